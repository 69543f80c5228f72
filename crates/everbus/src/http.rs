//! Middleware for HTTP servers: events published by a request carry the request's ids.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use everbus_core::{EventId, TraceContext};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use tower_layer::Layer;
use tower_service::Service;

use crate::ambient::{with_correlation_id, with_trace};

/// The header that links a request to everything it causes.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longer request ids are not used: they end up in every event and log line.
const LONGEST_ID: usize = 128;

/// A tower layer for HTTP services (axum, tonic, hyper): the `X-Request-ID` of a request becomes the
/// correlation id of every event published while it is served, its `traceparent` the trace. A request
/// without a usable id gets one. The response carries the id.
///
/// An id is used if it has 1 to 128 visible ASCII characters.
///
/// With axum: `axum::Router::new().route("/orders", post(place_order)).layer(RequestIdLayer)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestIdLayer;

impl<S> Layer<S> for RequestIdLayer {
    type Service = RequestId<S>;

    fn layer(&self, inner: S) -> RequestId<S> {
        RequestId { inner }
    }
}

/// The service that [`RequestIdLayer`] makes.
#[derive(Clone, Debug)]
pub struct RequestId<S> {
    inner: S,
}

impl<S, B, R> Service<Request<B>> for RequestId<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let id = request_id(request.headers());
        let trace = trace(request.headers());
        let serve = self.inner.call(request);
        Box::pin(async move {
            let header = HeaderValue::from_str(&id);
            let serve = with_correlation_id(id, serve);
            let mut response = match trace {
                Some(trace) => with_trace(trace, serve).await?,
                None => serve.await?,
            };
            if let Ok(header) = header {
                response.headers_mut().insert(REQUEST_ID, header);
            }
            Ok(response)
        })
    }
}

fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let usable = |id: &&str| (1..=LONGEST_ID).contains(&id.len()) && !id.contains(' ');
    given
        .filter(usable)
        .map_or_else(|| EventId::new().to_string(), str::to_owned)
}

fn trace(headers: &HeaderMap) -> Option<TraceContext> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    TraceContext::parse(text("traceparent")?, text("tracestate")).ok()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tower::{ServiceBuilder, ServiceExt, service_fn};

    use super::*;
    use crate::runtime::bus::Bus;

    const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    /// The correlation id and the trace of what a request with this id published, and the id in the
    /// response.
    async fn published(id: Option<&str>) -> (String, Option<TraceContext>, String) {
        let bus = Bus::open("memory:").await.unwrap();
        let serving = bus.clone();
        let service = ServiceBuilder::new()
            .layer(RequestIdLayer)
            .service(service_fn(move |_: Request<()>| {
                let bus = serving.clone();
                async move {
                    let receipt = bus.publish(("order.placed", 1)).await.unwrap();
                    Ok::<_, Infallible>(Response::new(receipt.id()))
                }
            }));
        let mut request = Request::new(());
        let headers = request.headers_mut();
        headers.insert("traceparent", TRACEPARENT.parse().unwrap());
        if let Some(id) = id {
            headers.insert(REQUEST_ID, id.parse().unwrap());
        }
        let response = service.oneshot(request).await.unwrap();
        let shown = response.headers()[REQUEST_ID].to_str().unwrap().to_owned();
        let stored = bus.lookup().unwrap().find(*response.body()).await.unwrap();
        let event = &stored[0].event;
        let trace = event.attributes().unwrap().trace.clone();
        (event.correlation_id().into_owned(), trace, shown)
    }

    // conformance: handlers/correlation-http: the X-Request-ID of a request is the correlation id of what it publishes, and comes back with the response.
    // conformance: framework/structure-correlation: the X-Request-ID of a request is the correlation id of what it publishes, and comes back with the response.
    #[tokio::test]
    async fn what_a_request_publishes_carries_its_ids() {
        let (correlation, trace, shown) = published(Some("request-7")).await;
        assert_eq!(
            (correlation.as_str(), shown.as_str()),
            ("request-7", "request-7")
        );
        assert_eq!(trace.unwrap().traceparent, TRACEPARENT);
    }

    #[tokio::test]
    async fn a_request_without_a_usable_id_is_given_one() {
        for id in [None, Some(""), Some("two words"), Some(&*"x".repeat(129))] {
            let (correlation, _, shown) = published(id).await;
            assert_eq!(correlation, shown);
            assert!(correlation.parse::<EventId>().is_ok(), "{correlation}");
        }
    }
}
