//! The section `server`: how `everbus serve` listens, and what it allows.

use std::time::Duration;

use super::section::{Reader, Section};

pub(super) const KEYS: &[&str] = &[
    "listen",
    "hosts",
    "origins",
    "tls_cert",
    "tls_key",
    "max_body",
    "max_connections",
    "requests_per_second",
    "private_webhooks",
    "health_check",
    "task_overtime",
    "task_heartbeat",
    "task_pending",
];

const MOST_NAMES: usize = 1000;

/// How the server listens, and what it allows. A setting that is not in the file is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Server {
    /// The address to listen on, such as `127.0.0.1:7770`.
    pub listen: Option<std::net::SocketAddr>,
    /// Host names under which it answers without tokens, besides those of loopback.
    pub hosts: Vec<String>,
    /// Origins whose pages may call it.
    pub origins: Vec<String>,
    /// The certificate, in PEM.
    pub tls_cert: Option<String>,
    /// The key of the certificate, in PEM.
    pub tls_key: Option<String>,
    /// The largest body of a request, in bytes.
    pub max_body: Option<usize>,
    /// The most connections at once.
    pub max_connections: Option<usize>,
    /// Requests per second of one token.
    pub requests_per_second: Option<u32>,
    /// Whether every webhook may go to `http:` and to private addresses.
    pub private_webhooks: bool,
    /// When the health of running tasks is checked: a cron expression, or `off`.
    pub health_check: Option<String>,
    /// A task that runs for longer is not healthy.
    pub task_overtime: Option<Duration>,
    /// The time between two heartbeats of the workers.
    pub task_heartbeat: Option<Duration>,
    /// An alert is sent about a task that waits for a worker for longer.
    pub task_pending: Option<Duration>,
}

pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Server {
    let names = |reader: &mut Reader<'_>, key: &str| -> Vec<String> {
        let items = reader.list(section.get(key), MOST_NAMES, "names");
        let texts = items.into_iter();
        let texts = texts.filter_map(|item| reader.text(Some(item), "a name"));
        texts.map(|text| text.value).collect()
    };
    let (hosts, origins) = (names(reader, "hosts"), names(reader, "origins"));
    let text = |reader: &mut Reader<'_>, key: &str| {
        let text = reader.text(section.get(key), "the name of a file");
        text.map(|text| text.value)
    };
    let (tls_cert, tls_key) = (text(reader, "tls_cert"), text(reader, "tls_key"));
    if tls_cert.is_some() != tls_key.is_some() {
        let what = format!(
            "{} has a certificate without a key, or a key alone",
            section.path()
        );
        let hint = "tls_cert and tls_key belong together";
        reader.problems.add(section.place, what, hint);
    }
    let health_check = reader.text(section.get("health_check"), "a cron expression, or off");
    let listen = reader.text(section.get("listen"), "an address such as 127.0.0.1:7770");
    let listen = listen.and_then(|text| {
        let address = text.value.parse().ok();
        if address.is_none() {
            let hint =
                "an IP address and a port: 127.0.0.1:7770, or 0.0.0.0:7770 for every interface";
            reader.refuse(&text, "which is not an address", hint);
        }
        address
    });
    let mut whole =
        |key: &str, most: u64, what: &str| reader.whole(section.get(key), 1..=most, what);
    let max_body = whole("max_body", 1 << 30, "bytes");
    let max_connections = whole("max_connections", 1_000_000, "connections");
    let requests = whole("requests_per_second", 1_000_000, "requests");
    let private = reader.boolean(section.get("private_webhooks"));
    Server {
        listen,
        hosts,
        origins,
        tls_cert,
        tls_key,
        max_body: max_body.and_then(|n| usize::try_from(n).ok()),
        max_connections: max_connections.and_then(|n| usize::try_from(n).ok()),
        requests_per_second: requests.and_then(|n| u32::try_from(n).ok()),
        private_webhooks: private.unwrap_or(false),
        health_check: health_check.map(|text| text.value),
        task_overtime: reader.duration(section.get("task_overtime")),
        task_heartbeat: reader.duration(section.get("task_heartbeat")),
        task_pending: reader.duration(section.get("task_pending")),
    }
}
