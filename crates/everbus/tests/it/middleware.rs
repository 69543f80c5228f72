//! Middleware that is a function.

use everbus::{Context, Message, Router, middleware, permanent};

use crate::layers::Diary;
use crate::support::{given_up, handled, on_every_engine};

#[tokio::test]
async fn a_function_runs_around_the_handler_and_the_first_is_outermost() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let diary = Diary::default();
        let noting = |name: &'static str| {
            let diary = diary.clone();
            middleware::from_fn(move |message: Message, next| {
                let diary = diary.clone();
                async move {
                    diary.note(format!("{name} before {}", message.handler_name()));
                    let outcome = next.run(message).await;
                    diary.note(format!("{name} after, ok: {}", outcome.is_ok()));
                    outcome
                }
            })
        };
        let inside = diary.clone();
        let handler = move |_: Context| {
            let inside = inside.clone();
            async move { inside.note("handler") }
        };
        let router = Router::new().on("a", handler);
        bus.mount(router.layer(noting("outer")).layer(noting("inner")))
            .await
            .unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("a", 1)).await;
        let expected = [
            "outer before a",
            "inner before a",
            "handler",
            "inner after, ok: true",
            "outer after, ok: true",
        ];
        assert_eq!(diary.read(), expected);
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_function_may_answer_instead_of_the_handler() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let diary = Diary::default();
        let ran = diary.clone();
        let handler = move |_: Context| {
            let ran = ran.clone();
            async move { ran.note("handler") }
        };
        let guard = middleware::from_fn(|message: Message, next| async move {
            match message.json::<u32>()? {
                0 => Err(permanent("zero is refused")),
                _ => next.run(message).await,
            }
        });
        bus.mount(Router::new().on("a", handler).layer(guard))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a", 0)).await;
        assert!(letter.failures[0].error.contains("zero is refused"));
        assert!(diary.read().is_empty(), "the handler did not run");
        handled(&bus, ("a", 1)).await;
        assert_eq!(diary.read(), ["handler"]);
        bus.shutdown().await.unwrap();
    })
    .await;
}
