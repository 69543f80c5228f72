//! `everbus schedule`: work at given times. Adds, lists and removes schedules, and runs them.

use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use everbus::Bus;
use everbus::config::{Alerts, Secret};
use everbus::duty::Duty;
use everbus_core::{Clock as _, SystemClock};
use everbus_jobs::alerts::mount_configured;
use everbus_jobs::events::Json;
use everbus_jobs::schedule::{
    Action, CronTimes, HEALTH_CHECK, Missed, Scheduler, Schedules, StoredSchedule,
};
use serde_json::json;

use super::health::Limits;
use crate::interrupt::Interrupt;
use crate::open::{Target, close};
use crate::output::{Output, Table, escaped};
use crate::stop::{Outcome, Stop};
use crate::values::parse_whole_rate;
use crate::when;

#[derive(Debug, Subcommand)]
pub(crate) enum ScheduleCommand {
    /// Add a schedule, or replace the one of this name
    Add(Box<AddArgs>),
    /// List the schedules: when they run next, and how the last run ended
    List,
    /// Show the next times of a schedule
    Next {
        /// The schedule
        name: String,
        /// How many
        #[arg(short = 'n', long, default_value = "5", value_parser = parse_whole_rate)]
        count: u32,
    },
    /// Pause a schedule: it takes no ticks until it is resumed
    Pause {
        /// The schedule
        name: String,
    },
    /// Resume a paused schedule; ticks that were missed meanwhile are left out
    Resume {
        /// The schedule
        name: String,
    },
    /// Remove a schedule
    Remove {
        /// The schedule
        name: String,
    },
    /// Run the schedules, until Ctrl-C; several processes may do this, and each tick runs once
    Run(Box<RunArgs>),
}

#[derive(Debug, clap::Args)]
pub(crate) struct AddArgs {
    /// Its name: letters, digits, - and _
    name: String,

    /// When: minute, hour, day of month, month, day of week
    #[arg(long, value_name = "EXPRESSION", allow_hyphen_values = true)]
    cron: String,

    /// The time zone of the expression: Europe/Berlin
    #[arg(long, value_name = "NAME", default_value = "UTC")]
    timezone: String,

    /// Submit a task of this name; it has one attempt
    #[arg(
        long,
        value_name = "NAME",
        required_unless_present = "event",
        conflicts_with = "event"
    )]
    task: Option<String>,

    /// The input of the task, as JSON
    #[arg(long, value_name = "JSON", requires = "task")]
    input: Option<String>,

    /// Publish an event of this type
    #[arg(long, value_name = "TYPE")]
    event: Option<String>,

    /// The payload of the event, as JSON
    #[arg(long, value_name = "JSON", requires = "event")]
    payload: Option<String>,

    /// How long a run may take [default: the interval less a minute, or 90 % of one under 10 minutes]
    #[arg(long, value_name = "DURATION", value_parser = when::parse_limit)]
    timeout: Option<Duration>,

    /// What happens to ticks at which no process ran the schedules
    #[arg(long, value_enum, value_name = "POLICY", default_value = "skip")]
    missed: MissedPolicy,

    /// The tenant of what it submits or publishes
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MissedPolicy {
    /// Leave missed ticks out
    Skip,
    /// Run the newest missed tick
    Once,
    /// Run all missed ticks, the newest hundred at most
    All,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Check the health of running tasks at these times, and publish a Task Health Check: "*/5 * * * *"
    #[arg(long, value_name = "EXPRESSION", allow_hyphen_values = true)]
    health: Option<String>,

    #[command(flatten)]
    limits: Limits,

    /// Send alerts to this webhook of Slack, or of a service that takes the same JSON
    #[arg(
        long,
        value_name = "URL",
        env = "EVERBUS_SLACK_WEBHOOK",
        hide_env_values = true
    )]
    slack: Option<String>,

    /// Send alerts as JSON to this webhook
    #[arg(
        long,
        value_name = "URL",
        env = "EVERBUS_ALERT_WEBHOOK",
        hide_env_values = true
    )]
    webhook: Option<String>,

    /// Post JSON to this webhook when a job completes or a task of it fails
    #[arg(
        long,
        value_name = "URL",
        env = "EVERBUS_JOB_WEBHOOK",
        hide_env_values = true
    )]
    job_webhook: Option<String>,

    /// Webhooks may lead to addresses of this machine and of private networks
    #[arg(long)]
    allow_private: bool,

    /// Webhooks may use plain http
    #[arg(long)]
    allow_http: bool,

    /// An alert about the same subject is repeated only after this time [default: 15m]
    #[arg(long, value_name = "DURATION", value_parser = when::parse_limit)]
    repeat_after: Option<Duration>,

    /// How many alerts are sent in a minute [default: 20]
    #[arg(long, value_name = "N", value_parser = parse_whole_rate)]
    alerts_per_minute: Option<u32>,
}

impl RunArgs {
    /// The settings of the configuration file, with those of the command line over them.
    fn alerts_over(&self, mut alerts: Alerts) -> Alerts {
        let over = |url: &Option<String>, settings: &mut Option<Secret>| {
            if let Some(url) = url {
                *settings = Some(Secret::new(url));
            }
        };
        over(&self.slack, &mut alerts.slack);
        over(&self.webhook, &mut alerts.webhook);
        over(&self.job_webhook, &mut alerts.job_webhook);
        alerts.allow_http |= self.allow_http;
        alerts.allow_private |= self.allow_private;
        alerts.repeat_after = self.repeat_after.or(alerts.repeat_after);
        alerts.per_minute = self.alerts_per_minute.or(alerts.per_minute);
        alerts
    }
}

pub(crate) async fn run(command: ScheduleCommand, target: &Target, output: &mut Output) -> Outcome {
    match command {
        ScheduleCommand::Run(args) => serve(&args, target, output).await,
        command => super::until_interrupted(change(command, target, output)).await,
    }
}

async fn change(command: ScheduleCommand, target: &Target, output: &mut Output) -> Outcome {
    let bus = match &command {
        ScheduleCommand::Add(_) => target.open_bus().await?,
        _ => target.open_existing_bus().await?,
    };
    let done = apply(command, &bus, output).await;
    close(bus.engine()).await;
    done
}

async fn apply(command: ScheduleCommand, bus: &Bus, output: &mut Output) -> Outcome {
    let schedules = Schedules::of(bus)?;
    match command {
        ScheduleCommand::Add(args) => add(*args, &schedules, output).await,
        ScheduleCommand::List => list(bus, &schedules, output).await,
        ScheduleCommand::Next { name, count } => {
            let schedule = known(&schedules, &name).await?;
            next(&schedule.times()?, count, output)
        }
        ScheduleCommand::Pause { name } => pause(&name, true, &schedules, output).await,
        ScheduleCommand::Resume { name } => pause(&name, false, &schedules, output).await,
        ScheduleCommand::Remove { name } => {
            known(&schedules, &name).await?;
            schedules.remove(&name).await?;
            said(output, &name, "removed")
        }
        // `run` handles it.
        ScheduleCommand::Run(_) => Ok(()),
    }
}

async fn known(schedules: &Schedules, name: &str) -> Outcome<StoredSchedule> {
    let found = schedules.get(name).await?;
    found.ok_or_else(|| {
        let what = format!("there is no schedule {name:?}");
        Stop::not_found(what, "`everbus schedule list` lists them")
    })
}

fn parse_json(option: &str, text: Option<String>) -> Outcome<Option<Json>> {
    let Some(text) = text else { return Ok(None) };
    let parsed = Json::parse(text);
    parsed
        .map(Some)
        .map_err(|error| Stop::usage(format!("{option} is not JSON: {error}"), None))
}

async fn add(args: AddArgs, schedules: &Schedules, output: &mut Output) -> Outcome {
    let now = SystemClock.now();
    let input = parse_json("--input", args.input)?;
    let payload = parse_json("--payload", args.payload)?;
    let action = match (args.task, args.event) {
        (Some(name), _) => Action::Task {
            name,
            input: input.unwrap_or_default(),
        },
        (None, Some(event_type)) => Action::Event {
            event_type,
            payload: payload.unwrap_or_else(Json::null),
        },
        (None, None) => return Err(Stop::usage("name a --task or an --event", None)),
    };
    let schedule = StoredSchedule {
        name: args.name,
        cron: args.cron,
        timezone: args.timezone,
        action,
        timeout_ms: args
            .timeout
            .map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
        missed: match args.missed {
            MissedPolicy::Skip => Missed::Skip,
            MissedPolicy::Once => Missed::Once,
            MissedPolicy::All => Missed::All,
        },
        paused: false,
        tenant: args.tenant,
        since: now,
    };
    schedule.check(now)?;
    let new = schedules.put(&schedule).await?;
    if output.is_json() {
        return output.json(&schedule);
    }
    let next = schedule.times()?.next_after(now);
    output.line(format!(
        "{} {}; it runs next at {}",
        if new { "added" } else { "changed" },
        schedule.name,
        next.map(when::shown).unwrap_or_default()
    ))?;
    output.line("`everbus schedule run` must be running somewhere for it")
}

async fn pause(name: &str, paused: bool, schedules: &Schedules, output: &mut Output) -> Outcome {
    let mut schedule = known(schedules, name).await?;
    schedule.paused = paused;
    if !paused {
        schedule.since = SystemClock.now();
    }
    schedules.put(&schedule).await?;
    said(output, name, if paused { "paused" } else { "resumed" })
}

fn said(output: &mut Output, name: &str, what: &str) -> Outcome {
    if output.is_json() {
        return output.json(&json!({ "schedule": name, "change": what }));
    }
    output.line(format!("{what} {name}"))
}

fn next(times: &CronTimes, count: u32, output: &mut Output) -> Outcome {
    let mut time = SystemClock.now();
    let mut ticks = Vec::new();
    for _ in 0..count {
        let Some(tick) = times.next_after(time) else {
            break;
        };
        ticks.push(tick);
        time = tick;
    }
    if output.is_json() {
        return output.json(&ticks);
    }
    ticks
        .into_iter()
        .try_for_each(|tick| output.line(when::shown(tick)))
}

async fn list(bus: &Bus, schedules: &Schedules, output: &mut Output) -> Outcome {
    let now = SystemClock.now();
    let mut rows = Vec::new();
    for schedule in schedules.list().await? {
        let duty = Duty::of(bus.engine(), format!("schedule/{}", schedule.name), "")?;
        rows.push((schedule, duty.state().await?));
    }
    if output.is_json() {
        for (schedule, last) in rows {
            let next = schedule.times()?.next_after(now);
            output.json(&json!({ "schedule": schedule, "next": next, "last": last }))?;
        }
        return Ok(());
    }
    if rows.is_empty() {
        return output.line("there are no schedules; `everbus schedule add` adds one");
    }
    let mut table = Table::new(&[
        "schedule",
        "cron",
        "zone",
        "does",
        "next",
        "last tick",
        "ended",
    ]);
    for (schedule, last) in rows {
        let next = schedule.times()?.next_after(now).map(when::shown);
        let does = match &schedule.action {
            Action::Task { name, .. } => format!("task {name}"),
            Action::Event { event_type, .. } => format!("event {event_type}"),
        };
        let ended = match &last {
            None => "-".to_owned(),
            Some(last) => match (&last.error, last.finished_at) {
                (Some(error), _) => format!("failed: {error}"),
                (None, Some(_)) => "well".to_owned(),
                (None, None) if last.is_held(now) => format!("runs in {}", last.owner),
                (None, None) => format!("not: {} died", last.owner),
            },
        };
        table.row(vec![
            schedule.name.clone(),
            schedule.cron.clone(),
            schedule.timezone.clone(),
            escaped(&does).into_owned(),
            match (schedule.paused, next) {
                (true, _) => "paused".to_owned(),
                (false, next) => next.unwrap_or_else(|| "never".to_owned()),
            },
            last.map_or_else(|| "-".to_owned(), |last| when::shown(last.turn)),
            escaped(&ended).into_owned(),
        ]);
    }
    table.print(output)
}

/// Runs the schedules, and with them the health check and the alerts.
async fn serve(args: &RunArgs, target: &Target, output: &mut Output) -> Outcome {
    let config = target.load_config()?;
    let alerts = args.alerts_over(config.and_then(|config| config.alerts).unwrap_or_default());
    let health = args
        .health
        .as_deref()
        .map(|cron| CronTimes::new(cron, "UTC"));
    let health = health.transpose()?;
    let interrupt = Interrupt::listen();
    let bus = target.open_bus().await?;
    let jobs = super::jobs_on(&bus, target, None)?;
    mount_configured(&jobs, &alerts).await?;
    bus.start().await?;
    let mut scheduler = Scheduler::new(jobs.clone())
        .owner(format!(
            "everbus schedule run, process {}",
            std::process::id()
        ))
        .stored()?;
    if let Some(times) = health {
        let checked = jobs.clone();
        let thresholds = args.limits.thresholds();
        scheduler = scheduler.on(HEALTH_CHECK, times, move |tick| {
            let jobs = checked.clone();
            async move {
                let checked = jobs.check_health_at(&thresholds, Some(&tick)).await;
                checked.map(drop).map_err(|error| error.to_string())
            }
        });
    }
    if !output.is_json() {
        output.line("running the schedules; Ctrl-C ends it")?;
        output.flush()?;
    }
    let ran = Box::pin(scheduler.run(interrupt.wait())).await;
    bus.shutdown().await?;
    Ok(ran?)
}
