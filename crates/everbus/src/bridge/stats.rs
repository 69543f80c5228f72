//! The counts of a bridge.

use serde::Serialize;

/// What a bridge has done since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BridgeStats {
    /// Events that the target stored.
    pub moved: u64,
    /// Events that the target had already.
    pub duplicates: u64,
    /// Events that were not carried because they came from the target.
    pub returned: u64,
    /// Events that the target refused; they are dead letters of the bridge's group.
    pub refused: u64,
    /// Verdicts that came too late: these events come again, and the target knows them.
    pub late: u64,
    /// Events of the source that are not settled, at the last look; `None` before the first one.
    pub lag: Option<u64>,
    /// Whether the bridge waits because an end is away.
    pub waiting: bool,
    /// The last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

impl BridgeStats {
    pub(super) fn went_wrong(&mut self, error: &impl std::fmt::Display) {
        self.last_error = Some(error.to_string());
    }
}
