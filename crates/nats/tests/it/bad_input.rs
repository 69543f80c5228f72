//! What is wrong with a server, an account or an event is said in words, with a hint.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Delivery, Error, Event, Settlement, SystemClock, Verdict};
use everbus_nats::Options;
use everbus_testkit::servers::{Certificates, Nats, NatsOptions};

use crate::streams::{group, options, publish};

async fn refused(url: &str, options: Options) -> Error {
    let opened = everbus_nats::open(url, options).await;
    let error = opened.map(drop).unwrap_err();
    assert!(error.hint_text().is_some(), "{error:?}");
    assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
    error
}

// conformance: contract/nats-wrong-password: wrong credentials are refused with a hint, and are not repeated in the error
// needs: nats-server
#[tokio::test]
async fn wrong_credentials_are_refused() {
    let options = NatsOptions::default().user("shop", "right");
    let Some(server) = Nats::start(options) else {
        return;
    };
    let host = server.plain_url();
    let with = |who: &str| host.replace("nats://", &format!("nats://{who}"));
    for url in [with("shop:s3cret@"), with("s3cret@"), host.clone()] {
        let error = refused(&url, Options::default()).await;
        assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    }
    let mut options = Options::default();
    (options.user, options.password) = (Some("shop".into()), Some("right".into()));
    let engine = everbus_nats::open(&host, options.clone()).await.unwrap();
    engine.broker.close().await.unwrap();
    options.token = Some("s3cret".into());
    let error = refused(&host, options).await;
    assert!(error.message().contains("more than one"), "{error}");
    let mut options = Options::default();
    options.creds = Some("/no/such/file.creds".into());
    assert_eq!(refused(&host, options).await.code(), Code::InvalidSetting);
}

// conformance: omni/nats-connect: a connection takes user, password, token and credentials
// conformance: contract/nats-credentials: user with password, token, nkey and creds file give access
// needs: nats-server
#[tokio::test]
async fn tokens_and_nkeys_give_access() {
    let Some(server) = Nats::start(NatsOptions::default().token("t0ken")) else {
        return;
    };
    let mut options = Options::default();
    options.token = Some("t0ken".into());
    let engine = everbus_nats::open(&server.plain_url(), options)
        .await
        .unwrap();
    engine.broker.close().await.unwrap();
    // A seed and its public key, made for this test.
    let seed = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
    let public = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";
    let users = format!("authorization {{ users: [ {{ nkey: {public} }} ] }}");
    let Some(server) = Nats::start(NatsOptions::default().config(&users)) else {
        return;
    };
    let mut options = Options::default();
    options.creds = Some(seed.into());
    let engine = everbus_nats::open(&server.plain_url(), options)
        .await
        .unwrap();
    engine.broker.close().await.unwrap();
}

// conformance: contract/nats-no-jetstream: a server without JetStream is refused with a hint
// needs: nats-server
#[tokio::test]
async fn a_server_without_jetstream_is_refused() {
    let Some(server) = Nats::start(NatsOptions::default().without_jetstream()) else {
        return;
    };
    let error = refused(&server.url(), Options::default()).await;
    assert_eq!(error.code(), Code::Unsupported);
}

// conformance: contract/nats-unreachable: a server that is not there is Unavailable, with a hint
// needs: nats-server
#[tokio::test]
async fn a_server_that_is_not_there_is_unavailable() {
    let Some(server) = Nats::start(NatsOptions::default()) else {
        return;
    };
    server.kill();
    let error = refused(&server.url(), Options::default()).await;
    assert_eq!(error.code(), Code::Unavailable);
}

// conformance: contract/nats-no-permission: an account that may not use JetStream or its subjects learns which subject it was
// needs: nats-server
#[tokio::test]
async fn an_account_without_permission_learns_what_it_lacks() {
    let users = r#"authorization { users: [
        { user: low, password: low, permissions: { publish: { deny: ["$JS.API.STREAM.CREATE.>"] } } }
        { user: mute, password: mute, permissions: { publish: { deny: ["events.>"] } } }
    ] }"#;
    let Some(server) = Nats::start(NatsOptions::default().config(users)) else {
        return;
    };
    let as_user = |user: &str| {
        let who = format!("nats://{user}:{user}@");
        server.plain_url().replace("nats://", &who)
    };
    let mut options = Options::default();
    options.timeout = Duration::from_secs(1);
    let error = refused(&as_user("low"), options.clone()).await;
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    assert!(error.message().contains("STREAM.CREATE"), "{error}");
    let engine = everbus_nats::open(&as_user("mute"), options).await.unwrap();
    let event = Event::builder("order.placed").build().unwrap();
    let answers = engine.broker.append(vec![event]).await;
    let error = answers
        .and_then(|mut answers| answers.remove(0))
        .unwrap_err();
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    assert!(error.message().contains("events.order.placed"), "{error}");
}

// conformance: contract/nats-too-large: an event over the server's limit is refused before it is sent
// needs: nats-server
#[tokio::test]
async fn an_event_over_the_limit_is_refused() {
    let Some(server) = Nats::start(NatsOptions::default().max_payload(10_000)) else {
        return;
    };
    let engine = everbus_nats::open(&server.url(), Options::default())
        .await
        .unwrap();
    let of = |length: usize| {
        let text = "x".repeat(length);
        Event::builder("order.placed").json(&text).build().unwrap()
    };
    let answers = engine.broker.append(vec![of(11_000)]).await.unwrap();
    let error = answers.into_iter().next().unwrap().unwrap_err();
    assert_eq!(error.code(), Code::PayloadTooLarge);
    assert!(error.hint_text().unwrap().contains("overflow"));
    let refused = engine.broker.append(vec![of(10), of(11_000)]).await;
    assert_eq!(refused.unwrap_err().code(), Code::PayloadTooLarge);
    let answers = engine.broker.append(vec![of(9000)]).await.unwrap();
    assert_eq!(
        answers[0].as_ref().unwrap().position.place(),
        1,
        "nothing else was stored"
    );
}

// conformance: contract/beside-bad-neighbour: of several acks in one batch, only the one whose event cannot be stored is refused
// needs: nats-server
#[tokio::test]
async fn a_follow_up_over_the_limit_fails_its_own_ack_only() {
    let Some(server) = Nats::start(NatsOptions::default().max_payload(10_000)) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let broker = everbus_nats::open(&server.url(), Options::default()).await;
    let file = folder.path().join("store.db");
    let store = everbus_sqlite::open(&file, everbus_sqlite::Options::default()).unwrap();
    let engine = everbus::compose(broker.unwrap(), store, Arc::new(SystemClock)).await;
    let engine = engine.unwrap();
    engine.broker.declare(group("g", &["a.*"])).await.unwrap();
    for event_type in ["a.b", "a.c", "a.d"] {
        publish(&engine, event_type).await;
    }
    let consumer = engine.broker.consume("g".parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let mut batch = Vec::new();
    while batch.len() < 3 {
        batch.extend(consumer.fetch(3).await.unwrap());
    }
    let ack = |(n, delivery): (usize, &Delivery)| {
        let mut ack = Settlement::new(delivery.lease.clone(), Verdict::Ack);
        let body = "x".repeat(if n == 1 { 11_000 } else { 10 });
        let event = Event::builder("other.type").json(&body).build().unwrap();
        (ack.inbox, ack.follow_ups) = (true, vec![event]);
        ack
    };
    let acks = batch.iter().enumerate().map(ack).collect();
    let answers = engine.broker.settle(acks).await.unwrap();
    let codes: Vec<Option<Code>> = answers
        .iter()
        .map(|answer| answer.as_ref().err().map(Error::code))
        .collect();
    assert_eq!(codes, [None, Some(Code::PayloadTooLarge), None]);
    let records = batch.into_iter().map(|delivery| delivery.record).collect();
    let inbox = engine.inbox().unwrap();
    let handled = inbox.handled("g".parse().unwrap(), records).await.unwrap();
    assert_eq!(handled, [true, false, true]);
    engine.broker.close().await.unwrap();
}

// conformance: contract/nats-tls: tls:// connects to a server whose certificate the named authority signed, and refuses one that it did not
// needs: nats-server
#[tokio::test]
async fn an_encrypted_connection_is_checked() {
    let (Some(ours), Some(others)) = (Certificates::make(), Certificates::make()) else {
        return;
    };
    let (certificate, key) = (ours.certificate(), ours.key());
    let tls = format!("tls {{ cert_file: {certificate:?}, key_file: {key:?} }}");
    let Some(server) = Nats::start(NatsOptions::default().config(&tls)) else {
        return;
    };
    let url = server.plain_url().replace("nats://", "tls://");
    let mut options = Options::default();
    options.ca_file = Some(ours.authority());
    let engine = everbus_nats::open(&url, options.clone()).await.unwrap();
    engine.broker.close().await.unwrap();
    options.ca_file = Some(others.authority());
    let error = refused(&url, options).await;
    assert!(error.to_string().contains("certificate"), "{error}");
}
