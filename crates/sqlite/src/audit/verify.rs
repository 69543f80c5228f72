//! Verification of the audit trail: every record against the one before it, both ends against the head file, and the
//! triggers that protect the trail against mistakes of other programs.
//!
//! The trail may be long, so it is read in short transactions, and the bus continues meanwhile.

use std::path::Path;
use std::sync::OnceLock;

use everbus_core::{
    AuditBreak, AuditContent, AuditHash, AuditHead, AuditVerdict, Code, Error, Result, Timestamp,
};
use rusqlite::{Connection, Row};

use super::head::{Found, HeadFile, Kept};
use crate::errors::from_sqlite;
use crate::file::open_reader;
use crate::rows::to_sql;

/// Records read in one transaction.
const CHUNK: i64 = 1000;

pub(super) fn run(path: &Path, known: Option<AuditHead>) -> Result<AuditVerdict> {
    let conn = open_reader(path)?;
    let file = HeadFile::of(path);
    // Read before the chain, which is never behind the head file.
    let found = file.read();
    let mut verdict = AuditVerdict::default();
    let schema = schema_problem(&conn)?;
    if let Some(problem) = &schema
        && problem.missing_table
    {
        verdict.broken = Some(AuditBreak {
            seq: None,
            problem: problem.text.clone(),
        });
        return Ok(verdict);
    }
    let mut walk = Walk::new(&found, known);
    match walk.all(&conn) {
        Ok(()) => {}
        Err(Broken::Chain(broken)) => verdict.broken = Some(broken),
        Err(Broken::Reading(error)) => return Err(error),
    }
    verdict.verified = walk.verified;
    verdict.first = walk.first;
    verdict.head = (walk.at.seq > 0).then_some(walk.at);
    // Read after the chain, whose anchor is never ahead of the head file.
    let later = file.read();
    if verdict.broken.is_none() {
        verdict.broken = walk.anchor_problem(later.kept());
    }
    if let Some(problem) = schema {
        if verdict.broken.is_some() {
            verdict.notes.push(problem.text);
        } else {
            verdict.broken = Some(AuditBreak {
                seq: None,
                problem: problem.text,
            });
        }
    }
    if verdict.broken.is_none() {
        verdict.notes = notes(&later, walk.at, known);
        verdict.mended = mend(&file, &found, walk.at);
    }
    Ok(verdict)
}

/// Notes what could not be verified because there is no head to compare with.
fn notes(found: &Found, head: AuditHead, known: Option<AuditHead>) -> Vec<String> {
    let covered = known.map_or(0, |known| known.seq);
    let note = match found {
        _ if head.seq == 0 => return Vec::new(),
        Found::Nothing if covered == 0 => {
            "no head of the trail is kept beside the file: records that \
             were removed at its end would not be missed"
                .to_owned()
        }
        Found::Unreadable(why) if covered == 0 => {
            format!("the head of the trail that is kept beside the file cannot be read: {why}")
        }
        Found::Kept(Kept { since, .. }) if *since > 1 && covered + 1 < *since => format!(
            "the head of the trail was lost once and is kept only since record {since}: what was \
             removed at its end before that would not be missed"
        ),
        _ => return Vec::new(),
    };
    vec![note]
}

/// Moves the head to the end of the chain, which has just been verified, if a crash kept the head from moving.
fn mend(file: &HeadFile, found: &Found, head: AuditHead) -> Option<u64> {
    let before = *found.kept().filter(|kept| kept.head.seq < head.seq)?;
    let mut moved = false;
    let updated = file.update(|now| {
        moved = now.kept() == Some(&before);
        Ok(moved.then_some(Kept { head, ..before }))
    });
    (updated.is_ok() && moved).then(|| head.seq - before.head.seq)
}

/// Why a verification ended early.
enum Broken {
    Chain(AuditBreak),
    Reading(Error),
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        Self::Reading(error)
    }
}

fn broken(seq: u64, problem: String) -> Broken {
    Broken::Chain(AuditBreak {
        seq: Some(seq),
        problem,
    })
}

/// A record whose hash is known from elsewhere.
struct Point {
    head: AuditHead,
    whose: &'static str,
}

/// A verification under way.
struct Walk {
    /// Known hashes to compare with, in the order of the chain.
    points: Vec<Point>,
    anchor: AuditHead,
    /// The last record that was verified, or the anchor.
    at: AuditHead,
    first: Option<u64>,
    verified: u64,
    begun: bool,
}

impl Walk {
    fn new(found: &Found, known: Option<AuditHead>) -> Self {
        let mut points = Vec::new();
        if let Some(kept) = found.kept() {
            points.push(Point {
                head: kept.anchor,
                whose: "the anchor kept beside the file",
            });
            points.push(Point {
                head: kept.head,
                whose: "the head kept beside the file",
            });
        }
        points.extend(known.map(|head| Point {
            head,
            whose: "the head that was given",
        }));
        points.retain(|point| point.head.seq > 0);
        points.sort_by_key(|point| point.head.seq);
        Self {
            points,
            anchor: AuditHead::ORIGIN,
            at: AuditHead::ORIGIN,
            first: None,
            verified: 0,
            begun: false,
        }
    }

    fn all(&mut self, conn: &Connection) -> Result<(), Broken> {
        loop {
            conn.execute_batch("BEGIN")
                .map_err(|e| from_sqlite("reading the audit trail", e))?;
            let read = self.chunk(conn);
            let _ = conn.execute_batch("ROLLBACK");
            if read? < CHUNK {
                break;
            }
        }
        match self.points.last() {
            Some(point) if point.head.seq > self.at.seq => {
                let seq = self.at.seq + 1;
                let Point { head, whose } = point;
                Err(broken(
                    seq,
                    format!(
                        "record {seq} is missing: the trail ends before it, and {whose} is record {}",
                        head.seq
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Verifies some records in one transaction. Returns how many.
    fn chunk(&mut self, conn: &Connection) -> Result<i64, Broken> {
        let doing = |e| from_sqlite("reading the audit trail", e);
        self.take_anchor(conn)?;
        if !self.begun {
            self.begun = true;
            self.nothing_before_the_anchor(conn)?;
        }
        let mut statement = conn
            .prepare_cached(
                "SELECT seq, at, actor, action, entity_type, entity_id, tenant, correlation_id,
                   trace_id, details, hash
                 FROM audit_log WHERE seq > ?1 ORDER BY seq LIMIT ?2",
            )
            .map_err(doing)?;
        let mut rows = statement
            .query((to_sql(self.at.seq), CHUNK))
            .map_err(doing)?;
        let mut count = 0;
        while let Some(row) = rows.next().map_err(doing)? {
            self.step(row)?;
            count += 1;
        }
        Ok(count)
    }

    /// Begins after the anchor, also if retention moves it during the verification.
    fn take_anchor(&mut self, conn: &Connection) -> Result<(), Broken> {
        let (anchor, _) = super::anchor(conn)?;
        if self.begun && anchor.seq <= self.at.seq {
            self.anchor = anchor;
            return Ok(());
        }
        self.anchor = anchor;
        self.at = anchor;
        self.compare()
    }

    fn nothing_before_the_anchor(&self, conn: &Connection) -> Result<(), Broken> {
        let first: Option<i64> = conn
            .query_row("SELECT min(seq) FROM audit_log", [], |r| r.get(0))
            .map_err(|e| from_sqlite("reading the audit trail", e))?;
        match first {
            Some(first) if first <= to_sql(self.anchor.seq) => Err(Broken::Chain(AuditBreak {
                seq: u64::try_from(first).ok(),
                problem: format!(
                    "record {first} was inserted: the trail begins after record {}",
                    self.anchor.seq
                ),
            })),
            _ => Ok(()),
        }
    }

    fn step(&mut self, row: &Row<'_>) -> Result<(), Broken> {
        let expected = self.at.seq + 1;
        let seq: i64 = row
            .get(0)
            .map_err(|e| from_sqlite("reading the audit trail", e))?;
        if seq != to_sql(expected) {
            let what = format!("record {expected} is missing: the next one is {seq}");
            return Err(broken(expected, what));
        }
        let stored = row.get_ref(10).ok().and_then(|hash| hash.as_blob().ok());
        let stored = stored.and_then(AuditHash::from_bytes);
        let hash = content(row, expected).map(|content| content.hash(&self.at.hash));
        match (hash, stored) {
            (Some(hash), Some(stored)) if hash == stored => {
                self.at = AuditHead {
                    seq: expected,
                    hash,
                };
                self.first.get_or_insert(expected);
                self.verified += 1;
                self.compare()
            }
            _ => Err(broken(
                expected,
                format!(
                    "record {expected} was changed: its content and the record before it do not give its hash"
                ),
            )),
        }
    }

    /// Compares the current place with the known hashes.
    fn compare(&self) -> Result<(), Broken> {
        let here = |point: &&Point| point.head.seq == self.at.seq;
        for Point { head, whose } in self.points.iter().filter(here) {
            if head.hash != self.at.hash {
                let seq = head.seq;
                let what = if seq == self.anchor.seq {
                    format!("the anchor at record {seq} was replaced: {whose} has another hash")
                } else {
                    format!(
                        "record {seq} is not the one that was written: {whose} has another hash; it, or \
                         one before it, was replaced and the hashes were made anew"
                    )
                };
                return Err(broken(seq, what));
            }
        }
        Ok(())
    }

    /// Whether the trail begins where retention left it.
    fn anchor_problem(&self, kept: Option<&Kept>) -> Option<AuditBreak> {
        let kept = kept?;
        let allowed = kept.anchor.seq;
        if self.anchor.seq > allowed {
            let seq = allowed + 1;
            return Some(AuditBreak {
                seq: Some(seq),
                problem: format!(
                    "record {seq} is missing: the anchor says that retention removed everything up to \
                     {}, but it removed nothing after {allowed}",
                    self.anchor.seq
                ),
            });
        }
        if kept.head.seq < self.anchor.seq {
            let seq = kept.head.seq;
            return Some(AuditBreak {
                seq: Some(seq),
                problem: format!(
                    "record {seq}, the head kept beside the file, was contradicted by the trail when \
                     retention removed it"
                ),
            });
        }
        None
    }
}

/// The content of a row; `None` if it has values that no record can have.
fn content<'a>(row: &'a Row<'_>, seq: u64) -> Option<AuditContent<'a>> {
    let text = |column: usize| row.get_ref(column).ok()?.as_str().ok();
    let optional = |column: usize| row.get_ref(column).ok()?.as_str_or_null().ok();
    Some(AuditContent {
        seq,
        at: Timestamp::from_micros(row.get_ref(1).ok()?.as_i64().ok()?),
        actor: text(2)?,
        action: text(3)?,
        entity_type: optional(4)?,
        entity_id: optional(5)?,
        tenant: optional(6)?,
        correlation_id: optional(7)?,
        trace_id: optional(8)?,
        details: optional(9)?,
    })
}

struct SchemaProblem {
    text: String,
    missing_table: bool,
}

/// kind, name, statement
type Object = (String, String, String);

/// Whether the tables of the trail and their triggers are those that this build creates.
fn schema_problem(conn: &Connection) -> Result<Option<SchemaProblem>> {
    static EXPECTED: OnceLock<Vec<Object>> = OnceLock::new();
    let expected = match EXPECTED.get() {
        Some(expected) => expected,
        None => {
            let fresh = Connection::open_in_memory()
                .map_err(|e| from_sqlite("making the tables to compare with", e))?;
            crate::schema::migrate(&fresh)?;
            let made = objects(&fresh)?;
            EXPECTED.get_or_init(|| made)
        }
    };
    if expected.is_empty() {
        return Err(Error::new(Code::Internal, "there is no audit trail"));
    }
    let there = objects(conn)?;
    let named = |all: &[Object], name: &str| all.iter().find(|o| o.1 == name).cloned();
    for (kind, name, sql) in expected {
        let problem = match named(&there, name) {
            Some((_, _, found)) if found == *sql => continue,
            Some(_) => "was changed",
            None => "is missing",
        };
        return Ok(Some(SchemaProblem {
            text: format!("the {kind} {name}, which keeps the trail append-only, {problem}"),
            missing_table: kind == "table" && problem == "is missing",
        }));
    }
    let foreign = there.iter().find(|o| named(expected, &o.1).is_none());
    Ok(foreign.map(|(kind, name, _)| SchemaProblem {
        text: format!("the {kind} {name} on the audit trail is not one of Everbus"),
        missing_table: false,
    }))
}

/// The tables of the trail and their triggers, tables first, without comments and line breaks.
fn objects(conn: &Connection) -> Result<Vec<Object>> {
    let plain = |sql: String| {
        let lines = sql
            .lines()
            .map(|line| line.split("--").next().unwrap_or(""));
        let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
        words.join(" ")
    };
    conn.prepare(
        "SELECT type, name, coalesce(sql, '') FROM sqlite_schema
         WHERE tbl_name COLLATE NOCASE IN ('audit_log', 'audit_anchor') AND type <> 'index'
         ORDER BY type, name",
    )
    .and_then(|mut s| {
        s.query_map([], |r| Ok((r.get(0)?, r.get(1)?, plain(r.get(2)?))))?
            .collect()
    })
    .map_err(|e| from_sqlite("reading the tables", e))
}
