//! Part of the writer: leases that expire, leases of deliveries that wait to be fetched, and leases after a
//! rollback.

use std::collections::HashMap;

use everbus_core::{Failure, FailureKind, Progress, Result, Timestamp};

use crate::claims::{claim_slot, delivery_slot};
use crate::deliver::EXPIRED;
use crate::errors::from_sqlite;
use crate::rows::{LeaseParts as _, Seq as _, seq_from, to_sql};
use crate::state::{State, micros};
use crate::writer::Writer;

impl Writer {
    pub(crate) fn leases_ended(&self, now: i64) -> bool {
        !self.sessions.is_empty()
            && (self.state.foreign_until.is_some_and(|until| until <= now)
                || self
                    .state
                    .claims
                    .values()
                    .any(|claim| claim.may_have_ended(now))
                || self.state.held.values().any(|held| held.until <= now))
    }

    /// Ends leases whose events were not settled in time.
    pub(crate) fn end_leases(&mut self, now: i64) -> Result<()> {
        let ended: Vec<i64> = self
            .state
            .claims
            .iter()
            .filter(|(_, c)| c.may_have_ended(now))
            .map(|(id, _)| *id)
            .collect();
        for id in ended {
            self.end_claim(id, now)?;
        }
        let ended: Vec<(i64, u64)> = self
            .state
            .held
            .iter()
            .filter(|(_, h)| h.until <= now)
            .map(|(key, _)| *key)
            .collect();
        for key in ended {
            self.end_row(key, now)?;
        }
        if self.state.foreign_until.is_some_and(|until| until <= now) {
            let theirs = (self.state.owner, now);
            self.crash_rows("owner <> ?5 AND until <= ?6", theirs, EXPIRED, false)?;
            self.crash_claims("owner NOT IN (0, ?1) AND until <= ?2", theirs)?;
            self.state.find_foreign_leases(&self.conn)?;
            self.after_crashes()?;
        }
        Ok(())
    }

    /// Ends expired leases in a claim of this process. Events that were not fetched were never begun; the
    /// others count as a failed attempt.
    pub(crate) fn end_claim(&mut self, id: i64, now: i64) -> Result<()> {
        let Some(claim) = self.state.claims.get(&id) else {
            return Ok(());
        };
        let (group, session, ended) = (claim.group, claim.session, claim.ended(now));
        let bytes = claim.bytes_each * ended.len() as u64;
        let slot = claim_slot(id);
        if let Some(session) = self.sessions.get_mut(&session) {
            session.gave(ended.len(), bytes);
        }
        let unseen = self.recall(session, |d| {
            d.lease.slot() == slot && ended.binary_search(&d.lease.seq()).is_ok()
        });
        self.give_back(group, &unseen)?;
        self.touched.push(id);
        for seq in ended {
            let Some(claim) = self.state.claims.get_mut(&id) else {
                break;
            };
            if claim.progress.complete(seq) {
                let at = Timestamp::from_micros(now);
                let failure = Failure::new(1, at, FailureKind::Crash, EXPIRED);
                self.insert_suspect(group, seq, 1, &[failure], now)?;
            }
        }
        Ok(())
    }

    pub(crate) fn end_row(&mut self, (group, seq): (i64, u64), now: i64) -> Result<()> {
        let Some(held) = self.drop_held((group, seq)) else {
            return Ok(());
        };
        if self.isolating == Some((group, seq)) {
            self.isolating = None;
        }
        if let Some(session) = self.sessions.get_mut(&held.session) {
            session.gave(1, held.bytes);
        }
        let token = held.token as u64;
        let unseen = self.recall(held.session, |d| {
            d.lease.seq() == seq && d.lease.token() == token
        });
        if !unseen.is_empty() {
            return self.release_row(group, seq, held.suspect, now);
        }
        self.crash_rows(
            "group_id = ?5 AND seq = ?6",
            (group, to_sql(seq)),
            EXPIRED,
            // An expired lease proves nothing against the event: no process died.
            false,
        )?;
        self.note_suspect(group, now);
        self.free_keys(group)
    }

    /// Claims and rows that wait in a mailbox and whose lease is half over.
    pub(crate) fn waiting_leases(&self, now: i64) -> (Vec<i64>, Vec<(i64, u64)>) {
        let half_over = |session: u64, until: i64| {
            self.sessions.get(&session).filter(|s| {
                let half = i64::try_from(s.lease.as_micros() / 2).unwrap_or(i64::MAX);
                until.saturating_sub(now) < half
            })
        };
        let claims = self.state.claims.iter().filter(|(id, claim)| {
            half_over(claim.session, claim.until).is_some_and(|s| {
                s.mailbox.holds(|d| {
                    d.lease.slot() == claim_slot(**id)
                        && half_over(claim.session, claim.until_of(d.lease.seq())).is_some()
                })
            })
        });
        let rows = self.state.held.iter().filter(|((group, seq), held)| {
            half_over(held.session, held.until).is_some_and(|s| {
                s.mailbox
                    .holds(|d| d.lease.seq() == *seq && d.lease.slot() == delivery_slot(*group))
            })
        });
        (
            claims.map(|(id, _)| *id).collect(),
            rows.map(|(key, _)| *key).collect(),
        )
    }

    pub(crate) fn leases_to_extend(&self, now: i64) -> bool {
        let (claims, rows) = self.waiting_leases(now);
        !claims.is_empty() || !rows.is_empty()
    }

    /// Extends the leases of deliveries that wait in mailboxes. The consumer extends only what it has
    /// fetched.
    pub(crate) fn extend_waiting(&mut self, now: i64) -> Result<()> {
        let (claims, rows) = self.waiting_leases(now);
        for id in claims {
            let session = self
                .state
                .claims
                .get(&id)
                .and_then(|c| self.sessions.get(&c.session));
            let Some(session) = session else { continue };
            let until = micros(self.clock.now().plus(session.lease));
            let seqs = session
                .mailbox
                .positions(|d| d.lease.slot() == claim_slot(id));
            session
                .mailbox
                .renew(until, |d| d.lease.slot() == claim_slot(id));
            self.extend_claimed(id, &seqs, until)?;
        }
        for (group, seq) in rows {
            let held = self.state.held.get(&(group, seq));
            let Some(session) = held.and_then(|h| self.sessions.get(&h.session)) else {
                continue;
            };
            let until = micros(self.clock.now().plus(session.lease));
            let slot = delivery_slot(group);
            session
                .mailbox
                .renew(until, |d| d.lease.seq() == seq && d.lease.slot() == slot);
            self.extend_row(group, seq, until)?;
        }
        Ok(())
    }

    /// The leases of this process in the file.
    pub(crate) fn leases_in_file(&self, owner: i64) -> Result<LeasesInFile> {
        let doing = |e| from_sqlite("reading the leases again", e);
        let claims = self
            .conn
            .prepare_cached("SELECT id, token, until, started, done FROM claims WHERE owner = ?1")
            .and_then(|mut s| {
                s.query_map([owner], |r| {
                    let claim = ClaimInFile {
                        token: r.get(1)?,
                        until: r.get(2)?,
                        started: r.get::<_, Option<i64>>(3)?.map(seq_from),
                        done: r.get(4)?,
                    };
                    Ok((r.get(0)?, claim))
                })?
                .collect()
            })
            .map_err(doing)?;
        let rows = self
            .conn
            .prepare_cached(
                "SELECT group_id, seq, token, until FROM deliveries WHERE state = 1 AND owner = ?1",
            )
            .and_then(|mut s| {
                s.query_map([owner], |r| {
                    Ok(((r.get(0)?, seq_from(r.get(1)?)), (r.get(2)?, r.get(3)?)))
                })?
                .collect()
            })
            .map_err(doing)?;
        Ok(LeasesInFile { claims, rows })
    }

    /// After a rollback: restores the leases in memory that the file confirms. Deliveries without a lease are
    /// removed from the mailboxes.
    pub(crate) fn restore_leases(&mut self, old: State, file: &LeasesInFile) {
        for (id, mut claim) in old.claims {
            match file.claims.get(&id).filter(|c| c.token == claim.token) {
                Some(stored) => {
                    claim.until = stored.until;
                    claim.started = stored.started.unwrap_or(claim.hi);
                    let done = stored.done.as_deref().unwrap_or_default();
                    claim.progress = Progress::from_bitmap(claim.lo, claim.hi, done);
                    self.state.claims.insert(id, claim);
                }
                None => self.discard(claim.session, |d| d.lease.slot() == claim_slot(id)),
            }
        }
        for ((group, seq), mut held) in old.held {
            match file
                .rows
                .get(&(group, seq))
                .filter(|(token, _)| *token == held.token)
            {
                Some((_, until)) => {
                    held.until = *until;
                    self.state.held.insert((group, seq), held);
                }
                None => {
                    let token = held.token as u64;
                    self.discard(held.session, |d| {
                        d.lease.seq() == seq && d.lease.token() == token
                    });
                }
            }
        }
        for session in self.sessions.values_mut() {
            session.recount();
            session.look_for_unhandled = true;
        }
        for claim in self.state.claims.values() {
            if let Some(session) = self.sessions.get_mut(&claim.session) {
                let open = claim.progress.unfinished_count(claim.hi);
                session.took(usize::try_from(open).unwrap_or(0), open * claim.bytes_each);
            }
        }
        for held in self.state.held.values() {
            if let Some(session) = self.sessions.get_mut(&held.session) {
                session.took(1, held.bytes);
            }
        }
    }

    fn discard(&self, session: u64, which: impl FnMut(&everbus_core::Delivery) -> bool) {
        if let Some(session) = self.sessions.get(&session) {
            session.mailbox.recall(which);
        }
    }
}

/// The leases of this process in the file: claims, and rows with token and end.
pub(crate) struct LeasesInFile {
    claims: HashMap<i64, ClaimInFile>,
    rows: HashMap<(i64, u64), (i64, i64)>,
}

struct ClaimInFile {
    token: i64,
    until: i64,
    started: Option<u64>,
    done: Option<Vec<u8>>,
}
