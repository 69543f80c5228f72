//! The nearest known name, for messages about unknown ones.

/// The candidate that is nearest to the given word, if it is near enough.
pub fn nearest<'a>(
    written: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let most = (written.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (strsim::osa_distance(written, candidate), candidate))
        .filter(|(distance, _)| *distance <= most)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found_and_a_far_one_is_not() {
        let known = ["orders.order.placed", "payments.payment.processed"];
        assert_eq!(nearest("orders.order.palced", known), Some(known[0]));
        assert_eq!(nearest("order.placed", known), None);
        assert_eq!(nearest("zebra", known), None);
        assert_eq!(nearest("strem", ["stream", "group"]), Some("stream"));
    }
}
