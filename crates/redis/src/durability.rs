//! How durable the server is, read from its settings as far as this user may read them.

use std::collections::HashMap;

use everbus_core::{Code, Durability, Error, Result, Weakness};

use crate::client::{Link, Read as _};
use crate::config::Options;

/// The default of `proto-max-bulk-len`: the largest value, in bytes, that the server accepts.
const MAX_BULK: u64 = 512 << 20;

/// The durability of acknowledged events, and the settings that weaken it.
#[derive(Clone, Debug)]
pub(crate) struct Grade {
    pub(crate) durability: Durability,
    pub(crate) weaknesses: Vec<Weakness>,
}

/// Checks the server, and returns its durability and the largest value that it accepts, in bytes.
///
/// Fails if the server is older than 7.0, is a replica, is a cluster, or evicts any key when its memory is full (unless
/// `allow_eviction` is set). Every other weak setting is a [`Weakness`]: eviction, no append-only file, writes that are
/// not synced, no replicas, or replicas that may trail.
pub(crate) async fn check(link: &Link, options: &Options) -> Result<(Grade, u64)> {
    let mut info = redis::cmd("INFO");
    let info = link.ask(info.arg("everything")).await?.text()?;
    let info: HashMap<&str, &str> = info
        .lines()
        .filter_map(|line| line.trim_end().split_once(':'))
        .collect();
    let told = |name: &str| info.get(name).copied().unwrap_or_default();
    let major = told("redis_version").split('.').next();
    let major: u32 = major.and_then(|n| n.parse().ok()).unwrap_or(0);
    if major < 7 {
        let what = format!(
            "{}: Redis {} is too old",
            link.server,
            told("redis_version")
        );
        return Err(Error::new(Code::Unsupported, what).hint("use Redis 7.0 or newer, or Valkey"));
    }
    if told("role") == "slave" {
        return Err(crate::errors::of_word(&link.server, "READONLY", ""));
    }
    if told("cluster_enabled") == "1" {
        return Err(crate::errors::of_word(&link.server, "MOVED", ""));
    }
    let settings = settings(link).await;
    let set = |name: &str| settings.get(name).map(String::as_str);
    let policy = set("maxmemory-policy").unwrap_or_else(|| told("maxmemory_policy"));
    let limited = set("maxmemory").unwrap_or_else(|| told("maxmemory")) != "0";
    let mut weaknesses = Vec::new();
    let mut weak = |setting: &str, value: &str, advice: &str| {
        weaknesses.push(Weakness::new(setting, value, advice));
    };
    if limited && policy.starts_with("allkeys") {
        if !options.allow_eviction {
            let what = format!(
                "{}: maxmemory-policy is {policy}: when memory is full, the server deletes streams with events \
                 that no group has handled",
                link.server
            );
            return Err(Error::new(Code::InvalidSetting, what)
                .hint("set maxmemory-policy noeviction: a full server then refuses new events"));
        }
        weak(
            "maxmemory-policy",
            policy,
            "the server deletes streams when memory is full; set noeviction",
        );
    } else if limited && policy.starts_with("volatile") {
        weak(
            "maxmemory-policy",
            policy,
            "when memory is full, ids are forgotten before their window ends, and values by key before their \
             expiry; set noeviction",
        );
    }
    let aof = set("appendonly").map_or(told("aof_enabled") == "1", |value| value == "yes");
    let durability = match (aof, set("appendfsync")) {
        (false, _) => {
            weak(
                "appendonly",
                "no",
                "a restart of the server loses every event since its last snapshot; set appendonly yes",
            );
            Durability::Memory
        }
        (true, Some("always")) if set("no-appendfsync-on-rewrite") == Some("yes") => {
            Durability::Process
        }
        (true, Some("always")) => Durability::PowerLoss,
        (true, Some(fsync)) => {
            let advice = match fsync {
                "everysec" => "a power loss may lose the last second; set appendfsync always",
                _ => "a power loss may lose the last half minute; set appendfsync always",
            };
            weak("appendfsync", fsync, advice);
            Durability::Process
        }
        (true, None) => {
            weak(
                "appendfsync",
                "not known",
                "this user may not read the configuration (CONFIG GET); a power loss may lose the last second",
            );
            Durability::Process
        }
    };
    if aof && set("no-appendfsync-on-rewrite") == Some("yes") {
        weak(
            "no-appendfsync-on-rewrite",
            "yes",
            "while the file is rewritten, writes are not synced; set no-appendfsync-on-rewrite no",
        );
    }
    let replicas = told("connected_slaves");
    if replicas == "0" || replicas.is_empty() {
        weak(
            "replicas",
            "0",
            "the loss of the machine loses every event; add a replica for a copy, which may trail",
        );
    } else if set("min-replicas-to-write").is_none_or(|least| least == "0") {
        weak(
            "min-replicas-to-write",
            set("min-replicas-to-write").unwrap_or("not known"),
            "replicas trail: a failover loses what they have not received; set 1 to bound that by \
             min-replicas-max-lag",
        );
    }
    let max_bulk = set("proto-max-bulk-len").and_then(|bytes| bytes.parse().ok());
    let grade = Grade {
        durability,
        weaknesses,
    };
    Ok((grade, max_bulk.unwrap_or(MAX_BULK)))
}

/// The settings that this user may read (`CONFIG GET`). A setting that it may not read is left out.
async fn settings(link: &Link) -> HashMap<String, String> {
    let names = [
        "appendonly",
        "appendfsync",
        "maxmemory",
        "maxmemory-policy",
        "min-replicas-to-write",
        "no-appendfsync-on-rewrite",
        "proto-max-bulk-len",
    ];
    let mut settings = HashMap::new();
    for name in names {
        let mut get = redis::cmd("CONFIG");
        let Ok(answer) = link.ask(get.arg("GET").arg(name)).await else {
            continue;
        };
        let mut pair = answer.list().unwrap_or_default().into_iter();
        if let (Some(name), Some(value)) = (pair.next(), pair.next())
            && let (Ok(name), Ok(value)) = (name.text(), value.text())
        {
            settings.insert(name, value);
        }
    }
    settings
}
