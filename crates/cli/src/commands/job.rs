//! `everbus job`: submit, look at, draw, add to, resume and cancel jobs.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use everbus_core::Timestamp;
use everbus_jobs::events::TaskState;
use everbus_jobs::{Dispatcher, JobState, JobStatus, Jobs, NewJob, parse_tasks};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::json;

use super::jobs_on::{Whose, jobs_on};
use crate::interrupt::Interrupt;
use crate::open::{Target, close};
use crate::output::{Output, Table, counted, escaped, shortened};
use crate::stop::{Outcome, Stop};
use crate::suggest::Suggestion;
use crate::values::parse_page;
use crate::when;

/// A larger job file is refused, and not read to its end.
const LARGEST_FILE: u64 = 64 << 20;

const FILE_HELP: &str = "\
A job file is YAML or JSON:

  jobId: store-analysis-7        # optional; requestId too
  tasks:
    - taskId: scrape
      name: scrape-store
      input: {storeId: store-123}
    - taskId: tags
      name: color-tags
      dependsOn: [scrape]

A task receives its input, with the results of the tasks that it depends on as dependencyOutputs. The tasks run in \
`everbus worker`.

With --wait the exit code is 0 if the job completed and 1 if it failed.";

#[derive(Debug, clap::Subcommand)]
pub(crate) enum JobCommand {
    /// Submit a job: a graph of tasks
    #[command(after_help = FILE_HELP)]
    Submit(SubmitArgs),
    /// Show the state of a job and of its tasks
    Status(StatusArgs),
    /// Draw the graph of a job, now or as it was at a past moment
    Graph(GraphArgs),
    /// Add tasks to a job, also to one that has completed
    #[command(after_help = FILE_HELP)]
    Add(AddArgs),
    /// Run the failed tasks of a job again
    Resume(OneArgs),
    /// Cancel the tasks of a job that run, wait or could start
    Cancel(OneArgs),
    /// List jobs, the newest first
    List(ListArgs),
    /// Start the tasks of jobs as the tasks before them complete, until Ctrl-C. `everbus worker` does this too
    Dispatch,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SubmitArgs {
    /// The job file; - reads standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Put the id of the job before the ids of its tasks
    #[arg(long)]
    prefix_ids: bool,

    /// Wait until it has ended
    #[arg(long)]
    wait: bool,

    #[command(flatten)]
    whose: Whose,
}

#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    /// The job
    id: String,

    /// Show its progress until it has ended
    #[arg(long)]
    watch: bool,

    #[command(flatten)]
    whose: Whose,
}

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(crate) struct GraphArgs {
    /// The job
    id: String,

    /// As Graphviz
    #[arg(long, conflicts_with_all = ["mermaid", "svg"])]
    dot: bool,

    /// As Mermaid
    #[arg(long, conflicts_with = "svg")]
    mermaid: bool,

    /// As SVG
    #[arg(long)]
    svg: bool,

    /// As it was at this time
    #[arg(long, value_name = "TIME", value_parser = when::parse_past)]
    at: Option<Timestamp>,

    #[command(flatten)]
    whose: Whose,
}

#[derive(Debug, clap::Args)]
pub(crate) struct AddArgs {
    /// The job
    id: String,

    /// A file with tasks: a list of them, or a job file; - reads standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Put the id of the job before the ids of the new tasks
    #[arg(long)]
    prefix_ids: bool,

    #[command(flatten)]
    whose: Whose,
}

#[derive(Debug, clap::Args)]
pub(crate) struct OneArgs {
    /// The job
    id: String,

    #[command(flatten)]
    whose: Whose,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// How many
    #[arg(long, value_name = "N", default_value = "100", value_parser = parse_page)]
    limit: usize,

    #[command(flatten)]
    whose: Whose,
}

impl JobCommand {
    fn tenant(&self) -> Option<&str> {
        match self {
            Self::Submit(args) => Some(&args.whose.tenant),
            Self::Status(args) => Some(&args.whose.tenant),
            Self::Graph(args) => Some(&args.whose.tenant),
            Self::Add(args) => Some(&args.whose.tenant),
            Self::Resume(args) | Self::Cancel(args) => Some(&args.whose.tenant),
            Self::List(args) => Some(&args.whose.tenant),
            Self::Dispatch => None,
        }
    }
}

pub(crate) async fn run(command: JobCommand, target: &Target, output: &mut Output) -> Outcome {
    // A wrong file is reported before anything is opened or created.
    let submitted = match &command {
        JobCommand::Submit(args) => Some(NewJob::parse(&read(&args.file)?)?),
        _ => None,
    };
    let creates = matches!(command, JobCommand::Submit(_) | JobCommand::Dispatch);
    let bus = match creates {
        true => target.open_bus().await?,
        false => target.open_existing_bus().await?,
    };
    let jobs = jobs_on(&bus, target, command.tenant())?;
    if let JobCommand::Dispatch = command {
        return dispatch(&jobs, output).await;
    }
    let outcome = match command {
        JobCommand::Submit(args) => {
            let job = NewJob {
                prefix_ids: args.prefix_ids,
                ..submitted.unwrap_or_default()
            };
            submit(&args, job, &jobs, target, output).await
        }
        JobCommand::Status(args) => status(&args, &jobs, output).await,
        JobCommand::Graph(args) => graph(&args, &jobs, output).await,
        JobCommand::Add(args) => add(&args, &jobs, output).await,
        JobCommand::Resume(args) => resume(&args.id, &jobs, output).await,
        JobCommand::Cancel(args) => cancel(&args.id, &jobs, output).await,
        JobCommand::List(args) => list(&args, &jobs, output).await,
        JobCommand::Dispatch => Ok(()),
    };
    close(bus.engine()).await;
    outcome
}

fn read(path: &Path) -> Outcome<String> {
    let name = path.display();
    let failed = |e: std::io::Error| Stop::usage(format!("{name}: {e}"), None);
    let mut text = String::new();
    let from: Box<dyn std::io::Read> = match path.as_os_str() == "-" {
        true => Box::new(std::io::stdin()),
        false => Box::new(std::fs::File::open(path).map_err(failed)?),
    };
    from.take(LARGEST_FILE + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > LARGEST_FILE {
        let hint = "store large inputs elsewhere, and name their place in the job";
        return Err(Stop::usage(
            format!("{name} has more than 64 MiB"),
            Some(hint),
        ));
    }
    Ok(text)
}

async fn submit(
    args: &SubmitArgs,
    job: NewJob,
    jobs: &Jobs,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    let submitted = jobs.submit_job(job).await?;
    let id = submitted.job_id.clone();
    // With --wait only the final state is printed as JSON, so that there is one value to read.
    if output.is_json() && !args.wait {
        return output.json(&submitted);
    }
    if !output.is_json() {
        let before = if submitted.new {
            ""
        } else {
            ", submitted before"
        };
        let tasks = counted(submitted.total_tasks as u64, "task");
        output.line(format!("{}  {tasks}{before}", escaped(&id)))?;
        output.flush()?;
    }
    if args.wait {
        return watch(&id, jobs, output).await;
    }
    let command = Suggestion::new(
        target,
        &format!("job status {}", crate::output::shell_word(&id)),
    );
    output.line(format!("{command} --watch"))
}

async fn status(args: &StatusArgs, jobs: &Jobs, output: &mut Output) -> Outcome {
    if args.watch {
        return watch(&args.id, jobs, output).await;
    }
    let status = jobs.job(&args.id).await?;
    if output.is_json() {
        return output.json(&status);
    }
    print(&status, jobs, output).await
}

/// Shows the progress of a job until it has ended. The exit code says whether it completed.
async fn watch(id: &str, jobs: &Jobs, output: &mut Output) -> Outcome {
    let bars = Bars::new(output.is_json());
    let status = jobs.wait(id, |status| bars.show(status)).await?;
    bars.clear();
    if output.is_json() {
        output.json(&status)?;
    } else {
        print(&status, jobs, output).await?;
    }
    match status.state {
        JobState::Completed => Ok(()),
        _ => Err(Stop::Unsatisfied),
    }
}

/// The bar of a job, on standard error and only on a terminal.
struct Bars {
    all: MultiProgress,
    bar: Option<ProgressBar>,
}

impl Bars {
    fn new(hidden: bool) -> Self {
        let all = MultiProgress::new();
        let bar = (!hidden).then(|| all.add(ProgressBar::new(0)));
        if let Some(bar) = &bar
            && let Ok(style) =
                ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {elapsed}")
        {
            bar.set_style(style);
        }
        Self { all, bar }
    }

    fn show(&self, status: &JobStatus) {
        let Some(bar) = &self.bar else {
            return;
        };
        bar.set_length(status.total_tasks as u64);
        bar.set_position(status.count(TaskState::Completed) as u64);
        let running = status.count(TaskState::Processing);
        let failed = match status.count(TaskState::Failed) {
            0 => String::new(),
            n => format!(", {n} failed"),
        };
        bar.set_message(format!(
            "{} {running} running{failed}",
            escaped(&status.job_id)
        ));
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        // If standard error is closed there is nothing to clear.
        let _ = self.all.clear();
    }
}

async fn print(status: &JobStatus, jobs: &Jobs, output: &mut Output) -> Outcome {
    let tasks = counted(status.total_tasks as u64, "task");
    output.line(format!(
        "{}  {}  {tasks}",
        escaped(&status.job_id),
        status.state.as_str()
    ))?;
    if let Some(refused) = &status.refused {
        return output.line(format!("  {}", escaped(refused)));
    }
    let mut table = Table::new(&["TASK", "STATE", "NAME", "SINCE", "ERROR"]);
    for task in jobs.job_tasks(&status.job_id).await? {
        let text = |text: &str| shortened(&escaped(text), 60).into_owned();
        table.row(vec![
            text(&task.request_id),
            task.state.map_or("waiting", TaskState::as_str).to_owned(),
            text(&task.name),
            task.since.map(when::stamp).unwrap_or_default(),
            text(task.error.as_deref().unwrap_or_default()),
        ]);
    }
    table.print(output)
}

async fn graph(args: &GraphArgs, jobs: &Jobs, output: &mut Output) -> Outcome {
    let picture = jobs.job_graph(&args.id, args.at).await?;
    let text = match (args.dot, args.mermaid, args.svg) {
        (true, ..) => picture.to_dot(),
        (_, true, _) => picture.to_mermaid(),
        (_, _, true) => picture.to_svg(),
        _ if output.is_json() => {
            let tasks = picture.graph.tasks().iter().zip(&picture.states);
            let tasks = tasks.map(|(task, state)| {
                json!({
                    "taskId": task.task_id, "name": task.name, "dependsOn": task.depends_on, "state": state,
                })
            });
            let tasks: Vec<serde_json::Value> = tasks.collect();
            return output.json(&json!({ "jobId": picture.job_id, "tasks": tasks }));
        }
        _ => picture.to_text(),
    };
    output.raw(text.as_bytes())
}

async fn add(args: &AddArgs, jobs: &Jobs, output: &mut Output) -> Outcome {
    let tasks = parse_tasks(&read(&args.file)?)?;
    let new = tasks.len();
    let total = jobs.add_tasks(&args.id, tasks, args.prefix_ids).await?;
    if output.is_json() {
        return output.json(&json!({ "jobId": args.id, "added": new, "totalTasksNow": total }));
    }
    let (new, total) = (counted(new as u64, "task"), counted(total as u64, "task"));
    output.line(format!("added {new}; {} has {total}", escaped(&args.id)))
}

async fn resume(id: &str, jobs: &Jobs, output: &mut Output) -> Outcome {
    let resumed = jobs.resume(id).await?;
    if output.is_json() {
        let (started, waiting) = (resumed.started, resumed.waiting);
        return output.json(&json!({ "jobId": id, "resumed": started, "waiting": waiting }));
    }
    let none = "no task of it has failed";
    listed(id, "resumed", none, &resumed.started, output)?;
    if resumed.waiting.is_empty() {
        return Ok(());
    }
    output.line("resume it again for these, which were cancelled before it was their turn:")?;
    named(&resumed.waiting, output)
}

async fn cancel(id: &str, jobs: &Jobs, output: &mut Output) -> Outcome {
    let cancelled = jobs.cancel_job(id).await?;
    listed(
        id,
        "cancelled",
        "nothing of it runs, waits or can start",
        &cancelled,
        output,
    )
}

fn listed(id: &str, what: &str, none: &str, tasks: &[String], output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(&json!({ "jobId": id, what: tasks }));
    }
    if tasks.is_empty() {
        return output.line(format!("{}: {none}", escaped(id)));
    }
    let number = counted(tasks.len() as u64, "task");
    output.line(format!("{}: {what} {number}", escaped(id)))?;
    named(tasks, output)
}

fn named(tasks: &[String], output: &mut Output) -> Outcome {
    for task in tasks.iter().take(20) {
        output.line(format!("  {}", escaped(task)))?;
    }
    if tasks.len() > 20 {
        output.line(format!("  and {} more", tasks.len() - 20))?;
    }
    Ok(())
}

async fn list(args: &ListArgs, jobs: &Jobs, output: &mut Output) -> Outcome {
    let rows = jobs.jobs(args.limit).await?;
    if output.is_json() {
        let rows = rows.iter().map(|row| {
            let mut value = serde_json::to_value(row).unwrap_or_default();
            value["state"] = row.state().as_str().into();
            value
        });
        return output.json(&rows.collect::<Vec<_>>());
    }
    if rows.is_empty() {
        return output.line("no jobs yet; `everbus job submit FILE` submits one");
    }
    let mut table = Table::new(&[
        "JOB",
        "STATE",
        "TASKS",
        "COMPLETED",
        "RUNNING",
        "PENDING",
        "FAILED",
        "SUBMITTED",
    ]);
    for row in &rows {
        table.row(vec![
            shortened(&escaped(&row.job_id), 60).into_owned(),
            row.state().as_str().to_owned(),
            row.total_tasks.to_string(),
            row.completed.to_string(),
            row.processing.to_string(),
            row.pending.to_string(),
            row.failed.to_string(),
            when::stamp(row.created_at),
        ]);
    }
    table.print(output)
}

async fn dispatch(jobs: &Jobs, output: &mut Output) -> Outcome {
    let interrupt = Interrupt::listen();
    Dispatcher::subscribe(jobs).await?;
    jobs.bus().start().await?;
    if output.is_json() {
        output.json(&json!({ "dispatching": true, "pid": std::process::id() }))?;
    } else {
        output.line("dispatching; Ctrl-C ends it")?;
    }
    output.flush()?;
    interrupt.wait().await;
    jobs.bus().shutdown().await?;
    Ok(())
}
