//! The last result of each benchmark that a requirement names: `docs/requirements/benches.txt`.
//!
//! `cargo xtask bench --record` writes the output of `everbus bench`; results of other commands are written
//! by hand from `bench/LEDGER.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

pub(crate) const RESULTS: &str = "docs/requirements/benches.txt";

const HEAD: &str = "\
# The last result of each benchmark that a requirement names. `cargo xtask bench --record` writes those of
# `everbus bench`; the others (pipeline, allocations, instructions) are written by hand from bench/LEDGER.md.
#   <scenario>: yes or NO, as it was printed for its own target
#   target, figures, commit: what was to be reached, what was measured, and of which commit
";

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    met: bool,
    target: String,
    /// The figures as text, by their names in the JSON.
    figures: BTreeMap<String, String>,
    commit: String,
}

/// Outcomes by scenario.
#[derive(Debug, Default)]
pub(crate) struct Results(BTreeMap<String, Outcome>);

impl Results {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut results = BTreeMap::new();
        let mut current: Option<&mut Outcome> = None;
        for (number, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = || format!("{RESULTS}:{}: {line:?} is not understood", number + 1);
            let (name, value) = line.split_once(": ").ok_or_else(wrong)?;
            if !name.starts_with(' ') {
                let met = match value.trim() {
                    "yes" => true,
                    "NO" => false,
                    _ => return Err(wrong()),
                };
                let outcome = results.entry(name.to_owned()).or_insert(Outcome::default());
                outcome.met = met;
                current = Some(outcome);
                continue;
            }
            let outcome = current.as_deref_mut().ok_or_else(wrong)?;
            match name.trim() {
                "target" => value.trim().clone_into(&mut outcome.target),
                "commit" => value.trim().clone_into(&mut outcome.commit),
                "figures" => {
                    for figure in value.split_whitespace() {
                        let (name, number) = figure.split_once('=').ok_or_else(wrong)?;
                        number.parse::<f64>().map_err(|_| wrong())?;
                        outcome.figures.insert(name.to_owned(), number.to_owned());
                    }
                }
                _ => return Err(wrong()),
            }
        }
        if let Some((name, _)) = results.iter().find(|(_, o)| o.commit.is_empty()) {
            return Err(format!("{RESULTS}: {name} has no commit"));
        }
        Ok(Self(results))
    }

    pub(crate) fn render(&self) -> String {
        let mut text = HEAD.to_owned();
        for (name, outcome) in &self.0 {
            let met = if outcome.met { "yes" } else { "NO" };
            let figures: Vec<String> = outcome
                .figures
                .iter()
                .map(|(name, number)| format!("{name}={number}"))
                .collect();
            let _ = writeln!(text, "\n{name}: {met}\n  target: {}", outcome.target);
            if !figures.is_empty() {
                let _ = writeln!(text, "  figures: {}", figures.join(" "));
            }
            let _ = writeln!(text, "  commit: {}", outcome.commit);
        }
        text
    }

    /// Records the output of `everbus bench -o json`, and returns the names of its scenarios.
    pub(crate) fn record(&mut self, json: &str, commit: &str) -> Result<Vec<String>, String> {
        let mut recorded = Vec::new();
        for object in objects(json).ok_or("everbus bench did not print an array of objects")? {
            let text = |name: &str| match object.get(name) {
                Some(Value::Text(text)) => Ok(text.clone()),
                _ => Err(format!("an object of everbus bench has no {name}")),
            };
            let scenario = text("scenario")?;
            let Some(Value::Bool(met)) = object.get("met") else {
                return Err(format!("{scenario} does not say whether it was met"));
            };
            let figures = object.iter().filter_map(|(name, value)| match value {
                Value::Number(number) => Some((name.clone(), number.clone())),
                _ => None,
            });
            let outcome = Outcome {
                met: *met,
                target: text("target")?,
                figures: figures.collect(),
                commit: commit.to_owned(),
            };
            self.0.insert(scenario.clone(), outcome);
            recorded.push(scenario);
        }
        Ok(recorded)
    }

    /// Whether the last result meets a `bench:` line: `publish-1` for the target of the scenario, or
    /// `publish-1 events_per_s > 1000` for the row's own target.
    pub(crate) fn met(&self, bench: &str) -> Result<bool, String> {
        let (scenario, condition) = split(bench);
        let outcome = self
            .0
            .get(scenario)
            .ok_or_else(|| format!("there is no result of {scenario} in {RESULTS}"))?;
        let Some(condition) = condition else {
            return Ok(outcome.met);
        };
        let words: Vec<&str> = condition.split_whitespace().collect();
        let [figure, sign, limit] = words[..] else {
            return Err(format!("{condition:?} is not `figure < number`"));
        };
        let measured = outcome
            .figures
            .get(figure)
            .and_then(|number| number.parse::<f64>().ok())
            .ok_or_else(|| format!("the result of {scenario} has no {figure}"))?;
        let limit: f64 = limit
            .parse()
            .map_err(|_| format!("{limit:?} is not a number"))?;
        match sign {
            "<" => Ok(measured < limit),
            "<=" => Ok(measured <= limit),
            ">" => Ok(measured > limit),
            ">=" => Ok(measured >= limit),
            _ => Err(format!("{sign:?} is none of < <= > >=")),
        }
    }

    /// The last result, as the table shows it.
    pub(crate) fn describe(&self, bench: &str) -> String {
        let (scenario, condition) = split(bench);
        let Some(outcome) = self.0.get(scenario) else {
            return format!("`everbus bench {scenario}`: no result");
        };
        let figures: Vec<String> = outcome
            .figures
            .iter()
            .map(|(name, number)| format!("{name} {number}"))
            .collect();
        let met = match self.met(bench) {
            Ok(true) => "met",
            _ => "**not met**",
        };
        let target = condition.unwrap_or(&outcome.target);
        let figures = figures.join(", ");
        format!(
            "`bench {scenario}` {met}: {target} ({figures}{}commit {})",
            if figures.is_empty() { "" } else { "; " },
            outcome.commit
        )
    }
}

/// The scenario of a `bench:` line, and its own condition if it has one.
pub(crate) fn split(bench: &str) -> (&str, Option<&str>) {
    match bench.split_once(' ') {
        Some((scenario, condition)) => (scenario, Some(condition.trim())),
        None => (bench, None),
    }
}

#[derive(Debug)]
enum Value {
    Text(String),
    Number(String),
    Bool(bool),
    /// `null`, an array or an object: not a figure.
    Other,
}

/// The objects of a JSON array, as far as they are flat.
fn objects(json: &str) -> Option<Vec<BTreeMap<String, Value>>> {
    let mut rest = json.trim().strip_prefix('[')?.trim_start();
    let mut found = Vec::new();
    while !rest.starts_with(']') {
        rest = rest
            .trim_start_matches([',', ' ', '\n'])
            .strip_prefix('{')?;
        let mut object = BTreeMap::new();
        loop {
            rest = rest.trim_start_matches([',', ' ', '\n']);
            if let Some(after) = rest.strip_prefix('}') {
                rest = after.trim_start();
                break;
            }
            let (name, after) = string(rest)?;
            let (value, after) = value(after.trim_start().strip_prefix(':')?.trim_start())?;
            object.insert(name, value);
            rest = after.trim_start();
        }
        found.push(object);
    }
    Some(found)
}

fn value(text: &str) -> Option<(Value, &str)> {
    if text.starts_with('"') {
        let (content, rest) = string(text)?;
        return Some((Value::Text(content), rest));
    }
    if text.starts_with(['[', '{']) {
        return Some((Value::Other, nested(text)?));
    }
    let end = text.find([',', '}', ']', ' ', '\n'])?;
    let (word, rest) = text.split_at(end);
    let value = match word {
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        "null" => Value::Other,
        number => {
            number.parse::<f64>().ok()?;
            Value::Number(number.to_owned())
        }
    };
    Some((value, rest))
}

/// What follows the array or object at the beginning.
fn nested(text: &str) -> Option<&str> {
    let (mut depth, mut rest) = (0_usize, text);
    loop {
        let next = rest.find(['[', '{', ']', '}', '"'])?;
        if rest[next..].starts_with('"') {
            rest = string(&rest[next..])?.1;
            continue;
        }
        let opens = rest[next..].starts_with(['[', '{']);
        rest = &rest[next + 1..];
        depth = if opens { depth + 1 } else { depth - 1 };
        if depth == 0 {
            return Some(rest);
        }
    }
}

/// The string at the beginning, and what follows it. The program escapes nothing but quotes and backslashes.
fn string(text: &str) -> Option<(String, &str)> {
    let mut content = String::new();
    let mut chars = text.strip_prefix('"')?.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((content, &text[at + 2..])),
            '\\' => content.push(chars.next()?.1),
            c => content.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# prose\npublish-1: NO\n  target: ≥ 0.9 × bare\n  figures: events_per_s=3167 ratio=0.813\n  commit: dd5d15a\n\nlatency: yes\n  target: p99 < 3 ms; always\n  commit: 800c8c7\n";

    #[test]
    fn results_are_read_and_written() {
        let results = Results::parse(FILE).unwrap();
        let again = Results::parse(&results.render()).unwrap();
        assert_eq!(results.0, again.0);
        assert_eq!(results.0.len(), 2);
        assert_eq!(results.0["latency"].target, "p99 < 3 ms; always");
    }

    #[test]
    fn what_is_no_result_is_refused_with_its_place() {
        for (text, place) in [
            ("publish-1: perhaps\n", ":1:"),
            ("  commit: x\n", ":1:"),
            ("a: yes\n  figures: ratio\n  commit: x\n", ":2:"),
            ("a: yes\n  figures: ratio=x\n  commit: x\n", ":2:"),
            ("a: yes\n  colour: x\n", ":2:"),
            ("a: yes\n", "a has no commit"),
        ] {
            let error = Results::parse(text).unwrap_err();
            assert!(error.contains(place), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_row_asks_for_the_target_of_the_scenario_or_for_its_own() {
        let results = Results::parse(FILE).unwrap();
        assert_eq!(results.met("publish-1"), Ok(false));
        assert_eq!(results.met("latency"), Ok(true));
        assert_eq!(results.met("publish-1 events_per_s > 1000"), Ok(true));
        assert_eq!(results.met("publish-1 events_per_s > 5000"), Ok(false));
        assert_eq!(results.met("publish-1 ratio <= 0.813"), Ok(true));
        for wrong in [
            "publish-64",
            "publish-1 rss_mib < 40",
            "publish-1 ratio about 1",
            "publish-1 ratio < much",
            "publish-1 ratio",
        ] {
            results.met(wrong).unwrap_err();
        }
        assert_eq!(
            results.describe("publish-1"),
            "`bench publish-1` **not met**: ≥ 0.9 × bare (events_per_s 3167, ratio 0.813; commit dd5d15a)"
        );
        assert_eq!(
            results.describe("latency"),
            "`bench latency` met: p99 < 3 ms; always (commit 800c8c7)"
        );
    }

    #[test]
    fn what_the_bench_prints_is_recorded() {
        let json = r#"[{"scenario":"latency","events_per_s":null,"p99_us":61.2,"target":"p99 \"x\"","met":false,"detail":"a, b","parts":[{"name":"x]","small_p50_us":1.0}]},
 {"scenario":"new","ratio":1e-2,"target":"","met":true,"detail":""}]
"#;
        let mut results = Results::parse(FILE).unwrap();
        assert_eq!(results.record(json, "abc").unwrap(), ["latency", "new"]);
        assert_eq!(results.met("latency"), Ok(false));
        assert_eq!(results.met("latency p99_us < 62"), Ok(true));
        assert_eq!(results.0["latency"].target, "p99 \"x\"");
        assert_eq!(results.0["latency"].commit, "abc");
        assert_eq!(results.met("publish-1"), Ok(false), "others stay");
        Results::parse(&results.render()).unwrap();
        for wrong in ["", "{}", "[{\"met\":true}]", "[{\"scenario\":\"a\"}]", "[{"] {
            results.record(wrong, "abc").unwrap_err();
        }
    }
}
