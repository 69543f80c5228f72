//! The end of the writer, in order or not.

use everbus_core::Error;

use super::Writer;

impl Writer {
    /// The end: what was not fetched is given back, everything skipped is written down, the lock is
    /// freed. In an orderly end what was fetched and not settled is given back too.
    pub(super) fn finish(&mut self, orderly: bool) {
        let ids: Vec<u64> = self.sessions.keys().copied().collect();
        let mailboxes: Vec<_> = self.sessions.values().map(|s| s.mailbox.clone()).collect();
        if self.sync_all().and_then(|()| self.begin()).is_ok() {
            let done = ids
                .iter()
                .try_for_each(|id| self.detach(*id))
                .and_then(|()| self.flush())
                .and_then(|()| if orderly { self.leave() } else { Ok(()) })
                .and_then(|()| self.commit());
            if done.is_err() {
                // Nothing acknowledged depends on this: the next owner inherits what is left.
                let _ = self.conn.execute_batch("ROLLBACK");
            }
        }
        self.stop(&Error::shutdown());
        mailboxes
            .iter()
            .for_each(|mailbox| mailbox.end(Error::shutdown()));
    }

    /// Answers everybody who waits with an error and takes nothing more.
    pub(super) fn stop(&mut self, error: &Error) {
        let _ = self.failed.set(error.clone());
        for session in self.sessions.values() {
            session.mailbox.end(error.clone());
        }
        self.sessions.clear();
        self.watches.fail_all(error);
        // Wakes everybody who waits for new events; they find the engine stopped.
        self.head.send_modify(|_| {});
        // The readers go first: the last connection to close must be one that can tidy up the
        // write-ahead log.
        self.readers.iter().for_each(|readers| readers.close());
        self.feeder.close();
        self.indexer.close();
        self.owner_lock = None;
    }
}
