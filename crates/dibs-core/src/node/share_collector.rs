//! Collects the shares of what a peer split over paths, until enough are there.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use smallvec::SmallVec;
use zeroize::Zeroizing;

use super::shared::Journal;
use crate::bump::Split;
use crate::counters::Counter;
use crate::session::ReplayWindow;
use crate::stream::rx::HELD_OVERHEAD;
use crate::time::Time;

/// Bytes of shares that wait for others, at most, with [`HELD_OVERHEAD`] for each.
const MAX_BYTES: usize = 32 << 20;
/// A set that is not complete by then never will be: TCP has long sent the bytes again.
const PATIENCE: Duration = Duration::from_secs(10);

/// Sets that are not complete, by number.
#[derive(Default)]
pub(super) struct ShareCollector {
    partial: BTreeMap<u64, Partial>,
    /// The same by age: a peer numbers them as it likes, and late ones come out of turn.
    by_age: BTreeSet<(Time, u64)>,
    /// Sets that were joined or given up.
    done: ReplayWindow,
    highest: u64,
    bytes: usize,
}

struct Partial {
    shares: SmallVec<[(u8, Zeroizing<Vec<u8>>); 4]>,
    since: Time,
}

/// What came of a share.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Added {
    /// More are needed.
    Partly,
    /// The whole is there: it counts once [`ShareCollector::finish`] was told.
    Whole(u64),
    /// Its set needs no more.
    Late,
    /// No room: it counts as not received.
    NoRoom,
    /// It contradicts the others of its set.
    Contradiction,
}

impl ShareCollector {
    /// Adds share `index` of the set whose number ends in `set`; the whole, if it is there, is written
    /// to `whole`.
    pub(super) fn add(
        &mut self,
        now: Time,
        split: &dyn Split,
        (set, index): (u32, u8),
        share: &[u8],
        whole: &mut Vec<u8>,
    ) -> Added {
        let set = self.expand(set);
        if !self.done.is_new(set) {
            return Added::Late;
        }
        let cost = share.len() + HELD_OVERHEAD;
        let room = self.bytes + cost <= MAX_BYTES;
        let partial = match self.partial.get_mut(&set) {
            Some(partial) => partial,
            None if room => {
                self.by_age.insert((now, set));
                self.partial.entry(set).or_insert(Partial {
                    shares: SmallVec::new(),
                    since: now,
                })
            }
            None => return Added::NoRoom,
        };
        self.highest = self.highest.max(set);
        let shares = &mut partial.shares;
        if shares.iter().any(|(_, other)| other.len() != share.len()) {
            return Added::Contradiction;
        }
        let needed = usize::from(split.needed());
        if shares.iter().all(|(known, _)| *known != index) && shares.len() < needed {
            if !room {
                return Added::NoRoom;
            }
            self.bytes += cost;
            shares.push((index, Zeroizing::new(share.to_vec())));
        }
        if shares.len() < needed {
            return Added::Partly;
        }
        let shares: SmallVec<[(u8, &[u8]); 4]> = partial
            .shares
            .iter()
            .map(|(index, share)| (*index, &share[..]))
            .collect();
        match split.join(&shares, whole) {
            true => Added::Whole(set),
            false => Added::Contradiction,
        }
    }

    /// What a set held was taken.
    pub(super) fn finish(&mut self, set: u64) {
        self.done.accept(set);
        self.remove(set);
    }

    /// The number that ends in `low` and lies nearest to the highest seen.
    fn expand(&self, low: u32) -> u64 {
        let ahead = low.wrapping_sub(self.highest as u32) as i32;
        // In front of the first, they count from zero.
        self.highest
            .checked_add_signed(i64::from(ahead))
            .unwrap_or(u64::from(low))
    }

    fn remove(&mut self, set: u64) {
        if let Some(partial) = self.partial.remove(&set) {
            self.by_age.remove(&(partial.since, set));
            let cost = |(_, share): &(u8, Zeroizing<Vec<u8>>)| share.len() + HELD_OVERHEAD;
            self.bytes -= partial.shares.iter().map(cost).sum::<usize>();
        }
    }

    /// When the oldest is given up.
    pub(super) fn expires_at(&self) -> Option<Time> {
        let (since, _) = self.by_age.first()?;
        Some(*since + PATIENCE)
    }

    /// Gives up what is too old.
    pub(super) fn expire(&mut self, now: Time, journal: &mut Journal) {
        for _ in 0..self.give_up(now) {
            journal.count(Counter::SetsExpired);
        }
    }

    /// The same; says how many that were.
    fn give_up(&mut self, now: Time) -> usize {
        let before = self.partial.len();
        while let Some(&(since, set)) = self.by_age.first()
            && since + PATIENCE <= now
        {
            // Below the window it is nothing that a share could still be added to.
            if self.done.is_new(set) {
                self.done.accept(set);
            }
            self.remove(set);
        }
        before - self.partial.len()
    }

    /// Sets that are not complete, and their bytes.
    pub(super) fn held(&self) -> (usize, usize) {
        (self.partial.len(), self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bump::Scheme;

    const START: Time = Time::ZERO;

    /// Shares of one byte that says which set it is.
    fn shares(scheme: Scheme, secret: &[u8]) -> Vec<Vec<u8>> {
        let random = vec![7; scheme.randomness(secret.len())];
        let mut shares = vec![vec![0; secret.len()]; usize::from(Scheme::shares(scheme))];
        let mut rooms: Vec<&mut [u8]> = shares.iter_mut().map(Vec::as_mut_slice).collect();
        scheme.split(secret, &random, &mut rooms);
        shares
    }

    #[test]
    fn enough_shares_give_the_whole_and_later_ones_nothing() {
        let scheme = Scheme::new(2, 3).unwrap();
        let mut collector = ShareCollector::default();
        let mut whole = Vec::new();
        let shares = shares(scheme, b"secret");
        let mut add = |collector: &mut ShareCollector, index: u8| {
            let share = &shares[usize::from(index)];
            collector.add(START, &scheme, (5, index), share, &mut whole)
        };
        assert_eq!(add(&mut collector, 2), Added::Partly);
        assert_eq!(add(&mut collector, 2), Added::Partly, "twice the same");
        assert_eq!(add(&mut collector, 0), Added::Whole(5));
        assert_eq!(add(&mut collector, 0), Added::Whole(5), "it was not taken");
        collector.finish(5);
        assert_eq!(add(&mut collector, 1), Added::Late);
        assert_eq!(collector.held(), (0, 0));
        assert_eq!(whole, b"secret");
    }

    #[test]
    fn shares_of_other_lengths_are_no_shares() {
        let scheme = Scheme::new(2, 2).unwrap();
        let mut collector = ShareCollector::default();
        let mut whole = Vec::new();
        collector.add(START, &scheme, (1, 0), b"four", &mut whole);
        let added = collector.add(START, &scheme, (1, 1), b"seven..", &mut whole);
        assert_eq!(added, Added::Contradiction);
    }

    #[test]
    fn what_is_never_completed_is_bounded_in_bytes_and_time() {
        let scheme = Scheme::new(2, 2).unwrap();
        let mut collector = ShareCollector::default();
        let mut whole = Vec::new();
        let share = [0; 1400];
        let mut refused = 0;
        for set in 0..40_000 {
            let added = collector.add(START, &scheme, (set, 0), &share, &mut whole);
            refused += u32::from(added == Added::NoRoom);
            assert!(collector.held().1 <= MAX_BYTES);
        }
        assert!(refused > 0);
        assert_eq!(collector.expires_at(), Some(START + PATIENCE));
    }

    #[test]
    fn a_set_may_wait_while_more_are_done_than_the_window_is_long() {
        let scheme = Scheme::new(2, 2).unwrap();
        let mut collector = ShareCollector::default();
        let mut whole = Vec::new();
        let mut add = |collector: &mut ShareCollector, set, index| {
            collector.add(START, &scheme, (set, index), b"x", &mut whole)
        };
        add(&mut collector, 0, 0);
        for set in 1..=40_000 {
            add(&mut collector, set, 0);
            assert_eq!(add(&mut collector, set, 1), Added::Whole(set.into()));
            collector.finish(set.into());
        }
        assert_eq!(add(&mut collector, 0, 1), Added::Late);
        assert_eq!(collector.give_up(START + PATIENCE), 1);
        assert_eq!((collector.held(), collector.expires_at()), ((0, 0), None));
    }

    /// What is not complete, and since when, by a model that looks through all of it.
    #[test]
    fn each_set_is_given_up_at_its_own_age_whatever_its_number() {
        let scheme = Scheme::new(2, 2).unwrap();
        let mut collector = ShareCollector::default();
        let mut whole = Vec::new();
        let second = Duration::from_secs(1);
        // A late set with the lowest number of all, again and again; each keeps a share of its own.
        let mut waiting = BTreeMap::new();
        for step in 0..30 {
            let now = START + second * step;
            let given_up = collector.give_up(now);
            let before = waiting.len();
            waiting.retain(|_, since| *since + PATIENCE > now);
            assert_eq!(given_up, before - waiting.len(), "at {now:?}");
            for set in [1000 - step, 2000 + step, 1500] {
                let index = u8::from(set % 2 == 0);
                let added = collector.add(now, &scheme, (set, index), b"x", &mut whole);
                let expected = match step >= 10 && set == 1500 {
                    true => Added::Late,
                    false => Added::Partly,
                };
                assert_eq!(added, expected, "{set} at {now:?}");
                if added == Added::Partly {
                    waiting.entry(set).or_insert(now);
                }
            }
            assert_eq!(collector.held().0, waiting.len(), "at {now:?}");
            let oldest = waiting.values().min().map(|since| *since + PATIENCE);
            assert_eq!(collector.expires_at(), oldest, "at {now:?}");
        }
        assert!(collector.give_up(START + second * 60) > 0);
        assert_eq!((collector.held(), collector.expires_at()), ((0, 0), None));
        assert!(collector.by_age.is_empty());
    }

    #[test]
    fn numbers_go_on_beyond_their_low_bits() {
        let scheme = Scheme::new(2, 2).unwrap();
        let mut collector = ShareCollector {
            highest: (7 << 32) - 2,
            ..ShareCollector::default()
        };
        let mut whole = Vec::new();
        collector.add(START, &scheme, (1, 0), b"x", &mut whole);
        assert!(collector.partial.contains_key(&((7 << 32) + 1)));
        collector.add(START, &scheme, (u32::MAX, 0), b"x", &mut whole);
        assert!(collector.partial.contains_key(&((7 << 32) - 1)));
    }
}
