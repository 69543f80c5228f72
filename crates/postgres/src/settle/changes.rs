//! What settlements change, written with few statements.

use everbus_core::{Death, Event, Failure, Ran, Result, Settlement, Timestamp, Verdict};

use super::held::{Held, LeasedRow, Place};
use crate::Postgres;
use crate::bury::{bury, write_skips};
use crate::outcomes;
use crate::pool::{Sql, Tx};
use crate::rows::{read_failures, to_sql, write_failures};

/// An event that failed before it ended: group, position, attempts, failures, the final attempt.
type Ended = (i64, u64, u32, Vec<Failure>, Option<Ran>);

/// What settlements change, collected so that few statements are needed.
#[derive(Default)]
pub(super) struct Changes {
    /// Events of claims that wait now: group, position, attempts, due, failures.
    set_aside: Vec<(i64, u64, u32, i64, Option<String>)>,
    /// Rows that are finished.
    finished: Vec<(i64, u64)>,
    /// Rows that wait again: group, position, whether the attempt counts, due, new failures.
    put_back: Vec<(i64, u64, bool, i64, Option<String>)>,
    skips: Vec<(i64, u64, String)>,
    outcomes: Vec<Ended>,
    deaths: Vec<(i64, u64, Death)>,
}

/// Notes what a settlement changes.
pub(super) fn decide(
    held: &mut Held,
    changes: &mut Changes,
    settlement: &Settlement,
    now: Timestamp,
) {
    let lease = &settlement.lease;
    match held.place(lease) {
        Some(Place::Claim(token)) => {
            let Some(claim) = held.claims.get_mut(&token) else {
                return;
            };
            claim.done.add(lease.position().place());
            claim.changed = true;
            let place = (claim.group, lease.position().place());
            changes.settle_claimed(place, &settlement.verdict, now);
        }
        Some(Place::Row(group, seq)) => {
            let Some((_, row)) = held.rows.remove(&(group, seq)) else {
                return;
            };
            changes.settle_row((group, seq), &row, settlement, now);
        }
        None => {}
    }
}

impl Changes {
    /// Settles a first attempt, whose event is in a claim.
    fn settle_claimed(&mut self, (group, seq): (i64, u64), verdict: &Verdict, now: Timestamp) {
        match verdict {
            Verdict::Ack => {}
            Verdict::Skip { reason } => self.skips.push((group, seq, reason.clone())),
            Verdict::Retry { after, failure } => {
                let failures = write_failures(std::slice::from_ref(failure));
                let due = now.plus(*after).as_micros();
                self.set_aside.push((group, seq, 1, due, failures));
            }
            Verdict::Release { after } => {
                let due = now.plus(*after).as_micros();
                self.set_aside.push((group, seq, 0, due, None));
            }
            Verdict::Dead { failure } => {
                let death = Death::new(1, Vec::new(), failure.clone(), now);
                self.deaths.push((group, seq, death));
            }
        }
    }

    fn settle_row(
        &mut self,
        (group, seq): (i64, u64),
        row: &LeasedRow,
        settlement: &Settlement,
        now: Timestamp,
    ) {
        // Damaged earlier failures must not stop the event.
        let failures = || read_failures(row.failures.as_deref()).unwrap_or_default();
        match &settlement.verdict {
            verdict @ (Verdict::Ack | Verdict::Skip { .. }) => {
                if let Verdict::Skip { reason } = verdict {
                    self.skips.push((group, seq, reason.clone()));
                }
                if row.failures.is_some() || row.was_dead {
                    let ran = settlement.ran.as_deref().cloned();
                    self.outcomes
                        .push((group, seq, row.attempt, failures(), ran));
                }
                self.finished.push((group, seq));
            }
            Verdict::Retry { after, failure } => {
                let mut failures = failures();
                failures.push(failure.clone());
                let due = now.plus(*after).as_micros();
                self.put_back
                    .push((group, seq, true, due, write_failures(&failures)));
            }
            Verdict::Release { after } => {
                let due = now.plus(*after).as_micros();
                self.put_back
                    .push((group, seq, false, due, row.failures.clone()));
            }
            Verdict::Dead { failure } => {
                let death = Death::new(row.attempt, failures(), failure.clone(), now);
                self.deaths.push((group, seq, death));
                self.finished.push((group, seq));
            }
        }
    }

    /// Writes everything. Returns the events that report dead letters.
    pub(super) async fn write(
        self,
        engine: &Postgres,
        tx: &Tx<'_>,
        now: Timestamp,
    ) -> Result<Vec<Event>> {
        let at = now.as_micros();
        set_aside(tx, self.set_aside, at).await?;
        finish(tx, &self.finished).await?;
        put_back(tx, self.put_back, at).await?;
        write_skips(tx, &self.skips, at).await?;
        for (group, seq, attempts, failures, ran) in self.outcomes {
            outcomes::keep(tx, (group, seq), (attempts, failures), ran.as_ref(), now).await?;
        }
        let mut notices = Vec::new();
        for (group, seq, death) in self.deaths {
            notices.extend(bury(engine, tx, group, seq, death).await?);
        }
        Ok(notices)
    }
}

/// Gives events of claims rows of their own, in which they wait. Events of ordered groups are never in claims,
/// so these need no key.
async fn set_aside(
    db: &impl Sql,
    rows: Vec<(i64, u64, u32, i64, Option<String>)>,
    now: i64,
) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let groups: Vec<i64> = rows.iter().map(|row| row.0).collect();
    let seqs: Vec<i64> = rows.iter().map(|row| to_sql(row.1)).collect();
    let attempts: Vec<i32> = rows
        .iter()
        .map(|row| i32::try_from(row.2).unwrap_or(0))
        .collect();
    let due: Vec<i64> = rows.iter().map(|row| row.3).collect();
    let failures: Vec<Option<String>> = rows.into_iter().map(|row| row.4).collect();
    let sql = "INSERT INTO everbus.deliveries
                 (group_id, seq, state, due, attempt, type, failures, updated_at)
               SELECT x.group_id, x.seq, 0, x.due, x.attempt, l.type, x.failures, $6
               FROM unnest($1::bigint[], $2::bigint[], $3::integer[], $4::bigint[], $5::text[])
                 AS x (group_id, seq, attempt, due, failures)
               JOIN everbus.log l ON l.seq = x.seq ON CONFLICT (group_id, seq) DO NOTHING";
    db.execute(
        "setting events aside",
        sql,
        &[&groups, &seqs, &attempts, &due, &failures, &now],
    )
    .await
    .map(drop)
}

async fn finish(db: &impl Sql, rows: &[(i64, u64)]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let groups: Vec<i64> = rows.iter().map(|row| row.0).collect();
    let seqs: Vec<i64> = rows.iter().map(|row| to_sql(row.1)).collect();
    let sql = "DELETE FROM everbus.deliveries d
               USING unnest($1::bigint[], $2::bigint[]) AS x (group_id, seq)
               WHERE d.group_id = x.group_id AND d.seq = x.seq";
    db.execute("settling", sql, &[&groups, &seqs])
        .await
        .map(drop)
}

async fn put_back(
    db: &impl Sql,
    rows: Vec<(i64, u64, bool, i64, Option<String>)>,
    now: i64,
) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let groups: Vec<i64> = rows.iter().map(|row| row.0).collect();
    let seqs: Vec<i64> = rows.iter().map(|row| to_sql(row.1)).collect();
    let counts: Vec<bool> = rows.iter().map(|row| row.2).collect();
    let due: Vec<i64> = rows.iter().map(|row| row.3).collect();
    let failures: Vec<Option<String>> = rows.into_iter().map(|row| row.4).collect();
    // A released event stays suspect. An event whose attempt has ended is no longer suspect.
    let sql =
        "UPDATE everbus.deliveries d SET state = 0, due = x.due, owner = 0, token = 0, until = 0,
                 attempt = d.attempt - CASE WHEN x.counts THEN 0 ELSE 1 END,
                 suspect = d.suspect AND NOT x.counts, failures = x.failures, updated_at = $6
               FROM unnest($1::bigint[], $2::bigint[], $3::boolean[], $4::bigint[], $5::text[])
                 AS x (group_id, seq, counts, due, failures)
               WHERE d.group_id = x.group_id AND d.seq = x.seq AND d.state = 1";
    db.execute(
        "settling",
        sql,
        &[&groups, &seqs, &counts, &due, &failures, &now],
    )
    .await
    .map(drop)
}
