//! Effects in the transaction of the ack, with tables of the user.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use everbus::{Bus, HandlerError, Json, Router, postgres};
use everbus_testkit::servers::Postgres;

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
