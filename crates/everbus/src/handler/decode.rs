//! What becomes of events that cannot be read.

/// What becomes of an event that its handler cannot read: a payload that is not what the handler takes,
/// a version that no upcast leads from, a payload that does not meet the schema.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decode {
    /// It goes to the dead letters at once, after one attempt: reading the same bytes again gives the same
    /// error.
    #[default]
    DeadLetter,
    /// It is tried again by the retry policy. For deployments in which another process may be able to read
    /// it, for example while a new version is being rolled out.
    Retry,
}

impl Decode {
    /// The name, as it is written in configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DeadLetter => "dead_letter",
            Self::Retry => "retry",
        }
    }
}
