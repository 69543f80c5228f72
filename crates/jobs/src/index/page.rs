//! Lists of tasks and jobs, page by page. A page begins after the last row of the page before. An SQL index finds that
//! row, so that the thousandth page costs as much as the first.

use everbus::{Code, Error, Result, Timestamp};
use rusqlite::params;
use serde::Serialize;

use super::query::{JOB, TASK, job_of, reading, state_to, task_of};
use super::{Index, to_sql};
use crate::JobState;
use crate::events::TaskState;
use crate::index::JobRow;
use crate::state::TaskStatus;

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Page<T> {
    /// The rows.
    pub items: Vec<T>,
    /// Where the next page begins; `None` on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// The cursor after a row: its sort key, and its id, because several rows may have the same key.
struct Mark<'a> {
    number: i64,
    id: &'a str,
}

impl<'a> Mark<'a> {
    /// The cursor before the first row. Lists are descending, so it is larger than every row.
    const FIRST: Mark<'static> = Mark {
        number: i64::MAX,
        id: "\u{10ffff}",
    };

    fn parse(text: Option<&'a str>) -> Result<Self> {
        let Some(text) = text else {
            return Ok(Self::FIRST);
        };
        let parts = text.split_once('.');
        let mark = parts.and_then(|(number, id)| {
            let number = number.parse().ok()?;
            Some(Mark { number, id })
        });
        mark.ok_or_else(|| {
            Error::new(Code::InvalidCursor, "this is not the cursor of a list")
                .hint("take `next` of the page before, or leave it out")
        })
    }
}

/// Makes a page. `items` may have one row more than `limit`, which shows that there is another page; it is cut off.
fn page<T>(mut items: Vec<T>, limit: usize, mark: impl Fn(&T) -> String) -> Page<T> {
    let more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().filter(|_| more).map(mark);
    Page { items, next }
}

impl Index {
    /// Tasks in this state, or in any. The task whose state changed last is first.
    pub fn tasks_page(
        &self,
        tenant: &str,
        state: Option<TaskState>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page<TaskStatus>> {
        let mark = Mark::parse(after)?;
        let states = state.map_or(TaskState::ALL.to_vec(), |state| vec![state]);
        let sql = format!(
            "SELECT {TASK} FROM tasks WHERE tenant = ?1 AND state = ?2 AND (since, id) < (?3, ?4)
             ORDER BY since DESC, id DESC LIMIT ?5"
        );
        let conn = self.conn.lock();
        let mut statement = conn.prepare_cached(&sql).map_err(reading)?;
        let mut found = Vec::new();
        let more = to_sql(limit as u64 + 1);
        // A query for one state can use the index.
        for state in states {
            let values = params![tenant, state_to(state), mark.number, mark.id, more];
            let rows = statement.query_map(values, task_of).map_err(reading)?;
            for row in rows {
                found.push(row.map_err(reading)?);
            }
        }
        found.sort_by(|a, b| (b.since, &b.request_id).cmp(&(a.since, &a.request_id)));
        Ok(page(found, limit, |task: &TaskStatus| {
            let since = task.since.map_or(0, Timestamp::as_micros);
            format!("{since}.{}", task.request_id)
        }))
    }

    /// Jobs in this state, or in any, the newest first. The state is derived from the counts, as in [`JobRow::state`].
    pub fn jobs_page(
        &self,
        tenant: &str,
        state: Option<JobState>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page<JobRow>> {
        let mark = Mark::parse(after)?;
        // Few of the jobs are not completed. They have an index of their own.
        let (index, only) = match state {
            None => ("jobs_by_place", ""),
            Some(JobState::Completed) => (
                "jobs_by_place",
                "AND completed >= total AND refused IS NULL",
            ),
            Some(JobState::Failed) => (
                "jobs_unfinished",
                "AND completed < total AND refused IS NULL AND failed > 0 AND pending + processing = 0",
            ),
            Some(JobState::Running) => (
                "jobs_unfinished",
                "AND completed < total AND refused IS NULL AND NOT (failed > 0 AND pending + processing = 0)",
            ),
            Some(JobState::Refused) => ("jobs_by_place", "AND refused IS NOT NULL"),
        };
        let sql = format!(
            "SELECT {JOB} FROM jobs INDEXED BY {index} WHERE tenant = ?1 AND (place, id) < (?2, ?3) {only}
             ORDER BY place DESC, id DESC LIMIT ?4"
        );
        let conn = self.conn.lock();
        let mut statement = conn.prepare_cached(&sql).map_err(reading)?;
        let more = to_sql(limit as u64 + 1);
        let rows = statement
            .query_map(params![tenant, mark.number, mark.id, more], job_of)
            .map_err(reading)?;
        let found = rows.collect::<rusqlite::Result<_>>().map_err(reading)?;
        Ok(page(found, limit, |job: &JobRow| {
            format!("{}.{}", job.place, job.job_id)
        }))
    }

    /// Every tenant that has tasks.
    pub fn all_tenants(&self) -> Result<Vec<String>> {
        // The query jumps from one tenant to the next in the index: there are few tenants and many tasks.
        let sql = "WITH RECURSIVE found(whose) AS (
                     SELECT min(tenant) FROM tasks
                     UNION ALL
                     SELECT (SELECT min(tasks.tenant) FROM tasks WHERE tasks.tenant > found.whose)
                     FROM found WHERE found.whose IS NOT NULL
                   ) SELECT whose FROM found WHERE whose IS NOT NULL";
        let conn = self.conn.lock();
        let mut statement = conn.prepare_cached(sql).map_err(reading)?;
        let rows = statement.query_map([], |row| row.get(0)).map_err(reading)?;
        rows.collect::<rusqlite::Result<_>>().map_err(reading)
    }
}
