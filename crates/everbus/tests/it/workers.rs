//! A program that runs as several processes: this test binary, started again.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use everbus::{Bus, Json, workers};

use crate::support::PATIENCE;

/// The folder of a test, for the processes that it starts.
const FOLDER: &str = "EVERBUS_TEST_WORKERS";
/// Set if the workers fail at once.
const BROKEN: &str = "EVERBUS_TEST_BROKEN";
const COUNT: usize = 3;

/// The program under test. In a usual run of the tests it does nothing.
#[test]
fn the_program() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let broken = std::env::var_os(BROKEN).is_some();
    let code = runtime.block_on(workers::run(COUNT, async |worker| {
        if broken {
            std::fs::write(folder.join(format!("worker-{}", std::process::id())), "")?;
            return Err("broken".into());
        }
        let bus = open(&folder).await;
        let pid = std::process::id();
        let path = folder.join(format!("worker-{pid}"));
        let mut notes = std::fs::File::create(path)?;
        writeln!(notes, "number {}", worker.number())?;
        let notes = std::sync::Arc::new(notes);
        let handler = move |Json(n): Json<u64>| {
            let written = writeln!(&mut &*notes, "handled {n}");
            async move {
                // Slow enough that one process does not do it all.
                tokio::time::sleep(Duration::from_millis(2)).await;
                written
            }
        };
        let subscribe = bus.subscribe("a.b").group("g").name("h").concurrency(1);
        subscribe.handler(handler).await?;
        bus.start().await?;
        worker.stopping().await;
        bus.shutdown().await?;
        std::fs::write(folder.join(format!("ended-{pid}")), "")?;
        Ok(())
    }));
    // The test harness would turn this into a code of its own.
    std::process::exit(i32::from(code != ExitCode::SUCCESS));
}

async fn open(folder: &Path) -> Bus {
    let url = folder.join("bus.db").display().to_string();
    // Few at a time, so that there is something for each process.
    Bus::builder().prefetch(4).open(url).await.unwrap()
}

/// A running program with its workers.
struct Program {
    folder: tempfile::TempDir,
    parent: Child,
}

impl Program {
    fn start() -> Self {
        Self::start_with(|_| {})
    }

    fn start_with(change: impl FnOnce(&mut Command)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["workers::the_program", "--exact", "--nocapture"]);
        command
            .env(FOLDER, folder.path())
            .env_remove(workers::WORKER);
        change(&mut command);
        let parent = command.spawn().unwrap();
        Self { folder, parent }
    }

    fn files(&self, prefix: &str) -> Vec<(u32, String)> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let files = entries.filter_map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name()?.to_str()?.to_owned();
            let pid = name.strip_prefix(prefix)?.parse().ok()?;
            Some((pid, std::fs::read_to_string(&path).ok()?))
        });
        files.collect()
    }

    /// The workers that were started, by their process ids.
    fn workers(&self) -> BTreeSet<u32> {
        self.files("worker-")
            .into_iter()
            .map(|(pid, _)| pid)
            .collect()
    }

    fn handled(&self) -> BTreeSet<u64> {
        let files = self.files("worker-");
        let lines = files.iter().flat_map(|(_, text)| text.lines());
        let numbers = lines.filter_map(|line| line.strip_prefix("handled ")?.parse().ok());
        numbers.collect()
    }

    async fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let wait = async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        assert!(
            tokio::time::timeout(PATIENCE, wait).await.is_ok(),
            "never: {what}"
        );
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.parent.kill();
        let _ = self.parent.wait();
    }
}

fn send(pid: u32, signal: &str) {
    let kill = Command::new("kill")
        .args([signal, &pid.to_string()])
        .status();
    assert!(kill.unwrap().success());
}

fn is_running(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    // A zombie has ended.
    status.is_ok_and(|stat| !stat.contains(") Z "))
}

// conformance: engines/workers: a program runs as several processes that share its groups; one that is killed is started again, SIGTERM lets all of them finish, and the exit code says whether they did
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_share_the_work_are_started_again_and_end_together() {
    let mut program = Program::start();
    let bus = open(program.folder.path()).await;
    program
        .until("all workers run", || program.workers().len() == COUNT)
        .await;
    while bus.groups().await.unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let publish = |range: std::ops::Range<u64>| bus.publish_batch(range.map(|n| ("a.b", n)));
    publish(0..200).await.unwrap();
    program
        .until("all are handled", || program.handled().len() == 200)
        .await;
    let busy = program.files("worker-");
    let busy = busy
        .iter()
        .filter(|(_, text)| text.contains("handled"))
        .count();
    assert!(busy > 1, "one process did all of it");

    let victim = *program.workers().iter().next().unwrap();
    send(victim, "-KILL");
    program
        .until("another one takes its place", || {
            program.workers().len() == COUNT + 1
        })
        .await;
    publish(200..300).await.unwrap();
    program
        .until("all are handled", || program.handled().len() == 300)
        .await;
    let numbers: BTreeSet<String> = program
        .files("worker-")
        .iter()
        .filter_map(|(_, text)| text.lines().next().map(str::to_owned))
        .collect();
    assert_eq!(
        numbers.len(),
        COUNT,
        "the new one has the number of the old one"
    );

    send(program.parent.id(), "-TERM");
    let status = tokio::task::block_in_place(|| program.parent.wait().unwrap());
    assert!(status.success(), "{status}");
    let ended: BTreeSet<u32> = program
        .files("ended-")
        .into_iter()
        .map(|(pid, _)| pid)
        .collect();
    assert_eq!(ended.len(), COUNT, "each has shut its bus down");
    assert!(program.workers().iter().all(|pid| !is_running(*pid)));
    bus.shutdown().await.unwrap();
}

// conformance: engines/workers-orphaned: workers stop when their parent is killed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_stop_when_their_parent_is_killed() {
    let mut program = Program::start();
    program
        .until("all workers run", || program.workers().len() == COUNT)
        .await;
    assert!(program.files("ended-").is_empty(), "they run");
    send(program.parent.id(), "-KILL");
    tokio::task::block_in_place(|| program.parent.wait().unwrap());
    program
        .until("they end", || {
            program.workers().iter().all(|pid| !is_running(*pid))
        })
        .await;
    assert_eq!(program.files("ended-").len(), COUNT, "in good order");
}

// conformance: engines/workers: a program whose workers have failed when it is stopped exits with 1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_between_two_starts_does_not_hide_the_failure() {
    let mut program = Program::start_with(|command| _ = command.env(BROKEN, "1"));
    program
        .until("all workers have failed", || {
            let workers = program.workers();
            workers.len() >= COUNT && workers.iter().all(|pid| !is_running(*pid))
        })
        .await;
    send(program.parent.id(), "-TERM");
    let status = tokio::task::block_in_place(|| program.parent.wait().unwrap());
    assert_eq!(status.code(), Some(1), "{status}");
}
