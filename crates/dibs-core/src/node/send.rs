//! What goes to the peer next.
//!
//! In this order: what opens and keeps paths, acknowledgements (of paths and of TCP), messages
//! between the daemons, what was lost, new data.
//!
//! Each step takes from a queue of its own; what all of them work on is in [`SendCx`].

mod carrier;
mod context;
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

use self::context::SendCx;
use self::data::Round;
use self::datagram::Sealer;
pub(super) use self::datagram::{NOT_BARE, key_of};
pub(super) use self::retransmit::{RetransmitQueue, lose_share};
pub(super) use self::shares::Shares;
use super::out::Out;
use super::peer::Peer;
use super::shared::Shared;
use crate::counters::Counter;
use crate::flow::queue::Patience;
use crate::session::Session;
use crate::time::Time;

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
        .or_else(|| empty_segments::send(cx, &mut peer.segments, &mut peer.receiver.notices))
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
