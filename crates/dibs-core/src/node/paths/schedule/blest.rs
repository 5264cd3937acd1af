//! Blocking estimation (Ferlin et al. 2016): the fastest path, or another one if that does not block the sender.

use super::{Candidate, Wanted};
use crate::node::paths::Link;

pub(super) fn choose<'a>(
    links: &mut [Link],
    wanted: &Wanted,
    candidates: &'a [Candidate],
) -> Option<&'a Candidate> {
    let srtt = |one: &&Candidate| (one.avoided, one.secondary, links[one.link].path.srtt());
    let fastest = candidates.iter().min_by_key(srtt)?;
    if fastest.budget > 0 {
        return Some(fastest);
    }
    let ready = candidates.iter().filter(|one| one.budget > 0);
    let other = ready.min_by_key(srtt)?;
    let (fast, slow) = (&links[fastest.link].path, &links[other.link].path);
    // What the fastest one sends until an acknowledgement by the other is back, its window growing by a datagram
    // each round trip.
    let trips = slow.srtt().as_secs_f64() / fast.srtt().as_secs_f64().max(1e-6);
    let grown = f64::from(fast.mtu()) * (trips - 1.0).max(0.0) / 2.0;
    let needed = (fast.cwnd() as f64 + grown) * trips;
    let room = wanted.under_way as f64 - (slow.in_flight() as f64 + f64::from(slow.mtu()));
    if needed > room {
        links[other.link].passed_over = true;
        return None;
    }
    Some(other)
}
