//! `everbus replay`: replays one event or a range, as copies for every group or into one group.

use everbus::replay::{ReplayProgress, ReplaySkips, Run};
use everbus::{Bus, Replay, ReplayPreview, ReplayReport};
use everbus_core::{Entity, EventId, GroupName, Pattern, Timestamp};
use serde_json::{Value, json};

use super::{ID_HINT, check_range, event_id, existing_group, replay_runs};
use crate::interrupt::Interrupt;
use crate::open::Target;
use crate::output::{Output, Table, counted, escaped, grouped, shell_word, shortened};
use crate::progress;
use crate::stop::{Outcome, Stop};
use crate::suggest::Suggestion;
use crate::values::{entity_text, parse_entity, parse_group, parse_pattern, parse_rate};
use crate::when;

#[derive(Debug, Default, clap::Args)]
#[command(after_help = "\
Without --group, copies are published for every group. A copy has a new id, names its original in \
the metadata replay_of, and keeps the time at which the original occurred. With --group, that group \
gets the events themselves again; its position does not move, and other groups are not affected. \
Times are those of receipt, and both ends of a range belong to it.

Ctrl-C ends a replay in good order and prints the command that continues it. For a replay that was killed, \
--list shows this command.")]
pub(crate) struct ReplayArgs {
    /// The id of one event
    #[arg(conflicts_with_all = ["since", "until", "stream", "types", "app", "entity", "rate", "name"])]
    id: Option<String>,

    /// The source the event was published with, if its id is not a UUID
    #[arg(long, requires = "id")]
    source: Option<String>,

    /// Events received at or after this time: 2026-01-31T12:00:00Z, 2026-01-31, or how long ago (2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = when::parse_past, allow_hyphen_values = true)]
    since: Option<Timestamp>,

    /// Events received at or before this time
    #[arg(long, value_name = "TIME", value_parser = when::parse, allow_hyphen_values = true)]
    until: Option<Timestamp>,

    /// Events of this stream, as --config declares it; without declared streams a type or a domain:
    /// orders:order-placed, orders.order.placed, orders
    #[arg(long, value_name = "NAME")]
    stream: Option<String>,

    /// Events of types that match
    #[arg(long = "type", id = "types", value_name = "PATTERN", value_parser = parse_pattern)]
    types: Option<Pattern>,

    /// Events of this tenant; with an id, whose event it is
    #[arg(long)]
    tenant: Option<String>,

    /// Events of this application
    #[arg(long)]
    app: Option<String>,

    /// Events about this entity
    #[arg(long, value_name = "TYPE:ID", value_parser = parse_entity)]
    entity: Option<Entity>,

    /// Deliver them to this group again, instead of publishing copies for every group
    #[arg(long, value_name = "NAME", value_parser = parse_group)]
    group: Option<GroupName>,

    /// Only print what would happen
    #[arg(long)]
    dry_run: bool,

    /// At most this many events per second
    #[arg(long, value_name = "R", value_parser = parse_rate, allow_negative_numbers = true)]
    rate: Option<f64>,

    /// The name under which a stopped replay can continue; a name is made if none is given
    #[arg(long, value_name = "RUN")]
    name: Option<String>,

    /// Publish copies for every group
    #[arg(long)]
    yes: bool,

    /// List the replays that are not complete: running, stopped or killed
    #[arg(long, conflicts_with_all = ALL_OTHERS)]
    list: bool,

    /// Forget the progress of the replay with this name; what it did stays done
    #[arg(long, value_name = "RUN", conflicts_with_all = ALL_OTHERS, conflicts_with = "list")]
    forget: Option<String>,
}

/// Options that have no meaning when nothing is replayed.
const ALL_OTHERS: [&str; 14] = [
    "id", "source", "since", "until", "stream", "types", "tenant", "app", "entity", "group",
    "dry_run", "rate", "name", "yes",
];

pub(crate) async fn run(args: ReplayArgs, target: &Target, output: &mut Output) -> Outcome {
    let unfinished = args.list || args.forget.is_some();
    if !unfinished {
        args.check()?;
    }
    let interrupt = Interrupt::listen();
    let bus = target.open_existing_bus().await?;
    let outcome = match &args.forget {
        Some(name) => {
            target
                .patiently(replay_runs::forget(name, &bus, output))
                .await
        }
        None if args.list => replay_runs::list(&bus, target, output).await,
        None => replay(&args, &bus, target, interrupt, output).await,
    };
    if let Err(error) = bus.shutdown().await {
        tracing::warn!(%error, "the file did not close cleanly");
    }
    outcome
}

async fn replay(
    args: &ReplayArgs,
    bus: &Bus,
    target: &Target,
    interrupt: Interrupt,
    output: &mut Output,
) -> Outcome {
    if let Some(group) = &args.group {
        existing_group(group, bus.engine()).await?;
    }
    let id = args.event_id();
    if let (Some(id), Some(text)) = (id, &args.id)
        && bus.engine().lookup()?.find(id).await?.is_empty()
    {
        let what = format!("there is no event {text:?}");
        return Err(Stop::not_found(what, ID_HINT));
    }
    let asked = Interrupt::clone(&interrupt);
    let selected = args
        .select(bus.replay())
        .stop_on(async move { asked.wait().await });
    if args.dry_run {
        let preview = match &args.group {
            Some(group) => selected.into_group(group.to_string()).preview().await?,
            None => selected.publish_copies().preview().await?,
        };
        if interrupt.is_set() {
            return Err(Stop::Interrupted);
        }
        return print_preview(&preview, args.group.as_ref(), output);
    }
    if args.group.is_none() && !args.yes {
        let refusal = unconfirmed(args, selected, target).await?;
        let stopped = interrupt.is_set();
        return Err(if stopped { Stop::Interrupted } else { refusal });
    }
    if let (Some(id), None, None) = (id, &args.group, &args.tenant) {
        let receipt = target.patiently(bus.replay_event(id)).await?;
        if output.is_json() {
            return output.json(&json!({
                "id": receipt.id(), "seq": receipt.seq(), "replay_of": id,
            }));
        }
        return output.line(receipt.id().to_string());
    }
    // A range can be continued if the engine has checkpoints. A single event need not be.
    let name = match (&args.name, id) {
        (Some(name), _) => Some(name.clone()),
        (None, Some(_)) => None,
        (None, None) => bus.engine().checkpoints.as_ref().map(|_| made_up()),
    };
    if let Some(name) = &name {
        announce(name, &args.command(target, name).to_string(), output);
    }
    let bar = progress::bar("replaying", Some(0));
    let shown = bar.clone();
    let mut run = selected.progress(move |progress: &ReplayProgress| {
        shown.set_length(progress.upto.saturating_sub(progress.from));
        shown.set_position(progress.position.saturating_sub(progress.from));
    });
    if let Some(name) = &name {
        run = run.name(name);
    }
    let done = match &args.group {
        Some(group) => run.into_group(group.to_string()).await,
        None => run.publish_copies().await,
    };
    bar.finish_and_clear();
    let resume = name
        .as_ref()
        .map(|name| args.command(target, name).to_string());
    match done {
        Ok(report) => {
            let run = name.as_deref().zip(resume.as_deref());
            print_report(&report, args, run, output)
        }
        Err(error) => {
            if let Some(resume) = resume.filter(|_| error.hint_text().is_none()) {
                return Err(error.hint(format!("to go on: {resume}")).into());
            }
            Err(error.into())
        }
    }
}

/// Prints the name of the run at the start, so that even a killed run can be continued.
fn announce(name: &str, resume: &str, output: &Output) {
    let line = if output.is_json() {
        format!("{}\n", json!({ "name": name, "resume": resume }))
    } else {
        let name = escaped(name);
        format!("this is the replay {name}; if it is interrupted, to go on: {resume}\n")
    };
    // If standard error is closed, there is no reader.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
}

/// A name that is not used yet.
fn made_up() -> String {
    let id = EventId::new().to_string();
    id.rsplit('-').next().unwrap_or(&id).to_owned()
}

impl ReplayArgs {
    /// Refuses contradictory options before a file is opened.
    fn check(&self) -> Outcome {
        let any = self.since.is_some()
            || self.until.is_some()
            || self.stream.is_some()
            || self.types.is_some()
            || self.tenant.is_some()
            || self.app.is_some()
            || self.entity.is_some();
        if self.id.is_none() && !any {
            return Err(Stop::usage(
                "what is to be replayed?",
                Some("name the id of an event, or a range: everbus replay --since 2h --dry-run"),
            ));
        }
        check_range(self.since, self.until)
    }

    fn event_id(&self) -> Option<EventId> {
        let id = self.id.as_deref()?;
        Some(event_id(id, self.source.as_deref()))
    }

    fn select(&self, mut replay: Replay) -> Replay {
        if let Some(id) = self.event_id() {
            replay = replay.event(id);
        }
        if let Some(since) = self.since {
            replay = replay.since(since);
        }
        if let Some(until) = self.until {
            replay = replay.until(until);
        }
        if let Some(stream) = &self.stream {
            replay = replay.stream(stream);
        }
        if let Some(types) = &self.types {
            replay = replay.types(types.as_str());
        }
        if let Some(tenant) = &self.tenant {
            replay = replay.tenant(tenant);
        }
        if let Some(app) = &self.app {
            replay = replay.app(app);
        }
        if let Some(entity) = &self.entity {
            replay = replay.entity(&entity.kind, &entity.id);
        }
        if let Some(rate) = self.rate {
            replay = replay.rate(rate);
        }
        replay
    }

    /// The command that continues this replay. Times are absolute: "two hours ago" would be another time by
    /// then.
    fn command(&self, target: &Target, name: &str) -> Suggestion {
        if let Some(id) = &self.id {
            return Suggestion::new(target, &format!("replay {}", shell_word(id)))
                .option("--source", self.source.as_ref())
                .option("--tenant", self.tenant.as_ref())
                .option("--group", self.group.as_ref())
                .flag("--yes", self.group.is_none());
        }
        Suggestion::new(target, "replay")
            .option("--since", self.since)
            .option("--until", self.until)
            .option("--stream", self.stream.as_ref())
            .option("--type", self.types.as_ref())
            .option("--tenant", self.tenant.as_ref())
            .option("--app", self.app.as_ref())
            .option("--entity", self.entity.as_ref().map(entity_text))
            .option("--group", self.group.as_ref())
            .option("--rate", self.rate)
            .option("--name", Some(name))
            .flag("--yes", self.group.is_none())
    }
}

/// Describes what publishing copies would do, and how to confirm it.
async fn unconfirmed(args: &ReplayArgs, selected: Replay, target: &Target) -> Outcome<Stop> {
    let run: Run<_> = selected.publish_copies();
    let preview = run.preview().await?;
    let groups: Vec<String> = preview.groups.iter().map(|g| g.group.to_string()).collect();
    let whom = match (groups.as_slice(), preview.events) {
        ([], _) => "no group wants it now".to_owned(),
        (some, 1) => format!("it reaches {}", some.join(", ")),
        (some, _) => format!("they reach {}", some.join(", ")),
    };
    let what = match preview.events {
        1 => "a copy of 1 event".to_owned(),
        many => format!("copies of {}", counted(many, "event")),
    };
    let name = args.name.clone().unwrap_or_else(made_up);
    Ok(Stop::usage(
        format!("{what} would be published for every group; {whom}"),
        Some(&format!(
            "if that is meant: {}; to replay for one group only, name it with --group",
            args.command(target, &name)
        )),
    ))
}

fn print_preview(
    preview: &ReplayPreview,
    group: Option<&GroupName>,
    output: &mut Output,
) -> Outcome {
    if output.is_json() {
        let mut json = serde_json::to_value(preview).unwrap_or(Value::Null);
        json["dry_run"] = true.into();
        return output.json(&json);
    }
    if preview.events + preview.skipped == 0 {
        return output.line("nothing to replay: no event matches");
    }
    let what = counted(preview.events, "event");
    output.line(match (group, preview.events) {
        (Some(group), _) => format!("would replay {what} into {}", escaped(&group.to_string())),
        (None, 1) => format!("would publish a copy of {what} for every group"),
        (None, _) => format!("would publish copies of {what} for every group"),
    })?;
    if let (Some(first), Some(last)) = (preview.first, preview.last) {
        output.line(if first == last {
            format!("received at {}", when::shown(first))
        } else {
            let (first, last) = (when::shown(first), when::shown(last));
            format!("received from {first} to {last}")
        })?;
    }
    if !preview.types.is_empty() {
        let mut table = Table::new(&["TYPE", "EVENTS"]);
        for (name, count) in &preview.types {
            table.row(vec![
                shortened(&escaped(name), 60).into_owned(),
                grouped(*count),
            ]);
        }
        output.line("")?;
        table.print(output)?;
    }
    output.line("")?;
    if preview.skipped > 0 {
        let mut table = Table::new(&["EVENTS", "LEFT OUT"]);
        for (count, why) in left_out(&preview.skips) {
            table.row(vec![grouped(count), why.to_owned()]);
        }
        table.print(output)?;
        output.line("")?;
    }
    if preview.groups.is_empty() {
        return output.line("no group wants them");
    }
    let mut table = Table::new(&[
        "GROUP",
        "EVENTS",
        "STILL OWED",
        "IN ITS INBOX",
        "PATTERNS",
        "HANDLERS",
    ]);
    for group in &preview.groups {
        table.row(vec![
            escaped(&group.group.to_string()).into_owned(),
            grouped(group.events),
            grouped(group.owed),
            grouped(group.absorbed),
            shortened(&escaped(&group.patterns.join(" ")), 60).into_owned(),
            shortened(&escaped(&group.handlers.join(" ")), 60).into_owned(),
        ]);
    }
    table.print(output)
}

fn print_report(
    report: &ReplayReport,
    args: &ReplayArgs,
    run: Option<(&str, &str)>,
    output: &mut Output,
) -> Outcome {
    let stopped = !report.is_complete();
    let resume = run.map(|(_, resume)| resume);
    if output.is_json() {
        let mut json = serde_json::to_value(report).unwrap_or(Value::Null);
        if let Some((name, _)) = run {
            json["name"] = name.into();
        }
        if let Some(resume) = resume.filter(|_| stopped) {
            json["resume"] = resume.into();
        }
        output.json(&json)?;
    } else {
        print_counts(report, args.group.as_ref(), output)?;
        for failure in &report.failures {
            let error = escaped(&failure.error);
            output.line(format!("error: {} {error}", failure.id))?;
        }
        if let Some(resume) = resume.filter(|_| stopped) {
            output.line(format!("stopped; to go on: {resume}"))?;
        }
    }
    match (stopped, report.errors) {
        (true, _) => Err(Stop::Interrupted),
        (false, 0) => Ok(()),
        (false, _) => Err(Stop::Unsatisfied),
    }
}

/// Prints the counts: one line for events that were replayed, one for each reason to leave events out.
fn print_counts(report: &ReplayReport, group: Option<&GroupName>, output: &mut Output) -> Outcome {
    let reached = match group {
        Some(group) => format!("handed to {}", escaped(&group.to_string())),
        None => "published as copies".to_owned(),
    };
    let mut table = Table::new(&["EVENTS", "WHAT BECAME OF THEM"]);
    table.row(vec![grouped(report.processed), reached]);
    for (count, why) in left_out(&report.skips) {
        table.row(vec![grouped(count), format!("skipped: {why}")]);
    }
    if report.errors > 0 {
        table.row(vec![grouped(report.errors), "failed".to_owned()]);
    }
    table.print(output)
}

/// Why events are left out, and how many.
fn left_out(skips: &ReplaySkips) -> impl Iterator<Item = (u64, &'static str)> {
    [
        (skips.filtered, "the filter said no"),
        (skips.unwanted, "no pattern of the group matches"),
        (skips.owed, "still owed by the group"),
        (skips.absorbed, "in the group's inbox as handled"),
        (skips.gone, "no longer there"),
        (skips.copies, "copies of an earlier replay"),
        (skips.replaced, "corrected: another was sent in their place"),
        (
            skips.corrections,
            "corrections that were meant for one group",
        ),
    ]
    .into_iter()
    .filter(|(count, _)| *count > 0)
}
