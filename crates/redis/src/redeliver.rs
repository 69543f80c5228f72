//! Redelivery: a group gets events again that it has finished.

use everbus_core::{BoxFuture, GroupName, Position, Redeliver, Redelivery, Result, no_group};

use crate::broker::{Redis, Shared};
use crate::client::{Arguments, Read as _};
use crate::keys::{self, EntryId};
use crate::scripts::REVIVE;

impl Shared {
    /// Redelivers events (`what` is `event`), or only reports what a redelivery would do (`ask`).
    async fn redeliver(
        &self,
        name: &GroupName,
        positions: &[Position],
        what: &str,
    ) -> Result<Vec<Redelivery>> {
        let Some((record, _)) = self.load_group(name.as_str()).await? else {
            return Err(no_group(name));
        };
        if positions.is_empty() {
            return Ok(Vec::new());
        }
        let registry = self.load_registry().await?;
        let patterns = record.patterns()?;
        let mut arguments = Arguments::default();
        arguments
            .text(name.as_str())
            .text(keys::group_name(name.as_str()))
            .text(if record.ordered { "1" } else { "0" })
            .text(what)
            .number(self.options.clock.now())
            .number(positions.len());
        for position in positions {
            let of_shard = |key: &&String| self.space.shard(key).ok() == Some(position.shard());
            let key = registry.streams.keys().find(of_shard);
            // A shard that this process does not know has no stream.
            let key = key.map_or("", String::as_str);
            let wants = self.space.wanted(key, &patterns);
            let id = EntryId::at_place(position.place());
            arguments
                .text(&format!("{id}@{key}"))
                .text(if wants { "1" } else { "0" });
        }
        let answers = self.link.run(&REVIVE, &arguments).await?.list()?;
        if let Some(group) = self.groups.lock().get(name).cloned() {
            group.poke(std::time::Duration::ZERO);
        }
        let answers = answers.into_iter().map(|answer| {
            Ok(match answer.text()?.as_str() {
                "queued" => Redelivery::Queued,
                "owed" => Redelivery::Owed,
                _ => Redelivery::Gone,
            })
        });
        answers.collect()
    }
}

impl Redeliver for Redis {
    fn redeliver(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.redeliver(&group, &positions, "event").await
        })
    }

    fn redeliverable(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.redeliver(&group, &positions, "ask").await
        })
    }
}
