//! The same work for callgrind, which counts instructions: `instructions N plain|all|engine|publish|bare`.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a measurement that cannot be made ends here, and its figures are printed"
)]

mod common;

use common::{Layers, Prepared, bare, runtime};

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let events: u64 = arguments
        .next()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1000);
    let runtime = runtime();
    match arguments.next().as_deref() {
        Some("bare") => runtime.block_on(bare(events)),
        which => {
            let layers = if which != Some("all") {
                Layers::Plain
            } else {
                Layers::All
            };
            runtime.block_on(async {
                let prepared = Prepared::new(events, layers).await;
                match which {
                    Some("publish") => {}
                    Some("engine") => prepared.run_without_pipeline().await,
                    _ => prepared.run().await,
                }
            });
        }
    }
}
