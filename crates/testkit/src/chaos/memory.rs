//! Rounds about the outbox, large payloads and retention: a relay, a process that splits large events, or a
//! retention job is killed during its work.

use std::process::Command;
use std::time::Duration;

use super::checker::Stage;
use super::content::Ids;
use super::observe::observe;
use super::outboxes::{self, Which};
use super::process::{End, Victim};
use super::relay::{self, LEASE, PLACES};
use super::retain::{self, Policy};
use super::rounds::Arena;
use super::{Broken, objects};

/// Failpoints for a process that removes events.
const WRITES: [&str; 2] = ["before-commit", "after-commit"];

impl Arena {
    /// A process that splits large events is killed: at random, between an object and its event, or
    /// around the commit of the event.
    pub fn overflow(&mut self) -> Result<(), Broken> {
        let mut orders = self.orders();
        orders.overflow = true;
        let mut failpoint = None;
        match self.random.below(4) {
            0 => orders.die_between = Some(1 + self.random.below(40) as u64),
            1 => {
                let place = WRITES[self.random.below(WRITES.len())];
                failpoint = Some(format!("{place}:{}", 1 + self.random.below(40)));
            }
            _ => {}
        }
        let named = failpoint.is_some() || orders.die_between.is_some();
        let mut victim = self.spawn(&orders, failpoint.as_deref())?;
        if named {
            victim.ends_within(Duration::from_millis(800));
        } else {
            self.work(&victim)?;
        }
        let end = victim.kill()?;
        self.tally.overflow_kills += killed(end);
        self.count(end)
    }

    /// A relay is killed at random or at a failpoint, while another one runs, or is stopped past its lease
    /// while another takes over. Events are committed to the outbox meanwhile.
    pub fn relay(&mut self) -> Result<(), Broken> {
        self.declare()?;
        let which = Which::ALL[self.random.below(2)];
        self.fill(which)?;
        let handler = if self.random.one_in(3) {
            let orders = self.orders();
            Some(self.spawn(&orders, None)?)
        } else {
            None
        };
        match self.random.below(10) {
            0..4 => {
                let relay = self.spawn_relay(which, None)?;
                self.relay_works(&relay, which)?;
                self.end_relay(relay)?;
            }
            4..7 => {
                let place = PLACES[self.random.below(PLACES.len())];
                let hit = 1 + self.random.below(6);
                let mut relay = self.spawn_relay(which, Some(&format!("{place}:{hit}")))?;
                relay.ends_within(Duration::from_millis(400));
                self.end_relay(relay)?;
            }
            7..9 => {
                let one = self.spawn_relay(which, None)?;
                let other = self.spawn_relay(which, None)?;
                self.relay_works(&one, which)?;
                self.end_relay(one)?;
                self.fill(which)?;
                // Sometimes long enough to take over.
                std::thread::sleep(self.up_to(700));
                self.end_relay(other)?;
            }
            _ => self.stop_relay(which)?,
        }
        handler.map_or(Ok(()), |handler| self.end(handler))
    }

    fn stop_relay(&mut self, which: Which) -> Result<(), Broken> {
        let mut zombie = self.spawn_relay(which, None)?;
        self.relay_works(&zombie, which)?;
        if !zombie.stop_between_transactions()? {
            return self.end_relay(zombie);
        }
        self.tally.stops += 1;
        self.fill(which)?;
        let heir = self.spawn_relay(which, None)?;
        heir.wait_until_ready()?;
        std::thread::sleep(LEASE + self.up_to(300));
        zombie.go_on()?;
        self.fill(which)?;
        std::thread::sleep(self.up_to(200));
        self.end_relay(zombie)?;
        self.end_relay(heir)
    }

    /// Commits events to the outbox while a relay works on it.
    fn relay_works(&mut self, relay: &Victim, which: Which) -> Result<(), Broken> {
        if self.random.one_in(4) {
            std::thread::sleep(self.up_to(40));
            return Ok(());
        }
        relay.wait_until_ready()?;
        for _ in 0..self.random.below(3) {
            self.fill(which)?;
            std::thread::sleep(self.up_to(20));
        }
        std::thread::sleep(self.up_to(30));
        Ok(())
    }

    /// Commits some events to an outbox.
    pub fn fill(&mut self, which: Which) -> Result<(), Broken> {
        let count = 5 + self.random.below(40);
        let ids: Vec<_> = Ids::new(self.random.number()).take(count).collect();
        outboxes::commit(&self.file, which, &ids)?;
        self.ledger.lock().committed(which, &ids);
        Ok(())
    }

    /// Orders for a relay of one of the outboxes.
    pub fn relay_orders(&self, which: Which) -> relay::Orders {
        relay::Orders {
            db: self.file.clone(),
            outbox: (which == Which::Beside).then(|| which.file(&self.file)),
            keep_on: true,
            mark_first: false,
        }
    }

    fn spawn_relay(&mut self, which: Which, failpoint: Option<&str>) -> Result<Victim, Broken> {
        let orders = self.relay_orders(which);
        self.launch_relay(&orders, failpoint)
    }

    /// Starts a relay.
    pub fn launch_relay(
        &mut self,
        orders: &relay::Orders,
        failpoint: Option<&str>,
    ) -> Result<Victim, Broken> {
        let command = orders.command(&self.program);
        self.launch(command, orders.outbox.clone(), failpoint)
    }

    fn end_relay(&mut self, relay: Victim) -> Result<(), Broken> {
        let end = relay.kill()?;
        self.tally.relay_kills += killed(end);
        self.count(end)
    }

    /// Relays until nothing waits in an outbox.
    pub(super) fn drain_outboxes(&mut self) -> Result<(), Broken> {
        for which in Which::ALL {
            let used = self.ledger.lock().outbox().iter().any(|(w, _)| *w == which);
            if !used {
                continue;
            }
            let mut orders = self.relay_orders(which);
            orders.keep_on = false;
            let end = self.launch_relay(&orders, None)?.end_in_order()?;
            self.count(end)?;
        }
        Ok(())
    }

    /// A retention job is killed while others publish and handle; sometimes two jobs run.
    pub fn retain(&mut self) -> Result<(), Broken> {
        let policy = self.retention.unwrap_or(Policy::Age);
        self.declare()?;
        let mut orders = self.orders();
        orders.overflow = self.random.one_in(2);
        let worker = self.spawn(&orders, None)?;
        let orders = self.retain_orders(policy);
        let failpoint = self.random.one_in(3).then(|| {
            let place = WRITES[self.random.below(WRITES.len())];
            format!("{place}:{}", 1 + self.random.below(30))
        });
        let other = if self.random.one_in(4) {
            Some(self.launch_retain(&orders, None)?)
        } else {
            None
        };
        let mut job = self.launch_retain(&orders, failpoint.as_deref())?;
        if failpoint.is_some() {
            job.ends_within(Duration::from_millis(800));
        } else {
            self.work(&job)?;
        }
        self.end_retain(job)?;
        if self.random.one_in(2) {
            self.end(worker)?;
        } else {
            let end = worker.end_in_order()?;
            self.count(end)?;
        }
        other.map_or(Ok(()), |other| self.end_retain(other))
    }

    /// Orders for a retention job.
    pub fn retain_orders(&self, policy: Policy) -> retain::Orders {
        retain::Orders {
            db: self.file.clone(),
            policy,
            bug: None,
        }
    }

    /// Starts a retention job.
    pub fn launch_retain(
        &mut self,
        orders: &retain::Orders,
        failpoint: Option<&str>,
    ) -> Result<Victim, Broken> {
        let mut command = Command::new(&self.program);
        command.arg("retain-victim").arg("--db").arg(&orders.db);
        command.args(["--policy", orders.policy.name()]);
        if let Some(bug) = orders.bug {
            command.args(["--bug", bug.name()]);
        }
        self.launch(command, None, failpoint)
    }

    fn end_retain(&mut self, job: Victim) -> Result<(), Broken> {
        let end = job.kill()?;
        self.tally.retention_kills += killed(end);
        self.count(end)
    }

    fn launch(
        &mut self,
        command: Command,
        outbox: Option<std::path::PathBuf>,
        failpoint: Option<&str>,
    ) -> Result<Victim, Broken> {
        self.victims += 1;
        let files = std::iter::once(self.file.clone()).chain(outbox).collect();
        Victim::launch(command, files, failpoint, self.victims, &self.ledger)
    }

    /// Makes sure that the file knows all groups, so that they want every event from now on.
    pub fn declare(&mut self) -> Result<(), Broken> {
        if self.declared {
            return Ok(());
        }
        let mut orders = self.orders();
        orders.publishes = 0;
        let victim = self.spawn(&orders, None)?;
        victim.wait_until_ready()?;
        let end = victim.end_in_order()?;
        self.declared = end == End::Orderly;
        self.count(end)
    }

    /// After the drain: removes what retention may remove, collects objects without events, and checks that
    /// nothing else was removed.
    pub(super) fn tidy(&mut self) -> Result<(), Broken> {
        if let Some(policy) = self.retention {
            retain::once(&self.file, policy)?;
        }
        let collected = objects::collect(&self.file)?;
        self.tally.collected += collected.orphans + collected.strays;
        self.check(Stage::Drained)?;
        let observed = observe(&self.file)?;
        let left = objects::unreferenced(&self.file, &observed.objects)?;
        let left = left
            .into_iter()
            .map(|object| format!("no event refers to {object}, and it was not collected"));
        self.tally.problems.extend(left);
        Ok(())
    }
}

fn killed(end: End) -> u64 {
    u64::from(matches!(end, End::Killed | End::Failpoint))
}
