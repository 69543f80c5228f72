//! Makes a new run: the sorted postings of the events after the last run.

use everbus_core::Result;

use super::work::{Next, Standing, Work};
use crate::errors::from_sqlite;
use crate::history::block::{Encoder, Posting};
use crate::history::runs::{BATCH, End, Run, Target};
use crate::history::scope::{self, Hashes, Named};
use crate::readers::Reader;
use crate::rows::{seq_from, to_sql};

/// Rows read between two checks whether the engine closes.
const ROWS: u64 = 2048;

impl Work {
    /// Makes a run of the events after the last one. If the index is far behind, the run is larger.
    pub(super) fn cut(&mut self, standing: &Standing) -> Result<Result<usize, Next>> {
        let waiting = standing.newest - standing.after;
        let large = self.tuning.run.saturating_mul(self.tuning.fan as u64);
        // Not after small runs: they would be in the way until the large ones are merged.
        let tidy = standing.runs.last().is_none_or(|run| run.level > 0);
        let (level, size) = if tidy && waiting >= large {
            (1, large)
        } else {
            (0, self.tuning.run)
        };
        let mut postings: Vec<Posting> = Vec::new();
        let (mut hi, mut events) = (standing.after, 0);
        while events < size && hi < standing.newest {
            self.check_open()?;
            let rows = ROWS.min(size - events);
            let read = self.read((hi, standing.newest), rows, &mut postings)?;
            events += read.0;
            hi = if read.0 < rows {
                standing.newest
            } else {
                read.1
            };
        }
        postings.sort_unstable();
        // Two combinations of one event may have the same hash.
        postings.dedup();
        let run = Run {
            id: 0,
            level,
            lo: standing.after + 1,
            hi,
            events,
        };
        let mut encoder = Encoder::new(run.lo, self.tuning.block);
        for posting in postings {
            encoder.push(posting)?;
        }
        encoder.finish();
        let mut blocks = encoder.done;
        let written = blocks.len();
        let mut target = Target::New(run);
        while blocks.len() > BATCH {
            let rest = blocks.split_off(BATCH);
            let some = std::mem::replace(&mut blocks, rest);
            target = match self.change(target, some, End::Open)? {
                Ok(id) => Target::Begun(id),
                Err(None) => return Ok(Ok(0)),
                Err(Some(next)) => return Ok(Err(next)),
            };
        }
        let after = standing.covered;
        Ok(
            match self.change(target, blocks, End::Appended { after })? {
                Ok(_) => Ok(written),
                Err(None) => Ok(0),
                Err(Some(next)) => Err(next),
            },
        )
    }

    /// Adds the postings of some events. Returns how many events there were, and the last position.
    fn read(
        &mut self,
        (after, upto): (u64, u64),
        limit: u64,
        postings: &mut Vec<Posting>,
    ) -> Result<(u64, u64)> {
        let doing = |e| from_sqlite("reading the log", e);
        let Reader { conn, types } = &mut self.reader;
        let mut statement = conn
            .prepare_cached(
                "SELECT seq, type, attrs FROM log WHERE seq > ?1 AND seq <= ?2
                 ORDER BY seq LIMIT ?3",
            )
            .map_err(doing)?;
        let mut rows = statement
            .query((to_sql(after), to_sql(upto), to_sql(limit)))
            .map_err(doing)?;
        // Neighbouring events often have the same names.
        let mut known: Option<(i64, u64)> = None;
        let (mut events, mut last) = (0, after);
        let mut found = Vec::new();
        while let Some(row) = rows.next().map_err(doing)? {
            events += 1;
            last = seq_from(row.get(0).map_err(doing)?);
            let Ok(attrs) = row.get_ref(2).map_err(doing)?.as_str() else {
                continue;
            };
            // Unreadable attributes are damaged; such an event cannot be found by its names.
            let Ok(named) = serde_json::from_str::<Named<'_>>(attrs) else {
                continue;
            };
            let Ok(type_id) = row.get::<_, i64>(1) else {
                continue;
            };
            let event_type = match known {
                Some((id, hash)) if id == type_id => hash,
                _ => match types.find(conn, type_id)? {
                    Some(name) => scope::name(&name),
                    None => continue,
                },
            };
            known = Some((type_id, event_type));
            let hashes = Hashes {
                tenant: named.tenant.map(|t| scope::name(&t.0)),
                app: named.app.map(|a| scope::name(&a.0)),
                entity: named.entity.map(|e| scope::entity(&e.kind, &e.id)),
                event_type: Some(event_type),
                correlation: named.correlation_id.map(|id| scope::name(&id.0)),
            };
            found.extend(hashes.scopes().map(|scope| (scope, last)));
        }
        postings.append(&mut found);
        Ok((events, last))
    }
}
