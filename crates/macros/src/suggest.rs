//! Suggests the known name that is most similar to a misspelt one.

/// The nearest of the known names, if it is at most a third of the name (or two letters) away.
pub(crate) fn nearest<S: AsRef<str>>(name: &str, known: impl IntoIterator<Item = S>) -> Option<S> {
    let tolerated = (name.chars().count() / 3).clamp(1, 2);
    known
        .into_iter()
        .map(|candidate| (strsim::levenshtein(name, candidate.as_ref()), candidate))
        .filter(|(distance, _)| *distance <= tolerated)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_finds_its_name_and_something_else_finds_none() {
        let known = ["type", "version", "key", "tenant", "entity"];
        assert_eq!(nearest("verson", known), Some("version"));
        assert_eq!(nearest("typ", known), Some("type"));
        assert_eq!(nearest("keys", known), Some("key"));
        assert_eq!(nearest("tennat", known), Some("tenant"));
        assert_eq!(nearest("schema", known), None);
        assert_eq!(nearest("", known), None);
    }
}
