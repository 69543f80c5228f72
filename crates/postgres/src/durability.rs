//! How durable an acknowledged write is, by the settings of the server.

use std::fmt;

use everbus_core::{Durability, Result, Weakness};

use crate::pool::Sql;
use crate::rows::get;

/// The grade of an acknowledged publish, and what to change for a better one.
#[derive(Clone, Debug)]
pub(crate) struct Grade {
    pub(crate) grade: Durability,
    pub(crate) weakness: Option<Weakness>,
}

impl fmt::Display for Grade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.grade)?;
        match &self.weakness {
            Some(weakness) => write!(f, "; {weakness}"),
            None => Ok(()),
        }
    }
}

/// Reads the settings that apply to this connection. What other sessions set for themselves is not seen.
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
    let weak = |grade, setting: &str, value: &str, advice: &str| Grade {
        grade,
        weakness: Some(Weakness::new(setting, value, advice)),
    };
    let process = Durability::Process;
    if fsync != "on" {
        let advice = "a power loss may damage the database; set fsync = on on the server";
        return weak(process, "fsync", fsync, advice);
    }
    if commit == "off" {
        let advice = "the last commits may be lost with the server; set synchronous_commit = on";
        return weak(process, "synchronous_commit", commit, advice);
    }
    if full_pages != "on" {
        let advice = "a power loss may leave half-written pages; set full_page_writes = on, unless the disk \
                      never writes half a page";
        return weak(process, "full_page_writes", full_pages, advice);
    }
    let elsewhere = Durability::PowerLoss;
    if standbys.trim().is_empty() {
        let advice = "for a copy on another machine name the standbys that every commit waits for";
        return weak(elsewhere, "synchronous_standby_names", "empty", advice);
    }
    if commit == "local" {
        let advice = "commits do not wait for the standbys; set synchronous_commit = on";
        return weak(elsewhere, "synchronous_commit", commit, advice);
    }
    Grade {
        grade: Durability::Replicated,
        weakness: None,
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
            assert_eq!(found.weakness.is_none(), expected == Durability::Replicated);
        }
    }
}
