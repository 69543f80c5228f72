//! Applies events to the index: one transaction for each batch.

use std::sync::Arc;

use everbus::{Cursor, Recorded, Result, TypedEvent as _};
use rusqlite::{Connection, OptionalExtension as _, TransactionBehavior, params};

use super::query::{read_task, state_from, state_to};
use super::{Index, failed, read_cursor, to_sql};
use crate::DEFAULT_TENANT;
use crate::events::{JobCreated, JobTasksAdded, Json, TaskSpec, TaskState};
use crate::graph::Graph;
use crate::handle::is_copy;
use crate::state::{Kind, Note};

impl Index {
    /// Applies the events between two cursors. Does nothing if another process has moved the cursor of the index.
    pub(super) fn apply(
        &self,
        from: &Cursor,
        to: &Cursor,
        records: &[Arc<Recorded>],
    ) -> Result<()> {
        let applying = |e| failed("writing the index", e);
        let mut conn = self.conn.lock();
        let tx = conn
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(applying)?;
        if read_cursor(&tx)? != *from {
            return Ok(());
        }
        for record in records {
            apply_one(&tx, record).map_err(applying)?;
        }
        let sql = "UPDATE meta SET cursor = ?1";
        tx.prepare_cached(sql)
            .and_then(|mut update| update.execute([to.to_string()]))
            .map_err(applying)?;
        if let Some(last) = records.last() {
            let sql = "UPDATE meta SET last_id = ?1, last_place = ?2";
            let place = to_sql(last.position.place());
            tx.prepare_cached(sql)
                .and_then(|mut update| update.execute(params![last.event.id().as_bytes(), place]))
                .map_err(applying)?;
        }
        tx.commit().map_err(applying)
    }
}

fn apply_one(conn: &Connection, record: &Recorded) -> rusqlite::Result<()> {
    if is_copy(&record.event) {
        return Ok(());
    }
    let tenant = record.event.tenant().unwrap_or(DEFAULT_TENANT);
    match record.event.event_type() {
        JobCreated::TYPE => match record.event.json::<JobCreated>() {
            Ok(job) => job_created(conn, tenant, record, &job),
            Err(error) => {
                unreadable(record, &error);
                Ok(())
            }
        },
        JobTasksAdded::TYPE => match record.event.json::<JobTasksAdded>() {
            Ok(added) => tasks_added(conn, tenant, &added),
            Err(error) => {
                unreadable(record, &error);
                Ok(())
            }
        },
        _ => match Note::of(record) {
            Some(note) => task_event(conn, tenant, &note),
            None => Ok(()),
        },
    }
}

fn unreadable(record: &Recorded, error: &everbus::Error) {
    let (id, event_type) = (record.event.id(), record.event.event_type());
    tracing::warn!(target: "everbus::jobs", %id, event_type, %error, "an event of a job cannot be read and is ignored");
}

/// Adds a job with its tasks. A task belongs to the first job in the log that names it. A later job that names the same
/// task is refused as a whole.
fn job_created(
    conn: &Connection,
    tenant: &str,
    record: &Recorded,
    job: &JobCreated,
) -> rusqlite::Result<()> {
    let known = "SELECT 1 FROM jobs WHERE tenant = ?1 AND id = ?2";
    if conn
        .prepare_cached(known)?
        .exists(params![tenant, job.job_id])?
    {
        return Ok(());
    }
    let mut refused = taken(conn, tenant, &job.tasks)?;
    if refused.is_none() {
        let checked = Graph::default().check(&job.tasks);
        refused = checked.err().map(|error| error.message().to_owned());
    }
    let app = record.event.attributes().and_then(|a| a.app.as_deref());
    let insert = "INSERT INTO jobs (tenant, id, app, request_id, created_at, place, total, refused)
                  VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
    conn.prepare_cached(insert)?.execute(params![
        tenant,
        job.job_id,
        app,
        job.request_id,
        record.received_at.as_micros(),
        to_sql(record.position.place()),
        to_sql(job.tasks.len() as u64),
        refused,
    ])?;
    match refused {
        None => insert_tasks(conn, tenant, &job.job_id, 0, &job.tasks),
        Some(_) => Ok(()),
    }
}

fn tasks_added(conn: &Connection, tenant: &str, added: &JobTasksAdded) -> rusqlite::Result<()> {
    let sql = "SELECT total FROM jobs WHERE tenant = ?1 AND id = ?2 AND refused IS NULL";
    let total: Option<i64> = conn
        .prepare_cached(sql)?
        .query_row(params![tenant, added.job_id], |row| row.get(0))
        .optional()?;
    // The event adds nothing if it was made for an older graph, or if it names a task of another job.
    let previous = added.previous_total_tasks;
    if total != Some(to_sql(previous as u64)) {
        return Ok(());
    }
    if taken(conn, tenant, &added.new_tasks)?.is_some() || !fits(conn, tenant, added)? {
        return Ok(());
    }
    let sql = "UPDATE jobs SET total = ?3 WHERE tenant = ?1 AND id = ?2";
    let now = to_sql((previous + added.new_tasks.len()) as u64);
    conn.prepare_cached(sql)?
        .execute(params![tenant, added.job_id, now])?;
    insert_tasks(conn, tenant, &added.job_id, previous, &added.new_tasks)
}

/// Whether the tasks may be added to the graph of their job. The dependencies of the existing tasks do not matter.
fn fits(conn: &Connection, tenant: &str, added: &JobTasksAdded) -> rusqlite::Result<bool> {
    let sql = "SELECT id FROM tasks WHERE tenant = ?1 AND job = ?2";
    let mut statement = conn.prepare_cached(sql)?;
    let ids = statement.query_map(params![tenant, added.job_id], |row| row.get(0))?;
    let known = ids.map(|id| {
        Ok(TaskSpec {
            task_id: id?,
            name: "known".to_owned(),
            depends_on: Vec::new(),
            input: Json::empty(),
        })
    });
    let known: Vec<TaskSpec> = known.collect::<rusqlite::Result<_>>()?;
    let graph = Graph::new(known);
    Ok(graph.is_ok_and(|graph| graph.check(&added.new_tasks).is_ok()))
}

/// Whether one of these task ids exists already, in a job or without one. Returns the reason as a text.
pub(super) fn taken(
    conn: &Connection,
    tenant: &str,
    tasks: &[TaskSpec],
) -> rusqlite::Result<Option<String>> {
    let sql = "SELECT job FROM tasks WHERE tenant = ?1 AND id = ?2";
    let mut find = conn.prepare_cached(sql)?;
    for task in tasks {
        let owner: Option<Option<String>> = find
            .query_row(params![tenant, task.task_id], |row| row.get(0))
            .optional()?;
        if let Some(owner) = owner {
            let id = &task.task_id;
            return Ok(Some(match owner {
                Some(job) => format!("the task {id:?} belongs to the job {job:?}"),
                None => format!("there is a task {id:?} without a job"),
            }));
        }
    }
    Ok(None)
}

impl Index {
    /// Whether all these tasks belong to the job.
    pub(crate) fn belong(&self, tenant: &str, job: &str, tasks: &[TaskSpec]) -> Result<bool> {
        let reading = |e| failed("reading the index", e);
        let conn = self.conn.lock();
        let sql = "SELECT 1 FROM tasks WHERE tenant = ?1 AND id = ?2 AND job = ?3";
        let mut find = conn.prepare_cached(sql).map_err(reading)?;
        for task in tasks {
            if !find
                .exists(params![tenant, task.task_id, job])
                .map_err(reading)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn insert_tasks(
    conn: &Connection,
    tenant: &str,
    job: &str,
    first: usize,
    tasks: &[TaskSpec],
) -> rusqlite::Result<()> {
    let sql = "INSERT INTO tasks (tenant, id, job, number, name) VALUES (?1, ?2, ?3, ?4, ?5)";
    let mut insert = conn.prepare_cached(sql)?;
    for (number, task) in (to_sql(first as u64)..).zip(tasks) {
        insert.execute(params![tenant, task.task_id, job, number, task.name])?;
    }
    Ok(())
}

fn task_event(conn: &Connection, tenant: &str, note: &Note) -> rusqlite::Result<()> {
    let known = read_task(conn, tenant, &note.task)?;
    let mut task = known.clone().unwrap_or_default();
    // A task belongs to the job that the index has for it. An event that names another job, or none, is about another
    // task with the same id, which came too late. Heartbeats name no job, so they are accepted.
    let job = known.as_ref().and_then(|task| task.job_id.clone());
    if job.is_some() && note.job != job && note.kind != Kind::Heartbeat {
        return Ok(());
    }
    let before = task.state;
    if !task.apply(note) {
        return Ok(());
    }
    if known.is_some() {
        task.job_id.clone_from(&job);
    } else {
        // The task has no job, or its job is not in the log. It is listed as a task without a job.
        task.job_id = None;
    }
    let sql = "INSERT INTO tasks (tenant, id, name, state, run, cancelled, since, started_at, last_type, last_at,
                 effective_until, worker_id, error, place, attempt)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)
               ON CONFLICT (tenant, id) DO UPDATE SET name = excluded.name, state = excluded.state,
                 run = excluded.run, cancelled = excluded.cancelled, since = excluded.since,
                 started_at = excluded.started_at, last_type = excluded.last_type, last_at = excluded.last_at,
                 effective_until = excluded.effective_until, worker_id = excluded.worker_id,
                 error = excluded.error, place = excluded.place, attempt = excluded.attempt";
    conn.prepare_cached(sql)?.execute(params![
        tenant,
        note.task,
        task.name,
        task.state.map(state_to),
        task.run,
        task.cancelled,
        task.since.map(everbus::Timestamp::as_micros),
        task.started_at.map(everbus::Timestamp::as_micros),
        task.last_event_type,
        task.last_event_at.map(everbus::Timestamp::as_micros),
        task.effective_until.map(to_sql),
        task.worker_id,
        task.error,
        to_sql(task.place),
        task.attempt,
    ])?;
    match &task.job_id {
        Some(job) if before != task.state => count(conn, (tenant, job), before, task.state),
        _ => Ok(()),
    }
}

/// Moves one task of a job from one count to another.
fn count(
    conn: &Connection,
    (tenant, job): (&str, &str),
    before: Option<TaskState>,
    after: Option<TaskState>,
) -> rusqlite::Result<()> {
    let change =
        |state: TaskState| i64::from(after == Some(state)) - i64::from(before == Some(state));
    let sql = "UPDATE jobs SET pending = pending + ?3, processing = processing + ?4,
                 completed = completed + ?5, failed = failed + ?6 WHERE tenant = ?1 AND id = ?2";
    conn.prepare_cached(sql)?.execute(params![
        tenant,
        job,
        change(TaskState::Pending),
        change(TaskState::Processing),
        change(TaskState::Completed),
        change(TaskState::Failed),
    ])?;
    debug_assert!(
        TaskState::ALL
            .into_iter()
            .all(|s| state_from(state_to(s)) == Some(s))
    );
    Ok(())
}
