//! What waits for a path that is away holds up nothing else.
//!
//! New data waits while the peer may have to hold too much for the sake of the oldest that it has not got. If that
//! can go by no path now, its own stream alone waits for it, whose kernel sends no more than a window without it:
//! so it counts as if it had been sent last.

use super::SendCx;
use super::retransmit::{RetransmitQueue, postpone};
use crate::chunk::Placement;

/// Whether the peer, whose store has so many bytes, can hold more.
pub(super) fn has_room(cx: &mut SendCx<'_>, lost: &mut RetransmitQueue, store: usize) -> bool {
    if cx.in_flight.claim() < store {
        return true;
    }
    let Some((oldest, pending)) = cx.in_flight.oldest() else {
        return false;
    };
    if lost.postponed == Some(oldest) || !is_away(cx, pending.placement) {
        return false;
    }
    postpone_waiting(cx, lost);
    lost.postponed = cx.in_flight.oldest().map(|(key, _)| key);
    cx.in_flight.claim() < store
}

/// Whether no path that may carry such carries anything now.
fn is_away(cx: &SendCx<'_>, placement: Placement) -> bool {
    let mut active = cx.paths.active(cx.shared);
    !active.any(|link| placement.allows(link.id, link.trusted))
}

fn postpone_waiting(cx: &mut SendCx<'_>, lost: &mut RetransmitQueue) {
    let trusted_away = is_away(cx, Placement::TrustedOnly);
    let SendCx {
        shared,
        flows,
        in_flight,
        paths,
        ..
    } = cx;
    for link in paths.iter_mut() {
        if !link.is_active(shared) {
            let shares = &mut link.shares;
            shares.retain_mut(|lost| postpone(flows, in_flight, &mut shared.pool, &mut lost.key));
        }
    }
    if trusted_away {
        let trusted = &mut lost.trusted;
        trusted.retain_mut(|lost| postpone(flows, in_flight, &mut shared.pool, &mut lost.key));
    }
}
