//! The state of a file, read with plain SQL while no process works on it.
//!
//! The rules of the tables are applied here a second time, without the engine: a bug in the engine's reading
//! must not hide what it did.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use everbus_core::{EventId, Failure, Overflow, Progress, Timestamp};
use rusqlite::{Connection, OpenFlags, Row};

use super::outboxes::{self, Row as OutboxRow, Which};
use super::{Broken, GROUPS, objects};

/// Where an event stands in a group.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// Not handed out, or waiting for its next attempt.
    Waiting,
    /// Handed out under a lease.
    InFlight,
    /// Done, as far as the group is concerned.
    Handled,
    /// In the dead letters.
    Dead(Dead),
    /// Skipped on purpose, with this reason.
    Skipped(String),
}

/// A dead letter as stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Dead {
    /// Attempts begun.
    pub attempts: u32,
    /// The failed attempts, in order.
    pub failures: Vec<Failure>,
    /// The handler that failed last.
    pub handler: Option<String>,
    /// When it first became a dead letter.
    pub first_seen_at: Timestamp,
    /// When it did last.
    pub died_at: Timestamp,
}

/// An event as stored, with its places in each group. A correct file has exactly one place per group.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Its position in the log.
    pub position: u64,
    /// Its type.
    pub event_type: String,
    /// Its payload, with what is in its object.
    pub payload: Vec<u8>,
    /// The problem with its object, if there is one.
    pub dangling: Option<String>,
    /// When it was received.
    pub received_at: Timestamp,
    /// Per group of [`GROUPS`]; empty for a group that does not exist.
    pub places: [Vec<Place>; GROUPS.len()],
}

/// Everything that a file contains about its events.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// The events of the log.
    pub events: HashMap<EventId, Stored>,
    /// The objects that events refer to.
    pub objects: HashSet<String>,
    /// The rows of outboxes.
    pub rows: HashMap<(Which, EventId), OutboxRow>,
    /// Problems that SQLite or the engine finds.
    pub damage: Vec<String>,
}

/// Reads a file. A missing or empty file contains nothing.
pub fn observe(file: &Path) -> Result<Observed, Broken> {
    let mut observed = Observed::default();
    if !file.metadata().is_ok_and(|meta| meta.len() > 0) {
        return Ok(observed);
    }
    let conn = open(file)?;
    read(&conn, file, &mut observed).map_err(Broken::at("reading the file"))?;
    drop(conn);
    observed.rows = outboxes::observe(file)?;
    engine_check(file, &mut observed)?;
    Ok(observed)
}

fn open(file: &Path) -> Result<Connection, Broken> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(file, flags).map_err(Broken::at("opening the file"))?;
    conn.busy_timeout(Duration::from_secs(10))
        .map_err(Broken::at("opening the file"))?;
    Ok(conn)
}

/// How much work of a file is open: rows, claims, groups that are behind.
pub fn pending(file: &Path) -> Result<u64, Broken> {
    let conn = open(file)?;
    conn.query_row(
        "SELECT (SELECT count(*) FROM deliveries)
              + (SELECT coalesce(sum(hi - lo + 1), 0) FROM claims)
              + (SELECT coalesce(sum(max(0, (SELECT coalesce(max(seq), 0) FROM log) - cursor)), 0)
                   FROM groups)",
        [],
        |row| row.get::<_, i64>(0),
    )
    .map(i64::unsigned_abs)
    .map_err(Broken::at("counting what is pending"))
}

pub(crate) fn ids(file: &Path) -> Result<HashSet<EventId>, Broken> {
    Ok(observe(file)?.events.into_keys().collect())
}

/// Whether a process holds the file for writing.
pub(crate) fn is_being_written(file: &Path) -> Result<bool, Broken> {
    let conn = open(file)?;
    conn.busy_timeout(Duration::ZERO)
        .map_err(Broken::at("opening the file"))?;
    Ok(conn.execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_err())
}

struct GroupRow {
    index: usize,
    cursor: u64,
}

fn read(conn: &Connection, file: &Path, observed: &mut Observed) -> rusqlite::Result<()> {
    conn.execute_batch("BEGIN")?;
    let known = conn.query_row(
        "SELECT count(*) FROM sqlite_schema WHERE name = 'log'",
        [],
        |row| row.get::<_, i64>(0),
    )?;
    if known == 0 {
        // A process died before it had created the tables.
        return Ok(());
    }
    let groups = read_groups(conn)?;
    let by_position = read_log(conn, file, observed)?;
    read_leftovers(conn, observed)?;
    let place = |group: i64, seq: i64, place: Place, observed: &mut Observed| {
        let Some(group) = groups.get(&group) else {
            return;
        };
        match by_position
            .get(&seq.unsigned_abs())
            .and_then(|id| observed.events.get_mut(id))
        {
            Some(event) => event.places[group.index].push(place),
            None => observed.damage.push(format!(
                "group {} has {place:?} for position {seq}, which is not in the log",
                GROUPS[group.index].name
            )),
        }
    };
    let mut statement = conn.prepare("SELECT group_id, seq, state FROM deliveries")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let in_flight = row.get::<_, i64>(2)? == 1;
        let standing = if in_flight {
            Place::InFlight
        } else {
            Place::Waiting
        };
        place(row.get(0)?, row.get(1)?, standing, observed);
    }
    let mut statement = conn.prepare("SELECT group_id, seq, reason FROM skips")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        place(
            row.get(0)?,
            row.get(1)?,
            Place::Skipped(row.get(2)?),
            observed,
        );
    }
    let mut statement = conn.prepare(
        "SELECT group_id, seq, attempts, failures, handler, first_seen_at, died_at
         FROM dead_letters WHERE retried_at IS NULL",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let dead = read_dead(row)?;
        place(row.get(0)?, row.get(1)?, Place::Dead(dead), observed);
    }
    let mut statement = conn.prepare("SELECT group_id, lo, hi, owner, done FROM claims")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (lo, hi) = (row.get::<_, i64>(1)?, row.get::<_, i64>(2)?);
        let done: Option<Vec<u8>> = row.get(4)?;
        let (first, last) = (lo.unsigned_abs(), hi.unsigned_abs());
        let progress = Progress::from_bitmap(first, last, done.as_deref().unwrap_or_default());
        let inherited = row.get::<_, i64>(3)? == 0;
        for (begin, end) in progress.unfinished(last) {
            for seq in begin..=end {
                let standing = if inherited {
                    Place::Waiting
                } else {
                    Place::InFlight
                };
                place(row.get(0)?, seq as i64, standing, observed);
            }
        }
    }
    drop(rows);
    // An event without any row is done if the group has passed it.
    for event in observed.events.values_mut() {
        for group in groups.values() {
            let places = &mut event.places[group.index];
            let skipped = |place: &Place| matches!(place, Place::Skipped(_));
            // An event dropped from a full stream is skipped before the group reaches it.
            if event.position > group.cursor && !places.iter().any(skipped) {
                places.push(Place::Waiting);
            } else if places.is_empty() {
                places.push(Place::Handled);
            }
        }
    }
    conn.execute_batch("ROLLBACK")
}

fn read_groups(conn: &Connection) -> rusqlite::Result<HashMap<i64, GroupRow>> {
    let mut statement = conn.prepare("SELECT id, name, cursor FROM groups")?;
    let mut rows = statement.query([])?;
    let mut groups = HashMap::new();
    while let Some(row) = rows.next()? {
        let name: String = row.get(1)?;
        if let Some(index) = GROUPS.iter().position(|group| group.name == name) {
            let cursor = row.get::<_, i64>(2)?.unsigned_abs();
            groups.insert(row.get(0)?, GroupRow { index, cursor });
        }
    }
    Ok(groups)
}

/// Rows about removed events must be gone.
fn read_leftovers(conn: &Connection, observed: &mut Observed) -> rusqlite::Result<()> {
    for table in ["event_payloads", "expirations"] {
        let known: i64 = conn.query_row(
            "SELECT count(*) FROM sqlite_schema WHERE name = ?1",
            [table],
            |row| row.get(0),
        )?;
        if known == 0 {
            // A process died before it had created all tables.
            continue;
        }
        let left: i64 = conn.query_row(
            &format!("SELECT count(*) FROM {table} WHERE seq NOT IN (SELECT seq FROM log)"),
            [],
            |row| row.get(0),
        )?;
        if left > 0 {
            observed.damage.push(format!(
                "{left} rows of {table} are of events that are gone"
            ));
        }
    }
    Ok(())
}

fn read_log(
    conn: &Connection,
    file: &Path,
    observed: &mut Observed,
) -> rusqlite::Result<HashMap<u64, EventId>> {
    let mut statement = conn.prepare(
        "SELECT log.seq, log.id, types.name, log.payload, log.received_at, attrs -> '$.overflow'
         FROM log LEFT JOIN types ON types.id = log.type",
    )?;
    let mut rows = statement.query([])?;
    let mut by_position = HashMap::new();
    while let Some(row) = rows.next()? {
        let position = row.get::<_, i64>(0)?.unsigned_abs();
        let id = EventId::from_bytes(row.get(1)?);
        by_position.insert(position, id);
        let (mut payload, mut dangling): (Vec<u8>, _) = (row.get(3)?, None);
        if let Some(reference) = row.get::<_, Option<String>>(5)? {
            let made = serde_json::from_str(&reference)
                .map_err(|error| format!("has the reference {reference}: {error}"))
                .and_then(|reference: Overflow| {
                    observed.objects.insert(reference.key.clone());
                    objects::whole(file, &payload, &reference)
                });
            match made {
                Ok(whole) => payload = whole,
                Err(what) => dangling = Some(what),
            }
        }
        let stored = Stored {
            position,
            event_type: row.get::<_, Option<String>>(2)?.unwrap_or_default(),
            payload,
            dangling,
            received_at: Timestamp::from_micros(row.get(4)?),
            places: Default::default(),
        };
        if let Some(other) = observed.events.insert(id, stored) {
            observed
                .damage
                .push(format!("{id} is at {} and at {position}", other.position));
        }
    }
    Ok(by_position)
}

fn read_dead(row: &Row<'_>) -> rusqlite::Result<Dead> {
    let failures: String = row.get(3)?;
    Ok(Dead {
        attempts: row.get(2)?,
        // Unreadable failures count as missing, and the checker reports them.
        failures: serde_json::from_str(&failures).unwrap_or_default(),
        handler: row.get(4)?,
        first_seen_at: Timestamp::from_micros(row.get(5)?),
        died_at: Timestamp::from_micros(row.get(6)?),
    })
}

/// Opens the engine, consumes nothing, and lets it check the file.
fn engine_check(file: &Path, observed: &mut Observed) -> Result<(), Broken> {
    let engine = everbus_sqlite::open(file, everbus_sqlite::Options::default())
        .map_err(Broken::at("opening the file with the engine"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .map_err(Broken::at("starting a runtime"))?;
    let report = runtime.block_on(async {
        let report = engine.maintenance()?.check().await;
        engine.broker.close().await?;
        report
    });
    match report {
        Ok(report) => {
            let bad = report.findings.iter().filter(|finding| !finding.ok);
            observed
                .damage
                .extend(bad.map(|f| format!("{}: {}", f.check, f.detail)));
        }
        Err(error) => observed.damage.push(format!("the check failed: {error}")),
    }
    Ok(())
}
