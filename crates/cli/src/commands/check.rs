//! `everbus check`: is the file as it should be, and what does the engine promise?

use std::path::Path;

use everbus_core::{Capabilities, CheckReport, Code, Error};
use rusqlite::{Connection, OpenFlags};
use serde_json::json;

use crate::open::{Target, blocking, close};
use crate::output::{Output, escaped};
use crate::progress;
use crate::stop::{Outcome, Stop};

pub(crate) async fn run(target: &Target, output: &mut Output) -> Outcome {
    let bar = progress::spinner("checking");
    let checked = check(target).await;
    bar.finish_and_clear();
    let (report, capabilities) = match checked {
        // Damage is what a check looks for: it is a finding, not an error.
        Err(Stop::Failed(error)) if error.code() == Code::Corrupt => {
            (damage(target.path()?, &error).await?, None)
        }
        other => {
            let (report, capabilities) = other?;
            (report, Some(capabilities))
        }
    };
    print(&report, capabilities.as_ref(), output)?;
    if report.is_ok() {
        Ok(())
    } else {
        Err(Stop::Unsatisfied)
    }
}

async fn check(target: &Target) -> Outcome<(CheckReport, Capabilities)> {
    let engine = target.open_existing().await?;
    let report = match engine.maintenance() {
        Ok(maintenance) => maintenance.check().await,
        Err(error) => Err(error),
    };
    let capabilities = engine.broker.capabilities();
    close(&engine).await;
    Ok((report?, capabilities))
}

/// What can be said about a file that is too damaged for the engine.
async fn damage(path: &Path, error: &Error) -> Outcome<CheckReport> {
    let mut report = CheckReport::default();
    report.add("readable", false, error.message());
    let path = path.to_path_buf();
    let problems = blocking(move || Ok(integrity(&path))).await?;
    let sound = matches!(&problems, Ok(problems) if problems == "ok");
    let detail = problems.unwrap_or_else(|e| e.to_string());
    report.add("integrity", sound, detail);
    Ok(report)
}

/// What SQLite itself finds, without changing anything.
fn integrity(path: &Path) -> rusqlite::Result<String> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    let mut statement = connection.prepare("PRAGMA integrity_check(20)")?;
    let problems: Vec<String> = statement
        .query_map([], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    Ok(problems.join("; "))
}

fn print(
    report: &CheckReport,
    capabilities: Option<&Capabilities>,
    output: &mut Output,
) -> Outcome {
    if output.is_json() {
        return output.json(&json!({
            "ok": report.is_ok(),
            "findings": report.findings,
            "capabilities": capabilities,
        }));
    }
    if let Some(capabilities) = capabilities {
        output.line(format!(
            "engine {}, durability {}",
            capabilities.engine,
            json!(capabilities.durability).as_str().unwrap_or_default()
        ))?;
    }
    for finding in &report.findings {
        let mark = if finding.ok { "ok " } else { "BAD" };
        output.line(format!(
            "{mark} {}: {}",
            escaped(&finding.check),
            escaped(&finding.detail)
        ))?;
    }
    output.line(if report.is_ok() {
        "everything is as it should be"
    } else {
        "something is wrong: keep a copy of the file and its -wal, then restore a backup"
    })
}
