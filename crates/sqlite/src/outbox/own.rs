//! The outbox in the engine's file: read on its own connection, written by the writer.

use std::path::Path;
use std::sync::Arc;

use everbus_core::{BoxFuture, Clock, OutboxSource, Result};
use rusqlite::Connection;

use super::source::{Access, Source};
use crate::handle::Handle;

struct Own(Arc<Handle>);

/// The outbox of an opened engine.
pub(crate) fn own_outbox(handle: Arc<Handle>) -> Arc<dyn OutboxSource> {
    Arc::new(Source::new(Own(handle)))
}

impl Access for Own {
    fn name(&self) -> String {
        self.0.path.display().to_string()
    }

    fn file(&self) -> &Path {
        &self.0.path
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.0.clock
    }

    fn is_own(&self) -> bool {
        true
    }

    fn has_retention(&self) -> bool {
        true
    }

    fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        self.0.query_outbox(|reader| query(&reader.conn))
    }

    fn write<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        self.0.job(|writer| change(&writer.tx.conn))
    }
}
