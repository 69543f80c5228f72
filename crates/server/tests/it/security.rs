//! Who may do what: every route without a token, with a wrong one, with too little scope; requests that pages of
//! other sites cause; tenants apart from each other.

use everbus_server::routes::Access;
use everbus_server::{Scope, Server, ServerOptions};
use serde_json::json;

use crate::api::{Api, until};

const ALL: &[Scope] = &[
    Scope::Publish,
    Scope::Consume,
    Scope::Read,
    Scope::Operate,
    Scope::Admin,
];

fn path_of(route: &str) -> String {
    route
        .split('/')
        .map(|part| if part.starts_with('{') { "x" } else { part })
        .collect::<Vec<_>>()
        .join("/")
}

// conformance: operations/server-routes: every route of the server's own list refuses a request without a token, with a wrong token, and with every scope but its own
#[tokio::test]
async fn every_route_asks_for_its_scope() {
    let api = Api::start().await;
    let admin = api.token(ALL, None).await;
    let mut checked = 0;
    for route in api.state.routes() {
        let (path, method) = (path_of(route.path), route.method.as_str());
        let (scope, is_page) = match route.access {
            Access::Public => continue,
            Access::Scope(scope) => (scope, false),
            Access::Page(scope) => (scope, true),
        };
        checked += 1;
        let what = format!("{method} {path}");
        for token in [None, Some("evb_wrong"), Some("")] {
            let got = api.send(method, &path, token, &[], b"").await;
            if is_page && method == "GET" && token.is_none() {
                assert_eq!(got.status, 303, "{what}");
                assert!(got.header("location").unwrap().starts_with("/login"));
            } else if !is_page {
                assert_eq!(got.problem(401), "Unauthenticated", "{what}");
                assert!(got.header("www-authenticate").is_some(), "{what}");
            } else {
                assert!(matches!(got.status, 303 | 401), "{what}: {}", got.status);
            }
        }
        let others: Vec<Scope> = ALL
            .iter()
            .copied()
            .filter(|other| *other != scope && *other != Scope::Admin)
            .collect();
        let weak = api.token(&others, None).await;
        let got = api.send(method, &path, Some(&weak), &[], b"").await;
        assert_eq!(got.problem(403), "Forbidden", "{what}");
        if route.all_tenants {
            let tenant = api.token(ALL, Some("acme")).await;
            let got = api.send(method, &path, Some(&tenant), &[], b"").await;
            assert_eq!(got.problem(403), "Forbidden", "{what} with a tenant");
        }
    }
    assert!(checked > 25, "only {checked} routes");
    api.get("/v1/health", Some(&admin)).await.ok(200);
    api.stop().await;
}

/// What needs no token: health checks, signing in, and the files of the pages.
const PUBLIC: &[&str] = &[
    "GET /healthz",
    "GET /readyz",
    "GET /openapi.json",
    "GET /login",
    "POST /v1/session",
    "DELETE /v1/session",
];

/// The scope of a route, by what it does.
fn scope_of(method: &str, path: &str) -> Scope {
    let publishes = ["/v1/events", "/v1/tasks", "/v1/jobs", "/v1/jobs/{id}/tasks"];
    let consumes = ["/fetch", "/settle", "/extend"];
    match (method, path) {
        (_, path) if path.starts_with("/v1/tokens") => Scope::Admin,
        (_, path) if path.starts_with("/v1/webhooks") => Scope::Consume,
        ("GET", _) | ("POST", "/v1/dead-letters/preview") => Scope::Read,
        ("POST", path) if publishes.contains(&path) => Scope::Publish,
        ("POST", path) if consumes.iter().any(|end| path.ends_with(end)) => Scope::Consume,
        _ => Scope::Operate,
    }
}

// conformance: operations/server-routes: a route needs no token only if it is in the list of those, and what changes something needs another scope than what reads
#[tokio::test]
async fn every_route_has_the_scope_of_what_it_does() {
    let api = Api::start().await;
    for route in api.state.routes() {
        let what = format!("{} {}", route.method, route.path);
        match route.access {
            Access::Public => {
                let expected = PUBLIC.contains(&&*what) || what.starts_with("GET /assets/");
                assert!(expected, "{what} needs no token");
            }
            Access::Scope(scope) | Access::Page(scope) => {
                assert_eq!(scope, scope_of(route.method.as_str(), route.path), "{what}");
            }
        }
    }
    api.stop().await;
}

// conformance: operations/server-beyond-loopback: an address beyond loopback is refused until there is a token
#[tokio::test]
async fn other_machines_are_not_let_in_without_tokens() {
    let api = Api::start().await;
    let mut options = ServerOptions::default();
    options.listen = "0.0.0.0:0".parse().unwrap();
    let error = Server::bind(api.bus.clone(), None, options.clone())
        .await
        .unwrap_err();
    assert!(error.message().contains("no token"), "{error}");
    api.token(&[Scope::Read], None).await;
    Server::bind(api.bus.clone(), None, options).await.unwrap();
    api.stop().await;
}

// conformance: operations/server-foreign-pages: while the server is open, a page of another site can neither read under its own host name nor act
#[tokio::test]
async fn pages_of_other_sites_cannot_act() {
    let api = Api::start().await;
    let body = br#"{"type":"a.b"}"#;
    let json = ("content-type", "application/json");
    let own = format!("http://{}", api.address);
    // DNS rebinding: the name is the attacker's, the address ours.
    for host in [
        "evil.example",
        "evil.example:7770",
        "127.0.0.1.evil.example",
        "",
    ] {
        let got = api
            .send("GET", "/v1/events", None, &[("host", host)], b"")
            .await;
        assert_eq!(got.problem(421), "UnknownHost", "{host:?}");
    }
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:7770"] {
        let got = api
            .send("GET", "/v1/events", None, &[("host", host)], b"")
            .await;
        got.ok(200);
    }
    for origin in ["https://evil.example", "null", "http://127.0.0.1:1", "evil"] {
        let headers = [json, ("origin", origin)];
        let got = api.send("POST", "/v1/events", None, &headers, body).await;
        assert_eq!(got.problem(403), "Forbidden", "{origin}");
    }
    for route in api.state.routes() {
        if route.method != "GET" {
            let (method, path) = (route.method.as_str(), path_of(route.path));
            let headers = [json, ("origin", "https://evil.example")];
            let got = api.send(method, &path, None, &headers, b"{}").await;
            assert_eq!(got.problem(403), "Forbidden", "{method} {path}");
        }
    }
    let headers = [json, ("sec-fetch-site", "cross-site")];
    let got = api.send("POST", "/v1/events", None, &headers, body).await;
    assert_eq!(got.problem(403), "Forbidden");
    // What a form of another site can send.
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
    ] {
        let got = api
            .send("POST", "/v1/events", None, &[("content-type", kind)], body)
            .await;
        assert_eq!(got.problem(415), "UnsupportedMediaType", "{kind}");
    }
    let got = api
        .send("POST", "/v1/events", None, &[json, ("origin", &own)], body)
        .await;
    got.ok(201);
    let found = api.get("/v1/events?type=a.b", None).await.ok(200);
    assert_eq!(found["items"].as_array().unwrap().len(), 1);
    // CORS is off: no page of another origin may read an answer.
    let got = api
        .send(
            "GET",
            "/v1/events",
            None,
            &[("origin", "https://evil.example")],
            b"",
        )
        .await;
    assert_eq!(got.header("access-control-allow-origin"), None);
    api.stop().await;
}

#[tokio::test]
async fn origins_that_are_named_may_call() {
    let ops = "https://ops.example.com";
    let api = Api::with(None, |options| options.origins.push(ops.to_owned())).await;
    let headers = [("origin", ops), ("access-control-request-method", "POST")];
    let got = api.send("OPTIONS", "/v1/events", None, &headers, b"").await;
    assert_eq!(got.status, 204);
    assert_eq!(got.header("access-control-allow-origin"), Some(ops));
    let headers = [("origin", ops), ("content-type", "application/json")];
    let got = api
        .send("POST", "/v1/events", None, &headers, br#"{"type":"a.b"}"#)
        .await;
    got.ok(201);
    assert_eq!(got.header("access-control-allow-origin"), Some(ops));
    assert_eq!(got.header("access-control-allow-credentials"), None);
    api.stop().await;
}

// conformance: operations/server-headers: every answer forbids foreign scripts, frames and content sniffing
#[tokio::test]
async fn every_answer_has_the_headers_that_protect_a_browser() {
    let api = Api::start().await;
    for path in ["/healthz", "/v1/events", "/nothing", "/openapi.json"] {
        let got = api.get(path, None).await;
        let policy = got.header("content-security-policy").unwrap();
        assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self'"));
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(got.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(got.header("x-frame-options"), Some("deny"));
        assert!(got.header("x-request-id").is_some());
    }
    let got = api.get("/nothing", None).await;
    assert_eq!(got.problem(404), "NotFound");
    let got = api.send("DELETE", "/v1/events", None, &[], b"").await;
    assert_eq!(got.problem(405), "MethodNotAllowed");
    api.stop().await;
}

// conformance: operations/server-tokens: a token has 256 random bits, the store has only its hash, and a revoked one is refused by every server
#[tokio::test]
async fn tokens_are_hashed_and_revocable() {
    let api = Api::start().await;
    let token = api.token(&[Scope::Read], None).await;
    let secret = token.strip_prefix("evb_").unwrap();
    let bytes = data_encoding::BASE64URL_NOPAD
        .decode(secret.as_bytes())
        .unwrap();
    assert_eq!(bytes.len(), 32);
    let kv = api.bus.kv("everbus-server").unwrap();
    let stored = kv.get("tokens").await.unwrap().unwrap();
    let stored = String::from_utf8(stored.value.to_vec()).unwrap();
    assert!(!stored.contains(secret), "{stored}");
    api.get("/v1/events", Some(&token)).await.ok(200);
    assert_eq!(
        api.get("/v1/events", None).await.problem(401),
        "Unauthenticated"
    );
    let elsewhere = api.tokens_elsewhere();
    let id = elsewhere.list().await.unwrap()[0].id.clone();
    let keeper = api.token(&[Scope::Read], None).await;
    elsewhere.revoke(&id).await.unwrap();
    until("the revoked token to be refused", async || {
        (api.get("/v1/events", Some(&token)).await.status == 401).then_some(())
    })
    .await;
    api.get("/v1/events", Some(&keeper)).await.ok(200);
    api.stop().await;
}

#[tokio::test]
async fn a_token_that_expired_is_refused() {
    let api = Api::start().await;
    let request = everbus_server::auth::TokenRequest {
        name: "old".to_owned(),
        scopes: vec![Scope::Read],
        tenant: None,
        expires_at: Some(everbus::Timestamp::from_micros(1)),
    };
    let old = api.state.tokens().create(request).await.unwrap();
    assert!(!format!("{old:?}").contains(&old.token));
    assert_eq!(
        api.get("/v1/events", Some(&old.token)).await.problem(401),
        "Unauthenticated"
    );
    api.stop().await;
}

// conformance: operations/server-session: the dashboard's cookie cannot be read by scripts, is not sent by other sites, and ends with its token
#[tokio::test]
async fn a_session_ends_with_a_logout_and_with_its_token() {
    let api = Api::start().await;
    let token = api.token(&[Scope::Read], None).await;
    let other = api.token(&[Scope::Admin], None).await;
    let begin = async || {
        let got = api
            .post("/v1/session", None, &json!({ "token": token }))
            .await;
        got.ok(200);
        let cookie = got.header("set-cookie").unwrap().to_owned();
        assert!(
            cookie.contains("httponly") && cookie.contains("samesite=strict"),
            "{cookie}"
        );
        cookie
    };
    // The head was read in lower case, and the session's id has capitals: ask for the real one.
    let session = async || {
        let body = json!({ "token": token }).to_string();
        let request = format!(
            "POST /v1/session HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            api.address,
            body.len()
        );
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut stream = tokio::net::TcpStream::connect(api.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let at = text.find("everbus_session=").unwrap();
        text[at..].split(';').next().unwrap().to_owned()
    };
    begin().await;
    let cookie = session().await;
    api.send("GET", "/v1/events", None, &[("cookie", &cookie)], b"")
        .await
        .ok(200);
    let foreign = [
        ("cookie", cookie.as_str()),
        ("origin", "https://evil.example"),
    ];
    let got = api.send("DELETE", "/v1/session", None, &foreign, b"").await;
    assert_eq!(got.problem(403), "Forbidden");
    api.send("DELETE", "/v1/session", None, &[("cookie", &cookie)], b"")
        .await
        .ok(200);
    let got = api
        .send("GET", "/v1/events", None, &[("cookie", &cookie)], b"")
        .await;
    assert_eq!(got.problem(401), "Unauthenticated");
    let cookie = session().await;
    let id = api.state.tokens().list().await.unwrap()[0].id.clone();
    let path = format!("/v1/tokens/{id}");
    api.send("DELETE", &path, Some(&other), &[], b"")
        .await
        .ok(200);
    let got = api
        .send("GET", "/v1/events", None, &[("cookie", &cookie)], b"")
        .await;
    assert_eq!(got.problem(401), "Unauthenticated");
    let got = api
        .post("/v1/session", None, &json!({ "token": "evb_guess" }))
        .await;
    assert_eq!(got.problem(401), "Unauthenticated");
    api.stop().await;
}

// conformance: operations/server-tenants: a token of a tenant publishes, sees and consumes only that tenant's events, and group names are the tenant's own
#[tokio::test]
async fn tenants_are_apart() {
    let api = Api::start().await;
    let acme = api.token(ALL, Some("acme")).await;
    let beta = api.token(ALL, Some("beta")).await;
    let everyone = api.token(ALL, None).await;
    let first = api.publish(Some(&acme), "order.placed").await;
    let second = api.publish(Some(&beta), "order.placed").await;
    let shown = api
        .get(&format!("/v1/events/{first}"), Some(&acme))
        .await
        .ok(200);
    assert_eq!(shown["event"]["tenant"], "acme");
    // The tenant comes from the token, never from the body or the query.
    let body = json!({ "type": "order.placed", "tenant": "beta" });
    assert_eq!(
        api.post("/v1/events", Some(&acme), &body)
            .await
            .problem(403),
        "Forbidden"
    );
    for path in ["/v1/events?tenant=beta", "/v1/dead-letters?tenant=beta"] {
        assert_eq!(api.get(path, Some(&acme)).await.problem(403), "Forbidden");
    }
    for path in [
        format!("/v1/events/{second}"),
        format!("/v1/events/{second}/tree"),
    ] {
        assert_eq!(api.get(&path, Some(&acme)).await.problem(404), "NotFound");
    }
    let ids = async |token: &str| {
        let page = api.get("/v1/events", Some(token)).await.ok(200);
        let items = page["items"].as_array().unwrap();
        let ids = items
            .iter()
            .map(|item| item["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    assert_eq!(ids(&acme).await, std::slice::from_ref(&first));
    assert_eq!(ids(&beta).await, std::slice::from_ref(&second));
    assert_eq!(ids(&everyone).await, [second.clone(), first.clone()]);
    // Two groups of the same name, each with the events of its tenant.
    for (token, id) in [(&acme, &first), (&beta, &second)] {
        let fetch =
            json!({ "patterns": ["order.*"], "start_from": "first", "max": 10, "wait_ms": 20000 });
        let got = api
            .post("/v1/groups/billing/fetch", Some(token), &fetch)
            .await
            .ok(200);
        let items = got["items"].as_array().unwrap();
        assert_eq!(items.len(), 1, "{items:?}");
        assert_eq!(items[0]["event"]["id"], **id);
        let groups = api.get("/v1/groups", Some(token)).await.ok(200);
        let groups = groups["items"].as_array().unwrap();
        assert_eq!(groups.len(), 1);
        assert_eq!(groups[0]["name"], "billing");
        let dead =
            json!({ "items": [{ "lease": items[0]["lease"], "verdict": "dead", "error": "no" }] });
        let other = if token == &acme { &beta } else { &acme };
        let got = api
            .post("/v1/groups/billing/settle", Some(other), &dead)
            .await;
        assert_eq!(got.problem(400), "InvalidRequest");
        let got = api
            .post("/v1/groups/billing/settle", Some(token), &dead)
            .await
            .ok(200);
        assert_eq!(got["items"][0]["ok"], true);
    }
    let letters = api.get("/v1/dead-letters", Some(&acme)).await.ok(200);
    let letters = letters["items"].as_array().unwrap();
    assert_eq!(letters.len(), 1);
    assert_eq!(
        (&letters[0]["event"]["id"], &letters[0]["group"]),
        (&json!(first), &json!("billing"))
    );
    for action in ["retry", "edit"] {
        let path = format!("/v1/dead-letters/{second}/{action}");
        let got = api.post(&path, Some(&acme), &json!({ "payload": 1 })).await;
        assert!(matches!(got.status, 400 | 404), "{}", got.status);
    }
    assert_eq!(
        api.get(&format!("/v1/dead-letters/{second}"), Some(&acme))
            .await
            .problem(404),
        "NotFound"
    );
    let purged = api
        .post(
            "/v1/dead-letters/purge",
            Some(&acme),
            &json!({ "filter": {} }),
        )
        .await
        .ok(200);
    assert_eq!(purged["purged"], 1);
    let left = api.get("/v1/dead-letters", Some(&everyone)).await.ok(200);
    assert_eq!(left["items"][0]["event"]["id"], second);
    assert_eq!(left["items"][0]["group"], "@beta/billing");
    // A caller of all tenants opens the group of a tenant from the list.
    let link = "/groups/%40beta%2Fbilling";
    until("the group in the list", async || {
        let page = api.get("/groups", Some(&everyone)).await;
        let page = String::from_utf8(page.body).unwrap();
        page.contains(&format!("href=\"{link}\"")).then_some(())
    })
    .await;
    assert_eq!(api.get(link, Some(&everyone)).await.status, 200);
    api.stop().await;
}

#[tokio::test]
async fn a_caller_over_its_rate_is_told_when_to_come_back() {
    let api = Api::with(None, |options| options.limits.requests_per_second = Some(1)).await;
    let requests = (0..20).map(|_| api.get("/v1/events", None));
    let answers = futures_util::future::join_all(requests).await;
    assert!(answers.iter().any(|got| got.status == 200));
    let refused = answers.iter().find(|got| got.status != 200);
    let refused = refused.expect("no request was refused");
    assert_eq!(refused.problem(429), "RateLimited");
    assert_eq!(refused.header("retry-after"), Some("1"));
    api.stop().await;
}
