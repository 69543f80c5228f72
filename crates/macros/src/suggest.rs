//! The known name that a misspelt one was probably meant to be.

/// The nearest of the known names, if it is at most a third of the name (or two letters) away.
pub(crate) fn nearest<S: AsRef<str>>(name: &str, known: impl IntoIterator<Item = S>) -> Option<S> {
    let tolerated = (name.chars().count() / 3).clamp(1, 2);
    known
        .into_iter()
        .map(|candidate| (distance(name, candidate.as_ref()), candidate))
        .filter(|(distance, _)| *distance <= tolerated)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// How many letters must be inserted, removed or replaced (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
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

    #[test]
    fn the_distance_counts_single_letters() {
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", "abc"), 0);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
