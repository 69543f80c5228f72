//! Kills dispatcher, worker and producer during random jobs on one file, and compares the end with a model. The worker is a
//! handler, which is fast, or the real one with child processes.
//!
//! A short run is a part of every test run. `EVERBUS_JOBS_CAMPAIGN=200 cargo test -p everbus-jobs --test it crash --
//! --nocapture` runs 200 jobs of each kind. `EVERBUS_SEED` repeats one. With `--all-features` and `EVERBUS_JOBS_ENGINE=postgres`
//! it runs on PostgreSQL; with `nats`, `redis` or `kafka` on that broker with a file beside it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use everbus::{Bus, TypedEvent};
use everbus_jobs::events::{
    ErrorCategory, JobCompleted, Json, TaskCompleted, TaskPending, TaskState, TaskStatuses, Work,
};
use everbus_jobs::worker::child::ChildCommand;
use everbus_jobs::{Dispatcher, JobState, Jobs, NewTask, Task, TaskError, WORK, Worker};

use crate::random_jobs::{Random, model, random_job};
use crate::support::{events_of, job, until};

async fn open(directory: &Path) -> Jobs {
    let file = format!("sqlite:{}", directory.join("events.db").display());
    // The file names another engine, if it is there. A broker without a history has the store beside it.
    let Ok(url) = std::fs::read_to_string(directory.join("url")) else {
        return Jobs::new(Bus::open(file).await.unwrap()).unwrap();
    };
    let mut bus = Bus::builder();
    if !url.starts_with("postgres") {
        bus = bus.store(file);
    }
    Jobs::new(bus.open(url).await.unwrap()).unwrap()
}

/// The URL of a fresh database of another engine; `None` for the file.
fn engine(name: &str) -> Option<String> {
    match name {
        "file" => None,
        #[cfg(feature = "postgres")]
        "postgres" => {
            let server = everbus_testkit::servers::Postgres::shared().expect("no PostgreSQL here");
            Some(server.fresh_database())
        }
        #[cfg(feature = "nats")]
        "nats" => Some(
            everbus_testkit::servers::Nats::shared()
                .expect("no NATS here")
                .fresh_account(),
        ),
        #[cfg(feature = "redis")]
        "redis" => {
            let server =
                everbus_testkit::servers::Redis::shared(everbus_testkit::servers::Flavour::Redis);
            Some(server.expect("no Redis here").fresh_database())
        }
        #[cfg(feature = "kafka")]
        "kafka" => Some(
            everbus_testkit::servers::Kafka::shared()
                .expect("no Kafka here, or EVERBUS_KAFKA is not set")
                .fresh_space(),
        ),
        other => panic!("this build has no engine {other}"),
    }
}

/// How many tasks a worker runs at once.
const CONCURRENCY: usize = 4;
/// The heartbeat of a worker. A broker notices by its lease that a worker died, which lasts for three of them.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// The campaign fails if no task begins or ends for this long after the last kill. On a broker an event may wait for the
/// leases of a killed worker (6 s), archive (15 s) and dispatcher (30 s), one after another.
const STUCK: Duration = Duration::from_secs(120);

/// The child of a task: says who it is, works for a moment, and says that it has come to its end. The file `long` makes
/// it work for a quarter of an hour.
const CHILD: &str = r#"
echo "$EVERBUS_REQUEST_ID $$ $PPID" >> begun
input=$(cat)
if [ -e long ]; then sleep 900; else sleep 0.02; fi
if [ -e daemon ]; then
  setsid sleep 900 <&- >&- 2>&- &
  while [ "$(cut -d' ' -f6 /proc/$!/stat)" != $! ]; do sleep 0.01; done
  echo $! > daemon
fi
case $input in *'"fail":true'*) exit 65 ;; esac
echo "$EVERBUS_REQUEST_ID" >> ran
echo '{}'
"#;

/// The children of a worker that run: tasks and process ids.
fn children_of(directory: &Path, worker: u32) -> Vec<(String, u32)> {
    let text = std::fs::read_to_string(directory.join("begun")).unwrap_or_default();
    let of_worker = text.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (task, child, parent) = (words.next()?, words.next()?, words.next()?);
        (parent == worker.to_string()).then_some((task.to_owned(), child.parse().ok()?))
    });
    of_worker.filter(|(_, child)| is_running(*child)).collect()
}

/// Whether a child of these tests runs. One that has ended may wait for a parent that reads its exit code.
fn is_running(pid: u32) -> bool {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
    let is_ours = read("cmdline").is_ok_and(|command| command.contains("EVERBUS_REQUEST_ID"));
    let state = read("stat").unwrap_or_default();
    let state = state.rsplit_once(") ").map_or("Z", |(_, state)| state);
    is_ours && !state.starts_with('Z')
}

/// One of the processes that are killed. It is no test by itself.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the crash harness"]
async fn crash_process() {
    let Ok(role) = std::env::var("EVERBUS_JOBS_ROLE") else {
        return;
    };
    let directory = PathBuf::from(std::env::var("EVERBUS_JOBS_DIR").unwrap());
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let jobs = open(&directory).await;
    match role.as_str() {
        "producer" => {
            let (seed, count) = (number("EVERBUS_JOBS_SEED"), number("EVERBUS_JOBS_COUNT"));
            for n in 0..count {
                let (id, tasks) = random_job(seed, n);
                jobs.submit_job(job(&id, tasks)).await.unwrap();
            }
            jobs.bus().shutdown().await.unwrap();
        }
        "dispatcher" => {
            Dispatcher::subscribe(&jobs).await.unwrap();
            jobs.bus().start().await.unwrap();
            std::future::pending::<()>().await;
        }
        "children" => {
            let heartbeat = std::fs::read_to_string(directory.join("heartbeat"));
            let heartbeat = heartbeat.map_or(HEARTBEAT, |text| {
                Duration::from_millis(text.parse().unwrap())
            });
            let command = ChildCommand::new("sh")
                .args([OsString::from("-c"), CHILD.into()])
                .directory(&directory);
            Worker::new(jobs.clone())
                .command(command)
                .concurrency(CONCURRENCY)
                .heartbeat(heartbeat)
                .retry(everbus::RetryPolicy::default().max_retries(10_000))
                .mount()
                .await
                .unwrap();
            jobs.bus().start().await.unwrap();
            std::future::pending::<()>().await;
        }
        _ => {
            let ran = directory.join("ran");
            let function = move |task: Task| {
                let ran = ran.clone();
                async move {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    // A run to its end, whether or not it is acknowledged.
                    let mut file = std::fs::File::options()
                        .create(true)
                        .append(true)
                        .open(ran)?;
                    writeln!(file, "{}", task.request_id)?;
                    if task.input.get().contains("true") {
                        let error = "it was asked to";
                        return Err(TaskError::new(ErrorCategory::Validation, error));
                    }
                    Ok(Json::empty())
                }
            };
            Worker::new(jobs.clone())
                .any(function)
                .concurrency(CONCURRENCY)
                .heartbeat(HEARTBEAT)
                .retry(everbus::RetryPolicy::default().max_retries(10_000))
                .mount()
                .await
                .unwrap();
            jobs.bus().start().await.unwrap();
            std::future::pending::<()>().await;
        }
    }
}

struct Process {
    role: &'static str,
    child: Child,
}

fn start(role: &'static str, directory: &Path, seed: u64, count: u64) -> Process {
    let child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "crash::crash_process",
            "--nocapture",
        ])
        .env("EVERBUS_JOBS_ROLE", role)
        .env("EVERBUS_JOBS_DIR", directory)
        .env("EVERBUS_JOBS_SEED", seed.to_string())
        .env("EVERBUS_JOBS_COUNT", count.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Process { role, child }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// conformance: workflow/job-events: dispatcher, worker and producer are killed during random jobs; each job ends as a model says, no task is lost or started twice
// conformance: workflow/job-ids: a restarted dispatcher repeats its ids, so that nothing is started twice
#[tokio::test(flavor = "multi_thread")]
async fn killed_dispatchers_workers_and_producers_lose_and_double_nothing() {
    campaign("worker", 12).await;
}

// conformance: workflow/job-orphans: workers with real child processes are killed during random jobs; each job ends as a model says, and no child of a killed worker goes on
#[tokio::test(flavor = "multi_thread")]
async fn killed_workers_with_children_lose_and_double_nothing() {
    campaign("children", 4).await;
}

// conformance: workflow/job-orphans: the child of a worker that is killed with SIGKILL ends with it, and its task completes once, by the next worker
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_takes_its_children_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let jobs = open(path).await;
    std::fs::write(path.join("long"), "").unwrap();
    let task = NewTask::new("long", Json::empty()).id("req-1");
    jobs.submit(task).await.unwrap();
    let first = start("children", path, 0, 0);
    let pid = first.child.id();
    until("the child runs", async || children_of(path, pid).len() == 1).await;
    drop(first);
    // It would work for far longer than this waits.
    until("the child has ended", async || {
        children_of(path, pid).is_empty()
    })
    .await;
    std::fs::remove_file(path.join("long")).unwrap();
    let second = start("children", path, 0, 0);
    until("the task has completed", async || {
        let task = jobs.task("req-1").await.unwrap().unwrap();
        task.state == Some(TaskState::Completed)
    })
    .await;
    let ran = std::fs::read_to_string(path.join("ran")).unwrap();
    assert_eq!(ran, "req-1\n", "only the second child came to its end");
    assert_eq!(events_of::<TaskCompleted>(&jobs).await.len(), 1);
    drop(second);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-orphans: what a task that has ended left behind on purpose does not end with the worker
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_of_an_ended_task_outlives_its_worker() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let jobs = open(path).await;
    std::fs::write(path.join("daemon"), "").unwrap();
    let task = NewTask::new("daemon", Json::empty()).id("req-1");
    jobs.submit(task).await.unwrap();
    let worker = start("children", path, 0, 0);
    until("the task has completed", async || {
        let task = jobs.task("req-1").await.unwrap().unwrap();
        task.state == Some(TaskState::Completed)
    })
    .await;
    let daemon = std::fs::read_to_string(path.join("daemon")).unwrap();
    let daemon: u32 = daemon.trim().parse().unwrap();
    let helper = helper_of(worker.child.id()).expect("the worker has a helper");
    drop(worker);
    until("the helper has ended", async || helper_at(helper).is_none()).await;
    let command = std::fs::read_to_string(format!("/proc/{daemon}/cmdline")).unwrap_or_default();
    let pid = rustix::process::Pid::from_raw(i32::try_from(daemon).unwrap()).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    assert!(command.contains("sleep"), "the daemon was killed");
    jobs.bus().shutdown().await.unwrap();
}

/// The process that kills the children of a worker.
fn helper_of(worker: u32) -> Option<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| helper_at(*pid) == Some(worker))
}

/// The parent of a process, if it is such a helper.
fn helper_at(pid: u32) -> Option<u32> {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
    let stat = read("stat").ok()?;
    let mut words = stat.rsplit_once(") ")?.1.split(' ').skip(1);
    let parent = words.next()?.parse().ok()?;
    let is_helper = read("cmdline").is_ok_and(|command| command.contains("everbus-orphans"));
    is_helper.then_some(parent)
}

// conformance: workflow/task-lock: a worker that stands still beyond its lease loses the task; the next one completes it, and the first kills its child and changes nothing
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_stands_still_loses_its_task() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let jobs = open(path).await;
    std::fs::write(path.join("long"), "").unwrap();
    std::fs::write(path.join("heartbeat"), "500").unwrap();
    let task = NewTask::new("long", Json::empty()).id("req-1");
    jobs.submit(task).await.unwrap();
    let first = start("children", path, 0, 0);
    let pid = first.child.id();
    let signal = |signal| {
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    };
    until("the first child runs", async || {
        let task = jobs.task("req-1").await.unwrap().unwrap();
        task.state == Some(TaskState::Processing) && children_of(path, pid).len() == 1
    })
    .await;
    loop {
        signal(rustix::process::Signal::STOP);
        // It must not hold the lock of the file while it stands still.
        let written = jobs.bus().publish(("still.there", 1));
        if let Ok(Ok(_)) = tokio::time::timeout(Duration::from_secs(2), written.into_future()).await
        {
            break;
        }
        signal(rustix::process::Signal::CONT);
    }
    std::fs::remove_file(path.join("long")).unwrap();
    let second = start("children", path, 0, 0);
    let state = async || jobs.task("req-1").await.unwrap().unwrap().state;
    until("the second worker completes the task", async || {
        state().await == Some(TaskState::Completed)
    })
    .await;
    assert_eq!(
        children_of(path, pid).len(),
        1,
        "the first child runs still"
    );
    signal(rustix::process::Signal::CONT);
    until("the first worker kills its child", async || {
        children_of(path, pid).is_empty()
    })
    .await;
    // Everything that the first worker still wants to say is said before it takes another task.
    drop(second);
    let task = NewTask::new("next", Json::empty()).id("req-2");
    jobs.submit(task).await.unwrap();
    until("the first worker goes on", async || {
        let task = jobs.task("req-2").await.unwrap().unwrap();
        task.state == Some(TaskState::Completed)
    })
    .await;
    assert_eq!(state().await, Some(TaskState::Completed));
    let ran = std::fs::read_to_string(path.join("ran")).unwrap();
    assert_eq!(
        ran, "req-1\nreq-2\n",
        "the first child did not come to its end"
    );
    assert_eq!(events_of::<TaskCompleted>(&jobs).await.len(), 2);
    jobs.bus().shutdown().await.unwrap();
}

/// What is known of the jobs that have not ended.
async fn stuck(jobs: &Jobs, open: &BTreeMap<String, TaskStatuses>) -> String {
    let mut text = format!("{} jobs have not ended\n", open.len());
    for (job, states) in open {
        text.push_str(&format!("{job}: {states:?}\n"));
        for task in states.keys() {
            let history = jobs.task_history(task).await.unwrap();
            let events = history.iter().map(|record| {
                let attempt = record.event.metadata().get(everbus_jobs::ATTEMPT);
                let kind = record.event.event_type();
                format!("{} {kind} {attempt:?}", record.position)
            });
            text.push_str(&format!("  {task}: {:?}\n", events.collect::<Vec<_>>()));
        }
    }
    for group in jobs.bus().groups().await.unwrap() {
        text.push_str(&format!("{}: {:?}\n", group.name, group.lag()));
    }
    text
}

async fn campaign(worker: &'static str, usual: u64) {
    let env = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    let count = env("EVERBUS_JOBS_CAMPAIGN").unwrap_or(usual);
    let seed = env("EVERBUS_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.unwrap().as_micros() as u64
    });
    println!("EVERBUS_SEED={seed}");
    let mut random = Random(seed);
    let directory = tempfile::tempdir().unwrap();
    let chosen = std::env::var("EVERBUS_JOBS_ENGINE");
    if let Some(url) = engine(chosen.as_deref().unwrap_or("file")) {
        std::fs::write(directory.path().join("url"), url).unwrap();
    }
    let jobs = open(directory.path()).await;
    let go = |role| start(role, directory.path(), seed, count);
    let mut processes = vec![
        go("producer"),
        go("dispatcher"),
        go(worker),
        go(worker),
        go("dispatcher"),
    ];
    let mut kills = BTreeMap::from([("producer", 0_usize), ("dispatcher", 0), (worker, 0)]);
    let begin = Instant::now();
    let mut progress = (BTreeMap::new(), begin);
    // Kills go on for a while and then stop, so that the end is reached on any machine.
    let killing = Duration::from_secs(10 + count / 4);
    loop {
        let pause = 50 + random.below(400);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let all = jobs
            .jobs(usize::try_from(count).unwrap() + 1)
            .await
            .unwrap();
        let producer = processes
            .iter_mut()
            .find(|process| process.role == "producer")
            .unwrap();
        let submitted = producer
            .child
            .try_wait()
            .unwrap()
            .is_some_and(|status| status.success());
        let mut open = BTreeMap::new();
        for row in &all {
            let status = jobs.job(&row.job_id).await.unwrap();
            if status.state == JobState::Running {
                open.insert(row.job_id.clone(), status.task_statuses);
            }
        }
        if submitted && all.len() as u64 == count && open.is_empty() {
            break;
        }
        if open != progress.0 || begin.elapsed() < killing {
            progress = (open, Instant::now());
        } else if progress.1.elapsed() > STUCK {
            panic!("seed {seed}: {}", stuck(&jobs, &progress.0).await);
        }
        if begin.elapsed() > killing {
            // Only what has ended by itself is started again.
            for process in &mut processes {
                let ended = process.child.try_wait().unwrap();
                if ended.is_some_and(|status| !(status.success() && process.role == "producer")) {
                    *process = start(process.role, directory.path(), seed, count);
                }
            }
            continue;
        }
        let victim = usize::try_from(random.below(processes.len() as u64)).unwrap();
        let role = processes[victim].role;
        if role == "producer" && submitted {
            continue;
        }
        *kills.get_mut(role).unwrap() += 1;
        let pid = processes[victim].child.id();
        processes[victim] = start(role, directory.path(), seed, count);
        until("the children of a killed worker have ended", async || {
            children_of(directory.path(), pid).is_empty()
        })
        .await;
    }
    // Events that were in flight when the last job ended.
    let completed = |n| jobs_completed(seed, n);
    let wanted = (0..count).filter(|n| completed(*n)).count();
    until("every end is told", async || {
        events_of::<JobCompleted>(&jobs).await.len() >= wanted
    })
    .await;
    // The store beside a broker may get the start of a task after its end.
    until("the store has all events", async || {
        let lag = everbus::archive_lag(jobs.bus().engine()).await.unwrap();
        lag.is_none_or(|lag| lag.unsettled() == 0)
    })
    .await;
    drop(processes);

    let mut started: BTreeMap<String, usize> = BTreeMap::new();
    for record in events_of::<TaskPending>(&jobs).await {
        let pending: TaskPending = record.event.json().unwrap();
        *started.entry(pending.request_id).or_default() += 1;
    }
    let mut finished: BTreeMap<String, usize> = BTreeMap::new();
    for record in events_of::<TaskCompleted>(&jobs).await {
        let done: TaskCompleted = record.event.json().unwrap();
        *finished.entry(done.request_id).or_default() += 1;
    }
    let mut total = 0;
    for n in 0..count {
        let (id, tasks) = random_job(seed, n);
        let model = model(&tasks);
        total += tasks.len();
        let status = jobs.job(&id).await.unwrap();
        assert_eq!(status.task_statuses, model, "seed {seed}, {id}");
        for (task, state) in &model {
            let starts = started.get(task).copied().unwrap_or(0);
            assert_eq!(
                starts,
                usize::from(state.is_some()),
                "seed {seed}: starts of {task}"
            );
            let ends = finished.get(task).copied().unwrap_or(0);
            let once = usize::from(*state == Some(TaskState::Completed));
            assert_eq!(ends, once, "seed {seed}: completions of {task}");
        }
    }
    assert_eq!(
        events_of::<JobCompleted>(&jobs).await.len(),
        wanted,
        "seed {seed}"
    );
    assert_eq!(
        events_of::<Work>(&jobs).await.len(),
        events_of::<TaskPending>(&jobs).await.len()
    );
    let ran = std::fs::read_to_string(directory.path().join("ran")).unwrap_or_default();
    let mut runs: BTreeMap<&str, usize> = BTreeMap::new();
    for line in ran.lines() {
        *runs.entry(line).or_default() += 1;
    }
    let again: usize = runs.values().map(|n| n - 1).sum();
    // A run is repeated only if its worker was killed while it had the task.
    let most = kills[worker] * CONCURRENCY;
    assert!(
        again <= most,
        "seed {seed}: {again} runs repeated, {kills:?}"
    );
    println!(
        "{count} jobs, {total} tasks, kills {kills:?}, {again} runs repeated because their worker was killed, {:?}",
        begin.elapsed()
    );
    assert_eq!(Work::TYPE, WORK);
    jobs.bus().shutdown().await.unwrap();
}

fn jobs_completed(seed: u64, n: u64) -> bool {
    let (_, tasks) = random_job(seed, n);
    model(&tasks)
        .values()
        .all(|state| *state == Some(TaskState::Completed))
}
