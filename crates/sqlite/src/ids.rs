//! Maps keyed by numbers that the engine assigns: rows, types, sessions.
//!
//! No outside party chooses these numbers, so their hash must be fast but need not be hard to guess: the
//! writer looks up several of them for every event.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by engine numbers.
pub(crate) type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// Spreads a number over all bits by one multiplication.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        // The map uses the low bits, which depend on few others after a multiplication.
        self.0.rotate_left(32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_i64(&mut self, number: i64) {
        self.write_u64(number as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::{BuildHasher, BuildHasherDefault};

    use super::*;

    #[test]
    fn numbers_in_a_row_fall_into_different_places() {
        let build = BuildHasherDefault::<IdHasher>::default();
        let places = |step: i64| -> usize {
            let hashes = (0..1024).map(|n| build.hash_one(n * step));
            // The low bits choose the slot, and the upper seven bits distinguish the entries near it.
            let places: HashSet<u64> = hashes.map(|hash| hash & 0xfff).collect();
            places.len()
        };
        for step in [1, 2, 1024, 1 << 20] {
            assert!(
                places(step) > 700,
                "{} places for step {step}",
                places(step)
            );
        }
    }
}
