//! Three NATS servers that form a cluster.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::nats::{Nats, server};
use super::{PATIENCE, free_port};

const NODES: usize = 3;

/// A cluster of three NATS servers; dropping it kills them.
#[derive(Debug)]
pub struct NatsCluster {
    nodes: Vec<Nats>,
}

impl NatsCluster {
    /// Starts three nodes and waits until all are healthy.
    pub fn start() -> Option<Self> {
        let program = server()?;
        for _ in 0..20 {
            let routes: Vec<u16> = (0..NODES).map(|_| free_port()).collect();
            let listed: Vec<String> = routes
                .iter()
                .map(|port| format!("\"nats://127.0.0.1:{port}\""))
                .collect();
            let listed = listed.join(", ");
            let node = |n: usize| {
                // Nodes do not send the addresses of the others to clients: so a client stays behind its proxy.
                let more = format!(
                    "server_name: n{n}\ncluster {{ name: c, listen: \"127.0.0.1:{}\", \
                     no_advertise: true, routes: [{listed}] }}",
                    routes[n]
                );
                Nats::node(program.clone(), free_port(), free_port(), &more)
            };
            let nodes: Vec<Nats> = (0..NODES).map(node).collect();
            // A node ends if another program took its port first.
            if nodes.iter().all(Nats::is_ready) {
                return Some(Self { nodes });
            }
        }
        panic!("the NATS cluster does not start");
    }

    /// The URLs of all nodes.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Nats::url).collect()
    }

    /// The URLs of all nodes, separated by commas.
    pub fn url(&self) -> String {
        self.urls().join(",")
    }

    /// A node: `0`, `1` or `2`.
    pub fn node(&self, n: usize) -> &Nats {
        &self.nodes[n]
    }

    /// The node that leads a stream, once one does.
    pub fn leader_of(&self, stream: &str) -> usize {
        let begin = Instant::now();
        loop {
            let said = self.nodes.iter().find_map(|node| leader(node, stream));
            if let Some(n) = said {
                return n;
            }
            assert!(begin.elapsed() < PATIENCE, "{stream} has no leader");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The leader of a stream, as one node says.
fn leader(node: &Nats, stream: &str) -> Option<usize> {
    let said = node.monitor("/jsz?accounts=true&streams=true")?;
    let accounts = said.get("account_details")?.as_array()?;
    let mut streams = accounts.iter().filter_map(|account| {
        let details = account.get("stream_detail").and_then(Value::as_array);
        details?.iter().find(|detail| detail["name"] == stream)
    });
    let name = streams.next()?.pointer("/cluster/leader")?.as_str()?;
    name.strip_prefix('n')?.parse().ok()
}
