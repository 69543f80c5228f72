//! Settling deliveries: ack, skip, retry, release, dead-letter. Leases are extended in `deliveries/leases.rs`.

use std::borrow::Cow;
use std::collections::HashSet;

use everbus_core::{Code, Death, Failure, Result, Settlement, Timestamp, Verdict};
use rusqlite::params;

use crate::append::append_follow_ups;
use crate::dead_letters::bury::write_dead_letter;
use crate::deliveries::Deliveries;
use crate::deliveries::claims::note_due;
use crate::deliveries::leases::{Leases, Place, lost};
use crate::deliveries::suspects::note_suspect;
use crate::effect::{Effects, check_effect, run_effect, under_savepoint};
use crate::failpoint;
use crate::inbox::{note_handled, unnote_handled, write_noted};
use crate::outcomes::keep_outcome;
use crate::rows::{
    LeaseParts as _, Seq as _, micros, read_failures, stored_at, to_sql, write_failures,
};
use crate::sql::Sql as _;
use crate::tx::Tx;

impl Deliveries {
    /// Applies settlements. Each one is refused separately if its lease is lost or its effect fails.
    pub(crate) fn settle(
        &mut self,
        tx: &mut Tx,
        effects: &mut Effects,
        settlements: &[Settlement],
    ) -> Result<Vec<Result<()>>> {
        let appended = self.append_together(tx, settlements)?;
        let mut results = Vec::with_capacity(settlements.len());
        for (n, settlement) in settlements.iter().enumerate() {
            let result = match appended.get(n) {
                Some(Some(place)) => self.settle_at(tx, *place, settlement),
                _ => self.settle_one(tx, effects, settlement),
            };
            let refused = match &result {
                Ok(()) => true,
                // Without a transaction, the other settlements are rolled back too.
                Err(_) if tx.conn.is_autocommit() => false,
                Err(e) => is_refusal(e.code()),
            };
            if !refused {
                return result.map(|()| results);
            }
            results.push(result);
        }
        write_noted(tx)?;
        failpoint::hit("after-settle");
        Ok(results)
    }

    /// Appends the follow-ups of all plain acks in one batch, which is much faster than one batch for each. Returns
    /// the places of the settlements whose follow-ups are in the log; none if one of the follow-ups was refused.
    fn append_together(
        &self,
        tx: &mut Tx,
        settlements: &[Settlement],
    ) -> Result<Vec<Option<Place>>> {
        let is_plain = |settlement: &Settlement| {
            settlement.verdict == Verdict::Ack
                && !settlement.inbox
                && settlement.effect.is_none()
                && !settlement.follow_ups.is_empty()
        };
        if settlements.iter().filter(|s| is_plain(s)).nth(1).is_none() {
            return Ok(Vec::new());
        }
        let mut events = Vec::with_capacity(settlements.len());
        let mut appended = vec![None; settlements.len()];
        let mut leases = HashSet::with_capacity(settlements.len());
        for (settlement, appended) in settlements.iter().zip(&mut appended) {
            let lease = &settlement.lease;
            // A lease that is settled twice is refused the second time.
            if is_plain(settlement)
                && leases.insert((lease.slot(), lease.seq()))
                && let Ok(place) = self.leases.find(tx, lease)
            {
                events.extend(settlement.follow_ups.iter().cloned());
                *appended = Some(place);
            }
        }
        match append_follow_ups(tx, events) {
            Ok(()) => Ok(appended),
            // Nothing was appended. Each settlement gets its own answer.
            Err(e) if is_refusal(e.code()) && !tx.conn.is_autocommit() => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }

    fn settle_one(
        &mut self,
        tx: &mut Tx,
        effects: &mut Effects,
        settlement: &Settlement,
    ) -> Result<()> {
        let lease = &settlement.lease;
        let place = self.leases.find(tx, lease)?;
        if settlement.verdict == Verdict::Ack && (settlement.inbox || settlement.effect.is_some()) {
            accompany_ack(tx, &mut self.leases, effects, place, settlement)?;
        } else if !settlement.follow_ups.is_empty() {
            append_follow_ups(tx, settlement.follow_ups.clone())?;
        }
        self.settle_at(tx, place, settlement)
    }

    /// Settles a delivery whose follow-ups are in the log.
    fn settle_at(&mut self, tx: &mut Tx, place: Place, settlement: &Settlement) -> Result<()> {
        let seq = settlement.lease.seq();
        match place {
            Place::Claim(id) => self.settle_claimed(tx, id, seq, &settlement.verdict)?,
            Place::Row(group) => self.settle_row(tx, group, settlement)?,
        }
        tx.watches.touch(seq);
        Ok(())
    }

    fn settle_claimed(&mut self, tx: &mut Tx, id: i64, seq: u64, verdict: &Verdict) -> Result<()> {
        let Some(claim) = self.leases.claims.get_mut(&id) else {
            return Err(lost(seq));
        };
        let (group, session, bytes) = (claim.group, claim.session, claim.bytes_each);
        claim.progress.complete(seq);
        self.leases.touched.push(id);
        self.consumers.settled_in(session, bytes);
        match verdict {
            Verdict::Ack => Ok(()),
            Verdict::Skip { reason } => write_skip(tx, group, seq, reason),
            Verdict::Retry { after, failure } => {
                let due = tx.clock.now().plus(*after);
                insert_waiting(tx, group, seq, 1, due, std::slice::from_ref(failure))
            }
            Verdict::Release { after } => {
                let due = tx.clock.now().plus(*after);
                insert_waiting(tx, group, seq, 0, due, &[])
            }
            Verdict::Dead { failure } => {
                let death = Death::new(1, Vec::new(), failure.clone(), tx.clock.now());
                let type_id = type_of(tx, seq)?;
                write_dead_letter(tx, group, seq, type_id, death)
            }
        }
    }

    fn settle_row(&mut self, tx: &mut Tx, group: i64, settlement: &Settlement) -> Result<()> {
        let seq = settlement.lease.seq();
        let Some(held) = self.leases.drop_held((group, seq)) else {
            return Err(lost(seq));
        };
        self.consumers.settled_in(held.session, held.bytes);
        self.leases.end_isolation((group, seq));
        let now = tx.clock.now();
        match &settlement.verdict {
            verdict @ (Verdict::Ack | Verdict::Skip { .. }) => {
                if let Verdict::Skip { reason } = verdict {
                    write_skip(tx, group, seq, reason)?;
                }
                if held.failed {
                    keep_outcome(tx, group, seq, settlement.ran.as_deref())?;
                }
                remove_row(tx, group, seq)
            }
            Verdict::Retry { after, failure } => {
                let (_, mut failures) = row(tx, group, seq)?;
                failures.push(failure.clone());
                let due = micros(now.plus(*after));
                tx.conn.run(
                    "settling",
                    "UPDATE deliveries SET state = 0, due = ?3, owner = 0, suspect = 0, alone = 0,
                       failures = ?4, updated_at = ?5
                     WHERE group_id = ?1 AND seq = ?2",
                    params![
                        group,
                        to_sql(seq),
                        due,
                        write_failures(&failures),
                        micros(now)
                    ],
                )?;
                note_due(tx, group, due);
                free_keys(tx, group)
            }
            Verdict::Release { after } => {
                let due = micros(now.plus(*after));
                release_row(tx, group, seq, held.suspect, due)
            }
            Verdict::Dead { failure } => {
                let (attempt, failures) = row(tx, group, seq)?;
                let death = Death::new(attempt, failures, failure.clone(), now);
                let type_id = type_of(tx, seq)?;
                write_dead_letter(tx, group, seq, type_id, death)?;
                remove_row(tx, group, seq)
            }
        }
    }
}

/// Does the work that belongs to an ack: the inbox record, the effect, the follow-up events. If the inbox
/// record exists, all of it was done before.
fn accompany_ack(
    tx: &mut Tx,
    leases: &mut Leases,
    effects: &mut Effects,
    place: Place,
    settlement: &Settlement,
) -> Result<()> {
    let seq = settlement.lease.seq();
    let group = match place {
        Place::Row(group) => group,
        Place::Claim(id) => leases.claims.get(&id).ok_or_else(|| lost(seq))?.group,
    };
    if let Some(effect) = &settlement.effect {
        check_effect(effect)?;
        let offence = effects
            .offenders
            .iter()
            .find(|(l, _)| *l == settlement.lease);
        if let Some((_, error)) = offence {
            return Err(error.clone());
        }
        return under_savepoint(tx, |tx| {
            if settlement.inbox && !note_handled(tx, group, seq)? {
                return Ok(());
            }
            let more = run_effect(tx, effects, &settlement.lease, effect)?;
            let mut follow_ups = settlement.follow_ups.clone();
            follow_ups.extend(more);
            append_follow_ups(tx, follow_ups)
        });
    }
    if settlement.follow_ups.is_empty() {
        return note_later(tx, leases, place, group, seq);
    }
    if !note_handled(tx, group, seq)? {
        return Ok(());
    }
    let appended = append_follow_ups(tx, settlement.follow_ups.clone());
    if appended.is_err() {
        unnote_handled(tx, group, seq)?;
    }
    appended
}

/// A plain ack need not know whether the event was handled before, so these inbox records are written
/// together.
fn note_later(tx: &mut Tx, leases: &mut Leases, place: Place, group: i64, seq: u64) -> Result<()> {
    let known = match place {
        Place::Claim(id) => leases.claims.get(&id).and_then(|c| c.key_of(seq)),
        Place::Row(_) => None,
    };
    match known {
        Some(key) => tx.noted.push((group, key)),
        None => {
            note_handled(tx, group, seq)?;
        }
    }
    Ok(())
}

/// Puts a leased row back as if it had not been handed out.
pub(crate) fn release_row(
    tx: &mut Tx,
    group: i64,
    seq: u64,
    suspect: bool,
    due: i64,
) -> Result<()> {
    tx.conn.run(
        "giving an event back",
        "UPDATE deliveries SET state = 0, due = ?3, attempt = attempt - 1, owner = 0,
           suspect = ?4, alone = 0, updated_at = ?5
         WHERE group_id = ?1 AND seq = ?2",
        params![group, to_sql(seq), due, suspect, tx.now()],
    )?;
    if suspect {
        note_suspect(tx, group, due);
    } else {
        note_due(tx, group, due);
    }
    free_keys(tx, group)
}

pub(crate) fn row(tx: &Tx, group: i64, seq: u64) -> Result<(u32, Vec<Failure>)> {
    let (attempt, failures): (u32, Option<String>) = tx.conn.one(
        "reading a delivery",
        "SELECT attempt, failures FROM deliveries WHERE group_id = ?1 AND seq = ?2",
        (group, to_sql(seq)),
    )?;
    Ok((attempt, read_failures(failures.as_deref())?))
}

pub(crate) fn type_of(tx: &mut Tx, seq: u64) -> Result<i64> {
    let sql = "SELECT CAST(type AS INTEGER) FROM log WHERE seq = ?1";
    tx.conn.one("reading the log", sql, [to_sql(seq)])
}

/// Removes a finished row. In an ordered group the next event with its key may go.
pub(crate) fn remove_row(tx: &mut Tx, group: i64, seq: u64) -> Result<()> {
    let doing = "settling";
    let ordered = tx.groups.get(&group).is_some_and(|g| g.ordered);
    let key: Option<String> = if ordered {
        let sql = "SELECT key FROM deliveries WHERE group_id = ?1 AND seq = ?2";
        tx.conn.one(doing, sql, (group, to_sql(seq)))?
    } else {
        None
    };
    let sql = "DELETE FROM deliveries WHERE group_id = ?1 AND seq = ?2";
    tx.conn.run(doing, sql, (group, to_sql(seq)))?;
    if let Some(key) = key {
        let sql = "UPDATE deliveries SET state = 0 WHERE group_id = ?1 AND state = 2 AND seq =
                   (SELECT min(seq) FROM deliveries WHERE group_id = ?1 AND key = ?2)";
        let freed = tx.conn.change(doing, sql, params![group, key])?;
        if freed > 0 {
            note_due(tx, group, tx.now());
        }
    }
    Ok(())
}

/// In an ordered group, releases the first event of every key that has none in flight. Needed when an
/// event is no longer in flight but not finished.
pub(crate) fn free_keys(tx: &mut Tx, group: i64) -> Result<()> {
    if !tx.groups.get(&group).is_some_and(|g| g.ordered) {
        return Ok(());
    }
    let sql = "UPDATE deliveries AS d SET state = 0 WHERE d.group_id = ?1 AND d.state = 2
               AND NOT EXISTS (SELECT 1 FROM deliveries other WHERE other.group_id = ?1
                 AND other.key = d.key AND other.seq <> d.seq
                 AND (other.seq < d.seq OR other.state = 1))";
    let freed = tx.conn.change("ordering by key", sql, [group])?;
    if freed > 0 {
        note_due(tx, group, tx.now());
    }
    Ok(())
}

/// The key of an event, if the group is ordered by it.
pub(crate) fn key_at(tx: &mut Tx, group: i64, seq: u64) -> Result<Option<String>> {
    let group = tx.groups.known(group)?;
    if !group.ordered {
        return Ok(None);
    }
    let stored = stored_at(&tx.conn, seq, &mut tx.log.type_names)?;
    Ok(stored.and_then(|s| s.record.event.ordering_key().map(Cow::into_owned)))
}

/// Inserts a waiting row.
pub(crate) fn insert_waiting(
    tx: &mut Tx,
    group: i64,
    seq: u64,
    attempt: u32,
    due: Timestamp,
    failures: &[Failure],
) -> Result<()> {
    let (type_id, key) = (type_of(tx, seq)?, key_at(tx, group, seq)?);
    let sql = "INSERT OR REPLACE INTO deliveries
                 (group_id, seq, state, due, attempt, type, key, failures, updated_at)
               VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6, ?7, ?8)";
    let (seq, at, failures) = (to_sql(seq), micros(due), write_failures(failures));
    let values = params![group, seq, at, attempt, type_id, key, failures, tx.now()];
    tx.conn.run("setting an event aside", sql, values)?;
    note_due(tx, group, micros(due));
    Ok(())
}

pub(crate) fn write_skip(tx: &mut Tx, group: i64, seq: u64, reason: &str) -> Result<()> {
    let doing = "recording a skip";
    let sql = "INSERT OR REPLACE INTO skips (group_id, seq, reason, at) VALUES (?1, ?2, ?3, ?4)";
    tx.conn
        .run(doing, sql, params![group, to_sql(seq), reason, tx.now()])
}

/// Whether an error refuses one settlement and leaves the others alone.
fn is_refusal(code: Code) -> bool {
    matches!(
        code,
        Code::LeaseLost
            | Code::IdReused
            | Code::InvalidAttribute
            | Code::EffectFailed
            | Code::Unsupported
    )
}
