//! The settings of a test bus.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Engine, Error, ManualClock, Result};

use super::bus::{Parts, TestBus};
use super::control::Control;
use super::duplicator::Duplicator;
use super::idle::Gates;
use super::journal::Journal;
use super::tap::tapped;
use crate::open::builder::BusBuilder;
use crate::runtime::bus::Bus;
use crate::runtime::router::Router;

/// Builds a [`TestBus`].
///
/// ```
/// use everbus::testing::TestBus;
/// use everbus::{RetryPolicy, Router};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = TestBus::builder()
///     .bus(|bus| bus.retry(RetryPolicy::default().max_retries(1)).source("shop"))
///     .duplicate_deliveries()
///     .open(Router::new())
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it is opened"]
pub struct TestBusBuilder {
    bus: BusBuilder,
    clock: ManualClock,
    on: On,
    duplicates: bool,
    patience: Duration,
}

/// The engine of the test bus.
#[derive(Clone, Debug)]
enum On {
    Url(String),
    Engine(Box<Engine>),
}

/// How long a wait may last before the test fails.
const PATIENCE: Duration = Duration::from_secs(30);

impl Default for TestBusBuilder {
    fn default() -> Self {
        Self {
            bus: Bus::builder(),
            clock: ManualClock::default(),
            on: On::Url("memory:".to_owned()),
            duplicates: false,
            patience: PATIENCE,
        }
    }
}

impl TestBusBuilder {
    /// Changes the settings of the bus: retry policy, limits, configuration file. The clock stays the
    /// test's, and the engine of a configuration file is not opened: see [`with_real`](Self::with_real).
    pub fn bus(mut self, settings: impl FnOnce(BusBuilder) -> BusBuilder) -> Self {
        self.bus = settings(self.bus);
        self
    }

    /// The clock to use; by default one that stands at the time when the test began.
    pub fn clock(mut self, clock: ManualClock) -> Self {
        self.clock = clock;
        self
    }

    /// Delivers every event twice, through a [`Duplicator`].
    pub fn duplicate_deliveries(mut self) -> Self {
        self.duplicates = true;
        self
    }

    /// Runs the same test on a real engine instead of the one in memory: `sqlite:FILE` or any URL that a
    /// [`Bus`] opens. The engine uses the same clock, if it takes one. The caller chooses and removes its
    /// data; events that are already there are not reported.
    pub fn with_real(mut self, url: impl Into<String>) -> Self {
        self.on = On::Url(url.into());
        self
    }

    /// Runs on an open engine, for example one with injected faults. Give its clock with [`clock`](Self::clock) too.
    pub fn engine(mut self, engine: Engine) -> Self {
        self.on = On::Engine(Box::new(engine));
        self
    }

    /// How long, in real time, the bus may be busy with due events before waiting for it fails (30 s).
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Opens the engine, mounts the router and starts the bus.
    pub async fn open(self, router: Router) -> Result<TestBus> {
        let gates = Gates::of(&router.clone().resolve()?);
        let settings = self.bus.clock(self.clock.clone());
        let mut engine = match self.on {
            // Opened like the engine of any bus; only the engine is used.
            On::Url(url) => settings.clone().open(url).await?.engine().clone(),
            On::Engine(engine) => *engine,
        };
        let log = engine.log.clone();
        let log = log.ok_or_else(|| no_log(engine.broker.capabilities().engine))?;
        let began_after = log.head().await?;
        let journal = Arc::new(Journal::begin(log, self.clock.clone()).await?);
        if self.duplicates {
            engine = Duplicator::wrap(engine);
        }
        let bus = settings.with_engine(tapped(engine, &journal))?;
        let control = Control::default();
        // Around all routes of the router.
        let router = Router::new().layer(control.clone()).merge(router);
        bus.mount(router).await?;
        bus.start().await?;
        Ok(TestBus::of(Parts {
            bus,
            clock: self.clock,
            journal,
            control,
            gates,
            began_after,
            patience: self.patience,
        }))
    }
}

fn no_log(engine: &str) -> Error {
    let what = format!("a test bus reads the log of its engine; the {engine} engine has none");
    Error::new(Code::Unsupported, what)
}
