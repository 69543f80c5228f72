//! PostgreSQL: Everbus beside tables written by hand.
//!
//! The raw loop inserts with `INSERT … SELECT unnest` and claims by a range, each in one prepared statement: it locks
//! the row of the group, takes the next events and notes the claim; then it removes the claim. As in Everbus the commit
//! of a claim does not wait for the disk, and that of a publish and of an ack does. It has no retries, no dead letters,
//! no deduplication beyond the unique id, and it loses events that commit out of order. As in Everbus the server does
//! not compress payloads: in this benchmark they repeat one letter, and compressed they would be almost empty.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use everbus_testkit::servers::Postgres;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, NoTls, Statement};
use uuid::Uuid;

use crate::{BATCH, FETCH, Outcome, PUBLISHERS, Plan, Round, ours};

/// Connections that claim at the same time.
const CONSUMERS: usize = 2;

const TABLES: &str = "\
CREATE TABLE raw_log (
  seq bigserial PRIMARY KEY, id uuid NOT NULL UNIQUE, type text NOT NULL, payload bytea NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now());
ALTER TABLE raw_log ALTER COLUMN payload SET STORAGE EXTERNAL;
CREATE TABLE raw_group (name text PRIMARY KEY, cursor bigint NOT NULL);
CREATE TABLE raw_claims (id bigserial PRIMARY KEY, lo bigint NOT NULL, hi bigint NOT NULL, until timestamptz NOT NULL);
INSERT INTO raw_group VALUES ('bench', 0);";

const INSERT: &str = "INSERT INTO raw_log (id, type, payload) \
     SELECT * FROM unnest($1::uuid[], $2::text[], $3::bytea[])";

const NOTIFY: &str = "\
WITH stored AS (INSERT INTO raw_log (id, type, payload) VALUES ($1, $2, $3) RETURNING seq)
SELECT seq, pg_notify('raw', '') FROM stored";

const CLAIM: &str = "\
WITH held AS MATERIALIZED (
  SELECT cursor, set_config('synchronous_commit', 'off', true) FROM raw_group WHERE name = 'bench' FOR UPDATE),
found AS MATERIALIZED (
  SELECT seq, id, type, payload FROM raw_log WHERE seq > (SELECT cursor FROM held) ORDER BY seq LIMIT $1),
claimed AS (
  INSERT INTO raw_claims (lo, hi, until)
  SELECT min(seq), max(seq), now() + interval '40 s' FROM found HAVING count(*) > 0 RETURNING id, hi),
moved AS (UPDATE raw_group SET cursor = claimed.hi FROM claimed WHERE name = 'bench')
SELECT claimed.id, found.seq, found.id, found.type, found.payload FROM claimed, found ORDER BY found.seq";

const SETTLE: &str = "DELETE FROM raw_claims WHERE id = $1";

pub(crate) fn server() -> Outcome<&'static Postgres> {
    static SERVER: std::sync::OnceLock<Option<Postgres>> = std::sync::OnceLock::new();
    let server = SERVER.get_or_init(Postgres::start).as_ref();
    server.ok_or_else(|| "PostgreSQL is not installed".into())
}

pub(crate) async fn ours(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    let round = ours::round(plan, payload, true, 0, || fresh(server)).await;
    clean(server);
    round
}

/// An empty database, right after a checkpoint: the writes of earlier rounds are on disk.
fn fresh(server: &Postgres) -> String {
    let url = server.fresh_database();
    server.sql("CHECKPOINT");
    url
}

/// Removes the databases of a round, so that autovacuum does not work in them while others are measured.
fn clean(server: &Postgres) {
    let names = server.sql("SELECT datname FROM pg_database WHERE datname LIKE 'test%'");
    for name in names.lines() {
        server.drop_database(name);
    }
}

pub(crate) async fn raw(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    let url = fresh(server);
    connect(&url).await?.batch_execute(TABLES).await?;
    let publish = publish(&publishers(&url).await?, plan.events, payload).await?;
    let consume = consume(&url, plan.events).await?;
    let url = fresh(server);
    connect(&url).await?.batch_execute(TABLES).await?;
    let publishers = publishers(&url).await?;
    let began = Instant::now();
    let (published, consumed) = tokio::join!(
        self::publish(&publishers, plan.events, payload),
        self::consume(&url, plan.events)
    );
    let (_, _) = (published?, consumed?);
    let end_to_end = began.elapsed();
    drop(publishers);
    // As for Everbus: an empty database, right after a checkpoint.
    let url = fresh(server);
    connect(&url).await?.batch_execute(TABLES).await?;
    let latencies = latencies(&url, plan.samples, payload).await?;
    clean(server);
    Ok(Round {
        publish,
        consume,
        end_to_end,
        latencies,
    })
}

async fn connect(url: &str) -> Outcome<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

type Publisher = (Arc<Client>, Statement);

/// Opens the connections that publish before the time is taken: Everbus has its connections by then too.
async fn publishers(url: &str) -> Outcome<Vec<Publisher>> {
    let mut publishers = Vec::new();
    for _ in 0..PUBLISHERS {
        let client = connect(url).await?;
        let insert = client.prepare(INSERT).await?;
        publishers.push((Arc::new(client), insert));
    }
    Ok(publishers)
}

async fn publish(publishers: &[Publisher], events: usize, payload: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for (client, insert) in publishers {
        let (client, insert) = (client.clone(), insert.clone());
        tasks.spawn(async move {
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

/// A connection that claims and settles.
struct Claimer {
    client: Client,
    claim: Statement,
    settle: Statement,
}

impl Claimer {
    async fn open(url: &str) -> Outcome<Self> {
        let client = connect(url).await?;
        Ok(Self {
            claim: client.prepare(CLAIM).await?,
            settle: client.prepare(SETTLE).await?,
            client,
        })
    }

    /// Claims events. Returns the id of the claim and the number of the last event; `None` if there are no events.
    async fn claim(&self, most: usize) -> Outcome<Option<(i64, i64)>> {
        let most = i64::try_from(most)?;
        let rows = self.client.query(&self.claim, &[&most]).await?;
        let Some(last) = rows.last() else {
            return Ok(None);
        };
        if rows.iter().any(|row| row.get::<_, &[u8]>(4).is_empty()) {
            return Err("a payload is gone".into());
        }
        Ok(Some((last.get(0), last.get(1))))
    }

    async fn settle(&self, claim: i64) -> Outcome<()> {
        match self.client.execute(&self.settle, &[&claim]).await? {
            1 => Ok(()),
            _ => Err("a claim is gone".into()),
        }
    }
}

/// Consumes until the group has passed this many events.
async fn consume(url: &str, events: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let last = Arc::new(AtomicI64::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..CONSUMERS {
        let (url, last) = (url.to_owned(), last.clone());
        tasks.spawn(async move {
            let claimer = Claimer::open(&url).await?;
            while last.load(Ordering::Relaxed) < i64::try_from(events)? {
                match claimer.claim(FETCH).await? {
                    Some((claim, seq)) => {
                        last.fetch_max(seq, Ordering::Relaxed);
                        claimer.settle(claim).await?;
                    }
                    None => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            }
            Outcome::Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(began.elapsed())
}

/// From the insert to its claim by a consumer that listens.
async fn latencies(url: &str, samples: usize, payload: usize) -> Outcome<Vec<Duration>> {
    let publisher = connect(url).await?;
    let claimer = Claimer::open(url).await?;
    let (listener, mut connection) = tokio_postgres::connect(url, NoTls).await?;
    let (heard, mut hints) = mpsc::unbounded_channel::<()>();
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
    let (arrived, mut arrivals) = mpsc::unbounded_channel::<Instant>();
    let mut consumer = JoinSet::new();
    consumer.spawn(async move {
        while hints.recv().await.is_some() {
            while let Some((claim, _)) = claimer.claim(FETCH).await? {
                arrived.send(Instant::now())?;
                claimer.settle(claim).await?;
            }
        }
        Outcome::Ok(())
    });
    let types = [Type::UUID, Type::TEXT, Type::BYTEA];
    let insert = publisher.prepare_typed(NOTIFY, &types).await?;
    let mut took = Vec::with_capacity(samples);
    for sample in 0..samples + samples / 10 {
        let body = vec![b'x'; payload];
        let began = Instant::now();
        publisher
            .query_one(&insert, &[&Uuid::now_v7(), &"bench.event.stored", &body])
            .await?;
        let arrival = arrivals.recv().await.ok_or("the consumer is gone")?;
        if sample >= samples / 10 {
            took.push(arrival.saturating_duration_since(began));
        }
    }
    Ok(took)
}
