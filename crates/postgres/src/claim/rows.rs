//! Handing out events in rows of their own: retries, released events, suspects, events without a handler.

use everbus_core::{Death, Delivery, Failure, FailureKind, Result};

use super::{Claim, lease};
use crate::bury::{bury, bury_damaged};
use crate::groups::Group;
use crate::pool::{Params, Sql as _};
use crate::rows::{AFTER_RECORD, RECORD, Stored, UNHANDLED, get, read_failures, to_sql};

/// After this many crashes an event is handed out only while nothing else is in flight, so that the next
/// crash proves that this event caused it.
const CRASHES_BEFORE_ISOLATION: i32 = 3;

/// The condition that no other row with the key of `d` comes before `d` or is in flight.
pub(super) const FIRST_OF_KEY: &str = "(d.key IS NULL OR NOT EXISTS (SELECT 1 FROM everbus.deliveries o
  WHERE o.group_id = d.group_id AND hashtextextended(o.key, 0) = hashtextextended(d.key, 0) AND o.key = d.key
    AND o.seq <> d.seq AND (o.seq < d.seq OR o.state = 1)))";

/// A row that may be handed out.
pub(super) struct Ready {
    stored: Stored,
    attempt: u32,
    failures: Option<String>,
    crashes: i32,
    retried: bool,
}

impl Claim<'_, '_> {
    /// Dead-letters events that had no handler in any process for too long.
    pub(super) async fn give_up_unhandled(&mut self, group: &Group) -> Result<()> {
        let sql = format!(
            "SELECT {RECORD}, d.attempt, d.failures FROM everbus.deliveries d
             JOIN everbus.log log ON log.seq = d.seq
             WHERE d.group_id = $1 AND d.state = 3 AND d.due <= $2 ORDER BY d.seq LIMIT 200"
        );
        let at = self.now.as_micros();
        let rows = self
            .tx
            .query("reading what has no handler", &sql, &[&group.id, &at])
            .await?;
        let stored = self.engine.types.read(self.tx, &rows).await?;
        let (mut seqs, mut kept) = (Vec::new(), Vec::new());
        for (row, stored) in rows.iter().zip(stored) {
            if self
                .engine
                .seats
                .is_handled(group.id, stored.record.event.event_type())
            {
                // A consumer of this engine has a handler, and may be paused.
                kept.push(to_sql(stored.seq()));
                continue;
            }
            let attempt = u32::try_from(get::<i32>(row, AFTER_RECORD)?).unwrap_or(0);
            let failures = read_failures(get(row, AFTER_RECORD + 1)?).unwrap_or_default();
            let text = format!(
                "no process had a handler for {} for {:?}",
                stored.record.event.event_type(),
                self.asking.options.no_handler_after
            );
            let failure = Failure::new(attempt, self.now, FailureKind::NoHandler, text);
            let death = Death::new(attempt, failures, Some(failure), self.now);
            let seq = stored.seq();
            let notice = bury(self.engine, self.tx, group.id, seq, death).await?;
            self.notices.extend(notice);
            seqs.push(to_sql(seq));
        }
        if !kept.is_empty() {
            let sql =
                "UPDATE everbus.deliveries SET due = $3 WHERE group_id = $1 AND seq = ANY ($2)";
            let due = self.patience();
            self.tx
                .execute("setting events aside", sql, &[&group.id, &kept, &due])
                .await?;
        }
        self.remove_rows(group, &seqs).await
    }

    async fn remove_rows(&self, group: &Group, seqs: &Vec<i64>) -> Result<()> {
        if seqs.is_empty() {
            return Ok(());
        }
        let sql = "DELETE FROM everbus.deliveries WHERE group_id = $1 AND seq = ANY ($2)";
        self.tx
            .execute("removing rows", sql, &[&group.id, seqs])
            .await
            .map(drop)
    }

    /// Reads the rows that the condition `which` selects.
    async fn ready(&self, which: &str, values: Params<'_>) -> Result<Vec<Ready>> {
        let sql = format!(
            "SELECT {RECORD}, d.attempt, d.failures, d.crashes, d.replayed
               OR EXISTS (SELECT 1 FROM everbus.dead_letters x WHERE x.seq = d.seq
                 AND x.group_id = d.group_id AND x.retried_at IS NOT NULL)
             FROM everbus.deliveries d JOIN everbus.log log ON log.seq = d.seq
             WHERE d.group_id = $1 AND {which}"
        );
        let rows = self
            .tx
            .query("reading the waiting deliveries", &sql, values)
            .await?;
        let stored = self.engine.types.read(self.tx, &rows).await?;
        let ready = rows.iter().zip(stored).map(|(row, stored)| {
            Ok(Ready {
                stored,
                attempt: u32::try_from(get::<i32>(row, AFTER_RECORD)?).unwrap_or(0),
                failures: get(row, AFTER_RECORD + 1)?,
                crashes: get(row, AFTER_RECORD + 2)?,
                retried: get(row, AFTER_RECORD + 3)?,
            })
        });
        ready.collect()
    }

    /// Hands out one event that was in flight when a lease ended: one at a time, to find the event that kills
    /// processes; after several crashes only while nothing else is in flight.
    pub(super) async fn take_suspect(&mut self, group: &Group) -> Result<()> {
        let seats = &self.engine.seats;
        let sql = "SELECT EXISTS (SELECT 1 FROM everbus.deliveries
                   WHERE group_id = $1 AND state = 1 AND suspect AND owner = $2),
                   EXISTS (SELECT 1 FROM everbus.deliveries WHERE group_id = $1 AND state = 0 AND suspect)";
        let row = self
            .tx
            .one(
                "reading the suspects",
                sql,
                &[&group.id, &self.asking.owner],
            )
            .await?;
        let (running, waiting): (bool, bool) = (get(&row, 0)?, get(&row, 1)?);
        let isolating = seats.isolating();
        if !waiting && isolating.is_some_and(|(of, _)| of == group.id) && !running {
            seats.isolate(None);
        }
        if running || !waiting {
            return Ok(());
        }
        let chosen = isolating
            .filter(|(of, _)| *of == group.id)
            .map(|(_, seq)| to_sql(seq));
        let which = format!(
            "d.state = 0 AND d.suspect AND d.due <= $2 AND ($3::bigint IS NULL OR d.seq = $3) AND {FIRST_OF_KEY}
             ORDER BY d.due, d.seq LIMIT 1"
        );
        let at = self.now.as_micros();
        let found = self.ready(&which, &[&group.id, &at, &chosen]).await?.pop();
        let Some(ready) = found else {
            if chosen.is_some() {
                seats.isolate(None);
            }
            return Ok(());
        };
        if !self.handles(ready.stored.record.event.event_type()) {
            seats.isolate(None);
            return self
                .set_unhandled(group, vec![to_sql(ready.stored.seq())])
                .await;
        }
        if ready.crashes >= CRASHES_BEFORE_ISOLATION {
            seats.isolate(Some((group.id, ready.stored.seq())));
            if seats.in_flight() > 0 {
                return Ok(());
            }
        }
        self.lease_rows(group, vec![ready]).await
    }

    /// Hands out rows that are due. Those that this consumer does not handle are set aside for others.
    pub(super) async fn take_due(&mut self, group: &Group, room: usize) -> Result<()> {
        let which = format!(
            "d.state = 0 AND NOT d.suspect AND d.due <= $2 AND {FIRST_OF_KEY}
             ORDER BY d.due, d.seq LIMIT $3"
        );
        let at = self.now.as_micros();
        loop {
            let left = room.saturating_sub(self.deliveries.len());
            if left == 0 {
                return Ok(());
            }
            let limit = i64::try_from(left).unwrap_or(i64::MAX);
            let found = self.ready(&which, &[&group.id, &at, &limit]).await?;
            let all = found.len() < left;
            let (ours, others): (Vec<Ready>, Vec<Ready>) = found
                .into_iter()
                .partition(|ready| self.handles(ready.stored.record.event.event_type()));
            let all_ours = others.is_empty();
            let others = others
                .iter()
                .map(|ready| to_sql(ready.stored.seq()))
                .collect();
            self.set_unhandled(group, others).await?;
            self.lease_rows(group, ours).await?;
            if all || all_ours {
                return Ok(());
            }
        }
    }

    /// Hands out events for which other consumers had no handler.
    pub(super) async fn take_set_aside(&mut self, group: &Group, room: usize) -> Result<()> {
        let left = room.saturating_sub(self.deliveries.len());
        if left == 0 {
            return Ok(());
        }
        let sql =
            "SELECT t.id FROM everbus.types t WHERE EXISTS (SELECT 1 FROM everbus.deliveries d
                   WHERE d.group_id = $1 AND d.state = 3 AND d.type = t.id)";
        let rows = self
            .tx
            .query("reading what has no handler", sql, &[&group.id])
            .await?;
        let types: Vec<i32> = rows.iter().map(|row| get(row, 0)).collect::<Result<_>>()?;
        let names = self
            .engine
            .types
            .learn(self.tx, types.iter().copied())
            .await?;
        let handled = types.into_iter().filter(|id| {
            let name = names.get(id);
            name.is_some_and(|name| self.handles(name))
        });
        let handled: Vec<i32> = handled.collect();
        if handled.is_empty() {
            return Ok(());
        }
        let which =
            format!("d.state = 3 AND d.type = ANY ($2) AND {FIRST_OF_KEY} ORDER BY d.seq LIMIT $3");
        let limit = i64::try_from(left).unwrap_or(i64::MAX);
        let found = self.ready(&which, &[&group.id, &handled, &limit]).await?;
        self.lease_rows(group, found).await
    }

    /// Sets rows aside until a consumer with a handler comes.
    async fn set_unhandled(&mut self, group: &Group, seqs: Vec<i64>) -> Result<()> {
        if seqs.is_empty() {
            return Ok(());
        }
        self.set_aside = true;
        let sql =
            "UPDATE everbus.deliveries SET state = $3, due = $4, suspect = false, updated_at = $5
                   WHERE group_id = $1 AND seq = ANY ($2)";
        let (due, at) = (self.patience(), self.now.as_micros());
        self.tx
            .execute(
                "setting events aside",
                sql,
                &[&group.id, &seqs, &UNHANDLED, &due, &at],
            )
            .await
            .map(drop)
    }

    /// Leases rows. The attempt is counted here, before the handler runs. A damaged event is dead-lettered
    /// instead.
    async fn lease_rows(&mut self, group: &Group, rows: Vec<Ready>) -> Result<()> {
        let (mut seqs, mut damaged) = (Vec::with_capacity(rows.len()), Vec::new());
        for ready in rows {
            let seq = ready.stored.seq();
            // Damaged earlier failures must not stop the event.
            let failures = read_failures(ready.failures.as_deref()).unwrap_or_default();
            if ready.stored.damage.is_some() {
                let (engine, tx) = (self.engine, self.tx);
                let notice =
                    bury_damaged(engine, tx, group.id, &ready.stored, ready.attempt, failures)
                        .await?;
                self.notices.extend(notice);
                damaged.push(to_sql(seq));
                if self.engine.seats.isolating() == Some((group.id, seq)) {
                    self.engine.seats.isolate(None);
                }
                continue;
            }
            seqs.push(to_sql(seq));
            let delivery = Delivery::new(ready.stored.record, lease(group.id, self.token, seq))
                .after(ready.attempt + 1, failures)
                .retried(ready.retried);
            self.deliveries.push(delivery);
        }
        self.remove_rows(group, &damaged).await?;
        if seqs.is_empty() {
            return Ok(());
        }
        let sql = "UPDATE everbus.deliveries SET state = 1, attempt = attempt + 1, owner = $3, token = $4,
                     until = $5, updated_at = $6
                   WHERE group_id = $1 AND seq = ANY ($2)";
        let at = self.now.as_micros();
        let values: Params<'_> = &[
            &group.id,
            &seqs,
            &self.asking.owner,
            &self.token,
            &self.until,
            &at,
        ];
        self.tx.execute("claiming", sql, values).await?;
        let sql = "UPDATE everbus.groups SET active_at = $2 WHERE id = $1 AND active_at < $2";
        self.tx
            .execute("claiming", sql, &[&group.id, &at])
            .await
            .map(drop)
    }
}
