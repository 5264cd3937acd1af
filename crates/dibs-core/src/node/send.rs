//! What goes to the peer next.
//!
//! In this order: what opens and keeps paths, acknowledgements (of paths and of TCP), messages
//! between the daemons, what was lost, new data.
//!
//! Each step takes from a queue of its own; what all of them work on is in [`SendCx`].

mod carrier;
mod control;
mod copies;
mod cutter;
mod data;
mod datagram;
mod empty_segments;
mod opaque;
mod path_frames;
mod retransmit;
mod run;
mod shares;

use dibs_wire::packet::flags;

use self::data::Round;
pub(super) use self::datagram::key_of;
use self::datagram::{Asks, Seal, Sealer};
pub(super) use self::retransmit::{RetransmitQueue, lose_share};
pub(super) use self::shares::Shares;
use super::flows::FlowTable;
use super::out::{Out, Source};
use super::paths::{Choice, PathSet, Wanted};
use super::peer::Peer;
use super::shared::Shared;
use crate::counters::Counter;
use crate::flow::queue::Patience;
use crate::in_flight::InFlight;
use crate::session::{CLEAR_HEADER_LEN as CLEAR, OVERHEAD, Session};
use crate::time::Time;

/// Flags whose segments begin or end something, and go authenticated whatever `integrity` says.
pub(super) const NOT_BARE: u16 = flags::SYN | flags::FIN | flags::RST;

/// What all steps of a turn work on.
struct SendCx<'a> {
    now: Time,
    shared: &'a mut Shared,
    sealer: Sealer<'a>,
    paths: &'a mut PathSet,
    flows: &'a mut FlowTable,
    in_flight: &'a mut InFlight,
}

/// The next send of a peer, or none if nothing may go now.
pub(super) fn poll_transmit(
    peer: &mut Peer,
    now: Time,
    shared: &mut Shared,
    session: &mut Session,
) -> Option<Out> {
    let cx = &mut SendCx {
        now,
        shared,
        sealer: Sealer {
            now,
            session,
            refused: 0,
        },
        paths: &mut peer.paths,
        flows: &mut peer.flows,
        in_flight: &mut peer.in_flight,
    };
    let (lost, shares) = (&mut peer.retransmit, &mut peer.shares);
    let out = { shares.pop(cx) }
        .or_else(|| path_frames::send(cx, &peer.segments))
        .or_else(|| empty_segments::send(cx, &mut peer.segments, &mut peer.notices))
        .or_else(|| shares.send_segments(cx))
        .or_else(|| control::send(cx, &mut peer.messages))
        .or_else(|| lost.send_trusted(cx))
        .or_else(|| lost.send_any(cx))
        .or_else(|| lost.send_shares(cx))
        .or_else(|| opaque::send(cx, &mut peer.opaque, shares))
        .or_else(|| copies::send(cx))
        .or_else(|| {
            let patience = Patience {
                turn: cx.paths.quantum(),
                target: cx.paths.standing(cx.shared),
            };
            let round = Round {
                fq: &mut peer.fq,
                lost,
                shares,
                held_by_trust: &mut peer.held_by_trust,
                store: peer.association.store(),
                patience,
                trusted_awaited: false,
            };
            round.send(cx)
        });
    let refused = cx.sealer.refused;
    shared.counters.add(Counter::KeysExhausted, refused);
    out
}

impl SendCx<'_> {
    /// Seals a header block as one datagram without payload, by the path at `at`.
    fn send_block(&mut self, at: usize, block: &[u8], asks: Asks) -> Option<Out> {
        let link = &mut self.paths[at];
        let len = OVERHEAD + block.len();
        let datagram = &mut self.shared.scratch.datagrams;
        datagram.clear();
        datagram.resize(len, 0);
        datagram[CLEAR..CLEAR + block.len()].copy_from_slice(block);
        self.sealer
            .seal(link, datagram, block.len(), asks, Seal::Headers)
            .then(|| Out::by(link, len, Source::Scratch))
    }

    /// The path for what no flow waits for, and its budget; none if it has to wait.
    fn choose(&mut self, wanted: &Wanted) -> Option<(usize, usize)> {
        match self.paths.choose(self.shared, self.now, wanted) {
            Choice::Send { link, budget } => Some((link, budget)),
            Choice::Wait(at) => {
                self.paths.wait_until(at);
                None
            }
            Choice::Nobody => None,
        }
    }

    /// Untrusted paths may carry everything: `on_trusted_down = "untrusted"`, and it is down.
    fn is_lax(&self) -> bool {
        !self.shared.policy.hold_without_trusted && !self.paths.has_trusted(self.shared)
    }
}
