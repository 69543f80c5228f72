//! One consumer of a group. It claims as many events as a fetch asks for. So a dropped fetch leaves no more than these
//! events claimed, and the next fetch returns them. After a large fetch it claims as many again in advance, and gives
//! them back if no fetch comes for half of their lease.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    BoxFuture, Code, ConsumeOptions, Consumer, Delivery, Error, Lease, Pattern, Result,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::Postgres;
use crate::claim::{Asking, Looked};
use crate::settle::give_back;

/// After a fetch of this many events or more, the next look begins at once, while the caller works.
const MANY: usize = 128;
/// How soon to look again while a writer that has not ended holds events back.
const HELD_BACK: Duration = Duration::from_millis(5);

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

    fn looked(&mut self, looked: &Looked) {
        if std::mem::take(&mut self.woken) {
            self.wakes_pay = !looked.deliveries.is_empty();
        }
        self.more = looked.more;
    }
}

/// A look under way, or its result that no fetch has taken yet.
struct Look {
    task: JoinHandle<Result<Looked>>,
    /// Dropped when a fetch waits for the result.
    in_advance: Option<oneshot::Sender<()>>,
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
    async fn result(&mut self) -> Result<Looked> {
        self.in_advance = None;
        let looked = (&mut self.task).await;
        looked.map_err(|e| Error::new(Code::Internal, "looking for events failed").caused_by(e))?
    }
}

/// Keeps the result of a look in advance until a fetch takes it. Handlers may have become slow meanwhile: then the
/// events are given back before their leases end, since events whose leases end count as crashes of their worker.
async fn kept(
    engine: &Postgres,
    mut looked: Looked,
    taken: oneshot::Receiver<()>,
    time: Duration,
) -> Looked {
    if !looked.deliveries.is_empty() && tokio::time::timeout(time, taken).await.is_err() {
        let _returning = engine.returning.begin();
        let leases: Vec<Lease> = looked.deliveries.drain(..).map(|d| d.lease).collect();
        if let Err(error) = give_back(engine, &leases).await {
            tracing::warn!(target: "everbus::postgres", %error, "events come again when their leases end");
        }
    }
    looked
}

pub(crate) struct PgConsumer {
    engine: Arc<Postgres>,
    asking: Asking,
    /// Events that are claimed and not yet returned, each with the end of its lease.
    mailbox: VecDeque<(Delivery, i64)>,
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
        Self {
            engine,
            asking: Asking {
                seat,
                group,
                owner,
                options: Arc::new(options),
            },
            mailbox: VecDeque::new(),
            running: None,
            outlook: Outlook::default(),
            quiet: None,
            closed: false,
        }
    }

    /// Takes events that were claimed before. Leases that are more than half over are extended first.
    async fn take_from_mailbox(&mut self, max: usize) -> Result<Vec<Delivery>> {
        if self.mailbox.is_empty() {
            return Ok(Vec::new());
        }
        let lease = self.asking.options.lease;
        let soon = self.engine.now().plus(lease / 2).as_micros();
        let count = max.min(self.mailbox.len());
        let old = |(_, until): &(Delivery, i64)| *until < soon;
        if self.mailbox.iter().take(count).any(old) {
            let leases: Vec<Lease> = self
                .mailbox
                .iter()
                .map(|(delivery, _)| delivery.lease.clone())
                .collect();
            let until = self.engine.now().plus(lease).as_micros();
            let extended = self.engine.extend_leases(&leases, lease).await?;
            let kept = std::mem::take(&mut self.mailbox).into_iter().zip(extended);
            // Events whose lease has ended are dropped here. They are delivered again.
            let kept = kept.filter(|(_, answer)| answer.is_ok());
            self.mailbox = kept.map(|((delivery, _), _)| (delivery, until)).collect();
        }
        let count = max.min(self.mailbox.len());
        Ok(self
            .mailbox
            .drain(..count)
            .map(|(delivery, _)| delivery)
            .collect())
    }

    /// Begins a look, unless one is under way.
    fn begin_look(&mut self, max: usize) -> &mut Look {
        let (engine, asking) = (&self.engine, &self.asking);
        let eager = self.outlook.is_eager();
        self.running.get_or_insert_with(|| {
            let (engine, asking) = (engine.clone(), asking.clone());
            let (in_advance, taken) = oneshot::channel();
            let rings = engine.bell.rings();
            let task = tokio::spawn(async move {
                let looked = engine.look(&asking, max, eager).await?;
                Ok(kept(&engine, looked, taken, asking.options.lease / 2).await)
            });
            Look {
                task,
                in_advance: Some(in_advance),
                rings,
            }
        })
    }

    /// Looks once, and puts events into the mailbox. Returns the look if there were none.
    async fn look(&mut self, max: usize) -> Result<Option<Looked>> {
        let look = self.begin_look(max);
        let rings = look.rings;
        let looked = look.result().await;
        self.running = None;
        let mut looked = looked?;
        self.outlook.looked(&looked);
        let deliveries = std::mem::take(&mut looked.deliveries);
        if deliveries.is_empty() {
            return Ok(Some(looked));
        }
        let next = looked.next;
        self.quiet = looked.nothing_left.then_some(Quiet { rings, next });
        self.mailbox
            .extend(deliveries.into_iter().map(|d| (d, looked.until)));
        Ok(None)
    }

    /// Gives back what was claimed and not returned, in a task that goes on when its caller is dropped. `None`: there
    /// is nothing, or no runtime.
    fn return_unfetched(&mut self) -> Option<JoinHandle<Result<()>>> {
        if self.mailbox.is_empty() && self.running.is_none() {
            return None;
        }
        let runtime = tokio::runtime::Handle::try_current().ok()?;
        let (mailbox, running) = (std::mem::take(&mut self.mailbox), self.running.take());
        let engine = self.engine.clone();
        let returning = self.engine.returning.begin();
        Some(runtime.spawn(async move {
            let leases: Vec<Lease> = mailbox.into_iter().map(|(d, _)| d.lease).collect();
            let mut given = give_back(&engine, &leases).await;
            // A look waits until nothing is on its way back. Holding the guard while waiting for a look is a deadlock.
            drop(returning);
            if let Some(mut running) = running
                && let Ok(looked) = running.result().await
            {
                let _returning = engine.returning.begin();
                let leases: Vec<Lease> = looked.deliveries.into_iter().map(|d| d.lease).collect();
                given = given.and(give_back(&engine, &leases).await);
            }
            if let Err(error) = &given {
                tracing::warn!(target: "everbus::postgres", %error, "events come again when their leases end");
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
                let batch = self.take_from_mailbox(max).await?;
                if !batch.is_empty() {
                    if batch.len() >= MANY && self.outlook.more {
                        self.begin_look(max);
                    }
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
                            _ => continue,
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
