//! Handing out events: a look that changes nothing, and a claim if there is something to hand out.
//!
//! A claim covers a range of the log with one row, and only what may begin: the window of the consumer. In a
//! transaction that holds the lock of the group it ends leases, hands out rows that are due, and then new
//! events up to the horizon.

use std::collections::HashSet;
use std::sync::Arc;

use everbus_core::{
    ConsumeOptions, Death, Delivery, Event, Failure, FailureKind, Lease, Pattern, Position,
    Recorded, Result, Timestamp,
};

use crate::Postgres;
use crate::bury::{bury, bury_damaged, tell};
use crate::groups::{self, Group, Locked};
use crate::leases::end_expired;
use crate::pool::{Params, Sql, Tx, transaction};
use crate::ranges::Ranges;
use crate::rows::{
    AFTER_RECORD, RECORD, Stored, UNHANDLED, WAITING, get, get_seq, read_failures, to_sql,
};

/// After this many crashes an event is handed out only while nothing else is in flight, so that the next
/// crash proves that this event caused it.
const CRASHES_BEFORE_ISOLATION: i32 = 3;
/// At most this many events, and about this many bytes, are handed out in one transaction.
const BATCH: usize = 1024;
const MOST_BYTES: i64 = 8 << 20;
/// A claim whose events lie in more pieces than this would be a large row: each event gets its own.
const MOST_PIECES: usize = 64;
/// So far a cursor may trail behind events that the group does not want.
const LAZY: u64 = 1000;
/// In an ordered group no more than this many events wait in rows.
const MOST_WAITING: i64 = 20_000;

/// Who asks for events.
#[derive(Clone)]
pub(crate) struct Asking {
    pub(crate) seat: u64,
    pub(crate) group: i64,
    pub(crate) owner: i64,
    pub(crate) options: Arc<ConsumeOptions>,
}

/// The result of a look.
#[derive(Default)]
pub(crate) struct Looked {
    pub(crate) deliveries: Vec<Delivery>,
    /// When the leases of the deliveries end.
    pub(crate) until: i64,
    /// When to look again, if nothing else happens before.
    pub(crate) next: Option<i64>,
    /// A writer that has not ended holds events back: look again soon.
    pub(crate) held_back: bool,
}

/// What a look without a lock has seen.
struct Peek {
    work: bool,
    next: Option<i64>,
}

impl Postgres {
    /// Hands out up to `max` events, if there are any for this consumer.
    pub(crate) async fn look(&self, asking: &Asking, max: usize, sure: bool) -> Result<Looked> {
        self.check_open()?;
        // What a consumer here gives back must not be taken for a lease that ended.
        self.returning.done().await;
        let now = self.now();
        let room = self
            .seats
            .room(asking.seat, now.as_micros())
            .min(max)
            .min(BATCH);
        let patterns = self.seats.handled(asking.seat);
        if let Some(isolated) = self.seats.isolating()
            && (isolated.0 != asking.group || self.seats.holds(isolated))
        {
            if !self.seats.is_attended(isolated) {
                self.seats.isolate(None);
            } else {
                return Ok(Looked::default());
            }
        }
        if !sure || room == 0 {
            let peek = self.peek(asking, &patterns, now.as_micros()).await?;
            if !peek.work || room == 0 {
                return Ok(Looked {
                    next: peek.next,
                    ..Looked::default()
                });
            }
        }
        // Known outside of the transaction, so that a commit of unknown outcome can be taken back.
        let token = new_token();
        let claimed = transaction!(self.pool, "claiming", |tx| {
            let mut claim = Claim {
                engine: self,
                tx,
                asking,
                patterns: &patterns,
                token,
                now,
                until: now.plus(asking.options.lease).as_micros(),
                deliveries: Vec::new(),
                notices: Vec::new(),
                set_aside: false,
                held_back: false,
            };
            claim.run(room).await?;
            Ok((
                claim.deliveries,
                claim.until,
                claim.set_aside,
                claim.held_back,
                claim.notices.len(),
            ))
        });
        let (deliveries, until, set_aside, held_back, told) = match claimed {
            Ok(claimed) => claimed,
            Err(error) => {
                if error.outcome_unknown() {
                    self.take_back(token, asking.group).await;
                }
                return Err(error);
            }
        };
        self.seats.took(asking.seat, &deliveries, until);
        if told > 0 || set_aside {
            self.bell.ring();
        }
        let mut looked = Looked {
            until,
            next: None,
            held_back,
            deliveries,
        };
        if looked.deliveries.is_empty() {
            looked.next = self.peek(asking, &patterns, now.as_micros()).await?.next;
        }
        Ok(looked)
    }

    /// Gives back what a claim may have handed out whose commit was not answered.
    async fn take_back(&self, token: i64, group: i64) {
        let read = async {
            let conn = self.pool.get().await?;
            let sql = "SELECT l.seq FROM everbus.claims c
                         JOIN everbus.log l ON l.seq BETWEEN c.lo AND c.hi AND NOT c.done @> l.seq
                       WHERE c.token = $1
                       UNION SELECT seq FROM everbus.deliveries
                         WHERE group_id = $2 AND token = $1 AND state = 1";
            let rows = conn
                .query("taking a claim back", sql, &[&token, &group])
                .await?;
            let leases = rows
                .iter()
                .map(|row| Ok(lease(group, token, get_seq(row, 0)?)));
            leases.collect::<Result<Vec<Lease>>>()
        };
        let taken = match read.await {
            Ok(leases) => crate::settle::give_back(self, &leases).await,
            Err(error) => Err(error),
        };
        if let Err(error) = taken {
            tracing::warn!(target: "everbus::postgres", %error, "a claim is given back when its lease ends");
        }
    }

    /// Looks whether there is something to hand out.
    async fn peek(&self, asking: &Asking, patterns: &[Pattern], now: i64) -> Result<Peek> {
        let conn = self.conn().await?;
        loop {
            let group = self.groups.get(&*conn, asking.group).await?;
            if let Some(peek) = self.peek_as(&conn, &group, asking, patterns, now).await? {
                return Ok(peek);
            }
        }
    }

    /// Looks with the patterns that are known of a group. `None`: it has others by now.
    async fn peek_as(
        &self,
        conn: &crate::pool::Conn,
        group: &Group,
        asking: &Asking,
        patterns: &[Pattern],
        now: i64,
    ) -> Result<Option<Peek>> {
        let unwanted = group.unwanted(&self.types);
        // In an ordered group a row may go only if it is the first of its key.
        let sql = format!(
            "SELECT g.cursor, s.newest,
               (SELECT min(l.seq) FROM (SELECT l.seq FROM everbus.log l WHERE l.seq > g.cursor
                  AND NOT (l.type = ANY ($3)) AND (l.address IS NULL OR l.address = g.name OR $4)
                  ORDER BY l.seq LIMIT 1) l),
               EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 0
                  AND d.due <= $2 AND NOT d.suspect AND {FIRST_OF_KEY}),
               EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 0
                  AND d.due <= $2 AND d.suspect AND {FIRST_OF_KEY})
                 AND NOT EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 1
                  AND d.suspect AND d.owner = $5),
               (SELECT min(d.due) FROM everbus.deliveries d
                  WHERE d.group_id = g.id AND d.state = 0 AND d.due > $2),
               (SELECT min(d.due) FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 3),
               least((SELECT min(c.until) FROM everbus.claims c WHERE c.group_id = g.id),
                 (SELECT min(d.until) FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 1)),
               ARRAY (SELECT DISTINCT d.type FROM everbus.deliveries d
                  WHERE d.group_id = g.id AND d.state = 3 AND {FIRST_OF_KEY}),
               ARRAY (SELECT s.event_type FROM everbus.subscriptions s
                  WHERE s.group_id = g.id ORDER BY s.name)
             FROM everbus.groups g,
               (SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS newest FROM everbus.log_seq) s
             WHERE g.id = $1"
        );
        let values: Params<'_> = &[
            &asking.group,
            &now,
            &unwanted,
            &group.is_archive(),
            &asking.owner,
        ];
        let row = conn.first("looking for events", &sql, values).await?;
        let row = row.ok_or_else(groups::removed)?;
        let (cursor, newest) = (get_seq(&row, 0)?, get_seq(&row, 1)?);
        let first_new: Option<i64> = get(&row, 2)?;
        let (due, suspect): (bool, bool) = (get(&row, 3)?, get(&row, 4)?);
        let next_due: Option<i64> = get(&row, 5)?;
        let (unhandled, lease_end): (Option<i64>, Option<i64>) = (get(&row, 6)?, get(&row, 7)?);
        let texts: Vec<&str> = get(&row, 9)?;
        if !texts
            .iter()
            .copied()
            .eq(group.patterns.iter().map(Pattern::as_str))
        {
            self.groups.forget(group.id);
            return Ok(None);
        }
        let set_aside: Vec<i32> = get(&row, 8)?;
        self.types.learn(conn, set_aside.iter().copied()).await?;
        let mut names = set_aside.iter().filter_map(|id| self.types.name(*id));
        let is_over = |at: Option<i64>| at.is_some_and(|at| at <= now);
        let work = first_new.is_some()
            || newest > cursor + LAZY
            || due
            || suspect
            || is_over(unhandled)
            || is_over(lease_end)
            || names.any(|name| patterns.iter().any(|p| p.matches(&name)));
        let next = [next_due, unhandled, lease_end].into_iter().flatten().min();
        Ok(Some(Peek { work, next }))
    }
}

/// A row `d` that no other row of its key stands before, and none is in flight.
const FIRST_OF_KEY: &str = "(d.key IS NULL OR NOT EXISTS (SELECT 1 FROM everbus.deliveries o
  WHERE o.group_id = d.group_id AND o.key = d.key AND o.seq <> d.seq AND (o.seq < d.seq OR o.state = 1)))";

/// A random fencing token: no earlier holder can guess or repeat it.
fn new_token() -> i64 {
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    ((high ^ low) >> 1).cast_signed()
}

fn lease(group: i64, token: i64, seq: u64) -> Lease {
    Lease::new(
        Position::seq(seq),
        [group.cast_unsigned(), token.cast_unsigned()],
    )
}

/// A claim under way.
struct Claim<'a, 'c> {
    engine: &'a Postgres,
    tx: &'a Tx<'c>,
    asking: &'a Asking,
    /// What the consumer handles.
    patterns: &'a [Pattern],
    token: i64,
    now: Timestamp,
    until: i64,
    deliveries: Vec<Delivery>,
    /// The events that report dead letters.
    notices: Vec<Event>,
    /// Events wait for a handler in another consumer.
    set_aside: bool,
    held_back: bool,
}

/// A row that may be handed out.
struct Ready {
    stored: Stored,
    attempt: u32,
    failures: Option<String>,
    crashes: i32,
    retried: bool,
}

impl Claim<'_, '_> {
    async fn run(&mut self, room: usize) -> Result<()> {
        let at = self.now.as_micros();
        let Some(locked) = groups::lock(self.tx, self.asking.group).await? else {
            return Err(groups::removed());
        };
        let group = &locked.group;
        self.engine.groups.put(group);
        if locked.lease_end.is_some_and(|end| end <= at) {
            end_expired(self.tx, group, self.now).await?;
        }
        if locked.unhandled.is_some_and(|due| due <= at) {
            self.give_up_unhandled(group).await?;
        }
        self.take_suspect(group).await?;
        if self.engine.seats.isolating().is_none() {
            self.take_due(group, room).await?;
            self.take_set_aside(group, room).await?;
            if self.deliveries.len() < room {
                self.take_new(&locked, room).await?;
                if group.ordered {
                    self.take_due(group, room).await?;
                }
            }
        }
        let notices = std::mem::take(&mut self.notices);
        self.notices.clone_from(&notices);
        tell(self.engine, self.tx, notices).await
    }

    fn handles(&self, event_type: &str) -> bool {
        self.patterns.iter().any(|p| p.matches(event_type))
    }

    fn patience(&self) -> i64 {
        self.now
            .plus(self.asking.options.no_handler_after)
            .as_micros()
    }

    /// Dead-letters events that had no handler in any process for too long.
    async fn give_up_unhandled(&mut self, group: &Group) -> Result<()> {
        let sql = format!(
            "SELECT {RECORD}, d.attempt, d.failures FROM everbus.deliveries d
             JOIN everbus.log log ON log.seq = d.seq
             WHERE d.group_id = $1 AND d.state = 3 AND d.due <= $2 ORDER BY d.seq LIMIT 200"
        );
        let at = self.now.as_micros();
        let rows = self
            .tx
            .query("reading what has no handler", &sql, &[&group.id, &at])
            .await?;
        let stored = self.engine.types.read(self.tx, &rows).await?;
        let (mut seqs, mut kept) = (Vec::new(), Vec::new());
        for (row, stored) in rows.iter().zip(stored) {
            if self
                .engine
                .seats
                .is_handled(group.id, stored.record.event.event_type())
            {
                // A consumer that is paused has a handler.
                kept.push(to_sql(stored.seq()));
                continue;
            }
            let attempt = u32::try_from(get::<i32>(row, AFTER_RECORD)?).unwrap_or(0);
            let failures = read_failures(get(row, AFTER_RECORD + 1)?)?;
            let text = format!(
                "no process had a handler for {} for {:?}",
                stored.record.event.event_type(),
                self.asking.options.no_handler_after
            );
            let failure = Failure::new(attempt, self.now, FailureKind::NoHandler, text);
            let death = Death::new(attempt, failures, Some(failure), self.now);
            let seq = stored.seq();
            let notice = bury(self.engine, self.tx, group.id, seq, death).await?;
            self.notices.extend(notice);
            seqs.push(to_sql(seq));
        }
        if !kept.is_empty() {
            let sql =
                "UPDATE everbus.deliveries SET due = $3 WHERE group_id = $1 AND seq = ANY ($2)";
            let due = self.patience();
            self.tx
                .execute("setting events aside", sql, &[&group.id, &kept, &due])
                .await?;
        }
        self.remove_rows(group, &seqs).await
    }

    async fn remove_rows(&self, group: &Group, seqs: &Vec<i64>) -> Result<()> {
        if seqs.is_empty() {
            return Ok(());
        }
        let sql = "DELETE FROM everbus.deliveries WHERE group_id = $1 AND seq = ANY ($2)";
        self.tx
            .execute("removing rows", sql, &[&group.id, seqs])
            .await
            .map(drop)
    }

    /// Reads rows that may go.
    async fn ready(&self, which: &str, values: Params<'_>) -> Result<Vec<Ready>> {
        let sql = format!(
            "SELECT {RECORD}, d.attempt, d.failures, d.crashes, d.replayed
               OR EXISTS (SELECT 1 FROM everbus.dead_letters x WHERE x.seq = d.seq
                 AND x.group_id = d.group_id AND x.retried_at IS NOT NULL)
             FROM everbus.deliveries d JOIN everbus.log log ON log.seq = d.seq
             WHERE d.group_id = $1 AND {which}"
        );
        let rows = self
            .tx
            .query("reading the waiting deliveries", &sql, values)
            .await?;
        let stored = self.engine.types.read(self.tx, &rows).await?;
        let ready = rows.iter().zip(stored).map(|(row, stored)| {
            Ok(Ready {
                stored,
                attempt: u32::try_from(get::<i32>(row, AFTER_RECORD)?).unwrap_or(0),
                failures: get(row, AFTER_RECORD + 1)?,
                crashes: get(row, AFTER_RECORD + 2)?,
                retried: get(row, AFTER_RECORD + 3)?,
            })
        });
        ready.collect()
    }

    /// Hands out one event that was in flight when a lease ended: one at a time, to find the event that kills
    /// processes; after several crashes only while nothing else is in flight.
    async fn take_suspect(&mut self, group: &Group) -> Result<()> {
        let seats = &self.engine.seats;
        let sql = "SELECT EXISTS (SELECT 1 FROM everbus.deliveries
                   WHERE group_id = $1 AND state = 1 AND suspect AND owner = $2),
                   EXISTS (SELECT 1 FROM everbus.deliveries WHERE group_id = $1 AND state = 0 AND suspect)";
        let row = self
            .tx
            .one(
                "reading the suspects",
                sql,
                &[&group.id, &self.asking.owner],
            )
            .await?;
        let (running, waiting): (bool, bool) = (get(&row, 0)?, get(&row, 1)?);
        let isolating = seats.isolating();
        if !waiting && isolating.is_some_and(|(of, _)| of == group.id) && !running {
            seats.isolate(None);
        }
        if running || !waiting {
            return Ok(());
        }
        let chosen = isolating
            .filter(|(of, _)| *of == group.id)
            .map(|(_, seq)| to_sql(seq));
        let which = format!(
            "d.state = 0 AND d.suspect AND d.due <= $2 AND ($3::bigint IS NULL OR d.seq = $3) AND {FIRST_OF_KEY}
             ORDER BY d.due, d.seq LIMIT 1"
        );
        let at = self.now.as_micros();
        let found = self.ready(&which, &[&group.id, &at, &chosen]).await?.pop();
        let Some(ready) = found else {
            if chosen.is_some() {
                seats.isolate(None);
            }
            return Ok(());
        };
        if !self.handles(ready.stored.record.event.event_type()) {
            seats.isolate(None);
            return self
                .set_unhandled(group, vec![to_sql(ready.stored.seq())])
                .await;
        }
        if ready.crashes >= CRASHES_BEFORE_ISOLATION {
            seats.isolate(Some((group.id, ready.stored.seq())));
            if seats.in_flight() > 0 {
                return Ok(());
            }
        }
        self.lease_rows(group, vec![ready]).await
    }

    /// Hands out rows that are due. Those that this consumer does not handle are set aside for others.
    async fn take_due(&mut self, group: &Group, room: usize) -> Result<()> {
        let which = format!(
            "d.state = 0 AND NOT d.suspect AND d.due <= $2 AND {FIRST_OF_KEY}
             ORDER BY d.due, d.seq LIMIT $3"
        );
        let at = self.now.as_micros();
        loop {
            let left = room.saturating_sub(self.deliveries.len());
            if left == 0 {
                return Ok(());
            }
            let limit = i64::try_from(left).unwrap_or(i64::MAX);
            let found = self.ready(&which, &[&group.id, &at, &limit]).await?;
            let all = found.len() < left;
            let (ours, others): (Vec<Ready>, Vec<Ready>) = found
                .into_iter()
                .partition(|ready| self.handles(ready.stored.record.event.event_type()));
            let nobody = others.is_empty();
            let others = others
                .iter()
                .map(|ready| to_sql(ready.stored.seq()))
                .collect();
            self.set_unhandled(group, others).await?;
            self.lease_rows(group, ours).await?;
            if all || nobody {
                return Ok(());
            }
        }
    }

    /// Hands out events for which other consumers had no handler.
    async fn take_set_aside(&mut self, group: &Group, room: usize) -> Result<()> {
        let left = room.saturating_sub(self.deliveries.len());
        if left == 0 {
            return Ok(());
        }
        let sql = "SELECT DISTINCT type FROM everbus.deliveries WHERE group_id = $1 AND state = 3";
        let rows = self
            .tx
            .query("reading what has no handler", sql, &[&group.id])
            .await?;
        let types: Vec<i32> = rows.iter().map(|row| get(row, 0)).collect::<Result<_>>()?;
        self.engine
            .types
            .learn(self.tx, types.iter().copied())
            .await?;
        let handled = types.into_iter().filter(|id| {
            let name = self.engine.types.name(*id);
            name.is_some_and(|name| self.handles(&name))
        });
        let handled: Vec<i32> = handled.collect();
        if handled.is_empty() {
            return Ok(());
        }
        let which =
            format!("d.state = 3 AND d.type = ANY ($2) AND {FIRST_OF_KEY} ORDER BY d.seq LIMIT $3");
        let limit = i64::try_from(left).unwrap_or(i64::MAX);
        let found = self.ready(&which, &[&group.id, &handled, &limit]).await?;
        self.lease_rows(group, found).await
    }

    /// Sets rows aside until a consumer with a handler comes.
    async fn set_unhandled(&mut self, group: &Group, seqs: Vec<i64>) -> Result<()> {
        if seqs.is_empty() {
            return Ok(());
        }
        self.set_aside = true;
        let sql =
            "UPDATE everbus.deliveries SET state = $3, due = $4, suspect = false, updated_at = $5
                   WHERE group_id = $1 AND seq = ANY ($2)";
        let (due, at) = (self.patience(), self.now.as_micros());
        self.tx
            .execute(
                "setting events aside",
                sql,
                &[&group.id, &seqs, &UNHANDLED, &due, &at],
            )
            .await
            .map(drop)
    }

    /// Leases rows. The attempt is counted here, before the handler runs. A damaged event is dead-lettered
    /// instead.
    async fn lease_rows(&mut self, group: &Group, rows: Vec<Ready>) -> Result<()> {
        let (mut seqs, mut damaged) = (Vec::with_capacity(rows.len()), Vec::new());
        for ready in rows {
            let seq = ready.stored.seq();
            let failures = read_failures(ready.failures.as_deref())?;
            if ready.stored.damage.is_some() {
                let (engine, tx) = (self.engine, self.tx);
                let notice =
                    bury_damaged(engine, tx, group.id, &ready.stored, ready.attempt, failures)
                        .await?;
                self.notices.extend(notice);
                damaged.push(to_sql(seq));
                if self.engine.seats.isolating() == Some((group.id, seq)) {
                    self.engine.seats.isolate(None);
                }
                continue;
            }
            seqs.push(to_sql(seq));
            let delivery = Delivery::new(ready.stored.record, lease(group.id, self.token, seq))
                .after(ready.attempt + 1, failures)
                .retried(ready.retried);
            self.deliveries.push(delivery);
        }
        self.remove_rows(group, &damaged).await?;
        if seqs.is_empty() {
            return Ok(());
        }
        let sql = "UPDATE everbus.deliveries SET state = 1, attempt = attempt + 1, owner = $3, token = $4,
                     until = $5, updated_at = $6
                   WHERE group_id = $1 AND seq = ANY ($2)";
        let at = self.now.as_micros();
        let values: Params<'_> = &[
            &group.id,
            &seqs,
            &self.asking.owner,
            &self.token,
            &self.until,
            &at,
        ];
        self.tx.execute("claiming", sql, values).await?;
        let sql = "UPDATE everbus.groups SET active_at = $2 WHERE id = $1 AND active_at < $2";
        self.tx
            .execute("claiming", sql, &[&group.id, &at])
            .await
            .map(drop)
    }

    /// Hands out new events, up to the horizon.
    async fn take_new(&mut self, locked: &Locked, room: usize) -> Result<()> {
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
        // Payloads are only read for rows that are handed out: their sizes stand in the row.
        let sql = format!(
            "SELECT {RECORD} FROM (
               SELECT l.*, sum(octet_length(l.payload)) OVER (ORDER BY l.seq ROWS UNBOUNDED PRECEDING)
                 - octet_length(l.payload) AS before
               FROM (SELECT * FROM everbus.log l WHERE l.seq > $1 AND l.seq <= $2
                       AND NOT (l.type = ANY ($3)) AND (l.address IS NULL OR l.address = $4 OR $5)
                     ORDER BY l.seq LIMIT $6) l
             ) log WHERE log.before < $7 ORDER BY log.seq"
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

    /// Events beyond the cursor that the group passes by: dropped ones, and those that have a row already.
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

    /// Claims new events: a range, or each its own row if they are far apart.
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
