//! Maintenance of the file: check, backup, restore. Retention is a separate module.

use std::path::{Path, PathBuf};
use std::time::Duration;

use everbus_core::{
    BoxFuture, CheckReport, ClockDoubt, Code, Error, Holdings, Maintenance, Pruned, Result,
    Retention, Timestamp,
};
use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, OpenFlags};
use tokio::sync::oneshot;

use crate::ahead::bring_back_times;
use crate::broker::SqliteEngine;
use crate::errors::from_sqlite;
use crate::file::{locate, open_reader};
use crate::retention::clock::{look_at_clock, trust_clock};
use crate::rows::{RECORD, TypeNames, read_stored};
use crate::schema::{Kind, VERSION, identify};

/// Pages copied between two checks of the time.
const PAGES: i32 = 256;
/// Name of the finding of SQLite's integrity check.
const INTEGRITY: &str = "integrity";
/// At most this many damaged events are named.
const SHOWN: usize = 20;

impl Maintenance for SqliteEngine {
    fn check(&self) -> BoxFuture<'_, Result<CheckReport>> {
        let (path, now) = (self.handle.path.clone(), self.handle.clock.now());
        apart("everbus-check", move || check(&path, now))
    }

    fn backup(
        &self,
        target: PathBuf,
        progress: Box<dyn FnMut(u64, u64) + Send>,
    ) -> BoxFuture<'_, Result<()>> {
        let path = self.handle.path.clone();
        apart("everbus-backup", move || {
            copy(&path, &target, false, progress)
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
        self.handle.job(|writer| look_at_clock(&mut writer.tx))
    }

    fn trust_clock(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.handle
                .job(|writer| trust_clock(&mut writer.tx))
                .await?;
            // Corrects times in the future, which a clock far ahead of this one has written.
            while self
                .handle
                .job(|writer| bring_back_times(&mut writer.tx))
                .await?
            {}
            Ok(())
        })
    }
}

/// Copies a backup to a path where a bus can open it. An existing file is replaced only with `force`, and
/// never while a process has it open. `progress` gets the pages done and the total.
pub fn restore(
    backup: &Path,
    target: &Path,
    force: bool,
    progress: Box<dyn FnMut(u64, u64) + Send>,
) -> Result<()> {
    let source = locate(backup, false)?;
    let conn = open_reader(&source)?;
    let report = verify(&conn)?;
    if let Some(bad) = report.findings.iter().find(|f| !f.ok) {
        return Err(Error::of_file(
            Code::Corrupt,
            format!("the backup is damaged: {}: {}", bad.check, bad.detail),
        )
        .hint("use another backup; nothing was changed"));
    }
    drop(conn);
    if target.exists() {
        if !force {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("{} exists already", target.display()),
            )
            .hint("restore to another path, or replace it with --force"));
        }
        refuse_if_in_use(target)?;
    }
    copy(&source, target, force, progress)?;
    crate::audit::adopt(target)
}

/// An exclusive lock can be taken only while no other process has the file open.
fn refuse_if_in_use(target: &Path) -> Result<()> {
    let in_use = |e: rusqlite::Error| match e.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DatabaseBusy | rusqlite::ErrorCode::DatabaseLocked) => {
            Error::of_file(
                Code::Busy,
                format!("{} is in use by a process", target.display()),
            )
            .hint("stop it first; nothing was changed")
        }
        // A damaged file may be replaced.
        _ => from_sqlite("looking whether the file is in use", e),
    };
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(target, flags).map_err(in_use)?;
    conn.pragma_update(None, "locking_mode", "EXCLUSIVE")
        .map_err(in_use)?;
    match conn.execute_batch("BEGIN EXCLUSIVE; ROLLBACK") {
        Ok(()) => Ok(()),
        Err(e) => {
            let error = in_use(e);
            if error.code() == Code::Corrupt {
                Ok(())
            } else {
                Err(error)
            }
        }
    }
}

/// Copies a database through the backup API into a temporary file beside the target, and renames it. A plain
/// copy of the file would lack the write-ahead log.
fn copy(
    source: &Path,
    target: &Path,
    replace: bool,
    mut progress: Box<dyn FnMut(u64, u64) + Send>,
) -> Result<()> {
    let doing = |e| from_sqlite("copying the file", e);
    if !replace && target.exists() {
        return Err(Error::new(
            Code::InvalidSetting,
            format!("{} exists already", target.display()),
        )
        .hint("choose another name; nothing is overwritten"));
    }
    let target = locate(target, true)?;
    let mut partial = target.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let _ = std::fs::remove_file(&partial);
    let result = (|| {
        let from = open_reader(source)?;
        // One read transaction for the whole copy: commits of other processes do not restart it.
        from.execute_batch("BEGIN").map_err(doing)?;
        from.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(()))
            .map_err(doing)?;
        let mut to = Connection::open(&partial).map_err(doing)?;
        {
            let backup = Backup::new(&from, &mut to).map_err(doing)?;
            loop {
                let step = backup.step(PAGES).map_err(doing)?;
                let state = backup.progress();
                let (all, left) = (state.pagecount.max(0) as u64, state.remaining.max(0) as u64);
                progress(all - left.min(all), all);
                match step {
                    StepResult::Done => break,
                    StepResult::More => {}
                    _ => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        }
        // One self-contained file: no write-ahead log beside it.
        let mode: String = to
            .query_row("PRAGMA journal_mode = DELETE", [], |r| r.get(0))
            .map_err(doing)?;
        if !mode.eq_ignore_ascii_case("delete") {
            return Err(Error::new(
                Code::Internal,
                "the copy kept its write-ahead log",
            ));
        }
        // From now on source and copy are different logs. A file of an older version gets its id when it is
        // migrated.
        if identify(&to)? == Kind::Ours(VERSION) {
            let doing = |e| from_sqlite("giving the copy an id", e);
            let change = to.unchecked_transaction().map_err(doing)?;
            crate::orphans::renew(&change)?;
            change.commit().map_err(doing)?;
        }
        drop(to);
        let io = |e: std::io::Error| {
            Error::new(
                Code::StorageFailed,
                format!("the copy cannot be made safe: {e}"),
            )
            .caused_by(e)
        };
        std::fs::File::open(&partial)
            .and_then(|file| file.sync_all())
            .map_err(io)?;
        if replace {
            for suffix in ["-wal", "-shm"] {
                let mut side = target.as_os_str().to_owned();
                side.push(suffix);
                let _ = std::fs::remove_file(PathBuf::from(side));
            }
        }
        std::fs::rename(&partial, &target).map_err(io)?;
        let directory = target.parent().unwrap_or(Path::new("."));
        std::fs::File::open(directory)
            .and_then(|d| d.sync_all())
            .map_err(io)
    })();
    if result.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    result
}

/// Runs a long task on a new thread.
pub(crate) fn apart<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> BoxFuture<'static, Result<T>> {
    let (reply, answer) = oneshot::channel();
    let spawned = std::thread::Builder::new()
        .name(name.into())
        .spawn(move || {
            let _ = reply.send(work());
        });
    Box::pin(async move {
        if let Err(e) = spawned {
            return Err(Error::new(Code::Internal, format!("no thread: {e}")));
        }
        answer
            .await
            .unwrap_or_else(|_| Err(Error::new(Code::Internal, "the work has ended")))
    })
}

fn check(path: &Path, now: Timestamp) -> Result<CheckReport> {
    let conn = open_reader(path)?;
    let mut report = verify(&conn)?;
    if report.is_ok() {
        crate::audit::check(path, &mut report)?;
    }
    if is_sound(&report) {
        check_events(&conn, &mut report)?;
        crate::log_head::check(path, &conn, &mut report)?;
        crate::ahead::check(&conn, now, &mut report)?;
    }
    if report.is_ok()
        && let Some(known) = crate::retention::clock::recorded(&conn)?
    {
        report.note_clock(&known);
    }
    report.add("SQLite", true, rusqlite::version());
    let mode: String = conn
        .query_row("PRAGMA journal_mode", [], |r| r.get(0))
        .map_err(|e| from_sqlite("checking", e))?;
    report.add("write-ahead log", mode.eq_ignore_ascii_case("wal"), mode);
    Ok(report)
}

/// Whether SQLite can read all of the file.
fn is_sound(report: &CheckReport) -> bool {
    report.findings.iter().any(|f| f.check == INTEGRITY && f.ok)
}

/// Reads every event as a consumer would.
fn check_events(conn: &Connection, report: &mut CheckReport) -> Result<()> {
    let doing = |e| from_sqlite("checking", e);
    let mut types = TypeNames::default();
    let mut statement = conn
        .prepare(&format!("SELECT {RECORD} FROM log ORDER BY log.seq"))
        .map_err(doing)?;
    let mut rows = statement.query([]).map_err(doing)?;
    let (mut damaged, mut shown) = (0u64, Vec::new());
    while let Some(row) = rows.next().map_err(doing)? {
        let stored = read_stored(conn, row, &mut types)?;
        if let Some(damage) = stored.damage {
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
    Ok(())
}

/// The structure of the database and the rules of the tables.
fn verify(conn: &Connection) -> Result<CheckReport> {
    let doing = |e| from_sqlite("checking", e);
    let mut report = CheckReport::default();
    match identify(conn)? {
        Kind::Empty => {
            return Err(
                Error::of_file(Code::NotEverbus, "the file holds no Everbus tables")
                    .hint("name a file that everbus made"),
            );
        }
        Kind::Ours(version) => {
            report.add("schema", true, format!("version {version}"));
        }
    }
    let problems: Vec<String> = conn
        .prepare("PRAGMA integrity_check(20)")
        .and_then(|mut s| s.query_map([], |r| r.get(0))?.collect())
        .map_err(doing)?;
    let sound = problems.len() == 1 && problems[0] == "ok";
    report.add(INTEGRITY, sound, problems.join("; "));
    if !sound {
        return Ok(report);
    }
    const RULES: &[(&str, &str)] = &[
        (
            "every event has a type",
            "SELECT count(*) FROM log WHERE type NOT IN (SELECT id FROM types)",
        ),
        (
            "every delivery has its event",
            "SELECT count(*) FROM deliveries WHERE seq NOT IN (SELECT seq FROM log)",
        ),
        (
            "every open dead letter has its event",
            "SELECT count(*) FROM dead_letters
             WHERE retried_at IS NULL AND seq NOT IN (SELECT seq FROM log)",
        ),
        (
            "what belongs to an event goes with it",
            "SELECT (SELECT count(*) FROM event_payloads WHERE seq NOT IN (SELECT seq FROM log))
             + (SELECT count(*) FROM expirations WHERE seq NOT IN (SELECT seq FROM log))
             + (SELECT count(*) FROM outcomes WHERE seq NOT IN (SELECT seq FROM log))
             + (SELECT count(*) FROM everbus_failures WHERE seq NOT IN (SELECT seq FROM log))",
        ),
        (
            "no event is both waiting and dead",
            "SELECT count(*) FROM deliveries JOIN dead_letters USING (group_id, seq)
             WHERE retried_at IS NULL",
        ),
        (
            "no claim lies beyond its group",
            "SELECT count(*) FROM claims JOIN groups ON groups.id = group_id WHERE hi > cursor",
        ),
        (
            "claims do not overlap",
            "SELECT count(*) FROM claims a JOIN claims b
             ON a.group_id = b.group_id AND a.id < b.id AND a.lo <= b.hi AND b.lo <= a.hi",
        ),
        (
            "the runs of the history's index do not overlap",
            "SELECT count(*) FROM (SELECT lo <= lag(hi) OVER (ORDER BY lo) OR hi < lo AS bad
             FROM history_runs WHERE state = 1) WHERE bad",
        ),
        (
            "times never fall",
            "SELECT count(*) FROM (SELECT received_at < lag(received_at) OVER (ORDER BY seq) AS fell
             FROM log) WHERE fell",
        ),
    ];
    for (rule, sql) in RULES {
        let broken: i64 = conn.query_row(sql, [], |r| r.get(0)).map_err(doing)?;
        let detail = if broken == 0 {
            "ok".into()
        } else {
            format!("{broken} rows break it")
        };
        report.add(*rule, broken == 0, detail);
    }
    let events: i64 = conn
        .query_row("SELECT count(*) FROM log", [], |r| r.get(0))
        .map_err(doing)?;
    report.add("events", true, events.to_string());
    Ok(report)
}
