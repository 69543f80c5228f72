//! The thread that reads the log for groups that are behind, so that the writer does not have to.

use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use everbus_core::{Code, Error, GroupName, Pattern, Result};

use crate::deliveries::claims::Typed;
use crate::errors::from_sqlite;
use crate::queue::{Command, Queue};
use crate::readers::Reader;
use crate::rows::{RECORD, Stored, UNREADABLE, read_stored, seq_from, to_sql};

/// A request: what to read, for which group.
pub(crate) struct Feed {
    pub(crate) session: u64,
    /// Events addressed to other groups are left out.
    pub(crate) group: GroupName,
    pub(crate) after: u64,
    pub(crate) upto: u64,
    pub(crate) patterns: Vec<Pattern>,
    /// The group whose dropped events are left out, if it has any.
    pub(crate) without_drops_of: Option<i64>,
    pub(crate) limit: usize,
    pub(crate) bytes: u64,
}

/// What was read: the matching events after `after`, and how far the log was searched.
pub(crate) struct Fed {
    pub(crate) session: u64,
    pub(crate) after: u64,
    pub(crate) searched: u64,
    /// The patterns of the request.
    pub(crate) patterns: Vec<Pattern>,
    pub(crate) records: Result<Vec<Typed>>,
    /// Matching events that are damaged and cannot be handed out.
    pub(crate) damaged: Vec<Damaged>,
}

/// An event whose row is damaged.
#[derive(Clone)]
pub(crate) struct Damaged {
    pub(crate) seq: u64,
    pub(crate) type_id: i64,
    pub(crate) damage: String,
}

/// The events of a range of the log that a reader wants.
#[derive(Default)]
pub(crate) struct Matching {
    /// The events, oldest first.
    pub(crate) found: Vec<Typed>,
    /// Damaged events that match or may match.
    pub(crate) damaged: Vec<Damaged>,
    /// How far the log was searched.
    pub(crate) searched: u64,
}

/// At most this many rows are searched before the writer gets an answer.
const SEARCH: u64 = 200_000;

/// The thread that reads ahead.
pub(crate) struct Feeder {
    sender: Option<mpsc::Sender<Feed>>,
    handle: Option<JoinHandle<()>>,
}

impl Feeder {
    /// Sends a request. Returns whether an answer will come.
    pub(crate) fn ask(&self, feed: Feed) -> bool {
        self.sender
            .as_ref()
            .is_some_and(|sender| sender.send(feed).is_ok())
    }

    /// Ends the thread and closes its connection.
    pub(crate) fn close(&mut self) {
        self.sender = None;
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

/// Starts the thread.
pub(crate) fn start(path: &Path, queue: &Arc<Queue>) -> Result<Feeder> {
    let mut reader = Reader::open(path)?;
    let (sender, feeds) = mpsc::channel::<Feed>();
    let queue: Weak<Queue> = Arc::downgrade(queue);
    let handle = std::thread::Builder::new()
        .name("everbus-feed".into())
        .spawn(move || {
            for feed in feeds {
                let Some(queue) = queue.upgrade() else { return };
                queue.push(Command::Fed(serve(&mut reader, feed)));
            }
        })
        .map_err(|e| Error::new(Code::Internal, format!("no thread for reading ahead: {e}")))?;
    Ok(Feeder {
        sender: Some(sender),
        handle: Some(handle),
    })
}

fn serve(reader: &mut Reader, feed: Feed) -> Fed {
    let result = reader.snapshot(|reader| {
        read_matching(
            reader,
            (feed.after, feed.upto),
            &feed.patterns,
            Some(&feed.group),
            feed.without_drops_of,
            (feed.limit, feed.bytes),
        )
    });
    let (records, damaged, searched) = match result {
        Ok(read) => (Ok(read.found), read.damaged, read.searched),
        Err(e) => (Err(e), Vec::new(), feed.after),
    };
    Fed {
        session: feed.session,
        after: feed.after,
        searched,
        patterns: feed.patterns,
        records,
        damaged,
    }
}

/// Reads matching events after a position, up to a number of events or bytes. For a group, events addressed
/// to other groups are left out.
pub(crate) fn read_matching(
    reader: &mut Reader,
    (after, upto): (u64, u64),
    patterns: &[Pattern],
    group: Option<&GroupName>,
    without_drops_of: Option<i64>,
    (limit, limit_in_bytes): (usize, u64),
) -> Result<Matching> {
    let doing = |e| from_sqlite("reading the log", e);
    let upto = upto.min(after.saturating_add(SEARCH));
    let filter = type_filter(reader, patterns)?;
    let drops = match without_drops_of {
        None => "AND ?4 IS NULL",
        Some(_) => {
            "AND NOT EXISTS (SELECT 1 FROM skips WHERE skips.group_id = ?4 AND skips.seq = log.seq)"
        }
    };
    let sql = format!(
        "SELECT {RECORD} FROM log WHERE log.seq > ?1 AND log.seq <= ?2 {filter} {drops}
         ORDER BY log.seq LIMIT ?3"
    );
    let Reader { conn, types } = reader;
    let mut statement = conn.prepare_cached(&sql).map_err(doing)?;
    let mut rows = statement
        .query((
            to_sql(after),
            to_sql(upto),
            to_sql(limit as u64),
            without_drops_of,
        ))
        .map_err(doing)?;
    let mut read = Matching {
        searched: upto,
        ..Matching::default()
    };
    let (mut bytes, mut rows_read, mut last) = (0, 0, after);
    while let Some(row) = rows.next().map_err(doing)? {
        rows_read += 1;
        let seq = seq_from(row.get(0).map_err(doing)?);
        if seq <= last || seq > upto {
            // A reader that continued from here could read the same range for ever.
            return Err(out_of_order(last, seq));
        }
        last = seq;
        if rows_read == limit {
            // The query ends here, whether or not this row matches.
            read.searched = seq;
        }
        let Stored {
            type_id,
            record,
            damage,
        } = read_stored(conn, row, types)?;
        let event_type = record.event.event_type();
        // An event whose type is unreadable may match any pattern.
        let matches = patterns.iter().any(|p| p.matches(event_type))
            || (damage.is_some() && event_type == UNREADABLE);
        if !matches || group.is_some_and(|group| !record.event.is_for(group)) {
            continue;
        }
        bytes += record.event.payload().len() as u64;
        match damage {
            None => read.found.push((type_id, record)),
            Some(damage) => read.damaged.push(Damaged {
                seq,
                type_id,
                damage,
            }),
        }
        if bytes > limit_in_bytes {
            read.searched = seq;
            break;
        }
    }
    Ok(read)
}

fn out_of_order(after: u64, seq: u64) -> Error {
    Error::of_file(
        Code::Corrupt,
        format!("the rows of the log are out of order: {seq} comes after {after}"),
    )
    .hint("restore a backup with `everbus restore`; keep the damaged file for recovery")
}

/// More matching types than this are not listed in the query; the rows are filtered instead.
const LISTED_TYPES: usize = 2_000;

/// A condition for the matching types; empty if nearly all types match.
pub(crate) fn type_filter(reader: &Reader, patterns: &[Pattern]) -> Result<String> {
    let doing = |e| from_sqlite("reading the types", e);
    let mut statement = reader
        .conn
        .prepare_cached("SELECT id, name FROM types ORDER BY id")
        .map_err(doing)?;
    let mut rows = statement.query([]).map_err(doing)?;
    let (mut wanted, mut others, mut last) = (Vec::new(), 0u32, 0i64);
    while let Some(row) = rows.next().map_err(doing)? {
        last = row.get(0).map_err(doing)?;
        let name = row.get_ref(1).map_err(doing)?.as_str().unwrap_or_default();
        if patterns.iter().any(|p| p.matches(name)) {
            if wanted.len() == LISTED_TYPES {
                return Ok(String::new());
            }
            wanted.push(last.to_string());
        } else {
            others += 1;
        }
    }
    if others == 0 {
        return Ok(String::new());
    }
    // The inserted values are the engine's numbers, never text from a user. A number that no type can have is
    // damage and must be found; text and NULL sort after all numbers.
    Ok(format!(
        "AND (log.type IN ({}) OR log.type NOT BETWEEN 1 AND {last})",
        wanted.join(",")
    ))
}
