//! What the compiler says about a wrong `#[event(…)]`, about publishing what is no event, about a
//! function that is no handler and about its parts under `#[debug_handler]`, word for word.
//!
//! After a deliberate change, `TRYBUILD=overwrite cargo test -p everbus-compile-errors` writes the snapshots
//! anew; read them before keeping them.

// conformance: handlers/handler-compile-errors: a function that is no handler is a compile error that says why and what to do.
// conformance: handlers/handler-debug: #[debug_handler] points at the part of a function that keeps it from being a handler.
// conformance: handlers/typed-compile-errors: a wrong attribute is a compile error at the place of the mistake that says what to do.
#[test]
fn mistakes_are_pointed_at_with_advice() {
    trybuild::TestCases::new().compile_fail("tests/it/compile_errors/*.rs");
}
