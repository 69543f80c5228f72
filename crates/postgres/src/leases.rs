//! Leases that end: their time is over, their owner is dead, or the engine is closed in order.
//!
//! The events of an ended lease become rows of `deliveries` that are *suspect*: the attempt counts, and they
//! are handed out one at a time, so that an event that kills its process is told from those that only ran
//! beside it. An event that was alone in flight when its owner died is known to be the cause.

use std::time::Duration;

use everbus_core::{Failure, FailureKind, Lease, Result, Timestamp};

use crate::Postgres;
use crate::groups::{Group, lock};
use crate::pool::{Sql, Tx, transaction};
use crate::ranges::Ranges;
use crate::rows::{LEASED, get, read_failures, seq_from, to_sql, write_failures};

/// Failure text of an event whose process died.
pub(crate) const CRASHED: &str = "the process died while the event was in flight";
/// Failure text of an event whose lease expired.
pub(crate) const EXPIRED: &str = "the lease ended before the event was settled";
/// Failure text of an event whose handler did not finish before the shutdown.
const ABANDONED: &str = "the bus was shut down before the handler finished";

/// Which leases end, and why.
#[derive(Clone, Copy)]
enum Ended {
    /// Their time is over.
    Expired,
    /// Their owner is dead. `alone`: it had only one event in flight.
    Dead { owner: i64, alone: bool },
    /// Their owner closes in order.
    Left { owner: i64 },
}

impl Ended {
    fn text(self) -> &'static str {
        match self {
            Self::Expired => EXPIRED,
            Self::Dead { .. } => CRASHED,
            Self::Left { .. } => ABANDONED,
        }
    }

    /// The condition, with the value for `$2`.
    fn which(self, now: i64) -> (&'static str, i64) {
        match self {
            Self::Expired => ("until <= $2", now),
            Self::Dead { owner, .. } | Self::Left { owner } => ("owner = $2", owner),
        }
    }

    /// An expired lease does not prove that the event killed its process, so `alone` is not set for it.
    fn failure(self, attempt: u32, at: Timestamp) -> Failure {
        let mut failure = Failure::new(attempt, at, FailureKind::Crash, self.text());
        failure.alone = matches!(self, Self::Dead { alone: true, .. });
        failure
    }
}

/// Ends the expired leases of a locked group. Returns whether there were any.
pub(crate) async fn end_expired(db: &impl Sql, group: &Group, now: Timestamp) -> Result<bool> {
    end(db, group.id, Ended::Expired, now).await
}

async fn end(db: &impl Sql, group: i64, ended: Ended, now: Timestamp) -> Result<bool> {
    let doing = "ending leases";
    let at = now.as_micros();
    let (which, value) = ended.which(at);
    let failures = write_failures(&[ended.failure(1, now)]);
    // The events of claims. Events of ordered groups are never in claims, so they need no key here.
    let sql = format!(
        "WITH gone AS (DELETE FROM everbus.claims WHERE group_id = $1 AND {which} RETURNING lo, hi, done)
         INSERT INTO everbus.deliveries
           (group_id, seq, state, due, attempt, type, suspect, crashes, failures, updated_at)
         SELECT $1, l.seq, 0, $3, 1, l.type, true, 1, $4, $3
         FROM gone g JOIN everbus.log l ON l.seq BETWEEN g.lo AND g.hi AND NOT g.done @> l.seq
         ON CONFLICT (group_id, seq) DO NOTHING"
    );
    let claimed = db
        .execute(doing, &sql, &[&group, &value, &at, &failures])
        .await?;
    let sql = format!(
        "SELECT seq, attempt, failures FROM everbus.deliveries
         WHERE group_id = $1 AND state = 1 AND {which} FOR UPDATE"
    );
    let rows = db.query(doing, &sql, &[&group, &value]).await?;
    let mut seqs = Vec::with_capacity(rows.len());
    let mut texts = Vec::with_capacity(rows.len());
    for row in &rows {
        let attempt = u32::try_from(get::<i32>(row, 1)?).unwrap_or(0);
        let mut failures = read_failures(get(row, 2)?).unwrap_or_default();
        failures.push(ended.failure(attempt, now));
        seqs.push(get::<i64>(row, 0)?);
        texts.push(write_failures(&failures));
    }
    if !seqs.is_empty() {
        let sql =
            "UPDATE everbus.deliveries d SET state = 0, due = $2, owner = 0, token = 0, until = 0,
                     suspect = true, crashes = d.crashes + 1, failures = x.failures, updated_at = $2
                   FROM unnest($3::bigint[], $4::text[]) AS x (seq, failures)
                   WHERE d.group_id = $1 AND d.seq = x.seq";
        db.execute(doing, sql, &[&group, &at, &seqs, &texts])
            .await?;
    }
    Ok(claimed > 0 || !rows.is_empty())
}

impl Postgres {
    /// Ends every lease whose time is over, in all groups. Cheap if there is none.
    pub(crate) async fn end_leases(&self) -> Result<()> {
        self.returning.done().await;
        let (now, doing) = (self.now(), "ending leases");
        let sql = "SELECT group_id FROM everbus.claims WHERE until <= $1
                   UNION SELECT group_id FROM everbus.deliveries WHERE state = 1 AND until <= $1";
        let groups: Vec<i64> = {
            let conn = self.conn().await?;
            let rows = conn.query(doing, sql, &[&now.as_micros()]).await?;
            rows.iter().map(|row| get(row, 0)).collect::<Result<_>>()?
        };
        for group in groups {
            transaction!(self.pool, doing, |tx| {
                if let Some(locked) = lock(tx, group).await? {
                    end_expired(tx, &locked.group, now).await?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Takes over from owners that are dead, and removes their ephemeral groups. Returns whether there were
    /// any.
    pub(crate) async fn recover(&self) -> Result<bool> {
        let doing = "looking for dead owners";
        let unlocked: Vec<i64> = {
            let conn = self.conn().await?;
            let rows = conn
                .query(doing, "SELECT everbus.unlocked_owners()", &[])
                .await?;
            rows.iter().map(|row| get(row, 0)).collect::<Result<_>>()?
        };
        let dead = self.session().dead(unlocked, self.options.owner_grace);
        for owner in &dead {
            tracing::warn!(target: "everbus::postgres", owner, "taking over from an owner that is gone");
            self.take_over(*owner).await?;
        }
        if !dead.is_empty() {
            self.bell.ring();
        }
        Ok(!dead.is_empty())
    }

    async fn take_over(&self, owner: i64) -> Result<()> {
        let (now, doing) = (self.now(), "taking over");
        transaction!(self.pool, doing, |tx| {
            let sql = "SELECT id FROM everbus.owners WHERE id = $1 FOR UPDATE";
            if tx.first(doing, sql, &[&owner]).await?.is_none() {
                return Ok(());
            }
            // If the owner is back, it holds its lock.
            let sql = "SELECT pg_try_advisory_xact_lock(everbus.owner_key($1))";
            if !get::<bool>(&tx.one(doing, sql, &[&owner]).await?, 0)? {
                return Ok(());
            }
            remove_ephemeral(tx, owner).await?;
            let groups = groups_of(tx, owner).await?;
            for group in &groups {
                lock(tx, *group).await?;
            }
            let in_flight = in_flight_of(tx, owner).await?;
            let ended = Ended::Dead {
                owner,
                alone: in_flight == 1,
            };
            for group in groups {
                end(tx, group, ended, now).await?;
            }
            strike(tx, owner).await
        })
    }

    /// Gives up all leases and the ephemeral groups of this engine at an orderly end.
    pub(crate) async fn leave(&self) -> Result<()> {
        self.returning.done().await;
        let owner = self.session().owner();
        if owner == 0 {
            return Ok(());
        }
        let (now, doing) = (self.now(), "leaving");
        transaction!(self.pool, doing, |tx| {
            remove_ephemeral(tx, owner).await?;
            let groups = groups_of(tx, owner).await?;
            for group in &groups {
                lock(tx, *group).await?;
            }
            for group in groups {
                end(tx, group, Ended::Left { owner }, now).await?;
            }
            strike(tx, owner).await
        })
    }

    /// Extends leases: each ends `by` from now.
    pub(crate) async fn extend_leases(
        &self,
        leases: &[Lease],
        by: Duration,
    ) -> Result<Vec<Result<()>>> {
        self.check_open()?;
        let now = self.now();
        let until = now.plus(by);
        let owner = self.session().owner();
        let answers = transaction!(self.pool, "extending leases", |tx| {
            extend(tx, leases, owner, now.as_micros(), until.as_micros()).await
        })?;
        for (lease, answer) in leases.iter().zip(&answers) {
            let until = answer.is_ok().then_some(until.as_micros());
            self.seats.extended(lease, until);
        }
        Ok(answers)
    }
}

async fn extend(
    tx: &Tx<'_>,
    leases: &[Lease],
    owner: i64,
    now: i64,
    until: i64,
) -> Result<Vec<Result<()>>> {
    let doing = "extending leases";
    let held = crate::settle::Held::read(tx, leases, owner, now).await?;
    let mut answers = Vec::with_capacity(leases.len());
    let (mut groups, mut seqs) = (Vec::new(), Vec::new());
    let mut claimed: std::collections::BTreeMap<i64, Vec<u64>> = std::collections::BTreeMap::new();
    for lease in leases {
        answers.push(match held.place(lease) {
            None => Err(crate::settle::lost(lease)),
            Some(crate::settle::Place::Claim(token)) => {
                claimed
                    .entry(token)
                    .or_default()
                    .push(lease.position().place());
                Ok(())
            }
            Some(crate::settle::Place::Row(group, seq)) => {
                groups.push(group);
                seqs.push(to_sql(seq));
                Ok(())
            }
        });
    }
    if !groups.is_empty() {
        let sql = "UPDATE everbus.deliveries d SET until = $1
                   FROM unnest($2::bigint[], $3::bigint[]) AS x (group_id, seq)
                   WHERE d.group_id = x.group_id AND d.seq = x.seq AND d.state = 1";
        tx.execute(doing, sql, &[&until, &groups, &seqs]).await?;
    }
    for (token, wanted) in claimed {
        let Some(claim) = held.claim(token) else {
            continue;
        };
        let open = claim.done.gaps(claim.lo, claim.hi);
        let open: u64 = open.iter().map(|(first, last)| last - first + 1).sum();
        let distinct: std::collections::BTreeSet<u64> = wanted.into_iter().collect();
        if distinct.len() as u64 == open {
            let sql = "UPDATE everbus.claims SET until = $2 WHERE token = $1";
            tx.execute(doing, sql, &[&token, &until]).await?;
            continue;
        }
        // Only some events of the claim are extended. These get rows of their own.
        let seqs: Vec<i64> = distinct.iter().map(|seq| to_sql(*seq)).collect();
        let sql = "INSERT INTO everbus.deliveries
                     (group_id, seq, state, due, attempt, type, owner, token, until, updated_at)
                   SELECT c.group_id, l.seq, $2, $3, 1, l.type, c.owner, c.token, $4, $3
                   FROM everbus.claims c JOIN everbus.log l ON l.seq = ANY ($5) WHERE c.token = $1
                   ON CONFLICT (group_id, seq) DO NOTHING";
        tx.execute(doing, sql, &[&token, &LEASED, &now, &until, &seqs])
            .await?;
        let done: Ranges = distinct
            .into_iter()
            .fold(claim.done.clone(), |mut done, seq| {
                done.add(seq);
                done
            });
        let sql = "UPDATE everbus.claims SET done = $2::text::int8multirange WHERE token = $1";
        tx.execute(doing, sql, &[&token, &done.to_string()]).await?;
    }
    Ok(answers)
}

/// The groups in which an owner has something in flight, in the order in which they are locked.
async fn groups_of(db: &impl Sql, owner: i64) -> Result<Vec<i64>> {
    let sql = "SELECT group_id FROM everbus.claims WHERE owner = $1
               UNION SELECT group_id FROM everbus.deliveries WHERE state = 1 AND owner = $1
               ORDER BY 1";
    let rows = db
        .query("reading what an owner holds", sql, &[&owner])
        .await?;
    rows.iter().map(|row| get(row, 0)).collect()
}

/// How many events an owner has in flight.
async fn in_flight_of(db: &impl Sql, owner: i64) -> Result<u64> {
    let sql = "SELECT (SELECT count(*) FROM everbus.deliveries WHERE state = 1 AND owner = $1)
               + (SELECT count(*) FROM everbus.claims c
                  CROSS JOIN LATERAL (SELECT l.seq FROM everbus.log l
                    WHERE l.seq BETWEEN c.lo AND c.hi AND NOT c.done @> l.seq ORDER BY l.seq) l
                  WHERE c.owner = $1)";
    let row = db
        .one("counting what an owner holds", sql, &[&owner])
        .await?;
    Ok(seq_from(get(&row, 0)?))
}

async fn strike(db: &impl Sql, owner: i64) -> Result<()> {
    let sql = "DELETE FROM everbus.owners WHERE id = $1";
    db.execute("striking an owner", sql, &[&owner])
        .await
        .map(drop)
}

/// Removes the ephemeral groups of an owner.
pub(crate) async fn remove_ephemeral(db: &impl Sql, owner: i64) -> Result<()> {
    let sql = "SELECT id FROM everbus.groups WHERE owner = $1 ORDER BY id FOR UPDATE";
    let rows = db
        .query("removing ephemeral groups", sql, &[&owner])
        .await?;
    for row in rows {
        crate::declare::remove_numbered(db, get(&row, 0)?).await?;
    }
    Ok(())
}
