//! Documents of other senders whose large fields are in an object: the payload contains
//! `_s3Overflow {bucket, key}` ([`workflow::moved`]). The object is fetched when the event is read, like an object of
//! this bus.
//!
//! The reference comes from outside. It is followed only into the configured places, and there only into
//! the folder of objects. Otherwise a publisher could read other files of this machine, or make this
//! machine contact other servers.

use bytes::Bytes;
use everbus_core::{Code, Error, Event, Result};
use everbus_dialects::workflow::{self, MOVED, Overflow as Place};

use super::places::Flaw;
use super::store::{self, Store};
use super::{Objects, errors, key};

/// Whether an event may have its large fields in an object of another sender.
pub(super) fn is_foreign(event: &Event) -> bool {
    event
        .attributes()
        .is_some_and(|a| !a.metadata.is_empty() && a.metadata.contains_key(MOVED))
}

/// Whether an event refers to this object of another sender.
pub(super) fn refers_to(event: &Event, key: &str) -> bool {
    matches!(workflow::moved(event), Ok(Some(place)) if place.key == key)
}

/// The complete payload; `None` if it is complete already.
pub(super) async fn payload(objects: Option<&Objects>, event: &Event) -> Result<Option<Bytes>> {
    let Some(place) = workflow::moved(event).map_err(|e| as_store_error(&e))? else {
        return Ok(None);
    };
    let Some(objects) = objects else {
        let what = "no object store is configured";
        return Err(about(
            event,
            &place,
            what,
            Flaw::Elsewhere(String::new()).hint(),
        ));
    };
    let object = objects.fetch(event, &place).await?;
    let whole = workflow::completed(event.payload(), &object).map_err(|e| {
        let hint = "its fields are those that were left out of the payload";
        about(event, &place, e.message(), hint)
    })?;
    Ok(Some(whole.into()))
}

impl Objects {
    async fn fetch(&self, event: &Event, place: &Place) -> Result<Bytes> {
        for store in self.allowed(event, place)? {
            let Some(found) = store.get(&place.key).await? else {
                continue;
            };
            if found.meta.size > self.limit() as u64 {
                let what = format!("it has {} bytes", found.meta.size);
                let hint = "overflow.limit says how large the payload of an event may be";
                return Err(about(event, place, &what, hint));
            }
            let bytes = found.bytes().await;
            return bytes.map_err(|e| {
                errors::failed(format!("the object {:?} could not be read", place.key), e)
            });
        }
        Err(flawed(event, place, &Flaw::Missing))
    }

    /// The configured places that the reference names, if its key is inside the folder of objects there.
    fn allowed(&self, event: &Event, place: &Place) -> Result<Vec<&Store>> {
        let stores = std::iter::once(&self.store).chain(&self.others);
        let mut stores: Vec<&Store> = stores.collect();
        stores.retain(|store| store.is_called(&place.bucket));
        if stores.is_empty() {
            let bucket = place.bucket.escape_debug().to_string();
            return Err(flawed(event, place, &Flaw::Elsewhere(bucket)));
        }
        stores.retain(|store| is_within(store, &place.key));
        if stores.is_empty() {
            let what = "its key is outside the folder of objects of that place";
            let hint = "keys begin with events/, after the prefix of the place";
            return Err(about(event, place, what, hint));
        }
        Ok(stores)
    }
}

/// Whether a key is inside a place: under its prefix and in the folder of objects, without `..`.
fn is_within(store: &Store, wanted: &str) -> bool {
    let folder = wanted.strip_prefix(&store.prefix);
    let inside = folder.and_then(|rest| rest.strip_prefix(key::FOLDER)?.strip_prefix('/'));
    inside.is_some_and(|rest| !rest.is_empty()) && store::path(wanted).is_ok()
}

fn flawed(event: &Event, place: &Place, flaw: &Flaw) -> Error {
    about(event, place, &flaw.to_string(), flaw.hint())
}

fn about(event: &Event, place: &Place, what: &str, hint: &str) -> Error {
    Error::new(
        Code::ObjectStoreError,
        format!(
            "the large fields of {} are in the object {:?} of {:?}: {what}",
            event.display_id(),
            place.key,
            place.bucket
        ),
    )
    .hint(hint)
}

/// Reports an invalid reference as an object store error: readers handle both alike.
fn as_store_error(error: &Error) -> Error {
    let named = Error::new(Code::ObjectStoreError, error.message());
    match error.hint_text() {
        Some(hint) => named.hint(hint),
        None => named,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: workflow/overflow-foreign-place: a key that leaves the folder of objects is not looked for
    #[test]
    fn only_keys_in_the_folder_of_objects_are_within() {
        let mut store = Store::parse("/var/objects").unwrap();
        let good = "events/req-123/e-1-payload.json";
        assert!(is_within(&store, good));
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
            "everbus-log.json",
            "/etc/passwd",
            "events/a\0b",
            "prefix/events/x",
        ] {
            assert!(!is_within(&store, bad), "{bad:?}");
        }
        store.prefix = "prefix/".to_owned();
        assert!(is_within(&store, "prefix/events/x"));
        assert!(!is_within(&store, good));
        assert!(!is_within(&store, "prefix/../prefix/events/x"));
    }
}
