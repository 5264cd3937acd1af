//! Which path carries the next bytes.

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

/// The `balanced` scheduler: earliest predicted delivery within the windows.
///
/// `wanted` bytes are to be sent, `backlog` wait in all. `avoid` is the path that lost them.
pub(super) fn balanced(
    links: &mut [Link],
    shared: &Shared,
    now: Time,
    placement: Placement,
    wanted: usize,
    backlog: usize,
    avoid: Option<u8>,
) -> Choice {
    let mut ready: Option<(bool, Time, usize, usize)> = None;
    let mut blocked: Option<Time> = None;
    let mut release: Option<Time> = None;
    let mut any = false;
    for (index, link) in links.iter_mut().enumerate() {
        if !placement.allows(link.id, link.trusted) || !link.is_active(shared) {
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
        let candidate = (avoid == Some(link.id), at, index, budget);
        if ready.is_none_or(|best| (candidate.0, candidate.1) < (best.0, best.1)) {
            ready = Some(candidate);
        }
    }
    match (ready, blocked) {
        (None, _) if any => Choice::Wait(release),
        (None, _) => Choice::Nobody,
        // All that waits would be there earlier by the path that is blocked now (ECF).
        (Some((_, at, ..)), Some(earlier)) if earlier < at => Choice::Wait(release),
        (Some((_, _, link, budget)), _) => Choice::Send { link, budget },
    }
}
