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

/// Events that a client has and has not acked; more are not sent.
const WINDOW: usize = 64;
/// How long one look for events waits.
const WAIT_MS: u64 = 20_000;
/// After an error of the engine the next look waits this long.
const AFTER_ERROR: Duration = Duration::from_secs(1);
/// Leases last this long, and are extended while the connection lives.
const LEASE: Duration = Duration::from_secs(30);
const EXTEND_EVERY: Duration = Duration::from_secs(10);
/// A client that has not acked an event after this time does not get its lease extended any more: another client gets
/// the event.
const LONGEST: Duration = Duration::from_secs(15 * 60);

/// What one client holds of a group.
pub(super) struct Held {
    group: String,
    leases: Mutex<HashMap<String, Holding>>,
    /// A lease was settled: there is room.
    settled: Notify,
}

/// One event that the client has.
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

    /// Waits until the client may have more events, and returns how many.
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
            // Leases also end by themselves.
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
            // After an error the next round tries again; until then the leases hold.
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
                    // Settled meanwhile.
                    (_, None) => {}
                }
            }
        }
    }

    /// Settles events with one verdict, and returns how many of them it was applied to.
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

    /// Gives back what a client held when it left.
    pub(super) async fn release(&self, state: &AppState, caller: &Caller) {
        let leases: Vec<String> = self.leases.lock().keys().cloned().collect();
        if !leases.is_empty() {
            // Leases that cannot be given back end by themselves.
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
        ..FetchRequest::default()
    };
    let mut first = true;
    loop {
        request.max = Some(held.room().await);
        match fetch_for(&state, &caller, &held.group, &request).await {
            Ok(items) => {
                // Declared by the first look.
                request.patterns.clear();
                first = false;
                // All of them first: those that wait for room are kept as well.
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
            // A group that cannot be had is an answer; later the engine may only be busy.
            Err(problem) if first => {
                outbox.text(protocol::refused_by(&id, &problem));
                return id;
            }
            Err(_) => tokio::time::sleep(AFTER_ERROR).await,
        }
    }
}
