//! Earliest predicted delivery within the windows.

use std::time::Duration;

use super::{Offer, Pick, Wanted};

/// With such a trusted path, a delivery by an untrusted one is earlier only by more than this. All goes
/// by the trusted one then: runs have no holes for what only trusted paths may carry, and nothing waits
/// at the far end to be put in order.
const HEAD_START: Duration = Duration::from_micros(500);

pub(super) fn choose(offers: &[Offer], wanted: &Wanted) -> Pick {
    let rank = |one: &Offer| {
        let mut late = one.delivery;
        if !one.is_ample {
            late += HEAD_START;
        }
        // What it lost goes by another one, if that delivers it before this one would at the second attempt.
        if one.is_avoided {
            late += one.srtt;
        }
        let is_gone = one.is_avoided && one.is_unanswered;
        (is_gone, one.is_secondary, late)
    };
    let ready = offers.iter().enumerate().filter(|(_, one)| one.budget > 0);
    let Some((at, best)) = ready.min_by_key(|(_, one)| rank(one)) else {
        return Pick::Wait;
    };
    // All that waits would be there earlier by paths that are blocked now (ECF) ...
    let is_faster = |one: &&Offer| {
        let is_sooner = one.delivery < best.delivery;
        one.budget == 0 && (is_sooner || (best.is_secondary && !one.is_secondary))
    };
    let rate: u64 = offers.iter().filter(is_faster).map(|one| one.rate).sum();
    // ... and they would stand still before this one's delivery was acknowledged, by the quickest: the sender has no
    // more under way than they carry until then (BLEST).
    if (wanted.under_way as f64) < rate as f64 * best.acknowledgement.as_secs_f64() {
        return Pick::PassOver(at);
    }
    Pick::Take(at)
}
