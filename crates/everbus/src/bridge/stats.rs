//! The counts of a bridge.

use serde::Serialize;

/// The counts of a bridge since it was created.
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
    /// Verdicts that came too late: these events are delivered again, and the target recognises them.
    pub late: u64,
    /// Events of the source that are not settled, when last read. `None` before the first read.
    pub lag: Option<u64>,
    /// Whether the bridge waits because source or target is not available.
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
