//! NATS JetStream: Everbus beside the client library on a stream of its own.
//!
//! The raw loop awaits every acknowledgement of a publish, takes messages with a pull consumer, and waits until
//! the server has confirmed each ack, as Everbus does.

use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::{self, Context};
use async_nats::{ConnectOptions, HeaderMap};
use everbus_testkit::servers::{Nats, NatsOptions};
use futures_util::StreamExt as _;
use futures_util::future::try_join_all;
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
    ours::round(plan, payload, false, || server.fresh_account()).await
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
    let stream = context
        .create_stream(jetstream::stream::Config {
            name: "RAW".to_owned(),
            subjects: vec!["bench.>".to_owned()],
            ..Default::default()
        })
        .await?;
    let consumer = pull::Config {
        durable_name: Some("bench".to_owned()),
        ack_policy: AckPolicy::Explicit,
        max_ack_pending: 10_000,
        ..Default::default()
    };
    Ok(stream.create_consumer(consumer).await?)
}

async fn send(context: &Context, payload: usize) -> Outcome<()> {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", Uuid::now_v7().to_string().as_str());
    let body = vec![b'x'; payload].into();
    context
        .publish_with_headers(SUBJECT, headers, body)
        .await?
        .await?;
    Ok(())
}

/// A batch is this many publishes in flight.
async fn publish(context: &Context, events: usize, payload: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..PUBLISHERS {
        let context = context.clone();
        tasks.spawn(async move {
            for _ in 0..events / PUBLISHERS / BATCH {
                try_join_all((0..BATCH).map(|_| send(&context, payload))).await?;
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
        try_join_all(messages.iter().map(jetstream::Message::double_ack)).await?;
    }
    Ok(began.elapsed())
}

async fn latencies(
    context: &Context,
    consumer: &PullConsumer,
    samples: usize,
    payload: usize,
) -> Outcome<Vec<Duration>> {
    let mut messages = consumer.messages().await?;
    let mut took = Vec::with_capacity(samples);
    for sample in 0..samples + samples / 10 {
        let began = Instant::now();
        send(context, payload).await?;
        let message = messages
            .next()
            .await
            .ok_or("the stream of messages ended")??;
        if sample >= samples / 10 {
            took.push(began.elapsed());
        }
        message.ack().await?;
    }
    Ok(took)
}
