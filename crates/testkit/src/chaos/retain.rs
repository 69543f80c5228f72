//! The retention job that is killed: it removes old or surplus events and collects objects, in a loop, while
//! others publish and handle.

use std::path::{Path, PathBuf};
use std::time::Duration;

use everbus::Bus;
use everbus::overflow::Collect;
use everbus_core::{Code, Error, Pattern, Retention, StreamAge};

use super::Broken;
use super::plant;
use super::victim::{end_of_input, tell};

/// Pause between two runs.
const PAUSE: Duration = Duration::from_millis(5);
/// An object that has no event after this time will never have one: no victim is stopped or starved for so long.
const STRAYS_AFTER: Duration = Duration::from_secs(8);

/// Which events are removed from a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Events older than a moment, and dead letters too. The notices of dead letters stay, so that the
    /// checker knows which dead letters were removed. The plain events stay too; their dead letters are
    /// removed without them.
    Age,
    /// All but the newest events. Dead letters stay.
    Length,
}

impl Policy {
    /// Its name as an argument.
    pub fn name(self) -> &'static str {
        match self {
            Self::Age => "age",
            Self::Length => "length",
        }
    }

    /// The policy of that name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Age, Self::Length]
            .into_iter()
            .find(|policy| policy.name() == name)
    }

    /// The retention of this policy. Events are also removed when they expire.
    fn retention(self) -> Result<Retention, Error> {
        let mut retention = Retention {
            payloads: Some(Duration::from_millis(30)),
            ..Retention::default()
        };
        match self {
            Self::Age => {
                retention.max_age = Some(Duration::from_millis(60));
                retention.dead_letters = Some(Duration::from_millis(150));
                for types in ["system.>", "chaos.plain.>"] {
                    retention.streams.push(StreamAge {
                        types: Pattern::new(types)?,
                        max_age: None,
                    });
                }
            }
            Self::Length => retention.max_len = Some(40),
        }
        Ok(retention)
    }
}

/// A bug in the job that the campaign must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Events in flight count as done.
    IgnoresClaims,
    /// Objects are deleted without checking whether an event refers to them.
    DeletesObjects,
}

impl Bug {
    /// Its name as an argument.
    pub fn name(self) -> &'static str {
        match self {
            Self::IgnoresClaims => "claims",
            Self::DeletesObjects => "objects",
        }
    }

    /// The bug of that name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::IgnoresClaims, Self::DeletesObjects]
            .into_iter()
            .find(|bug| bug.name() == name)
    }
}

/// The orders of a retention job.
#[derive(Clone, Debug)]
pub struct Orders {
    /// The file.
    pub db: PathBuf,
    /// Which events are removed.
    pub policy: Policy,
    /// A bug that is planted.
    pub bug: Option<Bug>,
}

/// Works until standard input is closed. Usually it is killed before that.
pub fn run(orders: &Orders) -> Result<(), Broken> {
    on_runtime(work(orders))
}

/// One run of the job, by the campaign itself.
pub fn once(file: &Path, policy: Policy) -> Result<(), Broken> {
    on_runtime(async {
        let bus = open(file).await?;
        bus.maintenance()?.prune(policy.retention()?).await?;
        bus.shutdown().await.map(drop)
    })
}

fn on_runtime(work: impl Future<Output = Result<(), Error>>) -> Result<(), Broken> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .map_err(Broken::at("starting a runtime"))?
        .block_on(work)
        .map_err(|error| Broken(format!("{error:?}")))
}

async fn open(file: &Path) -> Result<Bus, Error> {
    Bus::open(format!("sqlite:{}", file.display())).await
}

async fn work(orders: &Orders) -> Result<(), Error> {
    let bus = open(&orders.db).await?;
    tell("READY\n");
    let mut ended = end_of_input();
    let collect = Collect {
        strays_after: STRAYS_AFTER,
        ..Collect::default()
    };
    loop {
        if orders.bug == Some(Bug::IgnoresClaims) {
            plant::remove_what_is_in_flight(&orders.db)?;
        }
        if orders.bug == Some(Bug::DeletesObjects) {
            plant::delete_an_object(&orders.db);
        }
        let pruned = bus.maintenance()?.prune(orders.policy.retention()?).await;
        let collected = match pruned {
            Ok(_) => bus.collect_objects(&collect).await.map(drop),
            Err(error) => Err(error),
        };
        match collected {
            Err(error) if error.code() != Code::EventBusShutdownError => {
                tell(&format!("E retention: {error}\n"));
            }
            _ => {}
        }
        tokio::select! {
            _ = &mut ended => return bus.shutdown().await.map(drop),
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}
