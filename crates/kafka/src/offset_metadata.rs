//! The progress of a group in a partition, as the metadata of its committed offset.
//!
//! The offset is the floor: everything before it is done. The metadata says what is above: the events that are done,
//! those that have begun, and those that wait, with their attempts. Kafka keeps 4,096 characters. What does not fit
//! is left out in an order that loses no event: first due times, then what is done (it is delivered again), then
//! attempts.

use std::collections::BTreeMap;

use data_encoding::BASE64URL_NOPAD;
use everbus_core::{Progress, Timestamp};

/// The most characters of the metadata. The server takes 4,096.
pub(crate) const MOST: usize = 4_000;
const VERSION: u64 = 1;
/// Due times are kept in steps of this many milliseconds.
const STEP: i64 = 100;

/// The outcome of the last attempt at an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    /// No attempt has begun, or it was taken back.
    None,
    /// It is under way.
    Running,
    /// It failed.
    Failed,
    /// The outcome is not known: the lease ended, or the partition moved.
    Lost,
}

/// The state of an event above the floor that is not done. An event that has only begun once needs no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Attempts begun.
    pub(crate) attempts: u32,
    pub(crate) last: Last,
    /// It was the only event in flight.
    pub(crate) alone: bool,
    /// When it may be handed out again.
    pub(crate) due: Option<Timestamp>,
    /// The attempts whose outcome is not known: bit 0 stands for the first. The others failed.
    pub(crate) lost: u32,
}

impl Entry {
    /// An event whose first attempt is under way.
    pub(crate) const BEGUN: Self = Self {
        attempts: 1,
        last: Last::Running,
        alone: false,
        due: None,
        lost: 0,
    };
}

/// The state of a group in one partition. Places are offsets plus one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    pub(crate) progress: Progress,
    /// Everything up to here that is neither done nor in `entries` has begun once.
    pub(crate) begun: u64,
    pub(crate) entries: BTreeMap<u64, Entry>,
    /// Dead letters of the group from this partition.
    pub(crate) dead: u64,
    /// The birth of the group that committed it. A group that was removed and created again has another one.
    pub(crate) born: i64,
}

impl Saved {
    pub(crate) fn new(floor: u64) -> Self {
        Self {
            progress: Progress::new(floor),
            begun: 0,
            entries: BTreeMap::new(),
            dead: 0,
            born: 0,
        }
    }

    /// What a group committed. `None` if that was an older group of the same name. An offset without metadata of
    /// this kind was set by an operator, and counts.
    pub(crate) fn of_group(floor: u64, text: &str, born: i64) -> Option<Self> {
        match Self::decode(floor, text) {
            Some(saved) => (saved.born == born).then_some(saved),
            None => Some(Self::new(floor)),
        }
    }

    /// What is known of an event that is not done; `None` if no attempt has begun.
    pub(crate) fn entry(&self, place: u64) -> Option<Entry> {
        let known = self.entries.get(&place).copied();
        known.or_else(|| (place <= self.begun).then_some(Entry::BEGUN))
    }

    /// The metadata, at most [`MOST`] characters.
    pub(crate) fn encode(&self) -> String {
        let mut text = BASE64URL_NOPAD.encode(&self.bytes());
        if text.len() <= MOST {
            return text;
        }
        let mut less = self.clone();
        for entry in less.entries.values_mut() {
            entry.due = None;
        }
        text = BASE64URL_NOPAD.encode(&less.bytes());
        while text.len() > MOST && less.progress.fragments() > 0 {
            less.progress = lower_half(&less.progress);
            text = BASE64URL_NOPAD.encode(&less.bytes());
        }
        while text.len() > MOST && !less.entries.is_empty() {
            // Drops the later half of the entries: an event without an entry counts as begun once.
            let half = less.entries.keys().nth(less.entries.len() / 2).copied();
            _ = half.map(|half| less.entries.split_off(&half));
            text = BASE64URL_NOPAD.encode(&less.bytes());
        }
        text
    }

    fn bytes(&self) -> Vec<u8> {
        let floor = self.progress.floor();
        let mut out = Vec::new();
        push(&mut out, VERSION);
        push(&mut out, self.begun.saturating_sub(floor));
        push(&mut out, self.dead);
        push(&mut out, self.born.unsigned_abs());
        let done = self.progress.encode();
        push(&mut out, done.len() as u64);
        out.extend(done);
        let dues = self.entries.values().filter_map(|entry| entry.due);
        let base = dues.min().map_or(0, |due| millis(due).max(0));
        push(&mut out, base as u64);
        let mut at = floor;
        for (place, entry) in &self.entries {
            push(&mut out, place.saturating_sub(at));
            let last = match entry.last {
                Last::None => 0,
                Last::Running => 1,
                Last::Failed => 2,
                Last::Lost => 3,
            };
            let flags = [entry.lost != 0, entry.alone, entry.due.is_some()];
            let flags = flags
                .iter()
                .fold(0, |bits, flag| bits << 1 | u64::from(*flag));
            push(&mut out, u64::from(entry.attempts) << 5 | last << 3 | flags);
            if entry.lost != 0 {
                push(&mut out, u64::from(entry.lost));
            }
            if let Some(due) = entry.due {
                // Rounds up, so that a retry never comes early.
                push(
                    &mut out,
                    ((millis(due) - base).max(0) as u64).div_ceil(STEP as u64),
                );
            }
            at = *place;
        }
        out
    }

    /// Reads metadata that was committed with a floor. `None` if it is not of this kind.
    pub(crate) fn decode(floor: u64, text: &str) -> Option<Self> {
        let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).ok()?;
        let mut rest = &bytes[..];
        if take(&mut rest)? != VERSION {
            return None;
        }
        let begun = floor.checked_add(take(&mut rest)?)?;
        let dead = take(&mut rest)?;
        let born = i64::try_from(take(&mut rest)?).ok()?;
        let length = usize::try_from(take(&mut rest)?).ok()?;
        let (done, mut rest) = rest.split_at_checked(length)?;
        let progress = Progress::decode(floor, done).ok()?;
        let base = i64::try_from(take(&mut rest)?).ok()?;
        let mut entries = BTreeMap::new();
        let mut at = floor;
        while !rest.is_empty() {
            at = at.checked_add(take(&mut rest)?)?;
            let bits = take(&mut rest)?;
            let last = match bits >> 3 & 3 {
                0 => Last::None,
                1 => Last::Running,
                2 => Last::Failed,
                _ => Last::Lost,
            };
            let lost = match bits & 4 {
                0 => 0,
                _ => u32::try_from(take(&mut rest)?).ok()?,
            };
            let due = match bits & 1 {
                0 => None,
                _ => {
                    let steps = i64::try_from(take(&mut rest)?).ok()?;
                    let due = base.checked_add(steps.checked_mul(STEP)?)?;
                    Some(Timestamp::from_micros(due.checked_mul(1000)?))
                }
            };
            let entry = Entry {
                attempts: u32::try_from(bits >> 5).ok()?,
                last,
                alone: bits & 2 != 0,
                due,
                lost,
            };
            entries.insert(at, entry);
        }
        Some(Self {
            progress,
            begun,
            entries,
            dead,
            born,
        })
    }
}

fn millis(at: Timestamp) -> i64 {
    // Rounds up to whole milliseconds.
    at.as_micros().saturating_add(999).div_euclid(1000)
}

/// The progress without the upper half of the ranges that are done above the floor.
fn lower_half(progress: &Progress) -> Progress {
    let mut lower = Progress::new(progress.floor());
    let highest = progress.highest();
    let keep = progress.fragments() / 2;
    let mut gaps = progress.unfinished(highest);
    let mut before = gaps.next().map(|(_, last)| last);
    for _ in 0..keep {
        let (Some(end), next) = (before, gaps.next()) else {
            break;
        };
        let last = next.map_or(highest, |(first, _)| first - 1);
        lower.complete_range(end + 1, last);
        before = next.map(|(_, last)| last);
    }
    lower
}

fn push(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        let part = u64::from(first & 0x7f);
        value |= part.checked_shl(shift).filter(|v| v >> shift == part)?;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(attempts: u32, last: Last, due: Option<i64>) -> Entry {
        Entry {
            attempts,
            last,
            alone: last == Last::Lost,
            due: due.map(|ms| Timestamp::from_micros(ms * 1000)),
            lost: attempts / 2,
        }
    }

    // conformance: contract/kafka-progress: what is done, begun and waiting above the committed offset is read back from the metadata
    #[test]
    fn it_reads_back() {
        let mut saved = Saved::new(1_000_000);
        assert_eq!(
            Saved::decode(1_000_000, &saved.encode()),
            Some(Saved {
                begun: 1_000_000,
                ..saved.clone()
            })
        );
        saved.begun = 1_000_050;
        saved.dead = 7;
        saved.born = 12;
        saved.progress.complete_range(1_000_003, 1_000_040);
        saved.progress.complete(1_000_049);
        saved
            .entries
            .insert(1_000_001, entry(3, Last::Failed, Some(1_700_000_000_100)));
        saved.entries.insert(1_000_002, entry(0, Last::None, None));
        saved
            .entries
            .insert(1_000_041, entry(2, Last::Lost, Some(1_700_000_003_100)));
        saved
            .entries
            .insert(1_000_042, entry(9, Last::Running, None));
        let text = saved.encode();
        assert!(text.len() < 60, "{text}");
        let back = Saved::decode(1_000_000, &text).unwrap();
        assert_eq!(back, saved);
        assert_eq!(back.entry(1_000_043), Some(Entry::BEGUN));
        assert_eq!(back.entry(1_000_051), None);
    }

    #[test]
    fn what_is_damaged_is_refused() {
        let mut saved = Saved::new(10);
        saved.entries.insert(12, entry(1, Last::Failed, Some(5)));
        let text = saved.encode();
        for bad in ["", "!", "AA", &text[..text.len() - 2]] {
            assert_eq!(Saved::decode(10, bad), None, "{bad}");
        }
        assert!(Saved::decode(u64::MAX, &text).is_none());
    }

    // conformance: contract/kafka-metadata-size: metadata never outgrows what the server keeps; what is left out is delivered again and not lost
    #[test]
    fn it_always_fits_and_forgets_in_the_safe_direction() {
        let mut random = fastrand::Rng::with_seed(5);
        for round in 0..40 {
            let mut saved = Saved::new(500);
            let span = 1 << random.u32(4..16);
            for place in 501..501 + span {
                match random.u32(0..4) {
                    0 | 1 => _ = saved.progress.complete(place),
                    2 if round % 2 == 0 => {
                        let due = random.bool().then(|| random.i64(0..1 << 42));
                        let last = Last::Failed;
                        saved
                            .entries
                            .insert(place, entry(random.u32(1..100), last, due));
                    }
                    _ => {}
                }
            }
            let floor = saved.progress.floor();
            saved.entries.retain(|place, _| *place > floor);
            saved.begun = 500 + span;
            let text = saved.encode();
            assert!(text.len() <= MOST, "{}", text.len());
            let back = Saved::decode(floor, &text).unwrap();
            for place in 501..=500 + span {
                let forged = back.progress.is_done(place) && !saved.progress.is_done(place);
                assert!(!forged, "{place} is not done");
            }
            for (place, kept) in &back.entries {
                assert_eq!(kept.attempts, saved.entries[place].attempts);
            }
        }
    }
}
