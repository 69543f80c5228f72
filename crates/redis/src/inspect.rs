//! The state of every group.
//!
//! `behind` counts the entries of a stream that the group has not read. Entries that are addressed to other groups do
//! not count. Entries with a spelling of the type that no pattern of the group matches count until the group has passed
//! them.

use everbus_core::{Cursor, GroupInfo, GroupName, Lag, Result, Timestamp};
use redis::Value;

use crate::broker::Shared;
use crate::client::{Arguments, Read as _};
use crate::errors;
use crate::groups::Record;
use crate::keys::{self, EntryId};
use crate::scripts::INSPECT;

/// The progress of a group.
pub(crate) struct Standing {
    pub(crate) in_flight: u64,
    pub(crate) waiting: u64,
    pub(crate) dead: u64,
    pub(crate) lost: u64,
    pub(crate) active_ms: u64,
    pub(crate) streams: Vec<InStream>,
}

/// The progress of a group in one stream.
pub(crate) struct InStream {
    pub(crate) key: String,
    pub(crate) after: EntryId,
    pub(crate) unread: u64,
    pub(crate) in_flight: u64,
    pub(crate) waiting: u64,
    pub(crate) oldest: Option<EntryId>,
    dead: u64,
}

impl Shared {
    /// Reads the progress of a group. `wanted` has the streams that the group wants.
    pub(crate) async fn standing(&self, name: &str, wanted: &[&String]) -> Result<Standing> {
        let mut arguments = Arguments::default();
        arguments
            .text(name)
            .text(keys::group_name(name))
            .list(wanted);
        let answer = self.link.run(&INSPECT, &arguments).await?.list()?;
        let mut parts = answer.into_iter();
        let mut part = || parts.next().unwrap_or(Value::Nil);
        let mut standing = Standing {
            in_flight: part().number()?,
            waiting: part().number()?,
            dead: part().number()?,
            lost: part().number()?,
            active_ms: part().number()?,
            streams: Vec::new(),
        };
        for stream in part().list()? {
            let mut parts = stream.list()?.into_iter();
            let mut part = || parts.next().unwrap_or(Value::Nil);
            let (key, after) = (part().text()?, part().text()?);
            standing.streams.push(InStream {
                key,
                after: EntryId::parse(&after).ok_or_else(|| errors::unreadable("a position"))?,
                unread: part().number()?,
                in_flight: part().number()?,
                waiting: part().number()?,
                oldest: EntryId::parse(&part().text()?),
                dead: part().number()?,
            });
        }
        Ok(standing)
    }

    pub(crate) async fn inspect(&self) -> Result<Vec<GroupInfo>> {
        self.load_registry().await?;
        let mut infos = Vec::new();
        for (record, _) in self.load_groups().await? {
            infos.extend(self.inspect_one(&record).await?);
        }
        Ok(infos)
    }

    /// `None` for an ephemeral group whose engine is gone.
    async fn inspect_one(&self, record: &Record) -> Result<Option<GroupInfo>> {
        if let Some(owner) = &record.owner
            && !self.is_alive(owner).await?
        {
            return Ok(None);
        }
        let name: GroupName = record.name.parse()?;
        let patterns = record.patterns()?;
        let registry = self.registry();
        let wanted = registry.streams.keys();
        let wanted: Vec<&String> = wanted
            .filter(|key| self.space.wanted(key, &patterns))
            .collect();
        let standing = self.standing(&record.name, &wanted).await?;
        let now = self.options.clock.now();
        let mut info = GroupInfo::new(name.clone(), record.created_at);
        info.ordered = record.ordered;
        info.ephemeral = record.owner.is_some();
        info.subscriptions = record.infos(&name)?;
        info.subscriptions.sort_by(|a, b| a.name.cmp(&b.name));
        info.patterns = record
            .subscriptions
            .iter()
            .map(|s| s.pattern.clone())
            .collect();
        info.patterns.sort();
        info.in_flight = standing.in_flight;
        info.waiting = standing.waiting;
        info.dead_letters = standing.dead;
        if standing.lost > 0 {
            let lost = standing.lost;
            info.held_back = Some(format!(
                "{lost} events were deleted from their streams before the group had finished them"
            ));
        }
        // Events count as unhandled only if processes of the group run, and none of them has a handler.
        let handled = self.handled_by_all(&name, false).await?;
        let active = i64::try_from(standing.active_ms)
            .unwrap_or(0)
            .saturating_mul(1000);
        info.active_at = info.active_at.max(Timestamp::from_micros(active));
        let mut position = Cursor::START;
        for stream in &standing.streams {
            position.advance(stream.after.position(self.space.shard(&stream.key)?));
            let mut lag = Lag::new();
            lag.behind = stream.unread;
            lag.in_flight = stream.in_flight;
            lag.waiting = stream.waiting;
            lag.dead_letters = stream.dead;
            if !handled.is_empty() && !self.space.wanted(&stream.key, &handled) {
                lag.unhandled = lag.behind + lag.waiting;
            }
            lag.oldest = stream.oldest.map(EntryId::time);
            info.unhandled += lag.unhandled;
            info.behind += lag.behind;
            info.oldest = [info.oldest, lag.oldest].into_iter().flatten().min();
            if lag != Lag::default() {
                let event_type = self.space.types(&stream.key).swap_remove(0);
                info.types.insert(event_type.into(), lag);
            }
        }
        info.position = position;
        info.behind_for = info.oldest.map(|at| now.since(at)).unwrap_or_default();
        Ok(Some(info))
    }
}
