//! Appending events to the log.

use std::sync::Arc;

use everbus_core::{Appended, Code, Error, Event, Position, Recorded, Result, Timestamp};

use crate::state::State;

impl State {
    /// Appends all events or none.
    pub(crate) fn append(&mut self, batch: Vec<Event>, now: Timestamp) -> Result<Vec<Appended>> {
        let before = self.records.head();
        let received_at = self.records.receipt_time(now);
        let mut answers = Vec::with_capacity(batch.len());
        for event in batch {
            let (id, tenant) = (event.id(), event.tenant());
            let appended = match self.records.find(id, tenant) {
                Some(known) if known.event.same_body(&event) => {
                    Appended::new(id, known.position, known.received_at).as_duplicate()
                }
                Some(_) => {
                    self.records.truncate(before);
                    let what = format!("the event {id} exists with another body");
                    return Err(Error::new(Code::IdReused, what)
                        .hint("an id names one event for ever; give the new event a new id"));
                }
                None => {
                    let position = Position::seq(self.records.head() + 1);
                    let record = Recorded::new(event, position, received_at);
                    self.records.push(Arc::new(record));
                    Appended::new(id, position, received_at)
                }
            };
            answers.push(appended);
        }
        for position in before + 1..=self.records.head() {
            if let Some(record) = self.records.get(position) {
                self.orphans.born(&record.event);
            }
        }
        Ok(answers)
    }
}
