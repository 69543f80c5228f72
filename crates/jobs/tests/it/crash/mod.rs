//! Kills dispatcher, worker and producer during random jobs on one file, and compares the end with a model. The worker is a
//! handler, which is fast, or the real one with child processes. In one test workers stand still for longer than their
//! leases last.
//!
//! A short run is a part of every test run. `EVERBUS_JOBS_CAMPAIGN=200 cargo test -p everbus-jobs --test it crash --
//! --nocapture` runs 200 jobs of each kind. `EVERBUS_SEED` repeats one. With `--all-features` and `EVERBUS_JOBS_ENGINE=postgres`
//! it runs on PostgreSQL; with `nats`, `redis` or `kafka` on that broker with a file beside it, where no worker stands still.

mod account;
mod process;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use everbus::TypedEvent as _;
use everbus_jobs::events::{
    JobCompleted, Json, TaskCompleted, TaskPending, TaskState, TaskStatuses, Work,
};
use everbus_jobs::{JobState, Jobs, NewTask, WORK};
use rustix::process::Signal;

use self::account::{Account, KILLED, histories};
use self::process::{
    Process, children_of, engine, heartbeat, helper_at, helper_of, now, open, set_heartbeat,
};
use crate::random_jobs::{Random, model, random_job};
use crate::support::{events_of, until};

/// The campaign fails if no task begins or ends for this long after the last kill. On a broker an event may wait for the
/// leases of a killed worker (6 s), archive (15 s) and dispatcher (30 s), one after another.
const STUCK: Duration = Duration::from_secs(120);

// conformance: workflow/job-events: dispatcher, worker and producer are killed during random jobs; each job ends as a model says, no task is lost or started twice
// conformance: workflow/job-ids: a restarted dispatcher repeats its ids, so that nothing is started twice
#[tokio::test(flavor = "multi_thread")]
async fn killed_dispatchers_workers_and_producers_lose_and_double_nothing() {
    campaign("worker", 12, Harm::Kills).await;
}

// conformance: workflow/job-orphans: workers with real child processes are killed during random jobs; each job ends as a model says, and no child of a killed worker goes on
#[tokio::test(flavor = "multi_thread")]
async fn killed_workers_with_children_lose_and_double_nothing() {
    campaign("children", 4, Harm::Kills).await;
}

// conformance: workflow/task-lock: workers stand still for longer than their leases during random jobs; each job ends as a model says, and a run is repeated only after its lease was over
#[tokio::test(flavor = "multi_thread")]
async fn workers_that_stand_still_double_only_what_they_have_lost() {
    campaign("worker", 12, Harm::Pauses).await;
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
    let first = Process::start("children", path, 0, 0);
    let pid = first.pid();
    until("the child runs", async || children_of(path, pid).len() == 1).await;
    drop(first);
    // It would work for far longer than this waits.
    until("the child has ended", async || {
        children_of(path, pid).is_empty()
    })
    .await;
    std::fs::remove_file(path.join("long")).unwrap();
    let second = Process::start("children", path, 0, 0);
    until("the task has completed", async || {
        let task = jobs.task("req-1").await.unwrap().unwrap();
        task.state == Some(TaskState::Completed)
    })
    .await;
    assert_eq!(ran(path), ["req-1"], "only the second child ended");
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
    let worker = Process::start("children", path, 0, 0);
    until("the task has completed", async || {
        let task = jobs.task("req-1").await.unwrap().unwrap();
        task.state == Some(TaskState::Completed)
    })
    .await;
    let daemon = std::fs::read_to_string(path.join("daemon")).unwrap();
    let daemon: u32 = daemon.trim().parse().unwrap();
    let helper = helper_of(worker.pid()).expect("the worker has a helper");
    drop(worker);
    until("the helper has ended", async || helper_at(helper).is_none()).await;
    let command = std::fs::read_to_string(format!("/proc/{daemon}/cmdline")).unwrap_or_default();
    let pid = rustix::process::Pid::from_raw(i32::try_from(daemon).unwrap()).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    assert!(command.contains("sleep"), "the daemon was killed");
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/task-lock: a worker that stands still beyond its lease loses the task; the next one completes it, and the first kills its child and changes nothing
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_stands_still_loses_its_task() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let jobs = open(path).await;
    std::fs::write(path.join("long"), "").unwrap();
    set_heartbeat(path, Duration::from_millis(500));
    let task = NewTask::new("long", Json::empty()).id("req-1");
    jobs.submit(task).await.unwrap();
    let first = Process::start("children", path, 0, 0);
    let pid = first.pid();
    until("the first child runs", async || {
        let task = jobs.task("req-1").await.unwrap().unwrap();
        task.state == Some(TaskState::Processing) && children_of(path, pid).len() == 1
    })
    .await;
    loop {
        first.signal(Signal::STOP);
        // It must not hold the lock of the file while it stands still.
        let written = jobs.bus().publish(("still.there", 1));
        if let Ok(Ok(_)) = tokio::time::timeout(Duration::from_secs(2), written.into_future()).await
        {
            break;
        }
        first.signal(Signal::CONT);
    }
    std::fs::remove_file(path.join("long")).unwrap();
    let second = Process::start("children", path, 0, 0);
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
    first.signal(Signal::CONT);
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
    let first_did_not_end = ran(path) == ["req-1", "req-2"];
    assert!(first_did_not_end, "{:?}", ran(path));
    assert_eq!(events_of::<TaskCompleted>(&jobs).await.len(), 2);
    jobs.bus().shutdown().await.unwrap();
}

/// The tasks whose children came to their end, in this order.
fn ran(directory: &Path) -> Vec<String> {
    let ran = std::fs::read_to_string(directory.join("ran")).unwrap();
    let words = ran.lines().map(|line| line.split(' ').next());
    words.map(|word| word.unwrap().to_owned()).collect()
}

/// What is done to the processes of a campaign.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Harm {
    /// They are killed.
    Kills,
    /// They are killed, or a worker stands still for longer than its leases last.
    Pauses,
}

/// The heartbeat of workers that stand still.
const SHORT_HEARTBEAT: Duration = Duration::from_millis(300);

/// What is known of the jobs that have not ended.
async fn stuck(jobs: &Jobs, open: &BTreeMap<String, TaskStatuses>) -> String {
    let mut text = format!("{} jobs have not ended\n", open.len());
    for (job, states) in open {
        text.push_str(&format!("{job}: {states:?}\n"));
        text.push_str(&histories(jobs, states.keys()).await);
    }
    for group in jobs.bus().groups().await.unwrap() {
        text.push_str(&format!("{}: {:?}\n", group.name, group.lag()));
    }
    text
}

async fn campaign(worker: &'static str, usual: u64, harm: Harm) {
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
    // Beside a broker, a worker that stands still may hold the lock of the store's file. Then the leases of the other
    // workers end before their runs begin, and no event tells that.
    let is_beside = jobs.bus().engine().background.is_some();
    let harm = if is_beside { Harm::Kills } else { harm };
    if harm == Harm::Pauses {
        set_heartbeat(directory.path(), SHORT_HEARTBEAT);
    }
    let go = |role| Process::start(role, directory.path(), seed, count);
    let mut account = Account::new(directory.path());
    let mut processes = vec![
        go("producer"),
        go("dispatcher"),
        go(worker),
        go(worker),
        go("dispatcher"),
    ];
    let mut kills = BTreeMap::from([("producer", 0_usize), ("dispatcher", 0), (worker, 0)]);
    let mut pauses = 0;
    let mut seen = now();
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
        let submitted = producer.ended().is_some_and(|status| status.success());
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
        for process in &mut processes {
            let ended = process.ended();
            if let Some(status) = ended
                && !(status.success() && process.role == "producer")
            {
                account.ended(process.role, process.pid(), seen, status.to_string());
                *process = go(process.role);
            }
        }
        seen = now();
        if begin.elapsed() > killing {
            continue;
        }
        let victim = usize::try_from(random.below(processes.len() as u64)).unwrap();
        let role = processes[victim].role;
        if role == "producer" && submitted {
            continue;
        }
        if role == worker && harm == Harm::Pauses {
            pauses += 1;
            let lease = 3 * heartbeat(directory.path());
            let pause = lease + Duration::from_millis(random.below(1000));
            processes[victim].signal(Signal::STOP);
            tokio::time::sleep(pause).await;
            processes[victim].signal(Signal::CONT);
            continue;
        }
        *kills.get_mut(role).unwrap() += 1;
        let pid = processes[victim].pid();
        let next = go(role);
        account.ended(role, pid, now(), KILLED.to_owned());
        processes[victim] = next;
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
    let repeated = account.repeated(&jobs, seed).await;
    println!(
        "{count} jobs, {total} tasks, kills {kills:?}, {pauses} pauses, runs repeated because {repeated:?}, {:?}",
        begin.elapsed()
    );
    print!("{}", account.ended_by_themselves());
    assert_eq!(Work::TYPE, WORK);
    jobs.bus().shutdown().await.unwrap();
}

fn jobs_completed(seed: u64, n: u64) -> bool {
    let (_, tasks) = random_job(seed, n);
    model(&tasks)
        .values()
        .all(|state| *state == Some(TaskState::Completed))
}
