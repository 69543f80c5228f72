//! The checker that no acknowledged event is lost, and campaigns of kills and power cuts that try to lose one.
//!
//! ```text
//!  campaign ──spawns, kills, stops──▶ victim ──publishes, handles──▶ file
//!     ▲                                 │                             │
//!     │        A id seq, H group id …   │                             │ after the kill
//!  ledger ◀──────────── pipe ───────────┘        checker ◀── observe ─┘
//! ```
//!
//! The victim is a separate process. It prints on its standard output which publishes were acknowledged
//! and which handlers finished. The ledger of these reports is in the campaign's process, which is never
//! killed. The checker compares the ledger with the file, and knows no engine.
//!
//! Beside the process that publishes and handles there are three more kinds of victims: one that relays
//! from an outbox ([`relay`]), one that puts large payloads into objects ([`objects`]), and one that removes
//! old events ([`retain`]).

pub mod campaign;
pub mod checker;
pub mod content;
pub mod disk;
pub mod hooks;
pub mod hostile;
pub mod leases;
pub mod ledger;
pub mod memory;
pub mod objects;
pub mod observe;
pub mod outboxes;
pub mod plant;
pub mod power;
pub mod process;
pub mod relay;
pub mod retain;
pub mod rounds;
pub mod tally;
pub mod victim;
pub mod zombie;

use std::io::Write as _;

/// A group that every victim subscribes to.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Its name as stored; empty for the unnamed group.
    pub name: &'static str,
    /// Which events it wants.
    pub pattern: &'static str,
    /// Its handlers, in the order they run for each event.
    pub handlers: &'static [&'static str],
    /// Whether events with the same key are handled one after another.
    pub ordered: bool,
}

/// The groups of a victim. All of them are declared before it publishes anything.
pub const GROUPS: [Group; 3] = [
    Group {
        name: "",
        pattern: "chaos.>",
        handlers: &["first", "second"],
        ordered: false,
    },
    Group {
        name: "work",
        pattern: "chaos.work.*",
        handlers: &["worker"],
        ordered: false,
    },
    Group {
        name: "ledger",
        pattern: "chaos.>",
        handlers: &["bookkeeper"],
        ordered: true,
    },
];

/// How many deliveries of a group a victim holds at most, and so how many may be repeated for each group
/// after a kill.
pub const PREFETCH: usize = 64;

/// Failpoints where a process may be killed; see the engine's `failpoint.rs`.
pub const FAILPOINTS: [&str; 6] = [
    "before-commit",
    "after-commit",
    "after-answer",
    "after-hand-over",
    "after-settle",
    "after-dead-letter",
];

/// Why a campaign could not go on. Problems that it found are in the tally instead.
#[derive(Debug)]
pub struct Broken(pub String);

impl Broken {
    pub(crate) fn new(what: impl std::fmt::Display) -> Self {
        Self(what.to_string())
    }

    pub(crate) fn at<E: std::fmt::Display>(doing: &str) -> impl FnOnce(E) -> Self {
        move |error| Self(format!("{doing}: {error}"))
    }
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Prints progress for a person; standard output is kept for the result.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
