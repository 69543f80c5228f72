//! Replay into a function.

use std::fmt::Display;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use everbus_core::{Recorded, Result};
use tokio::task::JoinSet;

use super::report::ReplayReport;
use super::target::{Context, Target};
use super::whole::whole;
use crate::guard;

/// The result of a call; the outer error is the text of a panic.
type Outcome<E> = Result<Result<(), E>, String>;

/// Gives the events to a function.
pub struct Function<F> {
    function: Arc<F>,
    concurrency: usize,
}

impl<F> Function<F> {
    pub(super) fn new(function: F, concurrency: usize) -> Self {
        Self {
            function: Arc::new(function),
            concurrency,
        }
    }
}

impl<F, Fut, E> Target for Function<F>
where
    F: Fn(Arc<Recorded>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send + 'static,
    E: Display + Send + 'static,
{
    const PORTION: usize = 4096;
    const SAVED_EACH_TIME: bool = false;
    const AUDITED: bool = false;

    fn describe(&self) -> String {
        "a function".into()
    }

    async fn take(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> Result<()> {
        // The calls that run concurrently; they are aborted if the run is dropped.
        let mut running: JoinSet<(Outcome<E>, Arc<Recorded>)> = JoinSet::new();
        for record in events {
            if running.len() >= self.concurrency
                && let Some(Ok((outcome, record))) = running.join_next().await
            {
                count(outcome, &record, context, report);
            }
            let given = match whole(context.bus.shared(), record).await? {
                Ok(given) => given,
                Err(error) => {
                    count(Ok(Err(error)), record, context, report);
                    continue;
                }
            };
            let function = self.function.clone();
            let call = async move {
                // The call itself may panic too.
                guard::contained(pin!(async { function(given).await })).await
            };
            if self.concurrency == 1 {
                count(call.await, record, context, report);
            } else {
                let record = record.clone();
                running.spawn(async move { (call.await, record) });
            }
        }
        while let Some(done) = running.join_next().await {
            if let Ok((outcome, record)) = done {
                count(outcome, &record, context, report);
            }
        }
        Ok(())
    }
}

/// Counts the result. An error and a panic count alike.
fn count<E: Display>(
    outcome: Outcome<E>,
    record: &Recorded,
    context: &Context,
    report: &mut ReplayReport,
) {
    let error = match outcome {
        Ok(Ok(())) => {
            report.processed += 1;
            return;
        }
        // The `Display` of an error is user code too.
        Ok(Err(error)) => guard::contain(|| error.to_string()).unwrap_or_default(),
        Err(said) => format!("panicked: {said}"),
    };
    guard::log(|| {
        let id = record.event.id();
        tracing::warn!(target: "everbus::replay", event_id = %id, error, "a replayed event failed");
    });
    report.failed(record, error, context.kept_failures);
}
