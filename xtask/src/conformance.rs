//! The conformance table: every requirement in `docs/requirements/*.txt` beside the tests that
//! carry its tag. It cannot claim what no test shows.
//!
//! A tag is a comment above a test: `// conformance: embedded/dlq-list: the requirement`. Rules and
//! faults are their own ids: `// conformance: rule-4: the requirement`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::run::Failed;

const TABLE: &str = "docs/conformance.md";
const SECTIONS: &[(&str, &str)] = &[
    ("embedded", "The embedded specification"),
    ("bus", "What the embedded bus delivers beyond it"),
    ("framework", "The framework specification"),
    ("outbox", "The outbox specification"),
    ("omni", "The omni specification"),
    ("workflow", "The workflow specification"),
    ("handlers", "What handlers deliver"),
    ("memory", "What the memory delivers"),
    ("contract", "The contract between engines and runtime"),
    ("operations", "Ordinary days of operation"),
    ("rules", "Delivery rules"),
    ("faults", "Ways to lose events"),
];

/// The files beside that of a section: `docs/requirements/<section>/*.txt`, by name.
fn parts_of(root: &Path, section: &str) -> Result<Vec<String>, Failed> {
    let folder = format!("docs/requirements/{section}");
    let Ok(entries) = std::fs::read_dir(root.join(&folder)) else {
        return Ok(Vec::new());
    };
    let mut parts = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| Failed::new(format!("cannot read {folder}: {e}")))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".txt") {
            parts.push(format!("{folder}/{name}"));
        }
    }
    parts.sort();
    Ok(parts)
}

/// Writes the table, complete or not, and says what is missing.
pub(crate) fn write(root: &Path) -> Result<(), Failed> {
    let table = Table::gather(root)?;
    let path = root.join(TABLE);
    std::fs::write(&path, table.render())
        .map_err(|e| Failed::new(format!("cannot write {TABLE}: {e}")))?;
    println!("wrote {TABLE}: {}", table.count());
    for problem in &table.problems {
        println!("  {problem}");
    }
    Ok(())
}

/// Fails if a requirement has no test, a tag names no requirement, or the table is not up to date.
pub(crate) fn check(root: &Path) -> Result<(), Failed> {
    let table = Table::gather(root)?;
    let mut problems = table.problems.clone();
    let stored = std::fs::read_to_string(root.join(TABLE)).unwrap_or_default();
    if stored != table.render() {
        problems.push(format!("{TABLE} is stale: run `cargo xtask conformance`"));
    }
    println!("conformance: {}", table.count());
    if problems.is_empty() {
        return Ok(());
    }
    Err(Failed::new(format!(
        "the conformance table is not in order:\n  {}",
        problems.join("\n  ")
    )))
}

#[derive(Debug, Default)]
struct Requirement {
    section: String,
    heading: String,
    id: String,
    text: String,
    lives: Option<String>,
    deviation: Option<String>,
    /// What the tests show and what they do not.
    note: Option<String>,
    bench: Option<String>,
    out_of_scope: Option<String>,
    /// Further ids whose tags show this requirement too.
    also: Vec<String>,
    tests: Vec<String>,
}

impl Requirement {
    /// Whether a tag means this requirement: by its own id, or by one that is listed beside it,
    /// with its section where that is another one.
    fn is_named(&self, tag: &str) -> bool {
        let (section, id) = split_name(tag);
        let here = self.section == section;
        (here && self.id == id)
            || self
                .also
                .iter()
                .any(|also| (here && also == id) || also == tag)
    }

    fn is_shown(&self) -> bool {
        !self.tests.is_empty() || self.bench.is_some() || self.out_of_scope.is_some()
    }
}

#[derive(Debug, Default)]
struct Table {
    requirements: Vec<Requirement>,
    problems: Vec<String>,
}

impl Table {
    fn gather(root: &Path) -> Result<Self, Failed> {
        let mut table = Self::default();
        for (section, _) in SECTIONS {
            let path = format!("docs/requirements/{section}.txt");
            let text = read(&root.join(&path))?;
            table.add_requirements(section, &path, &text);
            // A long section may go on in files of its own.
            for path in parts_of(root, section)? {
                table.add_requirements(section, &path, &read(&root.join(&path))?);
            }
        }
        let mut files = Vec::new();
        source_files(&root.join("crates"), &mut files);
        source_files(&root.join("examples"), &mut files);
        source_files(&root.join("xtask"), &mut files);
        files.sort();
        let mut benches = String::new();
        for file in &files {
            let text = read(file)?;
            let shown = file.strip_prefix(root).unwrap_or(file);
            let shown = shown.to_string_lossy().replace('\\', "/");
            if shown.starts_with("crates/cli/src/bench") {
                benches.push_str(&text);
            }
            table.add_tags(&shown, &text);
        }
        table.find_problems(root, &benches);
        Ok(table)
    }

    fn add_requirements(&mut self, section: &str, path: &str, text: &str) {
        let mut heading = String::new();
        for (number, line) in text.lines().enumerate() {
            let at = || format!("{path}:{}", number + 1);
            if let Some(title) = line.strip_prefix("## ") {
                heading = title.trim().to_owned();
                continue;
            }
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let Some((name, value)) = line.split_once(": ") else {
                self.problems.push(format!("{} has no `id: text`", at()));
                continue;
            };
            let (field, value) = (name.trim(), value.trim().to_owned());
            if !name.starts_with(' ') {
                self.requirements.push(Requirement {
                    section: section.to_owned(),
                    heading: heading.clone(),
                    id: field.to_owned(),
                    text: value,
                    ..Requirement::default()
                });
                continue;
            }
            let Some(requirement) = self.requirements.last_mut() else {
                self.problems.push(format!("{} belongs to nothing", at()));
                continue;
            };
            match field {
                "lives" => requirement.lives = Some(value),
                "deviation" => requirement.deviation = Some(value),
                "note" => requirement.note = Some(value),
                "bench" => requirement.bench = Some(value),
                "out-of-scope" => requirement.out_of_scope = Some(value),
                "also" => requirement.also = value.split(", ").map(str::to_owned).collect(),
                other => self
                    .problems
                    .push(format!("{}: {other:?} is not a field", at())),
            }
        }
    }

    fn add_tags(&mut self, file: &str, text: &str) {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (index, line) in lines.iter().enumerate() {
            // Prose about tags (such as this file's) does not begin a line with a plain comment.
            let Some(tag) = line.strip_prefix("// conformance: ") else {
                continue;
            };
            let at = format!("{file}:{}", index + 1);
            let Some(name) = tag.split_once(": ").map(|(name, _)| name.trim()) else {
                self.problems
                    .push(format!("{at}: a tag is `section/id: requirement`"));
                continue;
            };
            let Some(test) = test_below(&lines[index + 1..]) else {
                self.problems
                    .push(format!("{at}: no test follows the tag {name}"));
                continue;
            };
            let mut known = false;
            for requirement in &mut self.requirements {
                if requirement.is_named(name) {
                    known = true;
                    requirement.tests.push(format!("{file}::{test}"));
                }
            }
            if !known {
                self.problems
                    .push(format!("{at}: there is no requirement {name}"));
            }
        }
    }

    fn find_problems(&mut self, root: &Path, benches: &str) {
        let mut seen = BTreeMap::new();
        for r in &self.requirements {
            let name = format!("{}/{}", r.section, r.id);
            if seen.insert(name.clone(), ()).is_some() {
                self.problems.push(format!("{name} is listed twice"));
            }
            if !r.is_shown() {
                self.problems.push(format!("{name} has no test"));
            }
            if let Some(lives) = &r.lives
                && !root.join(lives).exists()
            {
                self.problems
                    .push(format!("{name} lives in {lives}, which is not there"));
            }
            if let Some(bench) = &r.bench
                && !benches.contains(&format!("\"{bench}\""))
                && !root
                    .join(format!("crates/everbus/benches/{bench}.rs"))
                    .exists()
            {
                self.problems
                    .push(format!("{name}: there is no bench scenario {bench}"));
            }
            if r.out_of_scope.is_some() && !r.tests.is_empty() {
                self.problems.push(format!(
                    "{name} is out of scope and has a test all the same"
                ));
            }
        }
    }

    fn count(&self) -> String {
        let shown = self.requirements.iter().filter(|r| r.is_shown()).count();
        let out = self
            .requirements
            .iter()
            .filter(|r| r.out_of_scope.is_some())
            .count();
        let deviations = self
            .requirements
            .iter()
            .filter(|r| r.deviation.is_some())
            .count();
        format!(
            "{} requirements, {} shown, {out} out of scope, {deviations} deviations, {} missing",
            self.requirements.len(),
            shown - out,
            self.requirements.len() - shown
        )
    }

    fn render(&self) -> String {
        let mut text = String::from(
            "# Conformance\n\n\
             Generated by `cargo xtask conformance` from the lists in `docs/requirements/` and the\n\
             `// conformance:` tags above the tests. Do not edit.\n\n",
        );
        let _ = writeln!(text, "{}.", self.count());
        for (section, title) in SECTIONS {
            let _ = writeln!(text, "\n## {title}");
            let mut heading = None;
            for r in self.requirements.iter().filter(|r| r.section == *section) {
                if heading != Some(r.heading.as_str()) {
                    heading = Some(&r.heading);
                    if r.heading.is_empty() {
                        text.push('\n');
                    } else {
                        let _ = writeln!(text, "\n### {}\n", r.heading);
                    }
                    text.push_str(
                        "| id | requirement | lives in | shown by |\n|---|---|---|---|\n",
                    );
                }
                render_row(&mut text, r);
            }
        }
        text
    }
}

fn render_row(text: &mut String, r: &Requirement) {
    let mut requirement = cell(&r.text);
    if let Some(reason) = &r.deviation {
        let _ = write!(requirement, "<br>*deviation*: {}", cell(reason));
    }
    if let Some(note) = &r.note {
        let _ = write!(requirement, "<br>*note*: {}", cell(note));
    }
    let mut shown: Vec<String> = r.tests.iter().map(|test| format!("`{test}`")).collect();
    if let Some(scenario) = &r.bench {
        shown.push(format!("`everbus bench {scenario}`"));
    }
    if let Some(reason) = &r.out_of_scope {
        shown.push(format!("*out of scope*: {}", cell(reason)));
    }
    if shown.is_empty() {
        shown.push("**MISSING**".to_owned());
    }
    let lives = r
        .lives
        .as_ref()
        .map_or_else(String::new, |path| format!("`{path}`"));
    let _ = writeln!(
        text,
        "| {} | {requirement} | {lives} | {} |",
        r.id,
        shown.join("<br>")
    );
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('*', "\\*")
}

/// `embedded/dlq-list` is that; `rule-4` and `rule-4/anything` are `rules/rule-4`.
fn split_name(name: &str) -> (&str, &str) {
    let (first, second) = name.split_once('/').unwrap_or((name, name));
    if first.starts_with("rule-") {
        ("rules", first)
    } else if first.starts_with("fault-") {
        ("faults", first)
    } else {
        (first, second)
    }
}

/// The name of the function below a tag, or of the macro that makes tests; attributes, comments and
/// further tags may come between.
fn test_below<'a>(lines: &[&'a str]) -> Option<&'a str> {
    for line in lines {
        if line.is_empty() || line.starts_with("//") || line.starts_with('#') || *line == ")]" {
            continue;
        }
        let mut words = line.split_whitespace();
        return match words.find(|word| *word == "fn") {
            Some(_) => words
                .next()
                .map(|name| name.split(['(', '<']).next().unwrap_or(name)),
            None => macro_called(line),
        };
    }
    None
}

/// `everbus_testkit::conformance_tests!(…)` makes tests too.
fn macro_called(line: &str) -> Option<&str> {
    let (path, _) = line.split_once("!(")?;
    let name = path.rsplit("::").next()?;
    name.ends_with("_tests").then_some(name)
}

fn source_files(directory: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return;
    };
    for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
        if path.is_dir() {
            source_files(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}

fn read(path: &Path) -> Result<String, Failed> {
    std::fs::read_to_string(path)
        .map_err(|e| Failed::new(format!("cannot read {}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# a comment\n## Part\na: first | thing\n  lives: crates\n  deviation: because\n  note: by halves\nb: second\nc: third\n  out-of-scope: later\n";

    fn table(source: &str) -> Table {
        let mut table = Table::default();
        table.add_requirements("embedded", "list", LIST);
        table.add_requirements("rules", "list", "rule-1: ack late\n");
        table.add_tags("crates/x/tests/it/a.rs", source);
        table.find_problems(&crate::root(), "");
        table
    }

    #[test]
    fn a_tag_gives_its_requirement_the_test_below() {
        let t = table(
            "// conformance: embedded/a: x\n// conformance: rule-1: y\n#[tokio::test]\nasync fn shows_it() {\n",
        );
        let text = t.render();
        assert!(text.contains("| a | first \\| thing<br>*deviation*: because<br>*note*: by halves | `crates` | `crates/x/tests/it/a.rs::shows_it` |"), "{text}");
        assert!(text.contains("| rule-1 | ack late |  | `crates/x/tests/it/a.rs::shows_it` |"));
        assert!(text.contains("| b | second |  | **MISSING** |"));
        assert!(text.contains("*out of scope*: later"));
        assert_eq!(t.problems, ["embedded/b has no test"]);
    }

    #[test]
    fn further_ids_and_macros_that_make_tests_are_understood() {
        let mut t = Table::default();
        t.add_requirements(
            "embedded",
            "list",
            "a: first\n  also: x, y\nb: second\n  also: y, rule-9/panic\n",
        );
        t.add_tags(
            "f.rs",
            "// conformance: embedded/y: z\nkit::suite_tests!(One::new());\n",
        );
        t.find_problems(&crate::root(), "");
        assert!(t.problems.is_empty(), "{:?}", t.problems);
        assert_eq!(t.requirements[1].tests, ["f.rs::suite_tests"]);
    }

    #[test]
    fn unknown_ids_and_tags_without_a_test_are_problems() {
        let t = table(
            "// conformance: embedded/zzz: x\n#[test]\nfn f() {}\n// conformance: embedded/a: x\nlet y = 1;\n",
        );
        let text = t.problems.join("\n");
        assert!(text.contains("no requirement embedded/zzz"), "{text}");
        assert!(
            text.contains("no test follows the tag embedded/a"),
            "{text}"
        );
    }
}
