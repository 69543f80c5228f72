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

/// The largest batch of deliveries.
const BATCH: usize = 256;
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The result of one turn of the loop.
enum Fetched {
    Events,
    /// The engine was not asked, or another change came first.
    Nothing,
}

/// A consumer, with the last plan and the last gate it was given.
struct Consuming {
    consumer: Box<dyn Consumer>,
    plan: Arc<Plan>,
    gate: Gate,
}

impl Consuming {
    /// Opens or shuts the consumer as the gate says. The consumer stays in its group: leaving and joining
    /// again is a rebalance on some engines.
    async fn turn(&mut self, gate: Gate) -> Result<()> {
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
    pub(super) async fn fetch_loop(self: Arc<Self>) {
        let mut consuming = None;
        let mut table = MatchTable::new(self.plan(), self.shared.schemas());
        let mut outage = Outage::none(&self.group, "fetching", FIRST_PAUSE, LONGEST_PAUSE);
        while !self.queue.is_stopping() {
            let fetched = {
                let mut once = pin!(self.fetch_once(&mut consuming, &mut table));
                if outage.is_on() {
                    // An engine that accepts a wait for events is available.
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

    /// Applies the plan, then waits for one batch or for a change.
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
        // Uses the newest plan: a handler that was subscribed before an event was published gets the event.
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
        self.ask_inbox(&mut work).await;
        self.spawn_worker(self.queue.push(work.into_iter()));
        self.depth.set(self.queue.depth());
        Ok(Fetched::Events)
    }

    /// Gives back events whose publisher asked for a later delivery, until that time. This counts no
    /// attempt.
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
            self.queue.give_back(std::iter::once(work), after);
        }
    }

    /// Marks events that the group has handled before. If the inbox does not answer, the events are given
    /// back: they must not be handled twice, and they have not failed.
    async fn ask_inbox(&self, work: &mut Vec<Work>) {
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
                    tracing::warn!(target: "everbus::dispatch", %group, ?error, "the inbox did not answer; the events are given back");
                });
                let unknown = work.extract_if(.., |work| work.matched.idempotent);
                self.queue.give_back(unknown, LONGEST_PAUSE);
            }
        }
    }

    /// While the group is paused it holds nothing and fetches nothing.
    async fn wait_for_resume(&self, consuming: &mut Option<Consuming>) -> Result<()> {
        self.queue.give_back_waiting();
        if let Some(consuming) = consuming {
            consuming.turn(Gate::Shut).await?;
        }
        self.changed.notified().await;
        Ok(())
    }

    /// While a breaker of a critical handler is open, the group holds nothing and fetches nothing until the
    /// breaker allows a probe.
    async fn wait_for_breakers(
        &self,
        consuming: &mut Option<Consuming>,
        plan: &Plan,
    ) -> Result<()> {
        self.queue.give_back_waiting();
        if let Some(consuming) = consuming {
            consuming.turn(Gate::Shut).await?;
        }
        for breaker in &plan.gates {
            tokio::select! {
                () = breaker.ready() => {}
                () = self.changed.notified() => return Ok(()),
            }
        }
        Ok(())
    }

    /// Opens, changes or closes the consumer as the plan requires.
    async fn follow_plan(
        &self,
        consuming: &mut Option<Consuming>,
        plan: Arc<Plan>,
        gate: Gate,
    ) -> Result<()> {
        match consuming {
            Some(current) if Arc::ptr_eq(&current.plan, &plan) => return current.turn(gate).await,
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

    /// Whether fetching continues after this error.
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
