//! The history: finds events by tenant, app, entity and type, with an index that is built behind the log.
//!
//! ```text
//!  log     ……………………………………………………………………………………………………………………………………▶ newest
//!  runs    [ level 2                 ][ level 1 ][ level 1 ][0][0][0]   not yet
//!            8 merge into one of the next level               2048 events each
//! ```
//!
//! Every event with names has up to eight postings, (scope, position), one for each combination of the
//! *workflow* table. Publishing does not write them: a thread sorts the postings of a few thousand events
//! at a time into a *run*, and merges runs when there are many. A query follows the postings of its scope
//! through the runs, and reads the log for events after the last run.

mod block;
mod indexer;
mod merge;
mod plan;
mod postings;
mod runs;
mod scope;
mod search;
#[cfg(test)]
mod tests;

use everbus_core::{BoxFuture, History, HistoryPage, HistoryQuery, Result, check_range};

use crate::broker::SqliteEngine;
use crate::handle::Handle;
use search::Search;

pub(crate) use indexer::Indexer;
pub(crate) use runs::forget_history;

/// How large the parts of the index are.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct HistoryTuning {
    /// How many events a new run has. A query reads at most about this many events in the log.
    pub run: u64,
    /// How many runs of a level are merged into one run of the next level. A larger number means fewer writes, and more
    /// runs that a query must search.
    pub fan: usize,
    /// How many bytes a block has at most. Two of the default size fill a page.
    pub block: usize,
}

impl Default for HistoryTuning {
    fn default() -> Self {
        Self {
            run: 2048,
            fan: 8,
            block: 1980,
        }
    }
}

impl History for SqliteEngine {
    fn query(&self, query: HistoryQuery) -> BoxFuture<'_, Result<HistoryPage>> {
        Box::pin(async move {
            query.validate()?;
            let search = finish(&self.handle, Search::page(query)).await?;
            Ok(search.into_page())
        })
    }

    fn count(&self, query: HistoryQuery, limit: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            check_range(query.since, query.until)?;
            let search = finish(&self.handle, Search::count(query, limit)).await?;
            Ok(search.into_count())
        })
    }

    fn indexes_correlations(&self) -> bool {
        true
    }
}

/// Searches in steps. Other queries can run between two steps.
async fn finish(handle: &Handle, mut search: Search) -> Result<Search> {
    loop {
        search = handle
            .query(move |reader| {
                search.step(reader)?;
                Ok(search)
            })
            .await?;
        if search.is_done() {
            return Ok(search);
        }
    }
}
