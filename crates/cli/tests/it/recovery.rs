//! What a process that was killed had in flight, seen by the next one.

use std::io::{BufRead as _, BufReader};
use std::time::Duration;

use everbus::{Bus, HandlerError, Message, RetryPolicy, StartFrom};

use crate::support::{Shop, on_runtime};

// conformance: embedded/recovery-normal-flow: a recovered event is tried again by its policy, waits between attempts, and ends in the dead letters
#[test]
fn a_recovered_event_is_retried_and_then_dead_lettered() {
    let shop = Shop::new();
    // A process that publishes one event, takes it in flight and never settles it.
    let mut holder = shop
        .command(&["bench", "--only-child", "hold", "--events", "1"])
        .spawn()
        .unwrap();
    let mut held = String::new();
    let mut out = BufReader::new(holder.stdout.take().unwrap());
    out.read_line(&mut held).unwrap();
    assert_eq!(held, "holding 1\n");
    holder.kill().unwrap();
    holder.wait().unwrap();

    let url = format!("sqlite:{}", shop.db().display());
    let letters = on_runtime(async {
        let bus = Bus::open(&url).await.unwrap();
        bus.subscribe("bench.>")
            .group("bench")
            .start_from(StartFrom::First)
            .retry(
                RetryPolicy::default()
                    .max_retries(2)
                    .base_delay(Duration::from_millis(1)),
            )
            .handler(|m: Message| {
                let error = HandlerError::new(format!("attempt {} failed", m.attempt()));
                std::future::ready(Err::<(), _>(error))
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let deadline = tokio::time::Instant::now() + Duration::from_secs(180);
        let letters = loop {
            let letters = bus.dead_letters().list().await.unwrap();
            if !letters.is_empty() {
                break letters;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "it never died: {:?}",
                bus.groups().await
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        bus.shutdown().await.unwrap();
        letters
    });
    assert_eq!(letters.len(), 1);
    // The attempt that the crash took counts, and the two that were left follow it.
    assert_eq!(letters[0].attempts, 3);
    let errors: Vec<&str> = letters[0]
        .failures
        .iter()
        .map(|f| f.error.as_str())
        .collect();
    assert_eq!(errors.len(), 3, "{errors:?}");
    assert_eq!(errors[1..], ["attempt 2 failed", "attempt 3 failed"]);
}
