//! The dashboard: pages rendered by the server, with small scripts for live parts.
//!
//! Pages only read. Every action is a request to the API of the same server, which checks it and writes it to the audit
//! trail.

mod assets;
mod dag;
mod dead_letters;
mod event;
mod events;
mod groups;
mod icons;
mod job;
mod jobs;
mod kinds;
mod login;
mod overview;
mod page;
mod parts;
mod system;
mod tasks;

use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, StatusCode, Uri, header};

use crate::auth::Scope;
use crate::problem::Problem;
use crate::routes::{Access, Route};

/// Pages need the scope `read`.
const READ: Access = Access::Page(Scope::Read);

pub(crate) fn routes() -> Vec<Route> {
    let mut routes = vec![
        Route::get("/", READ, overview::show),
        Route::get("/events", READ, events::show),
        Route::get("/events/{id}", READ, event::show),
        Route::get("/groups", READ, groups::list),
        Route::get("/groups/{name}", READ, groups::show),
        Route::get("/dead-letters", READ, dead_letters::list),
        Route::get("/dead-letters/{id}", READ, dead_letters::show),
        Route::get("/jobs", READ, jobs::list),
        Route::get("/jobs/{id}", READ, job::show),
        Route::get("/tasks", READ, tasks::list),
        Route::get("/tasks/{id}", READ, tasks::show),
        Route::get("/system", READ, system::show).all_tenants(),
        Route::get("/login", Access::Public, login::show),
    ];
    routes.extend(assets::routes());
    routes
}

/// The answer for a path that no route has: a page for a browser, and for other clients an empty body, which becomes a
/// problem document.
pub(crate) async fn nothing_here(uri: Uri, headers: HeaderMap) -> Response {
    let accepted = headers.get(header::ACCEPT);
    let accepted = accepted.and_then(|accepted| accepted.to_str().ok());
    let is_browser = accepted.is_some_and(|accepted| accepted.contains("text/html"));
    if !is_browser || uri.path().starts_with("/v1/") {
        return StatusCode::NOT_FOUND.into_response();
    }
    let problem = Problem::not_found("There is no page under this path.");
    page::PageError::from(problem).into_response()
}
