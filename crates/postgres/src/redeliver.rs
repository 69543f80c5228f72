//! Delivering events to a group again. The event gets a row in `deliveries`; the group's cursor does not
//! move.

use everbus_core::{
    BoxFuture, Event, GroupName, Position, Redeliver, Redelivery, Result, no_group,
};

use crate::Postgres;
use crate::groups::{self, Group, caught_up};
use crate::pool::{Params, Sql, Tx, transaction};
use crate::rows::{RECORD, get, get_seq, to_sql};

/// Events queued in one transaction, which holds the lock of the group.
const STEP: usize = 200;

impl Postgres {
    /// Delivers events again. Without `really` it only returns which events it would deliver.
    async fn redeliver_all(
        &self,
        name: GroupName,
        positions: Vec<Position>,
        really: bool,
    ) -> Result<Vec<Redelivery>> {
        self.end_leases().await?;
        let group = groups::by_name(&*self.conn().await?, &name).await?.id;
        let mut answers = Vec::with_capacity(positions.len());
        for step in positions.chunks(STEP) {
            let some = transaction!(self.pool, "delivering events once more", |tx| {
                let locked = groups::lock(tx, group).await?;
                let locked = locked.ok_or_else(|| no_group(&name))?;
                redeliver_some(self, tx, locked.group, step, really).await
            })?;
            answers.extend(some);
        }
        if really {
            self.bell.ring();
        }
        Ok(answers)
    }
}

async fn redeliver_some(
    engine: &Postgres,
    tx: &Tx<'_>,
    mut group: Group,
    positions: &[Position],
    really: bool,
) -> Result<Vec<Redelivery>> {
    let doing = "delivering events once more";
    // Moves past events that the group does not want: they count as done, although the stored cursor is before them.
    let decided = engine.horizon.ask(tx).await?.decided;
    group.cursor = caught_up(tx, &engine.types, &group, decided).await?;
    let seqs: Vec<i64> = positions.iter().map(|p| to_sql(p.place())).collect();
    let sql = format!(
        "SELECT {RECORD},
           EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = $1 AND d.seq = log.seq)
           OR EXISTS (SELECT 1 FROM everbus.dead_letters d
                WHERE d.seq = log.seq AND d.group_id = $1 AND d.retried_at IS NULL)
           OR EXISTS (SELECT 1 FROM everbus.claims c
                WHERE c.group_id = $1 AND log.seq BETWEEN c.lo AND c.hi AND NOT c.done @> log.seq)
         FROM everbus.log WHERE log.seq = ANY ($2)"
    );
    let rows = tx.query(doing, &sql, &[&group.id, &seqs]).await?;
    let stored = engine.types.read(tx, &rows).await?;
    let mut known = std::collections::HashMap::new();
    for (row, stored) in rows.iter().zip(stored) {
        let owed: bool = get(row, crate::rows::AFTER_RECORD)?;
        known.insert(get_seq(row, 0)?, (stored, owed));
    }
    let mut answers = Vec::with_capacity(positions.len());
    let mut again = Vec::new();
    for position in positions {
        let seq = position.place();
        answers.push(match known.get_mut(&seq) {
            None => Redelivery::Gone,
            Some((_, true)) => Redelivery::Owed,
            Some(_) if seq > group.cursor => Redelivery::Owed,
            Some((_, owed)) => {
                *owed = really;
                again.push(seq);
                Redelivery::Queued
            }
        });
    }
    if really {
        let now = engine.micros();
        let again = again.iter().filter_map(|seq| known.get(seq));
        let events: Vec<(u64, i32, &Event)> = again
            .map(|(s, _)| (s.seq(), s.type_id, &s.record.event))
            .collect();
        add_waiting(tx, &group, &events, true, now).await?;
    }
    Ok(answers)
}

/// Adds rows that wait from now on, without attempts: a retried dead letter, or a replay. An earlier skip no
/// longer holds. The caller has locked the group.
pub(crate) async fn add_waiting(
    db: &impl Sql,
    group: &Group,
    events: &[(u64, i32, &Event)],
    replayed: bool,
    now: i64,
) -> Result<()> {
    if events.is_empty() {
        return Ok(());
    }
    let doing = "delivering events once more";
    let seqs: Vec<i64> = events.iter().map(|(seq, ..)| to_sql(*seq)).collect();
    let types: Vec<i32> = events.iter().map(|(_, id, _)| *id).collect();
    let keys: Vec<Option<String>> = events
        .iter()
        .map(|(.., event)| group.key_of(event))
        .collect();
    let sql = "INSERT INTO everbus.deliveries
                 (group_id, seq, state, due, attempt, type, key, updated_at, replayed)
               SELECT $1, x.seq, 0, $2, 0, x.type, x.key, $2, $3
               FROM unnest($4::bigint[], $5::integer[], $6::text[]) AS x (seq, type, key)
               ON CONFLICT (group_id, seq) DO NOTHING";
    let values: Params<'_> = &[&group.id, &now, &replayed, &seqs, &types, &keys];
    db.execute(doing, sql, values).await?;
    let sql = "DELETE FROM everbus.skips WHERE group_id = $1 AND seq = ANY ($2)";
    db.execute(doing, sql, &[&group.id, &seqs]).await.map(drop)
}

impl Redeliver for Postgres {
    fn redeliver(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(self.redeliver_all(group, positions, true))
    }

    fn redeliverable(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(self.redeliver_all(group, positions, false))
    }
}
