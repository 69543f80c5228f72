//! The WebSocket and the server-sent events, from the side of a client.

use std::time::Duration;

use everbus::Event;
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::served::{PATIENCE, Served};

/// One client of the WebSocket.
struct Client(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl Client {
    async fn connect(server: &Served) -> Self {
        let url = format!("ws://{}/ws", server.address);
        let (socket, _) = connect_async(url).await.unwrap();
        let mut client = Self(socket);
        assert_eq!(client.message().await["status"], "connected");
        client
    }

    async fn send(&mut self, message: Value) {
        let text = message.to_string();
        self.0.send(Message::text(text)).await.unwrap();
    }

    /// The next JSON message; `Null` once the server has closed the connection.
    async fn message(&mut self) -> Value {
        loop {
            let next = timeout(PATIENCE, self.0.next()).await.expect("a message");
            match next {
                Some(Ok(Message::Text(text))) => return serde_json::from_str(&text).unwrap(),
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Value::Null,
                Some(Ok(_)) => {}
            }
        }
    }

    /// Subscribes and waits for the answer.
    async fn subscribe(&mut self, mut wanted: Value) -> Value {
        wanted["type"] = json!("subscribe");
        self.send(wanted).await;
        let answer = self.message().await;
        assert_eq!(answer["type"], "ack", "{answer}");
        assert_eq!(answer["of"], "subscribe");
        answer
    }

    /// The numbers of the next events, in order, and the cursor after them.
    async fn numbers(&mut self, many: usize) -> (Vec<u64>, Value) {
        let (mut numbers, mut cursor) = (Vec::new(), Value::Null);
        while numbers.len() < many {
            let message = self.message().await;
            assert_eq!(message["type"], "data", "{message}");
            for event in message["events"].as_array().unwrap() {
                numbers.push(event["payload"]["n"].as_u64().unwrap());
            }
            cursor = message["cursor"].clone();
        }
        (numbers, cursor)
    }
}

async fn publish(server: &Served, event_type: &str, numbers: impl IntoIterator<Item = u64>) {
    let events = numbers.into_iter().map(|n| {
        let event = Event::builder(event_type).json(&json!({ "n": n }));
        event.build().unwrap()
    });
    server
        .bus
        .publish_batch(events.collect::<Vec<_>>())
        .await
        .unwrap();
}

// conformance: framework/websocket-flow: a client connects, subscribes to patterns, gets events as they are stored, unsubscribes and leaves
// conformance: framework/websocket-messages: data, status and ack go out; subscribe, unsubscribe and ping come in
// conformance: omni/why-real-time: a WebSocket client gets the events that handlers get
#[tokio::test(flavor = "multi_thread")]
async fn a_client_gets_the_events_it_subscribed_to_and_no_others() {
    let server = Served::start().await;
    let mut client = Client::connect(&server).await;
    client
        .subscribe(json!({ "id": "orders", "patterns": ["order.*"] }))
        .await;
    publish(&server, "user.created", [7]).await;
    publish(&server, "order.placed", [1, 2, 3]).await;
    let (numbers, _) = client.numbers(3).await;
    assert_eq!(numbers, [1, 2, 3]);
    client.send(json!({ "type": "ping", "id": "p" })).await;
    let pong = client.message().await;
    assert_eq!(pong, json!({ "type": "ack", "of": "ping", "id": "p" }));
    client
        .send(json!({ "type": "unsubscribe", "id": "orders" }))
        .await;
    assert_eq!(client.message().await["of"], "unsubscribe");
    publish(&server, "order.placed", [4]).await;
    client.send(json!({ "type": "ping" })).await;
    assert_eq!(client.message().await["of"], "ping");
    server.stop().await;
}

// conformance: operations/server-websocket-resume: a client that reconnects with its last cursor misses no event and gets none twice
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reconnects_continues_after_its_cursor_without_a_gap() {
    let server = Served::start().await;
    let mut client = Client::connect(&server).await;
    client
        .subscribe(json!({ "id": "s", "from": "first" }))
        .await;
    publish(&server, "a.b", 0..10).await;
    let (mut seen, mut cursor) = client.numbers(10).await;
    let total = 1000;
    // A publisher that does not stop while the client comes and goes.
    let bus = server.bus.clone();
    let publisher = tokio::spawn(async move {
        for n in 10..total {
            let event = Event::builder("a.b")
                .json(&json!({ "n": n }))
                .build()
                .unwrap();
            bus.publish(event).await.unwrap();
        }
    });
    while (seen.len() as u64) < total {
        drop(client);
        client = Client::connect(&server).await;
        client
            .subscribe(json!({ "id": "s", "after": cursor }))
            .await;
        let (more, after) = client.numbers(1).await;
        seen.extend(more);
        cursor = after;
    }
    publisher.await.unwrap();
    let expected: Vec<u64> = (0..total).collect();
    assert_eq!(seen, expected);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_make_no_sense_are_answered_and_the_connection_goes_on() {
    let server = Served::start().await;
    let mut client = Client::connect(&server).await;
    let bad = [
        (json!({ "type": "dance" }), "InvalidPayloadError"),
        (
            json!({ "type": "subscribe", "id": "x", "patterns": ["a.>.b"] }),
            "InvalidPattern",
        ),
        (
            json!({ "type": "subscribe", "id": "x", "after": "no cursor" }),
            "InvalidCursor",
        ),
        (json!({ "type": "subscribe", "id": "" }), "InvalidSetting"),
        (
            json!({ "type": "subscribe", "id": "x", "topic": "weather" }),
            "InvalidSetting",
        ),
        (
            json!({ "type": "unsubscribe", "id": "x" }),
            "SubscriptionNotFound",
        ),
        (
            json!({ "type": "ping", "surprise": 1 }),
            "InvalidPayloadError",
        ),
    ];
    for (message, code) in bad {
        client.send(message.clone()).await;
        let answer = client.message().await;
        assert_eq!(answer["status"], "error", "{message}: {answer}");
        assert_eq!(answer["code"], code, "{message}: {answer}");
    }
    client.send(json!({ "type": "ping" })).await;
    assert_eq!(client.message().await["of"], "ping");
    server.stop().await;
}

// conformance: operations/server-websocket-limits: frames of 64 KiB, 100 subscriptions, 50 messages a second; a client beyond them is told and disconnected
#[tokio::test(flavor = "multi_thread")]
async fn a_client_beyond_its_limits_is_told_and_disconnected() {
    let server = Served::start().await;
    let mut client = Client::connect(&server).await;
    for n in 0..100 {
        // Below 50 messages a second.
        tokio::time::sleep(Duration::from_millis(25)).await;
        client
            .subscribe(json!({ "id": format!("s{n}"), "patterns": ["x.y"] }))
            .await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    client
        .send(json!({ "type": "subscribe", "id": "one more" }))
        .await;
    let refused = client.message().await;
    assert_eq!(refused["status"], "error");
    assert!(
        refused["detail"]
            .as_str()
            .unwrap()
            .contains("100 subscriptions"),
        "{refused}"
    );

    let mut large = Client::connect(&server).await;
    let _ = large.0.send(Message::text("x".repeat(65 << 10))).await;
    let mut last = Value::Null;
    loop {
        match large.message().await {
            Value::Null => break,
            message => last = message,
        }
    }
    assert!(last.is_null() || last["status"] == "error", "{last}");

    let mut flood = Client::connect(&server).await;
    for _ in 0..200 {
        if flood
            .0
            .send(Message::text("{\"type\":\"ping\"}"))
            .await
            .is_err()
        {
            break;
        }
    }
    let mut answers = Vec::new();
    loop {
        match flood.message().await {
            Value::Null => break,
            message => answers.push(message),
        }
    }
    assert!(answers.len() < 120, "{} answers", answers.len());
    assert!(
        answers.iter().any(|a| a["status"] == "flood"),
        "{answers:?}"
    );

    let mut binary = Client::connect(&server).await;
    binary.0.send(Message::binary(vec![1, 2, 3])).await.unwrap();
    assert_eq!(binary.message().await["status"], "error");
    assert!(binary.message().await.is_null());

    // Bytes that are no WebSocket frame end one connection and nothing else.
    let mut raw = Client::connect(&server).await;
    if let MaybeTlsStream::Plain(stream) = raw.0.get_mut() {
        stream.write_all(&[0xff; 64]).await.unwrap();
    }
    while !raw.message().await.is_null() {}
    let mut after = Client::connect(&server).await;
    after.send(json!({ "type": "ping" })).await;
    assert_eq!(after.message().await["of"], "ping");
    server.stop().await;
}

// conformance: operations/server-websocket-slow: a client that does not read is told that it is slow and disconnected once 1,000 messages wait
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_is_disconnected() {
    let server = Served::with(|options| options.websocket.queued = 50).await;
    let mut client = Client::connect(&server).await;
    client.subscribe(json!({ "id": "s" })).await;
    // It follows the end of the log: what is behind waits for the client.
    for n in 0..10 {
        publish(&server, "a.b", [n]).await;
        assert_eq!(client.numbers(1).await.0, [n]);
    }
    let large = "x".repeat(20_000);
    // More than the buffers of both sides hold, while the client reads nothing.
    for _ in 0..40 {
        let events = (0..50).map(|_| {
            Event::builder("a.b")
                .json(&json!({ "n": 1, "x": large }))
                .build()
                .unwrap()
        });
        server
            .bus
            .publish_batch(events.collect::<Vec<_>>())
            .await
            .unwrap();
    }
    let mut last = Value::Null;
    let mut events = 0;
    loop {
        match client.message().await {
            Value::Null => break,
            message => {
                events += message["events"].as_array().map_or(0, Vec::len);
                // Then the server does not close the connection, and its pings go on.
                assert!(events < 2000, "all {events} events arrived");
                last = message;
            }
        }
    }
    assert_eq!(last["status"], "slow", "{last}");
    server.stop().await;
}

// conformance: operations/server-websocket-coalesced: events that are stored one after another within 20 ms come in one message
#[tokio::test(flavor = "multi_thread")]
async fn events_stored_within_20_ms_come_in_one_message() {
    let server = Served::start().await;
    let mut client = Client::connect(&server).await;
    client.subscribe(json!({ "id": "s" })).await;
    let total = 300;
    let bus = server.bus.clone();
    let began = Instant::now();
    // Each event is durable before the next one is published, so the server reads them one at a time.
    let publisher = tokio::spawn(async move {
        for n in 0..total {
            let event = Event::builder("a.b").json(&json!({ "n": n }));
            bus.publish(event.build().unwrap()).await.unwrap();
        }
    });
    let (mut seen, mut messages) = (Vec::new(), 0);
    while (seen.len() as u64) < total {
        let message = client.message().await;
        assert_eq!(message["type"], "data", "{message}");
        let events = message["events"].as_array().unwrap();
        seen.extend(events.iter().map(|e| e["payload"]["n"].as_u64().unwrap()));
        messages += 1;
    }
    publisher.await.unwrap();
    assert_eq!(seen, (0..total).collect::<Vec<_>>());
    // A slow machine takes longer and may send more often. An event that comes while a message is written may have a
    // message of its own, hence the factor.
    let sends = began.elapsed().as_millis() / 20 + 2;
    assert!(
        messages <= 2 * sends,
        "{messages} messages in the time for {sends}"
    );
    server.stop().await;
}

// conformance: framework/websocket-heartbeat: pings come at the set interval, and a client that misses two answers is disconnected
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_answer_pings_is_disconnected() {
    let defaults = everbus_server::WebSocketLimits::default();
    assert_eq!(defaults.ping_every, Duration::from_secs(30));
    assert_eq!(defaults.pong_within, Duration::from_secs(10));
    assert_eq!(defaults.missed_pongs, 2);
    let server = Served::with(|options| {
        options.websocket.ping_every = Duration::from_millis(200);
        options.websocket.pong_within = Duration::from_millis(100);
    })
    .await;
    // A client that reads raw bytes answers nothing.
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let request = format!(
        "GET /ws HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        server.address
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    let end = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut bytes);
    timeout(PATIENCE, end)
        .await
        .expect("the server closes the connection")
        .unwrap();
    let pings = bytes.windows(2).filter(|w| *w == [0x89, 0x00]).count();
    assert!(pings >= 2, "{pings} pings");
    assert!(String::from_utf8_lossy(&bytes).contains("\"silent\""));

    // A client that answers stays.
    let mut client = Client::connect(&server).await;
    let quiet = timeout(Duration::from_secs(2), client.0.next());
    let mut pings = 0;
    let mut next = quiet.await;
    while let Ok(Some(Ok(Message::Ping(_)))) = next {
        pings += 1;
        if pings == 6 {
            break;
        }
        next = timeout(Duration::from_secs(2), client.0.next()).await;
    }
    assert_eq!(pings, 6);
    server.stop().await;
}

// conformance: operations/server-websocket-origin: a page of another site cannot connect
#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_site_cannot_connect() {
    let server =
        Served::with(|options| options.origins = vec!["https://ops.example".to_owned()]).await;
    let connect = async |origin: &str| {
        let url = format!("ws://{}/ws", server.address);
        let mut request = url.into_client_request().unwrap();
        request
            .headers_mut()
            .insert("origin", origin.parse().unwrap());
        match connect_async(request).await {
            Ok(_) => 101,
            Err(Error::Http(response)) => response.status().as_u16(),
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(connect("https://evil.example").await, 403);
    assert_eq!(connect("null").await, 403);
    assert_eq!(connect("https://ops.example").await, 101);
    assert_eq!(connect(&format!("http://{}", server.address)).await, 101);
    server.stop().await;
}

// conformance: operations/server-websocket-group: a durable group over the WebSocket: acked events are done, failed ones and those of a client that left come again
#[tokio::test(flavor = "multi_thread")]
async fn a_durable_group_delivers_until_the_client_acks() {
    let server = Served::start().await;
    let mut client = Client::connect(&server).await;
    let wanted = json!({ "id": "g", "group": "mail", "patterns": ["order.*"], "from": "first" });
    publish(&server, "order.placed", [1, 2, 3]).await;
    client.subscribe(wanted.clone()).await;
    let mut leases = std::collections::BTreeMap::new();
    while leases.len() < 3 {
        let message = client.message().await;
        assert_eq!(message["attempt"], 1, "{message}");
        let n = message["events"][0]["payload"]["n"].as_u64().unwrap();
        leases.insert(n, message["leases"][0].clone());
    }
    client
        .send(json!({ "type": "ack", "id": "g", "leases": [leases[&1]] }))
        .await;
    assert_eq!(
        client.message().await,
        json!({ "type": "ack", "of": "ack", "id": "g" })
    );
    client
        .send(
            json!({ "type": "nack", "id": "g", "leases": [leases[&2]], "error": "no mail server" }),
        )
        .await;
    let answer = client.message().await;
    assert_eq!(answer["of"], "nack", "{answer}");
    // The failed one comes again, as a second attempt.
    let again = client.message().await;
    assert_eq!(again["events"][0]["payload"]["n"], 2, "{again}");
    assert_eq!(again["attempt"], 2);
    // What the client holds when it leaves goes to the next one: 2 and 3, but not 1.
    client.0.close(None).await.unwrap();
    while !client.message().await.is_null() {}
    let mut next = Client::connect(&server).await;
    next.subscribe(wanted).await;
    let mut left = std::collections::BTreeSet::new();
    while left.len() < 2 {
        let message = next.message().await;
        left.insert(message["events"][0]["payload"]["n"].as_u64().unwrap());
    }
    assert_eq!(left, [2, 3].into());
    server.stop().await;
}

/// Reads server-sent events.
struct Listener(BufReader<TcpStream>);

impl Listener {
    async fn connect(server: &Served, query: &str, last: Option<&str>) -> Self {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let last = last.map_or_else(String::new, |id| format!("Last-Event-ID: {id}\r\n"));
        let request = format!(
            "GET /v1/events/stream{query} HTTP/1.1\r\nHost: {}\r\n{last}\r\n",
            server.address
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut listener = Self(BufReader::new(stream));
        assert!(listener.line().await.contains("200"));
        while !listener.line().await.is_empty() {}
        // The stream has begun once its first comment is here.
        while !listener.line().await.starts_with(':') {}
        listener
    }

    async fn line(&mut self) -> String {
        let mut line = String::new();
        let read = self.0.read_line(&mut line);
        assert!(
            timeout(PATIENCE, read).await.unwrap().unwrap() > 0,
            "the stream ended"
        );
        line.trim_end().to_owned()
    }

    /// The id and the data of the next event.
    async fn event(&mut self) -> (String, Value) {
        let (mut id, mut data) = (String::new(), String::new());
        loop {
            let line = self.line().await;
            if let Some(text) = line.strip_prefix("id: ") {
                id = text.to_owned();
            } else if let Some(text) = line.strip_prefix("data: ") {
                data.push_str(text);
            } else if line.is_empty() && !data.is_empty() {
                return (id, serde_json::from_str(&data).unwrap());
            }
        }
    }
}

// conformance: operations/server-sse: server-sent events follow the log, and Last-Event-ID resumes without a gap
#[tokio::test(flavor = "multi_thread")]
async fn server_sent_events_follow_and_resume() {
    let server = Served::start().await;
    let mut listener = Listener::connect(&server, "?types=order.*", None).await;
    publish(&server, "user.created", [9]).await;
    publish(&server, "order.placed", 1..=3).await;
    let (first, event) = listener.event().await;
    assert_eq!(event["payload"]["n"], 1);
    drop(listener);
    publish(&server, "order.placed", [4]).await;
    let mut again = Listener::connect(&server, "?types=order.*", Some(&first)).await;
    for n in 2..=4 {
        assert_eq!(again.event().await.1["payload"]["n"], n);
    }
    // A payload with line breaks is still one event.
    let odd = Event::builder("order.placed")
        .payload("{\r\n\"n\":\n5}")
        .build()
        .unwrap();
    server.bus.publish(odd).await.unwrap();
    assert_eq!(again.event().await.1["payload"]["n"], 5);
    server.stop().await;
}
