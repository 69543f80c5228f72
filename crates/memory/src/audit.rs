//! The audit trail in memory. Its records are chained by hashes as in the durable engines, so tests see the same.

use std::collections::VecDeque;

use everbus_core::{
    Audit, AuditBreak, AuditEntry, AuditHead, AuditPage, AuditQuery, AuditRecord, AuditVerdict,
    BoxFuture, Held, Order, Result, Timestamp,
};

use crate::broker::Memory;

/// The records. `anchor` is the head of the chain before the first record.
#[derive(Debug)]
pub(crate) struct Trail {
    anchor: AuditHead,
    records: VecDeque<AuditRecord>,
}

impl Default for Trail {
    fn default() -> Self {
        Self {
            anchor: AuditHead::ORIGIN,
            records: VecDeque::new(),
        }
    }
}

impl Trail {
    fn head(&self) -> AuditHead {
        self.records.back().map_or(self.anchor, head_of)
    }

    fn record(&mut self, entry: AuditEntry, now: Timestamp) -> u64 {
        let before = self.head();
        let seq = before.seq + 1;
        // Times never decrease, so the trail can be searched by time.
        let at = self.records.back().map_or(now, |last| now.max(last.at));
        let details = entry.details_text();
        let hash = entry
            .content(seq, at, details.as_deref())
            .hash(&before.hash);
        self.records.push_back(AuditRecord {
            seq,
            at,
            hash,
            entry,
        });
        seq
    }

    fn query(&self, query: &AuditQuery) -> AuditPage {
        let wanted = |record: &&AuditRecord| {
            let beyond = query.after.is_none_or(|after| match query.order {
                Order::Newest => record.seq < after,
                Order::Oldest => record.seq > after,
            });
            beyond && query.matches(record)
        };
        let take = query.page() + 1;
        let mut items: Vec<AuditRecord> = match query.order {
            Order::Newest => {
                let found = self.records.iter().rev().filter(wanted);
                found.take(take).cloned().collect()
            }
            Order::Oldest => {
                let found = self.records.iter().filter(wanted);
                found.take(take).cloned().collect()
            }
        };
        let more = items.len() == take;
        items.truncate(query.page());
        let next = items.last().filter(|_| more).map(|record| record.seq);
        AuditPage { items, next }
    }

    fn verify(&self, known: Option<AuditHead>) -> AuditVerdict {
        let mut verdict = AuditVerdict {
            first: self.records.front().map(|record| record.seq),
            ..AuditVerdict::default()
        };
        let broken = |seq: u64, what: &str| {
            Some(AuditBreak {
                seq: Some(seq),
                problem: format!("record {seq} {what}"),
            })
        };
        let differs = |at: AuditHead| known.is_some_and(|k| k.seq == at.seq && k.hash != at.hash);
        let replaced = "is not the one that was written: the head that was given has another hash";
        let mut at = self.anchor;
        for record in &self.records {
            let details = record.entry.details_text();
            let content = record
                .entry
                .content(record.seq, record.at, details.as_deref());
            if record.seq != at.seq + 1 || content.hash(&at.hash) != record.hash {
                verdict.broken = broken(at.seq + 1, "was changed");
                break;
            }
            at = head_of(record);
            verdict.verified += 1;
            if differs(at) {
                verdict.broken = broken(at.seq, replaced);
                break;
            }
        }
        if verdict.broken.is_none() && differs(self.anchor) {
            verdict.broken = broken(self.anchor.seq, replaced);
        }
        if verdict.broken.is_none() && known.is_some_and(|known| known.seq > at.seq) {
            verdict.broken = broken(at.seq + 1, "is missing: the trail ends before it");
        }
        verdict.head = (at.seq > 0).then_some(at);
        verdict
    }

    /// How many records were written before a time.
    pub(crate) fn older(&self, before: Timestamp) -> usize {
        let records = self.records.iter();
        records.take_while(|record| record.at < before).count()
    }

    /// The number of records, and the time of the first.
    pub(crate) fn held(&self) -> Held {
        Held {
            count: self.records.len() as u64,
            oldest: self.records.front().map(|record| record.at),
        }
    }

    pub(crate) fn forget(&mut self, before: Timestamp) -> u64 {
        let older = self.older(before);
        if let Some(last) = self.records.drain(..older).next_back() {
            self.anchor = head_of(&last);
        }
        older as u64
    }
}

fn head_of(record: &AuditRecord) -> AuditHead {
    AuditHead {
        seq: record.seq,
        hash: record.hash,
    }
}

impl Audit for Memory {
    fn record(&self, entry: AuditEntry) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            entry.validate()?;
            Ok(self.open_state()?.audit.record(entry, self.now()))
        })
    }

    fn query(&self, query: AuditQuery) -> BoxFuture<'_, Result<AuditPage>> {
        Box::pin(async move {
            query.validate()?;
            Ok(self.open_state()?.audit.query(&query))
        })
    }

    fn head(&self) -> BoxFuture<'_, Result<Option<AuditHead>>> {
        Box::pin(async move {
            let head = self.open_state()?.audit.head();
            Ok((head.seq > 0).then_some(head))
        })
    }

    fn verify(&self, known: Option<AuditHead>) -> BoxFuture<'_, Result<AuditVerdict>> {
        Box::pin(async move { Ok(self.open_state()?.audit.verify(known)) })
    }

    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { Ok(self.open_state()?.audit.forget(before)) })
    }

    fn forgettable(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { Ok(self.open_state()?.audit.older(before) as u64) })
    }
}
