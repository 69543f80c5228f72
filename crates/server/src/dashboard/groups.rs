//! The pages of groups: the lag of each, and the reasons why events wait.

use std::collections::BTreeMap;

use axum::extract::{Path, State};
use axum::response::Response;
use everbus::{
    BreakerState, Clock as _, DeadLetterFilter, GroupInfo, GroupName, PausedGroup, SystemClock,
};
use maud::{Markup, html};

use super::kinds;
use super::page::{Page, Place, may_operate};
use super::parts::{self, number};
use crate::api::percent_encoded;
use crate::auth::Caller;
use crate::problem::Problem;
use crate::state::AppState;

/// How many kinds of errors are shown, at most.
const KINDS: usize = 20;

pub(super) async fn list(
    State(state): State<AppState>,
    caller: Caller,
) -> Result<Response, Problem> {
    let groups = state.live().figures().groups().await?;
    let figures = state.live().figures().group_figures(&groups, &caller);
    let paused: Vec<String> = paused(&state)
        .await
        .keys()
        .filter_map(|group| caller.group_shown(group))
        .collect();
    let body = html! {
        div.head { h1 { "Groups" } span.sub { "Every group gets each event that matches its subscriptions." } }
        section.card {
            @if figures.is_empty() {
                (parts::empty(
                    "No groups yet",
                    "A group appears with its first subscription: in a program, in everbus.yaml, or over HTTP.",
                    Some("everbus tail 'order.*' --group billing"),
                ))
            } @else {
                div.scroll { table.cards {
                    thead { tr {
                        th { "Group" }
                        th.num title="matching events that were not delivered yet" { "Behind" }
                        th.num title="delivered, not settled" { "In flight" }
                        th.num title="for their next attempt" { "Waiting" }
                        th.num title="the oldest event that is not settled" { "Oldest" }
                        th title="events that are not settled" { "Last 2 minutes" }
                        th.num { "Dead letters" }
                    } }
                    tbody #group-rows { @for group in &figures {
                        tr data-href={ "/groups/" (percent_encoded(&group.name)) } data-group=(group.name) {
                            td.lead {
                                a href={ "/groups/" (percent_encoded(&group.name)) } { (group.name) } " "
                                @if paused.contains(&group.name) { span.badge.warn { "paused" } }
                            }
                            td.num data-label="Behind" { span data-figure="behind" { (number(group.behind)) } }
                            td.num data-label="In flight" { span data-figure="in_flight" { (number(group.in_flight)) } }
                            td.num data-label="Waiting" { span data-figure="retrying" { (number(group.waiting)) } }
                            td.num data-label="Oldest" { span data-figure="oldest" { (parts::oldest(group.behind_ms)) } }
                            td.off { span data-figure="spark" { (parts::spark(&group.spark)) } }
                            td.num data-label="Dead letters" { span data-figure="dead" class=[(group.dead_letters > 0).then_some("bad")] { (number(group.dead_letters)) } }
                        }
                    } }
                } }
            }
        }
    };
    let page = Page {
        place: Place::Groups,
        title: "Groups".to_owned(),
        script: Some("/assets/groups.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

pub(super) async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Response, Problem> {
    let wanted = caller.group(&name)?;
    let known = state.live().figures().groups().await?;
    let mut found = known.iter().find(|group| group.name == wanted).cloned();
    if found.is_none() {
        // The group may be newer than the cached figures.
        let groups = state.bus().groups().await?;
        found = groups.into_iter().find(|group| group.name == wanted);
    }
    let group = &found.ok_or_else(|| Problem::not_found(format!("there is no group {name}")))?;
    let paused = paused(&state).await.remove(&group.name);
    let letters = dead_letters(&state, &caller, &group.name, &name).await;
    let body = html! {
        div.head {
            h1 { (name) }
            @if paused.is_some() { span.badge.warn { "paused" } }
            @if group.ordered { span.badge { "ordered by key" } }
            @if group.ephemeral { span.badge { "ephemeral" } }
            span.tools {
                @if may_operate(&caller) {
                    @if paused.is_some() { button.primary type="button" data-resume=(name) { "Resume" } }
                    @else { button type="button" data-pause=(name) { "Pause" } }
                }
            }
        }
        div.figures {
            (figure("Behind", &number(group.behind), "not delivered yet"))
            (figure("In flight", &number(group.in_flight), "delivered, not settled"))
            (figure("Waiting", &number(group.waiting), "for their next attempt"))
            (figure("Oldest", &parts::oldest(u64::try_from(group.behind_for.as_millis()).unwrap_or(u64::MAX)), "unsettled event"))
            (figure("Dead letters", &number(group.dead_letters), "open"))
        }
        br;
        div.cols-2 {
            div.stack {
                section.card {
                    header { h2 { "Why is this waiting?" } }
                    div.body { ul.timeline { @for (class, reason) in reasons(&state, group, paused.as_ref()) { li class=(class) { (reason) } } } }
                }
                (letters)
            }
            div.stack {
                section.card {
                    header { h2 { "Subscriptions" } }
                    div.scroll { table {
                        tbody { @for subscription in &group.subscriptions {
                            tr { td.mono.wrap { (subscription.pattern.as_str()) } td.small.muted.wrap { (subscription.name) } td.num.small { (parts::time(subscription.created_at)) } }
                        } }
                    } }
                }
                section.card {
                    header { h2 { "Lag by type" } }
                    (lag_by_type(group))
                }
                section.card {
                    header { h2 { "Position" } }
                    div.body { (parts::facts(vec![
                        ("Delivered up to", html! { span.mono { (group.position) } }),
                        ("Last active", parts::time(group.active_at)),
                    ])) }
                }
            }
        }
    };
    let page = Page {
        place: Place::Groups,
        title: name.clone(),
        script: Some("/assets/groups.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

fn figure(label: &str, value: &str, note: &str) -> Markup {
    html! { div.card.figure { div.label { (label) } div.value { (value) } div.note { (note) } } }
}

/// The paused groups; empty if the engine cannot pause, or after an error.
async fn paused(state: &AppState) -> BTreeMap<GroupName, PausedGroup> {
    state.bus().paused_groups().await.unwrap_or_default()
}

/// The known reasons why events wait, the most important first.
fn reasons(
    state: &AppState,
    group: &GroupInfo,
    paused: Option<&PausedGroup>,
) -> Vec<(&'static str, Markup)> {
    let mut reasons = Vec::new();
    if let Some(paused) = paused {
        let text = html! {
            (paused.by) " paused the group " (parts::time(paused.at))
            @if let Some(reason) = &paused.reason { ": " (reason) }
            ". No process delivers to it until it is resumed."
        };
        reasons.push(("warn", text));
    }
    if let Some(held) = &group.held_back {
        reasons.push((
            "warn",
            html! { "New events are held back by the database: " (held) },
        ));
    }
    for breaker in state.bus().breakers() {
        if let (true, BreakerState::Open { until }) =
            (breaker.name == group.name.as_str(), breaker.state)
        {
            reasons.push(("bad", html! { "Its circuit breaker is open after " (breaker.failures) " failures. The next try is " (parts::time(until)) "." }));
        }
    }
    let stopped = state.bus().stopped_groups();
    for (_, error) in stopped.iter().filter(|(name, _)| *name == group.name) {
        reasons.push((
            "bad",
            html! { "The group stopped in this process: " (error.message()) },
        ));
    }
    if group.unhandled > 0 {
        reasons.push(("warn", html! { (parts::count(group.unhandled, "event")) " of a type that no running process handles. Start a process with their handler." }));
    }
    let retrying = group.waiting.saturating_sub(group.unhandled);
    if retrying > 0 {
        reasons.push(("warn", html! { (parts::count(retrying, "event")) " failed or had to be given back, waiting for the next attempt." }));
    }
    if group.in_flight > 0 {
        reasons.push((
            "",
            html! { (parts::count(group.in_flight, "event")) " in the hands of handlers now." },
        ));
    }
    if group.behind > 0 {
        let idle = SystemClock.now().since(group.active_at).as_secs();
        let text = html! { (parts::count(group.behind, "matching event")) " not delivered yet." };
        reasons.push(("warn", text));
        if idle > 60 && paused.is_none() && group.in_flight == 0 {
            reasons.push(("bad", html! { "The group was last active " (parts::time(group.active_at)) ": no process seems to consume it." }));
        }
    }
    if reasons.is_empty() {
        reasons.push((
            "good",
            html! { "Nothing waits: the group has settled every matching event." },
        ));
    }
    reasons
}

fn lag_by_type(group: &GroupInfo) -> Markup {
    let busy: Vec<_> = group
        .types
        .iter()
        .filter(|(_, lag)| lag.unsettled() > 0 || lag.dead_letters > 0)
        .collect();
    html! {
        @if busy.is_empty() {
            div.body { p.muted { "No type has unsettled events." } }
        } @else {
            div.scroll { table {
                thead { tr { th { "Type" } th.num { "Unsettled" } th.num { "Dead letters" } } }
                tbody { @for (event_type, lag) in busy {
                    tr { td.wrap { (event_type) } td.num { (number(lag.unsettled())) } td.num { (number(lag.dead_letters)) } }
                } }
            } }
        }
    }
}

async fn dead_letters(state: &AppState, caller: &Caller, group: &GroupName, name: &str) -> Markup {
    let filter = DeadLetterFilter {
        group: Some(group.clone()),
        tenant: caller.tenant().map(str::to_owned),
        ..DeadLetterFilter::default()
    };
    let kinds = kinds::kinds(state, filter, KINDS).await;
    let kinds = kinds.ok().flatten().unwrap_or_default();
    html! {
        @if !kinds.is_empty() {
            section.card {
                header { h2 { "Dead letters by error" } }
                div.scroll { table { tbody { @for kind in &kinds {
                    tr { td.wrap { a href=(super::dead_letters::link_of(kind, name)) { (kind.event_type) } span.clip.small.muted { (kind.error) } } td.num { b { (number(kind.count)) } } }
                } } } }
            }
        }
    }
}
