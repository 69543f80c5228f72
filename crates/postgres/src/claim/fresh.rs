//! Handing out new events, up to the horizon.

use std::collections::HashSet;
use std::sync::Arc;

use everbus_core::{Delivery, Recorded, Result};

use super::{Claim, LAZY, lease};
use crate::bury::bury_damaged;
use crate::groups::{Group, Locked};
use crate::pool::{Params, Sql as _};
use crate::ranges::Ranges;
use crate::rows::{RECORD, Stored, UNHANDLED, WAITING, get, get_seq, to_sql};

/// About this many bytes are handed out in one transaction.
pub(super) const MOST_BYTES: i64 = 8 << 20;
/// A claim with more gaps than this between its events would be a large row. Then each event gets a row of its own.
pub(super) const MOST_PIECES: usize = 64;
/// In an ordered group no more than this many events wait in rows. The limit is this high because events behind a retry
/// of their key count too, and must not keep the events of other keys waiting.
const MOST_WAITING: i64 = 200_000;

impl Claim<'_, '_> {
    /// Hands out new events, up to the horizon.
    pub(super) async fn take_new(&mut self, locked: &Locked, room: usize) -> Result<()> {
        let group = &locked.group;
        if group.ordered {
            let sql = "SELECT count(*) FROM (SELECT 1 FROM everbus.deliveries
                       WHERE group_id = $1 AND state = 0 LIMIT $2) w";
            let row = self
                .tx
                .one("counting what waits", sql, &[&group.id, &MOST_WAITING])
                .await?;
            if get::<i64>(&row, 0)? >= MOST_WAITING {
                return Ok(());
            }
        }
        let end = self.engine.horizon.ask(self.tx).await?;
        self.held_back = end.newest > end.decided;
        if end.newest < group.cursor {
            // The sequence was set back, for example by hand: the numbers up to the cursor are given again.
            return self.move_cursor(group, end.newest, false).await;
        }
        if end.decided <= group.cursor {
            return Ok(());
        }
        let left = room - self.deliveries.len();
        let (wanted, searched) = self.read_new(group, end.decided, left).await?;
        let passed = if locked.ahead && !wanted.is_empty() {
            self.passed_by(group, searched).await?
        } else {
            HashSet::new()
        };
        let idle = wanted.is_empty();
        let mut ours: Vec<(i32, Arc<Recorded>)> = Vec::with_capacity(wanted.len());
        let mut others: Vec<(i32, Arc<Recorded>)> = Vec::new();
        for stored in wanted {
            if passed.contains(&stored.seq()) || !group.is_due(&stored.record.event) {
                continue;
            }
            if stored.damage.is_some() {
                let (engine, tx) = (self.engine, self.tx);
                let notice = bury_damaged(engine, tx, group.id, &stored, 0, Vec::new()).await?;
                self.notices.extend(notice);
            } else if self.handles(stored.record.event.event_type()) {
                ours.push((stored.type_id, stored.record));
            } else {
                others.push((stored.type_id, stored.record));
            }
        }
        if idle && searched < group.cursor + LAZY {
            return Ok(());
        }
        if !others.is_empty() {
            self.set_aside = true;
            self.park(group, &others, UNHANDLED, self.patience())
                .await?;
        }
        if group.ordered {
            self.park(group, &ours, WAITING, self.now.as_micros())
                .await?;
            return self.move_cursor(group, searched, !ours.is_empty()).await;
        }
        self.hand_out(group, searched, ours).await
    }

    /// New events that the group may want, and how far the log was searched.
    async fn read_new(
        &self,
        group: &Group,
        decided: u64,
        left: usize,
    ) -> Result<(Vec<Stored>, u64)> {
        let unwanted = group.unwanted(&self.engine.types);
        // Payloads are only read for rows that are handed out: their sizes are known without reading them. The upper
        // end is compared last: with both ends the planner takes the range for small, and reads all of it to sort it.
        // A plain `address IS NULL OR …` misleads the planner in the same way, hence the CASE.
        let sql = format!(
            "SELECT {RECORD} FROM (
               SELECT l.*, sum(octet_length(l.payload)) OVER (ORDER BY l.seq ROWS UNBOUNDED PRECEDING)
                 - octet_length(l.payload) AS before
               FROM (SELECT * FROM everbus.log l WHERE l.seq > $1
                       AND NOT (l.type = ANY ($3)) AND CASE WHEN l.address IS NULL THEN true ELSE l.address = $4 OR $5 END
                     ORDER BY l.seq LIMIT $6) l
             ) log WHERE log.seq <= $2 AND log.before < $7 ORDER BY log.seq"
        );
        let (cursor, upto) = (to_sql(group.cursor), to_sql(decided));
        let limit = i64::try_from(left).unwrap_or(i64::MAX);
        let values: Params<'_> = &[
            &cursor,
            &upto,
            &unwanted,
            &group.name.as_str(),
            &group.is_archive(),
            &limit,
            &MOST_BYTES,
        ];
        let rows = self.tx.query("reading new events", &sql, values).await?;
        let stored = self.engine.types.read(self.tx, &rows).await?;
        let bytes: usize = stored.iter().map(|s| s.record.event.payload().len()).sum();
        let cut = stored.len() >= left || i64::try_from(bytes).unwrap_or(i64::MAX) >= MOST_BYTES;
        let searched = match stored.last() {
            Some(last) if cut => last.seq(),
            _ => decided,
        };
        Ok((stored, searched))
    }

    /// Events after the cursor that are not new to the group: it has skipped them, or they have a row already.
    async fn passed_by(&self, group: &Group, searched: u64) -> Result<HashSet<u64>> {
        let sql = "SELECT seq FROM everbus.skips WHERE group_id = $1 AND seq > $2 AND seq <= $3
                   UNION SELECT seq FROM everbus.deliveries WHERE group_id = $1 AND seq > $2 AND seq <= $3";
        let (cursor, upto) = (to_sql(group.cursor), to_sql(searched));
        let rows = self
            .tx
            .query("reading the skips", sql, &[&group.id, &cursor, &upto])
            .await?;
        rows.iter().map(|row| get_seq(row, 0)).collect()
    }

    async fn move_cursor(&self, group: &Group, to: u64, active: bool) -> Result<()> {
        let sql = "UPDATE everbus.groups SET cursor = $2,
                     active_at = CASE WHEN $3 THEN greatest(active_at, $4) ELSE active_at END
                   WHERE id = $1";
        let at = self.now.as_micros();
        self.tx
            .execute(
                "moving a group",
                sql,
                &[&group.id, &to_sql(to), &active, &at],
            )
            .await
            .map(drop)
    }

    /// Stores events in rows of their own, without counting an attempt.
    async fn park(
        &self,
        group: &Group,
        events: &[(i32, Arc<Recorded>)],
        state: i16,
        due: i64,
    ) -> Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        let types: Vec<i32> = events.iter().map(|(id, _)| *id).collect();
        let seqs: Vec<i64> = events
            .iter()
            .map(|(_, r)| to_sql(r.position.place()))
            .collect();
        let keys: Vec<Option<String>> =
            events.iter().map(|(_, r)| group.key_of(&r.event)).collect();
        let sql = "INSERT INTO everbus.deliveries
                     (group_id, seq, state, due, attempt, type, key, updated_at)
                   SELECT $1, x.seq, $2, $3, 0, x.type, x.key, $4
                   FROM unnest($5::bigint[], $6::integer[], $7::text[]) AS x (seq, type, key)
                   ON CONFLICT (group_id, seq) DO NOTHING";
        let at = self.now.as_micros();
        self.tx
            .execute(
                "setting events aside",
                sql,
                &[&group.id, &state, &due, &at, &seqs, &types, &keys],
            )
            .await
            .map(drop)
    }

    /// Claims new events: as one range, or each in a row of its own if the range would have too many gaps.
    async fn hand_out(
        &mut self,
        group: &Group,
        searched: u64,
        events: Vec<(i32, Arc<Recorded>)>,
    ) -> Result<()> {
        let place = |event: &(i32, Arc<Recorded>)| event.1.position.place();
        let (Some(first), Some(last)) = (events.first().map(place), events.last().map(place))
        else {
            return self.move_cursor(group, searched, false).await;
        };
        let done = Ranges::all_but(first, last, events.iter().map(place));
        let at = self.now.as_micros();
        if done.len() > MOST_PIECES {
            let types: Vec<i32> = events.iter().map(|(id, _)| *id).collect();
            let seqs: Vec<i64> = events.iter().map(|event| to_sql(place(event))).collect();
            let sql = "INSERT INTO everbus.deliveries
                         (group_id, seq, state, due, attempt, type, owner, token, until, updated_at)
                       SELECT $1, x.seq, 1, $2, 1, x.type, $3, $4, $5, $2
                       FROM unnest($6::bigint[], $7::integer[]) AS x (seq, type)";
            let values: Params<'_> = &[
                &group.id,
                &at,
                &self.asking.owner,
                &self.token,
                &self.until,
                &seqs,
                &types,
            ];
            self.tx.execute("claiming", sql, values).await?;
            self.move_cursor(group, searched, true).await?;
        } else {
            let sql = "WITH claimed AS (
                         INSERT INTO everbus.claims (token, group_id, lo, hi, owner, until, done)
                         VALUES ($2, $1, $3, $4, $5, $6, $7::text::int8multirange))
                       UPDATE everbus.groups SET cursor = $8, active_at = greatest(active_at, $9)
                       WHERE id = $1";
            let (lo, hi, to) = (to_sql(first), to_sql(last), to_sql(searched));
            let done = done.to_string();
            let values: Params<'_> = &[
                &group.id,
                &self.token,
                &lo,
                &hi,
                &self.asking.owner,
                &self.until,
                &done,
                &to,
                &at,
            ];
            self.tx.execute("claiming", sql, values).await?;
        }
        for (_, record) in events {
            let lease = lease(group.id, self.token, record.position.place());
            self.deliveries.push(Delivery::new(record, lease));
        }
        Ok(())
    }
}
