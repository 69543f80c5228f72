//! Events that commit late, out of the order of their numbers.

use std::collections::BTreeSet;
use std::time::Duration;

use everbus_core::{
    ConsumeOptions, Consumer, Cursor, Engine, GroupName, Pattern, Settlement, Verdict,
};
use everbus_postgres::tokio_postgres::{Client, NoTls};
use everbus_testkit::servers::{Postgres, PostgresOptions};

use crate::support::{event, fresh_schema, group, open};

/// A plain connection to the database of an engine, and its schema.
async fn plain(url: &str) -> (Client, String) {
    let (base, query) = url.split_once('?').unwrap();
    let schema = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("schema="))
        .unwrap();
    let (client, connection) = everbus_postgres::tokio_postgres::connect(base, NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    (client, schema.to_owned())
}

/// Begins to insert an event by hand, and leaves the transaction open.
async fn insert_slowly(client: &Client, schema: &str) -> i64 {
    client.batch_execute("BEGIN").await.unwrap();
    let sql = format!(
        "INSERT INTO {schema}.log (received_at, occurred_at, type, version, id, tenant, payload)
         SELECT 0, 0, id, 1, gen_random_uuid(), '', '\\x37' FROM {schema}.types WHERE name = 'a.b'
         RETURNING seq"
    );
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

// conformance: fault-6: an event that commits after a later number was read is not passed over
// conformance: engines/postgres-late-commit: an event that commits after events with higher numbers reaches every group and reader
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_commits_late_is_not_passed_over() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    engine.broker.append(vec![event(1)]).await.unwrap();
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), options())
        .await
        .unwrap();
    let first = consumer.fetch(10).await.unwrap();
    assert_eq!(first.len(), 1);
    let (slow, schema) = plain(&url).await;
    let late = insert_slowly(&slow, &schema).await;
    let answers = engine
        .broker
        .append(vec![event(3), event(4)])
        .await
        .unwrap();
    let after = answers[0].as_ref().unwrap().position.place();
    assert!(
        after > late.unsigned_abs(),
        "the late event has the lower number"
    );
    // Nothing may be handed out beyond the gap, and inspect says why.
    let early = tokio::time::timeout(Duration::from_millis(300), consumer.fetch(10)).await;
    assert!(early.is_err(), "{early:?}");
    let log = engine.log().unwrap();
    let (read, cursor) = log
        .read(Cursor::START, vec![Pattern::new("*").unwrap()], 100)
        .await
        .unwrap();
    assert_eq!(read.len(), 1, "a reader stops before the gap as well");
    let info = engine.broker.inspect().await.unwrap().remove(0);
    let held_back = info.held_back.expect("what holds the log back");
    assert!(held_back.contains("INSERT INTO"), "{held_back}");
    slow.batch_execute("COMMIT").await.unwrap();
    let mut got = Vec::new();
    while got.len() < 3 {
        for delivery in consumer.fetch(10).await.unwrap() {
            got.push(delivery.record.position.place());
            let ack = Settlement::new(delivery.lease, Verdict::Ack);
            engine
                .broker
                .settle(vec![ack])
                .await
                .unwrap()
                .remove(0)
                .unwrap();
        }
    }
    assert_eq!(got, [late.unsigned_abs(), after, after + 1]);
    let (rest, _) = log
        .read(cursor, vec![Pattern::new("*").unwrap()], 100)
        .await
        .unwrap();
    assert_eq!(rest.len(), 3);
    assert!(
        engine.broker.inspect().await.unwrap()[0]
            .held_back
            .is_none()
    );
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-rolled-back: a number whose transaction was rolled back holds readers back no longer than that
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_never_commits_holds_nobody_back() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    engine.broker.append(vec![event(1)]).await.unwrap();
    let (slow, schema) = plain(&url).await;
    insert_slowly(&slow, &schema).await;
    engine.broker.append(vec![event(3)]).await.unwrap();
    // A transaction that writes elsewhere is none of our business, however long it runs.
    let (other, _) = plain(&url).await;
    other
        .batch_execute("BEGIN; CREATE TEMPORARY TABLE t (x integer); INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), options())
        .await
        .unwrap();
    assert_eq!(consumer.fetch(10).await.unwrap().len(), 1);
    slow.batch_execute("ROLLBACK").await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(10)).await;
    assert_eq!(next.unwrap().unwrap().len(), 1);
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-many-writers: with many writers that commit late, in any order or not at all, a group gets every committed event once
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_lose_nothing() {
    let Some(url) = fresh_schema() else { return };
    write_and_receive(&url).await;
}

async fn write_and_receive(url: &str) {
    const WRITERS: u64 = 6;
    const EACH: usize = 40;
    let seed = everbus_testkit::model::Random::seed_from_env().unwrap_or_else(new_seed);
    eprintln!("EVERBUS_SEED={seed}");
    let engine = open(url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let first = engine
        .broker
        .append(vec![event(0)])
        .await
        .unwrap()
        .remove(0);
    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let url = url.to_owned();
        writers.push(tokio::spawn(async move {
            let mut random = everbus_testkit::model::Random::new(seed + writer);
            let (client, schema) = plain(&url).await;
            let mut committed = Vec::new();
            for _ in 0..EACH {
                let seq = insert_slowly(&client, &schema).await.unsigned_abs();
                let pause = Duration::from_millis(random.below(12) as u64);
                tokio::time::sleep(pause).await;
                if random.one_in(5) {
                    client.batch_execute("ROLLBACK").await.unwrap();
                } else {
                    client.batch_execute("COMMIT").await.unwrap();
                    committed.push(seq);
                }
            }
            committed
        }));
    }
    let wanted = engine
        .broker
        .consume(GroupName::new("g").unwrap(), options());
    let mut consumer = wanted.await.unwrap();
    let mut expected = BTreeSet::from([first.unwrap().position.place()]);
    let mut seen = BTreeSet::new();
    while !writers.is_empty() || seen.len() < expected.len() {
        if writers.iter().all(tokio::task::JoinHandle::is_finished) {
            for writer in writers.drain(..) {
                expected.extend(writer.await.unwrap());
            }
        }
        let fetched = tokio::time::timeout(Duration::from_secs(5), consumer.fetch(64)).await;
        let Ok(batch) = fetched else {
            let missing: Vec<_> = expected.difference(&seen).collect();
            assert!(
                !writers.is_empty() || missing.is_empty(),
                "never came: {missing:?}"
            );
            continue;
        };
        let mut acks = Vec::new();
        for delivery in batch.unwrap() {
            let position = delivery.record.position.place();
            assert!(seen.insert(position), "event {position} came twice");
            acks.push(Settlement::new(delivery.lease, Verdict::Ack));
        }
        let answers = engine.broker.settle(acks).await.unwrap();
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    }
    assert_eq!(seen, expected);
    engine.broker.close().await.unwrap();
}

/// Fetches and acknowledges until these events have come.
async fn receive(engine: &Engine, consumer: &mut Box<dyn Consumer>, expected: &BTreeSet<u64>) {
    let mut seen = BTreeSet::new();
    while seen != *expected {
        let fetched = tokio::time::timeout(Duration::from_secs(20), consumer.fetch(64)).await;
        let missing: Vec<_> = expected.difference(&seen).copied().collect();
        // An error is that of a connection to the server before.
        let Ok(batch) = fetched.unwrap_or_else(|_| panic!("never came: {missing:?}")) else {
            continue;
        };
        let mut acks = Vec::new();
        for delivery in batch {
            seen.insert(delivery.record.position.place());
            acks.push(Settlement::new(delivery.lease, Verdict::Ack));
        }
        let answers = engine.broker.settle(acks).await.unwrap();
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    }
}

/// Appends events, and again if a connection to the server before was met.
async fn append(engine: &Engine, count: u32) -> BTreeSet<u64> {
    let batch: Vec<_> = (0..count).map(event).collect();
    loop {
        if let Ok(answers) = engine.broker.append(batch.clone()).await {
            let places = answers.into_iter().map(|a| a.unwrap().position.place());
            return places.collect();
        }
    }
}

/// What the engine says holds the log back.
async fn held_back(engine: &Engine) -> Option<String> {
    loop {
        if let Ok(mut infos) = engine.broker.inspect().await {
            return infos.remove(0).held_back;
        }
    }
}

// conformance: engines/postgres-rewound: numbers that a killed server gives again are read again: no event below a number seen before the kill is passed over
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_gives_numbers_again() {
    // The numbers of an open transaction reach the disk with the next commit, or by this process, which every
    // claim wakes: so nothing is claimed before the kill.
    let options_ = PostgresOptions::default().setting("wal_writer_delay=10s");
    let Some(server) = Postgres::start_with(options_) else {
        return;
    };
    let url = format!("{}?schema=everbus", server.fresh_database());
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), options())
        .await
        .unwrap();
    let first = append(&engine, 10).await;
    let (slow, schema) = plain(&url).await;
    // The engine still notifies others of the append, and the first look tidies pages.
    let mut written = String::new();
    loop {
        assert!(held_back(&engine).await.is_none());
        let now = server.sql("SELECT pg_current_wal_insert_lsn()");
        if std::mem::replace(&mut written, now.clone()) == now {
            break;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    slow.batch_execute(&format!(
        "BEGIN; INSERT INTO {schema}.log (received_at, occurred_at, type, version, id, tenant, payload)
         SELECT 0, 0, t.id, 1, gen_random_uuid(), '', '\\x37'
         FROM {schema}.types t, generate_series(1, 2000) WHERE t.name = 'a.b'"
    ))
    .await
    .unwrap();
    assert!(held_back(&engine).await.is_some());
    server.restart();
    let (slow, _) = plain(&url).await;
    let late = insert_slowly(&slow, &schema).await.unsigned_abs();
    assert!(late < 1000, "the server gave no number again: {late}");
    let mut expected = append(&engine, 1).await;
    // The event of the open transaction has the lower number.
    assert!(held_back(&engine).await.is_some());
    receive(&engine, &mut consumer, &first).await;
    let early = tokio::time::timeout(Duration::from_millis(500), async {
        loop {
            if let Ok(batch) = consumer.fetch(10).await {
                return batch;
            }
        }
    });
    assert!(early.await.is_err(), "an event beyond the gap came");
    slow.batch_execute("COMMIT").await.unwrap();
    expected.insert(late);
    expected.extend(append(&engine, 20).await);
    receive(&engine, &mut consumer, &expected).await;
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-prepared: an event in a prepared transaction holds the log back, over a restart of the server too, and comes when it is committed
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_prepared_is_waited_for() {
    let options_ = PostgresOptions::default().setting("max_prepared_transactions=4");
    let Some(server) = Postgres::start_with(options_) else {
        return;
    };
    let url = format!("{}?schema=everbus", server.fresh_database());
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), options())
        .await
        .unwrap();
    let first = append(&engine, 1).await;
    receive(&engine, &mut consumer, &first).await;
    let (slow, schema) = plain(&url).await;
    let late = insert_slowly(&slow, &schema).await.unsigned_abs();
    slow.batch_execute("PREPARE TRANSACTION 'slow one'")
        .await
        .unwrap();
    let mut expected = append(&engine, 3).await;
    let said = held_back(&engine).await.expect("what holds the log back");
    assert!(said.contains("slow one"), "{said}");
    server.restart();
    let said = held_back(&engine).await.expect("what holds the log back");
    assert!(said.contains("slow one"), "{said}");
    // A second look: the names of its locks have changed with the restart.
    expected.extend(append(&engine, 1).await);
    let said = held_back(&engine).await.expect("what holds the log back");
    assert!(said.contains("slow one"), "{said}");
    let (slow, _) = plain(&url).await;
    slow.batch_execute("COMMIT PREPARED 'slow one'")
        .await
        .unwrap();
    expected.insert(late);
    receive(&engine, &mut consumer, &expected).await;
    engine.broker.close().await.unwrap();
}

/// Waits until a statement in the database waits for a lock.
async fn until_one_waits(url: &str) {
    let (watcher, _) = plain(url).await;
    let sql = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid IN
               (SELECT pid FROM pg_stat_activity WHERE datname = current_database())";
    while watcher.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A database where transactions keep the snapshot of their beginning by default.
fn repeatable(server: &Postgres) -> String {
    let base = server.fresh_database();
    let name = base.rsplit('/').next().unwrap().split('?').next().unwrap();
    server.sql(&format!(
        "ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'"
    ));
    base
}

// conformance: engines/postgres-isolation: with another default_transaction_isolation an event that commits while a claim asks for the horizon is not passed over, with and without a pooler
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_isolation_of_the_database_does_not_matter() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    for pooler in ["", "&pooler=transaction"] {
        let url = format!("{}?schema=everbus{pooler}", repeatable(server));
        let engine = open(&url).await;
        engine.broker.declare(group("g")).await.unwrap();
        let mut consumer = engine
            .broker
            .consume(GroupName::new("g").unwrap(), options())
            .await
            .unwrap();
        let first = append(&engine, 1).await;
        receive(&engine, &mut consumer, &first).await;
        let (slow, schema) = plain(&url).await;
        let mut expected = BTreeSet::from([insert_slowly(&slow, &schema).await.unsigned_abs()]);
        expected.extend(append(&engine, 1).await);
        // The claim waits for this table after its snapshot was taken, and before it knows the horizon.
        let (blocker, _) = plain(&url).await;
        let sql = format!("BEGIN; LOCK TABLE {schema}.runs IN ACCESS EXCLUSIVE MODE");
        blocker.batch_execute(&sql).await.unwrap();
        let receiving = async {
            receive(&engine, &mut consumer, &expected).await;
        };
        let committing = async {
            until_one_waits(&url).await;
            slow.batch_execute("COMMIT").await.unwrap();
            blocker.batch_execute("COMMIT").await.unwrap();
        };
        tokio::join!(receiving, committing);
        engine.broker.close().await.unwrap();
    }
}

// conformance: engines/postgres-isolation: with many late writers on such a database a group gets every committed event once
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_lose_nothing_whatever_the_isolation() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    write_and_receive(&format!("{}?schema=everbus", repeatable(server))).await;
}

// conformance: engines/postgres-types-again: after another server took over that gave the numbers of types again, no event is taken for one of an unwanted type
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_of_types_that_are_given_again_are_read_again() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    let mut wanted = group("g");
    wanted.subscriptions[0].pattern = Pattern::new("c.d").unwrap();
    engine.broker.declare(wanted).await.unwrap();
    let other = everbus_core::Event::builder("c.d").build().unwrap();
    let appended = engine.broker.append(vec![event(1), other]).await.unwrap();
    let known = appended[1].as_ref().unwrap().position.place();
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), options())
        .await
        .unwrap();
    receive(&engine, &mut consumer, &BTreeSet::from([known])).await;
    // Another run of the server, in which the two types have each other's number.
    let (plain, schema) = plain(&url).await;
    let sql = format!(
        "BEGIN;
         UPDATE {schema}.types SET name = 'was ' || name WHERE name IN ('a.b', 'c.d');
         UPDATE {schema}.types SET name = CASE name WHEN 'was a.b' THEN 'c.d' ELSE 'a.b' END WHERE name LIKE 'was %';
         UPDATE {schema}.runs SET mark = gen_random_uuid();
         INSERT INTO {schema}.log (received_at, occurred_at, type, version, id, tenant, payload)
         SELECT 0, 0, t.id, 1, gen_random_uuid(), '', '\\x37' FROM {schema}.types t
         WHERE t.name IN ('c.d', 'a.b') ORDER BY t.name DESC;
         COMMIT"
    );
    plain.batch_execute(&sql).await.unwrap();
    receive(&engine, &mut consumer, &BTreeSet::from([known + 1])).await;
    engine.broker.close().await.unwrap();
}

/// The random part of a new id.
fn new_seed() -> u64 {
    let id = everbus_core::EventId::new();
    let random = id.as_bytes()[8..].iter();
    random.fold(0, |seed, byte| (seed << 7) ^ u64::from(*byte))
}

fn options() -> ConsumeOptions {
    ConsumeOptions::new(vec![Pattern::new("*").unwrap()]).prefetch(100)
}

// conformance: engines/postgres-claim-durability: a claim does not wait for the disk, and what follows on its connection does
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_claim_itself_does_not_wait_for_the_disk() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let (client, schema) = plain(&url).await;
    for (token, eager) in [(1i64, false), (2, true)] {
        engine.broker.append(vec![event(1)]).await.unwrap();
        let claim = format!(
            "SELECT o_head[1], current_setting('synchronous_commit') FROM {schema}.claim_new(
               (SELECT id FROM {schema}.groups), 0, 1, {token}, 1, '{{*}}', ARRAY (SELECT id FROM {schema}.types), '{{}}',
               false, 10, 1000, 1000, 64, 0, 0, '{{}}', '', {eager}) WHERE o_head IS NOT NULL"
        );
        let row = client.query_one(&claim, &[]).await.unwrap();
        assert_eq!(row.get::<_, &str>(0), "1", "it is claimed");
        assert_eq!(row.get::<_, &str>(1), "off");
        let after = client.query_one("SHOW synchronous_commit", &[]).await;
        assert_eq!(after.unwrap().get::<_, &str>(0), "on");
    }
    engine.broker.close().await.unwrap();
}
