//! What a scenario needs of an engine, and how the suite reports an engine that lacks it.

use everbus_core::{Deduplication, Engine, OrderScope};

/// Something that an engine may lack.
#[derive(Debug)]
pub struct Need {
    /// Why a scenario that needs it is not offered.
    pub(crate) reason: &'static str,
    /// How the runtime makes up for it, with a store beside the broker. The scenario runs there, too.
    emulated: Option<&'static str>,
    offered: fn(&Offer<'_>) -> bool,
}

/// The facts that decide whether a need is met: never the name of the engine.
pub(crate) struct Offer<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) survives_restart: bool,
    pub(crate) virtual_time: bool,
}

/// Whether a need is met.
pub(crate) enum Judged {
    /// By the engine.
    Offered,
    /// By the runtime, in this way.
    Emulated(&'static str),
    /// Not at all.
    Missing,
}

impl Need {
    pub(crate) fn judge(&self, offer: &Offer<'_>) -> Judged {
        match self.emulated {
            _ if (self.offered)(offer) => Judged::Offered,
            Some(how) if is_composed(offer) => Judged::Emulated(how),
            _ => Judged::Missing,
        }
    }
}

/// Whether the runtime has put a store beside the broker: then it copies events in the background.
fn is_composed(offer: &Offer<'_>) -> bool {
    offer.engine.background.is_some()
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
/// Events survive a restart.
pub static RESTART: Need = need("nothing survives a restart", |o| o.survives_restart);

/// The log can be read without a group.
pub static LOG: Need = need("its log cannot be read without a group", |o| {
    o.engine.log.is_some()
});
/// Events are found by id, with their state in each group.
pub static LOOKUP: Need = need("it does not find events by id", |o| {
    o.engine.lookup.is_some()
});
/// It knows when every group is done with an event.
pub static SETTLED: Need = need(
    "it does not know when every group is done with an event",
    |o| o.engine.settled.is_some(),
);
/// It delivers an event itself to a group again. A replay that sends copies is no redelivery: copies have
/// their own ids, and the state of the original does not count.
pub static REDELIVER: Need = need("it does not deliver an event itself once more", |o| {
    o.engine.redeliver.is_some()
});
/// A dead letter goes back to its group.
pub static SENT_BACK: Need = Need {
    reason: "it does not deliver an event itself once more",
    emulated: Some("the runtime sends back an event that is addressed to the group"),
    offered: |o| o.engine.redeliver.is_some(),
};
/// Readers see an event as soon as its append is answered, at the position that the answer names.
pub static OWN_LOG: Need = need(
    "its readers see copies, which trail and have positions of their own",
    |o| !is_composed(o),
);
/// It knows the state of an event in every group.
pub static STATES: Need = need("it knows of groups only what the runtime told it", |o| {
    !is_composed(o)
});
/// Retention waits for what groups owe.
pub static OWED_IS_KEPT: Need = need(
    "its retention removes copies, and the broker keeps what groups owe",
    |o| !is_composed(o),
);
/// A payload stage is refused if its event is not there.
pub static STAGES_LAST: Need = need("a payload stage may come before its event", |o| {
    !is_composed(o)
});
/// An event that no process has a handler for becomes a dead letter.
pub static NO_HANDLER: Need = need("an event without a handler waits for one", |o| {
    !is_composed(o)
});
/// It counts what waits in a stream.
pub static DEPTH: Need = need("it does not count what waits in a stream", |o| {
    o.engine.depth.is_some()
});
/// Dead letters can be queried.
pub static DEAD_LETTERS: Need = need("its dead letters cannot be queried", |o| {
    o.engine.dead_letters.is_some()
});
/// It has maintenance operations.
pub static MAINTENANCE: Need = need("it has no upkeep of its own", |o| {
    o.engine.maintenance.is_some()
});
/// It remembers what each group has handled.
pub static INBOX: Need = need("it has no inbox", |o| o.engine.inbox.is_some());
/// It can be a store beside a broker.
pub static STORE: Need = need("it cannot be a store beside a broker", |o| {
    o.engine.store.is_some()
});
/// It can query the events of an entity.
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
/// It keeps values by key.
pub static KV: Need = need("it keeps no values by key", |o| o.engine.kv.is_some());
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
pub static NATIVE_DELAY: Need = need("it does not wait before a retry", |o| {
    o.engine.broker.capabilities().native_delay
});
/// A retry comes after its delay.
pub static DELAY: Need = Need {
    reason: "it does not wait before a retry",
    emulated: Some("the runtime holds an event that waits"),
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
/// Everything is in one log, in one order.
pub static ONE_LOG: Need = need("it has several logs, and the model has one", |o| {
    o.engine.broker.capabilities().order == OrderScope::Log && !is_composed(o)
});
/// Effects run in its transactions.
pub static TRANSACTION: Need = need("it has no transaction for effects", |o| {
    o.engine.broker.capabilities().transaction.is_some()
});
