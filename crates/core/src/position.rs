//! The position of an event, and the progress of a reader.
//!
//! A [`Shard`] is one ordered log: a stream, or one partition of it. A [`Position`] identifies an event by
//! its shard and its place (offset) there. A [`Cursor`] says how far a reader has read in every shard.
//! Engines with a single log (SQLite, memory) use [`Shard::ONLY`]; their positions are written as plain
//! numbers.
//!
//! The two words are kept apart: an event has a *position*; a group or a reader has a *cursor*. Where the "position
//! of a group" is meant ([`GroupInfo::position`](crate::GroupInfo::position)), it is the cursor of the group.
//!
//! ```
//! use everbus_core::{Cursor, Position, Shard};
//!
//! let orders = Shard::named("orders/3")?;
//! let position = Position::new(orders, 17);
//! assert_eq!(position.to_string(), "orders/3:17");
//! assert_eq!(Position::seq(1042).to_string(), "1042");
//!
//! // Positions of different shards have no order.
//! assert!(!(position < Position::seq(1042)) && !(position > Position::seq(1042)));
//!
//! let mut cursor = Cursor::START;
//! cursor.advance(position);
//! assert!(cursor.covers(position) && !cursor.covers(Position::new(orders, 18)));
//! assert_eq!(cursor.to_string().parse::<Cursor>()?, cursor);
//! # Ok::<(), everbus_core::Error>(())
//! ```

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use parking_lot::RwLock;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Code, Error, Result};

/// One ordered log. Small and `Copy`: each name is stored once per process.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shard(u32);

/// The names used in this process. They are never removed: there are only as many as partitions.
#[derive(Default)]
struct Names {
    by_number: Vec<&'static str>,
    by_name: HashMap<&'static str, u32>,
}

static NAMES: RwLock<Option<Names>> = RwLock::new(None);

/// The largest number of shards in a process, so that foreign cursors cannot fill its memory.
const MOST_SHARDS: usize = 1 << 20;

impl Shard {
    /// The shard of an engine that has a single log.
    pub const ONLY: Self = Self(0);

    /// The shard of this name: 1 to 255 printable characters without spaces and commas. An engine encodes
    /// other characters.
    pub fn named(name: &str) -> Result<Self> {
        let odd = |c: char| c.is_control() || c.is_whitespace() || c == ',';
        if name.is_empty() || name.chars().count() > 255 || name.contains(odd) {
            return Err(Error::new(
                Code::InvalidCursor,
                format!("{name:?} is not the name of a shard"),
            )
            .hint("a shard is 1 to 255 printable characters without spaces and commas"));
        }
        let known = NAMES.read();
        if let Some(number) = known.as_ref().and_then(|names| names.by_name.get(name)) {
            return Ok(Self(*number));
        }
        drop(known);
        let mut names = NAMES.write();
        let names = names.get_or_insert_default();
        if let Some(number) = names.by_name.get(name) {
            return Ok(Self(*number));
        }
        if names.by_number.len() >= MOST_SHARDS {
            return Err(Error::new(
                Code::InvalidCursor,
                format!("this process knows {MOST_SHARDS} shards already"),
            ));
        }
        let name: &'static str = Box::leak(name.into());
        names.by_number.push(name);
        let number = u32::try_from(names.by_number.len()).unwrap_or(u32::MAX);
        names.by_name.insert(name, number);
        Ok(Self(number))
    }

    /// The name; empty for [`Shard::ONLY`].
    pub fn name(self) -> &'static str {
        let Some(index) = (self.0 as usize).checked_sub(1) else {
            return "";
        };
        let names = NAMES.read();
        let name = names.as_ref().and_then(|names| names.by_number.get(index));
        name.copied().unwrap_or("")
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shard({:?})", self.name())
    }
}

/// Identifies an event: the shard and its place in it.
///
/// Positions are compared only within a shard: `<` and `>` between two shards are both false.
/// The text form is `1042` for the only log of an engine, and `shard:place` otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Position {
    place: u64,
    shard: Shard,
}

impl Position {
    /// An event in a shard. Places grow with the log and begin at 1.
    pub const fn new(shard: Shard, place: u64) -> Self {
        Self { place, shard }
    }

    /// An event in the only log of an engine.
    pub const fn seq(place: u64) -> Self {
        Self::new(Shard::ONLY, place)
    }

    /// The shard.
    pub const fn shard(self) -> Shard {
        self.shard
    }

    /// The place in the shard.
    pub const fn place(self) -> u64 {
        self.place
    }
}

impl PartialOrd for Position {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        (self.shard == other.shard).then(|| self.place.cmp(&other.place))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.shard == Shard::ONLY {
            // As a number, so that the format width applies.
            fmt::Display::fmt(&self.place, f)
        } else {
            f.pad(&format!("{}:{}", self.shard.name(), self.place))
        }
    }
}

impl fmt::Debug for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Position {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let place = |text: &str| {
            // Only the form that `Display` writes: no sign, no leading zeros.
            let plain =
                text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
            let number = text.parse().ok().filter(|_| plain);
            number.ok_or_else(|| {
                Error::new(Code::InvalidCursor, format!("{text:?} is not a position"))
                    .hint("a position is a number, or shard:number")
            })
        };
        match text.rsplit_once(':') {
            None => Ok(Self::seq(place(text)?)),
            Some((shard, number)) => {
                let number = place(number)?;
                Ok(Self::new(Shard::named(shard)?, number))
            }
        }
    }
}

impl Serialize for Position {
    /// A number in the only log of an engine, text otherwise.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.shard == Shard::ONLY {
            serializer.serialize_u64(self.place)
        } else {
            serializer.collect_str(self)
        }
    }
}

/// How far a reader has read in all shards. Opaque: engines make it, readers return it.
///
/// Its text form outlives the process. A shard that it does not mention has not been read.
#[derive(Clone, PartialEq, Eq)]
pub struct Cursor(Places);

#[derive(Clone, PartialEq, Eq)]
enum Places {
    /// The only log of an engine.
    Only(u64),
    /// The last place read in each shard, by name.
    Shards(Vec<Position>),
}

impl Cursor {
    /// Before the first event of every shard.
    pub const START: Self = Self(Places::Only(0));

    /// After the event at this place of the only log.
    pub const fn seq(place: u64) -> Self {
        Self(Places::Only(place))
    }

    /// The last place read in a shard; 0 if nothing was read.
    pub fn place(&self, shard: Shard) -> u64 {
        match &self.0 {
            Places::Only(place) if shard == Shard::ONLY => *place,
            Places::Only(_) => 0,
            Places::Shards(places) => {
                let found = places.iter().find(|p| p.shard == shard);
                found.map_or(0, |position| position.place)
            }
        }
    }

    /// Whether an event was read.
    pub fn covers(&self, position: Position) -> bool {
        position.place <= self.place(position.shard)
    }

    /// Moves the cursor to an event of one shard. Does nothing if the cursor is already further.
    pub fn advance(&mut self, position: Position) {
        if self.covers(position) {
            return;
        }
        match &mut self.0 {
            Places::Only(place) if position.shard == Shard::ONLY => *place = position.place,
            Places::Only(place) => {
                let only = (*place > 0).then_some(Position::seq(*place));
                self.0 = Places::Shards(only.into_iter().chain([position]).collect());
                self.sort();
            }
            Places::Shards(places) => match places.iter_mut().find(|p| p.shard == position.shard) {
                Some(known) => known.place = position.place,
                None => {
                    places.push(position);
                    self.sort();
                }
            },
        }
    }

    /// A cursor just before an event of one shard, and at the beginning of all other shards.
    pub fn before(position: Position) -> Self {
        let place = position.place.saturating_sub(1);
        Self::from(Position { place, ..position })
    }

    /// Whether the cursor is at least as far as another one, in every shard.
    pub fn reaches(&self, other: &Self) -> bool {
        other.positions().all(|position| self.covers(position))
    }

    /// Moves the cursor forward to another one, in every shard where the other one is further.
    pub fn advance_to(&mut self, other: &Self) {
        other
            .positions()
            .for_each(|position| self.advance(position));
    }

    /// A cursor with the earlier place of the two in every shard.
    #[must_use]
    pub fn earlier(&self, other: &Self) -> Self {
        let mut earlier = Self::START;
        for Position { place, shard } in self.positions() {
            let place = place.min(other.place(shard));
            earlier.advance(Position { place, shard });
        }
        earlier
    }

    /// A number that grows with the cursor, for progress bars: the sum of the places of all shards.
    pub fn progress(&self) -> u64 {
        self.positions()
            .fold(0, |sum, position| sum.saturating_add(position.place))
    }

    /// The last place read in each shard that it mentions.
    pub fn positions(&self) -> impl Iterator<Item = Position> + '_ {
        let (only, shards) = match &self.0 {
            Places::Only(0) => (None, &[][..]),
            Places::Only(place) => (Some(Position::seq(*place)), &[][..]),
            Places::Shards(places) => (None, &places[..]),
        };
        only.into_iter().chain(shards.iter().copied())
    }

    /// Whether nothing was read in any shard.
    pub fn is_start(&self) -> bool {
        self.positions().next().is_none()
    }

    fn sort(&mut self) {
        if let Places::Shards(places) = &mut self.0 {
            places.sort_by_key(|position| position.shard.name());
        }
    }
}

impl Default for Cursor {
    fn default() -> Self {
        Self::START
    }
}

impl From<Position> for Cursor {
    /// A cursor after this event in its shard, and at the beginning of all other shards.
    fn from(position: Position) -> Self {
        let mut cursor = Self::START;
        cursor.advance(position);
        cursor
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Places::Only(place) => fmt::Display::fmt(place, f),
            Places::Shards(places) => {
                for (index, position) in places.iter().enumerate() {
                    let comma = if index == 0 { "" } else { "," };
                    write!(f, "{comma}{position}")?;
                }
                Ok(())
            }
        }
    }
}

impl fmt::Debug for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cursor({self})")
    }
}

impl FromStr for Cursor {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut cursor = Self::START;
        for part in text.split(',') {
            let position: Position = part.parse()?;
            if position.place > 0 && cursor.place(position.shard) > 0 {
                let what = format!("the cursor {text:?} names a shard twice");
                return Err(Error::new(Code::InvalidCursor, what));
            }
            cursor.advance(position);
        }
        Ok(cursor)
    }
}

impl Serialize for Cursor {
    /// A number in the only log of an engine, text otherwise.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Places::Only(place) => serializer.serialize_u64(*place),
            Places::Shards(_) => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Cursor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(u64),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(place) => Ok(Self::seq(place)),
            Form::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // conformance: contract/position-text: A position has a text form that reads back as itself; the only log's is its number.
    #[test]
    fn a_position_reads_back_as_itself() {
        let redis = Shard::named("orders:order-placed").unwrap();
        for position in [
            Position::seq(0),
            Position::seq(1042),
            Position::seq(u64::MAX),
            Position::new(Shard::named("orders/3").unwrap(), 17),
            Position::new(redis, 5),
        ] {
            assert_eq!(position.to_string().parse::<Position>().unwrap(), position);
        }
        assert_eq!(Position::seq(1042).to_string(), "1042");
        assert_eq!(serde_json::to_string(&Position::seq(7)).unwrap(), "7");
        assert_eq!(Position::new(redis, 5).to_string(), "orders:order-placed:5");
    }

    #[test]
    fn what_is_no_position_is_refused() {
        for bad in [
            "",
            "x",
            "-1",
            "+1",
            "01",
            "a:",
            "a:x",
            ":1",
            "a b:1",
            "99999999999999999999",
        ] {
            let error = bad.parse::<Position>().unwrap_err();
            assert_eq!(error.code(), Code::InvalidCursor, "{bad:?}");
        }
        for bad in ["", ",", "1,2", "a:1,a:2", "a:1,", "a:1,,b:2"] {
            let error = bad.parse::<Cursor>().unwrap_err();
            assert_eq!(error.code(), Code::InvalidCursor, "{bad:?}");
        }
    }

    // conformance: contract/position-order: Positions are compared only within a shard.
    #[test]
    fn positions_of_two_shards_have_no_order() {
        let (a, b) = (Shard::named("a").unwrap(), Shard::named("b").unwrap());
        assert!(Position::new(a, 1) < Position::new(a, 2));
        assert_eq!(Position::new(a, 1).partial_cmp(&Position::new(b, 2)), None);
        assert_ne!(Position::new(a, 1), Position::new(b, 1));
        assert_eq!(Shard::named("a").unwrap(), a);
    }

    proptest! {
        // conformance: contract/cursor-text: A cursor names how far a reader has come in every shard, never goes back, and its text reads back as itself.
        #[test]
        fn a_cursor_covers_what_was_read_and_reads_back(
            steps in prop::collection::vec((0_usize..4, 1_u64..50), 0..40),
        ) {
            let names = ["", "p/0", "p/1", "other"];
            let mut cursor = Cursor::START;
            let mut furthest = [0_u64; 4];
            for (index, place) in steps {
                let shard = match names[index] {
                    "" => Shard::ONLY,
                    name => Shard::named(name).unwrap(),
                };
                cursor.advance(Position::new(shard, place));
                furthest[index] = furthest[index].max(place);
                prop_assert_eq!(cursor.place(shard), furthest[index]);
            }
            let text = cursor.to_string();
            let json = serde_json::to_string(&cursor).unwrap();
            prop_assert_eq!(serde_json::from_str::<Cursor>(&json).unwrap(), cursor.clone());
            prop_assert_eq!(text.parse::<Cursor>().unwrap(), cursor.clone());
            prop_assert_eq!(cursor.is_start(), furthest.iter().all(|place| *place == 0));
        }
    }
}
