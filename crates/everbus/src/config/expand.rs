//! Expands `${VARIABLE}` in a text. This happens after the YAML was parsed, so that a variable can only be
//! a value: it cannot add keys, quotes or lines.

use super::problems::quoted;

/// Looks up a variable; `None` if it is not set. The error means: the value is not UTF-8.
pub(super) type Lookup<'a> = dyn Fn(&str) -> Result<Option<String>, NotText> + 'a;

/// The variable is set to something that is not UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotText;

/// A text with its variables replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Expanded {
    pub(super) text: String,
    /// The variables used, in order.
    pub(super) variables: Vec<String>,
}

/// What is wrong and how to fix it.
pub(super) type Refusal = (String, String);

/// Replaces `${NAME}` and `${NAME:-default}`; `$$` is a dollar sign. Any other dollar sign is kept.
///
/// As in a shell, the default is used if the variable is not set or empty.
pub(super) fn expand(text: &str, lookup: &Lookup<'_>) -> Result<Expanded, Refusal> {
    let mut expanded = Expanded {
        text: String::with_capacity(text.len()),
        variables: Vec::new(),
    };
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        expanded.text.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        rest = if let Some(after) = after.strip_prefix('$') {
            expanded.text.push('$');
            after
        } else if let Some(after) = after.strip_prefix('{') {
            let Some((inside, after)) = after.split_once('}') else {
                return Err((
                    "a ${ without its }".to_owned(),
                    "write ${NAME}, or $${ if a dollar sign and a brace are meant".to_owned(),
                ));
            };
            let (name, value) = variable(inside, lookup)?;
            expanded.text.push_str(&value);
            expanded.variables.push(name.to_owned());
            after
        } else {
            expanded.text.push('$');
            after
        };
    }
    expanded.text.push_str(rest);
    Ok(expanded)
}

fn variable<'t>(inside: &'t str, lookup: &Lookup<'_>) -> Result<(&'t str, String), Refusal> {
    let (name, default) = match inside.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (inside, None),
    };
    let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if !is_name {
        return Err((
            format!("{} is not the name of a variable", quoted(name)),
            "write ${NAME} or ${NAME:-default}, with letters, digits and _; $${ is a literal ${"
                .to_owned(),
        ));
    }
    if default.is_some_and(|default| default.contains("${")) {
        return Err((
            format!("the default of ${{{name}}} is itself a variable"),
            "a default is a plain text".to_owned(),
        ));
    }
    let value = lookup(name).map_err(|NotText| {
        (
            format!("the variable {name} is set to something that is not UTF-8"),
            format!("set {name} to a text"),
        )
    })?;
    match (value, default) {
        (Some(value), None) => Ok((name, value)),
        (Some(value), Some(_)) if !value.is_empty() => Ok((name, value)),
        (_, Some(default)) => Ok((name, default.to_owned())),
        (None, None) => Err((
            format!("the variable {name} is not set"),
            format!("set {name}, or give a default: ${{{name}:-…}}"),
        )),
    }
}

/// The variables of this process.
pub(super) fn environment(name: &str) -> Result<Option<String>, NotText> {
    match std::env::var(name) {
        Ok(value) => Ok(Some(value)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => Err(NotText),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(name: &str) -> Result<Option<String>, NotText> {
        match name {
            "HOST" => Ok(Some("db".into())),
            "EMPTY" => Ok(Some(String::new())),
            "TRICK" => Ok(Some("${HOST}: \"x\"\n- $$".into())),
            "BYTES" => Err(NotText),
            _ => Ok(None),
        }
    }

    fn expanded(text: &str) -> String {
        expand(text, &lookup).unwrap().text
    }

    // conformance: handlers/config-variables: ${VAR} and ${VAR:-default} are expanded, $$ is a dollar sign
    #[test]
    fn variables_are_replaced_and_dollars_can_be_escaped() {
        assert_eq!(expanded("redis://${HOST}:6379"), "redis://db:6379");
        assert_eq!(expanded("${HOST}${HOST}"), "dbdb");
        assert_eq!(expanded("${NONE:-x:-y}"), "x:-y");
        assert_eq!(expanded("${NONE:-}"), "");
        assert_eq!(expanded("${EMPTY}"), "");
        assert_eq!(expanded("${EMPTY:-x}"), "x");
        assert_eq!(expanded("${HOST:-x}"), "db");
        assert_eq!(
            expanded("$${HOST} $$ $ $HOST pa$word$"),
            "${HOST} $ $ $HOST pa$word$"
        );
        assert_eq!(expanded("$$$${HOST}"), "$${HOST}");
        assert_eq!(expanded("größe ${HOST} ä"), "größe db ä");
        let variables = expand("a${HOST}b${EMPTY}", &lookup).unwrap().variables;
        assert_eq!(variables, ["HOST", "EMPTY"]);
    }

    #[test]
    fn what_a_variable_holds_is_not_expanded_again() {
        assert_eq!(expanded("${TRICK}"), "${HOST}: \"x\"\n- $$");
    }

    #[test]
    fn what_cannot_be_expanded_is_named() {
        for (text, named) in [
            ("${NONE}", "NONE is not set"),
            ("x${", "without its }"),
            ("${HOST", "without its }"),
            ("${}", "not the name"),
            ("${1A}", "not the name"),
            ("${HOST:?wrong}", "not the name"),
            ("${A:-${HOST}}", "itself a variable"),
            ("${BYTES}", "not UTF-8"),
        ] {
            let (what, hint) = expand(text, &lookup).unwrap_err();
            assert!(what.contains(named) && !hint.is_empty(), "{text}: {what}");
        }
    }
}
