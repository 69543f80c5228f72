//! Traces by OTLP (HTTP and protobuf): the request, the event, its handlers and what they publish are one trace.
//!
//! The exporter runs on a thread of its own. A receiver that is slow or down does not delay the command: spans that do
//! not fit into the queue are dropped.

use std::pin::Pin;
use std::time::Duration;

use everbus_jobs::webhook::{WebhookClient, WebhookOptions};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, SpanExporter,
    WithExportConfig as _, WithHttpConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tokio::runtime::Runtime;

/// One request may take this long.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long it may take to send the last spans at the end.
const FLUSH: Duration = Duration::from_secs(5);

/// Sends spans. When it is dropped it sends the spans that are left.
pub(crate) struct Telemetry {
    provider: SdkTracerProvider,
}

impl Telemetry {
    /// Whether an address is set in the environment, by the variables of OpenTelemetry.
    pub(crate) fn is_in_environment() -> bool {
        [
            OTEL_EXPORTER_OTLP_ENDPOINT,
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
        ]
        .iter()
        .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
    }

    /// Begins to send. The environment takes precedence over the address of the configuration.
    pub(crate) fn start(endpoint: Option<&str>) -> Result<Self, String> {
        let client = Client {
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|error| error.to_string())?,
        };
        let mut exporter = SpanExporter::builder().with_http().with_http_client(client);
        if let Some(endpoint) = endpoint.filter(|_| !Self::is_in_environment()) {
            let endpoint = endpoint.trim_end_matches('/');
            exporter = exporter.with_endpoint(format!("{endpoint}/v1/traces"));
        }
        let exporter = exporter.build().map_err(|error| error.to_string())?;
        let mut resource = Resource::builder();
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("everbus");
        }
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            .with_batch_exporter(exporter)
            .build();
        Ok(Self { provider })
    }

    /// Makes the spans of OpenTelemetry from those of `tracing`.
    pub(crate) fn tracer(&self) -> SdkTracer {
        self.provider.tracer("everbus")
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        let _ = self.provider.shutdown_with_timeout(FLUSH);
    }
}

/// Sends requests with the client of webhooks. The operator chose the address, so it may be private.
#[derive(Debug)]
struct Client {
    runtime: Runtime,
}

impl HttpClient for Client {
    /// Blocks: it is called on the thread of the exporter.
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(std::future::ready(self.runtime.block_on(send(request))))
    }
}

async fn send(request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let options = WebhookOptions::default()
        .allow_http(true)
        .allow_private(true)
        .timeout(TIMEOUT);
    let client = WebhookClient::new(&request.uri().to_string(), options)?;
    let (head, body) = request.into_parts();
    let headers: Vec<(&str, String)> = head
        .headers
        .iter()
        .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?.to_owned())))
        .collect();
    let reply = client.send(&headers, body).await?;
    Ok(Response::builder()
        .status(reply.status)
        .body(Bytes::new())?)
}
