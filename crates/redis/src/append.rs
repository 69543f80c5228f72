//! Appending: one script for a batch, which stores all of it or nothing.
//!
//! For a window of time the server remembers each id, with the position of its event and a digest of its body. So a
//! publish whose answer was lost can be repeated.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use everbus_core::{Appended, Code, Error, Event, EventId, Result, Shard};
use everbus_dialects::Dialect;
use redis::Value;

use crate::broker::Shared;
use crate::client::{Arguments, Read as _};
use crate::errors;
use crate::keys::EntryId;
use crate::scripts::APPEND;
use crate::wire;

/// How long a publish waits for a server that is away.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where the events of a type go.
struct Route {
    event_type: Arc<str>,
    key: String,
    dialect: Dialect,
    /// The dotted type of the stream.
    dotted: String,
}

impl Shared {
    pub(crate) async fn append(&self, batch: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let mut arguments = Arguments::default();
        arguments.millis(self.options.window).number(batch.len());
        let mut route = None;
        for event in &batch {
            self.write_event_by(&mut route, event, &mut arguments)?;
        }
        let answer = self.patiently(&arguments).await?;
        let mut answers = answer.list()?.into_iter();
        let mut next = || answers.next().unwrap_or(Value::Nil);
        match next().text()?.as_str() {
            "ok" => {}
            "no" => {
                let index = next().number()?.saturating_sub(1);
                let index = usize::try_from(index).unwrap_or(usize::MAX);
                let (why, detail) = (next().text()?, next().text()?);
                let id = batch.get(index).map(Event::id);
                return Err(self.refused(&why, &detail, id));
            }
            _ => return Err(errors::unreadable("the answer to an append")),
        }
        let mut appended = Vec::with_capacity(batch.len());
        // Most events of a batch go to the same stream.
        let mut last: Option<(Bytes, Shard)> = None;
        for event in &batch {
            let mut parts = next().list()?.into_iter();
            let mut part = || parts.next().unwrap_or(Value::Nil).bytes();
            let (id, key, known) = (part()?, part()?, part()?);
            let id = EntryId::read(&id).ok_or_else(|| errors::unreadable("an id"))?;
            let shard = match &last {
                Some((known, shard)) if *known == key => *shard,
                _ => {
                    let shard = self.space.shard(&String::from_utf8_lossy(&key))?;
                    last.insert((key, shard)).1
                }
            };
            let answer = Appended::new(event.id(), id.position(shard), id.time());
            appended.push(Ok(match &known[..] == b"1" {
                true => answer.as_duplicate(),
                false => answer,
            }));
        }
        Ok(appended)
    }

    /// The error for an event that the script refused.
    pub(crate) fn refused(&self, why: &str, detail: &str, id: Option<EventId>) -> Error {
        match (why, id) {
            ("reused", Some(id)) => reused(&id.to_string()),
            ("reused", None) => reused(detail.split('@').next().unwrap_or(detail)),
            ("failed", _) => errors::of_text(&self.link.server, detail),
            _ => errors::wrong_type(&self.link.server, detail),
        }
    }

    /// Adds an event to the arguments of a script. Refuses an event that is too large for the server.
    pub(crate) fn write_event(&self, event: &Event, arguments: &mut Arguments) -> Result<()> {
        self.write_event_by(&mut None, event, arguments)
    }

    /// As [`write_event`](Self::write_event), for a batch: `last` has the route of the event before, which often has
    /// the same type.
    fn write_event_by(
        &self,
        last: &mut Option<Route>,
        event: &Event,
        arguments: &mut Arguments,
    ) -> Result<()> {
        let event_type = event.type_arc();
        let route = match last {
            Some(route) if route.event_type == *event_type => route,
            last => {
                let (key, dialect) = self.route(event_type)?;
                let dotted = self.space.types(&key).swap_remove(0);
                last.insert(Route {
                    event_type: event_type.clone(),
                    key,
                    dialect,
                    dotted,
                })
            }
        };
        let fields = wire::write(event, route.dialect, &route.dotted)?;
        if fields
            .iter()
            .any(|field| field.len() as u64 > self.max_bulk)
        {
            let what = format!(
                "the event is larger than {} bytes, which the server takes at most",
                self.max_bulk
            );
            return Err(Error::new(Code::PayloadTooLarge, what).hint(
                "let large payloads overflow to an object store, or raise proto-max-bulk-len of the server",
            ));
        }
        arguments
            .text(&route.key)
            .text(route.dialect.as_str())
            .text(&wire::id_name(event))
            .text(&wire::digest(event))
            .number(fields.len());
        for field in &fields {
            arguments.bytes(field);
        }
        Ok(())
    }

    /// Repeats an append while the server is away. The ids make that safe.
    async fn patiently(&self, arguments: &Arguments) -> Result<Value> {
        let began = Instant::now();
        let mut pause = Duration::from_millis(20);
        let mut unknown = false;
        loop {
            let left = PATIENCE.saturating_sub(began.elapsed());
            let answer = tokio::time::timeout(left, self.link.run(&APPEND, arguments)).await;
            let answer = answer.unwrap_or_else(|_| {
                let what = "no answer in time";
                Err(errors::away(&self.link.server, what, true))
            });
            let error = match answer {
                Err(error) if matches!(error.code(), Code::Unavailable | Code::Busy) => error,
                // An earlier attempt may have been stored, whatever the server answers to this one.
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
}

fn reused(id: &str) -> Error {
    let what = format!("the event {id} exists with another body");
    Error::new(Code::IdReused, what)
        .hint("an id names one event for ever; give the new event a new id")
}
