//! Kills the relay of an outbox, at random and at failpoints, and checks that every event arrived once, and
//! in order for each key.
//!
//! The campaign commits the events to the outbox itself, so it knows what must arrive. Half of the rounds
//! relay from a separate database, half from the outbox in the file of the bus.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use everbus::outbox::{Outbox, Relay};
use everbus::overflow::Overflow;
use everbus::{Bus, Event, EventId};
use everbus_core::{Cursor, Error};
use rusqlite::Connection;

use super::Broken;
use super::hooks::Hooked;
use super::objects::THRESHOLD;
use super::plant::MarkFirst;
use super::process::PATIENCE;
use super::victim::{end_of_input, tell};
use crate::model::Random;

/// The lease of a victim, short, so that the next relay need not wait long.
pub(crate) const LEASE: Duration = Duration::from_millis(100);
const KEYS: u64 = 5;
const TYPE: &str = "chaos.relayed";

/// Failpoints where a relay is killed.
pub(crate) const PLACES: [&str; 5] = [
    "before-commit",
    "after-commit",
    "after-answer",
    "before-outbox-mark",
    "after-outbox-mark",
];

/// The orders of a relay.
#[derive(Clone, Debug)]
pub struct Orders {
    /// The file of the bus.
    pub db: PathBuf,
    /// A database with an outbox; `None`: the outbox in the file of the bus.
    pub outbox: Option<PathBuf>,
    /// It runs until standard input is closed, instead of until the outbox is empty.
    pub keep_on: bool,
    /// Rows are marked before they are published: a bug that the campaign must find.
    pub mark_first: bool,
}

impl Orders {
    /// The command that carries them out.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.arg("relay-victim").arg("--db").arg(&self.db);
        if let Some(outbox) = &self.outbox {
            command.arg("--outbox").arg(outbox);
        }
        for (wanted, flag) in [
            (self.keep_on, "--keep-on"),
            (self.mark_first, "--mark-first"),
        ] {
            if wanted {
                command.arg(flag);
            }
        }
        command
    }
}

/// The process that is killed: it relays until nothing is left, or until it is told to end.
pub fn run(orders: &Orders) -> Result<(), Broken> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .map_err(Broken::at("starting a runtime"))?;
    let relay = async {
        let mut engine = everbus_sqlite::open(&orders.db, everbus_sqlite::Options::default())?;
        if orders.mark_first {
            let outbox = orders.outbox.as_deref().unwrap_or(&orders.db);
            engine.broker = Hooked::wrap(engine.broker, MarkFirst::new(outbox)?);
        }
        let overflow = Overflow::default().threshold(THRESHOLD);
        let bus = Bus::builder().overflow(overflow).with_engine(engine)?;
        let relay = match &orders.outbox {
            Some(path) => Relay::new(&bus, Outbox::open(path)?),
            None => Relay::own(&bus)?,
        };
        let relay = relay.lease(LEASE).batch(7).max_batch(30);
        if orders.keep_on {
            tell("READY\n");
            let relay = relay.spawn();
            let _ = end_of_input().await;
            relay.stop().await?;
        } else {
            relay.run_until_empty().await?;
        }
        bus.shutdown().await?;
        Ok::<_, Error>(())
    };
    runtime
        .block_on(relay)
        .map_err(|error| Broken(format!("{error:?}")))
}

/// A campaign that kills a relay repeatedly.
#[derive(Clone, Debug)]
pub struct RelayCampaign {
    /// The program whose `relay-victim` is killed.
    pub program: PathBuf,
    /// Where its files go.
    pub directory: PathBuf,
    /// Repeats the schedule.
    pub seed: u64,
    /// How often.
    pub kills: u64,
}

/// The result of a campaign.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Relays that were killed at random.
    pub kills: u64,
    /// Relays that died at a named place.
    pub named: u64,
    /// Events that were committed to an outbox.
    pub events: u64,
    /// All problems found.
    pub problems: Vec<String>,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kills, named, events) = (self.kills, self.named, self.events);
        write!(
            f,
            "relay kills={kills} at named places={named} events={events} problems={}",
            self.problems.len()
        )
    }
}

impl RelayCampaign {
    /// Runs it.
    pub fn run(&self) -> Result<Found, Broken> {
        let mut found = Found::default();
        let mut random = Random::new(self.seed);
        for (number, own) in [(0, false), (1, true)] {
            let db = self.directory.join(format!("bus-{number}.db"));
            let outbox = (!own).then(|| self.directory.join(format!("shop-{number}.db")));
            let mut stage = Stage::new(self, db, outbox)?;
            let mut kills = 0;
            while kills < self.kills.div_ceil(2) {
                stage.fill(20 + random.number() % 60, &mut found)?;
                kills += u64::from(stage.kill(&mut random, &mut found)?);
            }
            stage.finish()?;
            stage.check(&mut found)?;
        }
        Ok(found)
    }
}

/// An outbox, a bus, and what must arrive.
struct Stage<'a> {
    program: &'a Path,
    db: PathBuf,
    outbox: Option<PathBuf>,
    written: Connection,
    expected: BTreeMap<EventId, u64>,
}

impl<'a> Stage<'a> {
    fn new(
        campaign: &'a RelayCampaign,
        db: PathBuf,
        outbox: Option<PathBuf>,
    ) -> Result<Self, Broken> {
        let broken = |error: Error| Broken(format!("{error:?}"));
        // Makes the file of the bus.
        drop(everbus_sqlite::open(&db, everbus_sqlite::Options::default()).map_err(broken)?);
        let file = outbox.as_ref().unwrap_or(&db);
        let written = Connection::open(file).map_err(Broken::at("opening the outbox"))?;
        written
            .busy_timeout(PATIENCE)
            .map_err(Broken::at("opening the outbox"))?;
        if outbox.is_some() {
            written
                .pragma_update(None, "journal_mode", "WAL")
                .map_err(Broken::at("opening the outbox"))?;
        }
        Outbox::create_tables(&written).map_err(broken)?;
        Ok(Self {
            program: &campaign.program,
            db,
            outbox,
            written,
            expected: BTreeMap::new(),
        })
    }

    fn fill(&mut self, events: u64, found: &mut Found) -> Result<(), Broken> {
        let doing = |error: &dyn fmt::Display| Broken(format!("enqueueing: {error}"));
        let tx = self.written.transaction().map_err(|e| doing(&e))?;
        let mut added = Vec::new();
        for _ in 0..events {
            let number = (self.expected.len() + added.len()) as u64;
            let event = Event::builder(TYPE)
                .json(&number)
                .key(format!("key-{}", number % KEYS));
            let id = Outbox::new().enqueue(&tx, event).map_err(|e| doing(&e))?;
            added.push((id, number));
        }
        tx.commit().map_err(|e| doing(&e))?;
        self.expected.extend(added);
        found.events += events;
        Ok(())
    }

    fn command(&self) -> Command {
        let orders = Orders {
            db: self.db.clone(),
            outbox: self.outbox.clone(),
            keep_on: false,
            mark_first: false,
        };
        let mut command = orders.command(self.program);
        command
            .env_remove("EVERBUS_FAILPOINT")
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// Starts a relay and kills it, unless it ended first. Returns whether it was killed.
    fn kill(&self, random: &mut Random, found: &mut Found) -> Result<bool, Broken> {
        let mut command = self.command();
        let named = random.below(2) == 0;
        if named {
            let place = PLACES[random.below(PLACES.len())];
            let hit = 1 + random.below(6);
            command.env("EVERBUS_FAILPOINT", format!("{place}:{hit}"));
        }
        let starting = Broken::at("starting a relay");
        let mut relay = command.spawn().map_err(starting)?;
        if !named {
            std::thread::sleep(Duration::from_millis(random.number() % 120));
            let _ = relay.kill();
        }
        let give_up = Instant::now() + PATIENCE;
        let ended = loop {
            match relay
                .try_wait()
                .map_err(Broken::at("waiting for a relay"))?
            {
                Some(ended) => break ended,
                None if Instant::now() > give_up => {
                    let _ = relay.kill();
                    let _ = relay.wait();
                    found.problems.push("a relay never ended".to_owned());
                    return Ok(true);
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        let killed = !ended.success();
        found.named += u64::from(killed && named);
        found.kills += u64::from(killed && !named);
        Ok(killed)
    }

    /// Runs a relay to its end.
    fn finish(&self) -> Result<(), Broken> {
        let ended = self.command().status();
        let ended = ended.map_err(Broken::at("starting a relay"))?;
        if ended.success() {
            return Ok(());
        }
        Err(Broken::new(format!("the last relay ended with {ended}")))
    }

    /// Every event arrived once, and in order for each key; every row is marked as sent.
    fn check(&self, found: &mut Found) -> Result<(), Broken> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .map_err(Broken::at("starting a runtime"))?;
        let arrived = runtime.block_on(self.arrived());
        let arrived = arrived.map_err(|error| Broken(format!("{error:?}")))?;
        let mut last = BTreeMap::new();
        let mut left = self.expected.clone();
        for (id, number) in arrived {
            if left.remove(&id) != Some(number) {
                found.problems.push(format!("{id} came twice, or changed"));
            }
            if last.insert(number % KEYS, number) > Some(number) {
                found.problems.push(format!("{id} came late for its key"));
            }
        }
        for (id, _) in left {
            found.problems.push(format!("{id} is lost"));
        }
        let unsent: i64 = self
            .written
            .query_row(
                "SELECT count(*) FROM event_outbox WHERE status <> 'sent' OR attempts > 0",
                [],
                |r| r.get(0),
            )
            .map_err(Broken::at("counting rows"))?;
        if unsent > 0 {
            found.problems.push(format!("{unsent} rows are not sent"));
        }
        Ok(())
    }

    async fn arrived(&self) -> Result<Vec<(EventId, u64)>, Error> {
        let bus = Bus::open(self.db.display().to_string()).await?;
        let (mut all, mut after) = (Vec::new(), Cursor::START);
        loop {
            let read = bus.log()?.read(after.clone(), vec![TYPE.parse()?], 1000);
            let (some, searched) = read.await?;
            for record in &some {
                all.push((record.event.id(), record.event.json()?));
            }
            if searched == after {
                bus.shutdown().await?;
                return Ok(all);
            }
            after = searched;
        }
    }
}
