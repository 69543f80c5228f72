//! Appends events, and handles ids that the server knows already.
//!
//! For a repeated id, the server answers with the sequence of the first publish. The event at this sequence is read
//! and compared. Servers from 2.12 on store a batch as a whole. They refuse a batch with a known id; then the engine
//! looks up each id on its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use everbus_core::{Appended, Code, Error, Event, EventId, Position, Result};
use futures_util::future::join_all;

use crate::api::{PubAck, Which};
use crate::broker::Shared;
use crate::errors::{ApiError, number};
use crate::names;
use crate::streams::{self, StreamHandle};
use crate::wire::{self, Around, Written, message_id};

/// The most messages in one batch; a limit of the server.
const MOST: usize = 1000;
/// The most bytes of an event's headers: they leave room for the headers that a dead letter adds.
const MOST_HEADERS: usize = 56_000;
/// A sequence that no stream reaches.
const NO_SEQUENCE: u64 = 1 << 62;
/// How long a publish waits for a server that is away or elects a leader.
const PATIENCE: Duration = Duration::from_secs(10);
/// The error codes of an incomplete batch and of too many open batches: the same request may succeed later.
const INCOMPLETE: [u64; 4] = [10176, 10199, 10205, 10210];

/// Events with their indexes in a batch.
type Numbered = Vec<(usize, Event)>;

impl Shared {
    pub(crate) async fn append(&self, batch: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let table = self.table().await?;
        let mut by_stream: Vec<(Arc<StreamHandle>, Numbered)> = Vec::new();
        let mut answers: Vec<Option<Result<Appended>>> = Vec::new();
        answers.resize_with(batch.len(), || None);
        for (index, event) in batch.into_iter().enumerate() {
            match table.route(event.event_type()) {
                Ok(stream) => {
                    let known = by_stream.iter_mut().find(|(s, _)| s.name == stream.name);
                    match known {
                        Some((_, events)) => events.push((index, event)),
                        None => by_stream.push((stream.clone(), vec![(index, event)])),
                    }
                }
                Err(error) if table.atomic() => return Err(error),
                Err(error) => answers[index] = Some(Err(error)),
            }
        }
        for (nth, (stream, events)) in by_stream.into_iter().enumerate() {
            let (places, events): (Vec<usize>, Vec<Event>) = events.into_iter().unzip();
            let appended = match self.append_to(&stream, events).await {
                // Other streams have stored their events already, so the error is only for the events of this stream.
                Err(error) if nth > 0 => vec![Err(error); places.len()],
                appended => appended?,
            };
            for (place, answer) in places.iter().zip(appended) {
                answers[*place] = Some(answer);
            }
        }
        let missing = || Err(Error::new(Code::Internal, "an event was not answered"));
        Ok(answers
            .into_iter()
            .map(|a| a.unwrap_or_else(missing))
            .collect())
    }

    /// Appends to one stream, in order.
    async fn append_to(
        &self,
        stream: &StreamHandle,
        events: Vec<Event>,
    ) -> Result<Vec<Result<Appended>>> {
        if let [event] = &events[..] {
            return match self.append_one(stream, event).await {
                Err(error) if error.class().may_repeat() => Err(error),
                answer => Ok(vec![answer]),
            };
        }
        let mut answers: Vec<Result<Appended>> = Vec::with_capacity(events.len());
        for chunk in events.chunks(MOST) {
            if stream.atomic {
                match self.append_atomic(stream, chunk).await {
                    Ok(appended) => answers.extend(appended.into_iter().map(Ok)),
                    Err(error) if answers.is_empty() => return Err(error),
                    // Earlier chunks are stored already, so the error is only for the remaining events.
                    Err(error) => {
                        answers.resize(events.len(), Err(error));
                        break;
                    }
                }
            } else {
                let appended = chunk.iter().map(|event| self.append_one(stream, event));
                answers.extend(join_all(appended).await);
            }
        }
        Ok(answers)
    }

    /// Encodes an event as a message, and refuses an event that is too large for the server.
    fn written(&self, stream: &StreamHandle, event: &Event) -> Result<(Written, Appended)> {
        let received_at = self.stamp();
        let mut written = wire::write(event, stream.dialect, stream.naming, received_at)?;
        if written.size() > self.link.max_payload() {
            return Err(self.link.too_large());
        }
        if written.size() - written.payload.len() > MOST_HEADERS {
            let what = format!(
                "the attributes of the event are larger than {MOST_HEADERS} bytes: a NATS server stores no \
                 more than 64 KB of headers"
            );
            return Err(Error::new(Code::PayloadTooLarge, what)
                .hint("move large metadata into the payload"));
        }
        written.subject = stream.subject(&written.subject);
        let appended = Appended::new(event.id(), Position::new(stream.shard, 0), received_at);
        Ok((written, appended))
    }

    /// Appends one event.
    pub(crate) async fn append_one(
        &self,
        stream: &StreamHandle,
        event: &Event,
    ) -> Result<Appended> {
        let (written, mut appended) = self.written(stream, event)?;
        let ack = self
            .patiently(|| async {
                let (headers, payload) = (written.headers.clone(), written.payload.clone());
                let publish = self
                    .link
                    .publish(&stream.name, &written.subject, headers, payload);
                refused_or(publish.await?)
            })
            .await;
        let ack = match ack {
            Err(error) if error.code() == Code::Unavailable => {
                return Err(self.why_away(stream, &written.subject, error).await);
            }
            ack => ack?,
        };
        if ack.duplicate {
            return self.known(stream, event, ack.seq).await;
        }
        appended.position = Position::new(stream.shard, ack.seq);
        Ok(appended)
    }

    /// Finds out why a publish got no answer: the stream may have been removed, or another process may have taken the
    /// subject from the stream.
    async fn why_away(&self, stream: &StreamHandle, subject: &str, error: Error) -> Error {
        let found = self.link.stream(&stream.name).await;
        let why = match found {
            Ok(None) => format!("the stream {} was removed from the server", stream.name),
            Ok(Some(info)) => {
                let there = streams::texts(&info.config["subjects"]);
                if there.iter().any(|known| names::covers(known, subject)) {
                    return error;
                }
                format!(
                    "the stream {} has the subjects {there:?}, and not {subject} any more",
                    stream.name
                )
            }
            Err(_) => return error,
        };
        let error = error.with_message(why);
        error.hint("open the bus again to declare its streams")
    }

    /// Repeats a publish while the server is away. The repetition is safe, because the server recognises the id.
    async fn patiently<T, F>(&self, mut publish: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let began = Instant::now();
        let mut pause = Duration::from_millis(20);
        let mut unknown = false;
        loop {
            let error = match publish().await {
                Err(error) if error.code() == Code::Unavailable => error,
                // An earlier try may have been stored, whatever the server says to this one.
                Err(error) if unknown => return Err(error.with_unknown_outcome()),
                answer => return answer,
            };
            unknown |= error.outcome_unknown();
            if began.elapsed() + pause > PATIENCE || self.link.check_open().is_err() {
                return Err(match unknown {
                    true => error.with_unknown_outcome(),
                    false => error,
                });
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// The answer for an event whose id the server knows.
    async fn known(&self, stream: &StreamHandle, event: &Event, seq: u64) -> Result<Appended> {
        let which = Which {
            seq: Some(seq),
            ..Which::default()
        };
        let position = Position::new(stream.shard, seq);
        let Some(stored) = self.link.message(&stream.name, &which).await? else {
            // Retention removed it, and the server still knows its id.
            return Ok(Appended::new(event.id(), position, self.stamp()).as_duplicate());
        };
        let around = Around {
            stream: &stream.name,
            subject: stream.plain(&stored.subject),
            seq,
            time: stored.time,
            dialect: stream.dialect,
            naming: stream.naming,
        };
        let read = wire::read(around, Some(&stored.headers), &stored.payload);
        if !read.event.same_body(event) {
            return Err(reused(event.id()));
        }
        Ok(Appended::new(event.id(), position, read.received_at).as_duplicate())
    }

    /// Appends events as a whole or not at all.
    async fn append_atomic(
        &self,
        stream: &StreamHandle,
        events: &[Event],
    ) -> Result<Vec<Appended>> {
        // For each id the index of its first event, and for each event the index of the first event with the same id.
        let mut firsts: HashMap<String, usize> = HashMap::new();
        let mut same_as = Vec::with_capacity(events.len());
        for (index, event) in events.iter().enumerate() {
            let first = *firsts.entry(message_id(event)).or_insert(index);
            if !events[first].same_body(event) {
                return Err(reused(event.id()));
            }
            same_as.push(first);
        }
        let mut answers: HashMap<usize, Appended> = HashMap::new();
        let mut new: Vec<usize> = firsts.into_values().collect();
        new.sort_unstable();
        let mut rounds = 0;
        while !new.is_empty() {
            rounds += 1;
            if let ([only], true) = (&new[..], rounds > 1) {
                answers.insert(*only, self.append_one(stream, &events[*only]).await?);
                break;
            }
            if let Some(appended) = self.publish_batch(stream, events, &new).await? {
                answers.extend(new.iter().copied().zip(appended));
                break;
            }
            if rounds > 5 {
                let what = "others publish the same ids all the time";
                return Err(Error::new(Code::Unavailable, what));
            }
            let copies = self.copies(stream).await?;
            let asked = new
                .iter()
                .map(|index| self.find_id(stream, &events[*index], copies));
            for (index, found) in new.clone().into_iter().zip(join_all(asked).await) {
                if let Some(seq) = found? {
                    answers.insert(index, self.known(stream, &events[index], seq).await?);
                    new.retain(|other| *other != index);
                }
            }
        }
        let answer = |(index, first): (usize, &usize)| {
            let found = answers.get(first).copied();
            let found = found.ok_or_else(|| Error::new(Code::Internal, "an event was not stored"));
            found.map(|appended| match index == *first {
                true => appended,
                false => appended.as_duplicate(),
            })
        };
        same_as.iter().enumerate().map(answer).collect()
    }

    /// Publishes events as one batch. `None` if the server knows one of the ids; then nothing was stored.
    async fn publish_batch(
        &self,
        stream: &StreamHandle,
        events: &[Event],
        indexes: &[usize],
    ) -> Result<Option<Vec<Appended>>> {
        let mut written = Vec::with_capacity(indexes.len());
        for index in indexes {
            written.push(self.written(stream, &events[*index])?);
        }
        let ack = self
            .patiently(|| async {
                let ack = self.send_batch(stream, &written).await?;
                match &ack.error {
                    Some(error) if error.err_code == number::BATCH_HAS_DUPLICATE => Ok(None),
                    _ => refused_or(ack).map(Some),
                }
            })
            .await?;
        let Some(ack) = ack else {
            return Ok(None);
        };
        let before = ack.seq.saturating_sub(indexes.len() as u64);
        let appended = written
            .into_iter()
            .zip(1..)
            .map(|((_, mut appended), nth)| {
                appended.position = Position::new(stream.shard, before + nth);
                appended
            });
        Ok(Some(appended.collect()))
    }

    async fn send_batch(
        &self,
        stream: &StreamHandle,
        written: &[(Written, Appended)],
    ) -> Result<PubAck> {
        let batch = EventId::new().to_string();
        let lost = |error: String| Error::new(Code::Unavailable, error);
        let last = written.len() - 1;
        for (index, (written, _)) in written.iter().enumerate() {
            let mut headers = written.headers.clone();
            headers.insert("Nats-Batch-Id", batch.as_str());
            headers.insert("Nats-Batch-Sequence", (index + 1).to_string());
            let payload = written.payload.clone();
            if index == last {
                headers.insert("Nats-Batch-Commit", "1");
                let link = &self.link;
                return link
                    .publish(&stream.name, &written.subject, headers, payload)
                    .await;
            }
            let sent =
                self.link
                    .client
                    .publish_with_headers(written.subject.clone(), headers, payload);
            sent.await.map_err(|e| lost(e.to_string()))?;
        }
        Err(Error::new(Code::Internal, "a batch is empty"))
    }

    /// The number of replicas that the stream has now. It may have changed since the stream was declared.
    async fn copies(&self, stream: &StreamHandle) -> Result<u64> {
        let Some(info) = self.link.stream(&stream.name).await? else {
            let what = format!("the stream {} was removed from the server", stream.name);
            return Err(Error::new(Code::Unavailable, what));
        };
        Ok(info.config["num_replicas"].as_u64().unwrap_or(1))
    }

    /// Returns the sequence of an event if the server knows its id. The question is a publish that the server cannot
    /// store.
    ///
    /// The server first looks for the id. Then it checks a condition that is never true: the last message id on a
    /// stream with one replica, the last sequence on a stream with several. The conditions must not be swapped. With
    /// one replica, the server checks the sequence before it looks for the id. With several, a wrong message id
    /// reaches all replicas, and they all give up the stream.
    async fn find_id(
        &self,
        stream: &StreamHandle,
        event: &Event,
        copies: u64,
    ) -> Result<Option<u64>> {
        let (written, _) = self.written(stream, event)?;
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(wire::MESSAGE_ID, message_id(event));
        match copies {
            0 | 1 => headers.insert("Nats-Expected-Last-Msg-Id", "everbus-asks"),
            _ => headers.insert("Nats-Expected-Last-Sequence", NO_SEQUENCE.to_string()),
        }
        let ack = self
            .link
            .publish(&stream.name, &written.subject, headers, Bytes::new())
            .await?;
        match ack.error {
            None if ack.duplicate => Ok(Some(ack.seq)),
            None => Err(Error::new(Code::Internal, "a question was stored")),
            Some(ApiError {
                err_code:
                    number::WRONG_LAST_MESSAGE_ID
                    | number::WRONG_LAST_SEQUENCE
                    | number::WRONG_LAST_SEQUENCE_2,
                ..
            }) => Ok(None),
            Some(error) => Err(error.into_error(&stream.name)),
        }
    }
}

fn reused(id: EventId) -> Error {
    let what = format!("the event {id} exists with another body");
    Error::new(Code::IdReused, what)
        .hint("an id names one event for ever; give the new event a new id")
}

fn refused_or(ack: PubAck) -> Result<PubAck> {
    match ack.error {
        None => Ok(ack),
        Some(error) if INCOMPLETE.contains(&error.err_code) => {
            Err(Error::new(Code::Unavailable, error.description))
        }
        Some(error) => Err(error.into_error("the event cannot be stored")),
    }
}
