//! The suite every engine passes.

use std::sync::Arc;

use everbus_core::{Clock, Engine};
use everbus_sqlite::Options;
use everbus_testkit::conformance::Harness;

/// A file in a directory of its own.
#[derive(Debug)]
pub(crate) struct File(tempfile::TempDir);

impl File {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }
}

impl Harness for File {
    async fn open(&self, clock: Arc<dyn Clock>) -> Engine {
        let path = self.0.path().join("test.db");
        let options = Options {
            clock,
            ..Options::default()
        };
        everbus_sqlite::open(&path, options).expect("the file opens")
    }

    fn survives_restart(&self) -> bool {
        true
    }
}

// conformance: bus/conformance-suite: the SQLite engine passes the suite every engine passes
everbus_testkit::conformance_tests!(File::new());
