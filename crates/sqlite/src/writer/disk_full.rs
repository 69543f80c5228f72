//! A disk that is nearly full: publishes are refused, so that acks and dead letters still have room.

use super::Writer;
use crate::queue::Command;

impl Writer {
    /// Answers appends with `DiskFull` while too little space is left, and returns those that may run.
    pub(super) fn refuse_if_full(&mut self, appends: Vec<Command>) -> Vec<Command> {
        if appends.is_empty() {
            return appends;
        }
        match self.space.check() {
            Ok(()) => {
                self.patience.save_room(&self.tx.conn, false);
                appends
            }
            Err(error) => {
                appends.into_iter().for_each(|c| c.fail(error.clone()));
                self.patience.save_room(&self.tx.conn, true);
                Vec::new()
            }
        }
    }
}
