//! The state of every group, from the server's counts.
//!
//! The server counts by stream and not by type, and it does not distinguish an event that waits from one in flight.
//! `waiting` counts the events that this process gave back; events that other processes gave back count as in flight.
//! `behind` is exact if the filters of the consumer are the patterns of the group; otherwise it is an upper bound.
//! `dropped` counts the sequences between the last delivery and the first event that is left, also those of events
//! that the group does not want.

use everbus_core::{Cursor, GroupInfo, GroupName, Lag, Position, Result, StreamLag, Timestamp};
use futures_util::future::try_join_all;

use crate::api::Which;
use crate::broker::Shared;
use crate::groups::{self, Record};
use crate::names;
use crate::streams::StreamHandle;
use crate::wire::{self, Around};

impl Shared {
    pub(crate) async fn inspect(&self) -> Result<Vec<GroupInfo>> {
        let records = groups::list(&self.link, &self.space).await?;
        let infos = try_join_all(records.iter().map(|record| self.inspect_one(record))).await?;
        Ok(infos.into_iter().flatten().collect())
    }

    /// `None` for an ephemeral group whose engine is gone.
    async fn inspect_one(&self, record: &Record) -> Result<Option<GroupInfo>> {
        if let Some(owner) = &record.owner
            && !self.is_alive(owner).await
        {
            return Ok(None);
        }
        let name: GroupName = record.name.parse()?;
        let encoded = names::encoded(name.as_str());
        let number = self.groups.lock().get(&name).map(|group| group.number);
        let now = self.options.clock.now();
        let mut info = GroupInfo::new(name.clone(), record.created_at);
        info.ordered = record.ordered;
        info.ephemeral = record.owner.is_some();
        info.subscriptions = record.infos(&name)?;
        info.subscriptions.sort_by(|a, b| a.name.cmp(&b.name));
        let patterns = record.subscriptions.iter().map(|s| s.pattern.clone());
        info.patterns = patterns.collect();
        info.patterns.sort();
        let mut position = Cursor::START;
        for (stream, start) in &record.starts {
            let Some(stream) = self.stream_named(stream).await? else {
                continue;
            };
            position.advance(Position::new(stream.shard, start.saturating_sub(1)));
            let Some(state) = self.link.consumer(&stream.name, &encoded).await? else {
                continue;
            };
            position.advance(Position::new(stream.shard, state.delivered.stream_seq));
            for at in [&state.delivered.last_active, &state.ack_floor.last_active] {
                let at = at.as_ref().and_then(|at| at.parse::<Timestamp>().ok());
                info.active_at = at.map_or(info.active_at, |at| at.max(info.active_at));
            }
            let (waiting, unhandled) = number
                .map(|number| self.held.waiting(stream.shard, number))
                .unwrap_or_default();
            let mut lag = Lag::new();
            if stream.max_age.is_some() {
                let next = (state.delivered.stream_seq + 1).max(*start);
                lag.dropped = self.first_in(&stream).await?.saturating_sub(next);
            }
            lag.behind = state.num_pending;
            lag.waiting = waiting.min(state.num_ack_pending);
            lag.unhandled = unhandled.min(lag.waiting);
            lag.in_flight = state.num_ack_pending - lag.waiting;
            if lag.unsettled() > 0 {
                let floor = state.ack_floor.stream_seq.max(start.saturating_sub(1));
                lag.oldest = self.oldest(&stream, record, floor).await?;
            }
            lag.dead_letters = self.count_dead(&stream.short, &encoded).await?;
            info.behind += lag.behind;
            info.in_flight += lag.in_flight;
            info.waiting += lag.waiting;
            info.unhandled += lag.unhandled;
            info.dead_letters += lag.dead_letters;
            info.oldest = [info.oldest, lag.oldest].into_iter().flatten().min();
            if lag != Lag::default() {
                let name = stream.short.as_str().into();
                let lag = StreamLag::new(name, lag, now).with_max_age(stream.max_age);
                info.streams.push(lag);
            }
        }
        info.position = position;
        info.behind_for = info.oldest.map(|at| now.since(at)).unwrap_or_default();
        Ok(Some(info))
    }

    /// The time of receipt of the first event after the ack floor that the group may want. That event may be settled
    /// already, so the oldest unsettled event may be newer.
    async fn oldest(
        &self,
        stream: &StreamHandle,
        record: &Record,
        floor: u64,
    ) -> Result<Option<Timestamp>> {
        let which = Which {
            seq: Some(floor + 1),
            next_by_subj: Some(stream.one_filter(&record.patterns()?)),
            ..Which::default()
        };
        let Some(stored) = self.link.message(&stream.name, &which).await? else {
            return Ok(None);
        };
        let around = Around {
            stream: &stream.name,
            subject: stream.plain(&stored.subject),
            seq: stored.seq,
            time: stored.time,
            dialect: stream.dialect,
            naming: stream.naming,
        };
        let read = wire::read(around, Some(&stored.headers), &stored.payload);
        Ok(Some(read.received_at))
    }

    /// The sequence of the first event that the stream still has, or will have.
    async fn first_in(&self, stream: &StreamHandle) -> Result<u64> {
        let info = self.link.stream(&stream.name).await?;
        Ok(info.map_or(0, |info| info.state.first_seq))
    }

    async fn count_dead(&self, stream: &str, group: &str) -> Result<u64> {
        let filter = self.space.dead_subject(stream, group, "*");
        let dead = self.space.dead_stream();
        let found = self.link.stream_subjects(&dead, &filter, 0).await?;
        Ok(found.map_or(0, |info| info.total.max(info.state.subjects.len() as u64)))
    }
}
