//! The archive: a group that copies every event into the store.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    ARCHIVE, Broker, Class, Code, ConsumeOptions, Delivery, GroupName, GroupSpec, Pattern, Result,
    Settlement, StartFrom, Store, SubscriptionSpec, Verdict,
};

use crate::guard;

/// At most this many events are copied in one step.
const BATCH: usize = 256;
/// How long a process holds the events that it copies. A process that dies with them holds back everything that
/// waits for the store, so this is short. If a copy takes longer, the events are copied again, which is harmless.
const LEASE: Duration = Duration::from_secs(15);
/// When an event that the store refuses is tried again.
const REFUSED_PAUSE: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

fn everything() -> Result<Vec<Pattern>> {
    // The pattern `*` does not match `system.…` events.
    Ok(vec![Pattern::new("*")?, Pattern::new("system.>")?])
}

/// Declares the archive group, so that every event published from now on is delivered to the store.
pub(super) async fn declare(broker: &dyn Broker) -> Result<()> {
    let subscriptions = everything()?.into_iter().map(|pattern| SubscriptionSpec {
        name: format!("archive {}", pattern.as_str()),
        pattern,
    });
    let spec = GroupSpec {
        name: GroupName::new(ARCHIVE)?,
        start_from: StartFrom::First,
        ordered: false,
        ephemeral: false,
        subscriptions: subscriptions.collect(),
    };
    broker.declare(spec).await.map(drop)
}

/// Copies events until the engine is closed.
pub(super) async fn run(broker: Arc<dyn Broker>, store: Arc<dyn Store>) {
    let mut pause = FIRST_PAUSE;
    loop {
        match copy(&*broker, &*store, &mut pause).await {
            Err(error) if error.code() == Code::EventBusShutdownError => return,
            Err(error) => {
                guard::log(|| {
                    tracing::warn!(target: "everbus::archive", %error, "events could not be copied into the store; trying again");
                });
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            Ok(()) => {}
        }
    }
}

/// Copies events until an error. Events that were fetched but not copied are delivered again when their leases
/// end.
async fn copy(broker: &dyn Broker, store: &dyn Store, pause: &mut Duration) -> Result<()> {
    let options = ConsumeOptions::new(everything()?)
        .prefetch(BATCH * 2)
        .lease(LEASE);
    let mut consumer = broker.consume(GroupName::new(ARCHIVE)?, options).await?;
    loop {
        let batch = consumer.fetch(BATCH).await?;
        let records = batch.iter().map(|delivery| delivery.record.clone());
        let verdicts = match store.ingest(records.collect()).await {
            Ok(_) => batch
                .into_iter()
                .map(|d| Settlement::new(d.lease, Verdict::Ack))
                .collect(),
            Err(error) if error.class().may_repeat() || error.class() == Class::Final => {
                return Err(error);
            }
            // One event that the store refuses must not block the others.
            Err(_) => one_by_one(store, batch).await?,
        };
        // After a lost ack the event is copied again; the store recognises it as a duplicate.
        broker.settle(verdicts).await?;
        *pause = FIRST_PAUSE;
    }
}

/// Copies events one by one. Events that the store refuses stay in the broker and are tried again later.
async fn one_by_one(store: &dyn Store, batch: Vec<Delivery>) -> Result<Vec<Settlement>> {
    let mut verdicts = Vec::with_capacity(batch.len());
    for delivery in batch {
        let verdict = match store.ingest(vec![delivery.record.clone()]).await {
            Ok(_) => Verdict::Ack,
            Err(error) if error.class().may_repeat() || error.class() == Class::Final => {
                return Err(error);
            }
            Err(error) => {
                guard::log(|| {
                    tracing::error!(
                        target: "everbus::archive",
                        event_id = %delivery.record.event.id(),
                        %error,
                        "the store refuses an event; it stays in the broker"
                    );
                });
                Verdict::Release {
                    after: REFUSED_PAUSE,
                }
            }
        };
        verdicts.push(Settlement::new(delivery.lease, verdict));
    }
    Ok(verdicts)
}
