//! Every route with the token of another tenant. The routes come from the router, so that a new one cannot be
//! forgotten.

use everbus_server::Scope;
use everbus_server::routes::{Access, Listed};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

use crate::api::{Api, PATIENCE, until};

/// This word is in everything of the tenant `beta`.
const MARK: &str = "betamark";

/// What `beta` has.
struct Beta {
    token: String,
    /// The event, which is also a dead letter.
    event: String,
}

impl Beta {
    async fn fill(api: &Api) -> Self {
        let scopes = [Scope::Publish, Scope::Consume, Scope::Read, Scope::Operate];
        let token = api.token(&scopes, Some("beta")).await;
        let post = async |path: &str, body: Value| {
            let got = api.post(path, Some(&token), &body).await;
            assert!(matches!(got.status, 200 | 201), "{path}: {}", got.json());
            got.json()
        };
        let placed = json!({
            "type": "betamark.placed", "app": MARK, "source": MARK,
            "entity": { "type": "ORDER", "id": MARK }, "payload": { "text": MARK },
        });
        let stored = post("/v1/events", placed).await;
        let event = stored["items"][0]["id"].as_str().unwrap().to_owned();
        let fetch = json!({ "patterns": ["betamark.>"], "start_from": "first", "wait_ms": 30000 });
        let fetched = post("/v1/groups/betamark-group/fetch", fetch).await;
        let dead =
            json!({ "lease": fetched["items"][0]["lease"], "verdict": "dead", "error": MARK });
        let settled = json!({ "items": [dead] });
        let settled = post("/v1/groups/betamark-group/settle", settled).await;
        assert_eq!(settled["items"][0]["ok"], true);
        post(
            "/v1/tasks",
            json!({ "requestId": "betamark-task", "name": MARK }),
        )
        .await;
        let tasks = json!([{ "taskId": "betamark-first", "name": MARK }]);
        post(
            "/v1/jobs",
            json!({ "jobId": "betamark-job", "tasks": tasks }),
        )
        .await;
        let replay =
            json!({ "name": "betamark-replay", "group": "betamark-other", "type": "none.>" });
        let other = json!({ "patterns": ["none.>"] });
        post("/v1/groups/betamark-other/fetch", other).await;
        post("/v1/replays", replay).await;
        let put = async |path: &str, body: Value| {
            let json = [("content-type", "application/json")];
            let body = body.to_string();
            let got = api.send("PUT", path, Some(&token), &json, body.as_bytes());
            got.await.ok(200);
        };
        let hook = json!({ "pattern": "none.>", "url": "https://betamark.example/" });
        put("/v1/webhooks/betamark-hook", hook).await;
        let schedule = json!({ "cron": "0 3 1 1 *", "action": { "task": { "name": MARK } } });
        put("/v1/schedules/betamark-schedule", schedule).await;
        until("the job and the replay", async || {
            let graph = api.get("/v1/jobs/betamark-job/graph", Some(&token)).await;
            let replay = api.get("/v1/replays/betamark-replay", Some(&token)).await;
            let begun = graph.ok(200)["nodes"][0]["state"] == "pending";
            (begun && replay.ok(200)["state"] != "running").then_some(())
        })
        .await;
        Self { token, event }
    }

    /// The path of a route with what `beta` has in place of its parameter.
    fn path(&self, route: &Listed) -> String {
        let Some(begin) = route.path.find('{') else {
            return route.path.to_owned();
        };
        let kind = route.path[..begin].trim_end_matches('/');
        let name = match kind.rsplit('/').next().unwrap() {
            "events" | "dead-letters" => &self.event,
            "groups" => "betamark-group",
            "tasks" => "betamark-task",
            "jobs" => "betamark-job",
            "replays" => "betamark-replay",
            "webhooks" => "betamark-hook",
            "schedules" => "betamark-schedule",
            other => panic!("no {other} for {}: add one to this test", route.path),
        };
        let end = route.path.find('}').unwrap();
        format!("{}{name}{}", &route.path[..begin], &route.path[end + 1..])
    }

    /// What must not change.
    async fn state(&self, api: &Api) -> Vec<Value> {
        let mut all = Vec::new();
        for path in [
            &format!("/v1/events/{}", self.event),
            "/v1/events",
            "/v1/dead-letters",
            "/v1/webhooks",
            "/v1/schedules",
            "/v1/tasks",
            "/v1/jobs",
            "/v1/replays",
        ] {
            all.push(api.get(path, Some(&self.token)).await.ok(200));
        }
        let groups = api.get("/v1/groups", Some(&self.token)).await.ok(200);
        let groups = groups["items"].as_array().unwrap().iter();
        let groups = groups.map(|group| json!([group["name"], group["paused"]]));
        all.push(groups.collect());
        all
    }
}

/// The routes that a token of a tenant may use, but those that do not end.
fn routes(api: &Api) -> Vec<Listed> {
    let routes = api.state.routes().iter();
    let routes = routes.filter(|route| {
        route.access != Access::Public
            && !route.all_tenants
            && !["/v1/events/stream", "/ws"].contains(&route.path)
    });
    routes.cloned().collect()
}

const ALL: &[Scope] = &[
    Scope::Publish,
    Scope::Consume,
    Scope::Read,
    Scope::Operate,
    Scope::Admin,
];

// conformance: operations/server-tenants-read: no route that reads, and no page, shows a token of one tenant anything of another tenant
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_route_shows_anything_of_another_tenant() {
    let api = Api::start().await;
    let acme = api.token(ALL, Some("acme")).await;
    let beta = Beta::fill(&api).await;
    let (mut hidden, mut shown) = (0, 0);
    for route in routes(&api).iter().filter(|route| route.method == "GET") {
        let path = beta.path(route);
        let own = api.get(&path, Some(&beta.token)).await;
        assert_eq!(own.status, 200, "{path}");
        shown += usize::from(String::from_utf8_lossy(&own.body).contains(MARK));
        let got = api.get(&path, Some(&acme)).await;
        if path == route.path {
            assert_eq!(got.status, 200, "{path}");
            let text = String::from_utf8_lossy(&got.body);
            assert!(!text.contains(MARK), "{path}: {text}");
        } else {
            assert_eq!(got.status, 404, "{path}");
        }
        hidden += 1;
    }
    // The test looks where there is something to see.
    assert!(hidden > 30 && shown > 25, "{hidden} {shown}");
    for query in [
        format!("/v1/events?correlation_id={}", beta.event),
        format!("/v1/events?causation_id={}", beta.event),
        "/v1/events?contains=text".to_owned(),
        "/v1/events?entity=ORDER:betamark".to_owned(),
        "/v1/events?type=betamark.placed".to_owned(),
        "/v1/dead-letters?error=beta".to_owned(),
        "/v1/dead-letters?group=betamark-group".to_owned(),
    ] {
        let own = api.get(&query, Some(&beta.token)).await.ok(200);
        assert!(!own["items"].as_array().unwrap().is_empty(), "{query}");
        let got = api.get(&query, Some(&acme)).await.ok(200);
        assert_eq!(got["items"], json!([]), "{query}");
    }
    api.stop().await;
}

// conformance: operations/server-tenants-change: no route changes anything of one tenant for a token of another tenant
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_route_changes_anything_of_another_tenant() {
    let api = Api::start().await;
    let acme = api.token(ALL, Some("acme")).await;
    let beta = Beta::fill(&api).await;
    let before = beta.state(&api).await;
    let mut tried = 0;
    for route in routes(&api).iter().filter(|route| route.method != "GET") {
        let path = beta.path(route);
        let body = match route.path {
            path if path.ends_with("/edit") => json!({ "payload": 1 }),
            path if path.ends_with("/settle") => json!({ "items": [] }),
            path if path.ends_with("/extend") => json!({ "leases": [], "by_ms": 1000 }),
            "/v1/jobs/{id}/tasks" => json!({ "tasks": [{ "taskId": "x", "name": "w" }] }),
            "/v1/webhooks/{name}" => json!({ "pattern": "a.b", "url": "https://acme.example/" }),
            "/v1/schedules/{name}" => {
                json!({ "cron": "* * * * *", "action": { "event": { "type": "a.b" } } })
            }
            "/v1/dead-letters/retry" | "/v1/dead-letters/purge" => json!({ "filter": {} }),
            _ => json!({}),
        };
        let json = [("content-type", "application/json")];
        let method = route.method.as_str();
        let text = body.to_string();
        let got = api.send(method, &path, Some(&acme), &json, text.as_bytes());
        let got = got.await;
        let answer = String::from_utf8_lossy(&got.body).into_owned();
        assert!(got.status < 500, "{method} {path}: {answer}");
        // Names of groups are the tenant's own, so these are about a group of acme.
        let ends = ["/settle", "/extend", "/betamark-hook"];
        let own = ends.iter().any(|end| path.ends_with(end)) || method == "PUT";
        if path != route.path && !own {
            assert_eq!(got.status, 404, "{method} {path}: {answer}");
        }
        tried += 1;
    }
    assert!(tried > 20, "{tried}");
    assert_eq!(beta.state(&api).await, before);
    api.stop().await;
}

// conformance: operations/server-tenants-listen: listeners of one tenant get no event of another tenant, neither past nor new ones
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listeners_get_events_of_their_tenant_only() {
    let api = Api::start().await;
    let acme = api.token(ALL, Some("acme")).await;
    let beta = Beta::fill(&api).await;
    let past = api.publish(Some(&acme), "order.past").await;
    let mut request = format!("ws://{}/ws", api.address)
        .into_client_request()
        .unwrap();
    let bearer = format!("Bearer {acme}").parse().unwrap();
    request.headers_mut().insert("authorization", bearer);
    let (mut socket, _) = connect_async(request).await.unwrap();
    let subscribe = |id: &str, from: &str| json!({ "type": "subscribe", "id": id, "from": from });
    for (id, from) in [("all", "first"), ("new", "new")] {
        let text = subscribe(id, from).to_string();
        socket.send(Message::text(text)).await.unwrap();
    }
    let foreign = json!({ "type": "subscribe", "id": "x", "tenant": "beta" });
    let foreign = Message::text(foreign.to_string());
    socket.send(foreign).await.unwrap();
    let overview = json!({ "type": "subscribe", "id": "figures", "topic": "overview" });
    let overview = Message::text(overview.to_string());
    socket.send(overview).await.unwrap();
    let mut stream = BufReader::new(TcpStream::connect(api.address).await.unwrap());
    let listen = format!(
        "GET /v1/events/stream?from=first HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {acme}\r\n\r\n",
        api.address
    );
    stream.write_all(listen.as_bytes()).await.unwrap();
    // An event of each tenant after both have begun to listen.
    let mut texts = String::new();
    let socket_until = async |socket: &mut tokio_tungstenite::WebSocketStream<_>,
                              texts: &mut String,
                              wanted: &[&str]| {
        while !wanted.iter().all(|wanted| texts.contains(wanted)) {
            let message = tokio::time::timeout(PATIENCE, socket.next()).await;
            if let Message::Text(text) = message.unwrap().unwrap().unwrap() {
                texts.push_str(&text);
            }
        }
    };
    let begun = [&past, "another tenant", "\"figures\":"];
    socket_until(&mut socket, &mut texts, &begun).await;
    let event = json!({ "type": "betamark.new" });
    api.post("/v1/events", Some(&beta.token), &event)
        .await
        .ok(201);
    let new = api.publish(Some(&acme), "order.new").await;
    let ends = format!("\"id\":\"{new}\"");
    while texts.matches(&ends).count() < 2 {
        let mut more = String::new();
        socket_until(&mut socket, &mut more, &[&ends]).await;
        texts.push_str(&more);
    }
    let mut lines = String::new();
    while !lines.contains(&ends) {
        let read = tokio::time::timeout(PATIENCE, stream.read_line(&mut lines)).await;
        assert!(read.unwrap().unwrap() > 0, "{lines}");
    }
    assert!(lines.contains(&past), "{lines}");
    for text in [&texts, &lines] {
        assert!(!text.contains(MARK), "{text}");
    }
    api.stop().await;
}
