//! Hostile conditions, in rounds: many processes that create one file, flipped bits, files deleted under a
//! publisher, unreadable rows, clocks that jump, few file descriptors.
//!
//! The engine's crate has a test for each of these; here they run with real processes and random choices, in as
//! many rounds as the command line says.

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock, ConsumeOptions, Cursor, DeadLetterFilter, Engine, Event, FailureKind, GroupName,
    GroupSpec, ManualClock, PageRequest, Settlement, StartFrom, SubscriptionSpec, SystemClock,
    Verdict,
};
use everbus_sqlite::Options;
use rusqlite::Connection;

use super::Broken;
use crate::model::Random;

/// An answer that takes longer is treated as missing.
const PATIENCE: Duration = Duration::from_secs(60);
/// This many processes open a new file at the same moment.
const STARTERS: u64 = 6;
/// Events in a file whose bits are flipped.
const EVENTS: u64 = 40;

/// What is tried, and how often.
#[derive(Debug)]
pub struct Hostile {
    /// This program, which is started again as a victim.
    pub program: PathBuf,
    /// Where the files are.
    pub directory: PathBuf,
    /// Seed of all random choices.
    pub seed: u64,
    /// How often each kind is tried.
    pub rounds: u64,
}

/// The result.
#[derive(Debug, Default)]
pub struct Found {
    /// Rounds that were tried, of all kinds.
    pub rounds: u64,
    /// Flipped bits that an event's checksum found.
    pub flips_found: u64,
    /// Flipped bits in bytes that are never read.
    pub flips_harmless: u64,
    /// What went wrong.
    pub problems: Vec<String>,
}

type Checked<T = ()> = Result<T, String>;

impl Hostile {
    /// Tries everything.
    pub fn run(&self) -> Result<Found, Broken> {
        let mut found = Found::default();
        let mut random = Random::new(self.seed);
        for round in 0..self.rounds {
            let directory = self.directory.join(round.to_string());
            std::fs::create_dir_all(&directory).map_err(Broken::new)?;
            let file = |name: &str| directory.join(name);
            let before = found.problems.len();
            found.note("new file", self.new_file(&file("new.db")));
            found.note("bad row", bad_row(&file("row.db"), &mut random));
            found.note("clock", clock_leap(&file("clock.db")));
            found.note("gone", self.gone(&file("gone.db"), &mut random));
            found.note(
                "descriptors",
                self.few_descriptors(&file("few.db"), &mut random),
            );
            match flipped_bit(&file("flip.db"), &mut random) {
                Ok(true) => found.flips_found += 1,
                Ok(false) => found.flips_harmless += 1,
                Err(problem) => found.problems.push(format!("flipped bit: {problem}")),
            }
            found.rounds += 6;
            if found.problems.len() == before {
                std::fs::remove_dir_all(&directory).map_err(Broken::new)?;
            }
        }
        Ok(found)
    }

    fn victim(&self, db: &Path, publishes: u64) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(["starter", "--publishes", &publishes.to_string(), "--db"])
            .arg(db)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Several processes open one file that is not there yet; each publishes one event.
    fn new_file(&self, db: &Path) -> Checked {
        let started: Result<Vec<Child>, _> =
            (0..STARTERS).map(|_| self.victim(db, 1).spawn()).collect();
        for child in started.map_err(text)? {
            let output = child.wait_with_output().map_err(text)?;
            if !output.status.success() {
                return Err(String::from_utf8_lossy(&output.stderr).into_owned());
            }
        }
        let stored = count(db, "SELECT count(*) FROM log")?;
        expect(stored == STARTERS, || {
            format!("{stored} of {STARTERS} events")
        })
    }

    /// The file of a publisher is deleted or moved: every acknowledged event is in the file that is left.
    fn gone(&self, db: &Path, random: &mut Random) -> Checked {
        let mut child = self.victim(db, u64::MAX).spawn().map_err(text)?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
        // It publishes for a while.
        for _ in 0..random.below(50) + 1 {
            lines.next().ok_or("the publisher ended")?.map_err(text)?;
        }
        let named = |suffix: &str| PathBuf::from(format!("{}{suffix}", db.display()));
        let victim = named(if random.below(2) == 0 { "" } else { "-wal" });
        let kept = named("-kept");
        if random.below(2) == 0 {
            // A second name keeps what the publisher wrote.
            std::fs::hard_link(&victim, &kept).map_err(text)?;
            std::fs::remove_file(&victim).map_err(text)?;
        } else {
            std::fs::rename(&victim, &kept).map_err(text)?;
        }
        let heard: Result<Vec<String>, _> = lines.collect();
        let heard = heard.map_err(text)?;
        let mut said = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            stderr.read_to_string(&mut said).map_err(text)?;
        }
        let status = child.wait().map_err(text)?;
        expect(!status.success() && said.contains("FileGone"), || {
            format!("the publisher ended with {status}: {said}")
        })?;
        // After the file is put back, every acknowledged event is there.
        std::fs::rename(&kept, &victim).map_err(text)?;
        let last: u64 = heard.last().and_then(|line| line.parse().ok()).unwrap_or(0);
        let stored = count(db, "SELECT max(seq) FROM log")?;
        expect(stored >= last, || {
            format!("{last} were acknowledged, {stored} are there")
        })
    }

    /// With few file descriptors a process works, or reports that it has too few.
    fn few_descriptors(&self, db: &Path, random: &mut Random) -> Checked {
        let limit = 4 + random.below(30);
        let victim = self.victim(db, 1);
        let output = Command::new("sh")
            .args(["-c", &format!("ulimit -n {limit}; exec \"$@\""), "sh"])
            .arg(victim.get_program())
            .args(victim.get_args())
            .output()
            .map_err(text)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let told = said.contains("OutOfResources") || said.contains("Too many open files");
        expect(
            output.status.success() || (told && !said.contains("panicked")),
            || format!("with {limit} descriptors: {}: {said}", output.status),
        )
    }
}

impl Found {
    fn note(&mut self, what: &str, checked: Checked) {
        if let Err(problem) = checked {
            self.problems.push(format!("{what}: {problem}"));
        }
    }
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "hostile rounds={} flips found={} harmless={} problems={}",
            self.rounds,
            self.flips_found,
            self.flips_harmless,
            self.problems.len()
        )
    }
}

/// The process that opens a file and publishes, and prints each acknowledged position.
pub fn start(db: &Path, publishes: u64) -> Result<(), Broken> {
    on_runtime(async {
        let engine = everbus_sqlite::open(db, Options::default()).map_err(|e| e.to_string())?;
        for n in 0..publishes {
            let position = publish(&engine, n).await?;
            let mut out = std::io::stdout().lock();
            // Without a reader the process ends.
            if writeln!(out, "{position}")
                .and_then(|()| out.flush())
                .is_err()
            {
                break;
            }
        }
        engine.broker.close().await.map_err(|e| e.to_string())
    })
    .map_err(Broken)
}

/// One column of one row is overwritten with something else.
fn bad_row(db: &Path, random: &mut Random) -> Checked {
    let columns = [
        "version",
        "id",
        "occurred_at",
        "received_at",
        "attrs",
        "payload",
        "type",
    ];
    let values = ["'abc'", "-1", "x'00ff'", "1.5", "''"];
    let column = columns[random.below(columns.len())];
    let value = values[random.below(values.len())];
    let seq = random.below(8) as u64 + 1;
    on_runtime(async {
        let engine = open(db)?;
        for n in 0..8 {
            publish(&engine, n).await?;
        }
        change(
            db,
            &format!("UPDATE log SET {column} = {value} WHERE seq = {seq}"),
        )?;
        let what = format!("{column} = {value} at {seq}");
        consumes(&engine, 8, &HashSet::from([seq]), &what).await
    })
}

/// Flips a bit of a file. A consumer must get events exactly as published. Returns whether damage was found.
fn flipped_bit(db: &Path, random: &mut Random) -> Checked<bool> {
    on_runtime(async {
        let engine = open(db)?;
        for n in 0..EVENTS {
            publish(&engine, n).await?;
        }
        engine.broker.close().await.map_err(text)?;
        let mut bytes = std::fs::read(db).map_err(text)?;
        // Payloads, which make up most of a file: SQLite does not notice a flip there.
        let places: Vec<usize> = bytes
            .windows(FILLER.len())
            .enumerate()
            .filter(|(_, window)| *window == FILLER.as_bytes())
            .map(|(at, _)| at)
            .collect();
        let place = places[random.below(places.len())];
        let at = place + random.below(FILLER.len());
        bytes[at] ^= 1 << random.below(8);
        std::fs::write(db, bytes).map_err(text)?;
        let engine = open(db)?;
        let report = engine
            .maintenance()
            .map_err(text)?
            .check()
            .await
            .map_err(text)?;
        if report.is_ok() {
            // A free page, or an old copy: every event must be intact.
            consumes(
                &engine,
                EVENTS,
                &HashSet::new(),
                "a flip that check did not find",
            )
            .await?;
            return Ok(false);
        }
        let (read, _) = engine
            .log()
            .map_err(text)?
            .read(
                Cursor::START,
                vec!["hostile.*".parse().map_err(text)?],
                1000,
            )
            .await
            .map_err(text)?;
        let intact: HashSet<u64> = read.iter().map(|r| r.position.place()).collect();
        let lost: HashSet<u64> = (1..=EVENTS).filter(|n| !intact.contains(n)).collect();
        expect(lost.len() == 1, || {
            format!("{} are damaged by one bit", lost.len())
        })?;
        consumes(&engine, EVENTS, &lost, "a flipped bit").await?;
        Ok(true)
    })
}

/// A publisher whose clock is decades ahead, and one whose clock is right: the check reports it.
fn clock_leap(db: &Path) -> Checked {
    let ahead = ManualClock::new(
        SystemClock
            .now()
            .plus(Duration::from_secs(30 * 365 * 86_400)),
    );
    on_runtime(async {
        for clock in [
            Arc::new(SystemClock) as Arc<dyn Clock>,
            Arc::new(ahead),
            Arc::new(SystemClock),
        ] {
            let options = Options {
                clock,
                ..Options::default()
            };
            let engine = everbus_sqlite::open(db, options).map_err(text)?;
            publish(&engine, 0).await?;
            engine.broker.close().await.map_err(text)?;
        }
        let engine = open(db)?;
        let report = engine
            .maintenance()
            .map_err(text)?
            .check()
            .await
            .map_err(text)?;
        expect(!report.is_ok(), || {
            "check says nothing of events from the future".into()
        })
    })
}

/// A group gets every event except the damaged ones, which become its dead letters.
async fn consumes(engine: &Engine, events: u64, damaged: &HashSet<u64>, what: &str) -> Checked {
    let group: GroupName = "hostile".parse().map_err(text)?;
    let spec = GroupSpec {
        name: group.clone(),
        start_from: StartFrom::First,
        ordered: false,
        ephemeral: false,
        subscriptions: vec![SubscriptionSpec {
            name: "all".into(),
            pattern: "hostile.*".parse().map_err(text)?,
        }],
    };
    engine.broker.declare(spec).await.map_err(text)?;
    let options = ConsumeOptions::new(vec!["*".parse().map_err(text)?]);
    let mut consumer = engine.broker.consume(group, options).await.map_err(text)?;
    let mut left: HashSet<u64> = (1..=events).filter(|n| !damaged.contains(n)).collect();
    while !left.is_empty() {
        let fetched = tokio::time::timeout(PATIENCE, consumer.fetch(100)).await;
        let fetched = fetched.map_err(|_| format!("{what}: {} do not come", left.len()))?;
        for delivery in fetched.map_err(text)? {
            let seq = delivery.record.position.place();
            let right = delivery.record.event.payload()[..] == *payload(seq - 1).as_bytes();
            expect(right && left.remove(&seq), || {
                format!("{what}: {seq} is wrong")
            })?;
            let settlement = Settlement::new(delivery.lease.clone(), Verdict::Ack);
            engine.broker.settle(vec![settlement]).await.map_err(text)?;
        }
    }
    let dead = engine.dead_letters().map_err(text)?;
    let mut tries = 0;
    loop {
        let page = dead.list(DeadLetterFilter::default(), PageRequest::default());
        let letters = page.await.map_err(text)?.items;
        let corrupt = |l: &everbus_core::DeadLetter| {
            l.failures
                .last()
                .is_some_and(|f| f.kind == FailureKind::Corrupt)
        };
        let buried: HashSet<u64> = letters.iter().map(|l| l.record.position.place()).collect();
        if buried == *damaged && letters.iter().all(corrupt) {
            return Ok(());
        }
        tries += 1;
        expect(tries < 1000, || {
            format!("{what}: the dead letters are {buried:?}")
        })?;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// So long that most bits of a file belong to a payload.
const FILLER: &str = "not a bit of this may change, not in a year and not in a hundred";

fn payload(n: u64) -> String {
    format!("{{\"n\":{n},\"filler\":\"{FILLER}{FILLER}{FILLER}\"}}")
}

fn open(db: &Path) -> Checked<Engine> {
    everbus_sqlite::open(db, Options::default()).map_err(text)
}

async fn publish(engine: &Engine, n: u64) -> Checked<u64> {
    let event = Event::builder("hostile.event").payload(payload(n)).build();
    let mut answers = engine
        .broker
        .append(vec![event.map_err(text)?])
        .await
        .map_err(text)?;
    let answer = answers.pop().ok_or("no answer")?;
    Ok(answer.map_err(text)?.position.place())
}

fn change(db: &Path, sql: &str) -> Checked {
    let conn = Connection::open(db).map_err(text)?;
    conn.busy_timeout(PATIENCE).map_err(text)?;
    conn.execute_batch(sql).map_err(text)
}

fn count(db: &Path, sql: &str) -> Checked<u64> {
    let conn = Connection::open(db).map_err(text)?;
    conn.query_row(sql, [], |r| r.get::<_, i64>(0))
        .map(|n| u64::try_from(n).unwrap_or(0))
        .map_err(text)
}

fn on_runtime<T>(work: impl Future<Output = Checked<T>>) -> Checked<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .map_err(text)?;
    runtime.block_on(work)
}

fn expect(holds: bool, problem: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(problem()) }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
