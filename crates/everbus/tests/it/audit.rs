//! The audit trail through the bus: who did what, in which request, and what operators do to a bus.

use everbus::audit::{Action, Operator, audited, with_operator};
use everbus::{
    AuditEntry, AuditQuery, AuditRecord, Bus, Clock as _, Code, Config, Context, DeadLetterFilter,
    Engine, Error, Event, HandlerError, PurgeBasis, Router, TraceContext, to, with_correlation_id,
    with_trace,
};
use serde_json::json;

use crate::support::{Lab, on_every_durable_engine, on_every_engine};

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";

/// The whole trail, oldest first.
async fn trail(bus: &Bus) -> Vec<AuditRecord> {
    let page = bus.audit().query(AuditQuery::default()).await.unwrap();
    assert!(bus.audit().verify().await.unwrap().is_ok());
    page.items.into_iter().rev().collect()
}

fn actions(trail: &[AuditRecord]) -> Vec<&str> {
    trail.iter().map(|r| r.entry.action.as_str()).collect()
}

// conformance: framework/audit-correlation: audit records include the correlation id and the trace id of what surrounds them
#[tokio::test]
async fn an_entry_carries_the_request_around_it() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().source("shop")).await;
        let audit = bus.audit();
        assert_eq!(audit.record(AuditEntry::of("plain")).await.unwrap(), 1);
        let trace = TraceContext::parse(TRACE, None).unwrap();
        let recorded = audit.record(AuditEntry::new("alice", "within").entity("ORDER", "1"));
        with_correlation_id("request-7", with_trace(trace, recorded))
            .await
            .unwrap();
        let own = AuditEntry::of("own").correlation_id("mine").trace_id("t");
        let recorded = with_correlation_id("request-8", audit.record(own));
        with_operator(Operator::new("bob"), recorded).await.unwrap();
        let trail = trail(&bus).await;
        let entry = |n: usize| &trail[n].entry;
        assert_eq!(entry(0).actor, "shop", "the service");
        assert_eq!(
            (&entry(0).correlation_id, &entry(0).trace_id),
            (&None, &None)
        );
        assert_eq!(entry(1).actor, "alice");
        assert_eq!(entry(1).correlation_id.as_deref(), Some("request-7"));
        assert_eq!(entry(1).trace_id.as_deref(), Some(TRACE_ID));
        assert_eq!(entry(2).actor, "bob", "the operator");
        assert_eq!(entry(2).correlation_id.as_deref(), Some("mine"));
        assert_eq!(entry(2).trace_id.as_deref(), Some("t"));
        let head = audit.head().await.unwrap().unwrap();
        assert!(audit.verify_against(head).await.unwrap().is_ok());
    })
    .await;
}

// conformance: memory/audit-handlers: a handler writes to the trail with the correlation id, trace and tenant of its event
#[tokio::test]
async fn a_handler_writes_to_the_trail() {
    async fn refund(context: Context) -> Result<(), HandlerError> {
        let entry = AuditEntry::of("order.refund").details(json!({ "amount": 20 }));
        context.audit(entry).await?;
        Ok(())
    }
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let route = to(refund).group("g").name("refunds");
        bus.mount(Router::new().on("a", route)).await.unwrap();
        bus.start().await.unwrap();
        let event = Event::builder("a")
            .tenant("acme")
            .correlation_id("c-9")
            .trace(TraceContext::parse(TRACE, None).unwrap());
        let receipt = bus.publish(event).await.unwrap();
        assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        let trail = trail(&bus).await;
        assert_eq!(trail.len(), 1);
        let entry = &trail[0].entry;
        assert_eq!(entry.actor, "refunds");
        assert_eq!(entry.tenant.as_deref(), Some("acme"));
        assert_eq!(entry.correlation_id.as_deref(), Some("c-9"));
        assert_eq!(entry.trace_id.as_deref(), Some(TRACE_ID));
    })
    .await;
    let called = everbus::testing::call(refund).with(("a", 1)).await;
    let error = called.unwrap_err().to_string();
    assert!(error.contains("no bus with an audit trail"), "{error}");
}

// conformance: memory/audit-library: dead-letter retry and purge and the removal of a group through the bus put themselves on record
#[tokio::test]
async fn what_is_done_through_the_bus_is_on_record() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().source("shop")).await;
        let id = bus
            .subscribe("a")
            .group("g")
            .handler(|| std::future::ready(Err::<(), _>(HandlerError::permanent("no"))))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        receipt.settled().await.unwrap();
        let alice = Operator::new("alice").reason("once more");
        let letters = bus.dead_letters();
        let retried = with_operator(alice, letters.retry(receipt.id())).await;
        assert_eq!(retried.unwrap(), 1);
        receipt.settled().await.unwrap();
        let filter = DeadLetterFilter {
            group: Some("g".parse().unwrap()),
            ..DeadLetterFilter::default()
        };
        let cutoff = lab.clock.now();
        crate::support::eventually("it is dead again", || async {
            letters.count(filter.clone()).await.unwrap() == 1
        })
        .await;
        let purged = letters.purge(cutoff, PurgeBasis::Died, filter).await;
        assert_eq!(purged.unwrap().dead_letters, 1);
        assert_eq!(
            letters.retry(receipt.id()).await.unwrap_err().code(),
            Code::NotFound
        );
        let group = "g".parse().unwrap();
        let refused = bus.remove_group(group).await.unwrap_err();
        assert_eq!(refused.code(), Code::GroupConflict, "and not on record");
        bus.unsubscribe(id).await.unwrap();
        bus.remove_group("g".parse().unwrap()).await.unwrap();
        let trail = trail(&bus).await;
        assert_eq!(
            actions(&trail),
            [
                "dlq.retry",
                "dlq.retry.done",
                "dlq.purge",
                "dlq.purge.done",
                "dlq.retry",
                "dlq.retry.done",
                "groups.remove",
                "groups.remove.done"
            ]
        );
        let entry = |n: usize| &trail[n].entry;
        assert_eq!(entry(0).actor, "alice");
        assert_eq!(entry(1).actor, "alice");
        assert_eq!(entry(2).actor, "shop");
        let event = entry(0).entity.as_ref().unwrap();
        assert_eq!(
            (&*event.kind, &event.id),
            ("EVENT", &receipt.id().to_string())
        );
        assert_eq!(entry(0).details["reason"], "once more");
        assert_eq!(entry(1).details, json!({ "of": 1, "result": 1 }));
        assert_eq!(entry(2).details["group"], "g");
        assert_eq!(entry(2).details["by"], "died");
        let gone = json!([{ "event": receipt.id(), "group": "g" }]);
        assert_eq!(entry(3).details["result"]["named"], gone);
        assert_eq!(entry(3).details["result"]["events"], 1);
        assert_eq!(entry(5).details["result"], 0);
        let group = entry(6).entity.as_ref().unwrap();
        assert_eq!((&*group.kind, &*group.id), ("GROUP", "g"));
    })
    .await;
}

// conformance: memory/audit-before: an action is on record before it is done; without the record it is not done; a failure is on record too
#[tokio::test]
async fn an_action_is_on_record_before_it_is_done() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let engine = bus.engine().clone();
        let operator = Operator::new("alice");
        let work = async {
            assert_eq!(actions(&trail(&bus).await), ["x"], "before");
            Err::<u64, _>(Error::new(Code::NotFound, "no such thing"))
        };
        let action = Action::new("x").on("THING", &7).detail("n", json!(1));
        let failed = audited(&engine, &operator, action, work).await;
        assert_eq!(failed.unwrap_err().code(), Code::NotFound);
        let written = trail(&bus).await;
        assert_eq!(actions(&written), ["x", "x.failed"]);
        assert_eq!(written[0].entry.details, json!({ "n": 1 }));
        assert_eq!(
            written[1].entry.details,
            json!({ "of": 1, "code": "NotFound", "error": "no such thing" })
        );
        // Too much to tell is told without the details.
        let long = async { Ok("x".repeat(100_000)) };
        audited(&engine, &operator, "long", long).await.unwrap();
        let written = trail(&bus).await;
        assert_eq!(written[3].entry.details, json!({ "of": 3 }));

        bus.shutdown().await.unwrap();
        let work = async { panic!("without a record nothing is done") };
        let refused = audited::<()>(&engine, &operator, "x", work).await;
        assert_eq!(refused.unwrap_err().code(), Code::EventBusShutdownError);
        let without = Engine {
            audit: None,
            ..engine
        };
        let done = audited(&without, &operator, "x", async { Ok(5) }).await;
        assert_eq!(done.unwrap(), 5, "an engine without a trail just acts");
    })
    .await;
}

// conformance: memory/audit-config: a bus opened with another configuration file than the last time puts that on record, without secrets
#[tokio::test]
async fn a_changed_configuration_is_on_record_without_secrets() {
    on_every_durable_engine(|lab| async move {
        let file = lab.file().with_extension("yaml");
        let broker = |more: &str| {
            format!(
                "broker: {{type: sqlite, url: '{}'}}\n{more}",
                lab.file().display()
            )
        };
        let open = async |text: String| {
            std::fs::write(&file, text).unwrap();
            let bus = Bus::open_file(&file).await.unwrap();
            let records = trail(&bus).await;
            bus.shutdown().await.unwrap();
            records
        };
        let streams = "streams: {default_maxlen: 9}\n";
        assert_eq!(open(broker("")).await.len(), 1, "the first");
        assert_eq!(open(broker("# a comment\n")).await.len(), 1);
        let records = open(broker(streams)).await;
        assert_eq!(actions(&records), ["config.changed"; 2]);
        assert_eq!(open(broker(streams)).await.len(), 2, "unchanged");
        let details = &records[1].entry.details;
        assert_eq!(details["changed"], json!(["streams"]));
        assert_eq!(details["previous"], records[0].entry.details["hash"]);
        assert_ne!(details["hash"], details["previous"]);
        let entity = records[1].entry.entity.as_ref().unwrap();
        assert_eq!(
            (&*entity.kind, &*entity.id),
            ("CONFIG", file.to_str().unwrap())
        );
        let records = open(broker("")).await;
        assert_eq!(
            records[2].entry.details["changed"],
            json!(["streams"]),
            "gone again"
        );
    })
    .await;
    // A password does not even change the hash.
    let lab = Lab::new(crate::support::Kind::Memory);
    let bus = lab.open().await;
    let used = async |text: &str| {
        let config = Config::parse(text, "everbus.yaml").unwrap();
        let operator = Operator::new("alice");
        everbus::config::config_used(bus.engine(), &operator, &config)
            .await
            .unwrap();
    };
    used("broker: {type: redis, url: 'redis://me:hunter2@host:6379'}").await;
    used("broker: {type: redis, url: 'redis://me:hunter3@host:6379'}").await;
    assert_eq!(trail(&bus).await.len(), 1);
    used("broker: {type: redis, url: 'redis://me:hunter3@other:6379'}").await;
    let records = trail(&bus).await;
    assert_eq!(records.len(), 2);
    let text = serde_json::to_string(&records).unwrap();
    assert!(!text.contains("hunter") && !text.contains("host"), "{text}");
}
