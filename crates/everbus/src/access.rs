//! Access to a server: credentials, and what a URL has no place for.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How a bus gets access to its server. Engines without a server ignore it; that of PostgreSQL has all of it in
/// its URL, and refuses it here.
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
    /// How user and password are shown to the server: `PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512` (Kafka).
    pub sasl: Option<String>,
    /// TLS is required.
    pub tls: bool,
    /// A file with root certificates, beside those of the system.
    pub ca_file: Option<PathBuf>,
    /// Messages that are not of their stream's dialect go to handlers as they are. Otherwise they are
    /// dead-lettered.
    pub raw_foreign: bool,
    /// The server syncs each write before it answers, which NATS does not tell its clients.
    pub synced: bool,
    /// Copies of streams that declare no number.
    pub copies: Option<u32>,
    /// A stream may get a shorter age than it has, which deletes what is older.
    pub allow_shorter_age: bool,
    /// What only Redis has.
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
    /// How many of them are looked at in one step.
    pub stale_count: Option<usize>,
    /// How many finished events a stream keeps that declares no limit.
    pub keep_finished: Option<u64>,
    /// How long an answer of the server may take.
    pub timeout: Option<Duration>,
    /// A server whose eviction policy may delete streams is used all the same.
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
