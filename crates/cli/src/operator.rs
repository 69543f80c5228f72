//! The name of the operator for the audit trail: `--actor`, the environment, or the system's user.

use everbus::audit::Operator;

use crate::args::Args;

pub(crate) fn of(args: &Args) -> Operator {
    let variable = || std::env::var("EVERBUS_ACTOR").ok();
    let named = args.actor.clone().or_else(variable);
    let named = named.filter(|name| !name.is_empty());
    let mut operator = Operator::new(named.unwrap_or_else(|| format!("cli:{}", user())));
    if let Some(reason) = args.reason.clone().filter(|reason| !reason.is_empty()) {
        operator = operator.reason(reason);
    }
    operator
}

/// The name of the user who owns this process. The environment is not used: anyone can set it.
fn user() -> String {
    let uid = rustix::process::getuid().as_raw();
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    name_of(uid, &users).unwrap_or_else(|| format!("uid-{uid}"))
}

/// The name of a user in the form of `/etc/passwd`: `name:password:uid:…`.
fn name_of(uid: u32, users: &str) -> Option<String> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _, number) = (fields.next()?, fields.next()?, fields.next()?);
        (number.parse() == Ok(uid) && !name.is_empty()).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_number() {
        let users = "root:x:0:0::/root:/bin/sh\n\nbad\n:x:7:7\nalice:x:1000:1000::/home/alice:\n";
        assert_eq!(name_of(0, users).as_deref(), Some("root"));
        assert_eq!(name_of(1000, users).as_deref(), Some("alice"));
        assert_eq!(name_of(7, users), None);
        assert_eq!(name_of(100, users), None);
    }
}
