//! `everbus worker`: runs tasks as child processes, until Ctrl-C or SIGTERM.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use everbus::{RetryPolicy, workers};
use everbus_jobs::events::ErrorCategory;
use everbus_jobs::worker::child::{ChildCommand, ChildLimits, OutputKind};
use everbus_jobs::worker::classify::Classifier;
use everbus_jobs::{Dispatcher, Jobs, Worker};

use crate::open::Target;
use crate::output::{Output, escaped};
use crate::stop::{Outcome, Stop};
use crate::values::{parse_bytes, parse_pair, parse_whole_rate};
use crate::when;

/// How long the bus may take to end after the children have ended.
const FLUSH: Duration = Duration::from_secs(5);
/// How much longer than its bus a worker process may take to end. Then it is killed.
const SPARE: Duration = Duration::from_secs(10);

const HELP: &str = "\
The command is started once per task, without a shell. It reads the input of the task as JSON from \
standard input; EVERBUS_REQUEST_ID, EVERBUS_JOB_ID, EVERBUS_TASK_NAME, EVERBUS_ATTEMPT and \
EVERBUS_TENANT say which task it is. Its last line on standard output is the output of the task, as \
JSON. Exit code 0 means that the task is completed.

While it runs it may print lines that begin with {\"everbus\":
  {\"everbus\":\"activity\",\"type\":\"step_running\",\"stepName\":\"color-tags\"}   for the next heartbeat
  {\"everbus\":\"error\",\"category\":\"auth\",\"message\":\"Invalid API key\"}      the reason of a failure
  {\"everbus\":\"usage\",\"inputTokens\":12000,\"outputTokens\":3500}             the tokens used
  {\"everbus\":\"output\",\"value\":{\"colors\":7}}                             the output, instead of the last line

A failure of the categories timeout, network, rate-limit and server-error is tried again; a failure of the \
categories auth, validation and programming is not. Without a reported category the standard error, the exit code \
(as in sysexits.h) and the signal determine the category.

Children get PATH, HOME, USER, LANG, LC_ALL, LC_CTYPE, TZ and TMPDIR of the environment, and the variables of --env \
and --set. A child that runs too long gets SIGTERM, and SIGKILL after the time of --grace; so do all processes that \
it started.";

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct WorkerArgs {
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,

    /// How many worker processes are started; one that dies is started again
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_whole_rate)]
    workers: u32,

    /// How many tasks each of them runs at once [default: the number of processors]
    #[arg(long, value_name = "N", value_parser = parse_whole_rate)]
    concurrency: Option<u32>,

    /// How long a task may run
    #[arg(long, value_name = "DURATION", default_value = "200s", value_parser = when::parse_limit)]
    timeout: Duration,

    /// How long a child has to end after SIGTERM
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = when::parse_limit)]
    grace: Duration,

    /// The time between two heartbeats; a task is locked for three of them
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = when::parse_limit)]
    heartbeat: Duration,

    /// How often a task is tried, the first time included
    #[arg(long, value_name = "N", default_value = "4", value_parser = parse_whole_rate)]
    attempts: u32,

    /// How much memory each process of a child may allocate: 512m (Linux)
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    memory: Option<usize>,

    /// How much a child may write to standard output
    #[arg(long, value_name = "BYTES", default_value = "16m", value_parser = parse_bytes)]
    max_output: usize,

    /// What the standard output of a child is
    #[arg(long, value_enum, value_name = "KIND", default_value = "json")]
    output_as: OutputAs,

    /// Pass this variable of the environment on to children; may be given several times
    #[arg(long = "env", value_name = "NAME")]
    env: Vec<String>,

    /// Set this variable for children; may be given several times
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = parse_pair)]
    set: Vec<(String, String)>,

    /// The directory that children start in
    #[arg(long, value_name = "DIRECTORY")]
    directory: Option<PathBuf>,

    /// The category of failures whose error matches a regular expression; may be given several times
    #[arg(long = "category", value_name = "REGEX=CATEGORY")]
    patterns: Vec<String>,

    /// The category of an exit code; may be given several times
    #[arg(long = "exit-code", value_name = "CODE=CATEGORY")]
    codes: Vec<String>,

    /// The category of failures for which no other rule gives one
    #[arg(long, value_name = "CATEGORY", default_value = "server-error", value_parser = parse_category)]
    otherwise: ErrorCategory,

    /// The name of the worker in the events [default: worker-, the host and the process id]
    #[arg(long, value_name = "NAME")]
    id: Option<String>,

    /// How long running tasks have to end after Ctrl-C or SIGTERM, before they are stopped and given back
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = when::parse_limit)]
    finish_within: Duration,

    /// Leave the dependent tasks of jobs to other processes
    #[arg(long)]
    no_dispatcher: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OutputAs {
    /// The last line, or all of it, is JSON
    Json,
    /// It is a text
    Text,
    /// It is dropped
    Nothing,
    /// It is text for people; the output is JSON on the file descriptor EVERBUS_OUTPUT_FD
    Descriptor,
}

fn parse_category(text: &str) -> Result<ErrorCategory, String> {
    let category = serde_json::from_value(serde_json::json!(text)).ok();
    let category = category.filter(|category| *category != ErrorCategory::Cancelled);
    category.ok_or_else(|| {
        format!(
            "{text:?} is not timeout, network, rate-limit, server-error, auth, validation or programming"
        )
    })
}

/// Reads `KEY=CATEGORY`. The last `=` separates the two, because a regular expression may contain one.
fn pair(text: &str) -> Outcome<(&str, ErrorCategory)> {
    let usage = |why: String| Stop::usage(why, None);
    let (key, category) = text
        .rsplit_once('=')
        .ok_or_else(|| usage(format!("{text:?} has no =CATEGORY")))?;
    Ok((key, parse_category(category).map_err(usage)?))
}

impl WorkerArgs {
    fn child(&self) -> Outcome<ChildCommand> {
        let Some((program, args)) = self.command.split_first() else {
            return Err(Stop::usage(
                "there is no command",
                Some("everbus worker -- COMMAND"),
            ));
        };
        let mut limits = ChildLimits::default()
            .timeout(self.timeout)
            .grace(self.grace)
            .output(self.max_output);
        if let Some(memory) = self.memory {
            limits = limits.memory(memory as u64);
        }
        let mut command =
            ChildCommand::new(program)
                .args(args)
                .limits(limits)
                .output(match self.output_as {
                    OutputAs::Json => OutputKind::Json,
                    OutputAs::Text => OutputKind::Text,
                    OutputAs::Nothing => OutputKind::Nothing,
                    OutputAs::Descriptor => OutputKind::Descriptor,
                });
        if let Some(directory) = &self.directory {
            command = command.directory(directory);
        }
        for name in &self.env {
            command = command.allow_env(name);
        }
        for (name, value) in &self.set {
            command = command.env(name, value);
        }
        command.check()?;
        Ok(command)
    }

    fn classifier(&self) -> Outcome<Classifier> {
        let mut classifier = Classifier::default().otherwise(self.otherwise);
        for text in &self.patterns {
            let (pattern, category) = pair(text)?;
            classifier = classifier.pattern(pattern, category)?;
        }
        for text in &self.codes {
            let (code, category) = pair(text)?;
            let code = code.parse().map_err(|_| {
                Stop::usage(format!("{code:?} is not an exit code"), Some("75=network"))
            })?;
            classifier = classifier.exit_code(code, category);
        }
        Ok(classifier)
    }

    /// How long the bus may take to end: running tasks end by themselves, or are stopped.
    fn time_to_end(&self) -> Duration {
        self.finish_within + self.grace + FLUSH
    }

    /// A worker of this process.
    fn worker(&self, jobs: Jobs) -> Outcome<Worker> {
        let retry = RetryPolicy::default().max_retries(self.attempts - 1);
        let mut worker = Worker::new(jobs)
            .command(self.child()?)
            .classifier(self.classifier()?)
            .heartbeat(self.heartbeat)
            .retry(retry)
            .finish_within(self.finish_within);
        if let Some(concurrency) = self.concurrency {
            worker = worker.concurrency(concurrency as usize);
        }
        if let Some(id) = &self.id {
            // Several processes need different names.
            let number = std::env::var(workers::WORKER).ok();
            worker = worker.id(match number {
                Some(number) => format!("{id}-{number}"),
                None => id.clone(),
            });
        }
        Ok(worker)
    }
}

pub(crate) async fn run(args: WorkerArgs, target: &Target, output: &mut Output) -> Outcome {
    // Wrong options are reported once, and not by every process.
    args.child()?;
    args.classifier()?;
    let grace = args.time_to_end() + SPARE;
    super::in_processes(args.workers, grace, output, async |process, output| {
        serve(&args, target, process, output).await
    })
    .await
}

/// Works until the process is told to stop.
async fn serve(
    args: &WorkerArgs,
    target: &Target,
    process: &workers::Worker,
    output: &mut Output,
) -> Outcome {
    let bus = target.open_bus().await?;
    let jobs = super::jobs_on(&bus, target, None)?;
    if !args.no_dispatcher {
        Dispatcher::subscribe(&jobs).await?;
    }
    args.worker(jobs)?.mount().await?;
    bus.start().await?;
    if output.is_json() {
        output.json(&serde_json::json!({ "working": true, "pid": std::process::id() }))?;
    } else {
        let what = args.command.iter().map(|word| word.to_string_lossy());
        let what = what.collect::<Vec<_>>().join(" ");
        output.line(format!("working: {}; Ctrl-C ends it", escaped(&what)))?;
    }
    output.flush()?;
    process.stopping().await;
    let ended = bus.shutdown_within(args.time_to_end()).await?;
    if ended.abandoned > 0 {
        tracing::warn!(target: "everbus::worker", abandoned = ended.abandoned, "tasks were still running; they are delivered again");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: WorkerArgs,
    }

    #[test]
    fn processes_may_take_as_long_as_their_tasks() {
        let line = "worker --workers 2 --finish-within 5m --grace 10s -- true";
        let line = Line::try_parse_from(line.split(' ')).unwrap();
        assert_eq!(line.args.time_to_end(), Duration::from_secs(315));
    }
}
