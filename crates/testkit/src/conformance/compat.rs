//! Writes `COMPAT.md`: every scenario of the suite, with its outcome for each engine.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::outcome::{directory, read_column};

const HEAD: &str = "# What each engine offers

One row for each scenario of the conformance suite. Written by `cargo xtask compat` from the outcomes of
the suite (`docs/compat/`); each run of the tests compares them. Do not edit.

- **yes**: the scenario holds.
- **yes** with a number: it holds, except for a part that the engine does not offer.
- **emulated**: the scenario holds because the runtime does what the engine does not offer. The numbers say
  how, and what is left out.
- **no**: the engine does not offer it. The number says why.

`narrow` is an engine of the test kit that offers the verbs and nothing else; `narrow + sqlite` is the same
with a SQLite file beside it, put together by `everbus::compose`.
";

type Lines = BTreeMap<String, String>;

/// All columns there are, by name.
fn columns() -> BTreeMap<String, Lines> {
    let entries = std::fs::read_dir(directory()).into_iter().flatten();
    let names = entries.flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_suffix(".txt").map(str::to_owned)
    });
    names
        .map(|name| {
            let lines = read_column(&name);
            (name, lines)
        })
        .collect()
}

/// What is wrong with the columns: scenarios that are missing, unknown or unexplained.
fn problems(columns: &BTreeMap<String, Lines>) -> Vec<String> {
    let names = super::names();
    let mut problems = Vec::new();
    for (column, lines) in columns {
        for name in &names {
            match lines.get(*name).map(String::as_str) {
                None => problems.push(format!("{column}: {name} is missing")),
                Some(said) if !is_explained(said) => {
                    problems.push(format!("{column}: {name}: {said:?} explains nothing"));
                }
                Some(_) => {}
            }
        }
        let unknown = lines.keys().filter(|name| !names.contains(&name.as_str()));
        problems.extend(unknown.map(|name| format!("{column}: there is no scenario {name}")));
    }
    problems
}

fn is_explained(said: &str) -> bool {
    let because = ["yes, except: ", "no: ", "emulated: "];
    said == "yes"
        || because.iter().any(|word| {
            let reason = said.strip_prefix(word);
            reason.is_some_and(|reason| !reason.trim().is_empty())
        })
}

/// The whole of `COMPAT.md`.
fn render(columns: &BTreeMap<String, Lines>) -> String {
    let mut text = HEAD.to_owned();
    let mut reasons: Vec<&str> = Vec::new();
    let mut group = "";
    for name in super::names() {
        let (module, scenario) = name.split_once("::").unwrap_or(("", name));
        if module != group {
            group = module;
            let _ = write!(text, "\n## {}\n\n| scenario |", module.replace('_', " "));
            for column in columns.keys() {
                let _ = write!(text, " {} |", column.replace('+', " + "));
            }
            let _ = writeln!(text, "\n|---|{}", "---|".repeat(columns.len()));
        }
        let _ = write!(text, "| {} |", scenario.replace('_', " "));
        for lines in columns.values() {
            let said = lines.get(name).map_or("no: not run", String::as_str);
            let _ = write!(text, " {} |", cell(said, &mut reasons));
        }
        text.push('\n');
    }
    if !reasons.is_empty() {
        text.push_str("\n## Reasons\n\n");
    }
    for (n, reason) in reasons.iter().enumerate() {
        let _ = writeln!(text, "{}. {reason}", n + 1);
    }
    text
}

fn cell<'a>(said: &'a str, reasons: &mut Vec<&'a str>) -> String {
    let (word, why) = match said.split_once(", except: ") {
        Some((word, why)) => (word, why),
        None => said.split_once(": ").unwrap_or((said, "")),
    };
    if why.is_empty() {
        return word.to_owned();
    }
    let mut numbers = Vec::new();
    for reason in why.split("; ") {
        let known = reasons.iter().position(|known| *known == reason);
        let at = known.unwrap_or_else(|| {
            reasons.push(reason);
            reasons.len() - 1
        });
        numbers.push((at + 1).to_string());
    }
    format!("{word} ({})", numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::outcome::root;

    // conformance: contract/compat-current: COMPAT.md has every scenario of the suite for every engine, each exception has its reason, and it is not stale
    #[test]
    fn compat_is_complete_explained_and_current() {
        let columns = columns();
        assert!(
            columns.len() >= 4,
            "memory, sqlite, narrow and narrow + sqlite at least"
        );
        let problems = problems(&columns);
        assert!(problems.is_empty(), "{}", problems.join("\n"));
        let path = root().join("COMPAT.md");
        let rendered = render(&columns);
        if std::env::var_os("EVERBUS_WRITE_COMPAT").is_some() {
            std::fs::write(&path, &rendered).unwrap();
        }
        let stored = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            stored == rendered,
            "COMPAT.md is stale: run `cargo xtask compat`"
        );
    }

    #[test]
    fn an_entry_without_a_reason_is_a_problem() {
        for said in ["no", "no: ", "emulated", "yes, except: ", "maybe", ""] {
            assert!(!is_explained(said), "{said:?}");
        }
        for said in ["yes", "no: it cannot", "yes, except: a; b"] {
            assert!(is_explained(said), "{said:?}");
        }
        let names = crate::conformance::names();
        let mut lines: Lines = names
            .iter()
            .map(|name| ((*name).to_owned(), "yes".to_owned()))
            .collect();
        lines.insert(names[0].to_owned(), "no: ".to_owned());
        lines.remove(names[1]);
        lines.insert("gone::scenario".to_owned(), "yes".to_owned());
        let found = problems(&BTreeMap::from([("x".to_owned(), lines)]));
        assert_eq!(found.len(), 3, "{found:?}");
    }

    #[test]
    fn reasons_are_numbered_once() {
        let mut reasons = Vec::new();
        assert_eq!(cell("yes", &mut reasons), "yes");
        assert_eq!(cell("no: a", &mut reasons), "no (1)");
        assert_eq!(cell("yes, except: b; a", &mut reasons), "yes (2, 1)");
        assert_eq!(reasons, ["a", "b"]);
    }
}
