//! Traces by OTLP, read by a small receiver of the test.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use serde_json::json;

use crate::serve::{Serving, ask_with};
use crate::support::{Shop, wait_until};

/// A receiver of OTLP over HTTP, which keeps the spans that it gets.
struct Collector {
    url: String,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let spans: Arc<Mutex<Vec<Span>>> = Arc::default();
        let kept = spans.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut bytes = Vec::new();
                let mut part = [0; 65536];
                let (head, body) = loop {
                    let n = stream.read(&mut part).unwrap();
                    assert!(n > 0, "a request that ends too early");
                    bytes.extend_from_slice(&part[..n]);
                    let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else {
                        continue;
                    };
                    let head = String::from_utf8(bytes[..end].to_vec())
                        .unwrap()
                        .to_lowercase();
                    let length = head.split("content-length: ").nth(1).unwrap();
                    let length: usize = length.lines().next().unwrap().parse().unwrap();
                    if bytes.len() == end + 4 + length {
                        break (head, bytes[end + 4..].to_vec());
                    }
                };
                assert!(head.starts_with("post /v1/traces http/1.1"), "{head}");
                assert!(
                    head.contains("content-type: application/x-protobuf"),
                    "{head}"
                );
                let request = ExportTraceServiceRequest::decode(&*body).unwrap();
                for resource in request.resource_spans {
                    let attributes = resource.resource.unwrap().attributes;
                    let name = attributes.iter().find(|a| a.key == "service.name").unwrap();
                    assert!(format!("{name:?}").contains("everbus"), "{name:?}");
                    let scopes = resource.scope_spans.into_iter();
                    kept.lock()
                        .unwrap()
                        .extend(scopes.flat_map(|scope| scope.spans));
                }
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
            }
        });
        Self { url, spans }
    }

    /// The span of this name in a trace.
    fn span(&self, trace: &[u8], name: &str) -> Option<Span> {
        let spans = self.spans.lock().unwrap();
        let found = spans.iter().find(|s| s.trace_id == trace && s.name == name);
        found.cloned()
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(digit).collect()
}

/// Publishes orders to the demo over HTTP, each in a trace of its client, until the whole chain of one was exported:
/// some orders of the demo fail.
fn is_one_trace(serving: &Serving, collector: &Collector) {
    const CLIENT: &str = "b7ad6b7169203331";
    let traces: Vec<String> = (1..=8).map(|n| format!("{n:032x}")).collect();
    for (n, trace) in traces.iter().enumerate() {
        let order = json!({
            "type": "orders.order.placed", "tenant": "demo-shop",
            "payload": { "order": n, "article": "Teapot", "quantity": 1, "total_cents": 1, "town": "Oslo" },
        });
        let header = format!("traceparent: 00-{trace}-{CLIENT}-01\r\n");
        let (status, answer) = ask_with(
            &serving.address,
            "POST",
            "/v1/events",
            &header,
            &order.to_string(),
        )
        .unwrap();
        assert_eq!(status, 201, "{answer}");
    }
    let names = [
        "POST /v1/events",
        "orders.order.placed process",
        "payments.payment.captured process",
    ];
    let mut chain = Vec::new();
    wait_until("the spans of one order", || {
        let whole = traces.iter().find_map(|trace| {
            let spans = names.iter().map(|name| collector.span(&bytes(trace), name));
            spans.collect::<Option<Vec<Span>>>()
        });
        chain = whole.unwrap_or_default();
        !chain.is_empty()
    });
    let [request, charge, pack] = &chain[..] else {
        panic!("{chain:?}")
    };
    assert_eq!(request.parent_span_id, bytes(CLIENT));
    // Of the two groups that handle an order, either may be the one that was found; both belong to the request.
    assert_eq!(charge.parent_span_id, request.span_id);
    assert_eq!((request.kind, charge.kind), (2, 5), "server and consumer");
    let spans = collector.spans.lock().unwrap();
    let cause = spans
        .iter()
        .find(|span| span.span_id == pack.parent_span_id);
    let cause = cause.unwrap_or_else(|| panic!("no cause of {pack:?}"));
    assert_eq!(cause.name, names[1]);
    assert_eq!(
        (&cause.trace_id, &cause.parent_span_id),
        (&request.trace_id, &request.span_id)
    );
}

// conformance: operations/otlp: a request, its event, the handlers and what they publish are one trace, exported by OTLP to the address of the configuration
#[test]
fn a_request_and_everything_it_causes_are_one_trace() {
    let (shop, collector) = (Shop::new(), Collector::start());
    let config = format!(
        "broker: {{url: 'sqlite:everbus.db'}}\ntelemetry: {{otlp: {{endpoint: '{}'}}}}\n",
        collector.url
    );
    std::fs::write(shop.path("everbus.yaml"), config).unwrap();
    let serving = Serving::start(&shop, &["--demo", "--config", "everbus.yaml"]);
    is_one_trace(&serving, &collector);
    assert!(serving.terminate());
}

// conformance: operations/otlp-environment: OTEL_EXPORTER_OTLP_ENDPOINT alone is enough, and the last spans are sent at the end
#[test]
fn the_variable_of_opentelemetry_is_enough() {
    let (shop, collector) = (Shop::new(), Collector::start());
    let variable = ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.as_str());
    let serving = Serving::start_with(&shop, &[], &[variable]);
    let event = json!({ "type": "a.b" }).to_string();
    let trace = format!("{:032x}", 77);
    let header = format!("traceparent: 00-{trace}-b7ad6b7169203331-01\r\n");
    let (status, _) = ask_with(&serving.address, "POST", "/v1/events", &header, &event).unwrap();
    assert_eq!(status, 201);
    // Long before the exporter's next turn.
    assert!(serving.terminate());
    assert!(collector.span(&bytes(&trace), "POST /v1/events").is_some());
}
