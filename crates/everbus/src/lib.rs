//! Reliable events that start as a file on disk: publish, subscribe, retry, dead letters.
//!
//! An event whose publish was acknowledged is never lost. Every subscribed group handles it, or it is in
//! the dead letters with everything needed to understand and retry it.
//!
//! ```
//! use everbus::{Bus, Json};
//! use serde_json::json;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> everbus::Result<()> {
//! # let dir = tempfile::tempdir().unwrap();
//! # let url = format!("sqlite:{}", dir.path().join("shop.db").display());
//! # let url = url.as_str();
//! let bus = Bus::open(url).await?; // "sqlite:shop.db", or "memory:" for a test
//! bus.subscribe("user.*")
//!     .handler(|Json(user): Json<serde_json::Value>| async move { println!("{user}") })
//!     .await?;
//! bus.start().await?;
//! let receipt = bus.publish(("user.created", json!({ "id": 1 }))).await?; // durable now
//! receipt.settled().await?; // handled now
//! bus.shutdown().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Typed events
//!
//! A Rust type that is the payload of one event type names the event type once, and is then published and
//! read directly; `everbus::Event` is the derive macro as well as the struct.
//!
//! ```
//! use everbus::{Bus, Event, Payload};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize, Event)]
//! #[event(type = "orders.order.placed", version = 2, key = "order_id")]
//! struct OrderPlaced {
//!     order_id: u64,
//!     total: u64,
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> everbus::Result<()> {
//! let bus = Bus::open("memory:").await?;
//! bus.subscribe("orders.>")
//!     .handler(|Payload(order): Payload<OrderPlaced>| async move {
//!         assert_eq!((order.order_id, order.total), (42, 1999));
//!     })
//!     .await?;
//! bus.start().await?;
//! let receipt = bus.publish(OrderPlaced { order_id: 42, total: 1999 }).await?;
//! assert!(receipt.settled().await?.dead_lettered.is_empty());
//! bus.shutdown().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Where to find what
//!
//! - [`Bus`]: open, publish, subscribe, start, shut down.
//! - [`Subscribe`]: which group, from where, how often to retry, how long a handler may take.
//! - [`HandlerError`]: the errors of a handler, and what happens to the event next.
//! - [`payloads`]: the payload of an event at each step of its way, stored beside it.
//! - [`overflow`]: large payloads in an object store.
//! - [`Replay`]: runs past events again.
//! - [`DeadLetterQueue`]: list, retry, correct and purge dead letters.
//! - [`outbox`]: events committed in a transaction of the service's own database, and the relay that
//!   publishes them.
//! - [`bridge`]: carries events to a bus on another engine.
//! - [`Bus::history`]: what happened to a tenant, an app, an entity.
//! - [`audit`]: who did what.
//! - `workers`: several processes of one program, behind the feature `workers`.
//! - [`Retention`]: what is kept, and for how long.
//! - [`TypedEvent`]: a Rust type that is the payload of one event type.
//!
//! Everything here uses the traits of [`everbus_core`]; it never asks which engine it runs on.

mod access;
mod admission;
mod ambient;
pub mod asyncapi;
pub mod audit;
mod breaker;
pub mod bridge;
mod compose;
#[cfg(feature = "config")]
pub mod config;
mod dead_letters;
pub mod duty;
mod environment;
mod guard;
mod handler;
pub mod holds;
#[cfg(feature = "http")]
pub mod http;
pub mod kv;
mod open;
#[cfg(feature = "otel")]
mod otel;
#[cfg(feature = "sqlite")]
pub mod outbox;
#[cfg(feature = "overflow")]
pub mod overflow;
#[cfg(not(feature = "overflow"))]
#[path = "overflow/absent.rs"]
pub mod overflow;
pub mod payloads;
#[cfg(feature = "postgres")]
pub mod postgres;
pub mod replay;
mod runtime;
mod schema;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod stats;
pub mod streams;
pub mod testing;
mod url;
#[cfg(all(feature = "workers", unix))]
pub mod workers;

pub use access::{Access, RedisAccess};
pub use admission::{Limits, PublishRate};
pub use ambient::{Scope, correlation_id, with_correlation_id, with_trace};
pub use audit::AuditTrail;
pub use breaker::{BreakerInfo, BreakerPolicy, BreakerState, Criticality};
pub use compose::{ARCHIVE, RETRY_OF, archive_lag, compose};
#[cfg(feature = "config")]
pub use config::Config;
pub use dead_letters::{DeadLetterPreview, DeadLetterQueue, RetryPace, RetryProgress};
pub use environment::watch::{Activity, LeaseExtension, LeaseExtensions, RunningActivity};
#[doc(hidden)]
pub use handler::Slot;
pub use handler::extract::{
    Context, Envelope, FromMessage, Json, Meta, Needs, Payload, PayloadNeed, State, StateNeed,
};
pub use handler::layers::HandlerService;
pub use handler::message::Message;
pub use handler::middleware;
pub use handler::outcome::{Emitted, IntoOutcome, Outcome, Returns};
pub use handler::upcast::Upcasts;
pub use handler::{
    BoxError, Handler, HandlerError, HandlerOutcome, HandlerResult, handled, permanent,
    retry_after, skip,
};
pub use handler::{Decode, SubscriptionId};
pub use kv::Kv;
pub use open::builder::BusBuilder;
#[cfg(feature = "sqlite")]
pub use open::engines::Durable;
#[cfg(feature = "otel")]
pub use otel::continue_trace;
pub use replay::{Replay, ReplayPreview, ReplayReport};
pub use runtime::bus::Bus;
pub use runtime::options::BusOptions;
pub use runtime::pauses::PausedGroup;
pub use runtime::receipt::{Receipt, Settled};
pub use runtime::router::{IntoRoute, Route, Router, to};
pub use runtime::shutdown::Shutdown;
pub use runtime::subscription::subscribe::Subscribe;
pub use schema::{Schema, Schemas};
pub use stats::{BusStats, GroupStats, Outcomes, Quantiles, Skipped, TypeStats};

pub use everbus_core as core;
pub use everbus_core::{
    Attributes, AuditEntry, AuditHead, AuditPage, AuditQuery, AuditRecord, AuditVerdict,
    Capabilities, CheckReport, Class, Clock, Code, Cursor, DeadLetter, DeadLetterFilter,
    DeadLetterKey, DeadLetterPage, DeadLetterTally, Durability, Engine, Entity, Error, Event,
    EventBuilder, EventId, EventState, Failure, FailureKind, GroupInfo, GroupName, GroupState,
    History, HistoryPage, HistoryQuery, IntoEvent, Lag, Log, Lookup, Maintenance, ManualClock,
    OnFull, Order, PageCursor, PageRequest, Pattern, Position, Pruned, PurgeBasis, Purged,
    PurgedLetter, Recorded, Result, Retention, RetryPolicy, Shard, StartFrom, Stream, StreamAge,
    StreamLag, StreamLimit, Streams, SystemClock, Timestamp, TraceContext, TypedEvent,
};
pub use everbus_dialects as dialects;
pub use everbus_dialects::Dialect;
/// The crate whose transactions [`postgres::in_transaction`] runs in.
#[cfg(feature = "postgres")]
pub use everbus_postgres::tokio_postgres;
/// The crate whose transactions [`sqlite::in_transaction`] runs in.
#[cfg(feature = "sqlite")]
pub use rusqlite;
/// The crate whose `JsonSchema` gives events their schemas.
#[cfg(feature = "schema")]
pub use schemars;
// The derive macro; it shares its name with the struct.
pub use everbus_macros::{Event, debug_handler};

/// Items that the code of the macros uses; not for direct use.
#[doc(hidden)]
pub mod __private {
    pub use serde::Serialize;
    pub use serde_json::Value;

    pub use crate::handler::debug::{is_extractor, is_outcome, is_send, value};
    pub use crate::handler::outcome::{emit, emits};
    pub use crate::schema::probe::{KnownSchema, NoSchema, SchemaOf};
}
