//! Small parts of pages: times, ids, states, JSON, empty lists.

use everbus::{Clock as _, Event, EventState, Recorded, SystemClock, Timestamp};
use maud::{Markup, html};
use serde_json::Value;

use super::icons;

/// Longer payloads, in bytes, are cut on a page. The API returns the whole payload.
const LONGEST_SHOWN: usize = 200_000;

/// The age of a time, with the exact time on hover. A script keeps it up to date.
pub(super) fn time(at: Timestamp) -> Markup {
    let text = at.to_string();
    html! { time datetime=(text) title=(text) data-ago { (ago(at)) } }
}

fn ago(at: Timestamp) -> String {
    let now = SystemClock.now();
    if at > now {
        return format!("in {}", span_text(at.since(now).as_secs()));
    }
    match now.since(at).as_secs() {
        0..=1 => "just now".to_owned(),
        seconds => format!("{} ago", span_text(seconds)),
    }
}

fn span_text(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// A duration in milliseconds, shown in a readable unit.
pub(super) fn millis(millis: u64) -> String {
    match millis {
        0 => "0".to_owned(),
        1..1000 => format!("{millis} ms"),
        1000..60_000 => format!("{:.1} s", millis as f64 / 1000.0),
        _ => span_text(millis / 1000),
    }
}

/// How old the oldest waiting event is; a dash if none waits.
pub(super) fn oldest(of_millis: u64) -> String {
    match of_millis {
        0 => "–".to_owned(),
        age => millis(age),
    }
}

/// A latency in milliseconds. Short ones have a decimal.
pub(super) fn latency(of_millis: f64) -> String {
    match of_millis < 10.0 {
        true => format!("{of_millis:.1} ms"),
        false => millis(of_millis.round() as u64),
    }
}

/// A number with thin spaces between groups of three digits.
pub(super) fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + 4);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// A number and a noun, which gets an `s` unless the number is one.
pub(super) fn count(n: u64, noun: &str) -> String {
    let ending = if n == 1 { "" } else { "s" };
    format!("{} {noun}{ending}", number(n))
}

/// The last characters of an id: ids of the same time share their first characters.
pub(super) fn short_id(id: &str) -> String {
    let shown = id.chars().count();
    if shown <= 14 {
        return id.to_owned();
    }
    let tail: String = id.chars().skip(shown - 12).collect();
    format!("…{tail}")
}

pub(super) fn event_link(record: &Recorded) -> Markup {
    let id = record.event.id().to_string();
    html! { a.mono href={ "/events/" (id) } title=(id) { (short_id(&record.event.display_id())) } }
}

/// The first characters of a payload, for a line of a list.
pub(super) fn beginning(event: &Event) -> String {
    const CHARS: usize = 160;
    let bytes = event.payload();
    let head = &bytes[..bytes.len().min(CHARS * 4)];
    let text = String::from_utf8_lossy(head);
    let mut shown: String = text
        .chars()
        .take(CHARS)
        .filter(|c| !c.is_control())
        .collect();
    if shown.len() < bytes.len() {
        shown.push('…');
    }
    shown
}

/// The part of a payload that a search has found, for a line of a list, with the found text marked.
pub(super) fn found(event: &Event, wanted: &str) -> Markup {
    const BEFORE: usize = 40;
    const AFTER: usize = 120;
    let text = String::from_utf8_lossy(event.payload());
    let same = |part: &[u8]| part.eq_ignore_ascii_case(wanted.as_bytes());
    let at = match wanted.is_empty() {
        true => None,
        false => text.as_bytes().windows(wanted.len()).position(same),
    };
    let Some(at) = at else {
        return html! { (beginning(event)) };
    };
    let (before, rest) = text.split_at(at);
    let (hit, after) = rest.split_at(wanted.len());
    let line = |text: &mut dyn Iterator<Item = char>| text.filter(|c| !c.is_control()).collect();
    let from = before.char_indices().rev().nth(BEFORE - 1);
    let from = from.map_or(0, |(from, _)| from);
    let before: String = line(&mut before[from..].chars());
    let after: String = line(&mut after.chars().take(AFTER));
    html! { @if from > 0 { "…" } (before) mark { (hit) } (after) }
}

pub(super) fn state(state: EventState) -> Markup {
    let (class, text) = match state {
        EventState::Pending => ("badge", "pending"),
        EventState::Processing => ("badge info", "processing"),
        EventState::Done => ("badge good", "done"),
        EventState::Dlq => ("badge bad", "dead letter"),
    };
    html! { span class=(class) { (text) } }
}

/// The text in place of an empty list, with a command that fills it.
pub(super) fn empty(title: &str, text: &str, command: Option<&str>) -> Markup {
    html! {
        div.empty {
            (icons::events())
            h2 { (title) }
            p { (text) }
            @if let Some(command) = command { pre { (command) } }
        }
    }
}

/// The payload of an event: coloured JSON, text, or the number of bytes.
pub(super) fn payload(record: &Recorded) -> Markup {
    let bytes = record.event.payload();
    if bytes.is_empty() {
        return html! { p.faint { "The event has no payload." } };
    }
    let Ok(text) = std::str::from_utf8(bytes) else {
        return html! { p.faint { (number(bytes.len() as u64)) " bytes of " (record.event.content_type()) } };
    };
    let json = record
        .event
        .is_json()
        .then(|| serde_json::from_str(text).ok());
    match json.flatten() {
        Some(json) if bytes.len() <= LONGEST_SHOWN => {
            html! { pre.code tabindex="0" { (coloured(&json, 0)) } }
        }
        _ => html! { pre.code.wrapped tabindex="0" { (cut(text)) } },
    }
}

fn cut(text: &str) -> String {
    if text.len() <= LONGEST_SHOWN {
        return text.to_owned();
    }
    let mut end = LONGEST_SHOWN;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}\n… {} more bytes", &text[..end], text.len() - end)
}

/// Coloured and indented JSON.
pub(super) fn json(value: &Value) -> Markup {
    html! { pre.code tabindex="0" { (coloured(value, 0)) } }
}

/// Deeper values are shown on one line, because each level adds an indentation.
const DEEPEST: usize = 40;

fn coloured(value: &Value, depth: usize) -> Markup {
    let inner = "  ".repeat(depth + 1);
    let outer = "  ".repeat(depth);
    if depth > DEEPEST {
        return html! { (value.to_string()) };
    }
    match value {
        Value::Object(fields) if !fields.is_empty() => html! {
            "{\n"
            @for (n, (name, value)) in fields.iter().enumerate() {
                (inner) span.tok-key { (Value::from(name.as_str()).to_string()) } ": " (coloured(value, depth + 1))
                @if n + 1 < fields.len() { "," } "\n"
            }
            (outer) "}"
        },
        Value::Array(items) if !items.is_empty() => html! {
            "[\n"
            @for (n, value) in items.iter().enumerate() {
                (inner) (coloured(value, depth + 1))
                @if n + 1 < items.len() { "," } "\n"
            }
            (outer) "]"
        },
        Value::String(_) => html! { span.tok-str { (value.to_string()) } },
        Value::Number(_) => html! { span.tok-num { (value.to_string()) } },
        _ => html! { span.tok-lit { (value.to_string()) } },
    }
}

/// A sparkline: the course of a number, without axes.
pub(super) fn spark(values: &[u64]) -> Markup {
    let most = values.iter().copied().max().unwrap_or(0).max(1);
    let last = values.len().saturating_sub(1).max(1);
    let points: Vec<String> = values
        .iter()
        .enumerate()
        .map(|(n, value)| {
            let x = n as f64 * 100.0 / last as f64;
            let y = 23.0 - *value as f64 * 22.0 / most as f64;
            format!("{x:.1},{y:.1}")
        })
        .collect();
    html! {
        svg.spark viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true" {
            polyline.line points=(points.join(" ")) {}
        }
    }
}

/// Keys and values in two columns.
pub(super) fn facts(facts: Vec<(&str, Markup)>) -> Markup {
    html! {
        dl.facts {
            @for (name, value) in facts {
                dt { (name) }
                dd { (value) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_are_readable() {
        assert_eq!(number(1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!(number(12), "12");
        assert_eq!(count(1, "attempt"), "1 attempt");
        assert_eq!(count(1_200, "failure"), "1\u{202f}200 failures");
        assert_eq!(millis(0), "0");
        assert_eq!(millis(999), "999 ms");
        let latencies = [0.0, 0.75, 238.75, 28_726.32].map(latency);
        assert_eq!(latencies, ["0.0 ms", "0.8 ms", "239 ms", "28.7 s"]);
        assert_eq!(millis(90_000), "1 min");
        assert_eq!(short_id("order-1"), "order-1");
    }

    #[test]
    fn json_is_escaped() {
        let shown = coloured(&serde_json::json!({ "<b>": "</script>" }), 0).into_string();
        assert!(
            !shown.contains("<b>") && !shown.contains("</script>"),
            "{shown}"
        );
    }
}
