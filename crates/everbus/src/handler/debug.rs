//! Checks that `#[debug_handler]` makes the compiler do. None of this code ever runs.

use std::future::Future;

use crate::handler::extract::FromMessage;
use crate::handler::outcome::IntoOutcome;

/// A handler can have a parameter of this type.
pub fn is_extractor<T: FromMessage + 'static>() {}

/// A handler can return this type.
pub fn is_outcome<R: IntoOutcome + 'static>() {}

/// The handler can move from one thread to another while it waits.
pub fn is_send<F: Future + Send + 'static>(future: F) {
    drop(future);
}

/// Stands for an argument where a function is called only to see the type of its future.
pub fn value<T>() -> T {
    unreachable!("the checks of debug_handler are not run")
}
