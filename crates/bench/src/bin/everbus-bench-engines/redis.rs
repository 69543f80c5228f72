//! Redis Streams: Everbus beside the client library, which runs the same scripts with the same arguments.
//!
//! The raw loop uses only those scripts: it appends batches over one connection, claims, and settles one claim
//! while it makes the next. It has no retries, no types, no handlers, and sends a constant in place of the digest of
//! each event.

use std::time::{Duration, Instant};

use ::redis::aio::MultiplexedConnection;
use ::redis::{Client, Script, Value};
use everbus_testkit::servers::{Redis, RedisOptions};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::{BATCH, FETCH, Failed, Outcome, PUBLISHERS, Plan, Round, ours};

/// An entry of a stream: its id, and names and values in turn.
type Entry = (String, Vec<Value>);

const PREFIX: &str = "everbus:";
const STREAM: &str = "bench:event-stored";
const GROUP: &str = "bench";
/// The digest of an event has this form.
const DIGEST: &str = "0123456789abcdef0123456789abcdef";
const WINDOW: &str = "600000";
const LEASE: &str = "40000";

macro_rules! script {
    ($file:literal) => {
        Script::new(concat!(
            include_str!("../../../../redis/src/scripts/common.lua"),
            include_str!(concat!("../../../../redis/src/scripts/", $file))
        ))
    };
}

/// The server syncs every write.
pub(crate) fn server() -> Outcome<&'static Redis> {
    static SERVER: std::sync::OnceLock<Option<Redis>> = std::sync::OnceLock::new();
    let start = || Redis::start(RedisOptions::default().set("databases", "1000"));
    let server = SERVER.get_or_init(start).as_ref();
    server.ok_or_else(|| "redis-server is not installed".into())
}

pub(crate) async fn ours(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    ours::round(plan, payload, true, 0, || server.fresh_database()).await
}

pub(crate) async fn raw(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    let raw = Raw::open(&server.fresh_database()).await?;
    let publish = raw.publish(plan.events, payload).await?;
    let consume = raw.consume(plan.events).await?;
    let raw = Raw::open(&server.fresh_database()).await?;
    let began = Instant::now();
    let (published, consumed) =
        tokio::join!(raw.publish(plan.events, payload), raw.consume(plan.events));
    let (_, _) = (published?, consumed?);
    let end_to_end = began.elapsed();
    Ok(Round {
        publish,
        consume,
        end_to_end,
        latencies: raw.latencies(plan.samples, payload).await?,
    })
}

/// The client on one database.
#[derive(Clone)]
struct Raw {
    client: Client,
    /// All requests share it, as in Everbus.
    connection: MultiplexedConnection,
    append: String,
    claim: String,
    settle: String,
}

impl Raw {
    async fn open(url: &str) -> Outcome<Self> {
        let client = Client::open(url)?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        let (append, claim) = (script!("append.lua"), script!("claim.lua"));
        let settle = script!("settle.lua");
        for script in [&append, &claim, &settle] {
            script.load_async(&mut connection).await?;
        }
        // The scripts ask only for the revision of the group.
        let mut record = ::redis::cmd("HSET");
        record
            .arg(format!("{PREFIX}groups"))
            .arg(GROUP)
            .arg("1\n{}");
        let _: Value = record.query_async(&mut connection).await?;
        Ok(Self {
            client,
            connection,
            append: append.get_hash().to_owned(),
            claim: claim.get_hash().to_owned(),
            settle: settle.get_hash().to_owned(),
        })
    }

    fn call(hash: &str) -> ::redis::Cmd {
        let mut call = ::redis::cmd("EVALSHA");
        call.arg(hash).arg(1).arg(PREFIX);
        call
    }

    async fn append(&self, count: usize, payload: usize) -> Outcome<()> {
        let body = vec![b'x'; payload];
        let mut call = Self::call(&self.append);
        call.arg(WINDOW).arg(count);
        for _ in 0..count {
            let id = Uuid::now_v7().to_string();
            let mark = format!("{id} 1 1763000000000000");
            call.arg(STREAM).arg("native").arg(id).arg(DIGEST).arg(4);
            call.arg("eb").arg(mark).arg("p").arg(&body);
        }
        let mut connection = self.connection.clone();
        let answer: Vec<Value> = call.query_async(&mut connection).await?;
        match answer.len() == count + 1 {
            true => Ok(()),
            false => Err(format!("a batch was refused: {answer:?}").into()),
        }
    }

    async fn publish(&self, events: usize, payload: usize) -> Outcome<Duration> {
        let began = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..PUBLISHERS {
            let raw = self.clone();
            tasks.spawn(async move {
                for _ in 0..events / PUBLISHERS / BATCH {
                    raw.append(BATCH, payload).await?;
                }
                Outcome::Ok(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(began.elapsed())
    }

    async fn registry(&self) -> Outcome<String> {
        let mut connection = self.connection.clone();
        let mut ask = ::redis::cmd("GET");
        let version: Option<String> = ask
            .arg(format!("{PREFIX}registry"))
            .query_async(&mut connection)
            .await?;
        Ok(version.unwrap_or_else(|| "0".to_owned()))
    }

    /// Claims events. Returns the member and the token of each; `None` if the streams have changed.
    async fn claim(&self, registry: &str, tag: &str) -> Outcome<Option<Vec<(String, String)>>> {
        let mut call = Self::call(&self.claim);
        call.arg(GROUP).arg(GROUP).arg("1").arg(registry).arg(tag);
        call.arg(0).arg(FETCH).arg(LEASE);
        call.arg("2026-01-01T00:00:00Z").arg("");
        call.arg(1).arg(STREAM).arg(1).arg(STREAM);
        let mut connection = self.connection.clone();
        let mut answer: Vec<Value> = call.query_async(&mut connection).await?;
        let word: String = ::redis::from_redis_value(answer.remove(0))?;
        if word != "ok" {
            return Ok(None);
        }
        let Value::Array(claimed) = answer.remove(0) else {
            return Err("the claim is no list".into());
        };
        let event = |value: Value| {
            let Value::Array(mut parts) = value else {
                return Err(Failed::from("a claimed event is no list"));
            };
            if !matches!(&parts[5], Value::Array(fields) if fields.len() == 4) {
                return Err("a claimed event has no payload".into());
            }
            let token: String = ::redis::from_redis_value(parts.remove(2))?;
            let id: String = ::redis::from_redis_value(parts.remove(1))?;
            Ok((format!("{id}@{STREAM}"), format!("{token}|{tag}")))
        };
        claimed
            .into_iter()
            .map(event)
            .collect::<Outcome<_>>()
            .map(Some)
    }

    async fn settle(&self, events: Vec<(String, String)>) -> Outcome<()> {
        let mut call = Self::call(&self.settle);
        call.arg(WINDOW).arg(events.len());
        for (member, token) in &events {
            call.arg("K").arg(GROUP).arg(GROUP).arg(member).arg(token);
        }
        let mut connection = self.connection.clone();
        let answers: Vec<String> = call.query_async(&mut connection).await?;
        match answers.len() == events.len() && answers.iter().all(|answer| answer == "ok") {
            true => Ok(()),
            false => Err("an event could not be settled".into()),
        }
    }

    /// Claims and settles this many events. The next claim runs while the one before is settled.
    async fn consume(&self, events: usize) -> Outcome<Duration> {
        let began = Instant::now();
        let (claimed, mut to_settle) = tokio::sync::mpsc::channel::<Vec<(String, String)>>(2);
        let raw = self.clone();
        let settling = tokio::spawn(async move {
            while let Some(batch) = to_settle.recv().await {
                raw.settle(batch).await?;
            }
            Outcome::Ok(())
        });
        let (mut registry, mut taken, mut claims) = (self.registry().await?, 0, 0);
        while taken < events {
            claims += 1;
            let tag = format!("raw.1.{claims}");
            match self.claim(&registry, &tag).await? {
                None => registry = self.registry().await?,
                Some(batch) if batch.is_empty() => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Some(batch) => {
                    taken += batch.len();
                    claimed.send(batch).await?;
                }
            }
        }
        drop(claimed);
        settling.await??;
        Ok(began.elapsed())
    }

    /// From the append to the claim by a reader that a blocking read has woken.
    async fn latencies(&self, samples: usize, payload: usize) -> Outcome<Vec<Duration>> {
        let config = ::redis::AsyncConnectionConfig::new().set_response_timeout(None);
        let mut blocking = self
            .client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        let registry = self.registry().await?;
        // The first read must not miss an event that comes before it.
        let mut tail = self.connection.clone();
        let mut newest = ::redis::cmd("XREVRANGE");
        newest.arg(STREAM).arg("+").arg("-").arg("COUNT").arg(1);
        let newest: Vec<Entry> = newest.query_async(&mut tail).await?;
        let mut last = newest.into_iter().next().ok_or("an empty stream")?.0;
        let (arrived, mut arrivals) = tokio::sync::mpsc::unbounded_channel::<Instant>();
        let raw = self.clone();
        let mut reader = JoinSet::new();
        reader.spawn(async move {
            for claims in 0.. {
                let mut read = ::redis::cmd("XREAD");
                read.arg("BLOCK")
                    .arg(0)
                    .arg("STREAMS")
                    .arg(STREAM)
                    .arg(&last);
                let found: Vec<(String, Vec<Entry>)> = read.query_async(&mut blocking).await?;
                let entries = found.into_iter().flat_map(|(_, entries)| entries);
                if let Some((id, _)) = entries.last() {
                    last = id;
                }
                let tag = format!("raw.2.{claims}");
                let claimed = raw.claim(&registry, &tag).await?.unwrap_or_default();
                if claimed.len() != 1 {
                    let count = claimed.len();
                    return Err(format!("{count} events were claimed instead of 1").into());
                }
                arrived.send(Instant::now())?;
                raw.settle(claimed).await?;
            }
            Outcome::Ok(())
        });
        let mut took = Vec::with_capacity(samples);
        for sample in 0..samples + samples / 10 {
            let began = Instant::now();
            self.append(1, payload).await?;
            let Some(arrival) = arrivals.recv().await else {
                let ended = reader.join_next().await.ok_or("the reader is gone")?;
                return Err(ended?.err().unwrap_or_else(|| "the reader ended".into()));
            };
            if sample >= samples / 10 {
                took.push(arrival.saturating_duration_since(began));
            }
        }
        Ok(took)
    }
}
