//! `everbus get`: the timeline of an event.

use std::time::Duration;

use everbus::{Bus, HandlerError, Message, RetryPolicy};

use crate::support::{Shop, on_runtime};

/// An event that failed twice in the group `mail` and then worked, or was skipped.
fn failed_twice(shop: &Shop, then_skip: bool) -> String {
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        let bus = Bus::builder()
            .worker_name("mailer\u{1b}[1m-1")
            .retry(RetryPolicy::default().base_delay(Duration::from_millis(1)))
            .open(&url)
            .await
            .unwrap();
        let handler = move |message: Message| {
            std::future::ready(match message.attempt() {
                1 | 2 => Err(HandlerError::new("no mail server")),
                _ if then_skip => Err(everbus::skip("given up")),
                _ => Ok(()),
            })
        };
        bus.subscribe("order.*")
            .group("mail")
            .name("send")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("order.placed", 1)).await.unwrap();
        receipt.settled().await.unwrap();
        bus.shutdown().await.unwrap();
        receipt.id().to_string()
    })
}

// conformance: contract/attempts-cli: the timeline of an event in each group: time, duration, worker and outcome of each attempt
#[test]
fn get_shows_what_became_of_each_attempt() {
    for (skips, how) in [(false, "handled"), (true, "skipped")] {
        let shop = Shop::new();
        let id = failed_twice(&shop, skips);
        let text = shop.run(&["get", &id]).ok();
        assert!(
            text.contains("group        mail: done, attempts: 3"),
            "{text}"
        );
        let lines: Vec<&str> = text.lines().collect();
        let group = lines.iter().position(|l| l.starts_with("group")).unwrap();
        for (line, begins) in lines[group + 1..]
            .iter()
            .zip(["attempt 1 ", "attempt 2 ", how])
        {
            let line = line.trim_start();
            assert!(line.starts_with(begins), "{text}");
            assert!(line.contains(" UTC"), "{text}");
            assert!(
                line.contains(", took ") && line.contains(" ms, on mailer"),
                "{text}"
            );
            let failed = line.ends_with(": no mail server");
            assert_eq!(failed, begins != how, "{text}");
        }
        assert!(!text.contains('\u{1b}'), "{text}");

        let got = shop.run(&["-o", "json", "get", &id]).json();
        let group = &got["groups"][0];
        assert_eq!(
            (&group["state"], &group["attempts"]),
            (&"done".into(), &3.into())
        );
        let failures = group["failures"].as_array().unwrap();
        assert_eq!(failures.len(), 2);
        for made in failures.iter().chain([&group["ended"]]) {
            assert_eq!(made["worker"], "mailer\u{1b}[1m-1");
            assert!(made["at"].is_string() && made["took_us"].is_u64(), "{got}");
        }
        for failure in failures {
            assert_eq!(failure["handler"], "send");
        }
    }
}
