//! A publisher with a constant rate (open loop): it does not wait for one publish before it begins the next. So a
//! stall delays every publish that begins during it, and each of these latencies is counted.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::Result;
use tokio::task::JoinSet;

use crate::blocking;
use crate::sample::{self, Maker, TYPE};

/// What runs beside a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Quiet,
    Removing,
    Shrinking,
}

const KINDS: usize = 3;
const NONE: u8 = u8::MAX;

/// Sets the kind of the publishes that begin now.
#[derive(Clone)]
pub(crate) struct Switch(Arc<AtomicU8>);

impl Switch {
    pub(crate) fn count_as(&self, kind: Option<Kind>) {
        self.0
            .store(kind.map_or(NONE, |kind| kind as u8), Ordering::Relaxed);
    }
}

/// Latencies by kind.
type Latencies = [Vec<Duration>; KINDS];

/// Publishes at a steady rate and notes how long each publish took.
pub(crate) struct Pacer {
    switch: Switch,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<JoinSet<Result<()>>>,
    took: Arc<Mutex<Latencies>>,
}

impl Pacer {
    /// Publishes per second.
    pub(crate) const RATE: u32 = 500;

    pub(crate) fn start(bus: &Bus) -> Self {
        let (stop, switch) = (Arc::default(), Switch(Arc::new(AtomicU8::new(NONE))));
        let took: Arc<Mutex<Latencies>> = Arc::default();
        let round = Round {
            bus: bus.clone(),
            maker: Maker::new(TYPE),
            switch: switch.clone(),
            took: took.clone(),
        };
        // A separate thread: the timers of the runtime are too coarse, and may wait for its work.
        let (stopped, runtime) = (Arc::clone(&stop), tokio::runtime::Handle::current());
        let thread = std::thread::spawn(move || round.keep_on(&runtime, &stopped));
        Self {
            switch,
            stop,
            thread,
            took,
        }
    }

    pub(crate) fn switch(&self) -> Switch {
        self.switch.clone()
    }

    pub(crate) fn count_as(&self, kind: Option<Kind>) {
        self.switch.count_as(kind);
    }

    /// Stops, and waits until every publish was answered. Returns the latencies of each [`Kind`], in that order.
    pub(crate) async fn stop(self) -> Result<Latencies> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = |_| sample::wrong("the publisher ended early");
        let publishes = blocking(move || self.thread.join().map_err(ended)).await?;
        for published in publishes.join_all().await {
            published?;
        }
        let mut took = self.took.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *took))
    }
}

struct Round {
    bus: Bus,
    maker: Maker,
    switch: Switch,
    took: Arc<Mutex<Latencies>>,
}

impl Round {
    fn keep_on(
        self,
        runtime: &tokio::runtime::Handle,
        stopped: &AtomicBool,
    ) -> JoinSet<Result<()>> {
        let period = Duration::from_secs(1) / Pacer::RATE;
        let (mut publishes, mut next) = (JoinSet::new(), Instant::now());
        while !stopped.load(Ordering::Relaxed) {
            next += period;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            let (event, bus, took) = (self.maker.event(), self.bus.clone(), self.took.clone());
            let kind = usize::from(self.switch.0.load(Ordering::Relaxed));
            let called = Instant::now();
            publishes.spawn_on(
                async move {
                    bus.publish(event?).await?;
                    let latency = called.elapsed();
                    let mut took = took.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(all) = took.get_mut(kind) {
                        all.push(latency);
                    }
                    Ok(())
                },
                runtime,
            );
        }
        publishes
    }
}
