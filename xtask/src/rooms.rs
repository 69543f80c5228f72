//! Finds import cycles between the rooms of a crate: the folders and files directly under its `src`.
//!
//! A room may use another one, but then the other one must not use the first, directly or through others. The
//! check reads `crate::` paths; names that `lib.rs` re-exports count as uses of the room they come from. Test
//! code is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::run::Failed;

/// The crates that are divided into rooms.
const CRATES: &[&str] = &["crates/everbus"];

/// For each room the rooms that it uses, each with one file that does.
type Uses = BTreeMap<String, BTreeMap<String, String>>;

/// Fails if the rooms of a crate form a cycle, and names it.
pub(crate) fn check(root: &Path) -> Result<(), Failed> {
    for krate in CRATES {
        let uses = gather(&root.join(krate).join("src"))?;
        if let Some(cycle) = find_cycle(&uses) {
            return Err(Failed::new(format!(
                "the rooms of {krate} form a cycle: {}",
                describe(&uses, &cycle)
            )));
        }
        println!("rooms of {krate}: {}, no cycle", uses.len());
    }
    Ok(())
}

fn describe(uses: &Uses, cycle: &[String]) -> String {
    let next = cycle.iter().cycle().skip(1);
    let edges = cycle.iter().zip(next).map(|(from, to)| {
        let file = uses.get(from).and_then(|all| all.get(to));
        let file = file.map_or("?", String::as_str);
        format!("{from} uses {to} ({file})")
    });
    edges.collect::<Vec<_>>().join(", ")
}

fn gather(src: &Path) -> Result<Uses, Failed> {
    let failed = |e: std::io::Error| Failed::new(format!("cannot read {}: {e}", src.display()));
    let library = std::fs::read_to_string(src.join("lib.rs")).map_err(failed)?;
    let exported = exported(&library);
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(src).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let room = path.file_stem().unwrap_or_default().to_string_lossy();
        if room != "lib" {
            let all = files.entry(room.into_owned()).or_insert_with(Vec::new);
            sources(&path, all).map_err(failed)?;
        }
    }
    let rooms: BTreeSet<String> = files.keys().cloned().collect();
    let mut uses = Uses::new();
    for (room, sources) in files {
        let all = uses.entry(room.clone()).or_default();
        for (file, text) in sources {
            for head in heads(&without_tests(&text)) {
                let used = if rooms.contains(&head) {
                    Some(&head)
                } else {
                    exported.get(&head)
                };
                if let Some(used) = used.filter(|used| **used != room) {
                    all.entry(used.clone()).or_insert_with(|| file.clone());
                }
            }
        }
    }
    Ok(uses)
}

/// The sources of a room, with their names.
fn sources(path: &Path, all: &mut Vec<(String, String)>) -> std::io::Result<()> {
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            sources(&entry?.path(), all)?;
        }
    } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
        let text = std::fs::read_to_string(path)?;
        all.push((path.to_string_lossy().into_owned(), text));
    }
    Ok(())
}

/// A source without comments, and without the tests at its end.
fn without_tests(text: &str) -> String {
    let text = match text.find("#[cfg(test)]\nmod ") {
        Some(at) if text[at..].lines().nth(1).is_some_and(|l| l.ends_with('{')) => &text[..at],
        _ => text,
    };
    let lines = text.lines().map(|line| match line.find("//") {
        Some(at) => &line[..at],
        None => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The first names of all paths that begin with `crate::`, those in braces included.
fn heads(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    for (at, found) in text.match_indices("crate::") {
        let rest = &text[at + found.len()..];
        match rest.strip_prefix('{') {
            None => all.extend(first_name(rest)),
            Some(group) => {
                let mut depth = 1_usize;
                let mut begins = true;
                for (at, character) in group.char_indices() {
                    match character {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        ',' if depth == 1 => begins = true,
                        c if begins && depth == 1 && !c.is_whitespace() => {
                            all.extend(first_name(&group[at..]));
                            begins = false;
                        }
                        _ => {}
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
        }
    }
    all
}

fn first_name(text: &str) -> Option<String> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let name: String = text.chars().take_while(|c| is_name(*c)).collect();
    (!name.is_empty()).then_some(name)
}

/// The names that a library exports again, with the rooms they come from.
fn exported(library: &str) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let text = without_tests(library);
    for statement in text.split(';') {
        let Some(path) = statement.trim().split("pub use ").nth(1) else {
            continue;
        };
        let path = path.trim_start_matches("crate::");
        let Some((room, names)) = path.split_once("::") else {
            continue;
        };
        let names = names.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        for name in names.filter(|name| name.starts_with(char::is_uppercase)) {
            all.insert(name.to_owned(), room.to_owned());
        }
    }
    all
}

/// The rooms of one cycle in order, if there is a cycle.
fn find_cycle(uses: &Uses) -> Option<Vec<String>> {
    let mut done = BTreeSet::new();
    for room in uses.keys() {
        let mut path = Vec::new();
        if let Some(cycle) = follow(uses, room, &mut path, &mut done) {
            return Some(cycle);
        }
    }
    None
}

fn follow(
    uses: &Uses,
    room: &str,
    path: &mut Vec<String>,
    done: &mut BTreeSet<String>,
) -> Option<Vec<String>> {
    if let Some(at) = path.iter().position(|earlier| earlier == room) {
        return Some(path[at..].to_vec());
    }
    if done.contains(room) {
        return None;
    }
    path.push(room.to_owned());
    for used in uses.get(room).into_iter().flat_map(BTreeMap::keys) {
        if let Some(cycle) = follow(uses, used, path, done) {
            return Some(cycle);
        }
    }
    path.pop();
    done.insert(room.to_owned());
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(edges: &[(&str, &str)]) -> Uses {
        let mut all = Uses::new();
        for (from, to) in edges {
            let of_room = all.entry((*from).to_owned()).or_default();
            of_room.insert((*to).to_owned(), "file.rs".to_owned());
        }
        all
    }

    #[test]
    fn a_cycle_is_found_and_named() {
        let round = uses(&[("a", "b"), ("b", "c"), ("c", "b")]);
        let cycle = find_cycle(&round).unwrap();
        assert_eq!(cycle, ["b", "c"]);
        assert_eq!(
            describe(&round, &cycle),
            "b uses c (file.rs), c uses b (file.rs)"
        );
        assert_eq!(
            find_cycle(&uses(&[("a", "b"), ("a", "c"), ("b", "c")])),
            None
        );
    }

    #[test]
    fn paths_are_read_in_and_out_of_braces_and_tests_are_left_out() {
        let text = "use crate::bus::{Bus, Shared};\nuse crate::{\n    guard,\n    stats::{self, Stats},\n    Error,\n};\n\
                    // crate::comment::X\nfn f() { crate::trace::span(); }\n#[cfg(test)]\nmod tests {\nuse crate::tested;\n}";
        let heads = heads(&without_tests(text));
        assert_eq!(heads, ["bus", "guard", "stats", "Error", "trace"]);
    }

    #[test]
    fn exported_names_belong_to_their_rooms() {
        let library = "mod bus;\npub use bus::Bus;\npub use handler::extract::{\n    Context, Json,\n};\n\
                       pub use everbus_core as core;";
        let names = exported(library);
        assert_eq!(names["Bus"], "bus");
        assert_eq!(names["Json"], "handler");
        assert_eq!(names.len(), 3);
    }
}
