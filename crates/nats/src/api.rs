//! The requests of JetStream that the engine uses, as JSON.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use async_nats::{HeaderMap, Message, StatusCode};
use bytes::Bytes;
use data_encoding::BASE64;
use everbus_core::{Code, Error, Result, Timestamp};
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::client::Link;
use crate::errors::{ApiError, number, unreadable};

const API: &str = "$JS.API.";
/// How long a request is repeated while no server answers.
const PATIENCE: Duration = Duration::from_secs(12);

/// The state of a stream.
#[derive(Debug, Deserialize)]
pub(crate) struct StreamInfo {
    pub(crate) config: Value,
    pub(crate) state: StreamState,
    /// The creation time. A stream that is removed and created again has another one.
    #[serde(default)]
    pub(crate) created: String,
    /// How many subjects the filter selects.
    #[serde(default)]
    pub(crate) total: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct StreamState {
    pub(crate) first_seq: u64,
    pub(crate) last_seq: u64,
    #[serde(default)]
    pub(crate) subjects: BTreeMap<String, u64>,
}

/// The state of a consumer.
#[derive(Debug, Deserialize)]
pub(crate) struct ConsumerInfo {
    pub(crate) config: Value,
    pub(crate) delivered: Sequence,
    pub(crate) ack_floor: Sequence,
    pub(crate) num_ack_pending: u64,
    pub(crate) num_pending: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Sequence {
    pub(crate) stream_seq: u64,
    #[serde(default)]
    pub(crate) last_active: Option<String>,
}

/// A stored message.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) subject: String,
    pub(crate) seq: u64,
    pub(crate) time: Timestamp,
    pub(crate) headers: HeaderMap,
    pub(crate) payload: Bytes,
}

/// The answer to a publish.
#[derive(Debug, Deserialize)]
pub(crate) struct PubAck {
    #[serde(default)]
    stream: String,
    #[serde(default)]
    pub(crate) seq: u64,
    #[serde(default)]
    pub(crate) duplicate: bool,
    #[serde(default)]
    pub(crate) error: Option<ApiError>,
}

impl PubAck {
    /// Reads the ack of this stream. Returns `None` for any other answer: other programs may answer requests on the
    /// subject of an event, and their answers must not be taken for those of the server.
    fn of(stream: &str, message: &Message) -> Option<Self> {
        let ack: Self = serde_json::from_slice(&message.payload).ok()?;
        let refused = ack.error.as_ref().is_some_and(|error| error.err_code != 0);
        (refused || ack.stream == stream && ack.seq > 0).then_some(ack)
    }
}

#[derive(Deserialize)]
struct Refused {
    #[serde(default)]
    error: Option<ApiError>,
}

/// Selects a message of a stream.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Which {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seq: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next_by_subj: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_by_subj: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) start_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) batch: Option<usize>,
}

impl Link {
    /// Sends one request to the API of JetStream. The inner error is the refusal of the server.
    async fn api<T: DeserializeOwned>(
        &self,
        verb: &str,
        body: &Value,
    ) -> Result<Result<T, ApiError>> {
        let bytes = match body {
            Value::Null => Bytes::new(),
            body => body.to_string().into(),
        };
        let subject = format!("{API}{verb}");
        let began = Instant::now();
        // Every request here may be repeated: after an election, the new leader answers.
        let answer = loop {
            match self.ask(&subject, None, bytes.clone()).await {
                Err(error)
                    if error.code() == Code::Unavailable
                        && began.elapsed() < PATIENCE
                        && self.check_open().is_ok() =>
                {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                answer => break answer?,
            }
        };
        let read = |error: serde_json::Error| unreadable(verb, &error);
        let refused: Refused = serde_json::from_slice(&answer.payload).map_err(read)?;
        match refused.error {
            Some(error) => Ok(Err(error)),
            None => serde_json::from_slice(&answer.payload)
                .map(Ok)
                .map_err(read),
        }
    }

    /// Publishes into a stream and returns its ack. If another program answers first, the outcome is unknown. Later
    /// publishes then read all answers until the ack of the stream arrives.
    pub(crate) async fn publish(
        &self,
        stream: &str,
        subject: &str,
        mut headers: HeaderMap,
        payload: Bytes,
    ) -> Result<PubAck> {
        headers.insert("Nats-Expected-Stream", stream);
        if self.is_crowded() {
            return self.publish_among(stream, subject, headers, payload).await;
        }
        let answer = self.ask(subject, Some(headers), payload).await?;
        PubAck::of(stream, &answer).ok_or_else(|| self.crowded(subject))
    }

    /// Publishes a record or a value. While a stream of several replicas has no leader, no server answers; without a
    /// connection, no request is sent. In both cases nothing was stored. So the publish is repeated, and its condition on
    /// the last sequence still holds.
    pub(crate) async fn publish_to_leader(
        &self,
        stream: &str,
        subject: &str,
        headers: HeaderMap,
        payload: Bytes,
    ) -> Result<PubAck> {
        let began = Instant::now();
        loop {
            let publish = self.publish(stream, subject, headers.clone(), payload.clone());
            match publish.await {
                Err(error)
                    if error.code() == Code::Unavailable
                        && !error.outcome_unknown()
                        && began.elapsed() < PATIENCE
                        && self.check_open().is_ok() =>
                {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                answer => return answer,
            }
        }
    }

    /// Publishes on a subject where other programs answer too.
    async fn publish_among(
        &self,
        stream: &str,
        subject: &str,
        headers: HeaderMap,
        payload: Bytes,
    ) -> Result<PubAck> {
        let mut answers = self.ask_all(subject, headers, payload).await?;
        let found = async {
            while let Some(answer) = answers.next().await {
                if answer.status == Some(StatusCode::NO_RESPONDERS) {
                    return Some(Err(self.no_responders()));
                }
                if let Some(ack) = PubAck::of(stream, &answer) {
                    return Some(Ok(ack));
                }
            }
            None
        };
        match tokio::time::timeout(self.timeout(), found).await {
            Ok(Some(answer)) => answer,
            _ => Err(self.crowded(subject)),
        }
    }

    /// A stream, if it exists.
    pub(crate) async fn stream(&self, name: &str) -> Result<Option<StreamInfo>> {
        self.stream_with(name, Value::Null).await
    }

    /// A stream with the number of messages of each subject that the filter selects.
    pub(crate) async fn stream_subjects(
        &self,
        name: &str,
        filter: &str,
        offset: u64,
    ) -> Result<Option<StreamInfo>> {
        let body = json!({ "subjects_filter": filter, "offset": offset });
        self.stream_with(name, body).await
    }

    async fn stream_with(&self, name: &str, body: Value) -> Result<Option<StreamInfo>> {
        let what = format!("stream {name}");
        match self.api(&format!("STREAM.INFO.{name}"), &body).await? {
            Ok(info) => Ok(Some(info)),
            Err(error) if error.err_code == number::STREAM_NOT_FOUND => Ok(None),
            Err(error) => Err(error.into_error(&what)),
        }
    }

    /// All streams of the account.
    pub(crate) async fn streams(&self) -> Result<Vec<StreamInfo>> {
        #[derive(Deserialize)]
        struct Page {
            total: usize,
            #[serde(default)]
            streams: Option<Vec<StreamInfo>>,
        }
        let mut all: Vec<StreamInfo> = Vec::new();
        loop {
            let body = json!({ "offset": all.len() });
            let page: Page = match self.api("STREAM.LIST", &body).await? {
                Ok(page) => page,
                Err(error) => return Err(error.into_error("the streams cannot be listed")),
            };
            let streams = page.streams.unwrap_or_default();
            let end = streams.is_empty();
            all.extend(streams);
            if end || all.len() >= page.total {
                return Ok(all);
            }
        }
    }

    /// Creates a stream; `None` if another process was faster.
    pub(crate) async fn create_stream(&self, config: &Value) -> Result<Option<StreamInfo>> {
        let name = config["name"].as_str().unwrap_or_default();
        match self.api(&format!("STREAM.CREATE.{name}"), config).await? {
            Ok(info) => Ok(Some(info)),
            Err(error) if error.err_code == number::STREAM_NAME_IN_USE => Ok(None),
            Err(error) => Err(error.into_error(&format!("the stream {name} cannot be created"))),
        }
    }

    pub(crate) async fn update_stream(&self, config: &Value) -> Result<StreamInfo> {
        let name = config["name"].as_str().unwrap_or_default();
        let updated = self.api(&format!("STREAM.UPDATE.{name}"), config).await?;
        let updated: StreamInfo =
            updated.map_err(|e| e.into_error(&format!("the stream {name} cannot be changed")))?;
        // While a cluster adds replicas, it answers with the old settings.
        Ok(StreamInfo {
            config: config.clone(),
            ..updated
        })
    }

    /// Removes the messages of the subjects that the filter selects.
    pub(crate) async fn purge(&self, stream: &str, filter: &str) -> Result<()> {
        let body = json!({ "filter": filter });
        let purged: Result<Value, ApiError> =
            self.api(&format!("STREAM.PURGE.{stream}"), &body).await?;
        match purged {
            Err(error) if error.err_code != number::STREAM_NOT_FOUND => {
                Err(error.into_error(&format!("the stream {stream} cannot be purged")))
            }
            _ => Ok(()),
        }
    }

    pub(crate) async fn consumer(&self, stream: &str, name: &str) -> Result<Option<ConsumerInfo>> {
        let verb = format!("CONSUMER.INFO.{stream}.{name}");
        match self.api(&verb, &Value::Null).await? {
            Ok(info) => Ok(Some(info)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error.into_error(&format!("consumer {name} of {stream}"))),
        }
    }

    /// Creates a consumer, or changes it.
    pub(crate) async fn put_consumer(
        &self,
        stream: &str,
        name: &str,
        config: &Value,
    ) -> Result<Result<ConsumerInfo, ApiError>> {
        let body = json!({ "stream_name": stream, "config": config });
        let verb = format!("CONSUMER.CREATE.{stream}.{name}");
        let mut tries = 0;
        loop {
            let put = self.api(&verb, &body).await?;
            // The server may still be removing the files of a consumer of this name.
            let removing = |error: &ApiError| error.err_code == number::CONSUMER_NOT_CREATED;
            if !put.as_ref().is_err_and(removing) || tries == 20 {
                return Ok(put);
            }
            tries += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn delete_consumer(&self, stream: &str, name: &str) -> Result<()> {
        let verb = format!("CONSUMER.DELETE.{stream}.{name}");
        match self.api::<Value>(&verb, &Value::Null).await? {
            Err(error) if !is_gone(&error) => {
                Err(error.into_error(&format!("consumer {name} of {stream}")))
            }
            _ => Ok(()),
        }
    }

    /// Reads a message from the leader of the stream.
    pub(crate) async fn message(&self, stream: &str, which: &Which) -> Result<Option<Stored>> {
        #[derive(Deserialize)]
        struct Answer {
            message: Raw,
        }
        #[derive(Deserialize)]
        struct Raw {
            subject: String,
            seq: u64,
            #[serde(default)]
            hdrs: String,
            #[serde(default)]
            data: String,
            time: String,
        }
        let body = serde_json::to_value(which).map_err(|e| unreadable(stream, &e))?;
        let verb = format!("STREAM.MSG.GET.{stream}");
        let raw = match self.api::<Answer>(&verb, &body).await? {
            Ok(answer) => answer.message,
            Err(error)
                if matches!(
                    error.err_code,
                    number::NO_MESSAGE | number::STREAM_NOT_FOUND | 10057 | 10043
                ) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error.into_error(&format!("a message of {stream}"))),
        };
        let decoded = |text: &str| {
            BASE64.decode(text.as_bytes()).map_err(|error| {
                let what = format!("a message of {stream} is not in base64: {error}");
                Error::new(Code::Unavailable, what)
            })
        };
        Ok(Some(Stored {
            subject: raw.subject,
            seq: raw.seq,
            time: raw.time.parse().unwrap_or(Timestamp::EPOCH),
            headers: parse_headers(&decoded(&raw.hdrs)?),
            payload: decoded(&raw.data)?.into(),
        }))
    }

    /// Reads several messages at once from any replica, which may be behind its leader.
    pub(crate) async fn messages(&self, stream: &str, which: &Which) -> Result<Vec<Stored>> {
        let inbox = self.client.new_inbox();
        let lost = |what: String| Error::new(Code::Unavailable, format!("{stream}: {what}"));
        let mut answers = self
            .client
            .subscribe(inbox.clone())
            .await
            .map_err(|e| lost(e.to_string()))?;
        let body = serde_json::to_vec(which).map_err(|e| unreadable(stream, &e))?;
        self.client
            .publish_with_reply(format!("{API}DIRECT.GET.{stream}"), inbox, body.into())
            .await
            .map_err(|e| lost(e.to_string()))?;
        let mut messages = Vec::new();
        loop {
            let next = tokio::time::timeout(self.timeout(), answers.next()).await;
            let Ok(Some(message)) = next else {
                return Err(lost("no answer to a read in time".to_owned()));
            };
            match message.status.map(|status| status.as_u16()) {
                None | Some(200) => messages.push(of_direct(message)),
                // 204: the end of the batch. 404: there is no message.
                Some(204 | 404) => return Ok(messages),
                // The stream is of another program and has no `allow_direct`, or it has no leader: reads one message
                // at a time from the leader.
                Some(503) => return self.messages_of_leader(stream, which).await,
                Some(status) => {
                    let text = message.description.unwrap_or_default();
                    return Err(lost(format!("a read was refused: {status} {text}")));
                }
            }
        }
    }
}

impl Link {
    /// Like [`Link::messages`], with one request to the leader for each message.
    async fn messages_of_leader(&self, stream: &str, which: &Which) -> Result<Vec<Stored>> {
        let mut messages: Vec<Stored> = Vec::new();
        let mut which = which.clone();
        for _ in 0..which.batch.take().unwrap_or(1) {
            let Some(stored) = self.message(stream, &which).await? else {
                break;
            };
            (which.seq, which.start_time) = (Some(stored.seq + 1), None);
            messages.push(stored);
        }
        Ok(messages)
    }
}

fn is_gone(error: &ApiError) -> bool {
    matches!(
        error.err_code,
        number::CONSUMER_NOT_FOUND | number::STREAM_NOT_FOUND
    )
}

/// Reads the answer to a direct get: subject, sequence and time are in its headers.
fn of_direct(message: async_nats::Message) -> Stored {
    let headers = message.headers.unwrap_or_default();
    // A publisher may have set headers of the same names. The server appends its own, so the last value counts.
    let text = |name: &str| headers.get_last(name).map_or("", |value| value.as_str());
    Stored {
        subject: text("Nats-Subject").to_owned(),
        seq: text("Nats-Sequence").parse().unwrap_or(0),
        time: text("Nats-Time-Stamp").parse().unwrap_or(Timestamp::EPOCH),
        payload: message.payload,
        headers,
    }
}

/// Headers as they are stored: a first line, then `name: value`.
fn parse_headers(bytes: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let text = String::from_utf8_lossy(bytes);
    for line in text.split("\r\n").skip(1) {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        let name: Result<async_nats::HeaderName, _> = name.parse();
        let value: Result<async_nats::HeaderValue, _> = value.trim().parse();
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    headers
}
