//! Load that measures paths: datagrams of nothing, as fast as a path takes them, behind all that connections send.
//!
//! The path layer treats them as data. So acknowledgements say what arrived, and the round trip what waits.

use std::time::Duration;

use super::context::SendCx;
use super::datagram::{Asks, MAX_BATCH, MAX_SEGMENTS, Seal};
use crate::node::out::{Out, Source};
use crate::path::Blocked;
use crate::session::{PathId, TAG_LEN};
use crate::time::Time;

/// Load ends so long after it was last asked for: a user who goes away, or whose daemon does, needs not say so.
const LEASE: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Default)]
pub(in crate::node) struct Load {
    /// Number of the measurement.
    run: u64,
    paths: Vec<PathId>,
    until: Time,
}

impl Load {
    /// Load of a measurement by these paths.
    pub(in crate::node) fn new(now: Time, run: u64, paths: Vec<PathId>) -> Self {
        let until = if paths.is_empty() { now } else { now + LEASE };
        Self { run, paths, until }
    }

    /// True if it goes on, and is not of this measurement.
    pub(in crate::node) fn is_of_other(&self, now: Time, run: u64) -> bool {
        now < self.until && self.run != run
    }

    /// Sends some by the first of its paths that has room.
    pub(super) fn send(&self, cx: &mut SendCx<'_>) -> Option<Out> {
        if cx.now >= self.until {
            return None;
        }
        self.paths.iter().find_map(|id| send_by(cx, *id))
    }
}

fn send_by(cx: &mut SendCx<'_>, id: PathId) -> Option<Out> {
    let at = cx.paths.position(id)?;
    let link = &mut cx.paths[at];
    if !link.is_active(&cx.shared.setup) {
        return None;
    }
    let burst = link.path.quantum();
    let budget = link.path.budget(cx.now, burst);
    if budget == 0 {
        if let Blocked::Pacing(until) = link.path.blocked_until(cx.now, burst) {
            cx.paths.wait_until(Some(until));
        }
        return None;
    }
    let mtu = usize::from(link.path.mtu());
    let count = (budget.min(MAX_BATCH) / mtu).clamp(1, MAX_SEGMENTS);
    let ping = link.ping(&cx.shared.setup);
    let datagrams = &mut cx.shared.scratch.datagrams;
    datagrams.clear();
    datagrams.resize(count * mtu, 0);
    for datagram in datagrams.chunks_exact_mut(mtu) {
        // The rest is payload that no frame describes.
        datagram[mtu - TAG_LEN - 1] = ping;
        if !cx.sealer.seal(link, datagram, 1, Asks::Ack, Seal::All) {
            return None;
        }
    }
    Some(Out::by(link, mtu, Source::Scratch))
}
