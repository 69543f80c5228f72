//! The Redis Streams engine: it moves events, also beside services that use FastStream.
//!
//! | Everbus | Redis |
//! |---|---|
//! | type | a stream `{domain}:{event-type}`; a type without this form is encoded (`keys`) |
//! | event | an entry in the dialect of its stream (`wire`) |
//! | id | a key that expires with the window, with the position of the event and the digest of its body (`append`) |
//! | position | stream and packed id; ids grow over all streams of the engine |
//! | declared stream | limits and dialect of the streams that its patterns cover (`registry`) |
//! | group | a record in `everbus:groups`, and a consumer group of its name on each stream that it wants |
//! | delivery | the pending list of the group is the truth; state, leases and due times are beside it (`consumer`) |
//! | lease | its end in a sorted set, its token in a hash; a script compares both (`settle`) |
//! | retry after a delay, release | the due time in a sorted set |
//! | order by key | the events of a key in a sorted set; only the first may be handed out |
//! | dead letter | an entry of `dlq:{stream}`, written by the script that acks the event; a retried one is kept in a hash (`dead_letters`) |
//! | wake-up | a blocking read on a connection of its own (`tasks`) |
//! | inbox, values by key | a sorted set for each group; hashes that expire |
//!
//! Each operation is one Lua script (`scripts/`), so that it happens completely or not at all.
//!
//! # Limits
//!
//! - One primary. Replicas lag behind it: after a failover, events that the replica had not received are gone, although
//!   their publishes were acknowledged. `min-replicas-to-write` limits this loss and does not prevent it.
//! - Repeated ids are recognised for a window (ten minutes by default).
//! - A stream that only other programs write is found if a group names its type, or if the stream is declared. A
//!   wildcard finds streams that Everbus has seen, or all streams of the database ([`Options::adopt_streams`]).
//! - An event that no process has a handler for eventually becomes a dead letter (`orphans`), even if it waits for a
//!   retry.
//! - Another program that trims a stream (`MAXLEN`) or deletes entries may take events that a group has yet to
//!   read. They are reported as lost, in the log and by `inspect`, unless another program reads for the group too.
//! - Entries of other programs have no ordering key.
//! - An ephemeral group ends when its engine has sent no heartbeat for fifteen seconds.
//! - Inside an ordered group, order by key holds over all its streams, by the ids of the entries.

mod append;
mod broker;
mod client;
mod config;
mod consumer;
mod dead_letters;
mod declare;
mod durability;
mod errors;
mod groups;
mod held;
mod inbox;
mod inspect;
mod keys;
mod kv;
mod log;
mod orphans;
mod redeliver;
mod registry;
mod scripts;
mod settle;
mod streams;
mod tasks;
mod wire;

use std::sync::Arc;

use everbus_core::{Engine, Result};

use crate::broker::{Redis, Shared};
use crate::keys::Space;

pub use config::{DEFAULT_KEPT, DEFAULT_STALE, DEFAULT_WINDOW, Options};

/// Connects to a server and opens the engine. Refuses a server whose settings make it delete events.
pub async fn open(url: &str, options: Options) -> Result<Engine> {
    let address = config::parse(url)?;
    let space = Space::new(&address.space);
    let link = client::link(&address, &options, &space.prefix)?;
    let (grade, max_bulk) = durability::check(&link, &options).await?;
    let weaknesses = grade.weaknesses.clone();
    let redis = Arc::new(Redis {
        shared: Arc::new(Shared::new(link, space, options, grade, max_bulk)),
    });
    let mut engine = Engine::new(redis.clone());
    engine.log = Some(redis.clone());
    engine.depth = Some(redis.clone());
    engine.dead_letters = Some(redis.clone());
    engine.redeliver = Some(redis.clone());
    engine.inbox = Some(redis.clone());
    engine.kv = Some(redis);
    engine.weaknesses = weaknesses;
    Ok(engine)
}
