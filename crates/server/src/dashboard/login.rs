//! The page that asks for a token.

use axum::response::IntoResponse;
use maud::html;

use super::icons;
use super::page::document;

pub(super) async fn show() -> impl IntoResponse {
    let body = html! {
        div.sign-in {
            form.card #login {
                div.empty {
                    (icons::brand())
                    h2 { "Sign in to everbus" }
                    p { "Paste a token. It becomes a session of this browser for 12 hours." }
                    p { label.field { "Token" input #token type="password" autocomplete="current-password" required autofocus; } }
                    p.small.bad #problem role="alert" {}
                    p { button.primary type="submit" { "Sign in" } }
                    pre { "everbus token create me --scope read --scope operate" }
                }
            }
        }
    };
    document("Sign in", Some("/assets/login.js"), &body)
}
