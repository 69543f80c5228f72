//! The section `telemetry`: where traces go.

use super::section::{Reader, Section};

pub(super) const KEYS: &[&str] = &["otlp"];
pub(super) const OTLP_KEYS: &[&str] = &["endpoint"];

/// The endpoint of the OTLP receiver, without `/v1/traces`.
pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<String> {
    let otlp = reader.section(section.get("otlp"), OTLP_KEYS)?;
    let hint = "such as http://localhost:4318";
    let text = reader.text(otlp.get("endpoint"), hint)?;
    if !text.value.starts_with("http://") && !text.value.starts_with("https://") {
        reader.refuse(&text, "which is not an HTTP address", hint);
        return None;
    }
    Some(text.value)
}
