//! The tables of persons and accounts.

use everbus::rusqlite::{self, Connection, OptionalExtension as _, params};
use serde_json::{Map, Value};

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS persons (
  id          TEXT PRIMARY KEY,
  merged_into TEXT REFERENCES persons (id)   -- the person this one turned out to be
);
CREATE TABLE IF NOT EXISTS identities (
  id               TEXT PRIMARY KEY,
  person_id        TEXT NOT NULL REFERENCES persons (id),
  channel          TEXT NOT NULL,
  platform_user_id TEXT NOT NULL,
  confidence       REAL NOT NULL,
  profile          TEXT NOT NULL,            -- JSON: username, phone, email, …
  phone            TEXT,
  email            TEXT,
  UNIQUE (channel, platform_user_id)
);
CREATE INDEX IF NOT EXISTS identities_phone ON identities (phone);
CREATE INDEX IF NOT EXISTS identities_email ON identities (email);
CREATE INDEX IF NOT EXISTS identities_person ON identities (person_id);
-- What was answered for a message, so that a repetition gets the same answer.
CREATE TABLE IF NOT EXISTS resolutions (
  message_id TEXT PRIMARY KEY,
  answer     TEXT NOT NULL
);
";

/// An account on a platform.
#[derive(Clone, Debug)]
pub(super) struct Account {
    pub(super) id: String,
    pub(super) person: String,
    pub(super) confidence: f64,
    pub(super) profile: Map<String, Value>,
}

pub(super) fn create(db: &Connection) -> rusqlite::Result<()> {
    db.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")?;
    db.busy_timeout(std::time::Duration::from_secs(10))?;
    db.execute_batch(SCHEMA)
}

pub(super) fn answer(db: &Connection, message: &str) -> rusqlite::Result<Option<String>> {
    let sql = "SELECT answer FROM resolutions WHERE message_id = ?1";
    db.query_row(sql, [message], |row| row.get(0)).optional()
}

pub(super) fn keep_answer(db: &Connection, message: &str, answer: &str) -> rusqlite::Result<()> {
    let sql = "INSERT INTO resolutions VALUES (?1, ?2)";
    db.execute(sql, [message, answer]).map(drop)
}

pub(super) fn account(
    db: &Connection,
    channel: &str,
    user: &str,
) -> rusqlite::Result<Option<Account>> {
    let sql = "SELECT id, person_id, confidence, profile FROM identities
               WHERE channel = ?1 AND platform_user_id = ?2";
    let row = db.query_row(sql, [channel, user], |row| {
        let profile: String = row.get(3)?;
        Ok(Account {
            id: row.get(0)?,
            person: row.get(1)?,
            confidence: row.get(2)?,
            profile: serde_json::from_str(&profile).unwrap_or_default(),
        })
    });
    row.optional()
}

/// The person with an account that has this phone number or address, other than `but`.
pub(super) fn person_with(
    db: &Connection,
    column: &str,
    value: &str,
    but: &str,
) -> rusqlite::Result<Option<String>> {
    let sql = format!(
        "SELECT person_id FROM identities WHERE {column} = ?1 AND person_id <> ?2 ORDER BY person_id LIMIT 1"
    );
    db.query_row(&sql, [value, but], |row| row.get(0))
        .optional()
}

pub(super) fn add_person(db: &Connection, id: &str) -> rusqlite::Result<()> {
    let sql = "INSERT INTO persons (id) VALUES (?1)";
    db.execute(sql, [id]).map(drop)
}

pub(super) fn put_account(
    db: &Connection,
    channel: &str,
    user: &str,
    account: &Account,
) -> rusqlite::Result<()> {
    let text = |field| account.profile.get(field).and_then(Value::as_str);
    let sql = "INSERT INTO identities VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
               ON CONFLICT (id) DO UPDATE SET person_id = ?2, confidence = ?5, profile = ?6,
                 phone = ?7, email = ?8";
    let profile = Value::Object(account.profile.clone()).to_string();
    let values = params![
        account.id,
        account.person,
        channel,
        user,
        account.confidence,
        profile,
        text("phone"),
        text("email")
    ];
    db.execute(sql, values).map(drop)
}

/// The person that remains after all merges.
pub(super) fn present(db: &Connection, person: &str) -> rusqlite::Result<Option<String>> {
    let sql = "WITH RECURSIVE line (id, next) AS (
                 SELECT id, merged_into FROM persons WHERE id = ?1
                 UNION SELECT p.id, p.merged_into FROM persons p JOIN line ON p.id = line.next)
               SELECT id FROM line WHERE next IS NULL";
    db.query_row(sql, [person], |row| row.get(0)).optional()
}

/// Moves all accounts of `source` to `target`, and returns them.
pub(super) fn merge(db: &Connection, target: &str, source: &str) -> rusqlite::Result<Vec<String>> {
    let sql = "UPDATE identities SET person_id = ?1 WHERE person_id = ?2 RETURNING id";
    let mut moved = db
        .prepare(sql)?
        .query_map([target, source], |row| row.get(0))?
        .collect::<rusqlite::Result<Vec<String>>>()?;
    moved.sort_unstable();
    let sql = "UPDATE persons SET merged_into = ?1 WHERE id = ?2";
    db.execute(sql, [target, source])?;
    Ok(moved)
}

/// How many persons and accounts there are.
pub(super) fn count(db: &Connection) -> rusqlite::Result<(u32, u32)> {
    let sql = "SELECT (SELECT count(*) FROM persons WHERE merged_into IS NULL),
                      (SELECT count(*) FROM identities)";
    db.query_row(sql, (), |row| Ok((row.get(0)?, row.get(1)?)))
}
