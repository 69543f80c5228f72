//! Handing out events: a look that changes nothing, and a claim if there is something to hand out.
//!
//! A claim covers a range of the log with one row. It takes no more events than may begin: the window of the consumer.
//! Usually there are only new events (`quick`). Otherwise, in a transaction that holds the lock of the group, the claim
//! ends leases, hands out rows that are due, and then new events up to the horizon.

mod fresh;
mod peek;
mod quick;
mod rows;

use std::sync::Arc;
use std::time::Instant;

use everbus_core::{ConsumeOptions, Delivery, Event, Lease, Pattern, Position, Result, Timestamp};

use crate::Postgres;
use crate::bury::tell;
use crate::groups;
use crate::leases::end_expired;
use crate::pool::{Sql as _, Tx, transaction};
use crate::rows::get_seq;

/// At most this many events are handed out in one transaction.
const BATCH: usize = 1024;
/// A cursor may stay this far behind, if the group wants none of the events after it.
const LAZY: u64 = 1000;

/// The consumer that asks for events.
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
    /// There were as many events as there was room for, so there are probably more.
    pub(crate) more: bool,
    /// The group had no other event, and nothing is held back: a second look finds nothing before something changes.
    pub(crate) nothing_left: bool,
}

impl Postgres {
    /// Hands out up to `max` events, if there are any for this consumer. `eager`: there probably are.
    pub(crate) async fn look(&self, asking: &Asking, max: usize, eager: bool) -> Result<Looked> {
        self.check_open()?;
        // Waits until consumers of this engine have given their events back, so that no such lease ends meanwhile.
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
        if room == 0 {
            // The consumer gets nothing before a settlement, or before one of its leases ends.
            return Ok(Looked {
                next: self.seats.next_end(asking.seat),
                ..Looked::default()
            });
        }
        let began = Instant::now();
        let isolating = self.seats.isolating().is_some();
        if !isolating
            && let Some(looked) = self.claim_quickly(asking, &patterns, room, eager).await?
        {
            self.seats.looked(asking.seat, began.elapsed());
            return Ok(looked);
        }
        let peek = self.peek(asking, &patterns, now.as_micros()).await?;
        if !peek.work {
            return Ok(Looked {
                next: peek.next,
                ..Looked::default()
            });
        }
        // Made outside of the transaction, so that a claim with an unknown outcome can be taken back.
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
        self.seats.looked(asking.seat, began.elapsed());
        if told > 0 || set_aside {
            self.bell.ring();
        }
        let mut looked = Looked {
            until,
            next: None,
            held_back,
            more: deliveries.len() >= room,
            nothing_left: false,
            deliveries,
        };
        if looked.deliveries.is_empty() {
            looked.next = self.peek(asking, &patterns, now.as_micros()).await?.next;
        }
        Ok(looked)
    }

    /// Gives back the events of a claim whose commit was not answered.
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
}

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
    /// The types that the consumer handles.
    patterns: &'a [Pattern],
    token: i64,
    now: Timestamp,
    until: i64,
    deliveries: Vec<Delivery>,
    /// The events that report dead letters.
    notices: Vec<Event>,
    /// Events were set aside for another consumer that has a handler.
    set_aside: bool,
    held_back: bool,
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
}
