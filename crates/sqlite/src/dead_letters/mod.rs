//! The dead letters of a file: queries, and (part of the writer) retry and purge. Nothing here needs a
//! running bus.

pub(crate) mod bury;
mod replace;

use everbus_core::dead_letters::{MAX_PAGE, TALLY_ERROR_CHARS};
use everbus_core::{
    Appended, BoxFuture, DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetterPage,
    DeadLetterTally, DeadLetters, Event, EventId, GroupName, LETTER_PURGED, PageRequest, Position,
    PurgeBasis, Purged, Replaced, Result, Timestamp,
};
use rusqlite::types::Value;
use rusqlite::{Connection, Row, params_from_iter};

use crate::append::position_before;
use crate::broker::SqliteEngine;
use crate::dead_letters::replace::replace;
use crate::deliveries::leases::Leases;
use crate::errors::from_sqlite;
use crate::readers::Reader;
use crate::retention::needed::owed;
use crate::retention::remove::remove_unowed;
use crate::rows::{
    AFTER_RECORD, RECORD, TypeNames, UNREADABLE, micros, read_failures, read_stored, seq_from,
    to_sql,
};
use crate::settle::insert_waiting;
use crate::sql::Sql as _;
use crate::streams::skip_ahead;
use crate::tx::Tx;

/// Rows changed in one transaction: few enough that other commands hardly wait.
const STEP: usize = 500;
/// A retry writes more per row.
const RETRY_STEP: usize = 100;

const COLUMNS: &str = "d.attempts, d.failures, d.handler, d.first_seen_at, d.died_at, d.retried_at, g.name, d.replaced_by";

impl DeadLetters for SqliteEngine {
    fn list(
        &self,
        filter: DeadLetterFilter,
        page: PageRequest,
    ) -> BoxFuture<'_, Result<DeadLetterPage>> {
        self.handle.query(move |reader| {
            page.validate()?;
            let mut condition = Condition::open(&reader.conn, &filter)?;
            if let Some(after) = &page.after {
                condition.beyond(after);
            }
            let sql = format!(
                "SELECT {RECORD}, {COLUMNS} FROM dead_letters d
                   JOIN log ON log.seq = d.seq JOIN groups g ON g.id = d.group_id
                 WHERE {} ORDER BY d.seq DESC, g.name LIMIT {} OFFSET {}",
                condition.sql, page.limit, page.offset
            );
            let items = read(reader, &sql, condition.values)?;
            let full = items.len() == page.limit;
            let next = items.last().filter(|_| full).map(DeadLetter::key);
            Ok(DeadLetterPage { items, next })
        })
    }

    fn count(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        self.handle.query(move |reader| {
            let condition = Condition::open(&reader.conn, &filter)?;
            let join = if filter.id.is_some() {
                "JOIN log ON log.seq = d.seq"
            } else {
                ""
            };
            let sql = format!(
                "SELECT count(*) FROM dead_letters d {join} WHERE {}",
                condition.sql
            );
            reader
                .conn
                .query_row(&sql, params_from_iter(condition.values), |r| r.get(0))
                .map(seq_from)
                .map_err(|e| from_sqlite("counting dead letters", e))
        })
    }

    fn get(&self, id: EventId) -> BoxFuture<'_, Result<Vec<DeadLetter>>> {
        self.handle.query(move |reader| {
            let sql = format!(
                "SELECT {RECORD}, {COLUMNS} FROM log
                   JOIN dead_letters d ON d.seq = log.seq JOIN groups g ON g.id = d.group_id
                 WHERE log.id = ?1 ORDER BY log.seq, g.name"
            );
            read(reader, &sql, vec![Value::Blob(id.as_bytes().to_vec())])
        })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<Vec<Replaced>>> {
        self.handle.query(|reader| {
            let doing = "reading the replaced dead letters";
            let sql = "SELECT d.seq, g.name, d.replaced_by FROM dead_letters d
                         JOIN groups g ON g.id = d.group_id
                       WHERE d.replaced_by IS NOT NULL ORDER BY d.seq, g.name";
            let rows: Vec<(i64, String, [u8; 16])> = reader.conn.all(doing, sql, [])?;
            let replaced = rows.into_iter().map(|(seq, group, by)| {
                let (position, group) = (Position::seq(seq_from(seq)), group.parse()?);
                Ok(Replaced {
                    key: DeadLetterKey { position, group },
                    by: EventId::from_bytes(by),
                })
            });
            replaced.collect()
        })
    }

    fn tally(
        &self,
        filter: DeadLetterFilter,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<DeadLetterTally>>> {
        self.handle.query(move |reader| {
            let condition = Condition::open(&reader.conn, &filter)?;
            tally(&reader.conn, &condition, limit.min(MAX_PAGE))
        })
    }

    fn retry(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        self.retry_some(filter, usize::MAX)
    }

    fn retry_some(&self, filter: DeadLetterFilter, limit: usize) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let (mut total, mut after) = (0, (0, 0));
            loop {
                let filter = filter.clone();
                let step = RETRY_STEP.min(limit - total);
                let done = self
                    .handle
                    .job(move |writer| retry_step(&mut writer.tx, &filter, after, step))
                    .await?;
                total += done.len();
                // Goes forward only: an event that fails again during this retry is not retried again.
                match done.last() {
                    Some(last) if done.len() == step && total < limit => after = *last,
                    _ => return Ok(total as u64),
                }
            }
        })
    }

    fn replace(&self, key: DeadLetterKey, corrected: Event) -> BoxFuture<'_, Result<Appended>> {
        Box::pin(async move {
            self.handle
                .job(move |writer| replace(&mut writer.tx, &key, corrected))
                .await?
        })
    }

    fn purge(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: DeadLetterFilter,
    ) -> BoxFuture<'_, Result<Purged>> {
        Box::pin(async move {
            let mut total = Purged::default();
            loop {
                let filter = filter.clone();
                let (done, more) = self
                    .handle
                    .job(move |writer| {
                        purge_some(
                            &mut writer.tx,
                            &mut writer.deliveries.leases,
                            cutoff,
                            basis,
                            &filter,
                        )
                    })
                    .await?;
                total.extend(done);
                if !more {
                    return Ok(total);
                }
            }
        })
    }
}

/// A condition over `dead_letters d`, with its values.
struct Condition {
    sql: String,
    values: Vec<Value>,
}

impl Condition {
    /// The open dead letters that match a filter.
    fn open(conn: &Connection, filter: &DeadLetterFilter) -> Result<Self> {
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
        let mut condition = Self {
            sql: "d.retried_at IS NULL".into(),
            values: Vec::new(),
        };
        if let Some(pattern) = pattern {
            let names: Vec<(i64, String)> =
                conn.read_all("reading the types", "SELECT id, name FROM types", [], |r| {
                    r.try_into()
                })?;
            let ids: Vec<String> = names
                .iter()
                .filter(|(_, name)| pattern.matches(name))
                .map(|(id, _)| id.to_string())
                .collect();
            // The inserted values are the engine's numbers, never text from a user.
            condition.sql += &format!(" AND d.type IN ({})", ids.join(","));
        }
        if let Some(group) = group {
            condition.and(
                "d.group_id = (SELECT id FROM groups WHERE name = ?)",
                Value::Text(group.as_str().to_owned()),
            );
        }
        if let Some(id) = id {
            condition.and(
                "d.seq IN (SELECT seq FROM log WHERE id = ?)",
                Value::Blob(id.as_bytes().to_vec()),
            );
        }
        if let Some(since) = since {
            // Times never decrease along the log, so a time corresponds to a position.
            let before = position_before(conn, *since)?;
            condition.and("d.seq > ?", Value::Integer(to_sql(before)));
        }
        if let Some(until) = until {
            let last = last_received_by(conn, *until)?;
            condition.and("d.seq <= ?", Value::Integer(to_sql(last)));
        }
        if let Some(died_until) = died_until {
            condition.and("d.died_at <= ?", Value::Integer(micros(*died_until)));
        }
        if tenant.as_deref() == Some("") {
            condition.sql +=
                " AND EXISTS (SELECT 1 FROM log x WHERE x.seq = d.seq AND x.tenant = 0)";
        } else if let Some(tenant) = tenant {
            condition.and(
                "EXISTS (SELECT 1 FROM log x JOIN tenants n ON n.id = x.tenant
                   WHERE x.seq = d.seq AND n.name = ?)",
                Value::Text(tenant.clone()),
            );
        }
        if let Some(handler) = handler {
            condition.and("d.handler = ?", Value::Text(handler.clone()));
        }
        if let Some(error) = error {
            condition.and(
                "instr(json_extract(d.failures, '$[#-1].error'), ?) > 0",
                Value::Text(error.clone()),
            );
        }
        Ok(condition)
    }

    fn and(&mut self, term: &str, value: Value) {
        self.sql += " AND ";
        self.sql += term;
        self.values.push(value);
    }

    /// Only dead letters after this one in the order of the list.
    fn beyond(&mut self, key: &DeadLetterKey) {
        let position = Value::Integer(to_sql(key.position.place()));
        self.sql += " AND d.seq <= ? AND (d.seq < ? OR g.name > ?)";
        self.values.extend([
            position.clone(),
            position,
            Value::Text(key.group.as_str().to_owned()),
        ]);
    }
}

/// The position of the last event received at or before a time.
fn last_received_by(conn: &Connection, at: Timestamp) -> Result<u64> {
    position_before(conn, Timestamp::from_micros(micros(at).saturating_add(1)))
}

fn tally(conn: &Connection, condition: &Condition, limit: usize) -> Result<Vec<DeadLetterTally>> {
    let doing = "counting dead letters";
    let sql = format!(
        "SELECT g.name, coalesce(t.name, '{UNREADABLE}'),
                substr(coalesce(json_extract(d.failures, '$[#-1].error'), ''), 1, {TALLY_ERROR_CHARS}) AS error,
                count(*) AS n
         FROM dead_letters d JOIN groups g ON g.id = d.group_id LEFT JOIN types t ON t.id = d.type
         WHERE {} GROUP BY g.name, t.name, error ORDER BY n DESC, g.name, t.name, error LIMIT {limit}",
        condition.sql
    );
    let values = params_from_iter(&condition.values);
    let rows: Vec<(String, String, String, i64)> = conn.all(doing, &sql, values)?;
    let tallies = rows.into_iter().map(|(group, event_type, error, count)| {
        Ok(DeadLetterTally {
            group: group.parse()?,
            event_type,
            error,
            count: seq_from(count),
        })
    });
    tallies.collect()
}

fn read(reader: &mut Reader, sql: &str, values: Vec<Value>) -> Result<Vec<DeadLetter>> {
    let doing = |e| from_sqlite("reading dead letters", e);
    let Reader { conn, types } = reader;
    let mut statement = conn.prepare_cached(sql).map_err(doing)?;
    let mut rows = statement.query(params_from_iter(values)).map_err(doing)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().map_err(doing)? {
        found.push(read_one(conn, row, types)?);
    }
    Ok(found)
}

fn read_one(conn: &Connection, row: &Row<'_>, types: &mut TypeNames) -> Result<DeadLetter> {
    let doing = |e| from_sqlite("reading a dead letter", e);
    let time = |index: usize| -> Result<Timestamp> {
        row.get(index).map(Timestamp::from_micros).map_err(doing)
    };
    let failures: String = row.get(AFTER_RECORD + 1).map_err(doing)?;
    let name: String = row.get(AFTER_RECORD + 6).map_err(doing)?;
    let retried: Option<i64> = row.get(AFTER_RECORD + 5).map_err(doing)?;
    let group: GroupName = name.parse()?;
    Ok(DeadLetter {
        group,
        handler: row.get(AFTER_RECORD + 2).map_err(doing)?,
        attempts: row.get(AFTER_RECORD).map_err(doing)?,
        failures: read_failures(Some(&failures))?,
        first_seen_at: time(AFTER_RECORD + 3)?,
        died_at: time(AFTER_RECORD + 4)?,
        retried_at: retried.map(Timestamp::from_micros),
        replaced_by: row
            .get::<_, Option<[u8; 16]>>(AFTER_RECORD + 7)
            .map_err(doing)?
            .map(EventId::from_bytes),
        // Damage is reported in the failures.
        record: read_stored(conn, row, types)?.record,
    })
}

fn pick(tx: &Tx, condition: &Condition, order: &str, limit: usize) -> Result<Vec<(u64, i64)>> {
    let sql = format!(
        "SELECT d.seq, d.group_id FROM dead_letters d WHERE {} {order} LIMIT {limit}",
        condition.sql
    );
    tx.conn.read_all(
        "choosing dead letters",
        &sql,
        params_from_iter(&condition.values),
        |r| Ok((seq_from(r.get(0)?), r.get(1)?)),
    )
}

fn retry_step(
    tx: &mut Tx,
    filter: &DeadLetterFilter,
    after: (u64, i64),
    limit: usize,
) -> Result<Vec<(u64, i64)>> {
    let mut condition = Condition::open(&tx.conn, filter)?;
    condition.sql += " AND (d.seq, d.group_id) > (?, ?)";
    condition
        .values
        .extend([Value::Integer(to_sql(after.0)), Value::Integer(after.1)]);
    let chosen = pick(tx, &condition, "ORDER BY d.seq, d.group_id", limit)?;
    let now = tx.clock.now();
    for (seq, group) in &chosen {
        let doing = "retrying a dead letter";
        let sql = "UPDATE dead_letters SET retried_at = ?3 WHERE seq = ?1 AND group_id = ?2";
        tx.conn
            .run(doing, sql, (to_sql(*seq), group, micros(now)))?;
        insert_waiting(tx, *group, *seq, 0, now, &[])?;
    }
    Ok(chosen)
}

fn purge_some(
    tx: &mut Tx,
    leases: &mut Leases,
    cutoff: Timestamp,
    basis: PurgeBasis,
    filter: &DeadLetterFilter,
) -> Result<(Purged, bool)> {
    let mut condition = Condition::open(&tx.conn, filter)?;
    match basis {
        PurgeBasis::Created => {
            let last = last_received_by(&tx.conn, cutoff)?;
            condition.and("d.seq <= ?", Value::Integer(to_sql(last)));
        }
        PurgeBasis::Died => {
            condition.and("d.died_at <= ?", Value::Integer(micros(cutoff)));
        }
    }
    let chosen = pick(tx, &condition, "", STEP)?;
    let mut ids = Vec::with_capacity(chosen.len());
    for (seq, group) in &chosen {
        ids.push(id_of(tx, *seq)?);
        let sql = "DELETE FROM dead_letters WHERE seq = ?1 AND group_id = ?2";
        tx.conn
            .run("purging a dead letter", sql, (to_sql(*seq), group))?;
    }
    let owed = owed(tx, leases)?;
    let mut purged = Purged::default();
    let more = chosen.len() == STEP;
    for ((seq, group), id) in chosen.into_iter().zip(ids) {
        let with_event = remove_unowed(tx, &owed, seq)?;
        let name = tx.groups.get(&group).map(|group| group.name.clone());
        // The rows of a removed group are removed with the group.
        if let (Some(id), Some(name)) = (id, name) {
            purged.add(id, name, with_event);
            // The event may have been removed with the dead letter of another group.
            if !with_event && id_of(tx, seq)?.is_some() {
                skip_ahead(tx, group, seq, LETTER_PURGED)?;
            }
        }
    }
    Ok((purged, more))
}

fn id_of(tx: &Tx, seq: u64) -> Result<Option<EventId>> {
    let sql = "SELECT id FROM log WHERE seq = ?1";
    tx.conn
        .first("naming a dead letter", sql, [to_sql(seq)])
        .map(|id: Option<[u8; 16]>| id.map(EventId::from_bytes))
}
