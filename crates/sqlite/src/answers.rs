//! Sends the answers of a committed transaction to the publishers.
//!
//! Waking a task from outside its runtime costs a lock and often a system call. So the writer answers one
//! publisher only. That publisher sends the other answers from its own thread, while the writer begins the
//! next transaction. No answer depends on that publisher: the writer sends the answers that are left after
//! its next commit, or when it has nothing else to do.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use everbus_core::{Appended, Error, Result};

use crate::queue::{Command, Reply};

/// How many answers a thread takes at a time. Other publishers help to send the rest.
const AT_A_TIME: usize = 64;

/// A waiting publisher, and the answer that it gets if the transaction commits.
pub(crate) enum Published {
    One(Reply<Appended>, Result<Appended>),
    Batch(Reply<Vec<Result<Appended>>>, Result<Vec<Result<Appended>>>),
}

impl Published {
    /// The answer to a publish that is refused with this error. `None` if the command is not a publish.
    pub(crate) fn refused(command: Command, error: &Error) -> Option<Self> {
        match command {
            Command::AppendOne { reply, .. } => Some(Self::One(reply, Err(error.clone()))),
            Command::Append { reply, .. } => Some(Self::Batch(reply, Err(error.clone()))),
            _ => None,
        }
    }

    /// The error of the whole publish, if it has one. Errors of single events in a batch are not included.
    pub(crate) fn error(&self) -> Option<&Error> {
        match self {
            Self::One(_, result) => result.as_ref().err(),
            Self::Batch(_, result) => result.as_ref().err(),
        }
    }

    /// Sends the answer. Returns whether the publisher still waits for it.
    fn answer(self) -> bool {
        match self {
            Self::One(reply, result) => reply.send(result).is_ok(),
            Self::Batch(reply, result) => reply.send(result).is_ok(),
        }
    }

    /// Sends this error in place of the answer: the transaction did not commit.
    pub(crate) fn fail(self, error: Error) {
        match self {
            Self::One(reply, _) => drop(reply.send(Err(error))),
            Self::Batch(reply, _) => drop(reply.send(Err(error))),
        }
    }
}

/// The answers that are not sent yet. The writer and the publishers share them.
#[derive(Default)]
pub(crate) struct Answers {
    waiting: Mutex<VecDeque<Published>>,
}

impl Answers {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Published>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends one of these answers, and keeps the others for [`send`](Self::send), which the answered
    /// publisher calls. Sends all of them if the first publisher no longer waits.
    pub(crate) fn put(&self, published: &mut Vec<Published>) {
        // Sends the answers that are left from the previous transaction.
        self.send();
        let first = published.pop();
        self.lock().extend(published.drain(..));
        if !first.is_some_and(Published::answer) {
            // The first publisher no longer waits, so it cannot send the others.
            self.send();
        }
    }

    /// Sends all answers that are left.
    pub(crate) fn send(&self) {
        loop {
            let mut waiting = self.lock();
            let count = waiting.len().min(AT_A_TIME);
            let some: Vec<Published> = waiting.drain(..count).collect();
            drop(waiting);
            if some.is_empty() {
                return;
            }
            for published in some {
                published.answer();
            }
        }
    }
}

/// Sends the answers that are left, so that every durable publish gets its answer when the engine ends.
impl Drop for Answers {
    fn drop(&mut self) {
        self.send();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::time::Duration;

    use everbus_core::{
        Appended, BoxFuture, Broker as _, Code, Cursor, Event, EventId, Log as _, Result,
    };

    use crate::Options;
    use crate::broker::SqliteEngine;
    use crate::handle::Handle;

    /// Long enough for a slow machine.
    const TIMEOUT: Duration = Duration::from_secs(60);

    type Publish<'a> = BoxFuture<'a, Result<Vec<Result<Appended>>>>;

    /// Blocks the writer until the returned sender is dropped. Commands that are queued meanwhile become one
    /// transaction.
    fn hold(handle: &Arc<Handle>) -> mpsc::Sender<()> {
        let (go, wait) = mpsc::channel::<()>();
        let (began, begun) = mpsc::channel::<()>();
        drop(handle.job(move |_| {
            drop(began);
            Ok(wait.recv().is_ok())
        }));
        let _ = begun.recv();
        go
    }

    fn event(id: EventId, text: &str) -> Event {
        Event::builder("a.b").id(id).json(&text).build().unwrap()
    }

    fn open(dir: &tempfile::TempDir) -> SqliteEngine {
        let handle = crate::handle::start(&dir.path().join("a.db"), Options::default()).unwrap();
        SqliteEngine { handle }
    }

    // conformance: bus/duplicate-publish: among publishers whose events are written together, each is told what became of its own
    #[tokio::test]
    async fn publishers_in_one_transaction_get_their_own_answers() {
        let dir = tempfile::tempdir().unwrap();
        let engine = open(&dir);
        let known = event(EventId::new(), "known");
        engine.append(vec![known.clone()]).await.unwrap();
        let go = hold(&engine.handle);
        let fresh: Vec<Event> = (0..50)
            .map(|n| event(EventId::new(), &n.to_string()))
            .collect();
        let mut publishes: Vec<Publish<'_>> = Vec::new();
        for (n, one) in fresh.iter().enumerate() {
            publishes.push(engine.append(vec![one.clone()]));
            let more = match n {
                5 => vec![known.clone()],
                20 => vec![event(known.id(), "another body")],
                // The same event twice in one statement.
                35 => vec![one.clone()],
                // The last event makes the whole batch fail, after rows of the batch were written.
                40 => (0..40)
                    .map(|n| event(EventId::new(), &n.to_string()))
                    .chain([event(known.id(), "another body")])
                    .collect(),
                _ => continue,
            };
            publishes.push(engine.append(more));
        }
        drop(go);
        let mut stored = vec![known.id()];
        let mut refused = 0;
        for publish in publishes {
            match publish.await.and_then(|mut answers| answers.remove(0)) {
                Ok(appended) if appended.duplicate => {
                    let first = usize::try_from(appended.position.place()).unwrap() - 1;
                    assert_eq!(stored[first], appended.id);
                }
                Ok(appended) => {
                    stored.push(appended.id);
                    assert_eq!(appended.position.place(), stored.len() as u64);
                }
                Err(error) => {
                    assert_eq!(error.code(), Code::IdReused, "{error}");
                    refused += 1;
                }
            }
        }
        assert_eq!((stored.len(), refused), (51, 2));
        let all = vec!["**".parse().unwrap()];
        let (log, _) = engine.read(Cursor::START, all, 1000).await.unwrap();
        let ids: Vec<EventId> = log.iter().map(|record| record.event.id()).collect();
        assert_eq!(ids, stored);
        engine.handle.queue.close(true);
    }

    // conformance: bus/answers: no publisher waits for another one that does not look at its answer
    #[tokio::test]
    async fn no_publisher_waits_for_another() {
        let dir = tempfile::tempdir().unwrap();
        let engine = open(&dir);
        for gives_up in [false, true] {
            let go = hold(&engine.handle);
            let new = || event(EventId::new(), "a");
            let others: Vec<Publish<'_>> = (0..40).map(|_| engine.append(vec![new()])).collect();
            // The writer answers this publisher first.
            let last = engine.append(vec![new()]);
            let last = (!gives_up).then_some(last);
            drop(go);
            for other in others {
                let answer = tokio::time::timeout(TIMEOUT, other).await;
                answer.expect("it is answered").unwrap();
            }
            drop(last);
        }
        engine.handle.queue.close(true);
    }
}
