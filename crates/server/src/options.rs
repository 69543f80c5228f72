//! The settings of a server.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use everbus::Config;
use everbus::config::{Alerts, Compat};
use everbus_jobs::health::Thresholds;

/// The settings of a server. The default is a development server on `127.0.0.1:7770`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// Names that are allowed in the `Host` header, besides the loopback names. Checked while the server needs no
    /// token: otherwise a page of another site could reach the server under its own host name (DNS rebinding).
    pub hosts: Vec<String>,
    /// Origins whose pages may call the API, such as `https://ops.example.com`, besides the server's own.
    pub origins: Vec<String>,
    /// The certificate and the key, if the server itself uses TLS.
    pub tls: Option<Tls>,
    /// Limits for HTTP clients.
    pub limits: Limits,
    /// Limits for clients of the WebSocket.
    pub websocket: WebSocketLimits,
    /// Additional names of metrics, besides those that begin with `everbus_`.
    pub metrics_compat: Vec<MetricsCompat>,
    /// Whether the server runs the demo, a small shop.
    pub demo: bool,
    /// Whether webhooks may use `http:` and private addresses, for development and internal networks.
    pub private_webhooks: bool,
    /// The file of the task index. It is built from the events, so it can be deleted. `None`: the index is in memory.
    pub task_index: Option<PathBuf>,
    /// When the health of running tasks is checked, as a cron expression. `None`: never.
    pub health_check: Option<String>,
    /// The limits beyond which a task is not healthy, or waits too long.
    pub task_health: Thresholds,
    /// The webhooks for alerts and job ends.
    pub alerts: Alerts,
}

impl ServerOptions {
    /// The settings of a configuration file; defaults for the rest.
    pub fn from_config(config: &Config) -> Self {
        let mut options = Self {
            metrics_compat: match config.metrics_compat {
                Some(Compat::Omni) => vec![MetricsCompat::Omni],
                Some(Compat::Framework) => vec![MetricsCompat::Framework],
                _ => Vec::new(),
            },
            alerts: config.alerts.clone().unwrap_or_default(),
            ..Self::default()
        };
        let Some(server) = &config.server else {
            return options;
        };
        if let Some(listen) = server.listen {
            options.listen = listen;
        }
        options.hosts.clone_from(&server.hosts);
        options.origins.clone_from(&server.origins);
        if let (Some(cert), Some(key)) = (&server.tls_cert, &server.tls_key) {
            options.tls = Some(Tls {
                cert: cert.into(),
                key: key.into(),
            });
        }
        if let Some(bytes) = server.max_body {
            options.limits.body = bytes;
            options.limits.decoded_body = bytes.saturating_mul(4);
        }
        if let Some(most) = server.max_connections {
            options.limits.connections = most;
        }
        options.limits.requests_per_second = server.requests_per_second;
        options.private_webhooks = server.private_webhooks;
        match server.health_check.as_deref() {
            Some("off") => options.health_check = None,
            Some(cron) => options.health_check = Some(cron.to_owned()),
            None => {}
        }
        let health = &mut options.task_health;
        for (given, threshold) in [
            (server.task_overtime, &mut health.overtime),
            (server.task_heartbeat, &mut health.heartbeat),
            (server.task_pending, &mut health.pending),
        ] {
            *threshold = given.unwrap_or(*threshold);
        }
        options
    }
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 7770)),
            hosts: Vec::new(),
            origins: Vec::new(),
            tls: None,
            limits: Limits::default(),
            websocket: WebSocketLimits::default(),
            metrics_compat: Vec::new(),
            demo: false,
            private_webhooks: false,
            task_index: None,
            health_check: Some("*/5 * * * *".to_owned()),
            task_health: Thresholds::default(),
            alerts: Alerts::default(),
        }
    }
}

/// The files of a certificate, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The certificate and its chain.
    pub cert: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// Bounds on what clients send, so that no client can exhaust the server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// The largest body as it is sent, in bytes.
    pub body: usize,
    /// The largest body after decompression, in bytes.
    pub decoded_body: usize,
    /// The most events in one request.
    pub batch: usize,
    /// The most connections at once.
    pub connections: usize,
    /// The time in which the headers of a request must arrive.
    pub header_timeout: Duration,
    /// The time in which the body of a request must arrive.
    pub body_timeout: Duration,
    /// How long a search may take that no index answers. Then the page says that it was stopped.
    pub search: Duration,
    /// Requests per second of one token, or of one address without a token. `None`: no limit.
    pub requests_per_second: Option<u32>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body: 16 << 20,
            decoded_body: 64 << 20,
            batch: 10_000,
            connections: 4096,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            search: Duration::from_secs(2),
            requests_per_second: None,
        }
    }
}

/// Bounds on one client of the WebSocket.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WebSocketLimits {
    /// The most listeners at once, of the WebSocket and of server-sent events.
    pub connections: usize,
    /// The largest message of a client, in bytes.
    pub frame_bytes: usize,
    /// The most subscriptions of a connection.
    pub subscriptions: usize,
    /// The most messages of a client in a second.
    pub messages_per_second: u32,
    /// The most messages that wait for a client; a client that has more is disconnected.
    pub queued: usize,
    /// How often the server sends a ping.
    pub ping_every: Duration,
    /// The time in which the client must answer a ping.
    pub pong_within: Duration,
    /// A client that misses this many answers in a row is disconnected.
    pub missed_pongs: u32,
}

impl Default for WebSocketLimits {
    fn default() -> Self {
        Self {
            connections: 2048,
            frame_bytes: 64 << 10,
            subscriptions: 100,
            messages_per_second: 50,
            queued: 1000,
            ping_every: Duration::from_secs(30),
            pong_within: Duration::from_secs(10),
            missed_pongs: 2,
        }
    }
}

/// Names of metrics that a specification asks for, besides those under `everbus_`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsCompat {
    /// `omni_events_total` and related names.
    Omni,
    /// `consumer_lag_events` and related names.
    Framework,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thresholds_of_the_health_check_are_settings() {
        let text = "server: {task_overtime: 2h, task_heartbeat: 60s, task_pending: 1h}";
        let config = Config::parse(text, "everbus.yaml").unwrap();
        let hour = Duration::from_secs(3600);
        let wanted = Thresholds::default()
            .overtime(2 * hour)
            .heartbeat(Duration::from_secs(60))
            .pending(hour);
        assert_eq!(ServerOptions::from_config(&config).task_health, wanted);
    }
}
