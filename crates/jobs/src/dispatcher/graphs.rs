//! The graphs of running jobs in memory, with the states of their tasks. They are kept up to date from the log.

use std::collections::HashMap;
use std::time::Duration;

use everbus::{
    Cursor, Event, EventId, Pattern, Position, Recorded, Result, Timestamp, TypedEvent as _,
};
use serde::Deserialize;

use crate::DEFAULT_TENANT;
use crate::events::{JobCompleted, JobTasksAdded, TaskCompleted, TaskState, TaskStatuses};
use crate::graph::Graph;
use crate::handle::{Jobs, is_copy, readable};
use crate::query::load_graph;
use crate::state::{Fold, Kind, Note};
use crate::work::Output;

/// If the graphs in memory have more tasks than this, the least recently used graphs are dropped.
const MOST_TASKS: usize = 200_000;
/// Larger outputs, in bytes, are not kept: they are read from the history when a dependent task starts.
const KEPT_OUTPUT: usize = 1024;
/// The graph of a completed job is dropped after this many uses of other graphs.
const KEPT_USES: u64 = 10_000;
/// Events per read.
const BATCH: usize = 2_000;

/// The graph of a job, and the state of each task.
#[derive(Debug)]
pub(super) struct JobGraph {
    pub(super) id: String,
    pub(super) created_at: Timestamp,
    pub(super) graph: Graph,
    pub(super) nodes: Vec<Node>,
    /// How many tasks have completed.
    completed: usize,
    /// The number of tasks for which `Job Completed` was seen in the log.
    told: usize,
    /// The place in the log of the newest failure that was applied; 0 if there is none.
    pub(super) last_failed: u64,
    /// The place in the log of the newest `Task Completed` that was applied; 0 if there is none.
    last_completed: u64,
    used: u64,
}

/// A task in memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    pub(super) fold: Fold,
    /// The place in the log of the last event that was applied.
    place: u64,
    /// The place of the `Task Completed` that counts; 0 if the task has not completed.
    completed_at: u64,
    /// The number of parents that have not completed.
    waits_for: usize,
    /// The output of a completed task. `None`: it must be read from the history.
    pub(super) output: Option<(Output, EventId)>,
}

impl JobGraph {
    fn new(id: String, created_at: Timestamp, graph: Graph, states: &[(Fold, u64)]) -> Self {
        let mut this = Self {
            nodes: Vec::new(),
            completed: 0,
            told: 0,
            last_failed: 0,
            last_completed: 0,
            id,
            created_at,
            graph,
            used: 0,
        };
        this.add_nodes(states);
        this
    }

    /// Adds nodes for the tasks of the graph that have none.
    fn add_nodes(&mut self, states: &[(Fold, u64)]) {
        let first = self.nodes.len();
        for number in first..self.graph.len() {
            let (fold, place) = states.get(number).copied().unwrap_or_default();
            let completed_at = match fold.state {
                // The index keeps the place of the last event that counted: here the `Task Completed`.
                Some(TaskState::Completed) => place,
                _ => 0,
            };
            self.completed += usize::from(fold.state == Some(TaskState::Completed));
            self.last_completed = self.last_completed.max(completed_at);
            if fold.state == Some(TaskState::Failed) && !fold.cancelled {
                self.last_failed = self.last_failed.max(place);
            }
            self.nodes.push(Node {
                fold,
                place,
                completed_at,
                ..Node::default()
            });
        }
        for number in first..self.graph.len() {
            let parents = self.graph.parents(number).iter();
            let open = parents.filter(|p| !self.has_completed(**p)).count();
            self.nodes[number].waits_for = open;
        }
    }

    fn has_completed(&self, number: usize) -> bool {
        self.nodes[number].fold.state == Some(TaskState::Completed)
    }

    /// Whether a task has not begun and all its parents have completed.
    pub(super) fn can_start(&self, number: usize) -> bool {
        let node = &self.nodes[number];
        node.waits_for == 0 && node.fold.state.is_none()
    }

    /// Whether the `Task Completed` at this place starts a task. Of several parents, the one that is last in the log
    /// starts it. The events of the others may be handled later, and must not start the task again.
    pub(super) fn is_started_by(&self, number: usize, place: u64) -> bool {
        let mut parents = self.graph.parents(number).iter();
        self.can_start(number) && parents.all(|p| self.nodes[*p].completed_at <= place)
    }

    /// Whether the `Task Completed` at this place completes the job, and `Job Completed` is not in the log yet.
    pub(super) fn is_to_be_told(&self, place: u64) -> bool {
        self.completed == self.graph.len()
            && self.told != self.graph.len()
            && self.last_completed <= place
    }

    fn is_over(&self) -> bool {
        self.completed == self.graph.len() && self.told == self.graph.len()
    }

    pub(super) fn statuses(&self) -> TaskStatuses {
        let tasks = self.graph.tasks().iter().zip(&self.nodes);
        tasks
            .map(|(task, node)| (task.task_id.clone(), node.fold.state))
            .collect()
    }

    fn apply(&mut self, note: &Note, event: &Event) {
        let Some(number) = self.graph.number(&note.task) else {
            return;
        };
        let node = &mut self.nodes[number];
        if note.place <= node.place {
            return;
        }
        node.place = note.place;
        let was = node.fold.state == Some(TaskState::Completed);
        let had_failed = node.fold.state == Some(TaskState::Failed);
        if !node.fold.apply(note) {
            return;
        }
        if matches!(note.kind, Kind::Failed | Kind::Timeout) && !note.cancels {
            self.last_failed = note.place;
        } else if had_failed {
            // This may have been the newest failure. With 0, every remaining failure is reported when its event is
            // handled.
            self.last_failed = 0;
        }
        let is = node.fold.state == Some(TaskState::Completed);
        node.completed_at = 0;
        if is {
            node.output = output(event);
            node.completed_at = note.place;
            self.last_completed = note.place;
        }
        if was == is {
            return;
        }
        self.completed = if is {
            self.completed + 1
        } else {
            self.completed - 1
        };
        for child in self.graph.children(number) {
            let waits_for = &mut self.nodes[*child].waits_for;
            *waits_for = if is { *waits_for - 1 } else { *waits_for + 1 };
        }
    }
}

fn output(event: &Event) -> Option<(Output, EventId)> {
    if event.overflow().is_some() {
        return Some((Output::Large(event.id()), event.id()));
    }
    let completed: TaskCompleted = event.json().ok()?;
    let small = completed.output.get().len() <= KEPT_OUTPUT;
    small.then(|| (Output::of(&completed.output, event.id()), event.id()))
}

/// The part of `Job Completed` that a graph needs.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Told {
    total_tasks: usize,
}

/// The graphs of recently used jobs.
#[derive(Debug)]
pub(super) struct Graphs {
    jobs: Jobs,
    cursor: Cursor,
    /// The graphs by tenant and job.
    by_job: HashMap<(String, String), JobGraph>,
    tasks: usize,
    uses: u64,
}

impl Graphs {
    pub(super) fn new(jobs: &Jobs) -> Self {
        Self {
            jobs: jobs.clone(),
            cursor: Cursor::START,
            by_job: HashMap::new(),
            tasks: 0,
            uses: 0,
        }
    }

    /// Applies all events up to this position, and perhaps later ones.
    pub(super) async fn catch_up(&mut self, position: Position) -> Result<()> {
        if self.by_job.is_empty() {
            // No graph has to be kept up to date. A graph that is loaded later has all events of that moment.
            self.cursor.advance(position);
            return Ok(());
        }
        let bus = self.jobs.bus().clone();
        let log = bus.log()?;
        let patterns = patterns()?;
        while !self.cursor.covers(position) {
            let (records, next) = log
                .read(self.cursor.clone(), patterns.clone(), BATCH)
                .await?;
            if records.is_empty() && next == self.cursor {
                // The next events are not visible yet: another process has an open transaction.
                tokio::time::sleep(Duration::from_millis(2)).await;
                continue;
            }
            for record in &records {
                let record = readable(&bus, record).await?;
                self.apply(&record);
            }
            self.cursor = next;
        }
        Ok(())
    }

    fn apply(&mut self, record: &Recorded) {
        let event = &record.event;
        if is_copy(event) {
            return;
        }
        let tenant = event.tenant().unwrap_or(DEFAULT_TENANT);
        if event.event_type() == JobTasksAdded::TYPE {
            // The index decides whether the tasks are added. The graph is loaded again with the next event.
            let job = event.attributes().and_then(|a| a.entity.as_ref());
            if let Some(job) = job.map(|entity| entity.id.clone()) {
                let tenant = tenant.to_owned();
                self.forget(&tenant, &job);
            }
            return;
        }
        if event.event_type() == JobCompleted::TYPE {
            let job = event.attributes().and_then(|a| a.entity.as_ref());
            let key = job.map(|entity| (tenant.to_owned(), entity.id.clone()));
            if let Some(graph) = key.and_then(|key| self.by_job.get_mut(&key))
                && let Ok(told) = event.json::<Told>()
            {
                graph.told = told.total_tasks;
            }
            return;
        }
        let Some(note) = Note::of(record) else {
            return;
        };
        let Some(job) = note.job.clone() else {
            return;
        };
        if let Some(graph) = self.by_job.get_mut(&(tenant.to_owned(), job)) {
            graph.apply(&note, event);
        }
    }

    /// The graph of a job with the states of its tasks at this position or later; `None` if there is no such job.
    pub(super) async fn job(
        &mut self,
        tenant: &str,
        id: &str,
        position: Position,
    ) -> Result<Option<&mut JobGraph>> {
        let key = (tenant.to_owned(), id.to_owned());
        if !self.by_job.contains_key(&key) {
            let Some(graph) = self.load(tenant, id, position).await? else {
                return Ok(None);
            };
            self.make_room(graph.graph.len());
            self.tasks += graph.graph.len();
            self.by_job.insert(key.clone(), graph);
        }
        self.uses += 1;
        let uses = self.uses;
        let mut graph = self.by_job.get_mut(&key);
        if let Some(graph) = &mut graph {
            graph.used = uses;
        }
        Ok(graph)
    }

    async fn load(
        &mut self,
        tenant: &str,
        id: &str,
        position: Position,
    ) -> Result<Option<JobGraph>> {
        let index = self.jobs.index();
        let mut upto = position;
        // The states must include every event that this reader has passed: it does not apply them again.
        for read in self.cursor.positions() {
            if read.shard() == upto.shard() && read.place() > upto.place() {
                upto = read;
            }
        }
        index.catch_up(self.jobs.bus(), Some(upto)).await?;
        let Some(row) = index.job(tenant, id)?.filter(|row| row.refused.is_none()) else {
            return Ok(None);
        };
        let tasks = index.job_tasks(tenant, id)?;
        let graph = load_graph(&self.jobs, tenant, id, Some(tasks.len()), None).await?;
        let Some((graph, created_at)) = graph else {
            return Ok(None);
        };
        let states: Vec<(Fold, u64)> = tasks.iter().map(|t| (t.fold(), t.place)).collect();
        debug_assert_eq!(row.created_at, created_at);
        Ok(Some(JobGraph::new(
            id.to_owned(),
            created_at,
            graph,
            &states,
        )))
    }

    pub(super) fn forget(&mut self, tenant: &str, job: &str) {
        let key = (tenant.to_owned(), job.to_owned());
        if let Some(graph) = self.by_job.remove(&key) {
            self.tasks -= graph.graph.len();
        }
    }

    fn make_room(&mut self, wanted: usize) {
        let uses = self.uses;
        let over = self
            .by_job
            .iter()
            .filter(|(_, graph)| graph.is_over() && graph.used + KEPT_USES < uses);
        let over: Vec<(String, String)> = over.map(|(key, _)| key.clone()).collect();
        for (tenant, job) in over {
            self.forget(&tenant, &job);
        }
        while self.tasks + wanted > MOST_TASKS {
            let oldest = self.by_job.iter().min_by_key(|(_, graph)| graph.used);
            let Some((tenant, job)) = oldest.map(|(key, _)| key.clone()) else {
                return;
            };
            self.forget(&tenant, &job);
        }
    }
}

/// The event types that change a graph. Heartbeats are left out: there are many, and they change nothing here.
fn patterns() -> Result<Vec<Pattern>> {
    let kinds = Kind::ALL
        .into_iter()
        .filter(|kind| *kind != Kind::Heartbeat);
    let types = kinds
        .map(Kind::event_type)
        .chain([JobTasksAdded::TYPE, JobCompleted::TYPE]);
    types.map(Pattern::new).collect()
}
