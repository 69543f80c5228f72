//! Queries on the index.

use everbus::{Result, Timestamp};
use rusqlite::{Connection, OptionalExtension as _, Row, params};
use serde::Serialize;

use super::apply::taken;
use super::{Index, failed, to_sql};
use crate::events::{TaskSpec, TaskState};
use crate::state::TaskStatus;

/// Which tasks to list.
#[derive(Clone, Debug)]
pub struct TaskFilter {
    /// Only in this state.
    pub state: Option<TaskState>,
    /// Only tasks whose state began before this time.
    pub before: Option<Timestamp>,
    /// The oldest first, instead of the newest.
    pub oldest_first: bool,
    /// At most this many.
    pub limit: usize,
}

impl Default for TaskFilter {
    fn default() -> Self {
        Self {
            state: None,
            before: None,
            oldest_first: false,
            limit: 100,
        }
    }
}

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// A task runs or waits, or can start.
    Running,
    /// All tasks have completed.
    Completed,
    /// A task has failed, and no other task can continue. The job can be resumed.
    Failed,
    /// The job never started: one of its task ids was taken, or its graph is invalid.
    Refused,
}

impl JobState {
    /// The name of the state.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Refused => "refused",
        }
    }
}

/// A job with the number of its tasks in each state.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JobRow {
    /// The job.
    pub job_id: String,
    /// The app.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub app: Option<String>,
    /// The request that submitted it.
    pub request_id: String,
    /// When it was submitted.
    pub created_at: Timestamp,
    /// How many tasks it has.
    pub total_tasks: usize,
    /// Why it was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Tasks that wait for a worker.
    pub pending: usize,
    /// Tasks that a worker runs, or that wait for their next attempt.
    pub processing: usize,
    /// Tasks that ended well.
    pub completed: usize,
    /// Tasks that failed.
    pub failed: usize,
    /// The place of its `Job Created` in the log.
    #[serde(skip)]
    pub place: u64,
}

impl JobRow {
    /// The state, derived from the counts alone. A job with a failed task is `Failed` here even if another task is
    /// about to start; [`Jobs::job`](crate::Jobs::job) looks at the graph and is exact.
    pub fn state(&self) -> JobState {
        if self.refused.is_some() {
            JobState::Refused
        } else if self.completed == self.total_tasks {
            JobState::Completed
        } else if self.failed > 0 && self.pending + self.processing == 0 {
            JobState::Failed
        } else {
            JobState::Running
        }
    }
}

pub(super) const TASK: &str =
    "id, job, name, state, run, cancelled, since, started_at, last_type, last_at, effective_until,
                    worker_id, error, place, attempt";
pub(super) const JOB: &str = "id, app, request_id, created_at, total, refused, pending, processing, completed, failed, place";

impl Index {
    /// One task.
    pub fn task(&self, tenant: &str, id: &str) -> Result<Option<TaskStatus>> {
        let conn = self.conn.lock();
        read_task(&conn, tenant, id).map_err(reading)
    }

    /// The tasks that pass a filter. The task whose state changed last is first, unless the filter asks for the oldest.
    pub fn tasks(&self, tenant: &str, filter: &TaskFilter) -> Result<Vec<TaskStatus>> {
        let conn = self.conn.lock();
        let before = filter.before.map_or(i64::MAX, Timestamp::as_micros);
        let states: Vec<TaskState> = match filter.state {
            Some(state) => vec![state],
            None => TaskState::ALL.to_vec(),
        };
        let order = if filter.oldest_first { "ASC" } else { "DESC" };
        // A query for one state can use the index. The rows of all states are sorted afterwards.
        let sql = format!(
            "SELECT {TASK} FROM tasks WHERE tenant = ?1 AND state = ?2 AND since < ?3
             ORDER BY since {order}, id {order} LIMIT ?4"
        );
        let mut found = Vec::new();
        for state in states {
            let mut statement = conn.prepare_cached(&sql).map_err(reading)?;
            let limit = to_sql(filter.limit as u64);
            let rows = statement
                .query_map(params![tenant, state_to(state), before, limit], task_of)
                .map_err(reading)?;
            for row in rows {
                found.push(row.map_err(reading)?);
            }
        }
        found.sort_by(|a, b| {
            let newest = (b.since, &b.request_id).cmp(&(a.since, &a.request_id));
            if filter.oldest_first {
                newest.reverse()
            } else {
                newest
            }
        });
        found.truncate(filter.limit);
        Ok(found)
    }

    /// The tenants that have tasks in a state.
    pub fn tenants(&self, state: TaskState) -> Result<Vec<String>> {
        let conn = self.conn.lock();
        let sql = "SELECT DISTINCT tenant FROM tasks WHERE state = ?1";
        let mut statement = conn.prepare_cached(sql).map_err(reading)?;
        let rows = statement
            .query_map([state_to(state)], |row| row.get(0))
            .map_err(reading)?;
        rows.collect::<rusqlite::Result<_>>().map_err(reading)
    }

    /// How many tasks are in each state: pending, processing, completed, failed.
    pub fn counts(&self, tenant: &str) -> Result<[(TaskState, u64); 4]> {
        let conn = self.conn.lock();
        let sql = "SELECT count(*) FROM tasks WHERE tenant = ?1 AND state = ?2";
        let mut statement = conn.prepare_cached(sql).map_err(reading)?;
        let mut counts = TaskState::ALL.map(|state| (state, 0));
        for (state, count) in &mut counts {
            let number = statement.query_row(params![tenant, state_to(*state)], |row| row.get(0));
            *count = from_sql(number.map_err(reading)?);
        }
        Ok(counts)
    }

    /// The tasks of a job, in the order in which they were added.
    pub fn job_tasks(&self, tenant: &str, job: &str) -> Result<Vec<TaskStatus>> {
        let conn = self.conn.lock();
        let sql =
            format!("SELECT {TASK} FROM tasks WHERE tenant = ?1 AND job = ?2 ORDER BY number");
        let mut statement = conn.prepare_cached(&sql).map_err(reading)?;
        let rows = statement
            .query_map(params![tenant, job], task_of)
            .map_err(reading)?;
        rows.collect::<rusqlite::Result<_>>().map_err(reading)
    }

    /// One job.
    pub fn job(&self, tenant: &str, id: &str) -> Result<Option<JobRow>> {
        let conn = self.conn.lock();
        let sql = format!("SELECT {JOB} FROM jobs WHERE tenant = ?1 AND id = ?2");
        let mut statement = conn.prepare_cached(&sql).map_err(reading)?;
        statement
            .query_row(params![tenant, id], job_of)
            .optional()
            .map_err(reading)
    }

    /// Jobs, the newest first.
    pub fn jobs(&self, tenant: &str, limit: usize) -> Result<Vec<JobRow>> {
        let conn = self.conn.lock();
        let sql = format!("SELECT {JOB} FROM jobs WHERE tenant = ?1 ORDER BY place DESC LIMIT ?2");
        let mut statement = conn.prepare_cached(&sql).map_err(reading)?;
        let rows = statement
            .query_map(params![tenant, to_sql(limit as u64)], job_of)
            .map_err(reading)?;
        rows.collect::<rusqlite::Result<_>>().map_err(reading)
    }

    /// When the oldest job of any tenant that is neither completed nor refused was submitted.
    pub fn oldest_unfinished(&self) -> Result<Option<Timestamp>> {
        let conn = self.conn.lock();
        let sql = "SELECT min(created_at) FROM jobs WHERE completed < total AND refused IS NULL";
        let mut statement = conn.prepare_cached(sql).map_err(reading)?;
        let micros: Option<i64> = statement.query_row([], |row| row.get(0)).map_err(reading)?;
        Ok(micros.map(Timestamp::from_micros))
    }

    /// Whether one of these task ids exists already. Returns the reason as a text.
    pub fn taken(&self, tenant: &str, tasks: &[TaskSpec]) -> Result<Option<String>> {
        let conn = self.conn.lock();
        taken(&conn, tenant, tasks).map_err(reading)
    }

    /// All rows as text, to compare an index with a rebuilt one.
    #[doc(hidden)]
    pub fn dump(&self) -> Result<Vec<String>> {
        let conn = self.conn.lock();
        let mut lines = Vec::new();
        for sql in [
            "SELECT * FROM jobs ORDER BY 1, 2",
            "SELECT * FROM tasks ORDER BY 1, 2",
        ] {
            let mut statement = conn.prepare(sql).map_err(reading)?;
            let columns = statement.column_count();
            let rows = statement
                .query_map([], |row| {
                    let cells =
                        (0..columns).map(|n| row.get_ref(n).map(|cell| format!("{cell:?}")));
                    cells.collect::<rusqlite::Result<Vec<_>>>()
                })
                .map_err(reading)?;
            for row in rows {
                lines.push(row.map_err(reading)?.join(" "));
            }
        }
        Ok(lines)
    }
}

pub(super) fn read_task(
    conn: &Connection,
    tenant: &str,
    id: &str,
) -> rusqlite::Result<Option<TaskStatus>> {
    let sql = const {
        "SELECT id, job, name, state, run, cancelled, since, started_at, last_type, last_at, effective_until,
                    worker_id, error, place, attempt FROM tasks WHERE tenant = ?1 AND id = ?2"
    };
    let mut statement = conn.prepare_cached(sql)?;
    statement.query_row(params![tenant, id], task_of).optional()
}

pub(super) fn task_of(row: &Row<'_>) -> rusqlite::Result<TaskStatus> {
    let time = |column| {
        let micros: Option<i64> = row.get(column)?;
        Ok::<_, rusqlite::Error>(micros.map(Timestamp::from_micros))
    };
    Ok(TaskStatus {
        request_id: row.get(0)?,
        job_id: row.get(1)?,
        name: row.get(2)?,
        state: row.get::<_, Option<i64>>(3)?.and_then(state_from),
        run: row.get(4)?,
        cancelled: row.get(5)?,
        since: time(6)?,
        started_at: time(7)?,
        last_event_type: row.get(8)?,
        last_event_at: time(9)?,
        effective_until: row.get::<_, Option<i64>>(10)?.map(from_sql),
        worker_id: row.get(11)?,
        error: row.get(12)?,
        place: from_sql(row.get(13)?),
        attempt: row.get(14)?,
    })
}

pub(super) fn job_of(row: &Row<'_>) -> rusqlite::Result<JobRow> {
    let number = |column| {
        row.get::<_, i64>(column)
            .map(|n| usize::try_from(n).unwrap_or(0))
    };
    Ok(JobRow {
        job_id: row.get(0)?,
        app: row.get(1)?,
        request_id: row.get(2)?,
        created_at: Timestamp::from_micros(row.get(3)?),
        total_tasks: number(4)?,
        refused: row.get(5)?,
        pending: number(6)?,
        processing: number(7)?,
        completed: number(8)?,
        failed: number(9)?,
        place: from_sql(row.get(10)?),
    })
}

pub(super) const fn state_to(state: TaskState) -> i64 {
    match state {
        TaskState::Pending => 0,
        TaskState::Processing => 1,
        TaskState::Completed => 2,
        TaskState::Failed => 3,
    }
}

pub(super) fn state_from(number: i64) -> Option<TaskState> {
    TaskState::ALL
        .into_iter()
        .find(|state| state_to(*state) == number)
}

fn from_sql(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

pub(super) fn reading(error: rusqlite::Error) -> everbus::Error {
    failed("reading the index", error)
}
