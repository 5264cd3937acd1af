//! Earliest predicted delivery within the windows.

use std::time::Duration;

use smallvec::SmallVec;

use super::{Candidate, Wanted};
use crate::node::paths::Link;
use crate::node::shared::Shared;
use crate::time::Time;

/// Bytes a second of a path that is not the limit: more than a processor sends.
const PLENTY: u64 = 2_000_000_000;

/// With such a trusted path, a delivery by an untrusted one is earlier only by more than this. All goes
/// by the trusted one then: runs have no holes for what only trusted paths may carry, and nothing waits
/// at the far end to be put in order.
const HEAD_START: Duration = Duration::from_micros(500);

/// A path that may not send now.
struct Busy {
    /// When all that waits would be delivered by it.
    at: Time,
    /// Bytes a second.
    rate: u64,
    secondary: bool,
}

pub(super) fn choose<'a>(
    links: &mut [Link],
    shared: &Shared,
    now: Time,
    wanted: &Wanted,
    candidates: &'a [Candidate],
) -> Option<&'a Candidate> {
    let mut best: Option<(_, Time, &Candidate)> = None;
    let mut busy: SmallVec<[Busy; 4]> = SmallVec::new();
    for candidate in candidates {
        let path = &links[candidate.link].path;
        if candidate.budget == 0 {
            busy.push(Busy {
                at: path.predict_delivery(now, wanted.backlog.max(wanted.bytes)),
                rate: path.expected_rate(),
                secondary: candidate.secondary,
            });
            continue;
        }
        let at = path.predict_delivery(now, wanted.bytes);
        let early = match candidate.trusted && path.most_rate() >= PLENTY {
            true => at - HEAD_START,
            false => at,
        };
        // What it lost goes by another one, if that delivers it before this one would at the second attempt.
        let early = match candidate.avoided {
            true => early + path.srtt(),
            false => early,
        };
        let gone = candidate.avoided && path.is_unanswered();
        let rank = (gone, candidate.secondary, early);
        if best.as_ref().is_none_or(|(least, ..)| rank < *least) {
            best = Some((rank, at, candidate));
        }
    }
    let (_, at, candidate) = best?;
    // All that waits would be there earlier by paths that are blocked now (ECF) ...
    busy.retain(|busy| busy.at < at || (candidate.secondary && !busy.secondary));
    let faster: u64 = busy.iter().map(|busy| busy.rate).sum();
    // ... and they would stand still before this one's delivery was acknowledged, by the quickest: the sender has no
    // more under way than they carry until then (BLEST).
    let back = links.iter().filter(|link| link.is_active(shared));
    let back = back.map(|link| link.path.min_rtt()).min();
    let back = at.since(now) + back.unwrap_or_default() / 2;
    if !busy.is_empty() && (wanted.under_way as f64) < faster as f64 * back.as_secs_f64() {
        links[candidate.link].passed_over = true;
        return None;
    }
    Some(candidate)
}
