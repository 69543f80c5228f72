//! The byte format of postings: sorted by scope and position, stored as differences with variable length.
//!
//! The first posting of a block is in the columns beside it. Each further posting is a number whose lowest
//! bit says what the rest means. 0: the distance from the previous position, in the same scope. 1: the
//! distance from the previous scope; the position follows, counted from the beginning of the run.

use everbus_core::{Code, Error, Result};

/// A scope and a position.
pub(crate) type Posting = (i64, u64);

/// A block of a run, as stored.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) first: Posting,
    pub(crate) bytes: Vec<u8>,
}

/// Encodes sorted postings into blocks.
pub(crate) struct Encoder {
    /// Where the run begins.
    lo: u64,
    limit: usize,
    last: Posting,
    current: Option<Block>,
    pub(crate) done: Vec<Block>,
}

impl Encoder {
    /// Blocks have at most this many bytes.
    pub(crate) fn new(lo: u64, limit: usize) -> Self {
        Self {
            lo,
            limit,
            last: (0, 0),
            current: None,
            done: Vec::new(),
        }
    }

    /// Adds a posting. A posting out of order comes from a damaged file and is an error.
    pub(crate) fn push(&mut self, posting: Posting) -> Result<()> {
        let (scope, seq) = posting;
        let last = std::mem::replace(&mut self.last, posting);
        let from_lo = seq.checked_sub(self.lo).ok_or_else(damaged)?;
        if let Some(block) = &mut self.current {
            if posting <= last {
                return Err(damaged());
            }
            let before = block.bytes.len();
            if last.0 == scope {
                write(&mut block.bytes, (seq - last.1) << 1);
            } else {
                write(&mut block.bytes, scope.abs_diff(last.0) << 1 | 1);
                write(&mut block.bytes, from_lo);
            }
            if block.bytes.len() <= self.limit {
                return Ok(());
            }
            block.bytes.truncate(before);
            self.finish();
        }
        self.current = Some(Block {
            first: posting,
            bytes: Vec::with_capacity(self.limit + 16),
        });
        Ok(())
    }

    /// Ends the current block.
    pub(crate) fn finish(&mut self) {
        self.done.extend(self.current.take());
    }
}

/// Calls `found` with each posting of a block until it returns to stop.
pub(crate) fn decode(
    lo: u64,
    first: Posting,
    bytes: &[u8],
    mut found: impl FnMut(Posting) -> bool,
) -> Result<()> {
    let (mut scope, mut seq) = first;
    let mut rest = bytes;
    while found((scope, seq)) && !rest.is_empty() {
        let word = read(&mut rest)?;
        if word & 1 == 0 {
            seq = seq.checked_add(word >> 1).ok_or_else(damaged)?;
        } else {
            scope = scope.checked_add_unsigned(word >> 1).ok_or_else(damaged)?;
            seq = lo.checked_add(read(&mut rest)?).ok_or_else(damaged)?;
        }
    }
    Ok(())
}

/// Seven bits in a byte, the lowest first; the highest bit says that more follow.
fn write(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn read(rest: &mut &[u8]) -> Result<u64> {
    let mut value = 0u64;
    for (index, byte) in rest.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            *rest = &rest[index + 1..];
            return Ok(value);
        }
    }
    Err(damaged())
}

pub(crate) fn damaged() -> Error {
    Error::of_file(Code::Corrupt, "a block of the history's index is damaged")
        .hint("`everbus check` shows the damage; an earlier backup has the block intact")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(lo: u64, blocks: &[Block]) -> Vec<Posting> {
        let mut found = Vec::new();
        for block in blocks {
            decode(lo, block.first, &block.bytes, |posting| {
                found.push(posting);
                true
            })
            .unwrap();
        }
        found
    }

    #[test]
    fn what_goes_in_comes_out() {
        let mut postings = Vec::new();
        for scope in [0, 1, 7, 1 << 20, (1 << 48) - 1] {
            postings.extend((0..50u64).map(|n| (scope, 1000 + n * n * (1 + scope as u64 % 90))));
        }
        for limit in [1, 20, 64, 2000] {
            let mut encoder = Encoder::new(1000, limit);
            postings.iter().for_each(|p| encoder.push(*p).unwrap());
            encoder.finish();
            assert!(encoder.done.iter().all(|block| block.bytes.len() <= limit));
            assert_eq!(all(1000, &encoder.done), postings, "blocks of {limit}");
        }
    }

    #[test]
    fn postings_out_of_order_are_refused() {
        for bad in [(5, 10), (5, 9), (4, 11), (6, 0)] {
            let mut encoder = Encoder::new(1, 100);
            encoder.push((5, 10)).unwrap();
            assert_eq!(encoder.push(bad).unwrap_err().code(), Code::Corrupt);
        }
    }

    #[test]
    fn a_damaged_block_is_an_error() {
        for bytes in [
            &[0x80][..],
            &[0xff; 11],
            &[1],
            &[0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        ] {
            let error = decode(0, (i64::MAX, u64::MAX), bytes, |_| true).unwrap_err();
            assert_eq!(error.code(), Code::Corrupt, "{bytes:?}");
        }
    }
}
