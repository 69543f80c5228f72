//! `everbus groups`: the state and backlog of every group, its subscriptions, and removing them.

use everbus::audit::{Action, Operator, audited};
use everbus_core::{
    Clock as _, Code, Cursor, Engine, Error, GroupInfo, GroupName, Shard, StreamLag,
    SubscriptionInfo, SystemClock,
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
        Some(GroupsCommand::Show { name }) => show(&name, &engine, output).await,
        Some(GroupsCommand::Unsubscribe { name, pattern }) => {
            let retracted = unsubscribe(&name, &pattern, &engine, output);
            target.patiently(retracted).await
        }
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
    table.print(output)?;
    for group in &groups {
        if let Some(held_back) = &group.held_back {
            let name = group.name.to_string();
            output.line(format!("{}: {}", escaped(&name), escaped(held_back)))?;
        }
    }
    for group in groups.iter().filter(|group| group.unhandled > 0) {
        let command = format!("groups show {}", shell_word(&group.name.to_string()));
        output.line(format!(
            "{}: {} without a handler in any process; {}",
            escaped(&group.name.to_string()),
            counted(group.unhandled, "event"),
            Suggestion::new(target, &command)
        ))?;
    }
    for (group, of) in groups
        .iter()
        .flat_map(|g| g.streams.iter().map(move |s| (g, s)))
    {
        if of.lag.dropped > 0 {
            output.line(format!(
                "{}: the server removed {} of {} by age before the group got them",
                escaped(&group.name.to_string()),
                counted(of.lag.dropped, "event"),
                escaped(&of.stream)
            ))?;
        }
    }
    Ok(())
}

/// One group: its subscriptions, and its backlog by event type.
async fn show(name: &GroupName, engine: &Engine, output: &mut Output) -> Outcome {
    let group = existing_group(name, engine).await?;
    if output.is_json() {
        let types: serde_json::Map<String, serde_json::Value> = group
            .types
            .iter()
            .map(|(event_type, lag)| (event_type.to_string(), json!(lag)))
            .collect();
        return output.json(&json!({ "group": group, "types": types }));
    }
    let about = match (group.ordered, group.ephemeral) {
        (true, _) => ", ordered by key",
        (_, true) => ", ephemeral",
        _ => "",
    };
    output.line(format!(
        "{}{about}, at {}",
        escaped(&name.to_string()),
        position(&group.position)
    ))?;
    let mut table = Table::new(&["PATTERN", "NAME", "SINCE", "ID"]);
    for subscription in &group.subscriptions {
        table.row(vec![
            escaped(subscription.pattern.as_str()).into_owned(),
            escaped(&subscription.name).into_owned(),
            when::ago(subscription.created_at),
            subscription.id.to_string(),
        ]);
    }
    table.print(output)?;
    let busy: Vec<_> = group
        .types
        .iter()
        .filter(|(_, lag)| lag.unsettled() + lag.dead_letters > 0)
        .collect();
    if busy.is_empty() {
        return output.line("nothing to do");
    }
    let mut table = Table::new(&[
        "TYPE",
        "BEHIND",
        "IN FLIGHT",
        "WAITING",
        "NO HANDLER",
        "DEAD LETTERS",
    ]);
    for (event_type, lag) in busy {
        table.row(vec![
            escaped(event_type).into_owned(),
            grouped(lag.behind),
            grouped(lag.in_flight),
            grouped(lag.waiting),
            grouped(lag.unhandled),
            grouped(lag.dead_letters),
        ]);
    }
    table.print(output)
}

async fn unsubscribe(
    name: &GroupName,
    pattern: &str,
    engine: &Engine,
    output: &mut Output,
) -> Outcome {
    let group = existing_group(name, engine).await?;
    let is_meant = |s: &&SubscriptionInfo| s.pattern.as_str() == pattern || s.name == pattern;
    let meant: Vec<&SubscriptionInfo> = group.subscriptions.iter().filter(is_meant).collect();
    if meant.is_empty() {
        let known: Vec<&str> = group.patterns.iter().map(String::as_str).collect();
        let hint = match known.as_slice() {
            [] => "it has no subscriptions".to_owned(),
            known => format!("it is subscribed to {}", known.join(", ")),
        };
        let what = format!("the group {name} has no subscription {pattern:?}");
        let error = Error::new(Code::SubscriptionNotFound, what).hint(hint);
        return Err(error.into());
    }
    for subscription in &meant {
        let action = Action::new("groups.unsubscribe")
            .on("GROUP", name)
            .detail("pattern", subscription.pattern.as_str().into());
        let retracted = engine.broker.retract(subscription.id);
        audited(engine, &Operator::current(), action, retracted).await?;
    }
    // An event that waited for a handler and matches another subscription keeps waiting.
    let left = existing_group(name, engine).await?;
    let skipped = group.unhandled.saturating_sub(left.unhandled);
    if output.is_json() {
        let names: Vec<&str> = meant.iter().map(|s| s.name.as_str()).collect();
        return output.json(&json!({ "group": name, "unsubscribed": names, "skipped": skipped }));
    }
    output.line(format!(
        "unsubscribed {} from {}; {} that waited for a handler skipped",
        escaped(&name.to_string()),
        escaped(pattern),
        counted(skipped, "event")
    ))
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

/// The position of a group: a number if there is a single log.
fn position(cursor: &Cursor) -> String {
    match cursor.positions().next() {
        None => grouped(0),
        Some(only) if Cursor::from(only) == *cursor && only.shard() == Shard::ONLY => {
            grouped(only.place())
        }
        Some(_) => escaped(&cursor.to_string()).into_owned(),
    }
}

/// A stream read by the group above it.
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
