//! A server in this process for tests of the API, and requests to it with tokens and JSON.

use std::net::SocketAddr;
use std::time::Duration;

use everbus::{Bus, Config};
use everbus_server::auth::{TokenRequest, Tokens};
use everbus_server::{AppState, Scope, Server, ServerOptions, Tls};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Long enough for a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Api {
    pub(crate) bus: Bus,
    pub(crate) state: AppState,
    pub(crate) address: SocketAddr,
    pub(crate) dir: TempDir,
    stop: Option<oneshot::Sender<()>>,
    running: Option<JoinHandle<()>>,
}

pub(crate) struct Got {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Got {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The answer, which must have this status.
    pub(crate) fn ok(&self, status: u16) -> Value {
        let text = String::from_utf8_lossy(&self.body);
        assert_eq!(self.status, status, "{text}");
        self.json()
    }

    /// The code of a problem document, which must have this status.
    pub(crate) fn problem(&self, status: u16) -> String {
        let problem = self.ok(status);
        let is_problem = "content-type: application/problem+json";
        assert!(self.head.contains(is_problem), "{}", self.head);
        assert_eq!(problem["status"], status);
        assert!(problem["title"].is_string() && problem["detail"].is_string());
        problem["code"].as_str().unwrap().to_owned()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (known, value) = line.split_once(": ")?;
            known.eq_ignore_ascii_case(name).then_some(value)
        })
    }
}

impl Api {
    pub(crate) async fn start() -> Self {
        Self::with(None, |_| {}).await
    }

    pub(crate) async fn with(config: Option<&str>, set: impl FnOnce(&mut ServerOptions)) -> Self {
        Self::on(tempfile::tempdir().unwrap(), config, set).await
    }

    pub(crate) async fn on(
        dir: TempDir,
        config: Option<&str>,
        set: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let api = Self::bound(dir, config, set).await;
        api.get("/readyz", None).await.ok(200);
        api
    }

    /// A server that accepts connections, whether it is ready or not.
    async fn bound(
        dir: TempDir,
        config: Option<&str>,
        set: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let url = format!("sqlite:{}", dir.path().join("test.db").display());
        let config = config.map(|text| Config::parse(text, "everbus.yaml").unwrap());
        let mut builder = Bus::builder();
        if let Some(config) = &config {
            builder = builder.config(config);
        }
        let bus = builder.open(url).await.unwrap();
        let mut options = ServerOptions::default();
        options.listen = "127.0.0.1:0".parse().unwrap();
        set(&mut options);
        let server = Server::bind(bus.clone(), config, options).await.unwrap();
        let (address, state) = (server.address(), server.state().clone());
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(async move {
            let stopped = async move {
                let _ = stopped.await;
            };
            server.run(stopped).await.unwrap();
        });
        Self {
            bus,
            state,
            address,
            dir,
            stop: Some(stop),
            running: Some(running),
        }
    }

    /// A server that speaks TLS; requests of this client would not be understood.
    pub(crate) async fn over_tls(tls: Option<Tls>) -> Self {
        Self::bound(tempfile::tempdir().unwrap(), None, |options| {
            options.tls = tls;
        })
        .await
    }

    /// Stops the server and returns its directory.
    pub(crate) async fn stop(mut self) -> TempDir {
        let _ = self.stop.take().unwrap().send(());
        let running = self.running.take().unwrap();
        tokio::time::timeout(PATIENCE, running)
            .await
            .unwrap()
            .unwrap();
        self.dir
    }

    /// A token; from the first one on, every request needs one.
    pub(crate) async fn token(&self, scopes: &[Scope], tenant: Option<&str>) -> String {
        let request = TokenRequest {
            name: "test".to_owned(),
            scopes: scopes.to_vec(),
            tenant: tenant.map(str::to_owned),
            expires_at: None,
        };
        self.state.tokens().create(request).await.unwrap().token
    }

    /// The tokens as another process sees them.
    pub(crate) fn tokens_elsewhere(&self) -> Tokens {
        Tokens::new(&self.bus)
    }

    pub(crate) async fn get(&self, path: &str, token: Option<&str>) -> Got {
        self.send("GET", path, token, &[], b"").await
    }

    pub(crate) async fn post(&self, path: &str, token: Option<&str>, body: &Value) -> Got {
        let json = [("content-type", "application/json")];
        let body = body.to_string();
        self.send("POST", path, token, &json, body.as_bytes()).await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        token: Option<&str>,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Got {
        let mut request = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(name, _)| *name == "host") {
            request.push_str(&format!("host: {}\r\n", self.address));
        }
        if !headers.iter().any(|(name, _)| *name == "transfer-encoding") {
            request.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        if let Some(token) = token {
            request.push_str(&format!("authorization: Bearer {token}\r\n"));
        }
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str("\r\n");
        let mut bytes = request.into_bytes();
        bytes.extend_from_slice(body);
        let got = self.raw(&bytes).await;
        got.unwrap_or_else(|| panic!("{method} {path}: no answer"))
    }

    /// Sends bytes and reads the answer; `None` if the server closed the connection without one.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> Option<Got> {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        // The server may answer and close before it has read everything.
        let _ = stream.write_all(bytes).await;
        let mut answer = Vec::new();
        let mut buffer = [0; 16 * 1024];
        let reading = async {
            while let Ok(n @ 1..) = stream.read(&mut buffer).await {
                answer.extend_from_slice(&buffer[..n]);
            }
        };
        tokio::time::timeout(PATIENCE, reading).await.unwrap();
        let end = answer.windows(4).position(|w| w == b"\r\n\r\n")?;
        let head = String::from_utf8(answer[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Some(Got {
            status,
            body: answer[end + 4..].to_vec(),
            head: head.to_lowercase(),
        })
    }

    /// Publishes an event; the id.
    pub(crate) async fn publish(&self, token: Option<&str>, event_type: &str) -> String {
        let event = json!({ "type": event_type, "payload": { "n": 1 } });
        let stored = self.post("/v1/events", token, &event).await.ok(201);
        stored["items"][0]["id"].as_str().unwrap().to_owned()
    }
}

/// Asks again until the answer is there.
pub(crate) async fn until<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut ask: impl FnMut() -> F,
) -> T {
    let begun = tokio::time::Instant::now();
    loop {
        if let Some(found) = ask().await {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
