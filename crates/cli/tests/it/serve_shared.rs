//! Two servers on one store: schedules, health checks and alerts happen once, and go on when one server is killed.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::serve::{Serving, ask};
use crate::support::{Shop, wait_until};

/// A receiver of webhooks, which keeps the JSON that it gets.
struct Receiver {
    url: String,
    got: Arc<Mutex<Vec<Value>>>,
}

impl Receiver {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let got: Arc<Mutex<Vec<Value>>> = Arc::default();
        let kept = got.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut bytes = Vec::new();
                let mut part = [0; 4096];
                let body = loop {
                    let n = stream.read(&mut part).unwrap_or(0);
                    bytes.extend_from_slice(&part[..n]);
                    let text = String::from_utf8_lossy(&bytes);
                    let body = text.split_once("\r\n\r\n").map(|(_, body)| body);
                    let body = body.and_then(|body| serde_json::from_str(body).ok());
                    if body.is_some() || n == 0 {
                        break body;
                    }
                };
                kept.lock().unwrap().extend(body);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
            }
        });
        Self { url, got }
    }

    /// How many alerts there were about events of a type that died.
    fn about(&self, event_type: &str) -> usize {
        let got = self.got.lock().unwrap();
        let about = |alert: &&Value| alert["fields"]["eventType"] == event_type;
        got.iter().filter(about).count()
    }
}

/// Every payload of the events of a type.
fn payloads(address: &str, event_type: &str) -> Vec<Value> {
    let (mut all, mut cursor) = (Vec::new(), String::new());
    loop {
        let event_type = event_type.replace(' ', "%20");
        let path = format!("/v1/events?type={event_type}&limit=1000&cursor={cursor}");
        let (status, page) = ask(address, "GET", &path, "", "").unwrap();
        assert_eq!(status, 200, "{page}");
        all.extend(
            page["items"]
                .as_array()
                .unwrap()
                .iter()
                .map(|item| item["payload"].clone()),
        );
        match page["next"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => return all,
        }
    }
}

/// The ticks of a schedule that ran. A tick that ran twice is an error.
fn ticks(address: &str, schedule: &str) -> BTreeSet<String> {
    let mut ticks = BTreeSet::new();
    for run in payloads(address, "schedule.ran") {
        if run["schedule"] == schedule {
            assert_eq!(run["error"], Value::Null, "{run}");
            let tick = run["tick"].as_str().unwrap().to_owned();
            assert!(ticks.insert(tick), "twice: {run}");
        }
    }
    ticks
}

/// A page of the dashboard.
fn page(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn publish(address: &str, event_type: &str) {
    let event = json!({ "type": event_type, "payload": 1 }).to_string();
    let (status, answer) = ask(address, "POST", "/v1/events", "", &event).unwrap();
    assert_eq!(status, 201, "{answer}");
}

// conformance: operations/servers-figures: two servers on one store show the figures of both
// conformance: operations/servers-share: two servers on one store take each tick, health check and alert once, and after kill -9 of the one that has the lease the other goes on
#[test]
fn two_servers_share_ticks_health_checks_and_alerts() {
    let shop = Shop::new();
    let receiver = Receiver::start();
    let config = format!(
        "
broker: {{url: 'sqlite:everbus.db'}}
server: {{health_check: '*/2 * * * * *'}}
alerts: {{webhook: '{}', allow_http: true, allow_private: true}}
consumers:
  broken:
    stream: order.*
    exec: {{command: ['false']}}
    retry: {{max_attempts: 1}}
",
        receiver.url
    );
    std::fs::write(shop.path("everbus.yaml"), config).unwrap();
    let every_second = ["--cron", "* * * * * *", "--event", "pulse.sent"];
    let add = [&["schedule", "add", "pulse"], &every_second[..]].concat();
    shop.run(&add).ok();
    // A task that waits for a worker: there is something to check.
    shop.run(&["task", "submit", "report"]).ok();
    let with = ["--config", "everbus.yaml"];
    let mut servers = [Serving::start(&shop, &with), Serving::start(&shop, &with)];
    let addresses = [servers[0].address.clone(), servers[1].address.clone()];

    publish(&addresses[0], "order.first");
    wait_until("ticks, health checks and an alert", || {
        ticks(&addresses[1], "pulse").len() >= 4
            && ticks(&addresses[1], "health-check").len() >= 2
            && receiver.about("order.first") == 1
    });

    // Each shows what both have published.
    let published = |server: usize, of: usize| {
        let page = page(&addresses[server], "/system");
        let pid = servers[of].child.id();
        let (_, row) = page.split_once(&format!(">{pid}</td>"))?;
        let (row, _) = row.split_once("</tr>")?;
        let (_, cell) = row.split_once("data-label=\"Published\">")?;
        cell.split('<').next()?.parse::<u64>().ok()
    };
    wait_until("the figures of the other server", || {
        (0..2).all(|server| published(server, 0) >= Some(1) && published(server, 1).is_some())
    });
    for address in &addresses {
        assert!(page(address, "/").contains("2 servers on this store"));
    }

    // The server that took the last tick is killed.
    let listed = shop.run(&["-o", "json", "schedule", "list"]).json();
    let owner = listed["last"]["owner"].as_str().unwrap().to_owned();
    let holder = servers
        .iter()
        .position(|server| owner.ends_with(&format!("process {}", server.child.id())));
    let holder = holder.unwrap_or_else(|| panic!("{owner}"));
    servers[holder].kill();
    let survivor = &addresses[1 - holder];
    let before = (ticks(survivor, "pulse"), ticks(survivor, "health-check"));
    publish(survivor, "order.second");
    wait_until("the other server to go on", || {
        ticks(survivor, "pulse").len() >= before.0.len() + 3
            && ticks(survivor, "health-check").len() >= before.1.len() + 2
            && receiver.about("order.second") == 1
    });
    let listed = shop.run(&["-o", "json", "schedule", "list"]).json();
    let alive = format!("process {}", servers[1 - holder].child.id());
    let owner = listed["last"]["owner"].as_str().unwrap();
    assert!(owner.ends_with(&alive), "{owner}");
    // What a tick published is there once, and each alert was sent once. A tick may be under way: it has published and
    // is not recorded yet. So may be the one of the server that was killed.
    for (schedule, published) in [
        ("pulse", "pulse.sent"),
        ("health-check", "Task Health Check"),
    ] {
        let before = ticks(survivor, schedule).len();
        let published = payloads(survivor, published).len();
        let after = ticks(survivor, schedule).len();
        assert!(
            (before..=after + 2).contains(&published),
            "{schedule}: {published}, {after}"
        );
    }
    assert_eq!(receiver.about("order.first"), 1);
    assert_eq!(receiver.about("order.second"), 1);
}
