//! The suite every engine passes.

use std::sync::Arc;

use everbus_core::{Clock, Engine};
use everbus_testkit::conformance::Harness;

use crate::support::{fresh_schema, options};

/// A schema of its own; `None` if there is no server here.
#[derive(Debug)]
pub(crate) struct Schema(Option<String>);

impl Schema {
    pub(crate) fn new() -> Self {
        Self(fresh_schema())
    }

    fn url(&self) -> &str {
        self.0.as_deref().expect("a server")
    }
}

impl Harness for Schema {
    async fn open(&self, clock: Arc<dyn Clock>) -> Engine {
        let engine = everbus_postgres::open(self.url(), options(clock)).await;
        engine.expect("the engine opens")
    }

    fn survives_restart(&self) -> bool {
        true
    }

    fn available(&self) -> Result<(), String> {
        match &self.0 {
            Some(_) => Ok(()),
            None => Err("there is no PostgreSQL server".into()),
        }
    }
}

// conformance: engines/postgres-suite: the PostgreSQL engine passes the suite every engine passes
everbus_testkit::conformance_tests!(Schema::new());
