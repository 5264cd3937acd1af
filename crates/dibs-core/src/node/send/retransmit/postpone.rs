//! Postponement: entries that wait for a path that is away hold up nothing else.
//!
//! New data waits while the peer may have to hold too much for the sake of the oldest that it has not got. If that
//! can go by no path now, its own stream alone waits for it, whose kernel sends no more than a window without it:
//! so it counts as if it had been sent last.

use super::super::context::SendCx;
use super::{RetransmitQueue, postpone};
use crate::chunk::Placement;

impl RetransmitQueue {
    /// True if the peer, whose store has so many bytes, can hold more.
    pub(in crate::node::send) fn has_room(&mut self, cx: &mut SendCx<'_>, store: usize) -> bool {
        if cx.in_flight.claim() < store {
            return true;
        }
        let Some((oldest, pending)) = cx.in_flight.oldest() else {
            return false;
        };
        if self.postponed == Some(oldest) || !is_away(cx, pending.placement) {
            return false;
        }
        self.postpone_waiting(cx);
        self.postponed = cx.in_flight.oldest().map(|(key, _)| key);
        cx.in_flight.claim() < store
    }

    fn postpone_waiting(&mut self, cx: &mut SendCx<'_>) {
        let trusted_away = is_away(cx, Placement::TrustedOnly);
        let SendCx {
            now,
            shared,
            flows,
            in_flight,
            paths,
            ..
        } = cx;
        for link in paths.iter_mut() {
            if !link.is_active(&shared.setup) {
                let shares = &mut link.shares;
                shares.retain_mut(|lost| postpone(*now, flows, in_flight, &mut shared.pool, lost));
            }
        }
        if trusted_away {
            let trusted = &mut self.trusted;
            trusted.retain_mut(|lost| postpone(*now, flows, in_flight, &mut shared.pool, lost));
        }
    }
}

/// True if no path that may carry such carries anything now.
fn is_away(cx: &SendCx<'_>, placement: Placement) -> bool {
    let mut active = cx.paths.active(&cx.shared.setup);
    !active.any(|link| placement.allows(link.id, link.trusted))
}
