//! Running again what happened: which events, where to, how far, and what of it is told.

mod copies;
mod groups;
mod preview;
mod resuming;
mod selecting;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::{Bus, Event, EventBuilder, Receipt, Recorded, Timestamp};

use crate::support::Lab;

pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// What a function was given.
#[derive(Clone, Default)]
pub(crate) struct Given(Arc<Mutex<Vec<Arc<Recorded>>>>);

impl Given {
    /// A function that takes everything.
    pub(crate) fn function(
        &self,
    ) -> impl Fn(Arc<Recorded>) -> std::future::Ready<Result<(), String>> + Send + Sync + 'static
    {
        let given = self.clone();
        move |record| {
            given.0.lock().unwrap().push(record);
            std::future::ready(Ok(()))
        }
    }

    pub(crate) fn positions(&self) -> Vec<u64> {
        let given = self.0.lock().unwrap();
        given.iter().map(|record| record.position.place()).collect()
    }
}

/// Publishes events one second apart, beginning now.
pub(crate) async fn each_second(
    lab: &Lab,
    bus: &Bus,
    events: impl IntoIterator<Item = EventBuilder>,
) -> Vec<Receipt> {
    let mut receipts = Vec::new();
    for event in events {
        receipts.push(bus.publish(event).await.unwrap());
        lab.clock.advance(SECOND);
    }
    receipts
}

pub(crate) fn of_type(event_type: &str) -> EventBuilder {
    Event::builder(event_type.to_owned()).json(&1)
}

pub(crate) fn micros_after(at: Timestamp, micros: i64) -> Timestamp {
    Timestamp::from_micros(at.as_micros() + micros)
}
