//! The history: every combination of names, in both directions, page by page, while events come and go.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Code, Cursor, Event, History, HistoryQuery, Order, Pattern, Position, Recorded, Retention,
    Timestamp,
};

use super::needs::{HISTORY, LOG, RESTART};
use super::stage::code;
use super::{Harness, Outcome, Stage, Time};
use crate::model::Random;

const TYPES: [&str; 3] = ["order.placed", "order.paid", "Task Completed"];

fn history<H: Harness>(stage: &Stage<H>) -> &dyn History {
    stage.engine().history().unwrap()
}

fn pattern(text: &str) -> Pattern {
    Pattern::new(text).unwrap()
}

/// An event with some names; the empty text is none.
fn named(event_type: &str, tenant: &str, app: &str, entity: (&str, &str)) -> Event {
    correlated(event_type, tenant, app, entity, "")
}

fn correlated(
    event_type: &str,
    tenant: &str,
    app: &str,
    entity: (&str, &str),
    correlation: &str,
) -> Event {
    let mut event = Event::builder(event_type).payload("{}");
    if !correlation.is_empty() {
        event = event.correlation_id(correlation);
    }
    if !tenant.is_empty() {
        event = event.tenant(tenant);
    }
    if !app.is_empty() {
        event = event.app(app);
    }
    if !entity.0.is_empty() {
        event = event.entity(entity.0, entity.1);
    }
    event.build().unwrap()
}

/// All that is in the log.
async fn everything<H: Harness>(stage: &Stage<H>) -> Vec<Arc<Recorded>> {
    let (mut all, mut after) = (Vec::new(), Cursor::START);
    loop {
        let patterns = vec![pattern("*"), pattern("system.>")];
        let (some, searched) = stage
            .log()
            .read(after.clone(), patterns, 1000)
            .await
            .unwrap();
        all.extend(some);
        if searched == after {
            return all;
        }
        after = searched;
    }
}

/// All events that a query should find.
fn expected(all: &[Arc<Recorded>], query: &HistoryQuery) -> Vec<Position> {
    let wanted = all.iter().filter(|record| {
        query.matches(&record.event)
            && query.since.is_none_or(|since| record.received_at >= since)
            && query.until.is_none_or(|until| record.received_at <= until)
    });
    let mut positions: Vec<Position> = wanted.map(|record| record.position).collect();
    if query.order == Order::Newest {
        positions.reverse();
    }
    positions
}

/// All pages of a query; none is empty but the first, and all but the last are full.
async fn pages(history: &dyn History, query: &HistoryQuery) -> Vec<Position> {
    let mut found = Vec::new();
    let mut asked = query.clone();
    loop {
        let page = history.query(asked.clone()).await.unwrap();
        let positions = page.items.iter().map(|record| record.position);
        found.extend(positions);
        let Some(next) = page.next else {
            return found;
        };
        assert_eq!(page.items.len(), query.limit, "only the last is not full");
        // As text, as it goes through a command line.
        asked.cursor = Some(next.as_str().parse().unwrap());
    }
}

/// Every combination of the four names, wildcards and nothing at all.
fn combinations() -> Vec<HistoryQuery> {
    let mut queries = vec![HistoryQuery::default()];
    for (index, with) in [
        (|q: HistoryQuery| q.tenant("acme")) as fn(HistoryQuery) -> HistoryQuery,
        |q| q.app("shop"),
        |q| q.entity("ORDER", "1"),
        |q| q.types(pattern("order.placed")),
        |q| q.types(pattern("order.*")),
    ]
    .into_iter()
    .enumerate()
    {
        let more: Vec<HistoryQuery> = queries
            .iter()
            .filter(|q| index < 4 || q.types.is_none())
            .map(|q| with(q.clone()))
            .collect();
        queries.extend(more);
    }
    queries
}

/// Each of the eight patterns and all other combinations find what has those names, and nothing else.
pub async fn every_pattern_finds_its_events<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&HISTORY, &LOG]).await?;
    for round in 0..3 {
        let mut batch = Vec::new();
        for tenant in ["", "acme", "other"] {
            for app in ["", "shop", "mail"] {
                for entity in [("", ""), ("ORDER", "1"), ("ORDER", "2"), ("TASK", "1")] {
                    batch.extend(TYPES.map(|kind| named(kind, tenant, app, entity)));
                }
            }
        }
        stage.append_all(batch).await;
        let all = everything(&stage).await;
        assert_eq!(all.len(), (round + 1) * 108);
        for query in combinations() {
            for order in [Order::Newest, Order::Oldest] {
                for limit in [1000, 7] {
                    let query = query.clone().order(order).limit(limit);
                    let wanted = expected(&all, &query);
                    let found = pages(history(&stage), &query).await;
                    assert!(!wanted.is_empty());
                    assert_eq!(found, wanted, "{query:?}");
                    let count = history(&stage).count(query.clone(), u64::MAX).await;
                    assert_eq!(count.unwrap(), wanted.len() as u64, "{query:?}");
                    let few = history(&stage).count(query.clone(), 2).await.unwrap();
                    assert_eq!(few, 2.min(wanted.len() as u64), "up to a limit");
                }
            }
        }
        if round == 1 && stage.offers(&RESTART) {
            stage.restart().await;
        }
    }
    for without_events in [
        HistoryQuery::default().tenant("nobody"),
        HistoryQuery::default().app("nothing"),
        HistoryQuery::default().entity("ORDER", "3"),
        HistoryQuery::default().entity("order", "1"),
        HistoryQuery::default().types(pattern("order.lost")),
        HistoryQuery::default().tenant("acme").types(pattern("x.>")),
    ] {
        let page = history(&stage).query(without_events).await.unwrap();
        assert!(page.items.is_empty() && page.next.is_none());
    }
    stage.passed()
}

/// The ends of a range belong to it.
pub async fn since_and_until_are_inclusive<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&HISTORY, &LOG]).await?;
    let mut times = Vec::new();
    for _ in 0..20 {
        let event = named("order.placed", "acme", "shop", ("ORDER", "1"));
        times.push(stage.append(event).await.received_at);
        stage.append(named("order.paid", "", "", ("", ""))).await;
        stage.advance(Duration::from_secs(1)).await;
    }
    let all = everything(&stage).await;
    let tick = |at: Timestamp, by: i64| Timestamp::from_micros(at.as_micros() + by);
    let (from, to) = (times[5], times[12]);
    for query in [
        HistoryQuery::default(),
        HistoryQuery::default().tenant("acme"),
        HistoryQuery::default().types(pattern("order.paid")),
    ] {
        for order in [Order::Newest, Order::Oldest] {
            for limit in [3, 100] {
                for (since, until) in [
                    (Some(from), Some(to)),
                    (Some(tick(from, 1)), Some(tick(to, -1))),
                    (Some(from), None),
                    (None, Some(to)),
                    (Some(from), Some(from)),
                    (
                        Some(Timestamp::EPOCH),
                        Some(Timestamp::from_micros(i64::MAX)),
                    ),
                    (Some(tick(times[19], 10_000_000)), None),
                    (None, Some(tick(times[0], -1))),
                ] {
                    let mut query = query.clone().order(order).limit(limit);
                    (query.since, query.until) = (since, until);
                    let found = pages(history(&stage), &query).await;
                    assert_eq!(found, expected(&all, &query), "{query:?}");
                }
            }
        }
    }
    let seven = HistoryQuery::default().tenant("acme").since(from).until(to);
    let found = history(&stage).query(seven).await.unwrap();
    assert_eq!(found.items.len(), 8, "both ends are in it");
    stage.passed()
}

/// Events appended or removed between two pages do not move the second page.
pub async fn cursors_stay_where_they_are<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&HISTORY]).await?;
    let event = || named("order.placed", "acme", "shop", ("ORDER", "1"));
    let mut all = Vec::new();
    for _ in 0..40 {
        let appended = stage.append(event()).await;
        all.push(stage.read_at(&appended).await);
    }
    let from_to = |from: usize, to: usize| all[from - 1..to].to_vec();
    let back = |from: usize, to: usize| -> Vec<Position> {
        all[from - 1..to].iter().rev().copied().collect()
    };
    let newest = HistoryQuery::default().tenant("acme").limit(10);
    let oldest = newest.clone().order(Order::Oldest);
    let positions = |page: &everbus_core::HistoryPage| -> Vec<Position> {
        page.items.iter().map(|record| record.position).collect()
    };
    let first = history(&stage).query(newest.clone()).await.unwrap();
    assert_eq!(positions(&first), back(31, 40));
    let upward = history(&stage).query(oldest.clone()).await.unwrap();
    assert_eq!(positions(&upward), from_to(1, 10));

    for _ in 0..40 {
        stage.append(event()).await;
    }
    let next = newest.clone().after(first.next.unwrap());
    let second = history(&stage).query(next.clone()).await.unwrap();
    assert_eq!(positions(&second), back(21, 30));

    // The oldest 25 go, and with them the event that one of the cursors points to.
    let retention = Retention {
        max_len: Some(55),
        ..Retention::default()
    };
    let maintenance = stage.engine().maintenance().unwrap();
    let pruned = maintenance.prune(retention).await.unwrap();
    assert_eq!(pruned.removed, 25);
    let second = history(&stage).query(next.clone()).await.unwrap();
    assert_eq!(positions(&second), back(26, 30));
    assert!(second.next.is_none(), "a page that ends with the last");
    let onward = oldest.after(upward.next.unwrap());
    let page = history(&stage).query(onward).await.unwrap();
    assert_eq!(positions(&page), from_to(26, 35));
    if stage.offers(&RESTART) {
        stage.restart().await;
        let second = history(&stage).query(next).await.unwrap();
        assert_eq!(positions(&second), back(26, 30));
    }
    stage.passed()
}

/// Refuses a cursor of another query, an empty page, and a range that ends before it starts.
pub async fn queries_that_make_no_sense_are_refused<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&HISTORY]).await?;
    for _ in 0..3 {
        stage.publish("order.placed").await;
    }
    let history = history(&stage);
    let page = history.query(HistoryQuery::default().limit(1)).await;
    let cursor = page.unwrap().next.unwrap();
    let other = HistoryQuery::default().tenant("acme").after(cursor);
    assert_eq!(code(history.query(other).await), Code::InvalidCursor);
    for limit in [0, 10_001] {
        let query = HistoryQuery::default().limit(limit);
        assert_eq!(code(history.query(query).await), Code::InvalidSetting);
    }
    let backwards = HistoryQuery::default()
        .since(Timestamp::from_micros(2))
        .until(Timestamp::from_micros(1));
    let refused = history.count(backwards.clone(), 1).await;
    assert_eq!(code(refused), Code::InvalidSetting);
    assert_eq!(code(history.query(backwards).await), Code::InvalidSetting);
    stage.passed()
}

/// Names with odd characters, names that would be equal when joined, and names that another attribute also has.
pub async fn names_are_compared_whole<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&HISTORY, &LOG]).await?;
    let odd = [
        "a",
        "ab",
        "a\"b",
        "a\\",
        "ä€😀",
        "a#b",
        "a b",
        "%",
        "_",
        "1",
        "\u{7f}x",
    ];
    for one in odd {
        for other in ["a", "b", "a\"b"] {
            stage.append(named("t", one, other, ("K", "x"))).await;
            stage.append(named("t", other, "", (one, other))).await;
            stage.append(named("t", "", one, (other, one))).await;
        }
        let lookalike = Event::builder("t")
            .meta("app", one)
            .meta("tenant", one)
            .source(one)
            .key(one)
            .correlation_id(one);
        stage.append(lookalike.build().unwrap()).await;
    }
    let all = everything(&stage).await;
    for one in odd {
        for other in ["a", "b", "a\"b", "x"] {
            for query in [
                HistoryQuery::default().tenant(one),
                HistoryQuery::default().app(one),
                HistoryQuery::default().entity(one, other),
                HistoryQuery::default().entity(other, one),
                HistoryQuery::default().tenant(one).app(other),
                HistoryQuery::default().tenant(one).entity("K", other),
                HistoryQuery::default().app(one).entity(other, one),
            ] {
                let found = pages(history(&stage), &query).await;
                assert_eq!(found, expected(&all, &query), "{query:?}");
            }
        }
    }
    stage.passed()
}

/// A page ends early when its payloads are large: thirty megabytes do not come in one page.
pub async fn a_page_of_large_events_ends_early<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&HISTORY]).await?;
    let text = format!("\"{}\"", "x".repeat(1_000_000));
    let mut published = Vec::new();
    for _ in 0..30 {
        let event = Event::builder("order.placed").tenant("acme");
        let event = event.payload(text.clone()).build().unwrap();
        let appended = stage.append(event).await;
        published.push(stage.read_at(&appended).await);
    }
    let mut query = HistoryQuery::default().tenant("acme");
    let mut found = Vec::new();
    let mut count = 0;
    loop {
        let page = history(&stage).query(query.clone()).await.unwrap();
        found.extend(page.items.iter().map(|record| record.position));
        count += 1;
        match page.next {
            Some(next) => query.cursor = Some(next),
            None => break,
        }
    }
    published.reverse();
    assert_eq!(found, published);
    assert_eq!(count, 2, "pages of at most 16 MiB and one event");
    stage.passed()
}

/// A few hundred random events, some removed again, and random queries over them.
pub async fn random_queries_give_the_pages_of_a_scan<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Short, &[&HISTORY, &LOG]).await?;
    let seed = Random::seed_from_env().unwrap_or(2026);
    let mut random = Random::new(seed);
    let mut times = Vec::new();
    for round in 0..8 {
        for _ in 0..random.below(12) + 1 {
            let batch = (0..random.below(30) + 1).map(|_| random_event(&mut random));
            let appended = stage.append_all(batch.collect()).await;
            times.extend(appended.iter().map(|a| a.received_at));
            stage.advance(Duration::from_millis(10)).await;
        }
        if random.one_in(3) {
            let retention = Retention {
                max_len: Some(random.below(600) as u64),
                ..Retention::default()
            };
            let maintenance = stage.engine().maintenance().unwrap();
            maintenance.prune(retention).await.unwrap();
        }
        if random.one_in(4) && stage.offers(&RESTART) {
            stage.restart().await;
        }
        let all = everything(&stage).await;
        for _ in 0..60 {
            let mut query = random_query(&mut random);
            if random.one_in(3) {
                let mut ends = [random.below(times.len()), random.below(times.len())];
                ends.sort_unstable();
                query.since = Some(times[ends[0]]).filter(|_| !random.one_in(4));
                query.until = Some(times[ends[1]]).filter(|_| !random.one_in(4));
            }
            let found = pages(history(&stage), &query).await;
            let wanted = expected(&all, &query);
            assert_eq!(found, wanted, "seed {seed}, round {round}: {query:?}");
            let limit = random.below(50) as u64;
            let count = history(&stage).count(query.clone(), limit).await.unwrap();
            let wanted = limit.min(wanted.len() as u64);
            assert_eq!(count, wanted, "seed {seed}, round {round}: {query:?}");
        }
    }
    stage.passed()
}

fn random_event(random: &mut Random) -> Event {
    let mut pick = |choices: &'static [&'static str]| random.pick(choices).copied().unwrap_or("");
    let kind = pick(&["order.placed", "order.paid", "user.created", "system.x"]);
    let tenant = pick(&["", "acme", "acme", "other", "third"]);
    let app = pick(&["", "shop", "mail"]);
    let entity = (
        pick(&["", "ORDER", "ORDER", "TASK"]),
        pick(&["1", "2", "3", "4", "5", "6"]),
    );
    let correlation = pick(&["", "", "acme", "request-7", "request-8"]);
    correlated(kind, tenant, app, entity, correlation)
}

fn random_query(random: &mut Random) -> HistoryQuery {
    let mut query = HistoryQuery::default().limit(random.below(20) + 1);
    if random.one_in(2) {
        query = query.order(Order::Oldest);
    }
    if random.one_in(2) {
        query.tenant = random
            .pick(&["acme", "other", "nobody"])
            .map(ToString::to_string);
    }
    if random.one_in(3) {
        query.app = random.pick(&["shop", "mail"]).map(ToString::to_string);
    }
    if random.one_in(3) {
        let id = random.pick(&["1", "2", "3"]).copied().unwrap_or("1");
        query = query.entity("ORDER", id);
    }
    if random.one_in(2) {
        let types = ["order.placed", "order.*", "*", "system.>", "user.created"];
        query.types = random.pick(&types).map(|text| pattern(text));
    }
    if random.one_in(4) {
        query.correlation_id = random
            .pick(&["acme", "request-7", "request-9"])
            .map(ToString::to_string);
    }
    query
}

/// The four queries of the *workflow* specification, for one tenant among two with the same ids.
pub async fn the_states_of_tasks_can_be_asked<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&HISTORY]).await?;
    let life = |task: &'static str, end: &'static str| {
        [
            "Task Pending",
            "Task Processing Started",
            "Task Heartbeat",
            end,
        ]
        .map(|kind| (kind, ("TASK", task)))
    };
    let mut events = vec![("Job Created", ("JOB", "job-456"))];
    events.extend(life("req-1", "Task Completed"));
    events.extend(life("req-2", "Task Failed"));
    events.push(("Job Completed", ("JOB", "job-456")));
    for (kind, entity) in &events {
        for tenant in ["gbinnovations", "other"] {
            stage
                .append(named(kind, tenant, "task-workflow", *entity))
                .await;
        }
    }
    let of = |kind: &str, id: &str| {
        HistoryQuery::default()
            .tenant("gbinnovations")
            .entity(kind, id)
    };
    let types = async |query: HistoryQuery| -> Vec<String> {
        let page = history(&stage).query(query).await.unwrap();
        let ours = |record: &&Arc<Recorded>| record.event.tenant() == Some("gbinnovations");
        assert!(page.items.iter().all(|record| ours(&record)));
        let kinds = page.items.iter().map(|record| record.event.event_type());
        kinds.map(str::to_owned).collect()
    };
    // The state of a single task.
    assert_eq!(
        types(of("TASK", "req-1").limit(1)).await,
        ["Task Completed"]
    );
    // All by state.
    let failed = HistoryQuery::default()
        .tenant("gbinnovations")
        .types(pattern("Task Failed"));
    assert_eq!(types(failed).await, ["Task Failed"]);
    // The history of a task.
    let story = types(of("TASK", "req-2").order(Order::Oldest)).await;
    let expected = [
        "Task Pending",
        "Task Processing Started",
        "Task Heartbeat",
        "Task Failed",
    ];
    assert_eq!(story, expected);
    // A job, and the latest of each of its tasks.
    let job = types(of("JOB", "job-456").order(Order::Oldest)).await;
    assert_eq!(job, ["Job Created", "Job Completed"]);
    assert_eq!(types(of("TASK", "req-2").limit(1)).await, ["Task Failed"]);
    stage.passed()
}
