//! The backlog of a stream: counted, dropped from, and trimmed.
//!
//! Trimming removes what every group has finished and no more, whatever the limit of the stream is.

use everbus_core::{BoxFuture, DROPPED, Depth, Pattern, Result};

use crate::broker::{Redis, Shared};
use crate::client::{Arguments, Read as _};
use crate::groups::Record;
use crate::keys;
use crate::scripts::{DROP, TRIM};

impl Shared {
    /// The streams that a pattern covers. The pattern of a declared stream matches by the dotted type.
    fn covered(&self, pattern: &Pattern) -> Vec<String> {
        let registry = self.registry();
        let keys = registry.streams.keys();
        let patterns = std::slice::from_ref(pattern);
        let covered = keys.filter(|key| self.space.wanted(key, patterns));
        covered.cloned().collect()
    }

    /// Those of them that a group wants.
    fn owed<'a>(&self, covered: &'a [String], record: &Record) -> Result<Vec<&'a String>> {
        let patterns = record.patterns()?;
        let wanted = covered
            .iter()
            .filter(|key| self.space.wanted(key, &patterns));
        Ok(wanted.collect())
    }

    async fn depth(&self, pattern: &Pattern, limit: u64) -> Result<u64> {
        self.load_registry().await?;
        let covered = self.covered(pattern);
        let mut most = 0;
        for (record, _) in self.load_groups().await? {
            let keys = self.owed(&covered, &record)?;
            if keys.is_empty() {
                continue;
            }
            let standing = self.standing(&record.name, &keys).await?;
            let of_stream = standing.streams.iter().filter(|s| covered.contains(&s.key));
            let owed = of_stream.map(|s| s.unread + s.in_flight + s.waiting).sum();
            most = u64::max(most, owed);
        }
        Ok(most.min(limit))
    }

    async fn drop_oldest(&self, pattern: &Pattern, keep: u64) -> Result<u64> {
        self.load_registry().await?;
        let covered = self.covered(pattern);
        let mut dropped = std::collections::BTreeSet::new();
        for (record, _) in self.load_groups().await? {
            let keys = self.owed(&covered, &record)?;
            if keys.is_empty() {
                continue;
            }
            let mut arguments = Arguments::default();
            arguments
                .text(&record.name)
                .text(keys::group_name(&record.name))
                .text(DROPPED)
                .number(keep)
                .list(&keys);
            // In steps, so that the server is not held up.
            loop {
                let step = self.link.run(&DROP, &arguments).await?.list()?;
                if step.is_empty() {
                    break;
                }
                for member in step {
                    dropped.insert(member.text()?);
                }
            }
        }
        let groups: Vec<_> = self.groups.lock().values().cloned().collect();
        for group in groups {
            group.poke(std::time::Duration::ZERO);
        }
        Ok(dropped.len() as u64)
    }

    /// Removes what every group has finished from streams that are over their limits of length and age.
    pub(crate) async fn trim_all(&self) -> Result<()> {
        let table = self.table.read().clone();
        let registry = self.load_registry().await?;
        let groups = self.load_groups().await?;
        let now = self.options.clock.now();
        for key in registry.streams.keys() {
            let dotted = self.space.types(key).swap_remove(0);
            let stream = table.as_ref().and_then(|table| table.of(&dotted));
            let limit = stream.and_then(|stream| stream.limit.as_ref());
            let age = stream.and_then(|stream| stream.max_age);
            let (mut wanting, mut others) = (Vec::new(), Vec::new());
            for (record, _) in &groups {
                let name = keys::group_name(&record.name);
                // Nothing waits for an ephemeral group.
                match record.owner.is_none() && self.space.wanted(key, &record.patterns()?) {
                    true => wanting.push(name),
                    false => others.push(name),
                }
            }
            // What no group wants is finished by none.
            let kept = self.options.keep_finished.filter(|_| !wanting.is_empty());
            let most = match (limit, age) {
                (Some(limit), _) => Some(limit.max_len),
                (None, Some(_)) => None,
                (None, None) => kept,
            };
            let most = most.map_or(-1, |most| i64::try_from(most).unwrap_or(i64::MAX));
            let oldest = age.map_or(-1, |age| now.minus(age).as_micros() / 1000);
            if most < 0 && oldest < 0 {
                continue;
            }
            let mut arguments = Arguments::default();
            arguments
                .text(key)
                .number(most)
                .number(oldest)
                .list(&wanting)
                .list(&others);
            self.link.run(&TRIM, &arguments).await?;
        }
        Ok(())
    }
}

impl Depth for Redis {
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.depth(&stream, limit).await
        })
    }

    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.drop_oldest(&stream, keep).await
        })
    }
}
