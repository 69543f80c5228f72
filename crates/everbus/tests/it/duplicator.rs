//! Everything delivered twice: who minds, and who does not.

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use everbus::core::{
    BoxFuture, ConsumeOptions, Consumer, Delivery, GroupSpec, Inbox, Lease, Settlement,
    SubscriptionSpec, Verdict,
};
use everbus::testing::{Duplicator, Fate, TestBus, TestBusBuilder};
use everbus::{
    Bus, Code, Context, Engine, Envelope, Event, EventId, GroupName, HandlerError, Json,
    ManualClock, Payload, Recorded, Result, RetryPolicy, Router, StartFrom, State, Timestamp, skip,
    sqlite, to,
};
use serde::{Deserialize, Serialize};

/// Counts what was done, and fails as often as it is told before it does anything.
#[derive(Clone, Default)]
struct Mailer {
    sent: Arc<Mutex<Vec<u32>>>,
    failures: Arc<Mutex<u32>>,
}

impl Mailer {
    fn failing(times: u32) -> Self {
        let mailer = Self::default();
        *mailer.failures.lock().unwrap() = times;
        mailer
    }

    fn send(&self, mail: u32) -> Result<(), HandlerError> {
        let mut failures = self.failures.lock().unwrap();
        if *failures > 0 {
            *failures -= 1;
            return Err(HandlerError::new("the mail server is down"));
        }
        self.sent.lock().unwrap().push(mail);
        Ok(())
    }

    fn sent(&self) -> Vec<u32> {
        self.sent.lock().unwrap().clone()
    }
}

async fn send(Json(mail): Json<u32>, State(mailer): State<Mailer>) -> Result<(), HandlerError> {
    mailer.send(mail)
}

async fn duplicating(router: Router) -> TestBus {
    let builder = TestBus::builder().duplicate_deliveries();
    builder.open(router).await.unwrap()
}

/// A test bus on every engine that delivers everything twice.
async fn everywhere<Fut: Future<Output = ()>>(test: impl Fn(TestBusBuilder) -> Fut) {
    crate::logs::listen();
    eprintln!("in memory");
    test(TestBus::builder().duplicate_deliveries()).await;
    eprintln!("on a file");
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("test.db").display());
    test(TestBus::builder().duplicate_deliveries().with_real(url)).await;
}

// conformance: handlers/duplicator: a Duplicator delivers everything twice; a plain handler shows two effects, an idempotent one shows one
#[tokio::test]
async fn a_plain_handler_runs_twice_and_an_idempotent_one_once() {
    everywhere(|builder| async move {
        let (plain, careful) = (Mailer::default(), Mailer::default());
        let router = Router::new()
            .merge(
                Router::new()
                    .on("mail", to(send).group("plain").name("plain"))
                    .with_state(plain.clone()),
            )
            .merge(
                Router::new()
                    .on(
                        "mail",
                        to(send).group("careful").name("careful").idempotent(),
                    )
                    .with_state(careful.clone()),
            );
        let bus = builder.open(router).await.unwrap();
        for mail in 1..=3 {
            bus.publish(("mail", mail)).await.unwrap().assert_handled();
        }
        assert_eq!(plain.sent(), [1, 1, 2, 2, 3, 3]);
        assert_eq!(careful.sent(), [1, 2, 3]);
        assert_eq!((bus.calls("plain"), bus.calls("careful")), (6, 3));
        let stats = bus.bus().stats();
        assert_eq!(stats.groups[&"careful".parse().unwrap()].inbox_hits, 3);
        assert_eq!(stats.groups[&"plain".parse().unwrap()].inbox_hits, 0);
    })
    .await;
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "bank.deposit.made")]
struct Deposit {
    amount: i64,
}

async fn book(Payload(deposit): Payload<Deposit>) -> sqlite::InTransaction {
    sqlite::in_transaction(move |tx| {
        tx.execute("CREATE TABLE IF NOT EXISTS bookings (amount INTEGER)", ())?;
        tx.execute("INSERT INTO bookings VALUES (?1)", [deposit.amount])?;
        Ok::<_, HandlerError>(("bank.deposit.booked", deposit.amount))
    })
}

// conformance: handlers/duplicator: everything is delivered twice: a plain handler shows two effects, an idempotent or exactly-once one shows one
#[tokio::test]
async fn an_exactly_once_effect_happens_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bank.db");
    let bus = TestBus::builder()
        .with_real(file.display().to_string())
        .duplicate_deliveries()
        .open(Router::new().on("bank.deposit.made", to(book).name("book")))
        .await
        .unwrap();
    // Also after an attempt that failed.
    bus.fail_next(1);
    bus.publish_only(Deposit { amount: 40 }).await.unwrap();
    bus.run_to_end().await.unwrap();
    bus.publish(Deposit { amount: 2 })
        .await
        .unwrap()
        .assert_handled();
    assert_eq!(bus.calls("book"), 3);
    assert_eq!(bus.published_events("bank.deposit.booked").len(), 2);
    bus.assert_no_dead_letters().await;
    bus.shutdown().await.unwrap();
    let file = everbus::rusqlite::Connection::open(file).unwrap();
    let sum = "SELECT count(*), sum(amount) FROM bookings";
    let booked: (u32, i64) = file
        .query_row(sum, (), |r| Ok((r.get(0)?, r.get(1)?)))
        .unwrap();
    assert_eq!(booked, (2, 42));
}

/// The ids a handler has dealt with, in a table of its own.
#[derive(Clone, Default)]
struct Processed(Arc<Mutex<BTreeSet<EventId>>>);

impl Processed {
    fn contains(&self, id: EventId) -> bool {
        self.0.lock().unwrap().contains(&id)
    }

    /// Whether it was new.
    fn insert(&self, id: EventId) -> bool {
        self.0.lock().unwrap().insert(id)
    }
}

async fn record_first(
    Json(mail): Json<u32>,
    envelope: Envelope,
    State(mailer): State<Mailer>,
    State(processed): State<Processed>,
) -> Result<(), HandlerError> {
    if processed.insert(envelope.id()) {
        mailer.send(mail)?;
    }
    Ok(())
}

async fn record_last(
    Json(mail): Json<u32>,
    envelope: Envelope,
    State(mailer): State<Mailer>,
    State(processed): State<Processed>,
) -> Result<(), HandlerError> {
    if !processed.contains(envelope.id()) {
        mailer.send(mail)?;
        processed.insert(envelope.id());
    }
    Ok(())
}

// conformance: fault-8: an idempotency record that is written before the effect is found out
// conformance: handlers/duplicator: everything is delivered twice: a plain handler shows two effects, an idempotent or exactly-once one shows one
#[tokio::test]
async fn a_handler_that_writes_its_record_before_the_effect_is_found_out() {
    for (name, handler, mails) in [
        ("first", to(record_first), vec![]),
        ("last", to(record_last), vec![7]),
    ] {
        let mailer = Mailer::failing(1);
        let router = Router::new()
            .on("mail", handler)
            .with_state(mailer.clone())
            .with_state(Processed::default());
        let bus = duplicating(router).await;
        let report = bus.publish(("mail", 7)).await.unwrap();
        bus.run_to_end().await.unwrap();
        // The bus cannot tell; what was sent can.
        bus.assert_handled(report.id());
        assert_eq!(mailer.sent(), mails, "record {name}");
    }
}

/// An inbox with the fault: an event counts as handled as soon as it was asked for.
struct Hasty {
    inner: Arc<dyn Inbox>,
    asked: Processed,
}

impl Inbox for Hasty {
    fn handled(
        &self,
        group: GroupName,
        events: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<Vec<bool>>> {
        Box::pin(async move {
            let known = self.inner.handled(group, events.clone()).await?;
            let mark = |(event, known): (&Arc<Recorded>, bool)| {
                !self.asked.insert(event.event.id()) || known
            };
            Ok(events.iter().zip(known).map(mark).collect())
        })
    }

    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        self.inner.forget(before)
    }
}

// conformance: fault-8: an idempotency record that is written before the effect is found out
#[tokio::test]
async fn an_inbox_that_records_before_the_effect_is_found_out() {
    for hasty in [false, true] {
        let clock = ManualClock::default();
        let bus = Bus::builder()
            .clock(clock.clone())
            .open("memory:")
            .await
            .unwrap();
        let mut engine = bus.engine().clone();
        if hasty {
            engine.inbox = Some(Arc::new(Hasty {
                inner: engine.inbox.clone().unwrap(),
                asked: Processed::default(),
            }));
        }
        let mailer = Mailer::failing(1);
        let router = Router::new()
            .on("mail", to(send).idempotent())
            .with_state(mailer.clone());
        let builder = TestBus::builder().clock(clock).engine(engine);
        let bus = builder.duplicate_deliveries().open(router).await.unwrap();
        bus.publish(("mail", 7)).await.unwrap();
        bus.run_to_end().await.unwrap();
        let expected: &[u32] = if hasty { &[] } else { &[7] };
        assert_eq!(mailer.sent(), expected, "hasty: {hasty}");
    }
}

// conformance: handlers/duplicator: everything is delivered twice: a plain handler shows two effects, an idempotent or exactly-once one shows one
#[tokio::test]
async fn what_comes_of_the_second_delivery_changes_nothing() {
    everywhere(|builder| async move {
        // Fails whenever it has seen the event before.
        let handler = |envelope: Envelope, State(seen): State<Processed>| async move {
            match seen.insert(envelope.id()) {
                true => Ok(("caused", 1)),
                false => Err(HandlerError::new("twice")),
            }
        };
        let router = Router::new()
            .on("mail", to(handler).name("h").retry(RetryPolicy::never()))
            .with_state(Processed::default());
        let bus = builder.open(router).await.unwrap();
        let report = bus.publish(("mail", 1)).await.unwrap();
        assert_eq!(bus.calls("h"), 2);
        assert_eq!(report.fate("(unnamed)"), Some(&Fate::Handled));
        // It is told all the same.
        let failures: Vec<_> = report.failures().map(|f| f.error.as_str()).collect();
        assert_eq!(failures, ["twice"]);
        assert_eq!(bus.published_events("caused").len(), 1);
        bus.run_to_end().await.unwrap();
        assert_eq!(bus.calls("h"), 2);
        bus.assert_no_dead_letters().await;
    })
    .await;
}

// conformance: handlers/duplicator: everything is delivered twice: a plain handler shows two effects, an idempotent or exactly-once one shows one
#[tokio::test]
async fn failed_attempts_are_not_repeated_and_skipped_events_are() {
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let seen = attempts.clone();
    let fails = move |context: Context| {
        seen.lock().unwrap().push(context.attempt());
        async { Err::<(), _>(HandlerError::new("down")) }
    };
    let skips = || async { Err::<(), _>(skip("not mine")) };
    let router = Router::new()
        .on("a", to(fails).group("failing"))
        .on("a", to(skips).group("choosy").name("choosy"));
    let bus = duplicating(router).await;
    bus.publish(("a", 1)).await.unwrap();
    bus.run_to_end().await.unwrap();
    assert_eq!(*attempts.lock().unwrap(), [1, 2, 3, 4]);
    assert_eq!(bus.dead_letters().await.unwrap().len(), 1);
    assert_eq!(bus.calls("choosy"), 2);
}

/// An engine that delivers twice, with a group of two events, and a consumer of it.
async fn two_events() -> (Engine, Box<dyn Consumer>) {
    let bus = Bus::open("memory:").await.unwrap();
    let engine = Duplicator::wrap(bus.engine().clone());
    let group = GroupName::new("g").unwrap();
    let spec = GroupSpec {
        name: group.clone(),
        start_from: StartFrom::First,
        ordered: false,
        ephemeral: false,
        subscriptions: vec![SubscriptionSpec {
            name: "s".into(),
            pattern: "*".parse().unwrap(),
        }],
    };
    engine.broker.declare(spec).await.unwrap();
    let events = ["a", "b"].map(|name| Event::builder(name).build().unwrap());
    engine.broker.append(events.into()).await.unwrap();
    let options = ConsumeOptions::new(vec!["*".parse().unwrap()]);
    let consumer = engine.broker.consume(group, options).await.unwrap();
    (engine, consumer)
}

async fn in_flight(engine: &Engine) -> u64 {
    engine.broker.inspect().await.unwrap()[0].in_flight
}

fn ack(delivery: &Delivery) -> Settlement {
    Settlement::new(delivery.lease.clone(), Verdict::Ack)
}

/// What a future comes to without waiting.
async fn now<T>(future: &mut BoxFuture<'_, T>) -> Option<T> {
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// What a fetch returns at once.
async fn at_once(consumer: &mut Box<dyn Consumer>) -> Option<Vec<Delivery>> {
    now(&mut consumer.fetch(10))
        .await
        .map(|batch| batch.unwrap())
}

// conformance: handlers/duplicator: everything is delivered twice: a plain handler shows two effects, an idempotent or exactly-once one shows one
#[tokio::test]
async fn a_settled_delivery_comes_once_more_to_the_same_consumer() {
    let (engine, mut consumer) = two_events().await;
    let firsts = consumer.fetch(10).await.unwrap();
    assert_eq!(firsts.len(), 2);
    assert!(at_once(&mut consumer).await.is_none());
    let [a, b] = &firsts[..] else { unreachable!() };
    engine.broker.settle(vec![ack(a)]).await.unwrap();
    assert_eq!(in_flight(&engine).await, 2, "b, and the copy of a");

    // Dropping a fetch loses nothing.
    drop(consumer.fetch(10));
    let copies = consumer.fetch(10).await.unwrap();
    let [copy] = &copies[..] else {
        panic!("{copies:?}")
    };
    assert_eq!((&copy.record, copy.attempt), (&a.record, a.attempt));
    assert_ne!(copy.lease, a.lease);
    assert!(at_once(&mut consumer).await.is_none());

    // Copies and others in one batch are answered in order, and only the others reach the engine.
    let [claimed, token] = b.lease.words();
    let unknown = Lease::new(b.lease.position(), [claimed, token + 99]);
    let leases = vec![unknown.clone(), copy.lease.clone(), b.lease.clone()];
    let extended = engine
        .broker
        .extend(leases, Duration::from_secs(1))
        .await
        .unwrap();
    assert!(extended[0].is_err() && extended[1].is_ok() && extended[2].is_ok());
    let lost = Settlement::new(unknown, Verdict::Ack);
    let dead = Settlement::new(copy.lease.clone(), Verdict::Dead { failure: None });
    let answers = engine
        .broker
        .settle(vec![lost, dead, ack(b)])
        .await
        .unwrap();
    assert_eq!(answers[0].as_ref().unwrap_err().code(), Code::LeaseLost);
    assert!(answers[1].is_ok() && answers[2].is_ok());
    let letters = engine.dead_letters().unwrap();
    assert_eq!(letters.count(Default::default()).await.unwrap(), 0);

    // Now the copy of b, and then nothing more; a copy is not copied.
    let copies = consumer.fetch(10).await.unwrap();
    assert_eq!((copies.len(), &copies[0].record), (1, &b.record));
    engine.broker.settle(vec![ack(&copies[0])]).await.unwrap();
    assert!(at_once(&mut consumer).await.is_none());
    assert_eq!(in_flight(&engine).await, 0);
}

// conformance: handlers/duplicator: everything is delivered twice: a plain handler shows two effects, an idempotent or exactly-once one shows one
#[tokio::test]
async fn a_fetch_that_waits_gets_the_copy() {
    let (engine, mut consumer) = two_events().await;
    let firsts = consumer.fetch(10).await.unwrap();
    let waiting = tokio::spawn(async move { consumer.fetch(10).await });
    engine.broker.settle(vec![ack(&firsts[1])]).await.unwrap();
    let copies = tokio::time::timeout(crate::support::PATIENCE, waiting).await;
    let copies = copies.expect("it was not woken").unwrap().unwrap();
    assert_eq!(copies[0].record, firsts[1].record);
}

// conformance: handlers/duplicator: everything is delivered twice: a plain handler shows two effects, an idempotent or exactly-once one shows one
#[tokio::test]
async fn a_caller_that_waits_for_an_event_waits_for_its_second_delivery() {
    let (engine, mut consumer) = two_events().await;
    let firsts = consumer.fetch(10).await.unwrap();
    let broker = &engine.broker;
    let waits = engine.settled().unwrap();
    let mut settled = waits.settled(firsts[0].record.position, crate::support::PATIENCE);
    broker.settle(vec![ack(&firsts[0])]).await.unwrap();
    let copies = consumer.fetch(10).await.unwrap();
    assert!(now(&mut settled).await.is_none(), "the copy is not settled");
    broker.settle(vec![ack(&copies[0])]).await.unwrap();
    assert_eq!(settled.await.unwrap().dead_lettered, []);

    let second = firsts[1].record.position;
    let impatient = waits.settled(second, Duration::from_millis(10));
    broker.settle(vec![ack(&firsts[1])]).await.unwrap();
    assert_eq!(impatient.await.unwrap_err().code(), Code::Timeout);
}

#[tokio::test]
async fn what_waits_for_a_consumer_that_closes_is_forgotten() {
    let (engine, mut consumer) = two_events().await;
    let firsts = consumer.fetch(10).await.unwrap();
    engine.broker.settle(vec![ack(&firsts[0])]).await.unwrap();
    consumer.close().await.unwrap();
    assert_eq!(in_flight(&engine).await, 1);
    // Its deliveries stay valid; there is no consumer to have them twice.
    engine.broker.settle(vec![ack(&firsts[1])]).await.unwrap();
    assert_eq!(in_flight(&engine).await, 0);
}

#[tokio::test]
async fn what_waits_for_a_consumer_that_pauses_is_forgotten() {
    let (engine, mut consumer) = two_events().await;
    let firsts = consumer.fetch(10).await.unwrap();
    engine.broker.settle(vec![ack(&firsts[0])]).await.unwrap();
    consumer.pause().await.unwrap();
    assert_eq!(in_flight(&engine).await, 1);
    engine.broker.settle(vec![ack(&firsts[1])]).await.unwrap();
    assert_eq!(in_flight(&engine).await, 0);
    let next = Event::builder("c").build().unwrap();
    engine.broker.append(vec![next]).await.unwrap();
    assert!(at_once(&mut consumer).await.is_none());

    // What is fetched later comes twice again.
    consumer.resume(10).await.unwrap();
    let firsts = consumer.fetch(10).await.unwrap();
    engine.broker.settle(vec![ack(&firsts[0])]).await.unwrap();
    let copies = consumer.fetch(10).await.unwrap();
    assert_eq!(copies[0].record, firsts[0].record);
}
