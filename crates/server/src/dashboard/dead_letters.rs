//! The pages of dead letters: grouped by error, with single and bulk retry, and an editor for the payload.

use axum::extract::{Path, State};
use axum::response::Response;
use everbus::{DeadLetter, DeadLetterFilter, EventId, Failure};
use maud::{Markup, html};
use serde::Deserialize;

use super::kinds::{self, Kind};
use super::page::{Page, Place, may_operate};
use super::parts::{self, number};
use crate::api::dead_letters::{self, LetterFilter, LettersQuery};
use crate::api::publish::event_id;
use crate::auth::Caller;
use crate::body::Params;
use crate::problem::Problem;
use crate::state::AppState;

const PAGE: usize = 50;
const KINDS: usize = 30;

/// The filters, as in the URL of the page.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Filters {
    r#type: String,
    group: String,
    error: String,
    cursor: String,
}

impl Filters {
    fn query(&self) -> LettersQuery {
        let given = |text: &str| (!text.trim().is_empty()).then(|| text.trim().to_owned());
        LettersQuery {
            group: given(&self.group),
            event_type: given(&self.r#type),
            tenant: None,
            error: given(&self.error),
            limit: Some(PAGE),
            cursor: given(&self.cursor),
        }
    }

    fn filter(&self, caller: &Caller) -> Result<DeadLetterFilter, Problem> {
        let query = self.query();
        let filter = LetterFilter {
            group: query.group,
            event_type: query.event_type,
            error: query.error,
            ..LetterFilter::default()
        };
        filter.filter(caller)
    }

    fn link(&self, cursor: &str) -> String {
        let pairs = [
            ("type", self.r#type.as_str()),
            ("group", &self.group),
            ("error", &self.error),
            ("cursor", cursor),
        ];
        super::events::link("/dead-letters", &pairs)
    }

    fn is_plain(&self) -> bool {
        self.r#type.is_empty() && self.group.is_empty() && self.error.is_empty()
    }
}

/// The URL of the list with the filters of a kind of errors.
pub(super) fn link_of(kind: &Kind, group: &str) -> String {
    let pairs = [
        ("type", kind.event_type.as_str()),
        ("group", group),
        ("error", &kind.search),
    ];
    super::events::link("/dead-letters", &pairs)
}

pub(super) async fn list(
    State(state): State<AppState>,
    caller: Caller,
    Params(filters): Params<Filters>,
) -> Result<Response, Problem> {
    let (letters, next) = dead_letters::page(state.bus(), &caller, &filters.query()).await?;
    let filter = filters.filter(&caller)?;
    let total = state.bus().dead_letters().count(filter.clone()).await?;
    let kinds = match filters.cursor.is_empty() && total > 0 {
        true => kinds::kinds(&state, filter, KINDS).await?,
        false => Some(Vec::new()),
    };
    let operate = may_operate(&caller);
    let body = html! {
        div.head {
            h1 { "Dead letters" }
            span.sub { (number(total)) " open" @if !filters.is_plain() { " match" } }
            span.tools {
                @if operate && total > 0 {
                    button.primary type="button" #retry-all data-total=(total) { "Retry " @if filters.is_plain() { "all" } @else { "these" } " " (number(total)) "…" }
                    button.danger type="button" #purge-all data-total=(total) { "Purge…" }
                }
            }
        }
        div.stack #letters data-type=(filters.r#type) data-group=(filters.group) data-error=(filters.error) {
            @if !filters.is_plain() || total > 0 { (form(&filters)) }
            @if total == 0 && filters.is_plain() {
                section.card { (parts::empty(
                    "No dead letters",
                    "An event that fails in every attempt comes here, with its payload and every error. Nothing is lost: it can be retried, corrected, or purged.",
                    Some("everbus dlq list"),
                )) }
            } @else {
                @match &kinds {
                    Some(kinds) if kinds.len() > 1 => (by_error(kinds, &caller)),
                    Some(_) => {}
                    None => p.small.muted { "There are too many dead letters to group them by error now. Filter by type or group first." },
                }
                (rows(&letters, &caller, operate, &filters, next.as_deref()))
            }
        }
    };
    let page = Page {
        place: Place::DeadLetters,
        title: "Dead letters".to_owned(),
        script: Some("/assets/letters.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

fn form(filters: &Filters) -> Markup {
    html! {
        form.card method="get" action="/dead-letters" {
            header {
                div.filters.grow {
                    label.field.grow { "Error contains" input #search name="error" type="search" value=(filters.error) autocomplete="off"; }
                    label.field { "Type" input name="type" value=(filters.r#type) placeholder="order.*" spellcheck="false"; }
                    label.field { "Group" input name="group" value=(filters.group); }
                    button.primary type="submit" { "Filter" }
                    @if !filters.is_plain() { a.button href="/dead-letters" { "Clear" } }
                }
            }
        }
    }
}

fn by_error(kinds: &[Kind], caller: &Caller) -> Markup {
    html! {
        section.card {
            header { h2 { "By error" } }
            div.scroll { table.cards {
                thead { tr { th { "Error" } th { "Type" } th { "Group" } th.num { "Count" } } }
                tbody { @for kind in kinds {
                    @let group = dead_letters::group_shown(caller, &kind.group).unwrap_or_default();
                    tr data-href=(link_of(kind, &group)) {
                        td.lead { a href=(link_of(kind, &group)) { (first_line(&kind.error)) } }
                        td data-label="Type" { (kind.event_type) }
                        td data-label="Group" { (group) }
                        td.num data-label="Count" { b { (number(kind.count)) } }
                    }
                } }
            } }
        }
    }
}

fn first_line(error: &str) -> String {
    let line = error.lines().next().unwrap_or_default();
    let mut text: String = line.chars().take(140).collect();
    if text.len() < error.len() {
        text.push('…');
    }
    if text.is_empty() {
        text.push_str("(no text)");
    }
    text
}

fn rows(
    letters: &[DeadLetter],
    caller: &Caller,
    operate: bool,
    filters: &Filters,
    next: Option<&str>,
) -> Markup {
    html! {
        section.card {
            @if letters.is_empty() { (parts::empty("Nothing matches", "No open dead letter matches these filters.", None)) }
            @else { div.scroll { table.fixed.cards {
                thead { tr { th.w-type { "Event" } th { "Last error" } th.w-id { "Group" } th.num.w-num { "Attempts" } th.num.w-time { "Died" } th.w-num {} } }
                tbody { @for letter in letters {
                    @let id = letter.event().id();
                    @let group = dead_letters::group_shown(caller, &letter.group).unwrap_or_default();
                    @let link = super::events::link(&format!("/dead-letters/{id}"), &[("group", &group)]);
                    tr data-href=(link) {
                        td.lead { a.clip href=(link) { (letter.event().event_type()) } span.mono.small.faint { (parts::short_id(&letter.event().display_id())) } }
                        td data-label="Error" { span.clip title=(letter.last_error()) { (first_line(letter.last_error())) } }
                        td data-label="Group" { span.clip { (group) } }
                        td.num data-label="Attempts" { (letter.attempts) }
                        td.num data-label="Died" { (parts::time(letter.died_at)) }
                        td.num { @if operate { button.small-button type="button" data-retry=(id) data-of=(group) { "Retry" } } }
                    }
                } }
            } } }
            @if next.is_some() || !filters.cursor.is_empty() {
                footer {
                    span.grow {}
                    @if !filters.cursor.is_empty() { a.button href=(filters.link("")) { "First page" } }
                    @if let Some(next) = next { a.button #next rel="next" href=(filters.link(next)) { "Next page" } }
                }
            }
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Which {
    group: String,
}

pub(super) async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(which): Params<Which>,
) -> Result<Response, Problem> {
    let letters = dead_letters::of_event(state.bus(), &caller, event_id(&id, None)).await?;
    let letters: Vec<(String, DeadLetter)> = letters
        .into_iter()
        .filter_map(|letter| Some((dead_letters::group_shown(&caller, &letter.group)?, letter)))
        .collect();
    let chosen = letters
        .iter()
        .find(|(group, _)| *group == which.group)
        .or(letters.first())
        .ok_or_else(|| Problem::not_found(format!("the event {id} has no dead letter")))?;
    let (group, letter) = chosen;
    let id = letter.event().id();
    let record = state
        .bus()
        .whole(&letter.record)
        .await
        .unwrap_or_else(|_| letter.record.clone());
    let operate = may_operate(&caller) && letter.is_open();
    let text = std::str::from_utf8(record.event.payload()).ok();
    let body = html! {
        div.head {
            h1.wrap { (record.event.event_type()) }
            @if letter.is_open() { span.badge.bad { "dead letter" } } @else { span.badge.good { "retried" } }
            span.sub { "in " a href={ "/groups/" (crate::api::percent_encoded(group)) } { (group) } ", " (parts::count(u64::from(letter.attempts), "attempt")) ", died " (parts::time(letter.died_at)) }
            span.tools {
                a.button href={ "/events/" (id) } { "Event" }
                @if operate {
                    @if text.is_some() { button type="button" #edit { "Edit and retry…" } }
                    button.primary type="button" data-retry=(id) data-of=(group) { "Retry" }
                }
            }
        }
        @if let Some(by) = letter.replaced_by {
            div.notice.good { p { "A corrected event replaced it: " a.mono href={ "/events/" (by) } { (by) } } }
        }
        @if letters.len() > 1 {
            div.tabs { @for (other, _) in &letters {
                a href=(super::events::link(&format!("/dead-letters/{id}"), &[("group", other)])) aria-current=[(other == group).then_some("page")] { (other) }
            } }
            br;
        }
        div.cols-2 {
            section.card {
                header { h2 { "What went wrong" } span.tools.small.muted { (parts::count(letter.failures.len() as u64, "failure")) " kept" } }
                div.body { (failures(&letter.failures)) }
            }
            section.card {
                header { h2 { "Payload" } span.tools.small.muted { (record.event.content_type()) } }
                div.body { (parts::payload(&record)) }
            }
        }
        @if let (true, Some(text)) = (operate, text) { (editor(id, group, text)) }
    };
    let page = Page {
        place: Place::DeadLetters,
        title: record.event.event_type().to_owned(),
        script: Some("/assets/letters.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

/// Lists every attempt. An error that equals the one before is not shown again.
fn failures(failures: &[Failure]) -> Markup {
    html! {
        ul.timeline {
            @for (n, failure) in failures.iter().enumerate() {
                @let before = n.checked_sub(1).and_then(|n| failures.get(n));
                li.bad {
                    div.row.small {
                        b { "Attempt " (failure.attempt) } span.badge.bad { (failure.kind.as_str()) }
                        span.muted { (parts::time(failure.at)) }
                        @if let Some(took) = failure.took { span.muted { "after " (parts::millis(u64::try_from(took.as_millis()).unwrap_or(0).max(1))) } }
                    }
                    @match before {
                        Some(before) if before.error == failure.error => div.small.faint { "the same error" },
                        Some(before) => { (changed(&before.error, &failure.error)) div.small.faint { "marked: not in the error before" } }
                        None => pre.code.wrapped { (failure.error) },
                    }
                    @if let Some(handler) = &failure.handler { div.small.faint { "handler " (handler) @if let Some(worker) = &failure.worker { " on " (worker) } } }
                    @if let Some(backtrace) = &failure.backtrace { details { summary.small { "Backtrace" } pre.code { (backtrace) } } }
                }
            }
        }
    }
}

/// An error with the lines marked that the error before did not have.
fn changed(before: &str, now: &str) -> Markup {
    let known: Vec<&str> = before.lines().collect();
    html! {
        pre.code.wrapped {
            @for line in now.lines() {
                @if known.contains(&line) { (line) "\n" } @else { span.diff-add { (line) } }
            }
        }
    }
}

fn editor(id: EventId, group: &str, payload: &str) -> Markup {
    html! {
        dialog.wide #editor data-id=(id) data-of=(group) {
            form method="dialog" {
                header { h2 { "Edit and retry" } }
                div.body {
                    p.muted { "A corrected event is published for the group " b { (group) } " only, and this dead letter is closed. The original stays in the log." }
                    label.field { "Payload" textarea #payload spellcheck="false" { (payload) } }
                    p.small.bad #payload-problem role="alert" {}
                    details { summary.small { "What changes" } pre.code.wrapped #payload-diff {} }
                }
                footer {
                    button type="submit" value="" { "Cancel" }
                    button.primary #send type="submit" value="send" { "Publish the correction" }
                }
            }
        }
    }
}
