//! How often an event allocates between the memory engine and back.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a measurement that cannot be made ends here, and its figures are printed"
)]

mod common;

use common::{Layers, Prepared, runtime};

fn main() {
    for (layers, pipeline) in [
        (Layers::Plain, false),
        (Layers::Plain, true),
        (Layers::All, true),
    ] {
        let count = |events| allocations(events, layers, pipeline);
        let (few, many) = (count(10_000), count(30_000));
        // The difference leaves out what a start costs.
        let each = (many - few) as f64 / 20_000.0;
        let through = if pipeline { "pipeline" } else { "engine alone" };
        println!("{through}, {layers:?}: {each:.2} allocations per event");
    }
}

fn allocations(events: u64, layers: Layers, pipeline: bool) -> u64 {
    let runtime = runtime();
    let prepared = runtime.block_on(Prepared::new(events, layers));
    let counted = allocation_counter::measure(|| {
        runtime.block_on(async {
            if pipeline {
                prepared.run().await;
            } else {
                prepared.run_without_pipeline().await;
            }
        });
    });
    counted.count_total
}
