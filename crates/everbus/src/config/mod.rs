//! The configuration file `everbus.yaml`: the file of the framework specification, read strictly.
//!
//! ```
//! use std::time::Duration;
//! use everbus::Config;
//! let config = Config::parse(
//!     "
//! broker:
//!   type: sqlite
//!   url: shop.db
//! consumers:
//!   notification-service:
//!     stream: orders:order-placed
//!     processing_timeout: 30
//! ",
//!     "everbus.yaml",
//! )?;
//! assert_eq!(config.broker_url().as_deref(), Some("sqlite:shop.db"));
//! let consumer = &config.consumers[0];
//! assert_eq!(consumer.pattern.as_str(), "orders.order.placed");
//! assert_eq!(consumer.processing_timeout, Some(Duration::from_secs(30)));
//! # Ok::<(), everbus::Error>(())
//! ```
//!
//! Parsing gives plain data. An invalid file is an `InvalidConfig` error that lists every problem with its
//! line and column; [`Problems::of`] gives them one by one. The book's chapter on configuration lists all
//! keys.

mod alerts;
mod backpressure;
mod broker;
mod consumers;
mod delivery;
mod duration;
mod expand;
mod fingerprint;
mod limits;
mod metrics;
mod overflow;
mod problems;
mod redact;
mod retention;
mod section;
mod server;
mod streams;
mod telemetry;
mod used;
mod yaml;

pub use used::config_used;
pub(crate) use used::note_config;

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use everbus_core::{Result, Retention, Streams};

use crate::admission::Limits;
use crate::overflow::Overflow;

pub use alerts::Alerts;
pub use backpressure::Backpressure;
pub use broker::{Broker, BrokerKind, BrokerUrl};
pub use consumers::{Breaker, Consumer, Retry};
pub use delivery::{Delivery, Exec, Pull, Secret, Webhook};
pub(crate) use fingerprint::Fingerprint;
pub use metrics::Compat;
pub use problems::{Problem, Problems};
pub use redact::redacted;
pub use server::Server;

use expand::{Lookup, environment};
use problems::Place;
use section::Reader;

/// No hand-written configuration is larger.
const LARGEST_FILE: u64 = 1024 * 1024;

const KEYS: &[&str] = &[
    "broker",
    "store",
    "streams",
    "consumers",
    "backpressure",
    "overflow",
    "retention",
    "server",
    "alerts",
    "metrics",
    "telemetry",
];

/// Where each key belongs.
const SECTIONS: &[(&str, &[&str])] = &[
    ("the top of the file", KEYS),
    ("broker", broker::KEYS),
    ("store", broker::KEYS),
    ("streams", limits::KEYS),
    ("streams.declare.NAME", streams::DECLARE_KEYS),
    ("streams.overrides.NAME", limits::OVERRIDE_KEYS),
    ("consumers.NAME", consumers::KEYS),
    ("consumers.NAME.circuit_breaker", consumers::BREAKER_KEYS),
    ("consumers.NAME.retry", consumers::RETRY_KEYS),
    ("consumers.NAME.webhook", delivery::WEBHOOK_KEYS),
    ("consumers.NAME.exec", delivery::EXEC_KEYS),
    ("consumers.NAME.pull", delivery::PULL_KEYS),
    ("backpressure", backpressure::KEYS),
    ("overflow", overflow::KEYS),
    ("retention", retention::KEYS),
    ("server", server::KEYS),
    ("alerts", alerts::KEYS),
    ("metrics", metrics::KEYS),
    ("telemetry", telemetry::KEYS),
    ("telemetry.otlp", telemetry::OTLP_KEYS),
];

/// The content of a configuration file.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// The engine, if the file names one.
    pub broker: Option<Broker>,
    /// The store beside the broker, if the file names one.
    pub store: Option<Broker>,
    /// The declared streams; a single stream with all types if the file declares none.
    pub streams: Streams,
    /// How many events may be pending in each stream, by canonical name.
    pub limits: Limits,
    /// The consumers, in the order of the file.
    pub consumers: Vec<Consumer>,
    /// Which old events are skipped, and the publish rate.
    pub backpressure: Backpressure,
    /// When and where the large parts of events go to an object store, if the file says so.
    pub overflow: Option<Overflow>,
    /// Detects whether the file has changed since the last time.
    pub(crate) fingerprint: Fingerprint,
    /// The retention policy, if the file has one.
    pub retention: Option<Retention>,
    /// How `everbus serve` listens, if the file says so.
    pub server: Option<Server>,
    /// Where alerts are sent, if the file says so.
    pub alerts: Option<Alerts>,
    /// The names that `/metrics` of a server adds to its own (`metrics.compat`).
    pub metrics_compat: Option<Compat>,
    /// Where traces go by OTLP (`telemetry.otlp.endpoint`): an address without `/v1/traces`.
    pub otlp_endpoint: Option<String>,
}

impl Config {
    /// Loads a file. Variables come from the environment of this process.
    ///
    /// A file over 1 MiB is refused; not more than that is read.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut problems = Problems::new(&path.to_string_lossy());
        let Some(text) = read_file(path, &mut problems) else {
            return Err(problems.into_error());
        };
        let mut config = read_text(&text, problems, &environment)?;
        // An absolute path names the same file from every directory.
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        config.fingerprint.file = Some(absolute.to_string_lossy().into_owned());
        Ok(config)
    }

    /// Parses a text. `file` is the name to show in errors; variables come from the environment.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        read_text(text, Problems::new(file), &environment)
    }

    /// Parses a text with the given variables.
    ///
    /// ```
    /// use everbus::Config;
    /// let variables = |name: &str| (name == "FILE").then(|| "shop.db".to_owned());
    /// let config = Config::parse_with("broker: {url: 'sqlite:${FILE}'}", "everbus.yaml", variables)?;
    /// assert_eq!(config.broker_url().as_deref(), Some("sqlite:shop.db"));
    /// # Ok::<(), everbus::Error>(())
    /// ```
    pub fn parse_with(
        text: &str,
        file: &str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        read_text(text, Problems::new(file), &|name| Ok(variable(name)))
    }

    /// The URL for [`Bus::open`](crate::Bus::open), with its secrets.
    pub fn broker_url(&self) -> Option<String> {
        let broker = self.broker.as_ref()?;
        Some(broker.url.reveal().to_owned())
    }

    /// The URL for [`BusBuilder::store`](crate::BusBuilder::store), with its secrets.
    pub fn store_url(&self) -> Option<String> {
        let store = self.store.as_ref()?;
        Some(store.url.reveal().to_owned())
    }
}

/// The text of a file, if it is one.
fn read_file(path: &Path, problems: &mut Problems) -> Option<String> {
    let unreadable = |problems: &mut Problems, error: &std::io::Error| {
        if error.kind() == std::io::ErrorKind::NotFound {
            let hint = "create it, or name another one";
            problems.add_to_file("there is no such file", hint);
        } else {
            let what = format!("the file cannot be read: {error}");
            problems.add_to_file(what, "look at its permissions");
        }
    };
    let opened = File::open(path).and_then(|file| Ok((file.metadata()?.is_dir(), file)));
    let file = match opened {
        Ok((false, file)) => file,
        Ok((true, _)) => {
            let hint = "name a file in it, such as everbus.yaml";
            problems.add_to_file("this is a directory", hint);
            return None;
        }
        Err(error) => {
            unreadable(problems, &error);
            return None;
        }
    };
    let mut bytes = Vec::new();
    // The limit also holds where the size is unknown, as for a pipe.
    if let Err(error) = file.take(LARGEST_FILE + 1).read_to_end(&mut bytes) {
        unreadable(problems, &error);
        return None;
    }
    if bytes.len() as u64 > LARGEST_FILE {
        too_large(problems);
        return None;
    }
    match String::from_utf8(bytes) {
        Ok(text) => Some(text),
        Err(error) => {
            let valid = error.utf8_error().valid_up_to();
            let before = String::from_utf8_lossy(&error.as_bytes()[..valid]).into_owned();
            not_text(problems, &before, "a byte that is not UTF-8");
            None
        }
    }
}

fn too_large(problems: &mut Problems) {
    problems.add_to_file(
        "the file is larger than 1 MiB",
        "a configuration has a few kilobytes; is this the right file?",
    );
}

fn not_text(problems: &mut Problems, before: &str, what: &str) {
    let line = before.matches('\n').count() + 1;
    let start = before.rfind('\n').map_or(0, |at| at + 1);
    let column = before[start..].chars().count() + 1;
    let what = format!("this is not a text: there is {what}");
    let hint = "a configuration is YAML in UTF-8; is this the right file?";
    problems.add(Place { line, column }, what, hint);
}

fn read_text(text: &str, mut problems: Problems, lookup: &Lookup<'_>) -> Result<Config> {
    if text.len() as u64 > LARGEST_FILE {
        too_large(&mut problems);
        return Err(problems.into_error());
    }
    if let Some(at) = text.find('\0') {
        not_text(&mut problems, &text[..at], "a NUL byte");
        return Err(problems.into_error());
    }
    let root = yaml::parse(text, &mut problems);
    let Some(root) = root.filter(|root| !root.is_null()) else {
        if problems.total == 0 {
            let what = if text.trim_start_matches('\u{feff}').trim().is_empty() {
                "the file is empty"
            } else {
                "the file says nothing: it has only comments"
            };
            let hint = "write at least the section broker, or use no file at all";
            problems.add_to_file(what, hint);
        }
        return Err(problems.into_error());
    };
    let mut reader = Reader {
        problems,
        lookup,
        sections: SECTIONS,
    };
    let mut config = reader
        .root(&root, KEYS)
        .map(|top| config(&mut reader, &top))
        .unwrap_or_default();
    if reader.problems.total > 0 {
        return Err(reader.problems.into_error());
    }
    // Computed only for a valid file: a refused one may be very large after aliases are expanded.
    config.fingerprint = Fingerprint::of(&reader.problems.file, &root);
    Ok(config)
}

fn config(reader: &mut Reader<'_>, top: &section::Section<'_>) -> Config {
    let broker = reader.section(top.get("broker"), broker::KEYS);
    let store = reader.section(top.get("store"), broker::KEYS);
    let about_streams = reader.section(top.get("streams"), limits::KEYS);
    let streams = about_streams
        .as_ref()
        .map(|section| streams::read(reader, section))
        .unwrap_or_default();
    let backpressure = reader.section(top.get("backpressure"), backpressure::KEYS);
    let overflow = reader.section(top.get("overflow"), overflow::KEYS);
    let retention = reader.section(top.get("retention"), retention::KEYS);
    let server = reader.section(top.get("server"), server::KEYS);
    let alerts = reader.section(top.get("alerts"), alerts::KEYS);
    let metrics = reader.section(top.get("metrics"), metrics::KEYS);
    let telemetry = reader.section(top.get("telemetry"), telemetry::KEYS);
    Config {
        broker: broker.and_then(|section| broker::read(reader, &section, "broker")),
        store: store.and_then(|section| broker::read_store(reader, &section)),
        limits: about_streams
            .map(|section| limits::read(reader, &section, &streams))
            .unwrap_or_default(),
        consumers: consumers::read(reader, top.get("consumers"), &streams),
        backpressure: backpressure
            .map(|section| backpressure::read(reader, &section))
            .unwrap_or_default(),
        overflow: overflow.map(|section| overflow::read(reader, &section)),
        server: server.map(|section| server::read(reader, &section)),
        alerts: alerts.map(|section| alerts::read(reader, &section)),
        fingerprint: Fingerprint::default(),
        retention: retention.map(|section| retention::read(reader, &section, &streams)),
        metrics_compat: metrics.and_then(|section| metrics::read(reader, &section)),
        otlp_endpoint: telemetry.and_then(|section| telemetry::read(reader, &section)),
        streams,
    }
}
