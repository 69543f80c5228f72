//! How the writer ends. `finish` ends it in order, `stop` ends it after a fatal error.

use crate::deliveries::cursor::has_unwritten_cursors;
use std::sync::PoisonError;
use std::time::Instant;

use everbus_core::Error;

use super::Writer;

impl Writer {
    /// Ends the writer: releases deliveries that were not fetched, stores the cursors, frees the owner lock. In an
    /// orderly end, also releases deliveries that were fetched and not settled.
    pub(super) fn finish(&mut self, orderly: bool) {
        let ids: Vec<u64> = self.deliveries.consumers.sessions.keys().copied().collect();
        let mailboxes: Vec<_> = self
            .deliveries
            .consumers
            .sessions
            .values()
            .map(|s| s.mailbox.clone())
            .collect();
        // If there is nothing to write, does not wait for a file that another process has locked.
        let nothing_to_write = ids.is_empty()
            && self.deliveries.leases.owner_lock.is_none()
            && !has_unwritten_cursors(&self.tx);
        if !nothing_to_write
            && self
                .patience
                .sync_all(&self.tx.conn)
                .and_then(|()| self.begin())
                .is_ok()
        {
            let done = ids
                .iter()
                .try_for_each(|id| self.deliveries.detach(&mut self.tx, *id))
                .and_then(|()| self.flush())
                .and_then(|()| {
                    if orderly {
                        self.deliveries.leases.leave(&mut self.tx)
                    } else {
                        Ok(())
                    }
                })
                .and_then(|()| self.commit());
            if done.is_err() {
                // Nothing acknowledged depends on this: the next owner inherits what is left.
                let _ = self.tx.conn.execute_batch("ROLLBACK");
            }
        }
        self.stop(&Error::shutdown());
        mailboxes
            .iter()
            .for_each(|mailbox| mailbox.end(Error::shutdown()));
    }

    /// Answers every waiting caller with the error and accepts no more commands.
    pub(super) fn stop(&mut self, error: &Error) {
        let _ = self.failed.set(error.clone());
        for session in self.deliveries.consumers.sessions.values() {
            session.mailbox.end(error.clone());
        }
        self.deliveries.consumers.sessions.clear();
        self.tx.watches.fail_all(error);
        // Wakes every task that waits for new events; it finds the engine stopped.
        self.head.send_modify(|_| {});
        // The readers close first: the last connection to close must be the writing one, which can checkpoint
        // and remove the write-ahead log.
        self.readers.iter().for_each(|readers| readers.close());
        self.feeder.close();
        self.indexer.close();
        self.deliveries.leases.owner_lock = None;
    }

    /// Notes that a round failed. Tasks that wait for new events get the error after the busy timeout, as
    /// every other caller does.
    pub(super) fn note_failure(&mut self, error: Error) {
        let since = *self.failing_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= self.busy_timeout {
            *self.stalled.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            self.head.send_modify(|_| {});
        }
    }

    pub(super) fn note_success(&mut self) {
        if self.failing_since.take().is_some() {
            *self.stalled.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use everbus_core::{Code, Cursor, Error, Log as _};

    use crate::Options;
    use crate::broker::SqliteEngine;

    // conformance: contract/stalled-reader: who waits for new events learns that the engine cannot look for them, and may wait again afterwards
    #[tokio::test]
    async fn waiting_for_new_events_ends_when_none_can_be_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            busy_timeout: Duration::ZERO,
            ..Options::default()
        };
        let handle = crate::handle::start(&dir.path().join("a.db"), options).unwrap();
        let engine = SqliteEngine { handle };
        // The writer is blocked while it is in the failed state, so that its next successful round does not hide the
        // failure.
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let held = engine.handle.job(move |writer| {
            writer.note_failure(Error::of_file(Code::Busy, "locked"));
            Ok(wait.recv().is_ok())
        });
        let stalled = engine.wait_beyond(Cursor::START).await.unwrap_err();
        assert_eq!(stalled.code(), Code::Busy);
        drop(go);
        held.await.unwrap();
        engine.handle.job(|_| Ok(())).await.unwrap();
        let event = everbus_core::Event::builder("a.b").build().unwrap();
        let published = everbus_core::Broker::append(&engine, vec![event]);
        assert!(published.await.unwrap()[0].is_ok());
        engine.wait_beyond(Cursor::START).await.unwrap();
    }
}
