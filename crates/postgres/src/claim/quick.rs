//! The usual claim: new events only, in one call of the function `everbus.claim_new`.

use everbus_core::{Code, Delivery, Pattern, Result};

use super::fresh::{MOST_BYTES, MOST_PIECES};
use super::{Asking, LAZY, Looked, lease, new_token};
use crate::Postgres;
use crate::groups;
use crate::horizon::{End, Horizon};
use crate::pool::{Params, Role};
use crate::rows::{AFTER_RECORD, get, seq_from, to_sql};

/// The status that the function returns; see `sql/claim.sql`.
mod status {
    pub(super) const NOTHING: &str = "0";
    pub(super) const CLAIMED: &str = "1";
    pub(super) const REMOVED: &str = "3";
}

/// The column `o_head` of the function: a single column, because each column costs time for every event.
struct Head<'a>(Vec<Option<&'a str>>);

impl Head<'_> {
    fn text(&self, index: usize) -> Option<&str> {
        self.0.get(index).copied().flatten()
    }

    fn number(&self, index: usize) -> Option<i64> {
        self.text(index)?.parse().ok()
    }

    /// Remembers the horizon, if the function returned it.
    fn learn(&self, horizon: &Horizon) -> Option<End> {
        let (decided, newest) = (self.number(2)?, self.number(3)?);
        let end = End {
            decided: seq_from(decided),
            newest: seq_from(newest),
        };
        let holders = self.0.iter().skip(6).flatten();
        let holders = holders.map(|holder| (*holder).to_owned()).collect();
        let (pending, server) = (seq_from(self.number(4)?), self.text(5)?.to_owned());
        horizon.note(end, pending, holders, server);
        Some(end)
    }
}

impl Postgres {
    /// Claims up to `room` new events. `None`: nothing was done, because the group needs more than new events, for
    /// example because a retry is due. `eager`: there are probably events.
    pub(super) async fn claim_quickly(
        &self,
        asking: &Asking,
        patterns: &[Pattern],
        room: usize,
        eager: bool,
    ) -> Result<Option<Looked>> {
        let now = self.now();
        let conn = self.pool.get_for(Role::Claim).await?;
        let group = self.groups.get(&*conn, asking.group).await?;
        if group.ordered {
            return Ok(None);
        }
        let (mut ours, mut unwanted) = (Vec::new(), Vec::new());
        for (id, name) in self.types.all() {
            if !group.wants(&name) {
                unwanted.push(id);
            } else if patterns.iter().any(|p| p.matches(&name)) {
                ours.push(id);
            }
        }
        let texts: Vec<&str> = group.patterns.iter().map(Pattern::as_str).collect();
        let (token, until) = (new_token(), now.plus(asking.options.lease).as_micros());
        let (known, pending, holders, server) = self.horizon.known();
        let values: Params<'_> = &[
            &asking.group,
            &now.as_micros(),
            &asking.owner,
            &token,
            &until,
            &texts,
            &ours,
            &unwanted,
            &group.is_archive(),
            &i64::try_from(room).unwrap_or(i64::MAX),
            &MOST_BYTES,
            &to_sql(LAZY),
            &i64::try_from(MOST_PIECES).unwrap_or(i64::MAX),
            &known,
            &pending,
            &holders,
            &server,
            &eager,
        ];
        let sql = "SELECT * FROM everbus.claim_new($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14,
                     $15, $16, $17, $18)";
        let rows = match conn.query_planned("claiming", sql, values).await {
            Ok(rows) => rows,
            // A conflict with another transaction.
            Err(error) if error.code() == Code::Busy => return Ok(None),
            Err(error) => {
                if error.code() == Code::Unavailable {
                    drop(conn);
                    self.take_back(token, asking.group).await;
                }
                return Err(error);
            }
        };
        let Some((head, rows)) = rows.split_last() else {
            return Ok(None);
        };
        let nothing_left = get::<Option<i64>>(head, 0)?.is_some();
        let head = Head(get(head, AFTER_RECORD)?);
        let status = head.text(0).unwrap_or_default();
        if status == status::REMOVED {
            return Err(groups::removed());
        }
        let end = head.learn(&self.horizon);
        let mut looked = Looked {
            until,
            next: head.number(1),
            held_back: end.is_some_and(|end| end.newest > end.decided),
            more: rows.len() >= room,
            nothing_left,
            deliveries: Vec::with_capacity(rows.len()),
        };
        match status {
            status::NOTHING => return Ok(Some(looked)),
            status::CLAIMED => {}
            // Status 2: one reason is that the cached group is outdated.
            _ => {
                self.groups.forget(asking.group);
                return Ok(None);
            }
        }
        let stored = self.types.read(&*conn, rows).await;
        drop(conn);
        let stored = match stored {
            Ok(stored) => stored,
            Err(error) => {
                self.take_back(token, asking.group).await;
                return Err(error);
            }
        };
        let mut damaged = Vec::new();
        for stored in stored {
            let lease = lease(asking.group, token, stored.seq());
            if stored.damage.is_some() {
                damaged.push(lease);
            } else {
                let delivery = Delivery::new(stored.record, lease);
                looked.deliveries.push(delivery);
            }
        }
        self.seats.took(asking.seat, &looked.deliveries, until);
        // Given back, damaged events get rows of their own. The next longer claim dead-letters them.
        if let Err(error) = crate::settle::give_back(self, &damaged).await {
            tracing::warn!(target: "everbus::postgres", %error, "damaged events are dead-lettered when their leases end");
        }
        Ok(Some(looked))
    }
}
