//! The `everbus` command line: publish, inspect, repair and measure.
//!
//! `args` defines the command line, `values` and `when` parse values, and `commands` has one file per command. The
//! benchmarks are in the crate `everbus-bench`. All output goes through `output`, which escapes characters that could
//! harm a terminal. Every failure ends as a `Stop`, which has an exit code.

mod args;
mod commands;
mod files;
mod interrupt;
mod logging;
mod open;
mod operator;
mod output;
mod page;
mod progress;
mod reader;
mod stop;
mod suggest;
#[cfg(feature = "otlp")]
mod telemetry;
mod values;
mod when;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser as _;
use everbus::audit::with_operator;

use crate::args::{Args, OutputFormat};
use crate::output::Output;
use crate::stop::Stop;

/// The examples of the README, compiled as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;

/// Runs the command line of this process and returns its exit code.
pub fn main() -> ExitCode {
    let raw: Vec<OsString> = std::env::args_os().collect();
    let args = match Args::try_parse_from(&raw) {
        Ok(args) => args,
        Err(error) => return usage(&error, &raw),
    };
    let logging = match logging::start(&args) {
        Ok(logging) => logging,
        Err(stop) => return stop.report(args.output),
    };
    let mut output = Output::new(args.output);
    let format = args.output;
    let built = enough_descriptors().and_then(|()| {
        tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
    });
    let runtime = match built {
        Ok(runtime) => runtime,
        Err(error) => return Stop::from(error).report(format),
    };
    let operator = operator::of(&args);
    let run = with_operator(operator, Box::pin(commands::run(args, &mut output)));
    let outcome = runtime.block_on(run);
    // A thread that still runs (a reader of standard input) must not delay the exit.
    runtime.shutdown_background();
    drop(logging);
    match outcome.and_then(|()| output.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(stop) => {
            let _ = output.flush();
            stop.report(format)
        }
    }
}

/// The runtime panics if it needs a file descriptor and none is left, so this opens a few files first.
fn enough_descriptors() -> std::io::Result<()> {
    let opened: std::io::Result<Vec<_>> =
        (0..8).map(|_| std::fs::File::open("/dev/null")).collect();
    opened.map(drop)
}

/// Prints help and version, which are no errors, or reports a wrong command line in the requested format.
fn usage(error: &clap::Error, raw: &[OsString]) -> ExitCode {
    let json = raw.windows(2).any(|pair| {
        matches!(pair[0].to_str(), Some("-o" | "--output")) && pair[1].to_str() == Some("json")
    }) || raw
        .iter()
        .any(|word| matches!(word.to_str(), Some("-ojson" | "-o=json" | "--output=json")));
    if error.use_stderr() && json {
        let text = error.to_string();
        let said = text.split("\n\n").next().unwrap_or(&text);
        let (message, hint) = match said.split_once(values::HINT) {
            Some((message, hint)) => (message, Some(one_line(hint))),
            None => (said, None),
        };
        let message = one_line(message.strip_prefix("error: ").unwrap_or(message));
        return Stop::usage(message, hint.as_deref()).report(OutputFormat::Json);
    }
    let _ = error.print();
    ExitCode::from(if error.use_stderr() { 2 } else { 0 })
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
