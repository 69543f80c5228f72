//! File system operations on a directory of objects: making it and its entries durable, removing what
//! interrupted puts left, and importing a file.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::key;

/// Creates a directory and its parents, and syncs those that got a new entry.
pub(super) fn make_directory(path: &Path) -> std::io::Result<()> {
    let missing: Vec<&Path> = path
        .ancestors()
        .take_while(|above| !above.is_dir())
        .collect();
    std::fs::create_dir_all(path)?;
    for made in missing {
        match made.parent() {
            Some(above) if !above.as_os_str().is_empty() => sync_directory(above)?,
            Some(_) => sync_directory(Path::new("."))?,
            None => {}
        }
    }
    Ok(())
}

pub(super) fn sync_directory(path: &Path) -> std::io::Result<()> {
    if cfg!(unix) {
        std::fs::File::open(path)?.sync_all()?;
    }
    Ok(())
}

/// `object_store` writes a file with `#` and a number after its name, then renames it. Among the objects
/// all such files are removed; beside them only those of `mark`, because other programs may keep files
/// there.
pub(super) fn sweep(place: &Path, mark: &str, after: Duration, dry_run: bool) -> (u64, u64) {
    let entries = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten();
    let (mut files, mut bytes) = (0, 0);
    let objects = entries(&place.join(key::FOLDER)).flat_map(|entity| entries(&entity.path()));
    let marks = entries(place).filter(|entry| {
        let name = entry.file_name();
        let name = name.to_str().and_then(|name| name.strip_prefix(mark));
        name.is_some_and(|rest| rest.starts_with('#'))
    });
    for entry in objects.chain(marks) {
        let name = entry.file_name();
        let unfinished = name.to_str().is_some_and(|name| {
            let parts = name.rsplit_once('#');
            parts.is_some_and(|(_, n)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        });
        let Some(meta) = entry
            .metadata()
            .ok()
            .filter(|meta| unfinished && meta.is_file())
        else {
            continue;
        };
        let age = meta.modified().ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age >= after)
            && (dry_run || std::fs::remove_file(entry.path()).is_ok())
        {
            files += 1;
            bytes += meta.len();
        }
    }
    (files, bytes)
}

/// Creates a hard link to a file where the name is free, or a copy if links are not possible. Only regular
/// files are accepted. Durable once its directory has been synced; returns false if the name is taken.
pub(super) fn bring_in(file: &Path, to: &Path) -> std::io::Result<bool> {
    if !std::fs::symlink_metadata(file)?.is_file() {
        return Err(ErrorKind::InvalidData.into());
    }
    match std::fs::hard_link(file, to) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(error),
        // Another file system, or one without hard links.
        Err(_) => {}
    }
    let partial = partial(to);
    let copied = std::fs::copy(file, &partial)
        .and_then(|_| std::fs::File::open(&partial)?.sync_all())
        .and_then(|()| name(&partial, to));
    if copied.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    copied
}

/// The name of an unfinished file; the sweep recognises it.
pub(super) fn partial(of: &Path) -> PathBuf {
    let mut name = of.as_os_str().to_owned();
    name.push(format!("#{}", std::process::id()));
    name.into()
}

/// Renames a finished file, unless the name is taken.
pub(super) fn name(partial: &Path, to: &Path) -> std::io::Result<bool> {
    let named = match std::fs::hard_link(partial, to) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(_) if to.symlink_metadata().is_ok() => Ok(false),
        // A file system without hard links.
        Err(_) => return std::fs::rename(partial, to).map(|()| true),
    };
    std::fs::remove_file(partial)?;
    named
}
