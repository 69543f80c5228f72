//! How often an event allocates between the memory engine and back.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a measurement that cannot be made ends here, and its figures are printed"
)]

mod common;

use common::{Layers, Prepared, runtime};

fn main() {
    for layers in [Layers::Plain, Layers::All] {
        let (few, many) = (allocations(10_000, layers), allocations(30_000, layers));
        // The difference leaves out what a start costs.
        let each = (many - few) as f64 / 20_000.0;
        println!("{layers:?}: {each:.2} allocations per event");
    }
}

fn allocations(events: u64, layers: Layers) -> u64 {
    let runtime = runtime();
    let prepared = runtime.block_on(Prepared::new(events, layers));
    let counted = allocation_counter::measure(|| runtime.block_on(prepared.run()));
    counted.count_total
}
