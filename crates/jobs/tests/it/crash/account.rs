//! The account of a campaign: the runs of each task that came to their end, and why a run was repeated.
//!
//! A run may be repeated only after its worker has lost the lease: the worker has ended, or its lease was over.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use everbus::core::FailureKind;
use everbus::{GroupState, Recorded, Timestamp, TypedEvent as _};
use everbus_jobs::events::{
    TaskCompleted, TaskFailed, TaskHeartbeat, TaskStarted, TaskTimeout, Work,
};
use everbus_jobs::{ATTEMPT, Jobs, WORKERS};
use serde_json::Value;

use super::process::{heartbeat, log_of};
use crate::support::events_of;

/// A run of a task that came to its end, whether or not it was acknowledged.
#[derive(Clone, Debug)]
struct Run {
    /// The process id of its worker.
    worker: u32,
    attempt: u32,
    begun: u64,
    ended: u64,
}

/// The end of a process. It lived at this time, and ended then or later.
#[derive(Debug)]
struct Gone {
    role: &'static str,
    pid: u32,
    at: u64,
    how: String,
}

/// Why a worker has lost a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lost {
    /// The worker has ended.
    WorkerEnded,
    /// On a broker: the lease was over by the last `effectiveUntil` of the worker.
    EffectiveUntil,
    /// The engine took the lease from a worker that lives, and not before it was over.
    Engine,
}

/// What a campaign knows besides the events.
pub(super) struct Account {
    directory: PathBuf,
    gone: Vec<Gone>,
}

impl Account {
    pub(super) fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            gone: Vec::new(),
        }
    }

    /// A process that lived at this time has ended since.
    pub(super) fn ended(&mut self, role: &'static str, pid: u32, at: u64, how: String) {
        self.gone.push(Gone { role, pid, at, how });
    }

    /// How many repeated runs there are, by the reason for which the earlier worker had lost its lease. Fails with the
    /// whole history of each task of which a run was repeated without such a reason.
    pub(super) async fn repeated(&self, jobs: &Jobs, seed: u64) -> BTreeMap<Lost, usize> {
        let works = works(jobs).await;
        let ran = std::fs::read_to_string(self.directory.join("ran")).unwrap_or_default();
        let mut runs: BTreeMap<&str, Vec<Run>> = BTreeMap::new();
        for line in ran.lines() {
            let (task, run) = parse(line).unwrap_or_else(|| panic!("seed {seed}: {line:?}"));
            assert!(works.contains_key(task), "seed {seed}: {line:?}");
            runs.entry(task).or_default().push(run);
        }
        let (mut lost, mut faults) = (BTreeMap::new(), String::new());
        for (task, runs) in &mut runs {
            if runs.len() < 2 {
                continue;
            }
            let history = History::of(jobs, task, works[*task].clone()).await;
            // A worker that stands still may begin its run after the next worker. Brokers do not count such attempts.
            runs.sort_by_key(|run| match history.is_one_log {
                true => (run.attempt, run.begun),
                false => (0, run.begun),
            });
            let mut fault = |what: String| {
                faults.push_str(&what);
                faults.push_str(&self.story(&history, runs));
            };
            for pair in runs.windows(2) {
                let (earlier, later) = (&pair[0], &pair[1]);
                match self.lost(&history, earlier, later) {
                    Some(why) => *lost.entry(why).or_default() += 1,
                    None => fault(format!(
                        "worker {} has not lost {task}, and worker {} runs it again\n",
                        earlier.worker, later.worker
                    )),
                }
            }
            // In one log the end of a run and its ack are one step: there is no attempt after it.
            let last = runs.last().map(|run| run.worker);
            if history.is_one_log && history.ended_by() != last {
                fault(format!("{task} ran again after its end\n"));
            }
        }
        assert!(faults.is_empty(), "seed {seed}: {faults}");
        lost
    }

    /// Why the worker of a run had lost its lease when a later run began.
    fn lost(&self, history: &History, earlier: &Run, later: &Run) -> Option<Lost> {
        let has_ended = |gone: &Gone| gone.pid == earlier.worker && gone.at <= later.begun;
        if self.gone.iter().any(has_ended) {
            return Some(Lost::WorkerEnded);
        }
        if !history.is_one_log {
            let upto = earlier.ended.min(later.begun - 1);
            let until = history.effective_until(earlier.worker, upto)?;
            return (until <= later.begun).then_some(Lost::EffectiveUntil);
        }
        // The lease begins when the worker takes the task, which is before its start is published. It cannot begin
        // before the work is there, or before the lease before it was over.
        let mut begins = millis(history.work.received_at);
        let lease = u64::try_from((3 * heartbeat(&self.directory)).as_millis()).unwrap();
        for (attempt, over) in history.crashes() {
            if attempt == earlier.attempt && over <= later.begun && over >= begins + lease {
                return Some(Lost::Engine);
            }
            begins = over;
        }
        None
    }

    /// Everything that is known of a task.
    fn story(&self, history: &History, runs: &[Run]) -> String {
        let begin = millis(history.work.received_at);
        let mut lines: Vec<(u64, String)> = Vec::new();
        for record in history.events.iter().chain([&history.work]) {
            lines.push((millis(record.received_at), told(record)));
        }
        for run in runs {
            let Run {
                worker, attempt, ..
            } = run;
            let what = format!("run of worker {worker} begins, attempt {attempt}");
            lines.push((run.begun, what));
            lines.push((run.ended, format!("run of worker {worker} ends")));
        }
        for gone in &self.gone {
            let Gone { role, pid, how, .. } = gone;
            lines.push((gone.at, format!("{role} {pid}: {how}")));
        }
        lines.sort();
        let mut text = String::new();
        for (at, line) in lines {
            let at = i128::from(at) - i128::from(begin);
            text.push_str(&format!("  {at:>8} ms  {line}\n"));
        }
        text.push_str(&format!("  the engine: {:?}\n", history.state));
        let mut workers: Vec<u32> = runs.iter().map(|run| run.worker).collect();
        workers.sort_unstable();
        workers.dedup();
        for worker in workers {
            text.push_str(&format!("  the log of worker {worker}:\n"));
            text.push_str(&self.log(worker));
        }
        text
    }

    /// The log of a process, each line indented.
    fn log(&self, pid: u32) -> String {
        let log = std::fs::read_to_string(log_of(&self.directory, pid)).unwrap_or_default();
        let lines = log.lines().map(|line| format!("    {line}\n"));
        lines.collect()
    }

    /// The processes that ended although they were not killed, with their logs.
    pub(super) fn ended_by_themselves(&self) -> String {
        let gone = self.gone.iter().filter(|gone| gone.how != KILLED);
        let told = gone.map(|gone| {
            let Gone { role, pid, how, .. } = gone;
            format!("{role} {pid}: {how}\n{}", self.log(*pid))
        });
        told.collect()
    }
}

/// How a process ended that the campaign has killed.
pub(super) const KILLED: &str = "killed";

/// The work message of each task.
async fn works(jobs: &Jobs) -> BTreeMap<String, std::sync::Arc<Recorded>> {
    let works = events_of::<Work>(jobs).await.into_iter();
    works
        .map(|record| (record.event.json::<Work>().unwrap().request_id, record))
        .collect()
}

/// Reads a line of the file in which each run leaves its end.
fn parse(line: &str) -> Option<(&str, Run)> {
    let words: Vec<&str> = line.split(' ').collect();
    let [task, worker, attempt, begun, ended] = words.try_into().ok()?;
    let run = Run {
        worker: worker.parse().ok()?,
        attempt: attempt.parse().ok()?,
        begun: begun.parse().ok()?,
        ended: ended.parse().ok()?,
    };
    Some((task, run))
}

/// What the store knows of a task.
struct History {
    events: Vec<std::sync::Arc<Recorded>>,
    work: std::sync::Arc<Recorded>,
    /// Whether the events are in the log that moves them: not in a store beside a broker.
    is_one_log: bool,
    /// The state of the work in the group of the workers. A store beside a broker does not know it.
    state: Option<GroupState>,
}

impl History {
    async fn of(jobs: &Jobs, task: &str, work: std::sync::Arc<Recorded>) -> Self {
        let states = jobs.bus().lookup().unwrap().states(work.position).await;
        let mut states = states.unwrap_or_default().into_iter();
        Self {
            events: jobs.task_history(task).await.unwrap(),
            work,
            is_one_log: jobs.bus().engine().background.is_none(),
            state: states.find(|state| state.group.as_str() == WORKERS),
        }
    }

    /// The end of the lock that a worker published last, up to a time.
    fn effective_until(&self, worker: u32, upto: u64) -> Option<u64> {
        let ours = self.events.iter().filter(|record| {
            let event = &record.event;
            [TaskStarted::TYPE, TaskHeartbeat::TYPE].contains(&event.event_type())
                && millis(event.occurred_at()) <= upto
        });
        let locks = ours.filter_map(|record| {
            let properties = record.event.json::<Value>().unwrap();
            let id = properties["workerId"].as_str()?;
            let is_his = id.ends_with(&format!("-{worker}"));
            is_his.then(|| properties["effectiveUntil"].as_u64())?
        });
        locks.max().map(|seconds| seconds * 1000)
    }

    /// The worker that ended the task.
    fn ended_by(&self) -> Option<u32> {
        let ends = [TaskCompleted::TYPE, TaskFailed::TYPE, TaskTimeout::TYPE];
        let mut events = self.events.iter().rev();
        let end = events.find(|record| ends.contains(&record.event.event_type()))?;
        let context: Value = serde_json::from_str(end.event.metadata().get("context")?).ok()?;
        let worker = context["workerId"].as_str()?.rsplit_once('-')?.1;
        worker.parse().ok()
    }

    /// The attempts whose worker died, or whose lease was over, and when the engine noticed.
    fn crashes(&self) -> Vec<(u32, u64)> {
        let failures = self.state.iter().flat_map(|state| &state.failures);
        let crashes = failures.filter(|failure| failure.kind == FailureKind::Crash);
        crashes
            .map(|failure| (failure.attempt, millis(failure.at)))
            .collect()
    }
}

fn told(record: &Recorded) -> String {
    let event = &record.event;
    let attempt = event.metadata().get(ATTEMPT);
    let payload = String::from_utf8_lossy(event.payload());
    format!(
        "{} {} {attempt:?} {payload}",
        record.position,
        event.event_type()
    )
}

/// The histories of some tasks, for a campaign that stands still.
pub(super) async fn histories(jobs: &Jobs, tasks: impl Iterator<Item = &String>) -> String {
    let mut text = String::new();
    for task in tasks {
        text.push_str(&format!("  {task}:\n"));
        for record in jobs.task_history(task).await.unwrap() {
            text.push_str(&format!("    {}\n", told(&record)));
        }
    }
    text
}

fn millis(time: Timestamp) -> u64 {
    u64::try_from(Duration::from_micros(u64::try_from(time.as_micros()).unwrap()).as_millis())
        .unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_two_runs_is_no_line() {
        assert!(parse("job-1.2 17 1 5 6").is_some());
        assert!(parse("job-1.2 17 1 5 6job-1.3 18 1 5 6").is_none());
        assert!(parse("").is_none());
    }
}
