//! Documents of other senders whose large fields are in an object: the properties contain `_s3Overflow`
//! instead. This module does not decide which objects may be fetched.

use everbus_core::{Code, Error, Event, Result};
use serde::Deserialize;

use super::properties::{Members, Overflow, REFERENCE};

/// The metadata key of an event that came with `_s3Overflow` in its properties, so that the payloads of
/// other events need not be searched.
pub const MOVED: &str = "s3_overflow";
/// Its value.
pub(super) const BY: &str = "workflow";

/// The largest lengths of a bucket name or directory, and of an S3 key.
const LONGEST_BUCKET: usize = 4096;
const LONGEST_KEY: usize = 1024;

/// Whether the properties of a document contain `_s3Overflow`.
pub(super) fn says_so(properties: &str) -> bool {
    properties.contains(REFERENCE)
        && serde_json::from_str::<Members<'_>>(properties)
            .is_ok_and(|members| members.0.iter().any(|(name, _)| name == REFERENCE))
}

/// Where the large fields are, for an event with `_s3Overflow` in its properties. `None` for other events,
/// or if the payload was corrected since.
pub fn moved(event: &Event) -> Result<Option<Overflow>> {
    #[derive(Deserialize)]
    struct Reference {
        #[serde(rename = "_s3Overflow")]
        place: Option<Overflow>,
    }
    if !event.metadata().contains_key(MOVED) {
        return Ok(None);
    }
    let bad = |why: &dyn std::fmt::Display| {
        let id = event.display_id();
        let what = format!("{REFERENCE} of {id:?} does not say where the large fields are: {why}");
        // Readers handle an invalid reference and a missing object alike.
        Error::new(Code::ObjectStoreError, what)
            .hint("it is {\"bucket\": …, \"key\": \"events/…/…-payload.json\"}")
    };
    let reference: Reference = serde_json::from_slice(event.payload()).map_err(|e| bad(&e))?;
    match reference.place {
        Some(place) if place.bucket.len() > LONGEST_BUCKET || place.key.len() > LONGEST_KEY => {
            Err(bad(&"its names are too long"))
        }
        place => Ok(place),
    }
}

/// The properties with the fields of the object instead of `_s3Overflow`.
pub fn completed(properties: &[u8], object: &[u8]) -> Result<Vec<u8>> {
    let read = |what: &str, json| {
        serde_json::from_slice::<Members<'_>>(json).map_err(|e| {
            let what = format!("{what} cannot be read: {e}");
            Error::new(Code::InvalidPayloadError, what).hint("it is a JSON object")
        })
    };
    let rest = read("what is left of the payload", properties)?;
    let object = read("the object", object)?;
    let kept = |name: &str| name != REFERENCE && object.0.iter().all(|(other, _)| other != name);
    let rest = rest.0.iter().filter(|(name, _)| kept(name));
    let mut whole = Vec::with_capacity(properties.len() + 64);
    for (name, value) in rest.chain(&object.0) {
        whole.push(if whole.is_empty() { b'{' } else { b',' });
        whole.extend_from_slice(
            serde_json::Value::from(name.as_str())
                .to_string()
                .as_bytes(),
        );
        whole.push(b':');
        whole.extend_from_slice(value.get().as_bytes());
    }
    whole.extend_from_slice(if whole.is_empty() { &b"{}"[..] } else { b"}" });
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_the_object_take_the_place_of_the_reference() {
        let whole = |properties: &str, object: &str| {
            let whole = completed(properties.as_bytes(), object.as_bytes()).unwrap();
            String::from_utf8(whole).unwrap()
        };
        let rest = r#"{"requestId":"r","_s3Overflow":{"bucket":"b","key":"k"},"n":1.50}"#;
        assert_eq!(
            whole(rest, r#"{"outputs":[1.0, 2],"input":null}"#),
            r#"{"requestId":"r","n":1.50,"outputs":[1.0, 2],"input":null}"#
        );
        // If a field is in both, the one in the object counts.
        assert_eq!(
            whole(r#"{"input":null}"#, r#"{"input":7}"#),
            r#"{"input":7}"#
        );
        assert_eq!(whole(r#"{"_s3Overflow":1}"#, "{}"), "{}");
        for bad in ["", "[1]", "null", "\"x\"", "{\"a\":}"] {
            let error = completed(rest.as_bytes(), bad.as_bytes()).unwrap_err();
            assert_eq!(error.code(), Code::InvalidPayloadError, "{bad}");
        }
    }

    #[test]
    fn only_a_member_of_the_properties_is_a_reference() {
        assert!(says_so(r#"{"a":1,"_s3Overflow":{}}"#));
        for none in [r#"{"a":"_s3Overflow"}"#, r#"{"a":{"_s3Overflow":1}}"#, "[]"] {
            assert!(!says_so(none), "{none}");
        }
    }
}
