//! Appending events to the log.
//!
//! Calls that wait at the same time share a transaction: one commit makes all of them durable. A call that
//! must be refused does not affect the others.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use everbus_core::{Appended, Class, Code, Error, Event, EventId, Recorded, Result, Timestamp};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::Postgres;
use crate::insert::{Ids, insert, insert_new};
use crate::pool::{Role, Sql, transaction};
use crate::rows::{AFTER_RECORD, RECORD, Stored, get};

/// At most this many events share a transaction, and calls of about this many bytes: the server writes an array of more
/// than 2 MB of payloads to a temporary file.
const MOST_EVENTS: usize = 2000;
const MOST_BYTES: usize = 1 << 20;
/// Transactions that run at the same time: while one waits for the disk, the next is computed. They share what waits in
/// equal parts, because a transaction costs the server as much as about a hundred events.
const WRITERS: usize = 2;
/// So many more run at the same time if as much waits as a transaction may have.
const FURTHER: usize = 2;
/// After an id was published again, ids are looked up before each insert for this long.
const LATELY: Duration = Duration::from_secs(60);

type Answers = Result<Vec<Result<Appended>>>;

/// A waiting call.
pub(crate) struct Job {
    events: Vec<Event>,
    reply: oneshot::Sender<Answers>,
}

impl Job {
    /// Its events, and the bytes of their payloads.
    fn size(&self) -> (usize, usize) {
        let bytes = self.events.iter().map(|event| event.payload().len());
        (self.events.len(), bytes.sum())
    }
}

/// When an id was last published again.
#[derive(Default)]
pub(crate) struct Repeats(Mutex<Option<Instant>>);

impl Repeats {
    fn saw_one(&self) {
        *self.0.lock() = Some(Instant::now());
    }

    fn were_lately(&self) -> bool {
        self.0.lock().is_some_and(|at| at.elapsed() < LATELY)
    }
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
        // Checked before the call is queued: one statement inserts the events of several calls.
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
    let further = Arc::new(Semaphore::new(FURTHER));
    // Events of the transactions that run.
    let running = Arc::new(AtomicUsize::new(0));
    let mut waiting = Waiting::default();
    loop {
        if waiting.jobs.is_empty() {
            let Some(job) = queue.recv().await else {
                return;
            };
            waiting.add(job);
        }
        let writer = loop {
            waiting.fill(&mut queue);
            tokio::select! {
                biased;
                writer = writers.clone().acquire_owned() => break writer,
                writer = further.clone().acquire_owned(), if waiting.is_full() => break writer,
                Some(job) = queue.recv() => waiting.add(job),
            }
        };
        // Tasks that were answered together publish again together. Those that are ready to run come first, unless
        // nothing else is under way.
        while running.load(Ordering::Relaxed) > 0 && !waiting.is_full() {
            let before = waiting.jobs.len();
            tokio::task::yield_now().await;
            waiting.fill(&mut queue);
            if waiting.jobs.len() == before {
                break;
            }
        }
        let Some(engine) = engine.upgrade() else {
            return;
        };
        let share = (running.load(Ordering::Relaxed) + waiting.events).div_ceil(WRITERS);
        let (jobs, events) = waiting.take(share);
        let running = Running::begin(&running, events);
        tokio::spawn(async move {
            engine.append_jobs(jobs).await;
            drop((running, writer));
        });
    }
}

/// The events of a transaction that runs; they are subtracted when it is dropped.
struct Running {
    all: Arc<AtomicUsize>,
    events: usize,
}

impl Running {
    fn begin(all: &Arc<AtomicUsize>, events: usize) -> Self {
        all.fetch_add(events, Ordering::Relaxed);
        Self {
            all: all.clone(),
            events,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.all.fetch_sub(self.events, Ordering::Relaxed);
    }
}

/// The calls that no transaction has taken yet.
#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    events: usize,
    bytes: usize,
}

impl Waiting {
    fn add(&mut self, job: Job) {
        let (events, bytes) = job.size();
        self.events += events;
        self.bytes += bytes;
        self.jobs.push_back(job);
    }

    fn fill(&mut self, queue: &mut mpsc::UnboundedReceiver<Job>) {
        while let Ok(job) = queue.try_recv() {
            self.add(job);
        }
    }

    /// Whether a transaction could not take more.
    fn is_full(&self) -> bool {
        self.events >= MOST_EVENTS || self.bytes >= MOST_BYTES
    }

    /// Takes the calls of one transaction, with about `share` events, and says how many these are.
    fn take(&mut self, share: usize) -> (Vec<Job>, usize) {
        let mut jobs = Vec::new();
        let (mut events, mut bytes) = (0, 0);
        while jobs.is_empty() || events < share.min(MOST_EVENTS) && bytes < MOST_BYTES {
            let Some(job) = self.jobs.pop_front() else {
                break;
            };
            let size = job.size();
            (events, bytes) = (events + size.0, bytes + size.1);
            jobs.push(job);
        }
        self.events -= events;
        self.bytes -= bytes;
        (jobs, events)
    }
}

impl Postgres {
    async fn append_jobs(&self, jobs: Vec<Job>) {
        if let Some(jobs) = self.append_shared(jobs).await {
            // One of the calls cannot be stored. Each is tried alone, so that the others succeed.
            for job in jobs {
                self.append_shared(vec![job]).await;
            }
        }
    }

    /// Appends the events of these calls together and answers. If one call made all of them fail, returns the calls
    /// without an answer.
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
                self.bell.ring();
                for (answers, reply) in all.into_iter().zip(replies) {
                    let _ = reply.send(answers.map(|a| a.into_iter().map(Ok).collect()));
                }
            }
            Err(error) if replies.len() > 1 && is_of_one(&error) => {
                let jobs = events.into_iter().zip(replies);
                return Some(jobs.map(|(events, reply)| Job { events, reply }).collect());
            }
            Err(error) => {
                // The outcome may be unknown: the events may be stored.
                self.bell.ring();
                for reply in replies {
                    let _ = reply.send(Err(error.clone()));
                }
            }
        }
        None
    }

    /// Appends events whose ids are all new, which is the usual case, with a single statement that is its own
    /// transaction. `None`: nothing was done, because an id is taken or an event has its payload in an object store.
    ///
    /// Usually the unique index alone finds an id that is taken. The refused statement leaves a gap in the numbers and
    /// dead rows for vacuum, so after one refusal ids are looked up first for a while.
    async fn append_new(&self, batches: &[&[Event]]) -> Result<Option<Vec<Vec<Appended>>>> {
        let events: Vec<&Event> = batches.iter().flat_map(|batch| batch.iter()).collect();
        if events.iter().any(|event| event.overflow().is_some()) {
            return Ok(None);
        }
        let ids = if self.repeats.were_lately() {
            let mut seen = HashSet::with_capacity(events.len());
            if !events.iter().all(|event| seen.insert(key_of(event))) {
                return Ok(None);
            }
            Ids::LookedUp
        } else {
            Ids::Unseen
        };
        let conn = self.pool.get_for(Role::Append).await?;
        let names = events.iter().map(|e| e.type_arc());
        let types = self.types.intern(&*conn, names, true).await?;
        let inserted = match insert_new(&conn, &events, &types, self.micros(), ids).await {
            Ok(inserted) => inserted,
            // An id is taken, or another transaction stored it at the same moment.
            Err(error) if error.code() == Code::Busy => None,
            // Without an answer it is unknown whether the statement was committed.
            Err(error) if error.code() == Code::Unavailable => {
                return Err(error.with_unknown_outcome());
            }
            Err(error) => return Err(error),
        };
        let Some(inserted) = inserted else {
            self.repeats.saw_one();
            return Ok(None);
        };
        let mut appended = inserted.into_iter();
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
            // Outside of the transaction, so that new types are not rolled back with it.
            let conn = self.pool.get().await?;
            let names = batches.iter().flat_map(|batch| batch.iter());
            let names: Vec<Arc<str>> = names.map(|e| e.type_arc().clone()).collect();
            self.types.intern(&*conn, &names, true).await?;
        }
        transaction!(self.pool, "publishing", |tx| {
            // Batches are refused before anything is written, so that they leave no gap in the numbers.
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

/// Whether the error was caused by one request of a shared transaction, so that the others may succeed without it.
/// After this error nothing was done.
pub(crate) fn is_of_one(error: &Error) -> bool {
    matches!(error.class(), Class::Caller | Class::Conflict)
}

/// The texts of an event that have a column of their own.
pub(crate) fn texts(event: &Event) -> [Option<&str>; 5] {
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

/// Refuses an event with a zero character in one of these texts: PostgreSQL cannot store it.
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

/// Maps a reused id to a conflict: the id was free when it was checked, so another publisher stored it meanwhile, and
/// the transaction has to run again.
pub(crate) fn conflict(error: Error) -> Error {
    match error.code() {
        Code::IdReused => Error::new(Code::Busy, error.message()),
        _ => error,
    }
}

/// The identity of an event: ids are unique per tenant.
pub(crate) type Key<'a> = (EventId, &'a str);

pub(crate) fn key_of(event: &Event) -> Key<'_> {
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

/// As [`append_in`], with a given time of receipt.
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

/// One answer per event. `inserted` has the events whose ids were free.
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
            // The id was taken at the insert, and its event was removed since.
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
    // Compared by tenant too: ids are unique per tenant.
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
