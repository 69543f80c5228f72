//! `everbus bench`: runs the scenarios of `everbus-bench` and prints their figures: a table for people, an
//! array of objects for machines.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use everbus_bench::{Bench, Figure, Part, SCENARIOS, children};

use crate::files;
use crate::open::Target;
use crate::output::{Output, Table, grouped};
use crate::progress;
use crate::stop::{Outcome, Stop};

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// Which scenarios; all if none is named
    #[arg(value_name = "SCENARIO", value_parser = scenarios())]
    scenarios: Vec<usize>,

    /// How many events the throughput scenarios use in each round
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    events: Option<u64>,

    /// A twentieth of everything, to see that it runs; the figures mean little
    #[arg(long)]
    quick: bool,

    /// Directory for the files of the bench, since disks differ
    #[arg(long, value_name = "DIRECTORY")]
    dir: Option<PathBuf>,

    /// One part of a scenario, run by the bench in a separate process
    #[arg(long, hide = true, value_name = "PART")]
    only_child: Option<String>,
}

/// Parses the name of a scenario into its number.
fn scenarios() -> impl TypedValueParser<Value = usize> {
    let names = SCENARIOS
        .iter()
        .map(|scenario| PossibleValue::new(scenario.name).help(scenario.about));
    PossibleValuesParser::new(names).map(|name| {
        let number = SCENARIOS.iter().position(|scenario| scenario.name == name);
        number.unwrap_or_default()
    })
}

pub(crate) async fn run(args: BenchArgs, target: &Target, output: &mut Output) -> Outcome {
    if let Some(part) = &args.only_child {
        let mut said = Ok(());
        let mut say = |line: String| {
            said = output.line(line).and_then(|()| output.flush());
        };
        let events = args.events.unwrap_or(1000);
        children::run(part, target.path()?, events, &mut say).await?;
        return said;
    }
    // Not the directory for temporary files: that is memory on many machines, where nothing is durable.
    let beside = args.dir.unwrap_or_else(|| PathBuf::from("."));
    let directory = tempfile::Builder::new()
        .prefix("everbus-bench-")
        .tempdir_in(&beside)
        .map_err(|e| Stop::from(files::io_error("cannot write to", &beside, e)))?;
    let bar = progress::spinner("starting");
    let told = bar.clone();
    let bench = Bench {
        directory: directory.path().to_path_buf(),
        quick: args.quick,
        events: args.events,
        say: Box::new(move |what| told.set_message(what)),
        scenario: Default::default(),
    };
    if cfg!(debug_assertions) {
        tracing::warn!("this is a debug build; its figures mean little");
    }
    let chosen = match args.scenarios.is_empty() {
        true => (0..SCENARIOS.len()).collect(),
        false => args.scenarios,
    };
    let mut figures = Vec::new();
    for scenario in chosen.into_iter().filter_map(|n| SCENARIOS.get(n)) {
        figures.push(bench.measure(scenario).await?);
    }
    bar.finish_and_clear();
    print(&figures, args.quick, output)
}

fn print(figures: &[Figure], quick: bool, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(figures);
    }
    let mut table = Table::new(&[
        "SCENARIO", "EVENTS/S", "RAW/S", "RATIO", "P50 µs", "P99 µs", "RSS MiB", "TARGET", "MET",
    ]);
    for figure in figures {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| v.to_string());
        table.row(vec![
            figure.scenario.to_owned(),
            whole(figure.events_per_s),
            whole(figure.raw_events_per_s),
            number(figure.ratio),
            number(figure.p50_us),
            number(figure.p99_us),
            number(figure.rss_mib),
            figure.target.clone(),
            if figure.met { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    table.print(output)?;
    for figure in figures.iter().filter(|figure| !figure.detail.is_empty()) {
        output.line(format!("{}: {}", figure.scenario, figure.detail))?;
    }
    for figure in figures.iter().filter(|figure| !figure.parts.is_empty()) {
        print_parts(&figure.parts, output)?;
    }
    if quick {
        output.line("quick: a twentieth of everything; the figures mean little")?;
    }
    if cfg!(debug_assertions) {
        output.line("debug build: the figures mean little")?;
    }
    Ok(())
}

fn print_parts(parts: &[Part], output: &mut Output) -> Outcome {
    let mut table = Table::new(&[
        "PART",
        "SMALL µs",
        "LARGE µs",
        "P99",
        "RAW SMALL",
        "RAW LARGE",
        "RAW P99",
        "RATIO",
    ]);
    for part in parts {
        let mut cells = vec![part.name.clone()];
        let times = [
            part.small_p50_us,
            part.large_p50_us,
            part.large_p99_us,
            part.raw_small_p50_us,
            part.raw_large_p50_us,
            part.raw_large_p99_us,
        ];
        cells.extend(times.map(|time| time.round().to_string()));
        cells.push(part.ratio().to_string());
        table.row(cells);
    }
    table.print(output)
}

fn whole(value: Option<f64>) -> String {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate, rounded"
    )]
    value.map_or_else(|| "-".to_owned(), |v| grouped(v as u64))
}
