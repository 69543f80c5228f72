//! Routes and their checks. A route is declared once, with the scope that it needs. The router, the OpenAPI document
//! and the security tests are made from the list of routes. The scope is checked here, before a handler runs, so that
//! no handler can forget it.

use std::sync::Arc;

use axum::Router;
use axum::extract::{FromRequestParts, Request};
use axum::handler::Handler;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use everbus::audit::{Operator, with_operator};
use everbus::{with_correlation_id, with_trace};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::Method;
use http::request::Parts;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use crate::auth::{Caller, Scope};
use crate::guard::{Connection, Context};
use crate::problem::Problem;
use crate::state::AppState;

/// What a route requires of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing: for health checks, the login page, static files.
    Public,
    /// A token or a session with this scope. Without one the response is a problem document.
    Scope(Scope),
    /// A token or a session with this scope. Without one the response redirects to the login page.
    Page(Scope),
}

/// One route.
pub struct Route {
    pub(crate) listed: Listed,
    pub(crate) doc: Doc,
    handler: MakeHandler,
}

/// Makes the handler of a route with its check.
type MakeHandler = Box<dyn FnOnce(Arc<Checked>) -> MethodRouter<AppState>>;

/// The description of a route. The security tests go through the list of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The method.
    pub method: Method,
    /// The path, with `{parameters}`.
    pub path: &'static str,
    /// What it requires of its caller.
    pub access: Access,
    /// Whether tokens of a tenant are refused: the route shows or changes data of all tenants.
    pub all_tenants: bool,
}

type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// The description of a route in the OpenAPI document. Routes without a summary are not in the document.
#[derive(Default)]
pub(crate) struct Doc {
    pub(crate) summary: &'static str,
    pub(crate) query: Option<SchemaOf>,
    pub(crate) bodies: Vec<(&'static str, Option<SchemaOf>)>,
    pub(crate) status: u16,
    /// The status of a repeated request, if it differs.
    pub(crate) again: Option<u16>,
    pub(crate) returns: Option<SchemaOf>,
    pub(crate) content_type: Option<&'static str>,
}

impl Route {
    /// A route of any method.
    pub fn new<H, T>(method: Method, path: &'static str, access: Access, handler: H) -> Self
    where
        H: Handler<T, AppState>,
        T: 'static,
    {
        // All methods that are used here have a filter.
        let filter = MethodFilter::try_from(method.clone()).unwrap_or(MethodFilter::GET);
        Self {
            listed: Listed {
                method,
                path,
                access,
                all_tenants: false,
            },
            doc: Doc {
                status: 200,
                ..Doc::default()
            },
            handler: Box::new(move |check| on(filter, Guarded { check, handler })),
        }
    }

    /// A `GET` route.
    pub fn get<H: Handler<T, AppState>, T: 'static>(
        path: &'static str,
        access: Access,
        handler: H,
    ) -> Self {
        Self::new(Method::GET, path, access, handler)
    }

    /// A `POST` route.
    pub fn post<H: Handler<T, AppState>, T: 'static>(
        path: &'static str,
        access: Access,
        handler: H,
    ) -> Self {
        Self::new(Method::POST, path, access, handler)
    }

    /// A `DELETE` route.
    pub fn delete<H: Handler<T, AppState>, T: 'static>(
        path: &'static str,
        access: Access,
        handler: H,
    ) -> Self {
        Self::new(Method::DELETE, path, access, handler)
    }

    /// Refuses tokens of a tenant: the route shows or changes data of all tenants.
    #[must_use]
    pub fn all_tenants(mut self) -> Self {
        self.listed.all_tenants = true;
        self
    }

    /// Sets the summary. Only a route with a summary is in the OpenAPI document.
    #[must_use]
    pub fn summary(mut self, summary: &'static str) -> Self {
        self.doc.summary = summary;
        self
    }

    /// Declares the query parameters.
    #[must_use]
    pub fn query<Q: JsonSchema>(mut self) -> Self {
        self.doc.query = Some(Q::json_schema);
        self
    }

    /// Declares a JSON body.
    #[must_use]
    pub fn json<B: JsonSchema>(mut self) -> Self {
        let schema: SchemaOf = SchemaGenerator::subschema_for::<B>;
        self.doc.bodies.push(("application/json", Some(schema)));
        self
    }

    /// Declares a body of another content type, without a schema.
    #[must_use]
    pub fn accepts(mut self, content_type: &'static str) -> Self {
        self.doc.bodies.push((content_type, None));
        self
    }

    /// Declares the response and its status.
    #[must_use]
    pub fn returns<R: JsonSchema>(mut self, status: u16) -> Self {
        self.doc.status = status;
        self.doc.returns = Some(SchemaGenerator::subschema_for::<R>);
        self
    }

    /// Declares the status of a request that had been made before; the response has the same form.
    #[must_use]
    pub fn again(mut self, status: u16) -> Self {
        self.doc.again = Some(status);
        self
    }

    /// Declares the content type of a response that is not JSON.
    #[must_use]
    pub fn answers(mut self, content_type: &'static str) -> Self {
        self.doc.content_type = Some(content_type);
        self
    }
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.listed.fmt(f)
    }
}

/// Makes the router for these routes, each with its check.
pub(crate) fn router(state: &AppState, routes: Vec<Route>) -> Router<AppState> {
    let mut router = Router::new();
    for route in routes {
        let listed = route.listed;
        let path = listed.path;
        let checked = Arc::new(Checked {
            state: state.clone(),
            route: listed,
        });
        router = router.route(path, (route.handler)(checked));
    }
    router
}

/// The data that the check of a route needs.
struct Checked {
    state: AppState,
    route: Listed,
}

/// A handler with the check of its route. A router layer would clone the inner services for each request, so this is a
/// handler.
#[derive(Clone)]
struct Guarded<H> {
    check: Arc<Checked>,
    handler: H,
}

/// Runs the handler of a request that passed the check.
type Run = Box<dyn FnOnce(Request) -> BoxFuture<'static, Response> + Send>;

impl<H: Handler<T, AppState>, T: 'static> Handler<(Guarded<()>, T), AppState> for Guarded<H> {
    type Future = BoxFuture<'static, Response>;

    fn call(self, request: Request, state: AppState) -> Self::Future {
        let handler = self.handler;
        let run: Run = Box::new(move |request| handler.call(request, state).boxed());
        check(self.check, request, run).boxed()
    }
}

/// Runs a request with the trace and correlation id of the client. A request to the API also gets its own span.
async fn check(to: Arc<Checked>, mut request: Request, run: Run) -> Response {
    let span = span(&to.route, &request);
    let context = request.extensions_mut().remove::<Context>();
    if span.is_disabled() && context.is_none() {
        return checked(&to, request, run).await;
    }
    // The future is boxed only here: few requests need it, and the futures of the others stay small.
    let mut served = checked(&to, request, run).boxed();
    if let Some(context) = context {
        if let Some(trace) = context.trace {
            served = with_trace(trace, served).boxed();
        }
        if let Some(id) = context.correlation_id {
            served = with_correlation_id(id, served).boxed();
        }
    }
    let response = served.instrument(span.clone()).await;
    let status = response.status();
    span.record("http.response.status_code", u64::from(status.as_u16()));
    if status.is_server_error() {
        span.record("otel.status_code", "error");
    }
    response
}

/// The span of a request to the API, with the names of OpenTelemetry; no span for other requests.
fn span(route: &Listed, request: &Request) -> Span {
    if !route.path.starts_with("/v1/") {
        return Span::none();
    }
    let span = tracing::info_span!(
        target: "everbus::http",
        "request",
        otel.name = %format_args!("{} {}", route.method, route.path),
        otel.kind = "server",
        otel.status_code = Empty,
        http.request.method = %route.method,
        http.route = route.path,
        http.response.status_code = Empty,
        url.path = request.uri().path(),
    );
    #[cfg(feature = "otlp")]
    if let Some(trace) = crate::guard::trace(request.headers()) {
        everbus::continue_trace(&span, &trace);
    }
    span
}

/// Identifies the caller, checks what the route requires, and runs the handler with the caller as the operator.
async fn checked(to: &Checked, request: Request, run: Run) -> Response {
    let Checked { state, route } = to;
    let (scope, is_page) = match route.access {
        Access::Public => return run(request).await,
        Access::Scope(scope) => (scope, false),
        Access::Page(scope) => (scope, true),
    };
    // A body is not `Sync`, so only the other parts of the request are borrowed across the await.
    let (mut parts, body) = request.into_parts();
    let peer = parts.extensions.get::<Connection>().map(|of| of.peer);
    let caller = match Caller::of(state, &parts.headers, peer).await {
        Ok(caller) => caller,
        Err(problem) if is_page && problem.status() == http::StatusCode::UNAUTHORIZED => {
            return to_login(&parts);
        }
        Err(problem) => {
            // Guesses of tokens count against the rate limit too.
            let limited = peer.map(|peer| state.rates().take(|| peer.unnamed()));
            return match limited {
                Some(Err(limited)) => limited.into_response(),
                _ => problem.into_response(),
            };
        }
    };
    if let Err(problem) = state.rates().take(|| caller.identity()) {
        return problem.into_response();
    }
    if !caller.may(scope) {
        let what = format!("this needs the scope {scope}, which the token does not have");
        return Problem::forbidden(what).into_response();
    }
    if route.all_tenants && caller.tenant().is_some() {
        let what = "this is about every tenant, and the token belongs to one";
        return Problem::forbidden(what).into_response();
    }
    let operator = Operator::new(caller.actor());
    if let Some(connection) = parts.extensions.get_mut::<Connection>() {
        connection.caller = Some(caller);
    }
    let request = Request::from_parts(parts, body);
    with_operator(operator, run(request)).await
}

fn to_login(request: &Parts) -> Response {
    if request.method == Method::GET {
        let wanted = request.uri.path_and_query().map_or("/", |p| p.as_str());
        let next = crate::api::percent_encoded(wanted);
        return Redirect::to(&format!("/login?next={next}")).into_response();
    }
    Problem::unauthenticated("the session has ended").into_response()
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    /// The caller that the check of the route found. Public routes have no caller.
    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, Problem> {
        let connection = parts.extensions.get::<Connection>();
        let caller = connection.and_then(|connection| connection.caller.clone());
        caller.ok_or_else(|| Problem::unauthenticated("this route has no caller"))
    }
}
