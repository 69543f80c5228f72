//! What the compiler says about mistakes in handlers and events. Only `tests/` has content.
//!
//! The tests are not in `everbus-macros`: what a procedural macro's tests depend on is compiled a second time, for the
//! compiler's own use, and these depend on `everbus`.
