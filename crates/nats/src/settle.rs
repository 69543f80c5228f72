//! Settling: the verdict of each delivery, in an order that loses nothing.
//!
//! Follow-ups first, then the dead letter and its notice, then the verdict. Each step may be repeated: the repetition
//! gives follow-ups and notice the same ids, and the dead letter the same subject, where it replaces the first one.

use std::time::{Duration, Instant};

use bytes::Bytes;
use everbus_core::{
    Code, Error, Event, Failure, Lease, Result, Settlement, Timestamp, Verdict, dead_letter_notice,
};
use everbus_dialects::Dialect;

use crate::broker::Shared;
use crate::held::Hold;
use crate::names;
use crate::reader::nak;
use crate::wire;

/// Room for headers that the server adds.
const SPARE: usize = 512;
/// The most bytes of a dead letter's headers; the server stores at most 64 KB.
const HEADERS: usize = 60_000;
/// The most bytes of the failures among these headers.
const FAILURES: usize = 32 * 1024;

impl Shared {
    pub(crate) async fn settle_one(&self, settlement: Settlement) -> Result<()> {
        let Settlement {
            lease,
            verdict,
            follow_ups,
            effect,
            ..
        } = settlement;
        if effect.is_some() {
            let what = "NATS has no transactions for effects";
            return Err(Error::new(Code::Unsupported, what)
                .hint("do the effect in the handler, with the context's idempotency key"));
        }
        let hold = self.held.find(&lease).ok_or_else(lost)?;
        self.append_first(follow_ups).await?;
        let key = (
            hold.stream.shard,
            hold.group.number,
            hold.record.position.place(),
        );
        let mut after = None;
        match verdict {
            Verdict::Ack | Verdict::Skip { .. } => {
                self.ask_verdict(&hold, "+ACK").await?;
                self.held.forget(&key);
            }
            Verdict::Retry {
                after: delay,
                failure,
            } => {
                self.ask_verdict(&hold, &nak(delay)).await?;
                self.held.with_note(key, |note| {
                    note.failures.push(failure);
                    note.due = Some(Instant::now() + delay);
                });
                after = Some(delay);
            }
            Verdict::Release { after: delay } => {
                self.ask_verdict(&hold, &nak(delay)).await?;
                self.held.with_note(key, |note| {
                    note.uncounted += 1;
                    note.due = Some(Instant::now() + delay);
                });
                after = Some(delay);
            }
            Verdict::Dead { failure } => {
                if hold.group.record().owner.is_none() {
                    self.bury(&hold, failure).await?;
                }
                self.ask_verdict(&hold, "+TERM").await?;
                self.held.forget(&key);
            }
        }
        self.held.free(&lease);
        self.release_key(&hold, after);
        hold.group.freed.notify_waiters();
        Ok(())
    }

    /// Frees the key: its next event may be handed out, or this one again.
    fn release_key(&self, hold: &Hold, after: Option<Duration>) {
        let Some(key) = hold.record.event.ordering_key() else {
            return;
        };
        let (key, seq) = (
            (hold.stream.shard, key.into_owned()),
            hold.record.position.place(),
        );
        let mut keys = hold.group.keys.lock();
        match after {
            None => keys.finish(&key, seq),
            Some(after) => keys.give_back(&key, seq, after),
        }
    }

    /// Sends a verdict and waits until the server has it.
    async fn ask_verdict(&self, hold: &Hold, verdict: &str) -> Result<()> {
        let body = Bytes::copy_from_slice(verdict.as_bytes());
        self.link.ask(&hold.reply, None, body).await.map(drop)
    }

    /// Appends the events that belong to a verdict, before the verdict is sent.
    async fn append_first(&self, events: Vec<Event>) -> Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        let table = self.table().await?;
        for event in events {
            let stream = table.route(event.event_type())?;
            match self.append_one(stream, &event).await {
                // An earlier run appended it, perhaps with another time in its body. The first one counts.
                Err(error) if error.code() == Code::IdReused => {
                    tracing::warn!(target: "everbus::nats", %error, "an event that belongs to an outcome is there already with another body");
                }
                answer => drop(answer?),
            }
        }
        Ok(())
    }

    /// Stores the dead letter, then appends the notice about it.
    async fn bury(&self, hold: &Hold, failure: Option<Failure>) -> Result<()> {
        let (event, position) = (&hold.record.event, hold.record.position);
        // The event is given up because of recorded failures: this delivery was no attempt.
        let was_none = failure.is_none() && !hold.failures.is_empty();
        let attempts = hold.attempt.saturating_sub(u32::from(was_none));
        let mut failures = hold.failures.clone();
        failures.extend(failure);
        let now = self.options.clock.now();
        let died_at = failures.last().map_or(now, |last| last.at);
        let mut written = wire::write(
            event,
            Dialect::Native,
            hold.stream.naming,
            hold.record.received_at,
        )?;
        let (seq, dead) = (position.place().to_string(), self.space.dead_stream());
        written.subject = self
            .space
            .dead_subject(&hold.stream.short, &hold.group.encoded, &seq);
        let headers = &mut written.headers;
        // Not the id of the event: the server would take the dead letter of another group for a repetition.
        headers.insert(wire::MESSAGE_ID, dead_id(hold, died_at));
        headers.insert("Everbus-Event", wire::message_id(event));
        headers.insert(
            "Everbus-Subject",
            names::subject(hold.stream.naming, event.event_type()),
        );
        headers.insert("Everbus-Group", names::encoded(hold.group.name.as_str()));
        headers.insert("Everbus-Position", position.to_string());
        headers.insert("Everbus-Attempts", attempts.to_string());
        headers.insert("Everbus-Died-At", died_at.to_string());
        let room = self.link.max_payload().saturating_sub(SPARE);
        let headers = written.size() - written.payload.len();
        let text = failures_text(&failures, HEADERS.saturating_sub(headers).min(FAILURES));
        written.headers.insert("Everbus-Failures", text);
        if written.size() > room {
            // The payload has a message of its own, stored before the letter that names it.
            let payload = std::mem::take(&mut written.payload);
            let subject = format!("{}.payload", written.subject);
            let mut own = async_nats::HeaderMap::new();
            let id = format!("{} payload", dead_id(hold, died_at));
            own.insert(wire::MESSAGE_ID, id);
            let ack = self.link.publish(&dead, &subject, own, payload).await?;
            if let Some(error) = ack.error {
                return Err(error.into_error("the payload of a dead letter cannot be stored"));
            }
            written.headers.insert("Everbus-Payload", subject);
        }
        let ack = self
            .link
            .publish(&dead, &written.subject, written.headers, written.payload)
            .await?;
        if let Some(error) = ack.error {
            return Err(error.into_error("the dead letter cannot be stored"));
        }
        let last = failures.last();
        let notice = dead_letter_notice(&hold.record, &hold.group.name, attempts, last, died_at);
        match notice {
            Some(notice) => self.append_first(vec![notice]).await,
            None => Ok(()),
        }
    }

    pub(crate) async fn extend_one(&self, lease: &Lease, by: Duration) -> Result<()> {
        let hold = self.held.find(lease).ok_or_else(lost)?;
        self.ask_verdict(&hold, "+WPI").await?;
        self.held.extend(lease);
        if let Some(key) = hold.record.event.ordering_key() {
            let key = (hold.stream.shard, key.into_owned());
            let mut keys = hold.group.keys.lock();
            keys.extend(&key, hold.record.position.place(), hold.lease.max(by));
        }
        Ok(())
    }
}

/// The id of a dead letter. A repetition has the same id; if the event dies again, its dead letter has another one.
fn dead_id(hold: &Hold, died_at: Timestamp) -> String {
    let (group, position) = (&hold.group.encoded, hold.record.position);
    format!("dead {group} {position} {}", died_at.as_micros())
}

/// The failures as JSON, the newest ones if not all of them fit.
fn failures_text(failures: &[Failure], room: usize) -> String {
    let mut kept: Vec<Failure> = failures.to_vec();
    loop {
        let text = serde_json::to_string(&kept).unwrap_or_default();
        if text.len() <= room || kept.is_empty() {
            return text;
        }
        if kept.len() > 1 {
            kept.remove(0);
        } else {
            let last = &mut kept[0];
            last.backtrace = None;
            if last.error.len() <= 1000 {
                return "[]".to_owned();
            }
            let cut: String = last.error.chars().take(200).collect();
            last.error = cut;
        }
    }
}

fn lost() -> Error {
    Error::new(
        Code::LeaseLost,
        "the lease has ended, or the delivery was settled",
    )
}
