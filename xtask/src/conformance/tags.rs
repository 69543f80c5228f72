//! The tags above tests: `// conformance: area/id: what the test shows`.

/// A tag and the test below it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// `area/id`, or `rule-4`, or `fault-7/part`.
    pub(super) name: String,
    pub(super) test: String,
    /// What the test needs (it ends early without it), from the line `// needs: …` beside the tags.
    pub(super) needs: Option<String>,
}

/// The tags of a source file, and the problems of tags without a test.
#[derive(Debug, Default)]
pub(super) struct Tags {
    pub(super) found: Vec<Tag>,
    pub(super) problems: Vec<String>,
}

pub(super) fn read(file: &str, text: &str) -> Tags {
    let lines: Vec<&str> = text.lines().collect();
    let mut tags = Tags::default();
    for (index, line) in lines.iter().enumerate() {
        // Prose about tags (such as this file's) does not begin a line with a plain comment.
        let Some(tag) = line.trim().strip_prefix("// conformance: ") else {
            continue;
        };
        let at = format!("{file}:{}", index + 1);
        let mut problem = |what: String| tags.problems.push(format!("{at}: {what}"));
        let Some(name) = tag.split_once(": ").map(|(name, _)| name.trim()) else {
            problem("a tag is `area/id: requirement`".to_owned());
            continue;
        };
        let Some(test) = test_below(&lines, index + 1) else {
            problem(format!("no test follows the tag {name}"));
            continue;
        };
        if test.ignored {
            problem(format!(
                "{} is ignored, so it does not show {name}",
                test.name
            ));
            continue;
        }
        let needs = needs_above(&lines, index).or(test.needs);
        match (&needs, test.may_skip) {
            (None, true) => {
                problem(format!(
                    "{} may end early, so it does not show {name}; say what it needs (`// needs: root`)",
                    test.name
                ));
                continue;
            }
            // A test that needs something "by hand" is made by a macro, and ends early inside that macro.
            (Some(needs), false) if !needs.ends_with(", by hand") => problem(format!(
                "{} says that it needs {needs}, and never ends early for want of it",
                test.name
            )),
            _ => {}
        }
        tags.found.push(Tag {
            name: name.to_owned(),
            test: format!("{file}::{}", test.name),
            needs,
        });
    }
    tags
}

struct Test {
    name: String,
    ignored: bool,
    needs: Option<String>,
    may_skip: bool,
}

/// The function below a tag, or the macro that makes tests; attributes, comments and further tags may come
/// between.
fn test_below(lines: &[&str], from: usize) -> Option<Test> {
    let (mut ignored, mut needs) = (false, None);
    for (index, line) in lines.iter().enumerate().skip(from) {
        let text = line.trim();
        if text.starts_with("#[ignore") {
            ignored = true;
        }
        if let Some(what) = text.strip_prefix("// needs: ") {
            needs = Some(what.to_owned());
        }
        if text.is_empty() || text.starts_with("//") || text.starts_with('#') || text == ")]" {
            continue;
        }
        let mut words = text.split_whitespace();
        let name = match words.find(|word| *word == "fn") {
            Some(_) => words.next()?.split(['(', '<']).next()?,
            None => macro_called(text).or_else(|| listed(text))?,
        };
        return Some(Test {
            name: name.to_owned(),
            ignored,
            needs,
            may_skip: may_skip(&lines[index..]),
        });
    }
    None
}

/// `// needs: …` among the comments above a tag.
fn needs_above(lines: &[&str], tag: usize) -> Option<String> {
    let above = lines[..tag].iter().rev().map(|line| line.trim());
    let mut comments = above.take_while(|line| line.starts_with("//"));
    comments.find_map(|line| line.strip_prefix("// needs: ").map(str::to_owned))
}

/// Whether the function that begins with the first of the lines ends early where something is missing: it says
/// `SKIPPED`, or returns from a `let … else`.
fn may_skip(lines: &[&str]) -> bool {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let outer = lines.first().map_or(0, |line| indent(line));
    let body = lines
        .iter()
        .skip(1)
        .take_while(|line| line.trim().is_empty() || indent(line) > outer);
    let mut otherwise = false;
    for line in body.map(|line| line.trim()) {
        let returns = |text: &str| text == "return" || text == "return;";
        if line.contains("SKIPPED") || (otherwise && returns(line)) {
            return true;
        }
        let after = line.rsplit_once("else {").map(|(_, after)| after.trim());
        if let Some(after) = after.and_then(|after| after.strip_suffix("};"))
            && returns(after.trim())
        {
            return true;
        }
        otherwise = after == Some("");
    }
    false
}

/// `everbus_testkit::conformance_tests!(…)` makes tests too.
fn macro_called(line: &str) -> Option<&str> {
    let (path, _) = line.split_once("!(")?;
    let name = path.rsplit("::").next()?;
    name.ends_with("_tests").then_some(name)
}

/// `module::name;` in the list of scenarios is a test of that name.
fn listed(line: &str) -> Option<&str> {
    let (module, name) = line.strip_suffix(';')?.split_once("::")?;
    let is_name = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    (is_name(module) && is_name(name)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(source: &str) -> Tags {
        read("f.rs", source)
    }

    #[test]
    fn a_test_may_carry_several_tags() {
        let t = tags(
            "// conformance: omni/a: x\n// conformance: rule-1: y\n#[tokio::test]\nasync fn shows_it() {\n}\n",
        );
        let names: Vec<&str> = t.found.iter().map(|tag| tag.name.as_str()).collect();
        assert_eq!(names, ["omni/a", "rule-1"]);
        assert!(t.found.iter().all(|tag| tag.test == "f.rs::shows_it"));
        let t = tags("// conformance: omni/a: x\nkit::suite_tests!(One::new());\n");
        assert_eq!(t.found[0].test, "f.rs::suite_tests");
        let t = tags("// conformance: omni/a: x\nclaims::a_lease_is_held;\nclaims::b;\n");
        assert_eq!(t.found[0].test, "f.rs::a_lease_is_held");
    }

    #[test]
    fn a_tag_without_a_test_or_a_text_is_a_problem() {
        let t = tags("// conformance: omni/a: x\nlet y = 1;\n// conformance: omni/a\nfn f() {}\n");
        assert!(t.found.is_empty());
        assert_eq!(
            t.problems,
            [
                "f.rs:1: no test follows the tag omni/a",
                "f.rs:3: a tag is `area/id: requirement`"
            ]
        );
    }

    #[test]
    fn an_ignored_test_shows_nothing() {
        for attribute in ["#[ignore]", "#[ignore = \"slow\"]"] {
            let t = tags(&format!(
                "// conformance: omni/a: x\n#[test]\n{attribute}\nfn f() {{}}\n"
            ));
            assert!(t.found.is_empty());
            assert!(t.problems[0].contains("f is ignored"), "{:?}", t.problems);
        }
    }

    #[test]
    fn a_test_that_may_end_early_says_what_it_needs() {
        let bodies = [
            "    let Some(s) = server() else { return };\n",
            "    let Some(s) = server() else {\n        return;\n    };\n",
            "    if missing() {\n        eprintln!(\"SKIPPED: no server\");\n        return;\n    }\n",
        ];
        for body in bodies {
            let plain = format!("// conformance: omni/a: x\n#[test]\nfn f() {{\n{body}}}\n");
            let t = tags(&plain);
            assert!(t.found.is_empty());
            assert!(t.problems[0].contains("may end early"), "{:?}", t.problems);
            for t in [
                tags(&plain.replace("#[test]", "// needs: moto_server\n#[test]")),
                tags(&format!("// needs: moto_server\n{plain}")),
            ] {
                assert!(t.problems.is_empty(), "{:?}", t.problems);
                assert_eq!(t.found[0].needs.as_deref(), Some("moto_server"));
            }
        }
    }

    #[test]
    fn a_return_of_another_kind_and_a_later_function_are_no_skips() {
        let t = tags(
            "// conformance: omni/a: x\n#[test]\nfn f() {\n    if done {\n        return;\n    }\n}\n\nfn g() {\n    let Some(s) = x() else { return };\n}\n",
        );
        assert!(t.problems.is_empty(), "{:?}", t.problems);
        assert_eq!(t.found.len(), 1);
    }

    #[test]
    fn a_need_that_is_not_one_is_a_problem() {
        let t = tags("// conformance: omni/a: x\n// needs: root\n#[test]\nfn f() {\n    g();\n}\n");
        assert!(
            t.problems[0].contains("never ends early"),
            "{:?}",
            t.problems
        );
    }
}
