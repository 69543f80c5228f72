//! Every valid document comes back as it was.

use everbus_core::Event;
use everbus_dialects::cloudevents::{from_http, to_http};
use everbus_dialects::{Dialect, decode_beside, encode};
use proptest::prelude::*;

use crate::documents::{beside_of, cloudevents, documents, text};
use crate::support::exact;

fn read(document: &str, dialect: Dialect) -> Event {
    decode_beside(document.as_bytes(), dialect, &beside_of(dialect))
        .unwrap_or_else(|e| panic!("{e:?}: {document}"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    // conformance: memory/dialect-identity: dialect → native → dialect is the identity for every valid document
    #[test]
    fn every_valid_document_comes_back((dialect, document) in documents(), spaced: bool) {
        let text = text(&document, spaced);
        let event = read(&text, dialect);
        let again = encode(&event, dialect).unwrap();
        prop_assert_eq!(exact(&again), exact(text.as_bytes()));
        // The second time nothing changes either.
        let second = read(std::str::from_utf8(&again).unwrap(), dialect);
        prop_assert!(event.same_body(&second) && event.id() == second.id());
    }

    // conformance: memory/dialect-detour: what was kept survives the native document in between
    #[test]
    fn the_native_document_carries_what_was_kept((dialect, document) in documents()) {
        let text = text(&document, false);
        let event = read(&text, dialect);
        let native = encode(&event, Dialect::Native).unwrap();
        let carried = read(std::str::from_utf8(&native).unwrap(), Dialect::Native);
        if dialect != Dialect::Native {
            let again = encode(&carried, dialect).unwrap();
            prop_assert_eq!(exact(&again), exact(text.as_bytes()));
        }
        prop_assert_eq!(carried.id(), event.id());
    }

    // conformance: memory/dialect-payload-bytes: the payload is kept as it was written
    #[test]
    fn payloads_keep_their_bytes((dialect, document) in documents()) {
        let event = read(&text(&document, true), dialect);
        let names = ["payload", "properties", "data"];
        let found = document.iter().find(|(name, _)| names.contains(&name.as_str()));
        if let Some((_, json)) = found.filter(|_| event.is_json()) {
            prop_assert_eq!(std::str::from_utf8(event.payload()).unwrap(), json);
            let again = encode(&event, dialect).unwrap();
            prop_assert!(String::from_utf8(again).unwrap().contains(json.as_str()));
        }
    }

    #[test]
    fn binary_messages_come_back(document in cloudevents()) {
        let event = read(&text(&document, false), Dialect::CloudEvents);
        let (headers, body) = to_http(&event).unwrap();
        for (name, value) in &headers {
            let ascii = |text: &str| text.bytes().all(|b| (b' '..=b'~').contains(&b));
            prop_assert!(ascii(name) && ascii(value));
        }
        let back = from_http(&headers, &body).unwrap();
        prop_assert_eq!(back.id(), event.id());
        let (mut again, body_again) = to_http(&back).unwrap();
        let mut headers = headers;
        headers.sort();
        again.sort();
        prop_assert_eq!((again, body_again), (headers, body));
    }
}
