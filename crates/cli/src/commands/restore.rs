//! `everbus restore`: puts a backup in place, with its objects.

use std::path::{Path, PathBuf};

use everbus::audit::Operator;
use everbus::overflow::Place;
use everbus_core::{AuditEntry, AuditHead, Clock as _, Code, Engine, Error, SystemClock};
use serde_json::json;

use super::backup::{Report, reporter};
use super::carry::{Carried, Carrier};
use crate::files::{self, OBJECTS, with_suffix};
use crate::open::{Target, blocking, close};
use crate::output::{Output, escaped, grouped};
use crate::progress;
use crate::stop::{Outcome, Stop, about};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The objects of large events are copied from the directory BACKUP.objects. If an object is not there, it is copied from \
the objects of the replaced file or from the places of overflow.also_read. The copies go beside the file, or to \
overflow.url of the configuration; an existing object is never overwritten. A replaced file is kept beside the new one, \
together with its objects. If an object cannot be found, the command restores everything else, names the object, and \
ends with exit code 1.")]
pub(crate) struct RestoreArgs {
    /// The backup
    #[arg(value_name = "BACKUP")]
    pub(crate) file: PathBuf,

    /// Replace the file named by --db if it exists
    #[arg(long)]
    pub(crate) force: bool,
}

pub(crate) async fn run(args: RestoreArgs, target: &Target, output: &mut Output) -> Outcome {
    let path = target.path()?.to_path_buf();
    let exists = path.symlink_metadata().is_ok();
    if files::are_same(&args.file, &path) {
        return Err(Stop::usage(
            format!("{} is the file to restore itself", path.display()),
            Some("name a backup, and with --db the file that shall hold what is in it"),
        ));
    }
    if exists && !args.force {
        return Err(Error::new(
            Code::InvalidSetting,
            format!("{} is here already", path.display()),
        )
        .hint(
            "name a new file with --db, or replace it with --force; the old one is kept beside it",
        )
        .into());
    }
    let head_before = everbus_sqlite::kept_head(&path);
    let action = Restoring {
        backup: args.file.display().to_string(),
        head_before,
    };
    if exists {
        let alone = path.clone();
        if path.is_file() {
            blocking(move || files::claim_alone(&alone)).await?;
            action.record(&path, "restore", None).await;
        }
    }
    let stamp = SystemClock.now().as_micros();
    let names = Names {
        fresh: with_suffix(&path, &format!(".restoring-{stamp}")),
        old: with_suffix(&path, &format!(".before-restore-{stamp}")),
        path,
    };
    let brought = names.bring(&args.file, exists, target).await;
    let (carried, kept) = match brought {
        Ok(brought) => brought,
        Err(stop) => {
            let _ = files::remove(&names.fresh);
            return Err(stop);
        }
    };
    let path = names.path;
    action.record(&path, "restore.done", kept.as_deref()).await;
    done(&path, kept.as_deref(), &carried, output)?;
    if carried.lost.is_empty() {
        return Ok(());
    }
    carried.warn();
    tracing::warn!("these events are without their large parts until the objects are back");
    Err(Stop::Unsatisfied)
}

/// The paths of a restore.
struct Names {
    /// The path of the restored file.
    path: PathBuf,
    /// Where the new file is prepared, so that a bad backup changes nothing.
    fresh: PathBuf,
    /// Where the replaced file is kept.
    old: PathBuf,
}

impl Names {
    /// Prepares everything, then swaps. Returns the result for the objects, and where the old file is kept.
    async fn bring(
        &self,
        backup: &Path,
        exists: bool,
        target: &Target,
    ) -> Outcome<(Carried, Option<PathBuf>)> {
        let overflow = target.overflow()?;
        if exists && !std::fs::metadata(&self.path).is_ok_and(|meta| meta.is_file()) {
            let what = format!("{} is not a regular file", self.path.display());
            return Err(Error::new(Code::NotAFile, what).into());
        }
        let bar = progress::bar("copying pages", Some(0));
        let report = reporter(bar.clone());
        let (from, to) = (backup.to_path_buf(), self.fresh.clone());
        let copied = blocking(move || copy(&from, &to, report)).await;
        bar.finish_and_clear();
        copied?;

        let beside = with_suffix(&self.path, OBJECTS);
        let theirs = Place::directory(&with_suffix(backup, OBJECTS));
        let replaced = Place::directory(&beside);
        let place = Place::of(&overflow, &with_suffix(&self.fresh, OBJECTS))?;
        let others = Place::others(&overflow, None)?;
        let from = [&theirs, &replaced].into_iter().chain(&others).collect();
        let mut carrier = Carrier::new(from, &place);
        carrier.round(&self.fresh).await?;
        let mut carried = carrier.finish();
        if overflow.url.is_none() {
            carried.place = beside.to_string_lossy().into_owned();
        }
        let (fresh, path, old) = (self.fresh.clone(), self.path.clone(), self.old.clone());
        let kept = blocking(move || {
            if !exists {
                // Objects without their file are moved aside: not in the way, and not lost.
                let alone = beside.exists();
                if alone {
                    let aside = with_suffix(&old, OBJECTS);
                    std::fs::rename(&beside, &aside)
                        .map_err(|e| files::io_error("cannot move", &beside, e))?;
                }
                files::forget_log(&path)?;
                files::rename(&fresh, &path)?;
                files::sync_beside(&path)?;
                return Ok(alone.then(|| with_suffix(&old, OBJECTS)));
            }
            // Another program may have opened the file during the copy.
            files::claim_alone(&path)?;
            files::swap(&fresh, &path, &old)?;
            files::sync_beside(&path)?;
            Ok(Some(old))
        });
        Ok((carried, kept.await?))
    }
}

/// The record of a restore in the audit trails of the old and the new file.
struct Restoring {
    backup: String,
    /// The head of the old file's trail.
    head_before: Option<AuditHead>,
}

impl Restoring {
    /// Records the restore in a file, if the file has a trail. A damaged file or one of an older version is
    /// left as it is.
    async fn record(&self, path: &Path, action: &str, kept: Option<&Path>) {
        let file = path.to_path_buf();
        let opened = blocking(move || match files::schema_version(&file) {
            Some(everbus_sqlite::SCHEMA_VERSION) => {
                everbus_sqlite::open(&file, everbus_sqlite::Options::default()).map(Some)
            }
            _ => Ok(None),
        });
        let recorded = match opened.await {
            Ok(None) => return,
            Ok(Some(engine)) => {
                let recorded = self.record_in(&engine, action, kept).await;
                close(&engine).await;
                recorded
            }
            Err(error) => Err(error),
        };
        if let Err(error) = recorded {
            tracing::warn!(%error, "the restore could not be put on record");
        }
    }

    async fn record_in(
        &self,
        engine: &Engine,
        action: &str,
        kept: Option<&Path>,
    ) -> everbus_core::Result<()> {
        let operator = Operator::current();
        let audit = engine.audit()?;
        let details = json!({
            "backup": self.backup,
            "replaced": kept.map(Path::to_string_lossy),
            "head_before": self.head_before.map(|head| head.to_string()),
            "head": audit.head().await?.map(|head| head.to_string()),
            "reason": operator.reason,
        });
        let entry = AuditEntry::new(operator.actor, action);
        audit.record(entry.details(details)).await.map(drop)
    }
}

/// Copies a file to a new path. Errors in the backup name it, since two files are involved.
fn copy(backup: &Path, target: &Path, report: Report) -> everbus_core::Result<()> {
    everbus_sqlite::restore(backup, target, false, report).map_err(|error| {
        let name = backup.display().to_string();
        match error.code() {
            Code::Corrupt | Code::NotEverbus | Code::NewerSchema
                if !error.message().contains(&name) =>
            {
                about(&name, &error)
            }
            _ => error,
        }
    })
}

fn done(path: &Path, kept: Option<&Path>, carried: &Carried, output: &mut Output) -> Outcome {
    let bytes = std::fs::metadata(path).map_or(0, |meta| meta.len());
    if output.is_json() {
        return output.json(&json!({
            "restored": path.to_string_lossy(),
            "bytes": bytes,
            "kept": kept.map(Path::to_string_lossy),
            "objects": carried.json(),
        }));
    }
    output.line(format!(
        "restored: {} ({} bytes)",
        escaped(&path.to_string_lossy()),
        grouped(bytes)
    ))?;
    carried.print(output)?;
    if let Some(kept) = kept {
        output.line(format!(
            "what was there is kept as {}",
            escaped(&kept.to_string_lossy())
        ))?;
    }
    Ok(())
}
