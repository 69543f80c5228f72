//! An opened engine: the broker and whatever else it offers.

use std::fmt;
use std::sync::Arc;

use crate::broker::Broker;
use crate::dead_letters::DeadLetters;
use crate::error::{Code, Error, Result};
use crate::inbox::Inbox;
use crate::log::Log;
use crate::maintenance::Maintenance;

/// An opened engine. Everything above the engines works with this and never asks which one it is.
#[derive(Clone)]
pub struct Engine {
    /// Moves events.
    pub broker: Arc<dyn Broker>,
    /// Reads the log directly, where the engine can.
    pub log: Option<Arc<dyn Log>>,
    /// Keeps dead letters that can be queried, where the engine can.
    pub dead_letters: Option<Arc<dyn DeadLetters>>,
    /// Looks after its own file, where it has one.
    pub maintenance: Option<Arc<dyn Maintenance>>,
    /// Remembers what each group has handled, where the engine can.
    pub inbox: Option<Arc<dyn Inbox>>,
}

impl Engine {
    /// The log, or [`Code::Unsupported`].
    pub fn log(&self) -> Result<&dyn Log> {
        self.log
            .as_deref()
            .ok_or_else(|| self.unsupported("reading its log without a group"))
    }

    /// The dead letters, or [`Code::Unsupported`].
    pub fn dead_letters(&self) -> Result<&dyn DeadLetters> {
        self.dead_letters
            .as_deref()
            .ok_or_else(|| self.unsupported("querying dead letters"))
    }

    /// The upkeep of the file, or [`Code::Unsupported`].
    pub fn maintenance(&self) -> Result<&dyn Maintenance> {
        self.maintenance
            .as_deref()
            .ok_or_else(|| self.unsupported("a file to look after"))
    }

    /// The inbox, or [`Code::Unsupported`].
    pub fn inbox(&self) -> Result<&dyn Inbox> {
        self.inbox
            .as_deref()
            .ok_or_else(|| self.unsupported("an inbox"))
    }

    fn unsupported(&self, what: &str) -> Error {
        let engine = self.broker.capabilities().engine;
        Error::new(
            Code::Unsupported,
            format!("the {engine} engine does not offer {what}"),
        )
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("capabilities", &self.broker.capabilities())
            .finish_non_exhaustive()
    }
}
