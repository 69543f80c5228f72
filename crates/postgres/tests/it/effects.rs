//! Effects in the transaction of the ack, with tables of the user.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use everbus::{Bus, HandlerError, Json, Router, postgres};
use everbus_core::{
    BoxFuture, Code, ConsumeOptions, Effect, EffectResult, Engine, GroupName, Lease, Pattern,
    Settlement, SystemClock, Verdict,
};
use everbus_postgres::tokio_postgres::Transaction;
use everbus_postgres::{ENGINE, Options, Slot};
use everbus_testkit::servers::{Postgres, PostgresOptions};
use tokio::sync::Notify;

use crate::support::{event, fresh_schema, group, open, options};

// conformance: engines/postgres-in-transaction: an effect in the transaction of the ack happens exactly once, whatever its handler does
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_effect_happens_exactly_once() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let url = server.fresh_database();
    server.sql_at(
        &url,
        "CREATE TABLE balance (account bigint PRIMARY KEY, amount bigint NOT NULL)",
    );
    let bus = Bus::open(&url).await.unwrap();
    let runs = Arc::new(AtomicU32::new(0));
    let counted = runs.clone();
    let book = move |Json(amount): Json<i64>| {
        let run = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            postgres::in_transaction(move |tx| {
                Box::pin(async move {
                    let sql = "INSERT INTO balance VALUES (1, $1)
                               ON CONFLICT (account) DO UPDATE SET amount = balance.amount + $1";
                    tx.execute(sql, &[&amount]).await?;
                    if run.is_multiple_of(3) {
                        // Rolled back with everything before it.
                        return Err(HandlerError::from(std::io::Error::other("out of luck")));
                    }
                    Ok(())
                })
            })
        }
    };
    let router = Router::new().group("ledger").on("bank.deposit", book);
    bus.mount(router).await.unwrap();
    bus.start().await.unwrap();
    let mut receipts = Vec::new();
    for amount in 1..=10i64 {
        receipts.push(bus.publish(("bank.deposit", amount)).await.unwrap());
    }
    for receipt in receipts {
        let settled = receipt
            .settled_within(Duration::from_secs(100))
            .await
            .unwrap();
        assert!(settled.dead_lettered.is_empty());
    }
    assert!(runs.load(Ordering::SeqCst) > 10, "some runs failed");
    assert_eq!(server.sql_at(&url, "SELECT amount FROM balance"), "55");
    bus.shutdown().await.unwrap();
}

/// A group with its first events in flight, and their leases.
async fn in_flight(engine: &Engine, name: &str, count: u32) -> Vec<Lease> {
    engine.broker.declare(group(name)).await.unwrap();
    let events = (0..count).map(event).collect();
    engine.broker.append(events).await.unwrap();
    let wanted = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]);
    let group = GroupName::new(name).unwrap();
    let mut consumer = engine.broker.consume(group, wanted).await.unwrap();
    let mut leases = Vec::new();
    while leases.len() < count as usize {
        let fetched = consumer.fetch(count as usize - leases.len()).await.unwrap();
        leases.extend(fetched.into_iter().map(|delivery| delivery.lease));
    }
    // Closing would give the events back.
    std::mem::forget(consumer);
    leases
}

fn ack_with<F>(lease: &Lease, work: F) -> Settlement
where
    F: for<'a> Fn(&'a Transaction<'a>) -> BoxFuture<'a, EffectResult>
        + Clone
        + Send
        + Sync
        + 'static,
{
    let mut ack = Settlement::new(lease.clone(), Verdict::Ack);
    ack.effect = Some(Effect::new(ENGINE, move |slot| {
        let work = work.clone();
        let slot = slot.downcast_ref::<Slot>().unwrap();
        slot.set(Box::new(move |tx| work(tx)));
        Ok(Vec::new())
    }));
    ack
}

async fn settle(engine: &Engine, settlement: Settlement) -> everbus_core::Result<()> {
    let answers = engine.broker.settle(vec![settlement]).await;
    answers.unwrap().remove(0)
}

// conformance: engines/postgres-slow-effect: while an effect runs, acks and other effects of the same claim go on
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_effect_holds_nobody_up() {
    let Some(url) = fresh_schema() else {
        return;
    };
    let engine = open(&url).await;
    let leases = in_flight(&engine, "g", 3).await;
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let slow = {
        let (begun, go_on) = (begun.clone(), go_on.clone());
        ack_with(&leases[0], move |_| {
            let (begun, go_on) = (begun.clone(), go_on.clone());
            Box::pin(async move {
                begun.notify_one();
                go_on.notified().await;
                Ok(Vec::new())
            })
        })
    };
    let broker = engine.broker.clone();
    let slow = tokio::spawn(async move { broker.settle(vec![slow]).await });
    begun.notified().await;
    let others = async {
        let ack = Settlement::new(leases[1].clone(), Verdict::Ack);
        settle(&engine, ack).await.unwrap();
        let quick = ack_with(&leases[2], |tx| {
            Box::pin(async move {
                tx.batch_execute("SELECT 1").await?;
                Ok(Vec::new())
            })
        });
        settle(&engine, quick).await.unwrap();
    };
    // Less than the patience, after which the slow effect would be given up.
    let others = tokio::time::timeout(Duration::from_secs(20), others).await;
    others.expect("others are settled while the effect runs");
    go_on.notify_one();
    slow.await.unwrap().unwrap().remove(0).unwrap();
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-endless-effect: an effect that does not end is rolled back, and its lease can still be settled
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_effect_without_an_end_is_given_up() {
    let Some(url) = fresh_schema() else {
        return;
    };
    let brief = Options {
        patience: Duration::from_secs(3),
        ..options(Arc::new(SystemClock))
    };
    let engine = everbus_postgres::open(&url, brief).await.unwrap();
    let leases = in_flight(&engine, "g", 1).await;
    let endless = ack_with(&leases[0], |_| Box::pin(std::future::pending()));
    let error = settle(&engine, endless).await.unwrap_err();
    assert_eq!(error.code(), Code::EffectFailed, "{error:?}");
    let ack = Settlement::new(leases[0].clone(), Verdict::Ack);
    settle(&engine, ack).await.unwrap();
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-effect-session: what an effect changes in its session is gone for the next user of the connection
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_effect_leaves_nothing_on_its_connection() {
    let Some(url) = fresh_schema() else {
        return;
    };
    // One connection for effects, and the last one used is the next one.
    let engine = open(&url.replace("pool_size=6", "pool_size=2")).await;
    let leases = in_flight(&engine, "g", 8).await;
    for lease in &leases {
        let work = ack_with(lease, |tx| {
            Box::pin(async move {
                let sql = "SELECT current_setting('synchronous_commit'),
                           (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711)";
                let row = tx.query_one(sql, &[]).await?;
                let (commit, locks): (String, i64) = (row.get(0), row.get(1));
                if (&*commit, locks) != ("on", 0) {
                    return Err(format!("{commit} {locks}").into());
                }
                let sql = "SET synchronous_commit = off; SELECT pg_advisory_lock(4711)";
                tx.batch_execute(sql).await?;
                Ok(Vec::new())
            })
        });
        // Cleaning comes after the answer: the lock of the effect before may still be there for a moment.
        let settled = async {
            loop {
                match settle(&engine, work.clone()).await {
                    Err(error) if error.message().ends_with("on 1") => {}
                    other => return other,
                }
            }
        };
        let settled = tokio::time::timeout(Duration::from_secs(60), settled).await;
        settled.expect("the lock goes").unwrap();
    }
    engine.broker.close().await.unwrap();
}

// conformance: framework/exactly-once-postgres: the effect, the record in the inbox and the ack are committed by one transaction; if it fails, none of them is there
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effect_record_and_ack_are_one_transaction() {
    let settings = PostgresOptions::default()
        .setting("fsync=off")
        .setting("track_commit_timestamp=on");
    let Some(server) = Postgres::start_with(settings) else {
        return;
    };
    let url = server.fresh_database();
    server.sql_at(&url, "CREATE TABLE shipped (n int CHECK (n > 0))");
    let engine = open(&url).await;
    // One of three stays in flight, so that the claim is there to look at.
    let leases = in_flight(&engine, "g", 3).await;
    let ship = |lease: &Lease, sql: &'static str| {
        let mut ack = ack_with(lease, move |tx| {
            Box::pin(async move {
                tx.batch_execute(sql).await?;
                Ok(Vec::new())
            })
        });
        ack.inbox = true;
        ack
    };
    let count = |what: &str| server.sql_at(&url, &format!("SELECT count(*) FROM {what}"));
    let done = "everbus.claims WHERE done <> '{}'";
    let refused = settle(
        &engine,
        ship(&leases[0], "INSERT INTO shipped VALUES (1), (0)"),
    );
    assert_eq!(refused.await.unwrap_err().code(), Code::EffectFailed);
    assert_eq!(
        [count("shipped"), count("everbus.inbox"), count(done)],
        ["0", "0", "0"]
    );
    let shipped = ship(&leases[0], "INSERT INTO shipped VALUES (1)");
    settle(&engine, shipped).await.unwrap();
    // Subtransactions have the time of the transaction that they belong to.
    let committed = |table: &str| {
        server.sql_at(
            &url,
            &format!("SELECT pg_xact_commit_timestamp(xmin) FROM {table}"),
        )
    };
    let at = committed("shipped");
    assert!(!at.is_empty());
    assert_eq!(
        [committed("everbus.inbox"), committed(done)],
        [at.clone(), at]
    );
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-deferred-constraint: a constraint that is checked at the commit is a failure of the effect
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deferred_constraint_is_a_failed_effect() {
    let Some(url) = fresh_schema() else {
        return;
    };
    let engine = open(&url).await;
    let leases = in_flight(&engine, "g", 1).await;
    let work = ack_with(&leases[0], |tx| {
        Box::pin(async move {
            let sql = "CREATE TEMP TABLE part (id int PRIMARY KEY, whole int REFERENCES part
                         DEFERRABLE INITIALLY DEFERRED);
                       INSERT INTO part VALUES (1, 2)";
            tx.batch_execute(sql).await?;
            Ok(Vec::new())
        })
    });
    let error = settle(&engine, work).await.unwrap_err();
    assert_eq!(error.code(), Code::EffectFailed, "{error:?}");
    let ack = Settlement::new(leases[0].clone(), Verdict::Ack);
    settle(&engine, ack).await.unwrap();
    engine.broker.close().await.unwrap();
}
