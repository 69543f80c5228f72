//! Runs every Rust snippet of the book as a documentation test, so that none can be wrong.

/// Includes a chapter for `cargo test --doc`.
#[cfg(doctest)]
macro_rules! chapters {
    ($($name:ident: $file:literal,)*) => {$(
        #[doc = include_str!(concat!("../../docs/book/", $file))]
        pub mod $name {}
    )*};
}

#[cfg(doctest)]
chapters! {
    introduction: "introduction.md",
    first_events: "first-events.md",
    handlers: "handlers.md",
    failure: "failure.md",
    dead_letters: "dead-letters.md",
    idempotency: "idempotency.md",
    payloads: "payloads.md",
    replay: "replay.md",
    outbox: "outbox.md",
    audit: "audit.md",
    history: "history.md",
    retention: "retention.md",
    testing: "testing.md",
    engines: "engines.md",
    bridge: "bridge.md",
    tasks: "tasks.md",
    jobs: "jobs.md",
    task_workers: "task-workers.md",
    health: "health.md",
    workers: "workers.md",
    configuration: "configuration.md",
    dialects: "dialects.md",
    quick_start: "quick-start.md",
    http: "http.md",
    websocket: "websocket.md",
    dashboard: "dashboard.md",
    monitoring: "monitoring.md",
    operations: "operations.md",
    security: "security.md",
}
