//! The answer to a publish.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Appended, Error, Event, EventId, GroupName, Position, Result, Timestamp};

use crate::runtime::bus::Shared;

/// How long [`Receipt::settled`] waits.
pub(crate) const SETTLED_WAIT: Duration = Duration::from_secs(30);

/// Proof that an event is stored, as durably as the engine's
/// [`Capabilities`](everbus_core::Capabilities) say.
#[derive(Clone)]
pub struct Receipt {
    appended: Appended,
    about: About,
    shared: Arc<Shared>,
}

/// Data of the event that a receipt shows, besides id and position.
#[derive(Clone)]
pub(crate) struct About {
    event_type: Arc<str>,
    occurred_at: Timestamp,
    source: Option<Box<str>>,
}

impl About {
    pub(crate) fn of(event: &Event) -> Self {
        let source = event.attributes().and_then(|a| a.source.as_deref());
        Self {
            event_type: event.type_arc().clone(),
            occurred_at: event.occurred_at(),
            source: source.map(Box::from),
        }
    }
}

impl Receipt {
    pub(crate) fn new(appended: Appended, about: About, shared: Arc<Shared>) -> Self {
        Self {
            appended,
            about,
            shared,
        }
    }

    /// The id of the event.
    pub fn id(&self) -> EventId {
        self.appended.id
    }

    /// The type of the event.
    pub fn event_type(&self) -> &str {
        &self.about.event_type
    }

    /// When the event happened, as its publisher stated.
    pub fn occurred_at(&self) -> Timestamp {
        self.about.occurred_at
    }

    /// The service that published the event: the source of the event, or that of the bus.
    pub fn source(&self) -> Option<&str> {
        self.about.source.as_deref()
    }

    /// The position of the event: its shard and its sequence number there.
    pub fn position(&self) -> Position {
        self.appended.position
    }

    /// The sequence number in its shard; on an engine with a single log this is the whole position.
    pub fn seq(&self) -> u64 {
        self.appended.position.place()
    }

    /// When the engine received the event; for a duplicate, when it received the first copy.
    pub fn received_at(&self) -> Timestamp {
        self.appended.received_at
    }

    /// Whether the same event had been published before; nothing was stored this time.
    pub fn is_duplicate(&self) -> bool {
        self.appended.duplicate
    }

    /// Waits up to 30 seconds until every group that wanted the event when it was published has
    /// handled, skipped or dead-lettered it. An event that no group wants is settled at once.
    ///
    /// Fails with `Timeout` if it takes longer (the event is safe and still being handled), with
    /// `EventBusShutdownError` if the bus is shut down meanwhile, and with `Unsupported` if the engine cannot
    /// know this.
    pub async fn settled(&self) -> Result<Settled> {
        self.settled_within(SETTLED_WAIT).await
    }

    /// Like [`settled`](Self::settled), with another time limit.
    pub async fn settled_within(&self, wait: Duration) -> Result<Settled> {
        let engine = self.shared.engine.settled()?;
        let mut closed = self.shared.closed.subscribe();
        tokio::select! {
            biased;
            outcome = engine.settled(self.appended.position, wait) => Ok(Settled {
                dead_lettered: outcome?.dead_lettered,
            }),
            _ = closed.wait_for(|closed| *closed) => Err(Error::shutdown()),
        }
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receipt")
            .field("id", &self.id())
            .field("event_type", &self.event_type())
            .field("position", &self.position())
            .field("received_at", &self.received_at())
            .field("is_duplicate", &self.is_duplicate())
            .finish()
    }
}

/// How an event ended in all groups together.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settled {
    /// The groups in which the event became a dead letter; empty if all groups handled or skipped it.
    pub dead_lettered: Vec<GroupName>,
}
