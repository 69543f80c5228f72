//! The vocabulary of Everbus: events, patterns, policies and the traits that engines implement.
//!
//! This crate does no I/O and knows no engine. Read it in this order:
//!
//! 1. [`Event`]: what travels. [`Pattern`]: which events a subscriber wants.
//! 2. [`Broker`] and [`Consumer`]: how events move (append, fetch, settle).
//! 3. [`Log`], [`DeadLetters`], [`Inbox`], [`Maintenance`]: what an engine may offer beside that.
//! 4. [`RetryPolicy`], [`Clock`], [`Progress`]: the small pure parts every engine shares.
//!
//! Everything that can go wrong is an [`Error`] with a stable [`Code`] and a hint.

pub mod broker;
pub mod builder;
pub mod clock;
pub mod dead_letters;
pub mod effect;
pub mod engine;
pub mod error;
pub mod event;
pub mod failure;
pub mod group;
pub mod id;
pub mod inbox;
pub mod log;
pub mod maintenance;
pub mod pattern;
pub mod progress;
pub mod retry;
pub mod time;
pub mod typed;

pub use broker::{
    Appended, BoxFuture, Broker, Capabilities, ConsumeOptions, Consumer, DROPPED, Deduplication,
    Delivery, Durability, Lease, OrderScope, SettledOutcome, Settlement, Verdict,
};
pub use builder::{EventBuilder, IntoEvent, MAX_TYPE_CHARS};
pub use clock::{Clock, ManualClock, SystemClock};
pub use dead_letters::{
    DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetterPage, DeadLetters, PageRequest,
    PurgeBasis,
};
pub use effect::{Effect, EffectResult};
pub use engine::Engine;
pub use error::{Code, Error, Result};
pub use event::{Attributes, Entity, Event, Inherited, TraceContext};
pub use failure::{Failure, FailureKind};
pub use group::{GroupInfo, GroupName, GroupSpec, StartFrom, SubscriptionInfo, SubscriptionSpec};
pub use id::EventId;
pub use inbox::Inbox;
pub use log::{EventState, GroupState, Log, Recorded};
pub use maintenance::{CheckReport, Finding, Maintenance, Pruned, Retention};
pub use pattern::Pattern;
pub use progress::Progress;
pub use retry::RetryPolicy;
pub use time::Timestamp;
pub use typed::TypedEvent;
