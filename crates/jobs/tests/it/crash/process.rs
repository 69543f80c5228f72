//! The processes of a campaign: dispatcher, worker and producer. Each is this test binary with a role.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use everbus::Bus;
use everbus_jobs::events::{ErrorCategory, Json};
use everbus_jobs::worker::child::ChildCommand;
use everbus_jobs::{Dispatcher, Jobs, Task, TaskError, Worker};
use rustix::process::{Pid, Signal, kill_process};

use crate::random_jobs::random_job;
use crate::support::job;

/// How many tasks a worker runs at once.
const CONCURRENCY: usize = 4;
/// The heartbeat of a worker, unless the file `heartbeat` has another one. A broker notices by its lease that a worker
/// died, which lasts for three of them.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// The child of a task: says who it is, works for a moment, and says that it has come to its end. The file `long` makes
/// it work for a quarter of an hour.
const CHILD: &str = r#"
if [ -e long ]; then nap=900; else nap=0.02; fi
echo "$EVERBUS_REQUEST_ID $$ $PPID" >> begun
begun=$(date +%s%3N)
input=$(cat)
sleep $nap
if [ -e daemon ]; then
  setsid sleep 900 <&- >&- 2>&- &
  while [ "$(cut -d' ' -f6 /proc/$!/stat)" != $! ]; do sleep 0.01; done
  echo $! > daemon
fi
case $input in *'"fail":true'*) exit 65 ;; esac
echo "$EVERBUS_REQUEST_ID $PPID $EVERBUS_ATTEMPT $begun $(date +%s%3N)" >> ran
echo '{}'
"#;

pub(super) async fn open(directory: &Path) -> Jobs {
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
pub(super) fn engine(name: &str) -> Option<String> {
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

/// Sets the heartbeat of the workers that are started from now on.
pub(super) fn set_heartbeat(directory: &Path, heartbeat: Duration) {
    std::fs::write(
        directory.join("heartbeat"),
        heartbeat.as_millis().to_string(),
    )
    .unwrap();
}

pub(super) fn heartbeat(directory: &Path) -> Duration {
    let set = std::fs::read_to_string(directory.join("heartbeat"));
    set.map_or(HEARTBEAT, |text| {
        Duration::from_millis(text.parse().unwrap())
    })
}

/// Milliseconds since 1970.
pub(super) fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(now.as_millis()).unwrap()
}

/// One of the processes that are killed. It is no test by itself.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the crash harness"]
async fn crash_process() {
    let Ok(role) = std::env::var("EVERBUS_JOBS_ROLE") else {
        return;
    };
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
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
            return;
        }
        "dispatcher" => {
            Dispatcher::subscribe(&jobs).await.unwrap();
        }
        _ => {
            let worker = Worker::new(jobs.clone())
                .concurrency(CONCURRENCY)
                .heartbeat(heartbeat(&directory))
                .retry(everbus::RetryPolicy::default().max_retries(10_000));
            let worker = match role.as_str() {
                "children" => worker.command(
                    ChildCommand::new("sh")
                        .args([OsString::from("-c"), CHILD.into()])
                        .directory(&directory),
                ),
                _ => worker.any(function(directory.join("ran"))),
            };
            worker.mount().await.unwrap();
        }
    }
    jobs.bus().start().await.unwrap();
    std::future::pending::<()>().await;
}

/// The function of a task: works for a moment, and says that it has come to its end.
fn function(
    ran: PathBuf,
) -> impl Fn(Task) -> futures_util::future::BoxFuture<'static, Result<Json, TaskError>> {
    move |task: Task| {
        let ran = ran.clone();
        Box::pin(async move {
            let begun = now();
            tokio::time::sleep(Duration::from_millis(1)).await;
            // A run to its end, whether or not it is acknowledged. One write: other processes write to the file too.
            let line = format!(
                "{} {} {} {begun} {}\n",
                task.request_id,
                std::process::id(),
                task.attempt,
                now()
            );
            let mut file = File::options().create(true).append(true).open(ran)?;
            file.write_all(line.as_bytes())?;
            if task.input.get().contains("true") {
                let error = "it was asked to";
                return Err(TaskError::new(ErrorCategory::Validation, error));
            }
            Ok(Json::empty())
        })
    }
}

/// A process that runs. Dropping it kills it.
pub(super) struct Process {
    pub(super) role: &'static str,
    pub(super) child: Child,
}

impl Process {
    /// Its log is a file with its process id.
    pub(super) fn start(role: &'static str, directory: &Path, seed: u64, count: u64) -> Self {
        let log = tempfile::NamedTempFile::new_in(directory).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--ignored",
                "--exact",
                "crash::process::crash_process",
                "--nocapture",
            ])
            .env("EVERBUS_JOBS_ROLE", role)
            .env("EVERBUS_JOBS_DIR", directory)
            .env("EVERBUS_JOBS_SEED", seed.to_string())
            .env("EVERBUS_JOBS_COUNT", count.to_string())
            .stdout(Stdio::null())
            .stderr(log.reopen().unwrap())
            .spawn()
            .unwrap();
        log.persist(log_of(directory, child.id())).unwrap();
        Self { role, child }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.pid()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The file with the log of a process.
pub(super) fn log_of(directory: &Path, pid: u32) -> PathBuf {
    directory.join(format!("log-{pid}"))
}

/// The children of a worker that run: tasks and process ids.
pub(super) fn children_of(directory: &Path, worker: u32) -> Vec<(String, u32)> {
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

/// The process that kills the children of a worker.
pub(super) fn helper_of(worker: u32) -> Option<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| helper_at(*pid) == Some(worker))
}

/// The parent of a process, if it is such a helper.
pub(super) fn helper_at(pid: u32) -> Option<u32> {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
    let stat = read("stat").ok()?;
    let mut words = stat.rsplit_once(") ")?.1.split(' ').skip(1);
    let parent = words.next()?.parse().ok()?;
    let is_helper = read("cmdline").is_ok_and(|command| command.contains("everbus-orphans"));
    is_helper.then_some(parent)
}
