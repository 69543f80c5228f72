//! Settling deliveries: ack, skip, retry, release, dead-letter.
//!
//! Calls that wait at the same time share a transaction. A settlement with an effect has one of its own, so
//! that the effect of one handler cannot undo the acks of others.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Weak;
use std::time::Instant;

use everbus_core::{
    Class, Code, Death, Error, Event, Failure, Lease, Ran, Result, Settlement, Timestamp, Verdict,
};
use tokio::sync::{mpsc, oneshot};

use crate::Postgres;
use crate::append::{append_in, check_sets, conflict};
use crate::bury::{bury, tell, write_skips};
use crate::effect;
use crate::outcomes;
use crate::pool::{Sql, Tx, transaction};
use crate::ranges::Ranges;
use crate::rows::{get, get_seq, read_failures, to_sql, write_failures};

/// At most this many settlements share a transaction.
const MOST: usize = 2000;

/// A waiting call.
pub(crate) struct Job {
    settlements: Vec<Settlement>,
    reply: oneshot::Sender<Result<Vec<Result<()>>>>,
}

/// The queue of waiting calls.
pub(crate) type Queue = mpsc::UnboundedSender<Job>;

/// The error of a lease that is not held.
pub(crate) fn lost(lease: &Lease) -> Error {
    Error::new(
        Code::LeaseLost,
        format!(
            "the lease on event {} has ended or another consumer has it",
            lease.position()
        ),
    )
    .hint("the event is delivered again; make handlers idempotent or raise the timeout")
}

/// The group and the fencing token of a lease.
pub(crate) fn parts(lease: &Lease) -> (i64, i64) {
    let [group, token] = lease.words();
    (group.cast_signed(), token.cast_signed())
}

impl Postgres {
    pub(crate) async fn settle_batch(
        &self,
        settlements: Vec<Settlement>,
    ) -> Result<Vec<Result<()>>> {
        self.check_open()?;
        if settlements.is_empty() {
            return Ok(Vec::new());
        }
        let (reply, answer) = oneshot::channel();
        let sent = self.settlements.send(Job { settlements, reply });
        sent.map_err(|_| Error::shutdown())?;
        answer.await.map_err(|_| Error::shutdown())?
    }
}

/// Serves the waiting calls until the engine is gone.
pub(crate) async fn serve(engine: Weak<Postgres>, mut queue: mpsc::UnboundedReceiver<Job>) {
    while let Some(first) = queue.recv().await {
        let Some(engine) = engine.upgrade() else {
            return;
        };
        let mut count = first.settlements.len();
        let mut jobs = vec![first];
        while count < MOST {
            let Ok(next) = queue.try_recv() else { break };
            count += next.settlements.len();
            jobs.push(next);
        }
        engine.settle_jobs(jobs).await;
    }
}

impl Postgres {
    async fn settle_jobs(&self, jobs: Vec<Job>) {
        let began = Instant::now();
        let mut together = Vec::new();
        let mut alone = Vec::new();
        for (at, job) in jobs.iter().enumerate() {
            for (index, settlement) in job.settlements.iter().enumerate() {
                let effect = settlement.effect.as_ref();
                let runs = effect.is_some_and(|e| effect::check(e).is_ok());
                if runs && settlement.verdict == Verdict::Ack {
                    alone.push(((at, index), settlement));
                } else {
                    together.push(((at, index), settlement));
                }
            }
        }
        let mut answers: Vec<Vec<Option<Result<()>>>> = jobs
            .iter()
            .map(|job| job.settlements.iter().map(|_| None).collect())
            .collect();
        let mut failed: HashMap<usize, Error> = HashMap::new();
        if !together.is_empty() {
            let settlements: Vec<&Settlement> = together.iter().map(|(_, s)| *s).collect();
            match self.settle_together(&settlements).await {
                Ok(results) => {
                    for (((at, index), _), result) in together.iter().zip(results) {
                        answers[*at][*index] = Some(result);
                    }
                }
                Err(error) => {
                    for ((at, _), _) in &together {
                        failed.insert(*at, error.clone());
                    }
                }
            }
        }
        for ((at, index), settlement) in alone {
            let result = self.settle_together(&[settlement]).await;
            answers[at][index] = Some(match result {
                Ok(mut results) => results.pop().unwrap_or(Ok(())),
                Err(error) => Err(error),
            });
        }
        let step = began.elapsed();
        for (at, (job, answers)) in jobs.into_iter().zip(answers).enumerate() {
            let answer = match failed.remove(&at) {
                Some(error) => Err(error),
                None => Ok(answers.into_iter().flatten().collect()),
            };
            if let Ok(results) = &answer {
                for (settlement, result) in job.settlements.iter().zip(results) {
                    self.seats.settled(&settlement.lease, result, step);
                }
            }
            let _ = job.reply.send(answer);
        }
        self.bell.ring_here();
    }

    /// Applies settlements in one transaction; each may be refused on its own.
    async fn settle_together(&self, settlements: &[&Settlement]) -> Result<Vec<Result<()>>> {
        let types: Vec<_> = settlements
            .iter()
            .flat_map(|s| s.follow_ups.iter().map(|e| e.type_arc().clone()))
            .collect();
        if !types.is_empty() {
            // Outside of the transaction, so that new types are known for good.
            let conn = self.pool.get().await?;
            self.types.intern(&*conn, &types, true).await?;
        }
        let now = self.now();
        let done = transaction!(self.pool, "settling", |tx| {
            apply(self, tx, settlements, now, now.as_micros()).await
        });
        match done {
            Ok((answers, appended)) => {
                if appended {
                    self.bell.ring();
                }
                Ok(answers)
            }
            // An effect failed, or one of its events was refused: nothing was done.
            Err(e)
                if settlements.len() == 1
                    && !e.class().may_repeat()
                    && e.class() != Class::Final =>
            {
                Ok(vec![Err(e)])
            }
            Err(e) => Err(e),
        }
    }
}

/// Where the event of a lease is.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// In the claim with this token.
    Claim(i64),
    /// In a row of its own: group and position.
    Row(i64, u64),
}

/// A claim as stored.
pub(crate) struct Claim {
    pub(crate) group: i64,
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) done: Ranges,
    changed: bool,
}

/// A leased row.
struct LeasedRow {
    attempt: u32,
    failures: Option<String>,
    was_dead: bool,
}

/// The claims and rows of leases that are held, locked until the end of the transaction.
pub(crate) struct Held {
    claims: BTreeMap<i64, Claim>,
    rows: HashMap<(i64, u64), (i64, LeasedRow)>,
}

impl Held {
    /// Reads what is held after `now`, by this owner: the leases of another process are never ours to settle.
    pub(crate) async fn read(tx: &Tx<'_>, leases: &[Lease], owner: i64, now: i64) -> Result<Self> {
        let doing = "reading leases";
        let mut tokens: Vec<i64> = leases.iter().map(|lease| parts(lease).1).collect();
        tokens.sort_unstable();
        tokens.dedup();
        let sql = "SELECT token, group_id, lo, hi, done::text FROM everbus.claims
                   WHERE token = ANY ($1) AND until > $2 AND owner = $3 ORDER BY token FOR UPDATE";
        let mut claims = BTreeMap::new();
        for row in tx.query(doing, sql, &[&tokens, &now, &owner]).await? {
            let claim = Claim {
                group: get(&row, 1)?,
                lo: get_seq(&row, 2)?,
                hi: get_seq(&row, 3)?,
                done: Ranges::parse(get(&row, 4)?)?,
                changed: false,
            };
            claims.insert(get(&row, 0)?, claim);
        }
        let mut held = Self {
            claims,
            rows: HashMap::new(),
        };
        // Rows are read after the claims: an event may move from its claim to a row, never back.
        let rest = leases.iter().filter(|lease| held.place(lease).is_none());
        let (mut groups, mut seqs, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        for lease in rest {
            let (group, token) = parts(lease);
            groups.push(group);
            seqs.push(to_sql(lease.position().place()));
            tokens.push(token);
        }
        if groups.is_empty() {
            return Ok(held);
        }
        let sql = "SELECT d.group_id, d.seq, d.token, d.attempt, d.failures,
                     EXISTS (SELECT 1 FROM everbus.dead_letters x
                       WHERE x.seq = d.seq AND x.group_id = d.group_id AND x.retried_at IS NOT NULL)
                   FROM everbus.deliveries d
                   JOIN unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS x (group_id, seq, token)
                     ON d.group_id = x.group_id AND d.seq = x.seq AND d.token = x.token
                   WHERE d.state = 1 AND d.until > $4 AND d.owner = $5
                   ORDER BY d.group_id, d.seq FOR UPDATE OF d";
        for row in tx
            .query(doing, sql, &[&groups, &seqs, &tokens, &now, &owner])
            .await?
        {
            let leased = LeasedRow {
                attempt: u32::try_from(get::<i32>(&row, 3)?).unwrap_or(0),
                failures: get(&row, 4)?,
                was_dead: get(&row, 5)?,
            };
            held.rows
                .insert((get(&row, 0)?, get_seq(&row, 1)?), (get(&row, 2)?, leased));
        }
        Ok(held)
    }

    /// Where the event of a lease is, if the lease is held.
    pub(crate) fn place(&self, lease: &Lease) -> Option<Place> {
        let ((group, token), seq) = (parts(lease), lease.position().place());
        if let Some(claim) = self.claims.get(&token)
            && claim.group == group
            && (claim.lo..=claim.hi).contains(&seq)
            && !claim.done.contains(seq)
        {
            return Some(Place::Claim(token));
        }
        let (held, _) = self.rows.get(&(group, seq))?;
        (*held == token).then_some(Place::Row(group, seq))
    }

    pub(crate) fn claim(&self, token: i64) -> Option<&Claim> {
        self.claims.get(&token)
    }

    /// Writes the claims that changed; finished ones go.
    async fn write(&self, tx: &Tx<'_>) -> Result<()> {
        let doing = "settling";
        let changed = self.claims.iter().filter(|(_, claim)| claim.changed);
        let (finished, open): (Vec<_>, Vec<_>) =
            changed.partition(|(_, claim)| claim.done.gaps(claim.lo, claim.hi).is_empty());
        if !finished.is_empty() {
            let tokens: Vec<i64> = finished.iter().map(|(token, _)| **token).collect();
            let sql = "DELETE FROM everbus.claims WHERE token = ANY ($1)";
            tx.execute(doing, sql, &[&tokens]).await?;
        }
        if !open.is_empty() {
            let tokens: Vec<i64> = open.iter().map(|(token, _)| **token).collect();
            let done: Vec<String> = open
                .iter()
                .map(|(_, claim)| claim.done.to_string())
                .collect();
            let sql = "UPDATE everbus.claims c SET done = x.done::int8multirange
                       FROM unnest($1::bigint[], $2::text[]) AS x (token, done) WHERE c.token = x.token";
            tx.execute(doing, sql, &[&tokens, &done]).await?;
        }
        Ok(())
    }
}

/// An event that failed before it ended: group, position, attempts, failures, the final attempt.
type Ended = (i64, u64, u32, Vec<Failure>, Option<Ran>);

/// What settlements change, collected so that few statements are needed.
#[derive(Default)]
struct Changes {
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

/// Applies settlements of leases that last beyond `held_after`. An error undoes all of them. Returns whether
/// events were appended.
async fn apply(
    engine: &Postgres,
    tx: &Tx<'_>,
    settlements: &[&Settlement],
    now: Timestamp,
    held_after: i64,
) -> Result<(Vec<Result<()>>, bool)> {
    let leases: Vec<Lease> = settlements.iter().map(|s| s.lease.clone()).collect();
    let owner = engine.session().owner();
    let mut held = Held::read(tx, &leases, owner, held_after).await?;
    let mut seen = HashSet::new();
    let mut answers: Vec<Result<()>> = Vec::with_capacity(settlements.len());
    for settlement in settlements {
        let lease = &settlement.lease;
        let first = seen.insert((lease.words(), lease.position().place()));
        let effect = settlement
            .effect
            .as_ref()
            .filter(|_| settlement.verdict == Verdict::Ack);
        answers.push(match held.place(lease) {
            Some(_) if first => effect.map_or(Ok(()), effect::check),
            _ => Err(lost(lease)),
        });
    }
    let mut events = follow(engine, tx, settlements, &mut answers, now).await?;
    let mut changes = Changes::default();
    for (settlement, answer) in settlements.iter().zip(&answers) {
        if answer.is_ok() {
            decide(&mut held, &mut changes, settlement, now)?;
        }
    }
    held.write(tx).await?;
    let notices = changes.write(engine, tx, now).await?;
    let appended = !events.is_empty() || !notices.is_empty();
    if !events.is_empty() {
        let new: Vec<&Event> = events.iter().collect();
        append_in(engine, tx, &new).await.map_err(conflict)?;
        events.clear();
    }
    tell(engine, tx, notices).await?;
    Ok((answers, appended))
}

/// Does what belongs to acks: inbox records, effects, and the check of follow-up events. Returns the events
/// to append. An event that the inbox knows is acked without any of it.
async fn follow(
    engine: &Postgres,
    tx: &Tx<'_>,
    settlements: &[&Settlement],
    answers: &mut [Result<()>],
    now: Timestamp,
) -> Result<Vec<Event>> {
    let records = |s: &Settlement| s.inbox && s.verdict == Verdict::Ack;
    let brings = |s: &Settlement| !s.follow_ups.is_empty() || s.effect.is_some();
    let asked = settlements.iter().zip(&*answers);
    let asked: Vec<&Settlement> = asked
        .filter(|(s, answer)| answer.is_ok() && records(s) && brings(s))
        .map(|(s, _)| *s)
        .collect();
    let again = already_handled(tx, &asked).await?;
    let is_again = |s: &Settlement| {
        let place = (parts(&s.lease).0, s.lease.position().place());
        records(s) && again.contains(&place)
    };
    let sets: Vec<&[Event]> = settlements
        .iter()
        .zip(&*answers)
        .map(|(s, answer)| {
            let counts = answer.is_ok() && !is_again(s);
            if counts { s.follow_ups.as_slice() } else { &[] }
        })
        .collect();
    let free = check_sets(engine, tx, &sets).await?;
    let mut events = Vec::new();
    for ((settlement, answer), free) in settlements.iter().zip(answers.iter_mut()).zip(free) {
        if answer.is_err() {
            continue;
        }
        if let Err(refused) = free {
            *answer = Err(refused);
            continue;
        }
        if is_again(settlement) {
            continue;
        }
        events.extend(settlement.follow_ups.iter().cloned());
        if let Some(effect) = &settlement.effect
            && settlement.verdict == Verdict::Ack
        {
            let more = effect::run(tx, effect).await?;
            let set: &[Event] = &more;
            check_sets(engine, tx, &[set])
                .await?
                .pop()
                .unwrap_or(Ok(()))?;
            events.extend(more);
        }
    }
    let noted = settlements.iter().zip(&*answers);
    let noted: Vec<&Settlement> = noted
        .filter(|(s, answer)| answer.is_ok() && records(s))
        .map(|(s, _)| *s)
        .collect();
    note_handled(tx, &noted, now).await?;
    Ok(events)
}

fn places(settlements: &[&Settlement]) -> (Vec<i64>, Vec<i64>) {
    let leases = settlements.iter().map(|s| &s.lease);
    leases
        .map(|lease| (parts(lease).0, to_sql(lease.position().place())))
        .unzip()
}

/// Which of these events their groups have handled before.
async fn already_handled(tx: &Tx<'_>, asked: &[&Settlement]) -> Result<HashSet<(i64, u64)>> {
    if asked.is_empty() {
        return Ok(HashSet::new());
    }
    let (groups, seqs) = places(asked);
    let sql = "SELECT x.group_id, x.seq FROM unnest($1::bigint[], $2::bigint[]) AS x (group_id, seq)
               JOIN everbus.log l ON l.seq = x.seq
               JOIN everbus.inbox i ON i.group_id = x.group_id AND i.id = l.id AND i.tenant = l.tenant";
    let rows = tx.query("asking the inbox", sql, &[&groups, &seqs]).await?;
    rows.iter()
        .map(|row| Ok((get(row, 0)?, get_seq(row, 1)?)))
        .collect()
}

async fn note_handled(tx: &Tx<'_>, noted: &[&Settlement], now: Timestamp) -> Result<()> {
    if noted.is_empty() {
        return Ok(());
    }
    let (groups, seqs) = places(noted);
    let sql = "INSERT INTO everbus.inbox (group_id, id, tenant, at)
               SELECT x.group_id, l.id, l.tenant, $3
               FROM unnest($1::bigint[], $2::bigint[]) AS x (group_id, seq)
               JOIN everbus.log l ON l.seq = x.seq ON CONFLICT DO NOTHING";
    let at = now.as_micros();
    tx.execute("writing the inbox", sql, &[&groups, &seqs, &at])
        .await
        .map(drop)
}

/// Notes what a settlement changes.
fn decide(
    held: &mut Held,
    changes: &mut Changes,
    settlement: &Settlement,
    now: Timestamp,
) -> Result<()> {
    let lease = &settlement.lease;
    match held.place(lease) {
        Some(Place::Claim(token)) => {
            let Some(claim) = held.claims.get_mut(&token) else {
                return Ok(());
            };
            claim.done.add(lease.position().place());
            claim.changed = true;
            let place = (claim.group, lease.position().place());
            changes.settle_claimed(place, &settlement.verdict, now);
            Ok(())
        }
        Some(Place::Row(group, seq)) => {
            let Some((_, row)) = held.rows.remove(&(group, seq)) else {
                return Ok(());
            };
            changes.settle_row((group, seq), &row, settlement, now)
        }
        None => Ok(()),
    }
}

impl Changes {
    /// A first attempt, in a claim.
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
    ) -> Result<()> {
        let failures = || read_failures(row.failures.as_deref());
        match &settlement.verdict {
            verdict @ (Verdict::Ack | Verdict::Skip { .. }) => {
                if let Verdict::Skip { reason } = verdict {
                    self.skips.push((group, seq, reason.clone()));
                }
                if row.failures.is_some() || row.was_dead {
                    let ran = settlement.ran.as_deref().cloned();
                    self.outcomes
                        .push((group, seq, row.attempt, failures()?, ran));
                }
                self.finished.push((group, seq));
            }
            Verdict::Retry { after, failure } => {
                let mut failures = failures()?;
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
                let death = Death::new(row.attempt, failures()?, failure.clone(), now);
                self.deaths.push((group, seq, death));
                self.finished.push((group, seq));
            }
        }
        Ok(())
    }

    /// Writes everything. Returns the events that report dead letters.
    async fn write(self, engine: &Postgres, tx: &Tx<'_>, now: Timestamp) -> Result<Vec<Event>> {
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
    // A release leaves a suspect a suspect; after an attempt that ended it is none.
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

/// Gives back events that were claimed and reached no handler: no attempt counts, even if the lease is over
/// by now and nobody has noticed.
pub(crate) async fn give_back(engine: &Postgres, leases: &[Lease]) -> Result<()> {
    if leases.is_empty() {
        return Ok(());
    }
    let after = std::time::Duration::ZERO;
    let settlements: Vec<Settlement> = leases
        .iter()
        .map(|lease| Settlement::new(lease.clone(), Verdict::Release { after }))
        .collect();
    let settlements: Vec<&Settlement> = settlements.iter().collect();
    let now = engine.now();
    let answers = transaction!(engine.pool, "giving events back", |tx| {
        apply(engine, tx, &settlements, now, i64::MIN).await
    })?;
    let step = std::time::Duration::ZERO;
    for (lease, answer) in leases.iter().zip(&answers.0) {
        engine.seats.settled(lease, answer, step);
    }
    engine.bell.ring();
    Ok(())
}
