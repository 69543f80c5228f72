//! How a handler may be written.

use everbus::{
    Context, Event, HandlerError, IntoOutcome, Json, Message, Payload, Router, State, debug_handler,
};
use serde::{Deserialize, Serialize};

use super::Runs;
use crate::support::{handled, on_every_engine, published};

// conformance: handlers/handler-one-verb: subscribe(pattern).handler takes every handler: functions and closures, of the message, of extractors or of nothing.
#[tokio::test]
async fn a_subscription_takes_every_handler() {
    async fn invoice(Json(n): Json<u64>, context: Context) -> Result<(&'static str, u64), String> {
        match context.attempt() {
            1 => Ok(("invoiced", n)),
            other => Err(format!("attempt {other}")),
        }
    }
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (of_nothing, of_message) = (Runs::default(), Runs::default());
        let nothing = {
            let runs = of_nothing.clone();
            move || {
                runs.add();
                async {}
            }
        };
        let message = {
            let runs = of_message.clone();
            move |message: Message| {
                let runs = runs.clone();
                async move {
                    assert_eq!(message.json::<u64>()?, 7);
                    runs.add();
                    everbus::handled()
                }
            }
        };
        bus.subscribe("a").handler(nothing).await.unwrap();
        bus.subscribe("a").handler(message).await.unwrap();
        bus.subscribe("a").handler(invoice).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("a", 7)).await;
        assert_eq!((of_nothing.get(), of_message.get()), (1, 1));
        assert_eq!(published(&bus, "invoiced").await.len(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed")]
struct Placed {
    order: u64,
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "billing.invoice.sent")]
struct Sent {
    order: u64,
}

/// As it is written, with its documentation.
#[debug_handler]
async fn invoice(
    Payload(mut placed): Payload<Placed>,
    State(runs): State<Runs>,
    _context: Option<Context>,
) -> Result<Sent, HandlerError> {
    placed.order += 1;
    runs.add();
    Ok(Sent {
        order: placed.order,
    })
}

#[debug_handler]
async fn hidden(State(runs): State<Runs>) -> impl IntoOutcome {
    runs.add();
    ("billing.noted", 1)
}

#[debug_handler]
async fn nothing() {}

/// No handler, and not compiled.
#[debug_handler]
#[cfg(any())]
async fn absent(_runs: Runs) {}

// conformance: handlers/handler-debug: #[debug_handler] changes nothing else: the function is the handler it was.
#[tokio::test]
async fn a_function_that_is_checked_is_the_handler_it_was() {
    /// Only known here.
    #[derive(Clone)]
    struct Local(Runs);

    #[debug_handler]
    async fn local(State(Local(runs)): State<Local>) {
        runs.add();
    }
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let runs = Runs::default();
        let router = Router::new()
            .on("orders.order.placed", invoice)
            .on("orders.order.placed", hidden)
            .on("orders.order.placed", local)
            .on("orders.order.placed", nothing)
            .with_state(Local(runs.clone()))
            .with_state(runs.clone());
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, Placed { order: 41 }).await;
        assert_eq!(runs.get(), 3);
        let sent = published(&bus, "billing.*.sent").await;
        assert_eq!(sent[0].event.typed::<Sent>().unwrap().order, 42);
        assert_eq!(published(&bus, "billing.noted").await.len(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}
