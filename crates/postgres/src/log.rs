//! Reading the log without a group, finding events by id, and their states.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    ADDRESSED, BoxFuture, Code, Cursor, Ended, Error, EventId, EventState, GroupName, GroupState,
    Log, Lookup, Pattern, Position, Ran, Recorded, Result, Shard, StartFrom, Timestamp, UNMATCHED,
    all_failures,
};
use tokio_postgres::Row;

use crate::Postgres;
use crate::pool::{Conn, Params, Sql};
use crate::rows::{
    AFTER_RECORD, LEASED, RECORD, Stored, WAITING, get, get_seq, read_failures, stored_at, to_sql,
};
use crate::store::KeptRow;

/// Payloads of one read have about this many bytes at most.
const MOST_BYTES: i64 = 16 << 20;
/// Numbers of the log that one statement looks at, so that it ends in time however few events match.
const LOOK: i64 = 200_000;

impl Log for Postgres {
    fn head(&self) -> BoxFuture<'_, Result<Cursor>> {
        Box::pin(async move {
            let db = self.conn().await?;
            // Not the newest event: one that commits later may have a lower number. Numbers without an
            // event, such as those of a refused batch, do not count.
            let end = self.horizon.ask(&*db).await?;
            last_event(&db, end.decided).await.map(Cursor::seq)
        })
    }

    fn read(
        &self,
        after: Cursor,
        patterns: Vec<Pattern>,
        limit: usize,
    ) -> BoxFuture<'_, Result<(Vec<Arc<Recorded>>, Cursor)>> {
        Box::pin(async move {
            let after = after.place(Shard::ONLY);
            let db = self.conn().await?;
            let end = self.horizon.ask(&*db).await?;
            if end.decided <= after {
                return Ok((Vec::new(), Cursor::seq(after)));
            }
            let range = (after, end.decided);
            let (found, mut searched) = self.read_matching(&db, range, &patterns, limit).await?;
            let last = found.last().map(|record| record.position.place());
            if searched == end.decided && last != Some(searched) {
                searched = last_event(&db, searched).await?;
            }
            Ok((found, Cursor::seq(searched.max(after))))
        })
    }

    fn resolve(&self, from: StartFrom, patterns: Vec<Pattern>) -> BoxFuture<'_, Result<Cursor>> {
        Box::pin(async move {
            let db = self.conn().await?;
            let decided = self.horizon.ask(&*db).await?.decided;
            let head = last_event(&db, decided).await?;
            self.resolve_start(&*db, from, &patterns, head)
                .await
                .map(Cursor::seq)
        })
    }

    fn wait_beyond(&self, cursor: Cursor) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let seq = cursor.place(Shard::ONLY);
            loop {
                let woken = self.bell.here.notified();
                let end = {
                    let db = self.conn().await?;
                    let end = self.horizon.ask(&*db).await?;
                    if end.decided > seq && last_event(&db, end.decided).await? > seq {
                        return Ok(());
                    }
                    end
                };
                // A writer that has not ended may roll back, which sends no notification. So look again soon.
                let pause = match end.newest > end.decided {
                    true => Duration::from_millis(20),
                    false => self.options.poll,
                };
                let _ = tokio::time::timeout(pause, woken).await;
            }
        })
    }
}

/// The position of the last event up to `upto`. A reader keeps its cursor elsewhere, so the cursor must not go beyond
/// this event: the numbers after it were rolled back, and a server that crashes before the next commit gives them
/// again.
async fn last_event(db: &Conn, upto: u64) -> Result<u64> {
    let sql = "SELECT coalesce(max(seq), 0) FROM everbus.log WHERE seq <= $1";
    let row = db
        .one("reading the end of the log", sql, &[&to_sql(upto)])
        .await?;
    get_seq(&row, 0)
}

impl Postgres {
    /// Reads events of a range (after, up to) that match, and how far the log was searched.
    async fn read_matching(
        &self,
        db: &Conn,
        (after, upto): (u64, u64),
        patterns: &[Pattern],
        limit: usize,
    ) -> Result<(Vec<Arc<Recorded>>, u64)> {
        let doing = "reading the log";
        // Read after the horizon, so that the types of all events up to the horizon are known.
        let all = self.types.learn_all(db).await?;
        let matching = |name: &str| patterns.iter().any(|pattern| pattern.matches(name));
        let wanted = all.iter().filter(|(_, name)| matching(name));
        let wanted: Vec<i32> = wanted.map(|(id, _)| *id).collect();
        let sql = format!(
            "WITH first AS (SELECT min(seq) AS seq FROM everbus.log WHERE seq > $1),
             page AS (
               SELECT l.* FROM everbus.log l, first
               WHERE l.seq >= first.seq AND l.seq <= least($2, first.seq + {LOOK}) AND l.type = ANY ($3)
               ORDER BY l.seq LIMIT $4)
             SELECT {RECORD}, first.seq FROM first LEFT JOIN (
               SELECT page.*, sum(octet_length(payload)) OVER (ORDER BY seq) - octet_length(payload) AS before
               FROM page) AS log ON log.before < {MOST_BYTES}
             ORDER BY log.seq"
        );
        let limit = limit.max(1);
        let values: Params<'_> = &[
            &to_sql(after),
            &to_sql(upto),
            &wanted,
            &to_sql(limit as u64),
        ];
        let mut rows = db.query(doing, &sql, values).await?;
        let first: Option<i64> = rows
            .first()
            .map_or(Ok(None), |row| get(row, AFTER_RECORD))?;
        rows.retain(|row| row.try_get::<_, i64>(0).is_ok());
        let looked = match first {
            None => upto,
            Some(first) => upto.min(crate::rows::seq_from(first.saturating_add(LOOK))),
        };
        let last = rows.last().map(|row| get_seq(row, 0)).transpose()?;
        let bytes: usize = rows
            .iter()
            .map(|row| get::<&[u8]>(row, 7).map_or(0, <[u8]>::len))
            .sum();
        let ended = rows.len() >= limit || bytes >= usize::try_from(MOST_BYTES).unwrap_or(0);
        let searched = match last {
            Some(last) if ended => last,
            _ => looked,
        };
        let stored = self.types.read(db, &rows).await?;
        let found = stored.into_iter().filter_map(Stored::or_left_out);
        Ok((found.collect(), searched))
    }

    /// The cursor for `from`: reading after it yields the first matching event. `head` is how far the log is decided.
    pub(crate) async fn resolve_start(
        &self,
        db: &impl Sql,
        from: StartFrom,
        patterns: &[Pattern],
        head: u64,
    ) -> Result<u64> {
        let doing = "looking where to begin";
        match from {
            StartFrom::New => Ok(head),
            StartFrom::First => Ok(0),
            StartFrom::Time(at) => {
                let sql = "SELECT everbus.seq_at($1)";
                let row = db.one(doing, sql, &[&at.as_micros()]).await?;
                let first: Option<i64> = get(&row, 0)?;
                let before = first.map(|seq| crate::rows::seq_from(seq).saturating_sub(1));
                Ok(before.unwrap_or(head).min(head))
            }
            StartFrom::Last => {
                let all = self.types.learn_all(db).await?.into_iter();
                let wanted = all.filter(|(_, name)| patterns.iter().any(|p| p.matches(name)));
                let wanted: Vec<i32> = wanted.map(|(id, _)| id).collect();
                let sql = "SELECT seq FROM everbus.log WHERE seq <= $1 AND type = ANY ($2)
                           ORDER BY seq DESC LIMIT 1";
                let row = db.first(doing, sql, &[&to_sql(head), &wanted]).await?;
                let last = row.map(|row| get_seq(&row, 0)).transpose()?;
                Ok(last.map_or(head, |seq| seq.saturating_sub(1)))
            }
        }
    }
}

impl Lookup for Postgres {
    fn find(&self, id: EventId) -> BoxFuture<'_, Result<Vec<Arc<Recorded>>>> {
        Box::pin(async move {
            let db = self.conn().await?;
            let sql = format!("SELECT {RECORD} FROM everbus.log WHERE id = $1 ORDER BY seq");
            let rows = db
                .query("looking for an event", &sql, &[&id.as_uuid()])
                .await?;
            self.types.read_intact(&*db, &rows).await
        })
    }

    fn states(&self, position: Position) -> BoxFuture<'_, Result<Vec<GroupState>>> {
        Box::pin(async move {
            let db = self.conn().await?;
            let stored = stored_at(&*db, &self.types, position.place()).await?;
            let Some(record) = stored.map(Stored::intact).transpose()? else {
                let what = format!("there is no event at {position}");
                return Err(Error::new(Code::NotFound, what));
            };
            let seq = to_sql(position.place());
            let rows = db
                .query("reading the state of an event", STATES, &[&seq])
                .await?;
            rows.iter().map(|row| state_in(row, &record)).collect()
        })
    }
}

/// The state of one event in every group, in one snapshot.
const STATES: &str = "SELECT g.name, g.cursor,
    dead.attempts, dead.failures, dead.seq IS NOT NULL AND dead.retried_at IS NULL,
    w.state, w.due, w.attempt, w.failures,
    EXISTS (SELECT 1 FROM everbus.claims c
      WHERE c.group_id = g.id AND c.lo <= $1 AND c.hi >= $1 AND NOT c.done @> $1),
    s.reason,
    o.attempts, o.failures, o.ended_at, o.took, o.worker,
    k.failures, k.past,
    (SELECT coalesce(array_agg(p.event_type), '{}') FROM everbus.subscriptions p WHERE p.group_id = g.id)
  FROM everbus.groups g
  LEFT JOIN everbus.dead_letters dead ON dead.seq = $1 AND dead.group_id = g.id
  LEFT JOIN everbus.deliveries w ON w.group_id = g.id AND w.seq = $1
  LEFT JOIN everbus.skips s ON s.group_id = g.id AND s.seq = $1
  LEFT JOIN everbus.outcomes o ON o.seq = $1 AND o.group_id = g.id
  LEFT JOIN everbus.failures k ON k.seq = $1 AND k.group_id = g.id
  ORDER BY g.name";

fn state_in(row: &Row, record: &Recorded) -> Result<GroupState> {
    let count = |column: usize| -> Result<u32> {
        Ok(u32::try_from(get::<Option<i32>>(row, column)?.unwrap_or(0)).unwrap_or(0))
    };
    let group: GroupName = get::<&str>(row, 0)?.parse()?;
    let mut state = GroupState {
        group,
        state: EventState::Done,
        attempts: 0,
        failures: vec![],
        due_at: None,
        skipped: None,
        ended: None,
    };
    if get(row, 4)? {
        state.state = EventState::Dlq;
        state.attempts = count(2)?;
        state.failures = read_failures(get(row, 3)?)?;
        return Ok(state);
    }
    if let Some(kind) = get::<Option<i16>>(row, 5)? {
        state.attempts = count(7)?;
        state.failures = read_failures(get(row, 8)?)?;
        state.state = EventState::of_waiting(kind == LEASED, &state.failures);
        let due: i64 = get(row, 6)?;
        state.due_at = (kind == WAITING).then(|| Timestamp::from_micros(due));
        return Ok(state);
    }
    if get(row, 9)? {
        state.attempts = 1;
        state.state = EventState::Processing;
        return Ok(state);
    }
    let is_for = record.event.is_for(&state.group);
    let patterns: Vec<&str> = get(row, 18)?;
    let patterns: Result<Vec<Pattern>> = patterns.into_iter().map(Pattern::new).collect();
    let patterns = patterns?;
    let event_type = record.event.event_type();
    let is_matched = patterns.iter().any(|p| p.matches(event_type));
    state.skipped = get(row, 10)?;
    let cursor = get_seq(row, 1)?;
    let unread = record.position.place() > cursor;
    if unread && state.skipped.is_none() && is_for && is_matched {
        state.state = EventState::Pending;
        return Ok(state);
    }
    ended(row, &mut state)?;
    if !is_for && state.skipped.is_none() {
        state.skipped = Some(ADDRESSED.to_owned());
    }
    // A group without subscriptions belongs to another broker, or only single events were given to it.
    let untouched = state.failures.is_empty() && state.ended.is_none() && !patterns.is_empty();
    if !is_matched && untouched && state.skipped.is_none() {
        state.skipped = Some(UNMATCHED.to_owned());
    }
    // Failures that the runtime recorded for an event of another broker.
    let kept = KeptRow::read(row, 16)?;
    if !kept.current().is_empty() {
        state.state = EventState::Processing;
    }
    if let Some(last) = kept.all.last() {
        // If the group has handled it, one more attempt came after the last failure.
        let done = state.state == EventState::Done && state.skipped.is_none();
        state.attempts = last.attempt.saturating_add(u32::from(done));
        state.failures = kept.all;
    }
    Ok(state)
}

/// Adds the attempts of an event that a group is done with: those of a retried dead letter, and those kept
/// when it ended.
fn ended(row: &Row, state: &mut GroupState) -> Result<()> {
    let count = |column: usize| -> Result<u32> {
        Ok(u32::try_from(get::<Option<i32>>(row, column)?.unwrap_or(0)).unwrap_or(0))
    };
    state.attempts = count(2)?;
    state.failures = read_failures(get(row, 3)?)?;
    let Some(at) = get::<Option<i64>>(row, 13)? else {
        return Ok(());
    };
    let took: Option<i64> = get(row, 14)?;
    let took = took.and_then(|took| u64::try_from(took).ok());
    state.attempts = state.attempts.saturating_add(count(11)?);
    let before = std::mem::take(&mut state.failures);
    state.failures = all_failures(before, read_failures(get(row, 12)?)?);
    state.failures.sort_by_key(|failure| failure.at);
    state.ended = Some(Ended {
        at: Timestamp::from_micros(at),
        ran: Ran {
            took: took.map(Duration::from_micros),
            worker: get(row, 15)?,
        },
    });
    Ok(())
}
