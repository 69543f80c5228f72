//! The objects beside a file: checks that each object of an event exists, and lists objects without an event.
//!
//! Payloads are put together here without the bus: a bug in its reading must not hide what it wrote.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use everbus::Bus;
use everbus::overflow::{Collect, Collected};
use everbus_core::{Event, Overflow};

use super::Broken;
use super::hooks::Hook;

/// Larger events are split by the victims that split events.
pub const THRESHOLD: usize = 2048;

/// Where the objects of a file are.
pub fn directory(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".objects");
    name.into()
}

/// The payload that an event was published with, from its inline part and its object; or the problem with the
/// object.
pub fn whole(file: &Path, carried: &[u8], reference: &Overflow) -> Result<Vec<u8>, String> {
    let key = &reference.key;
    let object = std::fs::read(directory(file).join(key))
        .map_err(|error| format!("refers to the object {key}: {error}"))?;
    if object.len() as u64 != reference.size {
        return Err(format!(
            "refers to the object {key} of {} bytes, which has {}",
            reference.size,
            object.len()
        ));
    }
    if reference.parts.is_empty() {
        return Ok(object);
    }
    let torn = || format!("has parts that are not in its object {key}");
    let (mut payload, mut done) = (Vec::new(), 0);
    for part in &reference.parts {
        let place = |number: u64| usize::try_from(number).map_err(|_| torn());
        let (at, from, len) = (place(part.at)?, place(part.from)?, place(part.len)?);
        let end = from.checked_add(len).ok_or_else(torn)?;
        payload.extend(carried.get(done..at).ok_or_else(torn)?);
        payload.extend(object.get(from..end).ok_or_else(torn)?);
        done = at + b"null".len();
    }
    payload.extend(carried.get(done..).ok_or_else(torn)?);
    Ok(payload)
}

/// Object files that no event refers to.
pub fn unreferenced(file: &Path, referenced: &HashSet<String>) -> Result<Vec<String>, Broken> {
    let root = directory(file);
    let mut left = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(Broken(format!("listing the objects: {error}"))),
        };
        for entry in entries {
            let path = entry.map_err(Broken::at("listing the objects"))?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(&root).unwrap_or(&path);
            let name = name.to_string_lossy().into_owned();
            if !referenced.contains(&name) {
                left.push(name);
            }
        }
    }
    Ok(left)
}

/// Deletes objects that no event refers to, of any age. No process may be publishing.
pub fn collect(file: &Path) -> Result<Collected, Broken> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .map_err(Broken::at("starting a runtime"))?;
    let options = Collect {
        strays_after: Duration::ZERO,
        ..Collect::default()
    };
    runtime
        .block_on(async {
            let bus = Bus::open(format!("sqlite:{}", file.display())).await?;
            let collected = bus.collect_objects(&options).await;
            bus.shutdown().await?;
            collected
        })
        .map_err(|error| Broken(format!("collecting objects: {error:?}")))
}

/// Kills the process after the object of the n-th event is durable and before the event is in the log.
pub struct DieBetween(AtomicU64);

impl DieBetween {
    /// At the n-th time, counted from 1.
    pub fn new(n: u64) -> Self {
        Self(AtomicU64::new(n))
    }
}

impl Hook for DieBetween {
    fn before(&self, batch: &[Event]) {
        let split = batch.iter().any(|event| event.overflow().is_some());
        if split && self.0.fetch_sub(1, Ordering::SeqCst) == 1 {
            std::process::abort();
        }
    }

    fn after(&self, _batch: &[Event]) {}
}
