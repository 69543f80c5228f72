//! A TCP proxy that breaks connections at chosen moments.
//!
//! A *request* is what a client sent in one piece. A client that waits for each answer sends one piece at a
//! time.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// After a request whose answer is dropped, how long the proxy waits for that answer before it cuts.
const ANSWER: Duration = Duration::from_secs(2);

/// A TCP proxy before a server on 127.0.0.1; dropping it cuts all its connections.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    target: u16,
    /// How long each piece waits, in both directions.
    delay: AtomicU64,
    /// Nothing is forwarded.
    closed: watch::Sender<bool>,
    /// Connections that began before this generation are cut.
    generation: watch::Sender<u64>,
    cut: Mutex<Option<Cut>>,
    cuts: AtomicU64,
    connections: AtomicU64,
}

/// A cut that waits for its request.
#[derive(Debug)]
struct Cut {
    /// Only requests with these bytes count.
    needle: Vec<u8>,
    left: u64,
}

impl Proxy {
    /// Starts a proxy before the server on this port of 127.0.0.1.
    pub async fn start(target: u16) -> Self {
        Self::start_on(0, target).await
    }

    /// As [`start`](Self::start), on this port: for a server that sends its clients there.
    pub async fn start_on(port: u16, target: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            target,
            delay: AtomicU64::new(0),
            closed: watch::Sender::new(false),
            generation: watch::Sender::new(0),
            cut: Mutex::default(),
            cuts: AtomicU64::new(0),
            connections: AtomicU64::new(0),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self {
            port,
            shared,
            accepting,
        }
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A URL of the server, through the proxy.
    pub fn through(&self, url: &str) -> String {
        with_port(url, self.port)
    }

    /// Lets each piece wait this long, in both directions.
    pub fn delay(&self, time: Duration) {
        let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.shared.delay.store(millis, Ordering::Relaxed);
    }

    /// Cuts all connections now. New ones are taken.
    pub fn cut(&self) {
        self.shared.generation.send_modify(|n| *n += 1);
        self.shared.cuts.fetch_add(1, Ordering::Relaxed);
    }

    /// Forwards the n-th request from now (1 is the next), drops its answer, and cuts the connection when the
    /// server has begun to answer.
    pub fn cut_before_reply(&self, n: u64) {
        self.cut_before_reply_to(b"", n);
    }

    /// As [`cut_before_reply`](Self::cut_before_reply), counting only requests that contain these bytes.
    pub fn cut_before_reply_to(&self, needle: &[u8], n: u64) {
        assert!(n > 0, "the next request is number 1");
        *self.shared.lock() = Some(Cut {
            needle: needle.to_vec(),
            left: n,
        });
    }

    /// Whether a cut still waits for its request.
    pub fn is_armed(&self) -> bool {
        self.shared.lock().is_some()
    }

    /// Forwards nothing any more. Connections are taken and stay open.
    pub fn black_hole(&self) {
        self.shared.closed.send_replace(true);
    }

    /// Forwards everything at once again: ends the black hole and the delay, and cancels a cut that has not happened.
    pub fn heal(&self) {
        self.shared.closed.send_replace(false);
        self.shared.delay.store(0, Ordering::Relaxed);
        *self.shared.lock() = None;
    }

    /// How often connections were cut.
    pub fn cuts(&self) -> u64 {
        self.shared.cuts.load(Ordering::Relaxed)
    }

    /// How many connections were taken.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.shared.generation.send_modify(|n| *n += 1);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Cut>> {
        self.cut.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request; whether its answer is to be dropped.
    fn is_last(&self, request: &[u8]) -> bool {
        let mut waiting = self.lock();
        let Some(cut) = waiting.as_mut() else {
            return false;
        };
        let length = cut.needle.len().max(1);
        let matches = |piece: &[u8]| cut.needle.is_empty() || piece == cut.needle;
        if !request.windows(length).any(matches) {
            return false;
        }
        cut.left -= 1;
        let last = cut.left == 0;
        if last {
            *waiting = None;
        }
        last
    }

    /// Waits for the delay, and while nothing is forwarded.
    async fn hold(&self) {
        let millis = self.delay.load(Ordering::Relaxed);
        if millis > 0 {
            tokio::time::sleep(Duration::from_millis(millis)).await;
        }
        let mut closed = self.closed.subscribe();
        let _ = closed.wait_for(|closed| !closed).await;
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        shared.connections.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let mut generation = shared.generation.subscribe();
            let began = *generation.borrow_and_update();
            // A reset, as from a machine that is gone, and no waiting for what was not sent.
            let _ = client.set_zero_linger();
            tokio::select! {
                () = connect(client, &shared) => {}
                _ = generation.wait_for(|now| *now != began) => {}
            }
        });
    }
}

async fn connect(mut client: TcpStream, shared: &Shared) {
    shared.hold().await;
    let target = SocketAddr::from(([127, 0, 0, 1], shared.target));
    let Ok(mut server) = TcpStream::connect(target).await else {
        return;
    };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let dropped = watch::Sender::new(false);
    let requests = async {
        let mut buffer = vec![0; 256 * 1024];
        loop {
            let length = match from_client.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(length) => length,
            };
            shared.hold().await;
            // Before the request is sent, so that no byte of its answer gets through.
            if shared.is_last(&buffer[..length]) {
                dropped.send_replace(true);
            }
            if to_server.write_all(&buffer[..length]).await.is_err() {
                return;
            }
            if *dropped.borrow() {
                // The other direction ends the connection when the answer comes.
                tokio::time::sleep(ANSWER).await;
                return;
            }
        }
    };
    let answers = async {
        let mut buffer = vec![0; 256 * 1024];
        loop {
            let length = match from_server.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(length) => length,
            };
            if *dropped.borrow() {
                return;
            }
            shared.hold().await;
            if to_client.write_all(&buffer[..length]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = requests => {}
        () = answers => {}
    }
    if *dropped.borrow() {
        shared.cuts.fetch_add(1, Ordering::Relaxed);
    }
}

/// The URL with another port on 127.0.0.1.
pub(super) fn with_port(url: &str, port: u16) -> String {
    let host = "127.0.0.1:";
    let Some((before, after)) = url.split_once(host) else {
        panic!("{url} names no port of 127.0.0.1");
    };
    let rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
    format!("{before}{host}{port}{rest}")
}
