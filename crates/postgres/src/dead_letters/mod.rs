//! The dead letters: queries, retry and purge. Nothing here needs a running bus.

mod replace;

use everbus_core::dead_letters::{MAX_PAGE, TALLY_ERROR_CHARS};
use everbus_core::{
    Appended, BoxFuture, DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetterPage,
    DeadLetterTally, DeadLetters, Event, EventId, LETTER_PURGED, PageRequest, Position, PurgeBasis,
    Purged, Replaced, Result, Timestamp,
};
use tokio_postgres::Row;

use crate::Postgres;
use crate::condition::Condition;
use crate::groups::{self, Group};
use crate::pool::{Conn, Sql, transaction};
use crate::redeliver::add_waiting;
use crate::retention::needed::Owed;
use crate::retention::remove;
use crate::rows::{
    AFTER_RECORD, RECORD, UNREADABLE, get, get_seq, read_failures, storable, to_sql,
};

/// Rows changed in one transaction.
const STEP: usize = 500;

const COLUMNS: &str = "d.attempts, d.failures, d.handler, d.first_seen_at, d.died_at, d.retried_at, g.name, d.replaced_by";

/// The last error of a dead letter.
const LAST_ERROR: &str = "coalesce(d.failures::json -> -1 ->> 'error', '')";

/// The tables of a statement over dead letters.
const FROM: &str = "FROM everbus.dead_letters d
  JOIN everbus.log log ON log.seq = d.seq JOIN everbus.groups g ON g.id = d.group_id";

impl Postgres {
    /// The condition for the open dead letters that a filter selects.
    async fn open_letters(&self, db: &impl Sql, filter: &DeadLetterFilter) -> Result<Condition> {
        let DeadLetterFilter {
            pattern,
            group,
            id,
            since,
            until,
            died_until,
            tenant,
            handler,
            error,
        } = filter;
        let mut condition = Condition::default();
        condition.term("d.retried_at IS NULL");
        if let Some(pattern) = pattern {
            self.types.learn_all(db).await?;
            let all = self.types.all().into_iter();
            let wanted = all
                .filter(|(_, name)| pattern.matches(name))
                .map(|(id, _)| id);
            condition.and("d.type = ANY (?)", wanted.collect::<Vec<i32>>());
        }
        if let Some(group) = group {
            condition.and("g.name = ?", group.as_str().to_owned());
        }
        if let Some(id) = id {
            condition.and("log.id = ?", id.as_uuid());
        }
        for (term, at) in [
            ("log.received_at >= ?", since),
            ("log.received_at <= ?", until),
            ("d.died_at <= ?", died_until),
        ] {
            if let Some(at) = at {
                condition.and(term, at.as_micros());
            }
        }
        if let Some(tenant) = tenant {
            condition.and("log.tenant = ?", storable(tenant));
        }
        if let Some(handler) = handler {
            condition.and("d.handler = ?", storable(handler));
        }
        if let Some(error) = error {
            let term = format!("position(? IN {LAST_ERROR}) > 0");
            condition.and(&term, storable(error));
        }
        Ok(condition)
    }

    async fn read_letters(
        &self,
        db: &Conn,
        sql: &str,
        condition: &Condition,
    ) -> Result<Vec<DeadLetter>> {
        let rows = db
            .query("reading dead letters", sql, &condition.params())
            .await?;
        let stored = self.types.read(db, &rows).await?;
        let letters = rows.iter().zip(stored);
        // The letter of a damaged event is returned too: its failures report the damage.
        letters
            .map(|(row, stored)| read_letter(row, stored.record))
            .collect()
    }
}

fn read_letter(row: &Row, record: std::sync::Arc<everbus_core::Recorded>) -> Result<DeadLetter> {
    let time = |index: usize| -> Result<Timestamp> {
        get(row, AFTER_RECORD + index).map(Timestamp::from_micros)
    };
    let retried: Option<i64> = get(row, AFTER_RECORD + 5)?;
    let replaced: Option<uuid::Uuid> = get(row, AFTER_RECORD + 7)?;
    Ok(DeadLetter {
        group: get::<&str>(row, AFTER_RECORD + 6)?.parse()?,
        handler: get(row, AFTER_RECORD + 2)?,
        attempts: u32::try_from(get::<i32>(row, AFTER_RECORD)?).unwrap_or(0),
        failures: read_failures(get(row, AFTER_RECORD + 1)?).unwrap_or_default(),
        first_seen_at: time(3)?,
        died_at: time(4)?,
        retried_at: retried.map(Timestamp::from_micros),
        replaced_by: replaced.map(EventId::from),
        record,
    })
}

impl DeadLetters for Postgres {
    fn list(
        &self,
        filter: DeadLetterFilter,
        page: PageRequest,
    ) -> BoxFuture<'_, Result<DeadLetterPage>> {
        Box::pin(async move {
            page.validate()?;
            let db = self.conn().await?;
            let mut condition = self.open_letters(&*db, &filter).await?;
            if let Some(after) = &page.after {
                let seq = condition.value(to_sql(after.position.place()));
                let group = condition.value(after.group.as_str().to_owned());
                condition.term(format!(
                    "d.seq <= {seq} AND (d.seq < {seq} OR g.name > {group})"
                ));
            }
            let limit = condition.value(to_sql(page.limit as u64));
            let offset = condition.value(to_sql(page.offset as u64));
            let sql = format!(
                "SELECT {RECORD}, {COLUMNS} {FROM} WHERE {} ORDER BY d.seq DESC, g.name
                 LIMIT {limit} OFFSET {offset}",
                condition.sql()
            );
            let items = self.read_letters(&db, &sql, &condition).await?;
            let full = items.len() == page.limit;
            let next = items.last().filter(|_| full).map(DeadLetter::key);
            Ok(DeadLetterPage { items, next })
        })
    }

    fn count(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let db = self.conn().await?;
            let condition = self.open_letters(&*db, &filter).await?;
            let sql = format!("SELECT count(*) {FROM} WHERE {}", condition.sql());
            let row = db
                .one("counting dead letters", &sql, &condition.params())
                .await?;
            get_seq(&row, 0)
        })
    }

    fn tally(
        &self,
        filter: DeadLetterFilter,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<DeadLetterTally>>> {
        Box::pin(async move {
            let db = self.conn().await?;
            let mut condition = self.open_letters(&*db, &filter).await?;
            let most = condition.value(to_sql(limit.min(MAX_PAGE) as u64));
            let sql = format!(
                "SELECT g.name, coalesce(t.name, '{UNREADABLE}'),
                   left({LAST_ERROR}, {TALLY_ERROR_CHARS}), count(*)
                 {FROM} LEFT JOIN everbus.types t ON t.id = d.type
                 WHERE {} GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT {most}",
                condition.sql()
            );
            let rows = db
                .query("counting dead letters", &sql, &condition.params())
                .await?;
            let tallies = rows.iter().map(|row| {
                Ok(DeadLetterTally {
                    group: get::<&str>(row, 0)?.parse()?,
                    event_type: get(row, 1)?,
                    error: get(row, 2)?,
                    count: get_seq(row, 3)?,
                })
            });
            tallies.collect()
        })
    }

    fn get(&self, id: EventId) -> BoxFuture<'_, Result<Vec<DeadLetter>>> {
        Box::pin(async move {
            let db = self.conn().await?;
            let mut condition = Condition::default();
            condition.and("log.id = ?", id.as_uuid());
            let sql = format!(
                "SELECT {RECORD}, {COLUMNS} {FROM} WHERE {} ORDER BY log.seq, g.name",
                condition.sql()
            );
            self.read_letters(&db, &sql, &condition).await
        })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<Vec<Replaced>>> {
        Box::pin(async move {
            let sql = "SELECT d.seq, g.name, d.replaced_by FROM everbus.dead_letters d
                         JOIN everbus.groups g ON g.id = d.group_id
                       WHERE d.replaced_by IS NOT NULL ORDER BY d.seq, g.name";
            let db = self.conn().await?;
            let rows = db
                .query("reading the replaced dead letters", sql, &[])
                .await?;
            let replaced = rows.iter().map(|row| {
                let position = Position::seq(get_seq(row, 0)?);
                let group = get::<&str>(row, 1)?.parse()?;
                Ok(Replaced {
                    key: DeadLetterKey { position, group },
                    by: EventId::from(get::<uuid::Uuid>(row, 2)?),
                })
            });
            replaced.collect()
        })
    }

    fn retry(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        self.retry_some(filter, usize::MAX)
    }

    fn retry_some(&self, filter: DeadLetterFilter, limit: usize) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            self.check_open()?;
            let (mut total, mut after) = (0, (0, i64::MIN));
            loop {
                let step = STEP.min(limit - total);
                let (chosen, done) = self.retry_step(&filter, after, step).await?;
                total += done;
                // Forwards only: an event that fails again during this retry is not retried again.
                match chosen.last() {
                    Some(last) if chosen.len() == step && total < limit => after = *last,
                    _ => {
                        self.bell.ring();
                        return Ok(total as u64);
                    }
                }
            }
        })
    }

    fn replace(&self, key: DeadLetterKey, corrected: Event) -> BoxFuture<'_, Result<Appended>> {
        Box::pin(self.replace_letter(key, corrected))
    }

    fn purge(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: DeadLetterFilter,
    ) -> BoxFuture<'_, Result<Purged>> {
        Box::pin(async move {
            self.check_open()?;
            let mut total = Purged::default();
            loop {
                let (done, more) = self.purge_step(cutoff, basis, &filter).await?;
                total.extend(done);
                if !more {
                    return Ok(total);
                }
            }
        })
    }
}

impl Postgres {
    /// Retries some dead letters that come after `after`, oldest event first. Returns the chosen ones as pairs of event
    /// and group, and how many of them now wait.
    async fn retry_step(
        &self,
        filter: &DeadLetterFilter,
        after: (i64, i64),
        limit: usize,
    ) -> Result<(Vec<(i64, i64)>, usize)> {
        let doing = "retrying dead letters";
        transaction!(self.pool, doing, |tx| {
            let mut condition = self.open_letters(tx, filter).await?;
            let (seq, group) = (condition.value(after.0), condition.value(after.1));
            condition.term(format!("(d.seq, d.group_id) > ({seq}, {group})"));
            let most = condition.value(to_sql(limit as u64));
            let sql = format!(
                "SELECT d.seq, d.group_id {FROM} WHERE {} ORDER BY d.seq, d.group_id LIMIT {most}",
                condition.sql()
            );
            let chosen = pairs(&tx.query(doing, &sql, &condition.params()).await?)?;
            let (seqs, groups): (Vec<i64>, Vec<i64>) = chosen.iter().copied().unzip();
            let locked = self.lock_all(tx, &groups).await?;
            // Only those that are still open: another retry may have been first.
            let sql = "UPDATE everbus.dead_letters d SET retried_at = $3
                       FROM unnest($1, $2) AS t (seq, group_id)
                       WHERE d.seq = t.seq AND d.group_id = t.group_id AND d.retried_at IS NULL
                       RETURNING d.seq, d.group_id";
            let mut done = pairs(
                &tx.query(doing, sql, &[&seqs, &groups, &self.micros()])
                    .await?,
            )?;
            done.sort_unstable();
            for group in &locked {
                let of_group = done.iter().filter(|(_, id)| *id == group.id);
                let seqs: Vec<i64> = of_group.map(|(seq, _)| *seq).collect();
                self.wait_again(tx, group, &seqs).await?;
            }
            Ok((chosen, done.len()))
        })
    }

    /// Locks groups in the order of their numbers, before any other row.
    async fn lock_all(&self, db: &impl Sql, ids: &[i64]) -> Result<Vec<Group>> {
        let mut locked = Vec::new();
        for id in ids.iter().collect::<std::collections::BTreeSet<_>>() {
            locked.extend(groups::lock(db, *id).await?.map(|locked| locked.group));
        }
        Ok(locked)
    }

    /// Makes events wait in a group, with a fresh set of attempts.
    async fn wait_again(&self, db: &impl Sql, group: &Group, seqs: &[i64]) -> Result<()> {
        let sql =
            format!("SELECT {RECORD} FROM everbus.log WHERE log.seq = ANY ($1) ORDER BY log.seq");
        let rows = db.query("retrying dead letters", &sql, &[&seqs]).await?;
        // A damaged event is dead-lettered again.
        let stored = self.types.read(db, &rows).await?;
        let events: Vec<(u64, i32, &Event)> = stored
            .iter()
            .map(|s| (s.seq(), s.type_id, &s.record.event))
            .collect();
        add_waiting(db, group, &events, false, self.micros()).await
    }

    /// Deletes some dead letters. Returns what was done, and whether there may be more.
    async fn purge_step(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: &DeadLetterFilter,
    ) -> Result<(Purged, bool)> {
        let doing = "purging dead letters";
        transaction!(self.pool, doing, |tx| {
            remove::lock(tx).await?;
            let mut condition = self.open_letters(tx, filter).await?;
            let term = match basis {
                PurgeBasis::Created => "log.received_at <= ?",
                PurgeBasis::Died => "d.died_at <= ?",
            };
            condition.and(term, cutoff.as_micros());
            let sql = format!(
                "SELECT d.seq, d.group_id, log.id, g.name {FROM} WHERE {}
                 ORDER BY d.seq, d.group_id LIMIT {STEP} FOR UPDATE OF d",
                condition.sql()
            );
            let rows = tx.query(doing, &sql, &condition.params()).await?;
            let chosen = pairs(&rows)?;
            let (seqs, groups): (Vec<i64>, Vec<i64>) = chosen.iter().copied().unzip();
            let sql = "DELETE FROM everbus.dead_letters d USING unnest($1, $2) AS t (seq, group_id)
                       WHERE d.seq = t.seq AND d.group_id = t.group_id";
            tx.execute(doing, sql, &[&seqs, &groups]).await?;
            let mut events = seqs.clone();
            events.dedup();
            let owed = Owed::read(tx).await?;
            let needed = owed.needed_among(self, tx, &events, None).await?;
            let gone: Vec<i64> = events
                .into_iter()
                .filter(|seq| !needed.contains(seq))
                .collect();
            remove::remove_events(self, tx, &gone).await?;
            // If the event stays in the log, its group counts it as skipped.
            let kept = chosen.iter().filter(|(seq, _)| needed.contains(seq));
            let kept: Vec<(i64, i64)> = kept.copied().collect();
            remove::skip(self, tx, &kept, LETTER_PURGED).await?;
            let mut purged = Purged::default();
            let mut counted = std::collections::HashSet::new();
            for row in &rows {
                let (seq, id): (i64, uuid::Uuid) = (get(row, 0)?, get(row, 2)?);
                let with_event = !needed.contains(&seq) && counted.insert(seq);
                purged.add(EventId::from(id), get::<&str>(row, 3)?.parse()?, with_event);
            }
            Ok((purged, rows.len() == STEP))
        })
    }
}

/// Reads pairs of event and group from the first two columns.
fn pairs(rows: &[Row]) -> Result<Vec<(i64, i64)>> {
    rows.iter()
        .map(|row| Ok((get(row, 0)?, get(row, 1)?)))
        .collect()
}
