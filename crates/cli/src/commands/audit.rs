//! `everbus audit`: who did what. Lists the trail, verifies that it was not changed, prints its head to be
//! kept elsewhere, and adds to it.

use clap::Subcommand;
use everbus::audit::Operator;
use everbus_core::{AuditEntry, AuditHead, AuditQuery, AuditVerdict, Engine, Entity};
use serde_json::{Value, json};

use super::check_range;
use crate::open::{Target, close};
use crate::output::{Output, Table, counted, escaped, grouped, shortened};
use crate::page::PageArgs;
use crate::progress;
use crate::stop::{Outcome, Stop};
use crate::suggest::Suggestion;
use crate::values::{entity_text, parse_entity, parse_head, parse_record};
use crate::when;

#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// List what was done, newest first
    List(ListArgs),
    /// Verify that no record was changed, removed or added by hand; exit code 1 if one was
    #[command(after_help = VERIFY_HELP)]
    Verify(VerifyArgs),
    /// Print the head of the trail, to be kept where this machine cannot change it
    Head,
    /// Add an entry of your own
    Record(RecordArgs),
}

const VERIFY_HELP: &str = "\
The hash of each record covers the hash of the record before it, and the last hash is also kept in \
FILE.audit-head beside the file. A program that can write both files can still forge a whole new trail. So keep the \
output of `everbus audit head` elsewhere, and give it here with --head.";

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Only actions of this actor
    // Replaces the global option of this name: a list is not recorded in the audit trail.
    #[arg(long, value_name = "NAME")]
    actor: Option<String>,

    /// Only this action: dlq.retry, or dlq.* for all with this prefix
    #[arg(long, value_name = "ACTION")]
    action: Option<String>,

    /// Only actions on this entity
    #[arg(long, value_name = "TYPE:ID", value_parser = parse_entity)]
    entity: Option<Entity>,

    #[command(flatten)]
    page: PageArgs,

    /// Begin after this record: the number printed below a page that is not the last
    #[arg(long, value_name = "SEQ", value_parser = parse_record, allow_negative_numbers = true)]
    after: Option<u64>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    /// A head that was kept elsewhere: the trail must still contain it
    #[arg(long, value_name = "SEQ:HASH", value_parser = parse_head)]
    head: Option<AuditHead>,

    /// Fail also if something could not be verified, because the head file beside the database is gone
    #[arg(long)]
    strict: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RecordArgs {
    /// What was done, dotted: order.refund
    #[arg(value_name = "ACTION")]
    action: String,

    /// The entity it was done to
    #[arg(long, value_name = "TYPE:ID", value_parser = parse_entity)]
    entity: Option<Entity>,

    /// Further data
    #[arg(long, value_name = "JSON", value_parser = parse_json)]
    details: Option<Value>,

    /// For which tenant
    #[arg(long)]
    tenant: Option<String>,

    /// The correlation id, shared by all events that one request caused
    #[arg(long, value_name = "ID")]
    correlation_id: Option<String>,

    /// The id of the trace
    #[arg(long, value_name = "ID")]
    trace_id: Option<String>,
}

fn parse_json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))
}

pub(crate) async fn run(command: AuditCommand, target: &Target, output: &mut Output) -> Outcome {
    let engine = target.open_existing().await?;
    let outcome = run_on(command, &engine, target, output).await;
    close(&engine).await;
    outcome
}

async fn run_on(
    command: AuditCommand,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    match command {
        AuditCommand::List(args) => list(args, engine, target, output).await,
        AuditCommand::Verify(args) => verify(&args, engine, output).await,
        AuditCommand::Head => head(engine, output).await,
        AuditCommand::Record(args) => {
            let recorded = record(args, engine, output);
            target.patiently(recorded).await
        }
    }
}

async fn list(args: ListArgs, engine: &Engine, target: &Target, output: &mut Output) -> Outcome {
    check_range(args.page.since, args.page.until)?;
    let query = AuditQuery {
        actor: args.actor.clone(),
        action: args.action.clone(),
        entity: args.entity.clone(),
        since: args.page.since,
        until: args.page.until,
        order: args.page.order(),
        limit: args.page.limit,
        after: args.after,
    };
    let page = engine.audit()?.query(query).await?;
    if output.is_json() {
        return output.json(&json!({ "records": page.items, "next": page.next }));
    }
    if page.items.is_empty() {
        return output.line("nothing on record");
    }
    let mut table = Table::new(&["SEQ", "WHEN", "ACTOR", "ACTION", "ENTITY", "DETAILS"]);
    for record in &page.items {
        let entry = &record.entry;
        let entity = entry.entity.as_ref().map(entity_text);
        let details = entry.details_text().unwrap_or_default();
        table.row(vec![
            record.seq.to_string(),
            when::shown(record.at),
            shortened(&escaped(&entry.actor), 30).into_owned(),
            shortened(&escaped(&entry.action), 40).into_owned(),
            shortened(&escaped(entity.as_deref().unwrap_or("")), 50).into_owned(),
            shortened(&escaped(&details), 80).into_owned(),
        ]);
    }
    table.print(output)?;
    if let Some(next) = page.next {
        output.line(format!("more: {}", next_page(&args, next, target)))?;
    }
    Ok(())
}

/// The command that shows the next page.
fn next_page(args: &ListArgs, next: u64, target: &Target) -> Suggestion {
    let command = Suggestion::new(target, "audit list")
        .option("--actor", args.actor.as_ref())
        .option("--action", args.action.as_ref())
        .option("--entity", args.entity.as_ref().map(entity_text));
    args.page.repeated(command).option("--after", Some(next))
}

async fn verify(args: &VerifyArgs, engine: &Engine, output: &mut Output) -> Outcome {
    let bar = progress::spinner("verifying");
    let verdict = engine.audit()?.verify(args.head).await;
    bar.finish_and_clear();
    let verdict = verdict?;
    let ok = verdict.is_ok() && (verdict.notes.is_empty() || !args.strict);
    if output.is_json() {
        let mut shown = json!(verdict);
        shown["ok"] = ok.into();
        output.json(&shown)?;
    } else {
        print(&verdict, output)?;
    }
    if ok { Ok(()) } else { Err(Stop::Unsatisfied) }
}

fn print(verdict: &AuditVerdict, output: &mut Output) -> Outcome {
    match &verdict.broken {
        Some(broken) => {
            output.line(format!("BROKEN: {}", escaped(&broken.problem)))?;
            let verified = counted(verdict.verified, "record");
            output.line(match (broken.seq, verdict.first) {
                // The trail begins after the break.
                (Some(seq), Some(first)) if seq < first => {
                    format!("{verified} after that verified")
                }
                (Some(seq), Some(first)) => {
                    // A head that was kept elsewhere may contradict a record of an intact chain.
                    let before = verdict.verified.min(seq - first);
                    format!("{} before that verified", counted(before, "record"))
                }
                // There are no records, or the problem is not in a record.
                _ => format!("{verified} verified"),
            })?;
        }
        None => {
            let verified = counted(verdict.verified, "record");
            output.line(format!("the audit trail is whole: {verified}"))?;
            if let Some(first) = verdict.first.filter(|first| *first > 1) {
                let removed = grouped(first - 1);
                output.line(format!("retention removed the first {removed}"))?;
            }
        }
    }
    if let (None, Some(head)) = (&verdict.broken, verdict.head) {
        output.line(format!("head {head}"))?;
    }
    if let Some(mended) = verdict.mended {
        let behind = counted(mended, "record");
        output.line(format!(
            "the head beside the file was {behind} behind and was moved on"
        ))?;
    }
    for note in &verdict.notes {
        output.line(format!("note: {}", escaped(note)))?;
    }
    Ok(())
}

async fn head(engine: &Engine, output: &mut Output) -> Outcome {
    let Some(head) = engine.audit()?.head().await? else {
        return Err(Stop::not_found(
            "the audit trail is empty",
            "`everbus audit record` adds to it, and so does whatever an operator does",
        ));
    };
    if output.is_json() {
        return output
            .json(&json!({ "head": head.to_string(), "seq": head.seq, "hash": head.hash }));
    }
    output.line(head.to_string())
}

async fn record(args: RecordArgs, engine: &Engine, output: &mut Output) -> Outcome {
    let operator = Operator::current();
    let mut entry = AuditEntry::new(operator.actor, args.action);
    entry.entity = args.entity;
    entry.tenant = args.tenant;
    entry.correlation_id = args.correlation_id;
    entry.trace_id = args.trace_id;
    entry.details = args.details.unwrap_or_default();
    if let Some(reason) = operator.reason {
        match &mut entry.details {
            Value::Null => entry.details = json!({ "reason": reason }),
            Value::Object(details) => {
                details.insert("reason".to_owned(), reason.into());
            }
            _ => {
                return Err(Stop::usage(
                    "--reason needs --details that are an object, or none",
                    Some("put the reason into the details yourself"),
                ));
            }
        }
    }
    let seq = engine.audit()?.record(entry).await?;
    if output.is_json() {
        return output.json(&json!({ "seq": seq }));
    }
    output.line(format!("record {seq}"))
}
