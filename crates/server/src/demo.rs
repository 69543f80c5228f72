//! The demo: a small shop that runs in the server, so that every page has data. It has orders, payments and parcels.
//! Some steps fail and are retried, and some become dead letters.

use std::time::Duration;

use everbus::{Event, HandlerError, HandlerResult, Message, Result};
use everbus_jobs::events::{ErrorCategory, Json, TaskSpec};
use everbus_jobs::{NewJob, Task, TaskError, Worker};
use serde_json::{Value, json};

use crate::state::AppState;

/// The tenant of the demo's events.
const TENANT: &str = "demo-shop";
const GOODS: &[(&str, u32)] = &[
    ("Teapot", 2900),
    ("Umbrella", 1950),
    ("Bicycle bell", 1200),
    ("Notebook", 650),
    ("Desk lamp", 5400),
    ("Chess set", 3800),
];
const TOWNS: &[&str] = &["Lisbon", "Oslo", "Graz", "Leiden", "Porto", "Turku"];

/// Subscribes the handlers of the shop, and mounts its worker.
pub(crate) async fn open(state: &AppState) -> Result<()> {
    let bus = state.bus();
    bus.subscribe("orders.order.placed")
        .group("payments")
        .name("charge")
        .concurrency(4)
        .retry_with(|policy| policy.max_retries(2).base_delay(Duration::from_secs(2)))
        .timeout(Duration::from_secs(2))
        .handler(charge)
        .await?;
    bus.subscribe("payments.payment.captured")
        .group("shipping")
        .name("pack")
        .concurrency(2)
        .retry_with(|policy| policy.max_retries(3).base_delay(Duration::from_secs(1)))
        .handler(pack)
        .await?;
    bus.subscribe("shipping.parcel.sent")
        .group("mail")
        .name("tell-customer")
        .retry_with(|policy| policy.max_retries(1).base_delay(Duration::from_secs(3)))
        .handler(tell_customer)
        .await?;
    // This group handles one event at a time, a little faster than orders arrive: it has a lag after a burst.
    bus.subscribe("orders.>")
        .group("stock")
        .name("count")
        .concurrency(1)
        .handler(count)
        .await?;
    // An engine without a history has no jobs. The rest of the demo still runs.
    if let Ok(jobs) = state.jobs() {
        Worker::new(jobs)
            .id("demo-worker")
            .concurrency(4)
            .retry(
                everbus::RetryPolicy::default()
                    .max_retries(2)
                    .base_delay(Duration::from_secs(1)),
            )
            .any(renew)
            .mount()
            .await?;
    }
    Ok(())
}

/// Submits a job every few seconds, which renews the catalogue of the shop, until the server stops.
pub(crate) async fn catalogue(state: AppState) {
    let Ok(jobs) = state.jobs() else { return };
    let mut number = 1000 + u64::from(fastrand::u16(..));
    loop {
        number += 1;
        let job = NewJob {
            job_id: Some(format!("catalogue-{number}")),
            tasks: renewal(),
            prefix_ids: true,
            ..NewJob::default()
        };
        match jobs.submit_job(job).await {
            Ok(_) => state.tasks().want(),
            Err(error) => {
                tracing::warn!(target: "everbus::demo", %error, "a job was not stored");
            }
        }
        let pause = Duration::from_millis(fastrand::u64(4000..8000));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = state.stopping() => return,
        }
    }
}

fn renewal() -> Vec<TaskSpec> {
    let task = |id: &str, name: &str, depends_on: &[&str]| TaskSpec {
        task_id: id.to_owned(),
        name: name.to_owned(),
        depends_on: depends_on.iter().map(ToString::to_string).collect(),
        input: Json::empty(),
    };
    vec![
        task("stock", "read-stock", &[]),
        task("prices", "read-prices", &[]),
        task("photos", "shrink-photos", &["stock"]),
        task("texts", "translate", &["stock"]),
        task("offers", "choose-offers", &["stock", "prices"]),
        task("pages", "make-pages", &["photos", "texts", "offers"]),
        task("publish", "publish", &["pages"]),
    ]
}

async fn renew(task: Task) -> Result<Value, TaskError> {
    task.activity("step_running", Some(&task.name));
    work(400..2500).await;
    match fastrand::u8(..100) {
        0..6 => Err(TaskError::new(
            ErrorCategory::Network,
            "the supplier did not answer",
        )),
        6..9 => Err(TaskError::new(
            ErrorCategory::Validation,
            "a photo has no article",
        )),
        _ => Ok(json!({ "done": task.name })),
    }
}

/// Publishes orders, sometimes in bursts, until the server stops.
pub(crate) async fn customers(state: AppState) {
    let mut number = 1000 + u64::from(fastrand::u16(..));
    loop {
        let burst = if fastrand::u8(..20) == 0 { 12 } else { 1 };
        for _ in 0..burst {
            number += 1;
            if let Err(error) = state.bus().publish(order(number)).await {
                tracing::warn!(target: "everbus::demo", %error, "an order was not stored");
            }
        }
        let pause = Duration::from_millis(fastrand::u64(250..900));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = state.stopping() => return,
        }
    }
}

fn order(number: u64) -> everbus::EventBuilder {
    let (article, price) = GOODS[fastrand::usize(..GOODS.len())];
    let quantity = fastrand::u32(1..4);
    Event::builder("orders.order.placed")
        .source("demo/web-shop")
        .app("web-shop")
        .tenant(TENANT)
        .entity("ORDER", number.to_string())
        .json(&json!({
            "order": number,
            "article": article,
            "quantity": quantity,
            "total_cents": price * quantity,
            "town": TOWNS[fastrand::usize(..TOWNS.len())],
        }))
}

async fn charge(message: Message) -> HandlerResult {
    work(30..250).await;
    let order: serde_json::Value = message.json()?;
    match fastrand::u8(..100) {
        0..10 => return Err(HandlerError::new("the bank did not answer")),
        10..13 => {
            return Err(HandlerError::permanent(format!(
                "the card for order {} has expired",
                order["order"]
            )));
        }
        // This takes longer than the timeout of the handler.
        13 => work(5000..6000).await,
        _ => {}
    }
    message.publish(
        Event::builder("payments.payment.captured")
            .source("demo/payments")
            .app("payments")
            .tenant(TENANT)
            .entity("ORDER", order["order"].to_string())
            .json(&json!({ "order": order["order"], "amount_cents": order["total_cents"] })),
    )?;
    Ok(())
}

async fn pack(message: Message) -> HandlerResult {
    work(50..400).await;
    let payment: serde_json::Value = message.json()?;
    if fastrand::u8(..100) < 6 {
        return Err(HandlerError::new("no box of the right size"));
    }
    message.publish(
        Event::builder("shipping.parcel.sent")
            .source("demo/warehouse")
            .app("warehouse")
            .tenant(TENANT)
            .entity("ORDER", payment["order"].to_string())
            .json(
                &json!({ "order": payment["order"], "parcel": format!("P-{}", fastrand::u32(..)) }),
            ),
    )?;
    Ok(())
}

async fn tell_customer(_message: Message) -> HandlerResult {
    work(10..80).await;
    match fastrand::u8(..100) {
        0..4 => Err(HandlerError::new("mailbox full")),
        4..6 => Err(HandlerError::skip("the customer wants no mail")),
        _ => Ok(()),
    }
}

async fn count(_message: Message) -> HandlerResult {
    work(50..550).await;
    Ok(())
}

async fn work(millis: std::ops::Range<u64>) {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(millis))).await;
}
