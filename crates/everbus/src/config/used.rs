//! The audit record of a bus that runs with a changed configuration.

use everbus_core::{AuditEntry, AuditQuery, Code, Engine, Result};
use serde_json::json;

use super::Config;
use crate::audit::{Operator, surrounded};

const CONFIG_CHANGED: &str = "config.changed";

/// Records that a bus runs with another configuration than the last time, if it does: which sections
/// changed, and the old and new hashes. No value of the file is recorded, and no possible secret is part of
/// a hash.
pub async fn config_used(engine: &Engine, operator: &Operator, config: &Config) -> Result<()> {
    let Some(audit) = engine.audit.as_deref() else {
        return Ok(());
    };
    let print = &config.fingerprint;
    let Some(file) = print.file.as_deref() else {
        return Ok(());
    };
    let entry = AuditEntry::new(operator.actor.clone(), CONFIG_CHANGED).entity("CONFIG", file);
    let last = AuditQuery {
        action: Some(entry.action.clone()),
        entity: entry.entity.clone(),
        limit: 1,
        ..AuditQuery::default()
    };
    let last = match audit.query(last).await {
        Err(error) if error.code() == Code::Unsupported => return Ok(()),
        page => page?.items.pop(),
    };
    let before = last.map(|record| record.entry.details).unwrap_or_default();
    let hash = print.hash();
    if before["hash"] == hash.as_str() {
        return Ok(());
    }
    let known = before["sections"].as_object().cloned().unwrap_or_default();
    let sections = json!(print.sections);
    let now = sections.as_object().cloned().unwrap_or_default();
    let names: std::collections::BTreeSet<&String> = known.keys().chain(now.keys()).collect();
    let changed: Vec<_> = names
        .into_iter()
        .filter(|name| known.get(*name) != now.get(*name))
        .collect();
    let mut details = json!({ "hash": hash, "changed": changed, "sections": sections });
    if !before["hash"].is_null() {
        details["previous"] = before["hash"].clone();
    }
    if let Some(reason) = &operator.reason {
        details["reason"] = reason.as_str().into();
    }
    audit.record(surrounded(entry.details(details))).await?;
    Ok(())
}

/// As [`config_used`], but a failure does not stop the bus from opening.
pub(crate) async fn note_config(engine: &Engine, operator: &Operator, config: &Config) {
    if let Err(error) = config_used(engine, operator, config).await {
        tracing::warn!(target: "everbus::audit", %error, "a change of the configuration could not be recorded");
    }
}
