//! Leases that expire, and leases of deliveries that wait to be fetched.

use everbus_core::{Failure, FailureKind, Result, Timestamp};

use crate::deliveries::Deliveries;
use crate::deliveries::claims::{claim_slot, delivery_slot};
use crate::deliveries::consumers::Renewal;
use crate::deliveries::deliver::EXPIRED;
use crate::deliveries::recover::{after_crashes, crash_claims, crash_rows};
use crate::deliveries::suspects::{insert_suspect, note_suspect};
use crate::rows::{LeaseParts as _, Seq as _, micros, to_sql};
use crate::settle::{free_keys, release_row};
use crate::tx::Tx;

impl Deliveries {
    pub(crate) fn leases_ended(&self, now: i64) -> bool {
        !self.consumers.sessions.is_empty()
            && (self.leases.foreign_until.is_some_and(|until| until <= now)
                || self
                    .leases
                    .claims
                    .values()
                    .any(|claim| claim.may_have_ended(now))
                || self.leases.held.values().any(|held| held.until <= now))
    }

    /// Ends leases whose events were not settled in time.
    pub(crate) fn end_leases(&mut self, tx: &mut Tx, now: i64) -> Result<()> {
        let ended: Vec<i64> = self
            .leases
            .claims
            .iter()
            .filter(|(_, c)| c.may_have_ended(now))
            .map(|(id, _)| *id)
            .collect();
        for id in ended {
            self.end_claim(tx, id, now)?;
        }
        let ended: Vec<(i64, u64)> = self
            .leases
            .held
            .iter()
            .filter(|(_, h)| h.until <= now)
            .map(|(key, _)| *key)
            .collect();
        for key in ended {
            self.end_row(tx, key, now)?;
        }
        if self.leases.foreign_until.is_some_and(|until| until <= now) {
            let theirs = (self.leases.owner, now);
            crash_rows(tx, "owner <> ?5 AND until <= ?6", theirs, EXPIRED, false)?;
            crash_claims(tx, "owner NOT IN (0, ?1) AND until <= ?2", theirs)?;
            self.leases.find_foreign_leases(&tx.conn)?;
            after_crashes(tx)?;
        }
        Ok(())
    }

    /// Ends expired leases in a claim of this process. Events that were not fetched go back to waiting, because no
    /// handler has begun; the others count as a failed attempt.
    fn end_claim(&mut self, tx: &mut Tx, id: i64, now: i64) -> Result<()> {
        let Some(claim) = self.leases.claims.get(&id) else {
            return Ok(());
        };
        let (group, session, ended) = (claim.group, claim.session, claim.ended(now));
        let bytes = claim.bytes_each * ended.len() as u64;
        let slot = claim_slot(id);
        if let Some(session) = self.consumers.sessions.get_mut(&session) {
            session.gave(ended.len(), bytes);
        }
        let unseen = self.consumers.recall(session, |d| {
            d.lease.slot() == slot && ended.binary_search(&d.lease.seq()).is_ok()
        });
        self.leases.give_back(tx, group, &unseen)?;
        self.leases.touched.push(id);
        for seq in ended {
            let Some(claim) = self.leases.claims.get_mut(&id) else {
                break;
            };
            if claim.progress.complete(seq) {
                let at = Timestamp::from_micros(now);
                let failure = Failure::new(1, at, FailureKind::Crash, EXPIRED);
                insert_suspect(tx, group, seq, 1, &[failure], now)?;
            }
        }
        Ok(())
    }

    fn end_row(&mut self, tx: &mut Tx, (group, seq): (i64, u64), now: i64) -> Result<()> {
        let Some(held) = self.leases.drop_held((group, seq)) else {
            return Ok(());
        };
        self.leases.end_isolation((group, seq));
        if let Some(session) = self.consumers.sessions.get_mut(&held.session) {
            session.gave(1, held.bytes);
        }
        let token = held.token as u64;
        let unseen = self.consumers.recall(held.session, |d| {
            d.lease.seq() == seq && d.lease.token() == token
        });
        if !unseen.is_empty() {
            return release_row(tx, group, seq, held.suspect, now);
        }
        crash_rows(
            tx,
            "group_id = ?5 AND seq = ?6",
            (group, to_sql(seq)),
            EXPIRED,
            // Not `alone`: no process died, so an expired lease does not prove that the event kills its process.
            false,
        )?;
        note_suspect(tx, group, now);
        free_keys(tx, group)
    }

    /// Claims and rows that wait in a mailbox and have less than half of their lease left.
    fn waiting_leases(&self, now: i64) -> (Vec<i64>, Vec<(i64, u64)>) {
        let half_over = |session: u64, until: i64| {
            self.consumers.sessions.get(&session).filter(|s| {
                let half = i64::try_from(s.lease.as_micros() / 2).unwrap_or(i64::MAX);
                until.saturating_sub(now) < half
            })
        };
        let claims = self.leases.claims.iter().filter(|(id, claim)| {
            half_over(claim.session, claim.until).is_some_and(|s| {
                s.mailbox.holds(|d| {
                    d.lease.slot() == claim_slot(**id)
                        && half_over(claim.session, claim.until_of(d.lease.seq())).is_some()
                })
            })
        });
        let rows = self.leases.held.iter().filter(|((group, seq), held)| {
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

    /// Extends the leases of deliveries that wait in mailboxes. The lease keeper of the runtime extends only
    /// deliveries that were fetched.
    pub(crate) fn extend_waiting(&mut self, tx: &mut Tx, now: i64) -> Result<()> {
        let (claims, rows) = self.waiting_leases(now);
        for id in claims {
            let session = self
                .leases
                .claims
                .get(&id)
                .and_then(|c| self.consumers.sessions.get(&c.session));
            let Some(session) = session else { continue };
            let until = micros(tx.clock.now().plus(session.lease));
            let seqs = session
                .mailbox
                .positions(|d| d.lease.slot() == claim_slot(id));
            self.consumers.renewals.push(Renewal {
                mailbox: session.mailbox.clone(),
                slot: claim_slot(id),
                seq: None,
                until,
            });
            self.leases.extend_claimed(tx, id, &seqs, until)?;
        }
        for (group, seq) in rows {
            let held = self.leases.held.get(&(group, seq));
            let Some(session) = held.and_then(|h| self.consumers.sessions.get(&h.session)) else {
                continue;
            };
            let until = micros(tx.clock.now().plus(session.lease));
            self.consumers.renewals.push(Renewal {
                mailbox: session.mailbox.clone(),
                slot: delivery_slot(group),
                seq: Some(seq),
                until,
            });
            self.leases.extend_row(tx, group, seq, until)?;
        }
        Ok(())
    }
}
