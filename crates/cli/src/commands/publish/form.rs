//! The input of `everbus publish`: payloads for events that the options describe, or whole documents of a
//! dialect.

use std::io::Read as _;
use std::path::Path;

use everbus::Dialect;
use everbus_core::{Code, Error, Event, EventBuilder, IntoEvent as _};

use super::LONGEST_LINE;
use crate::args::PublishArgs;
use crate::files::io_error;
use crate::stop::{Outcome, Stop};

/// What the input describes.
pub(super) enum Form<'a> {
    /// Payloads of events that are otherwise alike.
    Payloads(Box<EventBuilder>),
    /// Complete documents, and the options beside them.
    Documents {
        dialect: Dialect,
        event_type: Option<&'a str>,
        source: Option<&'a str>,
    },
}

impl Form<'_> {
    /// Reports mistakes before there is a payload.
    pub(super) fn check(&self) -> Result<(), Error> {
        match self {
            Self::Payloads(template) => EventBuilder::clone(template).build().map(drop),
            Self::Documents { .. } => Ok(()),
        }
    }

    pub(super) fn event(&self, bytes: Vec<u8>) -> Result<Event, Error> {
        match self {
            Self::Payloads(template) => EventBuilder::clone(template).payload(bytes).build(),
            Self::Documents {
                dialect,
                event_type,
                source,
            } => {
                let mut document = dialect.document(&bytes);
                if let Some(event_type) = event_type {
                    document = document.of_type(event_type);
                }
                if let Some(source) = source {
                    document = document.from_source(source);
                }
                document.into_event().map_err(|error| match error.code() {
                    // The library's hint names a function.
                    Code::InvalidType if *dialect == Dialect::Outbox && event_type.is_none() => {
                        error.hint("give the type before the document, as for a payload")
                    }
                    _ => error,
                })
            }
        }
    }
}

/// The form of the input, and its text, from the arguments without option names. A document needs no type before it.
pub(super) fn given(args: &PublishArgs) -> Outcome<(Form<'_>, &str)> {
    let (first, second) = (args.event_type.as_deref(), args.payload.as_deref());
    let Some(dialect) = args.dialect else {
        let template = Box::new(template(args));
        return Ok((Form::Payloads(template), second.unwrap_or("null")));
    };
    let (event_type, document) = match (first, second, &args.payload_from) {
        (event_type, None, Some(_)) => (event_type, ""),
        (event_type, Some(document), _) => (event_type, document),
        (Some(document), None, None) => (None, document),
        (None, None, None) => {
            return Err(Stop::usage(
                "there is no document to publish",
                Some("give it as --payload @FILE, or - for one per line of standard input"),
            ));
        }
    };
    let form = Form::Documents {
        dialect,
        event_type,
        source: args.source.as_deref(),
    };
    Ok((form, document))
}

fn template(args: &PublishArgs) -> EventBuilder {
    let event_type = args.event_type.as_deref().unwrap_or_default();
    let mut event = Event::builder(event_type).version(args.version);
    if let Some(source) = &args.source {
        event = event.source(source);
    }
    if let Some(id) = &args.id {
        event = event.foreign_id(id);
    }
    if let Some(key) = &args.key {
        event = event.key(key);
    }
    if let Some(tenant) = &args.tenant {
        event = event.tenant(tenant);
    }
    if let Some(app) = &args.app {
        event = event.app(app);
    }
    if let Some(entity) = &args.entity {
        event = event.entity(&entity.kind, &entity.id);
    }
    if let Some(id) = &args.correlation_id {
        event = event.correlation_id(id);
    }
    if let Some(content_type) = &args.content_type {
        event = event.content_type(content_type);
    }
    if let Some(at) = args.at {
        event = event.at(at);
    }
    if let Some(delay) = args.after {
        event = event.after(delay);
    }
    if let Some(group) = &args.to {
        event = event.addressed_to(group);
    }
    if let Some(ttl) = args.ttl {
        event = event.ttl(ttl);
    }
    for (key, value) in &args.meta {
        event = event.meta(key, value);
    }
    event
}

/// The payload that `--payload` names.
pub(super) fn payload_from(text: &str) -> Outcome<Vec<u8>> {
    let Some(name) = text.strip_prefix('@') else {
        return Ok(text.as_bytes().to_vec());
    };
    let mut payload = Vec::new();
    let most = LONGEST_LINE as u64 + 1;
    if name == "-" {
        let read = std::io::stdin().take(most).read_to_end(&mut payload);
        read.map_err(|e| Stop::Io(format!("cannot read standard input: {e}")))?;
    } else {
        let path = Path::new(name);
        let file = std::fs::File::open(path).and_then(|f| f.take(most).read_to_end(&mut payload));
        file.map_err(|e| io_error("cannot read", path, e))?;
    }
    if payload.len() > LONGEST_LINE {
        let what = format!("{name} has more than {} MiB", LONGEST_LINE >> 20);
        return Err(Stop::usage(
            what,
            Some("publish where it is, and not itself"),
        ));
    }
    Ok(payload)
}
