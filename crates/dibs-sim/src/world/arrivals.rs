//! What is under way between the hosts, in the order in which it arrives.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use dibs_core::Time;
use dibs_netem::rng::mix;

use crate::adversary::Put;

pub(super) enum What {
    Datagram(Put),
    Packet(Vec<u8>),
}

pub(super) struct Arrival {
    pub(super) host: usize,
    pub(super) what: What,
}

/// What is under way.
#[derive(Default)]
pub(super) struct Arrivals {
    due: BinaryHeap<Reverse<(Time, u64)>>,
    by_order: BTreeMap<u64, Arrival>,
    order: u64,
    /// Of all arrivals.
    digest: u64,
}

impl Arrivals {
    pub(super) fn push(&mut self, at: Time, arrival: Arrival) {
        self.order += 1;
        self.due.push(Reverse((at, self.order)));
        self.by_order.insert(self.order, arrival);
    }

    /// When something arrives next.
    pub(super) fn next(&self) -> Option<Time> {
        self.due.peek().map(|Reverse((at, _))| *at)
    }

    /// What has arrived by `now`.
    pub(super) fn take(&mut self, now: Time) -> Option<Arrival> {
        self.next().filter(|at| *at <= now)?;
        let Reverse((_, order)) = self.due.pop()?;
        let arrival = self.by_order.remove(&order);
        let arrival = arrival.expect("what is due is there");
        self.digest = mix(self.digest ^ now.as_nanos()).wrapping_add(arrival.host as u64);
        Some(arrival)
    }

    /// A number that stands for what arrived, and when.
    pub(super) const fn digest(&self) -> u64 {
        self.digest
    }
}
