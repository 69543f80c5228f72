//! A disk that is low on space: publishes are refused, so that acks and dead letters still have room.
//!
//! A commit that fails because the disk is full is handled in `transaction.rs`.

use super::Writer;
use crate::queue::Command;

impl Writer {
    /// Returns the appends that may run. If too little space is free, answers all of them with `DiskFull` and returns
    /// none.
    pub(super) fn refuse_if_low_on_space(&mut self, appends: Vec<Command>) -> Vec<Command> {
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
