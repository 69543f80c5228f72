//! Everything the commands print: text for people, JSON for machines.
//!
//! Event data comes from outside, so every character that could move a cursor, change a colour or reorder
//! text is escaped before it reaches a terminal.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, BufWriter, StdoutLock, Write};

use everbus_core::Event;
use serde::Serialize;

use crate::args::OutputFormat;
use crate::stop::{Outcome, Stop};

/// Where a command prints.
pub(crate) struct Output {
    format: OutputFormat,
    to: BufWriter<StdoutLock<'static>>,
}

impl Output {
    pub(crate) fn new(format: OutputFormat) -> Self {
        Self {
            format,
            to: BufWriter::new(io::stdout().lock()),
        }
    }

    pub(crate) fn is_json(&self) -> bool {
        self.format == OutputFormat::Json
    }

    /// One line of text that is safe already.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) -> Outcome {
        self.raw(text.as_ref().as_bytes())?;
        self.raw(b"\n")
    }

    /// One line of text that is safe already, with a payload in it. The payload may be large: it is
    /// escaped as it is written, not copied.
    pub(crate) fn payload_line(&mut self, before: &str, event: &Event, after: &str) -> Outcome {
        self.to.write_all(before.as_bytes())?;
        match std::str::from_utf8(event.payload()) {
            Ok(text) => self.escaping(text)?,
            Err(_) => self.to.write_all(payload_text(event).as_bytes())?,
        }
        self.to.write_all(after.as_bytes())?;
        self.to.write_all(b"\n")?;
        Ok(())
    }

    fn escaping(&mut self, text: &str) -> io::Result<()> {
        let mut rest = text;
        while let Some((at, c)) = rest.char_indices().find(|(_, c)| is_unsafe(*c)) {
            self.to.write_all(&rest.as_bytes()[..at])?;
            write!(self.to, "{}", c.escape_default())?;
            rest = &rest[at + c.len_utf8()..];
        }
        self.to.write_all(rest.as_bytes())
    }

    /// One JSON value on one line.
    pub(crate) fn json<T: Serialize + ?Sized>(&mut self, value: &T) -> Outcome {
        serde_json::to_writer(&mut self.to, value).map_err(|e| unwritten(&e.into()))?;
        self.raw(b"\n")
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) -> Outcome {
        self.to.write_all(bytes).map_err(|e| unwritten(&e))
    }

    pub(crate) fn flush(&mut self) -> Outcome {
        self.to.flush().map_err(|e| unwritten(&e))
    }
}

/// A closed pipe is not a failure; any other error is reported.
fn unwritten(error: &io::Error) -> Stop {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Stop::BrokenPipe,
        _ => Stop::Io(format!("standard output: {error}")),
    }
}

/// The text with everything escaped that a terminal might act on.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unsafe(c) {
            let _ = write!(safe, "{}", c.escape_default());
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

/// Control characters, and the invisible ones that break lines or reorder text.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
        )
}

/// The payload for one line of text: JSON and text as they are, other bytes by their number.
pub(crate) fn payload_text(event: &Event) -> Cow<'_, str> {
    match std::str::from_utf8(event.payload()) {
        Ok(text) => escaped(text),
        Err(_) => Cow::Owned(format!(
            "({} bytes of {})",
            event.payload().len(),
            escaped(event.content_type())
        )),
    }
}

/// At most `width` characters, with a mark where something is left out.
pub(crate) fn shortened(text: &str, width: usize) -> Cow<'_, str> {
    match text.char_indices().nth(width) {
        None => Cow::Borrowed(text),
        Some(_) => {
            let end = text
                .char_indices()
                .nth(width.saturating_sub(1))
                .map_or(text.len(), |(at, _)| at);
            Cow::Owned(format!("{}…", &text[..end]))
        }
    }
}

/// A table with aligned columns; numbers are set to the right.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(header: &[&str]) -> Self {
        Self {
            rows: vec![header.iter().map(ToString::to_string).collect()],
        }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    pub(crate) fn print(&self, output: &mut Output) -> Outcome {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let numeric: Vec<bool> = (0..columns)
            .map(|column| {
                let mut cells = self.rows.iter().skip(1).filter_map(|row| row.get(column));
                cells.clone().count() > 0 && cells.all(|cell| is_number(cell))
            })
            .collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let pad = widths[column].saturating_sub(cell.chars().count());
                if numeric[column] {
                    line.extend(std::iter::repeat_n(' ', pad));
                    line.push_str(cell);
                } else {
                    line.push_str(cell);
                    line.extend(std::iter::repeat_n(' ', pad));
                }
                line.push_str("  ");
            }
            output.line(line.trim_end())?;
        }
        Ok(())
    }
}

fn is_number(cell: &str) -> bool {
    cell == "-"
        || cell
            .chars()
            .all(|c| c.is_ascii_digit() || matches!(c, ',' | '.'))
}

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 event`, `2 events`, `1,000 dead letters`.
pub(crate) fn counted(n: u64, one: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{} {one}{plural}", grouped(n))
}

/// An argument as a shell would need it, for the commands we suggest.
pub(crate) fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./:=@%+,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", escaped(text).replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: bus/cli-escapes: escape sequences, control and bidirectional characters are shown, not sent
    #[test]
    fn what_a_terminal_would_act_on_is_escaped() {
        assert_eq!(escaped("plain — ä"), "plain — ä");
        assert_eq!(escaped("\u{1b}[31mred\u{7}"), "\\u{1b}[31mred\\u{7}");
        assert_eq!(escaped("a\nb\tc\r"), "a\\nb\\tc\\r");
        assert_eq!(escaped("\u{9b}2J\u{202e}abc"), "\\u{9b}2J\\u{202e}abc");
    }

    #[test]
    fn texts_are_shortened_at_characters() {
        assert_eq!(shortened("äöü", 3), "äöü");
        assert_eq!(shortened("äöüx", 3), "äö…");
    }

    #[test]
    fn numbers_are_grouped_and_counted() {
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(999), "999");
        assert_eq!(counted(1, "event"), "1 event");
        assert_eq!(counted(2000, "event"), "2,000 events");
    }

    #[test]
    fn suggested_commands_are_quoted_for_a_shell() {
        assert_eq!(shell_word("everbus-demo.db"), "everbus-demo.db");
        assert_eq!(shell_word("12:(unnamed)"), "'12:(unnamed)'");
        assert_eq!(shell_word("it's"), "'it'\\''s'");
    }
}
