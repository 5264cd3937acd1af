//! What goes to the peer next.
//!
//! In this order: what opens and keeps paths, acknowledgements (of paths and of TCP), messages
//! between the daemons, what was lost, new data.

mod copies;
mod cutter;
mod data;
mod postpone;
mod retransmit;
mod run;
mod small;
mod split;

use dibs_wire::packet::flags;

pub(super) use retransmit::RetransmitQueue;
pub(super) use split::Shares;

use super::out::{Out, Source};
use super::paths::Kind;
use super::peer::{EmptyOut, Peer};
use super::shared::Shared;
use crate::chunk::Placement;
use crate::counters::Counter;
use crate::flow::queue::Patience;
use crate::session::CLEAR_HEADER_LEN as CLEAR;
use crate::session::{OVERHEAD, Session};
use crate::slab::Key;
use crate::time::Time;

/// Flags whose segments begin or end something, and go authenticated whatever `integrity` says.
pub(super) const NOT_BARE: u16 = flags::SYN | flags::FIN | flags::RST;

/// What every step of a turn needs beside the peer.
struct SendCx<'a> {
    now: Time,
    shared: &'a mut Shared,
    session: &'a mut Session,
    /// What of a flow's queue is left alone.
    patience: Patience,
    /// A flow waits for room on a trusted path: no other is to take it.
    trusted_awaited: bool,
}

/// A token of the path layer: zero is nobody's.
fn token(key: Key) -> u64 {
    key.to_u64() + 1
}

/// The key of a token.
pub(super) fn key_of(token: u64) -> Option<Key> {
    token.checked_sub(1).map(Key::from_u64)
}

/// Where one datagram's parts are to be written.
struct Shape {
    payload: usize,
    header: usize,
    tag: usize,
}

impl Shape {
    const fn len(&self) -> usize {
        CLEAR + self.payload + self.header + self.tag
    }
}

impl Peer {
    /// The next send, or none if nothing may go now.
    pub(crate) fn poll_transmit(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
    ) -> Option<Out> {
        let patience = Patience {
            turn: self.flow_quantum(),
            target: self.paths.standing(shared),
        };
        let cx = &mut SendCx {
            now,
            shared,
            session,
            patience,
            trusted_awaited: false,
        };
        self.send_splits()
            .or_else(|| self.send_link_frames(cx))
            .or_else(|| self.send_segments(cx))
            .or_else(|| self.send_split_segments(cx))
            .or_else(|| self.send_control(cx))
            .or_else(|| self.send_delayed_trusted(cx))
            .or_else(|| self.send_delayed_any(cx))
            .or_else(|| self.retransmit_shares(cx))
            .or_else(|| self.send_opaque(cx))
            .or_else(|| self.send_split_opaque(cx))
            .or_else(|| self.send_copies(cx))
            .or_else(|| self.send_data(cx))
    }

    /// Seals the header block in `block` as one datagram without payload.
    fn finish(
        &mut self,
        cx: &mut SendCx<'_>,
        link: usize,
        block: &[u8],
        eliciting: bool,
        token: u64,
    ) -> Option<Out> {
        let link = &mut self.paths[link];
        let len = OVERHEAD + block.len();
        cx.shared.scratch.datagrams.clear();
        cx.shared.scratch.datagrams.resize(len, 0);
        cx.shared.scratch.datagrams[CLEAR..CLEAR + block.len()].copy_from_slice(block);
        let seq = link.path.on_sent(cx.now, len as u16, token, eliciting);
        if cx
            .session
            .seal(
                &mut cx.shared.scratch.datagrams,
                link.id,
                seq,
                block.len(),
                false,
            )
            .is_err()
        {
            cx.shared.count(Counter::KeysExhausted);
            return None;
        }
        Some(Out::by(link, len, Source::Scratch))
    }

    /// The path with the least round trip of those that the user would have carry this.
    fn quickest(&self, shared: &Shared, placement: Placement) -> Option<usize> {
        // A connection begins by another path than the preferred one.
        let opens = |empty: &EmptyOut| {
            let conn = self.flows.get(empty.conn);
            conn.is_some_and(|conn| conn.open_frame().is_some())
        };
        let kind = match (placement, self.segments.front()) {
            (Placement::Any, Some(first)) if opens(first) => Kind::First,
            (Placement::Any, _) => Kind::New,
            _ => Kind::Other,
        };
        self.paths.quickest(shared, placement, kind)
    }
}
