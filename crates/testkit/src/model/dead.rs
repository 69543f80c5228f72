//! Dead letters in a plan: their notices, retry, replacement and purge.

use std::collections::HashSet;

use everbus_core::{
    Cursor, DEAD_LETTER_EVENT, DeadLetter, DeadLetterFilter, DeadLetterKey, Delivery, EDIT_OF,
    FailureKind, Position, PurgeBasis,
};

use super::plan::Plan;
use crate::conformance::Harness;
use crate::conformance::stage::{name, pattern};

impl<H: Harness> Plan<H> {
    /// A delivery became a dead letter: exactly one notice reports it, unless it was a system event.
    pub(super) async fn note_notice(&mut self, group: &str, delivery: &Delivery) {
        let everything = vec![pattern(">"), pattern("system.>")];
        let head = Cursor::seq(self.oracle.head);
        let (told, _) = self.stage.log().read(head, everything, 10).await.unwrap();
        let dead = &delivery.record.event;
        if dead.event_type().starts_with("system.") {
            assert!(told.is_empty(), "{told:?} tells of an event of the system");
            return;
        }
        let [notice] = told.as_slice() else {
            panic!("one event tells of a dead letter: {told:?}");
        };
        let death = &self.oracle.groups[group].dead[&delivery.record.position.place()];
        assert_eq!(notice.event.event_type(), DEAD_LETTER_EVENT);
        let body: serde_json::Value = notice.event.json().unwrap();
        assert_eq!(body["eventId"], dead.id().to_string());
        assert_eq!(body["eventType"], dead.event_type());
        assert_eq!(body["group"], name(group).to_string());
        assert_eq!(body["attempts"], death.attempts);
        match death.failures.last() {
            // The engine chooses the text of a crash.
            Some(last) if last.kind == FailureKind::Crash => {}
            last => assert_eq!(body["error"], last.map_or("", |f| f.error.as_str())),
        }
        self.oracle
            .appended(&notice.event, notice.position.place(), notice.received_at);
    }

    pub(super) async fn retry_dead(&mut self) {
        if self.stage.engine().dead_letters.is_none() {
            return;
        }
        let mut filter = DeadLetterFilter::default();
        let before = self.stage.open_dead_letters().await;
        if let Some(one) = self.random.pick(&before) {
            match self.random.below(3) {
                0 => filter.id = Some(one.record.event.id()),
                1 => filter.group = Some(one.group.clone()),
                _ => {}
            }
        }
        let limit = if self.random.one_in(2) {
            self.random.below(4)
        } else {
            usize::MAX
        };
        self.note(&format!("retry {limit} of {filter:?}"));
        let dead = self.stage.dead_letters();
        let retried = dead.retry_some(filter.clone(), limit).await.unwrap();
        let matching = before.iter().filter(|letter| {
            filter.group.as_ref().is_none_or(|g| *g == letter.group)
                && filter.id.is_none_or(|id| id == letter.event().id())
        });
        let matching: Vec<DeadLetterKey> = matching.map(DeadLetter::key).collect();
        let after = self.stage.open_dead_letters().await;
        let after: HashSet<DeadLetterKey> = after.iter().map(DeadLetter::key).collect();
        let (left, gone): (Vec<_>, Vec<_>) =
            matching.into_iter().partition(|key| after.contains(key));
        let newest = gone.iter().map(|key| key.position.place()).max();
        let older = left.iter().any(|key| Some(key.position.place()) < newest);
        assert!(!older, "oldest first: {gone:?} went, {left:?} stayed");
        let expected = self.oracle.retry_dead(|group, position| {
            let (position, group) = (Position::seq(position), name(group));
            gone.contains(&DeadLetterKey { position, group })
        });
        assert_eq!(expected, gone.len() as u64, "which were retried");
        assert_eq!(retried, expected, "how many were retried");
        let all = gone.len() + left.len();
        assert_eq!(gone.len(), all.min(limit), "as many as there are");
    }

    /// A corrected event replaces a dead letter, only in the group that failed.
    pub(super) async fn replace_dead(&mut self) {
        if self.stage.engine().dead_letters.is_none() {
            return;
        }
        let open = self.stage.open_dead_letters().await;
        let Some(letter) = self.random.pick(&open) else {
            return;
        };
        let key = letter.key();
        let payload = format!("{}", self.random.below(1000));
        self.note(&format!("replace {key:?} by {payload}"));
        let corrected = letter.corrected(payload).unwrap();
        let corrected = corrected.addressed_to(&key.group);
        let dead = self.stage.dead_letters();
        let appended = dead.replace(key.clone(), corrected.clone()).await.unwrap();
        assert!(!appended.duplicate && appended.id == corrected.id());
        let group = key.group.as_str();
        self.oracle
            .replaced(group, key.position.place(), &corrected, appended);
        let kept = dead.get(letter.event().id()).await.unwrap();
        let kept = kept.iter().find(|l| l.group == key.group).unwrap();
        assert_eq!(kept.replaced_by, Some(corrected.id()), "linked to the new");
        assert!(kept.retried_at.is_some());
        let original = letter.event().id().to_string();
        assert_eq!(corrected.metadata()[EDIT_OF], original, "linked to the old");
        self.oracle.note_claimable();
        self.compare(appended.position.place()).await;
        self.compare(key.position.place()).await;
    }

    pub(super) async fn purge(&mut self) {
        if self.stage.engine().dead_letters.is_none() {
            return;
        }
        let times: Vec<_> = self
            .oracle
            .log
            .values()
            .map(|kept| kept.received_at)
            .collect();
        let Some(&cutoff) = self.random.pick(&times) else {
            return;
        };
        let died = self.random.one_in(2);
        let basis = if died {
            PurgeBasis::Died
        } else {
            PurgeBasis::Created
        };
        self.note(&format!("purge to {cutoff} by {basis:?}"));
        let purge = self
            .stage
            .dead_letters()
            .purge(cutoff, basis, DeadLetterFilter::default());
        let purged = purge.await.unwrap();
        let expected = self.oracle.purge(|kept, death| {
            let time = if died {
                death.died_at
            } else {
                kept.received_at
            };
            time <= cutoff
        });
        assert_eq!(
            purged.dead_letters,
            expected.len() as u64,
            "how many were purged"
        );
        for position in expected {
            // An engine may keep the event longer: until every group has passed it, for example.
            let known = self.oracle.log.contains_key(&position);
            if known && !self.oracle.is_needed(position) && !self.is_kept(position).await {
                self.oracle.removed(position);
            }
        }
        self.compare_all().await;
    }
}
