//! Overflow in a build without the feature `overflow`: no event is split, and an event that was split
//! elsewhere is refused.

#[path = "options.rs"]
mod options;

use std::sync::Arc;

use everbus_core::{Code, Engine, Error, Event, Overflow as Reference, Recorded, Result};

pub use options::{LARGEST_EVENT, Overflow, THRESHOLD};

const HINT: &str = "build with the feature `overflow` of the crate everbus";

/// Has no values: this build has no object store.
#[derive(Debug)]
pub(crate) enum Objects {}

impl Objects {
    pub(crate) fn open(_: &Engine, options: &Overflow) -> Result<Option<Arc<Self>>> {
        options.validate()?;
        if options.url.is_some() {
            let what = "large parts of events cannot go to an object store in this build";
            return Err(Error::new(Code::Unsupported, what).hint(HINT));
        }
        Ok(None)
    }

    pub(crate) fn limit(&self) -> Option<usize> {
        match *self {}
    }

    pub(crate) fn is_over(&self, _: &Event) -> bool {
        match *self {}
    }

    pub(crate) async fn offload(&self, _: Event) -> Result<Event> {
        match *self {}
    }

    pub(crate) async fn discard(&self, _: &Engine, _: &Event) -> Result<()> {
        match *self {}
    }
}

/// Returns the record unchanged. `Unsupported` if a part of its payload is in an object store.
pub(crate) async fn whole(_: Option<&Objects>, record: &Arc<Recorded>) -> Result<Arc<Recorded>> {
    let Some(Reference { bucket, key, .. }) = record.event.overflow() else {
        return Ok(record.clone());
    };
    let id = record.event.display_id();
    let what = format!("the payload of {id} is in the object {key:?} of {bucket:?}");
    Err(Error::new(
        Code::Unsupported,
        format!("{what}, and this build reads no objects"),
    )
    .hint(HINT))
}

/// Whether a part of the payload is in an object.
pub(crate) fn is_apart(event: &Event) -> bool {
    event.overflow().is_some()
}
