//! Job files: YAML or JSON with the keys of `Job Created`. An error names the line. For a misspelt key it also names
//! the nearest known key.

use std::fmt::Write as _;

use everbus::{Code, Error, Result};
use saphyr_parser::{Event, Parser, ScalarStyle};

use crate::events::{Json, TaskSpec};
use crate::graph::nearest;
use crate::producer::NewJob;

/// A file that is nested more deeply is refused as a mistake.
const DEEPEST: usize = 64;
/// A file with more values is refused as a mistake.
const MOST_VALUES: usize = 1_000_000;

const JOB_KEYS: [&str; 4] = ["jobId", "requestId", "tasks", "totalTasks"];
const TASK_KEYS: [&str; 4] = ["taskId", "name", "dependsOn", "input"];

/// A value with its line.
struct Node {
    line: usize,
    value: Value,
}

enum Value {
    Scalar { text: String, plain: bool },
    List(Vec<Node>),
    Map(Vec<(String, usize, Node)>),
}

impl NewJob {
    /// Reads a job file: `{jobId?, requestId?, tasks: [{taskId, name, dependsOn?, input?}]}`, as YAML or JSON. The
    /// graph is checked when the job is submitted.
    pub fn parse(text: &str) -> Result<Self> {
        let root = parse(text)?;
        let Value::Map(entries) = root.value else {
            return Err(wrong(root.line, "a job is a mapping")
                .hint("begin with `tasks:` and a list of tasks"));
        };
        let mut job = Self::default();
        let mut has_tasks = false;
        let mut total = None;
        for (key, line, node) in entries {
            match known(&key, line, &JOB_KEYS)? {
                "jobId" => job.job_id = Some(text_of(&key, node)?),
                "requestId" => job.request_id = Some(text_of(&key, node)?),
                "totalTasks" => total = Some((line, text_of(&key, node)?)),
                _ => {
                    has_tasks = true;
                    job.tasks = tasks_of(node)?;
                }
            }
        }
        if !has_tasks {
            return Err(wrong(root.line, "the job has no tasks").hint("add `tasks:` with a list"));
        }
        if let Some((line, total)) =
            total.filter(|(_, total)| *total != job.tasks.len().to_string())
        {
            let what = format!(
                "totalTasks is {total}, but there are {} tasks",
                job.tasks.len()
            );
            return Err(wrong(line, what).hint("leave totalTasks out"));
        }
        Ok(job)
    }
}

/// Reads a file with tasks to add to a job: a list of tasks, or a mapping with `tasks`.
pub fn parse_tasks(text: &str) -> Result<Vec<TaskSpec>> {
    let root = parse(text)?;
    match root.value {
        Value::List(_) => tasks_of(root),
        _ => NewJob::parse(text).map(|job| job.tasks),
    }
}

fn tasks_of(node: Node) -> Result<Vec<TaskSpec>> {
    let Value::List(items) = node.value else {
        return Err(
            wrong(node.line, "tasks is not a list").hint("begin each task with `- taskId: …`")
        );
    };
    items.into_iter().map(task_of).collect()
}

fn task_of(node: Node) -> Result<TaskSpec> {
    let line = node.line;
    let Value::Map(entries) = node.value else {
        return Err(
            wrong(line, "a task is a mapping").hint("write {taskId: scrape, name: scrape-store}")
        );
    };
    let (mut task_id, mut name) = (None, None);
    let (mut depends_on, mut input) = (Vec::new(), Json::empty());
    for (key, line, node) in entries {
        match known(&key, line, &TASK_KEYS)? {
            "taskId" => task_id = Some(text_of(&key, node)?),
            "name" => name = Some(text_of(&key, node)?),
            "dependsOn" => {
                let Value::List(items) = node.value else {
                    return Err(wrong(node.line, "dependsOn is not a list")
                        .hint("write dependsOn: [scrape]"));
                };
                let ids = items.into_iter().map(|item| text_of(&key, item));
                depends_on = ids.collect::<Result<_>>()?;
            }
            _ => {
                let mut json = String::new();
                write_json(&node, &mut json);
                input = Json::parse(json).map_err(|e| {
                    wrong(node.line, "the input cannot be written as JSON").caused_by(e)
                })?;
            }
        }
    }
    let missing = |key: &str| {
        wrong(line, format!("the task has no {key}")).hint("a task has a taskId and a name")
    };
    Ok(TaskSpec {
        task_id: task_id.ok_or_else(|| missing("taskId"))?,
        name: name.ok_or_else(|| missing("name"))?,
        depends_on,
        input,
    })
}

fn known<'a>(key: &str, line: usize, keys: &[&'a str]) -> Result<&'a str> {
    if let Some(known) = keys.iter().find(|known| **known == key) {
        return Ok(known);
    }
    let hint = match nearest(key, keys.iter().copied()) {
        Some(near) => format!("did you mean {near}?"),
        None => format!("the keys are {}", keys.join(", ")),
    };
    Err(wrong(line, format!("the key {key:?} is not known")).hint(hint))
}

fn text_of(key: &str, node: Node) -> Result<String> {
    match node.value {
        Value::Scalar { text, .. } if !text.is_empty() => Ok(text),
        _ => Err(wrong(node.line, format!("{key} is not a text")).hint("write it on one line")),
    }
}

fn wrong(line: usize, what: impl std::fmt::Display) -> Error {
    Error::new(Code::InvalidJob, format!("line {line}: {what}"))
}

/// Writes a value as JSON. Numbers keep their digits.
fn write_json(node: &Node, json: &mut String) {
    match &node.value {
        Value::Scalar { text, plain } => {
            let word = *plain && matches!(text.as_str(), "true" | "false" | "null");
            let number = || serde_json::from_str::<serde_json::Number>(text).is_ok();
            if word || *plain && number() {
                json.push_str(text);
            } else if *plain && matches!(text.as_str(), "" | "~") {
                json.push_str("null");
            } else {
                json.push_str(&quoted(text));
            }
        }
        Value::List(items) => {
            json.push('[');
            for (n, item) in items.iter().enumerate() {
                if n > 0 {
                    json.push(',');
                }
                write_json(item, json);
            }
            json.push(']');
        }
        Value::Map(entries) => {
            json.push('{');
            for (n, (key, _, value)) in entries.iter().enumerate() {
                let comma = if n > 0 { "," } else { "" };
                let _ = write!(json, "{comma}{}:", quoted(key));
                write_json(value, json);
            }
            json.push('}');
        }
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A list or mapping whose end has not been read yet.
struct Open {
    line: usize,
    kind: Kind,
}

enum Kind {
    List(Vec<Node>),
    Map {
        entries: Vec<(String, usize, Node)>,
        key: Option<(String, usize)>,
    },
}

fn parse(text: &str) -> Result<Node> {
    let mut open: Vec<Open> = Vec::new();
    let mut root = None;
    let mut values = 0;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let what = format!("this is not YAML: {}", error.info());
            wrong(error.marker().line(), what).hint("check the indentation and the quotes")
        })?;
        let line = span.start.line();
        let node = match event {
            Event::Scalar(text, style, ..) => {
                let plain = style == ScalarStyle::Plain;
                let text = text.into_owned();
                Node {
                    line,
                    value: Value::Scalar { text, plain },
                }
            }
            Event::SequenceStart(..) | Event::MappingStart(..) => {
                if open.len() >= DEEPEST {
                    let what = format!("this is nested more than {DEEPEST} levels deep");
                    return Err(wrong(line, what).hint("give the input as a text"));
                }
                let kind = match event {
                    Event::SequenceStart(..) => Kind::List(Vec::new()),
                    _ => Kind::Map {
                        entries: Vec::new(),
                        key: None,
                    },
                };
                open.push(Open { line, kind });
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(Open {
                    line,
                    kind: Kind::List(items),
                }) => Node {
                    line,
                    value: Value::List(items),
                },
                Some(Open {
                    line,
                    kind: Kind::Map { entries, .. },
                }) => Node {
                    line,
                    value: Value::Map(entries),
                },
                None => continue,
            },
            Event::Alias(_) => {
                return Err(wrong(line, "a job file has no aliases").hint("write the value out"));
            }
            _ => continue,
        };
        values += 1;
        if values > MOST_VALUES {
            let what = format!("there are more than {MOST_VALUES} values up to here");
            return Err(wrong(line, what).hint("store large inputs elsewhere and name their place"));
        }
        match open.last_mut().map(|open| &mut open.kind) {
            None if root.is_some() => {
                return Err(
                    wrong(line, "a second document begins here").hint("a job is one document")
                );
            }
            None => root = Some(node),
            Some(Kind::List(items)) => items.push(node),
            Some(Kind::Map { entries, key }) => match (key.take(), node.value) {
                (Some((name, at)), value) => entries.push((
                    name,
                    at,
                    Node {
                        line: node.line,
                        value,
                    },
                )),
                (None, Value::Scalar { text, .. }) => {
                    if entries.iter().any(|(name, ..)| *name == text) {
                        return Err(wrong(line, format!("the key {text:?} is given twice"))
                            .hint("remove one of them"));
                    }
                    *key = Some((text, line));
                }
                (None, _) => {
                    return Err(wrong(line, "a key must be a plain text").hint("write key: value"));
                }
            },
        }
    }
    root.ok_or_else(|| {
        wrong(1, "the file is empty").hint("begin with `tasks:` and a list of tasks")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        let error = NewJob::parse(text).unwrap_err();
        assert_eq!(error.code(), Code::InvalidJob);
        format!(
            "{} ({})",
            error.message(),
            error.hint_text().unwrap_or_default()
        )
    }

    #[test]
    fn yaml_and_json_say_the_same() {
        let yaml = "\
jobId: job-1
tasks:
  - taskId: a
    name: scrape
    input: {store: 'store-1', n: 12345678901234567890123, f: 1.50, yes: true, none: ~, text: 'true'}
  - taskId: b
    name: sum
    dependsOn: [a]
";
        let json = r#"{"jobId": "job-1", "totalTasks": 2, "tasks": [
            {"taskId": "a", "name": "scrape",
             "input": {"store":"store-1","n":12345678901234567890123,"f":1.50,"yes":true,"none":null,"text":"true"}},
            {"taskId": "b", "name": "sum", "dependsOn": ["a"], "input": {}}]}"#;
        let (yaml, json) = (NewJob::parse(yaml).unwrap(), NewJob::parse(json).unwrap());
        assert_eq!(yaml.job_id.as_deref(), Some("job-1"));
        assert_eq!(yaml.tasks, json.tasks);
        assert_eq!(
            yaml.tasks[0].input.get(),
            r#"{"store":"store-1","n":12345678901234567890123,"f":1.50,"yes":true,"none":null,"text":"true"}"#
        );
        assert_eq!(yaml.tasks[1].depends_on, ["a"]);
    }

    // conformance: workflow/job-submit: a typing error in a job file is named with its line and the nearest key
    #[test]
    fn a_misspelt_key_is_named_with_its_line_and_the_nearest_one() {
        let text = refused("tasks:\n  - taskId: a\n    name: x\n    dependOn: [b]\n");
        assert_eq!(
            text,
            "line 4: the key \"dependOn\" is not known (did you mean dependsOn?)"
        );
        let text = refused("{\"tasks\": [\n{\"taskid\": \"a\"}]}");
        assert_eq!(
            text,
            "line 2: the key \"taskid\" is not known (did you mean taskId?)"
        );
        let text = refused("color: red\n");
        assert!(
            text.contains("line 1") && text.contains("the keys are jobId"),
            "{text}"
        );
    }

    #[test]
    fn other_mistakes_are_named_with_their_line() {
        for (text, wanted) in [
            ("", "line 1: the file is empty"),
            ("- a\n", "line 1: a job is a mapping"),
            ("jobId: x\n", "the job has no tasks"),
            ("tasks: 5\n", "line 1: tasks is not a list"),
            ("tasks:\n  - taskId: a\n", "line 2: the task has no name"),
            (
                "tasks: []\ntasks: []\n",
                "line 2: the key \"tasks\" is given twice",
            ),
            ("tasks: [\n", "this is not YAML"),
            (
                "tasks: []\ntotalTasks: 3\n",
                "line 2: totalTasks is 3, but there are 0 tasks",
            ),
            ("tasks: &a []\nx: *a\n", "no aliases"),
        ] {
            let found = refused(text);
            assert!(found.contains(wanted), "{text:?}: {found}");
        }
        let deep = format!("tasks: [{}]", "[".repeat(100));
        assert!(refused(&deep).contains("nested"), "{}", refused(&deep));
    }
}
