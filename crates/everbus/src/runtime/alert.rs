//! Publishes alerts: `system.*` events about problems of the bus.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Event, EventBuilder};

use crate::guard;
use crate::runtime::bus::Shared;

/// How often the bus tries to publish an alert.
const TRIES: u32 = 5;

/// Publishes an alert in the background.
pub(super) fn publish(shared: &Arc<Shared>, built: EventBuilder) {
    match built.build() {
        Ok(event) => drop(tokio::spawn(try_to_publish(shared.clone(), event))),
        Err(error) => {
            guard::log(|| tracing::error!(target: "everbus::bus", %error, "no alert"));
        }
    }
}

/// Publishes the event, and tries again after an error that may pass, up to [`TRIES`] times in all.
async fn try_to_publish(shared: Arc<Shared>, event: Event) {
    let mut pause = Duration::from_millis(20);
    for attempt in 1..=TRIES {
        let error = match shared.append_one(event.clone()).await {
            Ok(_) => return,
            // Another process has published the same alert.
            Err(error) if error.code() == Code::IdReused => return,
            Err(error) => error,
        };
        let last = attempt == TRIES || !error.class().may_repeat();
        guard::log(|| {
            tracing::warn!(target: "everbus::bus", %error, last, "an alert could not be published");
        });
        if last {
            return;
        }
        tokio::time::sleep(pause).await;
        pause *= 4;
    }
}
