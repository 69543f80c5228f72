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

use crate::auth::Scope;
use crate::routes::{Access, Route};

pub(crate) use page::error_page;

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
