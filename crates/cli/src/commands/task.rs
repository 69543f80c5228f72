//! `everbus task`: submit, look at, cancel and retry tasks.

use std::time::Duration;

use everbus_core::{Clock as _, SystemClock, Timestamp};
use everbus_jobs::events::{Json, TaskState};
use everbus_jobs::state::TaskStatus;
use everbus_jobs::{Jobs, NewTask, TaskFilter};
use serde_json::json;

use super::jobs_on::{Whose, jobs_on};
use crate::open::{Target, close};
use crate::output::{Output, Table, escaped, payload_text, shortened};
use crate::stop::{Outcome, Stop};
use crate::suggest::Suggestion;
use crate::values::parse_page;
use crate::when;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum TaskCommand {
    /// Submit a task; `everbus worker` runs it
    Submit(SubmitArgs),
    /// Show the state of a task
    Status(OneArgs),
    /// Show every event of a task, the oldest first
    History(OneArgs),
    /// Cancel a task; a worker that has it stops
    Cancel(OneArgs),
    /// Run a task again that has ended
    Retry(RetryArgs),
    /// List tasks, those whose state is newest first
    List(ListArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct SubmitArgs {
    /// The name of the work
    name: String,

    /// The input as JSON
    #[arg(default_value = "{}")]
    input: String,

    /// The id of the request: the same id twice is one task [default: a new one]
    #[arg(long, value_name = "ID")]
    id: Option<String>,

    /// Start it after this time: 10s, 30m
    #[arg(long, value_name = "DURATION", value_parser = when::parse_wait, conflicts_with = "at")]
    after: Option<Duration>,

    /// Start it at this time
    #[arg(long, value_name = "TIME", value_parser = when::parse_at)]
    at: Option<Timestamp>,

    /// Run it again if a task of this id has ended
    #[arg(long, requires = "id")]
    again: bool,

    /// Wait until it has ended; the exit code is 1 if it failed
    #[arg(long)]
    wait: bool,

    #[command(flatten)]
    whose: Whose,
}

#[derive(Debug, clap::Args)]
pub(crate) struct OneArgs {
    /// The task
    id: String,

    #[command(flatten)]
    whose: Whose,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RetryArgs {
    /// The task
    id: String,

    /// Also if it has completed
    #[arg(long)]
    completed: bool,

    #[command(flatten)]
    whose: Whose,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Only tasks in this state
    #[arg(long, value_enum)]
    state: Option<StateArg>,

    /// How many
    #[arg(long, value_name = "N", default_value = "100", value_parser = parse_page)]
    limit: usize,

    #[command(flatten)]
    whose: Whose,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum StateArg {
    Pending,
    Processing,
    Completed,
    Failed,
}

impl From<StateArg> for TaskState {
    fn from(state: StateArg) -> Self {
        match state {
            StateArg::Pending => Self::Pending,
            StateArg::Processing => Self::Processing,
            StateArg::Completed => Self::Completed,
            StateArg::Failed => Self::Failed,
        }
    }
}

impl TaskCommand {
    fn tenant(&self) -> &str {
        match self {
            Self::Submit(args) => &args.whose.tenant,
            Self::Status(args) | Self::History(args) | Self::Cancel(args) => &args.whose.tenant,
            Self::Retry(args) => &args.whose.tenant,
            Self::List(args) => &args.whose.tenant,
        }
    }
}

pub(crate) async fn run(command: TaskCommand, target: &Target, output: &mut Output) -> Outcome {
    let bus = match &command {
        TaskCommand::Submit(_) => target.open_bus().await?,
        _ => target.open_existing_bus().await?,
    };
    let jobs = jobs_on(&bus, target, Some(command.tenant()))?;
    let outcome = match command {
        TaskCommand::Submit(args) => submit(args, &jobs, target, output).await,
        TaskCommand::Status(args) => status(&args.id, &jobs, output).await,
        TaskCommand::History(args) => history(&args.id, &jobs, output).await,
        TaskCommand::Cancel(args) => cancel(&args.id, &jobs, output).await,
        TaskCommand::Retry(args) => retry(&args, &jobs, output).await,
        TaskCommand::List(args) => list(&args, &jobs, output).await,
    };
    close(bus.engine()).await;
    outcome
}

async fn submit(args: SubmitArgs, jobs: &Jobs, target: &Target, output: &mut Output) -> Outcome {
    let input = Json::parse(args.input).map_err(|e| {
        Stop::usage(
            format!("the input is not JSON: {e}"),
            Some("quote it: '{\"store\": 1}'"),
        )
    })?;
    let at = args
        .at
        .or_else(|| Some(SystemClock.now().plus(args.after?)));
    let task = NewTask {
        request_id: args.id,
        name: args.name,
        input,
        at,
        again: args.again,
    };
    let submitted = jobs.submit(task).await?;
    if output.is_json() {
        output.json(&submitted)?;
    } else if submitted.new {
        output.line(escaped(&submitted.request_id))?;
    } else {
        let id = escaped(&submitted.request_id);
        output.line(format!(
            "{id} was submitted before; it is {}",
            submitted.state
        ))?;
    }
    if !args.wait {
        return Ok(());
    }
    output.flush()?;
    let id = &submitted.request_id;
    loop {
        let head = jobs.bus().log()?.head().await?;
        let task = existing(jobs, id).await?;
        match task.state {
            Some(state) if state.is_terminal() => {
                print_one(&task, output)?;
                return match state {
                    TaskState::Completed => Ok(()),
                    _ => {
                        if !output.is_json() {
                            let id = crate::output::shell_word(id);
                            let command = Suggestion::new(target, &format!("task history {id}"));
                            output.line(format!("{command} shows why"))?;
                        }
                        Err(Stop::Unsatisfied)
                    }
                };
            }
            _ => jobs.bus().log()?.wait_beyond(head).await?,
        }
    }
}

async fn existing(jobs: &Jobs, id: &str) -> Outcome<TaskStatus> {
    let task = jobs.task(id).await?;
    if let Some(task) = task {
        return Ok(task);
    }
    // A task of a job that has not begun has no events.
    jobs.index().catch_up(jobs.bus(), None).await?;
    jobs.index().task(jobs.tenant(), id)?.ok_or_else(|| {
        let hint = "`everbus task list` shows them; --tenant chooses the tenant";
        Stop::not_found(format!("there is no task {id:?}"), hint)
    })
}

async fn status(id: &str, jobs: &Jobs, output: &mut Output) -> Outcome {
    let task = existing(jobs, id).await?;
    print_one(&task, output)
}

fn print_one(task: &TaskStatus, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(task);
    }
    let state = task
        .state
        .map_or("waits for its parents", TaskState::as_str);
    let cancelled = if task.cancelled { " (cancelled)" } else { "" };
    output.line(format!("{}  {state}{cancelled}", escaped(&task.request_id)))?;
    let mut lines = vec![("name", escaped(&task.name).into_owned())];
    if let Some(job) = &task.job_id {
        lines.push(("job", escaped(job).into_owned()));
    }
    if task.run > 1 {
        lines.push(("run", task.run.to_string()));
    }
    if let Some(since) = task.since {
        lines.push(("since", when::shown(since)));
    }
    if let Some(worker) = &task.worker_id {
        lines.push(("worker", escaped(worker).into_owned()));
    }
    if let Some(error) = &task.error {
        lines.push(("error", escaped(error).into_owned()));
    }
    for (name, value) in lines {
        output.line(format!("  {name:<7} {value}"))?;
    }
    Ok(())
}

async fn history(id: &str, jobs: &Jobs, output: &mut Output) -> Outcome {
    let events = jobs.task_history(id).await?;
    if events.is_empty() {
        existing(jobs, id).await?;
    }
    if output.is_json() {
        return output.json(&events);
    }
    let mut table = Table::new(&["SEQ", "RECEIVED", "EVENT", "PROPERTIES"]);
    for record in &events {
        table.row(vec![
            record.position.to_string(),
            when::stamp(record.received_at),
            escaped(record.event.event_type()).into_owned(),
            shortened(&payload_text(&record.event), 100).into_owned(),
        ]);
    }
    table.print(output)
}

async fn cancel(id: &str, jobs: &Jobs, output: &mut Output) -> Outcome {
    let cancelled = jobs.cancel_task(id).await?;
    if output.is_json() {
        return output.json(&json!({ "requestId": id, "cancelled": cancelled }));
    }
    output.line(match cancelled {
        true => format!("{} is cancelled", escaped(id)),
        false => format!("{} had ended before", escaped(id)),
    })
}

async fn retry(args: &RetryArgs, jobs: &Jobs, output: &mut Output) -> Outcome {
    let run = jobs.retry(&args.id, args.completed).await?;
    if output.is_json() {
        return output.json(&json!({ "requestId": args.id, "run": run }));
    }
    output.line(format!(
        "{} waits for a worker, run {run}",
        escaped(&args.id)
    ))
}

async fn list(args: &ListArgs, jobs: &Jobs, output: &mut Output) -> Outcome {
    let filter = TaskFilter {
        state: args.state.map(TaskState::from),
        limit: args.limit,
        ..TaskFilter::default()
    };
    let tasks = jobs.tasks(&filter).await?;
    let counts = jobs.task_counts().await?;
    if output.is_json() {
        let counts: serde_json::Map<String, serde_json::Value> = counts
            .iter()
            .map(|(state, n)| (state.to_string(), (*n).into()))
            .collect();
        return output.json(&json!({ "tasks": tasks, "counts": counts }));
    }
    let mut table = Table::new(&["TASK", "STATE", "NAME", "JOB", "SINCE", "WORKER"]);
    for task in &tasks {
        let text = |text: &str| shortened(&escaped(text), 60).into_owned();
        table.row(vec![
            text(&task.request_id),
            task.state.map_or("", TaskState::as_str).to_owned(),
            text(&task.name),
            text(task.job_id.as_deref().unwrap_or_default()),
            task.since.map(when::stamp).unwrap_or_default(),
            text(task.worker_id.as_deref().unwrap_or_default()),
        ]);
    }
    if !tasks.is_empty() {
        table.print(output)?;
    }
    let counts = counts.iter().map(|(state, n)| format!("{n} {state}"));
    output.line(counts.collect::<Vec<_>>().join(", "))
}
