//! The commands, one file each.

mod asyncapi;
pub(crate) mod audit;
pub(crate) mod backup;
pub(crate) mod bench;
pub(crate) mod bridge;
mod carry;
pub(crate) mod check;
mod check_config;
mod check_objects;
pub(crate) mod consume;
mod demo;
pub(crate) mod dlq;
mod documents;
pub(crate) mod events;
mod get;
mod groups;
pub(crate) mod health;
pub(crate) mod job;
mod jobs_on;
pub(crate) mod objects;
pub(crate) mod outbox;
pub(crate) mod payloads;
mod publish;
pub(crate) mod replay;
mod replay_runs;
pub(crate) mod restore;
pub(crate) mod retention;
pub(crate) mod schedule;
pub(crate) mod serve;
mod streams;
mod tail;
pub(crate) mod task;
pub(crate) mod token;
pub(crate) mod worker;

use std::process::ExitCode;
use std::time::Duration;

use self::jobs_on::jobs_on;
use clap::CommandFactory as _;
use everbus::workers;
use everbus_core::{Code, Engine, Error, EventId, GroupInfo, GroupName, Timestamp};

use crate::args::{Args, Command};
use crate::interrupt::Interrupt;
use crate::open::Target;
use crate::output::Output;
use crate::stop::{Outcome, Stop};
use crate::when;

const WELCOME: &str = "\
Everbus keeps events in a file and delivers each of them, or says why it could not.

  everbus demo                                 see it work, in a few seconds
  everbus publish order.placed '{\"order\": 1}'  store your first event (in everbus.db, here)
  everbus tail --from first                    look at what is stored, and follow
  everbus --help                               everything else";

/// Runs the command.
pub(crate) async fn run(mut args: Args, output: &mut Output) -> Outcome {
    let Some(command) = args.command.take() else {
        return welcome(output);
    };
    // Only commands that need a target choose one: the others work with any configuration.
    let target = || Target::choose(&args);
    match command {
        Command::Publish(args) => publish::run(*args, &target()?, output).await,
        Command::Tail(args) => tail::run(args, &target()?, output).await,
        // It finishes the running work after Ctrl-C.
        Command::Serve(serve) => serve::run(serve, &args, output).await,
        Command::Consume(args) => consume::run(args, &target()?, output).await,
        Command::Token(command) => until_interrupted(token::run(command, &target()?, output)).await,
        Command::Completions { shell } => completions(shell, output),
        Command::Demo => until_interrupted(demo::run(output)).await,
        Command::Bench(args) => until_interrupted(bench::run(args, &target()?, output)).await,
        Command::Events(args) => until_interrupted(events::run(&args, &target()?, output)).await,
        Command::Get(args) => until_interrupted(get::run(&args, &target()?, output)).await,
        Command::Payloads(command) => {
            until_interrupted(payloads::run(command, &target()?, output)).await
        }
        Command::Dlq(command) => dlq::run(command, &target()?, output).await,
        Command::Groups(args) => until_interrupted(groups::run(args, &target()?, output)).await,
        Command::Streams => until_interrupted(streams::run(&target()?, output)).await,
        Command::Replay(args) => replay::run(*args, &target()?, output).await,
        // The relay handles Ctrl-C itself: it finishes the running work.
        Command::Outbox(command) => outbox::run(command, &target()?, output).await,
        // It finishes the running work after Ctrl-C.
        Command::Bridge(bridge) => bridge::run(*bridge, &args, output).await,
        Command::Check(check) => match &args.config {
            Some(config) => check_config::run(&args, &check, config, output),
            None => until_interrupted(check::run(&check, &target()?, output)).await,
        },
        Command::Audit(command) => until_interrupted(audit::run(command, &target()?, output)).await,
        Command::Asyncapi(command) => {
            until_interrupted(asyncapi::run(command, &args, output)).await
        }
        Command::Task(command) => until_interrupted(task::run(command, &target()?, output)).await,
        // `job dispatch` finishes the running work after Ctrl-C.
        Command::Job(job::JobCommand::Dispatch) => {
            job::run(job::JobCommand::Dispatch, &target()?, output).await
        }
        // It ends or gives back the running tasks after Ctrl-C.
        Command::Worker(args) => worker::run(*args, &target()?, output).await,
        Command::Health(args) => until_interrupted(health::run(&args, &target()?, output)).await,
        Command::Schedule(command) => schedule::run(command, &target()?, output).await,
        Command::Job(command) => until_interrupted(job::run(command, &target()?, output)).await,
        Command::Retention(command) => {
            until_interrupted(retention::run(command, &args, &target()?, output)).await
        }
        Command::Backup(args) => until_interrupted(backup::run(args, &target()?, output)).await,
        Command::Restore(args) => until_interrupted(restore::run(args, &target()?, output)).await,
        Command::Objects(command) => {
            until_interrupted(objects::run(command, &target()?, output)).await
        }
    }
}

fn welcome(output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(&serde_json::json!({ "welcome": WELCOME }));
    }
    output.line(WELCOME)
}

fn completions(shell: clap_complete::Shell, output: &mut Output) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "everbus", &mut script);
    output.raw(&script)
}

/// Runs a command that Ctrl-C may end anywhere: dropping it is enough.
async fn until_interrupted<T>(command: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    let interrupt = Interrupt::listen();
    tokio::select! {
        outcome = Box::pin(command) => outcome,
        () = interrupt.wait() => Err(Stop::Interrupted),
    }
}

/// Runs the work in this process, or in several processes. A process that dies is started again; at the end each has
/// `grace` to finish. Fails if one of them did not end well.
async fn in_processes<W>(count: u32, grace: Duration, output: &mut Output, work: W) -> Outcome
where
    W: AsyncFnOnce(&workers::Worker, &mut Output) -> Outcome,
{
    let alone = count == 1 || std::env::var_os(workers::WORKER).is_some();
    if !alone && !output.is_json() {
        output.line(format!("starting {count} processes; Ctrl-C ends them"))?;
        output.flush()?;
    }
    let mut stopped = None;
    let ended = workers::run_within(grace, count as usize, async |process| {
        Box::pin(work(&process, output)).await.map_err(|stop| {
            stopped = Some(stop);
            "the process could not work".into()
        })
    })
    .await;
    match stopped {
        Some(stop) => Err(stop),
        None if ended == ExitCode::SUCCESS => Ok(()),
        None => Err(Stop::Unsatisfied),
    }
}

/// The event id from an argument: a UUID, or a foreign id with its source.
fn event_id(text: &str, source: Option<&str>) -> EventId {
    EventId::from_foreign(source.unwrap_or_default(), text)
}

/// Refuses a range that ends before it starts: it would match nothing, and look like an answer.
fn check_range(since: Option<Timestamp>, until: Option<Timestamp>) -> Outcome {
    match (since, until) {
        (Some(since), Some(until)) if since > until => Err(Stop::usage(
            format!(
                "--since {} is after --until {}",
                when::shown(since),
                when::shown(until)
            ),
            Some("exchange the two"),
        )),
        _ => Ok(()),
    }
}

const ID_HINT: &str = "`everbus tail --from first --no-follow` shows what is stored; an id that is \
                       not a UUID also needs the --source it was published with";

/// The group, which must exist: a mistyped name would look like a group without dead letters.
async fn existing_group(name: &GroupName, engine: &Engine) -> Outcome<GroupInfo> {
    let groups = engine.broker.inspect().await?;
    let found = groups.into_iter().find(|group| group.name == *name);
    found.ok_or_else(|| {
        Error::new(Code::GroupNotFound, format!("there is no group {name}"))
            .hint("`everbus groups` lists them")
            .into()
    })
}
