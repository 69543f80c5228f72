//! The follow-ups of many acks are written together. Each ack still gets its own answer.

use everbus_core::{Code, Error, Event, EventId, Settlement, Verdict};

use crate::{consume, declare, fetch, open, publish, settle};

/// Enough for a statement of many rows, and some more.
const MANY: usize = 40;

fn follow_up(id: EventId, n: usize) -> Event {
    Event::builder("out.done").id(id).json(&n).build().unwrap()
}

// conformance: bus/follow-ups: of many acks with follow-ups in one step, one that is refused or has lost its lease stands alone: the others are applied, each with its follow-up
#[tokio::test]
async fn a_refused_follow_up_among_many_refuses_its_own_ack_alone() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    declare(&engine, "g", "in.*").await;
    let mut consumer = consume(&engine, "g").await;
    for _ in 0..MANY {
        publish(&engine, "in.new").await;
    }
    let deliveries = fetch(&mut consumer, MANY).await;
    let ids: Vec<EventId> = (0..MANY).map(|_| EventId::new()).collect();
    // The id of one is taken by another event, one is an exact repetition, and one delivery was settled before.
    let (taken, repeated, lost) = (7, 11, 23);
    let other = follow_up(ids[taken], 1_000);
    let same = follow_up(ids[repeated], repeated);
    engine.broker.append(vec![other, same]).await.unwrap();
    settle(&engine, &deliveries[lost], Verdict::Ack).await;

    let acks = deliveries.iter().zip(&ids).enumerate();
    let acks = acks.map(|(n, (delivery, id))| {
        let mut ack = Settlement::new(delivery.lease.clone(), Verdict::Ack);
        ack.follow_ups = vec![follow_up(*id, n)];
        ack
    });
    let mut acks: Vec<Settlement> = acks.collect();
    // One lease is settled twice in the same step.
    let mut twice = acks[0].clone();
    let late = EventId::new();
    twice.follow_ups = vec![follow_up(late, 0)];
    acks.push(twice);
    let answers = engine.broker.settle(acks).await.unwrap();
    for (n, answer) in answers.iter().enumerate() {
        let code = answer.as_ref().err().map(Error::code);
        let wanted = match n {
            n if n == taken => Some(Code::IdReused),
            n if n == lost || n == MANY => Some(Code::LeaseLost),
            _ => None,
        };
        assert_eq!(code, wanted, "settlement {n}");
    }
    let lookup = engine.lookup().unwrap();
    for (n, id) in ids.iter().enumerate() {
        let found = lookup.find(*id).await.unwrap();
        let found = found
            .first()
            .map(|record| record.event.json::<usize>().unwrap());
        let wanted = match n {
            n if n == taken => Some(1_000),
            n if n == lost => None,
            n => Some(n),
        };
        assert_eq!(found, wanted, "the follow-up of {n}");
    }
    assert!(lookup.find(late).await.unwrap().is_empty());
    // The refused one is still in flight.
    settle(&engine, &deliveries[taken], Verdict::Ack).await;
    let group = engine.broker.inspect().await.unwrap();
    let group = group
        .iter()
        .find(|group| group.name.as_str() == "g")
        .unwrap();
    assert_eq!((group.behind, group.in_flight, group.waiting), (0, 0, 0));
}
