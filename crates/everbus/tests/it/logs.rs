//! Every failed attempt leaves a structured log entry.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use everbus::{HandlerResult, Message, RetryPolicy};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::support::{broken, fine, on_every_engine, recorder, run_out_of_retries};

/// An error of this text makes the logger panic.
pub(crate) const UNLOGGABLE: &str = "not to be logged";
/// What handlers of tests log under.
pub(crate) const TEST: &str = "test";

type Entry = (Level, BTreeMap<&'static str, String>);

/// One line of the log.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) level: Level,
    pub(crate) target: &'static str,
    pub(crate) fields: BTreeMap<&'static str, String>,
    /// Those of the span it was written in.
    pub(crate) span: BTreeMap<&'static str, String>,
}

impl Line {
    /// A field of the line, or of the span around it.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let own = self.fields.get(name).map(String::as_str);
        own.or_else(|| self.around(name))
    }

    pub(crate) fn around(&self, name: &str) -> Option<&str> {
        self.span.get(name).map(String::as_str)
    }
}

/// The entries of all tests of this process. One subscriber for all, set before anything is logged:
/// tracing remembers for each place in the code whether anybody listens, and a subscriber of a
/// single thread may come too late for that.
pub(crate) fn listen() -> &'static Entries {
    static ENTRIES: OnceLock<Entries> = OnceLock::new();
    ENTRIES.get_or_init(|| {
        let entries = Entries::default();
        tracing::subscriber::set_global_default(entries.clone()).unwrap();
        entries
    })
}

/// Keeps what the bus and the handlers of tests log, with the span it was logged in.
#[derive(Clone, Default)]
pub(crate) struct Entries(Arc<Kept>);

#[derive(Default)]
struct Kept {
    lines: Mutex<Vec<Line>>,
    /// The spans that are not closed, with how often they are held.
    spans: Mutex<HashMap<u64, (Fields, usize)>>,
    last_span: AtomicU64,
}

thread_local! {
    static INSIDE: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

impl Subscriber for Entries {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        matches!(
            metadata.target(),
            "everbus::dispatch"
                | "everbus::handle"
                | "everbus::breaker"
                | "everbus::router"
                | "everbus::retention"
                | TEST
        )
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let id = self.0.last_span.fetch_add(1, Ordering::Relaxed) + 1;
        self.0.spans.lock().unwrap().insert(id, (fields, 1));
        Id::from_u64(id)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let error = fields.0.get("error").map(String::as_str);
        assert_ne!(error, Some(UNLOGGABLE));
        let inside = INSIDE.with_borrow(|spans| spans.last().copied());
        let span = inside.and_then(|id| {
            let spans = self.0.spans.lock().unwrap();
            spans.get(&id).map(|(fields, _)| fields.0.clone())
        });
        let span = span.unwrap_or_default();
        for name in ["event_id", "event_type", "correlation_id"] {
            let twice = fields.0.contains_key(name) && span.contains_key(name);
            let target = event.metadata().target();
            assert!(
                !twice,
                "{target}: {name} is in the span and in the line: {:?}",
                fields.0
            );
        }
        self.0.lines.lock().unwrap().push(Line {
            level: *event.metadata().level(),
            target: event.metadata().target(),
            fields: fields.0,
            span,
        });
    }

    fn enter(&self, span: &Id) {
        INSIDE.with_borrow_mut(|spans| spans.push(span.into_u64()));
    }

    fn exit(&self, span: &Id) {
        INSIDE.with_borrow_mut(|spans| {
            let at = spans.iter().rposition(|id| *id == span.into_u64());
            spans.remove(at.unwrap());
        });
    }

    fn clone_span(&self, span: &Id) -> Id {
        let mut spans = self.0.spans.lock().unwrap();
        if let Some((_, held)) = spans.get_mut(&span.into_u64()) {
            *held += 1;
        }
        span.clone()
    }

    fn try_close(&self, span: Id) -> bool {
        let mut spans = self.0.spans.lock().unwrap();
        let Some((_, held)) = spans.get_mut(&span.into_u64()) else {
            return false;
        };
        *held -= 1;
        let closed = *held == 0;
        if closed {
            spans.remove(&span.into_u64());
        }
        closed
    }
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

/// The lines of all tests so far that are wanted.
pub(crate) fn lines(wanted: impl Fn(&Line) -> bool) -> Vec<Line> {
    let lines = listen().0.lines.lock().unwrap();
    lines.iter().filter(|line| wanted(line)).cloned().collect()
}

/// What was logged about an event.
#[expect(clippy::needless_pass_by_value, reason = "an id is passed as it is")]
pub(crate) fn lines_about(event_id: impl ToString) -> Vec<Line> {
    let event_id = event_id.to_string();
    lines(|line| line.target.starts_with("everbus::") && line.field("event_id") == Some(&event_id))
}

fn entries_of(event_id: &str) -> Vec<Entry> {
    let entries = lines_about(event_id).into_iter();
    entries
        .map(|line| {
            (
                line.level,
                line.span.into_iter().chain(line.fields).collect(),
            )
        })
        .collect()
}

// conformance: embedded/log-failed-attempts: each failed attempt, the final one included, emits a structured log entry.
// conformance: framework/resilience-final-log: each failed attempt, the final one included, emits a structured log entry.
#[tokio::test]
async fn every_failed_attempt_is_logged_with_its_fields_the_last_included() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().retry(RetryPolicy::default().max_retries(2)))
            .await;
        let (handler, _seen) = recorder(broken);
        bus.subscribe("a.b")
            .group("g")
            .name("fragile")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a.b", 1)).await.unwrap();
        run_out_of_retries(&lab, &bus, &receipt, "g").await;
        bus.shutdown().await.unwrap();

        let id = receipt.id().to_string();
        let entries = entries_of(&id);
        let expected = [
            (Level::WARN, "1", Some("1000")),
            (Level::WARN, "2", Some("2000")),
            (Level::ERROR, "3", None),
        ];
        assert_eq!(entries.len(), expected.len(), "{entries:?}");
        for ((level, fields), (expected_level, attempt, delay)) in entries.iter().zip(expected) {
            let field = |name| fields.get(name).map(String::as_str);
            assert_eq!(*level, expected_level);
            assert_eq!(field("event_id"), Some(id.as_str()));
            assert_eq!(field("event_type"), Some("a.b"));
            assert_eq!(field("group"), Some("g"));
            assert_eq!(field("handler"), Some("fragile"));
            assert_eq!(field("attempt"), Some(attempt));
            assert_eq!(field("max_attempts"), Some("3"));
            assert_eq!(field("delay_ms"), delay);
            assert_eq!(field("error"), Some(format!("failure {attempt}").as_str()));
            let dead = if delay.is_none() { "true" } else { "false" };
            assert_eq!(field("dead_lettered"), Some(dead));
        }
    })
    .await;
}

// conformance: embedded/log-failed-attempts: an attempt that ended with its lease or its process is logged once, when the event comes again.
#[tokio::test]
async fn an_attempt_whose_end_is_unknown_is_logged_when_the_event_comes_again() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().retry(RetryPolicy::default().max_retries(9)))
            .await;
        let (note, mut seen) = recorder(fine);
        let note = Arc::new(note);
        bus.subscribe("a.b")
            .group("g")
            .handler(move |m: Message| {
                let note = note.clone();
                async move {
                    note(m).await?;
                    std::future::pending::<HandlerResult>().await
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a.b", 1)).await.unwrap();
        let id = receipt.id().to_string();
        for attempt in 1..=3 {
            assert_eq!(seen.next().await.attempt(), attempt);
            assert_eq!(entries_of(&id).len() as u32, attempt - 1);
            // As if this process had been stopped for an hour.
            lab.clock.advance(Duration::from_secs(3600));
        }
        seen.next().await;
        let entries = entries_of(&id);
        assert_eq!(entries.len(), 3, "{entries:?}");
        for (index, (level, fields)) in entries.iter().enumerate() {
            let field = |name| fields.get(name).map(String::as_str);
            assert_eq!(*level, Level::WARN);
            assert_eq!(field("event_type"), Some("a.b"));
            assert_eq!(field("group"), Some("g"));
            assert_eq!(field("attempt"), Some(["1", "2", "3"][index]));
            assert_eq!(field("max_attempts"), Some("10"));
            assert!(field("error").unwrap().contains("lease"), "{fields:?}");
            assert_eq!(field("dead_lettered"), Some("false"));
        }
        bus.shutdown_within(Duration::ZERO).await.unwrap();
    })
    .await;
}
