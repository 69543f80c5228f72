//! `everbus get`: one event, its state in every group, and the result of each attempt.

use std::sync::Arc;
use std::time::Duration;

use everbus::overflow::{self, Objects};
use everbus_core::{Engine, GroupName, GroupState, Overflow, Recorded};
use serde::Serialize;

use super::documents::Documents;
use super::payloads::Shown;
use super::{ID_HINT, event_id};
use crate::args::GetArgs;
use crate::open::{Target, close};
use crate::output::{Output, escaped};
use crate::stop::{Outcome, Stop};
use crate::values::entity_text;
use crate::when;

pub(crate) async fn run(args: &GetArgs, target: &Target, output: &mut Output) -> Outcome {
    let engine = target.open_existing().await?;
    let outcome = match target.objects(&engine) {
        Ok(objects) => show(args, &engine, objects.as_deref(), output).await,
        Err(stop) => Err(stop),
    };
    close(&engine).await;
    outcome
}

async fn show(
    args: &GetArgs,
    engine: &Engine,
    objects: Option<&Objects>,
    output: &mut Output,
) -> Outcome {
    #[derive(Serialize)]
    struct Found<'a> {
        event: &'a Whole,
        groups: &'a [GroupState],
        /// Where the large part of the payload is.
        #[serde(skip_serializing_if = "Option::is_none")]
        overflow: Option<&'a Overflow>,
        #[serde(skip_serializing_if = "Option::is_none")]
        payloads: Option<Vec<Shown>>,
    }
    let lookup = engine.lookup()?;
    let records = lookup
        .find(event_id(&args.id, args.source.as_deref()))
        .await?;
    if records.is_empty() {
        return Err(Stop::not_found(
            format!("there is no event {:?}", args.id),
            ID_HINT,
        ));
    }
    let mut complete = true;
    let mut documents = args.dialect.map(Documents::new);
    for record in &records {
        if args.stages.export {
            args.stages.print_export(record, engine, output).await?;
            continue;
        }
        let whole = shown_whole(objects, record).await;
        if let Some(documents) = &mut documents {
            documents.print_or_fail(&whole, output)?;
            continue;
        }
        let groups = lookup.states(record.position).await?;
        complete &= whole.error.is_none();
        if output.is_json() {
            output.json(&Found {
                event: &whole,
                overflow: record.event.overflow(),
                groups: &groups,
                payloads: args.stages.shown(record, engine).await?,
            })?;
        } else {
            print_event(&whole.record, output)?;
            print_overflow(record, output)?;
            print_groups(&groups, output)?;
            args.stages.print(record, engine, output).await?;
        }
    }
    if let Some(documents) = &documents {
        documents.finish()?;
    }
    if complete {
        return Ok(());
    }
    Err(Stop::Unsatisfied)
}

/// An event with its large payload, or without it if it cannot be fetched.
#[derive(Serialize)]
pub(super) struct Whole {
    #[serde(flatten)]
    pub(super) record: Arc<Recorded>,
    /// Why the large part of the payload is missing.
    #[serde(rename = "payload_error", skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// Fetches the large payload of an event. If that fails, the output says so and shows the rest.
pub(super) async fn shown_whole(objects: Option<&Objects>, record: &Arc<Recorded>) -> Whole {
    let (record, error) = match overflow::whole(objects, record).await {
        Ok(whole) => (whole, None),
        Err(error) => {
            tracing::warn!("{}", escaped(&error.to_string()));
            (record.clone(), Some(error.to_string()))
        }
    };
    Whole { record, error }
}

/// Where the large part of the payload is, if it is in an object.
pub(super) fn print_overflow(record: &Recorded, output: &mut Output) -> Outcome {
    match record.event.overflow() {
        None => Ok(()),
        Some(overflow) => output.line(format!(
            "overflow     {} bytes in {} of {}",
            overflow.size,
            escaped(&overflow.key),
            escaped(&overflow.bucket)
        )),
    }
}

/// Every field that is set, one per line; also used for dead letters.
pub(super) fn print_event(record: &Recorded, output: &mut Output) -> Outcome {
    let event = &record.event;
    let mut field = |name: &str, value: &str| -> Outcome {
        output.line(format!("{name:<12} {}", escaped(value)))
    };
    field("id", &event.id().to_string())?;
    field("seq", &record.position.to_string())?;
    field("type", event.event_type())?;
    field("version", &event.version().to_string())?;
    field("received", &when::shown(record.received_at))?;
    field("occurred", &when::shown(event.occurred_at()))?;
    field("correlation", &event.correlation_id())?;
    if let Some(a) = event.attributes() {
        let texts = [
            ("foreign id", &a.foreign_id),
            ("causation", &a.causation_id),
            ("source", &a.source),
            ("app", &a.app),
            ("tenant", &a.tenant),
            ("key", &a.key),
            ("content type", &a.content_type),
        ];
        for (name, value) in texts {
            if let Some(value) = value {
                field(name, value)?;
            }
        }
        if let Some(at) = a.not_before {
            field("not before", &when::shown(at))?;
        }
        let address = a.address.as_deref().map(str::parse::<GroupName>);
        if let Some(Ok(group)) = address {
            field("only for", &group.to_string())?;
        }
        if let Some(entity) = &a.entity {
            field("entity", &entity_text(entity))?;
        }
        if let Some(trace) = &a.trace {
            field("trace", &trace.traceparent)?;
        }
        for (key, value) in &a.metadata {
            field("metadata", &format!("{key}={value}"))?;
        }
    }
    output.payload_line(&format!("{:<12} ", "payload"), event, "")
}

fn print_groups(groups: &[GroupState], output: &mut Output) -> Outcome {
    if groups.is_empty() {
        return output.line("groups       none yet");
    }
    for group in groups {
        let mut line = format!(
            "group        {}: {}",
            escaped(&group.group.to_string()),
            group.state.as_str()
        );
        if group.attempts > 0 {
            line.push_str(&format!(", attempts: {}", group.attempts));
        }
        if let Some(due) = group.due_at {
            line.push_str(&format!(", next attempt at {}", when::shown(due)));
        }
        if let Some(reason) = &group.skipped {
            line.push_str(&format!(", skipped: {}", escaped(reason)));
        }
        output.line(line)?;
        for failure in &group.failures {
            output.line(format!(
                "             attempt {} {} {}{}: {}",
                failure.attempt,
                when::shown(failure.at),
                failure.kind.as_str(),
                ran(failure.took, failure.worker.as_deref()),
                escaped(&failure.error)
            ))?;
        }
        if let Some(ended) = &group.ended {
            let how = match group.skipped {
                Some(_) => "skipped",
                None => "handled",
            };
            output.line(format!(
                "             {how}   {}{}",
                when::shown(ended.at),
                ran(ended.ran.took, ended.ran.worker.as_deref()),
            ))?;
        }
    }
    Ok(())
}

/// How long an attempt ran and on which worker, as far as that is known.
pub(super) fn ran(took: Option<Duration>, worker: Option<&str>) -> String {
    let took = took.map(|took| format!(", took {:.1} ms", took.as_secs_f64() * 1000.0));
    let worker = worker.map(|worker| format!(", on {}", escaped(worker)));
    [took, worker].into_iter().flatten().collect()
}
