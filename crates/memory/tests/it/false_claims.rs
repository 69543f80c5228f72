//! Engines that say more of themselves than is true: for every field of `Capabilities` a scenario of the
//! suite fails, and so it does for a consumer that does not really pause, a lease that is not really extended
//! and an event whose address gets lost.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, BrokerLayer, Capabilities, Clock, Code, ConsumeOptions, Consumer,
    Deduplication, Delivery, Durability, Engine, Event, EventId, GroupName, Lease, Pattern, Result,
    Settlement, Verdict,
};
use everbus_testkit::conformance::{self, Harness, Outcome};

/// What an engine says of itself although it is not so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    /// None: the scenarios pass.
    None,
    Fencing,
    ExactAttempts,
    NativeDelay,
    AtomicBatch,
    AtomicFollowUps,
    AtomicDeadLetter,
    Deduplication,
    Order,
    Transaction,
    Durability,
    Pause,
    Extend,
    Address,
}

#[derive(Debug)]
struct Lying(Lie);

impl Harness for Lying {
    async fn open(&self, clock: Arc<dyn Clock>) -> Engine {
        let mut engine = everbus_memory::open(everbus_memory::Options { clock });
        let (inner, lie) = (engine.broker.clone(), self.0);
        engine.broker = Arc::new(Liar { inner, lie });
        engine
    }

    fn survives_restart(&self) -> bool {
        false
    }

    fn claims_ahead(&self) -> bool {
        false
    }
}

#[derive(Clone)]
struct Liar {
    inner: Arc<dyn Broker>,
    lie: Lie,
}

impl BrokerLayer for Liar {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn capabilities(&self) -> Capabilities {
        let durability = match self.lie {
            Lie::Durability => Durability::PowerLoss,
            _ => Durability::Memory,
        };
        let transaction = (self.lie == Lie::Transaction).then_some("sqlite");
        let full = Capabilities::full("memory", durability).transaction(transaction);
        full.deduplication(Deduplication::WhileRetained)
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        match self.lie {
            Lie::AtomicBatch => Box::pin(async move {
                for event in batch.clone() {
                    self.inner.append(vec![event]).await?;
                }
                self.inner.append(batch).await
            }),
            // The copies have no address.
            Lie::Deduplication | Lie::Address => {
                let copies = batch.into_iter().map(|event| {
                    let id = match self.lie {
                        Lie::Address => event.id(),
                        _ => EventId::new(),
                    };
                    let copy = Event::builder(event.event_type()).id(id);
                    copy.payload(event.payload().clone()).build().unwrap()
                });
                self.inner.append(copies.collect())
            }
            _ => self.inner.append(batch),
        }
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let inner = self.inner.consume(group, options).await?;
            let lie = self.lie;
            Ok(Box::new(LyingConsumer { inner, lie }) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, mut settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            for settlement in &mut settlements {
                match (&mut settlement.verdict, self.lie) {
                    (Verdict::Retry { after, .. }, Lie::NativeDelay) => *after = Duration::ZERO,
                    (_, Lie::AtomicFollowUps) => {
                        for event in std::mem::take(&mut settlement.follow_ups) {
                            self.inner.append(vec![event]).await?.remove(0)?;
                        }
                    }
                    _ => {}
                }
            }
            let verdicts: Vec<Verdict> = settlements.iter().map(|s| s.verdict.clone()).collect();
            let answers = self.inner.settle(settlements).await?;
            let answers = answers.into_iter().zip(verdicts);
            let refused = |answer: &Result<()>| {
                let code = answer.as_ref().err().map(everbus_core::Error::code);
                code == Some(Code::LeaseLost)
            };
            Ok(answers
                .map(|(answer, verdict)| match (self.lie, verdict) {
                    (Lie::Fencing, _) if refused(&answer) => Ok(()),
                    (Lie::AtomicDeadLetter, Verdict::Dead { .. }) if refused(&answer) => Ok(()),
                    _ => answer,
                })
                .collect())
        })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        match self.lie {
            Lie::Extend => {
                let answers = leases.iter().map(|_| Ok(())).collect();
                Box::pin(std::future::ready(Ok(answers)))
            }
            _ => self.inner.extend(leases, by),
        }
    }
}

struct LyingConsumer {
    inner: Box<dyn Consumer>,
    lie: Lie,
}

impl Consumer for LyingConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let mut batch = self.inner.fetch(max).await?;
            match self.lie {
                Lie::Order => batch.reverse(),
                Lie::ExactAttempts => {
                    for delivery in batch.iter_mut().filter(|d| d.attempt > 1) {
                        delivery.attempt += 1;
                    }
                }
                _ => {}
            }
            Ok(batch)
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.inner.set_handled(handled);
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        match self.lie {
            Lie::Pause => Box::pin(std::future::ready(Ok(()))),
            _ => self.inner.pause(),
        }
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        self.inner.resume(prefetch)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        self.inner.close()
    }
}

/// Runs a scenario against the engine with the lie, and against the same one without.
async fn is_found<F, W>(lie: Lie, scenario: F)
where
    F: Fn(Lying) -> W,
    W: Future<Output = Outcome> + Send + 'static,
{
    if lie != Lie::Transaction {
        let honest = tokio::spawn(scenario(Lying(Lie::None))).await;
        assert!(matches!(honest, Ok(Ok(_))), "{lie:?}: {honest:?}");
    }
    let ended = tokio::spawn(scenario(Lying(lie))).await;
    let failed = ended.as_ref().is_err_and(tokio::task::JoinError::is_panic);
    assert!(failed, "{lie:?} was not found: {ended:?}");
}

// conformance: contract/claims-are-tested: an engine that claims what it does not do fails a scenario, for each field of its capabilities
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_false_claim_is_found() {
    use conformance::{addressed, appending, claims, consuming, effects, pausing, settling};
    is_found(Lie::Fencing, settling::a_late_settlement_is_refused).await;
    is_found(
        Lie::Fencing,
        settling::a_settlement_after_the_lease_is_refused,
    )
    .await;
    is_found(Lie::ExactAttempts, claims::attempts_are_exact).await;
    is_found(Lie::NativeDelay, claims::a_delay_is_the_engines_own).await;
    is_found(
        Lie::AtomicBatch,
        appending::a_batch_is_stored_whole_or_not_at_all,
    )
    .await;
    is_found(
        Lie::AtomicFollowUps,
        claims::a_refused_follow_up_refuses_the_verdict,
    )
    .await;
    is_found(
        Lie::AtomicDeadLetter,
        claims::a_lost_lease_makes_no_dead_letter,
    )
    .await;
    is_found(
        Lie::Deduplication,
        claims::an_id_is_known_while_its_event_is_kept,
    )
    .await;
    is_found(
        Lie::Deduplication,
        appending::the_same_event_twice_is_stored_once,
    )
    .await;
    is_found(Lie::Order, consuming::events_come_in_the_order_of_the_log).await;
    is_found(Lie::Transaction, effects::an_effect_comes_with_its_ack).await;
    is_found(Lie::Durability, claims::durability_is_what_it_says).await;
    is_found(
        Lie::Pause,
        pausing::a_paused_consumer_leaves_the_work_to_others,
    )
    .await;
    is_found(Lie::Extend, settling::an_extended_lease_is_kept).await;
    is_found(
        Lie::Address,
        addressed::an_addressed_event_reaches_its_group_alone,
    )
    .await;
    is_found(
        Lie::Address,
        addressed::other_groups_do_not_owe_an_addressed_event,
    )
    .await;
}

// conformance: contract/outcome-compared: a scenario whose outcome is another than the one checked in for the engine fails
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_suddenly_offers_less_is_found() {
    /// The memory engine without its history.
    #[derive(Debug)]
    struct Less;
    impl Harness for Less {
        async fn open(&self, clock: Arc<dyn Clock>) -> Engine {
            let mut engine = everbus_memory::open(everbus_memory::Options { clock });
            engine.history = None;
            engine
        }
        fn survives_restart(&self) -> bool {
            false
        }
    }
    if std::env::var_os("EVERBUS_WRITE_COMPAT").is_some() {
        return;
    }
    let scenario = conformance::history::names_are_compared_whole(Less);
    let run = conformance::run("history::names_are_compared_whole", scenario);
    let ended = tokio::spawn(run).await;
    let why = ended.unwrap_err().into_panic();
    let why = why.downcast_ref::<String>().unwrap();
    assert!(why.contains("no: its history cannot be asked"), "{why}");
}
