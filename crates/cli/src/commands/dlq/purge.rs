//! `everbus dlq purge`.

use everbus::audit::{Action, Operator, audited};
use everbus_core::{Clock as _, DeadLetterFilter, Engine, PurgeBasis, SystemClock};
use serde_json::json;

use super::args::{DlqPurgeArgs, PurgeBy};
use crate::output::{Output, counted};
use crate::progress;
use crate::stop::Outcome;

pub(super) async fn purge(
    args: DlqPurgeArgs,
    filter: DeadLetterFilter,
    engine: &Engine,
    output: &mut Output,
) -> Outcome {
    let letters = engine.dead_letters()?;
    let cutoff = SystemClock.now().minus(args.older_than);
    let bar = progress::spinner("deleting");
    let (purged, events) = match (args.dry_run, args.by) {
        (false, by) => {
            let (basis, name) = match by {
                PurgeBy::Created => (PurgeBasis::Created, "created"),
                PurgeBy::Died => (PurgeBasis::Died, "died"),
            };
            let action = Action::new("dlq.purge")
                .filter(&filter)
                .detail("cutoff", cutoff.to_string().into())
                .detail("by", name.into());
            let purged = letters.purge(cutoff, basis, filter);
            let purged = audited(engine, &Operator::current(), action, purged).await?;
            (purged.dead_letters, Some(purged.events))
        }
        (true, PurgeBy::Created) => {
            let until = filter.until.map_or(cutoff, |until| until.min(cutoff));
            let filter = DeadLetterFilter {
                until: Some(until),
                ..filter
            };
            (letters.count(filter).await?, None)
        }
        (true, PurgeBy::Died) => {
            let filter = DeadLetterFilter {
                died_until: Some(cutoff),
                ..filter
            };
            (letters.count(filter).await?, None)
        }
    };
    bar.finish_and_clear();
    let what = counted(purged, "dead letter");
    match (output.is_json(), events) {
        (true, None) => output.json(&json!({ "purged": purged, "dry_run": true })),
        (true, Some(events)) => {
            output.json(&json!({ "purged": purged, "events": events, "dry_run": false }))
        }
        (false, None) => output.line(format!(
            "would delete {what}, with their events where no other group needs them"
        )),
        (false, Some(0)) => output.line(format!("deleted {what}, and no events")),
        (false, Some(events)) => {
            output.line(format!("deleted {what} and {}", counted(events, "event")))
        }
    }
}
