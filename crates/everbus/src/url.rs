//! The scheme of a URL, as opposed to a path.

/// Splits `scheme:rest`. A single letter before the colon is a drive, and a text with a slash before the colon is a
/// path: both have no scheme.
pub(crate) fn split_scheme(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once(':')?;
    let is_scheme = scheme.len() > 1
        && scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-'));
    (is_scheme || scheme.is_empty()).then_some((scheme, rest))
}
