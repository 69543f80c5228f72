//! The connection: it sends requests, and says what became of a request when it breaks.
//!
//! All requests share one connection, except reads that block. The next request replaces a broken connection. The pause
//! between attempts to connect grows while the server is away.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, IntoConnectionInfo, RedisError, Script, Value};
use tokio::sync::Notify;

use crate::config::{Address, Options};
use crate::errors;

/// The first and the longest pause between two attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(640));

/// The connection of one engine.
pub(crate) struct Link {
    client: Client,
    current: tokio::sync::Mutex<Current>,
    timeout: Duration,
    tls: bool,
    pub(crate) server: String,
    prefix: String,
    closed: AtomicBool,
    /// Notified when the link begins to close.
    pub(crate) closing: Notify,
    running: AtomicUsize,
    idle: Notify,
}

#[derive(Default)]
struct Current {
    connection: Option<MultiplexedConnection>,
    number: u64,
    /// No attempt to connect before this time.
    not_before: Option<Instant>,
    pause: Duration,
    /// When the last attempt failed, and why.
    failed: Option<(Instant, Error)>,
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

/// Prepares the connection to a server.
pub(crate) fn link(address: &Address, options: &Options, prefix: &str) -> Result<Link> {
    let server = address.server();
    let refused = |error: &RedisError| {
        errors::of_server(&server, error).unwrap_or_else(|| {
            let detail = error
                .detail()
                .unwrap_or("the URL or the certificates")
                .to_owned();
            errors::of_word(&server, "CONFIG", &detail)
        })
    };
    let tls = address.tls || options.tls;
    if tls {
        // The client library uses the crypto provider of the process. If there is none and the dependencies bring
        // several, rustls panics, so ring is installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let scheme = if tls { "rediss" } else { "redis" };
    let host = match address.host.contains(':') {
        true => format!("[{}]", address.host),
        false => address.host.clone(),
    };
    let url = format!("{scheme}://{host}:{}/{}", address.port, address.database);
    let info = url.into_connection_info().map_err(|e| refused(&e))?;
    let mut settings = info.redis_settings().clone().set_skip_set_lib_name();
    if let Some(user) = address.user.as_ref().or(options.user.as_ref()) {
        settings = settings.set_username(user);
    }
    if let Some(password) = address.password.as_ref().or(options.password.as_ref()) {
        settings = settings.set_password(password);
    }
    let info = info.set_redis_settings(settings);
    let client = match &options.ca_file {
        Some(file) if tls => {
            let root = std::fs::read(file).map_err(|error| {
                let what = format!(
                    "the certificates {} cannot be read: {error}",
                    file.display()
                );
                Error::new(Code::InvalidSetting, what).hint("broker.tls names a PEM file")
            })?;
            let certificates = redis::TlsCertificates {
                client_tls: None,
                root_cert: Some(root),
            };
            Client::build_with_tls(info, certificates)
        }
        _ => Client::open(info),
    };
    Ok(Link {
        client: client.map_err(|e| refused(&e))?,
        current: tokio::sync::Mutex::default(),
        timeout: options.timeout,
        tls,
        server,
        prefix: prefix.to_owned(),
        closed: AtomicBool::new(false),
        closing: Notify::new(),
        running: AtomicUsize::new(0),
        idle: Notify::new(),
    })
}

impl Link {
    /// Refuses calls after the close, and counts this one otherwise.
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

    /// Notes the end of a task that [`join`](Self::join) counted.
    pub(crate) fn part(&self) {
        drop(Running(self));
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::SeqCst) {
            true => Err(Error::shutdown()),
            false => Ok(()),
        }
    }

    /// Refuses new calls. Returns `true` the first time.
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
        self.current.lock().await.connection = None;
    }

    /// A connection of its own, for reads that block up to `block`.
    pub(crate) async fn own_connection(&self, block: Duration) -> Result<MultiplexedConnection> {
        self.connect(block + self.timeout).await
    }

    async fn connect(&self, answer: Duration) -> Result<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(answer));
        let connecting = self
            .client
            .get_multiplexed_async_connection_with_config(&config);
        // The server may accept the connection and not answer.
        let connected = match tokio::time::timeout(self.timeout, connecting).await {
            Ok(connection) => connection.map_err(|error| self.error(&error, false)),
            Err(_) => Err(errors::away(&self.server, "no answer in time", false)),
        };
        connected.map_err(
            |error| match self.tls && error.code() == Code::Unavailable {
                true => error.hint(errors::TLS_HINT),
                false => error,
            },
        )
    }

    async fn connection(&self) -> Result<(u64, MultiplexedConnection)> {
        let asked = Instant::now();
        let mut current = self.current.lock().await;
        if let Some(connection) = &current.connection {
            return Ok((current.number, connection.clone()));
        }
        // An attempt that failed while this caller waited for the lock counts for this caller too. Otherwise the
        // waiting callers would try one after another.
        if let Some((at, error)) = &current.failed
            && *at > asked
        {
            return Err(error.clone());
        }
        if let Some(until) = current.not_before {
            tokio::time::sleep_until(until.into()).await;
        }
        match self.connect(self.timeout).await {
            Ok(connection) => {
                *current = Current {
                    connection: Some(connection.clone()),
                    number: current.number + 1,
                    not_before: None,
                    pause: PAUSES.0,
                    failed: None,
                };
                Ok((current.number, connection))
            }
            Err(error) => {
                current.pause = (current.pause * 2).clamp(PAUSES.0, PAUSES.1);
                let now = Instant::now();
                current.not_before = Some(now + current.pause);
                current.failed = Some((now, error.clone()));
                Err(error)
            }
        }
    }

    /// Drops the connection with this number, if it is still the current one.
    async fn give_up(&self, number: u64) {
        let mut current = self.current.lock().await;
        if current.number == number {
            current.connection = None;
        }
    }

    /// The error of a request; `sent`: it may have taken effect.
    pub(crate) fn error(&self, error: &RedisError, sent: bool) -> Error {
        if let Some(error) = errors::of_server(&self.server, error) {
            return error;
        }
        let what = match error.is_timeout() {
            true => "no answer in time".to_owned(),
            false => format!("the connection failed: {error}"),
        };
        errors::away(&self.server, &what, sent)
    }

    /// Sends a command and waits for its answer. An error says whether it may have taken effect.
    pub(crate) async fn ask(&self, command: &Cmd) -> Result<Value> {
        let (number, mut connection) = self.connection().await?;
        match connection
            .send_packed_command(command)
            .await
            .and_then(Value::extract_error)
        {
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.failed(number, &error).await),
        }
    }

    async fn failed(&self, number: u64, error: &RedisError) -> Error {
        let said = errors::of_server(&self.server, error).is_some();
        if !said || error.code() == Some("READONLY") {
            self.give_up(number).await;
        }
        self.error(error, true)
    }

    /// Runs a script with these arguments. Loads the script if the server does not know it.
    pub(crate) async fn run(&self, script: &Script, arguments: &Arguments) -> Result<Value> {
        let (number, mut connection) = self.connection().await?;
        let mut call = Cmd::with_capacity(arguments.ends.len() + 4, arguments.data.len() + 128);
        call.arg("EVALSHA")
            .arg(script.get_hash())
            .arg(1)
            .arg(&self.prefix);
        for argument in arguments.iter() {
            call.arg(argument);
        }
        for again in [false, true] {
            let answer = connection.send_packed_command(&call).await;
            match answer.and_then(Value::extract_error) {
                Ok(answer) => return Ok(answer),
                Err(error) if error.code() == Some("NOSCRIPT") && !again => {
                    if let Err(error) = script.load_async(&mut connection).await {
                        return Err(self.failed(number, &error).await);
                    }
                }
                Err(error) => return Err(self.failed(number, &error).await),
            }
        }
        Err(Error::new(
            Code::Unavailable,
            "the server forgets scripts at once",
        ))
    }
}

/// The arguments of a script, in one buffer, because a batch has thousands of arguments.
#[derive(Default)]
pub(crate) struct Arguments {
    data: Vec<u8>,
    /// Where each argument ends.
    ends: Vec<usize>,
}

impl Arguments {
    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let places = starts.zip(&self.ends);
        places.map(|(start, end)| self.data.get(start..*end).unwrap_or_default())
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.data.extend_from_slice(bytes);
        self.ends.push(self.data.len());
        self
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub(crate) fn number(&mut self, number: impl std::fmt::Display) -> &mut Self {
        use std::io::Write as _;
        // Writing to memory does not fail.
        let _ = write!(self.data, "{number}");
        self.ends.push(self.data.len());
        self
    }

    pub(crate) fn millis(&mut self, time: Duration) -> &mut Self {
        self.number(
            u64::try_from(time.as_millis())
                .unwrap_or(u64::MAX)
                .min(1 << 50),
        )
    }

    pub(crate) fn append(&mut self, more: &Self) -> &mut Self {
        let before = self.data.len();
        self.data.extend_from_slice(&more.data);
        self.ends.extend(more.ends.iter().map(|end| before + end));
        self
    }

    /// The current end of the arguments, for [`cut`](Self::cut).
    pub(crate) fn mark(&self) -> (usize, usize) {
        (self.data.len(), self.ends.len())
    }

    /// Removes the arguments that were added after the mark.
    pub(crate) fn cut(&mut self, mark: (usize, usize)) {
        self.data.truncate(mark.0);
        self.ends.truncate(mark.1);
    }

    pub(crate) fn list<T: AsRef<str>>(&mut self, texts: &[T]) -> &mut Self {
        self.number(texts.len());
        for text in texts {
            self.text(text.as_ref());
        }
        self
    }
}

/// Reads an answer of the server.
pub(crate) trait Read {
    fn list(self) -> Result<Vec<Value>>;
    fn bytes(self) -> Result<bytes::Bytes>;
    fn text(self) -> Result<String>;
    fn number(self) -> Result<u64>;
}

impl Read for Value {
    fn list(self) -> Result<Vec<Value>> {
        match self {
            Value::Array(list) | Value::Set(list) => Ok(list),
            Value::Map(pairs) => Ok(pairs.into_iter().flat_map(|(k, v)| [k, v]).collect()),
            Value::Nil => Ok(Vec::new()),
            other => Err(errors::unreadable(&format!("{} is no list", kind(&other)))),
        }
    }

    fn bytes(self) -> Result<bytes::Bytes> {
        match self {
            Value::BulkString(bytes) => Ok(bytes.into()),
            Value::SimpleString(text) => Ok(text.into()),
            Value::Okay => Ok("OK".into()),
            Value::Int(number) => Ok(number.to_string().into()),
            Value::Nil => Ok(bytes::Bytes::new()),
            other => Err(errors::unreadable(&format!("{} is no text", kind(&other)))),
        }
    }

    fn text(self) -> Result<String> {
        let bytes = self.bytes()?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn number(self) -> Result<u64> {
        match self {
            Value::Int(number) => Ok(u64::try_from(number).unwrap_or(0)),
            other => {
                let text = other.text()?;
                text.parse()
                    .map_err(|_| errors::unreadable("a number was expected"))
            }
        }
    }
}

/// The kind of an answer, without its content: an error must not contain payloads.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Nil => "nothing",
        Value::Int(_) => "a number",
        Value::BulkString(_) | Value::SimpleString(_) | Value::Okay => "a text",
        Value::Array(_) => "a list",
        _ => "something else",
    }
}
