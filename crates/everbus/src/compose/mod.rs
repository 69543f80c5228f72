//! A store beside a broker: this module uses the store to do what the broker cannot do.
//!
//! [`compose`] combines the two into an [`Engine`]. Dispatch, replay, dead letters and the command line use
//! it like any other engine.
//!
//! | the broker lacks | what happens instead | where |
//! |---|---|---|
//! | a delay | the event waits in this process under a lease that is extended | `waiting` |
//! | an inbox in the ack | the inbox of the store is read before the handler and written before the ack | `settle` |
//! | failure texts | kept in the store, joined at the next attempt | `settle`, `consumer` |
//! | dead letter with the ack | the dead letter is put into the store first, then the event is acked | `settle` |
//! | follow-ups with the ack | appended before the ack; a repetition derives the same ids | `settle` |
//! | redelivery | an event addressed to the group | `dead_letters`, [`crate::replay`] |
//! | payload stages | kept in the store, where a stage may come before its event | `payloads` |
//! | a key-value store | kept in the store | |
//! | history, find by id | the *archive* group copies every event into the store | `archive` |
//!
//! What cannot be done this way (effects in the transaction of an ack, waiting until every group has
//! settled) is refused, with a hint.

mod archive;
mod broker;
mod consumer;
mod dead_letters;
mod payloads;
mod settle;
mod waiting;

use std::sync::Arc;

use everbus_core::{Clock, Code, DeadLetters, Engine, Error, GroupInfo, Lag, Payloads, Result};

use broker::Beside;
use dead_letters::LettersBeside;
pub use dead_letters::RETRY_OF;
pub use everbus_core::ARCHIVE;
use payloads::PayloadsBeside;

/// Puts a store beside a broker. The store is any engine with a history: SQLite, PostgreSQL.
///
/// Declares the group [`ARCHIVE`]; a started bus copies every event published from now on into the store
/// through it. Due times are computed with `clock`.
pub async fn compose(broker: Engine, store: Engine, clock: Arc<dyn Clock>) -> Result<Engine> {
    let written = store.store().map_err(|e| no_store(&store, &e))?;
    let letters = store
        .dead_letters
        .clone()
        .ok_or_else(|| no_store(&store, &Error::new(Code::Unsupported, "no dead letters")))?;
    archive::declare(&*broker.broker).await?;
    let weaknesses = [broker.weaknesses, store.weaknesses.clone()].concat();
    let beside = Arc::new(Beside::new(
        broker.broker.clone(),
        store.broker.clone(),
        written.clone(),
        letters.clone(),
        clock.clone(),
    ));
    let payloads = store.payloads.clone().map(|payloads| {
        let store = written.clone();
        Arc::new(PayloadsBeside { payloads, store }) as Arc<dyn Payloads>
    });
    let letters: Arc<dyn DeadLetters> =
        Arc::new(LettersBeside::new(letters, written, broker.broker, clock));
    Ok(Engine {
        broker: beside.clone(),
        dead_letters: Some(letters),
        payloads,
        settled: broker.settled,
        // Not offered: readers have positions of the store, and the broker does not know these.
        redeliver: None,
        depth: broker.depth,
        kv: broker.kv.or(store.kv),
        background: Some(beside),
        weaknesses,
        ..store
    })
}

/// The lag of the archive: how many events are still to be copied into the store; `None` without a store.
pub async fn archive_lag(engine: &Engine) -> Result<Option<Lag>> {
    if engine.background.is_none() {
        return Ok(None);
    }
    let groups = engine.broker.inspect().await?;
    let archive = groups.iter().find(|group| group.name.as_str() == ARCHIVE);
    Ok(archive.map(GroupInfo::lag))
}

fn no_store(store: &Engine, error: &Error) -> Error {
    let engine = store.broker.capabilities().engine;
    Error::new(
        Code::Unsupported,
        format!("the {engine} engine cannot be a store beside a broker"),
    )
    .hint("name an engine that remembers as the store, such as sqlite:history.db")
    .caused_by(error.clone())
}
