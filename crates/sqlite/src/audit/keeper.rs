//! Moves the head file along with the chain, on its own thread.
//!
//! The head moves only along the chain: if the record that the head names has changed, the head stays, and
//! verification finds the contradiction.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use everbus_core::{AuditHash, AuditHead, BoxFuture, Result};
use rusqlite::Connection;

use super::Link;
use super::head::{Found, HeadFile, Kept};
use crate::readers::Readers;
use crate::rows::to_sql;
use crate::sql::Sql as _;

/// Keeps the head file of one engine, on a thread that the first record starts.
pub(crate) struct Keeper {
    file: HeadFile,
    thread: Arc<Readers>,
    /// Records that are not in the head file yet. The first task that runs stores the last of them for all tasks.
    pending: Arc<Mutex<Vec<Link>>>,
}

impl Keeper {
    pub(crate) fn new(database: PathBuf) -> Self {
        Self {
            file: HeadFile::of(&database),
            thread: Arc::new(Readers::new(database)),
            pending: Arc::default(),
        }
    }

    /// The thread, so that the engine can close it with the others.
    pub(crate) fn thread(&self) -> Arc<Readers> {
        self.thread.clone()
    }

    /// Stores the head of a durable record.
    pub(crate) fn advance(&self, link: Link) -> BoxFuture<'static, Result<()>> {
        lock(&self.pending).push(link);
        let (file, pending) = (self.file.clone(), self.pending.clone());
        self.thread.query(move |reader| {
            let mut links = std::mem::take(&mut *lock(&pending));
            links.sort_by_key(|link| link.head.seq);
            match links.last() {
                None => Ok(()),
                Some(last) => file.update(|found| next(&reader.conn, found, &links, last.head)),
            }
        })
    }

    /// Records that retention removes the chain up to here. Durable before retention removes anything.
    pub(crate) fn allow(&self, anchor: AuditHead) -> BoxFuture<'static, Result<()>> {
        let file = self.file.clone();
        self.thread.query(move |reader| {
            let (head, _) = super::last(&reader.conn)?;
            file.update(|found| {
                let kept = found.kept().copied();
                // The head moves too: it must never name a record that retention has removed.
                let moved = next(&reader.conn, found, &[], head)?;
                Ok(match moved.or(kept) {
                    Some(kept) if kept.anchor.seq < anchor.seq => Some(Kept { anchor, ..kept }),
                    _ => moved,
                })
            })
        })
    }
}

/// The new content of the head file when the chain ends at `head`. `None` if nothing changes.
fn next(conn: &Connection, found: Found, links: &[Link], head: AuditHead) -> Result<Option<Kept>> {
    let kept = match found {
        Found::Kept(kept) => kept,
        Found::Nothing | Found::Unreadable(_) => {
            let since = links.first().map_or(head.seq, |link| link.head.seq);
            if let Found::Unreadable(why) = found {
                tracing::error!(target: "everbus::audit", why, "the head of the audit trail, kept outside the file, could not be read: a new one is started");
            } else if since > 1 {
                tracing::warn!(target: "everbus::audit", since, "no head of the audit trail was kept outside the file: a new one is started");
            }
            return Ok(Some(Kept {
                head,
                anchor: super::anchor(conn)?.0,
                since,
            }));
        }
    };
    if kept.head.seq > head.seq {
        // Another process has written a later head. Otherwise the chain was shortened, and verification must report it.
        return Ok(None);
    }
    let known = links
        .iter()
        .flat_map(|link| [link.before, link.head])
        .find(|point| point.seq == kept.head.seq)
        .map(|point| point.hash);
    let there = match known {
        Some(hash) => Some(hash),
        None => hash_at(conn, kept.head.seq)?,
    };
    if there == Some(kept.head.hash) {
        return Ok((kept.head.seq < head.seq).then_some(Kept { head, ..kept }));
    }
    tracing::error!(
        target: "everbus::audit",
        record = kept.head.seq,
        "the audit trail contradicts the head kept outside the file; `everbus audit verify` says where"
    );
    Ok(None)
}

/// The hash of a record, or of the anchor in its place.
fn hash_at(conn: &Connection, seq: u64) -> Result<Option<AuditHash>> {
    let (anchor, _) = super::anchor(conn)?;
    if anchor.seq == seq {
        return Ok(Some(anchor.hash));
    }
    let doing = "reading the audit trail";
    let sql = "SELECT seq, hash, at FROM audit_log WHERE seq = ?1";
    conn.read_first(doing, sql, [to_sql(seq)], super::read_head)
        .map(|found| found.map(|(head, _)| head.hash))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
