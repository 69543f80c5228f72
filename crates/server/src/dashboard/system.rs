//! The system page: the guarantees of the engine, the running servers, the configuration and the audit trail.

use axum::extract::State;
use axum::response::Response;
use everbus::{AuditPage, AuditQuery, Code};
use maud::{Markup, html};
use serde::Deserialize;

use super::page::{Page, Place};
use super::parts::{self, number};
use crate::auth::{Caller, Scope};
use crate::body::Params;
use crate::problem::Problem;
use crate::state::AppState;

const ENTRIES: usize = 50;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Wanted {
    actor: String,
    action: String,
    before: Option<u64>,
}

pub(super) async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Params(wanted): Params<Wanted>,
) -> Result<Response, Problem> {
    let audit = audit(&state, &wanted).await?;
    let body = html! {
        div.head { h1 { "System" } span.sub { "everbus " (env!("CARGO_PKG_VERSION")) } }
        div.cols-2 {
            div.stack {
                (trail(audit.as_ref(), &wanted))
            }
            div.stack {
                (engine(&state))
                (file(&state))
                (outbox(&state).await)
                (processes(&state))
                (configuration(&state, &caller))
            }
        }
    };
    let page = Page {
        place: Place::System,
        title: "System".to_owned(),
        script: None,
        body,
    };
    Ok(page.show(&state, &caller).await)
}

fn engine(state: &AppState) -> Markup {
    let capabilities = state.bus().capabilities();
    let weaknesses = &state.bus().engine().weaknesses;
    let yes = |yes: bool| {
        if yes {
            html! { span.good { "yes" } }
        } else {
            html! { span.muted { "no" } }
        }
    };
    html! {
        section.card {
            header { h2 { "What an acknowledgement means" } }
            div.body {
                p { span.badge.good { (capabilities.durability.to_string().replace('_', " ")) } " An acknowledged event " (capabilities.durability.meaning()) "." }
                @for weakness in weaknesses {
                    div.notice.warn { p { (weakness) } }
                }
                (parts::facts(vec![
                    ("Engine", html! { (capabilities.engine) }),
                    ("Batches are atomic", yes(capabilities.atomic_batch)),
                    ("Follow-ups with the ack", yes(capabilities.atomic_follow_ups)),
                    ("Dead letter with the ack", yes(capabilities.atomic_dead_letter)),
                    ("Leases are fenced", yes(capabilities.fencing)),
                    ("Exact attempts", yes(capabilities.exact_attempts)),
                    ("Lost leases here", html! { (number(state.bus().lost_leases())) }),
                ]))
                @if let Some(failure) = state.bus().failure() {
                    div.notice.bad { p { "The engine failed: " (failure.message()) } }
                }
            }
        }
    }
}

fn file(state: &AppState) -> Markup {
    let Some(path) = state.bus().engine().file.as_deref() else {
        return html! {};
    };
    let size = |suffix: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        std::fs::metadata(std::path::Path::new(&name)).map_or(0, |file| file.len())
    };
    html! {
        section.card {
            header { h2 { "File" } }
            div.body { (parts::facts(vec![
                ("Path", html! { span.mono { (path.display()) } }),
                ("Size", html! { (bytes(size(""))) }),
                ("Write-ahead log", html! { (bytes(size("-wal"))) }),
            ])) }
        }
    }
}

fn bytes(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} bytes"),
        10_000..10_000_000 => format!("{} KB", bytes / 1000),
        _ => format!("{} MB", bytes / 1_000_000),
    }
}

async fn outbox(state: &AppState) -> Markup {
    let Ok(outbox) = state.bus().engine().outbox() else {
        return html! {};
    };
    let Ok(status) = outbox.status().await else {
        return html! {};
    };
    html! {
        section.card {
            header { h2 { "Outbox" } }
            div.body { (parts::facts(vec![
                ("Pending", html! { (number(status.pending)) }),
                ("Retrying", html! { (number(status.retrying)) }),
                ("Failed", html! { (number(status.failed)) }),
                ("Oldest", status.oldest_pending_at.map_or_else(|| html! { span.muted { "none" } }, parts::time)),
                ("Relay", html! { (status.relay.as_deref().unwrap_or("none runs")) }),
            ])) }
        }
    }
}

fn processes(state: &AppState) -> Markup {
    let figures = state.live().figures();
    let reports = figures.processes().reports(figures.metrics());
    html! {
        section.card {
            header { h2 { "Servers on this store" } }
            div.scroll { table.cards {
                thead { tr { th { "Host" } th.num { "Process" } th.num { "Started" } th.num { "Published" } th.num { "Handled" } } }
                tbody { @for report in &reports {
                    tr {
                        td.lead { span.wrap { (report.host) } span.clip.small.faint { (report.version) } }
                        td.num data-label="Process" { (report.pid) }
                        td.num data-label="Started" { (parts::time(report.started_at)) }
                        td.num data-label="Published" { (number(report.totals.published as u64)) }
                        td.num data-label="Handled" { (number(report.totals.handled as u64)) }
                    }
                } }
            } }
        }
    }
}

/// The settings, without secrets.
fn configuration(state: &AppState, caller: &Caller) -> Markup {
    let options = state.options();
    let limits = &options.limits;
    html! {
        section.card {
            header { h2 { "Configuration" } }
            div.body { (parts::facts(vec![
                ("Listens on", html! { (options.listen) }),
                ("TLS", html! { @if options.tls.is_some() { "yes" } @else { "no" } }),
                ("Tokens", html! { @if caller.token().is_some() { "required" } @else { "none: open on this machine only" } }),
                ("File everbus.yaml", html! { @if state.config().is_some() { "read" } @else { "none" } }),
                ("Largest body", html! { (bytes(limits.body as u64)) }),
                ("Most connections", html! { (number(limits.connections as u64)) }),
                ("Foreign origins", html! { @if options.origins.is_empty() { "none" } @else { (options.origins.join(", ")) } }),
                ("API", html! { a href="/openapi.json" { "openapi.json" } " · " @if caller.may(Scope::Read) { a href="/metrics" { "metrics" } } }),
            ])) }
        }
    }
}

async fn audit(state: &AppState, wanted: &Wanted) -> Result<Option<AuditPage>, Problem> {
    let given = |text: &str| (!text.trim().is_empty()).then(|| text.trim().to_owned());
    let query = AuditQuery {
        actor: given(&wanted.actor),
        action: given(&wanted.action),
        limit: ENTRIES,
        after: wanted.before,
        ..AuditQuery::default()
    };
    match state.bus().audit().query(query).await {
        Ok(page) => Ok(Some(page)),
        Err(error) if error.code() == Code::Unsupported => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn trail(page: Option<&AuditPage>, wanted: &Wanted) -> Markup {
    html! {
        section.card {
            header {
                h2 { "Audit trail" }
                form.tools.filters method="get" action="/system" {
                    input #search name="action" type="search" value=(wanted.action) placeholder="action, such as dlq.*" aria-label="Action";
                    input name="actor" value=(wanted.actor) placeholder="actor" aria-label="Actor";
                    button type="submit" { "Filter" }
                }
            }
            @match page {
                None => (parts::empty("No audit trail", "This engine keeps none. A store beside it does.", None)),
                Some(page) if page.items.is_empty() && !(wanted.action.is_empty() && wanted.actor.is_empty()) => (parts::empty("Nothing matches", "No record has this action and actor. \"dlq.*\" matches every action that begins with dlq.", None)),
                Some(page) if page.items.is_empty() => (parts::empty("Nothing recorded", "Every retry, edit, purge, pause and replay is recorded here with who did it.", None)),
                Some(page) => {
                    div.scroll { table.cards {
                        thead { tr { th { "Action" } th { "Actor" } th { "On" } th { "Details" } th.num { "When" } } }
                        tbody { @for record in &page.items {
                            tr {
                                td.lead { (record.entry.action) }
                                td data-label="Actor" { (record.entry.actor) }
                                td data-label="On" { @if let Some(entity) = &record.entry.entity { span.small { (entity.kind) " " (parts::short_id(&entity.id)) } } }
                                td.small.muted.wrap { @if !record.entry.details.is_null() { (details(&record.entry.details)) } }
                                td.num data-label="When" { (parts::time(record.at)) }
                            }
                        } }
                    } }
                    @if let Some(next) = page.next {
                        footer { span.grow {} a.button #next rel="next" href=(super::events::link("/system", &[("action", &wanted.action), ("actor", &wanted.actor), ("before", &next.to_string())])) { "Older" } }
                    }
                }
            }
        }
    }
}

fn details(details: &serde_json::Value) -> String {
    let text = details.to_string();
    let mut shown: String = text.chars().take(160).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}
