//! The head of the audit trail, kept in a file beside the database: `FILE.audit-head`.
//!
//! It records the last known record of the chain, and up to which record retention may remove the chain. The file is
//! replaced as a whole and only under a lock, since several processes share it.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use everbus_core::{AuditHead, Clock as _, Error, Result, SystemClock};

use crate::errors::io_code;
use crate::file::open_reader;

/// First line of the file.
const TITLE: &str = "everbus audit head 1";
/// Size limit: the file has a few lines; a larger one is not from Everbus.
const LARGEST: u64 = 4096;

/// Content of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// The chain reached at least this record.
    pub(super) head: AuditHead,
    /// Retention may have removed the chain up to here. Written before retention removes anything.
    pub(super) anchor: AuditHead,
    /// The first record that was written while the head was kept.
    pub(super) since: u64,
}

/// What reading the file found.
#[derive(Debug)]
pub(super) enum Found {
    Nothing,
    Unreadable(String),
    Kept(Kept),
}

impl Found {
    pub(super) fn kept(&self) -> Option<&Kept> {
        match self {
            Self::Kept(kept) => Some(kept),
            Self::Nothing | Self::Unreadable(_) => None,
        }
    }
}

/// The file that keeps the head of one database.
#[derive(Clone, Debug)]
pub(super) struct HeadFile {
    path: PathBuf,
    lock: PathBuf,
}

impl HeadFile {
    pub(super) fn of(database: &Path) -> Self {
        Self {
            path: beside(database, ".audit-head"),
            lock: beside(database, ".audit-lock"),
        }
    }

    pub(super) fn read(&self) -> Found {
        match std::fs::metadata(&self.path) {
            Ok(meta) if meta.len() > LARGEST => {
                return Found::Unreadable("it is too large".into());
            }
            _ => {}
        }
        match std::fs::read_to_string(&self.path) {
            Ok(text) => match parse(&text) {
                Some(kept) => Found::Kept(kept),
                None => Found::Unreadable("it is not in the form that Everbus writes".into()),
            },
            Err(e) if e.kind() == ErrorKind::NotFound => Found::Nothing,
            Err(e) => Found::Unreadable(e.to_string()),
        }
    }

    /// Changes the content. While `change` decides, no other process writes; `None` leaves the file as it is.
    pub(super) fn update(&self, change: impl FnOnce(Found) -> Result<Option<Kept>>) -> Result<()> {
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&self.lock)
            .and_then(|file| file.lock().map(|()| file))
            .map_err(|e| self.failed(e))?;
        if let Some(kept) = change(self.read())? {
            self.write(&kept).map_err(|e| self.failed(e))?;
        }
        drop(lock);
        Ok(())
    }

    /// The new file replaces the old one once it is durable.
    fn write(&self, kept: &Kept) -> std::io::Result<()> {
        let partial = beside(&self.path, ".partial");
        let mut file = File::create(&partial)?;
        file.write_all(print(kept).as_bytes())?;
        file.sync_all()?;
        drop(file);
        std::fs::rename(&partial, &self.path)?;
        self.sync_directory()
    }

    fn sync_directory(&self) -> std::io::Result<()> {
        let directory = match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        File::open(directory)?.sync_all()
    }

    fn failed(&self, error: std::io::Error) -> Error {
        Error::new(
            io_code(&error),
            format!("{} cannot be written: {error}", self.path.display()),
        )
        .hint("the directory of the file must be writable; the records themselves are safe")
        .caused_by(error)
    }
}

/// Creates the head file, once in the life of a database, before the trail gets its first record.
pub(super) fn begin(database: &Path) {
    let begun = HeadFile::of(database).update(|found| {
        Ok(matches!(found, Found::Nothing).then_some(Kept {
            head: AuditHead::ORIGIN,
            anchor: AuditHead::ORIGIN,
            since: 1,
        }))
    });
    if let Err(error) = begun {
        tracing::warn!(target: "everbus::audit", %error, "the head of the audit trail could not be kept outside the file");
    }
}

/// Returns the head of the audit trail that is kept beside a database, if the file exists and can be read.
pub fn kept_head(database: &Path) -> Option<AuditHead> {
    let found = HeadFile::of(database).read();
    found
        .kept()
        .map(|kept| kept.head)
        .filter(|head| head.seq > 0)
}

/// Sets the head file of a restored database to what its trail says. The previous head file is renamed.
pub(crate) fn adopt(database: &Path) -> Result<()> {
    let conn = open_reader(database)?;
    if crate::schema::identify(&conn)? != crate::schema::Kind::Ours(crate::schema::VERSION) {
        // An older database has no trail yet.
        return Ok(());
    }
    let (head, _) = super::last(&conn)?;
    let (anchor, _) = super::anchor(&conn)?;
    let file = HeadFile::of(database);
    if !matches!(file.read(), Found::Nothing) {
        let stamp = SystemClock.now().as_micros();
        let aside = beside(&file.path, &format!(".before-restore-{stamp}"));
        std::fs::rename(&file.path, aside).map_err(|e| file.failed(e))?;
    }
    if head.seq == 0 {
        return Ok(());
    }
    file.update(|_| {
        Ok(Some(Kept {
            head,
            anchor,
            since: 1,
        }))
    })
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

fn print(kept: &Kept) -> String {
    let Kept {
        head,
        anchor,
        since,
    } = kept;
    format!("{TITLE}\nhead {head}\nanchor {anchor}\nsince {since}\n")
}

fn parse(text: &str) -> Option<Kept> {
    let mut lines = text.lines();
    if lines.next()? != TITLE {
        return None;
    }
    let mut value = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
    let kept = Kept {
        head: value("head")?.parse().ok()?,
        anchor: value("anchor")?.parse().ok()?,
        since: value("since")?.parse().ok()?,
    };
    lines.next().is_none().then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use everbus_core::AuditHash;

    #[test]
    fn what_is_kept_is_read_as_it_was_written_and_nothing_else_is() {
        let hash = |byte| AuditHash::from_bytes(&[byte; 32]).unwrap();
        let kept = Kept {
            head: AuditHead {
                seq: 9,
                hash: hash(1),
            },
            anchor: AuditHead {
                seq: 4,
                hash: hash(2),
            },
            since: 1,
        };
        let text = print(&kept);
        assert_eq!(parse(&text), Some(kept));
        for cut in 0..text.len() - 1 {
            assert_eq!(parse(&text[..cut]), None, "{cut}");
        }
        assert_eq!(parse(&text.replace("head 9", "head x")), None);
        assert_eq!(parse(&format!("{text}more\n")), None);

        let dir = tempfile::tempdir().unwrap();
        let file = HeadFile::of(&dir.path().join("a.db"));
        assert!(matches!(file.read(), Found::Nothing));
        file.update(|_| Ok(Some(kept))).unwrap();
        assert_eq!(file.read().kept(), Some(&kept));
        file.update(|found| {
            assert_eq!(found.kept(), Some(&kept));
            Ok(None)
        })
        .unwrap();
        std::fs::write(&file.path, vec![b'x'; 5000]).unwrap();
        assert!(matches!(file.read(), Found::Unreadable(_)));
    }
}
