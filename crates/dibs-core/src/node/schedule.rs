//! Which path carries the next bytes.

use std::time::Duration;

use super::Shared;
use super::links::Link;
use crate::chunk::Placement;
use crate::path::Blocked;
use crate::time::Time;

/// A scheduler's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// By this path (index among the links), so many bytes at most.
    Send { link: usize, budget: usize },
    /// Not now; perhaps at that time, or when an acknowledgement comes.
    Wait(Option<Time>),
    /// No path may carry it.
    Nobody,
}

/// Bytes a second of a path that is not the limit: more than a processor sends.
const PLENTY: u64 = 2_000_000_000;

/// With such a trusted path, a delivery by an untrusted one is earlier only by more than this. All goes
/// by the trusted one then: runs have no holes for what only trusted paths may carry, and nothing waits
/// at the far end to be put in order.
const HEAD_START: Duration = Duration::from_micros(500);

/// Paths that others should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Avoid {
    /// None.
    Nothing,
    /// This one, if there is another: it lost what is to be sent.
    Link(u8),
    /// The trusted ones, in any case: those wait for them that need them.
    Trusted,
}

/// A path that may send now.
struct Ready {
    /// The lowest is chosen.
    rank: (bool, Time),
    /// The predicted delivery.
    at: Time,
    link: usize,
    budget: usize,
}

/// The `balanced` scheduler: earliest predicted delivery within the windows.
///
/// `wanted` bytes are to be sent, `backlog` wait in all.
pub(super) fn balanced(
    links: &mut [Link],
    shared: &Shared,
    now: Time,
    placement: Placement,
    wanted: usize,
    backlog: usize,
    avoid: Avoid,
) -> Choice {
    let mut ready: Option<Ready> = None;
    let mut blocked: Option<Time> = None;
    let mut release: Option<Time> = None;
    let mut any = false;
    for (index, link) in links.iter_mut().enumerate() {
        let allowed =
            placement.allows(link.id, link.trusted) && !(avoid == Avoid::Trusted && link.trusted);
        if !allowed || !link.is_active(shared) {
            continue;
        }
        any = true;
        let budget = link.path.budget(now, wanted);
        if budget == 0 {
            let at = link.path.predict_delivery(now, backlog.max(wanted));
            blocked = Some(blocked.map_or(at, |b| b.min(at)));
            if let Blocked::Pacing(t) = link.path.blocked_until(now, wanted) {
                release = Some(release.map_or(t, |r| r.min(t)));
            }
            continue;
        }
        let at = link.path.predict_delivery(now, wanted);
        let rank = match link.trusted && link.path.most_rate() >= PLENTY {
            true => at - HEAD_START,
            false => at,
        };
        let rank = (avoid == Avoid::Link(link.id), rank);
        if ready.as_ref().is_none_or(|best| rank < best.rank) {
            ready = Some(Ready {
                rank,
                at,
                link: index,
                budget,
            });
        }
    }
    match (ready, blocked) {
        (None, _) if any => Choice::Wait(release),
        (None, _) => Choice::Nobody,
        // All that waits would be there earlier by the path that is blocked now (ECF).
        (Some(ready), Some(earlier)) if earlier < ready.at => Choice::Wait(release),
        (Some(Ready { link, budget, .. }), _) => Choice::Send { link, budget },
    }
}
