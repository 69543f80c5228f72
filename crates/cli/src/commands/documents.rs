//! Prints events as documents of a dialect, one per line, and reports fields that the dialect cannot carry.

use std::collections::BTreeSet;

use everbus::Dialect;
use everbus::dialects::{dropped, encode_stored};
use everbus_core::{Code, Error};
use serde_json::value::RawValue;

use super::get::Whole;
use crate::output::{Output, escaped};
use crate::stop::{Outcome, Stop};

/// Writes events in one dialect.
pub(super) struct Documents {
    dialect: Dialect,
    /// Losses that were reported already.
    said: BTreeSet<String>,
    /// Whether an event could not be written at all.
    incomplete: bool,
}

impl Documents {
    pub(super) fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            said: BTreeSet::new(),
            incomplete: false,
        }
    }

    /// Prints an event on its own line. An event that the dialect cannot express is reported and left out.
    pub(super) fn print(&mut self, whole: &Whole, output: &mut Output) -> Outcome {
        match self.written(whole) {
            Some(document) => output.line(document.get()),
            None => Ok(()),
        }
    }

    /// As [`print`](Self::print), for an event that must not be left out.
    pub(super) fn print_or_fail(&mut self, whole: &Whole, output: &mut Output) -> Outcome {
        let document = self.write(whole)?;
        output.line(document.get())
    }

    /// The document of an event; `None`, with a report, if the dialect cannot express it.
    pub(super) fn written(&mut self, whole: &Whole) -> Option<Box<RawValue>> {
        let written = self.write(whole);
        written
            .inspect_err(|error| {
                self.incomplete = true;
                let (id, error) = (whole.record.event.display_id(), error.to_string());
                tracing::warn!("{} is left out: {}", escaped(&id), escaped(&error));
            })
            .ok()
    }

    fn write(&mut self, whole: &Whole) -> Result<Box<RawValue>, Error> {
        self.incomplete |= whole.error.is_some();
        let dialect = self.dialect;
        let document = encode_stored(&whole.record, dialect)?;
        for name in dropped(&whole.record.event, dialect)? {
            if !self.said.contains(&name) {
                let shown = escaped(&name);
                tracing::warn!("the {dialect} dialect has no place for {shown}; it is left out");
                self.said.insert(name);
            }
        }
        serde_json::from_slice(&document).map_err(|e| {
            Error::new(Code::Internal, "a document that was written is no JSON").caused_by(e)
        })
    }

    /// Fails if an event was left out.
    pub(super) fn finish(&self) -> Outcome {
        match self.incomplete {
            true => Err(Stop::Unsatisfied),
            false => Ok(()),
        }
    }
}
