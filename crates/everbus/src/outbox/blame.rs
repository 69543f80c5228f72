//! Classifies a publish error for the relay: caused by the row (counts as an attempt), by the broker (does
//! not count), or unclear. For an unclear error the relay tries other rows: see `publish`.

use everbus_core::{Class, Code, Error};

/// What caused a publish error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// The row: its event is invalid and will stay so.
    Row,
    /// Its stream is full: events of other streams may continue.
    Full,
    /// The broker cannot be reached, or accepts nothing. Never counts as an attempt.
    Broker,
    /// The row or the broker.
    Unclear,
}

pub(super) fn blame(error: &Error) -> Blame {
    match (error.class(), error.code()) {
        (Class::Passing, Code::Backpressure) => Blame::Full,
        (Class::Passing | Class::Unknown | Class::Final, _) => Blame::Broker,
        // A bug may be triggered by the row, or by every row. A publish should never report a lost lease.
        (_, Code::Internal | Code::LeaseLost) => Blame::Unclear,
        (Class::Caller | Class::Conflict, _) => Blame::Row,
        _ => Blame::Unclear,
    }
}
