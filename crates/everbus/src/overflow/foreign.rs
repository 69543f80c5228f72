//! Documents of other senders whose large fields are in an object: the payload contains
//! `_s3Overflow {bucket, key}` ([`workflow::moved`]). The object is fetched when the event is read, like an object of
//! this bus.
//!
//! The reference comes from outside. It is followed only into the configured places, and there only into
//! the folder of objects. Otherwise a publisher could read other files of this machine, or make this
//! machine contact other servers.

use bytes::Bytes;
use everbus_core::{Event, Result};
use everbus_dialects::workflow::{self, MOVED, Overflow as Reference};

use super::read::{Flaw, content};
use super::{Objects, Place, key, place};

/// Whether an event may have its large fields in an object of another sender.
pub(super) fn is_foreign(event: &Event) -> bool {
    let attributes = event.attributes();
    attributes.is_some_and(|a| !a.metadata.is_empty() && a.metadata.contains_key(MOVED))
}

/// Whether an event refers to this object of another sender.
pub(super) fn refers_to(event: &Event, key: &str) -> bool {
    matches!(workflow::moved(event), Ok(Some(reference)) if reference.key == key)
}

/// The complete payload; `None` if it is complete already.
pub(super) async fn payload(objects: Option<&Objects>, event: &Event) -> Result<Option<Bytes>> {
    let Some(reference) = workflow::moved(event)? else {
        return Ok(None);
    };
    let flawed = |flaw: Flaw| flaw.of(event, &reference.bucket, &reference.key);
    let Some(objects) = objects else {
        return Err(flawed(Flaw::unconfigured()));
    };
    for place in objects.allowed(&reference).map_err(flawed)? {
        let Some(found) = place.get(&reference.key, false).await? else {
            continue;
        };
        let size = found.meta.size;
        if size > objects.options.limit as u64 {
            let what = format!("it has {size} bytes");
            let hint = "overflow.limit says how large the payload of an event may be";
            return Err(flawed(Flaw { what, hint }));
        }
        let object = content(found, &reference.key).await?;
        let whole = workflow::completed(event.payload(), &object).map_err(|e| {
            let hint = "its fields are those that were left out of the payload";
            let what = e.message().to_owned();
            flawed(Flaw { what, hint })
        })?;
        return Ok(Some(whole.into()));
    }
    Err(flawed(Flaw::missing()))
}

impl Objects {
    /// The configured places that the reference names, if its key is inside the folder of objects there.
    fn allowed(&self, reference: &Reference) -> Result<Vec<&Place>, Flaw> {
        let mut places: Vec<&Place> = self.places().collect();
        places.retain(|place| place.name() == reference.bucket);
        if places.is_empty() {
            let bucket = reference.bucket.escape_debug().to_string();
            return Err(Flaw::elsewhere(&bucket));
        }
        places.retain(|place| is_within(place, &reference.key));
        if places.is_empty() {
            return Err(Flaw {
                what: "its key is outside the folder of objects of that place".into(),
                hint: "keys begin with events/, after the prefix of the place",
            });
        }
        Ok(places)
    }
}

/// Whether a key is inside a place: under its prefix and in the folder of objects, without `..`.
fn is_within(place: &Place, wanted: &str) -> bool {
    let folder = wanted.strip_prefix(&place.prefix);
    let inside = folder.and_then(|rest| rest.strip_prefix(key::FOLDER)?.strip_prefix('/'));
    inside.is_some_and(|rest| !rest.is_empty()) && place::path(wanted).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: workflow/overflow-foreign-place: a key that leaves the folder of objects is not looked for
    #[test]
    fn only_keys_in_the_folder_of_objects_are_within() {
        let mut place = Place::parse("/var/objects").unwrap();
        let good = "events/req-123/e-1-payload.json";
        assert!(is_within(&place, good));
        for bad in [
            "",
            "events",
            "events/",
            "events/..",
            "events/../secret",
            "events/./x",
            "events//x",
            "../events/x",
            "/events/x",
            "eventsx/y",
            "/etc/passwd",
            "events/a\0b",
            "prefix/events/x",
        ] {
            assert!(!is_within(&place, bad), "{bad:?}");
        }
        place.prefix = "prefix/".to_owned();
        assert!(is_within(&place, "prefix/events/x"));
        assert!(!is_within(&place, good));
        assert!(!is_within(&place, "prefix/../prefix/events/x"));
    }
}
