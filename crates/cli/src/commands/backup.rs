//! `everbus backup` copies a file while it is in use; `everbus restore` brings a backup into place.

use std::path::{Path, PathBuf};

use everbus::audit::Operator;
use everbus_core::{AuditEntry, AuditHead, Clock as _, Code, Engine, Error, SystemClock};
use indicatif::ProgressBar;
use serde_json::json;

use crate::args::{BackupArgs, RestoreArgs};
use crate::files::{self, with_suffix};
use crate::open::{Target, blocking, close, refuse_directory_name};
use crate::output::{Output, escaped, grouped};
use crate::progress;
use crate::stop::{Outcome, Stop, about};

pub(crate) async fn backup(args: BackupArgs, target: &Target, output: &mut Output) -> Outcome {
    refuse_directory_name(&args.file, "everbus backup")?;
    let engine = target.open_existing().await?;
    let bar = progress::bar("copying pages", Some(0));
    let copied = match engine.maintenance() {
        Ok(maintenance) => {
            let report = reporter(bar.clone());
            maintenance.backup(args.file.clone(), report).await
        }
        Err(error) => Err(error),
    };
    bar.finish_and_clear();
    close(&engine).await;
    copied?;
    done("backup", &args.file, None, output)
}

pub(crate) async fn restore(args: RestoreArgs, target: &Target, output: &mut Output) -> Outcome {
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
        let (alone, regular) = (path.clone(), path.is_file());
        if regular {
            blocking(move || files::claim_alone(&alone)).await?;
            action.record(&path, "restore", None).await;
        }
    }
    let bar = progress::bar("copying pages", Some(0));
    let report = reporter(bar.clone());
    let (from, to) = (args.file, path.clone());
    let outcome = blocking(move || {
        if exists {
            replace(&from, &to, report).map(Some)
        } else {
            copy(&from, &to, report).map(|()| None)
        }
    })
    .await;
    bar.finish_and_clear();
    let kept = outcome?;
    action.record(&path, "restore.done", kept.as_deref()).await;
    done("restored", &path, kept.as_deref(), output)
}

/// What the audit trails of the old and the new file say about a restore.
struct Restoring {
    backup: String,
    /// How far the trail of the old file had come.
    head_before: Option<AuditHead>,
}

impl Restoring {
    /// Records it in a file, if that has a trail: a damaged file or one of an older version is left as
    /// it is.
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

/// Is told pages copied and in all.
type Report = Box<dyn FnMut(u64, u64) + Send>;

fn reporter(bar: ProgressBar) -> Report {
    Box::new(move |copied, of| {
        bar.set_length(of);
        bar.set_position(copied);
    })
}

/// Restores to where nothing is. What is wrong with the backup is said with its name, since two
/// files are in play.
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

/// Restores beside the old file first, so that a bad backup changes nothing, then swaps the two.
/// Returns where the old file is kept.
fn replace(backup: &Path, target: &Path, report: Report) -> everbus_core::Result<PathBuf> {
    let is_file = std::fs::metadata(target).is_ok_and(|meta| meta.is_file());
    if !is_file {
        return Err(Error::new(
            Code::NotAFile,
            format!("{} is not a regular file", target.display()),
        ));
    }
    files::claim_alone(target)?;
    let stamp = SystemClock.now().as_micros();
    let fresh = with_suffix(target, &format!(".restoring-{stamp}"));
    let old = with_suffix(target, &format!(".before-restore-{stamp}"));
    let restored = copy(backup, &fresh, report)
        // Somebody may have come while we copied.
        .and_then(|()| files::claim_alone(target))
        .and_then(|()| files::swap(&fresh, target, &old));
    if restored.is_err() {
        let _ = files::remove(&fresh);
    }
    restored.map(|()| old)
}

fn done(what: &str, path: &Path, kept: Option<&Path>, output: &mut Output) -> Outcome {
    let bytes = std::fs::metadata(path).map_or(0, |meta| meta.len());
    if output.is_json() {
        return output.json(&json!({
            what: path.to_string_lossy(),
            "bytes": bytes,
            "kept": kept.map(Path::to_string_lossy),
        }));
    }
    output.line(format!(
        "{what}: {} ({} bytes)",
        escaped(&path.to_string_lossy()),
        grouped(bytes)
    ))?;
    if let Some(kept) = kept {
        output.line(format!(
            "the old file is kept as {}",
            escaped(&kept.to_string_lossy())
        ))?;
    }
    Ok(())
}
