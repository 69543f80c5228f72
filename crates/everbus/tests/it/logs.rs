//! Every failed attempt leaves a structured log entry.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, OnceLock};

use everbus::RetryPolicy;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::support::{broken, on_every_engine, recorder, run_out_of_retries};

type Entry = (Level, BTreeMap<&'static str, String>);

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

/// Keeps the entries of the dispatcher.
#[derive(Clone, Default)]
pub(crate) struct Entries(Arc<Mutex<Vec<Entry>>>);

impl Subscriber for Entries {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "everbus::dispatch"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let entry = (*event.metadata().level(), fields.0);
        self.0.lock().unwrap().push(entry);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
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

// conformance: embedded/log-failed-attempts: each failed attempt, the final one included, emits a structured log entry.
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
        let mut entries = listen().0.lock().unwrap().clone();
        entries.retain(|(_, fields)| fields.get("event_id") == Some(&id));
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
