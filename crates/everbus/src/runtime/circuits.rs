//! The circuit breakers of a bus, and the alerts when one opens or closes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use everbus_core::{Clock, Code, Error, Event, GroupName, Result};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::Notify;

use crate::breaker::{Breaker, BreakerInfo, BreakerPolicy, Change, Criticality};
use crate::guard;
use crate::handler::Registered;
use crate::runtime::alert;
use crate::runtime::bus::Shared;

/// Published when a breaker opens.
pub(crate) const OPENED: &str = "system.circuit_opened";
/// Published when a breaker closes again.
pub(crate) const CLOSED: &str = "system.circuit_closed";

/// The owner of a breaker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    Group(GroupName),
    Dependency(String),
}

impl Owner {
    fn name(&self) -> String {
        match self {
            Self::Group(group) => group.to_string(),
            Self::Dependency(name) => name.clone(),
        }
    }
}

/// The breakers by owner, and the groups to wake when a breaker changes.
#[derive(Default)]
pub(crate) struct Circuits {
    breakers: Mutex<BTreeMap<Owner, Circuit>>,
    listeners: Mutex<Vec<Weak<Notify>>>,
}

/// A breaker, with the settings of the handlers that share it.
struct Circuit {
    breaker: Breaker,
    policy: BreakerPolicy,
    /// The highest criticality of its handlers.
    criticality: Criticality,
}

impl Circuits {
    /// The breaker of a group or dependency; the first call makes it. Fails if the breaker exists with another
    /// policy. The breaker has the highest criticality of all calls.
    pub(crate) fn get(
        &self,
        owner: &Owner,
        policy: BreakerPolicy,
        criticality: Criticality,
        clock: &Arc<dyn Clock>,
    ) -> Result<Breaker> {
        let mut breakers = self.breakers.lock();
        match breakers.get_mut(owner) {
            Some(circuit) if circuit.policy == policy => {
                if rank(criticality) > rank(circuit.criticality) {
                    circuit.criticality = criticality;
                }
                Ok(circuit.breaker.clone())
            }
            Some(_) => Err(Error::new(
                Code::GroupConflict,
                format!(
                    "the circuit breaker of {:?} was asked for with two different policies",
                    owner.name()
                ),
            )
            .hint("handlers that share a group or a dependency share its breaker: say it once")),
            None => {
                let breaker = Breaker::new(&owner.name(), policy, clock.clone());
                let circuit = Circuit {
                    breaker: breaker.clone(),
                    policy,
                    criticality,
                };
                breakers.insert(owner.clone(), circuit);
                Ok(breaker)
            }
        }
    }

    /// The owners of all breakers.
    pub(crate) fn owners(&self) -> BTreeSet<Owner> {
        self.breakers.lock().keys().cloned().collect()
    }

    /// Removes all breakers except those of these owners. Used to undo a subscription that failed.
    pub(crate) fn keep_only(&self, owners: &BTreeSet<Owner>) {
        self.breakers
            .lock()
            .retain(|owner, _| owners.contains(owner));
    }

    /// Removes the breaker of a removed group.
    pub(crate) fn forget(&self, group: &GroupName) {
        self.breakers.lock().remove(&Owner::Group(group.clone()));
    }

    /// Adds a listener that is notified whenever a breaker changes.
    pub(crate) fn tell(&self, listener: &Arc<Notify>) {
        let mut listeners = self.listeners.lock();
        listeners.retain(|known| known.strong_count() > 0);
        listeners.push(Arc::downgrade(listener));
    }

    pub(crate) fn infos(&self) -> Vec<BreakerInfo> {
        let breakers = self.breakers.lock();
        breakers
            .values()
            .map(|circuit| circuit.breaker.info())
            .collect()
    }

    /// The breakers that publish alerts: those with a handler that is not best-effort.
    pub(crate) fn alerting(&self) -> Vec<BreakerInfo> {
        let breakers = self.breakers.lock();
        let alerting = breakers.values().filter(|c| alerts(c.criticality));
        alerting.map(|circuit| circuit.breaker.info()).collect()
    }

    fn criticality(&self, breaker: &Breaker) -> Option<Criticality> {
        let breakers = self.breakers.lock();
        let mut circuits = breakers.values();
        let found = circuits.find(|circuit| circuit.breaker.is(breaker))?;
        Some(found.criticality)
    }

    fn wake(&self) {
        let listeners = self.listeners.lock();
        for listener in listeners.iter().filter_map(Weak::upgrade) {
            listener.notify_one();
        }
    }
}

/// The order of criticalities.
fn rank(criticality: Criticality) -> u8 {
    match criticality {
        Criticality::Critical => 2,
        Criticality::Standard => 1,
        Criticality::BestEffort => 0,
    }
}

/// Whether a breaker of this criticality publishes an event when it opens or closes. Best-effort handlers
/// only skip events meanwhile, which is not worth an alert.
fn alerts(criticality: Criticality) -> bool {
    criticality != Criticality::BestEffort
}

impl Shared {
    /// Handles a change of a breaker: wakes the groups, sets the gauge, writes a log line, and publishes an
    /// alert. No alert for a best-effort breaker, or for a breaker that stays open after a failed probe.
    pub(crate) fn circuit_changed(
        self: &Arc<Self>,
        group: &GroupName,
        handler: &Registered,
        change: Change,
    ) {
        self.circuits.wake();
        let dependency = handler.traits.breaker.as_ref().map_or("", |b| b.name());
        if let Some(breaker) = &handler.traits.breaker {
            self.stats.breaker(dependency).set(breaker.state());
        }
        // The breaker affects all handlers that share it, so the highest criticality of these decides.
        let shared_by = handler.traits.breaker.as_ref();
        let criticality = shared_by
            .and_then(|breaker| self.circuits.criticality(breaker))
            .unwrap_or(handler.traits.criticality);
        let severity = match criticality {
            Criticality::Critical => "critical",
            Criticality::Standard => "warning",
            Criticality::BestEffort => "info",
        };
        let built = match change {
            Change::Opened { again: true, .. } => {
                guard::log(|| {
                    tracing::warn!(target: "everbus::breaker", resilience_event = "circuit_breaker_probe_failed", dependency, %group, "the probe failed; the circuit breaker stays open");
                });
                return;
            }
            Change::Opened {
                until, failures, ..
            } => {
                guard::log(|| match criticality {
                    Criticality::Critical => {
                        tracing::error!(target: "everbus::breaker", resilience_event = "circuit_breaker_opened", dependency, %group, failures, %until, severity, "the circuit breaker opened");
                    }
                    _ => {
                        tracing::warn!(target: "everbus::breaker", resilience_event = "circuit_breaker_opened", dependency, %group, failures, %until, severity, "the circuit breaker opened");
                    }
                });
                Event::builder(OPENED).json(&json!({
                    "dependency": dependency,
                    "group": group,
                    "criticality": criticality.as_str(),
                    "severity": severity,
                    "failures": failures,
                    "until": until.to_string(),
                }))
            }
            Change::Closed => {
                guard::log(|| {
                    tracing::info!(target: "everbus::breaker", resilience_event = "circuit_breaker_closed", dependency, %group, "the circuit breaker closed");
                });
                Event::builder(CLOSED).json(&json!({
                    "dependency": dependency,
                    "group": group,
                    "criticality": criticality.as_str(),
                    "severity": "info",
                }))
            }
        };
        if !alerts(criticality) {
            return;
        }
        alert::publish(self, built);
    }
}
