//! The options of `everbus dlq`.

use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use everbus_core::{DeadLetterKey, GroupName, Pattern, Timestamp};

use crate::values::{
    parse_count, parse_cursor, parse_group, parse_offset, parse_page, parse_pattern,
    parse_whole_rate,
};
use crate::when;

const EDIT_HELP: &str = "\
Without --payload, the payload is opened in the editor that VISUAL or EDITOR names: a program and \
its arguments, separated by spaces. If it is left as it was, nothing is sent.

The corrected event is a new event for the group that failed, and for no other group. Its metadata \
edit_of has the id of the original; `everbus dlq show` of the original shows the id of the corrected event.";

#[derive(Debug, Subcommand)]
pub(crate) enum DlqCommand {
    /// List dead letters, newest event first
    List(DlqListArgs),
    /// Show everything known about one: payload, attempts, errors, where they happened
    Show(DlqShowArgs),
    /// Send dead letters back to the group that failed, oldest first
    Retry(DlqRetryArgs),
    /// Send one back with another payload; the original is kept, each names the other
    #[command(after_help = EDIT_HELP)]
    Edit(DlqEditArgs),
    /// Delete old dead letters for good
    Purge(DlqPurgeArgs),
}

#[derive(Debug, Default, clap::Args)]
pub(crate) struct DlqFilterArgs {
    /// Only of types that match
    #[arg(long = "type", value_name = "PATTERN", value_parser = parse_pattern)]
    pub(crate) pattern: Option<Pattern>,

    /// Only of this stream: MESSAGES, orders:order-placed, orders
    #[arg(long, value_name = "NAME", conflicts_with = "pattern")]
    pub(crate) stream: Option<String>,

    /// Only of this group; (unnamed) is the unnamed one
    #[arg(long, value_name = "NAME", value_parser = parse_group)]
    pub(crate) group: Option<GroupName>,

    /// Only events received at or after this time
    #[arg(long, value_name = "TIME", value_parser = when::parse_past, allow_hyphen_values = true)]
    pub(crate) since: Option<Timestamp>,

    /// Only events received at or before this time
    #[arg(long, value_name = "TIME", value_parser = when::parse, allow_hyphen_values = true)]
    pub(crate) until: Option<Timestamp>,

    /// Only of this tenant
    #[arg(long, value_name = "NAME")]
    pub(crate) tenant: Option<String>,

    /// Only those that failed last in this handler
    #[arg(long, value_name = "NAME")]
    pub(crate) handler: Option<String>,

    /// Only those whose last error contains this text
    #[arg(long, value_name = "TEXT")]
    pub(crate) error: Option<String>,
}

impl DlqFilterArgs {
    /// Whether any filter is set.
    pub(crate) fn chooses(&self) -> bool {
        let Self {
            pattern,
            stream,
            group,
            since,
            until,
            tenant,
            handler,
            error,
        } = self;
        pattern.is_some()
            || stream.is_some()
            || group.is_some()
            || since.is_some()
            || until.is_some()
            || tenant.is_some()
            || handler.is_some()
            || error.is_some()
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct DlqListArgs {
    #[command(flatten)]
    pub(crate) filter: DlqFilterArgs,

    /// At most this many, up to 10000
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100,
        value_parser = parse_page,
        allow_negative_numbers = true
    )]
    pub(crate) limit: usize,

    /// Leave out this many first
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = parse_offset,
        allow_negative_numbers = true
    )]
    pub(crate) offset: usize,

    /// Begin after this one: the cursor printed below a page that is not the last
    #[arg(long, value_name = "CURSOR", value_parser = parse_cursor)]
    pub(crate) after: Option<DeadLetterKey>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DlqShowArgs {
    /// The id of the event
    pub(crate) id: String,

    /// Only of this group
    #[arg(long, value_name = "NAME", value_parser = parse_group)]
    pub(crate) group: Option<GroupName>,

    /// The source the event was published with, if its id is not a UUID
    #[arg(long)]
    pub(crate) source: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DlqRetryArgs {
    /// The ids of the events
    #[arg(value_name = "ID", conflicts_with = "all")]
    pub(crate) ids: Vec<String>,

    /// All of them
    #[arg(long)]
    pub(crate) all: bool,

    #[command(flatten)]
    pub(crate) filter: DlqFilterArgs,

    /// The source the events were published with, if their ids are not UUIDs
    #[arg(long)]
    pub(crate) source: Option<String>,

    /// At most this many, the oldest first
    #[arg(
        long,
        value_name = "N",
        value_parser = parse_count,
        allow_negative_numbers = true,
        conflicts_with = "ids"
    )]
    pub(crate) limit: Option<u64>,

    /// At most this many per second; events that fail again meanwhile are not retried again
    #[arg(
        long,
        value_name = "N",
        value_parser = parse_whole_rate,
        allow_negative_numbers = true,
        conflicts_with = "ids"
    )]
    pub(crate) rate: Option<u32>,

    /// Only say how many there are, of which groups, types and errors
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DlqEditArgs {
    /// The id of the event
    pub(crate) id: String,

    /// The group that gave up on it, if several did
    #[arg(long, value_name = "NAME", value_parser = parse_group)]
    pub(crate) group: Option<GroupName>,

    /// The tenant, if several have an event with this id
    #[arg(long, value_name = "NAME")]
    pub(crate) tenant: Option<String>,

    /// The source the event was published with, if its id is not a UUID
    #[arg(long)]
    pub(crate) source: Option<String>,

    /// The corrected payload: JSON, - for standard input, @FILE for a file. Without it an editor
    /// opens
    #[arg(long, value_name = "JSON", allow_hyphen_values = true)]
    pub(crate) payload: Option<String>,

    /// Only check the payload and show what would change
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DlqPurgeArgs {
    /// Those older than this many days
    #[arg(
        long,
        value_name = "DAYS",
        value_parser = when::parse_days,
        allow_hyphen_values = true
    )]
    pub(crate) older_than: Duration,

    /// By when the event was created or by when it died
    #[arg(long, value_enum, default_value = "created")]
    pub(crate) by: PurgeBy,

    #[command(flatten)]
    pub(crate) filter: DlqFilterArgs,

    /// Only say how many there are
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PurgeBy {
    Created,
    Died,
}
