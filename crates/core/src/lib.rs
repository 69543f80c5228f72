//! The vocabulary of Everbus: events, patterns, policies and the traits that engines implement.
//!
//! This crate does no I/O and knows no engine. Read it in this order:
//!
//! 1. [`Event`]: the data. [`Pattern`]: selects event types. [`Streams`]: which types are in which log.
//! 2. [`Broker`] and [`Consumer`]: how events move (append, fetch, settle). [`BrokerLayer`]: a broker
//!    that wraps another.
//! 3. [`Position`], [`Shard`], [`Cursor`]: the position of an event, and the progress of a reader.
//! 4. Optional abilities of an engine: [`Log`], [`Lookup`], [`Settled`], [`Redeliver`], [`Depth`], [`DeadLetters`],
//!    [`Inbox`], [`Maintenance`], and its records: [`History`], [`Payloads`], [`Audit`], [`Checkpoints`],
//!    [`OutboxSource`], [`Orphans`], [`KeyValue`].
//! 5. [`RetryPolicy`], [`Clock`], [`Progress`], [`Window`]: small pure parts that every engine shares.
//!
//! Every failure is an [`Error`] with a stable [`Code`] and a hint.

pub mod abilities;
pub mod audit;
pub mod broker;
pub mod builder;
pub mod checkpoints;
pub mod clock;
pub mod clock_record;
pub mod dead_letters;
pub mod durability;
pub mod effect;
pub mod engine;
mod envelope;
pub mod error;
pub mod event;
pub mod failure;
pub mod group;
pub mod history;
pub mod id;
pub mod inbox;
pub mod kv;
pub mod lag;
pub mod layer;
pub mod log;
pub mod maintenance;
pub mod orphans;
pub mod outbox;
pub mod pattern;
pub mod payloads;
pub mod position;
pub mod progress;
pub mod retry;
pub mod store;
pub mod stream;
pub mod suggest;
pub mod time;
pub mod typed;
pub mod window;

pub use abilities::{DROPPED, Depth, Lookup, Redeliver, Redelivery, Settled, SettledOutcome};
pub use audit::{
    Audit, AuditBreak, AuditContent, AuditEntry, AuditHash, AuditHead, AuditPage, AuditQuery,
    AuditRecord, AuditVerdict,
};
pub use broker::{
    Appended, BoxFuture, Broker, Capabilities, ConsumeOptions, Consumer, Deduplication, Delivery,
    Lease, OrderScope, Settlement, Verdict,
};
pub use builder::{EventBuilder, IntoEvent, MAX_TYPE_CHARS};
pub use checkpoints::{Checkpoint, Checkpoints, check_checkpoint_name};
pub use clock::{Clock, ManualClock, SystemClock};
pub use clock_record::{ClockDoubt, ClockRecord};
pub use dead_letters::{
    ADDRESSED, DEAD_LETTER_EVENT, DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetterPage,
    DeadLetterTally, DeadLetters, Death, EDIT_OF, LETTER_KEPT, LETTER_PURGED, MAX_FAILURES,
    PURGED_NAMED, PageRequest, PurgeBasis, Purged, PurgedLetter, REPLAY_OF, Replaced, UNMATCHED,
    all_failures, dead_letter_notice, letter_kept_for,
};
pub use durability::{Durability, Weakness};
pub use effect::{Effect, EffectResult};
pub use engine::{Background, Engine};
pub use envelope::{EnvelopeValue, envelope};
pub use error::{Class, Code, Error, Result};
pub use event::{
    Attributes, Entity, Event, IDEMPOTENCY_KEY, Inherited, Overflow, OverflowPart, TraceContext,
};
pub use failure::{Ended, Failure, FailureKind, Ran, given_up};
pub use group::{
    ARCHIVE, GroupInfo, GroupName, GroupSpec, StartFrom, SubscriptionInfo, SubscriptionSpec,
    UNSUBSCRIBED, no_group, other_lifetime,
};
pub use history::{History, HistoryPage, HistoryQuery, Order, PageCursor, check_range};
pub use id::EventId;
pub use inbox::Inbox;
pub use kv::{
    ABSENT, KeyValue, KvChange, KvEntry, KvPut, KvSeen, KvWatch, check_kv_names, revision_conflict,
};
pub use lag::{Lag, StreamLag};
pub use layer::BrokerLayer;
pub use log::{EventState, GroupState, Log, Recorded};
pub use maintenance::{
    CheckReport, Finding, Held, Holdings, Maintenance, Pruned, RETENTION_DUTY, Retention,
    StreamAge, TypeHoldings,
};
pub use orphans::{LogId, Orphan, Orphans};
pub use outbox::{
    Claimed, FailedRow, Forgotten, LONGEST_RELAY_LEASE, OUTBOX_ATTEMPTS, OUTBOX_GROUP, OutboxKeep,
    OutboxRow, OutboxSource, OutboxStatus, RelayLease, RowOutcome, outbox_delay,
};
pub use pattern::Pattern;
pub use payloads::{EventKey, Payloads, Stage, StageInfo, StoredStage};
pub use position::{Cursor, Position, Shard};
pub use progress::Progress;
pub use retry::RetryPolicy;
pub use store::{Burial, EARLY_STAGES, EarlierDeath, KeptFailures, SentBack, Store};
pub use stream::{OnFull, Stream, StreamLimit, Streams, TypeLimits};
pub use time::Timestamp;
pub use typed::TypedEvent;
pub use window::Window;
