//! `everbus groups`: how far every group is, and the removal of one that nobody needs any more.

use everbus::audit::{Action, Operator, audited};
use everbus_core::{Engine, GroupInfo, GroupName};
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
        None => list(&engine, output).await,
        Some(GroupsCommand::Remove { name, yes }) => {
            let removed = remove(name, yes, &engine, target, output);
            target.patiently(removed).await
        }
    };
    close(&engine).await;
    outcome
}

async fn list(engine: &Engine, output: &mut Output) -> Outcome {
    let groups = engine.broker.inspect().await?;
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
        grouped(group.position),
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
