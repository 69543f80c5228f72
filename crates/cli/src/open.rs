//! Which file or engine a command works on, and how it is opened.

use std::path::{Path, PathBuf};
use std::time::Duration;

use everbus::Bus;
use everbus_core::{Code, Engine, Error};

use crate::args::Args;
use crate::stop::{Outcome, Stop};

const DEFAULT_FILE: &str = "everbus.db";

/// What `--db`, `--broker` and the environment chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A file of the embedded engine.
    File(PathBuf),
    /// Another engine.
    Url(String),
}

impl Target {
    /// A flag beats the environment, whichever of the two variables is set.
    pub(crate) fn choose(args: &Args) -> Outcome<Self> {
        if let Some(path) = &args.db {
            return Ok(Self::File(path.clone()));
        }
        if let Some(url) = &args.broker {
            return Self::from_url(url);
        }
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        match (variable("EVERBUS_DB"), variable("EVERBUS_BROKER")) {
            (Some(_), Some(_)) => Err(Stop::usage(
                "EVERBUS_DB and EVERBUS_BROKER are both set",
                Some("unset one, or name the file with --db"),
            )),
            (Some(path), None) => Ok(Self::File(path.into())),
            (None, Some(url)) => Self::from_url(&url.to_string_lossy()),
            (None, None) => Ok(Self::File(DEFAULT_FILE.into())),
        }
    }

    fn from_url(url: &str) -> Outcome<Self> {
        if url.starts_with("memory:") {
            return Err(Stop::Failed(
                Error::new(
                    Code::InvalidUrl,
                    "events in memory live and die with the program that holds them",
                )
                .hint("name a file: --db everbus.db"),
            ));
        }
        // A file may also be written as a URL; what it may look like is the library's business.
        let path = url.strip_prefix("sqlite:").filter(|p| !p.contains('?'));
        match path.map(|p| p.strip_prefix("//").unwrap_or(p)) {
            Some(path) if !path.is_empty() && path != ":memory:" => Ok(Self::File(path.into())),
            _ => Ok(Self::Url(url.to_owned())),
        }
    }

    /// The file, for commands that work on files.
    pub(crate) fn path(&self) -> Outcome<&Path> {
        match self {
            Self::File(path) => Ok(path),
            Self::Url(url) => Err(Stop::Failed(
                Error::new(Code::Unsupported, format!("{url} is not a file"))
                    .hint("name the file with --db"),
            )),
        }
    }

    /// The option that names this target again, for the commands we suggest.
    pub(crate) fn as_option(&self) -> String {
        use crate::output::shell_word;
        match self {
            Self::File(path) => format!("--db {}", shell_word(&path.to_string_lossy())),
            Self::Url(url) => format!("--broker {}", shell_word(url)),
        }
    }

    /// Opens what exists. A command that reads must not leave an empty file behind.
    pub(crate) async fn open_existing(&self) -> Outcome<Engine> {
        self.open(false).await
    }

    /// Opens a bus that publishes; a file is created if it is not there.
    pub(crate) async fn open_bus(&self) -> Outcome<Bus> {
        Ok(Bus::builder().with_engine(self.open(true).await?)?)
    }

    async fn open(&self, create: bool) -> Outcome<Engine> {
        match self {
            Self::File(path) => {
                let path = path.clone();
                let options = everbus_sqlite::Options {
                    create,
                    ..everbus_sqlite::Options::default()
                };
                Ok(blocking(move || everbus_sqlite::open(&path, options)).await?)
            }
            Self::Url(url) => {
                let bus = Bus::builder().create(create).open(url).await?;
                Ok(bus.engine().clone())
            }
        }
    }
}

/// Runs what blocks off the executor.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> everbus_core::Result<T> + Send + 'static,
) -> everbus_core::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(Error::new(Code::Internal, "a task ended early").caused_by(error)),
    }
}

/// Closes an engine after the command is done; what it printed stands either way.
pub(crate) async fn close(engine: &Engine) {
    let close = tokio::time::timeout(Duration::from_secs(10), engine.broker.close());
    if let Ok(Err(error)) = close.await {
        tracing::warn!(%error, "the file did not close cleanly");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sqlite_url_names_its_file() {
        let file = |path: &str| Target::File(path.into());
        assert_eq!(Target::from_url("sqlite:a/b.db").unwrap(), file("a/b.db"));
        assert_eq!(Target::from_url("sqlite://a/b.db").unwrap(), file("a/b.db"));
        assert_eq!(Target::from_url("sqlite:///a.db").unwrap(), file("/a.db"));
        assert!(Target::from_url("memory:").is_err());
        assert!(matches!(
            Target::from_url("kafka://h").unwrap(),
            Target::Url(_)
        ));
    }
}
