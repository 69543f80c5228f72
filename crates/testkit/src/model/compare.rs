//! Compares the engine with the model, also at the end of a plan: nothing is lost, nothing is left.

use std::time::Duration;

use everbus_core::{
    DeadLetterFilter, EventId, GroupState, PageRequest, Position, Recorded, Verdict,
};

use super::oracle::same_failures;
use super::plan::{GROUPS, PATIENCE, Plan, ROOM};
use crate::conformance::Harness;
use crate::conformance::stage::name;

impl<H: Harness> Plan<H> {
    pub(super) async fn is_kept(&self, position: u64) -> bool {
        let id: EventId = self.oracle.log[&position].event.id();
        let found = self.stage.lookup().find(id).await.unwrap();
        found
            .iter()
            .any(|record| record.position == Position::seq(position))
    }

    /// Compares the state of one event in every group. A dropped consumer gives back its events in its own
    /// time, so an engine gets a moment to agree.
    pub(super) async fn compare(&self, position: u64) {
        if self.stage.engine().lookup.is_none() {
            return;
        }
        let began = tokio::time::Instant::now();
        loop {
            let states = self
                .stage
                .lookup()
                .states(Position::seq(position))
                .await
                .unwrap();
            assert_eq!(
                states.len(),
                self.oracle.groups.len(),
                "one state for every group"
            );
            match states
                .iter()
                .find_map(|state| self.differs(position, state))
            {
                None => return,
                Some(differs) => assert!(began.elapsed() < PATIENCE, "{differs}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Compares which groups have recorded an event as handled.
    async fn compare_handled(&self, position: u64) {
        let Ok(inbox) = self.stage.engine().inbox() else {
            return;
        };
        let kept = &self.oracle.log[&position];
        let record = std::sync::Arc::new(Recorded::new(
            kept.event.clone(),
            Position::seq(position),
            kept.received_at,
        ));
        for group in self.oracle.groups.keys() {
            let asked = vec![record.clone()];
            let handled = inbox.handled(name(group), asked).await.unwrap();
            let key = (group.clone(), kept.event.id());
            let expected = self.oracle.handled.contains(&key);
            assert_eq!(handled, [expected], "event {position} in {group:?}");
        }
    }

    fn differs(&self, position: u64, state: &GroupState) -> Option<String> {
        let desk = &self.oracle.groups[state.group.as_str()];
        let allowed = desk.states(position, self.oracle.now);
        let work = desk.owed.get(&position);
        let context = format!("event {position} in {}: {state:?}, {work:?}", state.group);
        if !allowed.contains(&state.state) {
            return Some(format!("{allowed:?} expected; {context}"));
        }
        let lapsed = desk.lapsed.get(&position).filter(|_| work.is_none());
        if let Some(reason) = lapsed
            && state.skipped.as_ref() != Some(reason)
        {
            return Some(format!("skipped for {reason:?} expected; {context}"));
        }
        let work = work?;
        // An engine that claims ahead may notice a lost lease only later.
        if self.oracle.ahead && (work.is_uncertain(self.oracle.now) || work.inherited) {
            return None;
        }
        if state.attempts != work.attempts {
            return Some(format!("the attempts differ; {context}"));
        }
        (!same_failures(&state.failures, &work.failures))
            .then(|| format!("the failures differ; {context}"))
    }

    /// Compares everything: events, states, dead letters.
    pub(super) async fn compare_all(&self) {
        for (position, kept) in &self.oracle.log {
            assert!(
                self.is_kept(*position).await,
                "{position} is lost: {:?}",
                kept.event
            );
            self.compare(*position).await;
            self.compare_handled(*position).await;
        }
        if self.stage.engine().dead_letters.is_none() {
            return;
        }
        let page = PageRequest {
            limit: 10_000,
            ..PageRequest::default()
        };
        let list = self
            .stage
            .dead_letters()
            .list(DeadLetterFilter::default(), page);
        let list = list.await.unwrap().items;
        let mut expected = Vec::new();
        for (group, desk) in &self.oracle.groups {
            let open = desk.dead.iter().filter(|(_, death)| death.open);
            expected.extend(open.map(|(position, death)| (*position, group, death)));
        }
        expected.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
        let keys: Vec<(u64, &str)> = expected.iter().map(|(p, g, _)| (*p, g.as_str())).collect();
        let got: Vec<(u64, &str)> = list
            .iter()
            .map(|d| (d.record.position.place(), d.group.as_str()))
            .collect();
        assert_eq!(got, keys, "the open dead letters");
        for (letter, (position, group, death)) in list.iter().zip(expected) {
            let context = format!("dead letter {position} of {group:?}: {letter:?}");
            assert_eq!(letter.attempts, death.attempts, "{context}");
            assert!(
                same_failures(&letter.failures, &death.failures),
                "{context}"
            );
            assert_eq!(letter.first_seen_at, death.first_seen_at, "{context}");
            assert_eq!(letter.died_at, death.died_at, "{context}");
            assert_eq!(
                letter.record.event, self.oracle.log[&position].event,
                "{context}"
            );
        }
    }

    /// Handles every event that is left; then nothing may be left and nothing more may come.
    pub(super) async fn drain(&mut self) {
        self.note("drain");
        let groups: Vec<&'static str> = GROUPS
            .iter()
            .map(|(group, _)| *group)
            .filter(|group| self.oracle.groups.contains_key(*group))
            .collect();
        for group in &groups {
            self.seats.remove(group);
            self.oracle.attended(group, false);
        }
        self.fetched.clear();
        let by = Duration::from_secs(600);
        self.stage.advance(by).await;
        self.oracle.advance(by);
        for group in &groups {
            self.attend(group, ROOM).await;
        }
        // Even on a slow disk a delivery must come within this time.
        let mut progress = tokio::time::Instant::now();
        while self
            .oracle
            .groups
            .values()
            .any(|desk| !desk.owed.is_empty())
        {
            for group in &groups {
                if self.oracle.groups[*group].owed.is_empty() {
                    continue;
                }
                let seat = &mut self.seats.get_mut(group).unwrap()[0];
                let number = seat.number;
                let turn = Duration::from_millis(20);
                if let Ok(batch) = tokio::time::timeout(turn, seat.consumer.fetch(ROOM)).await {
                    self.take_note(group, number, batch.unwrap());
                    progress = tokio::time::Instant::now();
                }
                for done in std::mem::take(&mut self.fetched) {
                    self.stage.ack(&done.delivery).await;
                    let position = done.delivery.record.position.place();
                    self.oracle.settled(done.group, position, &Verdict::Ack);
                }
                self.oracle.note_claimable();
            }
            assert!(
                progress.elapsed() < PATIENCE,
                "lost: {:?}",
                self.oracle
                    .groups
                    .values()
                    .map(|d| &d.owed)
                    .collect::<Vec<_>>()
            );
        }
        for seat in self.seats.values_mut().flatten() {
            let turn = Duration::from_millis(5);
            let more = tokio::time::timeout(turn, seat.consumer.fetch(ROOM)).await;
            assert!(more.is_err(), "more came than was owed: {more:?}");
        }
        self.compare_all().await;
        if let Ok(maintenance) = self.stage.engine().maintenance() {
            let report = maintenance.check().await.unwrap();
            assert!(report.is_ok(), "{report:?}");
        }
    }
}
