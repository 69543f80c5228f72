//! Tokens over HTTP, for administrators of all tenants.

use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use everbus::audit::{Action, Operator, audited};
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use super::Answer;
use crate::auth::{NewToken, Scope, TokenInfo, TokenRequest};
use crate::body::Input;
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

pub(super) fn routes() -> Vec<Route> {
    let admin = Access::Scope(Scope::Admin);
    vec![
        Route::get("/v1/tokens", admin, list)
            .all_tenants()
            .summary("Every token, without its secret")
            .returns::<TokenList>(200),
        Route::post("/v1/tokens", admin, create)
            .all_tenants()
            .summary("Makes a token; its secret is in the answer and nowhere else")
            .json::<TokenRequest>()
            .returns::<NewToken>(201),
        Route::delete("/v1/tokens/{id}", admin, revoke)
            .all_tenants()
            .summary("Revokes a token")
            .returns::<TokenInfo>(200),
    ]
}

#[derive(Serialize, JsonSchema)]
struct TokenList {
    items: Vec<TokenInfo>,
}

async fn list(State(state): State<AppState>) -> Result<Answer<TokenList>, Problem> {
    let items = state.tokens().list().await?;
    Ok(Answer(TokenList { items }))
}

async fn create(
    State(state): State<AppState>,
    Input(request): Input<TokenRequest>,
) -> Result<Response, Problem> {
    request.check()?;
    let action = Action::new("tokens.create")
        .on("TOKEN", &request.name)
        .detail("scopes", json!(request.scopes))
        .detail("tenant", json!(request.tenant));
    let mut made = None;
    let work = async {
        let token = state.tokens().create(request).await?;
        let id = token.info.id.clone();
        made = Some(token);
        // The audit record has the id, never the secret.
        Ok(id)
    };
    audited(state.bus().engine(), &Operator::current(), action, work).await?;
    let token = made.ok_or_else(|| Problem::not_found("the token was not made"))?;
    Ok((StatusCode::CREATED, Answer(token)).into_response())
}

async fn revoke(
    State(state): State<AppState>,
    Path(id): Path<String>,
) -> Result<Answer<TokenInfo>, Problem> {
    let action = Action::new("tokens.revoke").on("TOKEN", &id);
    let work = state.tokens().revoke(&id);
    let revoked = audited(state.bus().engine(), &Operator::current(), action, work).await?;
    Ok(Answer(revoked))
}
