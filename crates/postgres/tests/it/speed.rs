//! How quick the engine is beside statements written by hand. Not part of the usual run: `--ignored speed`.

use std::time::Instant;

use everbus_core::{ConsumeOptions, Event, GroupName, Pattern, Settlement, Verdict};
use everbus_testkit::servers::Postgres;

use crate::support::group;

const EVENTS: usize = 50_000;
const BATCH: usize = 100;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn speed() {
    let given = std::env::var("EVERBUS_POSTGRES").ok();
    let Some(server) = Postgres::start() else {
        return;
    };
    let url = given.unwrap_or_else(|| server.fresh_database());
    let engine = everbus_postgres::open(&url, everbus_postgres::Options::default())
        .await
        .unwrap();
    engine.broker.declare(group("g")).await.unwrap();
    let event = || {
        let body = "x".repeat(254);
        Event::builder("a.b").json(&body).build().unwrap()
    };
    let began = Instant::now();
    for _ in 0..EVENTS / BATCH {
        let batch = (0..BATCH).map(|_| event()).collect();
        engine.broker.append(batch).await.unwrap();
    }
    let rate = |n: usize, began: Instant| n as f64 / began.elapsed().as_secs_f64();
    eprintln!("publish, batches of {BATCH}: {:.0}/s", rate(EVENTS, began));
    let began = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..32 {
        let broker = engine.broker.clone();
        tasks.push(tokio::spawn(async move {
            for _ in 0..100 {
                let body = "x".repeat(254);
                let event = Event::builder("a.b").json(&body).build().unwrap();
                broker.append(vec![event]).await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    eprintln!(
        "publish, one by one, 32 at once: {:.0}/s",
        rate(3200, began)
    );
    let began = Instant::now();
    for _ in 0..300 {
        engine.broker.append(vec![event()]).await.unwrap();
    }
    eprintln!("publish, one after another: {:.0}/s", rate(300, began));
    let options = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]).prefetch(1024);
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), options)
        .await
        .unwrap();
    let began = Instant::now();
    let mut handled = 0;
    while handled < EVENTS {
        let batch = consumer.fetch(256).await.unwrap();
        handled += batch.len();
        let acks = batch
            .into_iter()
            .map(|d| Settlement::new(d.lease, Verdict::Ack));
        engine.broker.settle(acks.collect()).await.unwrap();
    }
    eprintln!("consume, 256 at a time: {:.0}/s", rate(handled, began));
    // By hand: the same insert, and a claim loop with deletes.
    let no_tls = everbus_postgres::tokio_postgres::NoTls;
    let (client, connection) = everbus_postgres::tokio_postgres::connect(&url, no_tls)
        .await
        .unwrap();
    tokio::spawn(connection);
    client
        .batch_execute(
            "CREATE TABLE raw (seq bigserial PRIMARY KEY, id uuid NOT NULL UNIQUE, payload bytea NOT NULL);
             CREATE TABLE raw_claims (lo bigint PRIMARY KEY, hi bigint)",
        )
        .await
        .unwrap();
    let insert = "INSERT INTO raw (id, payload) SELECT gen_random_uuid(), unnest($1::bytea[])";
    let insert = client.prepare(insert).await.unwrap();
    let payload = vec![b'x'; 256];
    let began = Instant::now();
    for _ in 0..EVENTS / BATCH {
        let payloads: Vec<&[u8]> = vec![&payload; BATCH];
        client.execute(&insert, &[&payloads]).await.unwrap();
    }
    eprintln!(
        "by hand, publish, batches of {BATCH}: {:.0}/s",
        rate(EVENTS, began)
    );
    let read = "SELECT seq, payload FROM raw WHERE seq > $1 ORDER BY seq LIMIT 256";
    let read = client.prepare(read).await.unwrap();
    let claim = client
        .prepare("INSERT INTO raw_claims VALUES ($1, $2)")
        .await
        .unwrap();
    let done = client
        .prepare("DELETE FROM raw_claims WHERE lo = $1")
        .await
        .unwrap();
    let (mut at, mut handled) = (0i64, 0);
    let began = Instant::now();
    while handled < EVENTS {
        let rows = client.query(&read, &[&at]).await.unwrap();
        let last: i64 = rows.last().unwrap().get(0);
        client.execute(&claim, &[&(at + 1), &last]).await.unwrap();
        client.execute(&done, &[&(at + 1)]).await.unwrap();
        handled += rows.len();
        at = last;
    }
    eprintln!(
        "by hand, consume, 256 at a time: {:.0}/s",
        rate(handled, began)
    );
}
