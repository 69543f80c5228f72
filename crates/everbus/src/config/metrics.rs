//! The section `metrics`: which names `/metrics` adds to its own.

use super::section::{Reader, Section};

pub(super) const KEYS: &[&str] = &["compat"];

/// The names of another system, for dashboards and alerts that exist already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Compat {
    /// `omni_events_total` and the other names of *omni*.
    Omni,
    /// `consumer_lag_events`, `dlq_depth` and the other names of *framework*.
    Framework,
}

const COMPAT: &[(&str, Compat)] = &[("omni", Compat::Omni), ("framework", Compat::Framework)];

impl Compat {
    /// The names, as they are written in the file.
    pub const NAMES: [&str; 2] = ["omni", "framework"];

    /// The word in the file.
    pub fn parse(word: &str) -> Option<Self> {
        let found = COMPAT.iter().find(|(name, _)| *name == word);
        found.map(|(_, compat)| *compat)
    }
}

pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Compat> {
    reader.choice(section.get("compat"), COMPAT)
}
