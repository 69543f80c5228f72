//! Tests of the verdict on single deliveries.

use std::future::Future;

use everbus_core::{Clock, Failure, Lease, Position, Recorded, RetryPolicy, Timestamp};

use super::*;
use crate::handler::{HandlerOutcome, HandlerResult};
use crate::runtime::bus::Bus;
use crate::runtime::options::BusOptions;

fn handler(policy: RetryPolicy, answer: fn() -> HandlerResult) -> Arc<Registered> {
    registered(policy, Duration::from_secs(30), move || async move {
        answer().map(|()| Outcome::default())
    })
}

fn registered<F, Fut>(policy: RetryPolicy, timeout: Duration, run: F) -> Arc<Registered>
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = HandlerOutcome> + Send + 'static,
{
    let run = Arc::new(move |_, slot: &mut Slot| slot.put(run()));
    let mut handler = Registered::new("h", "a".parse().unwrap(), run);
    (handler.retry, handler.timeout) = (policy, timeout);
    Arc::new(handler)
}

/// A delivery after this many crashes of its process.
fn crashed(times: u32, alone: bool) -> Delivery {
    let crash = |attempt| Failure {
        alone,
        ..Failure::new(attempt, Timestamp::EPOCH, FailureKind::Crash, "crash")
    };
    let event = Event::builder("a").build().unwrap();
    let record = Recorded::new(event, Position::seq(1), Timestamp::EPOCH);
    let lease = Lease::new(record.position, [1, 1]);
    Delivery::new(Arc::new(record), lease).after(times + 1, (1..=times).map(crash).collect())
}

async fn verdict(delivery: &Delivery, handlers: &[Arc<Registered>]) -> Verdict {
    verdict_by(BusOptions::default(), delivery, handlers).await
}

async fn verdict_by(
    options: BusOptions,
    delivery: &Delivery,
    handlers: &[Arc<Registered>],
) -> Verdict {
    deliver(options, delivery, handlers, false).await
}

async fn deliver(
    options: BusOptions,
    delivery: &Delivery,
    handlers: &[Arc<Registered>],
    already_handled: bool,
) -> Verdict {
    let engine = everbus_memory::open(everbus_memory::Options::default());
    let bus = Bus::with_engine(engine, options).unwrap();
    let group = GroupName::unnamed();
    let meter = bus.shared().stats.meter(&group, &"a".into());
    let matched = Arc::new(Matched::new(handlers.to_vec(), meter, None, None));
    let pipeline = Pipeline {
        shared: bus.shared().clone(),
        group,
    };
    let finished = pipeline
        .deliver(
            delivery.clone(),
            matched,
            already_handled,
            &mut Spare::default(),
        )
        .await;
    finished.settlement.verdict
}

// conformance: fault-12/crash: a process that dies during the last attempt leaves a dead letter.
// conformance: rule-3/crash-loop: an event that was alone in flight at every crash is dead-lettered once its attempts are used up, without running again.
#[tokio::test]
async fn an_event_that_keeps_crashing_its_process_is_given_up() {
    let handlers = [handler(RetryPolicy::default(), || Ok(()))];
    let verdict_after = async |times| verdict(&crashed(times, true), &handlers).await;
    assert_eq!(verdict_after(3).await, Verdict::Ack);
    assert_eq!(verdict_after(4).await, Verdict::Dead { failure: None });
}

// conformance: contract/nats-foreign: a message that is not of its stream's dialect is dead-lettered with the raw bytes and the reason, before any handler sees it
#[tokio::test]
async fn an_event_that_its_engine_could_not_read_is_given_up() {
    let handlers = [handler(RetryPolicy::default(), || Ok(()))];
    let mut delivery = crashed(1, false);
    delivery.failures[0].kind = FailureKind::Corrupt;
    let verdict_of = async |delivery: &Delivery| verdict(delivery, &handlers).await;
    assert_eq!(verdict_of(&delivery).await, Verdict::Dead { failure: None });
    delivery.retried = true;
    assert_eq!(
        verdict_of(&delivery).await,
        Verdict::Ack,
        "an operator may send it all the same"
    );
}

// conformance: handlers/idempotent-crash: an event that was handled is never dead-lettered for the crashes of later deliveries.
#[tokio::test]
async fn an_event_that_was_handled_is_not_given_up_for_its_crashes() {
    let handlers = [handler(RetryPolicy::default(), || Ok(()))];
    let (options, delivery) = (BusOptions::default(), crashed(9, true));
    let verdict = deliver(options, &delivery, &handlers, true).await;
    assert_eq!(verdict, Verdict::Ack);
}

// conformance: rule-3/innocent: an event that was not alone in flight at a crash is never dead-lettered for it.
#[tokio::test]
async fn an_event_that_shared_its_crashes_with_others_runs_again() {
    let handlers = [handler(RetryPolicy::default(), || Ok(()))];
    assert_eq!(verdict(&crashed(9, false), &handlers).await, Verdict::Ack);
}

#[tokio::test]
async fn an_event_whose_policy_was_tightened_runs_once_more_and_then_ends() {
    let handlers = [handler(RetryPolicy::never(), || {
        Err(HandlerError::new("still broken"))
    })];
    let mut delivery = crashed(3, true);
    delivery.failures[2].kind = FailureKind::Error;
    let verdict = verdict(&delivery, &handlers).await;
    let Verdict::Dead {
        failure: Some(last),
    } = verdict
    else {
        panic!("{verdict:?}");
    };
    assert_eq!((last.attempt, last.error.as_str()), (4, "still broken"));
}

#[tokio::test]
async fn an_event_without_a_handler_left_is_released() {
    let gone = handler(RetryPolicy::default(), || Ok(()));
    gone.remove();
    let released = Verdict::Release {
        after: Duration::ZERO,
    };
    assert_eq!(verdict(&crashed(0, false), &[gone]).await, released);
    assert_eq!(verdict(&crashed(4, true), &[]).await, released);
}

#[tokio::test]
async fn a_panic_outside_a_handler_is_a_failure_of_the_attempt() {
    #[derive(Debug)]
    struct Broken(std::sync::atomic::AtomicBool);
    impl Clock for Broken {
        fn now(&self) -> Timestamp {
            let was_asked = self.0.swap(true, std::sync::atomic::Ordering::SeqCst);
            assert!(was_asked, "the first answer is a panic");
            Timestamp::EPOCH
        }
    }
    let handlers = [handler(RetryPolicy::default(), || {
        Err(HandlerError::new("an error"))
    })];
    let options = BusOptions {
        clock: Arc::new(Broken(false.into())),
        ..BusOptions::default()
    };
    let verdict = verdict_by(options, &crashed(0, false), &handlers).await;
    let Verdict::Retry { failure, .. } = verdict else {
        panic!("{verdict:?}");
    };
    assert_eq!((failure.attempt, failure.kind), (1, FailureKind::Panic));
}

#[tokio::test]
async fn a_panic_while_a_timed_out_handler_is_dropped_stays_inside() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("in drop");
        }
    }
    let handler = registered(RetryPolicy::never(), Duration::from_millis(1), || async {
        let _bomb = Bomb;
        std::future::pending().await
    });
    let verdict = verdict(&crashed(0, false), &[handler]).await;
    let Verdict::Dead {
        failure: Some(last),
    } = verdict
    else {
        panic!("{verdict:?}");
    };
    assert_eq!(last.kind, FailureKind::Timeout);
}
