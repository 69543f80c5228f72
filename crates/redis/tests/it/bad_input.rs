//! What is wrong with a server or an event is said in words, with a hint.

use std::collections::HashSet;
use std::time::Duration;

use everbus_core::{Code, Durability, Error, Event, Settlement, Verdict};
use everbus_redis::Options;
use everbus_testkit::servers::{Certificates, Flavour, Redis, RedisOptions};

use crate::plain::{Plain, group, handle, options, publish};
use crate::server;

async fn refused(url: &str, options: Options) -> Error {
    let opened = everbus_redis::open(url, options).await;
    let error = opened.map(drop).unwrap_err();
    assert!(error.hint_text().is_some(), "{error:?}");
    assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
    error
}

// conformance: contract/redis-wrong-password: wrong credentials are refused with a hint, and are not repeated in the error
// needs: redis-server
#[tokio::test]
async fn wrong_credentials_are_refused() {
    let Some(server) = Redis::start(RedisOptions::default().password("right")) else {
        return;
    };
    let host = server.plain_url();
    let with = |who: &str| host.replace("redis://", &format!("redis://{who}"));
    for url in [with(":s3cret@"), with("me:s3cret@"), host.clone()] {
        let error = refused(&url, Options::default()).await;
        assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    }
    let mut options = Options::default();
    options.password = Some("right".into());
    let engine = everbus_redis::open(&host, options.clone()).await.unwrap();
    engine.broker.close().await.unwrap();
    assert!(!format!("{options:?}").contains("right"));
    let opened = everbus_redis::open(&server.url(), Options::default()).await;
    opened.unwrap().broker.close().await.unwrap();
}

// conformance: contract/redis-replica: a replica is refused with a hint
// needs: redis-server
#[tokio::test]
async fn a_replica_is_refused() {
    let Some(primary) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let options = RedisOptions::default().replica_of(primary.port());
    let Some(replica) = Redis::start(options) else {
        return;
    };
    replica.wait_for_primary();
    let error = refused(&replica.url(), Options::default()).await;
    assert_eq!(error.code(), Code::ReadOnly, "{error}");
    // A primary that becomes a replica while the engine is open says so with the next publish.
    let engine = everbus_redis::open(&primary.url(), Options::default())
        .await
        .unwrap();
    publish(&engine, "order.placed").await;
    primary.command(&format!("REPLICAOF 127.0.0.1 {}", replica.port()));
    let event = Event::builder("order.placed").build().unwrap();
    let error = engine.broker.append(vec![event]).await.unwrap_err();
    assert_eq!(error.code(), Code::ReadOnly, "{error}");
    assert!(error.hint_text().unwrap().contains("primary"));
}

// conformance: contract/redis-eviction: a server whose eviction policy deletes streams is refused, and one that forgets ids is a weakness
// needs: redis-server
#[tokio::test]
async fn a_server_that_evicts_streams_is_refused() {
    let evicts = RedisOptions::default().max_memory(100 << 20, "allkeys-lru");
    let Some(server) = Redis::start(evicts) else {
        return;
    };
    let error = refused(&server.url(), Options::default()).await;
    assert_eq!(error.code(), Code::InvalidSetting);
    assert!(error.hint_text().unwrap().contains("noeviction"));
    let mut allowed = Options::default();
    allowed.allow_eviction = true;
    let engine = everbus_redis::open(&server.url(), allowed).await.unwrap();
    let weak = |setting: &str| engine.weaknesses.iter().any(|w| w.setting == setting);
    assert!(weak("maxmemory-policy"));
    server.command("CONFIG SET maxmemory-policy volatile-lru");
    let engine = everbus_redis::open(&server.url(), Options::default())
        .await
        .unwrap();
    assert!(engine.weaknesses.iter().any(|w| w.value == "volatile-lru"));
}

// conformance: contract/redis-grade: the durability is that of the settings, and each weakness names the setting to change
// conformance: framework/redis-appendfsync: an append-only file that is synced every second is a weakness that names appendfsync always
// needs: redis-server
#[tokio::test]
async fn the_grade_follows_the_settings() {
    let cases = [
        (RedisOptions::default(), Durability::PowerLoss, None),
        (
            RedisOptions::default().fsync("everysec"),
            Durability::Process,
            Some("appendfsync always"),
        ),
        (
            RedisOptions::default().in_memory(),
            Durability::Memory,
            Some("appendonly yes"),
        ),
        (
            RedisOptions::default().set("no-appendfsync-on-rewrite", "yes"),
            Durability::Process,
            Some("no-appendfsync-on-rewrite no"),
        ),
    ];
    for (options, durability, advice) in cases {
        let Some(server) = Redis::start(options) else {
            return;
        };
        let engine = everbus_redis::open(&server.url(), Options::default())
            .await
            .unwrap();
        assert_eq!(engine.broker.capabilities().durability, durability);
        let told: Vec<String> = engine.weaknesses.iter().map(|w| w.advice.clone()).collect();
        let told = told.join("; ");
        assert!(advice.is_none_or(|advice| told.contains(advice)), "{told}");
        let required = engine.require_durability(Durability::PowerLoss);
        assert_eq!(required.is_ok(), durability == Durability::PowerLoss);
    }
}

// conformance: contract/redis-unreachable: a server that is not there is Unavailable, with a hint
// needs: redis-server
#[tokio::test]
async fn a_server_that_is_not_there_is_unavailable() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    server.kill();
    let error = refused(&server.url(), Options::default()).await;
    assert_eq!(error.code(), Code::Unavailable);
    let error = refused("redis://127.0.0.1:1/99999", Options::default()).await;
    assert_eq!(error.code(), Code::InvalidUrl);
}

// conformance: contract/redis-tls: rediss:// connects to a server whose certificate the named authority signed, and refuses one that it did not; the hint for a server without TLS says so
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encrypted_connection_is_checked() {
    let (Some(ours), Some(others)) = (Certificates::make(), Certificates::make()) else {
        return;
    };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    drop(taken);
    let text = |path: std::path::PathBuf| path.display().to_string();
    let encrypted = RedisOptions::default()
        .set("tls-port", &port.to_string())
        .set("tls-cert-file", &text(ours.certificate()))
        .set("tls-key-file", &text(ours.key()))
        .set("tls-ca-cert-file", &text(ours.authority()))
        .set("tls-auth-clients", "no");
    let Some(server) = Redis::start(encrypted) else {
        return;
    };
    let mut options = Options::default();
    options.ca_file = Some(ours.authority());
    let url = format!("rediss://127.0.0.1:{port}");
    let engine = everbus_redis::open(&url, options.clone()).await.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.placed").await;
    // The wake-up reads on a connection of its own.
    assert_eq!(handle(&engine, "g", 1).await, ["order.placed"]);
    engine.broker.close().await.unwrap();
    // As `tls: FILE` in the configuration.
    options.tls = true;
    let plain = format!("redis://127.0.0.1:{port}");
    let engine = everbus_redis::open(&plain, options.clone()).await.unwrap();
    engine.broker.close().await.unwrap();
    options.ca_file = Some(others.authority());
    let error = refused(&url, options.clone()).await;
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(error.to_string().contains("certificate"), "{error}");
    assert!(error.hint_text().unwrap().contains("broker.tls"));
    options.ca_file = Some(ours.authority());
    let without = server.plain_url().replace("redis://", "rediss://");
    let error = refused(&without, options).await;
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(error.hint_text().unwrap().contains("with TLS"), "{error}");
}

// conformance: contract/redis-no-permission: a user without permission learns what it lacks
// needs: redis-server
#[tokio::test]
async fn a_user_without_permission_learns_what_it_lacks() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    server.command("ACL SETUSER low on >low ~* +@all -@scripting -config");
    let url = server.plain_url().replace("redis://", "redis://low:low@");
    let engine = everbus_redis::open(&url, Options::default()).await.unwrap();
    let weak = engine
        .weaknesses
        .iter()
        .any(|w| w.advice.contains("CONFIG GET"));
    assert!(weak, "{:?}", engine.weaknesses);
    let event = Event::builder("order.placed").build().unwrap();
    let error = engine.broker.append(vec![event]).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    assert!(
        error.hint_text().unwrap().contains("@scripting"),
        "{error:?}"
    );
}

// conformance: contract/redis-wrong-type: a key of another type in the place of a stream is named, and nothing of the batch is stored
// needs: redis-server
#[tokio::test]
async fn a_key_of_another_type_is_named() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let plain = Plain::connect(&url).await;
    plain.ask(&["SET", "order:placed", "x"]).await.unwrap();
    let engine = everbus_redis::open(&url, Options::default()).await.unwrap();
    let of = |event_type: &str| Event::builder(event_type).build().unwrap();
    let batch = vec![of("user.created"), of("order.placed")];
    let error = engine.broker.append(batch).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    assert!(error.message().contains("order:placed"), "{error}");
    assert_eq!(plain.number(&["EXISTS", "user:created"]).await, 0);
    let refused = engine.broker.declare(group("g", &["order.placed"])).await;
    assert!(refused.unwrap_err().message().contains("order:placed"));
    assert!(engine.broker.inspect().await.unwrap().is_empty());
}

// conformance: contract/redis-wrong-type-verdicts: verdicts are applied whole, also of events whose stream has become a key of another type
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verdicts_are_whole_when_a_stream_becomes_another_key() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let plain = Plain::connect(&url).await;
    let engine = everbus_redis::open(&url, Options::default()).await.unwrap();
    let wanted = ["order.placed", "user.created"];
    engine.broker.declare(group("g", &wanted)).await.unwrap();
    for event_type in wanted {
        publish(&engine, event_type).await;
        publish(&engine, event_type).await;
    }
    let long = options().lease(Duration::from_secs(60));
    let consumer = engine.broker.consume("g".parse().unwrap(), long);
    let mut consumer = consumer.await.unwrap();
    let mut deliveries = Vec::new();
    while deliveries.len() < 4 {
        deliveries.extend(consumer.fetch(4).await.unwrap());
    }
    plain
        .ask(&["RENAME", "order:placed", "order:elsewhere"])
        .await
        .unwrap();
    plain.ask(&["SET", "order:placed", "x"]).await.unwrap();
    // Of each stream one event is acked, and one given up.
    let mut seen = HashSet::new();
    let settlements = deliveries.into_iter().map(|delivery| {
        let first = seen.insert(delivery.record.event.event_type().to_owned());
        let verdict = match first {
            true => Verdict::Ack,
            false => Verdict::Dead { failure: None },
        };
        Settlement::new(delivery.lease, verdict)
    });
    let answers = engine.broker.settle(settlements.collect()).await.unwrap();
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    // Nothing is left of them, and the letters are there once.
    assert_eq!(plain.number(&["EXISTS", "everbus:st:g"]).await, 0);
    assert_eq!(plain.number(&["EXISTS", "everbus:lease:g"]).await, 0);
    assert_eq!(plain.number(&["XLEN", "dlq:order:placed"]).await, 1);
    assert_eq!(plain.number(&["XLEN", "dlq:user:created"]).await, 1);
    let pending = plain.ask(&["XPENDING", "user:created", "g"]).await.unwrap();
    assert!(format!("{pending:?}").contains("int(0)"), "{pending:?}");
}

// conformance: contract/redis-too-large: an event over the server's limit is refused before it is sent
// needs: redis-server
#[tokio::test]
async fn an_event_over_the_limit_is_refused() {
    let options = RedisOptions::default().set("proto-max-bulk-len", "1048576");
    let Some(server) = Redis::start(options) else {
        return;
    };
    let engine = everbus_redis::open(&server.url(), Options::default())
        .await
        .unwrap();
    let of = |length: usize| {
        let text = "x".repeat(length);
        Event::builder("order.placed").json(&text).build().unwrap()
    };
    let error = engine
        .broker
        .append(vec![of(10), of(2 << 20)])
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::PayloadTooLarge);
    assert!(error.hint_text().unwrap().contains("overflow"));
    engine
        .broker
        .append(vec![of(1 << 19)])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    let plain = Plain::connect(&server.url()).await;
    assert_eq!(plain.number(&["XLEN", "order:placed"]).await, 1);
}
