//! Running again what happened: which events, where to, how far, and what of it is told.

mod copies;
mod groups;
mod preview;
mod resuming;
mod selecting;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::{Bus, Event, EventBuilder, Receipt, Recorded, Timestamp};

use crate::support::{Lab, eventually, given_up, on_every_engine};

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

// conformance: operations/idempotency-key: a handler's idempotency key is the same in every attempt, after an edit of the dead letter, and for a copy of the copy
#[tokio::test]
async fn the_idempotency_key_survives_retries_edits_and_replays() {
    use everbus::{Context, HandlerError, Json, Router};
    on_every_engine(|lab| async move {
        let keys: Arc<std::sync::Mutex<Vec<(u64, String)>>> = Arc::default();
        let bus = lab.open_impatient().await;
        let seen = keys.clone();
        let charge = move |Json(cents): Json<u64>, context: Context| {
            let seen = seen.clone();
            async move {
                seen.lock()
                    .unwrap()
                    .push((cents, context.idempotency_key()));
                match cents {
                    1 => Err(HandlerError::new("no such amount")),
                    _ => Ok(()),
                }
            }
        };
        bus.mount(Router::new().on("a.b", charge).group("bank"))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a.b", 1)).await;
        let id = letter.event().id();
        let letters = bus.engine().dead_letters().unwrap();
        assert_eq!(bus.dead_letters().retry(id).await.unwrap(), 1);
        eventually("it is dead again", || async {
            letters.get(id).await.unwrap()[0].attempts == 2
        })
        .await;
        let letter = letters.get(id).await.unwrap().remove(0);
        let corrected = letter.corrected("2").unwrap();
        let correction = corrected.id();
        letters.replace(letter.key(), corrected).await.unwrap();
        eventually("the correction is handled", || async {
            keys.lock().unwrap().len() == 3
        })
        .await;
        let copy = bus.replay_event(correction).await.unwrap();
        copy.settled().await.unwrap();
        let again = bus.replay_event(copy.id()).await.unwrap();
        again.settled().await.unwrap();
        let keys = keys.lock().unwrap().clone();
        let amounts: Vec<u64> = keys.iter().map(|(cents, _)| *cents).collect();
        assert_eq!(amounts, [1, 1, 2, 2, 2]);
        assert!(
            keys.iter().all(|(_, key)| *key == id.to_string()),
            "{keys:?}"
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}
