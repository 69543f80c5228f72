//! Consumers without Rust: fetching over HTTP, webhooks, commands; pausing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::api::{Api, until};

// conformance: operations/pull: a client fetches events under leases, acks, retries, extends; an event without attempts left is a dead letter
#[tokio::test]
async fn clients_fetch_settle_and_extend() {
    let api = Api::start().await;
    let declare = json!({ "patterns": ["job.*"] });
    let none = api
        .post("/v1/groups/work/fetch", None, &declare)
        .await
        .ok(200);
    assert_eq!(none["items"], json!([]));
    let got = api.post("/v1/groups/nobody/fetch", None, &json!({})).await;
    assert_eq!(got.problem(404), "GroupNotFound");
    let id = api.publish(None, "job.created").await;
    let fetch = json!({ "wait_ms": 30000, "max": 5 });
    let one = async || {
        let got = api
            .post("/v1/groups/work/fetch", None, &fetch)
            .await
            .ok(200);
        got["items"][0].clone()
    };
    let settle = async |lease: &Value, verdict: &str| {
        let item = json!({ "lease": lease, "verdict": verdict, "error": "busy", "after_ms": 0 });
        let body = json!({ "items": [item] });
        api.post("/v1/groups/work/settle", None, &body).await
    };
    // Four attempts by the default policy, then the dead letters.
    for attempt in 1..=4 {
        let item = one().await;
        assert_eq!(
            (&item["event"]["id"], &item["attempt"]),
            (&json!(id), &json!(attempt))
        );
        let extend = json!({ "leases": [item["lease"]], "by_ms": 60000 });
        let extended = api
            .post("/v1/groups/work/extend", None, &extend)
            .await
            .ok(200);
        assert_eq!(extended["items"][0]["ok"], true);
        let settled = settle(&item["lease"], "retry").await.ok(200);
        assert_eq!(settled["items"][0]["ok"], true, "{settled}");
        let late = settle(&item["lease"], "ack").await.ok(200);
        assert_eq!(late["items"][0]["code"], "LeaseLost");
    }
    let letters = api
        .get(&format!("/v1/dead-letters/{id}"), None)
        .await
        .ok(200);
    assert_eq!(letters["items"][0]["attempts"], 4);
    assert_eq!(letters["items"][0]["failures"][0]["error"], "busy");
    // Edit and retry: the corrected event goes to the group that gave up.
    let edit = json!({ "payload": { "n": 2 } });
    let edited = api
        .post(&format!("/v1/dead-letters/{id}/edit"), None, &edit)
        .await
        .ok(200);
    let item = one().await;
    assert_eq!(
        (&item["event"]["id"], &item["event"]["payload"]["n"]),
        (&edited["id"], &json!(2))
    );
    assert_eq!(
        settle(&item["lease"], "ack").await.ok(200)["items"][0]["ok"],
        true
    );
    // A lease cannot be made up, changed, or used for another group.
    let item = json!({ "lease": "e30.AAAA", "verdict": "ack" });
    let got = api
        .post("/v1/groups/work/settle", None, &json!({ "items": [item] }))
        .await;
    assert_eq!(got.problem(400), "InvalidRequest");
    api.publish(None, "job.created").await;
    let item = one().await;
    let got = api
        .post(
            "/v1/groups/other/settle",
            None,
            &json!({ "items": [{ "lease": item["lease"], "verdict": "ack" }] }),
        )
        .await;
    assert_eq!(got.problem(400), "InvalidRequest");
    api.stop().await;
}

// conformance: operations/pull-lease: an event whose client vanished goes to another client when its lease ends
#[tokio::test]
async fn an_event_whose_client_vanished_is_fetched_again() {
    let api = Api::start().await;
    let fetch = json!({ "patterns": ["job.*"], "wait_ms": 30000, "lease_ms": 300 });
    api.post(
        "/v1/groups/work/fetch",
        None,
        &json!({ "patterns": ["job.*"] }),
    )
    .await
    .ok(200);
    let id = api.publish(None, "job.created").await;
    let first = api
        .post("/v1/groups/work/fetch", None, &fetch)
        .await
        .ok(200);
    assert_eq!(first["items"][0]["event"]["id"], id);
    let second = until("the second delivery", async || {
        let got = api
            .post("/v1/groups/work/fetch", None, &fetch)
            .await
            .ok(200);
        (got["items"].as_array().unwrap().len() == 1).then_some(got)
    })
    .await;
    assert_eq!(second["items"][0]["event"]["id"], id);
    let late = json!({ "items": [{ "lease": first["items"][0]["lease"], "verdict": "ack" }] });
    let late = api
        .post("/v1/groups/work/settle", None, &late)
        .await
        .ok(200);
    assert_eq!(late["items"][0]["code"], "LeaseLost");
    api.stop().await;
}

// conformance: operations/pause: a paused group gets no events, in this process and after a restart, until it is resumed
#[tokio::test]
async fn a_paused_group_stays_paused_across_a_restart() {
    let api = Api::start().await;
    let count = Arc::new(AtomicUsize::new(0));
    let subscribe = async |api: &Api| {
        let count = count.clone();
        let handler = move || {
            let count = count.clone();
            async move {
                count.fetch_add(1, Ordering::SeqCst);
            }
        };
        api.bus
            .subscribe("tick.*")
            .group("clock")
            .handler(handler)
            .await
            .unwrap();
    };
    subscribe(&api).await;
    api.publish(None, "tick.one").await;
    until("the first tick", async || {
        (count.load(Ordering::SeqCst) == 1).then_some(())
    })
    .await;
    let paused = api
        .post(
            "/v1/groups/clock/pause",
            None,
            &json!({ "reason": "maintenance" }),
        )
        .await
        .ok(200);
    assert_eq!(paused["paused"]["reason"], "maintenance");
    assert_eq!(paused["paused"]["by"], "http");
    api.publish(None, "tick.two").await;
    until("the tick to wait", async || {
        let group = api.get("/v1/groups/clock", None).await.ok(200);
        (group["behind"].as_u64().unwrap() + group["waiting"].as_u64().unwrap() == 1).then_some(())
    })
    .await;
    let dir = api.stop().await;
    let api = Api::on(dir, None, |_| {}).await;
    subscribe(&api).await;
    // An event for a group that runs passes, so the paused one had its chance.
    let other = Arc::new(AtomicUsize::new(0));
    let seen = other.clone();
    let handler = move || {
        let seen = seen.clone();
        async move {
            seen.fetch_add(1, Ordering::SeqCst);
        }
    };
    api.bus
        .subscribe("tick.*")
        .group("running")
        .handler(handler)
        .await
        .unwrap();
    api.publish(None, "tick.three").await;
    until("the other group", async || {
        (other.load(Ordering::SeqCst) == 1).then_some(())
    })
    .await;
    assert_eq!(count.load(Ordering::SeqCst), 1, "the paused group ran");
    api.post("/v1/groups/clock/resume", None, &json!({}))
        .await
        .ok(200);
    until("the ticks after the pause", async || {
        (count.load(Ordering::SeqCst) == 3).then_some(())
    })
    .await;
    // A group whose handlers run is kept; another one is deleted.
    let delete = async |path: &str| api.send("DELETE", path, None, &[], b"").await;
    let kept = delete("/v1/groups/running").await;
    assert_eq!(kept.problem(409), "GroupConflict");
    let declare = json!({ "patterns": ["tick.*"] });
    api.post("/v1/groups/old/fetch", None, &declare)
        .await
        .ok(200);
    let removed = delete("/v1/groups/old").await.ok(200);
    assert_eq!(removed["removed"], "old");
    let gone = api.get("/v1/groups/old", None).await;
    assert_eq!(gone.problem(404), "GroupNotFound");
    let audit = api.get("/v1/audit?action=groups.pause", None).await.ok(200);
    assert_eq!(audit["items"][0]["details"]["reason"], "maintenance");
    assert_eq!(
        api.post("/v1/groups/none/pause", None, &json!({}))
            .await
            .problem(404),
        "GroupNotFound"
    );
    api.stop().await;
}

/// What came in: head and body of each request.
pub(crate) type Requests = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// A receiver of webhooks that answers from a list, and 200 afterwards.
pub(crate) struct Receiver {
    pub(crate) url: String,
    pub(crate) requests: Requests,
}

impl Receiver {
    pub(crate) async fn start(answers: &[&'static str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (kept, mut answers) = (requests.clone(), answers.to_vec());
        answers.reverse();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut bytes = Vec::new();
                let mut buffer = [0; 8192];
                let (head, body) = loop {
                    let n = stream.read(&mut buffer).await.unwrap_or(0);
                    bytes.extend_from_slice(&buffer[..n]);
                    if n == 0 {
                        break (String::new(), Vec::new());
                    }
                    let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else {
                        continue;
                    };
                    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
                    let length: usize = value(&head, "content-length").parse().unwrap();
                    if bytes.len() >= end + 4 + length {
                        break (head, bytes[end + 4..].to_vec());
                    }
                };
                kept.lock().push((head, body));
                let answer = answers.pop().unwrap_or("200 OK\r\n");
                let text =
                    format!("HTTP/1.1 {answer}content-length: 0\r\nconnection: close\r\n\r\n");
                let _ = stream.write_all(text.as_bytes()).await;
            }
        });
        Self { url, requests }
    }

    pub(crate) async fn wait_for(&self, count: usize) -> Vec<(String, Vec<u8>)> {
        until("webhooks", async || {
            let all = self.requests.lock().clone();
            (all.len() >= count).then_some(all)
        })
        .await
    }
}

pub(crate) fn value<'a>(head: &'a str, name: &str) -> &'a str {
    let found = head.lines().find_map(|line| {
        let (known, value) = line.split_once(": ")?;
        known.eq_ignore_ascii_case(name).then_some(value)
    });
    found.unwrap_or_default()
}

// conformance: operations/webhook: events are posted as CloudEvents with Standard Webhooks signatures of two live secrets, and a 503 is retried
#[tokio::test]
async fn webhooks_are_signed_and_retried() {
    let receiver = Receiver::start(&["503 Slow Down\r\nretry-after: 0\r\n", "500 Oops\r\n"]).await;
    let api = Api::with(None, |options| options.private_webhooks = true).await;
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let previous = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    let hook = json!({
        "pattern": "order.*", "url": receiver.url, "secret": secret, "previous_secret": previous,
    });
    let body = hook.to_string();
    let json = [("content-type", "application/json")];
    let made = api
        .send("PUT", "/v1/webhooks/billing", None, &json, body.as_bytes())
        .await
        .ok(200);
    assert_eq!(
        (&made["secret"], &made["secrets"]),
        (&json!(secret), &json!(2))
    );
    let id = api.publish(None, "order.placed").await;
    let requests = receiver.wait_for(3).await;
    for (head, body) in &requests {
        assert!(head.starts_with("POST /hook HTTP/1.1"), "{head}");
        assert_eq!(value(head, "content-type"), "application/cloudevents+json");
        assert_eq!(value(head, "webhook-id"), id);
        let document: Value = serde_json::from_slice(body).unwrap();
        assert_eq!(
            (&document["type"], &document["data"]["n"]),
            (&json!("order.placed"), &json!(1))
        );
        let signatures: Vec<&str> = value(head, "webhook-signature").split(' ').collect();
        assert_eq!(signatures.len(), 2);
        for (secret, signature) in [secret, previous].iter().zip(signatures) {
            let key = data_encoding::BASE64
                .decode(&secret.as_bytes()[6..])
                .unwrap();
            let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &key);
            let signed = [
                format!("{id}.{}.", value(head, "webhook-timestamp")).as_bytes(),
                body,
            ]
            .concat();
            let tag = data_encoding::BASE64
                .decode(&signature.as_bytes()[3..])
                .unwrap();
            ring::hmac::verify(&key, &signed, &tag).unwrap();
        }
    }
    until("the event to be handled", async || {
        let shown = api.get(&format!("/v1/events/{id}"), None).await.ok(200);
        let group = shown["groups"]
            .as_array()
            .unwrap()
            .iter()
            .find(|g| g["group"] == "billing")?
            .clone();
        (group["state"] == "done")
            .then(|| assert_eq!(group["failures"].as_array().unwrap().len(), 2))
    })
    .await;
    let listed = api.get("/v1/webhooks", None).await.ok(200);
    assert!(!listed.to_string().contains("whsec_"), "{listed}");
    api.send("DELETE", "/v1/webhooks/billing", None, &[], b"")
        .await
        .ok(200);
    api.publish(None, "order.placed").await;
    let listed = api.get("/v1/webhooks", None).await.ok(200);
    assert_eq!(listed["items"], json!([]));
    api.stop().await;
}

// conformance: operations/webhook: 429 and 503 are tried again after their Retry-After, not after the delay of the policy
#[tokio::test]
async fn a_webhook_waits_as_long_as_its_receiver_says() {
    let receiver = Receiver::start(&[
        "503 Slow Down\r\nretry-after: 0\r\n",
        "429 Too Many\r\nretry-after: 0\r\n",
    ])
    .await;
    let config = format!(
        "consumers:
  billing:
    stream: order.placed
    retry: {{max_attempts: 5, backoff_multiplier: 3600, backoff_max: 3600}}
    webhook: {{url: '{}', allow_private: true}}
",
        receiver.url
    );
    let api = Api::with(Some(&config), |_| {}).await;
    api.publish(None, "order.placed").await;
    receiver.wait_for(3).await;
    api.stop().await;
}

// conformance: operations/webhook-gone: a receiver that answers 410 pauses its group
#[tokio::test]
async fn a_receiver_that_is_gone_pauses_its_group() {
    let receiver = Receiver::start(&["410 Gone\r\n"]).await;
    let api = Api::with(None, |options| options.private_webhooks = true).await;
    let hook = json!({ "pattern": "order.*", "url": receiver.url }).to_string();
    let json = [("content-type", "application/json")];
    api.send("PUT", "/v1/webhooks/billing", None, &json, hook.as_bytes())
        .await
        .ok(200);
    api.publish(None, "order.placed").await;
    let paused = until("the pause", async || {
        let group = api.get("/v1/groups/billing", None).await.ok(200);
        group["paused"]["reason"].as_str().map(str::to_owned)
    })
    .await;
    assert!(paused.contains("410"), "{paused}");
    api.post("/v1/groups/billing/resume", None, &json!({}))
        .await
        .ok(200);
    receiver.wait_for(2).await;
    api.stop().await;
}

// conformance: operations/webhook-targets: addresses that are not https, private or of the metadata service are refused, and commands cannot be named over HTTP
#[tokio::test]
async fn webhooks_to_private_addresses_are_refused() {
    let api = Api::start().await;
    let json = [("content-type", "application/json")];
    for url in [
        "http://example.com/",
        "https://127.0.0.1/",
        "https://[::1]/",
        "https://169.254.169.254/latest",
        "https://10.0.0.1/",
        "ftp://example.com/",
        "https://user:pw@example.com/",
        "nothing",
    ] {
        let hook = json!({ "pattern": "a.*", "url": url }).to_string();
        let got = api
            .send("PUT", "/v1/webhooks/x", None, &json, hook.as_bytes())
            .await;
        assert_eq!(got.problem(400), "InvalidUrl", "{url}");
    }
    let hook =
        json!({ "pattern": "a.*", "url": "https://example.com/", "secret": "short" }).to_string();
    let got = api
        .send("PUT", "/v1/webhooks/x", None, &json, hook.as_bytes())
        .await;
    assert_eq!(got.problem(400), "InvalidSetting");
    let hook = json!({ "pattern": "a.*", "exec": { "command": ["id"] } }).to_string();
    let got = api
        .send("PUT", "/v1/webhooks/x", None, &json, hook.as_bytes())
        .await;
    assert_eq!(got.problem(400), "InvalidRequest");
    api.stop().await;
}

// conformance: operations/exec: a command of the configuration file gets each event on standard input, with a cleared environment; its exit code decides
#[tokio::test]
async fn commands_get_events_on_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let script = format!(
        "test -z \"$HOME\" && cat > {0}.part && echo \"$EVERBUS_EVENT_TYPE $EVERBUS_ATTEMPT\" >> {0}.part && mv {0}.part {0}",
        out.display()
    );
    let config = format!(
        "consumers:
  good:
    stream: order.placed
    exec: {{command: [sh, -c, '{script}']}}
  bad:
    stream: order.placed
    retry: {{max_attempts: 2, backoff_multiplier: 0.01}}
    exec: {{command: [sh, -c, 'echo no such customer >&2; exit 3']}}
  hopeless:
    stream: order.placed
    exec: {{command: [sh, -c, 'exit 65']}}
  other-tenant:
    stream: order.placed
    tenant: acme
    exec: {{command: [sh, -c, 'exit 65']}}
"
    );
    let api = Api::with(Some(&config), |_| {}).await;
    let id = api.publish(None, "order.placed").await;
    let text = until("the command", async || std::fs::read_to_string(&out).ok()).await;
    assert!(
        text.contains(&id) && text.contains("order.placed 1"),
        "{text}"
    );
    let letters = until("the dead letters", async || {
        let got = api.get(&format!("/v1/dead-letters/{id}"), None).await;
        let items = (got.status == 200).then(|| got.json()["items"].as_array().unwrap().clone())?;
        (items.len() == 2).then_some(items)
    })
    .await;
    let of = |group: &str| {
        letters
            .iter()
            .find(|l| l["group"] == group)
            .unwrap()
            .clone()
    };
    assert_eq!(
        (&of("bad")["attempts"], &of("hopeless")["attempts"]),
        (&json!(2), &json!(1))
    );
    let error = of("bad")["failures"][0]["error"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(error.contains("no such customer"), "{error}");
    // The group of the tenant skipped the event, which belongs to none.
    until("the skip", async || {
        let shown = api.get(&format!("/v1/events/{id}"), None).await.ok(200);
        let groups = shown["groups"].as_array().unwrap().clone();
        let group = groups.iter().find(|g| g["group"] == "@acme/other-tenant")?;
        group["skipped"]
            .as_str()
            .map(|why| assert!(why.contains("another tenant"), "{why}"))
    })
    .await;
    api.stop().await;
}

// conformance: operations/exec-timeout: a command that takes too long is killed with everything it started
#[tokio::test]
async fn a_command_that_hangs_is_killed_with_its_children() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let config = format!(
        "consumers:
  slow:
    stream: order.placed
    processing_timeout: 1
    retry: {{max_attempts: 1}}
    exec: {{command: [sh, -c, 'sleep 600 & echo $! > {}; wait']}}
",
        pid.display()
    );
    let api = Api::with(Some(&config), |_| {}).await;
    let id = api.publish(None, "order.placed").await;
    until("the dead letter", async || {
        let got = api.get(&format!("/v1/dead-letters/{id}"), None).await;
        (got.status == 200)
            .then(|| assert_eq!(got.json()["items"][0]["failures"][0]["kind"], "timeout"))
    })
    .await;
    let child: u32 = std::fs::read_to_string(&pid)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    until("the grandchild to be gone", async || {
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat"));
        // Gone, or a zombie that its new parent has not collected.
        stat.map_or(true, |stat| stat.contains(") Z "))
            .then_some(())
    })
    .await;
    api.stop().await;
}

// conformance: operations/pause-pull: a request that waits for events gets none that are published after its group was paused, and gets them once it is resumed
#[tokio::test]
async fn a_waiting_fetch_respects_a_pause() {
    let api = Api::start().await;
    let declare = json!({ "patterns": ["order.*"] });
    api.post("/v1/groups/billing/fetch", None, &declare)
        .await
        .ok(200);
    let waiting = async |wait_ms: u64| {
        let fetch = json!({ "wait_ms": wait_ms });
        let reply = api.post("/v1/groups/billing/fetch", None, &fetch).await;
        reply.ok(200)["items"].as_array().unwrap().len()
    };
    let pausing = async {
        // A fetch that begins only after the pause sees it at its beginning, which the test then shows instead.
        tokio::time::sleep(Duration::from_millis(500)).await;
        api.post("/v1/groups/billing/pause", None, &json!({}))
            .await
            .ok(200);
        api.publish(None, "order.placed").await;
    };
    let (got, ()) = tokio::join!(waiting(3_000), pausing);
    assert_eq!(got, 0, "an event was given out after the pause");
    let resuming = async {
        api.post("/v1/groups/billing/resume", None, &json!({}))
            .await
            .ok(200);
    };
    let (got, ()) = tokio::join!(waiting(30_000), resuming);
    assert_eq!(got, 1);
    api.stop().await;
}

// conformance: operations/dashboard-unsubscribed: neither the page of an event nor the API says that a group handled it if the group is not subscribed to its type
#[tokio::test]
async fn a_group_that_does_not_want_an_event_did_not_handle_it() {
    let api = Api::start().await;
    for (group, pattern) in [("billing", "order.*"), ("mail", "customer.*")] {
        let declare = json!({ "patterns": [pattern] });
        let path = format!("/v1/groups/{group}/fetch");
        api.post(&path, None, &declare).await.ok(200);
    }
    let id = api.publish(None, "order.placed").await;
    let fetch = json!({ "wait_ms": 30000 });
    let got = api.post("/v1/groups/billing/fetch", None, &fetch).await;
    let item = json!({ "lease": got.ok(200)["items"][0]["lease"], "verdict": "ack" });
    let settle = json!({ "items": [item] });
    api.post("/v1/groups/billing/settle", None, &settle)
        .await
        .ok(200);
    let page = api.get(&format!("/events/{id}"), None).await;
    let page = String::from_utf8(page.body).unwrap();
    assert_eq!(page.matches("Handled at the first attempt").count(), 1);
    assert!(page.contains("Not subscribed to this type: mail"), "{page}");
    assert!(!page.contains("no subscription of the group"), "{page}");
    let shown = api.get(&format!("/v1/events/{id}"), None).await.ok(200);
    let groups = shown["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 1, "{groups:?}");
    assert_eq!(groups[0]["group"], "billing");
    assert_eq!(shown["not_subscribed"], json!(["mail"]));
    api.stop().await;
}

// conformance: operations/dashboard-kinds: dead letters whose errors differ only in numbers and ids are shown as one kind, which leads to all of them
#[tokio::test]
async fn errors_with_different_numbers_are_one_kind() {
    let api = Api::start().await;
    let declare = json!({ "patterns": ["order.*"] });
    api.post("/v1/groups/billing/fetch", None, &declare)
        .await
        .ok(200);
    for error in ["card 10001 expired", "card 10002 expired", "bank is closed"] {
        api.publish(None, "order.placed").await;
        let fetch = json!({ "wait_ms": 30000 });
        let got = api.post("/v1/groups/billing/fetch", None, &fetch).await;
        let lease = got.ok(200)["items"][0]["lease"].clone();
        let item = json!({ "lease": lease, "verdict": "dead", "error": error });
        let settle = json!({ "items": [item] });
        api.post("/v1/groups/billing/settle", None, &settle)
            .await
            .ok(200);
    }
    for path in ["/dead-letters", "/", "/groups/billing"] {
        // A page does not wait for slow counts, and its figures may be a moment old.
        until(path, async || {
            let page = api.get(path, None).await;
            let page = String::from_utf8(page.body).unwrap();
            (page.contains("card … expired") && page.contains("bank is closed")).then_some(())
        })
        .await;
    }
    let found = api.get("/dead-letters?error=expired", None).await;
    let found = String::from_utf8(found.body).unwrap();
    assert!(found.contains("card 10001 expired") && found.contains("card 10002 expired"));
    api.stop().await;
}

// conformance: operations/dashboard-lost: a person gets errors as a page that leads back: an unknown path, job or filter, a wrong host; other clients get a problem document
#[tokio::test]
async fn an_unknown_path_is_a_page_for_a_person_and_a_problem_for_a_program() {
    let api = Api::start().await;
    let html = [("accept", "text/html,application/xhtml+xml,*/*;q=0.8")];
    let page = api.send("GET", "/evnets", None, &html, b"").await;
    assert_eq!(page.status, 404);
    assert!(
        page.head.contains("content-type: text/html"),
        "{}",
        page.head
    );
    let text = String::from_utf8(page.body).unwrap();
    assert!(text.contains("href=\"/\""), "{text}");
    for (path, headers) in [("/evnets", &[][..]), ("/v1/evnets", &html[..])] {
        let got = api.send("GET", path, None, headers, b"").await;
        assert_eq!(got.problem(404), "NotFound", "{path}");
    }
    // So is every other problem of a page.
    let host = [html[0], ("host", "events.example")];
    for (path, headers, status, says) in [
        ("/jobs/none", &html[..], 404, "there is no job"),
        ("/events?tpye=a.b", &html[..], 400, "tpye"),
        ("/events?entity=x", &html[..], 400, "TYPE:ID"),
        ("/", &host[..], 421, "127.0.0.1 or localhost"),
    ] {
        let got = api.send("GET", path, None, headers, b"").await;
        assert_eq!(got.status, status, "{path}");
        assert!(got.head.contains("content-type: text/html"), "{}", got.head);
        let text = String::from_utf8(got.body).unwrap();
        assert!(text.contains(says), "{path}: {text}");
    }
    assert_eq!(api.get("/jobs/none", None).await.problem(404), "NotFound");
    api.stop().await;
}

// conformance: operations/exec-background: a command has ended when it exits, also if a process that it left keeps its pipes open
#[tokio::test]
async fn a_command_that_leaves_a_process_behind_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let config = format!(
        "consumers:
  leaves:
    stream: order.placed
    processing_timeout: 600
    exec: {{command: [sh, -c, 'sleep 600 & echo $! > {}']}}
",
        pid.display()
    );
    let api = Api::with(Some(&config), |_| {}).await;
    let id = api.publish(None, "order.placed").await;
    until("the ack", async || {
        let got = api.get(&format!("/v1/events/{id}"), None).await.ok(200);
        let groups = got["groups"].as_array()?.clone();
        let group = groups.iter().find(|g| g["group"] == "leaves")?;
        (group["state"] == "done").then_some(())
    })
    .await;
    let left = std::fs::read_to_string(&pid).unwrap();
    let left = rustix::process::Pid::from_raw(left.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(left, rustix::process::Signal::KILL).unwrap();
    api.stop().await;
}

#[tokio::test]
async fn dead_letters_are_retried_in_bulk_after_a_preview() {
    let api = Api::start().await;
    api.post(
        "/v1/groups/work/fetch",
        None,
        &json!({ "patterns": ["job.*"] }),
    )
    .await
    .ok(200);
    for _ in 0..3 {
        api.publish(None, "job.created").await;
    }
    let fetch = json!({ "wait_ms": 30000, "max": 10 });
    let mut dead = 0;
    while dead < 3 {
        let got = api
            .post("/v1/groups/work/fetch", None, &fetch)
            .await
            .ok(200);
        let items: Vec<Value> = got["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(
                |item| json!({ "lease": item["lease"], "verdict": "dead", "error": "broken pipe" }),
            )
            .collect();
        dead += items.len();
        api.post("/v1/groups/work/settle", None, &json!({ "items": items }))
            .await
            .ok(200);
    }
    let filter = json!({ "error": "broken", "group": "work" });
    let preview = api
        .post("/v1/dead-letters/preview", None, &filter)
        .await
        .ok(200);
    assert_eq!(
        (&preview["total"], &preview["tallies"][0]["count"]),
        (&json!(3), &json!(3))
    );
    let page = api.get("/v1/dead-letters?limit=2", None).await.ok(200);
    let next = page["next"].as_str().unwrap();
    let rest = api
        .get(&format!("/v1/dead-letters?limit=2&cursor={next}"), None)
        .await
        .ok(200);
    assert_eq!(rest["items"].as_array().unwrap().len(), 1);
    let bulk = json!({ "filter": filter, "expected": 7 });
    assert_eq!(
        api.post("/v1/dead-letters/retry", None, &bulk)
            .await
            .problem(409),
        "PreviewOutdated"
    );
    let bulk = json!({ "filter": filter, "expected": 3 });
    assert_eq!(
        api.post("/v1/dead-letters/retry", None, &bulk)
            .await
            .ok(200)["retried"],
        3
    );
    let got = api
        .post("/v1/groups/work/fetch", None, &fetch)
        .await
        .ok(200);
    assert!(!got["items"].as_array().unwrap().is_empty());
    api.stop().await;
}
