//! What an event costs between the memory engine and back, over a bare call of its handler.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a measurement that cannot be made ends here, and its figures are printed"
)]

mod common;

use std::time::Instant;

use common::{Layers, Prepared, bare, runtime};
use criterion::{Criterion, criterion_group, criterion_main};

const EVENTS: u64 = 20_000;

fn pipeline(c: &mut Criterion) {
    let mut group = c.benchmark_group("pipeline, per 20000 events");
    group.sample_size(20);
    group.bench_function("bare call", |b| {
        let runtime = runtime();
        b.iter(|| runtime.block_on(bare(EVENTS)));
    });
    for (name, layers, pipeline) in [
        ("engine and bare call", Layers::Plain, false),
        ("pipeline, plain", Layers::Plain, true),
        ("pipeline, all layers", Layers::All, true),
    ] {
        group.bench_function(name, |b| {
            let runtime = runtime();
            b.iter_custom(|times| {
                let mut total = std::time::Duration::ZERO;
                for _ in 0..times {
                    total += runtime.block_on(async {
                        let prepared = Prepared::new(EVENTS, layers).await;
                        let start = Instant::now();
                        if pipeline {
                            prepared.run().await;
                        } else {
                            prepared.run_without_pipeline().await;
                        }
                        let took = start.elapsed();
                        prepared.bus.shutdown().await.unwrap();
                        took
                    });
                }
                total
            });
        });
    }
    group.finish();
}

criterion_group!(benches, pipeline);
criterion_main!(benches);
