//! Writes families as text: the Prometheus format 0.0.4, and OpenMetrics 1.0.

use std::fmt::Write as _;

use super::family::{Distribution, Family, Kind, Labels, Value};

/// The format of a scrape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Prometheus,
    OpenMetrics,
}

impl Format {
    /// The best format that an `Accept` header allows; Prometheus for clients that name neither.
    pub(crate) fn accepted(accept: Option<&str>) -> Self {
        if accept.is_some_and(|accept| accept.contains("application/openmetrics-text")) {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    pub(crate) const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

pub(crate) fn write<'a>(format: Format, families: impl IntoIterator<Item = &'a Family>) -> String {
    let mut text = String::with_capacity(16 * 1024);
    for family in families {
        write_family(&mut text, format, family);
    }
    if format == Format::OpenMetrics {
        text.push_str("# EOF\n");
    }
    text
}

/// Writes one family. Writing to a `String` cannot fail, so the results are ignored.
fn write_family(text: &mut String, format: Format, family: &Family) {
    let name = family.name.as_str();
    let strict = format == Format::OpenMetrics;
    // In OpenMetrics the name of a counter family has no `_total`, but each sample has it. A counter whose name is
    // specified without `_total` keeps its name, and gets the type `unknown`.
    let (base, kind) = match (family.kind, strict) {
        (Kind::Counter, true) => match name.strip_suffix("_total") {
            Some(base) => (base, Kind::Counter.as_str()),
            None => (name, "unknown"),
        },
        (kind, _) => (name, kind.as_str()),
    };
    let _ = writeln!(text, "# HELP {base} {}", escaped(&family.help, strict));
    let _ = writeln!(text, "# TYPE {base} {kind}");
    if let Some(unit) = family.unit.filter(|unit| strict && base.ends_with(unit)) {
        let _ = writeln!(text, "# UNIT {base} {unit}");
    }
    for (labels, value) in &family.series {
        match value {
            Value::Number(value) => {
                text.push_str(name);
                write_labels(text, labels, None);
                let _ = writeln!(text, " {value}");
            }
            Value::Distribution(of) => write_distribution(text, name, labels, of),
        }
    }
}

fn write_distribution(text: &mut String, name: &str, labels: &Labels, of: &Distribution) {
    let mut below = 0;
    for (bound, count) in of.bounds.iter().zip(&of.counts) {
        below += count;
        let _ = write!(text, "{name}_bucket");
        write_labels(text, labels, Some(&bound_text(*bound)));
        let _ = writeln!(text, " {below}");
    }
    let count = of.count();
    let _ = write!(text, "{name}_bucket");
    write_labels(text, labels, Some("+Inf"));
    let _ = writeln!(text, " {count}");
    let _ = write!(text, "{name}_sum");
    write_labels(text, labels, None);
    let _ = writeln!(text, " {}", of.sum);
    let _ = write!(text, "{name}_count");
    write_labels(text, labels, None);
    let _ = writeln!(text, " {count}");
}

/// A bound as text. OpenMetrics requires floating point numbers: `1.0`, not `1`.
fn bound_text(bound: f64) -> String {
    format!("{:?}", (bound * 1e9).round() / 1e9)
}

fn write_labels(text: &mut String, labels: &Labels, bound: Option<&str>) {
    let pairs = labels
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()));
    let pairs = pairs.chain(bound.map(|bound| ("le", bound)));
    let mut open = false;
    for (name, value) in pairs {
        text.push(if open { ',' } else { '{' });
        open = true;
        let _ = write!(text, "{name}=\"{}\"", escaped(value, true));
    }
    if open {
        text.push('}');
    }
}

fn escaped(text: &str, quotes: bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => escaped.push_str("\\\\"),
            '\n' => escaped.push_str("\\n"),
            '"' if quotes => escaped.push_str("\\\""),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn families() -> Vec<Family> {
        let mut total = Family::new("x_seen_total", Kind::Counter, "Seen \\ \"so\" far");
        total.number(&[("stream", "a:\"b\"\n")], 3.0);
        let mut times = Family::new("x_time_seconds", Kind::Histogram, "Time");
        times.unit = Some("seconds");
        let of = Distribution {
            bounds: vec![0.1, 1.0],
            counts: vec![2, 1, 1],
            sum: 4.5,
        };
        times.add(Vec::new(), Value::Distribution(of));
        vec![total, times]
    }

    #[test]
    fn prometheus_text_has_cumulative_buckets_and_escaped_labels() {
        let text = write(Format::Prometheus, &families());
        assert_eq!(
            text,
            "# HELP x_seen_total Seen \\\\ \"so\" far\n\
             # TYPE x_seen_total counter\n\
             x_seen_total{stream=\"a:\\\"b\\\"\\n\"} 3\n\
             # HELP x_time_seconds Time\n\
             # TYPE x_time_seconds histogram\n\
             x_time_seconds_bucket{le=\"0.1\"} 2\n\
             x_time_seconds_bucket{le=\"1.0\"} 3\n\
             x_time_seconds_bucket{le=\"+Inf\"} 4\n\
             x_time_seconds_sum 4.5\n\
             x_time_seconds_count 4\n"
        );
    }

    #[test]
    fn openmetrics_names_the_family_without_its_suffix_and_ends_with_eof() {
        let text = write(Format::OpenMetrics, &families());
        assert!(
            text.contains("# TYPE x_seen counter\nx_seen_total{"),
            "{text}"
        );
        assert!(text.contains("# UNIT x_time_seconds seconds\n"), "{text}");
        assert!(text.ends_with("# EOF\n"));
    }

    /// Names from a specification are the same in every format.
    #[test]
    fn a_counter_without_the_suffix_keeps_its_name() {
        let mut family = Family::new("events_skipped", Kind::Counter, "Skipped");
        family.number(&[], 2.0);
        let text = write(Format::OpenMetrics, [&family]);
        assert!(
            text.contains("# TYPE events_skipped unknown\nevents_skipped 2\n"),
            "{text}"
        );
        let text = write(Format::Prometheus, [&family]);
        assert!(
            text.contains("# TYPE events_skipped counter\nevents_skipped 2\n"),
            "{text}"
        );
    }

    #[test]
    fn a_scraper_that_accepts_openmetrics_gets_it() {
        let accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
        assert_eq!(Format::accepted(Some(accept)), Format::OpenMetrics);
        assert_eq!(Format::accepted(Some("*/*")), Format::Prometheus);
        assert_eq!(Format::accepted(None), Format::Prometheus);
    }
}
