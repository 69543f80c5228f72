//! Payload stages, beside the events they belong to.

use std::collections::BTreeMap;

use everbus_core::{
    BoxFuture, Code, Error, EventKey, Payloads, Result, Stage, StageInfo, StoredStage,
};

use crate::broker::Memory;
use crate::records::Seq as _;
use crate::state::State;

/// The stages by the position of their event, in the order they were stored.
#[derive(Debug, Default)]
pub(crate) struct Stages(BTreeMap<u64, Vec<StoredStage>>);

impl Stages {
    pub(crate) fn add(&mut self, position: u64, stage: StoredStage) {
        self.0.entry(position).or_default().push(stage);
    }

    /// Removes the stages of an event that is removed.
    pub(crate) fn forget(&mut self, position: u64) {
        self.0.remove(&position);
    }
}

impl State {
    pub(crate) fn position_of(&self, event: &EventKey) -> Option<u64> {
        let record = self.records.find(event.id, event.tenant.as_deref())?;
        Some(record.seq())
    }

    pub(crate) fn store_stage(&mut self, event: &EventKey, stage: StoredStage) -> Result<()> {
        let Some(position) = self.position_of(event) else {
            return Err(
                Error::new(Code::NotFound, format!("there is no event {}", event.id)).hint(
                    "a stage belongs to an event that was published; ids are unique per tenant",
                ),
            );
        };
        self.stages.add(position, stage);
        Ok(())
    }

    fn stages_of(&self, event: &EventKey, stage: Option<&Stage>) -> Vec<StoredStage> {
        let position = self.position_of(event);
        let stages = position.and_then(|position| self.stages.0.get(&position));
        // Includes stages whose event is not ingested yet.
        let early = self.early.iter().filter(|(to, _)| to == event);
        let early = early.map(|(_, stage)| stage);
        let wanted = stages.into_iter().flatten().chain(early);
        let mut found: Vec<StoredStage> = wanted
            .filter(|stored| stage.is_none_or(|stage| stored.info.stage == *stage))
            .cloned()
            .collect();
        found.sort_by_key(|stored| stored.info.timestamp);
        found
    }

    fn largest_stages(&self, over: u64, limit: usize) -> Vec<(EventKey, StageInfo)> {
        let mut found: Vec<(EventKey, StageInfo)> = Vec::new();
        for (position, stages) in self.stages.0.iter().rev() {
            let Some(record) = self.records.get(*position) else {
                continue;
            };
            let large = stages.iter().rev().map(|stored| &stored.info);
            let large = large.filter(|info| info.payload_size_original > over);
            found.extend(large.map(|info| (EventKey::of(&record.event), info.clone())));
        }
        found.sort_by_key(|(_, info)| std::cmp::Reverse(info.payload_size_original));
        found.truncate(limit);
        found
    }
}

impl Payloads for Memory {
    fn store(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { self.open_state()?.store_stage(&event, stage) })
    }

    fn stages(
        &self,
        event: EventKey,
        stage: Option<Stage>,
    ) -> BoxFuture<'_, Result<Vec<StoredStage>>> {
        Box::pin(async move { Ok(self.open_state()?.stages_of(&event, stage.as_ref())) })
    }

    fn largest(
        &self,
        over: u64,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<(EventKey, StageInfo)>>> {
        Box::pin(async move { Ok(self.open_state()?.largest_stages(over, limit)) })
    }
}
