//! `everbus bridge`: carries events from one engine to another, until Ctrl-C or until nothing is left.

use std::time::Duration;

use clap::ValueEnum;
use everbus::Bus;
use everbus::bridge::{BRIDGE, Bridge, BridgeStats};
use everbus_core::{
    Clock as _, Code, Deduplication, Error, GroupName, Pattern, StartFrom, SystemClock,
};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use crate::args::Args;
use crate::interrupt::Interrupt;
use crate::open::{Target, close};
use crate::output::{Output, counted, escaped, grouped, shell_word};
use crate::progress;
use crate::stop::{Outcome, Stop};
use crate::suggest::Suggestion;
use crate::values::{parse_own_group, parse_pattern};
use crate::when;

/// How often the bar moves.
const TICK: Duration = Duration::from_millis(200);
/// How often a bridge without an end prints its progress, if there is any.
const REPORT: Duration = Duration::from_secs(1);
/// After Ctrl-C, running work gets this long.
const LAST: Duration = Duration::from_secs(10);

const HELP: &str = "\
Events keep their ids, types, payloads, attributes and the order of each key; the target gives them \
a new time of receipt. A group of the source keeps the position of the bridge, and an event counts as handled \
only once the target has it. So a bridge that was killed continues where it was. A target that \
recognises ids stores no event twice.

Source and target are a file, a URL (sqlite:FILE, postgres://HOST/DATABASE, nats://HOST, redis://HOST, \
kafka://HOST) or an everbus.yaml, which also contains credentials, streams and store. From Redis, streams \
that only other programs have written are carried too.

To move to another engine while publishers run: bridge --until caught-up; let the publishers publish \
to the target; bridge --until caught-up once more. It ends with exit code 0 when the target has every \
event, and with 1 if the target refused some: those are dead letters of the bridge's group.

--group may name an existing group of consumers after these consumers have stopped. Then the target gets \
exactly the events that this group has not handled.";

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct BridgeArgs {
    /// Where the events are: a file, a URL, or a configuration file (.yaml)
    #[arg(long, value_name = "URL")]
    from: String,

    /// Where they go
    #[arg(long, value_name = "URL")]
    to: String,

    /// The store beside the source, which has its dead letters
    #[arg(long, value_name = "URL")]
    from_store: Option<String>,

    /// The store beside the target, which is asked for events that the target may have
    #[arg(long, value_name = "URL")]
    to_store: Option<String>,

    /// Only types that match; may be given several times [default: everything but system.]
    #[arg(long = "pattern", value_name = "PATTERN", value_parser = parse_pattern)]
    patterns: Vec<Pattern>,

    /// The group of the source that remembers how far the bridge is; bridges to several targets need one each
    #[arg(long, value_name = "NAME", default_value = BRIDGE, value_parser = parse_own_group)]
    group: GroupName,

    /// Where a new bridge begins: first, new, last, a time, or how long ago (15m, 2h, 7d)
    #[arg(long, value_name = "WHERE", default_value = "first", value_parser = when::parse_start, allow_hyphen_values = true)]
    start: StartFrom,

    /// Keep the order of each key even if the bridge is killed; slower
    #[arg(long)]
    ordered: bool,

    /// End once the target has every event of the source
    #[arg(long, value_enum, value_name = "WHEN")]
    until: Option<Until>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Until {
    CaughtUp,
}

pub(crate) async fn run(bridge: BridgeArgs, args: &Args, output: &mut Output) -> Outcome {
    if args.db.is_some() || args.broker.is_some() || args.store.is_some() || args.config.is_some() {
        return Err(Stop::usage(
            "a bridge has two ends: --db, --broker, --store and --config do not say which",
            Some("name them with --from and --to; each may be a configuration file"),
        ));
    }
    let from = Target::end(&bridge.from, bridge.from_store.clone(), args)?.with_all_streams();
    let to = Target::end(&bridge.to, bridge.to_store.clone(), args)?;
    if from.is_same_as(&to) {
        let what = format!("{} is the source and the target", from.label());
        return Err(Error::new(Code::InvalidSetting, what)
            .hint("name another file, database, schema or server as the target")
            .into());
    }
    let interrupt = Interrupt::listen();
    let opening = async {
        // The source is opened first, so that a mistyped source creates no target.
        let source = from.open_existing_bus().await?;
        match to.open_bus().await {
            Ok(target) => Ok((source, target)),
            Err(stop) => {
                close(source.engine()).await;
                Err(stop)
            }
        }
    };
    let (source, target) = tokio::select! {
        opened = Box::pin(opening) => opened?,
        () = interrupt.wait() => return Err(Stop::Interrupted),
    };
    warn_of_duplicates(&target, &to, output);
    // A store beside the target gets the events too.
    if let Some(archive) = &target.engine().background {
        tokio::spawn(archive.run());
    }
    let mut work = Bridge::new(&source, &target)
        .group(bridge.group.clone())
        .start_from(bridge.start)
        .ordered(bridge.ordered)
        .target(to.label());
    if !bridge.patterns.is_empty() {
        work = work.patterns(bridge.patterns.clone());
    }
    let outcome = follow(&work, &bridge, &interrupt, output).await;
    let stats = work.stats();
    let ended = report(&bridge, &outcome, &stats, &from, &to, output);
    close(source.engine()).await;
    close(target.engine()).await;
    // The error of the bridge says more than that of a closed pipe.
    outcome?;
    ended
}

/// Says how long the target recognises ids, if not for ever.
fn warn_of_duplicates(target: &Bus, to: &Target, output: &Output) {
    let how_long = match target.capabilities().deduplication {
        Deduplication::WhileRetained => return,
        Deduplication::Window(window) => format!("for {}", when::lasting(window)),
        _ => "not at all".to_owned(),
    };
    if output.is_json() {
        return;
    }
    let line = format!(
        "note: {} recognises repeated ids {how_long}; if the bridge is killed and starts again later, events that \
         were in flight may come twice\n",
        escaped(&to.label())
    );
    // If standard error is closed, there is no reader.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
}

async fn follow(
    work: &Bridge,
    args: &BridgeArgs,
    interrupt: &Interrupt,
    output: &mut Output,
) -> Outcome {
    let bar = progress::bar("carrying", Some(0));
    let mut run = match args.until {
        Some(Until::CaughtUp) => Box::pin(work.run_until_caught_up()) as Running<'_>,
        None => Box::pin(work.run()),
    };
    let mut told = work.stats();
    let mut since = tokio::time::Instant::now();
    let ended = loop {
        tokio::select! {
            ended = &mut run => break ended.map(drop).map_err(Stop::from),
            () = interrupt.wait() => {
                work.stop();
                let ended = tokio::time::timeout(LAST, &mut run).await;
                break match (ended, args.until) {
                    (Ok(Err(error)), _) => Err(error.into()),
                    // Ctrl-C is the usual end of a bridge without --until.
                    (_, None) => Ok(()),
                    (_, Some(_)) => Err(Stop::Interrupted),
                };
            }
            () = tokio::time::sleep(TICK) => {}
        }
        let stats = work.stats();
        show(&bar, &stats);
        if args.until.is_none() && stats != told && since.elapsed() >= REPORT {
            since = tokio::time::Instant::now();
            tell(&stats, output)?;
            told = stats;
        }
    };
    bar.finish_and_clear();
    ended
}

type Running<'a> = std::pin::Pin<Box<dyn Future<Output = everbus_core::Result<BridgeStats>> + 'a>>;

fn show(bar: &ProgressBar, stats: &BridgeStats) {
    let done = stats.moved + stats.duplicates + stats.returned + stats.refused;
    bar.set_length(done + stats.lag.unwrap_or(0));
    bar.set_position(done);
    bar.set_message(if stats.waiting { "waiting" } else { "carrying" });
}

fn tell(stats: &BridgeStats, output: &mut Output) -> Outcome {
    if output.is_json() {
        output.json(stats)?;
    } else {
        let now = when::stamp(SystemClock.now());
        let behind = stats.lag.unwrap_or(0);
        let waits = if stats.waiting { ", waiting" } else { "" };
        output.line(format!(
            "{now} {}, {} behind{waits}",
            said(stats),
            grouped(behind)
        ))?;
    }
    output.flush()
}

/// Prints the counts, and what to do about refused events.
fn report(
    args: &BridgeArgs,
    outcome: &Outcome,
    stats: &BridgeStats,
    from: &Target,
    to: &Target,
    output: &mut Output,
) -> Outcome {
    let caught_up = args.until.is_some() && outcome.is_ok();
    if output.is_json() {
        let mut value = serde_json::to_value(stats).unwrap_or(Value::Null);
        value["from"] = json!(from.label());
        value["to"] = json!(to.label());
        value["group"] = json!(args.group);
        value["caught_up"] = json!(caught_up);
        output.json(&value)?;
    } else {
        let end = if caught_up { "; nothing is left" } else { "" };
        output.line(format!("{}{end}", said(stats)))?;
        if stats.refused > 0 {
            let group = shell_word(&args.group.to_string());
            let list = Suggestion::new(from, &format!("dlq list --group {group}"));
            output.line(format!("those that the target refused: {list}"))?;
        }
    }
    if caught_up && stats.refused > 0 {
        return Err(Stop::Unsatisfied);
    }
    Ok(())
}

fn said(stats: &BridgeStats) -> String {
    let mut text = format!("{} carried", counted(stats.moved, "event"));
    for (n, what) in [
        (stats.duplicates, "were there already"),
        (stats.returned, "came from there"),
        (stats.refused, "refused"),
    ] {
        if n > 0 {
            text.push_str(&format!(", {} {what}", grouped(n)));
        }
    }
    text
}
