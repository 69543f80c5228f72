//! `POST /v1/events`: one event, a batch, or a stream of lines; native, CloudEvents, or another dialect.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use everbus::dialects::workflow::MOVED;
use everbus::dialects::{self, cloudevents};
use everbus::{
    Attributes, Class, Code, Dialect, Entity, Error, Event, EventId, Receipt, Timestamp,
};
use futures_util::{FutureExt as _, StreamExt as _};
use http::{HeaderMap, HeaderName, StatusCode, header};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::Answer;
use crate::auth::{Caller, Scope};
use crate::body::{self, Params, essence, from_json, unsupported};
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;
use crate::timer::ConnectionTimer;

/// A stream of lines is published in chunks of at most this many events.
const CHUNK: usize = 1000;
/// A chunk is also published once its lines have this many bytes.
const CHUNK_BYTES: usize = 1 << 20;

const SPECVERSION: HeaderName = HeaderName::from_static("ce-specversion");

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::post("/v1/events", Access::Scope(Scope::Publish), publish)
            .summary("Publishes events: one, a batch (all or none), or a stream of lines")
            .query::<PublishQuery>()
            .json::<NewEvents>()
            .accepts("application/x-ndjson")
            .accepts("application/cloudevents+json")
            .accepts("application/cloudevents-batch+json")
            .returns::<Published>(201),
    ]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PublishQuery {
    /// The dialect of a JSON body: native, cloudevents, omni, workflow, outbox or framework.
    #[serde(default)]
    dialect: Option<String>,
    /// The event type, for documents that have none.
    #[serde(default, rename = "type")]
    event_type: Option<String>,
}

/// One event or several.
#[derive(JsonSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only its schema is used")]
enum NewEvents {
    /// One.
    One(Box<NewEvent<'static>>),
    /// Several, stored together or not at all.
    Batch(Vec<NewEvent<'static>>),
}

/// An event to publish. Only the type is required.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct NewEvent<'a> {
    /// A UUID, or any text that is unique for the source. Publishing the same id again stores nothing, so give an id if
    /// the request may be repeated.
    #[serde(default, borrow)]
    id: Option<Cow<'a, str>>,
    /// `domain.entity.action`, such as `orders.order.placed`.
    #[serde(rename = "type", borrow)]
    event_type: Cow<'a, str>,
    /// The version of the payload; 1 unless given.
    #[serde(default)]
    version: Option<u32>,
    /// When it happened; now unless given.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    occurred_at: Option<Timestamp>,
    /// Who emitted it.
    #[serde(default)]
    source: Option<String>,
    /// The app that it belongs to.
    #[serde(default)]
    app: Option<String>,
    /// The tenant. With a token of a tenant it is set to that tenant; another tenant is refused.
    #[serde(default)]
    tenant: Option<String>,
    /// The entity that the event is about.
    #[serde(default)]
    #[schemars(with = "Option<super::shapes::EntityShape>")]
    entity: Option<Entity>,
    /// Events with the same key keep their order.
    #[serde(default)]
    key: Option<String>,
    /// Links all events that one request caused. Default: the X-Request-ID of the request.
    #[serde(default)]
    correlation_id: Option<String>,
    /// The event that caused it.
    #[serde(default)]
    causation_id: Option<String>,
    /// The event is not delivered before this time.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    not_before: Option<Timestamp>,
    /// The event is skipped if it was not handled before this time.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    expires_at: Option<Timestamp>,
    /// Additional texts by key.
    #[serde(default)]
    metadata: BTreeMap<String, String>,
    /// The payload: any JSON value, kept as it is written.
    #[serde(default, borrow)]
    #[schemars(with = "serde_json::Value")]
    payload: Option<&'a RawValue>,
}

impl NewEvent<'_> {
    fn into_event(self) -> Result<Event, Error> {
        let mut builder = Event::builder(&*self.event_type);
        if let Some(source) = self.source {
            builder = builder.source(source);
        }
        if let Some(id) = self.id {
            builder = builder.foreign_id(id);
        }
        if let Some(version) = self.version {
            builder = builder.version(version);
        }
        if let Some(at) = self.occurred_at {
            builder = builder.occurred_at(at);
        }
        if let Some(app) = self.app {
            builder = builder.app(app);
        }
        if let Some(tenant) = self.tenant {
            builder = builder.tenant(tenant);
        }
        if let Some(entity) = self.entity {
            builder = builder.entity(entity.kind, entity.id);
        }
        if let Some(key) = self.key {
            builder = builder.key(key);
        }
        if let Some(id) = self.correlation_id {
            builder = builder.correlation_id(id);
        }
        if let Some(id) = self.causation_id {
            builder = builder.causation_id(id);
        }
        if let Some(at) = self.not_before {
            builder = builder.at(at);
        }
        if let Some(at) = self.expires_at {
            builder = builder.expires_at(at);
        }
        for (key, value) in self.metadata {
            builder = builder.meta(key, value);
        }
        if let Some(payload) = self.payload {
            // The parser has already checked that the payload is JSON.
            builder = builder.json(payload);
        }
        builder.build()
    }
}

/// The result of a publish.
#[derive(Serialize, JsonSchema)]
struct Published {
    /// One item for each event, in the same order. Left out for a stream of lines.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    items: Vec<Stored>,
    /// How many events were stored, duplicates included.
    published: u64,
    /// How many of the events were stored before.
    duplicates: u64,
}

/// One stored event.
#[derive(Serialize, JsonSchema)]
struct Stored {
    /// Its id.
    #[schemars(with = "String")]
    id: EventId,
    /// Its place in the log.
    #[schemars(with = "serde_json::Value")]
    seq: everbus::Position,
    /// When it was stored.
    #[schemars(with = "String")]
    received_at: Timestamp,
    /// Whether the event was stored before. Then nothing was stored now.
    duplicate: bool,
}

impl Stored {
    fn of(receipt: &Receipt) -> Self {
        Self {
            id: receipt.id(),
            seq: receipt.position(),
            received_at: receipt.received_at(),
            duplicate: receipt.is_duplicate(),
        }
    }
}

async fn publish(
    State(state): State<AppState>,
    caller: Caller,
    Params(query): Params<PublishQuery>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let (headers, limits) = (&parts.headers, &state.options().limits);
    let kind = essence(headers);
    if matches!(
        &*kind,
        "application/x-ndjson" | "application/ndjson" | "application/jsonl"
    ) {
        // A compressed body is limited in size, so it is read as a whole.
        let body = match headers.contains_key(header::CONTENT_ENCODING) {
            true => Body::from(body::read(body, &parts, limits).await?),
            false => body,
        };
        let timer = body::timer_of(&parts, limits);
        let published = lines(&state, &caller, body, timer).await?;
        return Ok((StatusCode::CREATED, Answer(published)).into_response());
    }
    let body = body::read(body, &parts, limits).await?;
    let events = read(&body, headers, &kind, &query)?;
    if events.len() > limits.batch {
        let what = format!("more than {} events in one request", limits.batch);
        return Err(
            Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "BatchTooLarge", what)
                .hint("send several requests, or a stream of lines (application/x-ndjson)"),
        );
    }
    let events = events.into_iter().enumerate();
    let events: Vec<Event> = events
        .map(|(index, event)| accepted(&caller, index, event))
        .collect::<Result<_, _>>()?;
    let receipts = state.bus().publish_batch(events).await?;
    let items: Vec<Stored> = receipts.iter().map(Stored::of).collect();
    let published = Published {
        published: items.len() as u64,
        duplicates: items.iter().filter(|item| item.duplicate).count() as u64,
        items,
    };
    Ok((StatusCode::CREATED, Answer(published)).into_response())
}

/// Parses the events of a body.
fn read(
    body: &[u8],
    headers: &HeaderMap,
    kind: &str,
    query: &PublishQuery,
) -> Result<Vec<Event>, Problem> {
    let dialect = match &query.dialect {
        Some(name) => Some(name.parse::<Dialect>()?),
        None => None,
    };
    let is_cloud = headers.contains_key(SPECVERSION);
    match kind {
        "application/cloudevents+json" | "application/cloudevents" => {
            Ok(vec![dialects::decode(body, Dialect::CloudEvents)?])
        }
        "application/cloudevents-batch+json" => each(body, |one| {
            Ok(dialects::decode(
                one.get().as_bytes(),
                Dialect::CloudEvents,
            )?)
        }),
        _ if is_cloud => Ok(vec![cloudevents::from_http(
            &cloud_headers(headers)?,
            body,
        )?]),
        "application/json" => {
            let is_list = body.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'[');
            match (dialect, is_list) {
                (None, false) => Ok(vec![native(body)?]),
                (None, true) => natives(body),
                (Some(dialect), false) => {
                    let event_type = query.event_type.as_deref();
                    Ok(vec![document(from_json(body)?, dialect, event_type)?])
                }
                (Some(dialect), true) => each(body, |one| {
                    document(one, dialect, query.event_type.as_deref())
                }),
            }
        }
        other => Err(unsupported(
            other,
            "application/json, application/x-ndjson, application/cloudevents+json, application/cloudevents-batch+json",
        )),
    }
}

/// Parses an event in the native format.
fn native(text: &[u8]) -> Result<Event, Problem> {
    Ok(from_json::<NewEvent<'_>>(text)?.into_event()?)
}

/// Parses a list of events in the native format.
fn natives(body: &[u8]) -> Result<Vec<Event>, Problem> {
    if let Ok(all) = serde_json::from_slice::<Vec<NewEvent<'_>>>(body) {
        let events = all.into_iter().enumerate();
        return events
            .map(|(index, one)| one.into_event().map_err(|e| Problem::from(e).at(index)))
            .collect();
    }
    // The elements are parsed again one by one, so that the error names the wrong element.
    each(body, |one| native(one.get().as_bytes()))
}

fn document(one: &RawValue, dialect: Dialect, event_type: Option<&str>) -> Result<Event, Problem> {
    let beside = dialects::Beside {
        event_type,
        ..dialects::Beside::default()
    };
    Ok(dialects::decode_beside(
        one.get().as_bytes(),
        dialect,
        &beside,
    )?)
}

/// Parses each element of a list with `read`. An error names the element.
fn each(
    body: &[u8],
    read: impl Fn(&RawValue) -> Result<Event, Problem>,
) -> Result<Vec<Event>, Problem> {
    let all: Vec<&RawValue> = from_json(body)?;
    let events = all.into_iter().enumerate();
    events
        .map(|(index, one)| read(one).map_err(|problem| problem.at(index)))
        .collect()
}

/// The headers of a CloudEvent in binary mode.
fn cloud_headers(headers: &HeaderMap) -> Result<cloudevents::Headers, Problem> {
    let wanted = headers
        .iter()
        .filter(|(name, _)| name.as_str().starts_with("ce-") || *name == "content-type");
    wanted
        .map(|(name, value)| {
            let value = value.to_str().map_err(|_| {
                Problem::bad_request(format!("the header {name} is not printable ASCII"))
            })?;
            Ok((name.as_str().to_owned(), value.to_owned()))
        })
        .collect()
}

/// Checks whether the caller may publish an event, and sets its tenant to the tenant of the caller. An event of another
/// tenant is refused, not changed.
fn accepted(caller: &Caller, index: usize, event: Event) -> Result<Event, Problem> {
    // The bus accepts `system.` events, because replays publish copies of them. A client may not publish any.
    if event.event_type().starts_with("system.") {
        let what = "types that begin with system. are those of the bus itself";
        let problem = Problem::new(StatusCode::BAD_REQUEST, "InvalidType", what);
        return Err(problem.hint("choose a type of your own").at(index));
    }
    let Some(tenant) = caller.tenant() else {
        return Ok(event);
    };
    // The object could contain the payload of another tenant.
    if event.metadata().contains_key(MOVED) {
        let what = "a token of a tenant cannot publish a reference to a stored object";
        return Err(Problem::forbidden(what).at(index));
    }
    match event.tenant() {
        Some(own) if own == tenant => Ok(event),
        Some(_) => Err(Problem::forbidden("the event belongs to another tenant").at(index)),
        None => with_tenant(&event, tenant).map_err(|e| Problem::from(e).at(index)),
    }
}

fn with_tenant(event: &Event, tenant: &str) -> Result<Event, Error> {
    let attributes = event.attributes().cloned().unwrap_or_default();
    let mut builder = Event::builder(event.type_arc().clone())
        .version(event.version())
        .occurred_at(event.occurred_at())
        .payload(event.payload().clone())
        .attributes(Attributes {
            tenant: Some(tenant.to_owned()),
            ..attributes
        });
    if !event.has_made_id() {
        builder = builder.id(event.id());
    }
    builder.build()
}

/// Publishes a stream of lines, chunk by chunk, as they arrive. All lines before the first bad one are published, and
/// no line after it.
async fn lines(
    state: &AppState,
    caller: &Caller,
    body: Body,
    timer: ConnectionTimer,
) -> Result<Published, Problem> {
    let limits = &state.options().limits;
    let mut reading = Lines {
        stream: body.into_data_stream(),
        timer,
        buffer: BytesMut::new(),
        searched: 0,
        most: limits.body,
        patience: limits.body_timeout,
        ended: false,
    };
    let mut done = Published {
        items: Vec::new(),
        published: 0,
        duplicates: 0,
    };
    let mut number = 0;
    loop {
        let (chunk, failed) = tokio::select! {
            chunk = reading.chunk() => chunk,
            () = state.stopping() => {
                let what = "the server stops";
                let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Stopping", what);
                return Err(problem.retry_after(1).published(done.published));
            }
        };
        let mut events = Vec::with_capacity(chunk.len());
        let mut bad = failed;
        for line in &chunk {
            number += 1;
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let event = native(line).and_then(|event| accepted(caller, number - 1, event));
            match event {
                Ok(event) => events.push((number - 1, event)),
                Err(problem) => {
                    bad = Some(problem.at(number - 1));
                    break;
                }
            }
        }
        if let Err(problem) = store(state.bus(), events, &mut done).await {
            bad = Some(problem);
        }
        if let Some(problem) = bad {
            return Err(problem.published(done.published));
        }
        if reading.ended {
            return Ok(done);
        }
    }
}

/// Stores the events of a chunk. Each has the index of its line. If an event is refused, the events before it are
/// stored.
async fn store(
    bus: &everbus::Bus,
    events: Vec<(usize, Event)>,
    done: &mut Published,
) -> Result<(), Problem> {
    if events.is_empty() {
        return Ok(());
    }
    let all: Vec<Event> = events.iter().map(|(_, event)| event.clone()).collect();
    match bus.publish_batch(all).await {
        Ok(receipts) => {
            done.published += receipts.len() as u64;
            done.duplicates += receipts.iter().filter(|r| r.is_duplicate()).count() as u64;
            Ok(())
        }
        Err(error) if matches!(error.class(), Class::Caller | Class::Conflict) => {
            for (line, event) in events {
                let receipt = bus.publish(event).await;
                let receipt = receipt.map_err(|e| Problem::from(e).at(line))?;
                done.published += 1;
                done.duplicates += u64::from(receipt.is_duplicate());
            }
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Splits a body into lines, with bounded memory.
struct Lines {
    stream: BodyDataStream,
    timer: ConnectionTimer,
    buffer: BytesMut,
    /// The first bytes of the buffer, up to this index, contain no newline.
    searched: usize,
    most: usize,
    patience: Duration,
    ended: bool,
}

impl Lines {
    /// Returns the lines that have arrived: at least one, unless the body has ended or failed. Also returns the error
    /// of the rest of the body, if there is one.
    async fn chunk(&mut self) -> (Vec<Bytes>, Option<Problem>) {
        let (mut lines, mut bytes) = (Vec::new(), 0);
        loop {
            while let Some(end) = self.buffer[self.searched..]
                .iter()
                .position(|b| *b == b'\n')
            {
                let line = self.buffer.split_to(self.searched + end + 1).freeze();
                self.searched = 0;
                bytes += line.len();
                lines.push(line);
                if lines.len() >= CHUNK || bytes >= CHUNK_BYTES {
                    return (lines, None);
                }
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > self.most {
                let what = format!("a line has more than {} bytes", self.most);
                let status = StatusCode::PAYLOAD_TOO_LARGE;
                return (lines, Some(Problem::new(status, "BodyTooLarge", what)));
            }
            let next = if lines.is_empty() {
                let deadline = Instant::now() + self.patience;
                self.timer.before(deadline, self.stream.next()).await
            } else {
                // Complete lines are published before this waits for more.
                at_hand(&mut self.stream).await
            };
            match next {
                Some(Some(Ok(data))) => self.buffer.extend_from_slice(&data),
                Some(Some(Err(_))) => {
                    return (lines, Some(Problem::bad_request("the body ended early")));
                }
                Some(None) => {
                    self.ended = true;
                    if !self.buffer.is_empty() {
                        self.searched = 0;
                        lines.push(self.buffer.split().freeze());
                    }
                    return (lines, None);
                }
                None if !lines.is_empty() => return (lines, None),
                None => {
                    let what = "the next line did not arrive in time";
                    let status = StatusCode::REQUEST_TIMEOUT;
                    return (lines, Some(Problem::new(status, "BodyTimeout", what)));
                }
            }
        }
    }
}

/// The next piece of a body, if it has arrived. The connection reads only on request, so this polls, yields, and polls
/// again.
async fn at_hand(stream: &mut BodyDataStream) -> Option<Option<Result<Bytes, axum::Error>>> {
    if let Some(next) = stream.next().now_or_never() {
        return Some(next);
    }
    tokio::task::yield_now().await;
    stream.next().now_or_never()
}

/// Parses an id from a client: a UUID, or a foreign id with its source.
pub(crate) fn event_id(text: &str, source: Option<&str>) -> EventId {
    EventId::from_foreign(source.unwrap_or_default(), text)
}

/// The error for an event that does not exist, or that the caller may not see. Both get the same error.
pub(super) fn no_event(id: &str) -> Problem {
    Error::new(Code::NotFound, format!("there is no event {id:?}"))
        .hint("an id that is not a UUID also needs ?source=, the source it was published with")
        .into()
}
