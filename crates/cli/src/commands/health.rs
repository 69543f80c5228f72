//! `everbus health`: which running tasks are stuck, and which wait for too long.

use std::time::Duration;

use everbus_jobs::events::Health;
use everbus_jobs::health::{HealthReport, Thresholds};

use crate::commands::jobs_on::Whose;
use crate::open::{Target, close};
use crate::output::{Output, Table, counted, escaped};
use crate::stop::{Outcome, Stop};
use crate::when;

const HELP: &str = "\
A task that is being processed is
  overtime   if it has run for longer than --overtime,
  critical   else if its lock has ended, because its worker sent no heartbeat,
  warning    else if its last event is older than two heartbeats,
  healthy    otherwise.

The exit code is 0 if every task is healthy and none waits for too long, and 1 otherwise. `everbus schedule run \
--health CRON` runs this check at the given times and publishes a Task Health Check each time.";

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct HealthArgs {
    #[command(flatten)]
    whose: Whose,

    #[command(flatten)]
    limits: Limits,

    /// Publish the result as a Task Health Check, for every tenant that has tasks
    #[arg(long)]
    publish: bool,
}

/// When a task is not healthy.
#[derive(Debug, clap::Args)]
pub(crate) struct Limits {
    /// A task that runs longer than this is overtime
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = when::parse_limit)]
    overtime: Duration,

    /// The time between two heartbeats of a worker
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = when::parse_limit)]
    heartbeat: Duration,

    /// A task that waits longer than this for a worker is listed
    #[arg(long, value_name = "DURATION", default_value = "15m", value_parser = when::parse_limit)]
    pending: Duration,
}

impl Limits {
    pub(crate) fn thresholds(&self) -> Thresholds {
        Thresholds::default()
            .overtime(self.overtime)
            .heartbeat(self.heartbeat)
            .pending(self.pending)
    }
}

pub(crate) async fn run(args: &HealthArgs, target: &Target, output: &mut Output) -> Outcome {
    let bus = target.open_existing_bus().await?;
    let jobs = super::jobs_on(&bus, target, Some(&args.whose.tenant))?;
    let thresholds = args.limits.thresholds();
    let report = if args.publish {
        let reports = jobs.check_health(&thresholds).await?;
        reports
            .into_iter()
            .find(|report| report.tenant == args.whose.tenant)
    } else {
        Some(jobs.health(&thresholds).await?)
    };
    close(bus.engine()).await;
    let Some(report) = report else {
        return Ok(());
    };
    print(&report, output)?;
    match report.severity() {
        0 => Ok(()),
        _ => Err(Stop::Unsatisfied),
    }
}

fn print(report: &HealthReport, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(report);
    }
    let summary = report.check.summary;
    output.line(format!(
        "{}: {} healthy, {} warning, {} critical, {} overtime",
        counted(summary.total_processing as u64, "running task"),
        summary.healthy,
        summary.warning,
        summary.critical,
        summary.overtime
    ))?;
    let unhealthy = report.check.tasks.iter();
    let unhealthy: Vec<_> = unhealthy
        .filter(|task| task.health != Health::Healthy)
        .collect();
    if !unhealthy.is_empty() {
        let mut table = Table::new(&[
            "task",
            "health",
            "running",
            "silent",
            "last event",
            "worker",
        ]);
        for task in unhealthy {
            let lasting = |millis| when::lasting(Duration::from_millis(millis));
            table.row(vec![
                escaped(&task.request_id).into_owned(),
                format!("{:?}", task.health).to_lowercase(),
                lasting(task.elapsed),
                lasting(task.time_since_last_event),
                escaped(&task.last_event_type).into_owned(),
                escaped(&task.worker_id).into_owned(),
            ]);
        }
        table.print(output)?;
    }
    if !report.waiting.is_empty() {
        output.line("these tasks wait for a worker for too long:")?;
        let mut table = Table::new(&["task", "name", "job", "waiting"]);
        for task in &report.waiting {
            table.row(vec![
                escaped(&task.request_id).into_owned(),
                escaped(&task.name).into_owned(),
                escaped(task.job_id.as_deref().unwrap_or("-")).into_owned(),
                when::lasting(Duration::from_millis(task.waiting)),
            ]);
        }
        table.print(output)?;
    }
    Ok(())
}
