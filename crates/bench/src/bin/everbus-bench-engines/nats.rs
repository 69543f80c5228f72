//! NATS JetStream: Everbus beside the client library on a stream of its own.
//!
//! The raw loop stores batches as a whole, as Everbus does, takes messages with a pull consumer, and waits until the
//! server has confirmed each ack, while it takes the next messages.

use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::{self, Context};
use async_nats::{ConnectOptions, HeaderMap};
use everbus_testkit::servers::{Nats, NatsOptions};
use futures_util::StreamExt as _;
use futures_util::future::try_join_all;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::{BATCH, FETCH, Outcome, PUBLISHERS, Plan, Round, ours};

const SUBJECT: &str = "bench.event.stored";

fn server() -> Outcome<&'static Nats> {
    static SERVER: std::sync::OnceLock<Option<Nats>> = std::sync::OnceLock::new();
    let start = || Nats::start(NatsOptions::default().accounts(100));
    let server = SERVER.get_or_init(start).as_ref();
    server.ok_or_else(|| "nats-server is not installed".into())
}

pub(crate) async fn ours(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    ours::round(plan, payload, false, 0, || server.fresh_account()).await
}

pub(crate) async fn raw(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    let context = connect(&server.fresh_account()).await?;
    let consumer = create(&context).await?;
    let publish = publish(&context, plan.events, payload).await?;
    let consume = consume(&consumer, plan.events).await?;
    let context = connect(&server.fresh_account()).await?;
    let consumer = create(&context).await?;
    let began = Instant::now();
    let (published, consumed) = tokio::join!(
        self::publish(&context, plan.events, payload),
        self::consume(&consumer, plan.events)
    );
    let (_, _) = (published?, consumed?);
    let end_to_end = began.elapsed();
    Ok(Round {
        publish,
        consume,
        end_to_end,
        latencies: latencies(&context, &consumer, plan.samples, payload).await?,
    })
}

async fn connect(url: &str) -> Outcome<Context> {
    // The client library does not take the user from the URL.
    let (user, address) = url
        .strip_prefix("nats://")
        .and_then(|rest| rest.split_once('@'))
        .ok_or("a URL without a user")?;
    let (user, password) = user.split_once(':').ok_or("a user without a password")?;
    let options = ConnectOptions::with_user_and_password(user.to_owned(), password.to_owned());
    Ok(jetstream::new(options.connect(address).await?))
}

async fn create(context: &Context) -> Outcome<PullConsumer> {
    // A stream as Everbus makes it. Without a feature, the configuration of the client library has no atomic batches.
    let config = serde_json::json!({
        "name": "RAW",
        "subjects": ["bench.>"],
        "storage": "file",
        "allow_direct": true,
        "allow_atomic": true,
    });
    let created = context
        .client()
        .request("$JS.API.STREAM.CREATE.RAW", config.to_string().into())
        .await?;
    let created: serde_json::Value = serde_json::from_slice(&created.payload)?;
    if !created["error"].is_null() {
        return Err(format!("the stream was refused: {created}").into());
    }
    let stream = context.get_stream("RAW").await?;
    let consumer = pull::Config {
        durable_name: Some("bench".to_owned()),
        ack_policy: AckPolicy::Explicit,
        max_ack_pending: 10_000,
        ..Default::default()
    };
    Ok(stream.create_consumer(consumer).await?)
}

fn headers() -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", Uuid::now_v7().to_string().as_str());
    headers
}

async fn send(context: &Context, payload: usize) -> Outcome<()> {
    let body = vec![b'x'; payload].into();
    context
        .publish_with_headers(SUBJECT, headers(), body)
        .await?
        .await?;
    Ok(())
}

/// Stores a batch as a whole: the server answers to its last event.
async fn send_batch(context: &Context, payload: usize) -> Outcome<()> {
    let batch = Uuid::now_v7().to_string();
    for number in 1..=BATCH {
        let mut headers = headers();
        headers.insert("Nats-Batch-Id", batch.as_str());
        headers.insert("Nats-Batch-Sequence", number.to_string());
        let body = vec![b'x'; payload].into();
        if number < BATCH {
            let client = context.client();
            client.publish_with_headers(SUBJECT, headers, body).await?;
            continue;
        }
        headers.insert("Nats-Batch-Commit", "1");
        let sent = context.publish_with_headers(SUBJECT, headers, body).await?;
        sent.await?;
    }
    Ok(())
}

async fn publish(context: &Context, events: usize, payload: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..PUBLISHERS {
        let context = context.clone();
        tasks.spawn(async move {
            for _ in 0..events / PUBLISHERS / BATCH {
                send_batch(&context, payload).await?;
            }
            Outcome::Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(began.elapsed())
}

async fn consume(consumer: &PullConsumer, events: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let (taken, mut to_ack) = mpsc::channel::<Vec<jetstream::Message>>(4);
    let acking = tokio::spawn(async move {
        while let Some(messages) = to_ack.recv().await {
            try_join_all(messages.iter().map(jetstream::Message::double_ack)).await?;
        }
        Outcome::Ok(())
    });
    let mut done = 0;
    while done < events {
        let mut batch = consumer
            .batch()
            .max_messages(FETCH.min(events - done))
            .expires(Duration::from_secs(1))
            .messages()
            .await?;
        let mut messages = Vec::with_capacity(FETCH);
        while let Some(message) = batch.next().await {
            messages.push(message?);
        }
        done += messages.len();
        taken.send(messages).await?;
    }
    drop(taken);
    acking.await??;
    Ok(began.elapsed())
}

async fn latencies(
    context: &Context,
    consumer: &PullConsumer,
    samples: usize,
    payload: usize,
) -> Outcome<Vec<Duration>> {
    let mut messages = consumer.messages().await?;
    let (arrived, mut arrivals) = mpsc::unbounded_channel::<Instant>();
    let mut reader = JoinSet::new();
    reader.spawn(async move {
        while let Some(message) = messages.next().await {
            let message = message?;
            arrived.send(Instant::now())?;
            message.double_ack().await?;
        }
        Outcome::Ok(())
    });
    let mut took = Vec::with_capacity(samples);
    for sample in 0..samples + samples / 10 {
        let began = Instant::now();
        send(context, payload).await?;
        let arrival = arrivals.recv().await.ok_or("the reader is gone")?;
        if sample >= samples / 10 {
            took.push(arrival.saturating_duration_since(began));
        }
    }
    Ok(took)
}
