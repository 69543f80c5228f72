//! What a scenario needs of an engine, and what the suite says of an engine that lacks it.

use everbus_core::{Deduplication, Engine, OrderScope};

/// Something that an engine may lack.
#[derive(Debug)]
pub struct Need {
    /// Why a scenario that needs it is not offered.
    pub(crate) reason: &'static str,
    /// How the runtime makes up for it, where it does.
    pub(crate) emulated: Option<&'static str>,
    offered: fn(&Offer<'_>) -> bool,
}

/// What a need is judged by.
pub(crate) struct Offer<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) survives_restart: bool,
    pub(crate) virtual_time: bool,
}

impl Need {
    pub(crate) fn is_met_by(&self, offer: &Offer<'_>) -> bool {
        (self.offered)(offer)
    }
}

const fn need(reason: &'static str, offered: fn(&Offer<'_>) -> bool) -> Need {
    Need {
        reason,
        emulated: None,
        offered,
    }
}

/// A clock that can be moved by hand.
pub static CLOCK: Need = need("its clock cannot be moved", |o| o.virtual_time);
/// Something is there after a restart.
pub static RESTART: Need = need("nothing survives a restart", |o| o.survives_restart);

/// The log can be read without a group.
pub static LOG: Need = need("its log cannot be read without a group", |o| {
    o.engine.log.is_some()
});
/// Events are found by id, with how they stand in each group.
pub static LOOKUP: Need = need("it does not find events by id", |o| {
    o.engine.lookup.is_some()
});
/// It knows when every group is done with an event.
pub static SETTLED: Need = need(
    "it does not know when every group is done with an event",
    |o| o.engine.settled.is_some(),
);
/// It hands events to a group once more.
pub static REDELIVER: Need = Need {
    reason: "it does not deliver events once more",
    emulated: Some("the runtime appends an event for that group"),
    offered: |o| o.engine.redeliver.is_some(),
};
/// It counts what waits in a stream.
pub static DEPTH: Need = need("it does not count what waits in a stream", |o| {
    o.engine.depth.is_some()
});
/// Dead letters can be queried.
pub static DEAD_LETTERS: Need = need("its dead letters cannot be queried", |o| {
    o.engine.dead_letters.is_some()
});
/// There is something to look after.
pub static MAINTENANCE: Need = need("it has no upkeep of its own", |o| {
    o.engine.maintenance.is_some()
});
/// It remembers what each group has handled.
pub static INBOX: Need = need("it has no inbox", |o| o.engine.inbox.is_some());
/// It can be a store beside a broker.
pub static STORE: Need = need("it cannot be a store beside a broker", |o| {
    o.engine.store.is_some()
});
/// It answers what happened to an entity.
pub static HISTORY: Need = need("its history cannot be asked", |o| {
    o.engine.history.is_some()
});
/// It keeps payload stages.
pub static PAYLOADS: Need = need("it keeps no payload stages", |o| {
    o.engine.payloads.is_some()
});
/// It keeps an audit trail.
pub static AUDIT: Need = need("it keeps no audit trail", |o| o.engine.audit.is_some());
/// It keeps checkpoints.
pub static CHECKPOINTS: Need = need("it keeps no checkpoints", |o| {
    o.engine.checkpoints.is_some()
});
/// It knows which objects outlived their events.
pub static ORPHANS: Need = need("it keeps no list of objects", |o| {
    o.engine.orphans.is_some()
});

/// A settlement with a lost lease is refused.
pub static FENCING: Need = need("its leases are not fenced", |o| {
    o.engine.broker.capabilities().fencing
});
/// Attempts are exact.
pub static EXACT_ATTEMPTS: Need = need("it counts deliveries, not attempts", |o| {
    o.engine.broker.capabilities().exact_attempts
});
/// It waits before a retry itself.
pub static NATIVE_DELAY: Need = Need {
    reason: "it does not wait before a retry",
    emulated: Some("the runtime holds the event"),
    offered: |o| o.engine.broker.capabilities().native_delay,
};
/// A batch is stored as a whole.
pub static ATOMIC_BATCH: Need = need("a batch may be stored in part", |o| {
    o.engine.broker.capabilities().atomic_batch
});
/// Verdict and follow-ups are one step.
pub static ATOMIC_FOLLOW_UPS: Need = need("follow-up events and verdict are two steps", |o| {
    o.engine.broker.capabilities().atomic_follow_ups
});
/// Dead letter and verdict are one step.
pub static ATOMIC_DEAD_LETTER: Need = need("dead letter and verdict are two steps", |o| {
    o.engine.broker.capabilities().atomic_dead_letter
});
/// A repeated id is recognised, for a while at least.
pub static DEDUPLICATION: Need = need("it does not recognise repeated ids", |o| {
    o.engine.broker.capabilities().deduplication != Deduplication::None
});
/// A repeated id is recognised as long as the event is kept.
pub static DEDUPLICATION_WHILE_RETAINED: Need =
    need("it recognises repeated ids only for a while", |o| {
        o.engine.broker.capabilities().deduplication == Deduplication::WhileRetained
    });
/// A group gets its events in the order of the log.
pub static LOG_ORDER: Need = need("it keeps order for each key only", |o| {
    o.engine.broker.capabilities().order == OrderScope::Log
});
/// Effects run in its transactions.
pub static TRANSACTION: Need = need("it has no transaction for effects", |o| {
    o.engine.broker.capabilities().transaction.is_some()
});
