//! One pass over an outbox: from its oldest ready row to the newest.
//!
//! Three steps overlap: one batch is published while the batch before it is marked and the batch after it
//! is read. If the pass ends in between, nothing is lost: rows that were not marked are published again.

use std::sync::atomic::Ordering;
use std::time::Duration;

use everbus_core::{
    Claimed, Code, Error, OUTBOX_ATTEMPTS, OutboxRow, RelayLease, Result, RowOutcome, outbox_delay,
};
use tokio::time::Instant;

use super::blame::{Blame, blame};
use super::publish::{Answer, Held, Publisher};
use super::relay::Relay;

/// A pass ends after this long, so that rows whose delay is over are not left behind.
const LONGEST: Duration = Duration::from_secs(1);

/// How long a failed row waits if its `system.dead_letter` event could not be published.
const LAST_DELAY: Duration = Duration::from_secs(8);

/// The end of a pass.
#[derive(Debug)]
pub(super) enum Passed {
    /// No row is ready. The next waiting row is due after this delay.
    Empty {
        next_due: Option<everbus_core::Timestamp>,
    },
    /// There may be more rows now.
    More,
    /// A stream is full: its events wait, other streams continued.
    Full,
    /// Another relay has the lease.
    Lost,
    /// The broker or the outbox could not be reached.
    Outage(Error),
}

type Outcomes = Vec<(OutboxRow, RowOutcome)>;

impl Relay {
    /// Publishes the ready rows and marks them.
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
        // Also after an outage: published rows are marked, so that they are not published again.
        if let Err(error) = self.settle(lease, done).await {
            return self.unsettled(error);
        }
        tally.tell(&self.source.name());
        match ended {
            // Rows that were settled just now may have unblocked others, or wait for a retry.
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
        self.counters.lock().sent += sent;
        self.counters.lock().rejected += rejected;
        self.counters.lock().failed += failed;
        Ok(())
    }

    /// Turns the answers of the broker into outcomes of the rows. Before a row is given up,
    /// `system.dead_letter` is published: if this fails, the row is not given up yet.
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
            self.counters.lock().went_wrong(&error);
            let text = error.to_string();
            let outcome = match outbox_delay(attempt) {
                Some(after) => RowOutcome::Rejected { error: text, after },
                None => match self.tell_of_death(&row, &text, attempt).await {
                    Ok(()) => RowOutcome::Failed { error: text },
                    // Other rows need not wait for this one: it is tried again later.
                    Err(error) if is_passing(&error) => {
                        tracing::warn!(target: "everbus::outbox", %error, event_id = %row.event_id, "a row cannot be given up yet: its dead-letter event cannot be published");
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

    /// Publishes `system.dead_letter`. On an error the row is not given up yet; after as many attempts
    /// again it is given up without the event.
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
            // It was published before, with another text.
            Err(error) if error.code() == Code::IdReused => Ok(()),
            Err(error)
                if blame(&error) == Blame::Row
                    || is_passing(&error) && attempts >= 2 * OUTBOX_ATTEMPTS =>
            {
                tracing::warn!(target: "everbus::outbox", %error, "the dead-letter event of an outbox row could not be published");
                Ok(())
            }
            other => other,
        }
    }

    /// Enlarges the batch while more rows are ready.
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

/// Whether the dead-letter event cannot be published for now although the broker is available.
fn is_passing(error: &Error) -> bool {
    matches!(blame(error), Blame::Unclear | Blame::Full)
}

/// The counts of a pass, for the log.
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
