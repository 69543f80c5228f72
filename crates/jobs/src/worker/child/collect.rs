//! Collects what a child writes: its reports, its output, the end of its standard error. All of it is bounded.

use super::report::{Report, ReportedActivity, ReportedError};
use crate::events::{Json, Usage};

/// How the output of a task is read from the standard output of its child.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutputKind {
    /// The last line is JSON, or all lines together are. Without any line the output is `null`. Anything else is a
    /// failure.
    #[default]
    Json,
    /// All lines are one text.
    Text,
    /// There is no output: what the child writes is dropped.
    Nothing,
    /// The child writes JSON to the file descriptor whose number is in `EVERBUS_OUTPUT_FD`. From standard output only
    /// reports are read.
    Descriptor,
}

/// The standard output of a child.
#[derive(Debug, Default)]
pub(super) struct Output {
    kind: OutputKind,
    limit: usize,
    /// How many bytes the child has written.
    written: usize,
    /// The lines that are not reports.
    text: Vec<u8>,
    /// Where the current line begins in `text`.
    line: usize,
    pub(super) activity: Option<ReportedActivity>,
    pub(super) usage: Option<Usage>,
    pub(super) error: Option<ReportedError>,
    explicit: Option<Json>,
    /// The bytes from the separate descriptor for the output.
    apart: Vec<u8>,
}

impl Output {
    pub(super) fn new(kind: OutputKind, limit: usize) -> Self {
        Self {
            kind,
            limit,
            ..Self::default()
        }
    }

    /// Adds bytes that were read. Returns true if the limit is exceeded; the bytes are dropped then.
    pub(super) fn add(&mut self, bytes: &[u8]) -> bool {
        self.written = self.written.saturating_add(bytes.len());
        if self.written > self.limit {
            return true;
        }
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.text.extend_from_slice(part);
            if part.ends_with(b"\n") {
                self.end_line();
            }
        }
        false
    }

    /// Like [`add`](Self::add), for bytes from the separate descriptor.
    pub(super) fn add_apart(&mut self, bytes: &[u8]) -> bool {
        self.written = self.written.saturating_add(bytes.len());
        if self.written > self.limit {
            return true;
        }
        self.apart.extend_from_slice(bytes);
        false
    }

    /// Ends the last line, which may have no newline.
    pub(super) fn finish(&mut self) {
        if self.line < self.text.len() {
            self.end_line();
        }
    }

    fn end_line(&mut self) {
        match Report::parse(&self.text[self.line..]) {
            Some(report) => {
                self.text.truncate(self.line);
                match report {
                    Report::Activity(activity) => self.activity = Some(activity),
                    Report::Usage(usage) => self.usage = Some(usage),
                    Report::Error(error) => self.error = Some(error),
                    Report::Output { value } => self.explicit = Some(value),
                }
            }
            None if matches!(self.kind, OutputKind::Nothing | OutputKind::Descriptor) => {
                self.text.truncate(self.line);
            }
            None => self.line = self.text.len(),
        }
    }

    /// The output of the task, or why there is none.
    pub(super) fn value(&mut self) -> Result<Json, String> {
        if let Some(value) = self.explicit.take() {
            return Ok(value);
        }
        let text = self.text.trim_ascii();
        match self.kind {
            OutputKind::Nothing => Ok(Json::null()),
            OutputKind::Descriptor if self.apart.trim_ascii().is_empty() => Ok(Json::null()),
            OutputKind::Descriptor => {
                let text = self.apart.trim_ascii();
                serde_json::from_slice(text).map_err(|error| {
                    let shown = String::from_utf8_lossy(&text[..text.len().min(200)]);
                    let variable = super::descriptor::VARIABLE;
                    format!("what was written to {variable} is not JSON ({error}): {shown}")
                })
            }
            OutputKind::Text => {
                Json::of(&String::from_utf8_lossy(text)).map_err(|error| error.to_string())
            }
            OutputKind::Json if text.is_empty() => Ok(Json::null()),
            OutputKind::Json => {
                let last = text.rsplit(|byte| *byte == b'\n').next().unwrap_or(text);
                let parsed = serde_json::from_slice(last).or_else(|error| {
                    // The output may be one document over several lines.
                    serde_json::from_slice(text).map_err(|_| error)
                });
                parsed.map_err(|error| {
                    let shown = String::from_utf8_lossy(&last[..last.len().min(200)]);
                    format!("the last line of standard output is not JSON ({error}): {shown}")
                })
            }
        }
    }
}

/// The last bytes of standard error.
#[derive(Debug)]
pub(super) struct Tail {
    bytes: Vec<u8>,
    limit: usize,
    cut: bool,
}

impl Tail {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            limit,
            cut: false,
        }
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        // The buffer is cut only at twice the limit: cutting it at each small write would move all bytes each time.
        if self.bytes.len() > 2 * self.limit {
            self.cut();
        }
    }

    fn cut(&mut self) {
        let over = self.bytes.len().saturating_sub(self.limit);
        if over > 0 {
            self.bytes.drain(..over);
            self.cut = true;
        }
    }

    /// The text. Control characters are replaced, except line breaks and tabs: the text is shown on terminals.
    pub(super) fn text(&mut self) -> String {
        self.cut();
        let text = String::from_utf8_lossy(&self.bytes);
        let clean = text.trim().chars().map(|c| match c {
            '\n' | '\t' => c,
            c if c.is_control() => '\u{fffd}',
            c => c,
        });
        let clean: String = clean.collect();
        if self.cut {
            format!("…{clean}")
        } else {
            clean
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(kind: OutputKind, parts: &[&str]) -> Output {
        let mut output = Output::new(kind, 1000);
        for part in parts {
            assert!(!output.add(part.as_bytes()));
        }
        output.finish();
        output
    }

    #[test]
    fn the_last_line_is_the_output() {
        let mut several = output(
            OutputKind::Json,
            &["work", "ing\n{\"a\"", ":1}\n{\"b\":2}", "\n\n"],
        );
        assert_eq!(several.value().unwrap().get(), "{\"b\":2}");
        assert_eq!(output(OutputKind::Json, &["7"]).value().unwrap().get(), "7");
        assert_eq!(output(OutputKind::Json, &[]).value().unwrap(), Json::null());
        let mut pretty = output(OutputKind::Json, &["{\n  \"a\": 1\n}\n"]);
        assert_eq!(pretty.value().unwrap().get(), "{\n  \"a\": 1\n}");
        let text = output(OutputKind::Json, &["fine\nall done\n"]).value();
        let text = text.unwrap_err();
        assert!(
            text.contains("not JSON") && text.contains("all done"),
            "{text}"
        );
    }

    #[test]
    fn other_kinds_of_output() {
        let mut text = output(OutputKind::Text, &["fine\nall done\n"]);
        assert_eq!(text.value().unwrap().get(), "\"fine\\nall done\"");
        let mut nothing = output(OutputKind::Nothing, &["fine\n", "all done"]);
        assert!(nothing.text.is_empty());
        assert_eq!(nothing.value().unwrap(), Json::null());
    }

    #[test]
    fn reports_are_not_output() {
        let mut output = output(
            OutputKind::Json,
            &[
                "{\"a\":1}\n{\"everbus\":\"activity\",\"type\":\"waiting\"}\n",
                "{\"everbus\":\"usage\",\"inputTokens\":3}\n",
            ],
        );
        assert_eq!(output.activity.as_ref().unwrap().kind, "waiting");
        assert_eq!(output.usage.unwrap().input_tokens, 3);
        assert_eq!(output.value().unwrap().get(), "{\"a\":1}");
        output.add(b"{\"everbus\":\"output\",\"value\":2}\n");
        assert_eq!(output.value().unwrap().get(), "2");
    }

    #[test]
    fn output_beyond_the_limit_is_dropped() {
        let mut output = Output::new(OutputKind::Json, 10);
        assert!(!output.add(b"0123456789"));
        assert!(output.add(b"x"));
        assert!(output.add(&[b'x'; 1000]));
        assert_eq!(output.text.len(), 10);
    }

    #[test]
    fn the_tail_keeps_the_last_bytes() {
        let mut tail = Tail::new(8);
        for _ in 0..1000 {
            tail.add(b"more and more ");
        }
        tail.add(b"the end\x1b[31m\n");
        assert!(tail.bytes.len() <= 24);
        assert_eq!(tail.text(), "…nd\u{fffd}[31m");
        let mut short = Tail::new(8);
        short.add(b"fine\n");
        assert_eq!(short.text(), "fine");
    }
}
