//! Counts what a run would remove besides events and audit records.

use everbus_core::{Pruned, Result, Retention, Timestamp};

use super::others::AT_REST;
use crate::readers::Reader;
use crate::rows::{micros, seq_from};
use crate::sql::Sql as _;

/// Counts dead letters, payload stages, and rows of the outbox that are too old.
pub(super) fn count(reader: &Reader, retention: &Retention, now: Timestamp) -> Result<Pruned> {
    let (conn, doing) = (&reader.conn, "counting what may go");
    let dead_before = retention.dead_letters.map(|age| now.minus(age));
    let dead = dead_before.map_or(i64::MIN, micros);
    let mut old = Pruned::default();
    if let Some(before) = dead_before {
        let outbox = crate::outbox::count_dead(conn, before)?;
        let sql = format!("SELECT count(*) FROM dead_letters d WHERE d.died_at < ?1 AND {AT_REST}");
        let letters: i64 = conn.one(doing, &sql, [dead])?;
        (old.dead_letters, old.outbox) = (outbox.letters + seq_from(letters), outbox.rows);
    }
    if let Some(age) = retention.payloads {
        // Stages of open dead letters stay, unless the dead letter goes first.
        let sql = "SELECT count(*) FROM event_payloads p
                   WHERE p.timestamp < ?1 AND NOT EXISTS (SELECT 1 FROM dead_letters d
                     WHERE d.seq = p.seq AND d.retried_at IS NULL AND d.died_at >= ?2)";
        let stages: i64 = conn.one(doing, sql, (micros(now.minus(age)), dead))?;
        old.payloads = seq_from(stages);
    }
    if let Some(age) = retention.outbox {
        // Rows that were sent, and failed rows that count as sent because their dead letter goes first.
        let sql =
            "SELECT (SELECT count(*) FROM event_outbox WHERE status = 'sent' AND sent_at < ?1)
                     + (SELECT count(DISTINCT o.row) FROM dead_letters d INDEXED BY dead_open_died
                        CROSS JOIN event_outbox_origins v ON v.seq = d.seq
                        CROSS JOIN event_outbox o ON o.row = v.row
                        WHERE d.retried_at IS NULL AND d.died_at < ?2 AND +o.status = 'failed'
                          AND o.sent_at < ?1 AND NOT EXISTS (SELECT 1 FROM dead_letters e
                            WHERE e.seq = d.seq AND e.retried_at IS NULL
                              AND (e.died_at >= ?2 OR EXISTS (SELECT 1 FROM deliveries w
                                WHERE w.group_id = e.group_id AND w.seq = e.seq))))";
        let rows: i64 = conn.one(doing, sql, (now.minus(age).to_string(), dead))?;
        old.outbox += seq_from(rows);
    }
    Ok(old)
}
