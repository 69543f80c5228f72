//! Joins the effects of an event's handlers to one effect. The engine runs it in the transaction of the ack.

use std::sync::Arc;

use everbus_core::{Effect, GroupName, Inherited, Recorded};
use parking_lot::Mutex;

use super::follow_ups;
use crate::handler::Registered;
use crate::runtime::bus::Shared;

/// The effects that one handler returned.
pub(super) struct OfHandler {
    pub(super) handler: Arc<Registered>,
    /// What events of the effects inherit. It contains the trace of the handler's span, so it is read while
    /// that span is current.
    pub(super) inherited: Inherited,
    pub(super) effects: Vec<Effect>,
}

/// What the last run of the effects did. The settler reads it after the engine has answered.
#[derive(Clone, Default)]
pub(crate) struct EffectsRun(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    /// The handler whose effects ran last. If the effects failed, those of this handler failed.
    handler: Option<Arc<Registered>>,
    /// The types of the events that the effects published.
    types: Vec<Arc<str>>,
}

impl EffectsRun {
    pub(super) fn handler(&self) -> Option<Arc<Registered>> {
        self.0.lock().handler.clone()
    }

    pub(crate) fn types(&self) -> Vec<Arc<str>> {
        self.0.lock().types.clone()
    }
}

/// Joins the effects of the handlers, in the order of the handlers. The events that they publish get ids
/// and inherit from their cause. `None` if there are no effects.
pub(super) fn join(
    effects: Vec<OfHandler>,
    shared: &Arc<Shared>,
    record: &Arc<Recorded>,
    group: &GroupName,
) -> Option<(Effect, EffectsRun)> {
    let engine = effects.first()?.effects.first()?.engine();
    let last = EffectsRun::default();
    let seen = last.0.clone();
    let (shared, record, group) = (shared.clone(), record.clone(), group.clone());
    let joined = Effect::new(engine, move |transaction| {
        let mut events = Vec::new();
        for of in &effects {
            // Set before the effects run, because one of them may panic.
            seen.lock().handler = Some(of.handler.clone());
            let mut published = Vec::new();
            for effect in &of.effects {
                published.extend(effect.run(transaction)?);
            }
            let cause = (&record, &group, of.handler.name.as_str());
            let published = follow_ups::of_effects(&shared, cause, &of.inherited, published)?;
            events.extend(published);
        }
        seen.lock().types = events.iter().map(|e| e.type_arc().clone()).collect();
        Ok(events)
    });
    Some((joined, last))
}
