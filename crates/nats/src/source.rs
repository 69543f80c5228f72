//! One stream that a consumer reads: pull requests to the server, and the messages that come.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{Message, Subscriber};
use bytes::Bytes;
use everbus_core::{Code, Error, Result};
use futures_util::StreamExt as _;
use serde_json::json;

use crate::client::Link;
use crate::groups::Group;
use crate::streams::StreamHandle;

/// How long the server keeps a pull request while there are no messages.
const EXPIRES: Duration = Duration::from_secs(30);
/// How often the server confirms that a request is still open.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// If the server is silent for this long, the request counts as lost.
const SILENCE: Duration = Duration::from_millis(4500);

pub(crate) struct Source {
    pub(crate) stream: Arc<StreamHandle>,
    pub(crate) messages: Subscriber,
    inbox: String,
    api: String,
    /// How many messages the server may still send.
    outstanding: usize,
    heard: Instant,
    /// The value of [`Link::turns`] at the last request.
    turn: u64,
    number: u64,
    pin: Option<String>,
    /// No request before this.
    not_before: Option<Instant>,
}

/// The meaning of a message without an event.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// Nothing to do.
    Alive,
    /// The consumer is gone, or no server answers for it.
    Gone,
    /// Another process gets the messages of an ordered group.
    Unpinned,
}

impl Source {
    pub(crate) async fn open(
        link: &Link,
        stream: Arc<StreamHandle>,
        group: &Group,
    ) -> Result<Self> {
        let inbox = link.client.new_inbox();
        let messages = link.client.subscribe(format!("{inbox}.*")).await;
        let messages = messages.map_err(|e| Error::new(Code::Unavailable, e.to_string()))?;
        Ok(Self {
            api: format!(
                "$JS.API.CONSUMER.MSG.NEXT.{}.{}",
                stream.name, group.encoded
            ),
            stream,
            messages,
            inbox,
            outstanding: 0,
            heard: Instant::now(),
            turn: 0,
            number: 0,
            pin: None,
            not_before: None,
        })
    }

    /// How many messages may still come. A request is lost if the connection breaks, the server is silent, or the pin
    /// changes.
    pub(crate) fn outstanding(&mut self, turn: u64, pin: Option<&String>) -> usize {
        let lost = self.turn != turn || self.heard.elapsed() > SILENCE || self.pin.as_ref() != pin;
        if lost {
            self.outstanding = 0;
        }
        self.outstanding
    }

    /// When to look at this source again: the silence is too long, or the next request is allowed.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let silence = (self.outstanding > 0).then(|| self.heard + SILENCE);
        // A time that has passed is no deadline: the reader may have no reason to ask.
        let allowed = self.not_before.filter(|at| *at > Instant::now());
        [silence, allowed].into_iter().flatten().min()
    }

    /// Asks for this many messages more.
    pub(crate) async fn pull(
        &mut self,
        link: &Link,
        count: usize,
        brief: bool,
        turn: u64,
        pin: Option<String>,
        ordered: bool,
    ) -> Result<()> {
        if self.not_before.is_some_and(|at| at > Instant::now()) {
            return Ok(());
        }
        self.not_before = None;
        let expires = match (brief, ordered) {
            (true, _) => Duration::from_millis(500),
            // A process that asks seldom loses the group to another one.
            (false, true) => EXPIRES / 6,
            (false, false) => EXPIRES,
        };
        let mut body = json!({
            "batch": count,
            "expires": expires.as_nanos() as u64,
        });
        if !brief {
            body["idle_heartbeat"] = json!(HEARTBEAT.as_nanos() as u64);
        }
        if ordered {
            body["group"] = json!("ordered");
            if let Some(pin) = &pin {
                body["id"] = json!(pin);
            }
        }
        self.number += 1;
        let reply = format!("{}.{}", self.inbox, self.number);
        let body: Bytes = body.to_string().into();
        let sent = link
            .client
            .publish_with_reply(self.api.clone(), reply, body);
        sent.await
            .map_err(|e| Error::new(Code::Unavailable, e.to_string()))?;
        if self.outstanding == 0 {
            self.heard = Instant::now();
        }
        self.outstanding += count;
        (self.turn, self.pin) = (turn, pin);
        Ok(())
    }

    /// Notes a message that came: `None` if it has an event.
    pub(crate) fn note(&mut self, message: &Message) -> Option<Status> {
        self.heard = Instant::now();
        // A publisher may have set a status itself: a message with a place in the stream is an event.
        let status = message.status.filter(|_| !is_event(message));
        let Some(status) = status.filter(|status| status.as_u16() != 200) else {
            self.outstanding = self.outstanding.saturating_sub(1);
            return None;
        };
        let pending = message
            .headers
            .as_ref()
            .and_then(|headers| headers.get("Nats-Pending-Messages"))
            .and_then(|value| value.as_str().parse::<usize>().ok());
        let text = message.description.as_deref().unwrap_or_default();
        match status.as_u16() {
            100 => return Some(Status::Alive),
            404 | 408 => {
                self.outstanding = self
                    .outstanding
                    .saturating_sub(pending.unwrap_or(usize::MAX));
            }
            423 => {
                self.outstanding = 0;
                return Some(Status::Unpinned);
            }
            503 => {
                self.outstanding = 0;
                self.not_before = Some(Instant::now() + Duration::from_millis(200));
                return Some(Status::Gone);
            }
            _ => {
                self.outstanding = self
                    .outstanding
                    .saturating_sub(pending.unwrap_or(usize::MAX));
                tracing::debug!(target: "everbus::nats", stream = self.stream.name, %status, text, "a pull request ended");
                if text.contains("Consumer Deleted") || text.contains("Consumer is push") {
                    self.outstanding = 0;
                    self.not_before = Some(Instant::now() + Duration::from_millis(200));
                    return Some(Status::Gone);
                }
                self.not_before = Some(Instant::now() + Duration::from_millis(50));
            }
        }
        Some(Status::Alive)
    }

    /// Ends the subscription, and returns the messages that were on their way.
    pub(crate) async fn end(mut self) -> (Arc<StreamHandle>, Vec<Message>) {
        let mut left = Vec::new();
        if self.messages.drain().await.is_ok() {
            let rest = async {
                while let Some(message) = self.messages.next().await {
                    if is_event(&message) {
                        left.push(message);
                    }
                }
            };
            let _ = tokio::time::timeout(Duration::from_secs(1), rest).await;
        }
        (self.stream, left)
    }
}

fn is_event(message: &Message) -> bool {
    let reply = message.reply.as_ref();
    reply.is_some_and(|reply| place(reply.as_str()).is_some())
}

/// The place of a delivered message, from its reply subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) delivered: u64,
    pub(crate) seq: u64,
    /// Nanoseconds since 1970.
    pub(crate) time: i64,
}

/// Reads a reply subject, `$JS.ACK.stream.consumer.delivered.sequence.consumer sequence.time.pending`, or the same
/// with domain and account before the stream.
pub(crate) fn place(reply: &str) -> Option<Place> {
    let tokens: Vec<&str> = reply.strip_prefix("$JS.ACK.")?.split('.').collect();
    let at = match tokens.len() {
        7 => 2,
        9.. => 4,
        _ => return None,
    };
    Some(Place {
        delivered: tokens.get(at)?.parse().ok()?,
        seq: tokens.get(at + 1)?.parse().ok()?,
        time: tokens.get(at + 3)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_is_in_the_reply() {
        let expected = Place {
            delivered: 3,
            seq: 42,
            time: 17,
        };
        assert_eq!(place("$JS.ACK.ORDERS.billing.3.42.7.17.0"), Some(expected));
        let long = "$JS.ACK.hub.ACC.ORDERS.billing.3.42.7.17.0.abc";
        assert_eq!(place(long), Some(expected));
        assert_eq!(place("_INBOX.x"), None);
    }
}
