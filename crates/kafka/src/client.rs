//! The clients of one engine: producer, administration, and consumers that are made as they are needed.
//!
//! The client library keeps its connections by itself. Its calls block, so they run on threads that may block.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result};
use parking_lot::{Mutex, RwLock};
use rdkafka::ClientConfig;
use rdkafka::admin::AdminClient;
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext as _, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, ConsumerContext};
use rdkafka::error::KafkaError;
use rdkafka::producer::{FutureProducer, Producer as _};
use tokio::sync::{Notify, OnceCell};

use crate::config::{Address, Options};
use crate::errors::{OLDEST, is_passing, refused};
use crate::topics::{self, Defaults};

/// The client's own limit is never reached: records are checked against the limit of their topic.
const CLIENT_MAX_BYTES: &str = "1000000000";
/// An error that the client reports while it connects is final after this long.
const SETTLED: Duration = Duration::from_secs(2);

/// The last trouble that a client reported, for the error of a call that got no answer.
#[derive(Clone, Default)]
pub(crate) struct Trouble(Arc<Mutex<Option<String>>>);

/// The context of clients without callbacks.
#[derive(Clone, Default)]
pub(crate) struct Plain {
    pub(crate) trouble: Trouble,
}

impl Trouble {
    pub(crate) fn note(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        if matches!(facility, "FAIL" | "ERROR" | "SSL" | "SASL") {
            *self.0.lock() = Some(text.to_owned());
        }
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
                tracing::error!(target: "everbus::kafka", facility, text, "client");
            }
            RDKafkaLogLevel::Error | RDKafkaLogLevel::Warning => {
                tracing::warn!(target: "everbus::kafka", facility, text, "client");
            }
            _ => tracing::debug!(target: "everbus::kafka", facility, text, "client"),
        }
    }

    fn last(&self) -> Option<String> {
        self.0.lock().clone()
    }
}

impl ClientContext for Plain {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        self.trouble.note(level, facility, text);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "everbus::kafka", %error, reason, "client");
    }
}

impl ConsumerContext for Plain {}

pub(crate) type Producer = FutureProducer<Plain>;

/// The clients of one engine.
pub(crate) struct Link {
    config: ClientConfig,
    pub(crate) servers: String,
    pub(crate) timeout: Duration,
    pub(crate) trouble: Trouble,
    admin: AdminClient<Plain>,
    producer: RwLock<Arc<Producer>>,
    closed: AtomicBool,
    /// Notified when the engine begins to close.
    pub(crate) closing: Notify,
    running: AtomicUsize,
    idle: Notify,
    defaults: OnceCell<Defaults>,
}

/// A call that is under way: [`Link::quiet`] waits for it.
pub(crate) struct Running<'a>(&'a Link);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

fn config(address: &Address, options: &Options) -> Result<ClientConfig> {
    let user = address.user.as_ref().or(options.user.as_ref());
    let password = address.password.as_ref().or(options.password.as_ref());
    let mechanism = options.mechanism.as_deref().unwrap_or("PLAIN");
    let needs_tls = options.tls || user.is_some() && mechanism != "PLAIN";
    if !matches!(mechanism, "PLAIN" | "SCRAM-SHA-256" | "SCRAM-SHA-512") {
        let what = format!("{mechanism:?} is no mechanism of SASL that is supported");
        return Err(Error::new(Code::InvalidSetting, what)
            .hint("broker.sasl is PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512"));
    }
    if needs_tls && !cfg!(feature = "tls") {
        let what = "this build has no TLS for Kafka, which tls and SCRAM need";
        return Err(Error::new(Code::Unsupported, what).hint("build with `--features kafka-tls`"));
    }
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", &address.servers)
        .set("client.id", format!("everbus-{:08x}", fastrand::u32(..)))
        .set("socket.keepalive.enable", "true")
        .set("socket.nagle.disable", "true")
        .set("reconnect.backoff.ms", "20")
        .set("reconnect.backoff.max.ms", "1000")
        // A member that subscribes to a topic before every broker knows it looks again after this long.
        .set("topic.metadata.refresh.interval.ms", "10000")
        .set(
            "socket.timeout.ms",
            millis(options.timeout.max(Duration::from_secs(1))),
        )
        .set("allow.auto.create.topics", "false")
        .set_log_level(RDKafkaLogLevel::Warning);
    let protocol = match (user.is_some(), options.tls) {
        (false, false) => "plaintext",
        (false, true) => "ssl",
        (true, false) => "sasl_plaintext",
        (true, true) => "sasl_ssl",
    };
    config.set("security.protocol", protocol);
    if let Some(user) = user {
        config.set("sasl.mechanisms", mechanism);
        config.set("sasl.username", user);
        config.set("sasl.password", password.map_or("", String::as_str));
    }
    if let Some(file) = options.ca_file.as_ref().filter(|_| options.tls) {
        config.set("ssl.ca.location", file.display().to_string());
    }
    Ok(config)
}

pub(crate) fn millis(duration: Duration) -> String {
    duration.as_millis().to_string()
}

/// Connects, and asks for the brokers of the cluster.
pub(crate) async fn connect(address: &Address, options: &Options) -> Result<Link> {
    let config = config(address, options)?;
    let trouble = Trouble::default();
    let context = Plain {
        trouble: trouble.clone(),
    };
    let unusable = |error: KafkaError| {
        Error::new(
            Code::InvalidSetting,
            format!("the client cannot be made: {error}"),
        )
    };
    let admin = AdminClient::from_config_and_context(&config, context.clone()).map_err(unusable)?;
    let producer = producer(&config, context, options.timeout).map_err(unusable)?;
    let link = Link {
        config,
        servers: address.servers.clone(),
        timeout: options.timeout,
        trouble,
        admin,
        producer: RwLock::new(Arc::new(producer)),
        closed: AtomicBool::new(false),
        closing: Notify::new(),
        running: AtomicUsize::new(0),
        idle: Notify::new(),
        defaults: OnceCell::new(),
    };
    let producer = link.producer();
    let (timeout, trouble) = (link.timeout, link.trouble.clone());
    let reached = blocking(move || {
        let begin = Instant::now();
        loop {
            let slice = Duration::from_secs(1).min(timeout);
            match producer
                .client()
                .fetch_metadata(Some("everbus.asks"), slice)
            {
                Ok(metadata) if !metadata.brokers().is_empty() => {
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) => {
                    let late = begin.elapsed() > SETTLED && trouble.last().is_some();
                    if late || begin.elapsed() > timeout {
                        return Err(error);
                    }
                }
            }
        }
    });
    match reached.await? {
        Ok(()) => Ok(link),
        Err(error) => Err(not_connected(&link, &error)),
    }
}

fn producer(
    config: &ClientConfig,
    context: Plain,
    timeout: Duration,
) -> Result<Producer, KafkaError> {
    Producer::from_config_and_context(&producer_config(config, timeout), context)
}

fn producer_config(config: &ClientConfig, timeout: Duration) -> ClientConfig {
    let mut config = config.clone();
    config
        .set("acks", "all")
        .set("enable.idempotence", "true")
        .set("message.timeout.ms", millis(timeout))
        .set("message.max.bytes", CLIENT_MAX_BYTES)
        .set("linger.ms", "0")
        .set("queue.buffering.max.messages", "500000")
        .set("partitioner", "murmur2_random")
        // A record without a key goes to a random partition, not to the same one for a while.
        .set("sticky.partitioning.linger.ms", "0");
    config
}

/// The error of a connection that could not be made.
fn not_connected(link: &Link, error: &KafkaError) -> Error {
    let servers = &link.servers;
    let said = link.trouble.last().unwrap_or_else(|| error.to_string());
    let has = |part: &str| said.to_ascii_lowercase().contains(part);
    let new = |code: Code, what: String, hint: &str| Error::new(code, what).hint(hint);
    if has("connection refused") || has("resolve") || has("unreachable") {
        return new(
            Code::Unavailable,
            format!("{servers} cannot be reached: {said}"),
            "is the server running, and is the address right?",
        );
    }
    if has("authentication") || has("sasl mechanism") || has("sasl handshake") {
        return new(
            Code::InvalidSetting,
            format!("{servers} refuses these credentials: {said}"),
            "check user and password: in the URL, or broker.user, broker.password and broker.sasl",
        );
    }
    if has("apiversionrequest failed: broker") {
        return new(
            Code::Unsupported,
            format!("{servers} refuses the requests of this client: {said}"),
            OLDEST,
        );
    }
    if has("ssl") || has("certificate") {
        return new(
            Code::InvalidSetting,
            format!("{servers}: no TLS connection: {said}"),
            "set tls if the listener has it, and only then; broker.tls.ca names the root certificate of the server",
        );
    }
    // A broker that is killed while it answers looks like a server of another protocol that disconnects. Only an
    // invalid response shows that the server is not a Kafka broker.
    let hung_up = has("disconnected") && !has("invalid response");
    if !hung_up && (has("invalid response") || has("larger than") || has("protocol")) {
        return new(
            Code::InvalidUrl,
            format!("{servers} does not answer as a Kafka broker does: {said}"),
            "the port may be that of another server, of a controller, or one that wants TLS or a user",
        );
    }
    new(
        Code::Unavailable,
        format!("{servers} does not answer: {said}"),
        "is the server running, is the address right, and does the port want TLS?",
    )
}

/// Runs a call that blocks.
pub(crate) async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let run = tokio::task::spawn_blocking(call);
    run.await
        .map_err(|error| Error::new(Code::Internal, "a call of the client failed").caused_by(error))
}

/// Repeats a blocking request while the cluster elects a leader.
pub(crate) fn patiently<T>(
    timeout: Duration,
    ask: impl FnMut() -> Result<T, KafkaError>,
) -> Result<T, KafkaError> {
    patiently_while(is_passing, timeout, ask)
}

/// Repeats a blocking request after errors that pass.
pub(crate) fn patiently_while<T>(
    passes: fn(&KafkaError) -> bool,
    timeout: Duration,
    mut ask: impl FnMut() -> Result<T, KafkaError>,
) -> Result<T, KafkaError> {
    let begin = Instant::now();
    loop {
        match ask() {
            Err(error) if passes(&error) && begin.elapsed() < timeout => {
                std::thread::sleep(Duration::from_millis(20));
            }
            answer => return answer,
        }
    }
}

impl Link {
    /// Counts a call that begins, or refuses it after the close.
    pub(crate) fn enter(&self) -> Result<Running<'_>> {
        self.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self);
        self.check_open()?;
        Ok(running)
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

    /// Waits for the running calls.
    pub(crate) async fn quiet(&self) {
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
    }

    /// The cluster's defaults for new topics. Asks for them once.
    pub(crate) async fn defaults(&self) -> Result<Defaults> {
        let asked = self.defaults.get_or_try_init(|| topics::defaults(self));
        asked.await.copied()
    }

    pub(crate) fn admin(&self) -> &AdminClient<Plain> {
        &self.admin
    }

    /// The producer. It is replaced after a fatal error.
    pub(crate) fn producer(&self) -> Arc<Producer> {
        let producer = self.producer.read().clone();
        let Some((kind, reason)) = producer.client().fatal_error() else {
            return producer;
        };
        tracing::warn!(target: "everbus::kafka", %kind, reason, "the producer is made again");
        let context = Plain {
            trouble: self.trouble.clone(),
        };
        let mut known = self.producer.write();
        if Arc::ptr_eq(&known, &producer)
            && let Ok(fresh) = self::producer(&self.config, context, self.timeout)
        {
            *known = Arc::new(fresh);
        }
        known.clone()
    }

    /// A consumer that reads partitions without being a member of a group. It can ask for the committed offsets of
    /// `group`.
    pub(crate) fn reader(&self, group: &str) -> Result<BaseConsumer<Plain>> {
        let mut config = self.config.clone();
        config
            .set("group.id", group)
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("enable.partition.eof", "true")
            .set("auto.offset.reset", "earliest")
            .set("fetch.wait.max.ms", "100");
        let context = Plain {
            trouble: self.trouble.clone(),
        };
        let made = BaseConsumer::from_config_and_context(&config, context);
        made.map_err(|error| refused("a reader cannot be made", &error))
    }

    /// The configuration of the members of groups.
    pub(crate) fn member_config(&self, group: &str, session: Duration) -> ClientConfig {
        let mut config = self.config.clone();
        let heartbeat = (session / 5).min(Duration::from_secs(3));
        config
            .set("group.id", group)
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "earliest")
            .set("partition.assignment.strategy", "cooperative-sticky")
            .set("session.timeout.ms", millis(session))
            .set("heartbeat.interval.ms", millis(heartbeat))
            .set(
                "max.poll.interval.ms",
                millis(session.max(Duration::from_secs(300))),
            )
            .set("queued.min.messages", "5000")
            .set("queued.max.messages.kbytes", "32768")
            // By default, the client rests for a second once it has fetched enough ahead. Quick consumers then wait for it.
            .set("fetch.queue.backoff.ms", "10")
            // A partition that is resumed waits for the fetch under way.
            .set("fetch.wait.max.ms", "100");
        config
    }

    /// The error of a call that got no answer, with what the client said last.
    pub(crate) fn unanswered(&self, what: &str, error: &KafkaError) -> Error {
        let error = refused(what, error);
        match self
            .trouble
            .last()
            .filter(|_| error.code() == Code::Unavailable)
        {
            Some(said) => error.hint(format!("the client said last: {said}")),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: contract/kafka-acks: the client asks for acknowledgements of all copies in sync, and is idempotent
    #[test]
    fn an_event_is_acknowledged_by_all_copies_in_sync() {
        let config = producer_config(&ClientConfig::new(), Duration::from_secs(10));
        assert_eq!(config.get("acks"), Some("all"));
        assert_eq!(config.get("enable.idempotence"), Some("true"));
        // As the Java client does: a key has the same partition, whichever client writes it.
        assert_eq!(config.get("partitioner"), Some("murmur2_random"));
    }
}
