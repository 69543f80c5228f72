//! The lists in `docs/requirements`: one requirement per line, with indented fields below it.

/// A specification or another subject with its own requirements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// The rows of a specification stand under the titles of its sections, in the order of the document.
    pub(super) specification: bool,
}

const fn specification(name: &'static str, title: &'static str) -> Area {
    Area {
        name,
        title,
        specification: true,
    }
}

const fn subject(name: &'static str, title: &'static str) -> Area {
    Area {
        name,
        title,
        specification: false,
    }
}

pub(super) const AREAS: &[Area] = &[
    specification("omni", "The omni specification"),
    specification("workflow", "The workflow specification"),
    specification("embedded", "The embedded specification"),
    specification("outbox", "The outbox specification"),
    specification("framework", "The framework specification"),
    subject("bus", "What the embedded bus delivers beyond it"),
    subject("handlers", "What handlers deliver"),
    subject("memory", "What the memory delivers"),
    subject("contract", "The contract between engines and runtime"),
    subject("engines", "The same handlers on PostgreSQL"),
    subject("operations", "Ordinary days of operation"),
    subject("rules", "Delivery rules"),
    subject("faults", "Ways to lose events"),
];

/// Subjects of planned work.
pub(super) const SUBJECTS: &[&str] = &[
    "PostgreSQL and NATS",
    "Redis and Kafka and bridges",
    "tasks and jobs",
    "server, WebSocket, dashboard, metrics",
    "later",
];

/// The state of a requirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    Shown,
    Planned,
    Deviation,
    OutOfScope,
    /// The last recorded run of its benchmark missed the target.
    NotMet,
    /// All its tests end early on machines that lack something.
    Conditional,
    /// No test and no field says its state: a mistake.
    Unknown,
}

impl State {
    pub(super) const COUNTED: &[Self] = &[
        Self::Shown,
        Self::Planned,
        Self::Deviation,
        Self::OutOfScope,
        Self::NotMet,
        Self::Conditional,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Shown => "shown",
            Self::Planned => "planned",
            Self::Deviation => "deviation",
            Self::OutOfScope => "out of scope",
            Self::NotMet => "not met",
            Self::Conditional => "conditional",
            Self::Unknown => "missing",
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Requirement {
    pub(super) area: String,
    pub(super) heading: String,
    pub(super) id: String,
    pub(super) text: String,
    pub(super) lives: Option<String>,
    pub(super) planned: Option<String>,
    pub(super) deviation: Option<String>,
    /// What the tests show and what they do not.
    pub(super) note: Option<String>,
    pub(super) bench: Option<String>,
    pub(super) out_of_scope: Option<String>,
    /// Further ids of the same area whose tags show this requirement too.
    pub(super) also: Vec<String>,
    /// Tests that always run to their end.
    pub(super) tests: Vec<String>,
    /// Tests that end early where something is missing, with what they need.
    pub(super) conditional: Vec<(String, String)>,
}

impl Requirement {
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.area, self.id)
    }

    /// Whether a tag names this requirement: by its own id, or by an id of its field `also:`.
    pub(super) fn is_named(&self, tag: &str) -> bool {
        let (area, id) = split_name(tag);
        self.area == area && (self.id == id || self.also.iter().any(|also| also == id))
    }

    pub(super) fn has_tests(&self) -> bool {
        !self.tests.is_empty() || !self.conditional.is_empty()
    }

    /// `met` is whether the last run of its benchmark met the target; `None` without a benchmark.
    pub(super) fn state(&self, met: Option<bool>) -> State {
        if self.planned.is_some() {
            State::Planned
        } else if self.out_of_scope.is_some() {
            State::OutOfScope
        } else if met == Some(false) {
            State::NotMet
        } else if self.tests.is_empty() && met.is_none() {
            if self.conditional.is_empty() {
                State::Unknown
            } else {
                State::Conditional
            }
        } else if self.deviation.is_some() {
            State::Deviation
        } else {
            State::Shown
        }
    }

    /// Problems with the fields of this row alone.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if let Some(subject) = &self.planned {
            if !SUBJECTS.contains(&subject.as_str()) {
                let known = SUBJECTS.join(" | ");
                problems.push(format!("is planned with {subject:?}; known are {known}"));
            }
            if self.deviation.is_some() || self.out_of_scope.is_some() || self.bench.is_some() {
                problems.push("is planned and has another state beside that".to_owned());
            }
        }
        if let Some(subject) = &self.planned
            && self.has_tests()
        {
            let tests = self.tests.iter();
            let tests = tests.chain(self.conditional.iter().map(|(test, _)| test));
            let tests = tests.map(String::as_str).collect::<Vec<_>>().join(", ");
            problems.push(format!(
                "is planned ({subject}), but is tagged already: {tests}; remove `planned:` or the tag"
            ));
        }
        if self.out_of_scope.is_some() && (self.has_tests() || self.bench.is_some()) {
            problems.push("is out of scope and has a test all the same".to_owned());
        }
        if self.out_of_scope.is_some() && self.deviation.is_some() {
            problems.push("is out of scope and a deviation".to_owned());
        }
        for also in self.also.iter().filter(|also| also.contains('/')) {
            problems.push(format!(
                "names {also} of another area in `also:`; put a second tag above the test that shows it"
            ));
        }
        problems
    }
}

/// The content of a file: its headings in order and its requirements.
#[derive(Debug, Default)]
pub(super) struct List {
    pub(super) headings: Vec<String>,
    pub(super) requirements: Vec<Requirement>,
    pub(super) problems: Vec<String>,
}

pub(super) fn parse(area: &str, path: &str, text: &str) -> List {
    let mut list = List::default();
    for (number, line) in text.lines().enumerate() {
        let at = || format!("{path}:{}", number + 1);
        if let Some(title) = line.strip_prefix("## ") {
            list.headings.push(title.trim().to_owned());
            continue;
        }
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((name, value)) = line.split_once(": ") else {
            list.problems.push(format!("{} has no `id: text`", at()));
            continue;
        };
        let (field, value) = (name.trim(), value.trim().to_owned());
        if !name.starts_with(' ') {
            list.requirements.push(Requirement {
                area: area.to_owned(),
                heading: list.headings.last().cloned().unwrap_or_default(),
                id: field.to_owned(),
                text: value,
                ..Requirement::default()
            });
            continue;
        }
        let Some(requirement) = list.requirements.last_mut() else {
            list.problems.push(format!("{} belongs to nothing", at()));
            continue;
        };
        let place = match field {
            "lives" => &mut requirement.lives,
            "planned" => &mut requirement.planned,
            "deviation" => &mut requirement.deviation,
            "note" => &mut requirement.note,
            "bench" => &mut requirement.bench,
            "out-of-scope" => &mut requirement.out_of_scope,
            "also" => {
                requirement.also = value.split(", ").map(str::to_owned).collect();
                continue;
            }
            other => {
                let problem = format!("{}: {other:?} is not a field", at());
                list.problems.push(problem);
                continue;
            }
        };
        if place.replace(value).is_some() {
            list.problems
                .push(format!("{}: {field} is said twice", at()));
        }
    }
    list
}

/// Splits a name into area and id: `embedded/dlq-list` as written; `rule-4` and `rule-4/anything` are `rules/rule-4`.
pub(super) fn split_name(name: &str) -> (&str, &str) {
    let (first, second) = name.split_once('/').unwrap_or((name, name));
    if first.starts_with("rule-") {
        ("rules", first)
    } else if first.starts_with("fault-") {
        ("faults", first)
    } else {
        (first, second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(fields: &str) -> Requirement {
        let mut list = parse("omni", "list", &format!("a: text\n{fields}"));
        assert!(list.problems.is_empty(), "{:?}", list.problems);
        list.requirements.remove(0)
    }

    #[test]
    fn a_list_has_headings_rows_and_fields() {
        let text = "# prose\n## One\na: first\n  lives: crates\n  note: by halves\n## Two\nb: second\n  also: x, y\n";
        let list = parse("omni", "list", text);
        assert!(list.problems.is_empty(), "{:?}", list.problems);
        assert_eq!(list.headings, ["One", "Two"]);
        let [a, b] = &list.requirements[..] else {
            panic!("{list:?}")
        };
        assert_eq!((a.name().as_str(), a.heading.as_str()), ("omni/a", "One"));
        assert_eq!(a.lives.as_deref(), Some("crates"));
        assert_eq!(a.note.as_deref(), Some("by halves"));
        assert_eq!((b.heading.as_str(), b.also.len()), ("Two", 2));
    }

    #[test]
    fn lines_that_say_nothing_are_reported_with_their_place() {
        let text = "  lives: x\nno text\na: b\n  colour: red\n  note: x\n  note: y\n";
        assert_eq!(
            parse("omni", "list", text).problems,
            [
                "list:1 belongs to nothing",
                "list:2 has no `id: text`",
                "list:4: \"colour\" is not a field",
                "list:6: note is said twice"
            ]
        );
    }

    #[test]
    fn a_row_has_one_of_the_states() {
        assert_eq!(one("").state(None), State::Unknown);
        assert_eq!(one("  planned: later\n").state(None), State::Planned);
        assert_eq!(one("  out-of-scope: x\n").state(None), State::OutOfScope);
        assert_eq!(one("  deviation: x\n").state(None), State::Unknown);
        assert_eq!(one("  bench: x\n").state(Some(true)), State::Shown);
        assert_eq!(one("  bench: x\n").state(Some(false)), State::NotMet);
        let tested = |fields: &str| Requirement {
            tests: vec!["f.rs::t".to_owned()],
            ..one(fields)
        };
        assert_eq!(tested("").state(None), State::Shown);
        assert_eq!(tested("  deviation: x\n").state(None), State::Deviation);
        assert_eq!(tested("").state(Some(false)), State::NotMet);
        let conditional = Requirement {
            conditional: vec![("f.rs::t".to_owned(), "root".to_owned())],
            ..one("")
        };
        assert_eq!(conditional.state(None), State::Conditional);
    }

    #[test]
    fn two_states_at_once_are_a_problem() {
        assert!(one("  planned: tasks and jobs\n").problems().is_empty());
        for fields in [
            "  planned: some day\n",
            "  planned: later\n  deviation: x\n",
            "  planned: later\n  out-of-scope: x\n",
            "  planned: later\n  bench: x\n",
            "  out-of-scope: x\n  deviation: x\n",
            "  also: b, embedded/c\n",
        ] {
            assert_eq!(one(fields).problems().len(), 1, "{fields}");
        }
    }

    #[test]
    fn a_planned_row_that_a_test_claims_is_stale() {
        let mut row = one("  planned: later\n");
        row.tests.push("f.rs::t".to_owned());
        let problems = row.problems();
        assert!(
            problems[0].contains("tagged already: f.rs::t"),
            "{problems:?}"
        );
        let mut row = one("  out-of-scope: x\n");
        row.conditional
            .push(("f.rs::t".to_owned(), "root".to_owned()));
        assert_eq!(row.problems().len(), 1);
    }

    #[test]
    fn ids_reach_no_further_than_their_area() {
        let row = one("  also: b\n");
        assert!(row.is_named("omni/a") && row.is_named("omni/b"));
        assert!(!row.is_named("embedded/a") && !row.is_named("embedded/b"));
        assert_eq!(split_name("rule-4/panic"), ("rules", "rule-4"));
        assert_eq!(split_name("fault-12"), ("faults", "fault-12"));
    }
}
