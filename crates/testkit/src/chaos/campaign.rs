//! The kill campaign: kills processes in rounds, on one file after another, and checks each file.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::checker::Stage;
use super::retain::Policy;
use super::rounds::Arena;
use super::tally::Tally;
use super::{Broken, say};
use crate::model::Random;

/// After this many kills a file is drained and a new one begun, so that checks stay quick.
const KILLS_PER_FILE: u64 = 60;
/// The file is checked after about this many rounds.
const ROUNDS_PER_CHECK: usize = 8;

/// When a campaign ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// After this time, apart from the last drain.
    Time(Duration),
    /// After this many kills.
    Kills(u64),
}

impl Until {
    fn is_over(self, began: Instant, kills: u64) -> bool {
        match self {
            Self::Time(time) => began.elapsed() >= time,
            Self::Kills(most) => kills >= most,
        }
    }
}

/// A kill campaign.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// The program whose subcommand `victim` is killed.
    pub program: PathBuf,
    /// Where its files go.
    pub directory: PathBuf,
    /// Decides every round.
    pub seed: u64,
    /// When it ends.
    pub until: Until,
}

impl Campaign {
    /// Runs it, up to its end or to the first problem. A file with a problem is left in place.
    pub fn run(&self) -> Result<Tally, Broken> {
        let began = Instant::now();
        let mut random = Random::new(self.seed);
        let mut tally = Tally::default();
        let mut number = 0;
        while !self.until.is_over(began, tally.all_kills()) && tally.is_clean() {
            number += 1;
            let file = self.directory.join(format!("chaos-{number}.db"));
            let mut arena = Arena::new(&self.program, file, random.number());
            // Outboxes, removal by age, removal by length, in turn.
            arena = match number % 3 {
                2 => arena.retaining(Policy::Age),
                0 => arena.retaining(Policy::Length),
                _ => arena,
            };
            let before = tally.all_kills();
            self.play(&mut arena, began, before, random.number())?;
            let clean = arena.tally.is_clean();
            if !clean {
                say(&format!("the file is kept: {}", arena.file().display()));
            }
            tally.add(std::mem::take(&mut arena.tally));
            say(&format!("{tally} after {:?}", began.elapsed()));
            if clean {
                remove(arena.file())?;
            }
        }
        Ok(tally)
    }

    fn play(
        &self,
        arena: &mut Arena,
        began: Instant,
        before: u64,
        seed: u64,
    ) -> Result<(), Broken> {
        let mut random = Random::new(seed);
        loop {
            let kills = arena.tally.all_kills();
            if kills >= KILLS_PER_FILE
                || self.until.is_over(began, before + kills)
                || !arena.tally.is_clean()
            {
                break;
            }
            arena.play()?;
            if random.one_in(ROUNDS_PER_CHECK) {
                arena.check(Stage::Interrupted)?;
            }
        }
        arena.check(Stage::Interrupted)?;
        if arena.tally.is_clean() {
            arena.drain()?;
        }
        Ok(())
    }
}

/// Removes a file and everything beside it: what SQLite and owners left, outbox and objects.
pub(crate) fn remove(file: &Path) -> Result<(), Broken> {
    let (Some(directory), Some(name)) = (file.parent(), file.file_name()) else {
        return Ok(());
    };
    let name = name.to_string_lossy().into_owned();
    let entries = std::fs::read_dir(directory).map_err(Broken::at("listing the files"))?;
    for entry in entries.filter_map(Result::ok) {
        if entry.file_name().to_string_lossy().starts_with(&name) {
            let path = entry.path();
            let removed = if path.is_dir() {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
            removed.map_err(Broken::at("removing a file"))?;
        }
    }
    Ok(())
}
