//! Parses YAML into a tree with the place of every value. Input that expands or nests too much is refused
//! during parsing: the parser's events are handled one by one, so that neither nesting nor aliases can
//! exhaust the stack or the memory.

use std::collections::HashMap;
use std::rc::Rc;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Tag};

use super::problems::{Place, Problems, quoted};

/// The settings need six levels; a deeper file is not a configuration.
const DEEPEST: usize = 32;
/// The largest number of values in one file, repeated aliases included.
const MOST_VALUES: usize = 100_000;

/// A value and its place.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) place: Place,
    pub(super) value: Value,
    /// The number of values in it, itself included, with every alias counted in full.
    size: usize,
    /// Levels below it.
    depth: usize,
}

#[derive(Debug)]
pub(super) enum Value {
    /// A text without its quotes. Only an unquoted one may be a number or a boolean.
    Scalar {
        text: String,
        plain: bool,
    },
    List(Vec<Rc<Node>>),
    Map(Vec<(Key, Rc<Node>)>),
}

/// A key of a mapping.
#[derive(Clone, Debug)]
pub(super) struct Key {
    pub(super) text: String,
    pub(super) place: Place,
}

impl Node {
    /// Whether it is empty or a null word.
    pub(super) fn is_null(&self) -> bool {
        match &self.value {
            Value::Scalar { text, plain: true } => {
                matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL")
            }
            _ => false,
        }
    }

    /// Whether it is one of these words, with or without quotes.
    pub(super) fn is_word(&self, words: &[&str]) -> bool {
        matches!(&self.value, Value::Scalar { text, .. } if words.contains(&text.as_str()))
    }

    fn scalar(place: Place, text: String, plain: bool) -> Self {
        let value = Value::Scalar { text, plain };
        Self {
            place,
            value,
            size: 1,
            depth: 0,
        }
    }
}

/// A collection that is not finished.
struct Open {
    place: Place,
    anchor: usize,
    size: usize,
    depth: usize,
    kind: Kind,
}

enum Kind {
    List(Vec<Rc<Node>>),
    Map {
        entries: Vec<(Key, Rc<Node>)>,
        /// The place of the first use of each key.
        seen: HashMap<String, Place>,
        key: Waiting,
    },
}

/// What a mapping expects next.
enum Waiting {
    Key,
    Value(Key),
    /// A value whose key is invalid.
    Nothing,
}

/// Parses a text with one document. `None` if it has none or is invalid; the problems say why.
pub(super) fn parse(text: &str, problems: &mut Problems) -> Option<Rc<Node>> {
    let mut tree = Tree {
        problems,
        open: Vec::new(),
        anchors: HashMap::new(),
        values: 0,
        root: None,
    };
    let mut documents = 0;
    for event in Parser::new_from_str(text) {
        let (event, span) = match event {
            Ok(event) => event,
            Err(error) => {
                let at = place(*error.marker());
                // The parser looks ahead, and has its own limit.
                if error.info().contains("recursion limit") {
                    tree.too_deep(at);
                } else {
                    let what = format!("this is not YAML: {}", error.info());
                    tree.problems.add(at, what, hint_for(text, error.marker()));
                }
                return None;
            }
        };
        let at = place(span.start);
        if matches!(event, Event::DocumentStart(_)) {
            documents += 1;
            if documents > 1 {
                tree.problems.add(
                    at,
                    "a second document begins here",
                    "a configuration is one document: remove the --- or put the rest in a file of its own",
                );
                return None;
            }
        }
        tree.event(event, at)?;
    }
    tree.root
}

struct Tree<'p> {
    problems: &'p mut Problems,
    open: Vec<Open>,
    anchors: HashMap<usize, Rc<Node>>,
    values: usize,
    root: Option<Rc<Node>>,
}

impl Tree<'_> {
    /// Handles one event; `None` ends the parsing.
    fn event(&mut self, event: Event<'_>, at: Place) -> Option<()> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let plain = style == ScalarStyle::Plain && !is_text(tag.as_deref());
                self.check_tag(tag.as_deref(), at);
                self.count(1, at)?;
                self.finish(Node::scalar(at, text.into_owned(), plain), anchor)
            }
            Event::SequenceStart(anchor, tag) => {
                self.check_tag(tag.as_deref(), at);
                self.begin(Kind::List(Vec::new()), anchor, at)
            }
            Event::MappingStart(anchor, tag) => {
                self.check_tag(tag.as_deref(), at);
                let kind = Kind::Map {
                    entries: Vec::new(),
                    seen: HashMap::new(),
                    key: Waiting::Key,
                };
                self.begin(kind, anchor, at)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let open = self.open.pop()?;
                let value = match open.kind {
                    Kind::List(items) => Value::List(items),
                    Kind::Map { entries, .. } => Value::Map(entries),
                };
                let node = Node {
                    place: open.place,
                    value,
                    size: open.size,
                    depth: open.depth,
                };
                self.finish(node, open.anchor)
            }
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor).cloned() else {
                    self.problems.add(
                        at,
                        "an alias inside the very value that it repeats",
                        "write the value out",
                    );
                    return None;
                };
                self.count(node.size, at)?;
                self.check_depth(node.depth, at)?;
                self.attach(node)
            }
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(_)
            | Event::DocumentEnd => Some(()),
        }
    }

    fn begin(&mut self, kind: Kind, anchor: usize, place: Place) -> Option<()> {
        self.count(1, place)?;
        self.check_depth(0, place)?;
        self.open.push(Open {
            place,
            anchor,
            size: 1,
            depth: 0,
            kind,
        });
        Some(())
    }

    fn finish(&mut self, node: Node, anchor: usize) -> Option<()> {
        let node = Rc::new(node);
        if anchor > 0 {
            self.anchors.insert(anchor, Rc::clone(&node));
        }
        self.attach(node)
    }

    /// Adds a finished value to its parent.
    fn attach(&mut self, node: Rc<Node>) -> Option<()> {
        let Some(parent) = self.open.last_mut() else {
            self.root = Some(node);
            return Some(());
        };
        parent.size = parent.size.saturating_add(node.size);
        parent.depth = parent.depth.max(node.depth + 1);
        let (entries, seen, key) = match &mut parent.kind {
            Kind::Map { entries, seen, key } => (entries, seen, key),
            Kind::List(items) => {
                items.push(node);
                return Some(());
            }
        };
        match std::mem::replace(key, Waiting::Key) {
            Waiting::Value(name) => entries.push((name, node)),
            Waiting::Nothing => {}
            Waiting::Key => {
                *key = match &node.value {
                    Value::Scalar { text, .. } => match seen.get(text) {
                        Some(first) => {
                            let what = format!(
                                "the key {} is given twice, first on line {}",
                                quoted(text),
                                first.line
                            );
                            self.problems.add(node.place, what, "remove one of them");
                            Waiting::Nothing
                        }
                        None => {
                            seen.insert(text.clone(), node.place);
                            Waiting::Value(Key {
                                text: text.clone(),
                                place: node.place,
                            })
                        }
                    },
                    _ => {
                        let what = "a key must be a plain text";
                        self.problems.add(node.place, what, "write `key: value`");
                        Waiting::Nothing
                    }
                };
            }
        }
        Some(())
    }

    fn count(&mut self, more: usize, at: Place) -> Option<()> {
        self.values = self.values.saturating_add(more);
        if self.values > MOST_VALUES {
            let what = format!("there are more than {MOST_VALUES} values up to here");
            let hint = "what an alias repeats is counted each time; write less of it";
            self.problems.add(at, what, hint);
            return None;
        }
        Some(())
    }

    /// `below` is the depth of the value that is added.
    fn check_depth(&mut self, below: usize, at: Place) -> Option<()> {
        if self.open.len() + below >= DEEPEST {
            self.too_deep(at);
            return None;
        }
        Some(())
    }

    fn too_deep(&mut self, at: Place) {
        let what = format!("this is nested more than {DEEPEST} levels deep");
        let hint = "a configuration needs six levels; look for a stray [ or {";
        self.problems.add(at, what, hint);
    }

    fn check_tag(&mut self, tag: Option<&Tag>, at: Place) {
        let Some(tag) = tag.filter(|tag| !is_core(tag)) else {
            return;
        };
        let what = format!("the tag {} is not understood", quoted(&tag.to_string()));
        self.problems.add(at, what, "write the value without it");
    }
}

fn is_core(tag: &Tag) -> bool {
    let known = ["str", "int", "float", "bool", "null", "map", "seq"];
    // A lone `!` means: this is a text.
    tag.is_yaml_core_schema() && known.contains(&tag.suffix.as_str()) || is_lone(tag)
}

fn is_lone(tag: &Tag) -> bool {
    tag.handle.is_empty() && tag.suffix == "!" || tag.handle == "!" && tag.suffix.is_empty()
}

fn is_text(tag: Option<&Tag>) -> bool {
    tag.is_some_and(|tag| is_lone(tag) || tag.is_yaml_core_schema() && tag.suffix == "str")
}

fn place(marker: Marker) -> Place {
    Place {
        line: marker.line(),
        column: marker.col() + 1,
    }
}

/// The most frequent cause of a parser error.
fn hint_for(text: &str, at: &Marker) -> &'static str {
    let line = text.lines().nth(at.line().saturating_sub(1)).unwrap_or("");
    let before = line.len() - line.trim_start().len();
    if line[..before].contains('\t') {
        "YAML is indented with spaces, never with tabs"
    } else if line.matches(": ").count() > 1 {
        "put a value that contains `: ` in quotes"
    } else {
        "look at the indentation, quotes and brackets here and in the line before"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Option<Rc<Node>>, Vec<String>) {
        let mut problems = Problems::new("f.yaml");
        let node = parse(text, &mut problems);
        (node, problems.lines())
    }

    #[test]
    fn everything_knows_its_line_and_column() {
        let (node, problems) = read("a:\n  b: 1\n  \"c d\": 'x'\n");
        assert!(problems.is_empty(), "{problems:?}");
        let node = node.unwrap();
        let Value::Map(entries) = &node.value else {
            panic!("{node:?}")
        };
        let Value::Map(inner) = &entries[0].1.value else {
            panic!("{node:?}")
        };
        let places: Vec<_> = inner
            .iter()
            .map(|(key, value)| {
                (
                    key.text.as_str(),
                    key.place.line,
                    key.place.column,
                    value.place.column,
                )
            })
            .collect();
        assert_eq!(places, [("b", 2, 3, 6), ("c d", 3, 3, 10)]);
        assert!(
            matches!(&inner[0].1.value, Value::Scalar { text, plain: true } if text == "1"),
            "{node:?}"
        );
        assert!(
            matches!(&inner[1].1.value, Value::Scalar { text, plain: false } if text == "x"),
            "{node:?}"
        );
    }

    #[test]
    fn all_duplicate_keys_are_found_and_the_first_value_stands() {
        let (node, problems) = read("a: 1\nb: 2\na: 3\nb: 4\n");
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(
            problems[0].starts_with("f.yaml:3:1: the key \"a\" is given twice, first on line 1")
        );
        let Value::Map(entries) = &node.unwrap().value else {
            panic!("no map")
        };
        assert_eq!(entries.len(), 2);
    }

    #[test]
    fn aliases_repeat_values_and_cannot_blow_up() {
        let (node, problems) = read("a: &x {k: 1}\nb: *x\n");
        assert!(problems.is_empty(), "{problems:?}");
        assert!(node.is_some());
        let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for n in 1..20 {
            let ten = vec![format!("*a{}", n - 1); 10].join(", ");
            laughs.push_str(&format!("a{n}: &a{n} [{ten}]\n"));
        }
        let (node, problems) = read(&laughs);
        assert!(node.is_none());
        assert!(
            problems[0].contains("more than 100000 values"),
            "{problems:?}"
        );
        let (node, problems) = read("a: &a [*a]\n");
        assert!(node.is_none() && problems.len() == 1, "{problems:?}");
    }

    #[test]
    fn nesting_has_an_end_in_every_form_of_it() {
        let deep = [
            "- ".repeat(500_000),
            "[".repeat(500_000),
            "{a: ".repeat(200_000),
            "? ".repeat(300_000),
            (0..40).map(|n| format!("{}k:\n", " ".repeat(n))).collect(),
            // Each anchor nests deeper than any single one is written.
            (1..20).fold("a0: &a0 [[[]]]\n".to_owned(), |text, n| {
                format!("{text}a{n}: &a{n} [[*a{}]]\n", n - 1)
            }),
        ];
        for text in deep {
            let (node, problems) = read(&text);
            assert!(node.is_none());
            assert!(
                problems.len() == 1 && problems[0].contains("levels deep"),
                "{problems:?}"
            );
        }
    }

    #[test]
    fn tags_and_odd_keys_are_refused_where_they_stand() {
        let (_, problems) = read("a: !env X\n? [k]\n: v\nc: !!str 5\nd: !!map {}\ne: ! x\n");
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(
            problems[0].starts_with("f.yaml:1:4: the tag "),
            "{problems:?}"
        );
        assert!(
            problems[1].starts_with("f.yaml:2:3: a key must be"),
            "{problems:?}"
        );
    }

    #[test]
    fn what_is_not_yaml_comes_with_a_place_and_a_hint() {
        for (text, place, hint) in [
            ("a:\n\tb: 1\n", "f.yaml:2:2: ", "tabs"),
            ("a: b: c\n", "f.yaml:1:5: ", "in quotes"),
            ("a: \"x\n", "f.yaml:1:4: ", "quotes and brackets"),
            ("a: 1\n---\nb: 2\n", "f.yaml:2:1: ", "one document"),
        ] {
            let (node, problems) = read(text);
            assert!(node.is_none(), "{text}");
            assert!(
                problems[0].starts_with(place) && problems[0].contains(hint),
                "{problems:?}"
            );
        }
    }
}
