//! Power loss: a victim works on a disk whose power is cut. When the power is back, everything acknowledged
//! must be there, with the objects of large events.
//!
//! With `synchronous=NORMAL`, or with objects that are not synced, the same procedure must lose something;
//! otherwise the test proves nothing.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::checker::Stage;
use super::disk::Disk;
use super::rounds::Arena;
use super::tally::Tally;
use super::{Broken, campaign, say};
use crate::model::Random;

/// After this many losses the file is drained and a new one begun.
const LOSSES_PER_FILE: u64 = 20;
/// After this many files the file system is created again.
const FILES_PER_FORMAT: u64 = 5;
/// A control that has lost nothing after this many losses will lose nothing. On a slow machine the first few may come
/// before any publish was acknowledged.
const CONTROL_LOSSES: u64 = 100;

/// When to stop.
#[derive(Clone, Copy, Debug)]
pub enum Losses {
    /// After this many.
    Count(u64),
    /// After this time.
    Time(Duration),
}

/// What the victims of a control do not sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsynced {
    /// Commits.
    Commits,
    /// The objects of large events, before the events are appended.
    Objects,
}

/// A series of power losses.
#[derive(Clone, Debug)]
pub struct Power {
    /// The program whose subcommand `victim` works on the disk.
    pub program: PathBuf,
    /// Seed of the events and of the moments when the power is cut.
    pub seed: u64,
}

impl Power {
    /// Cuts the power again and again, up to the end or to the first problem. Every other victim splits large
    /// events, and publishes mostly large ones.
    pub fn run(&self, losses: Losses) -> Result<Tally, Broken> {
        let began = Instant::now();
        let is_over = |outages: u64| match losses {
            Losses::Count(most) => outages >= most,
            Losses::Time(time) => began.elapsed() >= time,
        };
        let mut disk = Disk::create()?;
        let mut random = Random::new(self.seed);
        let mut tally = Tally::default();
        let mut files = 0;
        while !is_over(tally.outages) && tally.is_clean() {
            files += 1;
            if files % FILES_PER_FORMAT == 0 {
                disk.replace()?;
            }
            let file = disk.path().join(format!("power-{files}.db"));
            let mut arena = Arena::new(&self.program, file, random.number());
            while arena.tally.outages < LOSSES_PER_FILE
                && !is_over(tally.outages + arena.tally.outages)
                && arena.tally.is_clean()
            {
                let split = arena.tally.outages % 2 == 1;
                lose_power(&mut disk, &mut arena, split, None)?;
                arena.check(Stage::Interrupted)?;
            }
            if arena.tally.is_clean() {
                arena.drain()?;
                campaign::remove(arena.file())?;
            }
            tally.add(std::mem::take(&mut arena.tally));
            say(&format!("{tally} after {:?}", began.elapsed()));
        }
        Ok(tally)
    }

    /// A control: without these syncs the same procedure must lose an acknowledged event, or the object of
    /// an event. If `lost` is 0, the procedure proves nothing.
    pub fn control(&self, unsynced: Unsynced) -> Result<Tally, Broken> {
        let mut disk = Disk::create()?;
        let file = disk.path().join("control.db");
        let mut arena = Arena::new(&self.program, file, self.seed);
        while arena.tally.outages < CONTROL_LOSSES && arena.tally.lost == 0 {
            let split = unsynced == Unsynced::Objects;
            lose_power(&mut disk, &mut arena, split, Some(unsynced))?;
            let report = arena.report(Stage::Interrupted)?;
            arena.tally.lost = report.lost.len() as u64;
        }
        Ok(std::mem::take(&mut arena.tally))
    }
}

fn lose_power(
    disk: &mut Disk,
    arena: &mut Arena,
    split: bool,
    unsynced: Option<Unsynced>,
) -> Result<(), Broken> {
    let mut orders = arena.orders();
    // It must still be publishing when the power is cut.
    orders.publishes = 10_000;
    orders.overflow = split;
    orders.normal = unsynced == Some(Unsynced::Commits);
    orders.unsynced_objects = unsynced == Some(Unsynced::Objects);
    orders.quiet = true;
    let victim = arena.spawn(&orders, None)?;
    arena.work(&victim)?;
    arena.ledger().lock().power_goes();
    disk.lose_power()?;
    arena.linger();
    victim.kill()?;
    let last_words = {
        let mut ledger = arena.ledger().lock();
        // Its disk was gone, so failed publishes are expected.
        ledger.take_errors();
        ledger.power_is_back()
    };
    arena.tally.outages += 1;
    disk.restore_power()?;
    arena.count_last_words(&last_words)
}
