//! A private PostgreSQL.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use super::daemon::{Daemon, controls};
use super::{Certificates, directory, free_port, is_root, program, require};

const NAME: &str = "postgresql";
const HOW: &str = "apt-get install postgresql";
/// It refuses to run as root.
const USER: &str = "postgres";

/// The options of a server.
#[derive(Clone, Debug, Default)]
pub struct PostgresOptions {
    /// Settings of the server, as `name=value`.
    pub settings: Vec<String>,
    /// The password of the user `postgres`. Without one every connection is trusted.
    pub password: Option<String>,
    /// The files of the certificate and of the key: the server then also takes encrypted connections.
    pub tls: Option<(PathBuf, PathBuf)>,
}

impl PostgresOptions {
    /// Adds a setting of the server: `fsync=off`.
    #[must_use]
    pub fn setting(mut self, setting: &str) -> Self {
        self.settings.push(setting.to_owned());
        self
    }

    /// Takes encrypted connections, with this certificate.
    #[must_use]
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        self.tls = Some((certificates.certificate(), certificates.key()));
        self
    }

    /// Asks every connection for this password.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }
}

/// A private PostgreSQL server; dropping it kills it.
///
/// [`start`](Self::start) gives one that is as durable as by default. [`shared`](Self::shared) gives the one of
/// the test process, without fsync, for tests that do not kill it.
#[derive(Debug)]
pub struct Postgres {
    running: Mutex<Option<Daemon>>,
    programs: PathBuf,
    port: u16,
    options: PostgresOptions,
    databases: AtomicU32,
    // After the server: it is removed last.
    directory: tempfile::TempDir,
}

impl Postgres {
    /// Starts a server with the default settings: it syncs every commit.
    pub fn start() -> Option<Self> {
        Self::start_with(PostgresOptions::default())
    }

    /// Starts a server with these options.
    pub fn start_with(options: PostgresOptions) -> Option<Self> {
        let programs = require(NAME, HOW, programs())?;
        Some(Self::initialise(programs, options))
    }

    /// The server of this test process. It does not sync: for tests that do not kill it.
    pub fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Postgres>> = OnceLock::new();
        let quick = || {
            let options = PostgresOptions::default().setting("fsync=off");
            let options = options.setting("full_page_writes=off");
            Self::start_with(options.setting("max_connections=500"))
        };
        SHARED.get_or_init(quick).as_ref()
    }

    fn initialise(programs: PathBuf, options: PostgresOptions) -> Self {
        let directory = directory("postgres");
        if is_root() {
            let owner = format!("{USER}:");
            succeed(Command::new("chown").arg(owner).arg(directory.path()));
        }
        let mut initdb = as_user(&programs.join("initdb"));
        initdb.arg("-D").arg(directory.path().join("data"));
        initdb.args(["-U", USER, "--no-sync", "--locale=C", "-E", "UTF8"]);
        if let Some(password) = &options.password {
            let file = directory.path().join("password");
            std::fs::write(&file, password).unwrap();
            initdb.args(["-A", "scram-sha-256"]);
            initdb.arg(format!("--pwfile={}", file.display()));
        } else {
            initdb.args(["-A", "trust"]);
        }
        succeed(&mut initdb);
        if let Some((certificate, key)) = &options.tls {
            // It refuses a key that others may read.
            for (file, name) in [(certificate, "server.crt"), (key, "server.key")] {
                let mut install = Command::new("install");
                install.args(["-m", "600"]);
                if is_root() {
                    install.args(["-o", USER]);
                }
                succeed(
                    install
                        .arg(file)
                        .arg(directory.path().join("data").join(name)),
                );
            }
        }
        let mut server = Self {
            running: Mutex::default(),
            programs,
            port: 0,
            options,
            databases: AtomicU32::new(0),
            directory,
        };
        for _ in 0..20 {
            server.port = free_port();
            if server.launch() {
                return server;
            }
        }
        panic!("PostgreSQL does not start: {}", server.log());
    }

    /// Starts the process and waits until it answers. False if it ended.
    fn launch(&self) -> bool {
        let mut command = as_user(&self.programs.join("postgres"));
        command.arg("-D").arg(self.directory.path().join("data"));
        command.args(["-p", &self.port.to_string()]);
        let sockets = format!(
            "unix_socket_directories={}",
            self.directory.path().display()
        );
        let fixed = [
            "listen_addresses=127.0.0.1",
            &sockets,
            "recovery_init_sync_method=syncfs",
            "max_prepared_transactions=8",
            "log_min_messages=warning",
        ];
        let own = self.options.settings.iter().map(String::as_str);
        let tls = self.options.tls.as_ref().map(|_| "ssl=on");
        for setting in fixed.into_iter().chain(own).chain(tls) {
            command.args(["-c", setting]);
        }
        let mut daemon = Daemon::spawn(command, self.directory.path(), "QUIT");
        let answers = daemon.wait_until(|| self.psql("SELECT 1").is_ok());
        *self.lock() = Some(daemon);
        answers
    }

    /// The URL of the database `postgres`.
    pub fn url(&self) -> String {
        self.database_url("postgres")
    }

    fn database_url(&self, database: &str) -> String {
        let password = self.options.password.as_deref();
        let password = password.map_or_else(String::new, |p| format!(":{p}"));
        format!(
            "postgres://{USER}{password}@127.0.0.1:{}/{database}",
            self.port
        )
    }

    /// Its port on 127.0.0.1. It stays the same after a restart.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder with its programs (`psql`, `pg_dump`, …).
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Makes an empty database and returns its URL.
    pub fn fresh_database(&self) -> String {
        let n = self.databases.fetch_add(1, Ordering::Relaxed);
        let name = format!("test_{n}");
        self.sql(&format!("CREATE DATABASE {name} TEMPLATE template0"));
        self.database_url(&name)
    }

    /// Removes a database that [`fresh_database`](Self::fresh_database) made, and its connections.
    pub fn drop_database(&self, url: &str) {
        let name = url.rsplit('/').next().unwrap_or_default();
        self.sql(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"));
    }

    /// Runs statements in the database `postgres` and returns their rows, one per line, columns separated by `|`.
    pub fn sql(&self, statements: &str) -> String {
        let rows = self.psql(statements);
        rows.unwrap_or_else(|said| panic!("{statements}: {said}"))
    }

    fn psql(&self, statements: &str) -> Result<String, String> {
        self.psql_at(&self.url(), statements)
    }

    /// As [`sql`](Self::sql), in the database of this URL.
    pub fn sql_at(&self, url: &str, statements: &str) -> String {
        let rows = self.psql_at(url, statements);
        rows.unwrap_or_else(|said| panic!("{statements}: {said}"))
    }

    fn psql_at(&self, url: &str, statements: &str) -> Result<String, String> {
        let ran = Command::new(self.programs.join("psql"))
            .args(["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-d", url])
            .args(["-c", statements])
            .env("PGCONNECT_TIMEOUT", "30")
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("psql: {e}"))?;
        if ran.status.success() {
            return Ok(String::from_utf8_lossy(&ran.stdout).trim().to_owned());
        }
        Err(String::from_utf8_lossy(&ran.stderr).into_owned())
    }

    /// Kills the server if it runs, and starts it again with the same data on the same port.
    pub fn restart(&self) {
        self.kill();
        for _ in 0..20 {
            if self.launch() {
                return;
            }
        }
        panic!("PostgreSQL does not start again: {}", self.log());
    }

    /// Restarts the server as a replica: it takes no writes and waits for a primary that never comes.
    pub fn restart_as_replica(&self) {
        self.kill();
        // The server only reads this file, so it need not own it.
        std::fs::write(self.directory.path().join("data/standby.signal"), "").unwrap();
        self.restart();
    }

    /// A failover: the server is killed, another one starts on this port with its data, and this one comes back as a
    /// replica. The port is that of [`free_port`](super::free_port).
    pub fn fail_over(&self, port: u16) -> Self {
        self.kill();
        let folder = directory("postgres");
        if is_root() {
            let owner = format!("{USER}:");
            succeed(Command::new("chown").arg(owner).arg(folder.path()));
        }
        let data = self.directory.path().join("data");
        succeed(Command::new("cp").arg("-a").arg(data).arg(folder.path()));
        let next = Self {
            running: Mutex::default(),
            programs: self.programs.clone(),
            port,
            options: self.options.clone(),
            databases: AtomicU32::new(self.databases.load(Ordering::Relaxed)),
            directory: folder,
        };
        next.restart();
        self.restart_as_replica();
        next
    }
}

controls!(Postgres);

/// The folder with the programs of the newest version.
fn programs() -> Result<PathBuf, String> {
    let chosen = std::env::var_os("EVERBUS_POSTGRES").map(PathBuf::from);
    let versions = std::fs::read_dir("/usr/lib/postgresql");
    let versions = versions.into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = versions.map(|version| version.path()).collect();
    let number = |folder: &PathBuf| {
        let name = folder.file_name().and_then(|name| name.to_str());
        name.and_then(|name| name.parse::<u32>().ok())
    };
    folders.sort_by_key(|folder| std::cmp::Reverse(number(folder)));
    let folders = folders.into_iter().map(|folder| folder.join("bin"));
    let folders: Vec<PathBuf> = chosen.into_iter().chain(folders).collect();
    let initdb = program("initdb", &folders).ok_or("initdb was not found")?;
    let folder = initdb.parent().map(Path::to_owned).unwrap_or_default();
    for name in ["postgres", "psql"] {
        if !folder.join(name).is_file() {
            return Err(format!("{} has no {name}", folder.display()));
        }
    }
    Ok(folder)
}

/// A command that does not run as root.
pub(super) fn as_user(program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.arg(format!("--reuid={USER}"));
    command.arg(format!("--regid={USER}"));
    command.arg("--init-groups").arg(program);
    command
}

fn succeed(command: &mut Command) {
    let ran = command.current_dir("/").stdin(Stdio::null()).output();
    let ran = ran.unwrap_or_else(|e| panic!("cannot run {command:?}: {e}"));
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{command:?}: {said}");
}
