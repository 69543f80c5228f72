//! How a handler may be written.

use everbus::{Context, Json, Message};

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
