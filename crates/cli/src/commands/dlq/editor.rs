//! The user's editor, and the text forms it shows.

use std::io::Write as _;
use std::process::Command;

use tempfile::NamedTempFile;

use crate::stop::{Outcome, Stop};

/// At most this many lines of a change are shown.
const MOST_LINES: usize = 40;

/// The result of an editor.
pub(super) enum Edited {
    Unchanged,
    /// The text, and its file, which is kept until the text is used.
    Changed {
        text: String,
        file: NamedTempFile,
    },
}

/// Opens a text in the user's editor.
pub(super) async fn edit_text(text: String, json: bool) -> Outcome<Edited> {
    // The handler stays installed: Ctrl-C is for the editor, which shares the terminal.
    let quiet = tokio::spawn(async { while tokio::signal::ctrl_c().await.is_ok() {} });
    let editing = tokio::task::spawn_blocking(move || edit_blocking(&text, json));
    let edited = editing.await;
    quiet.abort();
    edited.map_err(|error| Stop::Io(format!("the editor: {error}")))?
}

fn edit_blocking(text: &str, json: bool) -> Outcome<Edited> {
    let failed = |what: &str, error: std::io::Error| Stop::Io(format!("{what}: {error}"));
    let mut file = tempfile::Builder::new()
        .prefix("everbus-")
        .suffix(if json { ".json" } else { ".txt" })
        .tempfile()
        .map_err(|e| failed("a file to edit", e))?;
    let begun = format!("{}\n", text.trim_end_matches('\n'));
    file.write_all(begun.as_bytes())
        .and_then(|()| file.flush())
        .map_err(|e| failed("a file to edit", e))?;
    let editor = editor();
    let mut words = editor.split_whitespace();
    let program = words.next().unwrap_or("vi");
    // No shell: the words are the program and its arguments.
    let status = Command::new(program)
        .args(words)
        .arg(file.path())
        .status()
        .map_err(|e| failed(&format!("the editor {program:?}"), e))?;
    if !status.success() {
        let message = format!("the editor {program:?} ended with {status}; nothing was sent back");
        return Err(Stop::Io(message));
    }
    // Many editors replace the file instead of writing to it.
    let text = std::fs::read_to_string(file.path()).map_err(|e| failed("what was edited", e))?;
    if text == begun {
        return Ok(Edited::Unchanged);
    }
    let text = text.trim_end().to_owned();
    Ok(Edited::Changed { text, file })
}

/// The program that `VISUAL` or `EDITOR` names.
fn editor() -> String {
    let named = |name: &str| {
        let value = std::env::var(name).ok();
        value.filter(|value| !value.trim().is_empty())
    };
    named("VISUAL")
        .or_else(|| named("EDITOR"))
        .unwrap_or_else(|| "vi".to_owned())
}

/// Formats JSON with one value per line. Only whitespace between tokens changes: numbers and texts stay as
/// they were written.
pub(super) fn indented(json: &str) -> String {
    let mut out = String::with_capacity(json.len() * 2);
    let (mut depth, mut in_text, mut escaped) = (0usize, false, false);
    let mut chars = json.trim().chars().peekable();
    let line = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", depth));
    };
    while let Some(c) = chars.next() {
        if in_text {
            out.push(c);
            in_text = escaped || c != '"';
            escaped = !escaped && c == '\\';
            continue;
        }
        match c {
            '"' => {
                in_text = true;
                out.push(c);
            }
            '{' | '[' => {
                out.push(c);
                while chars.next_if(char::is_ascii_whitespace).is_some() {}
                match chars.next_if(|c| matches!(c, '}' | ']')) {
                    Some(end) => out.push(end),
                    None => {
                        depth += 1;
                        line(&mut out, depth);
                    }
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                line(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(c);
                line(&mut out, depth);
            }
            ':' => out.push_str(": "),
            c if c.is_ascii_whitespace() => {}
            c => out.push(c),
        }
    }
    out
}

/// Removes whitespace between the tokens of JSON. Text that is not JSON stays as it is: joining its tokens
/// could change its meaning.
pub(super) fn compact(text: String) -> String {
    if serde_json::from_str::<serde::de::IgnoredAny>(&text).is_err() {
        return text;
    }
    let (mut in_text, mut escaped) = (false, false);
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if in_text {
            in_text = escaped || c != '"';
            escaped = !escaped && c == '\\';
        } else if c.is_ascii_whitespace() {
            continue;
        } else {
            in_text = c == '"';
        }
        out.push(c);
    }
    out
}

/// The difference between two texts, as lines that begin with `-` or `+`. Equal lines at the beginning and
/// the end are left out.
pub(super) fn changes(before: &str, after: &str) -> Vec<String> {
    let before: Vec<&str> = before.lines().collect();
    let after: Vec<&str> = after.lines().collect();
    let same = |a: &[&str], b: &[&str]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let first = same(&before, &after);
    let (before, after) = (&before[first..], &after[first..]);
    let pairs = before.iter().rev().zip(after.iter().rev());
    let last = pairs.take_while(|(a, b)| a == b).count();
    let mut lines = Vec::new();
    for (mark, side) in [('-', before), ('+', after)] {
        let side = &side[..side.len() - last];
        let shown = side.iter().take(MOST_LINES);
        lines.extend(shown.map(|line| format!("{mark} {line}")));
        if side.len() > MOST_LINES {
            lines.push(format!("{mark} … {} more lines", side.len() - MOST_LINES));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_spaces_between_tokens_change() {
        let json = r#" {"a":1.50,"b":[ ],"c":["x, {\"y\\",{}, 12345678901234567890],"d" : null} "#;
        let expected = "{\n  \"a\": 1.50,\n  \"b\": [],\n  \"c\": [\n    \"x, {\\\"y\\\\\",\n    {},\n    12345678901234567890\n  ],\n  \"d\": null\n}";
        assert_eq!(indented(json), expected);
        assert_eq!(indented(expected), expected, "once is enough");
        assert_eq!(indented("7"), "7");
        // Text that is not JSON is shown, not repaired.
        assert_eq!(indented("}]"), "\n}\n]");
        let deep = "[".repeat(3000);
        assert!(indented(&deep).starts_with("[\n  [\n"));
    }

    #[test]
    fn what_was_indented_is_compact_again() {
        let json = r#"{"a":1.50,"b":[],"c":["x, { \"y\\",{}," z"]}"#;
        assert_eq!(compact(indented(json)), json);
        assert_eq!(compact("1 2".to_owned()), "1 2", "not 12");
    }

    #[test]
    fn what_differs_is_shown() {
        let changed = changes("{\n  a\n  b\n}", "{\n  a\n  c\n  d\n}");
        assert_eq!(changed, ["-   b", "+   c", "+   d"]);
        assert!(changes("a\nb", "a\nb").is_empty());
        assert_eq!(changes("a\na", "a"), ["- a"]);
        assert_eq!(changes("", "x"), ["+ x"]);
        let long: String = (0..100).map(|n| format!("{n}\n")).collect();
        assert_eq!(changes("", &long).len(), MOST_LINES + 1);
    }
}
