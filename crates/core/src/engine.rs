//! An open engine: the broker and its optional abilities.
//!
//! A new engine is a crate that implements [`Broker`] (`broker.rs`, with `config.rs`, `declare.rs`, `append.rs`,
//! `consumer.rs`, `settle.rs` and `inspect.rs`), has a file for each further trait, and returns an [`Engine`] from
//! `open` in `lib.rs`; the section "The files of an engine" in `docs/architecture.md` lists all files. Its URL is
//! registered in `everbus/src/open/engines.rs`.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::abilities::{Depth, Lookup, Redeliver, Settled};
use crate::audit::Audit;
use crate::broker::{BoxFuture, Broker};
use crate::checkpoints::Checkpoints;
use crate::dead_letters::DeadLetters;
use crate::durability::Weakness;
use crate::error::{Code, Error, Result};
use crate::history::History;
use crate::inbox::Inbox;
use crate::kv::KeyValue;
use crate::log::Log;
use crate::maintenance::Maintenance;
use crate::orphans::Orphans;
use crate::outbox::OutboxSource;
use crate::payloads::Payloads;
use crate::store::Store;

/// An open engine. All code above the engines uses this and never asks which engine it is.
///
/// Every engine moves events. An ability that an engine lacks is `None`, and the method of the same name returns
/// [`Code::Unsupported`].
#[derive(Clone)]
pub struct Engine {
    /// Moves events.
    pub broker: Arc<dyn Broker>,
    /// Reads the log without a group.
    pub log: Option<Arc<dyn Log>>,
    /// Finds events by id, and knows their state in every group.
    pub lookup: Option<Arc<dyn Lookup>>,
    /// Knows when every group has settled an event.
    pub settled: Option<Arc<dyn Settled>>,
    /// Redelivers events to a group.
    pub redeliver: Option<Arc<dyn Redeliver>>,
    /// Counts and drops the pending events of a stream.
    pub depth: Option<Arc<dyn Depth>>,
    /// Keeps dead letters that can be queried.
    pub dead_letters: Option<Arc<dyn DeadLetters>>,
    /// Stores what the runtime writes about events that another engine moves.
    pub store: Option<Arc<dyn Store>>,
    /// Work that runs as long as a bus runs on this engine.
    pub background: Option<Arc<dyn Background>>,
    /// Maintains the storage: retention, checks, backups.
    pub maintenance: Option<Arc<dyn Maintenance>>,
    /// Records which events each group has handled.
    pub inbox: Option<Arc<dyn Inbox>>,
    /// Answers history queries by tenant, app and entity.
    pub history: Option<Arc<dyn History>>,
    /// Keeps payload stages.
    pub payloads: Option<Arc<dyn Payloads>>,
    /// Keeps an audit trail.
    pub audit: Option<Arc<dyn Audit>>,
    /// Stores checkpoints of long operations.
    pub checkpoints: Option<Arc<dyn Checkpoints>>,
    /// The key-value store.
    pub kv: Option<Arc<dyn KeyValue>>,
    /// The outbox in the engine's own database, if it has one.
    pub outbox: Option<Arc<dyn OutboxSource>>,
    /// Lists objects without an event.
    pub orphans: Option<Arc<dyn Orphans>>,
    /// The directory for objects that are too large for the engine, unless another place is configured:
    /// beside its file, if it has one.
    pub objects: Option<PathBuf>,
    /// The file, if the engine is one.
    pub file: Option<PathBuf>,
    /// The settings that keep the engine from being more durable than
    /// [`Capabilities::durability`](crate::Capabilities::durability) says.
    pub weaknesses: Vec<Weakness>,
}

impl Engine {
    /// An engine that only moves events.
    pub fn new(broker: Arc<dyn Broker>) -> Self {
        Self {
            broker,
            log: None,
            lookup: None,
            settled: None,
            redeliver: None,
            depth: None,
            dead_letters: None,
            store: None,
            background: None,
            maintenance: None,
            inbox: None,
            history: None,
            payloads: None,
            audit: None,
            checkpoints: None,
            kv: None,
            outbox: None,
            orphans: None,
            objects: None,
            file: None,
            weaknesses: Vec::new(),
        }
    }

    /// The log, or [`Code::Unsupported`].
    pub fn log(&self) -> Result<&dyn Log> {
        self.log
            .as_deref()
            .ok_or_else(|| self.unsupported("reading its log without a group"))
    }

    /// Finding events by id, or [`Code::Unsupported`].
    pub fn lookup(&self) -> Result<&dyn Lookup> {
        self.lookup
            .as_deref()
            .ok_or_else(|| self.beside("finding events by id"))
    }

    /// Waiting until an event is settled, or [`Code::Unsupported`].
    pub fn settled(&self) -> Result<&dyn Settled> {
        self.settled.as_deref().ok_or_else(|| {
            let error = self.unsupported("waiting until every group is done with an event");
            error.hint("the event is stored; `everbus groups` shows how far each group is")
        })
    }

    /// Redelivering events, or [`Code::Unsupported`].
    pub fn redeliver(&self) -> Result<&dyn Redeliver> {
        self.redeliver
            .as_deref()
            .ok_or_else(|| self.unsupported("delivering events to a group once more"))
    }

    /// Counting the pending events of a stream, or [`Code::Unsupported`].
    pub fn depth(&self) -> Result<&dyn Depth> {
        self.depth
            .as_deref()
            .ok_or_else(|| self.unsupported("counting what waits in a stream"))
    }

    /// The dead letters, or [`Code::Unsupported`].
    pub fn dead_letters(&self) -> Result<&dyn DeadLetters> {
        self.dead_letters
            .as_deref()
            .ok_or_else(|| self.beside("querying dead letters"))
    }

    /// The writing side of the store, or [`Code::Unsupported`].
    pub fn store(&self) -> Result<Arc<dyn Store>> {
        self.store
            .clone()
            .ok_or_else(|| self.unsupported("a store for events that another engine moves"))
    }

    /// The maintenance of the storage, or [`Code::Unsupported`].
    pub fn maintenance(&self) -> Result<&dyn Maintenance> {
        self.maintenance
            .as_deref()
            .ok_or_else(|| self.beside("a file to maintain"))
    }

    /// The inbox, or [`Code::Unsupported`].
    pub fn inbox(&self) -> Result<&dyn Inbox> {
        self.inbox.as_deref().ok_or_else(|| self.beside("an inbox"))
    }

    /// The history, or [`Code::Unsupported`].
    pub fn history(&self) -> Result<&dyn History> {
        self.history
            .as_deref()
            .ok_or_else(|| self.beside("history queries"))
    }

    /// The payload stages, or [`Code::Unsupported`].
    pub fn payloads(&self) -> Result<&dyn Payloads> {
        self.payloads
            .as_deref()
            .ok_or_else(|| self.beside("payload stages"))
    }

    /// The audit trail, or [`Code::Unsupported`].
    pub fn audit(&self) -> Result<&dyn Audit> {
        self.audit
            .as_deref()
            .ok_or_else(|| self.beside("an audit trail"))
    }

    /// The checkpoints, or [`Code::Unsupported`].
    pub fn checkpoints(&self) -> Result<&dyn Checkpoints> {
        self.checkpoints
            .as_deref()
            .ok_or_else(|| self.beside("checkpoints"))
    }

    /// The key-value store, or [`Code::Unsupported`].
    pub fn kv(&self) -> Result<Arc<dyn KeyValue>> {
        self.kv.clone().ok_or_else(|| self.beside("values by key"))
    }

    /// The outbox in the engine's own database, or [`Code::Unsupported`].
    pub fn outbox(&self) -> Result<Arc<dyn OutboxSource>> {
        self.outbox.clone().ok_or_else(|| {
            let error = self.unsupported("an outbox in its own database");
            error.hint("name the database with the table event_outbox: --outbox shop.db, or --outbox postgres://…")
        })
    }

    /// The objects without an event, or [`Code::Unsupported`].
    pub fn orphans(&self) -> Result<&dyn Orphans> {
        self.orphans
            .as_deref()
            .ok_or_else(|| self.beside("a list of objects without their events"))
    }

    /// The error for a missing ability that a store beside this engine would add.
    fn beside(&self, what: &str) -> Error {
        self.unsupported(what)
            .hint("name a store beside it, such as --store sqlite:history.db")
    }

    fn unsupported(&self, what: &str) -> Error {
        let engine = self.broker.capabilities().engine;
        Error::new(
            Code::Unsupported,
            format!("the {engine} engine does not offer {what}"),
        )
    }
}

/// Work that an engine needs done while a bus runs on it, such as copying events into a store.
pub trait Background: Send + Sync + 'static {
    /// Runs the work. The future ends when the engine is closed.
    fn run(&self) -> BoxFuture<'static, ()>;
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("capabilities", &self.broker.capabilities())
            .finish_non_exhaustive()
    }
}
