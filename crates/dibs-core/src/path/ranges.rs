//! A bounded set of path sequence numbers, as ranges.

/// The numbers from `start` to `end`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqRange {
    /// The lowest number.
    pub start: u64,
    /// The highest number.
    pub end: u64,
}

/// Disjoint ranges, ascending, never adjacent. Over its capacity it forgets the lowest.
#[derive(Debug)]
pub(super) struct Ranges {
    ranges: Vec<SeqRange>,
    capacity: usize,
}

impl Ranges {
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Self {
            ranges: Vec::with_capacity(capacity + 1),
            capacity,
        }
    }

    /// The ranges, the highest first.
    pub(super) fn descending(&self) -> impl Iterator<Item = SeqRange> + Clone {
        self.ranges.iter().rev().copied()
    }

    /// The highest number.
    pub(super) fn largest(&self) -> Option<u64> {
        self.ranges.last().map(|r| r.end)
    }

    /// Adds the numbers of `new` and calls `added` with each part that was not there, ascending.
    ///
    /// A range forgotten for want of capacity counts as not there.
    pub(super) fn insert(&mut self, new: SeqRange, mut added: impl FnMut(SeqRange)) {
        // Nearly every insertion continues the highest range.
        if let Some(top) = self.ranges.last_mut()
            && new.start == top.end + 1
        {
            top.end = new.end;
            added(new);
            return;
        }
        let from = self.ranges.partition_point(|r| r.end + 1 < new.start);
        let mut to = from;
        let mut merged = new;
        let mut next = new.start;
        for r in &self.ranges[from..] {
            if r.start > new.end + 1 {
                break;
            }
            if next < r.start {
                added(SeqRange {
                    start: next,
                    end: r.start - 1,
                });
            }
            next = r.end + 1;
            merged = SeqRange {
                start: merged.start.min(r.start),
                end: merged.end.max(r.end),
            };
            to += 1;
        }
        if next <= new.end {
            added(SeqRange {
                start: next,
                end: new.end,
            });
        }
        if from == to {
            self.ranges.insert(from, merged);
            if self.ranges.len() > self.capacity {
                self.ranges.remove(0);
            }
        } else {
            self.ranges[from] = merged;
            self.ranges.drain(from + 1..to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::world::Rng;
    use super::*;
    use std::collections::BTreeSet;

    fn naive(set: &BTreeSet<u64>) -> Vec<SeqRange> {
        let mut out: Vec<SeqRange> = Vec::new();
        for &n in set {
            match out.last_mut() {
                Some(r) if r.end + 1 == n => r.end = n,
                _ => out.push(SeqRange { start: n, end: n }),
            }
        }
        out
    }

    #[test]
    fn agrees_with_a_set_of_numbers() {
        let mut rng = Rng::new(7);
        for _ in 0..300 {
            let capacity = 1 + rng.below(12) as usize;
            let mut ranges = Ranges::with_capacity(capacity);
            let mut set = BTreeSet::new();
            for _ in 0..60 {
                let start = rng.below(120);
                let new = SeqRange {
                    start,
                    end: start + rng.below(6),
                };
                let mut added = Vec::new();
                ranges.insert(new, |r| added.extend(r.start..=r.end));
                let fresh: Vec<u64> = (new.start..=new.end).filter(|&n| set.insert(n)).collect();
                assert_eq!(added, fresh);
                let mut want = naive(&set);
                if want.len() > capacity {
                    let lost = want.remove(0);
                    set.retain(|&n| n > lost.end);
                }
                assert_eq!(ranges.ranges, want);
                assert_eq!(ranges.largest(), want.last().map(|r| r.end));
            }
        }
    }
}
