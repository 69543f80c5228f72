//! The scripts that run on the server. Each runs as one atomic step.

use std::sync::LazyLock;

use redis::Script;

macro_rules! scripts {
    ($($(#[$doc:meta])* $name:ident = $file:literal;)*) => {
        $(
            $(#[$doc])*
            pub(crate) static $name: LazyLock<Script> = LazyLock::new(|| {
                Script::new(concat!(include_str!("scripts/common.lua"), include_str!($file)))
            });
        )*
    };
}

scripts! {
    /// Appends a batch.
    APPEND = "scripts/append.lua";
    /// Hands out events.
    CLAIM = "scripts/claim.lua";
    /// Applies verdicts.
    SETTLE = "scripts/settle.lua";
    /// Extends leases.
    EXTEND = "scripts/extend.lua";
    /// Stores a group and begins its streams.
    DECLARE = "scripts/declare.lua";
    /// Removes a group.
    REMOVE = "scripts/remove.lua";
    /// Reads the progress of a group.
    INSPECT = "scripts/inspect.lua";
    /// The last ids of streams.
    LAST = "scripts/last.lua";
    /// Reads an id that is smaller than the ids of all later entries.
    ENDS = "scripts/ends.lua";
    /// Sets the dialects of streams.
    REGISTER = "scripts/register.lua";
    /// Renews the heartbeat of an engine.
    ALIVE = "scripts/alive.lua";
    /// Takes over messages that other programs read and did not finish.
    SWEEP = "scripts/sweep.lua";
    /// Removes events that every group has finished.
    TRIM = "scripts/trim.lua";
    /// Counts events that were removed before groups had read them.
    MISSED = "scripts/missed.lua";
    /// Removes retried dead letters after a time.
    TIDY = "scripts/tidy.lua";
    /// Skips the oldest events of a group.
    DROP = "scripts/drop.lua";
    /// Hands out events that no process handles.
    ORPHANS = "scripts/orphans.lua";
    /// A page of dead letters.
    LETTERS = "scripts/letters.lua";
    /// Redelivers events to a group.
    REVIVE = "scripts/revive.lua";
    /// Retries a dead letter from its own copy of the event.
    RESTORE = "scripts/restore.lua";
    /// Replaces a dead letter by a corrected event.
    REPLACE = "scripts/replace.lua";
    /// Removes dead letters.
    PURGE = "scripts/purge.lua";
    /// Stores a value by key.
    KV_PUT = "scripts/kv_put.lua";
    /// Removes a value by key.
    KV_DELETE = "scripts/kv_delete.lua";
}
