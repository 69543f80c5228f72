//! Log lines on standard error, and traces by OTLP where they are configured.

use tracing_subscriber::Layer as _;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry, fmt};

use crate::args::{Args, Command, OutputFormat};
use crate::commands::schedule::ScheduleCommand;
use crate::open::Target;
use crate::stop::{Outcome, Stop};
#[cfg(feature = "otlp")]
use crate::telemetry::Telemetry;

type Layer = Box<dyn tracing_subscriber::Layer<Registry> + Send + Sync>;

/// Dropped at the end of the command. It then sends the traces that were not sent yet.
pub(crate) struct Logging {
    #[cfg(feature = "otlp")]
    _telemetry: Option<Telemetry>,
}

/// Starts logs, and traces if the environment or the configuration of a long-running command names an address.
pub(crate) fn start(args: &Args) -> Outcome<Logging> {
    let endpoint = match runs_long(args) {
        true => Target::choose(args)?
            .load_config()?
            .and_then(|config| config.otlp_endpoint),
        false => None,
    };
    #[cfg(not(feature = "otlp"))]
    if endpoint.is_some() {
        let hint = "build it with --features otlp, or leave telemetry.otlp out";
        return Err(Stop::usage(
            "this build cannot send traces by OTLP",
            Some(hint),
        ));
    }
    let layers: Vec<Layer> = vec![lines(args)];
    #[cfg(feature = "otlp")]
    let (layers, telemetry) = match runs_long(args) {
        true => with_traces(layers, endpoint.as_deref())?,
        false => (layers, None),
    };
    tracing_subscriber::registry().with(layers).init();
    Ok(Logging {
        #[cfg(feature = "otlp")]
        _telemetry: telemetry,
    })
}

/// Adds traces, if an address for them is known.
#[cfg(feature = "otlp")]
fn with_traces(
    mut layers: Vec<Layer>,
    endpoint: Option<&str>,
) -> Outcome<(Vec<Layer>, Option<Telemetry>)> {
    if endpoint.is_none() && !Telemetry::is_in_environment() {
        return Ok((layers, None));
    }
    let telemetry = Telemetry::start(endpoint).map_err(|error| Stop::usage(error, None))?;
    let ours = tracing_subscriber::filter::Targets::new();
    let ours = ours.with_target("everbus", tracing::Level::INFO);
    let spans = tracing_opentelemetry::layer().with_tracer(telemetry.tracer());
    layers.push(spans.with_filter(ours).boxed());
    Ok((layers, Some(telemetry)))
}

/// The log lines.
fn lines(args: &Args) -> Layer {
    let level = match args.verbose {
        // These commands fail on purpose, and print the failures themselves.
        0 if matches!(args.command, Some(Command::Demo | Command::Bench(_))) => "off",
        0 if matches!(&args.command, Some(Command::Serve(serve)) if serve.demo) => "off",
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env("EVERBUS_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let logs = fmt::layer().with_writer(std::io::stderr).with_ansi(ansi);
    match args.log_format {
        OutputFormat::Text => logs.with_filter(filter).boxed(),
        OutputFormat::Json => logs.json().flatten_event(true).with_filter(filter).boxed(),
    }
}

/// Whether the command handles events until it is stopped.
fn runs_long(args: &Args) -> bool {
    match &args.command {
        Some(Command::Serve(_) | Command::Consume(_) | Command::Worker(_)) => true,
        Some(Command::Schedule(command)) => matches!(command, ScheduleCommand::Run(_)),
        _ => false,
    }
}
