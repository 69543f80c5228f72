//! The queue of commands for the writer.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use everbus_core::{
    Appended, Error, Event, GroupName, GroupSpec, Lease, Pattern, Recorded, Result, SettledOutcome,
    Settlement, SubscriptionInfo,
};
use tokio::sync::oneshot;

use crate::consumer::NewSession;
use crate::feeder::Fed;
use crate::writer::Writer;

pub(crate) type Reply<T> = oneshot::Sender<Result<T>>;

/// A task that runs inside the writer's transaction.
pub(crate) type Job = Box<dyn FnOnce(&mut Writer) -> Result<Answer> + Send>;
/// Sends a job's answer once it is durable.
pub(crate) type Answer = Box<dyn FnOnce() + Send>;

/// Priority and durability of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// In the order of the queue.
    Now,
    /// May wait while other commands are queued.
    Patient,
    /// Patient, and not durable when it is answered. After a power failure the work is done again.
    Lazy,
}

/// A command for the writer.
pub(crate) enum Command {
    Append {
        events: Vec<Event>,
        reply: Reply<Vec<Result<Appended>>>,
    },
    /// A publish of one event, the usual case: it needs no lists for events and answers. The publisher allocates
    /// the record, so that the writer does not; its position is set by the append.
    AppendOne {
        record: Arc<Recorded>,
        reply: Reply<Appended>,
    },
    Settle {
        settlements: Vec<Settlement>,
        reply: Reply<Vec<Result<()>>>,
    },
    Extend {
        leases: Vec<Lease>,
        by: Duration,
        reply: Reply<Vec<Result<()>>>,
    },
    Declare {
        group: Box<GroupSpec>,
        reply: Reply<Vec<SubscriptionInfo>>,
    },
    Retract {
        subscription: String,
        reply: Reply<()>,
    },
    RemoveGroup {
        group: GroupName,
        reply: Reply<()>,
    },
    Attach {
        session: Box<NewSession>,
        reply: Reply<()>,
    },
    SetHandled {
        session: u64,
        handled: Vec<Pattern>,
    },
    Detach {
        session: u64,
        reply: Option<Reply<()>>,
    },
    Fed(Fed),
    Watch {
        position: u64,
        reply: Option<Reply<SettledOutcome>>,
    },
    /// A change made by an operator: retry or purge dead letters, prune.
    Job {
        job: Option<Job>,
        failed: Box<dyn FnOnce(Error) + Send>,
        priority: Priority,
    },
}

impl Command {
    /// Whether it runs a user's effect.
    pub(crate) fn has_effects(&self) -> bool {
        match self {
            Command::Settle { settlements, .. } => settlements.iter().any(|s| s.effect.is_some()),
            _ => false,
        }
    }

    /// Whether it publishes.
    pub(crate) fn is_append(&self) -> bool {
        matches!(self, Command::Append { .. } | Command::AppendOne { .. })
    }

    /// The event of an `AppendOne`.
    pub(crate) fn single(&self) -> Option<&Event> {
        match self {
            Command::AppendOne { record, .. } => Some(&record.event),
            _ => None,
        }
    }

    /// Whether it may wait while other commands are queued.
    pub(crate) fn is_patient(&self) -> bool {
        matches!(
            self,
            Command::Job {
                priority: Priority::Patient | Priority::Lazy,
                ..
            }
        )
    }

    /// Whether it is patient and need not be durable at once.
    pub(crate) fn is_lazy(&self) -> bool {
        matches!(
            self,
            Command::Job {
                priority: Priority::Lazy,
                ..
            }
        )
    }

    /// Answers with an error.
    pub(crate) fn fail(self, error: Error) {
        match self {
            Command::Append { reply, .. } => drop(reply.send(Err(error))),
            Command::AppendOne { reply, .. } => drop(reply.send(Err(error))),
            Command::Settle { reply, .. } | Command::Extend { reply, .. } => {
                drop(reply.send(Err(error)));
            }
            Command::Declare { reply, .. } => drop(reply.send(Err(error))),
            Command::Retract { reply, .. } | Command::RemoveGroup { reply, .. } => {
                drop(reply.send(Err(error)));
            }
            Command::Attach { reply, .. } => drop(reply.send(Err(error))),
            Command::Detach { reply, .. } => {
                if let Some(reply) = reply {
                    drop(reply.send(Err(error)));
                }
            }
            Command::Watch { reply, .. } => {
                if let Some(reply) = reply {
                    drop(reply.send(Err(error)));
                }
            }
            Command::Job { failed, .. } => failed(error),
            Command::SetHandled { .. } | Command::Fed(_) => {}
        }
    }
}

/// The queue between all callers and the writer.
#[derive(Default)]
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    wake: Condvar,
}

#[derive(Default)]
struct Inner {
    commands: Vec<Command>,
    sleeping: bool,
    nudged: bool,
    closed: bool,
    orderly: bool,
}

/// The commands that the writer took.
pub(crate) struct Taken {
    pub(crate) commands: Vec<Command>,
    pub(crate) closed: bool,
    pub(crate) orderly: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a command. After the end it is answered at once with an error.
    pub(crate) fn push(&self, command: Command) {
        let mut inner = self.lock();
        if inner.closed {
            drop(inner);
            command.fail(Error::shutdown());
            return;
        }
        inner.commands.push(command);
        if inner.sleeping {
            inner.sleeping = false;
            drop(inner);
            self.wake.notify_one();
        }
    }

    /// Wakes the writer although nothing was queued.
    pub(crate) fn nudge(&self) {
        self.lock().nudged = true;
        self.wake.notify_one();
    }

    /// Closes the queue: the writer finishes the queued commands and stops. In an orderly end it also gives
    /// up its leases; otherwise it leaves them, as a process that died would.
    pub(crate) fn close(&self, orderly: bool) {
        let mut inner = self.lock();
        inner.orderly |= orderly && !inner.closed;
        inner.closed = true;
        drop(inner);
        self.wake.notify_one();
    }

    /// Whether nothing waits for the writer.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().commands.is_empty()
    }

    /// Whether the queue was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Takes all commands, waiting up to `timeout` for the first.
    pub(crate) fn take(&self, spare: Vec<Command>, timeout: Option<Duration>) -> Taken {
        let mut inner = self.lock();
        if inner.commands.is_empty() && !inner.closed && !inner.nudged {
            inner.sleeping = true;
            inner = match timeout {
                Some(timeout) => {
                    self.wake
                        .wait_timeout(inner, timeout)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
                None => self
                    .wake
                    .wait(inner)
                    .unwrap_or_else(PoisonError::into_inner),
            };
        }
        inner.sleeping = false;
        inner.nudged = false;
        let commands = std::mem::replace(&mut inner.commands, spare);
        Taken {
            commands,
            closed: inner.closed,
            orderly: inner.orderly,
        }
    }
}
