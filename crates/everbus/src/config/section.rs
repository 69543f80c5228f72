//! Reads typed values from the tree. A value that does not fit becomes a problem with its place, and
//! reading continues.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::duration;
use super::expand::{Lookup, expand};
use super::problems::{Place, Problems, listed, nearest, quoted};
use super::yaml::{Node, Value};

/// Reads values and collects problems.
pub(super) struct Reader<'a> {
    pub(super) problems: Problems,
    pub(super) lookup: &'a Lookup<'a>,
    /// Every section and its keys, to say where a misplaced key belongs.
    pub(super) sections: &'static [(&'static str, &'static [&'static str])],
}

/// A mapping whose keys are known.
pub(super) struct Section<'n> {
    path: String,
    pub(super) place: Place,
    fields: Vec<Field<'n>>,
}

/// A value, its key, and its path from the top: `consumers.billing.retry.max_attempts`.
#[derive(Clone)]
pub(super) struct Field<'n> {
    pub(super) key: &'n str,
    /// The place of the key.
    pub(super) key_place: Place,
    pub(super) path: String,
    pub(super) node: &'n Node,
}

impl<'n> Section<'n> {
    pub(super) fn get(&self, key: &str) -> Option<Field<'n>> {
        self.fields.iter().find(|field| field.key == key).cloned()
    }

    /// The path of this section from the top.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// The path of a key of this section.
    pub(super) fn path_of(&self, key: &str) -> String {
        below(&self.path, key)
    }
}

/// A text with its variables replaced.
pub(super) struct Text {
    pub(super) value: String,
    pub(super) place: Place,
    pub(super) path: String,
    /// The text to show in a problem: as written in the file, never the value of a variable.
    pub(super) shown: String,
    /// The variables in it.
    pub(super) variables: Vec<String>,
    /// Whether it was written without quotes.
    plain: bool,
}

impl Text {
    /// Whether it may be a number or a boolean: it has no quotes, or it came from a variable.
    fn is_untyped(&self) -> bool {
        self.plain || !self.variables.is_empty()
    }
}

impl Reader<'_> {
    /// The top of the file.
    pub(super) fn root<'n>(&mut self, node: &'n Node, known: &[&str]) -> Option<Section<'n>> {
        let field = Field {
            key: "",
            key_place: node.place,
            path: String::new(),
            node,
        };
        self.section(Some(field), known)
    }

    /// A mapping with these keys and no others. A missing value is an empty mapping.
    pub(super) fn section<'n>(
        &mut self,
        field: Option<Field<'n>>,
        known: &[&str],
    ) -> Option<Section<'n>> {
        let field = field?;
        let (path, place) = (field.path.clone(), field.key_place);
        let fields = self.entries(
            &field,
            &format!("a mapping with the keys {}", listed(known)),
        )?;
        let (fields, unknown) = fields
            .into_iter()
            .partition(|field| known.contains(&field.key));
        for field in unknown {
            self.unknown_key(&field, &path, known);
        }
        Some(Section {
            path,
            place,
            fields,
        })
    }

    /// A mapping whose keys are names chosen by the user.
    pub(super) fn names<'n>(&mut self, field: Option<Field<'n>>, what: &str) -> Vec<Field<'n>> {
        let Some(field) = field else {
            return Vec::new();
        };
        let entries = self.entries(&field, &format!("a mapping from {what}"));
        let mut named = entries.unwrap_or_default();
        named.retain(|field| {
            if field.key.contains("${") {
                self.problems.add(
                    field.key_place,
                    format!("{} is a name, and names have no variables", field.path),
                    "write the name out",
                );
            }
            !field.key.contains("${")
        });
        named
    }

    /// The values of a list of at most `most`, in order. A missing value is an empty list.
    pub(super) fn list<'n>(
        &mut self,
        field: Option<Field<'n>>,
        most: usize,
        what: &str,
    ) -> Vec<Field<'n>> {
        let Some(field) = field else {
            return Vec::new();
        };
        match &field.node.value {
            Value::List(items) if items.len() <= most => {
                let items = items.iter().enumerate().map(|(n, node)| Field {
                    key: field.key,
                    key_place: node.place,
                    path: format!("{}[{n}]", field.path),
                    node,
                });
                items.collect()
            }
            _ if field.node.is_null() => Vec::new(),
            _ => {
                self.wrong_kind(&field, &format!("a list of at most {most} {what}"));
                Vec::new()
            }
        }
    }

    fn entries<'n>(&mut self, field: &Field<'n>, wanted: &str) -> Option<Vec<Field<'n>>> {
        match &field.node.value {
            Value::Map(entries) => Some(
                entries
                    .iter()
                    .map(|(key, node)| Field {
                        key: &key.text,
                        key_place: key.place,
                        path: below(&field.path, &key.text),
                        node,
                    })
                    .collect(),
            ),
            _ if field.node.is_null() => Some(Vec::new()),
            _ => {
                self.wrong_kind(field, wanted);
                None
            }
        }
    }

    fn unknown_key(&mut self, field: &Field<'_>, section: &str, known: &[&str]) {
        let inside = if section.is_empty() {
            "at the top of the file".to_owned()
        } else {
            format!("in {section}")
        };
        let what = format!("unknown key {} {inside}", quoted(field.key));
        let elsewhere = self
            .sections
            .iter()
            .find(|(_, keys)| keys.contains(&field.key));
        let hint = match (nearest(field.key, known), elsewhere) {
            (Some(word), _) => format!("did you mean {word:?}?"),
            (None, Some((section, _))) => format!("it belongs under {section}"),
            (None, None) if field.key == "<<" => {
                "merge keys are not part of YAML 1.2: write the keys out".to_owned()
            }
            (None, None) => format!("the keys here are {}", listed(known)),
        };
        self.problems.add(field.key_place, what, hint);
    }

    fn wrong_kind(&mut self, field: &Field<'_>, wanted: &str) {
        let found = match &field.node.value {
            Value::Map(_) => "a mapping".to_owned(),
            Value::List(items) => format!("a list of {}", items.len()),
            // The value is not shown: it may be an address with a password.
            Value::Scalar { .. } if field.node.is_null() => "nothing".to_owned(),
            Value::Scalar { .. } => "a single value".to_owned(),
        };
        let name = if field.path.is_empty() {
            "the file"
        } else {
            &field.path
        };
        let what = format!("{name} is {found}");
        self.problems
            .add(field.node.place, what, format!("it must be {wanted}"));
    }

    /// Any single value.
    pub(super) fn text(&mut self, field: Option<Field<'_>>, wanted: &str) -> Option<Text> {
        let field = field?;
        let Value::Scalar { text, plain } = &field.node.value else {
            self.wrong_kind(&field, wanted);
            return None;
        };
        let place = field.node.place;
        if field.node.is_null() {
            let what = format!("{} has no value", field.path);
            self.problems.add(
                field.key_place,
                what,
                format!("it must be {wanted}; or leave the key out"),
            );
            return None;
        }
        match expand(text, self.lookup) {
            Err((what, hint)) => {
                self.problems
                    .add(place, format!("{}: {what}", field.path), hint);
                None
            }
            Ok(expanded) => {
                let shown = quoted(text);
                Some(Text {
                    value: expanded.text,
                    place,
                    path: field.path,
                    shown: if *plain {
                        shown[1..shown.len() - 1].to_owned()
                    } else {
                        shown
                    },
                    variables: expanded.variables,
                    plain: *plain,
                })
            }
        }
    }

    pub(super) fn refuse(&mut self, text: &Text, what: &str, hint: impl Into<String>) {
        let what = format!("{} is {}, {what}", text.path, text.shown);
        self.problems.add(text.place, what, hint);
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy>(
        &mut self,
        field: Option<Field<'_>>,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        let one_of = format!("one of {}", listed(&words));
        let text = self.text(field, &one_of)?;
        let chosen = choices.iter().find(|(word, _)| *word == text.value);
        if chosen.is_none() {
            let hint = match nearest(&text.value, &words) {
                // A suggestion would reveal the value of a variable.
                Some(word) if text.variables.is_empty() => {
                    format!("did you mean {word:?}? It is {one_of}")
                }
                _ => format!("it is {one_of}"),
            };
            self.refuse(&text, "which is not known", hint);
        }
        chosen.map(|(_, value)| *value)
    }

    pub(super) fn boolean(&mut self, field: Option<Field<'_>>) -> Option<bool> {
        let text = self.text(field, "true or false")?;
        match text.value.trim() {
            "true" | "True" | "TRUE" if text.is_untyped() => Some(true),
            "false" | "False" | "FALSE" if text.is_untyped() => Some(false),
            _ => {
                self.refuse(
                    &text,
                    "which is not a boolean",
                    "write true or false, without quotes",
                );
                None
            }
        }
    }

    /// A whole number of `what`.
    pub(super) fn whole(
        &mut self,
        field: Option<Field<'_>>,
        range: RangeInclusive<u64>,
        what: &str,
    ) -> Option<u64> {
        let wanted = format!(
            "a whole number of {what} between {} and {}",
            range.start(),
            range.end()
        );
        let text = self.text(field, &wanted)?;
        let digits = text.value.trim().replace('_', "");
        let (sign, digits) = match digits.strip_prefix('-') {
            Some(digits) => ("-", digits),
            None => ("", digits.as_str()),
        };
        let is_whole = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        // 010 is eight for some YAML parsers and ten for others.
        let is_clear = digits == "0" || !digits.starts_with('0');
        if !text.is_untyped() || !is_whole || !is_clear {
            let hint = format!("write {wanted}, without quotes and unit");
            self.refuse(&text, "which is not a whole number", hint);
            return None;
        }
        let number = digits.parse().ok().filter(|_| sign.is_empty());
        let number = number.filter(|number| range.contains(number));
        if number.is_none() {
            self.refuse(&text, "which is out of range", format!("write {wanted}"));
        }
        number
    }

    /// A number of `what` that may have a fraction.
    pub(super) fn number(
        &mut self,
        field: Option<Field<'_>>,
        range: RangeInclusive<f64>,
        what: &str,
    ) -> Option<f64> {
        let wanted = format!("{what} between {} and {}", range.start(), range.end());
        let text = self.text(field, &wanted)?;
        let written = text.value.trim();
        let is_number = written.starts_with(|c: char| c.is_ascii_digit() || "-.".contains(c));
        let number = written.replace('_', "").parse::<f64>().ok();
        let number = number.filter(|number| text.is_untyped() && is_number && !number.is_nan());
        match number {
            Some(number) if range.contains(&number) => Some(number),
            Some(_) => {
                self.refuse(&text, "which is out of range", format!("write {wanted}"));
                None
            }
            None => {
                let hint = format!("write {wanted}, without quotes and unit");
                self.refuse(&text, "which is not a number", hint);
                None
            }
        }
    }

    /// A duration that is not zero: a number of seconds, or a number with its unit.
    pub(super) fn duration(&mut self, field: Option<Field<'_>>) -> Option<Duration> {
        let text = self.text(field, "a number of seconds, or one with its unit: 30s")?;
        match duration::parse(text.value.trim()) {
            Ok(duration) => Some(duration),
            Err((what, hint)) => {
                // The longer hint repeats a part of the value.
                let is_literal = text.variables.is_empty();
                let hint = if is_literal {
                    hint
                } else {
                    duration::UNITS.to_owned()
                };
                self.refuse(&text, what, hint);
                None
            }
        }
    }
}

/// The path of a key from the top, on one line.
fn below(path: &str, key: &str) -> String {
    let key = quoted(key);
    let inner = &key[1..key.len() - 1];
    let plain = |c: char| c.is_alphanumeric() || "-_".contains(c);
    let key = if inner.chars().all(plain) && !inner.is_empty() {
        inner
    } else {
        &key
    };
    if path.is_empty() {
        key.to_owned()
    } else {
        format!("{path}.{key}")
    }
}
