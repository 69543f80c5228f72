//! A layer around every handler of the test bus: counts the calls, and makes some of them fail.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll};

use everbus_core::BoxFuture;
use parking_lot::Mutex;
use tower_layer::Layer;
use tower_service::Service;

use crate::handler::layers::HandlerService;
use crate::handler::message::Message;
use crate::handler::outcome::Outcome;
use crate::handler::{BoxError, HandlerError};

/// The counts and the planned failures. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Control(Arc<Mutex<Orders>>);

#[derive(Default)]
struct Orders {
    /// This many of the next calls fail, of any handler.
    fail_any: usize,
    /// This many of the next calls of a handler fail.
    fail_in: BTreeMap<String, usize>,
    calls: BTreeMap<String, usize>,
}

impl Control {
    pub(super) fn fail_next(&self, calls: usize) {
        self.0.lock().fail_any += calls;
    }

    pub(super) fn fail_next_in(&self, handler: &str, calls: usize) {
        *self.0.lock().fail_in.entry(handler.to_owned()).or_default() += calls;
    }

    pub(super) fn calls(&self, handler: &str) -> usize {
        self.0
            .lock()
            .calls
            .get(handler)
            .copied()
            .unwrap_or_default()
    }

    /// Counts a call. Returns whether it must fail.
    fn begin(&self, handler: &str) -> bool {
        let orders = &mut *self.0.lock();
        *orders.calls.entry(handler.to_owned()).or_default() += 1;
        let own = orders.fail_in.get_mut(handler).filter(|left| **left > 0);
        let left = match own {
            Some(left) => left,
            None if orders.fail_any > 0 => &mut orders.fail_any,
            None => return false,
        };
        *left -= 1;
        true
    }
}

impl Layer<HandlerService> for Control {
    type Service = Controlled;

    fn layer(&self, inner: HandlerService) -> Controlled {
        Controlled {
            control: self.clone(),
            inner,
        }
    }
}

/// A handler under control.
#[derive(Clone)]
pub(super) struct Controlled {
    control: Control,
    inner: HandlerService,
}

impl Service<Message> for Controlled {
    type Response = Outcome;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Outcome, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, message: Message) -> Self::Future {
        if self.control.begin(message.handler_name()) {
            let error = HandlerError::new("the test lets this call fail");
            return Box::pin(std::future::ready(Err(error.into())));
        }
        self.inner.call(message)
    }
}
