//! The sending side's memory: one record per datagram, in a ring indexed by sequence number.

use super::rate::Snapshot;
use crate::time::Time;
use std::collections::VecDeque;

/// What has become of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Acknowledged, or never waited for.
    Done,
    /// In flight.
    Waiting,
    /// Declared lost; kept for a while to see whether that was wrong.
    Lost,
}

/// A datagram that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) at: Time,
    pub(super) token: u64,
    pub(super) bytes: u16,
    pub(super) fate: Fate,
    /// A probe of the path MTU: it carries nothing, and its loss says nothing about congestion.
    pub(super) mtu_probe: bool,
}

impl Sent {
    pub(super) const EMPTY: Self = Self {
        at: Time::ZERO,
        token: 0,
        bytes: 0,
        fate: Fate::Done,
        mtu_probe: false,
    };
}

/// Records of the numbers from `base` to `next`, the latter excluded.
///
/// Bounded by the congestion window: only a waiting datagram, or one lost a short time ago, keeps
/// the records above it. Who pushes makes room first when it [is full](Self::is_full): a peer that
/// only sends is answered by datagrams that are never acknowledged.
#[derive(Debug)]
pub(super) struct SentRing {
    /// A power of two of slots; number n has slot n mod length.
    slots: Vec<Sent>,
    base: u64,
    next: u64,
    /// What the rate estimator knew from this number on: it changes far more rarely than datagrams are
    /// sent. Of those before `base` only the last is kept.
    rates: VecDeque<(u64, Snapshot)>,
}

impl SentRing {
    pub(super) fn new() -> Self {
        Self {
            slots: vec![Sent::EMPTY; 256],
            base: 0,
            next: 0,
            rates: VecDeque::new(),
        }
    }

    /// Lets the first datagram have this number.
    pub(super) const fn start_at(&mut self, seq: u64) {
        self.base = seq;
        self.next = seq;
    }

    /// The number that the next datagram gets.
    pub(super) const fn next(&self) -> u64 {
        self.next
    }

    /// The lowest number remembered.
    pub(super) const fn base(&self) -> u64 {
        self.base
    }

    const fn slot(&self, seq: u64) -> usize {
        seq as usize & (self.slots.len() - 1)
    }

    /// Whether the next datagram makes it grow.
    pub(super) const fn is_full(&self) -> bool {
        self.next - self.base == self.slots.len() as u64
    }

    /// Adds the next one; `rate` is what the rate estimator knows, if it has to be remembered.
    // Inlined, or what was just written in parts is copied whole, which has to wait for the writes.
    #[inline(always)]
    pub(super) fn push(&mut self, sent: Sent, rate: Option<Snapshot>) -> u64 {
        let seq = self.next;
        if self.is_full() {
            self.grow();
        }
        if let Some(rate) = rate
            && self.rates.back().is_none_or(|(_, known)| *known != rate)
        {
            self.rates.push_back((seq, rate));
        }
        let slot = self.slot(seq);
        self.slots[slot] = sent;
        self.next += 1;
        seq
    }

    fn grow(&mut self) {
        let old = self.slots.len();
        self.slots.resize(2 * old, Sent::EMPTY);
        for seq in self.base..self.next {
            let slot = self.slot(seq);
            self.slots[slot] = self.slots[seq as usize & (old - 1)];
        }
    }

    pub(super) fn get(&self, seq: u64) -> Option<&Sent> {
        (self.base..self.next)
            .contains(&seq)
            .then(|| &self.slots[self.slot(seq)])
    }

    pub(super) fn get_mut(&mut self, seq: u64) -> Option<&mut Sent> {
        let slot = self.slot(seq);
        (self.base..self.next)
            .contains(&seq)
            .then(|| &mut self.slots[slot])
    }

    /// What the rate estimator knew when this one was sent.
    pub(super) fn rate(&self, seq: u64) -> Option<Snapshot> {
        let later = self.rates.partition_point(|(from, _)| *from <= seq);
        Some(self.rates.get(later.checked_sub(1)?)?.1)
    }

    /// Forgets from the front what is done, and what was lost and sent before `lost_before`.
    pub(super) fn forget(&mut self, lost_before: Time) {
        while let Some(sent) = self.get(self.base) {
            match sent.fate {
                Fate::Done => {}
                Fate::Lost if sent.at < lost_before => {}
                Fate::Lost | Fate::Waiting => break,
            }
            self.base += 1;
        }
        while self
            .rates
            .get(1)
            .is_some_and(|(from, _)| *from <= self.base)
        {
            self.rates.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rate::DeliveryRate;
    use super::super::tests::world::Rng;
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn agrees_with_a_map() {
        let mut rng = Rng::new(11);
        let mut ring = SentRing::new();
        let mut map: BTreeMap<u64, (u64, Fate)> = BTreeMap::new();
        // What was known at each number; of some nothing is remembered.
        let mut rates: BTreeMap<u64, Option<Snapshot>> = BTreeMap::new();
        let mut estimator = DeliveryRate::new(Time::ZERO);
        let mut longest = 0;
        for step in 0..50_000u64 {
            match rng.below(5) {
                // Alternately more is sent than done, and the reverse.
                0..=1 if step / 5000 % 2 == 0 => {
                    for _ in 0..4 {
                        let sent = Sent {
                            token: step,
                            fate: Fate::Waiting,
                            ..Sent::EMPTY
                        };
                        if rng.below(8) == 0 {
                            estimator.on_app_limited(rng.below(2));
                            estimator.on_sent(Time::from_nanos(step), rng.below(2) == 0);
                        }
                        let rate = (rng.below(3) > 0)
                            .then(|| estimator.on_sent(Time::from_nanos(step), false));
                        let seq = ring.push(sent, rate);
                        map.insert(seq, (step, Fate::Waiting));
                        rates.insert(seq, rate);
                    }
                }
                _ => {
                    let low = map.keys().next().copied().unwrap_or(0);
                    let seq = low + rng.below(8);
                    let fate = if rng.below(4) == 0 {
                        Fate::Lost
                    } else {
                        Fate::Done
                    };
                    let in_ring = ring.get_mut(seq).map(|s| s.fate = fate).is_some();
                    let in_map = map.get_mut(&seq).map(|s| s.1 = fate).is_some();
                    assert_eq!(in_ring, in_map);
                }
            }
            let patience = Time::from_nanos(rng.below(2));
            ring.forget(patience);
            while let Some(e) = map.first_entry()
                && (e.get().1 == Fate::Done || e.get().1 == Fate::Lost && patience > Time::ZERO)
            {
                e.remove();
            }
            assert_eq!(ring.next() - ring.base(), map.len() as u64);
            longest = longest.max(map.len());
            if step % 100 == 0 {
                for (&seq, &(token, fate)) in &map {
                    let sent = ring.get(seq).unwrap();
                    assert_eq!((sent.token, sent.fate), (token, fate));
                    if let Some(rate) = rates[&seq] {
                        assert_eq!(ring.rate(seq), Some(rate));
                    }
                }
            }
        }
        assert!(longest > 512, "the ring has never grown: {longest}");
    }
}
