//! The in-memory engine: the semantics of the embedded engine without a file.
//!
//! For tests, and for events that need not survive the process. Everything is behind one lock: a log, and
//! the state of each group. Nothing polls; waiting futures are woken by appends, settlements, due times and
//! jumps of the clock.
//!
//! ```
//! use everbus_core::Event;
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let engine = everbus_memory::open(everbus_memory::Options::default());
//! let event = Event::builder("order.placed").json(&42).build()?;
//! let appended = engine.broker.append(vec![event]).await?.remove(0)?;
//! assert_eq!(appended.position.to_string(), "1");
//! # Ok::<(), everbus_core::Error>(())
//! # }).unwrap();
//! ```

mod append;
mod audit;
mod broker;
mod checkpoints;
mod config;
mod consumer;
mod dead_letters;
mod declare;
mod groups;
mod history;
mod inbox;
mod inspect;
mod kv;
mod log;
mod maintenance;
mod orphans;
mod outcomes;
mod payloads;
mod records;
mod redeliver;
mod settle;
mod state;
mod store;
mod streams;
mod watch;

use std::sync::Arc;

use everbus_core::Engine;

use crate::broker::{Memory, MemoryBroker};

pub use config::Options;

/// Opens an empty engine. It lives as long as a reference to it. After it is closed, it refuses all calls.
pub fn open(options: Options) -> Engine {
    let memory = Arc::new(Memory::new(options.clock));
    memory.wake_on_jumps();
    Engine {
        kv: Some(Arc::new(MemoryBroker(memory.clone()))),
        log: Some(memory.clone()),
        lookup: Some(memory.clone()),
        settled: Some(memory.clone()),
        redeliver: Some(memory.clone()),
        depth: Some(memory.clone()),
        dead_letters: Some(memory.clone()),
        store: Some(memory.clone()),
        maintenance: Some(memory.clone()),
        inbox: Some(memory.clone()),
        payloads: Some(memory.clone()),
        orphans: Some(memory.clone()),
        checkpoints: Some(memory.clone()),
        audit: Some(memory.clone()),
        history: Some(memory.clone()),
        ..Engine::new(Arc::new(MemoryBroker(memory)))
    }
}
