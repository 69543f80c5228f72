//! Access to a server: credentials, and settings that a URL cannot contain.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How a bus gets access to its server. An engine without a server ignores it. The PostgreSQL engine takes all of it
/// from its URL, and refuses it here.
///
/// ```
/// use everbus::Access;
/// let mut access = Access::default();
/// access.user = Some("shop".into());
/// access.password = Some("secret".into());
/// assert!(!format!("{access:?}").contains("secret"));
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Access {
    /// The user, if the URL names none.
    pub user: Option<String>,
    /// The password of the user.
    pub password: Option<String>,
    /// A token instead of user and password (NATS).
    pub token: Option<String>,
    /// A credentials file, or the seed of an nkey (NATS).
    pub creds: Option<String>,
    /// The SASL mechanism for user and password: `PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512` (Kafka).
    pub sasl: Option<String>,
    /// TLS is required.
    pub tls: bool,
    /// A file with root certificates, beside those of the system.
    pub ca_file: Option<PathBuf>,
    /// Whether messages that are not in the dialect of their stream go to handlers unchanged. Otherwise they are
    /// dead-lettered.
    pub raw_foreign: bool,
    /// Whether the server syncs each write before it answers. A NATS server does not report this to its clients.
    pub synced: bool,
    /// The number of replicas of streams that declare none.
    pub copies: Option<u32>,
    /// Whether the age of an existing stream may be shortened, which deletes older events.
    pub allow_shorter_age: bool,
    /// Settings that only Redis has.
    pub redis: RedisAccess,
}

/// How a bus uses a Redis server. `None` is the default of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisAccess {
    /// For how long a repeated id is recognised.
    pub window: Option<Duration>,
    /// Messages that another program read for one of our groups and did not finish are taken over after this long.
    pub stale_after: Option<Duration>,
    /// How many of these messages are examined in one step.
    pub stale_count: Option<usize>,
    /// How many finished events a stream without a declared limit keeps.
    pub keep_finished: Option<u64>,
    /// How long the engine waits for an answer of the server.
    pub timeout: Option<Duration>,
    /// Whether a server is used although its eviction policy may delete streams.
    pub allow_eviction: bool,
    /// A new group with a wildcard also gets streams that only other programs have written.
    pub adopt_streams: bool,
}

impl fmt::Debug for Access {
    /// Without secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |secret: &Option<String>| secret.as_ref().map(|_| "***");
        f.debug_struct("Access")
            .field("user", &self.user)
            .field("password", &shown(&self.password))
            .field("token", &shown(&self.token))
            .field("creds", &shown(&self.creds))
            .field("sasl", &self.sasl)
            .field("tls", &self.tls)
            .field("ca_file", &self.ca_file)
            .field("raw_foreign", &self.raw_foreign)
            .field("synced", &self.synced)
            .field("copies", &self.copies)
            .field("allow_shorter_age", &self.allow_shorter_age)
            .field("redis", &self.redis)
            .finish()
    }
}
