//! A store that fails on demand, before or after it has written.

use std::sync::Arc;

use everbus_core::{
    BoxFuture, Burial, Engine, EventId, EventKey, Failure, GroupName, Position, Recorded, Result,
    SentBack, Store, StoredStage, Timestamp,
};

use super::faults::Faults;

struct FaultyStore {
    inner: Arc<dyn Store>,
    faults: Faults,
}

/// The same engine, whose store fails on demand: every call of [`Store`] may fail and have done nothing, or
/// fail although all was done.
pub fn with_faulty_store(engine: Engine, faults: Faults) -> Engine {
    let faulty = |inner| -> Arc<dyn Store> { Arc::new(FaultyStore { inner, faults }) };
    Engine {
        store: engine.store.map(faulty),
        ..engine
    }
}

impl FaultyStore {
    fn call<'a, T: Send + 'a>(
        &'a self,
        verb: &'static str,
        work: impl Future<Output = Result<T>> + Send + 'a,
    ) -> BoxFuture<'a, Result<T>> {
        Box::pin(async move {
            self.faults.before(verb)?;
            let answer = work.await?;
            self.faults.after(verb)?;
            Ok(answer)
        })
    }
}

impl Store for FaultyStore {
    fn ingest(&self, records: Vec<Arc<Recorded>>) -> BoxFuture<'_, Result<Vec<Position>>> {
        self.call("ingest", async move { self.inner.ingest(records).await })
    }

    fn store_stage(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>> {
        let work = async move { self.inner.store_stage(event, stage).await };
        self.call("store_stage", work)
    }

    fn record_failure(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        failure: Failure,
    ) -> BoxFuture<'_, Result<()>> {
        let work = async move { self.inner.record_failure(group, record, failure).await };
        self.call("record_failure", work)
    }

    fn failures(
        &self,
        group: GroupName,
        events: Vec<EventKey>,
    ) -> BoxFuture<'_, Result<Vec<Vec<Failure>>>> {
        let work = async move { self.inner.failures(group, events).await };
        self.call("failures", work)
    }

    fn record_handled(
        &self,
        group: GroupName,
        records: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<()>> {
        let work = async move { self.inner.record_handled(group, records).await };
        self.call("record_handled", work)
    }

    fn record_skip(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        reason: String,
    ) -> BoxFuture<'_, Result<()>> {
        let work = async move { self.inner.record_skip(group, record, reason).await };
        self.call("record_skip", work)
    }

    fn bury(&self, letter: Burial) -> BoxFuture<'_, Result<()>> {
        self.call("bury", async move { self.inner.bury(letter).await })
    }

    fn mark_replaced(
        &self,
        letter: SentBack,
        by: EventId,
        at: Timestamp,
    ) -> BoxFuture<'_, Result<()>> {
        let work = async move { self.inner.mark_replaced(letter, by, at).await };
        self.call("mark_replaced", work)
    }

    fn mark_retried(&self, letters: Vec<SentBack>, at: Timestamp) -> BoxFuture<'_, Result<()>> {
        let work = async move { self.inner.mark_retried(letters, at).await };
        self.call("mark_retried", work)
    }
}
