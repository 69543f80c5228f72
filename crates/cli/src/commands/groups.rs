//! `everbus groups`: how far every group is, and the removal of one that nobody needs any more.

use everbus::audit::{Action, Operator, audited};
use everbus_core::{
    Clock as _, Cursor, Engine, GroupInfo, GroupName, Shard, StreamLag, SystemClock,
};
use serde_json::json;

use super::existing_group;
use crate::args::{GroupsArgs, GroupsCommand};
use crate::open::{Target, close};
use crate::output::{Output, Table, counted, escaped, grouped, shell_word, shortened};
use crate::stop::{Outcome, Stop};
use crate::suggest::Suggestion;
use crate::when;

pub(crate) async fn run(args: GroupsArgs, target: &Target, output: &mut Output) -> Outcome {
    let engine = target.open_existing().await?;
    let outcome = match args.command {
        None => list(&engine, args.streams, target, output).await,
        Some(GroupsCommand::Remove { name, yes }) => {
            let removed = remove(name, yes, &engine, target, output);
            target.patiently(removed).await
        }
    };
    close(&engine).await;
    outcome
}

async fn list(engine: &Engine, by_stream: bool, target: &Target, output: &mut Output) -> Outcome {
    let streams = target.streams()?;
    let now = SystemClock.now();
    let groups = engine.broker.inspect().await?;
    let groups: Vec<GroupInfo> = groups
        .into_iter()
        .map(|group| group.with_streams(&streams, now))
        .collect();
    if output.is_json() {
        return output.json(&groups);
    }
    if groups.is_empty() {
        return output.line("no groups yet; a group exists from its first subscription");
    }
    let mut table = Table::new(&[
        "GROUP",
        "PATTERNS",
        "POSITION",
        "BEHIND",
        "IN FLIGHT",
        "WAITING",
        "DEAD LETTERS",
        "OLDEST",
        "LAST ACTIVE",
    ]);
    for group in &groups {
        table.row(row(group));
        if by_stream || streams.is_declared() {
            group
                .streams
                .iter()
                .for_each(|of| table.row(stream_row(of)));
        }
    }
    table.print(output)
}

fn row(group: &GroupInfo) -> Vec<String> {
    vec![
        if group.ephemeral {
            format!("{} (ephemeral)", escaped(&group.name.to_string()))
        } else {
            escaped(&group.name.to_string()).into_owned()
        },
        shortened(&escaped(&group.patterns.join(" ")), 40).into_owned(),
        position(&group.position),
        grouped(group.behind),
        grouped(group.in_flight),
        grouped(group.waiting),
        grouped(group.dead_letters),
        match group.oldest {
            Some(_) => when::lasting(group.behind_for),
            None => "-".to_owned(),
        },
        when::ago(group.active_at),
    ]
}

/// How far a group has come: a number where there is a single log.
fn position(cursor: &Cursor) -> String {
    match cursor.positions().next() {
        None => grouped(0),
        Some(only) if Cursor::from(only) == *cursor && only.shard() == Shard::ONLY => {
            grouped(only.place())
        }
        Some(_) => escaped(&cursor.to_string()).into_owned(),
    }
}

/// A stream that the group above it reads.
fn stream_row(of: &StreamLag) -> Vec<String> {
    vec![
        format!("  {}", escaped(&of.stream)),
        String::new(),
        String::new(),
        grouped(of.lag.behind),
        grouped(of.lag.in_flight),
        grouped(of.lag.waiting),
        grouped(of.lag.dead_letters),
        match of.lag.oldest {
            Some(_) => when::lasting(of.behind_for),
            None => "-".to_owned(),
        },
        String::new(),
    ]
}

async fn remove(
    name: GroupName,
    yes: bool,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    let group = existing_group(&name, engine).await?;
    if !yes {
        let command = format!("groups remove {}", shell_word(&name.to_string()));
        let command = Suggestion::new(target, &command).flag("--yes", true);
        return Err(Stop::usage(
            format!(
                "removing the group {name} forgets its position, {} it has not handled and {}",
                counted(group.behind + group.in_flight + group.waiting, "event"),
                counted(group.dead_letters, "dead letter")
            ),
            Some(&format!("if that is meant: {command}")),
        ));
    }
    let action = Action::new("groups.remove")
        .on("GROUP", &name)
        .detail("behind", group.behind.into())
        .detail("dead_letters", group.dead_letters.into());
    let removed = engine.broker.remove_group(name.clone());
    audited(engine, &Operator::current(), action, removed).await?;
    if output.is_json() {
        return output.json(&json!({ "removed": name }));
    }
    output.line(format!("removed {}", escaped(&name.to_string())))
}
