//! Reading the streams without a group.
//!
//! Batches of messages come from any replica, which may be behind its leader. So the leader confirms the end of a
//! stream before the cursor of a reader moves there.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    BoxFuture, Cursor, Log, Pattern, Position, Recorded, Result, StartFrom, Timestamp,
};

use crate::api::{Stored, Which};
use crate::broker::{Nats, Shared};
use crate::streams::{self, StreamHandle};
use crate::wire::{self, Around};

/// How many messages are read in one request.
const PAGE: usize = 256;
/// The pause between two looks at the end of the log.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

fn record(stream: &StreamHandle, stored: &Stored) -> Recorded {
    let around = Around {
        stream: &stream.name,
        subject: stream.plain(&stored.subject),
        seq: stored.seq,
        time: stored.time,
        dialect: stream.dialect,
        naming: stream.naming,
    };
    let read = wire::read(around, Some(&stored.headers), &stored.payload);
    let position = Position::new(stream.shard, stored.seq);
    Recorded::new(read.event, position, read.received_at)
}

impl Shared {
    /// The end of every stream.
    async fn head(&self) -> Result<Cursor> {
        let mut cursor = Cursor::START;
        for stream in self.readable().await? {
            if let Some(info) = self.link.stream(&stream.name).await? {
                cursor.advance(Position::new(stream.shard, info.state.last_seq));
            }
        }
        Ok(cursor)
    }

    /// The declared streams, or, if none are declared here, all streams that Everbus made.
    async fn readable(&self) -> Result<Vec<Arc<StreamHandle>>> {
        match self.known_table() {
            Some(table) => Ok(table.streams.clone()),
            None => streams::discover(&self.link, &self.space, &self.options).await,
        }
    }

    /// Reads up to `limit` matching events of a stream after a sequence. Also returns the last sequence that was
    /// read.
    async fn read_stream(
        &self,
        stream: &StreamHandle,
        after: u64,
        patterns: &[Pattern],
        limit: usize,
    ) -> Result<(Vec<Arc<Recorded>>, u64)> {
        let Some(info) = self.link.stream(&stream.name).await? else {
            return Ok((Vec::new(), after));
        };
        let end = info.state.last_seq;
        let mut reached = after.max(info.state.first_seq.saturating_sub(1).min(end));
        let mut found = Vec::new();
        if stream.filters(patterns) == Some(Vec::new()) {
            return Ok((found, end.max(reached)));
        }
        let filter = stream.one_filter(patterns);
        while found.len() < limit && reached < end {
            let which = Which {
                seq: Some(reached + 1),
                next_by_subj: Some(filter.clone()),
                batch: Some(PAGE.min(limit - found.len())),
                ..Which::default()
            };
            let mut page = self.link.messages(&stream.name, &which).await?;
            if page.is_empty() {
                // Nothing more on this replica: ask the leader.
                let which = Which {
                    batch: None,
                    ..which
                };
                page.extend(self.link.message(&stream.name, &which).await?);
            }
            let Some(last) = page.last() else {
                reached = end;
                break;
            };
            reached = reached.max(last.seq);
            let records = page.iter().map(|stored| record(stream, stored));
            let wanted = |record: &Recorded| {
                let event_type = record.event.event_type();
                patterns.iter().any(|pattern| pattern.matches(event_type))
            };
            found.extend(records.filter(wanted).map(Arc::new));
        }
        Ok((found, reached))
    }

    /// The sequence before the first event that was received at `time` or later.
    async fn before_time(&self, stream: &StreamHandle, time: Timestamp) -> Result<u64> {
        // Publishers stamp an event shortly before the server stores it, so the first events here may still be too
        // early.
        let mut seq = self.seq_at(stream, time).await?;
        loop {
            let which = Which {
                seq: Some(seq),
                next_by_subj: Some(stream.subject(">")),
                ..Which::default()
            };
            let Some(stored) = self.link.message(&stream.name, &which).await? else {
                return Ok(seq.saturating_sub(1));
            };
            let received_at = record(stream, &stored).received_at;
            if wire::deciding_time(received_at, stored.time) >= time {
                return Ok(seq.saturating_sub(1));
            }
            seq = stored.seq + 1;
        }
    }
}

impl Log for Nats {
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
            let mut reached = after.clone();
            let mut found = Vec::new();
            let streams = self.shared.readable().await?;
            for stream in &streams {
                if found.len() >= limit {
                    break;
                }
                let from = after.place(stream.shard);
                let room = limit - found.len();
                let (records, at) = self
                    .shared
                    .read_stream(stream, from, &patterns, room)
                    .await?;
                found.extend(records);
                reached.advance(Position::new(stream.shard, at));
            }
            Ok((found, reached))
        })
    }

    fn resolve(&self, from: StartFrom, patterns: Vec<Pattern>) -> BoxFuture<'_, Result<Cursor>> {
        Box::pin(async move {
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            let streams = shared.readable().await?;
            let mut cursor = match from {
                StartFrom::First | StartFrom::Time(_) => Cursor::START,
                StartFrom::New => return shared.head().await,
                StartFrom::Last => {
                    let newest = shared.newest(&streams, &patterns).await?;
                    let Some((name, seq)) = newest else {
                        return shared.head().await;
                    };
                    let head = shared.head().await?;
                    let mut cursor = Cursor::START;
                    for stream in &streams {
                        let place = match stream.name == name {
                            true => seq - 1,
                            false => head.place(stream.shard),
                        };
                        cursor.advance(Position::new(stream.shard, place));
                    }
                    return Ok(cursor);
                }
            };
            if let StartFrom::Time(time) = from {
                for stream in &streams {
                    let place = shared.before_time(stream, time).await?;
                    cursor.advance(Position::new(stream.shard, place));
                }
            }
            Ok(cursor)
        })
    }

    fn wait_beyond(&self, cursor: Cursor) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut pause = FIRST_PAUSE;
            loop {
                self.shared.link.check_open()?;
                let head = self.shared.head().await?;
                let is_beyond = |at: Position| at.place() > cursor.place(at.shard());
                if head.positions().any(is_beyond) {
                    return Ok(());
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        })
    }
}
