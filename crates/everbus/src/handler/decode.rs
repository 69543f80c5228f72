//! The setting for events that cannot be decoded.

/// What happens to an event that its handler cannot decode: a payload of another form, a version without an
/// upcast, or a payload that does not match the schema.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decode {
    /// The event goes to the dead letters at once, after one attempt: decoding the same bytes again gives
    /// the same error.
    #[default]
    DeadLetter,
    /// The event is retried by the retry policy. For deployments in which another process may be able to
    /// decode it, for example during the rollout of a new version.
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
