//! User middleware: tower layers around a handler.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context as Poller, Poll};
use std::time::Duration;

use everbus::core::BoxFuture;
use everbus::{
    BoxError, Context, Event, FailureKind, HandlerError, HandlerService, Json, Message, Outcome,
    RetryPolicy, Router, permanent, retry_after, skip, to,
};
use tower::limit::ConcurrencyLimitLayer;
use tower::timeout::TimeoutLayer;
use tower_layer::{Layer, layer_fn};
use tower_service::Service;

use crate::support::{
    counted, given_up, handled, is_done, on_every_engine, published, recorder, wait_for_retry,
};

/// What happened, in order.
#[derive(Clone, Default)]
pub(crate) struct Diary(Arc<Mutex<Vec<String>>>);

impl Diary {
    pub(crate) fn note(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }

    pub(crate) fn read(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

/// A layer that notes when it is passed, in and out.
#[derive(Clone)]
pub(crate) struct Noting {
    name: &'static str,
    diary: Diary,
}

impl Noting {
    pub(crate) fn new(name: &'static str, diary: &Diary) -> Self {
        let diary = diary.clone();
        Self { name, diary }
    }
}

impl Layer<HandlerService> for Noting {
    type Service = Noted;

    fn layer(&self, inner: HandlerService) -> Noted {
        let layer = self.clone();
        Noted { layer, inner }
    }
}

#[derive(Clone)]
pub(crate) struct Noted {
    layer: Noting,
    inner: HandlerService,
}

impl Service<Message> for Noted {
    type Response = Outcome;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Outcome, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Poller<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, message: Message) -> Self::Future {
        let Noting { name, diary } = self.layer.clone();
        diary.note(format!("{name} in"));
        let run = self.inner.call(message);
        Box::pin(async move {
            let outcome = run.await;
            match &outcome {
                Ok(outcome) => diary.note(format!("{name} out: {}", outcome.events().len())),
                Err(error) => diary.note(format!("{name} out: {error}")),
            }
            outcome
        })
    }
}

/// A layer that is a function of the message and the handler.
pub(crate) fn layer<F, Fut>(run: F) -> impl Layer<HandlerService, Service = Custom<F>> + Clone
where
    F: Fn(Message, HandlerService) -> Fut + Clone,
{
    layer_fn(move |inner| Custom {
        run: run.clone(),
        inner,
    })
}

#[derive(Clone)]
pub(crate) struct Custom<F> {
    run: F,
    inner: HandlerService,
}

impl<F, Fut> Service<Message> for Custom<F>
where
    F: Fn(Message, HandlerService) -> Fut,
    Fut: Future<Output = Result<Outcome, BoxError>>,
{
    type Response = Outcome;
    type Error = BoxError;
    type Future = Fut;

    fn poll_ready(&mut self, cx: &mut Poller<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, message: Message) -> Fut {
        (self.run)(message, self.inner.clone())
    }
}

// conformance: handlers/layers-order: of several layers the first is the outermost; those of an outer router go around those of an inner one, those of the route are the innermost.
// conformance: framework/framework-middleware: cross-cutting concerns are applied to all consumers in one place.
#[tokio::test]
async fn layers_run_from_the_outermost_in_and_back_out() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let diary = Diary::default();
        let noting = |name| Noting::new(name, &diary);
        let inside = diary.clone();
        let handler = move || {
            inside.note("handler");
            async { ("b", 1) }
        };
        let route = to(handler)
            .layer(noting("route 1"))
            .layer(noting("route 2"));
        let inner = Router::new().on("a", route).layer(noting("inner"));
        let outer = Router::new()
            .merge(inner)
            .layer(noting("outer 1"))
            .layer(noting("outer 2"));
        bus.mount(outer).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("a", 0)).await;
        let expected = [
            "outer 1 in",
            "outer 2 in",
            "inner in",
            "route 1 in",
            "route 2 in",
            "handler",
            "route 2 out: 1",
            "route 1 out: 1",
            "inner out: 1",
            "outer 2 out: 1",
            "outer 1 out: 1",
        ];
        assert_eq!(diary.read(), expected);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/layers-answers: what a handler answers with its error survives a layer that only knows errors.
#[tokio::test]
async fn the_answer_of_a_handler_survives_a_layer() {
    #[derive(Debug)]
    struct Wrapped(BoxError);

    impl std::fmt::Display for Wrapped {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("the layer adds its own word")
        }
    }

    impl std::error::Error for Wrapped {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&*self.0)
        }
    }

    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let wrapping = layer(|message, mut inner: HandlerService| async move {
            let outcome = inner.call(message).await;
            outcome.map_err(|error| BoxError::from(Wrapped(error)))
        });
        let wait = Duration::from_secs(99);
        let handler = move |Json(kind): Json<String>| async move {
            match kind.as_str() {
                "permanent" => Err(permanent("for good")),
                "later" => Err(retry_after("later", wait)),
                "skip" => Err(skip("not mine")),
                _ => Err(HandlerError::new("plain")),
            }
            .map(|()| Outcome::default())
        };
        let router = Router::new().on("a", handler).layer(wrapping.clone());
        bus.mount(router.layer(wrapping)).await.unwrap();
        bus.start().await.unwrap();

        let letter = given_up(&bus, ("a", "permanent")).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Permanent);
        assert!(letter.last_error().contains("for good"));
        let later = bus.publish(("a", "later")).await.unwrap();
        let state = wait_for_retry(&bus, later.seq(), "", 1).await;
        assert_eq!(
            state.due_at.unwrap(),
            everbus::Clock::now(&lab.clock).plus(wait)
        );
        let skipped = handled(&bus, ("a", "skip")).await;
        assert!(is_done(&bus, skipped.seq(), "").await);
        assert_eq!(counted(&bus).await.types["a"].skipped.handler, 1);
        let plain = bus.publish(("a", "plain")).await.unwrap();
        let state = wait_for_retry(&bus, plain.seq(), "", 1).await;
        assert_eq!(state.failures[0].kind, FailureKind::Error);
        assert!(state.failures[0].error.contains("plain"), "{state:?}");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/layers-answers: a layer may answer itself, and may add events to the ack.
#[tokio::test]
async fn a_layer_may_answer_instead_of_the_handler_and_add_events() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(|_| Ok(()));
        let gate = layer(|message: Message, mut inner: HandlerService| async move {
            match message.json::<u32>()? {
                0 => Err(BoxError::from(permanent("not allowed in"))),
                1 => Ok(Outcome::default()),
                _ => Ok(inner.call(message).await?.publish(("b", "added"))?),
            }
        });
        bus.subscribe("a")
            .layer(gate)
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a", 0)).await;
        assert_eq!(letter.last_error(), "not allowed in");
        handled(&bus, ("a", 1)).await;
        assert!(seen.is_empty());
        handled(&bus, ("a", 2)).await;
        seen.next().await;
        assert_eq!(published(&bus, "b").await.len(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/layers-tower: tower's own timeout composes: what it cuts is a failed attempt.
#[tokio::test]
async fn the_timeout_of_tower_cuts_a_handler() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let router = Router::new()
            .on("a", |Json(hangs): Json<bool>| async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
            })
            .layer(TimeoutLayer::new(Duration::from_millis(20)));
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a", true)).await;
        assert_eq!(letter.last_error(), "request timed out");
        handled(&bus, ("a", false)).await;
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/layers-tower: tower's own concurrency limit composes and holds over all events of its handler.
#[tokio::test]
async fn the_concurrency_limit_of_tower_holds_over_all_events() {
    const LIMIT: usize = 2;
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (inside, highest) = (running.clone(), most.clone());
        let handler = move || {
            let (running, most) = (inside.clone(), highest.clone());
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                // Everybody who may run gets to.
                for _ in 0..100 {
                    tokio::task::yield_now().await;
                }
                running.fetch_sub(1, Ordering::SeqCst);
            }
        };
        let limited = to(handler).layer(ConcurrencyLimitLayer::new(LIMIT));
        let router = Router::new().on("a", limited).concurrency(8);
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        for receipt in bus.publish_batch((0..40).map(|n| ("a", n))).await.unwrap() {
            assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        }
        assert_eq!(most.load(Ordering::SeqCst), LIMIT);
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// A layer that panics when it is asked whether it is ready.
#[derive(Clone)]
struct Unready(HandlerService);

impl Service<Message> for Unready {
    type Response = Outcome;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Outcome, BoxError>>;

    fn poll_ready(&mut self, _: &mut Poller<'_>) -> Poll<Result<(), BoxError>> {
        panic!("before the call of a layer");
    }

    fn call(&mut self, message: Message) -> Self::Future {
        self.0.call(message)
    }
}

// conformance: handlers/layers-panic: a panic in a layer is a failed attempt like any other, wherever in the layer it is.
// conformance: fault-4/layer-panic: a panic in a layer does not fall through to the ack.
#[tokio::test]
async fn a_panic_in_a_layer_is_a_failed_attempt() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let at_once = layer(|_, _| -> std::future::Ready<Result<Outcome, BoxError>> {
            panic!("in the call of a layer");
        });
        let after = layer(|message, mut inner: HandlerService| async move {
            let outcome = inner.call(message).await;
            assert!(outcome.is_err(), "after the handler");
            outcome
        });
        let router = Router::new()
            .on("ready", to(|| async {}).layer(layer_fn(Unready)))
            .on("call", to(|| async {}).layer(at_once))
            .on("after", to(|| async { ("b", 1) }).layer(after))
            .concurrency(1);
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        for (event_type, said) in [
            ("ready", "before the call of a layer"),
            ("call", "in the call of a layer"),
            ("after", "after the handler"),
            ("call", "in the call of a layer"),
        ] {
            let letter = given_up(&bus, (event_type, 1)).await;
            assert_eq!(letter.failures[0].kind, FailureKind::Panic);
            assert!(letter.last_error().contains(said), "{letter:?}");
        }
        assert!(published(&bus, "b").await.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/layers-attempt: a layer runs once for each attempt and is told which it is.
#[tokio::test]
async fn a_layer_runs_for_every_attempt() {
    on_every_engine(|lab| async move {
        let policy = RetryPolicy::default().max_retries(1);
        let bus = lab.open_with(lab.builder().retry(policy)).await;
        let diary = Diary::default();
        let notes = diary.clone();
        let watching = layer(move |message: Message, mut inner: HandlerService| {
            notes.note(format!("{} {}", message.handler_name(), message.attempt()));
            async move { inner.call(message).await }
        });
        let fragile = |context: Context| async move {
            (context.attempt() > 1).then_some(()).ok_or("not yet")
        };
        let route = to(fragile).name("fragile").layer(watching);
        bus.mount(Router::new().on("a", route)).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(Event::builder("a")).await.unwrap();
        let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
        lab.clock.set(state.due_at.unwrap());
        receipt.settled().await.unwrap();
        assert_eq!(diary.read(), ["fragile 1", "fragile 2"]);
        bus.shutdown().await.unwrap();
    })
    .await;
}
