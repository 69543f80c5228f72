//! Tasks and jobs: from submit to completed with tasks that do nothing, and what the dispatcher costs.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus_core::Result;
use everbus_jobs::events::{Json, TaskSpec, TaskState};
use everbus_jobs::{Dispatcher, Jobs, NewJob, NewTask, Task, TaskFilter, Worker};

use crate::sample::{self, expect};
use crate::{Bench, Figure};

/// Events of a task: pending, work, started, completed.
const EVENTS_OF_TASK: u64 = 4;
/// Tasks that one request submits.
const REQUEST: u64 = 500;

/// Tasks without a job: submitted in requests of 500, run in this process, all four events of each stored.
pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let tasks = bench.events(100_000).next_multiple_of(REQUEST);
    let raw = async || bench.raw_inserts(tasks * EVENTS_OF_TASK).await;
    let ours = async || {
        bench
            .on_file("ours.db", async |path| through(&path, tasks).await)
            .await
    };
    let rates = bench.turns(tasks, raw, ours).await?;
    let limit = rates.raw * EVENTS_OF_TASK as f64;
    let met = rates.ours >= 20_000.0;
    Ok(Figure::target("≥ 20,000 tasks/s", met)
        .rates(&rates)
        .detail(format!(
            "tasks per second; raw inserts {limit:.0} rows/s, {EVENTS_OF_TASK} rows for each task"
        )))
}

async fn through(path: &Path, tasks: u64) -> Result<Duration> {
    let bus = sample::open(path).await?;
    let jobs = Jobs::new(bus.clone())?;
    let done = worker(&jobs).await?;
    bus.start().await?;
    let began = Instant::now();
    let submitting = sample::from_tasks(4, || {
        let jobs = jobs.clone();
        async move {
            for _ in 0..tasks.div_ceil(4 * REQUEST) {
                let task = NewTask::new("nothing", Json::empty());
                let request = vec![task; usize::try_from(REQUEST).unwrap_or(1)];
                jobs.submit_all(&request).await?;
            }
            Ok(())
        }
    });
    submitting.await?;
    let submitted = tasks.div_ceil(4 * REQUEST) * 4 * REQUEST;
    // The state of the groups is read only at the end: each such query reads the file.
    done.reached(submitted).await;
    crate::end_to_end::until_idle(&bus).await?;
    let took = began.elapsed();
    sample::expect_stored(&bus, submitted * EVENTS_OF_TASK).await?;
    let counts = jobs.task_counts().await?;
    let completed = counts
        .iter()
        .find(|(state, _)| state.as_str() == "completed");
    expect(
        completed.map_or(0, |(_, n)| *n),
        submitted,
        "tasks have completed",
    )?;
    bus.shutdown().await?;
    // The last requests may be a few more tasks than were asked for.
    Ok(took.mul_f64(tasks as f64 / submitted as f64))
}

/// Counts the tasks that have run.
#[derive(Clone, Default)]
struct Done(Arc<AtomicU64>);

impl Done {
    async fn reached(&self, tasks: u64) {
        while self.0.load(Ordering::Relaxed) < tasks {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    }
}

/// A worker in this process whose tasks do nothing.
async fn worker(jobs: &Jobs) -> Result<Done> {
    let done = Done::default();
    let count = done.clone();
    Worker::new(jobs.clone())
        .id("bench")
        .concurrency(512)
        .any(move |_: Task| {
            count.0.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Ok(Json::empty()))
        })
        .mount()
        .await?;
    Ok(done)
}

/// A job of 10,000 tasks in layers of 100, each with three parents, and the same tasks without a job beside it: the
/// difference is what the dispatcher costs.
pub(crate) async fn measure_dispatch(bench: &Bench) -> Result<Figure> {
    const LAYER: u64 = 100;
    let total = bench.scaled(10_000).next_multiple_of(LAYER).max(4 * LAYER);
    let mut costs = Vec::new();
    let mut growths = Vec::new();
    for round in 1..=bench.rounds() {
        bench.say(format!("round {round}, without a job"));
        let bare = bench
            .on_file("bare.db", async |path| {
                layered(&path, total, LAYER, false).await
            })
            .await?;
        bench.say(format!("round {round}, as a job"));
        let job = bench
            .on_file("job.db", async |path| {
                layered(&path, total, LAYER, true).await
            })
            .await?;
        let per_task = |took: Duration| took.as_secs_f64() * 1e6 / total as f64;
        costs.push(per_task(job.took) - per_task(bare.took));
        growths.push(job.last_half.as_secs_f64() / job.first_half.as_secs_f64());
    }
    let (cost, growth) = (sample::median(costs), sample::median(growths));
    let met = cost <= 100.0 && growth <= 1.3;
    let mut figure = Figure::target("≤ 100 µs for each task, and flat", met).detail(format!(
        "{cost:.0} µs for each of {total} tasks; the second half took {growth:.2} × the time of the first"
    ));
    figure.p50_us = Some(crate::figure::round(cost, 1));
    Ok(figure)
}

struct Layered {
    took: Duration,
    first_half: Duration,
    last_half: Duration,
}

/// Runs tasks layer by layer: as one job, or with a producer that submits each layer when the one before is done.
async fn layered(path: &Path, total: u64, layer: u64, as_job: bool) -> Result<Layered> {
    let bus = sample::open(path).await?;
    let jobs = Jobs::new(bus.clone())?;
    let done = worker(&jobs).await?;
    if as_job {
        Dispatcher::subscribe(&jobs).await?;
    }
    bus.start().await?;
    let began = Instant::now();
    let half = if as_job {
        let tasks = (0..total).map(|n| {
            let parents = (n / layer).checked_sub(1).map(|above| {
                let parents = (0..3).map(move |k| above * layer + (n + k * 7) % layer);
                parents.map(|parent| format!("t{parent}")).collect()
            });
            TaskSpec {
                task_id: format!("t{n}"),
                name: "nothing".to_owned(),
                depends_on: parents.unwrap_or_default(),
                input: Json::empty(),
            }
        });
        let job = NewJob {
            tasks: tasks.collect(),
            ..NewJob::default()
        };
        jobs.submit_job(job).await?;
        done.reached(total / 2).await;
        let half = began.elapsed();
        done.reached(total).await;
        half
    } else {
        let mut half = Duration::ZERO;
        for n in 0..total / layer {
            let tasks =
                vec![NewTask::new("nothing", Json::empty()); usize::try_from(layer).unwrap_or(1)];
            jobs.submit_all(&tasks).await?;
            done.reached((n + 1) * layer).await;
            if n + 1 == total / layer / 2 {
                half = began.elapsed();
            }
        }
        half
    };
    let took = began.elapsed();
    bus.shutdown().await?;
    Ok(Layered {
        took,
        first_half: half,
        last_half: took.saturating_sub(half),
    })
}

/// Queries over a file with a million tasks. Each round opens the file anew, with an index that is up to date.
pub(crate) async fn measure_list(bench: &Bench) -> Result<Figure> {
    let total = bench.scaled(1_000_000).next_multiple_of(REQUEST);
    let path = bench.file("listed.db")?;
    let index = path.with_extension("tasks");
    let open = async || {
        let bus = sample::open(&path).await?;
        Jobs::builder().index(&index).open(bus)
    };
    let jobs = open().await?;
    let task = NewTask::new("nothing", Json::empty());
    let request = vec![task; usize::try_from(REQUEST).unwrap_or(1)];
    let mut some = String::new();
    for _ in 0..total / REQUEST {
        let ids = jobs.submit_all(&request).await?;
        some = ids.into_iter().next().unwrap_or_default();
    }
    let tasks = (0..1_000).map(|n| TaskSpec {
        task_id: format!("t{n}"),
        name: "nothing".to_owned(),
        depends_on: Vec::new(),
        input: Json::empty(),
    });
    let job = NewJob {
        job_id: Some("job".to_owned()),
        tasks: tasks.collect(),
        ..NewJob::default()
    };
    bench.say("building the index");
    let began = Instant::now();
    jobs.submit_job(job).await?;
    let built = began.elapsed();
    jobs.bus().shutdown().await?;
    let mut slowest: [Vec<Duration>; 4] = Default::default();
    for _ in 0..bench.rounds() * 4 {
        let jobs = open().await?;
        // The first query after the file was opened also reads the pages of the files.
        let filter = TaskFilter {
            state: Some(TaskState::Pending),
            ..TaskFilter::default()
        };
        let began = Instant::now();
        let listed = jobs.tasks(&filter).await?;
        slowest[0].push(began.elapsed());
        expect(listed.len() as u64, 100, "tasks are listed")?;
        let began = Instant::now();
        let task = jobs.task(&some).await?;
        slowest[1].push(began.elapsed());
        expect(u64::from(task.is_some()), 1, "task is found")?;
        let began = Instant::now();
        let status = jobs.job("job").await?;
        slowest[2].push(began.elapsed());
        expect(
            status.task_statuses.len() as u64,
            1_000,
            "tasks of the job are found",
        )?;
        let began = Instant::now();
        jobs.task_history(&some).await?;
        slowest[3].push(began.elapsed());
        jobs.bus().shutdown().await?;
    }
    bench.remove(&path);
    let [list, one, job, history] =
        slowest.map(|mut times| sample::percentile(&mut times, 0.5) / 1000.0);
    let most = [list, one, job, history].into_iter().fold(0.0, f64::max);
    let mut figure = Figure::target("≤ 20 ms each", most <= 20.0).detail(format!(
        "of {total} tasks, ms: 100 pending {list:.1}, one task {one:.1}, a job of 1,000 {job:.1}, history {history:.1}; \
         the index was built in {:.1} s",
        built.as_secs_f64()
    ));
    figure.p50_us = Some(crate::figure::round(most * 1000.0, 1));
    Ok(figure)
}
