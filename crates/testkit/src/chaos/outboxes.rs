//! The outboxes of a campaign: one in the file of the bus, one in a database beside it.
//!
//! The campaign commits events to the outboxes itself, in a process that is never killed: a committed row counts as
//! acknowledged. The state of the rows is read with plain SQL and compared with the committed events.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use everbus::outbox::Outbox;
use everbus_core::EventId;
use rusqlite::Connection;

use super::Broken;
use super::checker::{Report, Stage};
use super::content::Content;
use super::ledger::Ledger;
use super::observe::Observed;
use super::process::PATIENCE;

/// Which outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Which {
    /// In the file of the bus.
    Own,
    /// In a separate database beside that file.
    Beside,
}

impl Which {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Own, Self::Beside];

    /// The database it is in.
    pub fn file(self, bus: &Path) -> PathBuf {
        match self {
            Self::Own => bus.to_owned(),
            Self::Beside => {
                let mut name = bus.as_os_str().to_owned();
                name.push(".shop");
                name.into()
            }
        }
    }
}

/// A row as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// `pending`, `sent` or `failed`.
    pub status: String,
    /// How often it was rejected.
    pub attempts: u32,
    /// The last error.
    pub last_error: Option<String>,
    /// Whether it is among the dead letters of its outbox.
    pub dead: bool,
}

/// Commits events to an outbox, in one transaction. They are in it when this returns.
pub(crate) fn commit(bus: &Path, which: Which, ids: &[EventId]) -> Result<(), Broken> {
    let mut conn = open(&which.file(bus))?;
    let doing = |error: &dyn std::fmt::Display| Broken(format!("filling an outbox: {error}"));
    if which == Which::Beside {
        conn.pragma_update(None, "journal_mode", "WAL")
            .map_err(|e| doing(&e))?;
        Outbox::create_tables(&conn).map_err(|e| doing(&e))?;
    }
    let tx = conn
        .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
        .map_err(|e| doing(&e))?;
    for id in ids {
        let event = Content::of(*id).event();
        Outbox::new().enqueue(&tx, event).map_err(|e| doing(&e))?;
    }
    tx.commit().map_err(|e| doing(&e))
}

fn open(file: &Path) -> Result<Connection, Broken> {
    let conn = Connection::open(file).map_err(Broken::at("opening an outbox"))?;
    conn.busy_timeout(PATIENCE)
        .map_err(Broken::at("opening an outbox"))?;
    Ok(conn)
}

/// The rows in the outboxes of a file.
pub(crate) fn observe(bus: &Path) -> Result<HashMap<(Which, EventId), Row>, Broken> {
    let mut rows = HashMap::new();
    for which in Which::ALL {
        let file = which.file(bus);
        if file.exists() {
            read(&open(&file)?, which, &mut rows).map_err(Broken::at("reading an outbox"))?;
        }
    }
    Ok(rows)
}

fn read(
    conn: &Connection,
    which: Which,
    rows: &mut HashMap<(Which, EventId), Row>,
) -> rusqlite::Result<()> {
    let known = conn.query_row(
        "SELECT count(*) FROM sqlite_schema WHERE name = 'event_outbox'",
        [],
        |row| row.get::<_, i64>(0),
    )?;
    if known == 0 {
        return Ok(());
    }
    let mut statement = conn.prepare(
        "SELECT event_id, status, attempts, last_error,
           EXISTS (SELECT 1 FROM outbox_dead_letters d WHERE d.event_id = o.event_id)
         FROM event_outbox o",
    )?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        let id: String = row.get(0)?;
        // Only ids of the campaign are in it.
        let Ok(id) = id.parse() else { continue };
        let row = Row {
            status: row.get(1)?,
            attempts: row.get(2)?,
            last_error: row.get(3)?,
            dead: row.get(4)?,
        };
        rows.insert((which, id), row);
    }
    Ok(())
}

/// Checks that every committed row waits, or its event is in the log, or it failed and is a dead letter; and
/// that events with a key are in the log in the order of their outbox. Counts the relayed rows.
pub(crate) fn check(ledger: &Ledger, observed: &Observed, stage: Stage, report: &mut Report) {
    let mut last: HashMap<(Which, String), u64> = HashMap::new();
    let mut behind: HashSet<(Which, String)> = HashSet::new();
    for (which, id) in ledger.outbox() {
        let told = |what: String| format!("{id} of the outbox {which:?} {what}");
        let stored = observed.events.get(id);
        report.relayed += u64::from(stored.is_some());
        let row = observed.rows.get(&(*which, *id));
        match (row, stored) {
            (None, _) => report
                .lost
                .push(told("was committed, and its row is gone".into())),
            (Some(row), _) if row.attempts > 0 => report
                .faults
                .push(told(format!("was rejected: {:?}", row.last_error))),
            (Some(row), None) if row.status == "sent" => report
                .lost
                .push(told("is marked as sent and not in the log".into())),
            (Some(row), None) if row.status == "failed" && !row.dead => report
                .lost
                .push(told("failed, and there is no dead letter".into())),
            (Some(row), _) if row.status == "pending" && stage == Stage::Drained => report
                .faults
                .push(told("waits after everything was drained".into())),
            _ => {}
        }
        let Some(key) = Content::of(*id).key else {
            continue;
        };
        let of_key = (*which, key);
        match stored {
            None => {
                behind.insert(of_key);
            }
            Some(stored) => {
                if behind.contains(&of_key) {
                    report
                        .faults
                        .push(told("overtook one of its key in the outbox".into()));
                }
                if last.insert(of_key, stored.position) > Some(stored.position) {
                    report
                        .faults
                        .push(told("is in the log before one of its key".into()));
                }
            }
        }
    }
}
