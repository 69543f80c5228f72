//! `everbus token`: the tokens of the server.

use clap::Subcommand;
use everbus::audit::{Action, Operator, audited};
use everbus_core::{Clock as _, SystemClock, Timestamp};
use everbus_server::Scope;
use everbus_server::auth::{TokenRequest, Tokens};
use serde_json::json;

use crate::open::Target;
use crate::output::{Output, escaped};
use crate::stop::Outcome;
use crate::when;

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make a token and print it. It is shown this once: the store keeps only its hash
    Create {
        /// Who uses it
        name: String,

        /// What it allows: publish, consume, read, operate or admin; several are separated by commas
        #[arg(
            long = "scope",
            value_name = "SCOPE",
            required = true,
            value_delimiter = ',',
            value_parser = parse_scope
        )]
        scopes: Vec<Scope>,

        /// The only tenant that it can access; every tenant if it is left out
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,

        /// How long it is valid: 12h, 30d; for ever if it is left out
        #[arg(long, value_name = "DURATION", value_parser = when::parse_length)]
        expires: Option<std::time::Duration>,
    },
    /// Show every token, without its secret
    List,
    /// Revoke a token by its id: from now on no server accepts it
    Revoke {
        /// The id, as `everbus token list` shows it
        id: String,
    },
    /// Open a server on loopback again, after the last token was revoked
    Reset,
}

fn parse_scope(text: &str) -> Result<Scope, String> {
    let names = Scope::ALL.iter().map(|scope| scope.as_str());
    let names = names.collect::<Vec<_>>().join(", ");
    text.parse()
        .map_err(|_| format!("{text:?} is not a scope; the scopes are {names}"))
}

pub(crate) async fn run(command: TokenCommand, target: &Target, output: &mut Output) -> Outcome {
    let bus = target.open_bus().await?;
    let done = apply(command, &bus, output).await;
    crate::open::close(bus.engine()).await;
    done
}

async fn apply(command: TokenCommand, bus: &everbus::Bus, output: &mut Output) -> Outcome {
    let tokens = Tokens::new(bus);
    let operator = Operator::current();
    match command {
        TokenCommand::Create {
            name,
            scopes,
            tenant,
            expires,
        } => {
            let expires_at: Option<Timestamp> = expires.map(|after| SystemClock.now().plus(after));
            let request = TokenRequest {
                name,
                scopes,
                tenant,
                expires_at,
            };
            request.check()?;
            let action = Action::new("tokens.create")
                .on("TOKEN", &request.name)
                .detail("scopes", json!(request.scopes))
                .detail("tenant", json!(request.tenant));
            let mut made = None;
            let work = async {
                let token = tokens.create(request).await?;
                let id = token.info.id.clone();
                made = Some(token);
                Ok(id)
            };
            audited(bus.engine(), &operator, action, work).await?;
            let Some(token) = made else { return Ok(()) };
            if output.is_json() {
                return output.json(&token);
            }
            output.line(&token.token)?;
            output.line(format!(
                "id {}: keep the token now, it is not shown again",
                token.info.id
            ))
        }
        TokenCommand::List => {
            let all = tokens.list().await?;
            if output.is_json() {
                return output.json(&all);
            }
            if all.is_empty() {
                return output.line(match tokens.are_used().await? {
                    false => "no tokens: a server on loopback is open to this machine",
                    true => {
                        "no tokens, and the server asks for one: make one with everbus token \
                         create, or open a server on loopback again with everbus token reset"
                    }
                });
            }
            for token in all {
                let scopes: Vec<&str> = token.scopes.iter().map(|scope| scope.as_str()).collect();
                let tenant = token.tenant.as_deref().unwrap_or("(all tenants)");
                output.line(format!(
                    "{}  {}  {}  {}",
                    token.id,
                    escaped(&token.name),
                    scopes.join(","),
                    escaped(tenant)
                ))?;
            }
            Ok(())
        }
        TokenCommand::Revoke { id } => {
            let action = Action::new("tokens.revoke").on("TOKEN", &id);
            let revoked = audited(bus.engine(), &operator, action, tokens.revoke(&id)).await?;
            if output.is_json() {
                return output.json(&revoked);
            }
            output.line(format!(
                "revoked {} ({})",
                revoked.id,
                escaped(&revoked.name)
            ))
        }
        TokenCommand::Reset => {
            let action = Action::new("tokens.reset");
            audited(bus.engine(), &operator, action, tokens.reset()).await?;
            output.line("a server on loopback is open to this machine")
        }
    }
}
