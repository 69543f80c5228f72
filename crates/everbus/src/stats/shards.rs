//! Copies of a hot value, so that threads which write at the same time do not share a cache line.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Threads beyond this many begin to share.
const MOST: usize = 4;

/// A value of which a thread gets a copy of its own when it first writes, as long as there are
/// [`Spares`]. Readers add the copies up.
pub(super) struct Shards<T> {
    first: T,
    /// Nothing where there was no spare left.
    more: [OnceLock<Option<Box<T>>>; MOST - 1],
    spares: Spares,
}

/// How many copies may still be made, all values taken together: copies are big, and values are many.
#[derive(Clone)]
pub(super) struct Spares(Arc<AtomicUsize>);

impl Spares {
    pub(super) fn new(copies: usize) -> Self {
        Self(Arc::new(AtomicUsize::new(copies)))
    }

    fn take(&self) -> bool {
        let less = |left: usize| left.checked_sub(1);
        let order = Ordering::Relaxed;
        self.0.fetch_update(order, order, less).is_ok()
    }
}

impl<T: Default> Shards<T> {
    pub(super) fn new(spares: &Spares) -> Self {
        Self {
            first: T::default(),
            more: Default::default(),
            spares: spares.clone(),
        }
    }

    /// The copy that this thread writes to.
    pub(super) fn mine(&self) -> &T {
        self.of_thread(NUMBER.with(|number| *number))
    }

    fn of_thread(&self, number: usize) -> &T {
        let place = (number % MOST)
            .checked_sub(1)
            .and_then(|n| self.more.get(n));
        let copy = place.and_then(|place| {
            let copy = place.get_or_init(|| self.spares.take().then(Box::default));
            copy.as_deref()
        });
        copy.unwrap_or(&self.first)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        let more = self.more.iter().filter_map(|place| place.get()?.as_deref());
        std::iter::once(&self.first).chain(more)
    }
}

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Counted from the first write of a thread, so that the few that do write get different ones.
    static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// Every thread adds 1000; the sum of the copies.
    fn count_in_threads(shards: &Shards<AtomicU64>, threads: usize) -> u64 {
        let all = Barrier::new(threads);
        std::thread::scope(|scope| {
            for number in 0..threads {
                let all = &all;
                scope.spawn(move || {
                    all.wait();
                    for _ in 0..1000 {
                        let copy = shards.of_thread(number);
                        copy.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        shards.iter().map(|copy| copy.load(Ordering::Relaxed)).sum()
    }

    #[test]
    fn the_copies_together_hold_everything_and_stay_few() {
        let shards = Shards::new(&Spares::new(100));
        assert_eq!(count_in_threads(&shards, 4 * MOST), 4 * MOST as u64 * 1000);
        assert_eq!(shards.iter().count(), MOST);
        assert_eq!(shards.spares.0.load(Ordering::Relaxed), 100 - (MOST - 1));
    }

    #[test]
    fn threads_that_come_one_after_another_write_to_different_copies() {
        let shards = Shards::<AtomicU64>::new(&Spares::new(100));
        for number in 0..MOST {
            assert!(!std::ptr::eq(
                shards.of_thread(number),
                shards.of_thread(number + 1)
            ));
            assert!(std::ptr::eq(
                shards.of_thread(number),
                shards.of_thread(number + MOST)
            ));
        }
    }

    #[test]
    fn without_spares_threads_share_and_nothing_is_lost() {
        let spares = Spares::new(1);
        let (one, two) = (Shards::new(&spares), Shards::new(&spares));
        for shards in [&one, &two] {
            assert_eq!(count_in_threads(shards, 4 * MOST), 4 * MOST as u64 * 1000);
        }
        assert_eq!(one.iter().count() + two.iter().count(), 3);
    }
}
