//! An order is placed, a notification is sent: retries and a circuit breaker survive an outage.
//!
//! Run it with `cargo run -p everbus-examples --bin orders`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use everbus::{
    BreakerPolicy, Bus, Context, Criticality, Envelope, Event, Json, Payload, Router, State,
    TypedEvent, to, with_correlation_id,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed", key = "order_id")]
struct OrderPlaced {
    order_id: String,
    user_id: String,
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "notifications.notification.sent")]
struct NotificationSent {
    order_id: String,
}

/// A stub for a service on another machine: it accepts one call, refuses six, and then works again.
#[derive(Clone, Default)]
struct NotificationService {
    calls: Arc<AtomicU32>,
}

impl NotificationService {
    async fn send(&self, _user: &str, _message: &str) -> io::Result<()> {
        match self.calls.fetch_add(1, Ordering::SeqCst) {
            1..=6 => Err(io::Error::other("connection refused")),
            _ => Ok(()),
        }
    }
}

/// The handler. Any error means "try again later"; the returned event is published with the ack.
async fn handle_order_placed(
    Payload(order): Payload<OrderPlaced>,
    State(service): State<NotificationService>,
    context: Context,
) -> io::Result<NotificationSent> {
    let OrderPlaced { order_id, user_id } = order;
    let message = format!("Order {order_id} confirmed");
    let sent = service.send(&user_id, &message).await;
    let (attempt, request) = (context.attempt(), context.correlation_id());
    match &sent {
        Ok(()) => println!("  {order_id} attempt {attempt} ({request}): sent to {user_id}"),
        Err(error) => println!("  {order_id} attempt {attempt} ({request}): {error}"),
    }
    sent?;
    Ok(NotificationSent { order_id })
}

fn show_breakers(bus: &Bus) {
    for breaker in bus.breakers() {
        let (name, state, failures) = (breaker.name, breaker.state, breaker.failures);
        println!("  breaker of {name}: {state}, {failures} failures");
    }
}

#[tokio::main]
async fn main() -> everbus::Result<()> {
    let bus = Bus::builder()
        .source("order-service")
        .open("memory:") // a file: "sqlite:orders.db"
        .await?;

    let (tell, mut alerts) = mpsc::unbounded_channel();
    let on_call = move |event: Envelope, Json(alert): Json<Value>| {
        let tell = tell.clone();
        async move {
            let (kind, who) = (event.event_type(), &alert["dependency"]);
            let _ = tell.send(format!("{kind}: {who} (severity {})", alert["severity"]));
        }
    };

    let notify = to(handle_order_placed)
        .group("notification-service")
        .concurrency(1) // so that the lines below come in order
        .retry_with(|policy| policy.max_retries(5).base_delay(Duration::from_millis(20)))
        .timeout(Duration::from_secs(30))
        .breaker(BreakerPolicy::default().open_for(Duration::from_secs(1)))
        .criticality(Criticality::Critical); // while the breaker is open, orders wait
    bus.mount(
        Router::new()
            .on("orders.order.placed", notify)
            .on("system.*", to(on_call).group("on-call"))
            .with_state(NotificationService::default()),
    )
    .await?;
    bus.start().await?;

    println!("One order, and the notification service is up.");
    let order = |number: u32| OrderPlaced {
        order_id: format!("order-{number}"),
        user_id: format!("user-{number}"),
    };
    let receipt = with_correlation_id("request-1", bus.publish(order(1))).await?;
    receipt.settled().await?;

    println!("\nIt goes down. Three more orders; five failures open the circuit breaker.");
    let more = bus.publish_batch((2..=4).map(order));
    let receipts = with_correlation_id("request-2", more).await?;
    if let Some(alert) = alerts.recv().await {
        println!("  ALERT {alert}");
    }
    show_breakers(&bus);
    println!("The service is not called now, and no attempt is spent.");

    println!("\nOne probe at a time finds out whether it is back.");
    for receipt in &receipts {
        receipt.settled().await?;
    }
    if let Some(alert) = alerts.recv().await {
        println!("  ALERT {alert}");
    }
    show_breakers(&bus);

    let dead = bus.dead_letters().list().await?.len();
    bus.shutdown().await?;
    let stats = bus.stats(); // complete once the bus is shut down
    let orders = &stats.types[OrderPlaced::TYPE];
    let sent = stats.types[NotificationSent::TYPE].published;
    let (placed, failed) = (orders.published, orders.failed);
    println!(
        "\n{placed} orders placed, {failed} attempts failed, {sent} notifications sent, {dead} dead letters."
    );
    Ok(())
}
