//! The consumer: it claims events of its group's member, and hands them out once their attempts are durable.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{
    BoxFuture, ConsumeOptions, Consumer, Delivery, Failure, FailureKind, Lease, Pattern, Result,
    Settlement, Verdict,
};

use crate::board::Claimed;
use crate::broker::Shared;
use crate::member::Member;

/// Consumers look again after this long at the latest, for events that were set aside for too long.
const LOOK: Duration = Duration::from_secs(1);

/// Events are claimed ahead for a consumer that asks for at least this many.
const LARGE: usize = 64;

/// How many batches are claimed ahead at most. A claim waits for the commit that is under way and then for its own, so
/// with one batch ahead a consumer would get one batch for two commits.
const AHEAD: usize = 4;

pub(crate) struct KafkaConsumer {
    shared: Arc<Shared>,
    member: Arc<Member>,
    seat: u64,
    options: ConsumeOptions,
    /// Events that are claimed and not handed out.
    claimed: Vec<Claimed>,
}

impl KafkaConsumer {
    pub(crate) fn new(
        shared: Arc<Shared>,
        member: Arc<Member>,
        seat: u64,
        options: ConsumeOptions,
    ) -> Self {
        Self {
            shared,
            member,
            seat,
            options,
            claimed: Vec::new(),
        }
    }

    /// Claims up to `max` events, if none are claimed yet.
    fn claim(&mut self, max: usize) {
        if !self.claimed.is_empty() {
            return;
        }
        let (now, wall) = (Instant::now(), self.shared.options.clock.now());
        let (number, step) = (|| self.shared.number(), self.member.step());
        let mut board = self.member.board.lock();
        board.tick(now, wall);
        self.claimed = board.take_ahead(self.seat);
        if self.claimed.is_empty() {
            self.claimed = board.claim(self.seat, max.max(1), now, step, number);
        }
    }

    /// Hands out the first claimed events, once their attempts are durable.
    async fn hand_out(&mut self, max: usize) -> Result<Vec<Delivery>> {
        let first = self.claimed.len().min(max.max(1));
        let mut count = self.member.board.lock().stored(&self.claimed[..first]);
        if count == 0 {
            let mut versions: BTreeMap<u32, u64> = BTreeMap::new();
            for (id, _, version) in &self.claimed[..first] {
                let last = versions.entry(id.0).or_default();
                *last = (*last).max(*version);
            }
            for (slot, version) in versions {
                let timeout = self.shared.link.timeout;
                // If the partition was revoked meanwhile, its events are not delivered below.
                self.member
                    .durable(slot, version, timeout)
                    .await
                    .map_err(|error| {
                        error.with_message("the attempts could not be recorded in time")
                    })?;
            }
            count = first;
        }
        let (now, wall) = (Instant::now(), self.shared.options.clock.now());
        let mut deliveries = Vec::with_capacity(count);
        let mut board = self.member.board.lock();
        for (id, token, _) in self.claimed.drain(..count) {
            if let Some(held) = board.deliver(id, token, now, wall) {
                let lease = Lease::new(held.record.position, [self.member.number, token]);
                deliveries
                    .push(Delivery::new(held.record, lease).after(held.attempt, held.failures));
            }
        }
        // A consumer that takes large batches asks again soon. The attempts of its next batches become durable while it
        // works on this one. The rest of a claim is kept with them, so that it is given back if no fetch asks for it.
        let is_large = max >= LARGE;
        if !self.claimed.is_empty() || (is_large && count == max) {
            let (number, step) = (|| self.shared.number(), self.member.step());
            let rest = std::mem::take(&mut self.claimed);
            let wanted = if is_large { AHEAD * max } else { 0 };
            let more = wanted.saturating_sub(rest.len());
            let claimed = board.claim_ahead(self.seat, rest, more, now, step, number);
            drop(board);
            if claimed {
                self.member.kick();
            }
        }
        Ok(deliveries)
    }

    fn give_back(&mut self) {
        let mut claimed: Vec<Claimed> = self.claimed.drain(..).collect();
        let mut board = self.member.board.lock();
        claimed.extend(board.take_ahead(self.seat));
        board.give_back(&claimed);
        drop(board);
        if !claimed.is_empty() {
            self.member.changed.notify_waiters();
            self.member.kick();
        }
    }

    /// Dead-letters events that had no handler in this process for too long.
    fn bury_orphans(&self) {
        let number = || self.shared.number();
        let orphans = self.member.board.lock().orphans(Instant::now(), number);
        for (id, token) in orphans {
            let (shared, member) = (self.shared.clone(), self.member.clone());
            tokio::spawn(async move {
                let found = member.board.lock().held_record(id);
                let Some((record, attempt)) = found else {
                    return;
                };
                let text = format!("no process has a handler for {}", record.event.event_type());
                let now = shared.options.clock.now();
                let failure = Failure::new(attempt, now, FailureKind::NoHandler, text);
                let lease = Lease::new(record.position, [member.number, token]);
                let verdict = Verdict::Dead {
                    failure: Some(failure),
                };
                if let Err(error) = shared.settle_one(Settlement::new(lease, verdict)).await {
                    tracing::warn!(target: "everbus::kafka", %error, "an event without a handler could not be dead-lettered");
                }
            });
        }
    }
}

impl Consumer for KafkaConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let shared = self.shared.clone();
            loop {
                let member = self.member.clone();
                let mut changed = pin!(member.changed.notified());
                changed.as_mut().enable();
                let mut closing = pin!(shared.link.closing.notified());
                closing.as_mut().enable();
                shared.link.check_open()?;
                if let Some(error) = member.take_error() {
                    return Err(error);
                }
                if !member.is_running() {
                    // The member left, or its thread ended: starts another one.
                    self.claimed.clear();
                    let options = &self.options;
                    let sit = |member: &Arc<Member>| {
                        member.board.lock().sit(self.seat, options.clone());
                    };
                    self.member = shared.join(&member.group.name, sit).await?;
                    continue;
                }
                self.claim(max);
                if !self.claimed.is_empty() {
                    let deliveries = self.hand_out(max).await?;
                    if !deliveries.is_empty() {
                        return Ok(deliveries);
                    }
                    continue;
                }
                self.bury_orphans();
                let next = member.board.lock().next_tick();
                let look = Instant::now() + LOOK;
                let until = next.map_or(look, |next| next.min(look));
                tokio::select! {
                    () = changed => {}
                    () = closing => {}
                    () = tokio::time::sleep_until(until.into()) => {}
                }
            }
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.options.handled = handled.clone();
        self.member.board.lock().set_handled(self.seat, handled);
        self.member.changed.notify_waiters();
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.resume(0)
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        if prefetch == 0 {
            self.give_back();
        }
        self.options.prefetch = prefetch;
        self.member.board.lock().set_prefetch(self.seat, prefetch);
        self.member.changed.notify_waiters();
        Box::pin(std::future::ready(Ok(())))
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        drop(self);
        Box::pin(std::future::ready(Ok(())))
    }
}

impl Drop for KafkaConsumer {
    fn drop(&mut self) {
        self.give_back();
        self.member.board.lock().stand_up(self.seat);
        self.member.changed.notify_waiters();
    }
}
