//! Verification of the audit trail: every record against the one before it, both ends against what the schema
//! keeps beside the records, and the triggers that keep honest programs from changing the trail.
//!
//! The owner of the tables can change all of this, the kept head included. A head that the caller kept elsewhere
//! reveals such a change.

use everbus_core::{
    AuditBreak, AuditContent, AuditHash, AuditHead, AuditVerdict, Result, Timestamp,
};
use tokio_postgres::Row;

use super::chain::{anchor, kept_head};
use super::read::{COLUMNS, number};
use crate::pool::{Sql, in_schema};

/// Records read in one statement.
const CHUNK: i64 = 1000;
const TABLES: &str = include_str!("../sql/audit.sql");

/// Verifies the trail. `db` is a transaction that sees one state of it.
pub(super) async fn run(db: &impl Sql, known: Option<AuditHead>) -> Result<AuditVerdict> {
    let mut verdict = AuditVerdict::default();
    let schema = schema_problem(db).await?;
    let kept = kept_head(db).await?;
    let mut points: Vec<Point> = Vec::new();
    points.extend(kept.map(|head| Point {
        head,
        whose: "the head kept beside the records",
    }));
    points.extend(known.map(|head| Point {
        head,
        whose: "the head that was given",
    }));
    points.retain(|point| point.head.seq > 0);
    points.sort_by_key(|point| point.head.seq);
    let start = anchor(db).await?;
    let mut walk = Walk {
        points,
        anchor: start,
        at: start,
        first: None,
        verified: 0,
    };
    verdict.broken = walk.all(db).await?;
    verdict.verified = walk.verified;
    verdict.first = walk.first;
    verdict.head = (walk.at.seq > 0).then_some(walk.at);
    if verdict.broken.is_none() && kept.is_some_and(|kept| kept.seq < walk.at.seq) {
        let seq = kept.map_or(0, |kept| kept.seq) + 1;
        verdict.broken = Some(AuditBreak {
            seq: Some(seq),
            problem: format!(
                "record {seq} was inserted: the head kept beside the records is before it"
            ),
        });
    }
    if let Some(problem) = schema {
        if verdict.broken.is_some() {
            verdict.notes.push(problem);
        } else {
            verdict.broken = Some(AuditBreak { seq: None, problem });
        }
    }
    if verdict.broken.is_none() && kept.is_none() && walk.at.seq > 0 {
        let note = "no head of the trail is kept beside the records: records that were removed at its \
                    end would not be missed";
        verdict.notes.push(note.to_owned());
    }
    Ok(verdict)
}

/// A record whose hash is known from elsewhere.
struct Point {
    head: AuditHead,
    whose: &'static str,
}

/// A walk along the chain.
struct Walk {
    /// Known hashes to compare with, in the order of the chain.
    points: Vec<Point>,
    anchor: AuditHead,
    /// The last record that was verified, or the anchor.
    at: AuditHead,
    first: Option<u64>,
    verified: u64,
}

fn broken(seq: u64, problem: String) -> Option<AuditBreak> {
    Some(AuditBreak {
        seq: Some(seq),
        problem,
    })
}

impl Walk {
    async fn all(&mut self, db: &impl Sql) -> Result<Option<AuditBreak>> {
        let doing = "reading the audit trail";
        let sql = "SELECT seq FROM everbus.audit_log WHERE seq <= $1 ORDER BY seq LIMIT 1";
        let before = db.query(doing, sql, &[&number(self.anchor.seq)]).await?;
        if let Some(row) = before.first() {
            let seq: i64 = row.get(0);
            let problem = format!(
                "record {seq} was inserted: the trail begins after record {}",
                self.anchor.seq
            );
            return Ok(broken(u64::try_from(seq).unwrap_or(0), problem));
        }
        let mut found = self.compare();
        let sql =
            format!("SELECT {COLUMNS} FROM everbus.audit_log WHERE seq > $1 ORDER BY seq LIMIT $2");
        while found.is_none() {
            let chunk = db
                .query(doing, &sql, &[&number(self.at.seq), &CHUNK])
                .await?;
            for row in &chunk {
                found = found.or_else(|| self.step(row));
                if found.is_some() {
                    break;
                }
            }
            if (chunk.len() as i64) < CHUNK {
                break;
            }
        }
        Ok(found.or_else(|| self.end()))
    }

    /// Whether the trail ends before a record that is known from elsewhere.
    fn end(&self) -> Option<AuditBreak> {
        let Point { head, whose } = self.points.last()?;
        let seq = self.at.seq + 1;
        if head.seq < seq {
            return None;
        }
        let what = format!(
            "record {seq} is missing: the trail ends before it, and {whose} is record {}",
            head.seq
        );
        broken(seq, what)
    }

    fn step(&mut self, row: &Row) -> Option<AuditBreak> {
        let expected = self.at.seq + 1;
        let seq: i64 = row.get(0);
        if seq != number(expected) {
            let what = format!("record {expected} is missing: the next one is {seq}");
            return broken(expected, what);
        }
        let hash = content(row, expected).hash(&self.at.hash);
        if AuditHash::from_bytes(row.get(10)) != Some(hash) {
            let what = format!(
                "record {expected} was changed: its content and the record before it do not give its hash"
            );
            return broken(expected, what);
        }
        self.at = AuditHead {
            seq: expected,
            hash,
        };
        self.first.get_or_insert(expected);
        self.verified += 1;
        self.compare()
    }

    /// Compares the current place with the known hashes.
    fn compare(&self) -> Option<AuditBreak> {
        let mut here = self.points.iter().filter(|p| p.head.seq == self.at.seq);
        let Point { head, whose } = here.find(|point| point.head.hash != self.at.hash)?;
        let seq = head.seq;
        broken(
            seq,
            if seq == self.anchor.seq {
                format!("the anchor at record {seq} was replaced: {whose} has another hash")
            } else {
                format!(
                    "record {seq} is not the one that was written: {whose} has another hash; it, or one \
                     before it, was replaced and the hashes were made anew"
                )
            },
        )
    }
}

fn content(row: &Row, seq: u64) -> AuditContent<'_> {
    AuditContent {
        seq,
        at: Timestamp::from_micros(row.get(1)),
        actor: row.get(2),
        action: row.get(3),
        entity_type: row.get(4),
        entity_id: row.get(5),
        tenant: row.get(6),
        correlation_id: row.get(7),
        trace_id: row.get(8),
        details: row.get(9),
    }
}

/// Whether the triggers of the trail and their functions are those that this version makes.
async fn schema_problem(db: &impl Sql) -> Result<Option<String>> {
    let sql = "SELECT t.tgname::text, t.tgenabled IN ('O', 'A'), p.prosrc, n.nspname::text
               FROM pg_catalog.pg_trigger t
               JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid
               JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
               JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
               WHERE c.oid IN ('everbus.audit_log'::regclass, 'everbus.audit_anchor'::regclass,
                   'everbus.audit_head'::regclass)
                 AND NOT t.tgisinternal
               ORDER BY t.tgname";
    let found = db.query("reading the triggers", sql, &[]).await?;
    let there: Vec<(String, bool, String)> = found
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2)))
        .collect();
    let schema = found.first().map_or(String::new(), |row| row.get(3));
    for (name, function) in TRIGGERS {
        let problem = match there.iter().find(|(found, ..)| found == name) {
            None => "is missing",
            Some((_, false, _)) => "is disabled",
            Some((_, _, source)) if *source == body_of(function, &schema) => continue,
            Some(_) => "was changed",
        };
        return Ok(Some(format!(
            "the trigger {name}, which keeps the trail append-only, {problem}"
        )));
    }
    let known = |name: &str| TRIGGERS.iter().any(|(known, _)| *known == name);
    let foreign = there.iter().find(|(name, ..)| !known(name));
    Ok(foreign
        .map(|(name, ..)| format!("the trigger {name} on the audit trail is not one of Everbus")))
}

/// Each trigger with its function.
const TRIGGERS: [(&str, &str); 6] = [
    ("audit_anchor_moves_on", "audit_anchor_moves_on"),
    ("audit_anchor_no_truncate", "audit_anchor_moves_on"),
    ("audit_head_moves_on", "audit_head_moves_on"),
    ("audit_head_no_truncate", "audit_head_moves_on"),
    ("audit_log_no_truncate", "audit_log_only_grows"),
    ("audit_log_only_grows", "audit_log_only_grows"),
];

/// The body of a function between its dollar quotes, as the server stores it.
fn body_of(function: &str, schema: &str) -> String {
    let declared = format!("CREATE FUNCTION everbus.{function}()");
    let rest = TABLES.split_once(&declared).map_or("", |(_, rest)| rest);
    let body = rest.split("$everbus$").nth(1).unwrap_or_default();
    in_schema(body, schema)
}
