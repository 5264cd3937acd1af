//! What waits for a path that is away holds up nothing else.
//!
//! New data waits while the peer may have to hold too much for the sake of the oldest that it has not got. If that
//! can go by no path now, its own stream alone waits for it, whose kernel sends no more than a window without it:
//! so it counts as if it had been sent last.

use super::super::peer::Peer;
use super::super::shared::Shared;
use crate::chunk::Placement;
use crate::slab::Key;

impl Peer {
    /// Whether the peer can hold more.
    pub(super) fn has_room(&mut self, shared: &mut Shared) -> bool {
        if self.in_flight.claim() < self.association.store() {
            return true;
        }
        let Some((oldest, pending)) = self.in_flight.oldest() else {
            return false;
        };
        let placement = pending.placement;
        if self.retransmit.postponed == Some(oldest) || !self.is_away(shared, placement) {
            return false;
        }
        self.postpone_waiting(shared);
        self.retransmit.postponed = self.in_flight.oldest().map(|(key, _)| key);
        self.in_flight.claim() < self.association.store()
    }

    /// Whether no path that may carry such carries anything now.
    fn is_away(&self, shared: &Shared, placement: Placement) -> bool {
        let mut active = self.paths.active(shared);
        !active.any(|link| placement.allows(link.id, link.trusted))
    }

    fn postpone_waiting(&mut self, shared: &mut Shared) {
        for at in 0..self.paths.len() {
            if !self.paths[at].is_active(shared) {
                let mut shares = std::mem::take(&mut self.paths[at].shares);
                shares.retain_mut(|key| self.postpone(shared, key));
                self.paths[at].shares = shares;
            }
        }
        if self.is_away(shared, Placement::TrustedOnly) {
            let mut delayed = std::mem::take(&mut self.retransmit.trusted);
            delayed.retain_mut(|delayed| self.postpone(shared, &mut delayed.key));
            self.retransmit.trusted = delayed;
        }
    }

    /// Gives what waits under `key` another one, behind all others; false if nothing is to wait.
    pub(in crate::node) fn postpone(&mut self, shared: &mut Shared, key: &mut Key) -> bool {
        let Some(pending) = self.in_flight.get(*key) else {
            return false;
        };
        if self.is_stale(pending) {
            self.in_flight.remove(*key, &mut shared.pool);
            return false;
        }
        *key = self.in_flight.postpone(*key);
        true
    }
}
