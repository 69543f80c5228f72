//! Part of the writer: callers that wait until an event is settled.

use std::collections::HashMap;

use everbus_core::{Code, Error, Progress, Result, SettledOutcome};
use rusqlite::{OptionalExtension, params};

use crate::errors::from_sqlite;
use crate::queue::Reply;
use crate::rows::{ADDRESS, seq_from, to_sql};
use crate::writer::Writer;

/// Waiters by position.
#[derive(Default)]
pub(crate) struct Watches {
    waiting: HashMap<u64, Vec<Reply<SettledOutcome>>>,
    /// Positions that may be settled now.
    touched: Vec<u64>,
    /// At this many positions, those without a waiting caller are removed.
    sweep_at: usize,
}

impl Watches {
    pub(crate) fn add(&mut self, position: u64, reply: Reply<SettledOutcome>) {
        // Callers that stopped waiting are removed before there are too many of them.
        if self.waiting.len() >= self.sweep_at.max(1024) {
            self.waiting
                .retain(|_, replies| replies.iter().any(|reply| !reply.is_closed()));
            self.sweep_at = 2 * self.waiting.len();
        }
        self.waiting.entry(position).or_default().push(reply);
        self.touched.push(position);
    }

    pub(crate) fn touch(&mut self, position: u64) {
        if self.waiting.contains_key(&position) {
            self.touched.push(position);
        }
    }

    pub(crate) fn recheck_all(&mut self) {
        self.touched = self.waiting.keys().copied().collect();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn fail_all(&mut self, error: &Error) {
        for reply in self.waiting.drain().flat_map(|(_, replies)| replies) {
            let _ = reply.send(Err(error.clone()));
        }
    }

    /// Answers callers whose event is settled in every group. Runs outside a transaction, so that it reads
    /// only durable state.
    pub(crate) fn answer(&mut self, writer: &mut Writer) -> Result<()> {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        touched.dedup();
        for position in touched {
            let Some(replies) = self.waiting.get_mut(&position) else {
                continue;
            };
            // Callers that stopped waiting are dropped.
            replies.retain(|reply| !reply.is_closed());
            let outcome = match writer.outcome(position) {
                Ok(outcome) => outcome,
                Err(e) => {
                    // All are checked again in the next round.
                    self.recheck_all();
                    return Err(e);
                }
            };
            let answer = match outcome {
                _ if replies.is_empty() => None,
                Some(outcome) => Some(outcome),
                None => continue,
            };
            for reply in self.waiting.remove(&position).into_iter().flatten() {
                if let Some(answer) = &answer {
                    let _ = reply.send(answer.clone());
                }
            }
        }
        Ok(())
    }
}

impl Writer {
    /// How a position was settled; `None` while some group has yet to settle it.
    fn outcome(&mut self, position: u64) -> Result<Option<Result<SettledOutcome>>> {
        let doing = |e| from_sqlite("looking whether an event is settled", e);
        let found: Option<(i64, Option<String>)> = self
            .conn
            .prepare_cached(&format!("SELECT type, {ADDRESS} FROM log WHERE seq = ?1"))
            .and_then(|mut s| {
                s.query_row([to_sql(position)], |r| Ok((r.get(0)?, r.get(1)?)))
                    .optional()
            })
            .map_err(doing)?;
        let Some((type_id, address)) = found else {
            let error = Error::new(Code::NotFound, format!("there is no event at {position}"));
            return Ok(Some(Err(error)));
        };
        let name = self.state.type_names.get(&self.conn, type_id)?;
        let mut outcome = SettledOutcome::default();
        let own = self.state.owner;
        let ids: Vec<i64> = self.state.groups.keys().copied().collect();
        for id in ids {
            let group = self.state.group_mut(id)?;
            // This process cannot tell whether another process's ephemeral group still exists.
            let foreign = group.owner.is_some_and(|owner| owner != own);
            if foreign || group.declared_at >= position {
                continue;
            }
            let is_for = group.name.receives(address.as_deref());
            let to_come = is_for && group.cursor < position && group.wants(type_id, &name);
            let group_name = group.name.clone();
            let to_come = to_come && !self.was_dropped(id, position)?;
            if to_come || self.is_claimed(id, position)? || self.has_row(id, position)? {
                return Ok(None);
            }
            let dead: bool = self
                .conn
                .prepare_cached(
                    "SELECT EXISTS (SELECT 1 FROM dead_letters
                       WHERE seq = ?1 AND group_id = ?2 AND retried_at IS NULL)",
                )
                .and_then(|mut s| s.query_row((to_sql(position), id), |r| r.get(0)))
                .map_err(doing)?;
            if dead {
                outcome.dead_lettered.push(group_name);
            }
        }
        outcome.dead_lettered.sort();
        Ok(Some(Ok(outcome)))
    }

    fn is_claimed(&self, group: i64, position: u64) -> Result<bool> {
        let ours = self.state.claims.values().any(|c| {
            c.group == group && (c.lo..=c.hi).contains(&position) && !c.progress.is_done(position)
        });
        if ours {
            return Ok(true);
        }
        let doing = |e| from_sqlite("looking whether an event is settled", e);
        let mut statement = self
            .conn
            .prepare_cached(
                "SELECT lo, hi, done FROM claims
                 WHERE group_id = ?1 AND lo <= ?2 AND hi >= ?2 AND owner <> ?3",
            )
            .map_err(doing)?;
        let mut rows = statement
            .query(params![group, to_sql(position), self.state.owner])
            .map_err(doing)?;
        while let Some(row) = rows.next().map_err(doing)? {
            let (lo, hi) = (row.get(0).map_err(doing)?, row.get(1).map_err(doing)?);
            let done: Option<Vec<u8>> = row.get(2).map_err(doing)?;
            let (lo, hi) = (seq_from(lo), seq_from(hi));
            if !Progress::from_bitmap(lo, hi, done.as_deref().unwrap_or_default()).is_done(position)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn has_row(&self, group: i64, position: u64) -> Result<bool> {
        self.conn
            .prepare_cached(
                "SELECT EXISTS (SELECT 1 FROM deliveries WHERE group_id = ?1 AND seq = ?2)",
            )
            .and_then(|mut s| s.query_row((group, to_sql(position)), |r| r.get(0)))
            .map_err(|e| from_sqlite("looking whether an event is settled", e))
    }
}
