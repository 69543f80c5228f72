//! CloudEvents 1.0 over HTTP, with the examples of the standard.

use everbus_core::{Code, Event};
use everbus_dialects::cloudevents::{Headers, from_http, to_http};
use everbus_dialects::{Dialect, decode, encode};

use crate::cloudevents::{BINARY, OBJECT, STRING, XML};
use crate::support::{round, value};

fn headers(list: &[(&str, &str)]) -> Headers {
    list.iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

fn sorted(mut headers: Headers) -> Headers {
    headers.sort();
    headers
}

fn attributes(id: &str) -> Vec<(&'static str, String)> {
    vec![
        ("ce-specversion", "1.0".into()),
        ("ce-type", "com.example.someevent".into()),
        ("ce-source", "/mycontext".into()),
        ("ce-id", id.into()),
        ("ce-time", "2018-04-05T17:31:00Z".into()),
        ("ce-comexampleextension1", "value".into()),
        ("ce-comexampleothervalue", "5".into()),
    ]
}

// conformance: memory/dialect-cloudevents-http: binary mode, the examples of the standard
#[test]
fn the_examples_of_the_standard_in_binary_mode() {
    for (document, id, content_type, body) in [
        (
            BINARY,
            "A234-1234-1234",
            "application/vnd.apache.thrift.binary",
            &[0, 1, 0xff, 0x80][..],
        ),
        (
            XML,
            "B234-1234-1234",
            "application/xml",
            b"<much wow=\"xml\"/>",
        ),
        (
            OBJECT,
            "C234-1234-1234",
            "application/json",
            b"{ \"appinfoA\" : \"abc\", \"appinfoB\" : 123, \"appinfoC\" : true }",
        ),
        (
            STRING,
            "D234-1234-1234",
            "application/json",
            b"\"I'm just a string\"",
        ),
    ] {
        let event = decode(document.as_bytes(), Dialect::CloudEvents).unwrap();
        let (found, found_body) = to_http(&event).unwrap();
        let mut expected = attributes(id);
        expected.push(("content-type", content_type.into()));
        let expected = expected
            .into_iter()
            .map(|(n, v)| (n.to_owned(), v))
            .collect();
        assert_eq!(sorted(found.clone()), sorted(expected));
        assert_eq!(&found_body[..], body);
        let back = from_http(&found, &found_body).unwrap();
        assert_eq!((back.id(), back.payload()), (event.id(), event.payload()));
        assert_eq!(sorted(to_http(&back).unwrap().0), sorted(found));
    }
}

#[test]
fn header_values_are_percent_encoded_as_the_standard_shows() {
    let event = Event::builder("t")
        .source("s")
        .meta("note", "Euro € 😀")
        .meta("quote", "100% \"sure\"")
        .build()
        .unwrap();
    let (found, body) = to_http(&event).unwrap();
    let get = |name: &str| &found.iter().find(|(n, _)| n == name).unwrap().1;
    assert_eq!(get("ce-note"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
    assert_eq!(get("ce-quote"), "100%25%20%22sure%22");
    assert_eq!(
        from_http(&found, &body).unwrap().metadata(),
        event.metadata()
    );
}

#[test]
fn header_values_are_read_with_quotes_and_needless_escapes_and_any_case() {
    let read = |value: &str| {
        let list = headers(&[
            ("CE-SpecVersion", "1.0"),
            ("Ce-Id", "1"),
            ("ce-source", "s"),
            ("ce-type", "t"),
            ("ce-note", value),
            ("Host", "example.com"),
        ]);
        from_http(&list, b"").map(|event| event.metadata()["note"].clone())
    };
    assert_eq!(read("\"a \\\"b\\\" c\"").unwrap(), "a \"b\" c");
    assert_eq!(read("  %61%e2%82%ac ").unwrap(), "a€");
    assert_eq!(read("a b").unwrap(), "a b");
    for bad in ["%C0%A0", "50%", "%zz", "%2", "\"open", "%00", "a%0d%0ab"] {
        let e = read(bad).unwrap_err();
        assert_eq!(e.code(), Code::InvalidAttribute, "{bad}");
        assert!(e.message().contains("\"note\""), "{e}");
    }
}

#[test]
fn structured_mode_is_known_by_its_content_type() {
    let kinds = [
        "application/cloudevents+json; charset=UTF-8",
        "Application/CloudEvents+JSON",
        "application/cloudevents",
    ];
    for kind in kinds {
        let list = headers(&[("Content-Type", kind)]);
        let event = from_http(&list, OBJECT.as_bytes()).unwrap();
        assert_eq!(event.display_id(), "C234-1234-1234");
    }
    for kind in [
        "application/cloudevents-batch+json",
        "application/cloudevents+avro",
    ] {
        let list = headers(&[("content-type", kind)]);
        let e = from_http(&list, b"[]").unwrap_err();
        assert_eq!(e.code(), Code::Unsupported);
        assert!(e.message().contains(kind));
    }
}

fn minimal() -> Headers {
    headers(&[
        ("ce-specversion", "1.0"),
        ("ce-id", "1"),
        ("ce-source", "s"),
        ("ce-type", "t"),
        ("ce-time", "2018-04-05T17:31:00Z"),
    ])
}

#[test]
fn a_message_without_content_type_or_body_comes_back_so() {
    let typed = |kind: Option<&str>| {
        let mut list = minimal();
        list.extend(kind.map(|kind| ("content-type".to_owned(), kind.to_owned())));
        list
    };
    for (kind, body) in [
        (None, &b""[..]),
        (None, b"{\"a\":1}"),
        (None, b"\xff\x00"),
        (None, b"not json"),
        (Some("application/json"), b""),
        (Some("text/plain"), b""),
        (Some("text/plain"), b"hello"),
        (Some("image/png"), b"\xff\xd8"),
    ] {
        let sent = typed(kind);
        let event = from_http(&sent, body).unwrap();
        let (found, found_body) = to_http(&event).unwrap();
        assert_eq!(
            (sorted(found), &found_body[..]),
            (sorted(sent), body),
            "{kind:?}"
        );
        // The other mode says the same.
        let document = String::from_utf8(encode(&event, Dialect::CloudEvents).unwrap()).unwrap();
        let other = round(&document, Dialect::CloudEvents);
        assert_eq!(other.payload(), event.payload());
        assert_eq!(
            value(document.as_bytes()).get("data").is_none(),
            body.is_empty() || body[0] == 0xff
        );
    }
}

#[test]
fn mistakes_are_refused() {
    let with = |name: &str, value: &str| {
        let mut list = minimal();
        list.push((name.to_owned(), value.to_owned()));
        from_http(&list, b"{}").unwrap_err()
    };
    for (name, value) in [
        ("ce-id", "2"),
        ("CE-ID", "2"),
        ("ce-datacontenttype", "text/plain"),
        ("ce-data", "x"),
        ("ce-with-dash", "x"),
        ("ce-", "x"),
    ] {
        assert_eq!(with(name, value).code(), Code::InvalidAttribute, "{name}");
    }
    let mut twice = minimal();
    twice.extend(headers(&[("content-type", "a/b"), ("Content-Type", "a/c")]));
    assert_eq!(
        from_http(&twice, b"").unwrap_err().code(),
        Code::InvalidAttribute
    );
    let e = from_http(&minimal()[1..], b"{}").unwrap_err();
    assert!(e.message().contains("\"specversion\""), "{e}");
    let mut broken = minimal();
    broken.extend(headers(&[("content-type", "application/json")]));
    assert_eq!(
        from_http(&broken, b"{").unwrap_err().code(),
        Code::InvalidPayloadError
    );
}

#[test]
fn a_content_type_cannot_smuggle_in_a_header() {
    for kind in ["text/plain\r\nx-evil: 1", "text/plain\n", "text/pläin"] {
        let event = Event::builder("t")
            .payload("x")
            .content_type(kind)
            .build()
            .unwrap();
        assert_eq!(to_http(&event).unwrap_err().code(), Code::InvalidAttribute);
    }
}
