//! One WebSocket connection: its subscriptions, its heartbeat and its limits.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use everbus::{Code, Error, Result};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::follow::Follow;
use super::group::{self, Held};
use super::outbox::{COALESCE, Outbox};
use super::protocol::{self, Inbound, Subscribe};
use crate::auth::{Caller, Scope};
use crate::options::WebSocketLimits;
use crate::state::AppState;

/// A client that does not accept a frame within this time counts as gone.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How many frames are sent before messages of the client are read again.
const FRAMES_AT_ONCE: usize = 64;
/// How often the figures of the overview are sent.
const FIGURES_EVERY: Duration = Duration::from_secs(1);
/// How often the token of a connection is checked.
const VALID_EVERY: Duration = Duration::from_secs(2);
/// The longest name of a subscription.
const LONGEST_ID: usize = 128;

/// The end of a connection: its close code and last message.
struct Ending {
    code: u16,
    /// The last message; `None` if the client has left.
    last: Option<String>,
}

impl Ending {
    fn new(code: u16, status: &'static str, detail: &str) -> Self {
        Self {
            code,
            last: Some(protocol::status(status, detail)),
        }
    }

    /// The client has left.
    const fn gone() -> Self {
        Self {
            code: close_code::NORMAL,
            last: None,
        }
    }
}

pub(super) async fn serve(
    mut socket: WebSocket,
    state: AppState,
    caller: Caller,
    limits: WebSocketLimits,
) {
    let outbox = Arc::new(Outbox::new(limits.queued));
    outbox.text(protocol::status("connected", "send a subscribe message"));
    let mut connection = Connection {
        heartbeat: Heartbeat::new(&limits),
        budget: Budget::new(limits.messages_per_second),
        state,
        caller,
        outbox,
        subscriptions: HashMap::new(),
        groups: HashMap::new(),
        tasks: JoinSet::new(),
        limits,
        sent: Instant::now() - COALESCE,
        valid: tokio::time::interval_at(Instant::now() + VALID_EVERY, VALID_EVERY),
    };
    let ending = connection.run(&mut socket).await;
    connection.leave().await;
    let said = async {
        if let Some(text) = ending.last {
            socket.send(Message::Text(text.into())).await?;
        }
        let frame = CloseFrame {
            code: ending.code,
            reason: "".into(),
        };
        socket.send(Message::Close(Some(frame))).await
    };
    // A client that does not read does not get the message.
    let _ = timeout(Duration::from_secs(1), said).await;
}

struct Connection {
    state: AppState,
    caller: Caller,
    limits: WebSocketLimits,
    outbox: Arc<Outbox>,
    subscriptions: HashMap<Arc<str>, AbortHandle>,
    /// The leases that the client holds, for each subscription of a durable group.
    groups: HashMap<Arc<str>, Arc<Held>>,
    /// One task for each subscription. Dropping the connection ends them.
    tasks: JoinSet<Arc<str>>,
    heartbeat: Heartbeat,
    budget: Budget,
    /// When a frame was last sent.
    sent: Instant,
    /// Ticks when the token has to be checked.
    valid: tokio::time::Interval,
}

impl Connection {
    async fn run(&mut self, socket: &mut WebSocket) -> Ending {
        loop {
            let (outbox, due) = (self.outbox.clone(), self.sent + COALESCE);
            let ready = async {
                outbox.ready().await;
                sleep_until(due).await;
            };
            let ended = tokio::select! {
                biased;
                () = self.state.stopping() => {
                    Err(Ending::new(close_code::AWAY, "stopping", "the server stops; connect again"))
                }
                () = ready => self.send(socket).await,
                _ = self.valid.tick() => self.still_valid().await,
                beat = self.heartbeat.next() => self.beat(socket, beat).await,
                message = socket.recv() => self.receive(message).await,
                Some(ended) = self.tasks.join_next() => {
                    if let Ok(id) = ended {
                        self.subscriptions.remove(&id);
                        self.groups.remove(&id);
                    }
                    Ok(())
                }
            };
            if let Err(ending) = ended {
                return ending;
            }
        }
    }

    /// Ends the connection if the token was revoked or has expired.
    async fn still_valid(&self) -> Result<(), Ending> {
        if self.caller.is_valid(&self.state).await {
            return Ok(());
        }
        let detail = "the token was revoked or has expired";
        Err(Ending::new(close_code::POLICY, "revoked", detail))
    }

    /// Sends the waiting frames, up to [`FRAMES_AT_ONCE`].
    async fn send(&mut self, socket: &mut WebSocket) -> Result<(), Ending> {
        for _ in 0..FRAMES_AT_ONCE {
            if self.outbox.is_slow() {
                let detail =
                    "the client did not keep up; connect again and continue after the last cursor";
                return Err(Ending::new(close_code::POLICY, "slow", detail));
            }
            let Some(frame) = self.outbox.frame() else {
                break;
            };
            write(socket, Message::Text(frame.into())).await?;
        }
        self.sent = Instant::now();
        Ok(())
    }

    async fn beat(&mut self, socket: &mut WebSocket, beat: Beat) -> Result<(), Ending> {
        match beat {
            Beat::Ping => write(socket, Message::Ping(Vec::new().into())).await,
            Beat::Missed(missed) if missed < self.limits.missed_pongs => Ok(()),
            Beat::Missed(_) => {
                let detail = "the client did not answer the pings";
                Err(Ending::new(close_code::POLICY, "silent", detail))
            }
        }
    }

    async fn receive(
        &mut self,
        message: Option<Result<Message, axum::Error>>,
    ) -> Result<(), Ending> {
        let text = match message {
            None | Some(Ok(Message::Close(_))) => return Err(Ending::gone()),
            Some(Ok(Message::Pong(_))) => {
                self.heartbeat.pong();
                return Ok(());
            }
            // The WebSocket library answers pings. They count against the budget like other messages.
            Some(Ok(Message::Ping(_))) => return self.within_budget(),
            Some(Ok(Message::Binary(_))) => {
                let detail = "messages are JSON in text frames";
                return Err(Ending::new(close_code::UNSUPPORTED, "error", detail));
            }
            Some(Ok(Message::Text(text))) => text,
            Some(Err(error)) => return Err(self.broken(&error)),
        };
        self.within_budget()?;
        self.serve(text.as_str()).await;
        Ok(())
    }

    /// The ending for a frame that cannot be read: it is too large, or malformed.
    fn broken(&self, error: &axum::Error) -> Ending {
        let text = error.to_string();
        if text.contains("too long") || text.contains("too big") || text.contains("Space limit") {
            let detail = format!("a message has at most {} bytes", self.limits.frame_bytes);
            return Ending::new(close_code::SIZE, "error", &detail);
        }
        Ending::new(close_code::PROTOCOL, "error", "the frame is malformed")
    }

    fn within_budget(&mut self) -> Result<(), Ending> {
        if self.budget.take() {
            return Ok(());
        }
        let most = self.limits.messages_per_second;
        let detail = format!("more than {most} messages in a second");
        Err(Ending::new(close_code::POLICY, "flood", &detail))
    }

    async fn serve(&mut self, text: &str) {
        let message: Inbound = match serde_json::from_str(text) {
            Ok(message) => message,
            Err(error) => {
                let error = Error::new(Code::InvalidPayloadError, error.to_string())
                    .hint("a message is {\"type\": \"subscribe\" | \"unsubscribe\" | \"ping\", …}");
                return self.outbox.text(protocol::refused(None, &error));
            }
        };
        match message {
            Inbound::Ping { id } => self.outbox.text(protocol::ack("ping", id.as_deref(), None)),
            Inbound::Unsubscribe { id } => self.unsubscribe(&id).await,
            Inbound::Ack { id, leases } => self.settle("ack", &id, leases, None).await,
            Inbound::Nack { id, leases, error } => {
                self.settle("nack", &id, leases, error.as_deref()).await;
            }
            Inbound::Subscribe(wanted) => {
                let id = wanted.id.clone();
                if let Err(error) = self.subscribe(wanted).await {
                    self.outbox.text(protocol::refused(Some(&id), &error));
                }
            }
        }
    }

    /// Ends the subscriptions, and gives back the leases of the client.
    async fn leave(&mut self) {
        self.tasks.shutdown().await;
        for held in self.groups.values() {
            held.release(&self.state, &self.caller).await;
        }
    }

    async fn settle(&self, of: &'static str, id: &str, leases: Vec<String>, error: Option<&str>) {
        let Some(held) = self.groups.get(id) else {
            let what = format!("the subscription {id:?} is not of a group");
            let error = Error::new(Code::SubscriptionNotFound, what);
            return self.outbox.text(protocol::refused(Some(id), &error));
        };
        let verdict = if of == "ack" { "ack" } else { "retry" };
        let many = leases.len();
        let settled = held.settle(&self.state, &self.caller, leases, verdict, error);
        self.outbox.text(match settled.await {
            Ok(settled) if settled == many => protocol::ack(of, Some(id), None),
            Ok(settled) => {
                let lost = many - settled;
                let what =
                    format!("{lost} of {many} leases had ended; their events are delivered again");
                protocol::refused(Some(id), &Error::new(Code::LeaseLost, what))
            }
            Err(problem) => protocol::refused_by(id, &problem),
        });
    }

    async fn unsubscribe(&mut self, id: &str) {
        match self.subscriptions.remove(id) {
            Some(task) => {
                task.abort();
                if let Some(held) = self.groups.remove(id) {
                    held.release(&self.state, &self.caller).await;
                }
                self.outbox
                    .text(protocol::ack("unsubscribe", Some(id), None));
            }
            None => {
                let what = format!("there is no subscription {id:?} here");
                let error = Error::new(Code::SubscriptionNotFound, what);
                self.outbox.text(protocol::refused(Some(id), &error));
            }
        }
    }

    async fn subscribe(&mut self, wanted: Subscribe) -> Result<()> {
        let most = self.limits.subscriptions;
        if self.subscriptions.len() >= most {
            let what = format!("a connection has at most {most} subscriptions");
            return Err(
                Error::new(Code::InvalidSetting, what).hint("unsubscribe from others first")
            );
        }
        if wanted.id.is_empty() || wanted.id.len() > LONGEST_ID {
            let what = format!("the id of a subscription has 1 to {LONGEST_ID} bytes");
            return Err(Error::new(Code::InvalidSetting, what));
        }
        let id: Arc<str> = wanted.id.as_str().into();
        if self.subscriptions.contains_key(&id) {
            let what = format!("there is a subscription {id:?} already");
            return Err(Error::new(Code::InvalidSetting, what).hint("choose another id"));
        }
        let task = match wanted.topic.as_deref() {
            None if wanted.group.is_some() => self.consume(&id, wanted)?,
            None => {
                let follow = self.follow(&wanted).await?;
                let cursor = Some(follow.cursor().to_string());
                self.outbox
                    .text(protocol::ack("subscribe", Some(&id), cursor));
                let events = send_events(follow, id.clone(), self.outbox.clone());
                self.tasks.spawn(events)
            }
            Some("overview") => {
                self.outbox
                    .text(protocol::ack("subscribe", Some(&id), None));
                let (state, caller) = (self.state.clone(), self.caller.clone());
                let figures = send_figures(state, caller, id.clone(), self.outbox.clone());
                self.tasks.spawn(figures)
            }
            Some(topic) => {
                let what = format!("there is no topic {topic:?}");
                return Err(Error::new(Code::InvalidSetting, what).hint("the only one is overview"));
            }
        };
        self.subscriptions.insert(id, task);
        Ok(())
    }

    fn consume(&mut self, id: &Arc<str>, wanted: Subscribe) -> Result<AbortHandle> {
        if !self.caller.may(Scope::Consume) {
            let what = "a group needs the scope consume, which the token does not have";
            return Err(Error::new(Code::InvalidSetting, what));
        }
        if wanted.tenant.is_some() || wanted.after.is_some() {
            let what = "tenant and after do not go with a group, which has its own place";
            return Err(Error::new(Code::InvalidSetting, what).hint("leave them out"));
        }
        let held = Held::new(wanted.group.as_deref().unwrap_or_default());
        self.groups.insert(id.clone(), held.clone());
        self.outbox.text(protocol::ack("subscribe", Some(id), None));
        let (state, caller) = (self.state.clone(), self.caller.clone());
        let events = group::send(state, caller, wanted, held, self.outbox.clone());
        Ok(self.tasks.spawn(events))
    }

    async fn follow(&self, wanted: &Subscribe) -> Result<Follow> {
        let own = self.caller.tenant();
        if own.is_some() && wanted.tenant.is_some() && own != wanted.tenant.as_deref() {
            let what = "the token belongs to another tenant";
            return Err(Error::new(Code::InvalidSetting, what));
        }
        let tenant = own.map(str::to_owned).or_else(|| wanted.tenant.clone());
        let hub = self.state.live().hub();
        hub.follow(wanted.patterns()?, tenant, wanted.begin()?)
            .await
    }
}

/// Sends one message. A client that does not accept it in time counts as gone.
async fn write(socket: &mut WebSocket, message: Message) -> Result<(), Ending> {
    match timeout(WRITE_TIMEOUT, socket.send(message)).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(Ending::gone()),
    }
}

/// Sends the events of a subscription until the connection ends.
async fn send_events(mut follow: Follow, id: Arc<str>, outbox: Arc<Outbox>) -> Arc<str> {
    loop {
        let behind = follow.is_behind();
        match follow.next().await {
            // Past events wait until the client has room. For live events the client must keep up.
            Ok(events) if behind => outbox.past_events(&id, &events).await,
            Ok(events) => outbox.events(&id, &events),
            Err(error) => {
                outbox.text(protocol::refused(Some(&id), &error));
                return id;
            }
        }
    }
}

/// Sends the figures of the overview every second.
async fn send_figures(
    state: AppState,
    caller: Caller,
    id: Arc<str>,
    outbox: Arc<Outbox>,
) -> Arc<str> {
    let mut every = tokio::time::interval(FIGURES_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let figures = state.live().figures().overview(&caller).await;
        let message = serde_json::json!({
            "type": "data",
            "subscription": &*id,
            "figures": figures,
        });
        outbox.text(message.to_string());
    }
}

/// The next action of the heartbeat.
enum Beat {
    /// Send a ping.
    Ping,
    /// This many pings in a row were not answered in time.
    Missed(u32),
}

/// Sends a ping at a fixed interval, and checks that the answer comes in time.
struct Heartbeat {
    every: Duration,
    patience: Duration,
    ping_at: Instant,
    /// When the answer to the last ping is due; `None` once it has come or was missed.
    due: Option<Instant>,
    missed: u32,
}

impl Heartbeat {
    fn new(limits: &WebSocketLimits) -> Self {
        Self {
            every: limits.ping_every,
            // A pong is due before the next ping, so that every ping counts.
            patience: limits.pong_within.min(limits.ping_every),
            ping_at: Instant::now() + limits.ping_every,
            due: None,
            missed: 0,
        }
    }

    fn pong(&mut self) {
        self.due = None;
        self.missed = 0;
    }

    /// Waits for the next beat. The future may be dropped at any time.
    async fn next(&mut self) -> Beat {
        match self.due {
            Some(due) if due <= self.ping_at => {
                sleep_until(due).await;
                self.due = None;
                self.missed += 1;
                Beat::Missed(self.missed)
            }
            _ => {
                sleep_until(self.ping_at).await;
                let now = Instant::now();
                self.ping_at = now + self.every;
                self.due = Some(now + self.patience);
                Beat::Ping
            }
        }
    }
}

/// A token bucket for messages: a burst may have the messages of one second.
struct Budget {
    per_second: f64,
    left: f64,
    at: Instant,
}

impl Budget {
    fn new(per_second: u32) -> Self {
        Self {
            per_second: f64::from(per_second),
            left: f64::from(per_second),
            at: Instant::now(),
        }
    }

    fn take(&mut self) -> bool {
        let now = Instant::now();
        let earned = now.duration_since(self.at).as_secs_f64() * self.per_second;
        self.left = (self.left + earned).min(self.per_second);
        self.at = now;
        let enough = self.left >= 1.0;
        if enough {
            self.left -= 1.0;
        }
        enough
    }
}
