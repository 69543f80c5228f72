//! The two events that start a task: `Task Pending` and the work message. They are published as one batch.

use std::collections::BTreeMap;

use everbus::core::Deduplication;
use everbus::{Bus, Code, Error, Event, EventId, Result, Timestamp, TypedEvent as _};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::events::{Json, TaskPending, Work};
use crate::handle::Emitter;
use crate::ids::{Parts, time_in};

/// A larger output, in bytes, is passed on as a reference to its event.
pub(crate) const MAX_OUTPUT: usize = 16 * 1024;
/// The outputs that a task receives have at most this many bytes together: the largest become references.
pub(crate) const MAX_OUTPUTS: usize = 128 * 1024;

/// The metadata key in a `Task Pending` for the time before which the task does not start.
pub(crate) const NOT_BEFORE: &str = "not_before";
/// More bytes than a work message has besides its input.
const ENVELOPE: usize = 4 * 1024;

/// The data for one start of a task.
#[derive(Clone, Debug)]
pub(crate) struct Start<'a> {
    pub(crate) task: &'a str,
    /// The job, and its creation time: the derived ids begin with that time.
    pub(crate) job: Option<(&'a str, Timestamp)>,
    pub(crate) name: &'a str,
    pub(crate) depends_on: Option<&'a [String]>,
    pub(crate) input: Json,
    pub(crate) run: u32,
    /// The task does not start before this time.
    pub(crate) at: Option<Timestamp>,
}

impl Start<'_> {
    /// The `Task Pending` and the work message. Both ids are derived, so that a duplicate is recognised.
    pub(crate) fn events(&self, emitter: &Emitter) -> Result<[Event; 2]> {
        let job = self.job.map(|(job, _)| job);
        let pending = TaskPending {
            request_id: self.task.to_owned(),
            job_id: job.map(str::to_owned),
            name: self.name.to_owned(),
            depends_on: self.depends_on.map(<[String]>::to_vec),
        };
        let work = Work {
            request_id: self.task.to_owned(),
            job_id: job.map(str::to_owned),
            name: self.name.to_owned(),
            input: self.input.clone(),
        };
        let id = |event_type| run_id(emitter.tenant(), self.job, self.task, self.run, event_type);
        let mut pending = emitter
            .event_of_run(&pending, job, self.run)
            .id(id(TaskPending::TYPE));
        if let Some(at) = self.at {
            pending = pending.meta(NOT_BEFORE, at.to_string());
        }
        let pending = pending.build()?;
        let mut work = emitter
            .event_of_run(&work, job, self.run)
            .id(id(Work::TYPE));
        if job.is_none() {
            // Without a job the ordering key is the task id, as in the other events of the task.
            work = work.key(format!("TASK#{}", self.task));
        }
        if let Some(at) = self.at {
            work = work.at(at);
        }
        Ok([pending, work.build()?])
    }
}

/// The derived id of an event of one run of a task.
pub(crate) fn run_id(
    tenant: &str,
    job: Option<(&str, Timestamp)>,
    task: &str,
    run: u32,
    event_type: &str,
) -> EventId {
    let parts = Parts {
        tenant,
        job: job.map_or("", |(job, _)| job),
        task,
        run: run.into(),
        event_type,
    };
    parts.at(job.map_or_else(|| time_in(task), |(_, created)| Some(created)))
}

/// The output of a completed parent.
#[derive(Clone, Debug)]
pub(crate) enum Output {
    /// The output itself.
    Small(Json),
    /// The output is in the event with this id.
    Large(EventId),
}

impl Output {
    pub(crate) fn of(output: &Json, event: EventId) -> Self {
        if output.get().len() > MAX_OUTPUT {
            Self::Large(event)
        } else {
            Self::Small(output.clone())
        }
    }
}

/// The JSON that stands for a large output: the task and the event that has the output.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Reference<'a> {
    #[serde(rename = "$output")]
    output: Place<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Place<'a> {
    task_id: &'a str,
    event_id: EventId,
}

/// The input of a dependent task: its own input and `dependencyOutputs`. Large outputs become references. So do further
/// outputs, the largest first, until the event has at most `limit` bytes.
pub(crate) fn merged(
    own: &Json,
    outputs: &BTreeMap<&str, (Output, EventId)>,
    limit: usize,
) -> Result<Json> {
    let most = MAX_OUTPUTS.min(limit.saturating_sub(own.get().len() + ENVELOPE));
    let failed = |e: serde_json::Error| {
        Error::new(
            Code::InvalidPayloadError,
            "the input of a task cannot be built",
        )
        .caused_by(e)
    };
    let mut all: BTreeMap<&str, (Json, EventId, bool)> = BTreeMap::new();
    for (task, (output, event)) in outputs {
        let reference = |event: EventId| Json::of(&reference(task, event)).map_err(failed);
        let (json, whole) = match output {
            Output::Small(json) => (json.clone(), true),
            Output::Large(event) => (reference(*event)?, false),
        };
        all.insert(task, (json, *event, whole));
    }
    let mut total: usize = all.values().map(|(json, ..)| json.get().len()).sum();
    while total > most {
        let largest = all.iter_mut().filter(|(_, (.., whole))| *whole);
        let largest = largest.max_by_key(|(_, (json, ..))| json.get().len());
        let Some((task, (json, event, whole))) = largest else {
            break;
        };
        total -= json.get().len();
        *json = Json::of(&reference(task, *event)).map_err(failed)?;
        *whole = false;
        total += json.get().len();
    }
    let outputs: BTreeMap<&str, &Json> =
        all.iter().map(|(task, (json, ..))| (*task, json)).collect();
    let outputs = Json::of(&outputs).map_err(failed)?;
    // An input that is not an object becomes the field `input` beside `dependencyOutputs`.
    let Ok(mut members) = own.read::<BTreeMap<String, &RawValue>>() else {
        let both: BTreeMap<&str, &Json> = [("input", own), ("dependencyOutputs", &outputs)].into();
        return Json::of(&both).map_err(failed);
    };
    let outputs: &RawValue = serde_json::from_str(outputs.get()).map_err(failed)?;
    members.insert("dependencyOutputs".to_owned(), outputs);
    Json::of(&members).map_err(failed)
}

fn reference(task_id: &str, event_id: EventId) -> Reference<'_> {
    let output = Place { task_id, event_id };
    Reference { output }
}

/// Publishes events with derived ids, in one step if the engine can. An id that exists already counts as success,
/// whatever the body of the stored event. The pairs of events that start tasks must come first. Returns how many events
/// were new.
pub(crate) async fn publish_once(bus: &Bus, events: Vec<Event>) -> Result<usize> {
    if let Some(new) = publish_unknown(bus, &events).await? {
        return Ok(new);
    }
    // One of the ids exists with another body. The events are stored pair by pair, so that a crash leaves no `Task
    // Pending` without its work message. Only a pair with such an id is stored one by one.
    let mut new = 0;
    for pair in events.chunks(2) {
        if let Some(stored) = publish_unknown(bus, pair).await? {
            new += stored;
            continue;
        }
        for event in pair {
            new += publish_unknown(bus, std::slice::from_ref(event))
                .await?
                .unwrap_or(0);
        }
    }
    Ok(new)
}

/// Publishes events in one step if the engine can. Returns how many were new; `None` if one of the ids exists with
/// another body.
async fn publish_unknown(bus: &Bus, events: &[Event]) -> Result<Option<usize>> {
    let events = unknown_to_store(bus, events.to_vec()).await?;
    if events.is_empty() {
        return Ok(Some(0));
    }
    match bus.publish_batch(events).await {
        Ok(receipts) => Ok(Some(receipts.iter().filter(|r| !r.is_duplicate()).count())),
        Err(error) if error.code() == Code::IdReused => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes the events that the store has already. Needed if the broker recognises duplicate ids only for a limited
/// time.
async fn unknown_to_store(bus: &Bus, events: Vec<Event>) -> Result<Vec<Event>> {
    if bus.capabilities().deduplication == Deduplication::WhileRetained {
        return Ok(events);
    }
    let mut unknown = Vec::with_capacity(events.len());
    for event in events {
        let found = bus.lookup()?.find(event.id()).await?;
        if !found
            .iter()
            .any(|record| record.event.tenant() == event.tenant())
        {
            unknown.push(event);
        }
    }
    Ok(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> EventId {
        EventId::from_bytes([7; 16])
    }

    fn small(text: &str) -> (Output, EventId) {
        (Output::of(&Json::parse(text).unwrap(), id()), id())
    }

    // conformance: workflow/job-inputs: a dependent task gets its input merged with dependencyOutputs
    #[test]
    fn outputs_are_merged_into_the_input_as_they_are() {
        let own = Json::parse(r#"{"style":"modern","n":12345678901234567890123}"#).unwrap();
        let outputs = [
            ("task-A", small(r#"{"z":1.50}"#)),
            ("task-B", small("null")),
        ];
        let merged = merged(&own, &outputs.into(), 1 << 20).unwrap();
        assert_eq!(
            merged.get(),
            r#"{"dependencyOutputs":{"task-A":{"z":1.50},"task-B":null},"n":12345678901234567890123,"style":"modern"}"#
        );
    }

    #[test]
    fn an_input_that_is_no_object_stays_beside_the_outputs() {
        let merged = merged(
            &Json::parse("[1]").unwrap(),
            &[("a", small("2"))].into(),
            1 << 20,
        )
        .unwrap();
        assert_eq!(merged.get(), r#"{"dependencyOutputs":{"a":2},"input":[1]}"#);
    }

    #[test]
    fn large_outputs_travel_as_references() {
        let text = |n: usize| format!("\"{}\"", "x".repeat(n));
        let large = small(&text(MAX_OUTPUT));
        let merged_one = merged(&Json::empty(), &[("a", large)].into(), 1 << 20).unwrap();
        let wanted = format!(
            r#"{{"dependencyOutputs":{{"a":{{"$output":{{"taskId":"a","eventId":"{}"}}}}}}}}"#,
            id()
        );
        assert_eq!(merged_one.get(), wanted);
        // Many outputs that are each small enough.
        let names: Vec<String> = (0..20).map(|n| format!("t{n:02}")).collect();
        let many = names
            .iter()
            .map(|name| (name.as_str(), small(&text(10_000))));
        let merged_many = merged(&Json::empty(), &many.collect(), 1 << 20).unwrap();
        assert!(
            merged_many.get().len() < MAX_OUTPUTS + 4096,
            "{}",
            merged_many.get().len()
        );
        assert!(merged_many.get().contains("$output"));
        // An input that leaves little room for outputs.
        let own = Json::parse(format!("{{\"own\":{}}}", text(100_000))).unwrap();
        let outputs = [("a", small(&text(10_000))), ("b", small(&text(9_000)))];
        let tight = merged(&own, &outputs.into(), 115_000).unwrap();
        assert!(tight.get().len() < 115_000, "{}", tight.get().len());
        assert_eq!(tight.get().matches("$output").count(), 1);
    }
}
