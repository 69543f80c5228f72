//! Settling deliveries: ack, skip, retry, release, dead-letter.
//!
//! Calls that wait at the same time share a transaction. A settlement with an effect has a transaction of its own, so
//! that the effect of one handler cannot undo the acks of others, and a task of its own, so that a slow effect does not
//! hold the others up.

mod acks;
mod apply;
mod changes;
mod held;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use everbus_core::{Class, Code, Error, Lease, Result, Settlement, Verdict};
use tokio::sync::{mpsc, oneshot};

use crate::Postgres;
use crate::append::{check_texts, is_of_one};
use crate::effect;
use crate::pool::transaction;

use apply::apply;
pub(crate) use held::{Held, Place};

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

/// The error of a settlement whose task ended early.
fn unanswered() -> Error {
    Error::new(Code::Unavailable, "the settlement was not finished").with_unknown_outcome()
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
        let (slow, quick): (Vec<Job>, Vec<Job>) = jobs
            .into_iter()
            .partition(|job| job.settlements.iter().any(runs_effect));
        for job in slow {
            let engine = engine.clone();
            tokio::spawn(async move { engine.settle_jobs(vec![job]).await });
        }
        if !quick.is_empty() {
            engine.settle_jobs(quick).await;
        }
    }
}

/// Whether a settlement runs work of a handler.
pub(super) fn runs_effect(settlement: &Settlement) -> bool {
    let effect = settlement.effect.as_ref();
    settlement.verdict == Verdict::Ack && effect.is_some_and(|e| effect::check(e).is_ok())
}

impl Postgres {
    async fn settle_jobs(self: &Arc<Self>, jobs: Vec<Job>) {
        let began = Instant::now();
        let mut answers: Vec<Vec<Option<Result<()>>>> = jobs
            .iter()
            .map(|job| job.settlements.iter().map(|_| None).collect())
            .collect();
        let mut together = Vec::new();
        let mut alone = Vec::new();
        for (at, job) in jobs.iter().enumerate() {
            for (index, settlement) in job.settlements.iter().enumerate() {
                let refused = settlement.follow_ups.iter().try_for_each(check_texts);
                if let Err(error) = refused {
                    answers[at][index] = Some(Err(error));
                    continue;
                }
                if runs_effect(settlement) {
                    alone.push(((at, index), settlement));
                } else {
                    together.push(((at, index), settlement));
                }
            }
        }
        let mut failed: HashMap<usize, Error> = HashMap::new();
        // True if there are only plain acks of first attempts. These give consumers room, and change nothing else.
        let mut plain = alone.is_empty();
        if !together.is_empty() {
            let settlements: Vec<&Settlement> = together.iter().map(|(_, s)| *s).collect();
            match self.settle_or_part(&settlements).await {
                Ok((results, only_acks)) => {
                    plain &= only_acks;
                    for (((at, index), _), result) in together.iter().zip(results) {
                        answers[*at][*index] = Some(result);
                    }
                }
                Err(error) => {
                    plain = false;
                    for ((at, _), _) in &together {
                        failed.insert(*at, error.clone());
                    }
                }
            }
        }
        let mut running = tokio::task::JoinSet::new();
        for (place, settlement) in alone {
            let (engine, settlement) = (self.clone(), settlement.clone());
            running.spawn(async move { (place, engine.settle_alone(&settlement).await) });
        }
        while let Some(ended) = running.join_next().await {
            // A task that ended without a result leaves the outcome open; see below.
            if let Ok(((at, index), result)) = ended {
                answers[at][index] = Some(result);
            }
        }
        let step = began.elapsed();
        for (at, (job, answers)) in jobs.into_iter().zip(answers).enumerate() {
            let answer = match failed.remove(&at) {
                Some(error) => Err(error),
                None => Ok(answers
                    .into_iter()
                    .map(|answer| answer.unwrap_or_else(|| Err(unanswered())))
                    .collect()),
            };
            if let Ok(results) = &answer {
                let leases = job.settlements.iter().map(|s| &s.lease);
                self.seats.settled(leases.zip(results), step);
            }
            let _ = job.reply.send(answer);
        }
        self.bell.ring_settled();
        if !plain || self.seats.wait_for_settlements() {
            self.bell.ring_here();
        }
    }

    /// Applies a settlement with an effect. Effects use at most half of the connections at the same time.
    async fn settle_alone(&self, settlement: &Settlement) -> Result<()> {
        let _place = self.effects.acquire().await;
        let mut results = self.settle_together(&[settlement]).await?;
        results.pop().unwrap_or(Ok(()))
    }

    /// Applies settlements: first the plain acks of first attempts together, then the others. Also returns whether
    /// there were only plain acks.
    async fn settle_or_part(&self, settlements: &[&Settlement]) -> Result<(Vec<Result<()>>, bool)> {
        let written = self.write_acks(settlements).await?;
        if written.iter().all(|written| *written) {
            return Ok((settlements.iter().map(|_| Ok(())).collect(), true));
        }
        let rest = settlements.iter().zip(&written);
        let rest: Vec<&Settlement> = rest.filter(|(_, w)| !**w).map(|(s, _)| *s).collect();
        let mut results = match self.settle_rest(&rest).await {
            Ok(results) => results.into_iter(),
            // The plain acks are written, so only the others get the error.
            Err(error) if rest.len() < settlements.len() => {
                let results: Vec<_> = rest.iter().map(|_| Err(error.clone())).collect();
                results.into_iter()
            }
            Err(error) => return Err(error),
        };
        let answer = |written| {
            if written {
                return Ok(());
            }
            results.next().unwrap_or_else(|| Err(unanswered()))
        };
        Ok((written.into_iter().map(answer).collect(), false))
    }

    /// Applies settlements in one transaction. If one of them cannot be applied, the others are applied in smaller
    /// transactions.
    async fn settle_rest(&self, settlements: &[&Settlement]) -> Result<Vec<Result<()>>> {
        let mut results = Vec::with_capacity(settlements.len());
        let mut parts = vec![settlements];
        while let Some(part) = parts.pop() {
            match self.settle_together(part).await {
                Ok(answers) => results.extend(answers),
                Err(error) if part.len() > 1 && is_of_one(&error) => {
                    let (first, rest) = part.split_at(part.len() / 2);
                    parts.extend([rest, first]);
                }
                Err(error) if part.len() == settlements.len() => return Err(error),
                // Other parts may have been applied, so only this part gets the error.
                Err(error) => results.extend(part.iter().map(|_| Err(error.clone()))),
            }
        }
        Ok(results)
    }

    /// Applies settlements in one transaction; each may be refused on its own.
    async fn settle_together(&self, settlements: &[&Settlement]) -> Result<Vec<Result<()>>> {
        let types: Vec<_> = settlements
            .iter()
            .flat_map(|s| s.follow_ups.iter().map(|e| e.type_arc().clone()))
            .collect();
        if !types.is_empty() {
            // Outside of the transaction, so that new types are not rolled back with it.
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

/// Gives back events that were claimed and reached no handler: no attempt counts, even if the lease has ended
/// and no consumer has taken the event since.
pub(crate) async fn give_back(engine: &Postgres, leases: &[Lease]) -> Result<()> {
    if leases.is_empty() {
        return Ok(());
    }
    let after = Duration::ZERO;
    let settlements: Vec<Settlement> = leases
        .iter()
        .map(|lease| Settlement::new(lease.clone(), Verdict::Release { after }))
        .collect();
    let settlements: Vec<&Settlement> = settlements.iter().collect();
    let now = engine.now();
    let answers = transaction!(engine.pool, "giving events back", |tx| {
        apply(engine, tx, &settlements, now, i64::MIN).await
    })?;
    let answers = leases.iter().zip(&answers.0);
    engine.seats.settled(answers, Duration::ZERO);
    engine.bell.ring();
    Ok(())
}
