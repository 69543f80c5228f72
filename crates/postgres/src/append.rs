//! Appending events to the log.
//!
//! Calls that wait at the same time share a transaction: one commit makes all of them durable. A call that
//! must be refused is found out before anything is written.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use everbus_core::{
    Appended, Class, Code, Error, Event, EventId, Position, Recorded, Result, Timestamp,
};
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::Postgres;
use crate::pool::{Sql, transaction};
use crate::rows::{AFTER_RECORD, NewRow, RECORD, Stored, get, get_seq};

/// At most this many events and bytes share a transaction.
const MOST_EVENTS: usize = 2000;
const MOST_BYTES: usize = 4 << 20;
/// Transactions that run at the same time: while one waits for the disk, the next is computed.
const WRITERS: usize = 3;

type Answers = Result<Vec<Result<Appended>>>;

/// A waiting call.
pub(crate) struct Job {
    events: Vec<Event>,
    reply: oneshot::Sender<Answers>,
}

/// The queue of waiting calls.
pub(crate) type Queue = mpsc::UnboundedSender<Job>;

impl Postgres {
    /// Appends a batch as a whole or not at all.
    pub(crate) async fn append_batch(&self, events: Vec<Event>) -> Answers {
        self.check_open()?;
        if events.is_empty() {
            return Ok(Vec::new());
        }
        // Before it is queued: a statement is shared with the events of others.
        events.iter().try_for_each(check_texts)?;
        let (reply, answer) = oneshot::channel();
        let sent = self.appends.send(Job { events, reply });
        sent.map_err(|_| Error::shutdown())?;
        answer.await.map_err(|_| Error::shutdown())?
    }
}

/// Serves the waiting calls until the engine is gone.
pub(crate) async fn serve(engine: Weak<Postgres>, mut queue: mpsc::UnboundedReceiver<Job>) {
    let writers = Arc::new(Semaphore::new(WRITERS));
    loop {
        let Ok(writer) = writers.clone().acquire_owned().await else {
            return;
        };
        let Some(first) = queue.recv().await else {
            return;
        };
        let Some(engine) = engine.upgrade() else {
            return;
        };
        let size = |job: &Job| job.events.iter().map(|e| e.payload().len()).sum::<usize>();
        let (mut events, mut bytes) = (first.events.len(), size(&first));
        let mut jobs = vec![first];
        while events < MOST_EVENTS && bytes < MOST_BYTES {
            let Ok(next) = queue.try_recv() else { break };
            events += next.events.len();
            bytes += size(&next);
            jobs.push(next);
        }
        tokio::spawn(async move {
            engine.append_jobs(jobs).await;
            drop(writer);
        });
    }
}

impl Postgres {
    async fn append_jobs(&self, jobs: Vec<Job>) {
        if let Some(jobs) = self.append_shared(jobs).await {
            // One of them cannot be stored. The others must not suffer from it.
            for job in jobs {
                self.append_shared(vec![job]).await;
            }
        }
        self.bell.ring();
    }

    /// Appends and answers. Calls that failed because of one of them come back without an answer.
    async fn append_shared(&self, jobs: Vec<Job>) -> Option<Vec<Job>> {
        let (events, replies): (Vec<_>, Vec<_>) =
            jobs.into_iter().map(|job| (job.events, job.reply)).unzip();
        let batches: Vec<&[Event]> = events.iter().map(Vec::as_slice).collect();
        let appended = match self.append_new(&batches).await {
            Ok(None) => self.append_sets(&batches).await,
            Ok(Some(all)) => Ok(all.into_iter().map(Ok).collect()),
            Err(error) => Err(error),
        };
        match appended {
            Ok(all) => {
                for (answers, reply) in all.into_iter().zip(replies) {
                    let _ = reply.send(answers.map(|a| a.into_iter().map(Ok).collect()));
                }
            }
            Err(error) if replies.len() > 1 && is_of_one(&error) => {
                let jobs = events.into_iter().zip(replies);
                return Some(jobs.map(|(events, reply)| Job { events, reply }).collect());
            }
            Err(error) => {
                for reply in replies {
                    let _ = reply.send(Err(error.clone()));
                }
            }
        }
        None
    }

    /// Appends events whose ids are all new, with a single statement that is its own transaction: that is the
    /// usual case. `None`: nothing was done, since an id is taken, or an event needs more than its row.
    async fn append_new(&self, batches: &[&[Event]]) -> Result<Option<Vec<Vec<Appended>>>> {
        let events: Vec<&Event> = batches.iter().flat_map(|batch| batch.iter()).collect();
        let mut ids = std::collections::HashSet::with_capacity(events.len());
        for event in &events {
            if event.overflow().is_some() || !ids.insert(key_of(event)) {
                return Ok(None);
            }
        }
        let conn = self.pool.get().await?;
        let names = events.iter().map(|e| e.type_arc());
        let types = self.types.intern(&*conn, names, true).await?;
        let times = vec![self.micros(); events.len()];
        let inserted = match insert_as(&*conn, &events, &types, &times, ALL_NEW).await {
            Ok(inserted) => inserted,
            // Another transaction stored one of the ids at the same moment.
            Err(error) if error.code() == Code::Busy => return Ok(None),
            // Without an answer it is unknown whether it was committed.
            Err(error) if error.code() == Code::Unavailable => {
                return Err(error.with_unknown_outcome());
            }
            Err(error) => return Err(error),
        };
        if inserted.len() < events.len() {
            return Ok(None);
        }
        let mut appended = inserted.into_iter().map(|(_, appended)| appended);
        let lengths = batches.iter().map(|batch| batch.len());
        Ok(Some(
            lengths
                .map(|n| appended.by_ref().take(n).collect())
                .collect(),
        ))
    }

    /// Appends batches in one transaction, each as a whole or not at all.
    async fn append_sets(&self, batches: &[&[Event]]) -> Result<Vec<Result<Vec<Appended>>>> {
        {
            // Outside of the transaction, so that new types are known for good.
            let conn = self.pool.get().await?;
            let names = batches.iter().flat_map(|batch| batch.iter());
            let names: Vec<Arc<str>> = names.map(|e| e.type_arc().clone()).collect();
            self.types.intern(&*conn, &names, true).await?;
        }
        transaction!(self.pool, "publishing", |tx| {
            // Refused before anything is written, so that they leave no gap in the numbers.
            let free = check_sets(self, tx, batches).await?;
            let taken = batches.iter().zip(&free).filter(|(_, free)| free.is_ok());
            let taken: Vec<&Event> = taken.flat_map(|(batch, _)| batch.iter()).collect();
            let mut appended = append_in(self, tx, &taken)
                .await
                .map_err(conflict)?
                .into_iter();
            let answers = batches
                .iter()
                .zip(free)
                .map(|(batch, free)| free.map(|()| appended.by_ref().take(batch.len()).collect()));
            Ok(answers.collect())
        })
    }
}

/// Whether a request of a shared transaction caused its failure, so that the others may succeed without it.
/// Nothing was done.
pub(crate) fn is_of_one(error: &Error) -> bool {
    matches!(error.class(), Class::Caller | Class::Conflict)
}

/// The texts of an event that have a column of their own.
fn texts(event: &Event) -> [Option<&str>; 5] {
    let attributes = event.attributes();
    let entity = attributes.and_then(|a| a.entity.as_ref());
    [
        event.tenant(),
        attributes.and_then(|a| a.app.as_deref()),
        entity.map(|e| e.kind.as_str()),
        entity.map(|e| e.id.as_str()),
        attributes.and_then(|a| a.address.as_deref()),
    ]
}

/// Refuses an event that no table can hold.
pub(crate) fn check_texts(event: &Event) -> Result<()> {
    if texts(event)
        .iter()
        .flatten()
        .any(|text| text.contains('\0'))
    {
        return Err(Error::new(
            Code::InvalidAttribute,
            "tenant, app, entity and address cannot contain a zero character on PostgreSQL",
        )
        .hint("leave the character out"));
    }
    Ok(())
}

/// An id that was free a moment ago: another publisher stored it meanwhile, so look again.
pub(crate) fn conflict(error: Error) -> Error {
    match error.code() {
        Code::IdReused => Error::new(Code::Busy, error.message()),
        _ => error,
    }
}

/// The identity of an event: ids are unique per tenant.
type Key<'a> = (EventId, &'a str);

fn key_of(event: &Event) -> Key<'_> {
    (event.id(), event.tenant().unwrap_or_default())
}

/// Appends events inside a transaction; one answer each, in order. An id that exists with another body is
/// [`Code::IdReused`], and then the transaction must not be committed.
pub(crate) async fn append_in(
    engine: &Postgres,
    db: &impl Sql,
    events: &[&Event],
) -> Result<Vec<Appended>> {
    append_received(engine, db, events, engine.now()).await
}

/// As [`append_in`], with the time of receipt.
pub(crate) async fn append_received(
    engine: &Postgres,
    db: &impl Sql,
    events: &[&Event],
    received_at: Timestamp,
) -> Result<Vec<Appended>> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let names = events.iter().map(|e| e.type_arc());
    let types = engine.types.intern(db, names, false).await?;
    let times = vec![received_at.as_micros(); events.len()];
    let inserted = insert(db, events, &types, &times).await?;
    let born: Vec<(u64, &Event)> = inserted
        .iter()
        .map(|(event, a)| (a.position.place(), *event))
        .collect();
    crate::orphans::born(db, &born).await?;
    answer(engine, db, events, &inserted)
        .await?
        .into_iter()
        .collect()
}

/// One answer per event, after those whose ids were free were inserted.
async fn answer(
    engine: &Postgres,
    db: &impl Sql,
    events: &[&Event],
    inserted: &[(&Event, Appended)],
) -> Result<Vec<Result<Appended>>> {
    let new: HashMap<Key<'_>, Appended> = inserted
        .iter()
        .map(|(event, appended)| (key_of(event), *appended))
        .collect();
    let mut known: HashMap<Key<'_>, Option<Arc<Recorded>>> = HashMap::new();
    let stored;
    let missing = events.iter().filter(|e| !new.contains_key(&key_of(e)));
    let missing: Vec<&Event> = missing.copied().collect();
    if !missing.is_empty() {
        stored = with_ids(engine, db, &missing).await?;
        for (tenant, found) in &stored {
            // A damaged event cannot be compared. It counts as another event.
            let intact = found.damage.is_none().then(|| found.record.clone());
            known.insert((found.record.event.id(), tenant), intact);
        }
    }
    let mut answers = Vec::with_capacity(events.len());
    let mut seen: HashMap<Key<'_>, &Event> = HashMap::new();
    for event in events {
        let key = key_of(event);
        let answer = match (new.get(&key), seen.get(&key), known.get(&key)) {
            (Some(appended), None, _) => Ok(*appended),
            // Twice in the batch.
            (Some(appended), Some(first), _) if first.same_body(event) => {
                Ok(appended.as_duplicate())
            }
            (None, _, Some(Some(first))) if first.event.same_body(event) => {
                Ok(Appended::new(event.id(), first.position, first.received_at).as_duplicate())
            }
            // It was there a moment ago, and was removed since.
            (None, _, None) => {
                return Err(Error::new(
                    Code::Busy,
                    "an event with this id was removed meanwhile",
                ));
            }
            _ => Err(reused(event)),
        };
        seen.entry(key).or_insert(event);
        answers.push(answer);
    }
    Ok(answers)
}

/// The error of an id that exists with another body.
pub(crate) fn reused(event: &Event) -> Error {
    Error::new(
        Code::IdReused,
        format!(
            "event {} was published before with another body",
            event.display_id()
        ),
    )
    .hint("use a new id for a new event; repeat a publish with the same content")
}

/// The stored events with the ids of these events, each with its tenant.
async fn with_ids(
    engine: &Postgres,
    db: &impl Sql,
    events: &[&Event],
) -> Result<Vec<(String, Stored)>> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<uuid::Uuid> = events.iter().map(|event| event.id().as_uuid()).collect();
    let tenants: Vec<&str> = events.iter().map(|event| key_of(event).1).collect();
    // Both columns of the unique index, so that the server knows without statistics how little it finds.
    let sql = format!(
        "SELECT {RECORD}, log.tenant FROM unnest($1::uuid[], $2::text[]) AS x (id, tenant)
         JOIN everbus.log log ON log.id = x.id AND log.tenant = x.tenant"
    );
    let doing = "looking for an earlier publish";
    let rows = db.query(doing, &sql, &[&ids, &tenants]).await?;
    let stored = engine.types.read(db, &rows).await?;
    let tenants = rows.iter().map(|row| get(row, AFTER_RECORD));
    let found = tenants
        .zip(stored)
        .map(|(tenant, stored)| Ok((tenant?, stored)));
    found.collect()
}

/// Inserts events only if all their ids are free. One that is taken at the same moment fails the statement.
const ALL_NEW: &str =
    "WHERE NOT EXISTS (SELECT 1 FROM unnest($7::uuid[], $8::text[]) AS y (id, tenant)
                 JOIN everbus.log k ON k.id = y.id AND k.tenant = y.tenant)
               ORDER BY x.place";
/// Inserts events whose ids are free. An id that is taken is left out before it takes a number; only one that
/// is taken at the same moment leaves a gap.
const THE_NEW: &str =
    "WHERE NOT EXISTS (SELECT 1 FROM everbus.log k WHERE k.id = x.id AND k.tenant = x.tenant)
               ORDER BY x.place ON CONFLICT (id, hashtextextended(tenant, 0)) DO NOTHING";

/// Inserts events whose ids are free, each with its time of receipt, and returns those.
pub(crate) async fn insert<'e>(
    db: &impl Sql,
    events: &[&'e Event],
    types: &HashMap<Arc<str>, i32>,
    received_at: &[i64],
) -> Result<Vec<(&'e Event, Appended)>> {
    insert_as(db, events, types, received_at, THE_NEW).await
}

async fn insert_as<'e>(
    db: &impl Sql,
    events: &[&'e Event],
    types: &HashMap<Arc<str>, i32>,
    received_at: &[i64],
    which: &str,
) -> Result<Vec<(&'e Event, Appended)>> {
    let mut columns = Columns::with_capacity(events.len());
    let mut times = Vec::with_capacity(events.len());
    let mut ids = std::collections::HashSet::with_capacity(events.len());
    for (event, at) in events.iter().zip(received_at) {
        // A repetition in the batch would take a number and leave a gap.
        if ids.insert(key_of(event)) {
            columns.push(event, types)?;
            times.push(*at);
        }
    }
    // The last time of receipt is never undercut, whatever the clock does.
    let sql = format!(
        "INSERT INTO everbus.log (received_at, occurred_at, expires_at, type, version, checksum, id,
                 tenant, app, entity_type, entity_id, address, attrs, payload)
               SELECT greatest(x.received_at, (SELECT l.received_at FROM everbus.log l ORDER BY l.seq DESC LIMIT 1)),
                 x.occurred_at, x.expires_at, x.type, x.version, x.checksum, x.id, x.tenant, x.app,
                 x.entity_type, x.entity_id, x.address, x.attrs, x.payload
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::integer[], $5::bigint[], $6::integer[],
                 $7::uuid[], $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[],
                 $14::bytea[]) WITH ORDINALITY AS x (received_at, occurred_at, expires_at, type, version, checksum, id,
                 tenant, app, entity_type, entity_id, address, attrs, payload, place)
               {which} RETURNING seq, received_at, id, tenant"
    );
    let c = &columns;
    let rows = db
        .query(
            "publishing",
            &sql,
            &[
                &times,
                &c.occurred_at,
                &c.expires_at,
                &c.types,
                &c.versions,
                &c.checksums,
                &c.ids,
                &c.tenants,
                &c.apps,
                &c.entity_types,
                &c.entity_ids,
                &c.addresses,
                &c.attrs,
                &c.payloads,
            ],
        )
        .await?;
    // Rows come in the order of the batch, with gaps where an id was taken.
    let mut rest = events.iter();
    let mut inserted = Vec::with_capacity(rows.len());
    for row in &rows {
        let (id, tenant): (uuid::Uuid, &str) = (get(row, 2)?, get(row, 3)?);
        let key = (EventId::from(id), tenant);
        let event = rest.find(|event| key_of(event) == key);
        let Some(event) = event else {
            return Err(Error::new(
                Code::Internal,
                "an event was stored that no caller sent",
            ));
        };
        let position = Position::seq(get_seq(row, 0)?);
        let received_at = Timestamp::from_micros(get(row, 1)?);
        inserted.push((*event, Appended::new(event.id(), position, received_at)));
    }
    Ok(inserted)
}

/// New rows of the log, column by column.
struct Columns<'a> {
    occurred_at: Vec<i64>,
    expires_at: Vec<Option<i64>>,
    types: Vec<i32>,
    versions: Vec<i64>,
    checksums: Vec<i32>,
    ids: Vec<uuid::Uuid>,
    tenants: Vec<&'a str>,
    apps: Vec<Option<&'a str>>,
    entity_types: Vec<Option<&'a str>>,
    entity_ids: Vec<Option<&'a str>>,
    addresses: Vec<Option<&'a str>>,
    attrs: Vec<Option<String>>,
    payloads: Vec<&'a [u8]>,
}

impl<'a> Columns<'a> {
    fn with_capacity(n: usize) -> Self {
        Self {
            occurred_at: Vec::with_capacity(n),
            expires_at: Vec::with_capacity(n),
            types: Vec::with_capacity(n),
            versions: Vec::with_capacity(n),
            checksums: Vec::with_capacity(n),
            ids: Vec::with_capacity(n),
            tenants: Vec::with_capacity(n),
            apps: Vec::with_capacity(n),
            entity_types: Vec::with_capacity(n),
            entity_ids: Vec::with_capacity(n),
            addresses: Vec::with_capacity(n),
            attrs: Vec::with_capacity(n),
            payloads: Vec::with_capacity(n),
        }
    }

    fn push(&mut self, event: &'a Event, types: &HashMap<Arc<str>, i32>) -> Result<()> {
        let row = NewRow::of(event)?;
        let attributes = event.attributes();
        check_texts(event)?;
        let [tenant, app, entity_type, entity_id, address] = texts(event);
        let type_id = types
            .get(event.type_arc())
            .copied()
            .ok_or_else(|| Error::new(Code::Internal, "an event type has no number"))?;
        self.occurred_at.push(event.occurred_at().as_micros());
        let expires = attributes.and_then(|a| a.expires_at);
        self.expires_at.push(expires.map(Timestamp::as_micros));
        self.types.push(type_id);
        self.versions.push(i64::from(event.version()));
        self.checksums.push(row.checksum);
        self.ids.push(event.id().as_uuid());
        self.tenants.push(tenant.unwrap_or_default());
        self.apps.push(app);
        self.entity_types.push(entity_type);
        self.entity_ids.push(entity_id);
        self.addresses.push(address);
        self.attrs.push(row.attrs);
        self.payloads.push(event.payload());
        Ok(())
    }
}

/// Checks which of several sets of events could be appended: one answer per set.
///
/// Follow-ups of settlements are checked before anything is written, so that one refused settlement leaves
/// the others alone.
pub(crate) async fn check_sets(
    engine: &Postgres,
    db: &impl Sql,
    sets: &[&[Event]],
) -> Result<Vec<Result<()>>> {
    let events: Vec<&Event> = sets.iter().flat_map(|set| set.iter()).collect();
    let stored = with_ids(engine, db, &events).await?;
    let mut known: HashMap<Key<'_>, Option<&Event>> = HashMap::new();
    for (tenant, found) in &stored {
        let event = &found.record.event;
        let intact = Some(event).filter(|_| found.damage.is_none());
        known.insert((event.id(), tenant), intact);
    }
    let mut answers = Vec::with_capacity(sets.len());
    for set in sets {
        let mut own: HashMap<Key<'_>, &Event> = HashMap::new();
        let clash = set.iter().find(|event| {
            let key = key_of(event);
            let first = own.get(&key).copied();
            own.entry(key).or_insert(event);
            match (known.get(&key), first) {
                (Some(stored), _) => stored.is_none_or(|stored| !stored.same_body(event)),
                (None, Some(first)) => !first.same_body(event),
                (None, None) => false,
            }
        });
        answers.push(match clash {
            Some(event) => Err(reused(event)),
            None => {
                // Later sets see these as stored.
                for (key, event) in own {
                    known.entry(key).or_insert(Some(event));
                }
                Ok(())
            }
        });
    }
    Ok(answers)
}
