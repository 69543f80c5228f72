//! `cargo xtask bench bridge`: a bridge between each two engines, beside what its two ends do alone.
//!
//! In each round the events of a source are fetched and acked, eight tasks publish to the target in batches, and a
//! bridge carries as many events from one to the other. The ratio is the rate of the bridge divided by the rate of the
//! slower end, both as medians. Each part has an empty file, or an empty place on a private server.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus::bridge::Bridge;
use everbus::core::{ConsumeOptions, GroupSpec, Settlement, SubscriptionSpec, Verdict};
use everbus::{Bus, Event, GroupName, Pattern, StartFrom};
use everbus_testkit::servers::{Kafka, KafkaOptions, Nats, Postgres, Redis, RedisOptions};
use serde::Serialize;
use tokio::task::JoinSet;

type Failed = Box<dyn std::error::Error + Send + Sync>;
type Outcome<T> = Result<T, Failed>;

const PUBLISHERS: usize = 8;
const BATCH: usize = 100;
const FETCH: usize = 512;
const ROUNDS: usize = 3;
const LEAST: f64 = 0.7;

const USAGE: &str = "\
usage: everbus-bench-bridge [-o json] [--quick] [--events N] [--ordered] [FROM-TO…]

FROM and TO are sqlite, postgres, nats, redis or kafka; all pairs of two if none is named. The servers are started for the run.";

struct Plan {
    json: bool,
    ordered: bool,
    events: usize,
    rounds: usize,
    pairs: Vec<(Place, Place)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Place {
    Sqlite,
    Postgres,
    Nats,
    Redis,
    Kafka,
}

impl Place {
    const ALL: [Self; 5] = [
        Self::Sqlite,
        Self::Postgres,
        Self::Nats,
        Self::Redis,
        Self::Kafka,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::Nats => "nats",
            Self::Redis => "redis",
            Self::Kafka => "kafka",
        }
    }
}

impl Plan {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut plan = Self {
            json: false,
            ordered: false,
            events: 48_000,
            rounds: ROUNDS,
            pairs: Vec::new(),
        };
        let all = || {
            Place::ALL
                .into_iter()
                .flat_map(|a| Place::ALL.map(|b| (a, b)))
        };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "-o" | "--output" => plan.json = arguments.next().as_deref() == Some("json"),
                "--quick" => (plan.events, plan.rounds) = (4_000, 1),
                "--ordered" => plan.ordered = true,
                "--events" => {
                    let number = arguments.next().and_then(|n| n.parse::<usize>().ok());
                    let number = number.filter(|n| *n > 0).ok_or("--events takes a number")?;
                    plan.events = number.next_multiple_of(PUBLISHERS * BATCH);
                }
                pair => {
                    let is = |(a, b): &(Place, Place)| format!("{}-{}", a.name(), b.name()) == pair;
                    let found = all().find(is);
                    plan.pairs
                        .push(found.ok_or_else(|| format!("{pair:?} is not known"))?);
                }
            }
        }
        if plan.pairs.is_empty() {
            plan.pairs = all().filter(|(a, b)| a != b).collect();
        }
        Ok(plan)
    }
}

/// The servers of a run.
struct Places {
    directory: tempfile::TempDir,
    postgres: Option<Postgres>,
    nats: Option<Nats>,
    redis: Option<Redis>,
    kafka: Option<Kafka>,
    next: AtomicU64,
}

impl Places {
    fn fresh(&mut self, place: Place) -> Outcome<String> {
        let missing = |what: &str| Failed::from(format!("{what} is not installed"));
        Ok(match place {
            Place::Sqlite => {
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                let path = self.directory.path().join(format!("{number}.db"));
                format!("sqlite:{}", path.display())
            }
            Place::Postgres => {
                let server = self.postgres.take().or_else(Postgres::start);
                let server = self
                    .postgres
                    .insert(server.ok_or_else(|| missing("PostgreSQL"))?);
                server.fresh_database()
            }
            Place::Nats => {
                // Only the shared server has accounts, and it does not sync each write. On this one a space separates
                // the runs.
                let server = self.nats.take().or_else(|| Nats::start(Default::default()));
                let server = self
                    .nats
                    .insert(server.ok_or_else(|| missing("nats-server"))?);
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                format!("{}/b{number}", server.url())
            }
            Place::Redis => {
                let start = || Redis::start(RedisOptions::default().set("databases", "1000"));
                let server = self.redis.take().or_else(start);
                let server = self
                    .redis
                    .insert(server.ok_or_else(|| missing("redis-server"))?);
                server.fresh_database()
            }
            Place::Kafka => {
                let start = || Kafka::start(&KafkaOptions::default());
                let server = self.kafka.take().or_else(start);
                let server = self
                    .kafka
                    .insert(server.ok_or_else(|| missing("Kafka (with EVERBUS_KAFKA=1)"))?);
                server.fresh_space()
            }
        })
    }
}

/// One line of the result: events per second.
#[derive(Serialize)]
struct Line {
    scenario: &'static str,
    from: Place,
    to: Place,
    payload_bytes: usize,
    ordered: bool,
    bridge: f64,
    source: f64,
    target: f64,
    /// The rate of the bridge divided by that of the slower end.
    ratio: f64,
    met: bool,
    /// The entry of docs/requirements/benches.txt that has this result.
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded_as: Option<&'static str>,
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
        Ok(runtime) => runtime.block_on(measure(&plan)),
        Err(error) => Err(error.into()),
    };
    match measured {
        Ok(lines) => {
            print(&lines, plan.json);
            ExitCode::SUCCESS
        }
        Err(error) => {
            say(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

async fn measure(plan: &Plan) -> Outcome<Vec<Line>> {
    let mut places = Places {
        // Not the directory for temporary files: that is memory on many machines.
        directory: tempfile::tempdir_in(".")?,
        postgres: None,
        nats: None,
        redis: None,
        kafka: None,
        next: AtomicU64::new(0),
    };
    let mut lines = Vec::new();
    for (from, to) in &plan.pairs {
        for payload in [256, 4096] {
            let (mut bridges, mut sources, mut targets) = (Vec::new(), Vec::new(), Vec::new());
            for round in 1..=plan.rounds {
                let (from_name, to_name) = (from.name(), to.name());
                say(&format!(
                    "{from_name} to {to_name}, {payload} bytes, round {round}"
                ));
                let rate = |took: Duration| plan.events as f64 / took.as_secs_f64();
                let source = places.fresh(*from)?;
                sources.push(rate(consume(&source, plan.events, payload).await?));
                let target = places.fresh(*to)?;
                targets.push(rate(
                    publish(&Bus::open(&target).await?, plan.events, payload).await?,
                ));
                let ends = (places.fresh(*from)?, places.fresh(*to)?);
                bridges.push(rate(bridge(plan, &ends.0, &ends.1, payload).await?));
            }
            let [bridge, source, target] = [bridges, sources, targets].map(median);
            let ratio = bridge / source.min(target);
            lines.push(Line {
                scenario: "bridge",
                from: *from,
                to: *to,
                payload_bytes: payload,
                ordered: plan.ordered,
                bridge: bridge.round(),
                source: source.round(),
                target: target.round(),
                ratio: (ratio * 1000.0).round() / 1000.0,
                met: ratio >= LEAST,
                recorded_as: match (from, to) {
                    (Place::Redis, Place::Kafka) if !plan.ordered => Some("bridge-redis-kafka"),
                    _ => None,
                },
            });
        }
    }
    Ok(lines)
}

fn event(payload: usize) -> Outcome<Event> {
    let event = Event::builder("bench.event.stored").json(&"x".repeat(payload - 2));
    Ok(event.build()?)
}

async fn publish(bus: &Bus, events: usize, payload: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..PUBLISHERS {
        let bus = bus.clone();
        tasks.spawn(async move {
            for _ in 0..events / PUBLISHERS / BATCH {
                let batch: Outcome<Vec<Event>> = (0..BATCH).map(|_| event(payload)).collect();
                bus.publish_batch(batch?).await?;
            }
            Outcome::Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(began.elapsed())
}

/// Fills a place, then fetches and acks its events. There is no handler, which would need a store beside NATS and
/// Kafka.
async fn consume(url: &str, events: usize, payload: usize) -> Outcome<Duration> {
    let filled = Bus::open(url).await?;
    publish(&filled, events, payload).await?;
    filled.shutdown().await?;
    let bus = Bus::open(url).await?;
    let broker = bus.engine().broker.clone();
    let all = Pattern::new("*")?;
    let mut spec = GroupSpec::new(GroupName::new("bench")?);
    spec.start_from = StartFrom::First;
    spec.subscriptions.push(SubscriptionSpec {
        name: "all".to_owned(),
        pattern: all.clone(),
    });
    broker.declare(spec).await?;
    let began = Instant::now();
    let options = ConsumeOptions::new(vec![all]).prefetch(FETCH * 6);
    let mut consumer = broker.consume(GroupName::new("bench")?, options).await?;
    let (to_settle, mut fetched) = tokio::sync::mpsc::channel::<Vec<Settlement>>(2);
    let settling = tokio::spawn(async move {
        while let Some(batch) = fetched.recv().await {
            for answer in broker.settle(batch).await? {
                answer?;
            }
        }
        Outcome::Ok(())
    });
    let mut taken = 0;
    while taken < events {
        let batch = consumer.fetch(FETCH).await?;
        taken += batch.len();
        let acks = batch.into_iter();
        let acks = acks.map(|delivery| Settlement::new(delivery.lease, Verdict::Ack));
        to_settle.send(acks.collect()).await?;
    }
    drop(to_settle);
    settling.await??;
    let took = began.elapsed();
    consumer.close().await?;
    bus.shutdown().await?;
    Ok(took)
}

/// Fills the source and carries everything to the target.
async fn bridge(plan: &Plan, from: &str, to: &str, payload: usize) -> Outcome<Duration> {
    let filled = Bus::open(from).await?;
    publish(&filled, plan.events, payload).await?;
    filled.shutdown().await?;
    let (from, to) = (Bus::open(from).await?, Bus::open(to).await?);
    let began = Instant::now();
    let bridge = Bridge::new(&from, &to).ordered(plan.ordered);
    let stats = bridge.run_until_caught_up().await?;
    let took = began.elapsed();
    if stats.moved != plan.events as u64 {
        return Err(format!("{stats:?} instead of {} events", plan.events).into());
    }
    from.shutdown().await?;
    to.shutdown().await?;
    Ok(took)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn print(lines: &[Line], json: bool) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    if json {
        let _ = serde_json::to_writer_pretty(&mut out, lines);
        let _ = writeln!(out);
        return;
    }
    let header = [
        "FROM", "TO", "BYTES", "BRIDGE", "SOURCE", "TARGET", "RATIO", "MET",
    ];
    let [from, to, bytes, bridge, source, target, ratio, met] = header;
    let _ = writeln!(
        out,
        "{from:9} {to:9} {bytes:>6} {bridge:>9} {source:>9} {target:>9} {ratio:>6} {met}"
    );
    for line in lines {
        let _ = writeln!(
            out,
            "{:9} {:9} {:>6} {:>9} {:>9} {:>9} {:>6} {}",
            line.from.name(),
            line.to.name(),
            line.payload_bytes,
            line.bridge,
            line.source,
            line.target,
            line.ratio,
            if line.met { "yes" } else { "NO" }
        );
    }
    let _ = writeln!(
        out,
        "\nEvents per second. SOURCE is fetched and acked, TARGET published to in batches;\nthe ratio is that of the bridge to the slower of the two, to be at least {LEAST}."
    );
}

/// Prints the progress.
fn say(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{line}");
}
