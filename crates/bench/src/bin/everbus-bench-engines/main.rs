//! `cargo xtask bench engines`: every engine with a server beside its raw client, in the same run on the same
//! machine, with the same durability, the same batches and the same number of tasks.
//!
//! Raw and Everbus take turns for several rounds, each on an empty database or account of a private server, and
//! the median counts. Each of the two begins every other round, because the server may still clean up after the first
//! while the second is measured. A rate counts only if everything was stored and handled.

mod bloat;
mod faststream;
mod kafka;
mod nats;
mod ours;
mod postgres;
mod redis;

use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;

type Failed = Box<dyn std::error::Error + Send + Sync>;
type Outcome<T> = Result<T, Failed>;

/// Tasks that publish at the same time.
const PUBLISHERS: usize = 8;
/// Events in one publish of the throughput scenarios.
const BATCH: usize = 100;
/// Events that a consumer takes at a time, on both sides. On PostgreSQL Everbus claims 512 in advance; a raw loop
/// that claims 512 at a time was not faster.
const FETCH: usize = 256;

/// The results that docs/requirements/benches.txt has, as `engine-scenario`.
const RECORDED: [&str; 11] = [
    "postgres-publish",
    "postgres-consume",
    "postgres-end-to-end",
    "postgres-latency",
    "nats-publish",
    "nats-consume",
    "nats-latency",
    "redis-publish",
    "redis-consume",
    "kafka-publish",
    "kafka-consume",
];

const USAGE: &str = "\
usage: everbus-bench-engines [-o json] [--quick] [--events N] [ENGINE…]
       everbus-bench-engines [-o json] [--quick] [--events N] --faststream
       everbus-bench-engines [-o json] --bloat N

--bloat sends N events through PostgreSQL and prints what its hot tables weigh meanwhile.
--faststream measures consuming on Redis beside a service on FastStream, the newest release.
ENGINE is postgres, nats, redis or kafka; all of these if none is named. kafka-offsets is Kafka beside a raw loop that
stores no attempts. The servers are started for the run.";

const ENGINES: [&str; 4] = ["postgres", "nats", "redis", "kafka"];
/// Measured only if it is named.
const OFFSETS: &str = "kafka-offsets";

/// The options of a run.
struct Plan {
    json: bool,
    events: usize,
    rounds: usize,
    samples: usize,
    bloat: Option<usize>,
    faststream: bool,
    engines: Vec<&'static str>,
}

impl Plan {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut plan = Self {
            json: false,
            events: 50_000,
            rounds: 3,
            samples: 1000,
            bloat: None,
            faststream: false,
            engines: Vec::new(),
        };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "-o" | "--output" => match arguments.next().as_deref() {
                    Some("json") => plan.json = true,
                    Some("table") => plan.json = false,
                    other => return Err(format!("-o takes json or table, got {other:?}")),
                },
                "--quick" => {
                    (plan.events, plan.rounds, plan.samples) = (2_000, 1, 100);
                }
                "--events" => {
                    let number = arguments.next().and_then(|n| n.parse().ok());
                    let number = number.filter(|n| *n >= PUBLISHERS * BATCH);
                    plan.events = number.ok_or_else(|| {
                        format!("--events takes a number from {} on", PUBLISHERS * BATCH)
                    })?;
                }
                "--bloat" => {
                    let number = arguments.next().and_then(|n| n.parse().ok());
                    plan.bloat = Some(number.ok_or("--bloat takes a number of events")?);
                }
                "--faststream" => plan.faststream = true,
                other => {
                    let mut known = ENGINES.into_iter().chain([OFFSETS]);
                    match known.find(|engine| *engine == other) {
                        Some(engine) => plan.engines.push(engine),
                        None => return Err(format!("{other:?} is not known")),
                    }
                }
            }
        }
        // Every publisher publishes whole batches.
        plan.events = plan.events.next_multiple_of(PUBLISHERS * BATCH);
        if plan.engines.is_empty() {
            plan.engines = ENGINES.to_vec();
        }
        Ok(plan)
    }
}

/// One line of the result.
#[derive(Serialize)]
struct Line {
    engine: &'static str,
    scenario: &'static str,
    payload_bytes: usize,
    /// Events per second, or microseconds at the 99th percentile for `latency`.
    ours: f64,
    raw: f64,
    /// Of `latency`: the medians of Everbus and of the raw client, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    medians: Option<[f64; 2]>,
    /// Of `latency`: the lowest and the highest of the rounds, of Everbus and of the raw client. Two rounds of the same
    /// client differ by this much, so a smaller difference between Everbus and the raw client says nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    spread: Option<[[f64; 2]; 2]>,
    /// `ours / raw`; for `latency` it is the difference in microseconds.
    ratio: f64,
    target: &'static str,
    met: bool,
    /// The entry of docs/requirements/benches.txt that has this result.
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded_as: Option<&'static str>,
}

/// The measurements of one round, of raw or of Everbus.
struct Round {
    publish: Duration,
    consume: Duration,
    end_to_end: Duration,
    latencies: Vec<Duration>,
}

fn main() -> ExitCode {
    let plan = match Plan::parse(std::env::args().skip(1)) {
        Ok(plan) => plan,
        Err(what) => {
            say(&format!("{what}\n{USAGE}"));
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let measured = match runtime {
        Ok(runtime) => runtime.block_on(run(&plan)),
        Err(error) => Err(error.into()),
    };
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{error}"));
            ExitCode::FAILURE
        }
    }
}

async fn run(plan: &Plan) -> Outcome<()> {
    match plan.bloat {
        Some(events) => print_json(plan, &bloat::measure(plan, events).await?),
        None if plan.faststream => {
            let lines = faststream::measure(plan).await?;
            if !plan.json {
                print_header();
                print_rows(&lines);
            }
            print_json(plan, &lines);
        }
        None => print_json(plan, &measure(plan).await?),
    }
    Ok(())
}

async fn measure(plan: &Plan) -> Outcome<Vec<Line>> {
    let mut lines = Vec::new();
    if !plan.json {
        print_header();
    }
    for engine in &plan.engines {
        for payload in [256, 4096] {
            let (mut raw, mut ours) = (Vec::new(), Vec::new());
            for round in 1..=plan.rounds {
                say(&format!(
                    "{engine}, {payload} bytes, round {round} of {}",
                    plan.rounds
                ));
                let turns = match round % 2 {
                    1 => [Side::Raw, Side::Ours],
                    _ => [Side::Ours, Side::Raw],
                };
                for side in turns {
                    let measured = run_round(plan, engine, payload, side).await?;
                    match side {
                        Side::Raw => raw.push(measured),
                        Side::Ours => ours.push(measured),
                    }
                }
            }
            let measured = compare(engine, payload, plan.events, &raw, &ours);
            if !plan.json {
                print_rows(&measured);
            }
            lines.extend(measured);
        }
    }
    Ok(lines)
}

#[derive(Clone, Copy)]
enum Side {
    Raw,
    Ours,
}

async fn run_round(plan: &Plan, engine: &str, payload: usize, side: Side) -> Outcome<Round> {
    match (engine, side) {
        ("postgres", Side::Raw) => postgres::raw(plan, payload).await,
        ("postgres", Side::Ours) => postgres::ours(plan, payload).await,
        ("nats", Side::Raw) => nats::raw(plan, payload).await,
        ("nats", Side::Ours) => nats::ours(plan, payload).await,
        ("redis", Side::Raw) => redis::raw(plan, payload).await,
        ("redis", Side::Ours) => redis::ours(plan, payload).await,
        (OFFSETS, Side::Raw) => kafka::raw(plan, payload, kafka::Attempts::Unknown).await,
        (_, Side::Raw) => kafka::raw(plan, payload, kafka::Attempts::Stored).await,
        (_, Side::Ours) => kafka::ours(plan, payload).await,
    }
}

fn compare(
    engine: &'static str,
    payload_bytes: usize,
    events: usize,
    raw: &[Round],
    ours: &[Round],
) -> Vec<Line> {
    let end_to_end = if engine == "postgres" { 0.5 } else { 0.85 };
    type Took = fn(&Round) -> Duration;
    let rates: [(&'static str, Took, f64); 3] = [
        ("publish", |r| r.publish, 0.85),
        ("consume", |r| r.consume, 0.85),
        ("end-to-end", |r| r.end_to_end, end_to_end),
    ];
    let mut lines: Vec<Line> = rates
        .into_iter()
        .map(|(scenario, took, least)| {
            let rate = |rounds: &[Round]| {
                median(
                    rounds
                        .iter()
                        .map(|r| events as f64 / took(r).as_secs_f64())
                        .collect(),
                )
            };
            let (ours, raw) = (rate(ours), rate(raw));
            Line {
                engine,
                scenario,
                payload_bytes,
                ours: ours.round(),
                raw: raw.round(),
                medians: None,
                spread: None,
                ratio: round(ours / raw),
                target: if least > 0.8 {
                    "≥ 0.85 × raw"
                } else {
                    "≥ 0.5 × raw"
                },
                met: ours >= least * raw,
                recorded_as: recorded_as(engine, scenario),
            }
        })
        .collect();
    let latency = |rounds: &[Round], share: f64| {
        let of_rounds = rounds.iter().map(|r| percentile(&r.latencies, share));
        median(of_rounds.collect()).round()
    };
    let medians = [latency(ours, 0.5), latency(raw, 0.5)];
    let spread = |rounds: &[Round]| {
        let of_rounds = rounds
            .iter()
            .map(|r| percentile(&r.latencies, 0.99).round());
        let (low, high) = (f64::INFINITY, f64::NEG_INFINITY);
        of_rounds.fold([low, high], |[low, high], p99| {
            [low.min(p99), high.max(p99)]
        })
    };
    let spread = [spread(ours), spread(raw)];
    let (ours, raw) = (latency(ours, 0.99), latency(raw, 0.99));
    lines.push(Line {
        engine,
        scenario: "latency",
        payload_bytes,
        ours,
        raw,
        medians: Some(medians),
        spread: Some(spread),
        ratio: round(ours - raw),
        target: "p99 ≤ raw + 200 µs",
        met: ours <= raw + 200.0,
        recorded_as: recorded_as(engine, "latency"),
    });
    lines
}

fn recorded_as(engine: &str, scenario: &str) -> Option<&'static str> {
    let name = format!("{engine}-{scenario}");
    RECORDED.into_iter().find(|recorded| *recorded == name)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn percentile(durations: &[Duration], share: f64) -> f64 {
    let mut micros: Vec<f64> = durations.iter().map(|d| d.as_secs_f64() * 1e6).collect();
    micros.sort_by(f64::total_cmp);
    let index = ((micros.len() as f64 * share) as usize).min(micros.len().saturating_sub(1));
    micros.get(index).copied().unwrap_or(f64::NAN)
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn print_json(plan: &Plan, lines: &impl Serialize) {
    use std::io::Write as _;
    if !plan.json {
        return;
    }
    let mut out = std::io::stdout().lock();
    let _ = serde_json::to_writer_pretty(&mut out, lines);
    let _ = writeln!(out);
}

fn print_header() {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    let header = [
        "ENGINE", "SCENARIO", "BYTES", "OURS", "RAW", "RATIO", "TARGET", "MET",
    ];
    let _ = writeln!(
        out,
        "Rates in events per second; latency is p99 in µs from publish to handler, its ratio the difference.\n"
    );
    let _ = writeln!(
        out,
        "{:9} {:11} {:>6} {:>9} {:>9} {:>9}  {:20} {}",
        header[0], header[1], header[2], header[3], header[4], header[5], header[6], header[7]
    );
}

fn print_rows(lines: &[Line]) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    for line in lines {
        let _ = writeln!(
            out,
            "{:9} {:11} {:>6} {:>9} {:>9} {:>9}  {:20} {}",
            line.engine,
            line.scenario,
            line.payload_bytes,
            line.ours,
            line.raw,
            line.ratio,
            line.target,
            if line.met { "yes" } else { "NO" }
        );
        if let Some([ours, raw]) = line.medians {
            let _ = writeln!(out, "{:9} {:11} {:>6} {ours:>9} {raw:>9}", "", "p50", "");
        }
        if let Some([[ours_low, ours_high], [raw_low, raw_high]]) = line.spread {
            let (ours, raw) = (
                format!("{ours_low}–{ours_high}"),
                format!("{raw_low}–{raw_high}"),
            );
            let _ = writeln!(
                out,
                "{:9} {:11} {:>6} {ours:>9} {raw:>9}",
                "", "p99, rounds", ""
            );
        }
    }
}

/// Prints the progress.
fn say(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{line}");
}
