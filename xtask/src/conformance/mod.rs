//! The conformance table: every requirement in `docs/requirements` with its state. A requirement counts as shown
//! only if a test shows it; planned ones are counted too, so that the totals say how far the work is.
//!
//! A tag is a comment above a test: `// conformance: embedded/dlq-list: the requirement`. Rules and
//! faults are their own ids: `// conformance: rule-4: the requirement`.

mod benches;
mod render;
mod requirements;
mod tags;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::run::Failed;
pub(crate) use benches::{RESULTS, Results};
use requirements::{AREAS, Requirement, State, split_name};

const TABLE: &str = "docs/conformance.md";

/// Writes the table, complete or not, and reports its problems.
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

/// Fails if a requirement has no state or two of them, a tag names no requirement, a section of a specification has
/// no row, or the table is not up to date.
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
struct Table {
    requirements: Vec<Requirement>,
    /// The headings of each area in the order in which they are shown.
    headings: BTreeMap<String, Vec<String>>,
    results: Results,
    /// Area and id of every tag that is above a test.
    tagged: BTreeSet<(String, String)>,
    problems: Vec<String>,
}

impl Table {
    fn gather(root: &Path) -> Result<Self, Failed> {
        let mut table = Self {
            results: Results::parse(&read(&root.join(RESULTS))?).map_err(Failed::new)?,
            ..Self::default()
        };
        for area in AREAS {
            let path = format!("docs/requirements/{}.txt", area.name);
            table.add_list(area.name, &path, &read(&root.join(&path))?, true);
            // A long area may have more files, in a folder of its name.
            for path in parts_of(root, area.name)? {
                table.add_list(
                    area.name,
                    &path,
                    &read(&root.join(&path))?,
                    !area.specification,
                );
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
            if shown.starts_with("crates/bench/src") {
                benches.push_str(&text);
            }
            table.add_tags(&shown, &text);
        }
        table.find_problems(root, &benches);
        Ok(table)
    }

    /// `declares` is whether the file may introduce headings. The sections of a specification are listed in its
    /// first file, so that one without rows is noticed.
    fn add_list(&mut self, area: &str, path: &str, text: &str, declares: bool) {
        let list = requirements::parse(area, path, text);
        self.problems.extend(list.problems);
        let known = self.headings.entry(area.to_owned()).or_default();
        for heading in list.headings {
            if known.contains(&heading) {
                continue;
            }
            if !declares {
                self.problems.push(format!(
                    "{path}: docs/requirements/{area}.txt lists no section {heading:?}"
                ));
            }
            known.push(heading);
        }
        self.requirements.extend(list.requirements);
    }

    fn add_tags(&mut self, file: &str, text: &str) {
        let tags = tags::read(file, text);
        self.problems.extend(tags.problems);
        for tag in tags.found {
            let (area, id) = split_name(&tag.name);
            self.tagged.insert((area.to_owned(), id.to_owned()));
            let mut known = false;
            for requirement in &mut self.requirements {
                if !requirement.is_named(&tag.name) {
                    continue;
                }
                known = true;
                match &tag.needs {
                    None => requirement.tests.push(tag.test.clone()),
                    Some(needs) => {
                        let test = (tag.test.clone(), needs.clone());
                        requirement.conditional.push(test);
                    }
                }
            }
            if !known {
                let problem = format!("{}: there is no requirement {}", tag.test, tag.name);
                self.problems.push(problem);
            }
        }
        for requirement in &mut self.requirements {
            requirement.tests.dedup();
            requirement.conditional.dedup();
        }
    }

    fn find_problems(&mut self, root: &Path, benches: &str) {
        let mut problems = Vec::new();
        let mut seen = BTreeSet::new();
        for r in &self.requirements {
            let name = r.name();
            let mut problem = |what: String| problems.push(format!("{name} {what}"));
            if !seen.insert(name.clone()) {
                problem("is listed twice".to_owned());
            }
            for what in r.problems() {
                problem(what);
            }
            for also in &r.also {
                if !self.tagged.contains(&(r.area.clone(), also.clone())) {
                    problem(format!("names {also} in `also:`, which no test carries"));
                }
            }
            if self.state(r) == State::Unknown && r.bench.is_none() {
                problem("has no test, and is neither planned nor out of scope".to_owned());
            }
            if let Some(lives) = &r.lives
                && !root.join(lives).exists()
            {
                problem(format!("lives in {lives}, which is not there"));
            }
            if let Some(bench) = &r.bench {
                let (scenario, _) = benches::split(bench);
                let program = root.join(format!("crates/everbus/benches/{scenario}.rs"));
                if !benches.contains(&format!("\"{scenario}\"")) && !program.exists() {
                    problem(format!(
                        "names {scenario}, which is no scenario of the bench"
                    ));
                } else if let Err(why) = self.results.met(bench) {
                    problem(format!("has no result: {why}"));
                }
            }
        }
        for area in AREAS.iter().filter(|area| area.specification) {
            let rows = || self.requirements.iter().filter(|r| r.area == area.name);
            for heading in self.headings.get(area.name).into_iter().flatten() {
                if !rows().any(|r| r.heading == *heading) {
                    problems.push(format!("{}: the section {heading:?} has no row", area.name));
                }
            }
            for row in rows().filter(|r| r.heading.is_empty()) {
                problems.push(format!("{} is in no section", row.name()));
            }
        }
        self.problems.extend(problems);
    }

    fn state(&self, requirement: &Requirement) -> State {
        let met = requirement.bench.as_deref().map(|b| self.results.met(b));
        requirement.state(met.and_then(Result::ok))
    }

    /// How many of the chosen requirements have this state.
    fn in_state(&self, state: State, chosen: impl Fn(&Requirement) -> bool) -> usize {
        let rows = self.requirements.iter().filter(|r| chosen(r));
        rows.filter(|r| self.state(r) == state).count()
    }

    fn count(&self) -> String {
        let mut parts = vec![format!("{} requirements", self.requirements.len())];
        for state in State::COUNTED.iter().chain([&State::Unknown]) {
            let count = self.in_state(*state, |_| true);
            if count > 0 || *state != State::Unknown {
                parts.push(format!("{count} {}", state.name()));
            }
        }
        parts.join(", ")
    }
}

/// The files beside that of an area: `docs/requirements/<area>/*.txt`, by name.
fn parts_of(root: &Path, area: &str) -> Result<Vec<String>, Failed> {
    let folder = format!("docs/requirements/{area}");
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

    const LIST: &str = "## Part\na: first | thing\n  lives: crates\n  deviation: because\n  note: by halves\nb: second\nc: third\n  out-of-scope: never\nd: fourth\n  planned: tasks and jobs\n";
    const RESULTS: &str = "slow: NO\n  target: < 3 ×\n  commit: abc\nquick: yes\n  target: < 1 s\n  figures: p99_us=12\n  commit: abc\n";

    fn table(lists: &[(&str, &str)], source: &str) -> Table {
        let mut table = Table {
            results: Results::parse(RESULTS).unwrap(),
            ..Table::default()
        };
        for (area, list) in lists {
            table.add_list(area, "list", list, true);
        }
        table.add_tags("crates/x/tests/it/a.rs", source);
        table.find_problems(&crate::root(), "\"slow\" \"quick\"");
        table
    }

    #[test]
    fn every_state_has_its_row_and_its_count() {
        let t = table(
            &[("embedded", LIST), ("rules", "rule-1: ack late\n")],
            "// conformance: embedded/a: x\n// conformance: rule-1: y\n#[tokio::test]\nasync fn shows_it() {\n",
        );
        let text = t.render();
        assert!(text.contains("| a | deviation | first \\| thing<br>*deviation*: because<br>*note*: by halves | `crates` | `crates/x/tests/it/a.rs::shows_it` |"), "{text}");
        assert!(
            text.contains("| rule-1 | shown | ack late |  | `crates/x/tests/it/a.rs::shows_it` |")
        );
        assert!(text.contains("| b | **missing** | second |  |  |"));
        assert!(text.contains("| c | out of scope | third |  | *out of scope*: never |"));
        assert!(text.contains("| d | planned | fourth |  | *planned*: tasks and jobs |"));
        assert!(
            text.contains("| [The embedded specification](#the-embedded-specification) | 0 | 1 | 1 | 1 | 0 | 0 | 4 |"),
            "{text}"
        );
        assert_eq!(
            t.problems,
            ["embedded/b has no test, and is neither planned nor out of scope"]
        );
        assert!(t.count().ends_with("1 missing"), "{}", t.count());
    }

    #[test]
    fn unknown_ids_and_stale_plans_are_problems() {
        let t = table(
            &[("embedded", LIST)],
            "// conformance: embedded/zzz: x\n// conformance: embedded/d: x\n// conformance: omni/b: x\n// conformance: embedded/a: x\n// conformance: embedded/b: x\n#[test]\nfn f() {}\n",
        );
        let [unknown, elsewhere, stale] = &t.problems[..] else {
            panic!("{:?}", t.problems)
        };
        assert!(unknown.contains("no requirement embedded/zzz"), "{unknown}");
        assert!(elsewhere.contains("no requirement omni/b"), "{elsewhere}");
        assert!(
            stale.starts_with("embedded/d is planned (tasks and jobs), but is tagged"),
            "{stale}"
        );
    }

    #[test]
    fn an_id_beside_a_row_has_a_test() {
        let source = "// conformance: bus/y: z\nkit::suite_tests!(One::new());\n";
        let t = table(&[("bus", "a: first\n  also: y\n")], source);
        assert!(t.problems.is_empty(), "{:?}", t.problems);
        assert_eq!(
            t.requirements[0].tests,
            ["crates/x/tests/it/a.rs::suite_tests"]
        );
        let t = table(&[("bus", "a: first\n  also: y, x\n")], source);
        assert_eq!(
            t.problems,
            ["bus/a names x in `also:`, which no test carries"]
        );
    }

    #[test]
    fn a_bench_shows_its_row_while_its_last_result_is_met() {
        let list = "## Speed\na: first\n  bench: quick\nb: second\n  bench: slow\nc: third\n  bench: quick p99_us < 10\nd: fourth\n  bench: other\ne: fifth\n  bench: quick rss_mib < 10\n";
        let t = table(&[("embedded", list)], "");
        let states: Vec<State> = t.requirements.iter().map(|r| t.state(r)).collect();
        assert_eq!(
            states,
            [
                State::Shown,
                State::NotMet,
                State::NotMet,
                State::Unknown,
                State::Unknown
            ]
        );
        assert_eq!(t.problems.len(), 2, "{:?}", t.problems);
        assert!(t.problems[0].contains("embedded/d names other"));
        assert!(t.problems[1].contains("embedded/e has no result"));
        assert!(
            t.render()
                .contains("| b | **not met** | second |  | `bench slow` **not met**: < 3 ×")
        );
    }

    #[test]
    fn a_conditional_test_does_not_show_its_row() {
        let list = "## Part\na: first\nb: second\n";
        let t = table(
            &[("embedded", list)],
            "// conformance: embedded/a: x\n// conformance: embedded/b: x\n// needs: root\n#[test]\nfn f() {\n    let Some(x) = y() else { return };\n}\n// conformance: embedded/b: x\n#[test]\nfn g() {}\n",
        );
        assert!(t.problems.is_empty(), "{:?}", t.problems);
        assert_eq!(t.state(&t.requirements[0]), State::Conditional);
        assert_eq!(t.state(&t.requirements[1]), State::Shown);
        let text = t.render();
        assert!(
            text.contains(
                "| a | conditional | first |  | `crates/x/tests/it/a.rs::f` (needs root) |"
            ),
            "{text}"
        );
    }

    #[test]
    fn every_section_of_a_specification_has_rows() {
        let mut t = Table::default();
        t.add_list(
            "omni",
            "omni.txt",
            "x: y\n  planned: later\n## One\n## Two\n",
            true,
        );
        t.add_list(
            "omni",
            "omni/a.txt",
            "## Two\na: b\n  planned: later\n",
            false,
        );
        t.add_list(
            "omni",
            "omni/b.txt",
            "## Three\nc: d\n  planned: later\n",
            false,
        );
        t.find_problems(&crate::root(), "");
        assert_eq!(
            t.problems,
            [
                "omni/b.txt: docs/requirements/omni.txt lists no section \"Three\"",
                "omni: the section \"One\" has no row",
                "omni/x is in no section"
            ]
        );
        // Other areas choose their headings freely.
        let mut t = Table::default();
        t.add_list("bus", "bus.txt", "## One\n", true);
        t.find_problems(&crate::root(), "");
        assert!(t.problems.is_empty(), "{:?}", t.problems);
    }

    #[test]
    fn rows_that_live_nowhere_or_twice_are_problems() {
        let list = "a: b\n  planned: later\n  lives: crates/nowhere\na: c\n  planned: later\n";
        let t = table(&[("bus", list)], "");
        assert_eq!(
            t.problems,
            [
                "bus/a lives in crates/nowhere, which is not there",
                "bus/a is listed twice"
            ]
        );
    }
}
