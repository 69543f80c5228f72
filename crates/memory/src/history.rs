//! The history: a plain scan of the log.

use everbus_core::history::MAX_HISTORY_BYTES;
use everbus_core::{
    BoxFuture, History, HistoryPage, HistoryQuery, Order, Recorded, Result, check_range,
};
use std::sync::Arc;

use crate::broker::Memory;
use crate::records::Records;

fn matching<'a>(
    records: &'a Records,
    query: &'a HistoryQuery,
) -> impl DoubleEndedIterator<Item = &'a Arc<Recorded>> {
    let received = |record: &Recorded| {
        query.since.is_none_or(|since| record.received_at >= since)
            && query.until.is_none_or(|until| record.received_at <= until)
    };
    let all = records.after(0);
    all.filter(move |record| received(record) && query.matches(&record.event))
}

impl History for Memory {
    fn query(&self, query: HistoryQuery) -> BoxFuture<'_, Result<HistoryPage>> {
        Box::pin(async move {
            query.validate()?;
            let resume = query.resume_after()?;
            let state = self.open_state()?;
            let found = matching(&state.records, &query);
            let found: &mut dyn Iterator<Item = &Arc<Recorded>> = match (query.order, resume) {
                (Order::Oldest, at) => {
                    &mut found.filter(move |r| at.is_none_or(|at| r.position > at))
                }
                (Order::Newest, at) => &mut found
                    .rev()
                    .filter(move |r| at.is_none_or(|at| r.position < at)),
            };
            let mut items: Vec<Arc<Recorded>> = Vec::new();
            let mut bytes = 0;
            let mut more = false;
            for record in found {
                if items.len() == query.limit || bytes > MAX_HISTORY_BYTES {
                    more = true;
                    break;
                }
                bytes += record.event.payload().len();
                items.push(record.clone());
            }
            let last = items.last().filter(|_| more);
            Ok(HistoryPage {
                next: last.map(|record| query.cursor_after(record.position)),
                items,
                plan: "scan".to_owned(),
            })
        })
    }

    fn count(&self, query: HistoryQuery, limit: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            check_range(query.since, query.until)?;
            let state = self.open_state()?;
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            let found = matching(&state.records, &query).take(limit);
            Ok(found.count() as u64)
        })
    }

    // There is no index. A scan of the log in memory is fast enough to count as one.
    fn indexes_correlations(&self) -> bool {
        true
    }
}
