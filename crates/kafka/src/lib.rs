//! The Apache Kafka engine: it moves events; a store beside it remembers them.
//!
//! | Everbus | Kafka |
//! |---|---|
//! | stream | a topic of its name; without declared streams a topic for each domain (`topics`) |
//! | shard | a partition |
//! | event | a record in the dialect of its topic, with attributes in headers (`wire`); `acks=all`, idempotent |
//! | ordering key | the key of the record, which decides its partition |
//! | position | topic, partition and offset |
//! | group | facts in the compacted topic `everbus.groups` (`groups`), and a consumer group of its name |
//! | consumer | all consumers of a group in one process are one member of it (`member`) |
//! | progress | the committed offset, and what is done above it in the metadata of the commit (`offset_metadata`) |
//! | attempt | in that metadata, committed before the event is handed out |
//! | lease | held by this process, as long as its partition is |
//! | retry after a delay, release | the event waits in this process; its due time is in the metadata |
//! | dead letter | a record in `dlq.TOPIC`, then the commit |
//! | order by key | within a partition, kept by the process that has it (`board`) |
//! | log | reads without a group |
//!
//! What Kafka cannot do is in [`Capabilities`](everbus_core::Capabilities): it does not recognise a repeated id,
//! and a batch may be stored in part. The inbox of a store beside it absorbs repetitions.
//!
//! # Limits
//!
//! - A partition is worked on by one process at a time. All processes of a group need handlers for the same
//!   types: an event without a handler in the process that has its partition waits there.
//! - When partitions move between processes, events in flight are delivered again.
//! - In a partition about 400 events can be unfinished at once: the metadata has 4,096 characters. If so many events
//!   wait for a retry or a handler, their partition stops until one of them ends. Other partitions go on.
//! - Records that the client cannot read (damaged, or compressed in an unknown way) stop their group in the process
//!   that has them, with an error, so that none of them is skipped.
//! - Texts of failures are not in the metadata. Without a store beside the engine, a dead letter lacks the texts of
//!   attempts that another process made.
//! - The records of a removed group stay in the topics of dead letters.
//! - The server forgets the offsets of a group that has no member for `offsets.retention.minutes` (seven days).
//!   The group then begins where it was declared, and handles events again.
//! - Order by key holds within a topic: with a topic for each domain, not between two domains.
//! - Transactions are not used: a follow-up is published before its event is acked.

mod append;
mod board;
mod broker;
mod client;
mod config;
mod consumer;
mod declare;
mod errors;
mod groups;
mod inspect;
mod log;
mod member;
mod names;
mod offset_metadata;
mod settle;
mod topics;
mod wire;

use std::sync::Arc;

use everbus_core::{Engine, Result};

use crate::broker::{Kafka, Shared};
use crate::groups::Registry;
use crate::names::Space;

pub use config::{Options, Topics};

/// Connects to a cluster and opens the engine. Topics are created when they are declared, or with the first
/// event.
pub async fn open(url: &str, options: Options) -> Result<Engine> {
    let address = config::parse(url)?;
    let link = Arc::new(client::connect(&address, &options).await?);
    let space = Space::new(&address.space);
    let topic = space.registry();
    topics::declare_registry(&link, &topic, &options).await?;
    let registry = Registry::start(&link, topic)?;
    registry.sync(&link).await?;
    let shared = Arc::new(Shared::new(link, space, options, registry));
    let weaknesses = shared.weaknesses().await;
    let kafka = Arc::new(Kafka { shared });
    let mut engine = Engine::new(kafka.clone());
    engine.log = Some(kafka);
    engine.weaknesses = weaknesses;
    Ok(engine)
}
