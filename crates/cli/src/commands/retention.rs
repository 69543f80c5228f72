//! `everbus retention`: shows how long everything is kept and what there is, and runs retention.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use everbus::Config;
use everbus::audit::{Action, Operator, audited};
use everbus::duty::{Duty, LastRun, Taken};
use everbus::overflow::{Collect, Collected};
use everbus_core::{
    Clock as _, Code, Engine, Error, Held, Holdings, Maintenance, Pattern, Pruned, RETENTION_DUTY,
    Retention, StreamAge, Streams, SystemClock, Timestamp,
};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use crate::args::Args;
use crate::open::{Target, close};
use crate::output::{Output, Table, escaped, grouped};
use crate::progress;
use crate::stop::Outcome;
use crate::when;

#[derive(Debug, Subcommand)]
pub(crate) enum RetentionCommand {
    /// Remove what is old and no longer needed, now
    Run(RunArgs),
    /// Show the ages in force, what there is, and what is removed next
    Show(PolicyArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = POLICY_HELP)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    policy: PolicyArgs,

    /// Only print what would be removed
    #[arg(long)]
    dry_run: bool,

    /// Trust the clock even if it has jumped: you have checked that it is right
    #[arg(long)]
    trust_clock: bool,
}

/// How long this command has the duty; a daily run that begins meanwhile waits for it.
const HOLD: Duration = Duration::from_secs(600);

const POLICY_HELP: &str = "\
The ages are those of the section `retention` of --config (or EVERBUS_CONFIG), or else the \
standard: events stay; payload stages are removed after 14 days, dead letters 30 days after death, rows of \
the outbox 7 days after they were sent. Rows that failed for good are removed with their dead letters. The \
options override these ages. Whatever the ages are, no event is removed that a group still owes work on, and an \
event with its own expiry time is removed after that time.";

#[derive(Debug, Default, clap::Args)]
pub(crate) struct PolicyArgs {
    /// Begin with the ages of this preset instead of those of the configuration
    #[arg(long, value_enum)]
    preset: Option<Preset>,

    /// Remove events older than this: 30d, 12h, or never
    #[arg(long, value_name = "AGE", value_parser = parse_age, allow_hyphen_values = true)]
    max_age: Option<Age>,

    /// Keep at most this many events
    #[arg(long, value_name = "N")]
    max_len: Option<u64>,

    /// An age for the events of a declared stream or of some types; it overrides --max-age. May be given
    /// several times, and the first match counts
    #[arg(long = "stream", value_name = "STREAM|PATTERN=AGE", value_parser = parse_stream)]
    streams: Vec<(String, Age)>,

    /// Remove payload stages older than this
    #[arg(long, value_name = "AGE", value_parser = parse_age, allow_hyphen_values = true)]
    payloads: Option<Age>,

    /// Remove dead letters this long after their death
    #[arg(long, value_name = "AGE", value_parser = parse_age, allow_hyphen_values = true)]
    dead_letters: Option<Age>,

    /// Remove audit records older than this
    #[arg(long, value_name = "AGE", value_parser = parse_age, allow_hyphen_values = true)]
    audit: Option<Age>,

    /// Remove rows of the outbox this long after they were sent
    #[arg(long, value_name = "AGE", value_parser = parse_age, allow_hyphen_values = true)]
    outbox: Option<Age>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Preset {
    /// Events stay; payload stages 14 days, dead letters 30, the outbox 7
    Standard,
    /// By stream: message 30 days, identity 90, media, agent and channel 7, access and the rest 30
    Omni,
    /// Everything stays except events with their own expiry time
    None,
}

/// `None` is never.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Age(pub(crate) Option<Duration>);

pub(crate) fn parse_age(text: &str) -> Result<Age, String> {
    if text == "never" {
        return Ok(Age(None));
    }
    when::parse_length(text).map(|age| Age(Some(age)))
}

fn parse_stream(text: &str) -> Result<(String, Age), String> {
    let wrong = || format!("{text:?} is not a pattern and an age, such as 'media.>=7d'");
    let (types, age) = text.rsplit_once('=').ok_or_else(wrong)?;
    Pattern::new(types).map_err(|e| e.to_string())?;
    Ok((types.to_owned(), parse_age(age)?))
}

/// The age of a declared stream, or of the types that match a pattern.
fn stream_age(streams: &Streams, name: &str, age: Age) -> Outcome<StreamAge> {
    let stream = streams.named(name).filter(|_| streams.is_declared());
    let types = stream.map_or_else(|| Pattern::new(name), |stream| Ok(stream.types().clone()))?;
    streams.reaches(&types)?;
    Ok(StreamAge {
        types,
        max_age: age.0,
    })
}

impl PolicyArgs {
    /// The settings in force, and where they come from. Options override the preset; without a preset, the
    /// configuration; without both, the standard.
    fn resolve(&self, config: Option<PathBuf>) -> Outcome<(Retention, String)> {
        let config = match config {
            Some(path) => Some((Config::load(&path)?, path.display().to_string())),
            None => None,
        };
        let streams = config.as_ref().map(|(config, _)| config.streams.clone());
        let streams = streams.unwrap_or_default();
        let (mut retention, from) = match (self.preset, config) {
            (Some(preset), _) => (preset.ages(), format!("the preset {}", preset.name())),
            (None, Some((config, path))) => match config.retention {
                Some(retention) => (retention.with_streams(&streams), path),
                None if streams.is_declared() => {
                    (Retention::standard().with_streams(&streams), path)
                }
                None => standard(),
            },
            (None, None) => standard(),
        };
        let over = |place: &mut Option<Duration>, age: Option<Age>| {
            if let Some(Age(age)) = age {
                *place = age;
            }
        };
        over(&mut retention.max_age, self.max_age);
        over(&mut retention.payloads, self.payloads);
        over(&mut retention.dead_letters, self.dead_letters);
        over(&mut retention.audit, self.audit);
        over(&mut retention.outbox, self.outbox);
        retention.max_len = self.max_len.or(retention.max_len);
        let mut ages = Vec::with_capacity(self.streams.len());
        for (name, age) in &self.streams {
            ages.push(stream_age(&streams, name, *age)?);
        }
        ages.append(&mut retention.streams);
        retention.streams = ages;
        retention.validate()?;
        Ok((retention, from))
    }
}

fn standard() -> (Retention, String) {
    (Retention::standard(), "the standard".to_owned())
}

impl Preset {
    fn ages(self) -> Retention {
        match self {
            Self::Standard => Retention::standard(),
            Self::Omni => Retention::omni(),
            Self::None => Retention::default(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::Omni => "omni",
            Self::None => "none",
        }
    }
}

/// The configuration file that was named, by the option or the environment.
fn config(args: &Args) -> Option<PathBuf> {
    let variable = || std::env::var_os("EVERBUS_CONFIG").filter(|value| !value.is_empty());
    args.config
        .clone()
        .or_else(|| variable().map(PathBuf::from))
}

pub(crate) async fn run(
    command: RetentionCommand,
    args: &Args,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    let policy = match &command {
        RetentionCommand::Run(args) => &args.policy,
        RetentionCommand::Show(policy) => policy,
    };
    let (retention, from) = policy.resolve(config(args))?;
    let engine = target.open_existing().await?;
    let outcome = match command {
        RetentionCommand::Run(args) if args.dry_run => {
            preview(&engine, target, retention, output).await
        }
        RetentionCommand::Run(args) => {
            let pruned = prune(&engine, target, retention, args.trust_clock, output);
            target.patiently(Box::pin(pruned)).await
        }
        RetentionCommand::Show(_) => show(&engine, &retention, &from, output).await,
    };
    close(&engine).await;
    outcome
}

async fn preview(
    engine: &Engine,
    target: &Target,
    retention: Retention,
    output: &mut Output,
) -> Outcome {
    let kept = everbus::holds::applied(engine, retention.clone(), SystemClock.now()).await?;
    let bar = progress::spinner("looking");
    let pruned = engine.maintenance()?.preview(kept).await;
    bar.finish_and_clear();
    let collected = collect(
        engine,
        target,
        &Collect {
            dry_run: true,
            ..Collect::default()
        },
    )
    .await?;
    print(&retention, &pruned?, collected, true, output)
}

/// Refuses to use a clock that has jumped.
async fn check_clock(maintenance: &dyn Maintenance) -> Outcome {
    match maintenance.look_at_clock().await? {
        None => Ok(()),
        Some(doubt) => Err(Error::new(Code::ClockInDoubt, doubt.to_string())
            .hint("if the clock of this machine is right, say so with --trust-clock; nothing was removed")
            .into()),
    }
}

/// Deletes the objects of events that an earlier run removed, and of unfinished publishes.
async fn collect(engine: &Engine, target: &Target, options: &Collect) -> Outcome<Collected> {
    match target.objects(engine)? {
        Some(objects) => Ok(objects.collect(engine, options).await?),
        None => Ok(Collected::default()),
    }
}

async fn prune(
    engine: &Engine,
    target: &Target,
    retention: Retention,
    trust_clock: bool,
    output: &mut Output,
) -> Outcome {
    let maintenance = engine.maintenance()?;
    if !trust_clock {
        check_clock(maintenance).await?;
    }
    // Records the run, so that the daily run does not do it again today.
    let owner = format!("everbus retention run, process {}", std::process::id());
    let duty = retention.duty();
    let duty = Duty::of(engine, duty, owner.clone())?;
    let turn = duty.take(SystemClock.now(), HOLD, &SystemClock).await?;
    let kept = everbus::holds::applied(engine, retention.clone(), SystemClock.now()).await?;
    let bar = progress::bar("removing", None);
    let action = Action::new("retention.run")
        .detail("policy", policy_json(&retention))
        .detail("trust_clock", json!(trust_clock));
    let run = async {
        if trust_clock {
            maintenance.trust_clock().await?;
        }
        let reporter = reporter(bar.clone());
        maintenance.prune_watched(kept, reporter).await
    };
    let pruned = audited(engine, &Operator::current(), action, run).await;
    bar.finish_and_clear();
    if let Taken::Yes(turn) = turn {
        let result = pruned.as_ref().map(drop).map_err(ToString::to_string);
        // A run that took longer than `HOLD` has lost the duty. That is not a failure.
        let _ = turn.finish(result, &SystemClock).await;
    }
    if pruned.is_ok() {
        let at = SystemClock.now();
        LastRun { owner, at }.note(engine, RETENTION_DUTY).await?;
    }
    let collected = collect(engine, target, &Collect::default()).await?;
    print(&retention, &pruned?, collected, false, output)
}

fn reporter(bar: ProgressBar) -> Box<dyn FnMut(Pruned) + Send> {
    Box::new(move |done| {
        bar.set_position(
            done.removed + done.payloads + done.dead_letters + done.audit + done.outbox,
        );
        if done.freed_bytes > 0 {
            bar.set_message(format!("giving back {} bytes;", grouped(done.freed_bytes)));
        }
    })
}

fn print(
    retention: &Retention,
    pruned: &Pruned,
    collected: Collected,
    dry_run: bool,
    output: &mut Output,
) -> Outcome {
    if output.is_json() {
        return output.json(&json!({
            "dry_run": dry_run,
            "policy": policy_json(retention),
            "result": pruned,
            "objects": collected,
        }));
    }
    let mut table = Table::new(&[
        "KIND",
        if dry_run { "WOULD GO" } else { "REMOVED" },
        "STILL NEEDED",
    ]);
    let mut row = |kind: &str, removed: u64, kept: Option<u64>| {
        let kept = kept.map_or_else(|| "-".to_owned(), grouped);
        table.row(vec![kind.to_owned(), grouped(removed), kept]);
    };
    row("events", pruned.removed, Some(pruned.kept));
    row("payload stages", pruned.payloads, None);
    row("dead letters", pruned.dead_letters, None);
    row("audit records", pruned.audit, None);
    row("sent outbox rows", pruned.outbox, None);
    let objects = collected.orphans + collected.strays;
    row("objects of large events", objects, Some(collected.kept));
    table.print(output)?;
    if dry_run {
        return output.line("nothing was changed");
    }
    output.line(format!("{} bytes given back", grouped(pruned.freed_bytes)))
}

/// One line of what there is.
struct Line {
    kind: &'static str,
    name: String,
    kept_for: Option<Duration>,
    held: Held,
    /// When the oldest is removed, if ever.
    next: Option<Timestamp>,
}

fn lines(retention: &Retention, holdings: &Holdings) -> Vec<Line> {
    let line = |kind, name: &str, kept_for, held| Line {
        kind,
        name: name.to_owned(),
        kept_for,
        held,
        next: None,
    };
    let streams = retention.streams.iter();
    let mut lines: Vec<Line> = streams
        .map(|s| line("events", s.types.as_str(), s.max_age, Held::default()))
        .collect();
    let rest = match lines.is_empty() {
        true => "everything",
        false => "everything else",
    };
    lines.push(line("events", rest, retention.max_age, Held::default()));
    for held in &holdings.types {
        let mut streams = retention.streams.iter();
        let own = streams.position(|s| s.types.matches(&held.event_type));
        let sum = &mut lines[own.unwrap_or(retention.streams.len())].held;
        sum.count += held.events;
        let oldest = sum.oldest.unwrap_or(held.oldest);
        sum.oldest = Some(oldest.min(held.oldest));
    }
    let (dead_letters, outbox) = (retention.dead_letters, retention.outbox);
    lines.extend([
        line("payload stages", "", retention.payloads, holdings.payloads),
        line("dead letters", "", dead_letters, holdings.dead_letters),
        line("audit records", "", retention.audit, holdings.audit),
        line("sent outbox rows", "", outbox, holdings.outbox),
    ]);
    for line in &mut lines {
        let oldest = line.held.oldest.zip(line.kept_for);
        line.next = oldest.map(|(oldest, age)| oldest.plus(age));
    }
    // These have their own expiry time.
    let mut expiring = line("expiring events", "", None, holdings.expiring);
    expiring.next = expiring.held.oldest.take();
    lines.push(expiring);
    lines
}

async fn show(engine: &Engine, retention: &Retention, from: &str, output: &mut Output) -> Outcome {
    let bar = progress::spinner("counting");
    let holdings = engine.maintenance()?.holdings().await;
    bar.finish_and_clear();
    let holdings = holdings?;
    let last = LastRun::of(engine, RETENTION_DUTY).await?;
    let lines = lines(retention, &holdings);
    if output.is_json() {
        let held: Vec<Value> = lines
            .iter()
            .map(|line| {
                json!({
                    "kind": line.kind,
                    "stream": (!line.name.is_empty()).then_some(&line.name),
                    "kept_for_s": line.kept_for.map(|age| age.as_secs()),
                    "count": line.held.count,
                    "oldest": line.held.oldest,
                    "next": line.next,
                })
            })
            .collect();
        return output.json(&json!({
            "policy": policy_json(retention),
            "policy_from": from,
            "held": held,
            "last_run": last,
            "clock_in_doubt": holdings.clock.map(|doubt| json!({
                "before": doubt.before,
                "found": doubt.found,
                "even_for_s": doubt.even_for.as_secs(),
                "left_s": doubt.left().as_secs(),
            })),
        }));
    }
    let mut table = Table::new(&[
        "KIND",
        "STREAM",
        "KEPT FOR",
        "COUNT",
        "OLDEST",
        "NEXT TO GO",
    ]);
    let now = SystemClock.now();
    for line in &lines {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let next = line.next.map(|at| match at > now {
            true => format!("in {}", when::lasting(at.since(now))),
            false => "now, unless still needed".to_owned(),
        });
        table.row(vec![
            line.kind.to_owned(),
            or_dash((!line.name.is_empty()).then(|| escaped(&line.name).into_owned())),
            match (line.kept_for, line.kind) {
                (_, "expiring events") => "as they say".to_owned(),
                (Some(age), _) => when::lasting(age),
                (None, _) => "ever".to_owned(),
            },
            grouped(line.held.count),
            or_dash(line.held.oldest.map(when::ago)),
            or_dash(next),
        ]);
    }
    table.print(output)?;
    if let Some(most) = retention.max_len {
        output.line(format!("at most {} events are kept", grouped(most)))?;
    }
    output.line(format!("the ages are those of {}", escaped(from)))?;
    output.line(match &last {
        Some(last) => format!(
            "last run {} by {}",
            when::ago(last.at),
            escaped(&last.owner)
        ),
        None => "retention has not run here yet".to_owned(),
    })?;
    match &holdings.clock {
        Some(doubt) => output.line(doubt.to_string()),
        None => Ok(()),
    }
}

fn policy_json(retention: &Retention) -> Value {
    let seconds = |age: Option<Duration>| age.map(|age| age.as_secs());
    let streams: Vec<Value> = retention
        .streams
        .iter()
        .map(|s| json!({ "types": s.types.as_str(), "max_age_s": seconds(s.max_age) }))
        .collect();
    json!({
        "max_age_s": seconds(retention.max_age),
        "max_len": retention.max_len,
        "streams": streams,
        "payloads_s": seconds(retention.payloads),
        "dead_letters_s": seconds(retention.dead_letters),
        "audit_s": seconds(retention.audit),
        "outbox_s": seconds(retention.outbox),
    })
}
