//! The content of an event and the behaviour of its handlers: all of it is derived from the event's id.
//!
//! So the checker needs only ids to verify every payload byte for byte and every outcome, and a process that
//! never saw the first publish can repeat it.

use everbus_core::{Event, EventBuilder, EventId, FailureKind};

use crate::model::Random;

/// Events with an ordinary behaviour.
const PLAIN: &str = "chaos.plain.made";
/// Events that the group `work` wants too.
const WORK: &str = "chaos.work.made";
/// So few keys that events often wait for another event with the same key.
const KEYS: usize = 12;

/// What a handler does with an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Succeeds at once.
    Finish,
    /// Succeeds after this many milliseconds.
    Nap(u64),
    /// Fails; a retry may help.
    Fail,
    /// Fails for good.
    GiveUp,
    /// Panics.
    Panic,
    /// Takes longer than its timeout.
    Oversleep,
    /// Leaves the event alone, with a reason.
    Skip,
}

/// How an event behaves in one group: the same every time, or differently at the first attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Nature {
    act: Act,
    always: bool,
}

/// The event that an id stands for.
#[derive(Clone, Debug)]
pub struct Content {
    /// The id that everything is derived from.
    pub id: EventId,
    /// Its type.
    pub event_type: &'static str,
    /// Its ordering key.
    pub key: Option<String>,
    /// Its payload, to the byte.
    pub payload: Vec<u8>,
    natures: [Nature; super::GROUPS.len()],
}

impl Content {
    /// The content of the event with this id.
    pub fn of(id: EventId) -> Self {
        let mut random = Random::new(checksum(id.as_bytes()));
        let hard = random.one_in(2);
        let key = (!random.one_in(4)).then(|| format!("key-{}", random.below(KEYS)));
        let natures = [
            unnamed_nature(&mut random),
            work_nature(&mut random),
            ordered_nature(&mut random),
        ];
        // A few are larger than a page or two, so that a commit spans many frames.
        let length = if random.one_in(48) {
            random.below(20_000)
        } else {
            random.below(200)
        };
        let filler: String = (0..length)
            .map(|_| char::from(b'a' + random.below(26) as u8))
            .collect();
        let sum = checksum(filler.as_bytes());
        // A large payload is split by this field, or moved as a whole.
        let name = if random.one_in(2) { "output" } else { "filler" };
        Self {
            id,
            event_type: if hard { WORK } else { PLAIN },
            key,
            payload: format!("{{\"id\":\"{id}\",\"{name}\":\"{filler}\",\"sum\":{sum}}}")
                .into_bytes(),
            natures,
        }
    }

    /// The event to publish.
    pub fn event(&self) -> EventBuilder {
        let builder = Event::builder(self.event_type)
            .id(self.id)
            .payload(self.payload.clone());
        match &self.key {
            Some(key) => builder.key(key.as_str()),
            None => builder,
        }
    }

    /// Whether a group wants it.
    pub fn is_wanted_by(&self, group: usize) -> bool {
        super::GROUPS[group].pattern == "chaos.>" || self.event_type == WORK
    }

    /// What a handler of a group does at an attempt. Of several handlers only the last can fail, so that an
    /// attempt fails after others have run.
    pub fn act(&self, group: usize, handler: usize, attempt: u32) -> Act {
        let last = handler + 1 == super::GROUPS[group].handlers.len();
        let Nature { act, always } = self.natures[group];
        if last && (always || attempt == 1) {
            act
        } else {
            Act::Finish
        }
    }

    /// Whether a group skips it, at least at the first attempt.
    pub fn may_be_skipped_by(&self, group: usize) -> bool {
        self.natures[group].act == Act::Skip
    }

    /// Whether a failure of this kind may be on record in a group. Crashes come from the campaign,
    /// and a process that is stopped or starved may overrun any timeout.
    pub fn may_fail_with(&self, group: usize, kind: FailureKind) -> bool {
        match kind {
            FailureKind::Crash | FailureKind::Timeout => true,
            FailureKind::Error => self.natures[group].act == Act::Fail,
            FailureKind::Permanent => self.natures[group].act == Act::GiveUp,
            FailureKind::Panic => self.natures[group].act == Act::Panic,
            _ => false,
        }
    }
}

fn unnamed_nature(random: &mut Random) -> Nature {
    let act = match random.below(20) {
        0 => Act::Fail,
        1 => Act::Nap(1 + random.number() % 4),
        _ => Act::Finish,
    };
    Nature { act, always: false }
}

fn work_nature(random: &mut Random) -> Nature {
    let act = match random.below(20) {
        0..=2 => Act::Fail,
        3..=4 => Act::Panic,
        5 => Act::Oversleep,
        6 => Act::GiveUp,
        7..=8 => Act::Skip,
        9..=12 => Act::Nap(1 + random.number() % 8),
        _ => Act::Finish,
    };
    // An event that overslept every time would hold a place for most of the drain.
    let always = matches!(act, Act::GiveUp | Act::Skip | Act::Nap(_)) || random.one_in(3);
    Nature {
        act,
        always: always && act != Act::Oversleep,
    }
}

fn ordered_nature(random: &mut Random) -> Nature {
    match random.below(40) {
        0 => Nature {
            act: Act::Fail,
            always: true,
        },
        1..=2 => Nature {
            act: Act::Fail,
            always: false,
        },
        3 => Nature {
            act: Act::Panic,
            always: false,
        },
        _ => Nature {
            act: Act::Finish,
            always: true,
        },
    }
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The ids a victim publishes: the same for the same seed.
#[derive(Clone, Debug)]
pub struct Ids(Random);

impl Ids {
    /// The ids of a seed.
    pub fn new(seed: u64) -> Self {
        Self(Random::new(seed ^ 0x1d5))
    }
}

impl Iterator for Ids {
    type Item = EventId;

    fn next(&mut self) -> Option<EventId> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.0.number().to_be_bytes());
        bytes[8..].copy_from_slice(&self.0.number().to_be_bytes());
        Some(EventId::from_bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_says_everything_about_its_event() {
        for id in Ids::new(7).take(200) {
            let (a, b) = (Content::of(id), Content::of(id));
            assert_eq!(
                (a.event_type, &a.key, &a.payload),
                (b.event_type, &b.key, &b.payload)
            );
            let event = a.event().build().unwrap();
            assert_eq!(event.payload().as_ref(), a.payload);
            assert!(a.is_wanted_by(0) && a.is_wanted_by(2));
        }
    }

    #[test]
    fn every_kind_of_handler_occurs() {
        let acts: std::collections::HashSet<String> = Ids::new(1)
            .take(500)
            .map(|id| format!("{:?}", Content::of(id).act(1, 0, 1)))
            .collect();
        for act in ["Finish", "Fail", "GiveUp", "Panic", "Oversleep", "Skip"] {
            assert!(acts.contains(act), "{act} is missing");
        }
    }
}
