//! The fetch loop: takes deliveries from the engine and queues them with their handlers.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Consumer, Delivery, Error, Result};

use super::Runner;
use super::outage::Outage;
use super::plan::{Gate, MatchTable, Plan};
use super::queue::Work;
use crate::guard;

/// At most this many deliveries are fetched at once.
const BATCH: usize = 256;
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The result of one pass of the loop.
enum Fetched {
    /// The engine returned a batch, which may be empty.
    Events,
    /// Nothing was fetched: the group was paused, a breaker was open, there is no handler, or the plan
    /// changed first.
    Nothing,
}

/// An open consumer, with the plan and the gate that it has now.
struct Consuming {
    consumer: Box<dyn Consumer>,
    plan: Arc<Plan>,
    gate: Gate,
}

impl Consuming {
    /// Pauses or resumes the consumer if the gate has changed. The consumer stays in its group: leaving and
    /// joining again is a rebalance on some engines.
    async fn set_gate(&mut self, gate: Gate) -> Result<()> {
        if self.gate != gate {
            match gate {
                Gate::Shut => self.consumer.pause().await?,
                gate => self.consumer.resume(self.plan.prefetch_at(gate)).await?,
            }
            self.gate = gate;
        }
        Ok(())
    }
}

impl Runner {
    /// Fetches batches until the group stops, then closes the consumer. Repeats after errors that may pass.
    pub(super) async fn fetch_loop(self: Arc<Self>) {
        let mut consuming = None;
        let mut table = MatchTable::new(self.plan(), self.shared.schemas());
        let mut outage = Outage::none(&self.group, "fetching", FIRST_PAUSE, LONGEST_PAUSE);
        while !self.queue.is_stopping() {
            let fetched = {
                let mut once = pin!(self.fetch_once(&mut consuming, &mut table));
                if outage.is_on() {
                    // The outage is over too if the engine lets the loop wait this long without an error.
                    tokio::select! {
                        biased;
                        fetched = &mut once => fetched,
                        () = tokio::time::sleep(LONGEST_PAUSE) => {
                            outage.is_over();
                            once.await
                        }
                    }
                } else {
                    once.await
                }
            };
            match fetched {
                Ok(Fetched::Events) => outage.is_over(),
                Ok(Fetched::Nothing) => {}
                Err(error) => {
                    if !self.survives(&error) {
                        // Without a consumer no more deliveries come; running handlers may finish.
                        self.queue.stop();
                        break;
                    }
                    tokio::select! {
                        () = tokio::time::sleep(outage.goes_on(&error)) => {}
                        () = self.changed.notified() => {}
                    }
                }
            }
        }
        close(consuming).await;
    }

    /// Applies the plan, then waits for one batch or for a change. Queues the batch.
    async fn fetch_once(
        self: &Arc<Self>,
        consuming: &mut Option<Consuming>,
        table: &mut MatchTable,
    ) -> Result<Fetched> {
        let plan = self.plan();
        if self.shared.pauses.contains(&self.group) {
            self.wait_for_resume(consuming).await?;
            return Ok(Fetched::Nothing);
        }
        let gate = plan.gate();
        if gate == Gate::Shut {
            self.wait_for_breakers(consuming, &plan).await?;
            return Ok(Fetched::Nothing);
        }
        self.follow_plan(consuming, plan, gate).await?;
        let Some(Consuming { consumer, plan, .. }) = consuming else {
            self.changed.notified().await;
            return Ok(Fetched::Nothing);
        };
        let most = if gate == Gate::Free {
            BATCH.min(plan.prefetch)
        } else {
            1
        };
        let batch = tokio::select! {
            biased;
            () = self.changed.notified() => return Ok(Fetched::Nothing),
            batch = async {
                self.queue.room().await;
                consumer.fetch(most).await
            } => batch?,
        };
        // The plan may have changed during the fetch. The newest plan is used, so that a handler gets every
        // event that was published after it was subscribed.
        table.follow(self.plan(), self.shared.schemas());
        let work = batch.into_iter().map(|delivery: Delivery| {
            let event_type = delivery.record.event.type_arc();
            Work {
                matched: table.find(&self.shared, &self.group, event_type),
                delivery,
                already_handled: false,
            }
        });
        let mut work: Vec<Work> = work.collect();
        self.put_off(&mut work);
        self.read_inbox(&mut work).await;
        self.spawn_worker(self.queue.push(work.into_iter()));
        self.depth.set(self.queue.depth());
        Ok(Fetched::Events)
    }

    /// Releases events whose publisher asked for a later delivery, until that time. This counts no attempt.
    fn put_off(&self, work: &mut Vec<Work>) {
        let not_before = |work: &Work| work.delivery.record.event.attributes()?.not_before;
        if work.iter().all(|work| not_before(work).is_none()) {
            return;
        }
        let now = self.shared.options.clock.now();
        let early = work.extract_if(.., |work| not_before(work).is_some_and(|at| at > now));
        let early: Vec<Work> = early.collect();
        for work in early {
            let after = not_before(&work).map_or(Duration::ZERO, |at| at.since(now));
            self.queue.release(std::iter::once(work), after);
        }
    }

    /// Marks events of idempotent handlers that the group has handled before. If the inbox cannot be read,
    /// these events are released: they must not be handled twice, and they have not failed.
    async fn read_inbox(&self, work: &mut Vec<Work>) {
        let asked = || work.iter().filter(|work| work.matched.idempotent);
        let records: Vec<_> = asked().map(|w| w.delivery.record.clone()).collect();
        if records.is_empty() {
            return;
        }
        let expected = records.len();
        let answers = match self.shared.engine.inbox() {
            Ok(inbox) => inbox.handled(self.group.clone(), records).await,
            Err(error) => Err(error),
        };
        match answers {
            Ok(answers) if answers.len() == expected => {
                let asked = work.iter_mut().filter(|work| work.matched.idempotent);
                for (work, handled) in asked.zip(answers) {
                    work.already_handled = handled;
                }
            }
            other => {
                let group = &self.group;
                let error = other.err();
                guard::log(|| {
                    tracing::warn!(target: "everbus::dispatch", %group, ?error, "the inbox did not answer; the events are released");
                });
                let unknown = work.extract_if(.., |work| work.matched.idempotent);
                self.queue.release(unknown, LONGEST_PAUSE);
            }
        }
    }

    /// Handles a pause of the group: releases what waits, pauses the consumer, and waits for a change.
    async fn wait_for_resume(&self, consuming: &mut Option<Consuming>) -> Result<()> {
        self.queue.release_waiting();
        if let Some(consuming) = consuming {
            consuming.set_gate(Gate::Shut).await?;
        }
        self.changed.notified().await;
        Ok(())
    }

    /// Handles an open breaker of a critical handler: releases what waits, pauses the consumer, and waits
    /// until every critical breaker allows a call, or for a change.
    async fn wait_for_breakers(
        &self,
        consuming: &mut Option<Consuming>,
        plan: &Plan,
    ) -> Result<()> {
        self.queue.release_waiting();
        if let Some(consuming) = consuming {
            consuming.set_gate(Gate::Shut).await?;
        }
        for breaker in &plan.critical_breakers {
            tokio::select! {
                () = breaker.ready() => {}
                () = self.changed.notified() => return Ok(()),
            }
        }
        Ok(())
    }

    /// Makes the consumer follow the plan: keeps it, changes its patterns and prefetch, or closes it and
    /// opens a new one. A plan without handlers has no consumer.
    async fn follow_plan(
        &self,
        consuming: &mut Option<Consuming>,
        plan: Arc<Plan>,
        gate: Gate,
    ) -> Result<()> {
        match consuming {
            Some(current) if Arc::ptr_eq(&current.plan, &plan) => {
                return current.set_gate(gate).await;
            }
            Some(current) if !plan.handlers.is_empty() && plan.consumes_like(&current.plan) => {
                current.consumer.set_handled(plan.patterns());
                let prefetch = plan.prefetch_at(gate);
                if prefetch != current.plan.prefetch_at(current.gate) {
                    current.consumer.resume(prefetch).await?;
                }
                (current.plan, current.gate) = (plan, gate);
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
                .consume(self.group.clone(), plan.consume_options(gate))
                .await?;
            *consuming = Some(Consuming {
                consumer,
                plan,
                gate,
            });
        }
        Ok(())
    }

    /// Whether fetching continues after this error. If it does not, and the group is still needed, records
    /// that the group has stopped.
    fn survives(&self, error: &Error) -> bool {
        let group = &self.group;
        if error.code() == Code::EventBusShutdownError {
            return false;
        }
        if self.shared.fail_if_fatal(error) {
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", %group, %error, "the engine failed; the group stops");
            });
        } else if error.code() == Code::GroupNotFound {
            if self.queue.is_stopping() || self.plan().handlers.is_empty() {
                // The group needs no more events.
                return false;
            }
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", %group, %error, "the group was removed; it stops");
            });
        } else {
            return true;
        }
        self.shared.group_stopped(group, error);
        false
    }
}

/// Closes the consumer, if there is one. An error is only logged.
async fn close(consuming: Option<Consuming>) {
    if let Some(Consuming { consumer, .. }) = consuming
        && let Err(error) = consumer.close().await
        && error.code() != Code::EventBusShutdownError
    {
        guard::log(|| {
            tracing::warn!(target: "everbus::dispatch", %error, "a consumer did not close cleanly");
        });
    }
}
