//! What a client must not be able to do to others, and what an operator must not lose by an ordinary action.

use std::collections::BTreeSet;
use std::time::Duration;

use everbus::{Event, HandlerError, HandlerResult};
use everbus_server::Scope;
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::api::{Api, PATIENCE, until};
use crate::consuming::Receiver;

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

async fn put_hook(api: &Api, name: &str, hook: &Value) -> crate::api::Got {
    let path = format!("/v1/webhooks/{name}");
    let body = hook.to_string();
    api.send("PUT", &path, None, &JSON, body.as_bytes()).await
}

// conformance: operations/webhook-change: events that are published while a webhook is changed or removed are delivered later
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_webhook_that_changes_misses_no_event() {
    let receiver = Receiver::start(&[]).await;
    let api = Api::with(None, |options| options.private_webhooks = true).await;
    let hook = |timeout: u64| json!({ "pattern": "order.*", "url": receiver.url, "timeout_ms": 1000 + timeout });
    put_hook(&api, "billing", &hook(0)).await.ok(200);
    let bus = api.bus.clone();
    let publishing = tokio::spawn(async move {
        let mut ids = BTreeSet::new();
        for n in 0..300 {
            let event = Event::builder("order.placed").json(&json!({ "n": n }));
            ids.insert(bus.publish(event).await.unwrap().id().to_string());
            tokio::task::yield_now().await;
        }
        ids
    });
    for timeout in 1..=10 {
        put_hook(&api, "billing", &hook(timeout)).await.ok(200);
    }
    let mut ids = publishing.await.unwrap();
    // While it is removed its group collects events.
    api.send("DELETE", "/v1/webhooks/billing", None, &[], b"")
        .await
        .ok(200);
    ids.insert(api.publish(None, "order.placed").await);
    put_hook(&api, "billing", &hook(20)).await.ok(200);
    until("every event to be delivered", async || {
        let requests = receiver.requests.lock();
        let got: BTreeSet<String> = requests
            .iter()
            .map(|(head, _)| crate::consuming::value(head, "webhook-id").to_owned())
            .collect();
        ids.is_subset(&got).then_some(())
    })
    .await;
    api.stop().await;
}

// conformance: operations/webhook-refused: a webhook that cannot run is taken back, and the others go on
#[tokio::test]
async fn a_webhook_that_cannot_run_stops_no_other() {
    let receiver = Receiver::start(&[]).await;
    let api = Api::with(None, |options| options.private_webhooks = true).await;
    let fetch = json!({ "patterns": ["a.*"] });
    api.post("/v1/groups/aaa/fetch", None, &fetch).await.ok(200);
    let ordered = json!({ "pattern": "a.*", "url": receiver.url, "ordered": true });
    let got = put_hook(&api, "aaa", &ordered).await;
    assert_eq!(got.problem(409), "GroupConflict");
    let hook = json!({ "pattern": "order.*", "url": receiver.url });
    put_hook(&api, "billing", &hook).await.ok(200);
    let listed = api.get("/v1/webhooks", None).await.ok(200);
    assert_eq!(listed["items"].as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(listed["items"][0]["name"], "billing");
    api.publish(None, "order.placed").await;
    receiver.wait_for(1).await;
    api.stop().await;
}

// conformance: operations/http-purge-expected: a purge is refused if another number of dead letters passes its filter than the preview showed
#[tokio::test]
async fn a_purge_deletes_what_was_previewed() {
    let api = Api::start().await;
    api.bus
        .subscribe("job.*")
        .group("work")
        .handler(|| async { HandlerResult::Err(HandlerError::permanent("broken pipe")) })
        .await
        .unwrap();
    let dead = async |many: u64| {
        until("dead letters", async || {
            let filter = json!({ "group": "work" });
            let preview = api.post("/v1/dead-letters/preview", None, &filter).await;
            (preview.ok(200)["total"] == many).then_some(())
        })
        .await;
    };
    api.publish(None, "job.created").await;
    dead(1).await;
    api.publish(None, "job.created").await;
    dead(2).await;
    let purge = |expected: u64| json!({ "filter": { "group": "work" }, "expected": expected, "by": "died" });
    let got = api.post("/v1/dead-letters/purge", None, &purge(1)).await;
    assert_eq!(got.problem(409), "PreviewOutdated");
    dead(2).await;
    let got = api.post("/v1/dead-letters/purge", None, &purge(2)).await;
    assert_eq!(got.ok(200)["purged"], 2);
    api.stop().await;
}

// conformance: operations/pull-incomplete: an event whose large part cannot be had fails alone, and the others of a fetch are delivered
#[tokio::test]
async fn one_incomplete_event_does_not_fail_a_fetch() {
    let api = Api::start().await;
    let fetch = json!({ "patterns": ["order.*"], "max": 10, "wait_ms": 30000 });
    api.post(
        "/v1/groups/mail/fetch",
        None,
        &json!({ "patterns": ["order.*"] }),
    )
    .await
    .ok(200);
    // Its payload is in an object store that this server does not have.
    let incomplete = json!({
        "type": "order.large", "metadata": { "s3_overflow": "workflow" },
        "payload": { "_s3Overflow": { "bucket": "b", "key": "events/a/b.json" } },
    });
    let batch = json!([{ "type": "order.one" }, incomplete, { "type": "order.two" }]);
    api.post("/v1/events", None, &batch).await.ok(201);
    let mut types = Vec::new();
    while types.len() < 2 {
        let got = api
            .post("/v1/groups/mail/fetch", None, &fetch)
            .await
            .ok(200);
        for item in got["items"].as_array().unwrap() {
            types.push(item["event"]["type"].as_str().unwrap().to_owned());
        }
    }
    assert_eq!(types, ["order.one", "order.two"]);
    let info = api.bus.groups().await.unwrap();
    let info = info.iter().find(|g| g.name.as_str() == "mail").unwrap();
    assert_eq!((info.in_flight, info.waiting), (2, 1), "{info:?}");
    api.stop().await;
}

// conformance: operations/pull-other-tenants: events of other tenants do not prolong the wait of a fetch
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_ends_while_other_tenants_publish() {
    let api = Api::start().await;
    let acme = api
        .token(&[Scope::Consume, Scope::Publish], Some("acme"))
        .await;
    let bus = api.bus.clone();
    let others = tokio::spawn(async move {
        let event = || {
            Event::builder("order.placed")
                .tenant("beta")
                .json(&json!({}))
        };
        while bus.publish(event()).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let fetch = json!({ "patterns": ["order.*"], "wait_ms": 200 });
    for _ in 0..3 {
        let got = api.post("/v1/groups/mine/fetch", Some(&acme), &fetch);
        let got = tokio::time::timeout(PATIENCE, got)
            .await
            .expect("an answer");
        assert_eq!(got.ok(200)["items"], json!([]));
    }
    others.abort();
    api.stop().await;
}

// conformance: operations/http-reserved: clients cannot publish events of the bus itself, and a tenant cannot refer to stored objects
#[tokio::test]
async fn events_of_the_bus_cannot_be_forged() {
    let api = Api::start().await;
    let forged =
        json!({ "type": "system.dead_letter", "metadata": { "replay_of": "x" }, "payload": {} });
    let got = api.post("/v1/events", None, &forged).await;
    assert_eq!(got.problem(400), "InvalidType");
    let ndjson = [("content-type", "application/x-ndjson")];
    let lines = format!("{{\"type\":\"a.b\"}}\n{forged}\n");
    let got = api
        .send("POST", "/v1/events", None, &ndjson, lines.as_bytes())
        .await;
    assert_eq!(got.problem(400), "InvalidType");
    assert_eq!(
        (&got.json()["index"], &got.json()["published"]),
        (&json!(1), &json!(1))
    );
    let cloud = json!({
        "specversion": "1.0", "id": "1", "source": "/x", "type": "system.dead_letter", "replayof": "x",
    });
    let kind = [("content-type", "application/cloudevents+json")];
    let got = api
        .send(
            "POST",
            "/v1/events",
            None,
            &kind,
            cloud.to_string().as_bytes(),
        )
        .await;
    assert_eq!(got.problem(400), "InvalidType");
    let acme = api.token(&[Scope::Publish], Some("acme")).await;
    let reference = json!({
        "type": "a.b", "metadata": { "s3_overflow": "workflow" },
        "payload": { "_s3Overflow": { "bucket": "b", "key": "events/x/y.json" } },
    });
    let got = api.post("/v1/events", Some(&acme), &reference).await;
    assert_eq!(got.problem(403), "Forbidden");
    api.stop().await;
}

// conformance: operations/http-lines-refused: lines before one that the bus refuses are stored, and the problem says which line and how many are stored
#[tokio::test]
async fn lines_before_a_refused_one_are_stored() {
    let api = Api::start().await;
    let first = json!({ "type": "a.b", "id": "one", "source": "/x", "payload": 1 });
    api.post("/v1/events", None, &first).await.ok(201);
    // The same id with another payload.
    let lines = "{\"type\":\"a.c\"}\n{\"type\":\"a.c\"}\n\
                 {\"type\":\"a.b\",\"id\":\"one\",\"source\":\"/x\",\"payload\":2}\n{\"type\":\"a.c\"}\n";
    let ndjson = [("content-type", "application/x-ndjson")];
    let got = api
        .send("POST", "/v1/events", None, &ndjson, lines.as_bytes())
        .await;
    assert_eq!(got.problem(409), "IdReused");
    assert_eq!(
        (&got.json()["index"], &got.json()["published"]),
        (&json!(2), &json!(2))
    );
    let stored = api.get("/v1/events?type=a.c", None).await.ok(200);
    assert_eq!(stored["items"].as_array().unwrap().len(), 2);
    api.stop().await;
}

// conformance: operations/server-revoked-listeners: a WebSocket and a stream of server-sent events end when their token is revoked
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listeners_end_with_their_token() {
    let api = Api::start().await;
    let token = api.token(&[Scope::Read], None).await;
    let url = format!("ws://{}/ws", api.address);
    let mut request = url.into_client_request().unwrap();
    let bearer = format!("Bearer {token}").parse().unwrap();
    request.headers_mut().insert("authorization", bearer);
    let (mut socket, _) = connect_async(request).await.unwrap();
    let mut stream = BufReader::new(TcpStream::connect(api.address).await.unwrap());
    let request = format!(
        "GET /v1/events/stream HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n",
        api.address
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    // The token is revoked after the stream has begun: its first comment is here.
    let mut begun = String::new();
    while !begun.lines().any(|line| line.starts_with(':')) {
        let read = tokio::time::timeout(PATIENCE, stream.read_line(&mut begun)).await;
        assert!(read.unwrap().unwrap() > 0, "{begun}");
    }
    assert!(begun.starts_with("HTTP/1.1 200"), "{begun}");
    let mut rest = Vec::new();
    let streamed = stream.read_to_end(&mut rest);
    let revoke = async {
        let id = api.state.tokens().list().await.unwrap()[0].id.clone();
        api.state.tokens().revoke(&id).await.unwrap();
        let mut texts = Vec::new();
        while let Some(Ok(message)) = socket.next().await {
            match message {
                Message::Text(text) => texts.push(text.to_string()),
                Message::Close(_) => break,
                _ => {}
            }
        }
        assert!(texts.last().unwrap().contains("\"revoked\""), "{texts:?}");
    };
    let (streamed, ()) = tokio::time::timeout(PATIENCE, async { tokio::join!(streamed, revoke) })
        .await
        .expect("both end");
    streamed.unwrap();
    api.stop().await;
}

// conformance: operations/server-websocket-token: the token of a WebSocket comes in a header, or as a subprotocol from a page of a browser, and is not accepted in the URL
#[tokio::test]
async fn the_token_of_a_websocket_is_not_in_its_url() {
    let api = Api::start().await;
    let token = api.token(&[Scope::Read], None).await;
    let weak = api.token(&[Scope::Publish], None).await;
    let connect = async |query: &str, header: Option<(&'static str, String)>| {
        let url = format!("ws://{}/ws{query}", api.address);
        let mut request = url.into_client_request().unwrap();
        if let Some((name, value)) = header {
            request.headers_mut().insert(name, value.parse().unwrap());
        }
        match connect_async(request).await {
            Ok((_, response)) => {
                let chosen = response.headers().get("sec-websocket-protocol");
                let chosen = chosen.map(|chosen| chosen.to_str().unwrap().to_owned());
                (101, chosen)
            }
            Err(Error::Http(response)) => (response.status().as_u16(), None),
            Err(error) => panic!("{error}"),
        }
    };
    let offered = |token: &str| {
        let offered = format!("everbus.v1, everbus.token.{token}");
        Some(("sec-websocket-protocol", offered))
    };
    assert_eq!(connect("", None).await.0, 401);
    for name in ["token", "access_token", "authorization"] {
        let query = format!("?{name}={token}");
        assert_eq!(connect(&query, None).await.0, 401, "{query}");
    }
    let header = Some(("authorization", format!("Bearer {token}")));
    assert_eq!(connect("", header).await.0, 101);
    // The answer names the protocol and never the token.
    let protocol = Some("everbus.v1".to_owned());
    assert_eq!(connect("", offered(&token)).await, (101, protocol));
    assert_eq!(connect("", offered("evb_wrong")).await.0, 401);
    assert_eq!(connect("", offered(&weak)).await.0, 403);
    api.stop().await;
}

// conformance: operations/server-last-token: revoking the last token does not open the server; forgetting that tokens were used does
#[tokio::test]
async fn a_server_without_tokens_left_stays_closed() {
    let api = Api::start().await;
    api.get("/v1/events", None).await.ok(200);
    api.token(&[Scope::Read], None).await;
    let tokens = api.state.tokens();
    assert!(tokens.reset().await.is_err(), "a token is left");
    let id = tokens.list().await.unwrap()[0].id.clone();
    tokens.revoke(&id).await.unwrap();
    assert_eq!(
        api.get("/v1/events", None).await.problem(401),
        "Unauthenticated"
    );
    tokens.reset().await.unwrap();
    api.get("/v1/events", None).await.ok(200);
    api.stop().await;
}

// conformance: operations/server-login-body: the body of a login is small, whatever it is packed in
#[tokio::test]
async fn a_login_takes_no_large_body() {
    let api = Api::start().await;
    let large = format!("{{\"token\":\"{}\"}}", "x".repeat(10_000));
    let got = api
        .send("POST", "/v1/session", None, &JSON, large.as_bytes())
        .await;
    assert_eq!(got.problem(413), "BodyTooLarge");
    let packed = crate::bad_input::gzip(large.as_bytes());
    let headers = [JSON[0], ("content-encoding", "gzip")];
    let got = api
        .send("POST", "/v1/session", None, &headers, &packed)
        .await;
    assert_eq!(got.problem(413), "BodyTooLarge");
    api.stop().await;
}

// conformance: operations/server-websocket-large: a client that catches up with more bytes than may wait gets all of them
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_catches_up_with_large_events() {
    let api = Api::start().await;
    let text = "x".repeat(100_000);
    let events: Vec<Event> = (0..200)
        .map(|n| {
            let event = Event::builder("order.placed").json(&json!({ "n": n, "text": text }));
            event.build().unwrap()
        })
        .collect();
    for some in events.chunks(50) {
        api.bus.publish_batch(some.to_vec()).await.unwrap();
    }
    for subscribe in [
        json!({ "type": "subscribe", "id": "s", "patterns": ["order.*"], "from": "first" }),
        json!({ "type": "subscribe", "id": "s", "patterns": ["order.*"], "from": "first", "group": "mail" }),
    ] {
        let url = format!("ws://{}/ws", api.address);
        let (mut socket, _) = connect_async(url).await.unwrap();
        socket
            .send(Message::text(subscribe.to_string()))
            .await
            .unwrap();
        let mut seen = BTreeSet::new();
        while seen.len() < 200 {
            let next = tokio::time::timeout(PATIENCE, socket.next()).await;
            let message = next
                .expect("a message")
                .expect("an open connection")
                .unwrap();
            let Message::Text(message) = message else {
                continue;
            };
            let message: Value = serde_json::from_str(&message).unwrap();
            assert_ne!(message["status"], "slow", "after {} events", seen.len());
            for event in message["events"].as_array().into_iter().flatten() {
                seen.insert(event["payload"]["n"].as_u64().unwrap());
            }
            if message["leases"].is_array() {
                let ack = json!({ "type": "ack", "id": "s", "leases": message["leases"] });
                socket.send(Message::text(ack.to_string())).await.unwrap();
                // Fewer messages than the client may send in a second.
                tokio::time::sleep(Duration::from_millis(25)).await;
            }
        }
    }
    api.stop().await;
}
