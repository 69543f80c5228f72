//! One pass over an outbox: from its oldest row that is ready to the newest.
//!
//! Three things go on at once: a batch is published while the one before it is marked and the one after
//! it is read. None of it is lost if the pass ends in between: rows that were not marked come again.

use std::sync::atomic::Ordering;
use std::time::Duration;

use everbus_core::{
    Claimed, Code, Error, OUTBOX_ATTEMPTS, OutboxRow, RelayLease, Result, RowOutcome, outbox_delay,
};
use tokio::time::Instant;

use super::blame::{Blame, blame};
use super::publish::{Answer, Held, Publisher};
use super::relay::Relay;
use super::stats::Counters;

/// A pass ends after so long, so that rows whose wait is over get their turn.
const LONGEST: Duration = Duration::from_secs(1);

/// How long a row waits whose end could not be told.
const LAST_DELAY: Duration = Duration::from_secs(8);

/// How a pass ended.
#[derive(Debug)]
pub(super) enum Passed {
    /// There was nothing left. The next row that waits is due then.
    Empty {
        next_due: Option<everbus_core::Timestamp>,
    },
    /// There may be more at once.
    More,
    /// A stream is full: others went on, its events wait.
    Full,
    /// The lease went to another relay.
    Lost,
    /// The broker or the outbox could not be reached.
    Outage(Error),
}

type Outcomes = Vec<(OutboxRow, RowOutcome)>;

impl Relay {
    /// Publishes and marks what is ready.
    pub(super) async fn pass(&self, lease: &RelayLease, batch: &mut usize) -> Passed {
        let began = Instant::now();
        let mut held = Held::default();
        let mut done: Outcomes = Vec::new();
        let mut tally = Tally::default();
        let mut rows = match self.source.claim(0, *batch).await {
            Ok(claimed) if claimed.rows.is_empty() => {
                self.shrink(batch);
                return Passed::Empty {
                    next_due: claimed.next_due,
                };
            }
            Ok(claimed) => {
                self.grow(batch, &claimed);
                claimed
            }
            Err(error) => return Passed::Outage(error),
        };
        let ended = loop {
            let after = rows.rows.last().map_or(0, |row| row.row);
            let (more, current) = (rows.more, rows.rows);
            let go_on = more && began.elapsed() < LONGEST && !self.is_stopping();
            let claim = async {
                if go_on {
                    self.source.claim(after, *batch).await
                } else {
                    Ok(Claimed::default())
                }
            };
            let known = lease.since.max(self.tried.load(Ordering::Relaxed));
            self.tried.fetch_max(after, Ordering::Relaxed);
            let publisher =
                Publisher::new(&self.bus, &self.counters, &current, known, &self.last_sent);
            let publish = publisher.publish(&mut held);
            let settle = self.settle(lease, std::mem::take(&mut done));
            let ((answers, outage), claimed, settled) = tokio::join!(publish, claim, settle);
            let judged = self.judge(current, answers, &mut tally).await;
            done = judged.0;
            if let Err(error) = settled {
                break self.unsettled(error);
            }
            if let Some(error) = outage.or(judged.1) {
                break Passed::Outage(error);
            }
            rows = match claimed {
                Ok(claimed) => claimed,
                Err(error) => break Passed::Outage(error),
            };
            if rows.rows.is_empty() {
                break if more {
                    Passed::More
                } else {
                    Passed::Empty {
                        next_due: rows.next_due,
                    }
                };
            }
            self.grow(batch, &rows);
        };
        if matches!(ended, Passed::Lost) {
            return ended;
        }
        // Also after an outage: what was published before it is not published again.
        if let Err(error) = self.settle(lease, done).await {
            return self.unsettled(error);
        }
        tally.tell(&self.source.name());
        match ended {
            // What was settled just now may have given way to others, or waits by now.
            Passed::Empty { .. } if held.is_full() => Passed::Full,
            Passed::Empty { .. } => Passed::More,
            ended => ended,
        }
    }

    fn unsettled(&self, error: Error) -> Passed {
        match error.code() {
            Code::LeaseLost => Passed::Lost,
            _ => Passed::Outage(error),
        }
    }

    async fn settle(&self, lease: &RelayLease, outcomes: Outcomes) -> Result<()> {
        if outcomes.is_empty() {
            return Ok(());
        }
        let (mut sent, mut rejected, mut failed) = (0, 0, 0);
        for (_, outcome) in &outcomes {
            match outcome {
                RowOutcome::Sent => sent += 1,
                RowOutcome::Rejected { .. } => rejected += 1,
                RowOutcome::Failed { .. } => {
                    rejected += 1;
                    failed += 1;
                }
            }
        }
        self.source.settle(lease.clone(), outcomes).await?;
        Counters::add(&self.counters.sent, sent);
        Counters::add(&self.counters.rejected, rejected);
        Counters::add(&self.counters.failed, failed);
        Ok(())
    }

    /// From what the broker said to what becomes of the rows. Giving a row up is told to the broker
    /// first: if it cannot be told, the row is not given up yet.
    async fn judge(
        &self,
        rows: Vec<OutboxRow>,
        answers: Vec<Answer>,
        tally: &mut Tally,
    ) -> (Outcomes, Option<Error>) {
        let mut outcomes = Vec::with_capacity(rows.len());
        let mut outage = None;
        for (row, answer) in rows.into_iter().zip(answers) {
            tally.total += 1;
            let error = match answer {
                Answer::Sent => {
                    tally.published += 1;
                    outcomes.push((row, RowOutcome::Sent));
                    continue;
                }
                Answer::Later => continue,
                Answer::Rejected(error) => error,
            };
            let attempt = row.attempts.saturating_add(1);
            tracing::error!(
                target: "everbus::outbox",
                event_id = %row.event_id,
                event_type = %row.event_type,
                %error,
                attempt,
                "Failed to publish outbox event"
            );
            self.counters.went_wrong(&error);
            let text = error.to_string();
            let outcome = match outbox_delay(attempt) {
                Some(after) => RowOutcome::Rejected { error: text, after },
                None => match self.tell_of_death(&row, &text, attempt).await {
                    Ok(()) => RowOutcome::Failed { error: text },
                    // Nobody is held up by a death that cannot be told: it is tried again in its turn.
                    Err(error) if is_passing(&error) => {
                        tracing::warn!(target: "everbus::outbox", %error, event_id = %row.event_id, "a row cannot be given up yet: its end cannot be told");
                        let after = LAST_DELAY;
                        RowOutcome::Rejected { error: text, after }
                    }
                    Err(error) => {
                        outage = Some(error);
                        continue;
                    }
                },
            };
            outcomes.push((row, outcome));
        }
        (outcomes, outage)
    }

    /// Publishes `system.dead_letter`. An error means that it is not told yet; after as many attempts
    /// again, nobody is told.
    async fn tell_of_death(&self, row: &OutboxRow, error: &str, attempts: u32) -> Result<()> {
        let now = self.bus.clock().now();
        let Some(notice) = row.dead_letter_notice(error, attempts, now) else {
            return Ok(());
        };
        let told = match self.bus.append_as_is(vec![notice]).await {
            Ok(mut answers) => answers.pop().map_or(Ok(()), |answer| answer.map(drop)),
            Err(error) => Err(error),
        };
        match told {
            // It was told before, in other words.
            Err(error) if error.code() == Code::IdReused => Ok(()),
            Err(error)
                if blame(&error) == Blame::Row
                    || is_passing(&error) && attempts >= 2 * OUTBOX_ATTEMPTS =>
            {
                tracing::warn!(target: "everbus::outbox", %error, "a dead letter of the outbox could not be told of");
                Ok(())
            }
            other => other,
        }
    }

    /// More at a time while there is more.
    fn grow(&self, batch: &mut usize, claimed: &Claimed) {
        if claimed.more && claimed.rows.len() >= *batch {
            *batch = batch.saturating_mul(2).min(self.max_batch);
        } else if !claimed.more {
            self.shrink(batch);
        }
    }

    fn shrink(&self, batch: &mut usize) {
        *batch = self.batch.min(self.max_batch);
    }
}

/// Whether a death cannot be told for now, and the broker is there all the same.
fn is_passing(error: &Error) -> bool {
    matches!(blame(error), Blame::Unclear | Blame::Full)
}

/// What a pass did, for the log.
#[derive(Default)]
struct Tally {
    published: u64,
    total: u64,
}

impl Tally {
    fn tell(&self, outbox: &str) {
        if self.published > 0 {
            tracing::debug!(
                target: "everbus::outbox",
                outbox,
                published = self.published,
                total = self.total,
                "Outbox relay completed"
            );
        }
    }
}
