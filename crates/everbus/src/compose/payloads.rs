//! Payload stages of events that may not be in the store yet.

use std::sync::Arc;

use everbus_core::{BoxFuture, EventKey, Payloads, Result, Stage, StageInfo, Store, StoredStage};

/// The payload stages of a store beside a broker: a stage can be stored before its event arrives.
pub(super) struct PayloadsBeside {
    pub(super) payloads: Arc<dyn Payloads>,
    pub(super) store: Arc<dyn Store>,
}

impl Payloads for PayloadsBeside {
    fn store(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>> {
        self.store.store_stage(event, stage)
    }

    fn stages(
        &self,
        event: EventKey,
        stage: Option<Stage>,
    ) -> BoxFuture<'_, Result<Vec<StoredStage>>> {
        self.payloads.stages(event, stage)
    }

    fn largest(
        &self,
        over: u64,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<(EventKey, StageInfo)>>> {
        self.payloads.largest(over, limit)
    }
}
