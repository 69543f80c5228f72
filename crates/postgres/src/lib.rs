//! The PostgreSQL engine: broker and store in one database, for a team that has outgrown one machine.
//!
//! | here | there |
//! |---|---|
//! | the log | table `log`, numbered by a sequence; readers stay below the *horizon* (`horizon.rs`), because numbers do not come in the order of the commits |
//! | a group | a row of `groups` with its cursor; `FOR UPDATE` on it is the lock of everything that hands out |
//! | a claim | a row of `claims`: a range of the log, and a multirange of what in it is done |
//! | a retry, a released or redelivered event | a row of `deliveries` |
//! | a lease | the number of the group and a random token, compared in the statement that settles |
//! | an owner | an advisory lock on a session of its own; when the process dies, the server frees it |
//! | a wake-up | `NOTIFY`, as a hint; the log is also polled |
//! | a batch | one transaction with arrays (`unnest`) |
//!
//! Times come from the clock of the engine and are stored as microseconds.

// Wiring in progress: some helpers are used by files that follow.
#![allow(dead_code)]

mod checksum;
mod config;
mod errors;
mod horizon;
mod pool;
mod rows;
mod schema;
mod tls;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use everbus_core::{Clock, Error, Result, Timestamp};

pub use config::Options;

use crate::horizon::Horizon;
use crate::pool::{Pool, Pooled};
use crate::rows::Types;

/// The engine. This one type implements everything it offers; the traits are in the files of their roles.
pub(crate) struct Postgres {
    pub(crate) pool: Pool,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) options: Options,
    pub(crate) types: Types,
    pub(crate) horizon: Horizon,
    pub(crate) closed: AtomicBool,
}

impl Postgres {
    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The current time as it is stored.
    pub(crate) fn micros(&self) -> i64 {
        self.clock.now().as_micros()
    }

    /// Refuses every call after the engine was closed.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::shutdown());
        }
        Ok(())
    }

    /// A connection, unless the engine is closed.
    pub(crate) async fn conn(&self) -> Result<Pooled> {
        self.check_open()?;
        self.pool.get().await
    }
}
