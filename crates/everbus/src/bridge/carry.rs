//! Appends to the target: keeps the order of each key, repeats until the outcome is known, and separates a refused
//! event from the others.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus_core::{
    Appended, Class, Deduplication, Delivery, Error, Event, EventId, Failure, FailureKind, Result,
    Settlement, Verdict,
};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesOrdered;
use tokio::sync::mpsc;

use super::held::Held;
use super::route::Route;
use super::{BATCH, Bridge, FIRST_PAUSE};
use crate::guard;

/// The largest number of concurrent appends: the target can process one while the other waits for the disk.
const AT_ONCE: usize = 2;
/// About this many bytes of payload are appended at a time.
const MOST_BYTES: usize = 8 << 20;
/// If the target refuses this many events in a row, the events are not the cause.
const MOST_REFUSED: usize = 20;

/// Why an event is skipped: it came from the target.
const RETURNED: &str = "bridged: the event came from the target";

/// The result for one event.
pub(super) enum Carried {
    Stored {
        duplicate: bool,
    },
    Refused(Error),
    /// The bridge stopped first. `sent`: the event may be at the target.
    GivenUp {
        sent: bool,
    },
}

impl Bridge {
    /// Appends batches, and passes the verdicts to the settlement. Up to [`AT_ONCE`] batches are under way, as long as
    /// they share no ordering key: the order of each key is kept.
    pub(super) async fn append(
        &self,
        route: &Route,
        held: &Held,
        mut batches: mpsc::Receiver<Vec<Delivery>>,
        verdicts: mpsc::Sender<Vec<Settlement>>,
    ) -> Result<()> {
        let refused = AtomicUsize::new(0);
        let mut under_way = FuturesOrdered::new();
        let mut keys: VecDeque<HashSet<String>> = VecDeque::new();
        let mut next: Option<Vec<Delivery>> = None;
        let mut more = true;
        loop {
            let may_start = |batch: &mut Vec<Delivery>| {
                let shared = |key: &String| keys.iter().any(|keys| keys.contains(key));
                keys.is_empty() || (keys.len() < AT_ONCE && !keys_of(batch).iter().any(shared))
            };
            if let Some(batch) = next.take_if(may_start) {
                held.sending(&batch);
                keys.push_back(keys_of(&batch));
                under_way.push_back(Box::pin(self.carry_batch(route, batch, &refused)));
            }
            if !more && next.is_none() && under_way.is_empty() {
                return Ok(());
            }
            tokio::select! {
                biased;
                Some(carried) = under_way.next() => {
                    keys.pop_front();
                    let (settled, ended) = carried?;
                    let taken = verdicts.send(settled).await;
                    ended?;
                    if taken.is_err() {
                        return Ok(());
                    }
                }
                batch = waiting(&mut batches), if more && next.is_none() => {
                    more = batch.is_some();
                    next = batch;
                }
            }
        }
    }

    /// Returns the verdicts, and the error that ends the bridge after them.
    async fn carry_batch(
        &self,
        route: &Route,
        batch: Vec<Delivery>,
        refused: &AtomicUsize,
    ) -> Result<(Vec<Settlement>, Result<()>)> {
        let mut decided = Vec::with_capacity(batch.len());
        for delivery in &batch {
            decided.push(self.decide_before(delivery).await?);
        }
        let open = batch.iter().zip(&decided);
        let open = open.filter(|(_, verdict)| verdict.is_none());
        let events: Vec<&Event> = open.map(|(delivery, _)| &delivery.record.event).collect();
        let mut carried = self.store(route.mark, &events).await?.into_iter();
        let mut settlements = Vec::with_capacity(batch.len());
        let mut ended = Ok(());
        for (delivery, verdict) in batch.into_iter().zip(decided) {
            let verdict = match verdict {
                Some(verdict) => verdict,
                None => {
                    let carried = carried.next();
                    let carried = carried.unwrap_or(Carried::GivenUp { sent: true });
                    match self.judge(&delivery, carried, refused) {
                        Ok(verdict) => verdict,
                        // The events before this one keep their verdicts; otherwise the next run would get these events
                        // again.
                        Err(error) => {
                            ended = Err(error);
                            continue;
                        }
                    }
                }
            };
            settlements.push(Settlement::new(delivery.lease, verdict));
        }
        Ok((settlements, ended))
    }

    /// The verdict on an event that may be at the target. It counts as an attempt, so that the next run asks the target
    /// before it sends the event again.
    pub(super) fn unanswered(&self, attempt: u32) -> Verdict {
        let now = self.from.shared().options.clock.now();
        let text = "the bridge stopped before the target answered";
        Verdict::Retry {
            after: Duration::ZERO,
            failure: Failure::new(attempt, now, FailureKind::Crash, text),
        }
    }

    /// The verdict on an event that is not sent to the target.
    async fn decide_before(&self, delivery: &Delivery) -> Result<Option<Verdict>> {
        let event = &delivery.record.event;
        let last = delivery.failures.last();
        if last.is_some_and(|last| last.kind == FailureKind::Corrupt) {
            self.counters.lock().refused += 1;
            return Ok(Some(Verdict::Dead { failure: None }));
        }
        let mut pause = FIRST_PAUSE;
        loop {
            let asked = async {
                if self.came_from_target(event).await? {
                    self.counters.lock().returned += 1;
                    let reason = RETURNED.to_owned();
                    return Ok(Some(Verdict::Skip { reason }));
                }
                if delivery.attempt > 1 && self.is_stored(event).await? {
                    self.counters.lock().duplicates += 1;
                    return Ok(Some(Verdict::Ack));
                }
                Ok(None)
            };
            match asked.await {
                Err(error) if Error::class(&error).may_repeat() => {
                    if !self.endure("the target", &error, &mut pause).await {
                        let after = Duration::ZERO;
                        return Ok(Some(Verdict::Release { after }));
                    }
                }
                decided => return decided,
            }
        }
    }

    /// Whether the target has an event that may have been sent before. For a target whose appends do not recognise
    /// duplicates.
    async fn is_stored(&self, event: &Event) -> Result<bool> {
        let engine = self.to.engine();
        let Some(lookup) = &engine.lookup else {
            return Ok(false);
        };
        if engine.broker.capabilities().deduplication == Deduplication::WhileRetained {
            return Ok(false);
        }
        let found = lookup.find(event.id()).await?;
        Ok(found.iter().any(|known| known.event.same_body(event)))
    }

    /// Counts an outcome and converts it to a verdict.
    fn judge(
        &self,
        delivery: &Delivery,
        carried: Carried,
        refused: &AtomicUsize,
    ) -> Result<Verdict> {
        match carried {
            Carried::Stored { duplicate } => {
                refused.store(0, Ordering::Relaxed);
                match duplicate {
                    true => self.counters.lock().duplicates += 1,
                    false => self.counters.lock().moved += 1,
                }
                Ok(Verdict::Ack)
            }
            Carried::GivenUp { sent: true } => Ok(self.unanswered(delivery.attempt)),
            Carried::GivenUp { sent: false } => Ok(Verdict::Release {
                after: Duration::ZERO,
            }),
            Carried::Refused(error) => {
                if refused.fetch_add(1, Ordering::Relaxed) >= MOST_REFUSED {
                    let what = format!("{} refuses every event: {}", self.target, error.message());
                    return Err(error.with_message(what));
                }
                self.counters.lock().refused += 1;
                self.counters.lock().went_wrong(&error);
                let event = &delivery.record.event;
                guard::log(|| {
                    tracing::error!(target: "everbus::bridge", event_id = %event.id(), %error, "the target refuses an event; it is a dead letter of {}", self.group);
                });
                Ok(Verdict::Dead {
                    failure: Some(self.failure(delivery, &error)),
                })
            }
        }
    }

    fn failure(&self, delivery: &Delivery, error: &Error) -> Failure {
        let options = &self.from.shared().options;
        Failure {
            attempt: delivery.attempt,
            at: options.clock.now(),
            kind: FailureKind::Permanent,
            handler: Some(format!("bridge to {}", self.target)),
            error: error.to_string(),
            backtrace: None,
            alone: false,
            took: None,
            worker: Some(options.worker_name.to_string()),
        }
    }

    /// Stores events at the target in their order. Repeats after errors that may pass, until the bridge stops.
    pub(super) async fn store(&self, mark: EventId, events: &[&Event]) -> Result<Vec<Carried>> {
        let mut carried: Vec<Option<Carried>> = Vec::new();
        carried.resize_with(events.len(), || None);
        let mut sent = vec![false; events.len()];
        let mut open = parts(events);
        open.reverse();
        let mut pause = FIRST_PAUSE;
        while let Some(mut part) = open.pop() {
            let copies = part.iter().map(|n| events[*n].clone().bridged_by(mark));
            let error = match self.append_once(copies.collect()).await {
                Ok(answers) => {
                    let mut again = Vec::new();
                    let mut passing = None;
                    for (n, answer) in part.into_iter().zip(answers) {
                        match answer {
                            Ok(appended) => {
                                let duplicate = appended.duplicate;
                                carried[n] = Some(Carried::Stored { duplicate });
                            }
                            Err(error) if error.class().may_repeat() => {
                                sent[n] |= error.outcome_unknown();
                                again.push(n);
                                passing = Some(error);
                            }
                            Err(error) if error.class() == Class::Final => return Err(error),
                            Err(error) => carried[n] = Some(Carried::Refused(error)),
                        }
                    }
                    let Some(error) = passing else {
                        self.counters.lock().waiting = false;
                        pause = FIRST_PAUSE;
                        continue;
                    };
                    open.push(again);
                    error
                }
                Err(error) if error.class().may_repeat() => {
                    for n in &part {
                        sent[*n] |= error.outcome_unknown();
                    }
                    open.push(part);
                    error
                }
                Err(error) if error.class() == Class::Final => return Err(error),
                Err(error) => {
                    match &part[..] {
                        [only] => carried[*only] = Some(Carried::Refused(error)),
                        _ => {
                            let rest = part.split_off(part.len() / 2);
                            open.push(rest);
                            open.push(part);
                        }
                    }
                    continue;
                }
            };
            if !self.endure("the target", &error, &mut pause).await {
                break;
            }
        }
        let carried = carried.into_iter().zip(sent);
        let carried = carried.map(|(carried, sent)| carried.unwrap_or(Carried::GivenUp { sent }));
        Ok(carried.collect())
    }

    /// One append. Where a batch is stored as a whole, one error is the answer for all of it.
    async fn append_once(&self, events: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        let several = events.len() > 1;
        let answers = self.to.append_as_is(events).await?;
        if several && self.to.capabilities().atomic_batch {
            let answers: Result<Vec<Appended>> = answers.into_iter().collect();
            return answers.map(|answers| answers.into_iter().map(Ok).collect());
        }
        Ok(answers)
    }
}

/// The next batch together with the batches that wait behind it, for one append. `None` at the end.
async fn waiting(batches: &mut mpsc::Receiver<Vec<Delivery>>) -> Option<Vec<Delivery>> {
    let mut batch = batches.recv().await?;
    while batch.len() < BATCH
        && let Ok(more) = batches.try_recv()
    {
        batch.extend(more);
    }
    Some(batch)
}

fn keys_of(batch: &[Delivery]) -> HashSet<String> {
    let keys = batch.iter();
    let keys = keys.filter_map(|delivery| delivery.record.event.ordering_key());
    keys.map(std::borrow::Cow::into_owned).collect()
}

/// The events, by their numbers, in parts of a bounded size.
fn parts(events: &[&Event]) -> Vec<Vec<usize>> {
    let mut parts = Vec::new();
    let mut part = Vec::new();
    let mut bytes = 0;
    for (n, event) in events.iter().enumerate() {
        let size = event.payload().len();
        if !part.is_empty() && bytes + size > MOST_BYTES {
            parts.push(std::mem::take(&mut part));
            bytes = 0;
        }
        part.push(n);
        bytes += size;
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}
