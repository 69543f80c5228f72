//! Maintenance: a check of the tables, and the record of the clock. Retention is a module of its own.

use std::path::PathBuf;
use std::time::Duration;

use everbus_core::{
    BoxFuture, CheckReport, ClockDoubt, ClockRecord, Code, Error, Holdings, Maintenance, Pruned,
    Result, Retention, Timestamp,
};

use crate::Postgres;
use crate::errors::damaged;
use crate::pool::{Conn, Sql, transaction};
use crate::rows::{RECORD, get, get_seq, to_sql};

/// At most this many damaged events are named.
const SHOWN: usize = 20;
/// Events read in one statement.
const PAGE: i64 = 1000;
/// Allowed difference between the clocks of machines: a day.
const TOLERATED: Duration = Duration::from_secs(24 * 3600);
const CLOCK: &str = "clock";

impl Maintenance for Postgres {
    fn check(&self) -> BoxFuture<'_, Result<CheckReport>> {
        Box::pin(self.check_tables())
    }

    fn backup(
        &self,
        _target: PathBuf,
        _progress: Box<dyn FnMut(u64, u64) + Send>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let what = "Everbus does not back up a PostgreSQL server";
            Err(Error::new(Code::Unsupported, what).hint(
                "use the tools of the server: pg_basebackup for all of it, or pg_dump --schema=everbus",
            ))
        })
    }

    fn prune_watched(
        &self,
        retention: Retention,
        progress: Box<dyn FnMut(Pruned) + Send>,
    ) -> BoxFuture<'_, Result<Pruned>> {
        Box::pin(self.prune_all(retention, progress))
    }

    fn preview(&self, retention: Retention) -> BoxFuture<'_, Result<Pruned>> {
        Box::pin(self.preview_all(retention))
    }

    fn holdings(&self) -> BoxFuture<'_, Result<Holdings>> {
        Box::pin(self.count_holdings())
    }

    fn look_at_clock(&self) -> BoxFuture<'_, Result<Option<ClockDoubt>>> {
        Box::pin(async move {
            self.check_open()?;
            transaction!(self.pool, "looking at the clock", |tx| {
                lock_meta(tx, CLOCK).await?;
                let record = clock_now(tx, self.now()).await?;
                note_clock(tx, &record).await?;
                Ok(record.doubt)
            })
        })
    }

    fn trust_clock(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_open()?;
            let now = self.now();
            transaction!(self.pool, "noting the time", |tx| {
                lock_meta(tx, CLOCK).await?;
                note_clock(tx, &ClockRecord::certain(now)).await
            })?;
            // Sets back times that an earlier clock, far ahead of this one, put into the future. The
            // checksum of an event does not cover its time of receipt.
            let db = self.conn().await?;
            let sql = "UPDATE everbus.log SET received_at = $1 WHERE seq IN (
                         SELECT seq FROM everbus.log
                         WHERE seq >= (SELECT everbus.seq_at($2)) - 10000 AND received_at > $2
                         ORDER BY seq LIMIT 5000)";
            let ahead = now.plus(TOLERATED).as_micros();
            while db
                .execute("bringing times back", sql, &[&now.as_micros(), &ahead])
                .await?
                > 0
            {}
            Ok(())
        })
    }
}

/// The value of a key in `meta`, locked until the end of the transaction. A missing key is added with an empty value.
async fn lock_meta(db: &impl Sql, key: &str) -> Result<String> {
    let doing = "reading what the schema says of itself";
    let sql = "INSERT INTO everbus.meta (key, value) VALUES ($1, '') ON CONFLICT DO NOTHING";
    db.execute(doing, sql, &[&key]).await?;
    let sql = "SELECT value FROM everbus.meta WHERE key = $1 FOR UPDATE";
    let row = db.one(doing, sql, &[&key]).await?;
    get(&row, 0)
}

async fn write_meta(db: &impl Sql, key: &str, value: &str) -> Result<()> {
    let sql = "UPDATE everbus.meta SET value = $2 WHERE key = $1";
    db.execute(
        "writing what the schema says of itself",
        sql,
        &[&key, &value],
    )
    .await?;
    Ok(())
}

fn parsed<T: serde::de::DeserializeOwned>(what: &str, text: &str) -> Result<Option<T>> {
    if text.is_empty() {
        return Ok(None);
    }
    let record = serde_json::from_str(text);
    record
        .map(Some)
        .map_err(|e| damaged(format!("the record of {what} is damaged: {e}")))
}

async fn note_clock(db: &impl Sql, record: &ClockRecord) -> Result<()> {
    let text = serde_json::to_string(record)
        .map_err(|e| Error::new(Code::Internal, format!("noting the time: {e}")))?;
    write_meta(db, CLOCK, &text).await
}

/// The result of the last check of the clock.
async fn recorded_clock(db: &impl Sql) -> Result<Option<ClockRecord>> {
    let sql = "SELECT value FROM everbus.meta WHERE key = $1";
    let row = db
        .first("looking what is known of the clock", sql, &[&CLOCK])
        .await?;
    match row {
        None => Ok(None),
        Some(row) => parsed(CLOCK, get(&row, 0)?),
    }
}

/// The result of a check of the clock at this moment, without writing it.
pub(crate) async fn clock_now(db: &impl Sql, now: Timestamp) -> Result<ClockRecord> {
    let sql = "SELECT received_at FROM everbus.log ORDER BY seq DESC LIMIT 1";
    let newest = db.first("reading the newest event", sql, &[]).await?;
    let newest: Option<i64> = newest.map(|row| get(&row, 0)).transpose()?;
    let newest = newest.map(Timestamp::from_micros);
    Ok(ClockRecord::look(recorded_clock(db).await?, newest, now))
}

/// The rules of the tables: each statement counts the rows that break one.
const RULES: &[(&str, &str)] = &[
    (
        "every event has a type",
        "SELECT count(*) FROM everbus.log l
         WHERE NOT EXISTS (SELECT 1 FROM everbus.types t WHERE t.id = l.type)",
    ),
    (
        "every delivery has its event",
        "SELECT count(*) FROM everbus.deliveries d
         WHERE NOT EXISTS (SELECT 1 FROM everbus.log l WHERE l.seq = d.seq)",
    ),
    (
        "every open dead letter has its event",
        "SELECT count(*) FROM everbus.dead_letters d WHERE d.retried_at IS NULL
         AND NOT EXISTS (SELECT 1 FROM everbus.log l WHERE l.seq = d.seq)",
    ),
    (
        "what belongs to an event goes with it",
        "SELECT (SELECT count(*) FROM everbus.outcomes o
                 WHERE NOT EXISTS (SELECT 1 FROM everbus.log l WHERE l.seq = o.seq))
              + (SELECT count(*) FROM everbus.failures f
                 WHERE NOT EXISTS (SELECT 1 FROM everbus.log l WHERE l.seq = f.seq))",
    ),
    (
        "no event is both waiting and dead",
        "SELECT count(*) FROM everbus.deliveries d
         JOIN everbus.dead_letters x ON x.seq = d.seq AND x.group_id = d.group_id
         WHERE x.retried_at IS NULL",
    ),
    (
        "no claim lies beyond its group",
        "SELECT count(*) FROM everbus.claims c JOIN everbus.groups g ON g.id = c.group_id
         WHERE c.hi > g.cursor",
    ),
    (
        "claims do not overlap",
        "SELECT count(*) FROM everbus.claims a JOIN everbus.claims b
         ON a.group_id = b.group_id AND a.token < b.token AND a.lo <= b.hi AND b.lo <= a.hi",
    ),
];

impl Postgres {
    async fn check_tables(&self) -> Result<CheckReport> {
        let mut report = CheckReport::default();
        let db = self.conn().await?;
        let version = crate::schema::VERSION;
        report.add("schema", true, format!("version {version}"));
        for (rule, sql) in RULES {
            let broken = get_seq(&db.one("checking", sql, &[]).await?, 0)?;
            let detail = match broken {
                0 => "ok".into(),
                _ => format!("{broken} rows break it"),
            };
            report.add(*rule, broken == 0, detail);
        }
        self.check_events(&db, &mut report).await?;
        self.check_future(&db, &mut report).await?;
        let clock = recorded_clock(&*db).await?;
        let server = db
            .one("checking", "SELECT current_setting('server_version')", &[])
            .await?;
        // The check of the trail takes a connection of its own.
        drop(db);
        crate::audit::check(self, &mut report).await?;
        if let Some(known) = clock {
            report.note_clock(&known);
        }
        report.add("PostgreSQL", true, get::<String>(&server, 0)?);
        report.add("durability", true, self.durability.to_string());
        Ok(report)
    }

    /// Reads every event as a consumer would.
    async fn check_events(&self, db: &Conn, report: &mut CheckReport) -> Result<()> {
        let sql = format!(
            "SELECT {RECORD} FROM everbus.log WHERE log.seq > $1 ORDER BY log.seq LIMIT $2"
        );
        let (mut after, mut events, mut damaged, mut shown) = (0, 0, 0u64, Vec::new());
        loop {
            let rows = db.query("checking", &sql, &[&to_sql(after), &PAGE]).await?;
            let Some(last) = rows.last() else { break };
            after = get_seq(last, 0)?;
            events += rows.len();
            for stored in self.types.read(db, &rows).await? {
                let Some(damage) = stored.damage else {
                    continue;
                };
                damaged += 1;
                if shown.len() < SHOWN {
                    let id = stored.record.event.display_id();
                    shown.push(format!("{} ({id}): {damage}", stored.record.position));
                }
            }
        }
        let detail = match damaged {
            0 => "ok".into(),
            _ => format!("{damaged} are damaged: {}", shown.join("; ")),
        };
        report.add("every event is as it was written", damaged == 0, detail);
        report.add("events", true, events.to_string());
        Ok(())
    }

    /// Reports events with a time in the future: while they are the newest, new events get their time.
    async fn check_future(&self, db: &Conn, report: &mut CheckReport) -> Result<()> {
        let now = self.now();
        let sql = "SELECT everbus.seq_at($1)";
        let row = db
            .one("checking", sql, &[&now.plus(TOLERATED).as_micros()])
            .await?;
        let first: Option<i64> = get(&row, 0)?;
        let detail = match first {
            None => "ok".into(),
            Some(first) => format!(
                "events from {first} on were received more than a day after now, {now}: a clock was ahead, \
                 or this one is behind; if this one is right, `everbus retention run --trust-clock` brings \
                 their times back"
            ),
        };
        report.add("no event is from the future", first.is_none(), detail);
        Ok(())
    }
}
