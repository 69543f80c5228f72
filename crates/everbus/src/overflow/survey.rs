//! Lists the objects in a place by the log that put them, and removes objects of another log on command.
//! Nothing here runs by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use everbus_core::{Engine, Result};
use serde::Serialize;

use super::collect::{is_referred_to, noted};
use super::{Objects, key};

/// A number of objects and their total size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// How many.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Tally {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }
}

/// The content of a place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Survey {
    /// The place, as references name it.
    pub place: String,
    /// This log, by the first digits of its id.
    pub log: Option<String>,
    /// The log that owns the place.
    pub owner: Option<String>,
    /// Objects that events of this log refer to, whichever log put them.
    pub in_use: Tally,
    /// Objects that this log has a note of: deleted later, unless another log put them.
    pub noted: Tally,
    /// The rest, by the log that put them: another log, or this log before it was replaced by an older
    /// copy. The empty name stands for an unknown log.
    pub others: BTreeMap<String, Tally>,
}

impl Survey {
    /// All objects of other logs together.
    pub fn of_others(&self) -> Tally {
        let mut sum = Tally::default();
        for tally in self.others.values() {
            sum.objects += tally.objects;
            sum.bytes += tally.bytes;
        }
        sum
    }
}

/// An object that does not belong to this log.
struct Other {
    owner: String,
    key: String,
    bytes: u64,
    age: Duration,
}

impl Objects {
    /// Lists the configured place. Every object is checked.
    pub async fn survey(&self, engine: &Engine) -> Result<Survey> {
        let mut survey = Survey::default();
        self.walk(engine, &mut survey).await?;
        Ok(survey)
    }

    /// Deletes the objects of a log, as named by [`survey`](Self::survey), unless an event of this log
    /// refers to them or they are younger than `older`. The caller must know that no other file needs them.
    /// With `dry_run` nothing is deleted, only counted.
    pub async fn remove_others(
        &self,
        engine: &Engine,
        owner: &str,
        older: Duration,
        dry_run: bool,
    ) -> Result<Tally> {
        let others = self.walk(engine, &mut Survey::default()).await?;
        let mut removed = Tally::default();
        for other in others {
            if other.owner != owner || other.age < older {
                continue;
            }
            if !dry_run {
                self.store.delete(&other.key).await?;
            }
            removed.add(other.bytes);
        }
        Ok(removed)
    }

    async fn walk(&self, engine: &Engine, survey: &mut Survey) -> Result<Vec<Other>> {
        let owners = self.owners().await?;
        survey.place = self.store.bucket().to_owned();
        survey.log = owners.map(|owners| owners.log.short());
        survey.owner = owners.and_then(|owners| Some(owners.place?.short()));
        let mut found = Vec::new();
        let listed = self.store.list(|name, bytes, age| {
            if let Some(id) = key::event_of(&name) {
                found.push((id, name, bytes, age));
            }
        });
        listed.await?;
        let noted = match &self.orphans {
            Some(orphans) => noted(&**orphans).await?,
            None => Default::default(),
        };
        let mut others = Vec::new();
        for (id, key, bytes, age) in found {
            if is_referred_to(engine, id, &key).await? {
                survey.in_use.add(bytes);
                continue;
            }
            let ours = owners.is_some_and(|owners| owners.is_ours(&key));
            if ours && noted.contains(&key) {
                survey.noted.add(bytes);
                continue;
            }
            let owner = owners
                .and_then(|owners| owners.of(&key))
                .unwrap_or_default();
            survey.others.entry(owner.clone()).or_default().add(bytes);
            others.push(Other {
                owner,
                key,
                bytes,
                age,
            });
        }
        Ok(others)
    }
}
