//! `everbus serve` and `everbus token`: starting, stopping, and never losing an acknowledged event.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Shop, wait_until};

const PATIENCE: Duration = Duration::from_secs(60);

/// A running server.
pub(crate) struct Serving {
    pub(crate) child: Child,
    pub(crate) address: String,
}

impl Serving {
    pub(crate) fn start(shop: &Shop, more: &[&str]) -> Self {
        Self::start_with(shop, more, &[])
    }

    /// With variables of the environment.
    pub(crate) fn start_with(shop: &Shop, more: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut arguments = vec!["-o", "json", "serve", "--listen", "127.0.0.1:0"];
        arguments.extend(more);
        let mut command = shop.command(&arguments);
        command.envs(variables.iter().copied());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        let told: Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            let mut text = String::new();
            let _ = child.stderr.take().unwrap().read_to_string(&mut text);
            panic!("{line}{text}")
        });
        let url = told["listening"].as_str().unwrap();
        let address = url.strip_prefix("http://").unwrap().to_owned();
        Self { child, address }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends it as a supervisor does; whether it exited with success.
    pub(crate) fn terminate(mut self) -> bool {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap().success()
    }
}

impl Drop for Serving {
    /// A test that fails leaves no server behind.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One request; `None` if no whole answer came.
pub(crate) fn ask(
    address: &str,
    method: &str,
    path: &str,
    token: &str,
    body: &str,
) -> Option<(u16, Value)> {
    let authorization = match token {
        "" => String::new(),
        token => format!("authorization: Bearer {token}\r\n"),
    };
    ask_with(address, method, path, &authorization, body)
}

/// One request with these lines in its head.
pub(crate) fn ask_with(
    address: &str,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> Option<(u16, Value)> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{headers}\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, serde_json::from_str(body).ok()?))
}

// conformance: operations/token-command: tokens are made, listed and revoked by the command line, and a server asks for them
#[test]
fn tokens_are_made_listed_and_revoked() {
    let shop = Shop::new();
    let made = shop.run(&[
        "-o",
        "json",
        "token",
        "create",
        "ci",
        "--scope",
        "publish,read",
        "--tenant",
        "acme",
    ]);
    assert_eq!(made.code, 0, "{}", made.err);
    let made: Value = serde_json::from_str(&made.out).unwrap();
    let token = made["token"].as_str().unwrap();
    let serving = Serving::start(&shop, &[]);
    let event = json!({ "type": "a.b" }).to_string();
    let (status, _) = ask(&serving.address, "POST", "/v1/events", "evb_wrong", &event).unwrap();
    assert_eq!(status, 401);
    let (status, _) = ask(&serving.address, "POST", "/v1/events", token, &event).unwrap();
    assert_eq!(status, 201);
    let listed = shop.run(&["token", "list"]);
    assert!(
        listed.out.contains("acme") && !listed.out.contains(token),
        "{}",
        listed.out
    );
    let id = made["id"].as_str().unwrap();
    assert_eq!(shop.run(&["token", "revoke", id]).code, 0);
    assert_eq!(shop.run(&["token", "revoke", id]).code, 3);
    assert_eq!(
        shop.run(&["token", "create", "x", "--scope", "everything"])
            .code,
        2
    );
    assert!(serving.terminate());
    let audit = shop.run(&["-o", "json", "audit", "list"]);
    assert!(audit.out.contains("tokens.create") && !audit.out.contains(token));
}

// conformance: operations/serve-beyond-loopback: without a token the server does not listen beyond this machine
#[test]
fn a_server_without_tokens_stays_on_this_machine() {
    let shop = Shop::new();
    let ran = shop.run(&["serve", "--listen", "0.0.0.0:0"]);
    assert_eq!(ran.code, 2, "{}", ran.err);
    assert!(ran.err.contains("token create"), "{}", ran.err);
    for (arguments, says) in [
        (&["serve", "--listen", "8080"][..], "such as 127.0.0.1:7770"),
        (&["serve", "--listen", "localhost:port"], "127.0.0.1:7770"),
        (
            &["token", "create", "x", "--scope", "all"],
            "operate, admin",
        ),
        (&["token", "create", "", "--scope", "read"], "1 to 100"),
    ] {
        let ran = shop.run(arguments);
        assert_eq!(ran.code, 2, "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains(says), "{arguments:?}: {}", ran.err);
    }
}

// conformance: operations/serve-demo: the demo publishes, handles, fails and dead-letters by itself
#[test]
fn the_demo_moves() {
    let shop = Shop::new();
    let serving = Serving::start(&shop, &["--demo"]);
    let begun = Instant::now();
    loop {
        let page = ask(
            &serving.address,
            "GET",
            "/v1/events?type=shipping.parcel.sent",
            "",
            "",
        );
        let sent = page.is_some_and(|(_, page)| !page["items"].as_array().unwrap().is_empty());
        if sent {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "no parcel was sent");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(serving.terminate());
    assert!(shop.path("everbus-serve-demo.db").exists() && !shop.db().exists());
}

// conformance: operations/handled-line: a log line for each time a handler succeeded, with how long it took, is there when it is asked for and not otherwise
#[test]
fn each_handled_event_has_a_log_line_on_request() {
    for asked in [true, false] {
        let shop = Shop::new();
        let level = if asked {
            "warn,everbus::handled=debug"
        } else {
            "info"
        };
        let variables = [("EVERBUS_LOG", level)];
        let mut serving =
            Serving::start_with(&shop, &["--demo", "--log-format", "json"], &variables);
        let mut err = serving.child.stderr.take().unwrap();
        let reading = std::thread::spawn(move || {
            let mut text = String::new();
            err.read_to_string(&mut text).unwrap();
            text
        });
        let path = "/v1/events?type=payments.payment.captured";
        wait_until("a payment", || {
            let page = ask(&serving.address, "GET", path, "", "");
            page.is_some_and(|(_, page)| !page["items"].as_array().unwrap().is_empty())
        });
        assert!(serving.terminate());
        let text = reading.join().unwrap();
        let lines = text.lines().map(|line| {
            serde_json::from_str::<Value>(line).unwrap_or_else(|e| panic!("{e}: {line}"))
        });
        let mut handled = lines.filter(|line| line["target"] == "everbus::handled");
        let Some(line) = handled.next() else {
            assert!(!asked, "{text}");
            continue;
        };
        assert!(asked, "{line}");
        assert!(line["duration_ms"].as_f64().unwrap() > 0.0, "{line}");
        let about = &line["span"];
        assert!(
            about["group"].is_string() && about["event_id"].is_string(),
            "{line}"
        );
        assert!(about["attempt"].as_u64() >= Some(1), "{line}");
    }
}

/// How often the server is killed: a few times in CI, 200 by hand with `EVERBUS_HTTP_KILLS=200`.
fn kills() -> usize {
    let given = std::env::var("EVERBUS_HTTP_KILLS").ok();
    given.map_or(4, |text| text.parse().unwrap())
}

// conformance: operations/http-kills: no event that was acknowledged over HTTP is lost while the server is killed again and again
#[allow(clippy::print_stdout, reason = "the figures of a campaign by hand")]
#[test]
fn no_acknowledged_event_is_lost_when_the_server_is_killed() {
    let shop = Shop::new();
    let kills = kills();
    let address = Arc::new(Mutex::new(String::new()));
    let acknowledged: Arc<Mutex<Vec<String>>> = Arc::default();
    let done = Arc::new(AtomicBool::new(false));
    let publishers: Vec<_> = (0..4)
        .map(|publisher| {
            let (address, acknowledged, done) =
                (address.clone(), acknowledged.clone(), done.clone());
            std::thread::spawn(move || {
                for n in 0.. {
                    if done.load(Ordering::SeqCst) {
                        return;
                    }
                    let id = format!("{publisher}-{n}");
                    let event = json!({ "id": id, "source": "kills", "type": "kill.survived", "payload": n });
                    let address = address.lock().unwrap().clone();
                    match ask(&address, "POST", "/v1/events", "", &event.to_string()) {
                        Some((201, _)) => acknowledged.lock().unwrap().push(id),
                        Some((status, body)) => assert!(status >= 500, "{status} {body}"),
                        None => std::thread::sleep(Duration::from_millis(5)),
                    }
                }
            })
        })
        .collect();
    for _ in 0..kills {
        let before = acknowledged.lock().unwrap().len();
        let mut serving = Serving::start(&shop, &[]);
        *address.lock().unwrap() = serving.address.clone();
        let begun = Instant::now();
        // Killed in the middle of the work, not before it.
        while acknowledged.lock().unwrap().len() < before + 20 {
            assert!(begun.elapsed() < PATIENCE, "the server does not answer");
            std::thread::sleep(Duration::from_millis(2));
        }
        serving.kill();
    }
    done.store(true, Ordering::SeqCst);
    publishers
        .into_iter()
        .for_each(|publisher| publisher.join().unwrap());
    let serving = Serving::start(&shop, &[]);
    let (mut stored, mut cursor) = (BTreeSet::new(), String::new());
    loop {
        let path = format!("/v1/events?type=kill.survived&limit=1000&cursor={cursor}");
        let (status, page) = ask(&serving.address, "GET", &path, "", "").unwrap();
        assert_eq!(status, 200, "{page}");
        for item in page["items"].as_array().unwrap() {
            let id = item["foreign_id"].as_str().unwrap();
            assert!(stored.insert(id.to_owned()), "{id} is stored twice");
        }
        match page["next"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => break,
        }
    }
    let acknowledged = acknowledged.lock().unwrap();
    let lost: Vec<_> = acknowledged
        .iter()
        .filter(|id| !stored.contains(*id))
        .collect();
    assert!(lost.is_empty(), "lost {lost:?}");
    println!(
        "{kills} kills, {} acknowledged, 0 lost, {} stored",
        acknowledged.len(),
        stored.len()
    );
    assert!(serving.terminate());
}
