//! The connection: requests with an answer, and what happens to them when the connection breaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_nats::client::{PublishErrorKind, RequestErrorKind};
use async_nats::connection::State;
use async_nats::{
    Client, ConnectOptions, Event as Happened, HeaderMap, Message, Request, Subscriber,
};
use bytes::Bytes;
use everbus_core::{Code, Error, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::config::{Address, Options};
use crate::errors::{no_jetstream, not_connected};

/// The connection of one engine.
pub(crate) struct Link {
    pub(crate) client: Client,
    /// Grows with every connect and every disconnect.
    pub(crate) turns: watch::Receiver<u64>,
    events: Arc<Events>,
    timeout: Duration,
    servers: String,
    closed: AtomicBool,
    /// Notified when the engine begins to close.
    pub(crate) closing: Notify,
    running: AtomicUsize,
    idle: Notify,
    /// Whether other programs answer requests on the subjects of events.
    crowded: AtomicBool,
}

/// What the client library reports from its own task.
struct Events {
    turns: watch::Sender<u64>,
    /// The last error that the server reported, and when.
    refused: Mutex<Option<(Instant, String)>>,
}

impl Events {
    fn note(&self, event: &Happened) {
        match event {
            Happened::Connected | Happened::Disconnected => {
                self.turns.send_modify(|turn| *turn += 1);
            }
            Happened::ServerError(error) => {
                *self.refused.lock() = Some((Instant::now(), error.to_string()));
            }
            _ => {}
        }
        match event {
            Happened::Connected | Happened::Draining | Happened::Closed => {
                tracing::debug!(target: "everbus::nats", %event, "connection");
            }
            _ => tracing::warn!(target: "everbus::nats", %event, "connection"),
        }
    }
}

/// A call that is under way: [`Link::close`] waits for it.
pub(crate) struct Running<'a>(&'a Link);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

/// Connects, and checks that the server has JetStream.
pub(crate) async fn connect(address: &Address, options: &Options) -> Result<Link> {
    let servers = address.servers.join(",");
    let (sender, turns) = watch::channel(0);
    let events = Arc::new(Events {
        turns: sender,
        refused: Mutex::default(),
    });
    let noted = events.clone();
    let mut connect = credentials(address, options)
        .await?
        .name("everbus")
        .connection_timeout(options.timeout)
        .request_timeout(Some(options.timeout))
        .ping_interval(Duration::from_secs(10))
        .reconnect_delay_callback(|attempts| {
            let attempts = u32::try_from(attempts).unwrap_or(u32::MAX).min(5);
            Duration::from_millis(20 << attempts)
        })
        .event_callback(move |event| {
            noted.note(&event);
            std::future::ready(())
        });
    if options.tls || address.tls {
        connect = connect.require_tls(true);
    }
    if let Some(file) = &options.ca_file {
        connect = connect.add_root_certificates(file.clone());
    }
    // The client library uses the crypto provider of the process. If there is none and the dependencies bring
    // several, rustls panics, so ring is installed. A server may require TLS whatever the URL says.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = connect
        .connect(&address.servers[..])
        .await
        .map_err(|error| not_connected(&servers, &error))?;
    let info = client.server_info();
    if !info.jetstream {
        return Err(no_jetstream());
    }
    Ok(Link {
        client,
        turns,
        events,
        timeout: options.timeout,
        servers,
        closed: AtomicBool::new(false),
        closing: Notify::new(),
        running: AtomicUsize::new(0),
        idle: Notify::new(),
        crowded: AtomicBool::new(false),
    })
}

async fn credentials(address: &Address, options: &Options) -> Result<ConnectOptions> {
    let connect = ConnectOptions::new();
    let user = address.user.as_ref().or(options.user.as_ref());
    let password = address.password.as_ref().or(options.password.as_ref());
    let token = address.token.as_ref().or(options.token.as_ref());
    let given = [user.is_some(), token.is_some(), options.creds.is_some()];
    if given.into_iter().filter(|given| *given).count() > 1 {
        let what = "more than one of user, token and creds is given";
        return Err(Error::new(Code::InvalidSetting, what)
            .hint("name one: user with password, token, or creds"));
    }
    if let Some(creds) = &options.creds {
        if is_seed(creds) {
            return Ok(connect.nkey(creds.clone()));
        }
        return connect.credentials_file(creds).await.map_err(|error| {
            // The message must not contain a mistyped seed.
            let what = match looks_secret(creds) {
                true => "the credentials are neither a file nor the seed of an nkey".to_owned(),
                false => format!("the credentials file {creds} cannot be read: {error}"),
            };
            Error::new(Code::InvalidSetting, what)
                .hint("broker.creds is the path of a .creds file, or the seed of an nkey")
        });
    }
    Ok(match (user, token) {
        (Some(user), _) => {
            connect.user_and_password(user.clone(), password.cloned().unwrap_or_default())
        }
        (None, Some(token)) => connect.token(token.clone()),
        (None, None) => connect,
    })
}

/// The seed of a user's nkey: `SU` and 56 characters of base32.
fn is_seed(text: &str) -> bool {
    text.len() == 58 && text.starts_with("SU") && text.bytes().all(|b| b.is_ascii_alphanumeric())
}

/// Whether a text may be a seed with a mistake in it.
fn looks_secret(text: &str) -> bool {
    text.trim().starts_with('S') && !text.contains(['/', '\\', '.'])
}

impl Link {
    /// Counts a call that begins, or refuses it after the close.
    pub(crate) fn enter(&self) -> Result<Running<'_>> {
        self.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self);
        self.check_open()?;
        Ok(running)
    }

    /// Counts a task that [`Link::close`] waits for.
    pub(crate) fn join(&self) {
        self.running.fetch_add(1, Ordering::SeqCst);
    }

    /// The task has ended.
    pub(crate) fn part(&self) {
        drop(Running(self));
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::SeqCst) {
            true => Err(Error::shutdown()),
            false => Ok(()),
        }
    }

    /// Refuses new calls from now on. Returns true the first time.
    pub(crate) fn begin_close(&self) -> bool {
        let first = !self.closed.swap(true, Ordering::SeqCst);
        self.closing.notify_waiters();
        first
    }

    /// Waits for the running calls, then closes the connection.
    pub(crate) async fn close(&self) {
        let quiet = async {
            loop {
                let idle = self.idle.notified();
                if self.running.load(Ordering::SeqCst) == 0 {
                    return;
                }
                idle.await;
            }
        };
        let _ = tokio::time::timeout(self.timeout, quiet).await;
        let _ = tokio::time::timeout(self.timeout, self.client.drain()).await;
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Waits until a lost connection is back. If this fails, nothing was sent.
    async fn connected(&self) -> Result<()> {
        if self.is_connected() {
            return Ok(());
        }
        let mut turns = self.turns.clone();
        let back = async {
            while !self.is_connected() {
                if turns.changed().await.is_err() {
                    return;
                }
            }
        };
        match tokio::time::timeout(self.timeout, back).await {
            Ok(()) if self.is_connected() => Ok(()),
            _ => Err(self.away("there is no connection")),
        }
    }

    /// Checks that the server answers.
    pub(crate) async fn answers(&self) -> Result<()> {
        match self.is_connected() {
            true => self.ask("$JS.API.INFO", None, Bytes::new()).await.map(drop),
            false => Err(self.away("there is no connection")),
        }
    }

    fn away(&self, what: &str) -> Error {
        let text = format!("{}: {what}", self.servers);
        Error::new(Code::Unavailable, text)
            .hint("the bus goes on by itself once the server is there again")
    }

    /// A request whose answer is awaited. An error says whether the request may have taken effect.
    pub(crate) async fn ask(
        &self,
        subject: &str,
        headers: Option<HeaderMap>,
        payload: Bytes,
    ) -> Result<Message> {
        self.connected().await?;
        let began = Instant::now();
        let mut turns = self.turns.clone();
        turns.mark_unchanged();
        let mut request = Request::new().payload(payload);
        if let Some(headers) = headers {
            request = request.headers(headers);
        }
        let answer = self.client.send_request(subject.to_owned(), request);
        let mut answer = std::pin::pin!(answer);
        let answer = loop {
            tokio::select! {
                biased;
                answer = &mut answer => break answer,
                turned = turns.changed() => {
                    // The answer would have come over the connection that is gone.
                    if turned.is_err() || !self.is_connected() {
                        return Err(self.away("the connection was lost before the answer").with_unknown_outcome());
                    }
                }
            }
        };
        answer.map_err(|error| match error.kind() {
            RequestErrorKind::NoResponders => self.no_responders(),
            RequestErrorKind::MaxPayloadExceeded => self.too_large(),
            RequestErrorKind::InvalidSubject => Error::new(
                Code::InvalidType,
                format!("{subject:?} cannot be a subject"),
            ),
            RequestErrorKind::TimedOut => match self.refusal(subject, began) {
                Some(error) => error,
                None => self.away("no answer in time").with_unknown_outcome(),
            },
            RequestErrorKind::Other => self.away(&error.to_string()).with_unknown_outcome(),
        })
    }

    pub(crate) fn no_responders(&self) -> Error {
        self.away("no server answers, which happens while a leader is elected")
    }

    /// Sends a request, and returns the subscription where all answers arrive.
    pub(crate) async fn ask_all(
        &self,
        subject: &str,
        headers: HeaderMap,
        payload: Bytes,
    ) -> Result<Subscriber> {
        self.connected().await?;
        let inbox = self.client.new_inbox();
        let answers = self.client.subscribe(inbox.clone()).await;
        let answers = answers.map_err(|error| self.away(&error.to_string()))?;
        let sent =
            self.client
                .publish_with_reply_and_headers(subject.to_owned(), inbox, headers, payload);
        sent.await.map_err(|error| match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => self.too_large(),
            _ => self.away(&error.to_string()).with_unknown_outcome(),
        })?;
        Ok(answers)
    }

    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed)
    }

    /// The error for a publish that another program answered. Later publishes read all answers.
    pub(crate) fn crowded(&self, subject: &str) -> Error {
        if !self.crowded.swap(true, Ordering::Relaxed) {
            tracing::warn!(target: "everbus::nats", subject, "another program answers requests on the subject of events; publishing is slower for it");
        }
        let what = format!("the answer to a publish on {subject} is not that of its stream");
        self.away(&what).with_unknown_outcome()
    }

    /// The error if the server's permissions forbid the subject. The server reports this on the connection, not as an
    /// answer to the request.
    fn refusal(&self, subject: &str, began: Instant) -> Option<Error> {
        let mut refused = self.events.refused.lock();
        let named = format!("\"{}\"", subject.to_lowercase());
        let of_inbox = |text: &str| text.contains("violation for subscription to \"_inbox.");
        let is_of_this = |(at, text): &mut (Instant, String)| {
            let said = text.to_lowercase();
            let is_named = said.contains("permissions violation") && said.contains(&named);
            *at >= began && (is_named || of_inbox(&said))
        };
        let (_, text) = refused.take_if(is_of_this)?;
        let what = format!("no permission for {subject}: {text}");
        let hint = "the account needs to publish to $JS.API.>, $JS.ACK.>, $EVERBUS.> and the subjects of its \
                    events, and to subscribe to _INBOX.>";
        let error = Error::new(Code::InvalidSetting, what).hint(hint);
        // If only the inbox is forbidden, the request may have taken effect.
        Some(match of_inbox(&text.to_lowercase()) {
            true => error.with_unknown_outcome(),
            false => error,
        })
    }

    /// The largest message, headers included.
    pub(crate) fn max_payload(&self) -> usize {
        self.client.max_payload()
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn too_large(&self) -> Error {
        let limit = self.max_payload();
        let what =
            format!("the event is larger than {limit} bytes, which the server takes at most");
        Error::new(Code::PayloadTooLarge, what).hint(
            "let large payloads overflow to an object store, or raise max_payload of the server",
        )
    }
}
