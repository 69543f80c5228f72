//! The command line: commands, options and their help.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use everbus::Dialect;
use everbus_core::{Entity, GroupName, Pattern, StartFrom};

use crate::commands::audit::AuditCommand;
use crate::commands::dlq::DlqCommand;
use crate::commands::payloads::{PayloadsCommand, StageArgs};
use crate::values::{
    parse_bytes, parse_count, parse_dialect, parse_entity, parse_group, parse_own_group,
    parse_pair, parse_pattern, parse_rate,
};
use crate::when;

const EXIT_CODES: &str = "\
Exit codes:
  0    it worked
  1    the operation failed, or `check` or `audit verify` found problems
  2    the command line, the configuration file, or the data given with it, is wrong
  3    there is no such file, event, dead letter or group
  4    refused for now: server not reached, in use or locked, disk full, or nothing can be written
  130  interrupted with Ctrl-C before the work was done

Every command needs to write to the file and its directory, those that only look too: SQLite \
keeps its -wal and -shm files there, and a program that opens the file recovers what a dead one \
left.

Environment: EVERBUS_DB and EVERBUS_BROKER choose the file or engine, EVERBUS_STORE the store \
beside it, EVERBUS_CONFIG the \
configuration file that does if none is set, EVERBUS_MAX_PAYLOAD the largest payload, \
EVERBUS_LOG what is logged (for example EVERBUS_LOG=everbus=debug), EVERBUS_ACTOR who does it, \
for the audit trail. A flag is stronger than any of them.";

const CHECK_HELP: &str = "\
`everbus check` verifies the file that holds the events. `everbus check --config everbus.yaml` \
reads the configuration instead, reports everything that is wrong with it, each with line and \
column, shows which event types are in which stream, and warns if this build has no engine for its \
broker. Its variables must be set as for \
the program that will use it. The command touches no event and connects to no server.

The objects of large events are checked with the file: whether each exists and has its length, \
and with --deep also its SHA-256. The command looks for them beside the file. If the configuration \
names other places (overflow.url, overflow.also_read), set EVERBUS_CONFIG to it.";

/// Reliable events in a file: publish, follow, and repair what failed.
#[derive(Debug, Parser)]
#[command(
    name = "everbus",
    version,
    after_help = EXIT_CODES,
    max_term_width = 100,
    next_help_heading = "Options of every command"
)]
pub(crate) struct Args {
    /// The file that holds the events [env: EVERBUS_DB] [default: everbus.db]
    // The environment is read in `open`, so that a flag beats either variable.
    #[arg(long, global = true, value_name = "FILE", conflicts_with = "broker")]
    pub(crate) db: Option<PathBuf>,

    /// The engine, as a URL: sqlite:FILE, postgres://HOST/DATABASE, nats://HOST, redis://HOST, kafka://HOST
    /// [env: EVERBUS_BROKER]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) broker: Option<String>,

    /// The store beside a broker that moves events and cannot keep them, as a URL: sqlite:FILE
    /// [env: EVERBUS_STORE]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) store: Option<String>,

    /// The configuration file, usually everbus.yaml. Its broker and its store are used unless --db or
    /// --broker names another; its other settings always apply [env: EVERBUS_CONFIG]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Text for people or JSON for machines
    #[arg(
        short,
        long,
        global = true,
        value_enum,
        value_name = "FORMAT",
        default_value = "text"
    )]
    pub(crate) output: OutputFormat,

    /// The largest payload that is published, in bytes; 512k and 8m are understood [default: 64m, or 1m
    /// where large payloads have no object store to go to]
    #[arg(
        long,
        global = true,
        value_name = "BYTES",
        env = "EVERBUS_MAX_PAYLOAD",
        hide_env_values = true,
        allow_hyphen_values = true,
        value_parser = parse_bytes
    )]
    pub(crate) max_payload: Option<usize>,

    /// How long to wait for another program that holds the file: 10, 500ms, 2m
    #[arg(
        long,
        global = true,
        value_name = "DURATION",
        default_value = "10s",
        allow_hyphen_values = true,
        value_parser = when::parse_wait
    )]
    pub(crate) busy_timeout: Duration,

    /// Who does this, for the audit trail [env: EVERBUS_ACTOR] [default: cli: and the user]
    // The environment is read in `operator`, so that it never becomes the filter of `audit list`.
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) actor: Option<String>,

    /// Why, for the audit trail
    #[arg(long, global = true, value_name = "TEXT")]
    pub(crate) reason: Option<String>,

    /// How log lines are written
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "FORMAT",
        env = "EVERBUS_LOG_FORMAT",
        hide_env = true,
        default_value = "text"
    )]
    pub(crate) log_format: OutputFormat,

    /// Log more to standard error (-v, -vv, -vvv)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,

    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve events over HTTP, with a dashboard: publish, consume and operate from any language
    Serve(crate::commands::serve::ServeArgs),
    /// Run the consumers of --config that have a command or a webhook, in several processes if need be
    Consume(crate::commands::consume::ConsumeArgs),
    /// Make, list and revoke the tokens of the server
    #[command(subcommand)]
    Token(crate::commands::token::TokenCommand),
    /// Store an event; print its id and its place in the log once it is durable
    Publish(Box<PublishArgs>),
    /// Show events as they come
    Tail(TailArgs),
    /// Show what happened: events by tenant, app, entity, type and time, page by page
    Events(crate::commands::events::EventsArgs),
    /// Show one event, its state in every group, and the result of each attempt
    Get(GetArgs),
    /// Look at the payload stages stored for events
    #[command(subcommand)]
    Payloads(PayloadsCommand),
    /// Look at events that failed for good; retry, correct or delete them
    #[command(subcommand)]
    Dlq(DlqCommand),
    /// Show how far every group is
    Groups(GroupsArgs),
    /// Show which event types are in which stream, its limits, and how full it is: as --config declares
    /// them, or the one stream that has everything
    Streams,
    /// Replay events: one event, or a range of them
    Replay(Box<crate::commands::replay::ReplayArgs>),
    /// Publish events that were written with the data of your own database
    #[command(subcommand)]
    Outbox(crate::commands::outbox::OutboxCommand),
    /// Carry events from one engine to another, until Ctrl-C or (to move to another engine) until nothing is left
    Bridge(Box<crate::commands::bridge::BridgeArgs>),
    /// A small shop on a new file: publishes, handles, fails, retries, dead-letters. It replaces
    /// the everbus-demo.db of an earlier demo, and no other file
    Demo,
    /// Measure, with the figure of raw SQLite beside it
    Bench(crate::commands::bench::BenchArgs),
    /// Verify the file, or with --config the configuration; exit code 1 if something is wrong
    #[command(after_help = CHECK_HELP)]
    Check(crate::commands::check::CheckArgs),
    /// Show who did what: list the audit trail, verify that it was not changed, add to it
    #[command(subcommand)]
    Audit(AuditCommand),
    /// Print an AsyncAPI 3 document of the streams, consumers and groups: from --config, and from the
    /// groups and the newest events of the file
    Asyncapi(AsyncapiArgs),
    /// Submit tasks and look at them; retry and cancel them
    #[command(subcommand)]
    Task(crate::commands::task::TaskCommand),
    /// Submit jobs, graphs of tasks; look at them, draw them, add to them, resume and cancel them
    #[command(subcommand)]
    Job(crate::commands::job::JobCommand),
    /// Run tasks: start a command for each of them, until Ctrl-C
    Worker(Box<crate::commands::worker::WorkerArgs>),
    /// Show which running tasks are stuck and which wait for too long; exit code 1 if there are any
    Health(crate::commands::health::HealthArgs),
    /// Submit tasks or publish events at given times; check health and send alerts
    #[command(subcommand)]
    Schedule(crate::commands::schedule::ScheduleCommand),
    /// Show how long everything is kept, and remove what is old and no longer needed
    #[command(subcommand)]
    Retention(crate::commands::retention::RetentionCommand),
    /// Copy the file and its objects while it is in use
    Backup(crate::commands::backup::BackupArgs),
    /// Bring a backup into place as the file named by --db
    Restore(crate::commands::restore::RestoreArgs),
    /// Show the objects of large events by owner, and remove those of another log
    #[command(subcommand)]
    Objects(crate::commands::objects::ObjectsCommand),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
With - as the payload, each line of standard input is one payload; empty lines are skipped. Each event \
is printed once it is stored. A line that is not a valid payload ends the command with its \
line number and exit code 2; every line before it has been published, no line after it. After Ctrl-C \
the command stores and prints the batch under way and ends; exactly the printed events are stored.

With --dialect the input is not a payload but a whole document, which contains type, id and all other \
fields: everbus publish --dialect omni --payload @event.json, or --dialect cloudevents - for one \
document per line. An outbox envelope contains no type, so give the type before it.")]
pub(crate) struct PublishArgs {
    /// The type of the event, for example order.placed
    #[arg(value_name = "TYPE", required_unless_present = "dialect")]
    pub(crate) event_type: Option<String>,

    /// The payload as JSON, or - for one payload per line of standard input [default: null]
    #[arg(value_name = "JSON|-", allow_negative_numbers = true)]
    pub(crate) payload: Option<String>,

    /// Publish whole documents of this dialect: native, cloudevents, omni, workflow, outbox or framework.
    /// The log adds when they were received
    #[arg(
        long,
        value_name = "DIALECT",
        value_parser = parse_dialect,
        conflicts_with_all = [
            "id", "key", "tenant", "app", "entity", "correlation_id", "meta", "version",
            "content_type", "ttl", "at", "after", "to", "count",
        ]
    )]
    pub(crate) dialect: Option<Dialect>,

    /// The payload, instead of JSON: @FILE for what is in a file, @- for all of standard input, or the text
    /// itself
    #[arg(
        long = "payload",
        value_name = "@FILE",
        conflicts_with = "payload",
        allow_hyphen_values = true
    )]
    pub(crate) payload_from: Option<String>,

    /// An id of your own: publishing the same id again stores nothing
    #[arg(long, conflicts_with = "count")]
    pub(crate) id: Option<String>,

    /// Events with the same key are handled in order by groups that ask for it
    #[arg(long)]
    pub(crate) key: Option<String>,

    /// The tenant that the event belongs to
    #[arg(long)]
    pub(crate) tenant: Option<String>,

    /// The application it belongs to
    #[arg(long)]
    pub(crate) app: Option<String>,

    /// The entity it is about
    #[arg(long, value_name = "TYPE:ID", value_parser = parse_entity)]
    pub(crate) entity: Option<Entity>,

    /// The correlation id, shared by all events that one request caused
    #[arg(long, value_name = "ID")]
    pub(crate) correlation_id: Option<String>,

    /// The source: the program or service that emits it
    #[arg(long)]
    pub(crate) source: Option<String>,

    /// Metadata; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub(crate) meta: Vec<(String, String)>,

    /// The schema version of the payload
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true
    )]
    pub(crate) version: u32,

    /// The content type of the payload, if it is not JSON
    #[arg(long, value_name = "MIME")]
    pub(crate) content_type: Option<String>,

    /// Its time to live: 90s, 12h, 7d. After that it may be removed, once every group is done with it
    #[arg(long, value_name = "DURATION", value_parser = when::parse_length, allow_hyphen_values = true)]
    pub(crate) ttl: Option<Duration>,

    /// Deliver it to no group before this time: 2026-12-24T18:00:00Z
    #[arg(long, value_name = "TIME", value_parser = when::parse_at, conflicts_with = "after")]
    pub(crate) at: Option<everbus_core::Timestamp>,

    /// Deliver it to no group before this long from now: 30s, 2h, 7d
    #[arg(long, value_name = "DURATION", value_parser = when::parse_length, allow_hyphen_values = true)]
    pub(crate) after: Option<Duration>,

    /// For this group only; all others skip it. `(unnamed)` is the unnamed group
    #[arg(long, value_name = "GROUP")]
    pub(crate) to: Option<GroupName>,

    /// Publish this many events
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true)]
    pub(crate) count: Option<u64>,

    /// At most this many events per second
    #[arg(long, value_name = "R", value_parser = parse_rate, allow_negative_numbers = true)]
    pub(crate) rate: Option<f64>,

    /// Wait until every group has handled or dead-lettered each event: --wait for up to 30 seconds,
    /// --wait=5 for up to 5
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "30",
        value_parser = when::parse_seconds
    )]
    pub(crate) wait: Option<Duration>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
With --group, an event is handled once it is printed. Into a pipe, events go one by one, and each \
is handled once the reader has read it from the pipe: `everbus tail --group g | head -1` takes \
one event. An event that the reader read and did not use counts as handled too; use --limit N to take \
exactly N events.")]
pub(crate) struct TailArgs {
    /// Which types: order.placed, order.*, order.>; everything if none is given
    #[arg(value_name = "PATTERN", value_parser = parse_pattern)]
    pub(crate) patterns: Vec<Pattern>,

    /// Where to start: new, first, last, a time, or how long ago (15m, 2h, 7d)
    /// [default: new; first with --no-follow]
    #[arg(
        long,
        value_name = "WHERE",
        value_parser = when::parse_start,
        allow_hyphen_values = true
    )]
    pub(crate) from: Option<StartFrom>,

    /// Consume as this group: what was shown counts as handled and is not shown again. A new group begins at
    /// --from (default: new), an existing group keeps its position
    #[arg(long, value_name = "NAME", value_parser = parse_own_group)]
    pub(crate) group: Option<GroupName>,

    /// Stop after this many events
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true)]
    pub(crate) limit: Option<u64>,

    /// Stop at the end instead of waiting for more
    #[arg(long)]
    pub(crate) no_follow: bool,

    /// Print each event as a document of this dialect, one per line: native, cloudevents, omni, workflow,
    /// outbox or framework
    #[arg(long, value_name = "DIALECT", value_parser = parse_dialect)]
    pub(crate) dialect: Option<Dialect>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct GetArgs {
    /// The id of the event
    pub(crate) id: String,

    /// The source the event was published with, if its id is not a UUID
    #[arg(long)]
    pub(crate) source: Option<String>,

    /// Print the event alone, as a document of this dialect: native, cloudevents, omni, workflow, outbox or
    /// framework
    #[arg(long, value_name = "DIALECT", value_parser = parse_dialect)]
    pub(crate) dialect: Option<Dialect>,

    #[command(flatten)]
    pub(crate) stages: StageArgs,
}

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct GroupsArgs {
    /// Show each stream that a group reads on a line of its own; the default where streams are declared
    #[arg(long)]
    pub(crate) streams: bool,

    #[command(subcommand)]
    pub(crate) command: Option<GroupsCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GroupsCommand {
    /// Show one group: its subscriptions, and its backlog by event type
    Show {
        /// The group; (unnamed) is the unnamed one
        #[arg(value_parser = parse_group)]
        name: GroupName,
    },
    /// Remove a subscription from a group: the group skips events it has not reached yet, and those that wait
    /// for a handler. The program that declared it declares it again when it mounts its handler
    Unsubscribe {
        /// The group; (unnamed) is the unnamed one
        #[arg(value_parser = parse_group)]
        name: GroupName,
        /// The pattern of the subscription, or its name, as `groups show` prints them
        pattern: String,
    },
    /// Delete a group with its position, its backlog and its dead letters
    Remove {
        /// The group; (unnamed) is the unnamed one
        #[arg(value_parser = parse_group)]
        name: GroupName,
        /// Confirm the deletion
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct AsyncapiArgs {
    /// The name of the application
    #[arg(long, default_value = "Everbus")]
    pub(crate) title: String,

    /// The version of the application
    #[arg(long, value_name = "VERSION", default_value = "1.0.0")]
    pub(crate) app_version: String,

    /// How many of the newest events are looked at for their types
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub(crate) recent: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }
}
