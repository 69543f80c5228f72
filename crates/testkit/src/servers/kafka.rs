//! A private Apache Kafka server (KRaft, one node), and a cluster of three.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, OnceLock};
use std::time::Duration;

use super::daemon::{Daemon, controls};
use super::{Certificates, cache, directory, free_port, program, require};

const NAME: &str = "Apache Kafka";
const HOW: &str = "cargo xtask test installs it with Maven and Java 17";
/// `xtask/src/servers.rs` has the same name.
const FOLDER: &str = "kafka-4.3.1";

/// The options of a server. By default it accepts every client and has the usual limits.
#[derive(Clone, Debug, Default)]
pub struct KafkaOptions {
    behind_proxy: bool,
    with_users: bool,
    tls: Option<Tls>,
    more: String,
}

/// A listener with TLS.
#[derive(Clone, Debug)]
struct Tls {
    port: u16,
    /// The key of the server and its certificate.
    pem: String,
}

impl KafkaOptions {
    /// The server accepts only this user (SASL, PLAIN).
    #[must_use]
    pub fn user(mut self, user: &str, password: &str) -> Self {
        self.with_users = true;
        self.config(&format!(
            "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:SASL_PLAINTEXT\n\
             sasl.enabled.mechanisms=PLAIN\nsasl.mechanism.inter.broker.protocol=PLAIN\n\
             listener.name.plaintext.plain.sasl.jaas.config=\
             org.apache.kafka.common.security.plain.PlainLoginModule required username=\"broker\" \
             password=\"broker\" user_broker=\"broker\" user_{user}=\"{password}\";"
        ))
    }

    /// The server also listens with TLS, at [`Kafka::tls_url`].
    #[must_use]
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
        self.tls = Some(Tls {
            port: free_port(),
            pem: read(certificates.key()) + &read(certificates.certificate()),
        });
        self
    }

    /// Clients are sent to [`Kafka::proxy_port`], where a proxy must listen: a client of Kafka asks for the
    /// address of each broker, and would go around a proxy.
    #[must_use]
    pub fn behind_proxy(mut self) -> Self {
        self.behind_proxy = true;
        self
    }

    /// More lines of the server's properties. A later line wins over an earlier one.
    #[must_use]
    pub fn config(mut self, lines: &str) -> Self {
        self.more.push_str(lines);
        self.more.push('\n');
        self
    }
}

/// What a node needs to start again as it was.
#[derive(Debug)]
struct Node {
    id: usize,
    port: u16,
    controller: u16,
    /// The port that clients are sent to.
    advertised: u16,
    /// All controllers, `1@127.0.0.1:port` each.
    voters: String,
}

/// A private Kafka server; dropping it kills it.
#[derive(Debug)]
pub struct Kafka {
    running: Mutex<Option<Daemon>>,
    home: PathBuf,
    java: PathBuf,
    node: Node,
    nodes: usize,
    options: KafkaOptions,
    used: AtomicU32,
    // After the server: it is removed last.
    directory: tempfile::TempDir,
}

impl Kafka {
    /// Whether the tests with Kafka are to run (`EVERBUS_KAFKA=1`).
    pub fn is_asked_for() -> bool {
        std::env::var("EVERBUS_KAFKA").is_ok_and(|set| set == "1")
    }

    /// Starts a server with these options.
    pub fn start(options: &KafkaOptions) -> Option<Self> {
        let (home, java) = found()?;
        for _ in 0..10 {
            let (port, controller) = (free_port(), free_port());
            let node = Node {
                id: 1,
                port,
                controller,
                advertised: match options.behind_proxy {
                    true => free_port(),
                    false => port,
                },
                voters: format!("1@127.0.0.1:{controller}"),
            };
            let kafka = Self::new(home.clone(), java.clone(), node, 1, options.clone());
            kafka.spawn();
            if kafka.is_ready() {
                return Some(kafka);
            }
        }
        panic!("Kafka does not start");
    }

    /// The server of this test process. Tests have spaces of their own on it.
    pub fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Kafka>> = OnceLock::new();
        // Some scenarios have events of a megabyte.
        let options = || KafkaOptions::default().config("message.max.bytes=8388608");
        SHARED.get_or_init(|| Self::start(&options())).as_ref()
    }

    fn new(home: PathBuf, java: PathBuf, node: Node, nodes: usize, options: KafkaOptions) -> Self {
        let directory = directory("kafka");
        let template = home.join(format!("template-{}", node.id));
        copy(&template, &directory.path().join("data"));
        Self {
            running: Mutex::default(),
            home,
            java,
            node,
            nodes,
            options,
            used: AtomicU32::new(0),
            directory,
        }
    }

    fn properties(&self) -> String {
        let Node {
            id,
            port,
            controller,
            advertised,
            voters,
        } = &self.node;
        let data = self.directory.path().join("data");
        let (copies, in_sync) = match self.nodes {
            1 => (1, 1),
            nodes => (nodes, nodes - 1),
        };
        let mut text = format!(
            "process.roles=broker,controller\nnode.id={id}\ncontroller.quorum.voters={voters}\n\
             listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n\
             advertised.listeners=PLAINTEXT://127.0.0.1:{advertised}\n\
             listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n\
             controller.listener.names=CONTROLLER\ninter.broker.listener.name=PLAINTEXT\nlog.dirs={}\n\
             num.partitions=1\noffsets.topic.num.partitions=1\ntransaction.state.log.num.partitions=1\n\
             share.coordinator.state.topic.num.partitions=1\ngroup.initial.rebalance.delay.ms=0\n\
             group.min.session.timeout.ms=500\nauto.create.topics.enable=false\n\
             log.index.size.max.bytes=262144\n",
            data.display()
        );
        for topic in [
            "offsets.topic",
            "transaction.state.log",
            "share.coordinator.state.topic",
        ] {
            let _ = writeln!(text, "{topic}.replication.factor={copies}");
        }
        for topic in ["transaction.state.log", "share.coordinator.state.topic"] {
            let _ = writeln!(text, "{topic}.min.isr={in_sync}");
        }
        // Short, so that the other nodes, and the node itself when it starts again, soon notice that it was killed.
        text.push_str(match self.nodes {
            1 => "broker.session.timeout.ms=1500\nbroker.heartbeat.interval.ms=300\n",
            _ => {
                "broker.session.timeout.ms=3000\nbroker.heartbeat.interval.ms=500\n\
                 replica.lag.time.max.ms=5000\ndefault.replication.factor=3\nmin.insync.replicas=2\n"
            }
        });
        if let Some(tls) = &self.options.tls {
            let tls = tls.port;
            let _ = write!(
                text,
                "listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},TLS://127.0.0.1:{tls}\n\
                 advertised.listeners=PLAINTEXT://127.0.0.1:{advertised},TLS://127.0.0.1:{tls}\n\
                 listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,TLS:SSL\n\
                 ssl.keystore.type=PEM\nssl.keystore.location={}\n",
                self.pem().display()
            );
        }
        text + &self.options.more
    }

    fn pem(&self) -> PathBuf {
        self.directory.path().join("server.pem")
    }

    fn spawn(&self) {
        let folder = self.directory.path();
        if let Some(tls) = &self.options.tls {
            std::fs::write(self.pem(), &tls.pem).unwrap();
        }
        let file = folder.join("server.properties");
        std::fs::write(&file, self.properties()).unwrap();
        let mut command = Command::new(&self.java);
        let heap = if self.nodes == 1 {
            "-Xmx320m"
        } else {
            "-Xmx384m"
        };
        command.args([
            heap,
            "-Xms64m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
        ]);
        let archive = self.home.join("kafka.jsa");
        if archive.is_file() {
            command.arg(format!("-XX:SharedArchiveFile={}", archive.display()));
        }
        command.arg("-cp").arg(self.home.join("libs").join("*"));
        command.arg("kafka.Kafka").arg(&file);
        *self.lock() = Some(Daemon::spawn(command, folder, "KILL"));
    }

    /// Waits until it says that all nodes are there. False if it ended.
    fn is_ready(&self) -> bool {
        let mut running = self.lock();
        let ready = || match self.options.with_users {
            // Without a user it only says which requests it takes.
            true => ask(self.node.port, 18, &[]).is_some(),
            false => brokers(self.node.port).is_some_and(|known| known >= self.nodes),
        };
        let daemon = running.as_mut();
        daemon.is_some_and(|daemon| daemon.wait_until(ready))
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("kafka://127.0.0.1:{}", self.node.port)
    }

    /// The URL of its listener with TLS.
    pub fn tls_url(&self) -> String {
        let tls = self.options.tls.as_ref();
        format!("kafka://127.0.0.1:{}", tls.map_or(0, |tls| tls.port))
    }

    /// The URL of a space on it that no other test uses: it has no topics yet.
    pub fn fresh_space(&self) -> String {
        let n = self.used.fetch_add(1, Ordering::Relaxed);
        format!("{}/t{n}", self.url())
    }

    /// Its port on 127.0.0.1. It stays the same after a restart.
    pub fn port(&self) -> u16 {
        self.node.port
    }

    /// The port that it sends clients to: its own, unless it is behind a proxy.
    pub fn proxy_port(&self) -> u16 {
        self.node.advertised
    }

    /// Kills the server if it runs, starts it again with the same data on the same ports, and waits until it
    /// answers.
    pub fn restart(&self) {
        self.kill();
        for _ in 0..10 {
            self.spawn();
            if self.is_ready() {
                return;
            }
        }
        panic!("Kafka does not start again: {}", self.log());
    }
}

controls!(Kafka);

/// Three Kafka servers that form a cluster; dropping it kills them. Topics have three copies, two of which must
/// have a record before it is acknowledged.
#[derive(Debug)]
pub struct KafkaCluster {
    nodes: Vec<Kafka>,
}

impl KafkaCluster {
    /// Starts three nodes and waits until each knows the others.
    pub fn start(options: &KafkaOptions) -> Option<Self> {
        let (home, java) = found()?;
        for _ in 0..10 {
            let controllers: Vec<u16> = (0..3).map(|_| free_port()).collect();
            let voters = controllers.iter().zip(1..);
            let voters = voters.map(|(port, id)| format!("{id}@127.0.0.1:{port}"));
            let voters = voters.collect::<Vec<_>>().join(",");
            let node = |n: usize| {
                let port = free_port();
                let node = Node {
                    id: n + 1,
                    port,
                    controller: controllers[n],
                    advertised: match options.behind_proxy {
                        true => free_port(),
                        false => port,
                    },
                    voters: voters.clone(),
                };
                let kafka = Kafka::new(home.clone(), java.clone(), node, 3, options.clone());
                kafka.spawn();
                kafka
            };
            let nodes: Vec<Kafka> = (0..3).map(node).collect();
            // A node ends if another program took its port first.
            if nodes.iter().all(Kafka::is_ready) {
                return Some(Self { nodes });
            }
        }
        panic!("the Kafka cluster does not start");
    }

    /// The URL of all nodes.
    pub fn url(&self) -> String {
        let hosts = self.nodes.iter();
        let hosts = hosts.map(|node| format!("127.0.0.1:{}", node.port()));
        format!("kafka://{}", hosts.collect::<Vec<_>>().join(","))
    }

    /// How many nodes it has.
    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// A node: `0`, `1` or `2`. Its `node.id` is one more.
    pub fn node(&self, n: usize) -> &Kafka {
        &self.nodes[n]
    }
}

/// The paths of the server and of Java; or `None`, with a message, if one of them is missing. Its tests take
/// minutes, so they run only on request.
fn found() -> Option<(PathBuf, PathBuf)> {
    if Kafka::is_asked_for() {
        return require(NAME, HOW, find());
    }
    static SAID: Once = Once::new();
    // Not `eprintln!`: the test runner would capture it.
    SAID.call_once(|| {
        let line = format!("SKIPPED: tests with {NAME}: they run by hand, with EVERBUS_KAFKA=1\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    });
    None
}

fn find() -> Result<(PathBuf, PathBuf), String> {
    let home = cache().join(FOLDER);
    if !home.join("template-3").is_dir() {
        return Err(format!("it is not in {}", home.display()));
    }
    let java = program("java", &[]).ok_or("there is no java")?;
    Ok((home, java))
}

/// How many brokers a node knows: metadata about no topic.
fn brokers(port: u16) -> Option<usize> {
    let answer = ask(port, 3, &0_i32.to_be_bytes())?;
    usize::try_from(answer).ok()
}

/// Sends a request in the protocol of Kafka, in its version 0 or 1, and returns the first number of the answer.
fn ask(port: u16, request: i16, body: &[u8]) -> Option<i32> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let version = i16::from(request == 3);
    // The kind of the request, its version, a number for the answer, no client id.
    let message = [
        &request.to_be_bytes()[..],
        &version.to_be_bytes(),
        &7_i32.to_be_bytes(),
        &(-1_i16).to_be_bytes(),
        body,
    ]
    .concat();
    let length = i32::try_from(message.len()).ok()?;
    stream.write_all(&length.to_be_bytes()).ok()?;
    stream.write_all(&message).ok()?;
    // Length, the number of the request, and what was asked for.
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).ok()?;
    Some(i32::from_be_bytes(answer[8..].try_into().ok()?))
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}
