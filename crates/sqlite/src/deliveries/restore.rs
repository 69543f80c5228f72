//! Restores the state in memory after a rollback.
//!
//! SQLite rolls back the file; memory must follow. The log, the groups and the leases are loaded again. What
//! the file does not have (the consumers, the deliveries in their mailboxes, the consumer of each lease) comes from
//! the undo lists of [`Consumers`](crate::deliveries::consumers::Consumers) and
//! [`Leases`](crate::deliveries::leases::Leases).

use std::collections::HashMap;

use everbus_core::{Progress, Result};
use rusqlite::params;

use crate::deliveries::Deliveries;
use crate::deliveries::claims::claim_slot;
use crate::groups::Groups;
use crate::log_end::LogEnd;
use crate::rows::{LeaseParts as _, Seq as _, seq_from};
use crate::sql::Sql as _;
use crate::tx::Tx;

impl Deliveries {
    /// Keeps the changes of a durable transaction: forgets how to undo them.
    pub(crate) fn keep_changes(&mut self) {
        self.consumers.keep_changes();
        self.leases.undo = Default::default();
    }

    /// Undoes the changes of a transaction that was rolled back: loads the state from the file. If this fails, it
    /// can be called again.
    pub(crate) fn undo_changes(&mut self, tx: &mut Tx) -> Result<()> {
        self.consumers.outgoing.clear();
        self.leases.touched.clear();
        tx.noted.clear();
        let owner = self.owner_in_file(tx)?;
        // Everything that can fail comes first, so that the call can be repeated.
        let (log, mut groups) = (LogEnd::load(&tx.conn)?, Groups::load(&tx.conn)?);
        let leases = leases_in_file(tx, owner)?;
        self.leases.owner = owner;
        self.leases.find_others(&tx.conn)?;
        groups.stored_at = tx.groups.stored_at;
        (tx.log, tx.groups) = (log, groups);
        self.consumers.undo_changes();
        self.restore_leases(&leases);
        self.leases.isolating = None;
        Ok(())
    }

    /// The owner number of this process in the file. If the file has none, because the transaction that added it was
    /// rolled back, drops the owner lock and returns 0.
    fn owner_in_file(&mut self, tx: &Tx) -> Result<i64> {
        let Some(lock) = &self.leases.owner_lock else {
            return Ok(0);
        };
        let known: Option<i64> = tx.conn.first(
            "looking for our own entry",
            "SELECT id FROM owners WHERE id = ?1 AND lock = ?2",
            params![self.leases.owner, lock.name()],
        )?;
        if known.is_none() {
            self.leases.owner_lock = None;
        }
        Ok(known.unwrap_or(0))
    }

    /// Restores the leases in memory that the file has, and removes deliveries without a lease from the mailboxes.
    fn restore_leases(&mut self, file: &LeasesInFile) {
        let undo = std::mem::take(&mut self.leases.undo);
        let mut claims = std::mem::take(&mut self.leases.claims);
        let mut held = std::mem::take(&mut self.leases.held);
        // Undone in reverse order, so that the oldest value, which is the one in the file, is restored last.
        claims.extend(undo.claims.into_iter().rev());
        held.extend(undo.held.into_iter().rev());
        for (id, seq, before) in undo.extended.into_iter().rev() {
            if let Some(claim) = claims.get_mut(&id) {
                match before {
                    Some(until) => claim.extended.insert(seq, until),
                    None => claim.extended.remove(&seq),
                };
            }
        }
        for (id, mut claim) in claims {
            match file.claims.get(&id).filter(|c| c.token == claim.token) {
                Some(stored) => {
                    claim.started = stored.started.unwrap_or(claim.hi);
                    let done = stored.done.as_deref().unwrap_or_default();
                    claim.progress = Progress::from_bitmap(claim.lo, claim.hi, done);
                    self.leases.claims.insert(id, claim);
                }
                None => self
                    .consumers
                    .discard(claim.session, |d| d.lease.slot() == claim_slot(id)),
            }
        }
        for ((group, seq), mut held) in held {
            match file
                .rows
                .get(&(group, seq))
                .filter(|(token, _)| *token == held.token)
            {
                Some((_, until)) => {
                    held.until = *until;
                    self.leases.held.insert((group, seq), held);
                }
                None => {
                    let token = held.token as u64;
                    self.consumers.discard(held.session, |d| {
                        d.lease.seq() == seq && d.lease.token() == token
                    });
                }
            }
        }
        for session in self.consumers.sessions.values_mut() {
            session.recount();
            session.look_for_unhandled = true;
        }
        for claim in self.leases.claims.values() {
            if let Some(session) = self.consumers.sessions.get_mut(&claim.session) {
                let open = claim.progress.unfinished_count(claim.hi);
                session.took(usize::try_from(open).unwrap_or(0), open * claim.bytes_each);
            }
        }
        for held in self.leases.held.values() {
            if let Some(session) = self.consumers.sessions.get_mut(&held.session) {
                session.took(1, held.bytes);
            }
        }
    }
}

/// Reads the leases of this process from the file.
pub(crate) fn leases_in_file(tx: &Tx, owner: i64) -> Result<LeasesInFile> {
    let doing = "reading the leases again";
    let sql = "SELECT id, token, started, done FROM claims WHERE owner = ?1";
    let claims = tx.conn.read_all(doing, sql, [owner], |r| {
        let claim = ClaimInFile {
            token: r.get(1)?,
            started: r.get::<_, Option<i64>>(2)?.map(seq_from),
            done: r.get(3)?,
        };
        Ok((r.get(0)?, claim))
    })?;
    let rows = tx.conn.read_all(
        doing,
        "SELECT group_id, seq, token, until FROM deliveries WHERE state = 1 AND owner = ?1",
        [owner],
        |r| Ok(((r.get(0)?, seq_from(r.get(1)?)), (r.get(2)?, r.get(3)?))),
    )?;
    Ok(LeasesInFile { claims, rows })
}

/// The leases of this process in the file: claims, and rows with token and end.
pub(crate) struct LeasesInFile {
    claims: HashMap<i64, ClaimInFile>,
    rows: HashMap<(i64, u64), (i64, i64)>,
}

struct ClaimInFile {
    token: i64,
    started: Option<u64>,
    done: Option<Vec<u8>>,
}
