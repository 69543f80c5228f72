//! Input that is wrong, too large, too slow or hostile: the right status, bounded memory, and the server goes on.

use std::io::Write as _;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::api::{Api, PATIENCE};

const JSON: (&str, &str) = ("content-type", "application/json");

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

// conformance: operations/http-bad-bodies: bodies that are too large, truncated, not UTF-8, too deep or of the wrong type get the right status and a problem document
#[tokio::test]
async fn bad_bodies_are_refused_and_the_server_goes_on() {
    let api = Api::with(None, |options| {
        options.limits.body = 100_000;
        options.limits.decoded_body = 200_000;
    })
    .await;
    let large = json!({ "type": "a.b", "payload": "x".repeat(150_000) }).to_string();
    let got = api
        .send("POST", "/v1/events", None, &[JSON], large.as_bytes())
        .await;
    assert_eq!(got.problem(413), "BodyTooLarge");
    // The same without saying how long it is.
    let chunked = format!("{:x}\r\n{large}\r\n0\r\n\r\n", large.len());
    let headers = [JSON, ("transfer-encoding", "chunked")];
    let got = api
        .send("POST", "/v1/events", None, &headers, chunked.as_bytes())
        .await;
    assert_eq!(got.problem(413), "BodyTooLarge");
    // 50 MB of zeros in 50 kB of gzip.
    let bomb = gzip(&vec![b'0'; 50_000_000]);
    assert!(bomb.len() < 100_000);
    let zipped = [JSON, ("content-encoding", "gzip")];
    let got = api.send("POST", "/v1/events", None, &zipped, &bomb).await;
    assert_eq!(got.problem(413), "BodyTooLarge");
    let got = api
        .send("POST", "/v1/events", None, &zipped, b"not gzip")
        .await;
    assert_eq!(got.problem(400), "InvalidRequest");
    let fine = gzip(br#"{"type":"zipped.event"}"#);
    api.send("POST", "/v1/events", None, &zipped, &fine)
        .await
        .ok(201);
    let got = api
        .send(
            "POST",
            "/v1/events",
            None,
            &[JSON, ("content-encoding", "br")],
            &fine,
        )
        .await;
    assert_eq!(got.problem(415), "UnsupportedEncoding");
    let deep = format!(
        "{{\"type\":\"a.b\",\"metadata\":{}1{}}}",
        "[".repeat(40_000),
        "]".repeat(40_000)
    );
    for (body, status) in [
        (&b"{\"type\":\"a.b\""[..], 400),
        (b"", 400),
        (b"null", 400),
        (b"{}", 400),
        (b"\xff\xfe", 400),
        (b"{\"type\":\"a\xff\"}", 400),
        (b"{\"type\":\"a.b\",\"surprise\":1}", 400),
        (b"{\"type\":\"a.b\",\"version\":-1}", 400),
        (b"{\"type\":\"a.b\",\"occurred_at\":\"yesterday\"}", 400),
        (b"{\"type\":\"system.dead_letter\"}", 400),
        (b"[{\"type\":\"a.b\"},", 400),
        (deep.as_bytes(), 400),
    ] {
        let got = api.send("POST", "/v1/events", None, &[JSON], body).await;
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        assert_eq!(got.status, status, "{shown}");
        got.problem(status);
    }
    for (path, says) in [
        ("/v1/events?limit=many", "limit: not a whole number"),
        (
            "/v1/events?since=yesterday",
            "since: \"yesterday\" is not a time",
        ),
        ("/v1/events/stream?form=first", "unknown field `form`"),
        ("/v1/tasks/none", "there is no task"),
    ] {
        let got = api.get(path, None).await;
        let detail = got.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(says), "{path}: {detail}");
        assert!(!got.json().to_string().contains("--"), "{}", got.json());
    }
    let nameless = json!({ "name": "", "scopes": ["read"] });
    let got = api.post("/v1/tokens", None, &nameless).await;
    assert_eq!(got.problem(400), "InvalidSetting");
    let page = api.get("/v1/events", None).await.ok(200);
    assert_eq!(
        page["items"].as_array().unwrap().len(),
        1,
        "only the zipped one"
    );
    api.stop().await;
}

// conformance: operations/http-bad-requests: 10,000 headers, endless headers, slow headers and slow bodies end the connection, not the server
#[tokio::test]
async fn hostile_connections_end_and_the_server_goes_on() {
    let api = Api::with(None, |options| {
        options.limits.header_timeout = Duration::from_secs(2);
        options.limits.body_timeout = Duration::from_secs(2);
    })
    .await;
    let many: String = (0..10_000).map(|n| format!("x-{n}: 1\r\n")).collect();
    let request = format!(
        "GET /healthz HTTP/1.1\r\nhost: {}\r\n{many}\r\n",
        api.address
    );
    if let Some(got) = api.raw(request.as_bytes()).await {
        assert_eq!(got.status, 431);
    }
    let long = format!(
        "GET /healthz HTTP/1.1\r\nx: {}\r\n\r\n",
        "y".repeat(1_000_000)
    );
    if let Some(got) = api.raw(long.as_bytes()).await {
        assert!(matches!(got.status, 400 | 431), "{}", got.status);
    }
    for garbage in [
        &b"\x16\x03\x01\x02\x00"[..],
        b"NOT HTTP\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ] {
        if let Some(got) = api.raw(garbage).await {
            assert!(got.status >= 400, "{}", got.status);
        }
    }
    // A client that sends its headers letter by letter is cut off.
    let mut slow = tokio::net::TcpStream::connect(api.address).await.unwrap();
    slow.write_all(b"GET /healthz HTTP/1.1\r\nhost: loc")
        .await
        .unwrap();
    let mut rest = Vec::new();
    let cut = tokio::time::timeout(PATIENCE, slow.read_to_end(&mut rest)).await;
    assert!(cut.is_ok(), "a slow client keeps its connection");
    // One that promises a body and does not send it gets an answer.
    let request = format!(
        "POST /v1/events HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{",
        api.address
    );
    let got = api.raw(request.as_bytes()).await.unwrap();
    assert_eq!(got.status, 408);
    api.get("/healthz", None).await.ok(200);
    api.stop().await;
}

#[tokio::test]
async fn more_connections_than_seats_wait_their_turn() {
    let api = Api::with(None, |options| {
        options.limits.connections = 2;
        options.limits.header_timeout = Duration::from_secs(2);
    })
    .await;
    // Both seats are taken by clients that say nothing; the third is served once they are cut off.
    let mut silent = Vec::new();
    for _ in 0..2 {
        silent.push(tokio::net::TcpStream::connect(api.address).await.unwrap());
    }
    api.get("/healthz", None).await.ok(200);
    drop(silent);
    api.stop().await;
}
