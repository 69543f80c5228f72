//! `everbus check`: is the file as it should be, and what does the engine promise?

use serde_json::json;

use crate::open::{Target, close};
use crate::output::{Output, escaped};
use crate::progress;
use crate::stop::{Outcome, Stop};

pub(crate) async fn run(target: &Target, output: &mut Output) -> Outcome {
    let engine = target.open_existing().await?;
    let bar = progress::spinner("checking");
    let report = match engine.maintenance() {
        Ok(maintenance) => maintenance.check().await,
        Err(error) => Err(error),
    };
    bar.finish_and_clear();
    let capabilities = engine.broker.capabilities();
    close(&engine).await;
    let report = report?;
    if output.is_json() {
        output.json(&json!({
            "ok": report.is_ok(),
            "findings": report.findings,
            "capabilities": capabilities,
        }))?;
    } else {
        output.line(format!(
            "engine {}, durability {}",
            capabilities.engine,
            json!(capabilities.durability).as_str().unwrap_or_default()
        ))?;
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
        })?;
    }
    if report.is_ok() {
        Ok(())
    } else {
        Err(Stop::Unsatisfied)
    }
}
