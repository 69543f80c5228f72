//! Callers that wait until an event is settled.

use std::collections::HashMap;

use everbus_core::{Code, Error, Result, SettledOutcome};
use rusqlite::params;

use crate::deliveries::claims::stored_claims;
use crate::deliveries::leases::Leases;
use crate::queue::Reply;
use crate::rows::{ADDRESS, to_sql};
use crate::sql::Sql as _;
use crate::streams::was_dropped;
use crate::tx::Tx;

/// Waiters by position.
#[derive(Default)]
pub(crate) struct Watches {
    waiting: HashMap<u64, Vec<Reply<SettledOutcome>>>,
    /// Positions that may be settled now.
    touched: Vec<u64>,
    /// At this many positions, those without a waiting caller are removed.
    sweep_at: usize,
}

impl Watches {
    pub(crate) fn add(&mut self, position: u64, reply: Reply<SettledOutcome>) {
        // Callers that stopped waiting are removed before there are too many of them.
        if self.waiting.len() >= self.sweep_at.max(1024) {
            self.waiting
                .retain(|_, replies| replies.iter().any(|reply| !reply.is_closed()));
            self.sweep_at = 2 * self.waiting.len();
        }
        self.waiting.entry(position).or_default().push(reply);
        self.touched.push(position);
    }

    pub(crate) fn touch(&mut self, position: u64) {
        if self.waiting.contains_key(&position) {
            self.touched.push(position);
        }
    }

    pub(crate) fn recheck_all(&mut self) {
        self.touched = self.waiting.keys().copied().collect();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn fail_all(&mut self, error: &Error) {
        for reply in self.waiting.drain().flat_map(|(_, replies)| replies) {
            let _ = reply.send(Err(error.clone()));
        }
    }
}

/// Answers callers whose event is settled in every group. Runs outside a transaction, so that it reads
/// only durable state.
pub(crate) fn answer(tx: &mut Tx, leases: &Leases) -> Result<()> {
    let mut touched = std::mem::take(&mut tx.watches.touched);
    touched.sort_unstable();
    touched.dedup();
    for position in touched {
        let Some(replies) = tx.watches.waiting.get_mut(&position) else {
            continue;
        };
        // Callers that stopped waiting are dropped.
        replies.retain(|reply| !reply.is_closed());
        let unwatched = replies.is_empty();
        let outcome = match outcome(tx, leases, position) {
            Ok(outcome) => outcome,
            Err(e) => {
                // All are checked again in the next round.
                tx.watches.recheck_all();
                return Err(e);
            }
        };
        let answer = match outcome {
            _ if unwatched => None,
            Some(outcome) => Some(outcome),
            None => continue,
        };
        for reply in tx.watches.waiting.remove(&position).into_iter().flatten() {
            if let Some(answer) = &answer {
                let _ = reply.send(answer.clone());
            }
        }
    }
    Ok(())
}

/// How a position was settled; `None` while some group has yet to settle it.
fn outcome(tx: &mut Tx, leases: &Leases, position: u64) -> Result<Option<Result<SettledOutcome>>> {
    let doing = "looking whether an event is settled";
    let found: Option<(i64, Option<String>)> = tx.conn.first(
        doing,
        &format!("SELECT type, {ADDRESS} FROM log WHERE seq = ?1"),
        [to_sql(position)],
    )?;
    let Some((type_id, address)) = found else {
        let error = Error::new(Code::NotFound, format!("there is no event at {position}"));
        return Ok(Some(Err(error)));
    };
    let name = tx.log.type_names.get(&tx.conn, type_id)?;
    let mut outcome = SettledOutcome::default();
    let own = leases.owner;
    let ids: Vec<i64> = tx.groups.keys().copied().collect();
    for id in ids {
        let group = tx.groups.known(id)?;
        // This process cannot tell whether another process's ephemeral group still exists.
        let foreign = group.owner.is_some_and(|owner| owner != own);
        if foreign || group.declared_at >= position {
            continue;
        }
        let is_for = group.name.receives(address.as_deref());
        let to_come = is_for && group.cursor < position && group.wants(type_id, &name);
        let group_name = group.name.clone();
        let to_come = to_come && !was_dropped(tx, id, position)?;
        if to_come || is_claimed(tx, leases, id, position)? || has_row(tx, id, position)? {
            return Ok(None);
        }
        let sql = "SELECT EXISTS (SELECT 1 FROM dead_letters
                   WHERE seq = ?1 AND group_id = ?2 AND retried_at IS NULL)";
        let dead: bool = tx.conn.one(doing, sql, (to_sql(position), id))?;
        if dead {
            outcome.dead_lettered.push(group_name);
        }
    }
    outcome.dead_lettered.sort();
    Ok(Some(Ok(outcome)))
}

fn is_claimed(tx: &Tx, leases: &Leases, group: i64, position: u64) -> Result<bool> {
    let ours = leases.claims.values().any(|c| {
        c.group == group && (c.lo..=c.hi).contains(&position) && !c.progress.is_done(position)
    });
    if ours {
        return Ok(true);
    }
    let doing = "looking whether an event is settled";
    let which = "group_id = ?1 AND lo <= ?2 AND hi >= ?2 AND owner <> ?3";
    let values = params![group, to_sql(position), leases.owner];
    let theirs = stored_claims(&tx.conn, doing, which, values)?;
    Ok(theirs.iter().any(|claim| claim.is_open(position)))
}

fn has_row(tx: &Tx, group: i64, position: u64) -> Result<bool> {
    let doing = "looking whether an event is settled";
    let sql = "SELECT EXISTS (SELECT 1 FROM deliveries WHERE group_id = ?1 AND seq = ?2)";
    tx.conn.one(doing, sql, (group, to_sql(position)))
}
