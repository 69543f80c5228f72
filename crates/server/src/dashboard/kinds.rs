//! Dead letters by kind of error: errors that differ only in numbers and ids are one kind.

use std::collections::HashMap;
use std::time::Duration;

use everbus::{Code, DeadLetterFilter, DeadLetterTally, GroupName, Result};
use tokio::time::timeout;

use crate::state::AppState;

/// How long a page waits for the counts. Grouping a million dead letters takes longer.
const PATIENCE: Duration = Duration::from_millis(200);
/// Of more different texts, the most frequent ones are counted.
const MOST_TEXTS: usize = 2_000;
/// Stands for a number or an id in the text of a kind.
const VARIABLE: &str = "…";

/// Dead letters of one group and type with the same kind of error.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) group: GroupName,
    pub(super) event_type: String,
    /// The error; with [`VARIABLE`] in place of numbers and ids if several errors are of this kind.
    pub(super) error: String,
    /// A text that every error of this kind contains.
    pub(super) search: String,
    pub(super) count: u64,
}

/// Returns the most frequent kinds of errors; none on an engine that cannot count them. `None` if the counts did not
/// come in time.
pub(super) async fn kinds(
    state: &AppState,
    filter: DeadLetterFilter,
    most: usize,
) -> Result<Option<Vec<Kind>>> {
    let letters = match state.bus().engine().dead_letters() {
        Err(error) if error.code() == Code::Unsupported => return Ok(Some(Vec::new())),
        letters => letters?,
    };
    match timeout(PATIENCE, letters.tally(filter, MOST_TEXTS)).await {
        Err(_) => Ok(None),
        Ok(Err(error)) if error.code() == Code::Unsupported => Ok(Some(Vec::new())),
        Ok(tallies) => Ok(Some(merged(tallies?, most))),
    }
}

/// Merges the counts of errors of the same kind.
fn merged(tallies: Vec<DeadLetterTally>, most: usize) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = Vec::new();
    let mut known: HashMap<(GroupName, String, String), usize> = HashMap::new();
    for tally in tallies {
        let template = template(&tally.error);
        let key = (
            tally.group.clone(),
            tally.event_type.clone(),
            template.clone(),
        );
        match known.get(&key) {
            Some(index) => {
                let kind = &mut kinds[*index];
                kind.search = longest_part(&template);
                kind.error = template;
                kind.count += tally.count;
            }
            None => {
                known.insert(key, kinds.len());
                kinds.push(Kind {
                    group: tally.group,
                    event_type: tally.event_type,
                    search: tally.error.clone(),
                    error: tally.error,
                    count: tally.count,
                });
            }
        }
    }
    // The sort is stable: kinds with the same count keep the order of the engine.
    kinds.sort_by_key(|kind| std::cmp::Reverse(kind.count));
    kinds.truncate(most);
    kinds
}

/// The text of an error without its numbers and ids. Short numbers stay: they are often status codes.
fn template(error: &str) -> String {
    let mut text = String::with_capacity(error.len());
    let mut rest = error;
    while !rest.is_empty() {
        let is_word = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        text.push_str(if is_variable(word) { VARIABLE } else { word });
        let next = after.find(is_word).unwrap_or(after.len());
        text.push_str(&after[..next]);
        rest = &after[next..];
    }
    text
}

/// Whether a word looks like a number of four digits or more, or like an id.
fn is_variable(word: &str) -> bool {
    let has_digit = word.bytes().any(|b| b.is_ascii_digit());
    let is_number = word.bytes().all(|b| b.is_ascii_digit());
    has_digit && (word.len() >= 8 || (is_number && word.len() >= 4))
}

/// The longest part of a template without variables and line ends.
fn longest_part(template: &str) -> String {
    let parts = template.split(['…', '\n', '\r']);
    let longest = parts.map(str::trim).max_by_key(|part| part.len());
    longest.unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(group: &str, error: &str, count: u64) -> DeadLetterTally {
        DeadLetterTally {
            group: group.parse().unwrap(),
            event_type: "order.placed".to_owned(),
            error: error.to_owned(),
            count,
        }
    }

    #[test]
    fn numbers_and_ids_are_variable_and_status_codes_are_not() {
        for (error, expected) in [
            (
                "the card for order 59352 has expired",
                "the card for order … has expired",
            ),
            (
                "no parcel 0191f068-adbe-748e-b36b-ad3521e4e27c.",
                "no parcel ….",
            ),
            ("answered 503: try order-1234567", "answered 503: try …"),
            ("mailbox full", "mailbox full"),
            ("", ""),
        ] {
            assert_eq!(template(error), expected);
        }
    }

    #[test]
    fn errors_that_differ_in_a_number_are_one_kind() {
        let tallies = vec![
            tally("mail", "mailbox 12345 is full", 3),
            tally("pay", "card of order 1001 expired", 2),
            tally("pay", "card of order 1002 expired", 2),
            tally("ship", "card of order 1003 expired", 1),
        ];
        let found = merged(tallies, 2);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].count, &*found[0].error),
            (4, "card of order … expired")
        );
        assert_eq!(found[0].search, "card of order");
        // One error alone is shown as it is.
        assert_eq!(
            (found[1].count, &*found[1].error),
            (3, "mailbox 12345 is full")
        );
        assert_eq!(found[1].search, found[1].error);
    }
}
