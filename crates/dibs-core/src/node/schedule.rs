//! Which path carries the next bytes.

use std::time::Duration;

use smallvec::SmallVec;

use super::Shared;
use super::links::Link;
use crate::chunk::Placement;
use crate::flow::queue::TARGET;
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

/// What is to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) placement: Placement,
    /// Its bytes.
    pub(super) bytes: usize,
    /// Bytes that wait in all, these included.
    pub(super) backlog: usize,
    pub(super) avoid: Avoid,
    /// Of a flow, what its sender has under way, times the flows that have something to send: what it could have
    /// under way by itself if all of them did as it does.
    pub(super) under_way: usize,
}

impl Wanted {
    /// Something of its own, that no flow waits for.
    pub(super) const fn alone(placement: Placement, bytes: usize, avoid: Avoid) -> Self {
        Self {
            placement,
            bytes,
            backlog: bytes,
            avoid,
            under_way: 0,
        }
    }
}

/// A path that may not send now.
struct Busy {
    /// When all that waits would be delivered by it.
    at: Time,
    /// Bytes a second.
    rate: u64,
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

/// The most that deliveries by one path may be later than by another for a flow to have both: for more, a sender
/// would need a window that it has not soon.
const FAR: Duration = Duration::from_millis(100);

/// The delay that may stand in the queue of a flow.
///
/// A sender that answers a loss by having a third less under way, as CUBIC does, leaves a path idle after it unless
/// half a round trip waited before. And where paths differ, it has the sum of them only if it has so much more under
/// way that what goes by the shortest waits for as long as the longest takes longer.
pub(super) fn standing(links: &[Link], shared: &Shared) -> Duration {
    let active = || links.iter().filter(|link| link.is_active(shared));
    let trips = || active().map(|link| link.path.min_rtt());
    let least = trips().min().unwrap_or_default();
    let longer = trips()
        .map(|trip| trip - least)
        .filter(|more| *more <= 2 * FAR);
    TARGET.max(least / 2 + longer.max().unwrap_or_default())
}

/// The `balanced` scheduler: earliest predicted delivery within the windows.
pub(super) fn balanced(links: &mut [Link], shared: &Shared, now: Time, wanted: &Wanted) -> Choice {
    let &Wanted {
        placement,
        bytes: wanted,
        backlog,
        avoid,
        under_way,
    } = wanted;
    let mut ready: Option<Ready> = None;
    let mut busy: SmallVec<[Busy; 4]> = SmallVec::new();
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
            let rate = link.path.expected_rate();
            busy.push(Busy { at, rate });
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
    let Some(Ready {
        at, link, budget, ..
    }) = ready
    else {
        return match any {
            true => Choice::Wait(release),
            false => Choice::Nobody,
        };
    };
    // All that waits would be there earlier by paths that are blocked now (ECF) ...
    busy.retain(|busy| busy.at < at);
    let faster: u64 = busy.iter().map(|busy| busy.rate).sum();
    // ... and they would stand still before this one's delivery was acknowledged, by the quickest: the sender has no
    // more under way than they carry until then (BLEST).
    let back = links.iter().filter(|link| link.is_active(shared));
    let back = back.map(|link| link.path.min_rtt()).min();
    let back = at.since(now) + back.unwrap_or_default() / 2;
    match !busy.is_empty() && (under_way as f64) < faster as f64 * back.as_secs_f64() {
        true => Choice::Wait(release),
        false => Choice::Send { link, budget },
    }
}
