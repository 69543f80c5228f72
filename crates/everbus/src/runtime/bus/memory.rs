//! Reading what was published and what became of it: the log, the history, payloads, the audit trail.
//! Nothing here needs a started bus.

use std::sync::Arc;

use everbus_core::{History, Log, Lookup, Maintenance, Recorded, Result};

use super::Bus;
use crate::audit::AuditTrail;
use crate::kv::Kv;
#[cfg(feature = "overflow")]
use crate::overflow::{Collect, Collected};
use crate::payloads::PayloadStages;

impl Bus {
    /// The log, for reading and following events; `Unsupported` if the engine has no log to read.
    pub fn log(&self) -> Result<&dyn Log> {
        self.inner.shared.engine.log()
    }

    /// Finds events by id, and returns the state of an event in every group; `Unsupported` if the engine
    /// cannot do this.
    pub fn lookup(&self) -> Result<&dyn Lookup> {
        self.inner.shared.engine.lookup()
    }

    /// The history: events by tenant, app, entity, type and time; `Unsupported` where the engine has no
    /// history queries.
    ///
    /// ```
    /// use everbus::{Bus, Event, HistoryQuery};
    /// # #[tokio::main]
    /// # async fn main() -> everbus::Result<()> {
    /// let bus = Bus::open("memory:").await?;
    /// let event = Event::builder("order.placed").tenant("acme").entity("ORDER", "123").build()?;
    /// bus.publish(event).await?;
    ///
    /// let query = HistoryQuery::default().tenant("acme").entity("ORDER", "123").limit(20);
    /// let page = bus.history()?.query(query).await?;
    /// assert_eq!(page.items[0].event.event_type(), "order.placed");
    /// assert!(page.next.is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub fn history(&self) -> Result<&dyn History> {
        self.inner.shared.engine.history()
    }

    /// The payload stages: the payload of an event at each step of its way. They need no started bus.
    pub fn payloads(&self) -> PayloadStages {
        PayloadStages::new(self.inner.shared.environment.clone())
    }

    /// The key-value bucket of this name; `Unsupported` if the engine has no key-value store. It needs no
    /// started bus.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> everbus::Result<()> {
    /// let bus = everbus::Bus::open("memory:").await?;
    /// let sessions = bus.kv("sessions")?;
    /// let first = sessions.put("user.42", "open").await?;
    /// sessions.put("user.42", "closed").expected(first).await?;
    /// assert_eq!(sessions.get("user.42").await?.unwrap().value, "closed");
    /// # Ok(())
    /// # }
    /// ```
    pub fn kv(&self, bucket: impl Into<String>) -> Result<Kv> {
        Kv::new(self.inner.shared.engine.kv()?, bucket.into())
    }

    /// Returns the record with its complete event. Records from [`log`](Self::log) and from dead letters
    /// may have a part of the payload in an object store; a record that is complete is returned unchanged.
    ///
    /// `ObjectStoreError` if the object is missing, cannot be reached, or is not what was put there.
    pub async fn whole(&self, record: &Arc<Recorded>) -> Result<Arc<Recorded>> {
        self.inner.shared.whole(record).await
    }

    /// Deletes the objects that no event refers to any more; a started bus does this by itself once a day.
    /// Does nothing if the bus uses no object store.
    #[cfg(feature = "overflow")]
    pub async fn collect_objects(&self, options: &Collect) -> Result<Collected> {
        match &self.inner.shared.objects {
            Some(objects) => objects.collect(self.engine(), options).await,
            None => Ok(Collected::default()),
        }
    }

    /// The audit trail: who did what. It needs no started bus.
    pub fn audit(&self) -> AuditTrail {
        self.inner.shared.audit()
    }

    /// The maintenance of the engine's storage; `Unsupported` if the engine has none.
    pub fn maintenance(&self) -> Result<&dyn Maintenance> {
        self.inner.shared.engine.maintenance()
    }
}
