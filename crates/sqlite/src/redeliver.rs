//! Part of the writer: delivering events to a group again. The event gets a row in `deliveries`, as for the
//! retry of a dead letter; the group's cursor does not move.

use everbus_core::{Code, Error, GroupName, Position, Progress, Redelivery, Result};
use rusqlite::{OptionalExtension, params};

use crate::engine::SqliteEngine;
use crate::errors::from_sqlite;
use crate::rows::{seq_from, stored_at, to_sql};
use crate::state::{WAITING, micros};
use crate::writer::Writer;

/// Events queued in one transaction: few enough that a publish hardly waits.
const STEP: usize = 100;

impl SqliteEngine {
    /// Delivers events again. Without `really` it only returns which events it would deliver. The writer
    /// answers in both cases, because it knows best what is handed out.
    pub(crate) async fn redeliver_all(
        &self,
        group: GroupName,
        positions: Vec<Position>,
        really: bool,
    ) -> Result<Vec<Redelivery>> {
        let positions: Vec<u64> = positions.into_iter().map(Position::place).collect();
        let mut answers = Vec::with_capacity(positions.len());
        // Also without any positions: the group must exist.
        let mut steps = positions.chunks(STEP);
        let mut step = steps.next().unwrap_or_default().to_vec();
        loop {
            let name = group.clone();
            let some = self
                .handle
                .job(move |writer| writer.redeliver_some(&name, &step, really))
                .await?;
            answers.extend(some);
            match steps.next() {
                Some(next) => step = next.to_vec(),
                None => return Ok(answers),
            }
        }
    }
}

impl Writer {
    fn redeliver_some(
        &mut self,
        name: &GroupName,
        positions: &[u64],
        really: bool,
    ) -> Result<Vec<Redelivery>> {
        let group = self.state.group_id(name).ok_or_else(|| {
            Error::new(Code::GroupNotFound, format!("there is no group {name}"))
                .hint("declare the group, by subscribing, before it is used")
        })?;
        let claims = self.claims_of(group)?;
        let cursor = self.state.group_mut(group)?.cursor;
        let mut answers = Vec::with_capacity(positions.len());
        for seq in positions {
            let in_flight = || {
                let mut claims = claims.iter();
                claims.any(|(lo, hi, progress)| (lo..=hi).contains(&seq) && !progress.is_done(*seq))
            };
            answers.push(match self.standing(group, *seq)? {
                None => Redelivery::Gone,
                Some((_, true)) => Redelivery::Owed,
                Some(_) if *seq > cursor || in_flight() => Redelivery::Owed,
                Some((type_id, false)) => {
                    if really {
                        self.queue_again(group, *seq, type_id)?;
                    }
                    Redelivery::Queued
                }
            });
        }
        Ok(answers)
    }

    /// The type of an event, and whether it has a row or an open dead letter in the group. `None` if there is
    /// no such event.
    fn standing(&self, group: i64, seq: u64) -> Result<Option<(i64, bool)>> {
        self.conn
            .prepare_cached(
                "SELECT CAST(type AS INTEGER),
                   EXISTS (SELECT 1 FROM deliveries WHERE group_id = ?1 AND seq = ?2)
                   OR EXISTS (SELECT 1 FROM dead_letters
                     WHERE seq = ?2 AND group_id = ?1 AND retried_at IS NULL)
                 FROM log WHERE seq = ?2",
            )
            .and_then(|mut s| {
                s.query_row((group, to_sql(seq)), |r| Ok((r.get(0)?, r.get(1)?)))
                    .optional()
            })
            .map_err(|e| from_sqlite("reading the state of an event", e))
    }

    /// All ranges that the group has handed out, by any owner.
    fn claims_of(&self, group: i64) -> Result<Vec<(u64, u64, Progress)>> {
        let doing = |e| from_sqlite("reading the claims", e);
        let mut statement = self
            .conn
            .prepare_cached("SELECT id, lo, hi, done FROM claims WHERE group_id = ?1")
            .map_err(doing)?;
        let mut rows = statement.query([group]).map_err(doing)?;
        let mut claims = Vec::new();
        while let Some(row) = rows.next().map_err(doing)? {
            let id: i64 = row.get(0).map_err(doing)?;
            // Memory knows more than the file about this process's claims.
            if let Some(own) = self.state.claims.get(&id) {
                claims.push((own.lo, own.hi, own.progress.clone()));
                continue;
            }
            let lo = seq_from(row.get(1).map_err(doing)?);
            let hi = seq_from(row.get(2).map_err(doing)?);
            let done: Option<Vec<u8>> = row.get(3).map_err(doing)?;
            let progress = Progress::from_bitmap(lo, hi, done.as_deref().unwrap_or_default());
            claims.push((lo, hi, progress));
        }
        Ok(claims)
    }

    fn queue_again(&mut self, group: i64, seq: u64, type_id: i64) -> Result<()> {
        let key = if self.state.group_mut(group)?.ordered {
            stored_at(&self.conn, seq, &mut self.state.type_names)?.and_then(|s| {
                s.record
                    .event
                    .ordering_key()
                    .map(std::borrow::Cow::into_owned)
            })
        } else {
            None
        };
        let now = micros(self.clock.now());
        self.conn
            .prepare_cached(
                "INSERT INTO deliveries
                   (group_id, seq, state, due, attempt, type, key, updated_at, replayed)
                 VALUES (?1, ?2, ?3, ?4, 0, ?5, ?6, ?4, 1)",
            )
            .and_then(|mut s| s.execute(params![group, to_sql(seq), WAITING, now, type_id, key]))
            .map_err(|e| from_sqlite("delivering an event once more", e))?;
        // An earlier skip no longer holds.
        self.conn
            .prepare_cached("DELETE FROM skips WHERE group_id = ?1 AND seq = ?2")
            .and_then(|mut s| s.execute((group, to_sql(seq))))
            .map_err(|e| from_sqlite("delivering an event once more", e))?;
        self.note_due(group, now);
        Ok(())
    }
}
