//! The servers of the tests.

use std::time::Duration;

use everbus_core::Engine;
use everbus_kafka::Options;
use everbus_testkit::servers::Kafka;

/// The URL of a space of its own on the server that all tests share.
pub(crate) fn space() -> Option<String> {
    Kafka::shared().map(Kafka::fresh_space)
}

/// Why there is none.
pub(crate) fn missing() -> String {
    "Apache Kafka is not there: cargo xtask test installs it, with Maven and Java 17".to_owned()
}

/// Quick to see that a member has gone.
pub(crate) fn options() -> Options {
    let mut options = Options::default();
    options.session = Duration::from_secs(6);
    options.partitions = 2;
    options
}

/// Opens the engine of a space.
pub(crate) async fn open(url: &str) -> Engine {
    everbus_kafka::open(url, options()).await.unwrap()
}
