//! What readers see and consumers get of appended events, on engines whose readers see copies, and on those
//! without one order for everything.

use everbus_core::{
    Appended, Consumer, Cursor, DEAD_LETTER_EVENT, Delivery, EventId, EventKey, Position, Recorded,
};

use super::needs::{LOG_ORDER, OWN_LOG, SENT_BACK};
use super::stage::{pattern, positions, take};
use super::{Harness, Stage};

impl<H: Harness> Stage<H> {
    /// Waits until readers see an event, where they see copies.
    pub async fn copied(&self, key: &EventKey) {
        let (Some(_), Some(lookup)) = (&self.engine().background, &self.engine().lookup) else {
            return;
        };
        self.eventually("the event is copied", || async {
            let found = lookup.find(key.id).await.unwrap();
            found.iter().any(|r| EventKey::of(&r.event) == *key)
        })
        .await;
    }

    /// Waits until readers see this many notices of dead letters, where they see copies.
    pub async fn told(&self, count: usize) {
        let (Some(_), Some(log)) = (&self.engine().background, &self.engine().log) else {
            return;
        };
        self.eventually("the notices are copied", || async {
            let notices = vec![pattern(DEAD_LETTER_EVENT)];
            let read = log.read(Cursor::START, notices, count).await;
            read.unwrap().0.len() == count
        })
        .await;
    }

    /// Checks that a reader shows this event, at the position at which the broker has it.
    pub fn assert_same(&self, read: &Recorded, id: EventId, position: Position) {
        assert_eq!(read.event.id(), id);
        if self.offers(&OWN_LOG) {
            assert_eq!(read.position, position);
        }
    }

    /// Takes these events, in log order if the engine keeps it.
    pub async fn take_these(
        &self,
        consumer: &mut Box<dyn Consumer>,
        expected: &[Position],
    ) -> Vec<Delivery> {
        let mut got = take(consumer, expected.len()).await;
        if expected.len() > 1 && !self.offers(&LOG_ORDER) {
            got.sort_by_key(|d| expected.iter().position(|p| *p == d.record.position));
        }
        assert_eq!(positions(&got), expected);
        got
    }

    /// Takes the events of these retried dead letters, in log order if the engine keeps it.
    pub async fn take_sent_back(
        &self,
        consumer: &mut Box<dyn Consumer>,
        expected: &[&Appended],
    ) -> Vec<Delivery> {
        assert!(self.offers(&SENT_BACK), "the scenario needs it");
        if self.engine().redeliver.is_some() {
            let expected: Vec<Position> = expected.iter().map(|a| a.position).collect();
            return self.take_these(consumer, &expected).await;
        }
        let mut got = take(consumer, expected.len()).await;
        let original = |d: &Delivery| d.record.event.metadata()[everbus::RETRY_OF].clone();
        let expected: Vec<String> = expected.iter().map(|a| a.id.to_string()).collect();
        if expected.len() > 1 && !self.offers(&LOG_ORDER) {
            got.sort_by_key(|d| expected.iter().position(|id| *id == original(d)));
        }
        assert_eq!(got.iter().map(original).collect::<Vec<_>>(), expected);
        got
    }

    /// Where readers find an event.
    pub async fn read_at(&self, appended: &Appended) -> Position {
        match &self.engine().lookup {
            Some(lookup) if !self.offers(&OWN_LOG) => {
                lookup.find(appended.id).await.unwrap()[0].position
            }
            _ => appended.position,
        }
    }
}
