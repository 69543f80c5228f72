//! Paused groups: an operator stops a group in every process, and the store remembers it.
//!
//! All pauses are one value in the store, changed by compare-and-set. A bus reads it when it starts and every few
//! seconds; a change by this process takes effect at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use everbus_core::{ABSENT, Code, GroupName, Result, Timestamp, no_group};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::Notify;

use crate::audit::{Action, audited};
use crate::kv::Kv;
use crate::runtime::bus::{Bus, Shared};

const BUCKET: &str = "everbus";
const KEY: &str = "paused-groups";
/// How often a process reads the pauses. Other processes see a change after this time at the latest.
const EVERY: Duration = Duration::from_secs(2);
/// How often a change is tried when other processes change the value at the same time.
const TRIES: usize = 20;

/// Who paused a group, when and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PausedGroup {
    /// When.
    pub at: Timestamp,
    /// Who.
    pub by: String,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The stored value: the paused groups by name.
type Stored = BTreeMap<String, PausedGroup>;

/// The groups that are paused, as this process knows them.
#[derive(Default)]
pub(crate) struct Pauses {
    groups: RwLock<BTreeSet<GroupName>>,
    listeners: Mutex<Vec<Weak<Notify>>>,
}

impl Pauses {
    pub(crate) fn contains(&self, group: &GroupName) -> bool {
        self.groups.read().contains(group)
    }

    /// Adds a listener that is notified whenever the set of paused groups changes.
    pub(crate) fn tell(&self, listener: &Arc<Notify>) {
        let mut listeners = self.listeners.lock();
        listeners.retain(|known| known.strong_count() > 0);
        listeners.push(Arc::downgrade(listener));
    }

    fn set(&self, stored: &Stored) {
        let groups: BTreeSet<GroupName> = stored.keys().filter_map(|g| g.parse().ok()).collect();
        if *self.groups.read() == groups {
            return;
        }
        *self.groups.write() = groups;
        for listener in self.listeners.lock().iter().filter_map(Weak::upgrade) {
            listener.notify_one();
        }
    }
}

fn kv(shared: &Shared) -> Result<Kv> {
    Kv::new(shared.engine.kv()?, BUCKET.to_owned())
}

async fn read(kv: &Kv) -> Result<(Stored, u64)> {
    let found = kv.get_json(KEY).await?;
    Ok(found.unwrap_or((Stored::new(), ABSENT)))
}

/// Reads the pauses from the store. Does nothing if the engine has no key-value store. An error is only logged.
pub(crate) async fn load(shared: &Shared) {
    let Ok(kv) = kv(shared) else { return };
    match read(&kv).await {
        Ok((stored, _)) => shared.pauses.set(&stored),
        // The next read may succeed; other calls to the engine report the error as well.
        Err(error) => {
            tracing::debug!(target: "everbus::bus", %error, "which groups are paused is not known");
        }
    }
}

/// Reads the pauses every few seconds until the bus ends, to see the changes of other processes.
pub(crate) async fn follow(shared: Arc<Shared>) {
    if kv(&shared).is_err() {
        return;
    }
    loop {
        tokio::time::sleep(EVERY).await;
        load(&shared).await;
    }
}

impl Bus {
    /// Pauses a group, in every process that shares the store: its handlers get no more events until
    /// [`resume_group`](Self::resume_group). Running handlers finish. Other processes follow within a few seconds.
    /// It stays paused across restarts. `Unsupported` if the engine has no key-value store.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> everbus::Result<()> {
    /// let bus = everbus::Bus::open("memory:").await?;
    /// bus.subscribe("order.*").group("billing").handler(|| async {}).await?;
    /// bus.pause_group("billing".parse()?, Some("the bank is down".into())).await?;
    /// assert!(bus.paused_groups().await?.contains_key(&"billing".parse()?));
    /// bus.resume_group("billing".parse()?).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn pause_group(&self, group: GroupName, reason: Option<String>) -> Result<()> {
        let shared = self.shared();
        let groups = shared.engine.broker.inspect().await?;
        if !groups.iter().any(|known| known.name == group) {
            return Err(no_group(&group));
        }
        let by = shared.audit().operator().actor;
        let at = shared.options.clock.now();
        let action = Action::new("groups.pause")
            .on("GROUP", &group)
            .detail("reason", json!(reason));
        let paused = PausedGroup { at, by, reason };
        self.change_pauses(action, move |stored| {
            let name = group.as_str().to_owned();
            stored.entry(name).or_insert_with(|| paused.clone());
        })
        .await
    }

    /// Resumes a paused group. Resuming a group that runs is harmless.
    pub async fn resume_group(&self, group: GroupName) -> Result<()> {
        let action = Action::new("groups.resume").on("GROUP", &group);
        self.change_pauses(action, move |stored| {
            stored.remove(group.as_str());
        })
        .await
    }

    /// The groups that are paused.
    pub async fn paused_groups(&self) -> Result<BTreeMap<GroupName, PausedGroup>> {
        let (stored, _) = read(&kv(self.shared())?).await?;
        let groups = stored.into_iter();
        let groups = groups.filter_map(|(name, paused)| Some((name.parse().ok()?, paused)));
        Ok(groups.collect())
    }

    async fn change_pauses(&self, action: Action, change: impl Fn(&mut Stored)) -> Result<()> {
        self.accepts()?;
        let shared = self.shared();
        let kv = kv(shared)?;
        let work = async {
            let mut tries = 0;
            loop {
                let (mut stored, revision) = read(&kv).await?;
                change(&mut stored);
                match kv.put_json(KEY, &stored).expected(revision).await {
                    Err(e) if e.code() == Code::RevisionConflict && tries < TRIES => tries += 1,
                    put => {
                        put?;
                        shared.pauses.set(&stored);
                        return Ok(());
                    }
                }
            }
        };
        let operator = shared.audit().operator();
        audited(&shared.engine, &operator, action, work).await
    }
}
