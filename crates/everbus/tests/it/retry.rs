//! The retry schedule, what is kept of failed attempts, and when an event is given up.

use std::time::Duration;

use everbus::{EventState, FailureKind, HandlerError, HandlerResult, Json, Message, RetryPolicy};

use crate::support::{
    broken, fine, is_done, on_every_engine, recorder, run_out_of_retries, state_in, wait_for_retry,
};

const SECOND: Duration = Duration::from_secs(1);

// conformance: embedded/retry-schedule: attempt 1 is immediate, then the waits are 1 s, 2 s and 4 s by default.
// conformance: rule-8: attempt 1 is immediate, then the waits are 1 s, 2 s and 4 s by default.
// conformance: omni/subscribe-ack: a failed event is delivered again after a delay.
#[tokio::test]
async fn a_failed_event_waits_base_delay_then_doubles() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(broken);
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        for (failed, wait) in [(1, 1), (2, 2), (3, 4)] {
            let message = seen.next().await;
            assert_eq!(message.attempt() as usize, failed);
            assert_eq!(message.max_attempts(), 4);
            assert_eq!(message.failures().len(), failed - 1);
            let state = wait_for_retry(&bus, receipt.seq(), "", failed).await;
            let due = state.due_at.unwrap();
            assert_eq!(due, state.failures[failed - 1].at.plus(SECOND * wait));
            lab.clock.set(due.minus(Duration::from_millis(1)));
            assert!(seen.is_empty(), "called before its time");
            lab.clock.set(due);
        }
        seen.next().await;
        let settled = receipt.settled().await.unwrap();
        assert_eq!(settled.dead_lettered.len(), 1);
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: embedded/handler-error: a handler that fails is retried by its policy and then dead-lettered.
// conformance: embedded/dlq-after-max-retries: after maxRetries + 1 attempts the event is in the dead letters with every error in order, the original event and the time of the final failure.
// conformance: framework/dlq-exhausted: after its last attempt an event is in the dead letters.
// conformance: framework/resilience-final-log: after its last attempt an event is in the dead letters.
// conformance: omni/subscribe-exhausted: after maxRetries the event goes to the dead letters.
#[tokio::test]
async fn after_four_attempts_the_event_is_a_dead_letter_with_every_error_in_order() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, _seen) = recorder(broken);
        bus.subscribe("a")
            .name("fragile")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", "original")).await.unwrap();
        run_out_of_retries(&lab, &bus, &receipt, "").await;

        let letters = bus.dead_letters().list().await.unwrap();
        assert_eq!(letters.len(), 1);
        let letter = &letters[0];
        let errors: Vec<&str> = letter.failures.iter().map(|f| f.error.as_str()).collect();
        assert_eq!(errors, ["failure 1", "failure 2", "failure 3", "failure 4"]);
        let attempts: Vec<u32> = letter.failures.iter().map(|f| f.attempt).collect();
        assert_eq!(attempts, [1, 2, 3, 4]);
        assert_eq!(letter.attempts, 4);
        assert_eq!(letter.handler.as_deref(), Some("fragile"));
        assert!(letter.group.is_unnamed());
        assert_eq!(letter.event().id(), receipt.id());
        assert_eq!(letter.event().payload().as_ref(), b"\"original\"");
        assert_eq!(letter.died_at, letter.failures[3].at);
        assert!(letter.died_at >= letter.record.received_at.plus(SECOND * 7));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: fault-12/last-lease: an event whose lease ends during its last attempt becomes a dead letter with every attempt, at once or after one more run.
#[tokio::test]
async fn a_lease_that_ends_during_the_last_attempt_leads_to_a_dead_letter() {
    on_every_engine(|lab| async move {
        let policy = RetryPolicy::default().max_retries(1);
        let bus = lab.open_with(lab.builder().retry(policy)).await;
        let (note, mut seen) = recorder(fine);
        let note = std::sync::Arc::new(note);
        bus.subscribe("a")
            .handler(move |m: Message| {
                let note = note.clone();
                async move {
                    let attempt = m.attempt();
                    note(m).await?;
                    if attempt <= 2 {
                        std::future::pending::<()>().await;
                    }
                    Err::<(), _>(HandlerError::new("failed at last"))
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", "original")).await.unwrap();
        for attempt in 1..=2 {
            assert_eq!(seen.next().await.attempt(), attempt);
            // As if this process had been stopped for an hour.
            lab.clock.advance(SECOND * 3600);
        }
        let settled = receipt.settled().await.unwrap();
        assert_eq!(settled.dead_lettered.len(), 1);
        let letter = &bus.dead_letters().get(receipt.id()).await.unwrap()[0];
        let failures = letter.failures.iter().map(|f| (f.attempt, f.kind));
        let mut expected = vec![(1, FailureKind::Crash), (2, FailureKind::Crash)];
        // An engine that cannot tell that the event was alone in flight runs it once more.
        if letter.failures.len() == 3 {
            assert_eq!(seen.next().await.attempt(), 3);
            expected.push((3, FailureKind::Error));
        }
        assert_eq!(failures.collect::<Vec<_>>(), expected);
        assert_eq!(letter.event().payload().as_ref(), b"\"original\"");
        assert!(seen.is_empty());
        bus.shutdown_within(Duration::ZERO).await.unwrap();
    })
    .await;
}

// conformance: embedded/retry-then-success: an event that fails and then succeeds is done and no dead letter.
#[tokio::test]
async fn an_event_that_succeeds_on_its_second_attempt_is_done() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(|m| if m.attempt() == 1 { broken(m) } else { fine(m) });
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        wait_for_retry(&bus, receipt.seq(), "", 1).await;
        lab.clock.advance(SECOND);
        assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        seen.next().await;
        let second = seen.next().await;
        assert_eq!(
            (second.attempt(), second.failures()[0].error.as_str()),
            (2, "failure 1")
        );
        assert!(is_done(&bus, receipt.seq(), "").await);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: embedded/retry-override: the retry policy of a subscription merges over that of the bus.
// conformance: omni/handler-retry: a subscription has a retry policy of its own.
#[tokio::test]
async fn a_subscription_changes_parts_of_the_policy_and_keeps_the_rest() {
    on_every_engine(|lab| async move {
        let policy = RetryPolicy::default()
            .base_delay(SECOND * 10)
            .max_delay(SECOND * 15);
        let bus = lab.open_with(lab.builder().retry(policy)).await;
        let (handler, _seen) = recorder(broken);
        bus.subscribe("a")
            .retry_with(|defaults| defaults.max_retries(2))
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        // The waits are those of the bus, the number of attempts is the subscription's.
        for (failed, wait) in [(1, 10), (2, 15)] {
            let state = wait_for_retry(&bus, receipt.seq(), "", failed).await;
            let due = state.due_at.unwrap();
            assert_eq!(due, state.failures[failed - 1].at.plus(SECOND * wait));
            lab.clock.set(due);
        }
        assert_eq!(receipt.settled().await.unwrap().dead_lettered.len(), 1);
        let state = state_in(&bus, receipt.seq(), "").await.unwrap();
        assert_eq!((state.state, state.failures.len()), (EventState::Dlq, 3));
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// Publishes one event to a handler that answers like this, and returns the failures of its only
/// attempt, which is the last by its policy.
async fn the_failure_of(
    answer: impl Fn(&Message) -> HandlerResult + Clone + Send + Sync + 'static,
    kind: FailureKind,
    text: &'static str,
) {
    on_every_engine(|lab| {
        let answer = answer.clone();
        async move {
            let bus = lab
                .open_with(lab.builder().retry(RetryPolicy::never()))
                .await;
            let (handler, _seen) = recorder(answer);
            bus.subscribe("a").handler(handler).await.unwrap();
            bus.start().await.unwrap();
            let receipt = bus.publish(("a", "text")).await.unwrap();
            receipt.settled().await.unwrap();
            let letter = &bus.dead_letters().get(receipt.id()).await.unwrap()[0];
            assert_eq!(letter.failures.len(), 1);
            assert_eq!(letter.failures[0].kind, kind);
            assert!(letter.failures[0].error.contains(text), "{letter:?}");
            bus.shutdown().await.unwrap();
        }
    })
    .await;
}

async fn explodes(Json(after_await): Json<bool>) {
    if after_await {
        tokio::task::yield_now().await;
    }
    panic!("inside")
}

// conformance: fault-4/panic: a panic anywhere in a handler's future is a failure, never acked by falling through.
#[tokio::test]
async fn a_panic_before_or_after_an_await_is_a_failure() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().retry(RetryPolicy::never()))
            .await;
        bus.subscribe("a").handler(explodes).await.unwrap();
        bus.start().await.unwrap();
        for after_await in [false, true] {
            let receipt = bus.publish(("a", after_await)).await.unwrap();
            receipt.settled().await.unwrap();
            let letter = &bus.dead_letters().get(receipt.id()).await.unwrap()[0];
            assert_eq!(letter.failures[0].kind, FailureKind::Panic);
            assert!(letter.last_error().contains("inside"), "{letter:?}");
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: rule-9/panic: a panic is a failure like any other, recorded and never acked by falling through.
// conformance: bus/panic-is-failure: a panic is a failure like any other, recorded and never acked by falling through.
#[tokio::test]
async fn a_panic_is_a_failure_with_its_message() {
    the_failure_of(|_| panic!("boom {}", 7), FailureKind::Panic, "boom 7").await;
}

// conformance: rule-9/decode: a payload that does not parse is recorded and dead-lettered, never acked by falling through.
// conformance: fault-4/fall-through: a payload that does not parse is a failure like any other, never acked by falling through.
#[tokio::test]
async fn a_payload_that_does_not_parse_is_a_failure() {
    let parse = |m: &Message| -> HandlerResult {
        let _: u32 = m.json()?;
        Ok(())
    };
    the_failure_of(parse, FailureKind::Decode, "cannot be read").await;
}

// conformance: embedded/handler-throws: a handler that returns an error has failed, and the error is kept with its causes.
#[tokio::test]
async fn an_error_is_a_failure_with_its_causes() {
    let fail = |_: &Message| -> HandlerResult {
        Err(std::io::Error::other(std::fmt::Error))?;
        Ok(())
    };
    the_failure_of(
        fail,
        FailureKind::Error,
        "an error occurred when formatting",
    )
    .await;
}

// conformance: bus/permanent: a permanent error goes straight to the dead letters.
#[tokio::test]
async fn a_permanent_error_is_not_retried() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(|_| Err(HandlerError::permanent("no such customer")));
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        assert_eq!(receipt.settled().await.unwrap().dead_lettered.len(), 1);
        assert_eq!(seen.next().await.attempt(), 1);
        let letter = &bus.dead_letters().list().await.unwrap()[0];
        assert_eq!(letter.failures[0].kind, FailureKind::Permanent);
        assert_eq!(letter.last_error(), "no such customer");
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_handler_may_choose_the_wait_but_not_the_number_of_attempts() {
    on_every_engine(|lab| async move {
        let policy = RetryPolicy::default().max_retries(1);
        let bus = lab.open_with(lab.builder().retry(policy)).await;
        let (handler, _seen) = recorder(|_| Err(HandlerError::retry_after("closed", SECOND * 60)));
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
        assert_eq!(
            state.due_at.unwrap(),
            state.failures[0].at.plus(SECOND * 60)
        );
        lab.clock.set(state.due_at.unwrap());
        assert_eq!(receipt.settled().await.unwrap().dead_lettered.len(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: rule-1/skip: a handler may skip an event with a reason; it is then done, not a dead letter.
#[tokio::test]
async fn a_skipped_event_is_done() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(|_| Err(HandlerError::skip("not ours")));
        bus.subscribe("a").handler(handler).await.unwrap();
        let (other, mut other_seen) = recorder(fine);
        bus.subscribe("a").handler(other).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        seen.next().await;
        other_seen.next().await;
        assert!(is_done(&bus, receipt.seq(), "").await);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/attempts-worker: every failed attempt is on record with how long it ran and on which worker, also of an event that worked in the end
#[tokio::test]
async fn an_event_that_worked_in_the_end_keeps_its_attempts_with_durations_and_worker() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().worker_name("mailer-1")).await;
        let nap = Duration::from_millis(5);
        let handler = move |message: Message| async move {
            tokio::time::sleep(nap).await;
            match message.attempt() {
                1 | 2 => Err(HandlerError::new("not yet")),
                _ => Ok(()),
            }
        };
        bus.subscribe("a")
            .group("mail")
            .name("send")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        for failed in 1..=2 {
            let waiting = wait_for_retry(&bus, receipt.seq(), "mail", failed).await;
            lab.clock.set(waiting.due_at.unwrap());
        }
        receipt.settled().await.unwrap();
        let state = state_in(&bus, receipt.seq(), "mail").await.unwrap();
        assert_eq!((state.state, state.attempts), (EventState::Done, 3));
        assert_eq!(state.failures.len(), 2);
        for failure in &state.failures {
            assert_eq!(failure.error, "not yet");
            assert_eq!(failure.handler.as_deref(), Some("send"));
            assert_eq!(failure.worker.as_deref(), Some("mailer-1"));
            assert!(failure.took.unwrap() >= nap, "{failure:?}");
        }
        let ended = state.ended.unwrap();
        assert_eq!(ended.ran.worker.as_deref(), Some("mailer-1"));
        assert!(ended.ran.took.unwrap() >= nap, "{ended:?}");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/attempts-worker-name: a worker that was given no name is called after its host and process
#[tokio::test]
async fn a_worker_without_a_name_is_called_after_its_host_and_process() {
    let name = everbus::BusOptions::default().worker_name;
    let (host, pid) = name.rsplit_once('/').unwrap();
    assert!(!host.is_empty());
    assert_eq!(pid, std::process::id().to_string());
    let refused = everbus::Bus::builder()
        .worker_name("")
        .open("memory:")
        .await;
    assert_eq!(refused.unwrap_err().code(), everbus::Code::InvalidSetting);
}
