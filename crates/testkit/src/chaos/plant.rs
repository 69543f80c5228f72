//! Planted bugs: a consumer that acks before any handler has run; a relay that marks rows before it
//! publishes; objects that are stored after their events, deleted before them, or not synced; a retention job
//! that removes events in flight.
//!
//! They are the controls of the kill campaign, as `NORMAL` is the control of the power losses: with one of
//! them in place the campaign must find lost events, or it proves nothing.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use everbus_core::{
    BoxFuture, Broker, BrokerLayer, ConsumeOptions, Consumer, Delivery, Event, GroupName, Pattern,
    Result, Settlement, Verdict,
};
use everbus_core::{Code, Error};
use rusqlite::Connection;

use super::hooks::Hook;
use super::objects;

/// Acks on fetch, and answers later settlements as if they had been applied.
#[derive(Clone)]
pub struct AckFirst(Arc<dyn Broker>);

impl AckFirst {
    /// Plants the bug in a broker.
    pub fn wrap(inner: Arc<dyn Broker>) -> Arc<dyn Broker> {
        Arc::new(Self(inner))
    }
}

impl BrokerLayer for AckFirst {
    fn inner(&self) -> &dyn Broker {
        &*self.0
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let inner = self.0.consume(group, options).await?;
            let broker = self.0.clone();
            Ok(Box::new(AckingConsumer { inner, broker }) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        let answers = settlements.iter().map(|_| Ok(())).collect();
        Box::pin(std::future::ready(Ok(answers)))
    }
}

struct AckingConsumer {
    inner: Box<dyn Consumer>,
    broker: Arc<dyn Broker>,
}

impl Consumer for AckingConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let batch = self.inner.fetch(max).await?;
            let ack = |delivery: &Delivery| Settlement::new(delivery.lease.clone(), Verdict::Ack);
            self.broker.settle(batch.iter().map(ack).collect()).await?;
            Ok(batch)
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.inner.set_handled(handled);
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.inner.pause()
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        self.inner.resume(prefetch)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        self.inner.close()
    }
}

/// The object is stored only after its event is committed.
pub struct LateObjects(PathBuf);

impl LateObjects {
    /// Plants the bug for a file.
    pub fn new(file: &Path) -> Self {
        Self(objects::directory(file))
    }

    fn each(&self, batch: &[Event], rename: impl Fn(&Path, &Path)) {
        for reference in batch.iter().filter_map(Event::overflow) {
            let object = self.0.join(&reference.key);
            rename(&object, &object.with_extension("late"));
        }
    }
}

impl Hook for LateObjects {
    fn before(&self, batch: &[Event]) {
        self.each(batch, |object, late| drop(std::fs::rename(object, late)));
    }

    fn after(&self, batch: &[Event]) {
        self.each(batch, |object, late| drop(std::fs::rename(late, object)));
    }
}

/// An object that was not synced: it has the right name, but its data is only in memory.
pub struct UnsyncedObjects(PathBuf);

impl UnsyncedObjects {
    /// Plants the bug for a file.
    pub fn new(file: &Path) -> Self {
        Self(objects::directory(file))
    }
}

impl Hook for UnsyncedObjects {
    fn before(&self, batch: &[Event]) {
        for reference in batch.iter().filter_map(Event::overflow) {
            let object = self.0.join(&reference.key);
            let copy = object.with_extension("unsynced");
            // A new file with the same content replaces the synced one.
            let _ = std::fs::read(&object)
                .and_then(|bytes| std::fs::write(&copy, bytes))
                .and_then(|()| std::fs::remove_file(&object))
                .and_then(|()| std::fs::rename(&copy, &object));
        }
    }

    fn after(&self, _batch: &[Event]) {}
}

/// A relay whose rows are marked as sent before the broker has their events.
pub struct MarkFirst(Mutex<Connection>);

impl MarkFirst {
    /// Plants the bug in the relay of an outbox.
    pub fn new(outbox: &Path) -> Result<Self> {
        connect(outbox).map(|conn| Self(Mutex::new(conn)))
    }
}

impl Hook for MarkFirst {
    fn before(&self, batch: &[Event]) {
        let conn = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for event in batch {
            let _ = conn.execute(
                "UPDATE event_outbox SET status = 'sent', sent_at = created_at WHERE event_id = ?1",
                [event.id().to_string()],
            );
        }
    }

    fn after(&self, _batch: &[Event]) {}
}

/// Retention that ignores claims: it removes every event that all groups have passed and that is neither waiting
/// nor a dead letter, with everything that belongs to it.
pub(crate) fn remove_what_is_in_flight(file: &Path) -> Result<()> {
    let conn = connect(file)?;
    conn.execute_batch(
        "BEGIN IMMEDIATE;
         CREATE TEMP TABLE gone AS SELECT seq FROM main.log
           WHERE seq <= (SELECT min(cursor) FROM groups) AND seq < (SELECT max(seq) FROM log)
             AND seq NOT IN (SELECT seq FROM deliveries)
             AND seq NOT IN (SELECT seq FROM dead_letters)
             AND type IN (SELECT id FROM types WHERE name LIKE 'chaos.%');
         DELETE FROM skips WHERE seq IN (SELECT seq FROM gone);
         DELETE FROM event_payloads WHERE seq IN (SELECT seq FROM gone);
         DELETE FROM expirations WHERE seq IN (SELECT seq FROM gone);
         DELETE FROM log WHERE seq IN (SELECT seq FROM gone);
         COMMIT;",
    )
    .map_err(failed)
}

/// A collector that deletes objects without checking whether an event refers to them.
pub(crate) fn delete_an_object(file: &Path) {
    let folder = objects::directory(file).join("events/~");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files = entries.map(|entry| entry.path());
    if let Some(object) = files.find(|path| path.extension().is_some_and(|e| e == "json")) {
        let _ = std::fs::remove_file(object);
    }
}

fn connect(file: &Path) -> Result<Connection> {
    let conn = Connection::open(file).map_err(failed)?;
    conn.busy_timeout(Duration::from_secs(10)).map_err(failed)?;
    Ok(conn)
}

fn failed(error: rusqlite::Error) -> Error {
    Error::new(Code::Internal, "the planted bug does not work").caused_by(error)
}
