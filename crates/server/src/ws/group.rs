//! A durable group over the WebSocket: events under leases, settled by the acks of the client.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::outbox::Outbox;
use super::protocol::{self, Subscribe};
use crate::api::pull::{FetchRequest, SettleItem, extend_for, fetch_for, settle_for};
use crate::auth::Caller;
use crate::problem::Problem;
use crate::state::AppState;

/// How many unsettled events a client may hold.
const WINDOW: usize = 64;
/// How long one fetch waits for events.
const WAIT_MS: u64 = 20_000;
/// The pause before the next fetch after an error of the engine.
const AFTER_ERROR: Duration = Duration::from_secs(1);
/// The length of a lease, and of each extension while the connection is open. The configuration file may set another
/// length for the first lease of an event.
const LEASE: Duration = Duration::from_secs(30);
const EXTEND_EVERY: Duration = Duration::from_secs(10);
/// The lease of an event that was not settled after this time is not extended any more: another client gets the event.
const LONGEST: Duration = Duration::from_secs(15 * 60);

/// The leases that one client holds in a group.
pub(super) struct Held {
    group: String,
    leases: Mutex<HashMap<String, Holding>>,
    /// Notified when leases were settled: there is room for more events.
    settled: Notify,
}

/// One lease: when the client got it, and when it expires.
#[derive(Clone, Copy)]
struct Holding {
    since: Instant,
    until: Instant,
}

impl Held {
    pub(super) fn new(group: &str) -> Arc<Self> {
        Arc::new(Self {
            group: group.to_owned(),
            leases: Mutex::default(),
            settled: Notify::new(),
        })
    }

    /// Waits until the client may hold more events. Returns how many.
    async fn room(&self) -> usize {
        loop {
            let room = {
                let mut leases = self.leases.lock();
                leases.retain(|_, holding| holding.until > Instant::now());
                WINDOW.saturating_sub(leases.len())
            };
            if room > 0 {
                return room;
            }
            // The timeout is needed because leases also expire.
            let _ = tokio::time::timeout(LEASE, self.settled.notified()).await;
        }
    }

    /// Extends the leases until the future is dropped.
    async fn keep(&self, state: &AppState, caller: &Caller) -> Infallible {
        loop {
            tokio::time::sleep(EXTEND_EVERY).await;
            let now = Instant::now();
            let leases: Vec<String> = {
                let held = self.leases.lock();
                let kept = held.iter().filter(|(_, h)| now - h.since < LONGEST);
                kept.map(|(lease, _)| lease.clone()).collect()
            };
            if leases.is_empty() {
                continue;
            }
            // After an error the next round tries again; the leases last longer than one round.
            let Ok(answers) = extend_for(state, caller, &self.group, &leases, LEASE).await else {
                continue;
            };
            let mut held = self.leases.lock();
            for (lease, answer) in leases.iter().zip(answers) {
                match (answer, held.get_mut(lease)) {
                    (Ok(()), Some(holding)) => holding.until = now + LEASE,
                    (Err(_), Some(_)) => {
                        held.remove(lease);
                    }
                    // The client settled the event meanwhile.
                    (_, None) => {}
                }
            }
        }
    }

    /// Settles events with one verdict. Returns for how many of them this succeeded.
    pub(super) async fn settle(
        &self,
        state: &AppState,
        caller: &Caller,
        leases: Vec<String>,
        verdict: &str,
        error: Option<&str>,
    ) -> Result<usize, Problem> {
        let items = leases.iter().map(|lease| SettleItem {
            lease: lease.clone(),
            verdict: verdict.to_owned(),
            error: error.map(str::to_owned),
            after_ms: None,
        });
        let answers = settle_for(state, caller, &self.group, items.collect()).await?;
        {
            let mut held = self.leases.lock();
            for lease in &leases {
                held.remove(lease);
            }
        }
        self.settled.notify_one();
        Ok(answers.iter().filter(|answer| answer.is_ok()).count())
    }

    /// Releases all leases of a client that has left.
    pub(super) async fn release(&self, state: &AppState, caller: &Caller) {
        let leases: Vec<String> = self.leases.lock().keys().cloned().collect();
        if !leases.is_empty() {
            // Leases that cannot be released expire by themselves.
            let _ = self.settle(state, caller, leases, "release", None).await;
        }
    }
}

/// Sends the events of a group until the connection ends, and extends their leases meanwhile.
pub(super) async fn send(
    state: AppState,
    caller: Caller,
    wanted: Subscribe,
    held: Arc<Held>,
    outbox: Arc<Outbox>,
) -> Arc<str> {
    let keeper = held.clone();
    let (keep_state, keep_caller) = (state.clone(), caller.clone());
    tokio::select! {
        id = send_events(state, caller, wanted, held, outbox) => id,
        never = keeper.keep(&keep_state, &keep_caller) => match never {},
    }
}

async fn send_events(
    state: AppState,
    caller: Caller,
    wanted: Subscribe,
    held: Arc<Held>,
    outbox: Arc<Outbox>,
) -> Arc<str> {
    let id: Arc<str> = wanted.id.as_str().into();
    let mut request = FetchRequest {
        patterns: wanted.patterns,
        start_from: wanted.from,
        wait_ms: WAIT_MS,
        // Extensions count on this lease, not on a shorter one that the group may have.
        lease_ms: Some(u64::try_from(LEASE.as_millis()).unwrap_or(u64::MAX)),
        ..FetchRequest::default()
    };
    let mut first = true;
    loop {
        request.max = Some(held.room().await);
        match fetch_for(&state, &caller, &held.group, &request).await {
            Ok(items) => {
                // The first fetch has declared the patterns.
                request.patterns.clear();
                first = false;
                // All leases are noted before the first send: the sends may wait for room, and the leases must be
                // extended meanwhile.
                let now = Instant::now();
                let holding = Holding {
                    since: now,
                    until: now + LEASE,
                };
                for item in &items {
                    held.leases.lock().insert(item.lease.clone(), holding);
                }
                for item in items {
                    let message = json!({
                        "type": "data",
                        "subscription": &*id,
                        "events": [&*item.event],
                        "leases": [item.lease],
                        "attempt": item.attempt,
                    });
                    outbox.text_in_turn(message.to_string()).await;
                }
            }
            // An error of the first fetch ends the subscription. Later errors may be temporary.
            Err(problem) if first => {
                outbox.text(protocol::refused_by(&id, &problem));
                return id;
            }
            Err(_) => tokio::time::sleep(AFTER_ERROR).await,
        }
    }
}
