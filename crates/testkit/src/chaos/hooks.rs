//! A broker with something done right before and right after each append: where a process shall die
//! between an object and its event, and where bugs are planted.

use std::sync::Arc;

use everbus_core::{Appended, BoxFuture, Broker, BrokerLayer, Event, Result};

/// What is done around an append.
pub trait Hook: Send + Sync + 'static {
    /// Before the engine has the events.
    fn before(&self, batch: &[Event]);
    /// When they are committed, and before anybody is told.
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
