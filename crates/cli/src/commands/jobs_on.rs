//! Tasks and jobs of the chosen file or engine, with their index in a file that later commands find again.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::PathBuf;

use everbus::Bus;
use everbus_jobs::Jobs;

use crate::open::Target;
use crate::stop::Outcome;

/// The options that say whose tasks a command is about.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Whose {
    /// Whose tasks
    #[arg(long, value_name = "TENANT", default_value = everbus_jobs::DEFAULT_TENANT)]
    pub(crate) tenant: String,
}

/// Opens the tasks and jobs of a tenant, or of the default one.
pub(crate) fn jobs_on(bus: &Bus, target: &Target, tenant: Option<&str>) -> Outcome<Jobs> {
    let mut jobs = Jobs::builder();
    if let Some(tenant) = tenant {
        jobs = jobs.tenant(tenant);
    }
    if let Some(file) = index_file(target) {
        jobs = jobs.index(file);
    }
    Ok(jobs.open(bus.clone())?)
}

/// The file of the index: beside the file of the events, or in the user's cache. `None`: the index is built for each
/// command.
pub(crate) fn index_file(target: &Target) -> Option<PathBuf> {
    if let Ok(path) = target.path() {
        let mut name = path.as_os_str().to_owned();
        name.push("-tasks");
        return Some(name.into());
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    let directory = cache.join("everbus");
    std::fs::create_dir_all(&directory).ok()?;
    let mut hash = DefaultHasher::new();
    target.label().hash(&mut hash);
    Some(directory.join(format!("tasks-{:016x}.db", hash.finish())))
}
