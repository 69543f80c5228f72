//! How far the log is decided.
//!
//! Numbers of the log are given in the order of the calls, and transactions commit in any order. A reader
//! that saw event 7 and remembered "up to 7" would never see event 6, whose transaction commits later. So
//! readers go no further than the horizon: every number up to it is a committed event, or will never be one. The rule
//! is in the function `everbus.horizon` of `sql/broker.sql`. This module keeps what one engine already knows. That
//! stays true for one run of the server: after a crash, numbers that were never committed are given again, and a
//! promoted standby may lack events.

use std::sync::Arc;

use everbus_core::Result;
use parking_lot::Mutex;
use tokio_postgres::Row;

use crate::pool::Sql;
use crate::rows::{Types, get, get_seq, to_sql};

pub(crate) struct Horizon {
    seen: Mutex<Seen>,
    /// Cleared when the run of the server changes: a promoted standby may give the numbers of types again.
    types: Arc<Types>,
}

#[derive(Clone, Default)]
struct Seen {
    decided: u64,
    /// Once the writers in `holders` have ended, everything up to this number is decided.
    pending: u64,
    holders: Vec<String>,
    /// The run of the server that these values belong to.
    server: String,
}

/// An answer about the end of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// Readers may go up to here.
    pub(crate) decided: u64,
    /// The newest number that was given to a writer. If it is higher than `decided`, a writer has not ended.
    pub(crate) newest: u64,
}

impl Horizon {
    pub(crate) fn new(types: Arc<Types>) -> Self {
        Self {
            seen: Mutex::default(),
            types,
        }
    }

    /// What is known, as the function `everbus.horizon` takes it.
    pub(crate) fn known(&self) -> (i64, i64, Vec<String>, String) {
        let seen = self.seen.lock().clone();
        (
            to_sql(seen.decided),
            to_sql(seen.pending),
            seen.holders,
            seen.server,
        )
    }

    /// Asks how far readers may go. Later statements see every event up to there.
    pub(crate) async fn ask(&self, db: &impl Sql) -> Result<End> {
        let sql = "SELECT decided, newest, now_pending, now_holders, now_server
                   FROM everbus.horizon($1, $2, $3, $4)";
        let (known, pending, holders, server) = self.known();
        let row = db
            .one(
                "reading the end of the log",
                sql,
                &[&known, &pending, &holders, &server],
            )
            .await?;
        self.learn(&row, 0)
    }

    /// Remembers an answer of the function, whose columns begin at `first`.
    fn learn(&self, row: &Row, first: usize) -> Result<End> {
        let end = End {
            decided: get_seq(row, first)?,
            newest: get_seq(row, first + 1)?,
        };
        let holders = get::<Option<Vec<String>>>(row, first + 3)?.unwrap_or_default();
        self.note(end, get_seq(row, first + 2)?, holders, get(row, first + 4)?);
        Ok(end)
    }

    /// Remembers an answer.
    pub(crate) fn note(&self, end: End, pending: u64, holders: Vec<String>, server: String) {
        let mut now = self.seen.lock();
        if server != now.server && !now.server.is_empty() {
            self.types.forget();
        }
        if end.decided >= now.decided || server != now.server {
            *now = Seen {
                decided: end.decided,
                pending,
                holders,
                server,
            };
        }
    }
}
