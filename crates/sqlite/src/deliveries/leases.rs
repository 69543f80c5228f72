//! The leases of this process: claims, single rows, and the lock that makes the process an owner.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Lease, Progress, Result};
use rusqlite::{Connection, params};

use crate::ids::IdMap;
use crate::owner::OwnerLock;
use crate::rows::{LeaseParts as _, Seq as _, micros, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// What a lease refers to.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Claim(i64),
    Row(i64),
}

/// The leases of this process, and what it knows about other owners.
pub(crate) struct Leases {
    pub(crate) claims: IdMap<i64, Claim>,
    pub(crate) held: HashMap<(i64, u64), Held>,
    /// Claims whose bitmap changed in this transaction.
    pub(crate) touched: Vec<i64>,
    /// If set, only this suspect (group and seq) may be handed out.
    pub(crate) isolating: Option<(i64, u64)>,
    pub(crate) owner: i64,
    pub(crate) owner_lock: Option<OwnerLock>,
    /// Other owners in the file: their ids and lock names.
    pub(crate) other_owners: Vec<(i64, String)>,
    /// The earliest end of a lease of another owner.
    pub(crate) foreign_until: Option<i64>,
    pub(crate) owners_checked: Instant,
    pub(crate) owner_died: bool,
    /// What the running transaction removed or changed, for a rollback.
    pub(crate) undo: Undo,
}

/// Leases as they were before the running transaction.
#[derive(Default)]
pub(crate) struct Undo {
    pub(crate) claims: Vec<(i64, Claim)>,
    pub(crate) held: Vec<((i64, u64), Held)>,
    /// Extended events of claims: claim, seq, and the lease end that `extended` had before.
    pub(crate) extended: Vec<(i64, u64, Option<i64>)>,
}

impl Leases {
    pub(crate) fn load(conn: &Connection) -> Result<Self> {
        let mut leases = Self {
            claims: IdMap::default(),
            held: HashMap::new(),
            touched: Vec::new(),
            isolating: None,
            owner: 0,
            owner_lock: None,
            other_owners: Vec::new(),
            foreign_until: None,
            owners_checked: Instant::now(),
            owner_died: false,
            undo: Undo::default(),
        };
        leases.find_others(conn)?;
        Ok(leases)
    }

    /// Loads what another process may have changed. Removes and returns the leases that this process has lost.
    pub(crate) fn refresh(&mut self, conn: &Connection) -> Result<Lost> {
        self.find_others(conn)?;
        self.drop_lost(conn)
    }

    /// Loads the other owners, and when the first of their leases ends.
    pub(crate) fn find_others(&mut self, conn: &Connection) -> Result<()> {
        let sql = "SELECT id, lock FROM owners WHERE id <> ?1";
        self.other_owners = conn.all("reading the state of the file", sql, [self.owner])?;
        self.find_foreign_leases(conn)
    }

    /// Loads when the first lease of another owner ends.
    pub(crate) fn find_foreign_leases(&mut self, conn: &Connection) -> Result<()> {
        let sql = "SELECT min(until) FROM (
                   SELECT until FROM claims WHERE owner NOT IN (0, ?1)
                   UNION ALL SELECT until FROM deliveries WHERE state = 1 AND owner <> ?1)";
        self.foreign_until = conn.one("reading the leases of others", sql, [self.owner])?;
        Ok(())
    }

    fn drop_lost(&mut self, conn: &Connection) -> Result<Lost> {
        let doing = "checking the leases";
        let mut lost = Lost::default();
        if !self.claims.is_empty() {
            let sql = "SELECT id, token FROM claims WHERE owner = ?1";
            let ours: HashMap<i64, i64> = conn.all("checking the leases", sql, [self.owner])?;
            for (id, claim) in self
                .claims
                .extract_if(|id, claim| ours.get(id) != Some(&claim.token))
            {
                lost.claims.push((id, claim));
            }
        }
        if !self.held.is_empty() {
            let sql = "SELECT token FROM deliveries WHERE group_id = ?1 AND seq = ?2 AND state = 1";
            let mut gone = Vec::new();
            for (key, held) in &self.held {
                let token: Option<i64> = conn.first(doing, sql, (key.0, to_sql(key.1)))?;
                if token != Some(held.token) {
                    gone.push(*key);
                }
            }
            for key in gone {
                if let Some(held) = self.held.remove(&key) {
                    lost.held.push((key, held));
                }
            }
        }
        Ok(lost)
    }

    /// How many bytes a delivery counts for in the memory limit of its consumer.
    pub(crate) fn bytes_of(&self, lease: &Lease) -> u64 {
        let id = (lease.slot() >> 1) as i64;
        if lease.slot() & 1 == 0 {
            self.claims.get(&id).map_or(0, |claim| claim.bytes_each)
        } else {
            self.held
                .get(&(id, lease.seq()))
                .map_or(0, |held| held.bytes)
        }
    }

    /// How many events this engine has in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        let claimed: u64 = self
            .claims
            .values()
            .map(|c| c.progress.unfinished_count(c.hi))
            .sum();
        claimed + self.held.len() as u64
    }

    /// Stores the bitmap and the `started` mark of changed claims; removes finished claims.
    pub(crate) fn flush_claims(&mut self, tx: &mut Tx) -> Result<()> {
        let doing = "settling";
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        touched.dedup();
        for id in &touched {
            let Some(claim) = self.claims.get(id) else {
                continue;
            };
            if claim.progress.is_complete(claim.hi) {
                let sql = "DELETE FROM claims WHERE id = ?1 AND token = ?2";
                tx.conn.run(doing, sql, (id, claim.token))?;
                self.drop_claim(*id);
            } else {
                let done = claim.progress.bitmap(claim.lo, claim.hi);
                tx.conn.run(
                    doing,
                    "UPDATE claims SET done = ?3, started = ?4 WHERE id = ?1 AND token = ?2",
                    params![id, claim.token, done, to_sql(claim.started)],
                )?;
            }
        }
        touched.clear();
        self.touched = touched;
        Ok(())
    }

    /// The claim or row of a lease. Fails with `LeaseLost` if this process no longer holds the lease.
    pub(crate) fn find(&self, tx: &Tx, lease: &Lease) -> Result<Place> {
        let seq = lease.seq();
        // An expired lease is lost, even if no other consumer has taken the event yet.
        let now = tx.now();
        if lease.slot() & 1 == 0 {
            let id = (lease.slot() >> 1) as i64;
            match self.claims.get(&id) {
                Some(claim)
                    if claim.token as u64 == lease.token()
                        && (claim.lo..=claim.hi).contains(&seq)
                        && !claim.progress.is_done(seq)
                        && claim.until_of(seq) > now =>
                {
                    Ok(Place::Claim(id))
                }
                _ => Err(lost(seq)),
            }
        } else {
            let group = (lease.slot() >> 1) as i64;
            match self.held.get(&(group, seq)) {
                Some(held) if held.token as u64 == lease.token() && held.until > now => {
                    Ok(Place::Row(group))
                }
                _ => Err(lost(seq)),
            }
        }
    }

    /// Extends leases. The answers are in the order of the leases.
    pub(crate) fn extend(
        &mut self,
        tx: &mut Tx,
        leases: &[Lease],
        by: Duration,
    ) -> Result<Vec<Result<()>>> {
        let until = micros(tx.clock.now().plus(by));
        let mut results = Vec::with_capacity(leases.len());
        let mut claims: HashMap<i64, Vec<u64>> = HashMap::new();
        for lease in leases {
            results.push(match self.find(tx, lease) {
                Err(e) => Err(e),
                Ok(Place::Claim(id)) => {
                    claims.entry(id).or_default().push(lease.seq());
                    Ok(())
                }
                Ok(Place::Row(group)) => {
                    self.extend_row(tx, group, lease.seq(), until)?;
                    Ok(())
                }
            });
        }
        for (id, seqs) in claims {
            self.extend_claimed(tx, id, &seqs, until)?;
        }
        Ok(results)
    }

    /// Extends the leases of single events of a claim. The file has only the latest end of all leases of the claim.
    /// Memory has the end of each lease, so this process notices first when one expires.
    pub(crate) fn extend_claimed(
        &mut self,
        tx: &mut Tx,
        id: i64,
        seqs: &[u64],
        until: i64,
    ) -> Result<()> {
        let Some(claim) = self.claims.get_mut(&id) else {
            return Ok(());
        };
        for seq in seqs {
            let before = claim.extended.insert(*seq, until);
            self.undo.extended.push((id, *seq, before));
        }
        let sql = "UPDATE claims SET until = max(until, ?3) WHERE id = ?1 AND token = ?2";
        tx.conn
            .run("extending a lease", sql, (id, claim.token, until))
    }

    pub(crate) fn extend_row(
        &mut self,
        tx: &mut Tx,
        group: i64,
        seq: u64,
        until: i64,
    ) -> Result<()> {
        if let Some(held) = self.held.get_mut(&(group, seq)) {
            held.until = until;
            let sql = "UPDATE deliveries SET until = ?3 WHERE group_id = ?1 AND seq = ?2";
            tx.conn
                .run("extending a lease", sql, (group, to_sql(seq), until))?;
        }
        Ok(())
    }

    pub(crate) fn may_take_suspect(&self, group: i64) -> bool {
        let running = self
            .held
            .iter()
            .any(|((g, _), held)| *g == group && held.suspect);
        !running && (self.isolating.is_none() || self.in_flight() == 0)
    }

    /// Ends the isolation if it is that of this event.
    pub(crate) fn end_isolation(&mut self, event: (i64, u64)) {
        self.isolating = self.isolating.filter(|isolated| *isolated != event);
    }

    /// Removes a claim that is finished or given up. A rollback restores it.
    pub(crate) fn drop_claim(&mut self, id: i64) {
        if let Some(claim) = self.claims.remove(&id) {
            self.undo.claims.push((id, claim));
        }
    }

    /// Removes a single delivery that is finished or given up. A rollback restores it.
    pub(crate) fn drop_held(&mut self, key: (i64, u64)) -> Option<Held> {
        let held = self.held.remove(&key)?;
        self.undo.held.push((key, held));
        Some(held)
    }
}

/// A range of the log that this engine handed out.
pub(crate) struct Claim {
    pub(crate) group: i64,
    pub(crate) session: u64,
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) token: i64,
    /// The lease end of events whose lease was never extended.
    pub(crate) until: i64,
    /// Events whose lease was extended, each with its lease end. The file has only the latest end of all.
    pub(crate) extended: HashMap<u64, i64>,
    /// Events up to here may have begun; the others are reserved.
    pub(crate) started: u64,
    pub(crate) progress: Progress,
    /// The average payload size of the events.
    pub(crate) bytes_each: u64,
    /// The ids of the events, by position. An ack may record them in the inbox.
    pub(crate) keys: Vec<(u64, EventKey)>,
}

/// An event by its id and the number of its tenant.
pub(crate) type EventKey = ([u8; 16], i64);

impl Claim {
    /// When the lease of one event ends.
    pub(crate) fn until_of(&self, seq: u64) -> i64 {
        self.extended.get(&seq).copied().unwrap_or(self.until)
    }

    /// The id of an event, if it is known.
    pub(crate) fn key_of(&self, seq: u64) -> Option<EventKey> {
        let found = self.keys.binary_search_by_key(&seq, |(seq, _)| *seq);
        found.ok().map(|index| self.keys[index].1)
    }

    /// Unfinished events whose lease has ended.
    pub(crate) fn ended(&self, now: i64) -> Vec<u64> {
        let open = self
            .progress
            .unfinished(self.hi)
            .flat_map(|(first, last)| first..=last);
        open.filter(|seq| self.until_of(*seq) <= now).collect()
    }

    /// Whether the lease of an unfinished event has ended. Cheaper than [`ended`](Self::ended) if none has.
    pub(crate) fn may_have_ended(&self, now: i64) -> bool {
        self.until <= now && !self.ended(now).is_empty()
            || self
                .extended
                .iter()
                .any(|(seq, until)| *until <= now && !self.progress.is_done(*seq))
    }
}

/// A single delivery that this engine handed out.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    pub(crate) session: u64,
    pub(crate) token: i64,
    pub(crate) until: i64,
    pub(crate) suspect: bool,
    pub(crate) bytes: u64,
    /// Whether the event failed before, in this run or as a dead letter. If so, its outcome is kept.
    pub(crate) failed: bool,
}

/// Leases that this process has lost.
#[derive(Default)]
pub(crate) struct Lost {
    pub(crate) claims: Vec<(i64, Claim)>,
    pub(crate) held: Vec<((i64, u64), Held)>,
}

pub(crate) fn lost(seq: u64) -> Error {
    Error::new(
        Code::LeaseLost,
        format!("the lease on event {seq} has ended or another consumer has it"),
    )
    .hint("the event is delivered again; make handlers idempotent or raise the timeout")
}
