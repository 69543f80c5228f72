//! The consumer of a group whose breaker opens and closes: on some engines, leaving the group and
//! joining it again stops all its other consumers for a while.

use std::sync::{Arc, Mutex};

use everbus::core::{BoxFuture, Broker, BrokerLayer, ConsumeOptions, Consumer, Delivery};
use everbus::{BreakerPolicy, Engine, GroupName, Pattern, Result, Router, to};

use super::{Dependency, OPEN_FOR, call, closed, opened};
use crate::support::{eventually, on_every_engine};

/// What was asked of the consumers of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Joined(usize),
    Paused,
    Resumed(usize),
    Left,
}

type Diary = Arc<Mutex<Vec<Asked>>>;

/// Notes what is asked of consumers.
struct Noting {
    inner: Arc<dyn Broker>,
    diary: Diary,
}

impl BrokerLayer for Noting {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let prefetch = options.prefetch;
            let inner = self.inner.consume(group, options).await?;
            self.diary.lock().unwrap().push(Asked::Joined(prefetch));
            let member = Member(self.diary.clone());
            Ok(Box::new(NotingConsumer { inner, member }) as Box<dyn Consumer>)
        })
    }
}

/// A consumer that is closed or dropped leaves its group.
struct Member(Diary);

impl Drop for Member {
    fn drop(&mut self) {
        self.0.lock().unwrap().push(Asked::Left);
    }
}

struct NotingConsumer {
    inner: Box<dyn Consumer>,
    member: Member,
}

impl Consumer for NotingConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        self.inner.fetch(max)
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.inner.set_handled(handled);
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.member.0.lock().unwrap().push(Asked::Paused);
        self.inner.pause()
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        self.member.0.lock().unwrap().push(Asked::Resumed(prefetch));
        self.inner.resume(prefetch)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let Self { inner, member } = *self;
        Box::pin(async move {
            let closed = inner.close().await;
            drop(member);
            closed
        })
    }
}

// conformance: contract/consumer-stays: a circuit breaker that opens and closes pauses and resumes its consumer, and never closes it
#[tokio::test]
async fn a_breaker_pauses_its_consumer_and_never_closes_it() {
    on_every_engine(|lab| async move {
        let below = lab.open().await.engine().clone();
        let diary = Diary::default();
        let broker = Noting {
            inner: below.broker.clone(),
            diary: diary.clone(),
        };
        let broker = Arc::new(broker);
        let bus = lab
            .builder()
            .with_engine(Engine { broker, ..below })
            .unwrap();
        let dependency = Dependency::default();
        let route = to(call)
            .breaker(BreakerPolicy::default().fail_max(1))
            .group("g")
            .concurrency(1);
        let router = Router::new().on("a", route);
        bus.mount(router.with_state(dependency.clone()))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipts = bus.publish_batch((0..10).map(|n| ("a", n))).await.unwrap();
        let noted = || diary.lock().unwrap().clone();
        for round in 0..2_u64 {
            opened(&bus).await;
            eventually("the consumer is paused and holds nothing", || async {
                noted().last() == Some(&Asked::Paused)
                    && bus.groups().await.unwrap()[0].in_flight == 0
            })
            .await;
            // The first probe fails, the second one does not.
            dependency.works(round == 1);
            lab.clock.advance(OPEN_FOR);
            eventually("the probe is over", || async {
                dependency.attempts() as u64 >= round + 2
            })
            .await;
        }
        closed(&bus).await;
        // The probe that failed waits a moment longer than the breaker.
        lab.clock.advance(OPEN_FOR);
        for receipt in &receipts {
            assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        }
        let Asked::Joined(prefetch) = noted()[0] else {
            panic!("{:?}", noted());
        };
        let (last, before) = (noted().pop(), noted());
        assert_eq!(last, Some(Asked::Resumed(prefetch)), "{before:?}");
        assert!(before.contains(&Asked::Resumed(1)), "one probe: {before:?}");
        let stays = |asked: &Asked| matches!(asked, Asked::Paused | Asked::Resumed(_));
        assert!(before[1..].iter().all(stays), "{before:?}");

        bus.shutdown().await.unwrap();
        assert_eq!(noted().pop(), Some(Asked::Left));
    })
    .await;
}
