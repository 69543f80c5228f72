//! Ranges of positions, as the server stores them in an `int8multirange`.

use std::fmt;

use everbus_core::Result;

use crate::errors::damaged;

/// Disjoint ranges in order, none touching the next. Both ends are included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// Reads the text form of the server, `{[1,4),[7,8)}`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let bad = || damaged(format!("{text:?} is not a list of ranges"));
        let inner = text.strip_prefix('{').and_then(|t| t.strip_suffix('}'));
        let mut ranges = Vec::new();
        for part in inner.ok_or_else(bad)?.split_inclusive(')') {
            let part = part.strip_prefix(',').unwrap_or(part);
            let ends = part.strip_prefix('[').and_then(|p| p.strip_suffix(')'));
            let (first, after) = ends.and_then(|e| e.split_once(',')).ok_or_else(bad)?;
            let first: u64 = first.parse().map_err(|_| bad())?;
            let after: u64 = after.parse().map_err(|_| bad())?;
            ranges.push((first, after.checked_sub(1).ok_or_else(bad)?));
        }
        Ok(Self(ranges))
    }

    /// Everything from `lo` to `hi` except these positions, which are in order.
    pub(crate) fn all_but(lo: u64, hi: u64, positions: impl Iterator<Item = u64>) -> Self {
        let mut ranges = Vec::new();
        let mut next = lo;
        for position in positions {
            if position > next {
                ranges.push((next, position - 1));
            }
            next = position + 1;
        }
        if next <= hi {
            ranges.push((next, hi));
        }
        Self(ranges)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// How many positions there are.
    pub(crate) fn count(&self) -> u64 {
        self.0.iter().map(|(first, last)| last - first + 1).sum()
    }

    pub(crate) fn contains(&self, position: u64) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < position);
        self.0.get(at).is_some_and(|(first, _)| *first <= position)
    }

    /// Adds a position. Returns whether it was new.
    pub(crate) fn add(&mut self, position: u64) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < position);
        if self.0.get(at).is_some_and(|(first, _)| *first <= position) {
            return false;
        }
        let joins_next = self
            .0
            .get(at)
            .is_some_and(|(first, _)| *first == position + 1);
        let joins_before = at > 0 && self.0[at - 1].1 + 1 == position;
        match (joins_before, joins_next) {
            (true, true) => {
                self.0[at - 1].1 = self.0[at].1;
                self.0.remove(at);
            }
            (true, false) => self.0[at - 1].1 = position,
            (false, true) => self.0[at].0 = position,
            (false, false) => self.0.insert(at, (position, position)),
        }
        true
    }

    /// The ranges from `lo` to `hi` that are missing.
    pub(crate) fn gaps(&self, lo: u64, hi: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut next = lo;
        for (first, last) in &self.0 {
            if *first > next {
                gaps.push((next, (*first - 1).min(hi)));
            }
            next = next.max(last + 1);
            if next > hi {
                return gaps;
            }
        }
        if next <= hi {
            gaps.push((next, hi));
        }
        gaps
    }
}

impl fmt::Display for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (index, (first, last)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}[{first},{})", last + 1)?;
        }
        f.write_str("}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_together_and_survive_their_text() {
        let mut ranges = Ranges::all_but(10, 20, [12, 13, 17].into_iter());
        assert_eq!(ranges.to_string(), "{[10,12),[14,17),[18,21)}");
        assert_eq!(Ranges::parse(&ranges.to_string()).unwrap(), ranges);
        assert_eq!(ranges.gaps(10, 20), [(12, 13), (17, 17)]);
        assert!(ranges.add(13) && !ranges.add(13) && ranges.add(17));
        assert_eq!(ranges.to_string(), "{[10,12),[13,21)}");
        assert_eq!(ranges.count(), 10);
        assert!(ranges.contains(20) && !ranges.contains(12) && !ranges.contains(21));
        assert!(ranges.add(12));
        assert_eq!(
            (ranges.to_string().as_str(), ranges.len()),
            ("{[10,21)}", 1)
        );
        assert!(ranges.gaps(10, 20).is_empty());
        assert_eq!(Ranges::parse("{}").unwrap(), Ranges::default());
        assert_eq!(Ranges::default().gaps(3, 4), [(3, 4)]);
    }

    #[test]
    fn random_ranges_agree_with_a_set() {
        let seed = fastrand::u64(..);
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..200 {
            let (mut ranges, mut set) = (Ranges::default(), std::collections::BTreeSet::new());
            for _ in 0..60 {
                let position = random.u64(1..40);
                assert_eq!(ranges.add(position), set.insert(position), "seed {seed}");
            }
            let missing: Vec<u64> = (1..40).filter(|p| !set.contains(p)).collect();
            let gaps = ranges.gaps(1, 39).into_iter().flat_map(|(a, b)| a..=b);
            assert_eq!(gaps.collect::<Vec<u64>>(), missing, "seed {seed}");
            assert_eq!(
                Ranges::parse(&ranges.to_string()).unwrap(),
                ranges,
                "seed {seed}"
            );
        }
    }
}
