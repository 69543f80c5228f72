//! Redelivery: a group gets events again that it has finished. The event gets a row in `deliveries`, like a dead letter
//! that is retried. The group's cursor does not move.

use everbus_core::{GroupName, Position, Redelivery, Result, no_group};
use rusqlite::params;

use crate::broker::SqliteEngine;
use crate::deliveries::claims::{StoredClaim, note_due, stored_claims};
use crate::deliveries::leases::Leases;
use crate::rows::{WAITING, to_sql};
use crate::settle::key_at;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Events queued in one transaction: few enough that a publish hardly waits.
const STEP: usize = 100;

impl SqliteEngine {
    /// Delivers events again. Without `really` it only returns which events it would deliver. The writer answers in
    /// both cases, because only the writer knows all deliveries.
    pub(crate) async fn redeliver_all(
        &self,
        group: GroupName,
        positions: Vec<Position>,
        really: bool,
    ) -> Result<Vec<Redelivery>> {
        let positions: Vec<u64> = positions.into_iter().map(Position::place).collect();
        let mut answers = Vec::with_capacity(positions.len());
        // Runs at least once, also without positions, to check that the group exists.
        let mut steps = positions.chunks(STEP);
        let mut step = steps.next().unwrap_or_default().to_vec();
        loop {
            let name = group.clone();
            let some = self
                .handle
                .job(move |writer| {
                    redeliver_some(
                        &mut writer.tx,
                        &mut writer.deliveries.leases,
                        &name,
                        &step,
                        really,
                    )
                })
                .await?;
            answers.extend(some);
            match steps.next() {
                Some(next) => step = next.to_vec(),
                None => return Ok(answers),
            }
        }
    }
}

fn redeliver_some(
    tx: &mut Tx,
    leases: &mut Leases,
    name: &GroupName,
    positions: &[u64],
    really: bool,
) -> Result<Vec<Redelivery>> {
    let group = tx.groups.id_of(name).ok_or_else(|| no_group(name))?;
    let claims = claims_of(tx, leases, group)?;
    let cursor = tx.groups.known(group)?.cursor;
    let mut answers = Vec::with_capacity(positions.len());
    for seq in positions {
        let in_flight = || claims.iter().any(|claim| claim.is_open(*seq));
        answers.push(match standing(tx, group, *seq)? {
            None => Redelivery::Gone,
            Some((_, true)) => Redelivery::Owed,
            Some(_) if *seq > cursor || in_flight() => Redelivery::Owed,
            Some((type_id, false)) => {
                if really {
                    queue_again(tx, group, *seq, type_id)?;
                }
                Redelivery::Queued
            }
        });
    }
    Ok(answers)
}

/// The type of an event, and whether it has a row or an open dead letter in the group. `None` if there is
/// no such event.
fn standing(tx: &Tx, group: i64, seq: u64) -> Result<Option<(i64, bool)>> {
    let sql = "SELECT CAST(type AS INTEGER),
                 EXISTS (SELECT 1 FROM deliveries WHERE group_id = ?1 AND seq = ?2)
                 OR EXISTS (SELECT 1 FROM dead_letters
                   WHERE seq = ?2 AND group_id = ?1 AND retried_at IS NULL)
               FROM log WHERE seq = ?2";
    tx.conn
        .first("reading the state of an event", sql, (group, to_sql(seq)))
}

/// All ranges that the group has handed out, by any owner. Memory knows more than the file about this
/// process's claims.
fn claims_of(tx: &Tx, leases: &Leases, group: i64) -> Result<Vec<StoredClaim>> {
    let mut claims = stored_claims(&tx.conn, "reading the claims", "group_id = ?1", [group])?;
    for claim in &mut claims {
        if let Some(own) = leases.claims.get(&claim.id) {
            claim.progress.clone_from(&own.progress);
        }
    }
    Ok(claims)
}

fn queue_again(tx: &mut Tx, group: i64, seq: u64, type_id: i64) -> Result<()> {
    let (key, now) = (key_at(tx, group, seq)?, tx.now());
    let doing = "delivering an event once more";
    let sql = "INSERT INTO deliveries
                 (group_id, seq, state, due, attempt, type, key, updated_at, replayed)
               VALUES (?1, ?2, ?3, ?4, 0, ?5, ?6, ?4, 1)";
    let values = params![group, to_sql(seq), WAITING, now, type_id, key];
    tx.conn.run(doing, sql, values)?;
    // An earlier skip no longer holds.
    let sql = "DELETE FROM skips WHERE group_id = ?1 AND seq = ?2";
    tx.conn.run(doing, sql, (group, to_sql(seq)))?;
    note_due(tx, group, now);
    Ok(())
}
