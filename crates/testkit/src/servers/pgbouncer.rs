//! PgBouncer in transaction mode, before a private PostgreSQL.

use std::net::TcpStream;
use std::path::PathBuf;

use super::daemon::Daemon;
use super::postgres::as_user;
use super::{Postgres, directory, free_port, is_root, program, require};

/// A private PgBouncer in transaction mode; dropping it kills it.
#[derive(Debug)]
pub struct PgBouncer {
    daemon: Option<Daemon>,
    port: u16,
    _directory: tempfile::TempDir,
}

impl PgBouncer {
    /// Starts a pooler of five connections for each database of this server.
    pub fn start(server: &Postgres) -> Option<Self> {
        let place = program("pgbouncer", &[PathBuf::from("/usr/sbin")]);
        let place = place.ok_or_else(|| "pgbouncer was not found".to_owned());
        let pgbouncer = require("pgbouncer", "apt-get install pgbouncer", place)?;
        let directory = directory("pgbouncer");
        let file = directory.path().join("pgbouncer.ini");
        for _ in 0..20 {
            let port = free_port();
            let folder = directory.path().display();
            let text = format!(
                "[databases]\n* = host=127.0.0.1 port={} user=postgres\n\
                 [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
                 auth_type = any\npool_mode = transaction\ndefault_pool_size = 5\n\
                 logfile = {folder}/pgbouncer.log\npidfile = {folder}/pgbouncer.pid\n\
                 ignore_startup_parameters = extra_float_digits,search_path\n",
                server.port()
            );
            std::fs::write(&file, text).unwrap();
            if is_root() {
                let mut chown = std::process::Command::new("chown");
                let owned = chown.args(["-R", "postgres:"]).arg(directory.path());
                assert!(owned.status().is_ok_and(|status| status.success()));
            }
            let mut command = as_user(&pgbouncer);
            command.arg(&file);
            let mut daemon = Daemon::spawn(command, directory.path(), "INT");
            if daemon.wait_until(|| TcpStream::connect(("127.0.0.1", port)).is_ok()) {
                return Some(Self {
                    daemon: Some(daemon),
                    port,
                    _directory: directory,
                });
            }
        }
        panic!("pgbouncer does not start");
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a database of the server, through the pooler.
    pub fn through(&self, url: &str) -> String {
        super::proxy::with_port(url, self.port)
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.daemon.take().into_iter().for_each(Daemon::kill);
    }
}
