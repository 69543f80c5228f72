//! The audit trail: numbered without gaps, chained, queried by actor, action, entity and time, and shortened only
//! from its beginning.

use std::time::Duration;

use everbus_core::{Audit, AuditEntry, AuditHead, AuditQuery, Code, Entity, Order};
use serde_json::json;

use super::needs::{AUDIT, RESTART};
use super::stage::code;
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

async fn trail(audit: &dyn Audit, query: AuditQuery) -> Vec<u64> {
    let page = audit.query(query).await.unwrap();
    assert_eq!(page.next, None);
    page.items.iter().map(|record| record.seq).collect()
}

/// What is recorded comes back whole, numbered from 1 without gaps, and survives a restart.
pub async fn a_record_is_kept_whole<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Short, &[&AUDIT]).await?;
    let whole = AuditEntry::new("alice", "order.refund")
        .entity("ORDER", "123")
        .tenant("acme")
        .correlation_id("request-7")
        .trace_id("4bf92f3577b34da6a3ce929d0e0e4736")
        .details(json!({ "amount": 20.5, "why": "späte \u{0} Lieferung", "list": [1, null] }));
    let bare = AuditEntry::new("b\u{1b}[31m", "x");
    let audit = stage.engine().audit().unwrap();
    assert_eq!(audit.head().await.unwrap(), None);
    assert!(audit.verify(None).await.unwrap().is_ok(), "an empty trail");
    assert_eq!(audit.record(whole.clone()).await.unwrap(), 1);
    stage.advance(SECOND).await;
    let audit = stage.engine().audit().unwrap();
    assert_eq!(audit.record(bare.clone()).await.unwrap(), 2);
    if stage.offers(&RESTART) {
        stage.restart().await;
    }
    let audit = stage.engine().audit().unwrap();
    assert_eq!(audit.record(bare.clone()).await.unwrap(), 3);
    let page = audit.query(AuditQuery::default()).await.unwrap();
    let seqs: Vec<u64> = page.items.iter().map(|r| r.seq).collect();
    assert_eq!(seqs, [3, 2, 1], "newest first");
    assert_eq!(page.items[2].entry, whole);
    assert_eq!(page.items[1].entry, bare);
    assert!(page.items[1].at > page.items[2].at);
    let hashes: Vec<_> = page.items.iter().map(|r| r.hash).collect();
    assert!(hashes[0] != hashes[1], "the same entry, another place");
    let head = audit.head().await.unwrap().unwrap();
    assert_eq!((head.seq, head.hash), (3, hashes[0]));
    let verdict = audit.verify(None).await.unwrap();
    assert!(verdict.is_ok(), "{verdict:?}");
    assert_eq!((verdict.verified, verdict.first), (3, Some(1)));
    assert_eq!(verdict.head, Some(head));
    assert!(verdict.notes.is_empty(), "{verdict:?}");
    stage.passed()
}

/// Malformed entries are refused, and take no number.
pub async fn entries_without_sense_are_refused<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&AUDIT]).await?;
    let audit = stage.engine().audit().unwrap();
    let long = "x".repeat(16 * 1024 + 1);
    for entry in [
        AuditEntry::new("", "a"),
        AuditEntry::new("a", ""),
        AuditEntry::new(long.as_str(), "a"),
        AuditEntry::new("a", "b").entity("", "1"),
        AuditEntry::new("a", "b").entity("ORDER", ""),
        AuditEntry::new("a", "b").correlation_id(""),
        AuditEntry::new("a", "b").details(json!("x".repeat(70_000))),
    ] {
        assert_eq!(code(audit.record(entry).await), Code::InvalidAttribute);
    }
    assert_eq!(audit.record(AuditEntry::new("a", "b")).await.unwrap(), 1);
    let backwards = AuditQuery {
        since: Some(everbus_core::Timestamp::from_micros(2)),
        until: Some(everbus_core::Timestamp::from_micros(1)),
        ..AuditQuery::default()
    };
    assert_eq!(code(audit.query(backwards).await), Code::InvalidSetting);
    let huge = AuditQuery {
        limit: 10_001,
        ..AuditQuery::default()
    };
    assert_eq!(code(audit.query(huge).await), Code::InvalidSetting);
    stage.passed()
}

/// The trail can be asked by actor, action, entity and time, in both orders, page by page.
pub async fn the_trail_can_be_asked<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&AUDIT]).await?;
    let audit = stage.engine().audit().unwrap();
    let mut times = Vec::new();
    for n in 0..12u64 {
        times.push(stage.now());
        let actor = ["alice", "bob", "alicia"][n as usize % 3];
        let action = ["dlq.retry", "dlq.retry.done", "dlqx", "order.refund"][n as usize % 4];
        let mut entry = AuditEntry::new(actor, action);
        if n % 2 == 0 {
            entry = entry.entity("ORDER", (n % 4).to_string());
        }
        audit.record(entry).await.unwrap();
        stage.advance(SECOND).await;
    }
    let all = AuditQuery {
        order: Order::Oldest,
        ..AuditQuery::default()
    };
    let by = |change: fn(&mut AuditQuery)| {
        let mut query = all.clone();
        change(&mut query);
        query
    };
    let cases: &[(AuditQuery, &[u64])] = &[
        (by(|q| q.actor = Some("alice".into())), &[1, 4, 7, 10]),
        (by(|q| q.actor = Some("ali".into())), &[]),
        (by(|q| q.action = Some("dlq.retry".into())), &[1, 5, 9]),
        (
            by(|q| q.action = Some("dlq.*".into())),
            &[1, 2, 5, 6, 9, 10],
        ),
        (
            by(|q| q.action = Some("*".into())),
            &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        ),
        (by(|q| q.entity = Some(entity("ORDER", "2"))), &[3, 7, 11]),
        (by(|q| q.entity = Some(entity("TASK", "2"))), &[]),
        (
            by(|q| {
                q.entity = Some(entity("ORDER", "2"));
                q.actor = Some("alicia".into());
            }),
            &[3],
        ),
    ];
    for (query, expected) in cases {
        assert_eq!(trail(audit, query.clone()).await, *expected, "{query:?}");
        let newest = AuditQuery {
            order: Order::Newest,
            ..query.clone()
        };
        let backwards: Vec<u64> = expected.iter().rev().copied().collect();
        assert_eq!(trail(audit, newest).await, backwards, "{query:?}");
    }
    // Both ends of a range belong to it.
    for (since, until, expected) in [
        (Some(times[3]), None, vec![4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (None, Some(times[1]), vec![1, 2]),
        (Some(times[3]), Some(times[5]), vec![4, 5, 6]),
        (Some(times[3].plus(SECOND / 2)), Some(times[5]), vec![5, 6]),
        (Some(times[11].plus(SECOND)), None, vec![]),
        (None, Some(times[0].minus(SECOND)), vec![]),
    ] {
        let query = AuditQuery {
            since,
            until,
            ..all.clone()
        };
        assert_eq!(trail(audit, query).await, expected, "{since:?} {until:?}");
    }
    for order in [Order::Oldest, Order::Newest] {
        let mut query = AuditQuery {
            order,
            limit: 4,
            actor: Some("bob".into()),
            since: Some(times[1]),
            ..AuditQuery::default()
        };
        let mut seen = Vec::new();
        query.limit = 3;
        loop {
            let page = audit.query(query.clone()).await.unwrap();
            assert!(page.items.len() <= 3);
            seen.extend(page.items.iter().map(|r| r.seq));
            match page.next {
                Some(next) => query.after = Some(next),
                None => break,
            }
        }
        if order == Order::Newest {
            seen.reverse();
        }
        assert_eq!(seen, [2, 5, 8, 11]);
    }
    stage.passed()
}

fn entity(kind: &str, id: &str) -> Entity {
    Entity {
        kind: kind.into(),
        id: id.into(),
    }
}

/// Retention takes from the beginning; numbers go on and the chain stays verifiable.
pub async fn forgetting_leaves_a_chain<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&AUDIT]).await?;
    let mut heads = Vec::new();
    let begin = stage.now();
    for n in 0..250u64 {
        let audit = stage.engine().audit().unwrap();
        let entry = AuditEntry::new("a", "b").details(json!({ "n": n }));
        assert_eq!(audit.record(entry).await.unwrap(), n + 1);
        heads.push(audit.head().await.unwrap().unwrap());
        if n % 10 == 9 {
            stage.advance(SECOND).await;
        }
    }
    let audit = stage.engine().audit().unwrap();
    assert_eq!(audit.forgettable(begin).await.unwrap(), 0);
    assert_eq!(audit.forget(begin).await.unwrap(), 0);
    let before = begin.plus(22 * SECOND);
    assert_eq!(audit.forgettable(before).await.unwrap(), 220);
    assert_eq!(audit.forget(before).await.unwrap(), 220);
    assert_eq!(audit.forget(before).await.unwrap(), 0);
    let verdict = audit.verify(Some(heads[249])).await.unwrap();
    assert!(verdict.is_ok(), "{verdict:?}");
    assert_eq!((verdict.verified, verdict.first), (30, Some(221)));
    assert!(verdict.notes.is_empty(), "{verdict:?}");
    let oldest = AuditQuery {
        order: Order::Oldest,
        limit: 1,
        ..AuditQuery::default()
    };
    assert_eq!(audit.query(oldest).await.unwrap().items[0].seq, 221);
    // All of it, and the numbers still go on.
    assert_eq!(audit.forget(begin.plus(100 * SECOND)).await.unwrap(), 30);
    if stage.offers(&RESTART) {
        stage.restart().await;
    }
    let audit = stage.engine().audit().unwrap();
    let verdict = audit.verify(None).await.unwrap();
    assert!(verdict.is_ok(), "{verdict:?}");
    assert_eq!((verdict.verified, verdict.head), (0, Some(heads[249])));
    assert_eq!(audit.record(AuditEntry::new("a", "b")).await.unwrap(), 251);
    assert!(audit.verify(Some(heads[249])).await.unwrap().is_ok());
    stage.passed()
}

/// A head that was kept elsewhere shows whether the trail was changed.
pub async fn a_head_kept_elsewhere_is_compared<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&AUDIT]).await?;
    let audit = stage.engine().audit().unwrap();
    let mut heads = Vec::new();
    for _ in 0..5 {
        audit.record(AuditEntry::new("a", "b")).await.unwrap();
        heads.push(audit.head().await.unwrap().unwrap());
    }
    for head in &heads {
        assert!(audit.verify(Some(*head)).await.unwrap().is_ok());
    }
    let wrong = AuditHead {
        seq: 3,
        hash: heads[3].hash,
    };
    let broken = audit.verify(Some(wrong)).await.unwrap().broken.unwrap();
    assert_eq!(broken.seq, Some(3), "{broken:?}");
    let beyond = AuditHead {
        seq: 8,
        hash: heads[4].hash,
    };
    let broken = audit.verify(Some(beyond)).await.unwrap().broken.unwrap();
    assert_eq!(broken.seq, Some(6), "the first that is missing: {broken:?}");
    assert!(audit.verify(None).await.unwrap().is_ok());
    stage.passed()
}

/// A clock that jumps back does not make times fall.
pub async fn times_in_the_trail_never_fall<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&AUDIT]).await?;
    let audit = stage.engine().audit().unwrap();
    audit.record(AuditEntry::new("a", "b")).await.unwrap();
    let now = stage.now();
    stage.clock.set(now.minus(100 * SECOND));
    audit.record(AuditEntry::new("a", "b")).await.unwrap();
    let items = audit.query(AuditQuery::default()).await.unwrap().items;
    assert!(items[0].at >= items[1].at, "{items:?}");
    assert!(audit.verify(None).await.unwrap().is_ok());
    stage.passed()
}

/// Many records written at once: each has its own number, and none is missing.
pub async fn records_written_at_once_are_all_there<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&AUDIT]).await?;
    let audit = stage.engine().audit.clone().unwrap();
    let writers = (0..8).map(|who| {
        let audit = audit.clone();
        tokio::spawn(async move {
            let mut numbers = Vec::new();
            for _ in 0..20 {
                let entry = AuditEntry::new(format!("writer-{who}"), "x");
                numbers.push(audit.record(entry).await.unwrap());
            }
            numbers
        })
    });
    let writers: Vec<_> = writers.collect();
    let mut numbers = Vec::new();
    for writer in writers {
        let own = writer.await.unwrap();
        assert!(own.is_sorted(), "in the order they were written");
        numbers.extend(own);
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=160).collect::<Vec<u64>>());
    let verdict = audit.verify(None).await.unwrap();
    assert!(verdict.is_ok() && verdict.verified == 160, "{verdict:?}");
    assert_eq!(verdict.mended, None, "the head outside is up to date");
    stage.passed()
}
