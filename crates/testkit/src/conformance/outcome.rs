//! The outcome of a scenario: passed, passed with the help of the runtime, passed except for what the engine
//! lacks, or not offered.
//!
//! The outcomes of each engine are checked in, one line per scenario, in `docs/compat/<engine>.txt`. A
//! scenario with another outcome fails, so an engine cannot pass by doing nothing. With
//! `EVERBUS_WRITE_COMPAT` set, the lines are written instead (`cargo xtask compat`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::needs::Need;

/// How a scenario ends. It comes from a [`Stage`](super::Stage): nothing else makes one, so a scenario that
/// returns early without saying so does not compile.
///
/// ```compile_fail
/// use everbus_testkit::conformance::{Harness, Outcome, Stage, Time};
///
/// async fn silent<H: Harness>(harness: H) -> Outcome {
///     let stage = Stage::open(harness, Time::Still, &[]).await?;
///     if !stage.capabilities().fencing {
///         return;
///     }
///     stage.passed()
/// }
/// ```
pub type Outcome = Result<Passed, NotOffered>;

/// A scenario held.
#[derive(Debug)]
#[must_use]
pub struct Passed {
    pub(super) column: &'static str,
    /// What the runtime did instead of the engine.
    pub(super) emulated: BTreeSet<&'static str>,
    /// The parts that were left out, by reason.
    pub(super) except: BTreeSet<&'static str>,
}

/// A scenario needs something that the engine does not offer.
#[derive(Debug)]
#[must_use]
pub struct NotOffered {
    pub(super) column: &'static str,
    pub(super) need: &'static Need,
}

impl fmt::Display for Passed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = |parts: &BTreeSet<&str>| parts.iter().copied().collect::<Vec<_>>().join("; ");
        let (how, except) = (parts(&self.emulated), parts(&self.except));
        match (how.as_str(), except.as_str()) {
            ("", "") => f.write_str("yes"),
            ("", except) => write!(f, "yes, except: {except}"),
            (how, "") => write!(f, "emulated: {how}"),
            (how, except) => write!(f, "emulated: {how}; {except}"),
        }
    }
}

impl fmt::Display for NotOffered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no: {}", self.need.reason)
    }
}

/// Runs a scenario and compares its outcome with what the engine's column says.
pub async fn run(scenario: &'static str, work: impl Future<Output = Outcome>) {
    let began = Instant::now();
    let (column, said) = match work.await {
        Ok(passed) => (passed.column, passed.to_string()),
        Err(not_offered) => (not_offered.column, not_offered.to_string()),
    };
    let mut columns = COLUMNS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = columns
        .entry(column)
        .or_insert_with(|| Progress::new(column));
    if std::env::var_os("EVERBUS_WRITE_COMPAT").is_some() {
        known.lines.insert(scenario.to_owned(), said.clone());
        write_column(column, &known.lines);
    }
    let listed = known.lines.get(scenario).map_or("nothing", String::as_str);
    assert_eq!(
        said, listed,
        "{scenario} on {column}: docs/compat/{column}.txt says otherwise; \
         if this is as it should be, run `cargo xtask compat`"
    );
    known.note(scenario, said, began);
}

static COLUMNS: LazyLock<Mutex<BTreeMap<&'static str, Progress>>> = LazyLock::new(Mutex::default);

/// The progress of the suite on one engine.
struct Progress {
    column: &'static str,
    began: Option<Instant>,
    work: Duration,
    /// The outcome of each scenario in this run.
    said: BTreeMap<&'static str, String>,
    /// The checked-in outcomes.
    lines: BTreeMap<String, String>,
}

impl Progress {
    fn new(column: &'static str) -> Self {
        Self {
            column,
            began: None,
            work: Duration::ZERO,
            said: BTreeMap::new(),
            lines: read_column(column),
        }
    }

    fn note(&mut self, scenario: &'static str, said: String, began: Instant) {
        let first = self.began.map_or(began, |known| known.min(began));
        self.began = Some(first);
        self.work += began.elapsed();
        let new = self.said.insert(scenario, said).is_none();
        if new && self.said.len() == super::names().len() {
            // Not `eprintln!`: the test runner would capture it.
            let _ = std::io::stderr().write_all(self.summary(first.elapsed()).as_bytes());
        }
    }

    fn summary(&self, took: Duration) -> String {
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (scenario, said) in &self.said {
            reasons.entry(said).or_default().push(scenario);
        }
        let mut text = format!(
            "\nconformance of {}: {} scenarios in {:.1} s ({:.1} s one after another)\n",
            self.column,
            self.said.len(),
            took.as_secs_f64(),
            self.work.as_secs_f64()
        );
        for (said, scenarios) in reasons {
            text.push_str(&format!("{:>5}  {said}\n", scenarios.len()));
        }
        text
    }
}

/// Where the columns are.
pub(crate) fn directory() -> PathBuf {
    root().join("docs/compat")
}

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The lines of a column, by scenario; empty where there is none.
pub(crate) fn read_column(column: &str) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(directory().join(format!("{column}.txt")));
    let text = text.unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let lines = lines.filter_map(|line| line.split_once(" = "));
    lines.map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

fn write_column(column: &str, lines: &BTreeMap<String, String>) {
    let mut text =
        String::from("# Written by the conformance suite: `cargo xtask compat`. Do not edit.\n");
    for scenario in super::names() {
        if let Some(said) = lines.get(scenario) {
            text.push_str(&format!("{scenario} = {said}\n"));
        }
    }
    std::fs::create_dir_all(directory()).unwrap();
    std::fs::write(directory().join(format!("{column}.txt")), text).unwrap();
}
