//! One consumer of a group. It claims as many events as a fetch asks for. So a dropped fetch leaves no more than these
//! events claimed, and the next fetch returns them. After a large fetch it claims for the next fetches in advance. Claimed
//! events that no fetch takes for half of their lease are given back.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use everbus_core::{
    BoxFuture, Code, ConsumeOptions, Consumer, Delivery, Error, Lease, Pattern, Result,
};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::Postgres;
use crate::claim::{Asking, Looked};
use crate::settle::give_back;

/// After a fetch of this many events or more, the next look begins at once, while the caller works.
const MANY: usize = 128;
/// A look in advance claims for so many fetches, because a claim costs the server as much as about 150 events.
const AHEAD: usize = 2;
/// How soon to look again while a writer that has not ended holds events back.
const HELD_BACK: Duration = Duration::from_millis(5);
/// The longest time between two looks for claimed events that no fetch takes.
const LONGEST_TICK: Duration = Duration::from_secs(10);

/// Whether the next look should expect events (`eager`), judged by the looks before. An eager look is quicker if there
/// are events. If there are none, it locks the group, and so writes to the server, for nothing.
#[derive(Default)]
struct Outlook {
    /// The consumer was woken since the last look.
    woken: bool,
    /// The last look after a wake-up found events.
    wakes_pay: bool,
    /// The last look left events behind.
    more: bool,
}

impl Outlook {
    fn is_eager(&self) -> bool {
        self.more || self.woken && self.wakes_pay
    }

    fn looked(&mut self, (looked, found): &(Looked, bool)) {
        if std::mem::take(&mut self.woken) {
            self.wakes_pay = *found;
        }
        self.more = looked.more;
    }
}

/// A look under way, or its result that no fetch has seen yet. It puts the events that it found into the mailbox.
struct Look {
    /// Returns the rest, and whether there were events.
    task: JoinHandle<Result<(Looked, bool)>>,
    /// How often the bell had rung when the look began.
    rings: u64,
}

/// After a look that took the last events: another look finds nothing before the bell rings or time passes.
struct Quiet {
    rings: u64,
    /// When to look again.
    next: Option<i64>,
}

impl Look {
    fn is_done(&self) -> bool {
        self.task.is_finished()
    }

    async fn result(&mut self) -> Result<(Looked, bool)> {
        let looked = (&mut self.task).await;
        looked.map_err(|e| Error::new(Code::Internal, "looking for events failed").caused_by(e))?
    }
}

/// Events that are claimed and that no fetch has returned yet, each with the end of its lease.
#[derive(Default)]
struct Mailbox(Mutex<VecDeque<(Delivery, i64)>>);

impl Mailbox {
    fn put(&self, looked: &mut Looked) {
        let events = std::mem::take(&mut looked.deliveries);
        let until = looked.until;
        self.0.lock().extend(events.into_iter().map(|d| (d, until)));
    }

    fn take(&self, max: usize) -> Vec<Delivery> {
        let mut events = self.0.lock();
        let count = max.min(events.len());
        events
            .drain(..count)
            .map(|(delivery, _)| delivery)
            .collect()
    }

    fn len(&self) -> usize {
        self.0.lock().len()
    }

    fn take_leases(&self) -> Vec<Lease> {
        let events = std::mem::take(&mut *self.0.lock());
        events.into_iter().map(|(d, _)| d.lease).collect()
    }

    /// Gives back the events whose leases end within `left`, in a task of its own: a fetch may be dropped.
    /// Looks wait until the task is done.
    fn give_back_old(&self, engine: &Arc<Postgres>, left: Duration) {
        let soon = engine.now().plus(left).as_micros();
        let mut old: Vec<Lease> = Vec::new();
        self.0.lock().retain(|(delivery, until)| {
            let is_old = *until <= soon;
            if is_old {
                old.push(delivery.lease.clone());
            }
            !is_old
        });
        if old.is_empty() {
            return;
        }
        let (engine, returning) = (engine.clone(), engine.returning.begin());
        tokio::spawn(async move {
            if let Err(error) = give_back(&engine, &old).await {
                warn_of_ending(&error);
            }
            drop(returning);
        });
    }
}

fn warn_of_ending(error: &Error) {
    tracing::warn!(target: "everbus::postgres", %error, "events come again when their leases end");
}

/// Gives back the events of a mailbox that no fetch takes, as long as the consumer lives. Handlers may have become slow,
/// and events whose leases end count as crashes of their worker.
async fn give_back_unfetched(engine: Weak<Postgres>, mailbox: Weak<Mailbox>, lease: Duration) {
    let tick = (lease / 4).clamp(Duration::from_millis(1), LONGEST_TICK);
    loop {
        tokio::time::sleep(tick).await;
        let (Some(engine), Some(mailbox)) = (engine.upgrade(), mailbox.upgrade()) else {
            return;
        };
        mailbox.give_back_old(&engine, lease / 2);
    }
}

pub(crate) struct PgConsumer {
    engine: Arc<Postgres>,
    asking: Asking,
    mailbox: Arc<Mailbox>,
    /// A look under way. It goes on when the fetch that began it is dropped.
    running: Option<Look>,
    /// How the next look is made.
    outlook: Outlook,
    quiet: Option<Quiet>,
    closed: bool,
}

impl PgConsumer {
    pub(crate) fn new(
        engine: Arc<Postgres>,
        group: i64,
        owner: i64,
        options: ConsumeOptions,
    ) -> Self {
        let seat = engine.seats.add(group, &options);
        let mailbox = Arc::<Mailbox>::default();
        let (of, its) = (Arc::downgrade(&engine), Arc::downgrade(&mailbox));
        tokio::spawn(give_back_unfetched(of, its, options.lease));
        Self {
            engine,
            asking: Asking {
                seat,
                group,
                owner,
                options: Arc::new(options),
            },
            mailbox,
            running: None,
            outlook: Outlook::default(),
            quiet: None,
            closed: false,
        }
    }

    /// Takes events from the mailbox. If they are many, and the last look left some behind, the next one begins.
    fn take(&mut self, max: usize) -> Vec<Delivery> {
        let batch = self.mailbox.take(max);
        // What is left is for the next fetch. So no more than three fetches wait here, and other processes get the rest.
        if batch.len() >= MANY && self.outlook.more && self.mailbox.len() <= max {
            self.begin_look(max * AHEAD);
        }
        batch
    }

    /// Begins a look, unless one is under way.
    fn begin_look(&mut self, max: usize) -> &mut Look {
        let (engine, asking) = (&self.engine, &self.asking);
        let eager = self.outlook.is_eager();
        self.running.get_or_insert_with(|| {
            let (engine, asking) = (engine.clone(), asking.clone());
            let mailbox = self.mailbox.clone();
            let rings = engine.bell.rings();
            let task = tokio::spawn(async move {
                let mut looked = engine.look(&asking, max, eager).await?;
                let found = !looked.deliveries.is_empty();
                mailbox.put(&mut looked);
                Ok((looked, found))
            });
            Look { task, rings }
        })
    }

    /// Looks once, and puts events into the mailbox. Returns the look if there were none.
    async fn look(&mut self, max: usize) -> Result<Option<Looked>> {
        let look = self.begin_look(max);
        let rings = look.rings;
        let looked = look.result().await;
        self.running = None;
        let looked = looked?;
        self.outlook.looked(&looked);
        let (looked, found) = looked;
        if !found {
            return Ok(Some(looked));
        }
        let next = looked.next;
        self.quiet = looked.nothing_left.then_some(Quiet { rings, next });
        Ok(None)
    }

    /// Gives back what was claimed and not returned, in a task that goes on when its caller is dropped. `None`: there
    /// is nothing, or no runtime.
    fn return_unfetched(&mut self) -> Option<JoinHandle<Result<()>>> {
        if self.mailbox.0.lock().is_empty() && self.running.is_none() {
            return None;
        }
        let runtime = tokio::runtime::Handle::try_current().ok()?;
        let (mailbox, running) = (self.mailbox.clone(), self.running.take());
        let engine = self.engine.clone();
        let returning = self.engine.returning.begin();
        Some(runtime.spawn(async move {
            let mut given = give_back(&engine, &mailbox.take_leases()).await;
            // A look waits until nothing is on its way back. Holding the guard while waiting for a look is a deadlock.
            drop(returning);
            if let Some(mut running) = running
                && running.result().await.is_ok()
            {
                let _returning = engine.returning.begin();
                given = given.and(give_back(&engine, &mailbox.take_leases()).await);
            }
            if let Err(error) = &given {
                warn_of_ending(error);
            }
            given
        }))
    }
}

/// Waits until claims are given back.
async fn returned(task: Option<JoinHandle<Result<()>>>) -> Result<()> {
    let Some(task) = task else { return Ok(()) };
    let ended = task.await;
    ended.map_err(|e| Error::new(Code::Internal, "giving events back failed").caused_by(e))?
}

impl Consumer for PgConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let max = max.max(1);
            let bell = self.engine.bell.clone();
            loop {
                // Registered before the look, so that no ring between the two is lost.
                let mut woken = std::pin::pin!(bell.here.notified());
                woken.as_mut().enable();
                self.engine.check_open()?;
                if self.running.as_ref().is_some_and(Look::is_done) {
                    // Its events are in the mailbox. How the next look is made depends on it.
                    self.look(max).await?;
                }
                let lease = self.asking.options.lease;
                self.mailbox.give_back_old(&self.engine, lease / 2);
                let batch = self.take(max);
                if !batch.is_empty() {
                    return Ok(batch);
                }
                let looked = match self.quiet.take() {
                    Some(quiet) if quiet.rings == bell.rings() && self.running.is_none() => {
                        Looked {
                            next: quiet.next,
                            ..Looked::default()
                        }
                    }
                    _ => {
                        // A look that began before this fetch may have missed what happened since, so there is another.
                        let began_earlier = self.running.is_some();
                        match self.look(max).await? {
                            Some(looked) if !began_earlier => looked,
                            Some(_) => continue,
                            // Even if the claim has taken half of its lease: the next one may take as long. Leases that
                            // have ended may be those of another consumer by now.
                            None => {
                                self.mailbox.give_back_old(&self.engine, Duration::ZERO);
                                match self.take(max) {
                                    batch if batch.is_empty() => continue,
                                    batch => return Ok(batch),
                                }
                            }
                        }
                    }
                };
                let mut wait = self.engine.options.poll * 2;
                if let Some(next) = looked.next {
                    let now = self.engine.now();
                    let left = everbus_core::Timestamp::from_micros(next).since(now);
                    wait = wait.min(left.max(Duration::from_millis(1)));
                }
                if looked.held_back {
                    wait = wait.min(HELD_BACK);
                }
                self.outlook.woken = tokio::time::timeout(wait, woken).await.is_ok();
            }
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.engine.seats.set_handled(self.asking.seat, handled);
        self.engine.bell.ring_here();
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.engine.seats.set_prefetch(self.asking.seat, 0);
        Box::pin(returned(self.return_unfetched()))
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        self.engine.seats.set_prefetch(self.asking.seat, prefetch);
        self.engine.bell.ring_here();
        Box::pin(std::future::ready(Ok(())))
    }

    fn close(mut self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            self.closed = true;
            self.engine.seats.remove(self.asking.seat);
            let done = returned(self.return_unfetched()).await;
            // Others may take what this consumer would have taken.
            self.engine.bell.ring();
            done
        })
    }
}

impl Drop for PgConsumer {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        self.engine.seats.remove(self.asking.seat);
        self.engine.bell.ring_here();
        self.return_unfetched();
    }
}
