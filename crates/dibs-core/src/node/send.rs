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
mod plan;
mod retransmit;
mod run;
mod shares;

use std::collections::VecDeque;

use self::context::SendCx;
use self::data::Round;
use self::datagram::Sealer;
pub(super) use self::datagram::{NOT_BARE, key_of};
pub(super) use self::retransmit::{RetransmitQueue, lose_share};
pub(super) use self::shares::Shares;
use super::empty::EmptyOut;
use super::flows::FlowTable;
use super::fq::FairQueue;
use super::messages::Messages;
use super::opaque::OpaqueQueues;
use super::out::Out;
use super::paths::PathSet;
use super::shared::Shared;
use crate::counters::Counter;
use crate::flow::queue::Patience;
use crate::in_flight::InFlight;
use crate::session::Session;
use crate::time::Time;

/// What of a peer is sent, and what it is sent with.
pub(super) struct Turn<'a> {
    pub(super) now: Time,
    pub(super) shared: &'a mut Shared,
    pub(super) session: &'a mut Session,
    pub(super) paths: &'a mut PathSet,
    pub(super) flows: &'a mut FlowTable,
    pub(super) in_flight: &'a mut InFlight,
    pub(super) segments: &'a mut VecDeque<EmptyOut>,
    pub(super) notices: &'a mut Vec<u8>,
    pub(super) messages: &'a mut Messages,
    pub(super) lost: &'a mut RetransmitQueue,
    pub(super) shares: &'a mut Shares,
    pub(super) opaque: &'a mut OpaqueQueues,
    pub(super) fq: &'a mut FairQueue,
    pub(super) held_by_trust: &'a mut bool,
    /// Bytes that the peer can hold.
    pub(super) store: usize,
}

impl Turn<'_> {
    /// The next send, or none if nothing may go now.
    pub(super) fn poll_transmit(self) -> Option<Out> {
        let Self {
            now,
            shared,
            session,
            segments,
            lost,
            shares,
            ..
        } = self;
        let cx = &mut SendCx {
            now,
            shared,
            sealer: Sealer {
                now,
                session,
                refused: 0,
            },
            paths: self.paths,
            flows: self.flows,
            in_flight: self.in_flight,
        };
        let out = { shares.pop(cx) }
            .or_else(|| {
                let waiting = (!segments.is_empty()).then_some(&*segments);
                let carrier = waiting.and_then(|segments| empty_segments::carrier(cx, segments));
                path_frames::send(cx, carrier)
            })
            .or_else(|| empty_segments::send(cx, segments, self.notices))
            .or_else(|| shares.send_segments(cx))
            .or_else(|| control::send(cx, self.messages))
            .or_else(|| lost.send_messages(cx))
            .or_else(|| lost.send_trusted(cx))
            .or_else(|| lost.send_any(cx))
            .or_else(|| lost.send_shares(cx))
            .or_else(|| opaque::send(cx, self.opaque, shares))
            .or_else(|| copies::send(cx))
            .or_else(|| {
                let patience = Patience {
                    turn: cx.paths.quantum(),
                    target: cx.paths.standing(&cx.shared.setup),
                };
                let round = Round {
                    fq: self.fq,
                    lost,
                    shares,
                    held_by_trust: self.held_by_trust,
                    store: self.store,
                    patience,
                    trusted_awaited: false,
                };
                round.send(cx)
            });
        let refused = cx.sealer.refused;
        shared.journal.counters.add(Counter::KeysExhausted, refused);
        out
    }
}
