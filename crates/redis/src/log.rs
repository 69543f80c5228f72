//! Reading the streams without a group.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{BoxFuture, Cursor, Log, Pattern, Recorded, Result, StartFrom};
use redis::Value;

use crate::broker::{Redis, Shared};
use crate::client::Read;
use crate::errors;
use crate::keys::EntryId;
use crate::registry::Registry;
use crate::wire::{self, Around, Source};

/// How many entries are read in one request.
const PAGE: usize = 256;
/// The pause between two looks at the end of the log.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

impl Shared {
    /// The end of every stream.
    async fn head(&self) -> Result<Cursor> {
        let registry = self.load_registry().await?;
        let keys: Vec<String> = registry.streams.keys().cloned().collect();
        let ends = self.ends(&keys).await?;
        let mut cursor = Cursor::START;
        for (key, end) in keys.iter().zip(ends) {
            cursor.advance(end.position(self.space.shard(key)?));
        }
        Ok(cursor)
    }

    pub(crate) fn record(
        &self,
        registry: &Registry,
        key: &str,
        entry: Value,
    ) -> Result<(EntryId, Recorded)> {
        let mut parts = entry.list()?.into_iter();
        let mut part = || parts.next().unwrap_or(Value::Nil);
        let id = part().text()?;
        let id = EntryId::parse(&id).ok_or_else(|| errors::unreadable("the id of an entry"))?;
        let fields = part().list()?.into_iter().map(Read::bytes);
        let fields: Vec<Bytes> = fields.collect::<Result<_>>()?;
        let source = Source::new(&self.space, key, registry.dialect(key))?;
        let around = Around {
            space: &self.space,
            source: &source,
            id,
        };
        let read = wire::read(around, &fields);
        let position = id.position(source.shard);
        Ok((id, Recorded::new(read.event, position, read.received_at)))
    }

    /// Reads up to `limit` matching events of a stream after a place. Also returns the last id that was read.
    async fn read_stream(
        &self,
        registry: &Registry,
        key: &str,
        after: u64,
        patterns: &[Pattern],
        limit: usize,
    ) -> Result<(Vec<Arc<Recorded>>, EntryId)> {
        let mut found = Vec::new();
        let Some(mut reached) = EntryId::end_of_place(after) else {
            // Ids beyond 42 bits of time share a place: a reader that has reached this place cannot continue.
            static WARNED: std::sync::Once = std::sync::Once::new();
            WARNED.call_once(|| {
                tracing::warn!(target: "everbus::redis", stream = key, "entries with ids far in the future are read only once, and not all of them");
            });
            let (ms, seq) = (u64::MAX, u64::MAX);
            return Ok((found, EntryId { ms, seq }));
        };
        while found.len() < limit {
            let page = PAGE.min(limit - found.len());
            let mut range = redis::cmd("XRANGE");
            range.arg(key).arg(format!("({reached}")).arg("+");
            range.arg("COUNT").arg(page);
            let entries = self.link.ask(&range).await?.list()?;
            let is_last = entries.len() < page;
            for entry in entries {
                let (id, record) = self.record(registry, key, entry)?;
                reached = id;
                let event_type = record.event.event_type();
                if patterns.iter().any(|pattern| pattern.matches(event_type)) {
                    found.push(Arc::new(record));
                }
            }
            if is_last {
                break;
            }
        }
        Ok((found, reached))
    }

    async fn read(
        &self,
        after: Cursor,
        patterns: &[Pattern],
        limit: usize,
    ) -> Result<(Vec<Arc<Recorded>>, Cursor)> {
        let registry = self.load_registry().await?;
        let mut reached = after.clone();
        let mut found: Vec<Arc<Recorded>> = Vec::new();
        for key in registry.streams.keys() {
            if found.len() >= limit {
                break;
            }
            let shard = self.space.shard(key)?;
            let from = after.place(shard);
            if !self.space.wanted(key, patterns) {
                let ends = self.ends(std::slice::from_ref(key)).await?;
                for end in ends {
                    reached.advance(end.position(shard));
                }
                continue;
            }
            let room = limit - found.len();
            let (records, at) = self
                .read_stream(&registry, key, from, patterns, room)
                .await?;
            found.extend(records);
            reached.advance(at.position(shard));
        }
        // Ids grow over all streams.
        found.sort_by_key(|record| record.position.place());
        Ok((found, reached))
    }

    async fn resolve(&self, from: StartFrom, patterns: &[Pattern]) -> Result<Cursor> {
        let registry = self.load_registry().await?;
        let mut cursor = Cursor::START;
        match from {
            StartFrom::First => {}
            StartFrom::New => return self.head().await,
            StartFrom::Time(time) => {
                let before = EntryId::before(time);
                for key in registry.streams.keys() {
                    cursor.advance(before.position(self.space.shard(key)?));
                }
            }
            StartFrom::Last => {
                let keys = registry.streams.keys();
                let keys = keys.filter(|key| self.space.wanted(key, patterns));
                let keys: Vec<String> = keys.cloned().collect();
                cursor = self.head().await?;
                if let Some((id, key)) = self.newest(&keys).await? {
                    let head = std::mem::take(&mut cursor);
                    let shard = self.space.shard(&key)?;
                    for position in head.positions().filter(|at| at.shard() != shard) {
                        cursor.advance(position);
                    }
                    cursor.advance(id.just_before().position(shard));
                }
            }
        }
        Ok(cursor)
    }
}

impl Log for Redis {
    fn head(&self) -> BoxFuture<'_, Result<Cursor>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.head().await
        })
    }

    fn read(
        &self,
        after: Cursor,
        patterns: Vec<Pattern>,
        limit: usize,
    ) -> BoxFuture<'_, Result<(Vec<Arc<Recorded>>, Cursor)>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.read(after, &patterns, limit).await
        })
    }

    fn resolve(&self, from: StartFrom, patterns: Vec<Pattern>) -> BoxFuture<'_, Result<Cursor>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.resolve(from, &patterns).await
        })
    }

    fn wait_beyond(&self, cursor: Cursor) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut pause = FIRST_PAUSE;
            loop {
                self.shared.link.check_open()?;
                let head = self.shared.head().await?;
                let is_beyond = |at: everbus_core::Position| at.place() > cursor.place(at.shard());
                if head.positions().any(is_beyond) {
                    return Ok(());
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        })
    }
}
