//! Warnings that a peer can cause as often as it likes, with each message: some of them go to the log.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use dibs_core::Time;

/// Warnings of a peer that are logged at once.
const BURST: u32 = 10;
/// One more is logged each.
const EACH: Duration = Duration::from_secs(30);

/// Logs what peers cause. Warnings beyond a rate of each peer are counted only.
#[derive(Default)]
pub(crate) struct PeerWarnings {
    peers: RefCell<Vec<Bucket>>,
    left_out: Cell<u64>,
}

/// Warnings that one peer may still cause.
#[derive(Clone, Copy, Default)]
struct Bucket {
    /// When all of the burst may be logged again.
    full: Time,
    /// Left out since the last one that was logged.
    left_out: u64,
}

impl PeerWarnings {
    /// Warns of something that peer number `peer`, of this name, caused.
    pub(crate) fn warn(&self, now: Time, (peer, name): (usize, &str), text: &str) {
        match self.admit(now, peer) {
            Some(0) => tracing::warn!(dibs.peer = name, "peer {name}: {text}"),
            Some(more) => tracing::warn!(
                dibs.peer = name,
                "peer {name}: {text} ({more} warnings before were left out)"
            ),
            None => self.left_out.update(|count| count + 1),
        }
    }

    /// True if another one is logged, and how many were left out before it.
    fn admit(&self, now: Time, peer: usize) -> Option<u64> {
        let mut peers = self.peers.borrow_mut();
        if peers.len() <= peer {
            peers.resize(peer + 1, Bucket::default());
        }
        let bucket = &mut peers[peer];
        if bucket.full.since(now) > EACH * (BURST - 1) {
            bucket.left_out += 1;
            return None;
        }
        bucket.full = bucket.full.max(now) + EACH;
        Some(std::mem::take(&mut bucket.left_out))
    }

    /// For `status`, by name.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 1] {
        [("peer_warnings_left_out", self.left_out.get())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_warns_of_itself_at_a_rate_and_hides_no_other() {
        let warnings = PeerWarnings::default();
        let start = Time::ZERO + Duration::from_secs(1000);
        let admitted = |now, peer| warnings.admit(now, peer);
        for _ in 0..BURST {
            assert_eq!(admitted(start, 1), Some(0));
        }
        for _ in 0..50 {
            assert_eq!(admitted(start, 1), None);
            warnings.warn(start, (1, "b"), "it repeats itself");
        }
        assert_eq!(admitted(start, 0), Some(0), "another peer's");
        assert_eq!(admitted(start + EACH, 1), Some(100));
        assert_eq!(admitted(start + EACH, 1), None);
        let later = start + EACH * (2 * BURST);
        let logged = (0..100).filter(|_| admitted(later, 1).is_some());
        assert_eq!(logged.count(), BURST as usize);
        assert_eq!(warnings.counters(), [("peer_warnings_left_out", 50)]);
    }
}
