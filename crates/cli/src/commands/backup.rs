//! `everbus backup` copies a file and the objects that its events refer to, while both are in use.

use std::path::{Path, PathBuf};

use everbus::overflow::{Place, is_in_use};
use everbus_core::{Code, Engine, Error};
use indicatif::ProgressBar;
use serde_json::json;

use super::carry::{Carried, Carrier, References};
use crate::files::{self, OBJECTS, with_suffix};
use crate::open::{Target, blocking, close, refuse_directory_name};
use crate::output::{Output, counted, escaped, grouped};
use crate::progress;
use crate::stop::{Outcome, Stop};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The large parts of large events are objects outside of the file. The objects that the copied events refer to are \
copied into the directory FILE.objects. `everbus restore` brings them back, and `everbus --db FILE get ID` reads \
them there. A backup is complete and durable when the command ends with exit code 0. If an object is missing or \
damaged, the command copies everything else, names the object, and ends with exit code 1.")]
pub(crate) struct BackupArgs {
    /// The new file; it must not exist
    pub(crate) file: PathBuf,

    /// Leave out the objects of large events
    #[arg(long)]
    pub(crate) no_objects: bool,
}

pub(crate) async fn run(args: BackupArgs, target: &Target, output: &mut Output) -> Outcome {
    refuse_directory_name(&args.file, "everbus backup")?;
    for file in [args.file.clone(), with_suffix(&args.file, OBJECTS)] {
        if file.symlink_metadata().is_ok() {
            let what = format!("{} exists already", file.display());
            let error = Error::new(Code::InvalidSetting, what);
            return Err(error
                .hint("choose another name; nothing is overwritten")
                .into());
        }
    }
    target.path()?;
    let engine = target.open_existing().await?;
    let stage = with_suffix(&args.file, ".backing-up");
    let made = back_up(&args, &stage, &engine, target).await;
    close(&engine).await;
    let carried = match made {
        Ok(carried) => carried,
        Err(stop) => {
            let _ = files::remove(&stage);
            return Err(stop);
        }
    };
    let bytes = std::fs::metadata(&args.file).map_or(0, |meta| meta.len());
    if output.is_json() {
        output.json(&json!({
            "backup": args.file.to_string_lossy(),
            "bytes": bytes,
            "kept": null,
            "objects": carried.as_ref().map(Carried::json),
        }))?;
    } else {
        let name = args.file.to_string_lossy();
        output.line(format!(
            "backup: {} ({} bytes)",
            escaped(&name),
            grouped(bytes)
        ))?;
        if let Some(carried) = &carried {
            carried.print(output)?;
        }
    }
    match carried {
        Some(carried) if !carried.lost.is_empty() => {
            carried.warn();
            tracing::warn!("these events are in the backup without their large parts");
            Err(Stop::Unsatisfied)
        }
        _ => Ok(()),
    }
}

/// Makes the backup under another name first, so that a file with the requested name is complete.
async fn back_up(
    args: &BackupArgs,
    stage: &Path,
    engine: &Engine,
    target: &Target,
) -> Outcome<Option<Carried>> {
    // Left by a backup that was interrupted.
    files::remove(stage)?;
    let here = match (args.no_objects, &engine.objects) {
        (false, Some(beside)) => Some(Place::of(&target.overflow()?, beside)?),
        _ => None,
    };
    let others = match &here {
        Some(_) => Place::others(&target.overflow()?, engine.objects.as_deref())?,
        None => Vec::new(),
    };
    let there = with_suffix(stage, OBJECTS);
    let there = Place::directory(&there);
    let mut carrier = here
        .as_ref()
        .map(|here| Carrier::new(std::iter::once(here).chain(&others).collect(), &there));
    // The objects first: if an event is removed after the file was copied, its object may be gone too.
    if let (Some(carrier), Ok(file)) = (&mut carrier, target.path()) {
        carrier.round(file).await?;
    }
    let bar = progress::bar("copying pages", Some(0));
    let copied = match engine.maintenance() {
        Ok(maintenance) => {
            maintenance
                .backup(stage.into(), reporter(bar.clone()))
                .await
        }
        Err(error) => Err(error),
    };
    bar.finish_and_clear();
    copied?;
    let carried = match carrier {
        None => {
            say_what_is_left_out(args, stage).await?;
            None
        }
        Some(mut carrier) => {
            // Copies objects that were stored since.
            carrier.round(stage).await?;
            let mut carried = carrier.finish();
            for (id, key, why) in std::mem::take(&mut carried.lost) {
                // The object of an event that was removed meanwhile may be gone.
                if is_in_use(engine, id, &key).await? {
                    carried.lost.push((id, key, why));
                }
            }
            let place = with_suffix(&args.file, OBJECTS);
            carried.place = place.to_string_lossy().into_owned();
            Some(carried)
        }
    };
    let (from, to) = (stage.to_path_buf(), args.file.clone());
    blocking(move || {
        files::rename(&from, &to)?;
        files::sync_beside(&to)
    })
    .await?;
    Ok(carried)
}

async fn say_what_is_left_out(args: &BackupArgs, copy: &Path) -> Outcome {
    let (mut count, mut references) = (0, References::of(copy));
    while let Some(page) = references.page().await? {
        count += page.len() as u64;
    }
    if args.no_objects && count > 0 {
        tracing::warn!(
            "the large parts of {} are not in the backup (--no-objects)",
            counted(count, "event")
        );
    }
    Ok(())
}

/// Called with the number of copied pages and the total.
pub(super) type Report = Box<dyn FnMut(u64, u64) + Send>;

pub(super) fn reporter(bar: ProgressBar) -> Report {
    Box::new(move |copied, of| {
        bar.set_length(of);
        bar.set_position(copied);
    })
}
