use everbus_core::{Clock as _, ConsumeOptions, Event, Pattern, Position, SystemClock};
use everbus_dialects::Dialect;

use super::*;
use crate::offset_metadata::Saved;
use crate::wire::Read;

const SEAT: u64 = 1;
/// How long a commit takes.
const STEP: Duration = Duration::from_millis(1);

struct Table {
    board: Board,
    topic: Arc<Topic>,
    slot: u32,
    now: Instant,
    tokens: std::cell::Cell<u64>,
}

fn all() -> Vec<Pattern> {
    vec![Pattern::new("*").unwrap()]
}

impl Table {
    fn new(ordered: bool, saved: Option<Saved>) -> Self {
        let mut board = Board::new(ordered, 0);
        let topic = Arc::new(Topic::for_tests("board", Dialect::Native));
        board.open_part(topic.clone(), 0, 0, saved);
        board.sit(
            SEAT,
            ConsumeOptions::new(all()).lease(Duration::from_secs(5)),
        );
        let slot = board.slot(topic.shard(0)).unwrap();
        Self {
            board,
            topic,
            slot,
            now: Instant::now(),
            tokens: std::cell::Cell::new(1),
        }
    }

    fn token(&self) -> u64 {
        self.tokens.set(self.tokens.get() + 1);
        self.tokens.get()
    }

    fn arrive(&mut self, place: u64, key: &str, wanted: bool) -> Arrived {
        let event = Event::builder("a.b").key(key).build().unwrap();
        let position = Position::new(self.topic.shard(0), place);
        let read = Read {
            record: Recorded::new(event, position, Timestamp::EPOCH),
            foreign: None,
            untyped: false,
        };
        self.board
            .arrive(self.slot, read, wanted, (self.now, SystemClock.now()))
    }

    /// Claims events and hands them out. Returns places, tokens and attempts.
    fn take(&mut self, max: usize) -> Vec<(u64, u64, u32)> {
        self.board.tick(self.now, Timestamp::EPOCH);
        let tokens = std::mem::take(&mut self.tokens);
        let next = || {
            tokens.set(tokens.get() + 1);
            tokens.get()
        };
        let claimed = self.board.claim(SEAT, max, self.now, STEP, next);
        self.tokens = tokens;
        let now = self.now;
        claimed
            .into_iter()
            .map(|(id, token, _)| {
                let held = self
                    .board
                    .deliver(id, token, now, Timestamp::EPOCH)
                    .unwrap();
                (id.1, token, held.attempt)
            })
            .collect()
    }

    fn settle(&mut self, place: u64, token: u64, change: Change) -> Option<u64> {
        self.board
            .settle((self.slot, place), token, change, self.now)
    }

    fn done(&mut self, place: u64, token: u64) {
        self.settle(place, token, Change::Finished { dead: false })
            .unwrap();
    }

    /// What another process would read if this one died now.
    fn committed(&mut self) -> Saved {
        let all = self.board.snapshots(true, self.now);
        let last = all.last().expect("something to commit");
        let floor = u64::try_from(last.offset).unwrap();
        Saved::decode(floor, &last.metadata).unwrap()
    }
}

fn places(taken: &[(u64, u64, u32)]) -> Vec<u64> {
    taken.iter().map(|(place, ..)| *place).collect()
}

// conformance: contract/kafka-floor: the committed offset never passes an event that is not finished
#[test]
fn the_floor_stays_below_what_is_unfinished() {
    let mut table = Table::new(false, None);
    for place in 1..=6 {
        table.arrive(place, "k", place != 2);
    }
    let taken = table.take(10);
    assert_eq!(places(&taken), [1, 3, 4, 5, 6]);
    for (place, token, _) in &taken[1..] {
        table.done(*place, *token);
    }
    let saved = table.committed();
    assert_eq!((saved.progress.floor(), saved.progress.highest()), (0, 6));
    table.done(1, taken[0].1);
    assert_eq!(table.committed().progress.floor(), 6);
}

#[test]
fn an_attempt_is_in_the_commit_before_the_event_is_handed_out() {
    let mut table = Table::new(false, None);
    table.arrive(1, "k", true);
    table.arrive(2, "k", true);
    let token = table.token();
    let claimed = table.board.claim(SEAT, 1, table.now, STEP, || token);
    assert_eq!(claimed, [((table.slot, 1), token, 1)]);
    assert!(table.board.is_dirty());
    let saved = table.committed();
    assert_eq!(saved.entry(1), Some(Entry::BEGUN));
    assert_eq!(saved.entry(2), None, "only claimed events have begun");
    table.board.give_back(&claimed);
    assert_eq!(table.committed().entry(1).unwrap().attempts, 0);
    assert_eq!(
        table.take(5).iter().map(|t| t.2).collect::<Vec<_>>(),
        [1, 1]
    );
}

#[test]
fn what_was_running_comes_one_at_a_time_and_at_last_alone() {
    let mut saved = Saved::new(0);
    saved.begun = 3;
    let poison = Entry {
        attempts: 3,
        ..Entry::BEGUN
    };
    saved.entries.insert(3, poison);
    let mut table = Table::new(false, Some(saved));
    for place in 1..=5 {
        table.arrive(place, "k", true);
    }
    assert_eq!(
        places(&table.take(10)),
        [3],
        "it has crashed three processes"
    );
    let taken = table.committed();
    assert!(taken.entry(3).unwrap().alone);
    assert!(table.take(10).is_empty(), "it runs alone");
    table.done(3, 2);
    let taken = table.take(10);
    assert_eq!(
        places(&taken),
        [1, 4, 5],
        "of the other suspects one at a time"
    );
    assert_eq!(taken[0].2, 2);
    table.done(1, taken[0].1);
    assert_eq!(places(&table.take(10)), [2]);
}

#[test]
fn a_key_goes_in_order_in_an_ordered_group() {
    let mut table = Table::new(true, None);
    for (place, key) in [(1, "a"), (2, "a"), (3, "b"), (4, "a")] {
        table.arrive(place, key, true);
    }
    let taken = table.take(10);
    assert_eq!(places(&taken), [1, 3]);
    let failure = Failure::new(1, Timestamp::EPOCH, FailureKind::Error, "x");
    let after = Duration::from_secs(1);
    table
        .settle(1, taken[0].1, Change::Failed { after, failure })
        .unwrap();
    assert!(table.take(10).is_empty(), "the first of the key waits");
    table.now += after;
    let again = table.take(10);
    assert_eq!((again[0].0, again[0].2, again.len()), (1, 2, 1));
    table.done(1, again[0].1);
    assert_eq!(places(&table.take(10)), [2]);
}

#[test]
fn a_lease_that_ended_is_lost_and_its_event_comes_again() {
    let mut table = Table::new(false, None);
    table.arrive(1, "k", true);
    let first = table.take(1)[0];
    table.now += Duration::from_secs(6);
    assert!(
        table
            .settle(1, first.1, Change::Finished { dead: false })
            .is_none()
    );
    let again = table.take(1)[0];
    assert_eq!((again.0, again.2), (1, 2));
    assert!(
        table
            .settle(1, first.1, Change::Finished { dead: false })
            .is_none()
    );
    table.done(1, again.1);
    assert!(
        table
            .settle(1, again.1, Change::Finished { dead: false })
            .is_none(),
        "once"
    );
}

#[test]
fn a_partition_that_goes_takes_its_leases_and_leaves_its_attempts() {
    let mut table = Table::new(false, None);
    for place in 1..=3 {
        table.arrive(place, "k", true);
    }
    let taken = table.take(2);
    table.done(2, taken[1].1);
    let shard = table.topic.shard(0);
    let last = table.board.close_shard(shard).unwrap();
    assert!(
        table
            .board
            .find(shard, 1, taken[0].1, table.now, Timestamp::EPOCH)
            .is_none()
    );
    assert_eq!(table.board.held(), 0);
    let saved = Saved::decode(0, &last.metadata).unwrap();
    assert!(saved.progress.is_done(2));
    let entry = saved.entry(1).unwrap();
    assert_eq!(
        (entry.attempts, entry.last, entry.lost),
        (1, Last::Lost, 1),
        "no suspicion"
    );
    assert_eq!(saved.entry(3), None);
}

#[test]
fn a_partition_that_goes_while_an_event_runs_alone_blocks_nothing() {
    let mut saved = Saved::new(0);
    saved.begun = 1;
    let poison = Entry {
        attempts: 3,
        ..Entry::BEGUN
    };
    saved.entries.insert(1, poison);
    let mut table = Table::new(false, Some(saved));
    table.arrive(1, "k", true);
    assert_eq!(places(&table.take(10)), [1]);
    let shard = table.topic.shard(0);
    let last = table.board.close_shard(shard).unwrap();
    let saved = Saved::decode(0, &last.metadata).unwrap();
    assert_eq!(
        (
            saved.entry(1).unwrap().attempts,
            saved.entry(1).unwrap().alone
        ),
        (4, false)
    );
    table.board.open_part(table.topic.clone(), 0, 0, None);
    table.slot = table.board.slot(shard).unwrap();
    table.arrive(1, "k", true);
    table.arrive(2, "k", true);
    assert_eq!(
        places(&table.take(10)),
        [1, 2],
        "nothing runs alone any more"
    );
}

#[test]
fn a_topic_that_was_created_again_is_read_from_its_beginning() {
    let mut table = Table::new(false, Some(Saved::new(100)));
    assert_eq!(table.arrive(1, "k", true), Arrived::Anew);
    assert_eq!(table.arrive(2, "k", true), Arrived::Expected);
    assert_eq!(places(&table.take(10)), [1, 2]);
    assert_eq!(
        table.arrive(9, "k", true),
        Arrived::Gap(6),
        "the server removed records"
    );
}

#[test]
fn a_partition_begins_no_more_than_its_metadata_has_room_for() {
    let mut table = Table::new(false, None);
    for place in 1..=2000 {
        table.arrive(place, "k", true);
    }
    table.board.set_prefetch(SEAT, 10_000);
    let taken = table.take(10_000);
    assert_eq!(taken.len(), MOST_OPEN);
    for (place, token, _) in &taken {
        let failure = Failure::new(1, Timestamp::EPOCH, FailureKind::Error, "x");
        let after = Duration::from_secs(place % 50);
        table
            .settle(*place, *token, Change::Failed { after, failure })
            .unwrap();
    }
    let saved = table.committed();
    assert!(
        (1..=400).all(|place| saved.entry(place).unwrap().attempts == 1),
        "all of them fit"
    );
    assert!(saved.entries.values().any(|entry| entry.due.is_some()));
}

// conformance: contract/kafka-full-partition: events that no consumer takes stop only their partition
#[test]
fn a_full_partition_holds_up_no_other() {
    let mut table = Table::new(false, None);
    let other = Arc::new(Topic::for_tests("other", Dialect::Native));
    table.board.open_part(other.clone(), 0, 0, None);
    let load = |table: &Table, name: &str| {
        let mut loads = table.board.loads();
        loads.find(|((topic, _), ..)| topic == name).unwrap().1
    };
    // The only consumer takes none of these events, and there is one more than a partition holds.
    table.board.set_handled(SEAT, vec![]);
    for place in 1..=MOST_FRESH as u64 {
        table.arrive(place, "k", true);
    }
    assert_eq!(load(&table, "board"), Load::Some);
    table.arrive(MOST_FRESH as u64 + 1, "k", true);
    assert_eq!(load(&table, "board"), Load::Full);
    assert_eq!(load(&table, "other"), Load::Light);
    table.board.set_handled(SEAT, all());
    table.board.set_prefetch(SEAT, 10_000);
    while load(&table, "board") != Load::Light {
        let taken = table.take(10_000);
        assert!(!taken.is_empty());
        for (place, token, _) in taken {
            table.done(place, token);
        }
    }
}

// conformance: contract/kafka-between-unwanted: events between records that the group does not want are handed out, however many of those were fetched
#[test]
fn events_between_unwanted_records_are_handed_out() {
    let mut table = Table::new(false, None);
    table.board.set_prefetch(SEAT, 10_000);
    const RECORDS: u64 = 2 * MOST_FRESH as u64;
    for place in 1..=RECORDS {
        table.arrive(place, "k", place % 2 == 1);
    }
    let mut finished = 0;
    while finished < RECORDS / 2 {
        let taken = table.take(10_000);
        assert!(!taken.is_empty(), "{finished} of {} events", RECORDS / 2);
        let saved = table.committed();
        let last = taken.iter().map(|(place, ..)| *place).max();
        assert!(saved.progress.highest() <= last.unwrap(), "only what begun");
        // In reverse order, so that most is done above the floor.
        for (place, token, _) in taken.into_iter().rev() {
            table.done(place, token);
            finished += 1;
        }
    }
    assert_eq!(table.committed().progress.floor(), RECORDS);
}

#[test]
fn large_events_fill_a_partition_by_their_size() {
    let mut table = Table::new(false, None);
    let payload = format!("\"{}\"", "x".repeat((1 << 20) - 2));
    for place in 1..=33 {
        assert_ne!(table.board.loads().next().unwrap().1, Load::Full);
        let event = Event::builder("a.b").payload(payload.clone()).build();
        let position = Position::new(table.topic.shard(0), place);
        let read = Read {
            record: Recorded::new(event.unwrap(), position, Timestamp::EPOCH),
            foreign: None,
            untyped: false,
        };
        let now = (table.now, SystemClock.now());
        table.board.arrive(table.slot, read, true, now);
    }
    assert_eq!(table.board.loads().next().unwrap().1, Load::Full);
    while table.board.loads().next().unwrap().1 != Load::Light {
        let taken = table.take(33);
        assert!(!taken.is_empty());
        for (place, token, _) in taken {
            table.done(place, token);
        }
    }
}

// conformance: contract/kafka-refused-commit: a partition that cannot be committed holds up the commits of no other
#[test]
fn a_partition_that_is_not_committed_is_left_out_for_a_while() {
    let mut table = Table::new(false, None);
    let other = Arc::new(Topic::for_tests("other", Dialect::Native));
    table.board.open_part(other.clone(), 0, 0, None);
    table.arrive(1, "k", true);
    table.take(1);
    let refused = table.board.snapshots(false, table.now);
    assert_eq!(refused.len(), 1);
    table.board.refuse_commits(refused[0].slot, table.now);
    assert!(table.board.snapshots(true, table.now).is_empty());
    assert!(table.board.is_dirty(), "it is not forgotten");
    table.now += AFTER_REFUSAL;
    let again = table.board.snapshots(false, table.now);
    assert_eq!((again.len(), again[0].slot), (1, refused[0].slot));
}

// conformance: contract/kafka-untyped: a record of another program that no subscription can match is handed out to be dead-lettered, and is not passed over
#[test]
fn a_foreign_record_needs_no_handler() {
    let mut table = Table::new(false, None);
    table.board.set_handled(SEAT, vec![]);
    let event = Event::builder("topic").build().unwrap();
    let read = |place, untyped| {
        let position = Position::new(table.topic.shard(0), place);
        let record = Recorded::new(event.clone(), position, Timestamp::EPOCH);
        let foreign = None;
        Read {
            record,
            foreign,
            untyped,
        }
    };
    let (mut untyped, mut typed) = (read(1, true), read(2, false));
    assert!(untyped.is_for_all(&table.topic) && !typed.is_for_all(&table.topic));
    let now = (table.now, SystemClock.now());
    table.board.arrive(table.slot, untyped, true, now);
    table.board.refilter(|_| false);
    assert_eq!(places(&table.take(10)), [1]);
}

// conformance: contract/kafka-board: under random work and random ends of the process every event is finished, and none is passed over
#[test]
fn random_work_and_random_ends_pass_over_nothing() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut finished: BTreeSet<u64> = BTreeSet::new();
        let mut saved: Option<Saved> = None;
        let ordered = random.bool();
        const EVENTS: u64 = 120;
        let mut rounds = 0;
        while finished.len() < EVENTS as usize {
            rounds += 1;
            assert!(rounds < 5000, "seed {seed}: {} of {EVENTS}", finished.len());
            let mut table = Table::new(ordered, saved.clone());
            let mut next = saved.as_ref().map_or(0, |saved| saved.progress.floor()) + 1;
            let mut held: Vec<(u64, u64)> = Vec::new();
            for _ in 0..random.usize(1..300) {
                match random.u32(0..6) {
                    0 | 1 => {
                        for _ in 0..random.u32(1..9) {
                            if next <= EVENTS {
                                table.arrive(next, &format!("k{}", next % 5), true);
                                next += 1;
                            }
                        }
                    }
                    2 | 3 => {
                        let taken = table.take(random.usize(1..8));
                        for (place, token, attempt) in taken {
                            assert!(attempt > 0);
                            assert!(
                                !finished.contains(&place),
                                "seed {seed}: {place} was committed as done"
                            );
                            held.push((place, token));
                        }
                        saved = Some(table.committed_or(saved));
                    }
                    4 => table.now += Duration::from_secs(random.u64(0..3)),
                    _ => {
                        let Some((place, token)) = held.pop() else {
                            continue;
                        };
                        let change = match random.u32(0..4) {
                            0 => Change::Failed {
                                after: Duration::ZERO,
                                failure: Failure::new(1, Timestamp::EPOCH, FailureKind::Error, "x"),
                            },
                            1 => Change::Released {
                                after: Duration::ZERO,
                            },
                            _ => Change::Finished { dead: false },
                        };
                        let ends = matches!(change, Change::Finished { .. });
                        let applied = table.settle(place, token, change).is_some();
                        // The answer comes after the commit.
                        saved = Some(table.committed_or(saved));
                        if ends && applied {
                            finished.insert(place);
                        }
                    }
                }
                if let Some(saved) = &saved {
                    let floor = saved.progress.floor();
                    assert!(
                        (1..=floor).all(|place| finished.contains(&place)),
                        "seed {seed}: passed over"
                    );
                }
            }
        }
    }
}

impl Table {
    fn committed_or(&mut self, before: Option<Saved>) -> Saved {
        let all = self.board.snapshots(true, self.now);
        match all.last() {
            Some(last) => {
                let floor = u64::try_from(last.offset).unwrap();
                self.board.committed(last.slot, last.version);
                Saved::decode(floor, &last.metadata).unwrap()
            }
            None => before.unwrap_or_else(|| Saved::new(0)),
        }
    }
}

#[test]
fn quick_handlers_are_handed_more_with_each_commit() {
    let mut table = Table::new(false, None);
    let options = ConsumeOptions::new(all()).concurrency(4).prefetch(1000);
    table.board.sit(SEAT, options);
    for place in 1..=400 {
        table.arrive(place, &format!("k{place}"), true);
    }
    let mut most = 0;
    let mut held = table.take(1000);
    for _ in 0..8 {
        most = most.max(held.len());
        table.now += STEP;
        // Outcomes come in portions, and the consumer claims more events after each portion.
        let mut more = Vec::new();
        for portion in held.chunks(held.len() / 8 + 1) {
            for (place, token, _) in portion {
                table.done(*place, *token);
            }
            more.extend(table.take(1000));
        }
        held = more;
    }
    assert!(most >= 100, "at most {most} at a time");
}

#[test]
fn slow_handlers_are_handed_what_can_run() {
    let mut table = Table::new(false, None);
    let options = ConsumeOptions::new(all()).concurrency(4).prefetch(1000);
    table.board.sit(SEAT, options);
    for place in 1..=100 {
        table.arrive(place, &format!("k{place}"), true);
    }
    for _ in 0..5 {
        let taken = table.take(1000);
        assert_eq!(taken.len(), 4);
        table.now += 1000 * STEP;
        for (place, token, _) in taken {
            table.done(place, token);
        }
    }
}

// A delivery that is dead-lettered without a failure of its own keeps the reason.
#[test]
fn the_reason_why_a_record_cannot_be_read_stays_with_its_lease() {
    let mut table = Table::new(false, None);
    let event = Event::builder("a.b").build().unwrap();
    let position = Position::new(table.topic.shard(0), 1);
    let read = Read {
        record: Recorded::new(event, position, Timestamp::EPOCH),
        foreign: Some("not JSON".to_owned()),
        untyped: false,
    };
    let now = (table.now, SystemClock.now());
    table.board.arrive(table.slot, read, true, now);
    let taken = table.take(1);
    let shard = table.topic.shard(0);
    let found = table
        .board
        .find(shard, 1, taken[0].1, table.now, Timestamp::EPOCH);
    let failures = found.unwrap().1.failures;
    let failure = failures.first().unwrap();
    assert_eq!(
        (failure.kind, &*failure.error),
        (FailureKind::Corrupt, "not JSON")
    );
}

// conformance: contract/kafka-ahead: events that were claimed before the consumer asked for them are given back if it does not ask, and count no attempt
#[test]
fn what_was_claimed_ahead_and_is_not_asked_for_comes_again() {
    let mut table = Table::new(false, None);
    for place in 1..=3 {
        table.arrive(place, "k", true);
    }
    let now = table.now;
    assert!(table.board.claim_ahead(SEAT, vec![], 2, now, STEP, || 7));
    assert_eq!(places(&table.take(10)), [3], "the others are claimed");
    table.now += Duration::from_millis(2400);
    assert!(table.take(10).is_empty());
    table.now += Duration::from_millis(200);
    let taken = table.take(10);
    assert_eq!(
        (places(&taken), taken[0].2),
        (vec![1, 2], 1),
        "half a lease later they are free, without an attempt"
    );
    for (place, token, _) in taken {
        table.done(place, token);
    }
    table.arrive(4, "k", true);
    let now = table.now;
    assert!(table.board.claim_ahead(SEAT, vec![], 2, now, STEP, || 8));
    let ahead = table.board.take_ahead(SEAT);
    assert_eq!(ahead.len(), 1);
    table.now += Duration::from_secs(60);
    assert_eq!(
        places(&table.take(10)),
        [3],
        "what the consumer has asked for is not given back, and the lease of 3 has ended"
    );
}

#[test]
fn claims_ahead_are_handed_out_in_order_once_they_are_durable() {
    let mut table = Table::new(false, None);
    for place in 1..=6 {
        table.arrive(place, "k", true);
    }
    let (now, slot) = (table.now, table.slot);
    let mut rest = table.board.claim(SEAT, 3, now, STEP, || 7);
    let version = table.board.version(slot);
    rest.remove(0);
    assert!(table.board.claim_ahead(SEAT, rest, 2, now, STEP, || 8));
    let ahead = table.board.take_ahead(SEAT);
    let places: Vec<u64> = ahead.iter().map(|(id, ..)| id.1).collect();
    assert_eq!(places, [2, 3, 4, 5], "the earlier claim comes first");
    assert_eq!(table.board.stored(&ahead), 0);
    table.board.committed(slot, version);
    assert_eq!(
        table.board.stored(&ahead),
        2,
        "the later claim is not committed"
    );
    assert!(!table.board.claim_ahead(SEAT, ahead, 0, now, STEP, || 9));
    let ahead = table.board.take_ahead(SEAT);
    assert_eq!(ahead.len(), 4, "none is forgotten");
    table.board.close_shard(table.topic.shard(0));
    assert_eq!(table.board.stored(&ahead), 4, "nothing is waited for");
}

// conformance: contract/kafka-room: what has begun and was given back is handed out also while no other event of its partition may begin
#[test]
fn what_was_given_back_comes_before_what_may_not_begin() {
    let mut table = Table::new(false, None);
    table.board.set_prefetch(SEAT, 10_000);
    for place in 1..=2000 {
        table.arrive(place, "k", true);
    }
    let taken = table.take(10_000);
    assert_eq!(taken.len(), MOST_OPEN);
    for (place, token, _) in &taken {
        let after = Duration::ZERO;
        table
            .settle(*place, *token, Change::Released { after })
            .unwrap();
    }
    let again = table.take(10_000);
    assert_eq!(places(&again), places(&taken));
    for (place, token, _) in again {
        table.done(place, token);
    }
    assert_eq!(table.take(10_000)[0].0, MOST_OPEN as u64 + 1);
}
