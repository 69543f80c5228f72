//! The suite on Valkey.

use everbus_testkit::servers::Flavour;

use crate::conformance::OnServer;

// conformance: contract/engine-valkey: the Redis engine passes the suite on Valkey as well
everbus_testkit::conformance_tests!(OnServer::new(Flavour::Valkey));
