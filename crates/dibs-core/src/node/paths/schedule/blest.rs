//! Blocking estimation (Ferlin et al. 2016): the fastest path, or another one if that does not block the sender.

use super::{Offer, Pick, Wanted, first};

pub(super) fn choose(offers: &[Offer], wanted: &Wanted) -> Pick {
    let fastest = { offers.iter() }.min_by_key(|one| (one.is_avoided, one.is_secondary, one.srtt));
    let (Some(fast), Some(at)) = (fastest, first(offers, |one| one.srtt)) else {
        return Pick::Wait;
    };
    if fast.budget > 0 {
        return Pick::Take(at);
    }
    let slow = &offers[at];
    // What the fastest one sends until an acknowledgement by the other is back, its window growing by a datagram
    // each round trip.
    let trips = slow.srtt.as_secs_f64() / fast.srtt.as_secs_f64().max(1e-6);
    let grown = f64::from(fast.mtu) * (trips - 1.0).max(0.0) / 2.0;
    let needed = (fast.cwnd as f64 + grown) * trips;
    let room = wanted.under_way as f64 - (slow.in_flight as f64 + f64::from(slow.mtu));
    if needed > room {
        return Pick::PassOver(at);
    }
    Pick::Take(at)
}
