//! A small client of the WebDriver protocol, and a Chromium that it drives.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use data_encoding::BASE64;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::served::{PATIENCE, Reply, until};

const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A browser without a window.
pub(crate) struct Browser {
    driver: Child,
    address: SocketAddr,
    session: String,
    _dir: TempDir,
}

impl Browser {
    /// Starts one; `None`, with a message, if Chromium or its driver is not installed.
    pub(crate) async fn start() -> Option<Self> {
        let there = ["chromium", "chromedriver"].iter().all(|program| {
            let mut version = Command::new(program);
            version
                .arg("--version")
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            version.status().is_ok()
        });
        if !there {
            let message = "SKIPPED: no browser (apt-get install chromium chromium-driver)";
            assert!(
                std::env::var_os("EVERBUS_REQUIRE_SERVERS").is_none(),
                "{message}"
            );
            eprintln!("{message}");
            return None;
        }
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let driver = Command::new("chromedriver")
            .arg(format!("--port={port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut browser = Self {
            driver,
            address: SocketAddr::from(([127, 0, 0, 1], port)),
            session: String::new(),
            _dir: dir,
        };
        until("chromedriver", || async {
            let reply = Reply::of(browser.address, "/status").await?;
            reply.body.contains("\"ready\":true").then_some(())
        })
        .await;
        let flags = [
            "--headless".to_owned(),
            "--no-sandbox".to_owned(),
            "--disable-gpu".to_owned(),
            "--disable-quic".to_owned(),
            "--no-first-run".to_owned(),
            "--disable-background-networking".to_owned(),
            "--disable-component-update".to_owned(),
            "--disable-sync".to_owned(),
            "--hide-scrollbars".to_owned(),
            format!("--user-data-dir={}", browser._dir.path().display()),
        ];
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": { "binary": "/usr/bin/chromium", "args": flags },
            "goog:loggingPrefs": { "browser": "ALL" },
        } } });
        let begun = browser.call("POST", "/session", &wanted).await;
        browser.session = begun["sessionId"].as_str().unwrap().to_owned();
        Some(browser)
    }

    async fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let value = self.ask(method, path, body).await;
        assert!(value["error"].is_null(), "{path}: {value}");
        value
    }

    /// The answer of the driver, which may be an error.
    async fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = if method == "GET" {
            String::new()
        } else {
            body.to_string()
        };
        let reply = Reply::ask(self.address, method, path, &body).await;
        let mut answer: Value = serde_json::from_str(&reply.body).unwrap();
        answer["value"].take()
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let path = format!("/session/{}/{path}", self.session);
        self.call("POST", &path, &body).await
    }

    pub(crate) async fn open(&self, url: &str) {
        self.post("url", json!({ "url": url })).await;
    }

    pub(crate) async fn resize(&self, width: u32, height: u32) {
        self.post("window/rect", json!({ "width": width, "height": height }))
            .await;
    }

    /// The result of an expression in the page.
    pub(crate) async fn eval(&self, expression: &str) -> Value {
        let script = format!("return ({expression})");
        self.post("execute/sync", json!({ "script": script, "args": [] }))
            .await
    }

    /// Waits until an expression is true. A page that is being left has no answer for a moment.
    pub(crate) async fn wait_for(&self, expression: &str) {
        let begun = tokio::time::Instant::now();
        loop {
            let script = format!("return Boolean({expression})");
            let path = format!("/session/{}/execute/sync", self.session);
            let body = json!({ "script": script, "args": [] }).to_string();
            let reply = Reply::ask(self.address, "POST", &path, &body).await;
            let answer: Value = serde_json::from_str(&reply.body).unwrap_or_default();
            if answer["value"] == json!(true) {
                return;
            }
            if begun.elapsed() > PATIENCE {
                let page = self.eval("document.body.innerText").await;
                panic!("waited too long for {expression}: {answer}\n{page}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn find(&self, selector: &str) -> String {
        self.wait_for(&format!("document.querySelector({})", json!(selector)))
            .await;
        let found = self
            .post(
                "element",
                json!({ "using": "css selector", "value": selector }),
            )
            .await;
        found[ELEMENT].as_str().unwrap().to_owned()
    }

    /// Clicks on an element. A live page may replace the element after it was found: then it is found again.
    pub(crate) async fn click(&self, selector: &str) {
        let begun = tokio::time::Instant::now();
        loop {
            let element = self.find(selector).await;
            let path = format!("/session/{}/element/{element}/click", self.session);
            let value = self.ask("POST", &path, &json!({})).await;
            if value["error"] != "stale element reference" || begun.elapsed() > PATIENCE {
                assert!(value["error"].is_null(), "{selector}: {value}");
                return;
            }
        }
    }

    /// Types into an element, as a person would.
    pub(crate) async fn fill(&self, selector: &str, text: &str) {
        let element = self.find(selector).await;
        self.post(&format!("element/{element}/clear"), json!({}))
            .await;
        self.post(&format!("element/{element}/value"), json!({ "text": text }))
            .await;
    }

    /// Presses keys one after another, wherever the focus is.
    pub(crate) async fn press(&self, keys: &[&str]) {
        let actions: Vec<Value> = keys
            .iter()
            .flat_map(|key| {
                [
                    json!({ "type": "keyDown", "value": key }),
                    json!({ "type": "keyUp", "value": key }),
                ]
            })
            .collect();
        let actions =
            json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": actions }] });
        self.post("actions", actions).await;
    }

    /// Keeps a picture of the page, for a person to look at.
    pub(crate) async fn screenshot(&self, name: &str) {
        let path = format!("/session/{}/screenshot", self.session);
        let picture = self.call("GET", &path, &Value::Null).await;
        let bytes = BASE64.decode(picture.as_str().unwrap().as_bytes()).unwrap();
        let folder = std::env::var_os("EVERBUS_SCREENSHOTS").map_or_else(
            || PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("screenshots"),
            PathBuf::from,
        );
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(format!("{name}.png")), bytes).unwrap();
    }

    /// Fails if the console of the browser has an error.
    pub(crate) async fn no_errors(&self) {
        let log = self.post("se/log", json!({ "type": "browser" })).await;
        let bad: Vec<&Value> = log
            .as_array()
            .unwrap()
            .iter()
            .filter(|entry| entry["level"] == "SEVERE" || entry["level"] == "WARNING")
            .collect();
        assert!(bad.is_empty(), "{bad:?}");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The driver ends its browser when it is asked to; a killed driver leaves it behind.
        let path = format!("/session/{}", self.session);
        let request = format!(
            "DELETE {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
            self.address
        );
        if let Ok(mut stream) = std::net::TcpStream::connect(self.address) {
            use std::io::{Read as _, Write as _};
            let _ = stream.write_all(request.as_bytes());
            // The driver answers and keeps the connection open.
            let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
            let _ = stream.read(&mut [0; 1024]);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
