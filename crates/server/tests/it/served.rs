//! A server in this process on a new file, and a small HTTP client.

use std::net::SocketAddr;
use std::time::Duration;

use everbus::{Bus, Event, HandlerError, HandlerResult, Message};
use everbus_server::{Metrics, Server, ServerOptions};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Long enough for a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A server that runs until it is dropped or stopped.
pub(crate) struct Served {
    pub(crate) bus: Bus,
    pub(crate) address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: Option<JoinHandle<()>>,
    _dir: TempDir,
}

impl Served {
    pub(crate) async fn start() -> Self {
        Self::with(|_| {}).await
    }

    /// With other settings.
    pub(crate) async fn with(set: impl FnOnce(&mut ServerOptions)) -> Self {
        Metrics::install();
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", dir.path().join("test.db").display());
        let bus = Bus::open(url).await.unwrap();
        let mut options = ServerOptions::default();
        options.listen = "127.0.0.1:0".parse().unwrap();
        set(&mut options);
        let server = Server::bind(bus.clone(), None, options).await.unwrap();
        let address = server.address();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let stopped = async move {
                let _ = stopped.await;
            };
            server.run(stopped).await.unwrap();
        });
        Self {
            bus,
            address,
            stop: Some(stop),
            task: Some(task),
            _dir: dir,
        }
    }

    /// A group whose handler always fails, at once and for good.
    pub(crate) async fn failing_group(&self, pattern: &str, group: &str, error: &'static str) {
        self.bus
            .subscribe(pattern)
            .group(group)
            .handler(
                move |_: Message| async move { HandlerResult::Err(HandlerError::permanent(error)) },
            )
            .await
            .unwrap();
    }

    pub(crate) async fn publish(&self, event_type: &str, payload: serde_json::Value) -> Event {
        let event = Event::builder(event_type).json(&payload).build().unwrap();
        self.bus.publish(event.clone()).await.unwrap();
        event
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], "").await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Reply {
        exchange(self.address, method, path, headers, body)
            .await
            .unwrap()
    }

    /// Stops the server and waits until it has.
    pub(crate) async fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(task) = self.task.take() {
            tokio::time::timeout(PATIENCE, task).await.unwrap().unwrap();
        }
    }
}

/// One request on its own connection.
async fn exchange(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> std::io::Result<Reply> {
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str("\r\n");
    request.push_str(body);
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::new();
    let read = async {
        // Some servers keep the connection open although they were asked to close it.
        while !is_complete(&bytes) && stream.read_buf(&mut bytes).await? > 0 {}
        std::io::Result::Ok(())
    };
    tokio::time::timeout(PATIENCE, read).await??;
    Reply::parse(&bytes).ok_or_else(|| std::io::Error::other("no HTTP answer"))
}

/// Whether an answer with a known length is here as a whole.
fn is_complete(bytes: &[u8]) -> bool {
    let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else {
        return false;
    };
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let mut lines = head.lines();
    let length = lines.find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    length.is_some_and(|length: usize| bytes.len() >= end + 4 + length)
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Reply {
    /// What another server answers; `None` if it does not.
    pub(crate) async fn of(address: SocketAddr, path: &str) -> Option<Self> {
        exchange(address, "GET", path, &[], "").await.ok()
    }

    /// What another server answers to a JSON body.
    pub(crate) async fn ask(address: SocketAddr, method: &str, path: &str, body: &str) -> Self {
        let json = [("Content-Type", "application/json")];
        exchange(address, method, path, &json, body).await.unwrap()
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let end = bytes.windows(4).position(|w| w == b"\r\n\r\n")?;
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap();
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
            .collect();
        let mut body = bytes[end + 4..].to_vec();
        let chunked = headers
            .iter()
            .any(|(n, v)| n == "transfer-encoding" && v == "chunked");
        if chunked {
            body = unchunked(&body);
        }
        Some(Self {
            status: status.parse().unwrap(),
            headers,
            body: String::from_utf8(body).unwrap(),
        })
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(&bytes[..end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        bytes = &bytes[end + 2..];
        if size == 0 {
            break;
        }
        body.extend_from_slice(&bytes[..size]);
        bytes = &bytes[size + 2..];
    }
    body
}

/// Asks again until the answer is there.
pub(crate) async fn until<T, F: Future<Output = Option<T>>>(what: &str, ask: impl Fn() -> F) -> T {
    let begun = tokio::time::Instant::now();
    loop {
        if let Some(found) = ask().await {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
