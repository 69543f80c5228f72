//! The frame around every page, and the error page.

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use maud::{DOCTYPE, Markup, html};

use super::icons;
use crate::auth::{Caller, Scope};
use crate::problem::Problem;
use crate::state::AppState;

/// An entry of the side bar.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Overview,
    Events,
    Groups,
    DeadLetters,
    Jobs,
    System,
}

impl Place {
    const ALL: [Self; 6] = [
        Self::Overview,
        Self::Events,
        Self::Groups,
        Self::DeadLetters,
        Self::Jobs,
        Self::System,
    ];

    const fn path(self) -> &'static str {
        match self {
            Self::Overview => "/",
            Self::Events => "/events",
            Self::Groups => "/groups",
            Self::DeadLetters => "/dead-letters",
            Self::Jobs => "/jobs",
            Self::System => "/system",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Overview => "Overview",
            Self::Events => "Events",
            Self::Groups => "Groups",
            Self::DeadLetters => "Dead letters",
            Self::Jobs => "Jobs",
            Self::System => "System",
        }
    }

    /// The key that opens the page, after `g`.
    const fn key(self) -> &'static str {
        match self {
            Self::Overview => "o",
            Self::Events => "e",
            Self::Groups => "g",
            Self::DeadLetters => "d",
            Self::Jobs => "j",
            Self::System => "s",
        }
    }

    fn icon(self) -> Markup {
        match self {
            Self::Overview => icons::overview(),
            Self::Events => icons::events(),
            Self::Groups => icons::groups(),
            Self::DeadLetters => icons::letters(),
            Self::Jobs => icons::jobs(),
            Self::System => icons::system(),
        }
    }
}

/// A page to show.
pub(super) struct Page {
    pub(super) place: Place,
    pub(super) title: String,
    /// A script in addition to the one that every page has.
    pub(super) script: Option<&'static str>,
    pub(super) body: Markup,
}

impl Page {
    pub(super) async fn show(self, state: &AppState, caller: &Caller) -> Response {
        let dead_letters = dead_letters(state, caller).await;
        let body = html! {
            a.skip href="#main" { "Skip to the content" }
            div.frame {
                (side(self.place, caller, dead_letters))
                main #main tabindex="-1" { (self.body) }
            }
            dialog #confirm {
                form method="dialog" {
                    header { h2 #confirm-title {} }
                    div.body #confirm-body {}
                    footer {
                        button type="submit" value="" { "Cancel" }
                        button.primary #confirm-yes type="submit" value="yes" { "OK" }
                    }
                }
            }
            (keys())
            div #toasts role="status" aria-live="polite" {}
        };
        document(&self.title, self.script, &body).into_response()
    }
}

/// The number beside "Dead letters", from the cached figures.
async fn dead_letters(state: &AppState, caller: &Caller) -> u64 {
    let groups = state.live().figures().groups().await.unwrap_or_default();
    let own = groups
        .iter()
        .filter(|group| caller.group_shown(&group.name).is_some());
    own.map(|group| group.dead_letters).sum()
}

fn side(current: Place, caller: &Caller, dead_letters: u64) -> Markup {
    html! {
        nav.side aria-label="Pages" {
            a.brand href="/" { (icons::brand()) "everbus" }
            div.pages {
                @for place in Place::ALL {
                    a.nav href=(place.path()) data-key=(place.key()) aria-current=[(place == current).then_some("page")] {
                        (place.icon())
                        span { (place.name()) }
                        @if place == Place::DeadLetters {
                            span.count #dead-count hidden[dead_letters == 0] { (dead_letters) }
                        }
                    }
                }
            }
            div.foot {
                div.row {
                    // The script that connects shows this element. A page without live figures has no connection.
                    span.row #live hidden title="The connection for live figures" {
                        span.dot #live-dot {}
                        span #live-text { "connecting" }
                    }
                    span.row.tools {
                        button.plain #theme type="button" title="Dark or light (t)" aria-label="Dark or light" { (icons::theme()) }
                        button.plain #keys-button type="button" title="Keyboard (?)" aria-label="Keyboard" { (icons::keyboard()) }
                    }
                }
                @if let Some(token) = caller.token() {
                    div.row {
                        span.clip title=(token.name) {
                            (token.name)
                            @if let Some(tenant) = caller.tenant() { " · " (tenant) }
                        }
                        button.plain #sign-out type="button" { "Sign out" }
                    }
                } @else {
                    div.wide-only { "Open on this machine" }
                }
            }
        }
    }
}

fn keys() -> Markup {
    let keys = [
        ("/", "search"),
        ("j k", "next and previous row"),
        ("Enter", "open the row"),
        ("n", "next page of a list"),
        ("g then o e g d j s", "go to a page"),
        ("t", "dark or light"),
        ("?", "this list"),
    ];
    html! {
        dialog #keys {
            form method="dialog" {
                header { h2 { "Keyboard" } }
                div.body {
                    dl.facts {
                        @for (key, what) in keys {
                            dt { @for part in key.split(' ') { @if part == "then" { " then " } @else { kbd { (part) } " " } } }
                            dd { (what) }
                        }
                    }
                }
                footer { button.primary type="submit" { "Close" } }
            }
        }
    }
}

/// A complete HTML document.
pub(super) fn document(title: &str, script: Option<&'static str>, body: &Markup) -> Html {
    Html(html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · everbus" }
                link rel="icon" href="/assets/icon.svg" type="image/svg+xml";
                link rel="stylesheet" href="/assets/everbus.css";
                // This script runs before the page is drawn, so that a dark page does not flash.
                script src="/assets/theme.js" {}
                script type="module" src="/assets/app.js" {}
                @if let Some(script) = script {
                    script type="module" src=(script) {}
                }
            }
            body { (body) }
        }
    })
}

/// An HTML response.
pub(super) struct Html(pub(super) Markup);

impl IntoResponse for Html {
    fn into_response(self) -> Response {
        let kind = HeaderValue::from_static("text/html; charset=utf-8");
        ([(header::CONTENT_TYPE, kind)], self.0.into_string()).into_response()
    }
}

/// The page that a person sees in place of a problem document.
pub(crate) fn error_page(problem: &Problem) -> String {
    let title = match problem.status() {
        StatusCode::NOT_FOUND => "Not found",
        StatusCode::FORBIDDEN => "Not allowed",
        StatusCode::NOT_IMPLEMENTED => "This engine cannot do this",
        StatusCode::TOO_MANY_REQUESTS => "Too many requests",
        status if status.is_server_error() => "The server could not answer",
        _ => "This did not work",
    };
    let body = html! {
        div.sign-in {
            div.card {
                div.empty {
                    h2 { (title) }
                    p { (problem.detail()) }
                    @if let Some(hint) = problem.hint_text() { p.small { (hint) } }
                    p { a.button href="/" { "Overview" } }
                }
            }
        }
    };
    document(title, None, &body).0.into_string()
}

/// Whether the buttons for operators are shown.
pub(super) fn may_operate(caller: &Caller) -> bool {
    caller.may(Scope::Operate)
}
