//! `everbus outbox init`: creates the tables of an outbox, for services that cannot create them.

use std::path::{Path, PathBuf};

use clap::Args;
use everbus::outbox::{Outbox, OutboxInit, OutboxOptions};
use everbus_core::{Code, Error};
use serde_json::json;

use crate::open::{Target, blocking, refuse_directory_name};
use crate::output::{Output, escaped};
use crate::stop::Outcome;

pub(super) const INIT_HELP: &str = "\
A service in any language writes its events with INSERT INTO event_outbox, in the transaction of \
the data they are about; `everbus outbox relay --outbox FILE` publishes them. Either all tables are created \
or none, and existing tables are left as they are. With --print-sql the tables can \
be part of the service's own migrations: everbus outbox init --print-sql | sqlite3 shop.db. It prints \
the SQL of SQLite, or of PostgreSQL if --outbox or --broker names a database of PostgreSQL.";

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// The database that gets the tables: a file of SQLite, created if there is none, or postgres://…
    #[arg(long, value_name = "FILE|URL", required_unless_present = "print_sql")]
    outbox: Option<PathBuf>,

    /// Print the SQL that creates them in this kind of database, and change nothing
    #[arg(long)]
    print_sql: bool,
}

pub(super) async fn run(args: InitArgs, target: &Target, output: &mut Output) -> Outcome {
    let path = match args.outbox {
        Some(path) if !args.print_sql => path,
        named => return print_sql(named.as_deref(), target, output),
    };
    if let Some(url) = super::url_of(&path) {
        return init_url(url, target, output).await;
    }
    refuse_directory_name(&path, "--outbox")?;
    let options = OutboxOptions {
        busy_timeout: target.busy_timeout(),
        ..OutboxOptions::default()
    };
    let file = path.clone();
    let made = blocking(move || {
        Outbox::init(&file, &options).map_err(|error| match error.code() {
            Code::NotEverbus => Error::new(
                Code::NotAFile,
                format!("{} is not an SQLite database", file.display()),
            )
            .hint("name the database of your service"),
            _ => error,
        })
    });
    let made = target.patiently(made).await?;
    if output.is_json() {
        let new_file = made == OutboxInit::NewFile;
        return output.json(&json!({
            "outbox": path.display().to_string(),
            "created": new_file || made == OutboxInit::NewTables,
            "new_file": new_file,
        }));
    }
    let shown = path.display().to_string();
    let shown = escaped(&shown);
    output.line(match made {
        OutboxInit::NewFile => format!("made {shown}, with the tables of an outbox"),
        OutboxInit::NewTables => format!("made the tables of an outbox in {shown}"),
        OutboxInit::Everbus => format!("{shown} is a file of Everbus and has an outbox anyway"),
        _ => format!("the tables of the outbox are there already in {shown}"),
    })
}

/// Prints the SQL for the named database, or for the database of the broker.
fn print_sql(named: Option<&Path>, target: &Target, output: &mut Output) -> Outcome {
    let url = match named {
        Some(path) => super::url_of(path),
        None => target.url().and_then(|url| super::url_of(Path::new(url))),
    };
    let sql = match url {
        Some(url) => everbus::outbox::tables_sql_of(url)?,
        None => Outbox::tables_sql(),
    };
    if output.is_json() {
        return output.json(&json!({ "sql": sql }));
    }
    output.raw(sql.as_bytes())
}

async fn init_url(url: &str, target: &Target, output: &mut Output) -> Outcome {
    let created = target.patiently(everbus::outbox::init_url(url)).await?;
    if output.is_json() {
        return output.json(&json!({ "created": created }));
    }
    output.line(match created {
        true => "made the tables of an outbox",
        false => "the tables of the outbox are there already",
    })
}
