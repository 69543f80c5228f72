//! Settling: the verdict of each delivery, in an order that loses nothing.
//!
//! Follow-ups first, then the dead letter and its notice, then the progress of the group. A settlement is answered
//! when the commit that contains it is acknowledged. If the commit is not acknowledged in time, the same settlement
//! may be repeated: it then waits for a later commit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{
    Code, Error, Event, Failure, Lease, Result, Settlement, Verdict, dead_letter_notice,
};
use everbus_dialects::Dialect;
use futures_util::future::join_all;

use crate::board::{Change, Held};
use crate::broker::{Shared, lost};
use crate::member::Member;
use crate::topics::{DEAD_ROOM, Topic, declare_dead};
use crate::wire::{self, Written};

/// The most bytes of the failures of a dead letter.
const FAILURES: usize = DEAD_ROOM / 2;
/// How many settlements are applied while the board is locked once.
const AT_ONCE: usize = 64;
/// How long it may take until all brokers know a raised limit of a topic.
const RAISED_WITHIN: Duration = Duration::from_secs(5);

/// A settlement that was applied and waits for its commit. If the wait ends early, the settlement may be repeated.
struct Awaited {
    member: Arc<Member>,
    token: u64,
    at: (u32, u64),
    answered: bool,
}

impl Awaited {
    /// The answer. `stored` has the members and slots of which everything that was awaited is committed.
    fn answer(mut self, stored: &BTreeSet<(u64, u32)>) -> Result<()> {
        let (slot, version) = self.at;
        if stored.contains(&(self.member.number, slot)) {
            self.answered = true;
            return Ok(());
        }
        let committed = self.member.board.lock().is_committed(slot, version);
        self.answered = committed != Some(false);
        match committed {
            Some(true) => Ok(()),
            Some(false) => Err(self.member.not_durable()),
            None => Err(lost()),
        }
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        if !self.answered {
            self.member.board.lock().doubt(self.token, self.at);
        }
    }
}

impl Shared {
    pub(crate) async fn settle_one(&self, settlement: Settlement) -> Result<()> {
        let answers = self.settle_all(vec![settlement]).await;
        answers.into_iter().next().unwrap_or_else(|| Err(lost()))
    }

    /// Settles all of them with as few commits as they need.
    pub(crate) async fn settle_all(&self, settlements: Vec<Settlement>) -> Vec<Result<()>> {
        let mut applied = self.finish_plain(&settlements);
        let others = settlements.into_iter().zip(&mut applied);
        let others = others.filter(|(_, applied)| applied.is_none());
        let others = others.map(|(settlement, applied)| async move {
            *applied = Some(self.apply(settlement).await);
        });
        join_all(others).await;
        let applied: Vec<Result<Awaited>> = applied.into_iter().flatten().collect();
        let mut waits: BTreeMap<(u64, u32), (Arc<Member>, u64)> = BTreeMap::new();
        for awaited in applied.iter().flatten() {
            let (slot, version) = awaited.at;
            let key = (awaited.member.number, slot);
            let last = waits
                .entry(key)
                .or_insert_with(|| (awaited.member.clone(), version));
            last.1 = last.1.max(version);
        }
        let waits = waits
            .into_iter()
            .map(|((number, slot), (member, version))| async move {
                member.changed.notify_waiters();
                let durable = member.durable(slot, version, self.link.timeout).await;
                // Otherwise each settlement is looked at alone.
                matches!(durable, Ok(true)).then_some((number, slot))
            });
        let stored: BTreeSet<(u64, u32)> = join_all(waits).await.into_iter().flatten().collect();
        let answers = applied.into_iter();
        answers
            .map(|applied| applied.and_then(|awaited| awaited.answer(&stored)))
            .collect()
    }

    /// Applies the settlements that ask for nothing but the end of an event. These are most of them, so they are applied
    /// together. `None` stands for every other settlement.
    fn finish_plain(&self, settlements: &[Settlement]) -> Vec<Option<Result<Awaited>>> {
        let is_plain = |settlement: &Settlement| {
            let finished = matches!(settlement.verdict, Verdict::Ack | Verdict::Skip { .. });
            finished && settlement.follow_ups.is_empty() && settlement.effect.is_none()
        };
        let mut applied: Vec<Option<Result<Awaited>>> = Vec::new();
        applied.resize_with(settlements.len(), || None);
        let mut known: Option<Arc<Member>> = None;
        for (some, applied) in settlements.chunks(AT_ONCE).zip(applied.chunks_mut(AT_ONCE)) {
            let number = some.first().map_or(0, |first| first.lease.words()[0]);
            if known.as_ref().is_none_or(|known| known.number != number) {
                known = self.member_numbered(number);
            }
            let Some(member) = &known else {
                continue;
            };
            let now = Instant::now();
            let mut board = member.board.lock();
            for (settlement, applied) in some.iter().zip(applied) {
                let [of, token] = settlement.lease.words();
                if of != number || !is_plain(settlement) {
                    continue;
                }
                let at = board.doubted(token);
                let at = at.or_else(|| board.acked(settlement.lease.position(), token, now));
                *applied = Some(at.ok_or_else(lost).map(|at| Awaited {
                    member: member.clone(),
                    token,
                    at,
                    answered: false,
                }));
            }
        }
        applied
    }

    /// Does what a settlement asks for, except for the commit.
    async fn apply(&self, settlement: Settlement) -> Result<Awaited> {
        let Settlement {
            lease,
            verdict,
            follow_ups,
            effect,
            ..
        } = settlement;
        if effect.is_some() {
            let what = "Kafka has no transactions for effects";
            return Err(Error::new(Code::Unsupported, what)
                .hint("do the effect in the handler, with the context's idempotency key"));
        }
        let [number, token] = lease.words();
        let member = self.member_numbered(number).ok_or_else(lost)?;
        let position = lease.position();
        let doubted = member.board.lock().doubted(token);
        let at = match doubted {
            Some(at) => at,
            None => {
                let found = member.board.lock().find(
                    position.shard(),
                    position.place(),
                    token,
                    Instant::now(),
                    self.options.clock.now(),
                );
                let (id, held) = found.ok_or_else(lost)?;
                self.append_first(follow_ups).await?;
                let change = match verdict {
                    Verdict::Ack | Verdict::Skip { .. } => Change::Finished { dead: false },
                    Verdict::Retry { after, failure } => Change::Failed { after, failure },
                    Verdict::Release { after } => Change::Released { after },
                    Verdict::Dead { failure } => {
                        let dead = member.group.owner.is_none();
                        if dead {
                            self.bury(&member, &held, failure).await?;
                        }
                        Change::Finished { dead }
                    }
                };
                let mut board = member.board.lock();
                let version = board.settle(id, token, change, Instant::now());
                (id.0, version.ok_or_else(lost)?)
            }
        };
        Ok(Awaited {
            member,
            token,
            at,
            answered: false,
        })
    }

    /// Appends the events that belong to a verdict, before the verdict is applied.
    async fn append_first(&self, events: Vec<Event>) -> Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        let answers = self.append(events).await?;
        answers.into_iter().try_for_each(|answer| answer.map(drop))
    }

    /// Stores the dead letter, then appends the notice about it.
    async fn bury(
        &self,
        member: &Arc<Member>,
        held: &Held,
        failure: Option<Failure>,
    ) -> Result<()> {
        let (event, position) = (&held.record.event, held.record.position);
        // The event is given up because of recorded failures: this delivery was no attempt.
        let was_none = failure.is_none() && !held.failures.is_empty();
        let attempts = held.attempt.saturating_sub(u32::from(was_none));
        let mut failures = held.failures.clone();
        failures.extend(failure);
        let now = self.options.clock.now();
        let died_at = failures.last().map_or(now, |last| last.at);
        let name = &member.group.name;
        let mut written = wire::write(event, Dialect::Native, held.record.received_at)?;
        // All dead letters of one group and event have the same key, so they stay in order.
        written.key = Some(format!("{name} {position}"));
        written.headers.extend([
            ("everbus-group", name.as_str().to_owned()),
            ("everbus-position", position.to_string()),
            ("everbus-attempts", attempts.to_string()),
            ("everbus-died-at", died_at.to_string()),
            ("everbus-failures", failures_text(&failures, FAILURES)),
        ]);
        self.store_letter(&held.topic, &written)
            .await
            .map_err(|error| {
                let what = format!("the dead letter cannot be stored: {}", error.message());
                let error = error.with_message(what);
                tracing::error!(target: "everbus::kafka", group = %name, %position, %error, "the event stays until its dead letter is stored");
                error
            })?;
        let last = failures.last();
        let notice = dead_letter_notice(&held.record, name, attempts, last, died_at);
        self.append_first(notice.into_iter().collect()).await
    }

    async fn store_letter(&self, events: &Topic, letter: &Written) -> Result<()> {
        let topic = self.space.dead(&events.short);
        declare_dead(self, &topic, &events.name, letter.size()).await?;
        let begin = Instant::now();
        loop {
            match self.store(&topic, letter).await {
                // A limit that was raised a moment ago is not known to every broker yet.
                Err(error)
                    if error.code() == Code::PayloadTooLarge && begin.elapsed() < RAISED_WITHIN =>
                {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                stored => {
                    if stored.is_err() {
                        // The next letter checks the settings of the topic again.
                        self.dead_topics.lock().remove(&topic);
                    }
                    return stored;
                }
            }
        }
    }

    pub(crate) fn extend_one(&self, lease: &Lease, by: Duration) -> Result<()> {
        let [number, token] = lease.words();
        let member = self.member_numbered(number).ok_or_else(lost)?;
        let (position, now) = (lease.position(), Instant::now());
        let mut board = member.board.lock();
        let wall = self.options.clock.now();
        let found = board.find(position.shard(), position.place(), token, now, wall);
        let (id, _) = found.ok_or_else(lost)?;
        board.extend(id, by, now);
        Ok(())
    }
}

/// The failures as JSON, the newest ones if not all of them fit.
fn failures_text(failures: &[Failure], room: usize) -> String {
    let mut kept: Vec<Failure> = failures.to_vec();
    loop {
        let text = serde_json::to_string(&kept).unwrap_or_default();
        if text.len() <= room || kept.is_empty() {
            return text;
        }
        if kept.len() > 1 {
            kept.remove(0);
            continue;
        }
        let last = &mut kept[0];
        if last.backtrace.take().is_none() {
            last.error = last.error.chars().take(1000).collect();
            if last.error.chars().count() < 1000 {
                return "[]".to_owned();
            }
        }
    }
}
