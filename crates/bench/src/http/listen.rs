//! Fan-out over WebSockets: 1,000 events per second to 500 clients.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use everbus::Bus;
use everbus_core::Result;
use memchr::memmem;
use tokio::io::AsyncWriteExt as _;
use tokio::time::MissedTickBehavior;

use super::Serving;
use super::client::Client;
use crate::failed;
use crate::sample::{self, Maker, Moments, percentile, wrong};
use crate::{Bench, Figure};

const CLIENTS: u64 = 500;
const RATE: u64 = 1000;
const SECONDS: u64 = 10;
/// A batch of events is published this often.
const STEP: Duration = Duration::from_millis(10);
/// How many events are in a batch: [`RATE`] times [`STEP`].
const IN_STEP: u64 = 10;
/// The 99th percentile must be below this many microseconds.
const LIMIT_US: f64 = 100_000.0;
/// The bench fails if a client has not received every event after this time.
const TIMEOUT: Duration = Duration::from_secs(60);
const UPGRADE: &str = "GET /ws HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\
                       sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
const SUBSCRIBE: &[u8] = br#"{"type":"subscribe","id":"a","patterns":["bench.>"]}"#;

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let clients = bench.scaled(CLIENTS);
    let events = RATE * bench.scaled(SECONDS);
    bench
        .on_bus(async |bus| fan_out(bench, bus, clients, events).await)
        .await
}

async fn fan_out(bench: &Bench, bus: &Bus, clients: u64, events: u64) -> Result<Figure> {
    let serving = Serving::start(bus).await?;
    bench.say(format!("connecting {clients} clients"));
    let sent = Moments::new(events);
    let mut listening = tokio::task::JoinSet::new();
    for _ in 0..clients {
        let client = connect(serving.address).await?;
        listening.spawn(tokio::time::timeout(
            TIMEOUT,
            receive(client, events, sent.clone()),
        ));
    }
    bench.say(format!("{RATE} events per second"));
    let began = Instant::now();
    let mut steps = tokio::time::interval(STEP);
    steps.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut next = 0;
    while next < events {
        steps.tick().await;
        let upto = events.min(next + IN_STEP);
        let batch: Result<Vec<_>> = (next..upto).map(Maker::numbered).collect();
        // The time is marked before the publish, so a latency includes the commit.
        (next..upto).for_each(|n| sent.mark(usize::try_from(n).unwrap_or(usize::MAX)));
        bus.publish_batch(batch?).await?;
        next = upto;
    }
    let published = began.elapsed();
    let mut took = Vec::new();
    while let Some(ended) = listening.join_next().await {
        let received = ended.map_err(|error| wrong(error.to_string()))?;
        took.extend(received.map_err(|_| wrong("a client did not get every event"))??);
    }
    let rate = sample::rate(events, published);
    serving.end().await?;
    let (p50, p99) = (percentile(&mut took, 0.5), percentile(&mut took, 0.99));
    let deliveries = took.len();
    Ok(Figure::target("p99 < 100 ms", p99 < LIMIT_US)
        .latencies(p50, p99)
        .detail(format!(
            "{clients} clients, {rate:.0} events/s for {published:.1?}, {deliveries} deliveries, none missing; \
             clients and server in one process"
        )))
}

/// Connects a client, upgrades it to a WebSocket and subscribes it.
async fn connect(address: SocketAddr) -> Result<Client> {
    let mut client = Client::connect(address).await?;
    client
        .stream
        .write_all(UPGRADE.as_bytes())
        .await
        .map_err(failed)?;
    let head = client.head().await?;
    if !head.starts_with(b"HTTP/1.1 101 ") {
        let head = String::from_utf8_lossy(&head);
        return Err(wrong(format!("no WebSocket: {head}")));
    }
    // A text frame, with a mask of zeros: a mask is required, and this one leaves the payload as it is.
    let length = u8::try_from(SUBSCRIBE.len()).map_err(|_| wrong("too long"))?;
    let mut frame = vec![0x81, 0x80 | length, 0, 0, 0, 0];
    frame.extend_from_slice(SUBSCRIBE);
    client.stream.write_all(&frame).await.map_err(failed)?;
    loop {
        let message = frame_of(&mut client).await?;
        if message.starts_with(br#"{"type":"ack""#) {
            return Ok(client);
        }
    }
}

/// Reads the payload of the next frame. Relies on a server that splits no message over frames and sends no mask.
async fn frame_of(client: &mut Client) -> Result<BytesMut> {
    loop {
        let bytes = &client.bytes;
        let size = match bytes.get(1) {
            Some(126) if bytes.len() >= 4 => {
                Some((4, usize::from(u16::from_be_bytes([bytes[2], bytes[3]]))))
            }
            Some(127) if bytes.len() >= 10 => {
                let length = bytes[2..10]
                    .iter()
                    .fold(0, |n, byte| n << 8 | usize::from(*byte));
                Some((10, length))
            }
            Some(126 | 127) | None => None,
            Some(length) => Some((2, usize::from(*length))),
        };
        match size {
            Some((head, length)) if bytes.len() >= head + length => {
                let mut frame = client.bytes.split_to(head + length);
                return Ok(frame.split_off(head));
            }
            _ => client.more().await?,
        }
    }
}

/// Receives all events and returns the latency of each. Fails if an event is missing or out of order.
async fn receive(mut client: Client, events: u64, sent: Moments) -> Result<Vec<Duration>> {
    const MARK: &[u8] = br#""n":""#;
    const DIGITS: usize = 10;
    let mark = memmem::Finder::new(MARK);
    let mut late = Vec::new();
    let mut expected = 0;
    while expected < events {
        let message = frame_of(&mut client).await?;
        let now = Moments::now();
        let mut rest = &message[..];
        while let Some(at) = mark.find(rest) {
            let (from, upto) = (at + MARK.len(), at + MARK.len() + DIGITS);
            let number = rest
                .get(from..upto)
                .and_then(|n| std::str::from_utf8(n).ok());
            if number.and_then(|n| n.parse().ok()) != Some(expected) {
                return Err(wrong(format!("{number:?} came instead of {expected}")));
            }
            let begun = sent.at(usize::try_from(expected).unwrap_or(usize::MAX));
            late.push(Duration::from_nanos(now.saturating_sub(begun)));
            expected += 1;
            rest = &rest[upto..];
        }
    }
    Ok(late)
}
