//! Classifies a publish error for the relay: caused by the row (counts as an attempt), by the broker (does
//! not count), or unclear. What is unclear is found out by trying other rows: see `publish`.

use everbus_core::{Class, Code, Error};

/// Whose fault it is that a row was not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// The row's: its event is wrong, and will be tomorrow.
    Row,
    /// Its stream has no room: others may go on.
    Full,
    /// The broker cannot be reached, or cannot take anything. Never an attempt.
    Broker,
    /// It could be either.
    Unclear,
}

pub(super) fn blame(error: &Error) -> Blame {
    match (error.class(), error.code()) {
        (Class::Passing, Code::Backpressure) => Blame::Full,
        (Class::Passing | Class::Unknown | Class::Final, _) => Blame::Broker,
        // A bug may lie in the row, or be met by every row. A lease is no answer to a publish.
        (_, Code::Internal | Code::LeaseLost) => Blame::Unclear,
        (Class::Caller | Class::Conflict, _) => Blame::Row,
        _ => Blame::Unclear,
    }
}
