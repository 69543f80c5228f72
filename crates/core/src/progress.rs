//! Which events of a log are done: a floor, and the done ranges above it.
//!
//! A group finishes events out of order. [`Progress`] answers the one question that loses events when
//! it is answered wrongly: how far may the cursor move? Never past something unfinished. It is
//! pure, and every engine that keeps cursors uses it.

use std::collections::BTreeMap;

use crate::error::{Code, Error, Result};

/// Which sequence numbers are done.
///
/// Everything up to and including the [`floor`](Progress::floor) is done; above it, single ranges are done.
/// Completing a number twice is harmless.
///
/// ```
/// use everbus_core::Progress;
/// let mut progress = Progress::new(10);
/// progress.complete(12);
/// assert_eq!(progress.floor(), 10, "11 is unfinished");
/// progress.complete(11);
/// assert_eq!(progress.floor(), 12);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    floor: u64,
    /// Disjoint, non-adjacent ranges `first → last`, all beginning above `floor + 1`.
    done: BTreeMap<u64, u64>,
}

const RANGES: u8 = 0;
const BITMAP: u8 = 1;

impl Progress {
    /// Everything up to and including `floor` is done, nothing above it.
    pub fn new(floor: u64) -> Self {
        Self {
            floor,
            done: BTreeMap::new(),
        }
    }

    /// The highest number below which nothing is unfinished.
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// The highest number that is done.
    pub fn highest(&self) -> u64 {
        self.done
            .last_key_value()
            .map_or(self.floor, |(_, last)| *last)
    }

    /// Marks one number as done. Returns whether it was not done before.
    pub fn complete(&mut self, seq: u64) -> bool {
        // The common case, in order: no search needed.
        if seq.checked_sub(1) == Some(self.floor) {
            self.floor = seq;
            if let Some(next) = self.done.first_entry()
                && *next.key() == seq.saturating_add(1)
            {
                self.floor = next.remove();
            }
            return true;
        }
        if self.is_done(seq) {
            return false;
        }
        self.complete_range(seq, seq);
        true
    }

    /// Marks `first..=last` as done. An empty range does nothing.
    pub fn complete_range(&mut self, first: u64, last: u64) {
        if last < first || last <= self.floor {
            return;
        }
        let mut first = first.max(self.floor + 1);
        let mut last = last;
        // An earlier range that overlaps or touches the new one is merged with it.
        if let Some((&begin, &end)) = self.done.range(..first).next_back()
            && end >= first - 1
        {
            first = begin;
            last = last.max(end);
        }
        while let Some((&begin, &end)) = self.done.range(first..=last.saturating_add(1)).next() {
            self.done.remove(&begin);
            last = last.max(end);
        }
        if first == self.floor + 1 {
            self.floor = last;
        } else {
            self.done.insert(first, last);
        }
    }

    /// Whether a number is done.
    pub fn is_done(&self, seq: u64) -> bool {
        seq <= self.floor
            || !self.done.is_empty()
                && self
                    .done
                    .range(..=seq)
                    .next_back()
                    .is_some_and(|(_, last)| *last >= seq)
    }

    /// The unfinished ranges up to and including `end`, in order.
    pub fn unfinished(&self, end: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut next = self.floor.saturating_add(1);
        let mut ranges = self.done.iter();
        std::iter::from_fn(move || {
            while next <= end && next > 0 {
                let first = next;
                match ranges.next() {
                    Some((&begin, &last)) => {
                        next = last.saturating_add(1);
                        if begin > first {
                            return Some((first, (begin - 1).min(end)));
                        }
                    }
                    None => {
                        next = u64::MAX;
                        if first == u64::MAX {
                            return None;
                        }
                        return Some((first, end));
                    }
                }
            }
            None
        })
    }

    /// How many numbers up to and including `end` are unfinished.
    pub fn unfinished_count(&self, end: u64) -> u64 {
        self.unfinished(end)
            .map(|(first, last)| last - first + 1)
            .sum()
    }

    /// Whether everything up to and including `end` is done.
    pub fn is_complete(&self, end: u64) -> bool {
        self.floor >= end
    }

    /// How many separate ranges are kept above the floor: this determines the memory.
    pub fn fragments(&self) -> usize {
        self.done.len()
    }

    /// The done numbers above the floor, as bytes: ranges or a bitmap, whichever is shorter. The floor
    /// itself is not included.
    pub fn encode(&self) -> Vec<u8> {
        let mut ranges = vec![RANGES];
        let mut at = self.floor;
        for (&first, &last) in &self.done {
            push_varint(&mut ranges, first - at);
            push_varint(&mut ranges, last - first);
            at = last;
        }
        let bits = self.highest() - self.floor;
        let bitmap_len = usize::try_from(bits.div_ceil(8)).unwrap_or(usize::MAX);
        if bitmap_len.saturating_add(1) >= ranges.len() {
            return ranges;
        }
        let mut bitmap = vec![0; bitmap_len + 1];
        bitmap[0] = BITMAP;
        for (&first, &last) in &self.done {
            for seq in first..=last {
                let bit = (seq - self.floor - 1) as usize;
                bitmap[1 + bit / 8] |= 1 << (bit % 8);
            }
        }
        bitmap
    }

    /// The done numbers of `first..=last` as a plain bitmap: bit `n % 8` of byte `n / 8` stands for
    /// `first + n`. A plain SQL query can read this form.
    pub fn bitmap(&self, first: u64, last: u64) -> Vec<u8> {
        let length = last.saturating_sub(first).saturating_add(1);
        let mut bytes = vec![0xff_u8; usize::try_from(length.div_ceil(8)).unwrap_or(0)];
        for (begin, end) in self.unfinished(last) {
            for seq in begin.max(first)..=end {
                let bit = (seq - first) as usize;
                bytes[bit / 8] &= !(1 << (bit % 8));
            }
        }
        bytes
    }

    /// Reads the output of [`bitmap`](Progress::bitmap). Everything before `first` counts as done; numbers
    /// after the end of the bitmap count as not done.
    pub fn from_bitmap(first: u64, last: u64, bytes: &[u8]) -> Self {
        let mut progress = Self::new(first.saturating_sub(1));
        for (index, byte) in bytes.iter().enumerate() {
            for bit in (0..8).filter(|bit| byte & (1 << bit) != 0) {
                let seq = first.saturating_add(index as u64 * 8 + bit);
                if seq <= last {
                    progress.complete(seq);
                }
            }
        }
        progress
    }

    /// Reads the output of [`encode`](Progress::encode).
    pub fn decode(floor: u64, bytes: &[u8]) -> Result<Self> {
        let mut progress = Self::new(floor);
        let damaged = || Error::new(Code::Corrupt, "a record of progress is damaged");
        match bytes.split_first() {
            None => {}
            Some((&RANGES, mut rest)) => {
                let mut at = floor;
                while !rest.is_empty() {
                    let gap = take_varint(&mut rest).ok_or_else(damaged)?;
                    let length = take_varint(&mut rest).ok_or_else(damaged)?;
                    let first = at.checked_add(gap).ok_or_else(damaged)?;
                    let last = first.checked_add(length).ok_or_else(damaged)?;
                    if gap == 0 {
                        return Err(damaged());
                    }
                    progress.complete_range(first, last);
                    at = last;
                }
            }
            Some((&BITMAP, bits)) => {
                for (index, byte) in bits.iter().enumerate() {
                    for bit in (0..8).filter(|bit| byte & (1 << bit) != 0) {
                        let seq = (index as u64 * 8 + bit)
                            .checked_add(1)
                            .and_then(|offset| floor.checked_add(offset))
                            .ok_or_else(damaged)?;
                        progress.complete(seq);
                    }
                }
            }
            Some(_) => return Err(damaged()),
        }
        Ok(progress)
    }
}

fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push((value as u8) | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    // conformance: fault-5: a position never passes an unfinished earlier event
    #[test]
    fn the_floor_never_passes_an_unfinished_number() {
        let mut p = Progress::new(0);
        for seq in [2, 3, 5] {
            assert!(p.complete(seq));
        }
        assert_eq!((p.floor(), p.highest(), p.fragments()), (0, 5, 2));
        assert_eq!(
            p.unfinished(7).collect::<Vec<_>>(),
            [(1, 1), (4, 4), (6, 7)]
        );
        assert!(!p.complete(3), "twice is harmless");
        p.complete(1);
        assert_eq!(p.floor(), 3);
        p.complete(4);
        assert_eq!((p.floor(), p.fragments()), (5, 0));
        assert!(p.is_complete(5) && !p.is_complete(6));
    }

    #[test]
    fn the_ends_of_the_number_line_are_safe() {
        let mut p = Progress::new(u64::MAX - 2);
        p.complete(u64::MAX);
        assert_eq!(p.floor(), u64::MAX - 2);
        p.complete_range(0, u64::MAX);
        assert_eq!(p.floor(), u64::MAX);
        assert_eq!(p.unfinished(u64::MAX).count(), 0);
    }

    #[test]
    fn garbage_is_refused_not_believed() {
        for bytes in [
            &[7u8][..],
            &[RANGES, 0, 1],
            &[RANGES, 0x80],
            &[RANGES, 1],
            &[
                RANGES, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 1,
            ],
        ] {
            assert_eq!(
                Progress::decode(0, bytes).unwrap_err().code(),
                Code::Corrupt
            );
        }
        assert_eq!(Progress::decode(3, &[]).unwrap(), Progress::new(3));
    }

    proptest! {
        // conformance: bus/progress: it agrees with a plain set, and the floor never passes a gap
        #[test]
        fn it_agrees_with_a_plain_set(
            floor in 0u64..50,
            ranges in prop::collection::vec((0u64..300, 0u64..20), 0..60),
            end in 0u64..400,
        ) {
            let mut progress = Progress::new(floor);
            let mut set: BTreeSet<u64> = (0..=floor).collect();
            for (first, length) in ranges {
                let before = progress.floor();
                progress.complete_range(first, first + length);
                set.extend(first..=first + length);
                prop_assert!(progress.floor() >= before, "the floor never sinks");
            }
            let lowest_gap = (0..).find(|n| !set.contains(n)).unwrap();
            prop_assert_eq!(progress.floor(), lowest_gap - 1);
            prop_assert_eq!(progress.highest(), *set.last().unwrap());
            for n in 0..400 {
                prop_assert_eq!(progress.is_done(n), set.contains(&n));
            }
            let missing: Vec<u64> = (0..=end).filter(|n| !set.contains(n)).collect();
            let listed: Vec<u64> = progress.unfinished(end).flat_map(|(a, b)| a..=b).collect();
            prop_assert_eq!(progress.unfinished_count(end), missing.len() as u64);
            prop_assert_eq!(listed, missing);
            let bitmap = progress.bitmap(floor + 1, floor + 350);
            let read = Progress::from_bitmap(floor + 1, floor + 350, &bitmap);
            for n in floor + 1..=floor + 350 {
                prop_assert_eq!(read.is_done(n), set.contains(&n));
            }
            let copy = Progress::decode(progress.floor(), &progress.encode()).unwrap();
            prop_assert_eq!(copy, progress);
        }

        #[test]
        fn decoding_any_bytes_never_panics(floor: u64, bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = Progress::decode(floor, &bytes);
        }

        #[test]
        fn the_encoding_is_never_longer_than_the_bitmap(seqs in prop::collection::btree_set(1u64..2000, 0..400)) {
            let mut progress = Progress::new(0);
            seqs.iter().for_each(|seq| { progress.complete(*seq); });
            let bits = progress.highest() - progress.floor();
            prop_assert!(progress.encode().len() as u64 <= bits.div_ceil(8) + 1);
        }
    }
}
