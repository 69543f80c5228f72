//! One file and the rounds on it: each round starts victims and kills or stops them.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use everbus_core::EventId;

use super::checker::{Report, Stage, check};
use super::ledger::LAST_WORDS;
use super::observe::{ids, observe, pending};
use super::process::{End, SharedLedger, Victim};
use super::retain::Policy;
use super::tally::Tally;
use super::victim::Orders;
use super::{Broken, FAILPOINTS};
use crate::model::Random;

/// Leases of a victim that will be stopped. On a starved machine they may expire by themselves.
const SHORT_LEASE: Duration = Duration::from_millis(700);
/// A drain without progress for this long is stuck.
const STUCK: Duration = Duration::from_secs(30);

/// How a round goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    /// A process is killed at a random moment.
    Kill,
    /// A process dies at a named place.
    Failpoint,
    /// Two compete; one is killed, and the other goes on with its work until it is killed too.
    Pair,
    /// A process is stopped past its leases, another takes over, and the first goes on.
    Stop,
    /// A process ends as it should.
    Orderly,
    /// A process that splits large events is killed, also between an object and its event.
    Overflow,
    /// A relay is killed, or stopped past its lease.
    Relay,
    /// A retention job is killed while others publish and handle.
    Retention,
}

/// A file, the reports of victims about it, and the count of kills and stops.
pub struct Arena {
    pub(super) program: PathBuf,
    pub(super) file: PathBuf,
    pub(super) ledger: SharedLedger,
    pub(super) random: Random,
    pub(super) victims: u32,
    /// All groups are known to the file.
    pub(super) declared: bool,
    /// The retention policy of the file.
    pub(super) retention: Option<Policy>,
    last_seed: Option<u64>,
    /// The figures of this file so far.
    pub tally: Tally,
}

impl Arena {
    /// A new file for victims of this program. The seed decides what happens to it.
    pub fn new(program: &Path, file: PathBuf, seed: u64) -> Self {
        Self {
            program: program.to_owned(),
            file,
            ledger: SharedLedger::default(),
            random: Random::new(seed),
            victims: 0,
            declared: false,
            retention: None,
            last_seed: None,
            tally: Tally::default(),
        }
    }

    /// Enables retention for this file. Nothing is relayed into it then: if a killed relay publishes an event
    /// again, the engine could not recognise it once the first copy is removed.
    #[must_use]
    pub fn retaining(mut self, policy: Policy) -> Self {
        self.retention = Some(policy);
        self.ledger.lock().retains(policy);
        self
    }

    /// Plays one round.
    pub fn play(&mut self) -> Result<(), Broken> {
        match self.next_round() {
            Round::Kill => self.kill(),
            Round::Failpoint => self.failpoint(),
            Round::Pair => self.pair(),
            Round::Stop => self.stop(),
            Round::Orderly => self.orderly(),
            Round::Overflow => self.overflow(),
            Round::Relay => self.relay(),
            Round::Retention => self.retain(),
        }?;
        let errors = self.ledger.lock().take_errors();
        self.tally
            .problems
            .extend(errors.into_iter().map(|e| format!("something failed: {e}")));
        Ok(())
    }

    fn next_round(&mut self) -> Round {
        match self.random.below(100) {
            0..24 => Round::Kill,
            24..40 => Round::Failpoint,
            40..50 => Round::Pair,
            50..54 => Round::Stop,
            54..58 => Round::Orderly,
            58..75 => Round::Overflow,
            _ if self.retention.is_some() => Round::Retention,
            _ => Round::Relay,
        }
    }

    fn kill(&mut self) -> Result<(), Broken> {
        let orders = self.orders();
        let victim = self.spawn(&orders, None)?;
        self.work(&victim)?;
        self.end(victim)
    }

    fn failpoint(&mut self) -> Result<(), Broken> {
        let name = FAILPOINTS[self.random.below(FAILPOINTS.len())];
        let most = if name == "after-dead-letter" { 8 } else { 60 };
        let hit = 1 + self.random.below(most);
        let orders = self.orders();
        let mut victim = self.spawn(&orders, Some(&format!("{name}:{hit}")))?;
        victim.ends_within(Duration::from_millis(800));
        self.end(victim)
    }

    fn pair(&mut self) -> Result<(), Broken> {
        let (one, mut other) = (self.orders(), self.orders());
        if self.random.one_in(2) {
            other.publishes = 0;
        }
        let one = self.spawn(&one, None)?;
        let other = self.spawn(&other, None)?;
        self.work(&one)?;
        self.end(one)?;
        // Sometimes long enough to notice that the first is dead and to take over.
        std::thread::sleep(self.up_to(500));
        self.end(other)
    }

    fn stop(&mut self) -> Result<(), Broken> {
        let mut orders = self.orders();
        orders.lease_ms = Some(u64::try_from(SHORT_LEASE.as_millis()).unwrap_or(u64::MAX));
        let mut zombie = self.spawn(&orders, None)?;
        // Stopped by the campaign, or because it got no processor time.
        self.ledger.lock().was_stopped(zombie.number());
        self.work(&zombie)?;
        if !zombie.stop_between_transactions()? {
            return self.end(zombie);
        }
        self.tally.stops += 1;
        let orders = self.orders();
        let heir = self.spawn(&orders, None)?;
        std::thread::sleep(SHORT_LEASE + self.up_to(300));
        zombie.go_on()?;
        std::thread::sleep(self.up_to(300));
        if self.random.one_in(2) {
            self.end(zombie)?;
            self.end(heir)
        } else {
            self.end(heir)?;
            self.end(zombie)
        }
    }

    fn orderly(&mut self) -> Result<(), Broken> {
        let orders = self.orders();
        let victim = self.spawn(&orders, None)?;
        self.work(&victim)?;
        let end = victim.end_in_order()?;
        self.count(end)
    }

    /// Lets one process work until every group has caught up, and checks that every event has ended.
    pub fn drain(&mut self) -> Result<(), Broken> {
        self.drain_outboxes()?;
        let mut orders = self.orders();
        orders.publishes = 0;
        let mut victim = self.spawn(&orders, None)?;
        victim.wait_until_ready()?;
        let (mut least, mut progress) = (u64::MAX, Instant::now());
        loop {
            let left = pending(&self.file)?;
            if left == 0 {
                break;
            }
            if left < least {
                (least, progress) = (left, Instant::now());
            }
            if progress.elapsed() > STUCK || !victim.is_running() {
                self.tally
                    .problems
                    .push(format!("{left} deliveries are owed and nothing moves"));
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let end = victim.end_in_order()?;
        self.count(end)?;
        self.check(Stage::Drained)?;
        self.tidy()
    }

    /// Compares the file with the ledger. No victim may be running.
    pub fn check(&mut self, stage: Stage) -> Result<(), Broken> {
        let report = self.report(stage)?;
        self.tally.take(report);
        Ok(())
    }

    /// The result of a check, without counting it.
    pub fn report(&mut self, stage: Stage) -> Result<Report, Broken> {
        let observed = observe(&self.file)?;
        let ledger = self.ledger.lock();
        self.tally.events = ledger.acked().len() as u64;
        Ok(check(&ledger, &observed, stage, self.tally.interruptions()))
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// What victims reported about the file.
    pub fn ledger(&self) -> &SharedLedger {
        &self.ledger
    }

    /// Orders for the next victim, with some ids of the one before.
    pub fn orders(&mut self) -> Orders {
        let seed = self.random.number();
        let repeat = self.last_seed.replace(seed);
        let publishes = 10 + self.random.below(30) as u64;
        let mut orders = Orders::new(self.file.clone(), seed, publishes);
        // A second publish of a removed event would not be recognised as a duplicate.
        orders.mortal = self.retention.is_some();
        orders.repeat = repeat.filter(|_| !orders.mortal);
        orders
    }

    /// Starts a victim that reports to this arena.
    pub fn spawn(&mut self, orders: &Orders, failpoint: Option<&str>) -> Result<Victim, Broken> {
        self.victims += 1;
        Victim::spawn(&self.program, orders, failpoint, self.victims, &self.ledger)
    }

    /// Waits for a random moment: while the victim starts, or while it works.
    pub fn work(&mut self, victim: &Victim) -> Result<(), Broken> {
        if self.random.one_in(5) {
            std::thread::sleep(self.up_to(40));
            return Ok(());
        }
        victim.wait_until_ready()?;
        let most = if self.random.one_in(8) { 400 } else { 150 };
        std::thread::sleep(self.up_to(most));
        Ok(())
    }

    /// Waits a moment after the power was cut, sometimes so long that the victim must have noticed.
    pub fn linger(&mut self) {
        let long = self.random.one_in(30);
        let more = if long {
            LAST_WORDS + Duration::from_secs(1)
        } else {
            Duration::ZERO
        };
        std::thread::sleep(self.up_to(10) + more);
    }

    /// Counts acknowledgements during the power cut, and how many of their events are missing.
    pub(crate) fn count_last_words(&mut self, said: &HashSet<EventId>) -> Result<(), Broken> {
        let ids = if said.is_empty() {
            HashSet::new()
        } else {
            ids(&self.file)?
        };
        self.tally.last_words += said.len() as u64;
        self.tally.unheard += said.difference(&ids).count() as u64;
        Ok(())
    }

    /// Kills a victim, unless it has died at its failpoint.
    pub fn end(&mut self, victim: Victim) -> Result<(), Broken> {
        let end = victim.kill()?;
        self.count(end)
    }

    pub(super) fn count(&mut self, end: End) -> Result<(), Broken> {
        match end {
            End::Killed => self.tally.kills += 1,
            End::Failpoint => self.tally.failpoint_kills += 1,
            End::Orderly => self.tally.orderly += 1,
            End::Unexpected(status) => {
                self.tally
                    .problems
                    .push(format!("a victim ended by itself: {status}"));
            }
        }
        Ok(())
    }

    pub(super) fn up_to(&mut self, milliseconds: usize) -> Duration {
        Duration::from_micros(self.random.below(milliseconds * 1000) as u64)
    }
}
