//! PostgreSQL: Everbus beside tables written by hand.
//!
//! The raw loop inserts with `INSERT … SELECT unnest` and claims by a range: it locks the row of the group, takes
//! the next events, notes the claim, commits, and removes the claim in a second transaction. It has no retries,
//! no dead letters, no deduplication beyond the unique id, and it loses events that commit out of order; it is
//! what a team writes first.

use std::time::{Duration, Instant};

use everbus_testkit::servers::Postgres;
use tokio::task::JoinSet;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, NoTls};
use uuid::Uuid;

use crate::{BATCH, FETCH, Outcome, PUBLISHERS, Plan, Round, ours};

/// Connections that claim at the same time.
const CONSUMERS: usize = 2;

const TABLES: &str = "\
CREATE TABLE raw_log (
  seq bigserial PRIMARY KEY, id uuid NOT NULL UNIQUE, type text NOT NULL, payload bytea NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE raw_group (name text PRIMARY KEY, cursor bigint NOT NULL);
CREATE TABLE raw_claims (id bigserial PRIMARY KEY, lo bigint NOT NULL, hi bigint NOT NULL, until timestamptz NOT NULL);
INSERT INTO raw_group VALUES ('bench', 0);";

pub(crate) fn server() -> Outcome<&'static Postgres> {
    static SERVER: std::sync::OnceLock<Option<Postgres>> = std::sync::OnceLock::new();
    let server = SERVER.get_or_init(Postgres::start).as_ref();
    server.ok_or_else(|| "PostgreSQL is not installed".into())
}

pub(crate) async fn ours(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    ours::round(plan, payload, true, || server.fresh_database()).await
}

pub(crate) async fn raw(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    let url = server.fresh_database();
    connect(&url).await?.batch_execute(TABLES).await?;
    let publish = publish(&url, plan.events, payload).await?;
    let consume = consume(&url, plan.events).await?;
    let url = server.fresh_database();
    connect(&url).await?.batch_execute(TABLES).await?;
    let began = Instant::now();
    let (published, consumed) = tokio::join!(
        self::publish(&url, plan.events, payload),
        self::consume(&url, plan.events)
    );
    let (_, _) = (published?, consumed?);
    let end_to_end = began.elapsed();
    Ok(Round {
        publish,
        consume,
        end_to_end,
        latencies: latencies(&url, plan.samples, payload).await?,
    })
}

async fn connect(url: &str) -> Outcome<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

const INSERT: &str = "INSERT INTO raw_log (id, type, payload) \
     SELECT * FROM unnest($1::uuid[], $2::text[], $3::bytea[])";

async fn publish(url: &str, events: usize, payload: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..PUBLISHERS {
        let url = url.to_owned();
        tasks.spawn(async move {
            let client = connect(&url).await?;
            let insert = client.prepare(INSERT).await?;
            for _ in 0..events / PUBLISHERS / BATCH {
                let ids: Vec<Uuid> = (0..BATCH).map(|_| Uuid::now_v7()).collect();
                let types = vec!["bench.event.stored"; BATCH];
                let payloads = vec![vec![b'x'; payload]; BATCH];
                client.execute(&insert, &[&ids, &types, &payloads]).await?;
            }
            Outcome::Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(began.elapsed())
}

/// Consumes until the group has passed this many events.
async fn consume(url: &str, events: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..CONSUMERS {
        let url = url.to_owned();
        tasks.spawn(async move {
            let mut client = connect(&url).await?;
            while claim(&mut client, events).await? {}
            Outcome::Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(began.elapsed())
}

/// One claim and its settlement; `false` once everything was claimed.
async fn claim(client: &mut Client, events: usize) -> Outcome<bool> {
    let transaction = client.transaction().await?;
    let cursor: i64 = transaction
        .query_one(
            "SELECT cursor FROM raw_group WHERE name = 'bench' FOR UPDATE",
            &[],
        )
        .await?
        .get(0);
    if cursor >= i64::try_from(events)? {
        return Ok(false);
    }
    let limit = i64::try_from(FETCH)?;
    let rows = transaction
        .query(
            "SELECT seq, id, type, payload FROM raw_log WHERE seq > $1 ORDER BY seq LIMIT $2",
            &[&cursor, &limit],
        )
        .await?;
    let Some(hi) = rows.last().map(|row| row.get::<_, i64>(0)) else {
        transaction.rollback().await?;
        tokio::time::sleep(Duration::from_millis(1)).await;
        return Ok(true);
    };
    transaction
        .execute(
            "UPDATE raw_group SET cursor = $1 WHERE name = 'bench'",
            &[&hi],
        )
        .await?;
    let claim: i64 = transaction
        .query_one(
            "INSERT INTO raw_claims (lo, hi, until) VALUES ($1, $2, now() + interval '40 s') RETURNING id",
            &[&cursor, &hi],
        )
        .await?
        .get(0);
    transaction.commit().await?;
    let bytes: usize = rows.iter().map(|row| row.get::<_, &[u8]>(3).len()).sum();
    if bytes == 0 {
        return Err("the payloads are gone".into());
    }
    client
        .execute("DELETE FROM raw_claims WHERE id = $1", &[&claim])
        .await?;
    Ok(true)
}

/// From the insert to its arrival at a consumer that listens.
async fn latencies(url: &str, samples: usize, payload: usize) -> Outcome<Vec<Duration>> {
    let publisher = connect(url).await?;
    let reader = connect(url).await?;
    let (listener, mut connection) = tokio_postgres::connect(url, NoTls).await?;
    let (heard, mut hints) = tokio::sync::mpsc::unbounded_channel::<()>();
    tokio::spawn(async move {
        loop {
            match std::future::poll_fn(|context| connection.poll_message(context)).await {
                Some(Ok(AsyncMessage::Notification(_))) => drop(heard.send(())),
                Some(Ok(_)) => {}
                _ => return,
            }
        }
    });
    listener.batch_execute("LISTEN raw").await?;
    let insert = publisher
        .prepare_typed(
            "WITH stored AS (INSERT INTO raw_log (id, type, payload) VALUES ($1, $2, $3) RETURNING seq) \
             SELECT seq, pg_notify('raw', '') FROM stored",
            &[Type::UUID, Type::TEXT, Type::BYTEA],
        )
        .await?;
    let read = reader
        .prepare("SELECT seq, payload FROM raw_log WHERE seq > $1 ORDER BY seq LIMIT 1")
        .await?;
    let mut took = Vec::with_capacity(samples);
    for sample in 0..samples + samples / 10 {
        let began = Instant::now();
        let body = vec![b'x'; payload];
        let row = publisher
            .query_one(&insert, &[&Uuid::now_v7(), &"bench.event.stored", &body])
            .await?;
        let seq: i64 = row.get(0);
        hints.recv().await.ok_or("the connection is gone")?;
        let row = reader.query_one(&read, &[&(seq - 1)]).await?;
        assert_eq!(row.get::<_, i64>(0), seq);
        if sample >= samples / 10 {
            took.push(began.elapsed());
        }
    }
    Ok(took)
}
