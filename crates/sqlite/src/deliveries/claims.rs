//! Claims: handing out ranges of the log.
//!
//! A claim is one row for a range of events. The cursor of the group is past the range, and a bitmap says which
//! events of the range are done.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Delivery, Lease, Progress, Recorded, Result, Timestamp};
use rusqlite::{Connection, Params, params};

use crate::deliveries::Deliveries;
use crate::deliveries::leases::{Claim, Held};
use crate::rows::{BEHIND_KEY, Seq as _, WAITING, micros, seq_from, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// An event with the number of its type.
pub(crate) type Typed = (i64, Arc<Recorded>);

/// How many bytes an event counts for in the memory limit of a consumer.
pub(crate) fn size(record: &Recorded) -> u64 {
    record.event.payload().len() as u64
}

/// The slot number of a claim's leases. It is even; the slot numbers of single rows are odd.
pub(crate) fn claim_slot(id: i64) -> u64 {
    (id as u64) << 1
}

pub(crate) fn delivery_slot(group: i64) -> u64 {
    ((group as u64) << 1) | 1
}

/// A random fencing token. An earlier holder of the lease cannot have it.
pub(crate) fn new_token() -> i64 {
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    ((high ^ low) >> 1) as i64
}

/// A claim as it is stored in the file.
pub(crate) struct StoredClaim {
    pub(crate) id: i64,
    pub(crate) group: i64,
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) owner: i64,
    pub(crate) attempt: u32,
    /// Events up to here may have begun.
    pub(crate) started: u64,
    pub(crate) crashed_at: Timestamp,
    pub(crate) progress: Progress,
}

impl StoredClaim {
    /// Whether an event of the claim is not finished.
    pub(crate) fn is_open(&self, seq: u64) -> bool {
        (self.lo..=self.hi).contains(&seq) && !self.progress.is_done(seq)
    }

    /// The first event of the claim that is not finished.
    pub(crate) fn first_open(&self) -> Option<u64> {
        let open = self.progress.unfinished(self.hi).next();
        open.map(|(first, _)| first)
    }
}

/// The claims in the file that a condition selects.
pub(crate) fn stored_claims(
    conn: &Connection,
    doing: &str,
    which: &str,
    values: impl Params,
) -> Result<Vec<StoredClaim>> {
    let sql = format!(
        "SELECT id, group_id, lo, hi, owner, attempt, coalesce(started, hi),
         coalesce(crashed_at, 0), done FROM claims WHERE {which}"
    );
    conn.read_all(doing, &sql, values, |r| {
        let (lo, hi) = (seq_from(r.get(2)?), seq_from(r.get(3)?));
        let done: Option<Vec<u8>> = r.get(8)?;
        Ok(StoredClaim {
            id: r.get(0)?,
            group: r.get(1)?,
            lo,
            hi,
            owner: r.get(4)?,
            attempt: r.get(5)?,
            started: seq_from(r.get(6)?),
            crashed_at: Timestamp::from_micros(r.get(7)?),
            progress: Progress::from_bitmap(lo, hi, done.as_deref().unwrap_or_default()),
        })
    })
}

impl Deliveries {
    /// Hands out a range as one claim.
    pub(super) fn claim_range(
        &mut self,
        tx: &mut Tx,
        session: u64,
        group: i64,
        (lo, hi): (u64, u64),
        events: Vec<Typed>,
        lease: Duration,
    ) -> Result<()> {
        let mut progress = Progress::new(lo - 1);
        let mut next = lo;
        for (_, record) in &events {
            if record.seq() > next {
                progress.complete_range(next, record.seq() - 1);
            }
            next = record.seq() + 1;
        }
        let done = (progress.highest() >= lo).then(|| progress.bitmap(lo, hi));
        // While the consumer has reserved events, these come first: no event of the new claim may begin.
        let open = match self.consumers.reserved(session) {
            0 => self.consumers.places(session).min(events.len()),
            _ => 0,
        };
        let last_open = open.checked_sub(1).and_then(|last| events.get(last));
        let started = last_open.map_or(lo - 1, |(_, record)| record.seq());
        let token = new_token();
        let until = micros(tx.clock.now().plus(lease));
        let id = tx.conn.add(
            "claiming",
            "INSERT INTO claims (group_id, lo, hi, owner, token, until, attempt, done, started)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, 1, ?7, ?8)",
            params![
                group,
                to_sql(lo),
                to_sql(hi),
                self.leases.owner,
                token,
                until,
                done,
                to_sql(started)
            ],
        )?;
        let slot = claim_slot(id);
        let mut keys = Vec::with_capacity(events.len());
        for (_, record) in &events {
            let tenant = tx.log.intern_tenant(&tx.conn, record.event.tenant())?;
            keys.push((record.seq(), (*record.event.id().as_bytes(), tenant)));
        }
        let bytes_each =
            events.iter().map(|(_, record)| size(record)).sum::<u64>() / events.len() as u64;
        let deliveries: Vec<Delivery> = events
            .into_iter()
            .map(|(_, record)| {
                let lease = Lease::new(record.position, [slot, token as u64]);
                Delivery::new(record, lease)
            })
            .collect();
        if let Some(session) = self.consumers.sessions.get_mut(&session) {
            session.took(deliveries.len(), bytes_each * deliveries.len() as u64);
        }
        let extended = HashMap::new();
        let claim = Claim {
            group,
            session,
            lo,
            hi,
            token,
            until,
            extended,
            started,
            progress,
            bytes_each,
            keys,
        };
        self.leases.claims.insert(id, claim);
        self.consumers.send(session, until, deliveries, open);
        Ok(())
    }

    /// Hands out events that are far apart, each in its own row. As many as may begin are leased; the others wait
    /// in their rows.
    pub(super) fn lease_one_by_one(
        &mut self,
        tx: &mut Tx,
        session: u64,
        group: i64,
        mut events: Vec<Typed>,
        lease: Duration,
    ) -> Result<()> {
        let places = self.consumers.places(session).min(events.len());
        for event in events.split_off(places) {
            park(tx, group, &event, WAITING, tx.now())?;
        }
        let now = tx.clock.now();
        let until = micros(now.plus(lease));
        let sql = "INSERT INTO deliveries
                     (group_id, seq, state, due, attempt, type, owner, token, until, updated_at)
                   VALUES (?1, ?2, 1, ?3, 1, ?4, ?5, ?6, ?7, ?3)";
        let owner = self.leases.owner;
        let mut deliveries = Vec::with_capacity(events.len());
        for (type_id, record) in events {
            let token = new_token();
            let position = record.seq();
            let (seq, at) = (to_sql(position), micros(now));
            let values = params![group, seq, at, type_id, owner, token, until];
            tx.conn.run("claiming", sql, values)?;
            let bytes = size(&record);
            let held = Held {
                session,
                token,
                until,
                suspect: false,
                bytes,
                failed: false,
            };
            self.leases.held.insert((group, position), held);
            if let Some(session) = self.consumers.sessions.get_mut(&session) {
                session.took(1, bytes);
            }
            let lease = Lease::new(record.position, [delivery_slot(group), token as u64]);
            deliveries.push(Delivery::new(record, lease));
        }
        let open = deliveries.len();
        self.consumers.send(session, until, deliveries, open);
        Ok(())
    }
}

/// Stores the events of an ordered group in rows. An event waits for its key if an earlier event with the key is
/// unsettled, or any event with the key is in flight.
pub(super) fn queue_by_key(tx: &mut Tx, group: i64, events: &[Typed]) -> Result<()> {
    let due = tx.now();
    for event in events {
        let key = event.1.event.ordering_key();
        let behind: bool = match &key {
            None => false,
            Some(key) => {
                let sql = "SELECT EXISTS (SELECT 1 FROM deliveries WHERE group_id = ?1 AND key = ?2
                           AND (seq < ?3 OR state = 1))";
                let values = params![group, key, to_sql(event.1.seq())];
                tx.conn.one("ordering by key", sql, values)?
            }
        };
        let state = if behind { BEHIND_KEY } else { WAITING };
        park(tx, group, event, state, due)?;
    }
    Ok(())
}

/// Stores an event in its own row, without counting an attempt. Does nothing if the event has a row already.
pub(crate) fn park(tx: &mut Tx, group: i64, event: &Typed, state: i64, due: i64) -> Result<()> {
    let (type_id, record) = event;
    let key = tx.groups.known(group)?.key_of(&record.event);
    let sql = "INSERT OR IGNORE INTO deliveries
                 (group_id, seq, state, due, attempt, type, key, updated_at)
               VALUES (?1, ?2, ?3, ?4, 0, ?5, ?6, ?7)";
    let seq = to_sql(record.seq());
    let values = params![group, seq, state, due, type_id, key, tx.now()];
    tx.conn.run("setting an event aside", sql, values)?;
    if state != BEHIND_KEY {
        note_due(tx, group, due);
    }
    Ok(())
}

/// Notes that an event of the group is due at this time.
pub(crate) fn note_due(tx: &mut Tx, group: i64, due: i64) {
    if let Some(group) = tx.groups.get_mut(&group) {
        group.next_due = Some(group.next_due.map_or(due, |known| known.min(due)));
    }
}
