//! Removing events, with all rows that belong to them.

use everbus_core::Result;

use crate::Postgres;
use crate::bury::write_skips;
use crate::orphans::note_removed;
use crate::pool::Sql;
use crate::rows::seq_from;

/// Locks all groups until the transaction ends, so that no event is redelivered to a group that was done with it. A
/// group that is declared meanwhile begins with the events that are left.
pub(crate) async fn lock(db: &impl Sql) -> Result<()> {
    let sql = "SELECT id FROM everbus.groups ORDER BY id FOR UPDATE";
    db.query("locking the groups", sql, &[]).await?;
    Ok(())
}

/// Removes events and all rows about them, in a transaction that holds the [`lock`]. Returns how many.
pub(crate) async fn remove_events(engine: &Postgres, db: &impl Sql, seqs: &[i64]) -> Result<u64> {
    let doing = "removing events";
    if seqs.is_empty() {
        return Ok(0);
    }
    // The objects are deleted after this removal is durable, never before.
    note_removed(db, seqs, engine.micros()).await?;
    let sql = "DELETE FROM everbus.event_payloads p USING everbus.log l
               WHERE l.seq = ANY ($1) AND p.event_id = l.id AND p.tenant = l.tenant";
    db.execute(doing, sql, &[&seqs]).await?;
    for sql in [
        "DELETE FROM everbus.dead_letters WHERE seq = ANY ($1)",
        "DELETE FROM everbus.outcomes WHERE seq = ANY ($1)",
        "DELETE FROM everbus.failures WHERE seq = ANY ($1)",
        "DELETE FROM everbus.skips WHERE seq = ANY ($1)",
    ] {
        db.execute(doing, sql, &[&seqs]).await?;
    }
    // Cursors do not move: a group may have yet to read events between the removed ones.
    db.execute(
        doing,
        "DELETE FROM everbus.log WHERE seq = ANY ($1)",
        &[&seqs],
    )
    .await
}

/// Records why groups are done with events without having handled them. A group that has not reached an event yet will
/// skip it. Each pair is an event and a group.
pub(crate) async fn skip(
    engine: &Postgres,
    db: &impl Sql,
    pairs: &[(i64, i64)],
    reason: &str,
) -> Result<()> {
    let doing = "recording a skip";
    if pairs.is_empty() {
        return Ok(());
    }
    let (seqs, groups): (Vec<i64>, Vec<i64>) = pairs.iter().copied().unzip();
    let skips = pairs
        .iter()
        .map(|(seq, group)| (*group, seq_from(*seq), reason.to_owned()));
    let skips: Vec<(i64, u64, String)> = skips.collect();
    write_skips(db, &skips, engine.micros()).await?;
    let sql = "UPDATE everbus.groups g SET dropped_to = t.seq
               FROM (SELECT group_id, max(seq) AS seq FROM unnest($1, $2) AS u (seq, group_id)
                     GROUP BY group_id) AS t
               WHERE g.id = t.group_id AND g.cursor < t.seq AND g.dropped_to < t.seq";
    db.execute(doing, sql, &[&seqs, &groups]).await?;
    Ok(())
}
