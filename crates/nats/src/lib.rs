//! The NATS JetStream engine: it moves events; a store beside it remembers them.
//!
//! | Everbus | JetStream |
//! |---|---|
//! | stream | a stream of the same name, its patterns as subjects; `EVERBUS` where none are declared |
//! | type | the subject; what a subject cannot carry is encoded (`names`) |
//! | event | a message in the dialect of its stream, with attributes in headers (`wire`) |
//! | id | `Nats-Msg-Id`, known to the server for a window (`append`) |
//! | position | stream and sequence |
//! | group | a record in `EVERBUS_GROUPS` (`groups`), and a durable pull consumer in each of its streams |
//! | ephemeral group | a consumer that the server removes when no process has asked it for an hour |
//! | lease | `ack_wait` of the consumer; extended by `+WPI` |
//! | retry after a delay, release | `-NAK` with the delay |
//! | dead letter | a message in `DLQ`, then `+TERM` |
//! | order by key | one process at a time (a pinned client), which keeps the order (`ordered`) |
//! | log | direct reads of the streams |
//! | values by key | a bucket of NATS: the stream `KV_name` (`kv`) |
//!
//! What the server cannot do is in [`Capabilities`](everbus_core::Capabilities): leases have no fence, and
//! deliveries are counted instead of attempts.
//!
//! # Limits
//!
//! - The filters of a consumer only grow. After a subscription was removed, the server still sends its events,
//!   and readers ack them: without a reader they count as `behind`.
//! - The server has no compare-and-set for consumers. If two processes change one consumer within milliseconds
//!   (one its lease, the other its filters), the new filters may be lost. The process that overwrote them puts them
//!   back. If it dies before that, readers notice within seconds and create the consumer again from an earlier
//!   sequence: some events are repeated (`repair`).
//! - The lease of a group is the longest that one of its processes has asked for, also after that process is gone.
//! - Subjects that a stream has and no table declares any more stay, because a newer version may have added them.
//! - A group that is declared after a pattern moved to another stream does not get the older events of that
//!   pattern, which are in the stream where the pattern was.
//! - A message of another program whose headers are malformed (a line without a colon, bytes that are not UTF-8)
//!   ends the connection of every client that gets it, and comes again: remove it from the stream
//!   (`nats stream rmm`). Until then the groups of that stream get no events; nothing is lost.
//! - Processes without a handler for an event give it back, and the server counts each delivery. So a store beside the
//!   engine treats an event as poison (it kills its process) only after 40 deliveries without an outcome.
//! - A batch of more than 1,000 events is stored in parts of 1,000, each as a whole.
//! - A stream that is removed and created again begins at sequence 1: its dead letters replace those of the old
//!   stream with the same sequence and group.

mod api;
mod append;
mod broker;
mod client;
mod config;
mod consumer;
mod declare;
mod errors;
mod groups;
mod held;
mod inspect;
mod kv;
mod log;
mod names;
mod ordered;
mod reader;
mod repair;
mod settle;
mod source;
mod streams;
mod wire;

use std::sync::Arc;

use everbus_core::{Engine, Result, Weakness};

use crate::broker::{Nats, Shared};
use crate::streams::Space;

pub use config::{DEFAULT_WINDOW, Options};

/// Connects to a server and opens the engine. Streams are created when they are declared, or with the first
/// event.
pub async fn open(url: &str, options: Options) -> Result<Engine> {
    let address = config::parse(url)?;
    let link = client::connect(&address, &options).await?;
    let space = Space::new(&address.space);
    streams::declare_groups(&link, &space, &options, options.replicas).await?;
    let weaknesses = match (options.replicas, options.synced) {
        (3.., _) => Vec::new(),
        (replicas, true) => vec![Weakness::new(
            "replicas",
            replicas.to_string(),
            "for copies on several machines set copies: 3 (a cluster of three servers)",
        )],
        (_, false) => vec![Weakness::new(
            "sync_interval",
            "not known",
            "a power loss may lose the last moments; set sync_interval: always on the server and synced: true \
             here, or copies: 3 for streams on a cluster",
        )],
    };
    let nats = Arc::new(Nats {
        shared: Arc::new(Shared::new(link, space, options)),
    });
    let mut engine = Engine::new(nats.clone());
    engine.log = Some(nats.clone());
    engine.kv = Some(nats);
    engine.weaknesses = weaknesses;
    Ok(engine)
}
