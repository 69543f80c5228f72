//! The never-lost campaign for engines with a server.
//!
//! ```text
//!  publishers ──┐                        ┌── worker processes ──"H group id"──▶ campaign
//!  (campaign)   ├──▶ proxy ──▶ server ◀──┤   killed, stopped past their leases
//!               │   cut before the reply │
//!               └────────────────────────┴── server killed, restarted, paused
//! ```
//!
//! Publishers repeat a publish that failed, under the same id, until it is acknowledged. Workers are processes
//! of their own; they report each event that a handler finished. At the end every acknowledged event must have
//! been handled by each group that wants it, or be a dead letter of that group. After each fault the publishers
//! and the workers must go on by themselves.
//!
//! An engine's test binary has two tests for it:
//!
//! ```text
//! const SUBJECT: Subject = Subject { open: |place| Box::pin(open(place)), worker: "faults::worker" };
//!
//! #[test]
//! #[ignore = "a process of the campaign"]
//! fn worker() {
//!     SUBJECT.work();
//! }
//!
//! #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
//! async fn nothing_is_lost() {
//!     let Some(server) = Postgres::start() else { return };
//!     let url = server.fresh_database();
//!     campaign(&SUBJECT, &server, &url, Plan::from_env(), seed()).await.assert_clean();
//! }
//! ```

mod campaign;
mod figures;
mod publisher;
mod worker;
mod workers;
mod zombie;

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use everbus_core::{BoxFuture, Engine, Result};

pub use campaign::{campaign, campaign_with};
pub use figures::Figures;
pub use zombie::late_ack;

use crate::servers::{Kafka, KafkaCluster, Nats, NatsCluster, Postgres, Redis};

/// The leases of the workers: short, so that a test can outlive one.
pub const LEASE: Duration = Duration::from_secs(3);

/// Where an engine is opened.
#[derive(Clone, Debug)]
pub struct Place {
    /// The URL of the server, perhaps through a proxy.
    pub url: String,
    /// A folder that all processes of a campaign share, for a store beside the broker.
    pub folder: PathBuf,
}

/// The engine of a campaign.
#[derive(Clone, Copy, Debug)]
pub struct Subject {
    /// Opens the engine, with a store beside it if it needs one.
    pub open: fn(Place) -> BoxFuture<'static, Result<Engine>>,
    /// The ignored test of this binary that calls [`work`](Self::work): `faults::worker`.
    pub worker: &'static str,
}

impl Subject {
    /// Works as the campaign says in the environment of this process; without a campaign it returns at once.
    pub fn work(&self) {
        worker::run(*self);
    }
}

/// How often each fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The server is killed (SIGKILL) and restarted.
    pub server_kills: usize,
    /// A worker is killed and another one started.
    pub worker_kills: usize,
    /// A connection is cut, mostly after a request and before its reply.
    pub cuts: usize,
    /// The server is paused (SIGSTOP).
    pub pauses: usize,
    /// For this long.
    pub pause: Duration,
    /// A worker is stopped past its lease.
    pub stops: usize,
}

impl Plan {
    /// A few of each, for every run of the tests.
    pub const SMALL: Self = Self {
        server_kills: 2,
        worker_kills: 3,
        cuts: 10,
        pauses: 1,
        pause: Duration::from_secs(2),
        stops: 1,
    };

    /// Many of each, before a release.
    pub const FULL: Self = Self {
        server_kills: 20,
        worker_kills: 50,
        cuts: 200,
        pauses: 1,
        pause: Duration::from_secs(30),
        stops: 5,
    };

    /// [`FULL`](Self::FULL) if `EVERBUS_FAULTS` is `full`, otherwise [`SMALL`](Self::SMALL).
    pub fn from_env() -> Self {
        match std::env::var("EVERBUS_FAULTS").as_deref() {
            Ok("full") => Self::FULL,
            _ => Self::SMALL,
        }
    }
}

/// A server as the campaign treats it.
pub trait Server: Send + Sync {
    /// The ports that are reached through proxies.
    fn ports(&self) -> Vec<u16>;
    /// Where those proxies listen, if the server sends its clients to certain ports.
    fn proxy_ports(&self) -> Vec<u16> {
        Vec::new()
    }
    /// Kills it; of several nodes one.
    fn kill(&self);
    /// Starts what was killed.
    fn restart(&self);
    /// Stops it where it is; of several nodes one.
    fn pause(&self);
    /// Lets it go on.
    fn resume(&self);
}

macro_rules! one_node {
    ($server:ty $(, $proxy_port:ident)?) => {
        impl Server for $server {
            fn ports(&self) -> Vec<u16> {
                vec![self.port()]
            }

            $(fn proxy_ports(&self) -> Vec<u16> {
                vec![self.$proxy_port()]
            })?

            fn kill(&self) {
                self.kill();
            }

            fn restart(&self) {
                self.restart();
            }

            fn pause(&self) {
                self.pause();
            }

            fn resume(&self) {
                self.resume();
            }
        }
    };
}

one_node!(Postgres);
one_node!(Nats);
one_node!(Redis);
one_node!(Kafka, proxy_port);

/// The nodes of a cluster, one of which fails at a time.
pub trait Nodes: Send + Sync {
    /// The port of each node.
    fn ports(&self) -> Vec<u16>;
    /// Where the proxy of each node listens, if the nodes send their clients to certain ports.
    fn proxy_ports(&self) -> Vec<u16> {
        Vec::new()
    }
    /// Kills a node.
    fn kill(&self, n: usize);
    /// Starts it again.
    fn restart(&self, n: usize);
    /// Stops a node where it is.
    fn pause(&self, n: usize);
    /// Lets it go on.
    fn resume(&self, n: usize);
}

macro_rules! nodes {
    ($cluster:ty, $count:expr, $proxies:expr) => {
        impl Nodes for $cluster {
            fn ports(&self) -> Vec<u16> {
                (0..$count(self)).map(|n| self.node(n).port()).collect()
            }

            fn proxy_ports(&self) -> Vec<u16> {
                $proxies(self)
            }

            fn kill(&self, n: usize) {
                self.node(n).kill();
            }

            fn restart(&self, n: usize) {
                self.node(n).restart();
            }

            fn pause(&self, n: usize) {
                self.node(n).pause();
            }

            fn resume(&self, n: usize) {
                self.node(n).resume();
            }
        }
    };
}

nodes!(
    NatsCluster,
    |cluster: &Self| cluster.urls().len(),
    |_: &Self| Vec::new()
);
nodes!(KafkaCluster, Self::count, |cluster: &Self| {
    let nodes = 0..cluster.count();
    nodes.map(|n| cluster.node(n).proxy_port()).collect()
});

/// A cluster in which one node after another fails.
pub struct OneOfThree<'a> {
    cluster: &'a dyn Nodes,
    node: Mutex<usize>,
}

impl<'a> OneOfThree<'a> {
    /// The nodes of this cluster fail in turn.
    pub fn new(cluster: &'a dyn Nodes) -> Self {
        Self {
            cluster,
            node: Mutex::new(0),
        }
    }

    fn node(&self) -> usize {
        *self.node.lock().unwrap()
    }

    fn next(&self) {
        let mut node = self.node.lock().unwrap();
        *node = (*node + 1) % self.cluster.ports().len();
    }
}

impl std::fmt::Debug for OneOfThree<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ports = self.cluster.ports();
        f.debug_struct("OneOfThree").field("ports", &ports).finish()
    }
}

impl Server for OneOfThree<'_> {
    fn ports(&self) -> Vec<u16> {
        self.cluster.ports()
    }

    fn proxy_ports(&self) -> Vec<u16> {
        self.cluster.proxy_ports()
    }

    fn kill(&self) {
        self.cluster.kill(self.node());
    }

    fn restart(&self) {
        self.cluster.restart(self.node());
        self.next();
    }

    fn pause(&self) {
        self.cluster.pause(self.node());
    }

    fn resume(&self) {
        self.cluster.resume(self.node());
        self.next();
    }
}

/// A group of the workers. It wants what the group of the same number in [`chaos::GROUPS`](crate::chaos::GROUPS)
/// wants, and its handler does what the last handler there does.
struct Group {
    name: &'static str,
    pattern: &'static str,
}

const GROUPS: [Group; 2] = [
    Group {
        name: "everything",
        pattern: "chaos.>",
    },
    Group {
        name: "work",
        pattern: "chaos.work.*",
    },
];
