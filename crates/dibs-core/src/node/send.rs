//! What goes to the peer next.
//!
//! In this order: what opens and keeps paths, acknowledgements (of paths and of TCP), messages
//! between the daemons, what was lost, new data, load that measures paths.
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
mod load;
mod opaque;
mod path_frames;
mod plan;
mod retransmit;
mod run;
mod shares;

use std::collections::VecDeque;

pub(super) use self::context::SendCx;
use self::data::Round;
pub(super) use self::datagram::{NOT_BARE, Sealer, key_of};
pub(super) use self::load::Load;
pub(super) use self::retransmit::{RetransmitQueue, lose_share};
pub(super) use self::shares::Shares;
use super::empty::EmptyOut;
use super::fq::FairQueue;
use super::messages::Messages;
use super::opaque::OpaqueQueues;
use super::out::Out;
use crate::counters::Counter;

/// Queues of a peer: what waits to be sent, beside the connections' own.
#[derive(Default)]
pub(super) struct Queues {
    /// Segments without payload.
    pub(super) segments: VecDeque<EmptyOut>,
    pub(super) messages: Messages,
    pub(super) lost: RetransmitQueue,
    pub(super) shares: Shares,
    pub(super) opaque: OpaqueQueues,
    pub(super) fq: FairQueue,
    pub(super) load: Load,
    /// Trust keeps data waiting that an untrusted path could carry.
    pub(super) held_by_trust: bool,
}

impl Queues {
    /// The next send, or none if nothing may go now. `notices` tell the peer of flows and epochs; it can hold `store` bytes.
    pub(super) fn poll_transmit(
        &mut self,
        cx: &mut SendCx<'_>,
        notices: &mut Vec<u8>,
        store: usize,
    ) -> Option<Out> {
        let Self {
            segments,
            lost,
            shares,
            ..
        } = self;
        let out = { shares.pop(cx) }
            .or_else(|| {
                let waiting = (!segments.is_empty()).then_some(&*segments);
                let carrier = waiting.and_then(|segments| empty_segments::carrier(cx, segments));
                path_frames::send(cx, carrier)
            })
            .or_else(|| empty_segments::send(cx, segments, notices))
            .or_else(|| shares.send_segments(cx))
            .or_else(|| control::send(cx, &mut self.messages))
            .or_else(|| lost.send_messages(cx))
            .or_else(|| lost.send_trusted(cx))
            .or_else(|| lost.send_any(cx))
            .or_else(|| lost.send_shares(cx))
            .or_else(|| opaque::send(cx, &mut self.opaque, shares))
            .or_else(|| copies::send(cx))
            .or_else(|| Round::new(cx, self, store).send(cx))
            .or_else(|| self.load.send(cx));
        let refused = cx.sealer.refused;
        cx.shared
            .journal
            .counters
            .add(Counter::KeysExhausted, refused);
        out
    }
}
