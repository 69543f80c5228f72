//! The fetch loop: takes deliveries from the engine and queues them with their handlers.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Consumer, Error, Result};

use super::Runner;
use super::plan::{Plan, Routes};
use super::queue::Work;
use crate::guard;

/// At most this many deliveries at a time.
const BATCH: usize = 256;
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A consumer and the plan it was last told.
struct Consuming {
    consumer: Box<dyn Consumer>,
    plan: Arc<Plan>,
}

impl Runner {
    pub(super) async fn fetch_loop(self: Arc<Self>) {
        let mut consuming = None;
        let mut routes = Routes::new(self.plan());
        let mut pause = FIRST_PAUSE;
        while !self.queue.is_stopping() {
            match self.fetch_once(&mut consuming, &mut routes).await {
                Ok(()) => pause = FIRST_PAUSE,
                Err(error) => {
                    if !self.survives(&error) {
                        // Without a consumer nothing more comes; what runs may finish.
                        self.queue.stop();
                        break;
                    }
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = self.changed.notified() => {}
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
        close(consuming).await;
    }

    /// Follows the plan, then waits for one batch or for a change.
    async fn fetch_once(
        self: &Arc<Self>,
        consuming: &mut Option<Consuming>,
        routes: &mut Routes,
    ) -> Result<()> {
        self.follow_plan(consuming).await?;
        let Some(Consuming { consumer, plan }) = consuming else {
            self.changed.notified().await;
            return Ok(());
        };
        let most = BATCH.min(plan.prefetch);
        let batch = tokio::select! {
            biased;
            () = self.changed.notified() => return Ok(()),
            batch = consumer.fetch(most) => batch?,
        };
        // The plan as it is now: whoever subscribed before an event was published gets it.
        routes.follow(self.plan());
        let work = batch.into_iter().map(|delivery| Work {
            route: routes.find(delivery.record.event.type_arc()),
            delivery,
        });
        self.spawn_worker(self.queue.push(work));
        Ok(())
    }

    /// Opens, retunes or closes the consumer as the plan wants it.
    async fn follow_plan(&self, consuming: &mut Option<Consuming>) -> Result<()> {
        let plan = self.plan();
        match consuming {
            Some(current) if Arc::ptr_eq(&current.plan, &plan) => return Ok(()),
            Some(current) if !plan.handlers.is_empty() && plan.consumes_like(&current.plan) => {
                current.consumer.set_handled(plan.patterns());
                current.plan = plan;
                return Ok(());
            }
            _ => close(consuming.take()).await,
        }
        if !plan.handlers.is_empty() {
            self.lease.send_if_modified(|lease| {
                let changes = *lease != plan.lease;
                *lease = plan.lease;
                changes
            });
            let broker = &self.shared.engine.broker;
            let consumer = broker
                .consume(self.group.clone(), plan.consume_options())
                .await?;
            *consuming = Some(Consuming { consumer, plan });
        }
        Ok(())
    }

    /// Whether fetching goes on after this error.
    fn survives(&self, error: &Error) -> bool {
        let group = &self.group;
        if error.code() == Code::Shutdown {
            return false;
        }
        if self.shared.fail_if_fatal(error) {
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", %group, %error, "the engine failed; the group stops");
            });
        } else if error.code() == Code::GroupNotFound {
            if self.queue.is_stopping() || self.plan().handlers.is_empty() {
                // We wanted nothing more from it.
                return false;
            }
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", %group, %error, "the group was removed; it stops");
            });
        } else {
            guard::log(|| {
                tracing::warn!(target: "everbus::dispatch", %group, %error, "fetching failed and will be repeated");
            });
            return true;
        }
        self.shared.group_stopped(group, error);
        false
    }
}

async fn close(consuming: Option<Consuming>) {
    if let Some(Consuming { consumer, .. }) = consuming
        && let Err(error) = consumer.close().await
        && error.code() != Code::Shutdown
    {
        guard::log(|| {
            tracing::warn!(target: "everbus::dispatch", %error, "a consumer did not close cleanly");
        });
    }
}
