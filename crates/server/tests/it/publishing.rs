//! Publishing and reading over HTTP.

use std::time::Duration;

use everbus_server::Scope;
use serde_json::{Value, json};

use crate::api::{Api, until};

fn count(page: &Value) -> usize {
    page["items"].as_array().unwrap().len()
}

// conformance: operations/http-publish: one event, a batch that is stored as a whole or not at all, and a stream of lines
#[tokio::test]
async fn events_are_published_one_by_one_in_batches_and_as_lines() {
    let api = Api::start().await;
    let one = json!({
        "id": "order-7", "type": "orders.order.placed", "source": "shop", "app": "web",
        "tenant": "acme", "entity": { "type": "ORDER", "id": "7" }, "version": 2,
        "metadata": { "k": "v" }, "payload": { "total": 1.50 },
    });
    let stored = api.post("/v1/events", None, &one).await.ok(201);
    assert_eq!(stored["items"][0]["duplicate"], false);
    let again = api.post("/v1/events", None, &one).await.ok(201);
    assert_eq!(again["items"][0]["duplicate"], true);
    assert_eq!(again["items"][0]["seq"], stored["items"][0]["seq"]);
    let mut other = one.clone();
    other["payload"] = json!(2);
    assert_eq!(
        api.post("/v1/events", None, &other).await.problem(409),
        "IdReused"
    );
    let shown = api
        .get("/v1/events/order-7?source=shop", None)
        .await
        .ok(200);
    assert_eq!(shown["event"]["foreign_id"], "order-7");
    assert_eq!(shown["event"]["version"], 2);
    assert_eq!(shown["event"]["payload"], json!({ "total": 1.50 }));
    // A batch: the second is bad, so none is stored.
    let batch = json!([{ "type": "a.b" }, { "type": "" }, { "type": "a.c" }]);
    let got = api.post("/v1/events", None, &batch).await;
    assert_eq!(got.problem(400), "InvalidType");
    assert_eq!(got.json()["index"], 1);
    assert_eq!(
        count(&api.get("/v1/events?type=a.*", None).await.ok(200)),
        0
    );
    let batch = json!([{ "type": "a.b" }, { "type": "a.c" }]);
    assert_eq!(
        api.post("/v1/events", None, &batch).await.ok(201)["published"],
        2
    );
    let lines: String = (0..2500)
        .map(|n| format!("{{\"type\":\"line.sent\",\"payload\":{n}}}\n"))
        .collect();
    let ndjson = [("content-type", "application/x-ndjson")];
    let got = api
        .send("POST", "/v1/events", None, &ndjson, lines.as_bytes())
        .await
        .ok(201);
    assert_eq!(got["published"], 2500);
    // Every line before a bad one is stored, none after it.
    let lines = b"{\"type\":\"part.sent\"}\n\n{\"type\":\"part.sent\"}\nnot json\n{\"type\":\"part.sent\"}\n";
    let got = api.send("POST", "/v1/events", None, &ndjson, lines).await;
    assert_eq!(got.problem(400), "InvalidRequest");
    assert_eq!(got.json()["index"], 3);
    assert_eq!(
        count(&api.get("/v1/events?type=part.sent", None).await.ok(200)),
        2
    );
    api.stop().await;
}

// conformance: operations/http-cloudevents: CloudEvents in binary, structured and batch mode are published, with their ids
#[tokio::test]
async fn cloud_events_are_published_in_every_mode() {
    let api = Api::start().await;
    let structured = json!({
        "specversion": "1.0", "id": "ce-1", "source": "/shop", "type": "cloud.event.one",
        "datacontenttype": "application/json", "data": { "n": 1 },
    });
    let kind = [(
        "content-type",
        "application/cloudevents+json; charset=utf-8",
    )];
    let body = structured.to_string();
    api.send("POST", "/v1/events", None, &kind, body.as_bytes())
        .await
        .ok(201);
    let mut two = structured.clone();
    (two["id"], two["type"]) = (json!("ce-2"), json!("cloud.event.two"));
    let mut three = structured.clone();
    (three["id"], three["type"]) = (json!("ce-3"), json!("cloud.event.three"));
    let kind = [("content-type", "application/cloudevents-batch+json")];
    let body = json!([two, three]).to_string();
    api.send("POST", "/v1/events", None, &kind, body.as_bytes())
        .await
        .ok(201);
    let binary = [
        ("ce-specversion", "1.0"),
        ("ce-id", "ce-4"),
        ("ce-source", "/shop"),
        ("ce-type", "cloud.event.four"),
        ("content-type", "text/plain"),
    ];
    api.send("POST", "/v1/events", None, &binary, b"hello")
        .await
        .ok(201);
    let page = api
        .get("/v1/events?type=cloud.%3E&order=oldest", None)
        .await
        .ok(200);
    let items = page["items"].as_array().unwrap();
    let ids: Vec<&str> = items
        .iter()
        .map(|i| i["foreign_id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["ce-1", "ce-2", "ce-3", "ce-4"]);
    assert_eq!(items[0]["payload"], json!({ "n": 1 }));
    assert_eq!(items[3]["payload_text"], "hello");
    // A dialect by name.
    let omni = json!({
        "type": "message.received", "payload": { "text": "hi" }, "id": "m-1",
        "timestamp": "2026-01-03T15:22:19.640Z", "source": "whatsapp",
    });
    api.post("/v1/events?dialect=omni", None, &omni)
        .await
        .ok(201);
    api.stop().await;
}

// conformance: operations/http-history: the history pages by cursor, filters by tenant, app, entity and type, and searches payloads within a time budget
#[tokio::test]
async fn the_history_is_filtered_and_paged() {
    let api = Api::start().await;
    let events: Vec<Value> = (0..25)
        .map(|n| {
            json!({
                "type": if n % 5 == 0 { "a.fifth" } else { "a.other" }, "tenant": "t", "app": "x",
                "entity": { "type": "ORDER", "id": (n % 3).to_string() },
                "payload": { "text": format!("Number {n}") },
            })
        })
        .collect();
    api.post("/v1/events", None, &json!(events)).await.ok(201);
    let (mut path, mut seen) = ("/v1/events?limit=10&tenant=t".to_owned(), 0);
    loop {
        let page = api.get(&path, None).await.ok(200);
        seen += count(&page);
        let Some(next) = page["next"].as_str() else {
            break;
        };
        path = format!("/v1/events?limit=10&tenant=t&cursor={next}");
    }
    assert_eq!(seen, 25);
    for (query, found) in [
        ("type=a.fifth", 5),
        ("tenant=t&app=x&entity=ORDER:1&limit=1000", 8),
        ("tenant=other", 0),
        ("contains=number%2017", 1),
        ("contains=Number%201&type=a.fifth", 2),
        ("since=2100-01-01T00:00:00Z", 0),
    ] {
        let page = api.get(&format!("/v1/events?{query}"), None).await.ok(200);
        assert_eq!(count(&page), found, "{query}");
        assert!(page["plan"].is_string());
    }
    for bad in [
        "limit=0",
        "limit=5000",
        "cursor=zz",
        "entity=x",
        "order=up",
        "typ=a.b",
        "since=x",
    ] {
        let got = api.get(&format!("/v1/events?{bad}"), None).await;
        assert_eq!(got.status, 400, "{bad}");
    }
    api.stop().await;
}

// conformance: operations/http-history: a search inside payloads that reaches its time limit says so, and goes on from there
#[tokio::test]
async fn a_search_that_takes_too_long_says_so_and_goes_on() {
    let api = Api::with(None, |options| options.limits.search = Duration::ZERO).await;
    let ndjson = [("content-type", "application/x-ndjson")];
    let needle = "{\"type\":\"hay.stack\",\"payload\":\"needle\"}\n";
    let hay = "{\"type\":\"hay.stack\",\"payload\":\"straw\"}\n";
    let lines = format!("{needle}{}", hay.repeat(2500));
    api.send("POST", "/v1/events", None, &ndjson, lines.as_bytes())
        .await
        .ok(201);
    // Newest first: the needle is in the third part of the history.
    let (mut cursor, mut stops) = (String::new(), 0);
    let found = loop {
        let path = format!("/v1/events?contains=needle&cursor={cursor}");
        let page = api.get(&path, None).await.ok(200);
        if count(&page) > 0 {
            break page;
        }
        assert_eq!(page["stopped"], true, "{page}");
        stops += 1;
        cursor = page["next"].as_str().unwrap().to_owned();
    };
    assert_eq!(stops, 2);
    assert_eq!(found["items"][0]["payload"], "needle");
    let page = api.get("/events?q=needle", None).await;
    let page = String::from_utf8(page.body).unwrap();
    assert!(page.contains("Search on"), "{page}");
    let path = format!(
        "/events?q=NEEDLE&cursor={}",
        cursor.replace('#', "%23").replace('+', "%2B")
    );
    let page = api.get(&path, None).await;
    let page = String::from_utf8(page.body).unwrap();
    assert!(page.contains("<mark>needle</mark>"), "{page}");
    api.stop().await;
}

// conformance: operations/http-causal-tree: what an event caused, over several steps, and what caused it
#[tokio::test]
async fn the_tree_shows_what_caused_what() {
    let api = Api::start().await;
    let bus = &api.bus;
    bus.subscribe("step.one")
        .group("a")
        .handler(|m: everbus::Message| async move {
            m.publish(("step.two", 2))?;
            m.publish(("step.side", 2))?;
            everbus::handled()
        })
        .await
        .unwrap();
    bus.subscribe("step.two")
        .group("b")
        .handler(|m: everbus::Message| async move {
            m.publish(("step.three", 3))?;
            everbus::handled()
        })
        .await
        .unwrap();
    api.publish(None, "step.unrelated").await;
    let root = api.publish(None, "step.one").await;
    let leaf = until("the last step", async || {
        let page = api.get("/v1/events?type=step.three", None).await.ok(200);
        page["items"][0]["id"].as_str().map(str::to_owned)
    })
    .await;
    for id in [&root, &leaf] {
        let tree = api
            .get(&format!("/v1/events/{id}/tree"), None)
            .await
            .ok(200);
        assert_eq!(tree["root"], root);
        let items = tree["items"].as_array().unwrap();
        let mut types: Vec<&str> = items.iter().map(|i| i["type"].as_str().unwrap()).collect();
        types.sort_unstable();
        assert_eq!(types, ["step.one", "step.side", "step.three", "step.two"]);
    }
    // All of them by their correlation id, which is the id of the first, in pages of any size and either order.
    for (order, first) in [("oldest", "step.one"), ("newest", "step.three")] {
        for limit in [1, 2, 3, 4, 100] {
            let mut types = Vec::new();
            let mut cursor = String::new();
            loop {
                let page = format!(
                    "/v1/events?correlation_id={root}&order={order}&limit={limit}&cursor={cursor}"
                );
                let page = api.get(&page, None).await.ok(200);
                let items = page["items"].as_array().unwrap();
                assert!(items.len() <= limit);
                types.extend(items.iter().map(|i| i["type"].as_str().unwrap().to_owned()));
                match page["next"].as_str() {
                    Some(next) => cursor = next.to_owned(),
                    None => break,
                }
            }
            assert_eq!(types.len(), 4, "{order} by {limit}: {types:?}");
            assert_eq!(types[0], first, "{order} by {limit}");
        }
        let other = format!("/v1/events?correlation_id={root}&type=step.unrelated&order={order}");
        assert_eq!(count(&api.get(&other, None).await.ok(200)), 0);
    }
    api.stop().await;
}

// conformance: operations/http-request-id: the X-Request-ID of a request is the correlation id of what it publishes, and comes back
#[tokio::test]
async fn a_request_id_becomes_the_correlation_id() {
    let api = Api::start().await;
    let headers = [
        ("content-type", "application/json"),
        ("x-request-id", "req-7"),
    ];
    let got = api
        .send("POST", "/v1/events", None, &headers, br#"{"type":"a.b"}"#)
        .await;
    assert_eq!(got.header("x-request-id"), Some("req-7"));
    let id = got.ok(201)["items"][0]["id"].as_str().unwrap().to_owned();
    let shown = api.get(&format!("/v1/events/{id}"), None).await.ok(200);
    assert_eq!(shown["event"]["correlation_id"], "req-7");
    let found = api
        .get("/v1/events?correlation_id=req-7", None)
        .await
        .ok(200);
    assert_eq!(count(&found), 1);
    api.stop().await;
}

// conformance: operations/http-openapi: the OpenAPI document has every route of the API with its schemas, and no reference leads nowhere
#[tokio::test]
async fn the_openapi_document_is_complete() {
    let api = Api::start().await;
    let document = api.get("/openapi.json", None).await.ok(200);
    assert_eq!(document["openapi"], "3.1.0");
    for route in api.state.routes() {
        let is_api = route.path.starts_with("/v1/") && route.path != "/v1/events/stream";
        if is_api {
            let method = route.method.as_str().to_lowercase();
            let operation = &document["paths"][route.path][&method];
            assert!(
                operation["responses"]["default"].is_object(),
                "{method} {}",
                route.path
            );
        }
    }
    fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.len() > 20);
    for reference in found {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
    api.stop().await;
}

// conformance: operations/http-replay: a replay is previewed, runs in the server and reports its progress
#[tokio::test]
async fn a_replay_is_previewed_and_run() {
    let api = Api::start().await;
    for _ in 0..3 {
        api.publish(None, "past.event").await;
    }
    let fetch = json!({ "patterns": ["past.*"], "max": 1 });
    api.post("/v1/groups/late/fetch", None, &fetch)
        .await
        .ok(200);
    let mut request = json!({ "group": "late", "type": "past.*", "dry_run": true });
    let preview = api.post("/v1/replays", None, &request).await.ok(200);
    assert_eq!(preview["events"], 3, "{preview}");
    request["dry_run"] = json!(false);
    request["name"] = json!("again");
    api.post("/v1/replays", None, &request).await.ok(200);
    let done = until("the replay to end", async || {
        let shown = api.get("/v1/replays/again", None).await.ok(200);
        (shown["state"] != "running").then_some(shown)
    })
    .await;
    assert_eq!(
        (&done["state"], &done["report"]["processed"]),
        (&json!("complete"), &json!(3)),
        "{done}"
    );
    let fetch = json!({ "max": 10, "wait_ms": 20000 });
    let got = api
        .post("/v1/groups/late/fetch", None, &fetch)
        .await
        .ok(200);
    assert!(count(&got) > 0);
    assert_eq!(
        api.get("/v1/replays/other", None).await.problem(404),
        "NotFound"
    );
    // A wrong one is refused, and one of everything needs more than an empty request.
    for (request, status) in [
        (json!({ "group": "nobody" }), 404),
        (json!({ "group": "late", "rate": -1 }), 400),
        (json!({ "id": "none" }), 404),
        (json!({}), 400),
    ] {
        let got = api.post("/v1/replays", None, &request).await;
        assert_eq!(got.status, status, "{request}");
    }
    // A slow one is stopped, and the same request continues it.
    let slow = json!({ "group": "late", "type": "past.*", "name": "slow", "rate": 0.01 });
    api.post("/v1/replays", None, &slow).await.ok(200);
    let again = api.post("/v1/replays", None, &slow).await;
    assert_eq!(again.problem(409), "ReplayRunning");
    let stop = api.send("DELETE", "/v1/replays/slow", None, &[], b"").await;
    stop.ok(200);
    let ended = async |name: &str| {
        let path = format!("/v1/replays/{name}");
        until("the replay to end", async || {
            let shown = api.get(&path, None).await.ok(200);
            (shown["state"] != "running").then_some(shown)
        })
        .await
    };
    let stopped = ended("slow").await;
    assert_eq!(stopped["state"], "stopped", "{stopped}");
    let mut fast = slow.clone();
    fast["rate"] = json!(1000);
    api.post("/v1/replays", None, &fast).await.ok(200);
    let done = ended("slow").await;
    assert_eq!(done["state"], "complete", "{done}");
    let audit = api.get("/v1/audit?action=replay*", None).await.ok(200);
    assert_eq!(audit["items"][0]["actor"], "http");
    api.stop().await;
}

#[tokio::test]
async fn streams_outbox_audit_and_health_answer() {
    let api = Api::start().await;
    let streams = api.get("/v1/streams", None).await.ok(200);
    assert_eq!(count(&streams), 1);
    let health = api.get("/v1/health", None).await.ok(200);
    assert_eq!(
        (&health["status"], &health["engine"]),
        (&json!("ok"), &json!("sqlite"))
    );
    let outbox = api.get("/v1/outbox", None).await.ok(200);
    assert_eq!(outbox["failed"], 0, "{outbox}");
    let retried = api.post("/v1/outbox/retry", None, &json!({})).await;
    assert_eq!(retried.ok(200)["retried"], 0);
    api.get("/v1/audit", None).await.ok(200);
    let tokens = json!({ "name": "ci", "scopes": ["publish"] });
    let made = api.post("/v1/tokens", None, &tokens).await.ok(201);
    let token = made["token"].as_str().unwrap();
    api.publish(Some(token), "a.b").await;
    assert_eq!(
        api.get("/v1/audit", Some(token)).await.problem(403),
        "Forbidden"
    );
    let admin = api.token(&[Scope::Admin], None).await;
    let audit = api
        .get("/v1/audit?action=tokens.create*", Some(&admin))
        .await
        .ok(200);
    assert!(count(&audit) >= 1);
    assert!(!audit.to_string().contains(token));
    api.stop().await;
}

// conformance: operations/http-drain: a server that is told to stop answers requests under way, ends long polls, and takes no more
#[tokio::test]
async fn a_stop_ends_long_polls_and_drains() {
    let api = Api::start().await;
    let fetch = json!({ "patterns": ["never.*"], "wait_ms": 60000 });
    let poll = api.post("/v1/groups/idle/fetch", None, &fetch);
    let stop = async {
        // The poll waits in the engine once its group exists.
        until("the poll to begin", async || {
            let groups = api.bus.groups().await.unwrap();
            groups
                .iter()
                .any(|group| group.name.as_str() == "idle")
                .then_some(())
        })
        .await;
        api.state.stop();
    };
    let (got, ()) = tokio::join!(poll, stop);
    assert_eq!(count(&got.ok(200)), 0);
    api.stop().await;
}
