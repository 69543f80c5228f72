//! A broker with a hook before and after each append. Used to kill a process between an object and its event,
//! and to plant bugs.

use std::sync::Arc;

use everbus_core::{Appended, BoxFuture, Broker, BrokerLayer, Event, Result};

/// Code that runs around an append.
pub trait Hook: Send + Sync + 'static {
    /// Before the engine has the events.
    fn before(&self, batch: &[Event]);
    /// After the commit, before the publisher gets its answer.
    fn after(&self, batch: &[Event]);
}

/// Passes everything on, with a hook around appends.
pub struct Hooked {
    inner: Arc<dyn Broker>,
    hook: Box<dyn Hook>,
}

impl Hooked {
    /// Puts a hook around the appends of a broker.
    pub fn wrap(inner: Arc<dyn Broker>, hook: impl Hook) -> Arc<dyn Broker> {
        let hook = Box::new(hook);
        Arc::new(Self { inner, hook })
    }
}

impl BrokerLayer for Hooked {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        Box::pin(async move {
            self.hook.before(&batch);
            let answers = self.inner.append(batch.clone()).await?;
            self.hook.after(&batch);
            Ok(answers)
        })
    }
}
