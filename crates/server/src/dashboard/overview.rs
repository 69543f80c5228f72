//! The first page: rates, latencies, groups and errors at a glance.

use axum::extract::State;
use axum::response::Response;
use everbus::DeadLetterFilter;
use maud::{Markup, html};

use super::kinds::{self, Kind};
use super::page::{Page, Place};
use super::parts::{self, latency, number};
use crate::auth::Caller;
use crate::figures::{GroupFigures, Overview, Point};
use crate::problem::Problem;
use crate::state::AppState;

/// How many groups are shown.
const GROUPS: usize = 12;
/// A group whose oldest event has waited longer than this, in milliseconds, comes first.
const LATE_MS: u64 = 60_000;
/// How many errors are shown.
const KINDS: usize = 6;

pub(super) async fn show(
    State(state): State<AppState>,
    caller: Caller,
) -> Result<Response, Problem> {
    let figures = state.live().figures();
    let overview = figures.overview(&caller).await;
    let points = figures.points(&caller);
    let failing = failing(&state, &caller).await;
    let body = html! {
        div.head {
            h1 { "Overview" }
            span.sub {
                (state.bus().capabilities().engine) " · "
                span #processes { (processes(overview.processes)) }
            }
        }
        div.stack #overview data-points=(serde_json::to_string(&points).unwrap_or_default()) {
            (cards(&overview.now, caller.tenant().is_some()))
            (breakers(&overview))
            @if caller.tenant().is_none() {
                div.cols-2 {
                    (chart("rates", "Events per second", &[("k1", "published"), ("k2", "handled"), ("k3", "failed attempts")]))
                    (chart("latency", "Publish to handled, ms", &[("k1", "p50"), ("k2", "p99")]))
                }
            }
            div.cols-2 {
                (groups(&overview))
                (failing)
            }
        }
    };
    let page = Page {
        place: Place::Overview,
        title: "Overview".to_owned(),
        script: Some("/assets/overview.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

fn processes(count: usize) -> String {
    match count {
        1 => "1 server".to_owned(),
        count => format!("{count} servers on this store"),
    }
}

fn cards(now: &Point, of_tenant: bool) -> Markup {
    let rate = |value: f64| format!("{value:.1}");
    html! {
        div.figures {
            @if !of_tenant {
                a.card.figure href="/events" {
                    div.label { "Published" }
                    div.value { span #f-published { (rate(now.published)) } span.unit { "/s" } }
                    div.note { "over 10 s" }
                }
                div.card.figure {
                    div.label { "Handled" }
                    div.value { span #f-handled { (rate(now.handled)) } span.unit { "/s" } }
                    div.note { span #f-failed { (rate(now.failed)) } " failed attempts/s" }
                }
                div.card.figure {
                    div.label { "Latency p99" }
                    div.value #f-p99 { (latency(now.p99)) }
                    div.note { "p50 " span #f-p50 { (latency(now.p50)) } }
                }
            }
            a.card.figure href="/groups" {
                div.label { "Unsettled" }
                div.value #f-waiting { (number(now.waiting)) }
                div.note { "waiting or being handled" }
            }
            a.card.figure href="/dead-letters" {
                div.label { "Dead letters" }
                div.value #f-dead { (number(now.dead_letters)) }
                div.note { "open" }
            }
        }
    }
}

fn breakers(overview: &Overview) -> Markup {
    html! {
        div #breakers hidden[overview.breakers.is_empty()] {
            @for breaker in &overview.breakers {
                div.notice.warn { p { "The circuit breaker " b { (breaker.name) } " is " (breaker.state) "." } }
            }
        }
    }
}

fn chart(id: &str, title: &str, keys: &[(&str, &str)]) -> Markup {
    html! {
        section.card {
            header {
                h2 { (title) }
                span.tools.row { @for (class, name) in keys { span.key.(class) { (name) } } }
            }
            div.body { svg.chart id={ "chart-" (id) } role="img" aria-label=(title) {} }
        }
    }
}

fn groups(overview: &Overview) -> Markup {
    html! {
        section.card {
            header { h2 { "Groups" } span.tools { a.small href="/groups" { "All " (overview.groups.len()) " groups" } } }
            @if overview.groups.is_empty() {
                (parts::empty(
                    "No group consumes yet",
                    "A group gets every event that matches its patterns. Declare one in everbus.yaml, or subscribe in a program:",
                    Some("bus.subscribe(\"order.*\").group(\"billing\").handler(bill).await?;"),
                ))
            } @else {
                div.scroll { table.cards {
                    thead { tr { th { "Group" } th.num title="waiting or being handled" { "Unsettled" } th.num title="the oldest event that is not settled" { "Oldest" } th title="unsettled events" { "Last 2 minutes" } th.num title="open dead letters" { "Dead" } } }
                    tbody #group-rows {
                        @for group in first(&overview.groups) {
                            tr data-href={ "/groups/" (crate::api::percent_encoded(&group.name)) } data-group=(group.name) {
                                td.lead { a href={ "/groups/" (crate::api::percent_encoded(&group.name)) } { (group.name) } }
                                td.num data-label="Unsettled" { span data-figure="waiting" { (number(group.behind + group.in_flight + group.waiting)) } }
                                td.num data-label="Oldest" { span data-figure="oldest" { (parts::oldest(group.behind_ms)) } }
                                td.off { span data-figure="spark" { (parts::spark(&group.spark)) } }
                                td.num data-label="Dead letters" { span data-figure="dead" class=[(group.dead_letters > 0).then_some("bad")] { (number(group.dead_letters)) } }
                            }
                        }
                    }
                } }
            }
        }
    }
}

/// The groups to show: those with trouble first, and those of single processes last.
fn first(groups: &[GroupFigures]) -> Vec<&GroupFigures> {
    let mut first: Vec<&GroupFigures> = groups.iter().collect();
    first.sort_by_key(|group| {
        let troubled = group.dead_letters > 0 || group.behind_ms > LATE_MS;
        (group.ephemeral, !troubled)
    });
    first.truncate(GROUPS);
    first
}

/// The most frequent errors of dead letters.
async fn failing(state: &AppState, caller: &Caller) -> Markup {
    let filter = DeadLetterFilter {
        tenant: caller.tenant().map(str::to_owned),
        ..DeadLetterFilter::default()
    };
    let kinds = kinds::kinds(state, filter, KINDS).await;
    let kinds = kinds.ok().flatten().unwrap_or_default();
    html! {
        section.card {
            header { h2 { "What fails" } span.tools { a.small href="/dead-letters" { "All dead letters" } } }
            @if kinds.is_empty() {
                div.empty { (super::icons::check()) h2 { "No open dead letters" } p { "Every event was handled, skipped by policy, or still has attempts left." } }
            } @else {
                div.scroll { table.cards {
                    tbody { @for kind in &kinds { (kind_row(kind, caller)) } }
                } }
            }
        }
    }
}

fn kind_row(kind: &Kind, caller: &Caller) -> Markup {
    let group = crate::api::dead_letters::group_shown(caller, &kind.group).unwrap_or_default();
    let link = super::dead_letters::link_of(kind, &group);
    html! {
        tr data-href=(link) {
            td.lead {
                a href=(link) { (kind.event_type) }
                " " span.faint { "in " (group) }
                span.clip.small.muted title=(kind.error) { (kind.error) }
            }
            td.num data-label="Dead letters" { b.bad { (number(kind.count)) } }
        }
    }
}
