//! Authentication: tokens with scopes and a tenant, sessions of the dashboard, and the open development mode.

mod caller;
mod scope;
pub(crate) mod session;
mod tokens;

pub use caller::Caller;
pub(crate) use caller::{check_new_group, tenant_group, tenant_of_group};
pub use scope::Scope;
pub(crate) use tokens::BUCKET as TOKENS_BUCKET;
pub use tokens::{NewToken, TokenInfo, TokenRequest, Tokens};
