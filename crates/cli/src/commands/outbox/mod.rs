//! `everbus outbox`: relays events from a table in the user's database to the broker, and shows the state of
//! that table.

mod init;
mod relay;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Subcommand};
use everbus::audit::{Action, Operator, audited};
use everbus::outbox::{Outbox, OutboxOptions, OutboxSource};
use everbus_core::{Clock as _, Code, Engine, Error, SystemClock};
use serde_json::json;

use self::init::{INIT_HELP, InitArgs};
use self::relay::{RELAY_HELP, RelayArgs};
use crate::files;
use crate::open::{Target, blocking, close, refuse_directory_name};
use crate::output::{Output, Table, counted, escaped, grouped, shell_word, shortened};
use crate::stop::{Outcome, Stop};
use crate::values::parse_page;
use crate::when;

#[derive(Debug, Subcommand)]
pub(crate) enum OutboxCommand {
    /// Publish the rows of an outbox, until Ctrl-C
    #[command(after_help = RELAY_HELP)]
    Relay(RelayArgs),
    /// Create the tables of an outbox in your own database
    #[command(after_help = INIT_HELP)]
    Init(InitArgs),
    /// Show what waits and for how long, what failed, and which process relays
    Status(WhichArgs),
    /// List the rows that failed for good, newest first
    Failed(FailedArgs),
    /// Make failed rows wait again, with a fresh set of attempts
    Retry(RetryArgs),
}

#[derive(Debug, Args)]
pub(crate) struct WhichArgs {
    /// The database with the table event_outbox: a file of SQLite, or postgres://… [default: that of the broker]
    #[arg(long, value_name = "FILE|URL")]
    outbox: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct FailedArgs {
    #[command(flatten)]
    which: WhichArgs,

    /// At most this many, up to 10000
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = parse_page, allow_negative_numbers = true)]
    limit: usize,
}

#[derive(Debug, Args)]
pub(crate) struct RetryArgs {
    #[command(flatten)]
    which: WhichArgs,

    /// The ids of the rows or of their events
    #[arg(
        value_name = "ID",
        conflicts_with = "all",
        required_unless_present = "all"
    )]
    ids: Vec<String>,

    /// All of them
    #[arg(long)]
    all: bool,
}

pub(crate) async fn run(command: OutboxCommand, target: &Target, output: &mut Output) -> Outcome {
    match command {
        OutboxCommand::Relay(args) => relay::run(args, target, output).await,
        OutboxCommand::Init(args) => init::run(args, target, output).await,
        OutboxCommand::Status(which) => {
            let opened = Opened::new(&which, target).await?;
            let outcome = status(&*opened.source, output).await;
            opened.close().await;
            outcome
        }
        OutboxCommand::Failed(args) => {
            let opened = Opened::new(&args.which, target).await?;
            let outcome = failed(&args, &*opened.source, output).await;
            opened.close().await;
            outcome
        }
        OutboxCommand::Retry(args) => {
            let mut opened = Opened::new(&args.which, target).await?;
            opened.look_for_trail(target).await?;
            let outcome = target
                .patiently(retry(&args, &opened, target, output))
                .await;
            opened.close().await;
            outcome
        }
    }
}

/// An outbox, and the engine whose audit trail records actions on it.
struct Opened {
    source: Arc<dyn OutboxSource>,
    engine: Option<Engine>,
}

impl Opened {
    async fn new(which: &WhichArgs, target: &Target) -> Outcome<Self> {
        if let Some(path) = foreign(which, target) {
            return Ok(Self {
                source: open_file(path, target).await?,
                engine: None,
            });
        }
        let engine = target.open_existing().await?;
        match engine.outbox() {
            Ok(source) => Ok(Self {
                source,
                engine: Some(engine),
            }),
            Err(error) => {
                close(&engine).await;
                Err(error.into())
            }
        }
    }

    /// Opens the file of the bus, if there is one. Actions on a user's database are recorded there, because an
    /// operator looks there.
    async fn look_for_trail(&mut self, target: &Target) -> Outcome {
        if self.engine.is_some() {
            return Ok(());
        }
        self.engine = match target.open_existing().await {
            Ok(engine) => Some(engine),
            Err(Stop::Failed(error)) if error.code() == Code::NoSuchFile => None,
            // An action that should be recorded but cannot be is not done.
            Err(other) => return Err(other),
        };
        Ok(())
    }

    /// Makes failed rows wait again, and records it in the audit trail, if there is one.
    async fn retry(&self, id: Option<&String>) -> Outcome<u64> {
        let work = self.source.retry(id.map(|id| vec![id.clone()]));
        let Some(engine) = &self.engine else {
            return Ok(work.await?);
        };
        let mut action = Action::new("outbox.retry").detail("outbox", json!(self.source.name()));
        if let Some(id) = id {
            action = action.on("EVENT", id);
        }
        Ok(audited(engine, &Operator::current(), action, work).await?)
    }

    async fn close(self) {
        drop(self.source);
        if let Some(engine) = self.engine {
            close(&engine).await;
        }
    }
}

/// The database with the outbox, if it is not the broker's file.
fn foreign<'a>(which: &'a WhichArgs, target: &Target) -> Option<&'a Path> {
    let path = which.outbox.as_deref()?;
    let own = target.path().ok();
    (!own.is_some_and(|own| own == path || files::are_same(path, own))).then_some(path)
}

/// The URL of a database on a server, if the argument is one.
fn url_of(path: &Path) -> Option<&str> {
    let text = path.to_str()?;
    let schemes = ["postgres://", "postgresql://"];
    schemes.iter().any(|s| text.starts_with(s)).then_some(text)
}

const NO_TABLE: &str = "`everbus outbox init` makes it, or the program that owns the database with Outbox::create_tables";

async fn open_file(path: &Path, target: &Target) -> Outcome<Arc<dyn OutboxSource>> {
    if let Some(url) = url_of(path) {
        let opened = target.patiently(everbus::outbox::open_url(url)).await;
        return opened.map_err(|error| match error.code() {
            Code::NotFound => error.hint(NO_TABLE).into(),
            _ => error.into(),
        });
    }
    refuse_directory_name(path, "--outbox")?;
    let options = OutboxOptions {
        busy_timeout: target.busy_timeout(),
        ..OutboxOptions::default()
    };
    let path = path.to_path_buf();
    let opened = blocking(move || {
        let opened = Outbox::open_with(&path, options);
        opened.map_err(|error| match error.code() {
            Code::NotFound => Error::new(
                Code::NotFound,
                format!("there is no table event_outbox in {}", path.display()),
            )
            .hint(NO_TABLE),
            Code::NoSuchFile => Error::new(
                Code::NoSuchFile,
                format!("there is no file {}", path.display()),
            )
            .hint(
                "--outbox names the database of your program, the one with the table event_outbox",
            ),
            Code::NotEverbus => Error::new(
                Code::NotAFile,
                format!("{} is not an SQLite database", path.display()),
            )
            .hint("name the database with the table event_outbox"),
            _ => error,
        })
    });
    Ok(target.patiently(opened).await?)
}

async fn status(source: &dyn OutboxSource, output: &mut Output) -> Outcome {
    let status = source.status().await?;
    if output.is_json() {
        let mut value = serde_json::to_value(&status).map_err(std::io::Error::from)?;
        if let Some(object) = value.as_object_mut() {
            let age = status
                .oldest_pending_at
                .map(|at| SystemClock.now().since(at).as_millis());
            object.insert("outbox".into(), json!(source.name()));
            object.insert("oldest_pending_ms".into(), json!(age));
        }
        return output.json(&value);
    }
    let mut table = Table::new(&["WAITING", "OLDEST", "RETRYING", "FAILED", "SENT", "RELAY"]);
    table.row(vec![
        grouped(status.pending),
        status
            .oldest_pending_at
            .map_or_else(|| "-".to_owned(), when::ago),
        grouped(status.retrying),
        grouped(status.failed),
        grouped(status.sent),
        status
            .relay
            .as_deref()
            .map_or_else(|| "none".to_owned(), |relay| escaped(relay).into_owned()),
    ]);
    table.print(output)?;
    if let Some(error) = &status.last_error {
        output.line(format!("last error: {}", escaped(error)))?;
    }
    if status.failed > 0 {
        output.line("`everbus outbox failed` lists the rows that failed, `everbus outbox retry` sends them again")?;
    }
    Ok(())
}

async fn failed(args: &FailedArgs, source: &dyn OutboxSource, output: &mut Output) -> Outcome {
    let rows = source.failed(args.limit).await?;
    if output.is_json() {
        return output.json(&rows);
    }
    if rows.is_empty() {
        return output.line("no failed rows");
    }
    let mut table = Table::new(&["EVENT", "TYPE", "ATTEMPTS", "CREATED", "ERROR"]);
    for row in &rows {
        table.row(vec![
            escaped(&row.event_id).into_owned(),
            escaped(&row.event_type).into_owned(),
            grouped(row.attempts.into()),
            escaped(&row.created_at).into_owned(),
            shortened(&escaped(row.last_error.as_deref().unwrap_or("-")), 80).into_owned(),
        ]);
    }
    table.print(output)
}

async fn retry(args: &RetryArgs, opened: &Opened, target: &Target, output: &mut Output) -> Outcome {
    if args.all {
        return retried(opened.retry(None).await?, opened, target, output);
    }
    let mut rows = 0;
    // One by one, so that a mistyped id can be named.
    for id in &args.ids {
        let found = opened.retry(Some(id)).await?;
        if found == 0 {
            let what = format!("no failed row has the id {}", shell_word(id));
            return Err(Error::new(Code::NotFound, what)
                .hint("`everbus outbox failed` lists them; those named before it were retried")
                .into());
        }
        rows += found;
    }
    retried(rows, opened, target, output)
}

fn retried(rows: u64, opened: &Opened, target: &Target, output: &mut Output) -> Outcome {
    let engine = opened.engine.as_ref();
    let audited = engine.is_some_and(|engine| engine.audit.is_some());
    if output.is_json() {
        return output.json(&json!({ "retried": rows, "audited": audited }));
    }
    output.line(format!("{} waiting again", counted(rows, "row")))?;
    if !audited {
        let bus = target.as_option();
        output.line(format!(
            "no audit trail tells of it: there is none at {bus}; name the file of the bus with --db"
        ))?;
    }
    Ok(())
}
