//! The private servers: what a test does to them happens, and they end with their test.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpStream as Plain;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use everbus_testkit::servers::{
    Flavour, Nats, NatsCluster, NatsOptions, PgBouncer, Postgres, PostgresOptions, Proxy, Redis,
    RedisOptions,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const PATIENCE: Duration = Duration::from_secs(60);

/// Whether a server takes connections on a port.
fn listens(port: u16) -> bool {
    Plain::connect(("127.0.0.1", port)).is_ok()
}

// conformance: contract/test-postgres: tests have a private PostgreSQL that they kill, restart and pause
// needs: PostgreSQL
#[test]
fn postgres_is_killed_restarted_and_paused() {
    let Some(server) = Postgres::start() else {
        return;
    };
    let database = server.fresh_database();
    server.sql_at(&database, "CREATE TABLE t AS SELECT 42 AS n");
    server.kill();
    assert!(!listens(server.port()));
    server.restart();
    assert_eq!(server.sql_at(&database, "SELECT n FROM t"), "42");
    server.pause();
    // It does not answer while it is paused, and the same connection is answered after that.
    let mut client = Plain::connect(("127.0.0.1", server.port())).unwrap();
    let wants_ssl = [0, 0, 0, 8, 4, 210, 22, 47];
    std::io::Write::write_all(&mut client, &wants_ssl).unwrap();
    let short = Some(Duration::from_millis(300));
    client.set_read_timeout(short).unwrap();
    assert!(client.read(&mut [0]).is_err(), "it is paused");
    server.resume();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 1);
    server.drop_database(&database);
    server.restart_as_replica();
    assert_eq!(server.sql("SELECT pg_is_in_recovery()"), "t");
}

// needs: PostgreSQL
#[test]
fn postgres_asks_for_its_password() {
    let options = PostgresOptions::default().password("secret");
    let Some(server) = Postgres::start_with(options.setting("max_connections=20")) else {
        return;
    };
    assert_eq!(server.sql("SHOW max_connections"), "20");
    let wrong = server.url().replace("secret", "wrong");
    let psql = Command::new(server.programs().join("psql"))
        .args(["-X", "-d", &wrong, "-c", "SELECT 1"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&psql.stderr);
    assert!(said.contains("password authentication failed"), "{said}");
}

// conformance: contract/test-pooler: tests have a pooler in transaction mode before their PostgreSQL
// needs: PostgreSQL, PgBouncer
#[test]
fn a_pooler_stands_before_a_database() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let Some(mut pooler) = PgBouncer::start(server) else {
        return;
    };
    let database = server.fresh_database();
    let through = pooler.through(&database);
    assert_ne!(through, database);
    server.sql_at(&through, "CREATE TABLE t AS SELECT 7 AS n");
    assert_eq!(server.sql_at(&database, "SELECT n FROM t"), "7");
    pooler.kill();
    assert!(!listens(pooler.port()));
}

// conformance: contract/test-nats: tests have a private NATS server that they kill, restart and pause
// needs: nats-server
#[test]
fn nats_is_killed_restarted_and_paused() {
    let options = NatsOptions::default()
        .user("me", "secret")
        .max_payload(4096);
    let Some(server) = Nats::start(options) else {
        return;
    };
    assert!(server.url().starts_with("nats://me:secret@127.0.0.1:"));
    let told = |server: &Nats| {
        let client = Plain::connect(("127.0.0.1", server.port())).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut line = String::new();
        BufReader::new(client).read_line(&mut line).unwrap();
        line
    };
    let info = told(&server);
    assert!(info.contains("\"jetstream\":true"), "{info}");
    assert!(info.contains("\"auth_required\":true"), "{info}");
    assert!(info.contains("\"max_payload\":4096"), "{info}");
    server.kill();
    assert!(!listens(server.port()));
    server.restart();
    server.pause();
    let mut client = Plain::connect(("127.0.0.1", server.port())).unwrap();
    let short = Some(Duration::from_millis(300));
    client.set_read_timeout(short).unwrap();
    assert!(client.read(&mut [0]).is_err(), "it is paused");
    server.resume();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 1);
    let Some(server) = Nats::start(NatsOptions::default().without_jetstream().token("t")) else {
        return;
    };
    assert!(!told(&server).contains("\"jetstream\":true"));
}

// needs: nats-server
#[test]
fn each_test_has_an_account_of_the_shared_nats() {
    let Some(server) = Nats::shared() else {
        return;
    };
    assert_ne!(server.fresh_account(), server.fresh_account());
    assert!(server.monitor("/varz").unwrap()["jetstream"].is_object());
}

// conformance: contract/test-cluster: tests have a cluster of three NATS servers and know which one leads a stream
// needs: nats-server
#[test]
fn three_nats_servers_elect_a_leader() {
    let Some(cluster) = NatsCluster::start() else {
        return;
    };
    assert_eq!(cluster.urls().len(), 3);
    // A stream with three copies, made with two lines of the protocol.
    let mut client = Plain::connect(("127.0.0.1", cluster.node(0).port())).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let body = r#"{"name":"S","subjects":["s"],"num_replicas":3,"storage":"file"}"#;
    let lines = format!(
        "CONNECT {{\"verbose\":false}}\r\nSUB answer 1\r\nPUB $JS.API.STREAM.CREATE.S answer {}\r\n{body}\r\n",
        body.len()
    );
    std::io::Write::write_all(&mut client, lines.as_bytes()).unwrap();
    let mut lines = BufReader::new(client).lines();
    let created = lines.any(|line| line.unwrap().contains("stream_create_response"));
    assert!(created);
    let first = cluster.leader_of("S");
    cluster.node(first).kill();
    assert!(!listens(cluster.node(first).port()));
    cluster.node(first).restart();
    assert!(cluster.leader_of("S") < 3);
}

/// Answers each line with the same line.
async fn echo() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = client.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    port
}

async fn say(client: &mut TcpStream, text: &str) -> Option<String> {
    client.write_all(text.as_bytes()).await.ok()?;
    let mut answer = vec![0; text.len()];
    client.read_exact(&mut answer).await.ok()?;
    String::from_utf8(answer).ok()
}

// conformance: contract/test-proxy: a proxy of the test kit cuts after a request and before its reply, delays, and swallows everything
#[tokio::test]
async fn a_proxy_cuts_where_it_is_told() {
    let proxy = Proxy::start(echo().await).await;
    let connect = || async { TcpStream::connect(("127.0.0.1", proxy.port())).await };
    let mut client = connect().await.unwrap();
    assert_eq!(say(&mut client, "one").await.as_deref(), Some("one"));
    // Only the second request with the word loses its answer.
    proxy.cut_before_reply_to(b"word", 2);
    for text in ["word 1", "other"] {
        assert_eq!(say(&mut client, text).await.as_deref(), Some(text));
    }
    assert!(proxy.is_armed());
    assert_eq!(say(&mut client, "word 2").await, None);
    assert!(!proxy.is_armed());
    let mut client = connect().await.unwrap();
    assert_eq!(say(&mut client, "again").await.as_deref(), Some("again"));
    proxy.cut();
    assert_eq!(say(&mut client, "more").await, None);
    assert_eq!((proxy.cuts(), proxy.connections()), (2, 2));
    assert_eq!(
        proxy.through("nats://a:b@127.0.0.1:4222/x"),
        format!("nats://a:b@127.0.0.1:{}/x", proxy.port())
    );
}

#[tokio::test]
async fn a_proxy_holds_back_what_it_swallowed_until_it_heals() {
    let proxy = Proxy::start(echo().await).await;
    let mut client = TcpStream::connect(("127.0.0.1", proxy.port()))
        .await
        .unwrap();
    assert_eq!(say(&mut client, "one").await.as_deref(), Some("one"));
    proxy.black_hole();
    let swallowed = tokio::time::timeout(Duration::from_millis(300), say(&mut client, "two"));
    assert!(swallowed.await.is_err(), "nothing comes back");
    proxy.heal();
    let mut answer = [0; 3];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"two");
    let late = Duration::from_millis(50);
    proxy.delay(late);
    let begin = Instant::now();
    assert_eq!(say(&mut client, "three").await.as_deref(), Some("three"));
    assert!(begin.elapsed() >= 2 * late, "both ways");
}

/// Not a test of its own: the process that the next test kills.
#[test]
#[ignore = "started by a_server_ends_with_its_test"]
fn holds_a_server() {
    let server = Nats::start(NatsOptions::default());
    eprintln!("\nPORT {}", server.as_ref().map_or(0, Nats::port));
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

// conformance: contract/test-leftovers: a server of a test process that is killed ends as well
// needs: nats-server
#[test]
fn a_server_ends_with_its_test() {
    // Said aloud here, because the output of the other process is not shown.
    let Some(_) = Nats::shared() else {
        return;
    };
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "servers::holds_a_server"])
        .arg("--nocapture")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(holder.stderr.take().unwrap()).lines();
    let mut ports = lines.filter_map(|line| line.ok()?.strip_prefix("PORT ")?.parse().ok());
    let port: u16 = ports.next().unwrap();
    assert!(listens(port));
    holder.kill().unwrap();
    holder.wait().unwrap();
    let begin = Instant::now();
    while listens(port) {
        assert!(begin.elapsed() < PATIENCE, "the server is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

// conformance: contract/test-redis: tests have a private Redis or Valkey server that they kill, restart and pause
// needs: redis-server
#[test]
fn redis_is_killed_restarted_and_paused() {
    for flavour in [Flavour::Redis, Flavour::Valkey] {
        let options = RedisOptions::default().flavour(flavour);
        let Some(server) = Redis::start(options) else {
            return;
        };
        server.command("SET k v");
        server.kill();
        assert!(!listens(server.port()));
        server.restart();
        assert!(listens(server.port()));
        // What was written is there again.
        server.command("RENAME k other");
        server.pause();
        server.resume();
        server.command("GET other");
    }
}
