//! Context that all steps of a turn work on.

use super::datagram::{Asks, Seal, Sealer};
use crate::chunk::Placement;
use crate::in_flight::InFlight;
use crate::node::flows::FlowTable;
use crate::node::out::{Out, Source};
use crate::node::paths::{Choice, PathSet, Wanted};
use crate::node::shared::Shared;
use crate::session::{CLEAR_HEADER_LEN, OVERHEAD};
use crate::time::Time;

/// See the module.
pub(in crate::node) struct SendCx<'a> {
    pub(in crate::node) now: Time,
    pub(in crate::node) shared: &'a mut Shared,
    pub(in crate::node) sealer: Sealer<'a>,
    pub(in crate::node) paths: &'a mut PathSet,
    pub(in crate::node) flows: &'a mut FlowTable,
    pub(in crate::node) in_flight: &'a mut InFlight,
}

impl SendCx<'_> {
    /// Seals a header block as one datagram without payload, by the path at `at`.
    pub(super) fn send_block(&mut self, at: usize, block: &[u8], asks: Asks) -> Option<Out> {
        let link = &mut self.paths[at];
        let len = OVERHEAD + block.len();
        let datagram = &mut self.shared.scratch.datagrams;
        datagram.clear();
        datagram.resize(len, 0);
        datagram[CLEAR_HEADER_LEN..CLEAR_HEADER_LEN + block.len()].copy_from_slice(block);
        self.sealer
            .seal(link, datagram, block.len(), asks, Seal::Headers)
            .then(|| Out::by(link, len, Source::Scratch))
    }

    /// The path for what no flow waits for, and its budget; none if it has to wait.
    pub(super) fn choose(&mut self, wanted: &Wanted) -> Option<(usize, usize)> {
        match self.paths.choose(&self.shared.setup, self.now, wanted) {
            Choice::Send { link, budget } => Some((link, budget)),
            Choice::Wait(at) => {
                self.paths.wait_until(at);
                None
            }
            Choice::Nobody => None,
        }
    }

    /// Placement of the daemons' messages: trusted paths, or any as long as none of those carries anything. They are
    /// encrypted whole, so this is no matter of secrecy: a trusted path is not so easily cut.
    pub(super) fn message_placement(&self) -> Placement {
        match self.paths.has_trusted(&self.shared.setup) {
            true => Placement::TrustedOnly,
            false => Placement::Any,
        }
    }

    /// Untrusted paths may carry everything: `on_trusted_down = "untrusted"`, and it is down.
    pub(super) fn is_lax(&self) -> bool {
        !self.shared.setup.policy.hold_without_trusted
            && !self.paths.has_trusted(&self.shared.setup)
    }
}
