//! How durable the server's answers are, by its own settings.

use std::fmt;

use everbus_core::{Durability, Result};

use crate::pool::Sql;
use crate::rows::get;

/// The grade of an acknowledged publish, and what to change for a better one.
#[derive(Clone, Debug)]
pub(crate) struct Grade {
    pub(crate) grade: Durability,
    pub(crate) advice: Option<&'static str>,
}

impl fmt::Display for Grade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.grade {
            Durability::Replicated => "replicated",
            Durability::PowerLoss => "power-loss safe",
            Durability::Process => "process-crash safe",
            Durability::Memory => "memory",
        })?;
        match self.advice {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}

/// Reads the settings. They apply to this connection; one that changes them for its own session is not known.
pub(crate) async fn read(db: &impl Sql) -> Result<Grade> {
    let sql = "SELECT current_setting('fsync'), current_setting('synchronous_commit'),
               current_setting('full_page_writes'), current_setting('synchronous_standby_names')";
    let row = db
        .one("reading the settings of the server", sql, &[])
        .await?;
    let text = |index: usize| get::<String>(&row, index);
    Ok(grade(&text(0)?, &text(1)?, &text(2)?, &text(3)?))
}

fn grade(fsync: &str, commit: &str, full_pages: &str, standbys: &str) -> Grade {
    let process = |advice| Grade {
        grade: Durability::Process,
        advice: Some(advice),
    };
    if fsync != "on" {
        return process("set fsync = on on the server: a power loss may damage the database");
    }
    if commit == "off" {
        return process(
            "set synchronous_commit = on: the last commits may be lost with the server",
        );
    }
    if full_pages != "on" {
        return process("set full_page_writes = on, unless the disk never writes half a page");
    }
    if commit == "local" || standbys.trim().is_empty() {
        return Grade {
            grade: Durability::PowerLoss,
            advice: Some(
                "for a copy on another machine set synchronous_standby_names, and synchronous_commit = on",
            ),
        };
    }
    Grade {
        grade: Durability::Replicated,
        advice: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: engines/postgres-durability: the durability grade comes from fsync, synchronous_commit, full_page_writes and the synchronous standbys
    #[test]
    fn the_grade_follows_the_settings() {
        for (settings, expected) in [
            (["on", "on", "on", ""], Durability::PowerLoss),
            (["on", "local", "on", "a"], Durability::PowerLoss),
            (["on", "on", "on", "ANY 1 (a, b)"], Durability::Replicated),
            (["on", "remote_apply", "on", "a"], Durability::Replicated),
            (["off", "on", "on", "a"], Durability::Process),
            (["on", "off", "on", "a"], Durability::Process),
            (["on", "on", "off", "a"], Durability::Process),
        ] {
            let [fsync, commit, pages, standbys] = settings;
            let found = grade(fsync, commit, pages, standbys);
            assert_eq!(found.grade, expected, "{settings:?}");
            assert_eq!(found.advice.is_none(), expected == Durability::Replicated);
        }
    }
}
