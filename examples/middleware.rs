//! Middleware around handlers: a custom tower layer for times and an audit, and one of tower's layers.
//!
//! Run it with `cargo run -p everbus-examples --bin middleware`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use everbus::core::BoxFuture;
use everbus::{
    BoxError, Bus, Event, HandlerError, HandlerService, Message, Outcome, Payload, Router, State,
    permanent, to,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{self, UnboundedSender};
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::{Layer, Service};

#[derive(Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed", key = "order")]
struct OrderPlaced {
    order: u32,
    street: String,
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "shipping.parcel.sent", key = "order")]
struct ParcelSent {
    order: u32,
}

/// One line of the audit: which handler did what with which event, and how long it took.
struct Entry {
    line: String,
    took: Duration,
}

/// The layer: it writes an entry for every run of a handler.
#[derive(Clone, Default)]
struct Audit {
    entries: Arc<Mutex<Vec<Entry>>>,
}

impl Layer<HandlerService> for Audit {
    type Service = Audited;

    fn layer(&self, handler: HandlerService) -> Audited {
        Audited {
            handler,
            audit: self.clone(),
        }
    }
}

/// The handler inside the layer.
#[derive(Clone)]
struct Audited {
    handler: HandlerService,
    audit: Audit,
}

impl Service<Message> for Audited {
    type Response = Outcome;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Outcome, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.handler.poll_ready(context)
    }

    fn call(&mut self, message: Message) -> Self::Future {
        let entries = self.audit.entries.clone();
        let started = Instant::now();
        let run = self.handler.call(message.clone());
        Box::pin(async move {
            let result = run.await;
            let what = match &result {
                Ok(outcome) => format!("done, publishes {}", outcome.events().len()),
                Err(error) => format!("failed: {error}"),
            };
            let (handler, attempt) = (message.handler_name(), message.attempt());
            let order = message.ordering_key().unwrap_or_default();
            let line = format!("{handler} order {order}, attempt {attempt}: {what}");
            let entry = Entry {
                line,
                took: started.elapsed(),
            };
            entries
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(entry);
            result // passed on as it is, so that permanent, retry_after and skip keep their meaning
        })
    }
}

/// How many handlers are in the warehouse now, and the most so far.
#[derive(Clone, Default)]
struct Warehouse {
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

async fn ship(
    Payload(placed): Payload<OrderPlaced>,
    State(warehouse): State<Warehouse>,
) -> Result<ParcelSent, HandlerError> {
    if placed.street.is_empty() {
        return Err(permanent("there is no address"));
    }
    let now = warehouse.now.fetch_add(1, Ordering::SeqCst) + 1;
    warehouse.most.fetch_max(now, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(10)).await;
    warehouse.now.fetch_sub(1, Ordering::SeqCst);
    Ok(ParcelSent {
        order: placed.order,
    })
}

async fn thank(Payload(sent): Payload<ParcelSent>, State(thanked): State<UnboundedSender<u32>>) {
    let _ = thanked.send(sent.order);
}

#[tokio::main]
async fn main() -> everbus::Result<()> {
    let audit = Audit::default();
    let warehouse = Warehouse::default();
    let (thanked, mut customers) = mpsc::unbounded_channel::<u32>();
    let router = Router::new()
        .on(
            "orders.order.placed",
            // The group handles 16 events at once; in the warehouse there is room for two.
            to(ship)
                .name("ship")
                .group("warehouse")
                .layer(GlobalConcurrencyLimitLayer::new(2)),
        )
        .on(
            "shipping.parcel.sent",
            to(thank).name("thank").group("mail"),
        )
        .layer(audit.clone()) // around every handler of the router, outside of its own layers
        .with_state(warehouse.clone())
        .with_state(thanked);

    let bus = Bus::open("memory:").await?;
    bus.mount(router).await?;
    bus.start().await?;

    println!("Six orders, the last one without an address.");
    let orders = (1..=6).map(|order| OrderPlaced {
        order,
        street: if order == 6 {
            String::new()
        } else {
            format!("Mill Lane {order}")
        },
    });
    for receipt in bus.publish_batch(orders).await? {
        receipt.settled().await?;
    }
    let mut told = BTreeSet::new();
    while told.len() < 5 {
        told.extend(customers.recv().await);
    }
    println!("  The customers of the orders {told:?} know that their parcels are on the way.");
    bus.shutdown().await?;

    println!("\nThe audit:");
    let mut entries = audit.entries.lock().unwrap_or_else(PoisonError::into_inner);
    entries.sort_by(|a, b| a.line.cmp(&b.line));
    for entry in entries.iter() {
        println!("  {} ({} ms)", entry.line, entry.took.as_millis());
    }
    println!(
        "\nAt most {} handlers were in the warehouse at once.",
        warehouse.most.load(Ordering::SeqCst)
    );
    Ok(())
}
