//! Databases for tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use everbus_core::{
    Clock, Engine, Event, GroupName, GroupSpec, Pattern, StartFrom, SubscriptionSpec, SystemClock,
};
use everbus_postgres::Options;
use everbus_testkit::servers::Postgres;

/// A schema of its own in a database that all tests of this process share.
pub(crate) fn fresh_schema() -> Option<String> {
    static DATABASE: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let url = DATABASE.get_or_init(|| Postgres::shared().map(Postgres::fresh_database));
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let join = |url: &String| if url.contains('?') { '&' } else { '?' };
    url.as_ref()
        .map(|url| format!("{url}{}schema=t{number}&pool_size=6", join(url)))
}

/// Options for tests: engines that are gone are noticed at once.
pub(crate) fn options(clock: Arc<dyn Clock>) -> Options {
    Options {
        clock,
        owner_grace: Duration::ZERO,
        ..Options::default()
    }
}

/// Opens an engine on the clock of the system.
pub(crate) async fn open(url: &str) -> Engine {
    let engine = everbus_postgres::open(url, options(Arc::new(SystemClock))).await;
    engine.expect("the engine opens")
}

/// A group that wants every event there is.
pub(crate) fn group(name: &str) -> GroupSpec {
    let mut spec = GroupSpec::new(GroupName::new(name).unwrap());
    spec.start_from = StartFrom::First;
    spec.subscriptions.push(SubscriptionSpec {
        name: "all".into(),
        pattern: Pattern::new("*").unwrap(),
    });
    spec
}

pub(crate) fn event(number: u32) -> Event {
    Event::builder("a.b").json(&number).build().unwrap()
}
