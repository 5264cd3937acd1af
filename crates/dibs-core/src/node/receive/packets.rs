//! What is no chunk: segments and packets, and what has to be put together of shares or pieces first.
//!
//! A piece is of a packet, or of a chunk or a share; what shares give may hold pieces of packets, and no others: each
//! step leads down to [`take_inner`](Receiver::take_inner) or [`take_chunk`](Receiver::take_chunk), and none back.

use std::borrow::Cow;
use std::sync::Arc;

use dibs_settings::BumpId;
use dibs_wire::frame::{Frame, Frames, Share};
use dibs_wire::packet::{self, Packet};

use super::{ReceiveCx, Receiver};
use crate::counters::Counter;
use crate::flow::inject::MAX_PACKET;
use crate::node::hosts::begins;
use crate::node::names;
use crate::node::opaque::Assembled;
use crate::node::protection::Protection;
use crate::node::share_collector::Added;
use crate::path_index::PathIndex;

impl Receiver {
    /// Takes what a datagram brought by the local path `path`, other than a chunk; false if it counts as not received.
    pub(in crate::node) fn take(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        path: PathIndex,
        frame: &Frame<'_>,
        payload: &[u8],
    ) -> bool {
        // Header blocks are encrypted, always.
        let protection = Protection::Encrypted;
        match frame {
            Frame::Share(share) => self.take_share(cx, path, share, payload),
            Frame::Fragment { id, .. } if !is_opaque(*id) => {
                self.take_piece(cx, path, frame, protection)
            }
            _ => self.take_inner(cx, frame, protection),
        }
    }

    /// Takes a piece of a chunk or of a share.
    fn take_piece(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        path: PathIndex,
        piece: &Frame<'_>,
        protection: Protection,
    ) -> bool {
        let (bytes, header) = match self.reassemble(cx, piece, protection) {
            Ok(whole) => whole,
            Err(taken) => return taken,
        };
        let (block, payload) = bytes.split_at(header);
        match Frames::new(block).next() {
            Some(Ok(Frame::Share(share))) => self.take_share(cx, path, &share, payload),
            Some(Ok(Frame::Chunk(chunk))) => {
                self.take_chunk(cx, path, &chunk, (payload, protection))
            }
            _ => {
                cx.shared.count(Counter::FrameMalformed);
                true
            }
        }
    }

    /// Takes a share.
    fn take_share(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        path: PathIndex,
        share: &Share,
        bytes: &[u8],
    ) -> bool {
        let bumps = Arc::clone(&cx.shared.setup.bumps);
        let bump = bumps.named(share.bump);
        let Some((bump, split)) = bump.and_then(|bump| Some((bump.number, bump.split()?))) else {
            cx.shared.count(Counter::BumpUnknown);
            return true;
        };
        if (share.needed, share.shares) != (split.needed(), split.shares()) {
            cx.shared.count(Counter::ShareMismatch);
            return true;
        }
        let mut whole = std::mem::take(&mut cx.shared.scratch.joined);
        let number = (share.set, share.index);
        let added = self.shares.add(cx.now, split, number, bytes, &mut whole);
        let taken = match added {
            Added::Partly => true,
            Added::Whole(set) => {
                let taken = self.take_joined(cx, path, bump, &whole);
                if taken {
                    self.shares.finish(set);
                }
                taken
            }
            Added::Late => {
                cx.shared.count(Counter::ShareLate);
                true
            }
            Added::NoRoom => {
                cx.shared.count(Counter::StoreFull);
                false
            }
            Added::Contradiction => {
                cx.shared.count(Counter::PeerContradiction);
                true
            }
        };
        cx.shared.scratch.joined = whole;
        taken
    }

    /// Takes what shares were put together to: the length of a payload, the payload, a header block.
    fn take_joined(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        path: PathIndex,
        bump: BumpId,
        whole: &[u8],
    ) -> bool {
        let protection = Protection::Split(bump);
        let parts = whole
            .split_first_chunk()
            .and_then(|(len, rest)| rest.split_at_checked(usize::from(u16::from_be_bytes(*len))));
        let Some((payload, block)) = parts else {
            cx.shared.count(Counter::FrameMalformed);
            return true;
        };
        let mut payload = Some(payload);
        let mut taken = true;
        for frame in Frames::new(block) {
            taken &= match frame {
                Ok(Frame::Chunk(chunk)) if payload.is_some() => {
                    let bytes = payload.take().unwrap_or_default();
                    self.take_chunk(cx, path, &chunk, (bytes, protection))
                }
                Ok(Frame::Chunk(_)) | Err(_) => {
                    cx.shared.count(Counter::FrameMalformed);
                    true
                }
                Ok(frame) => self.take_inner(cx, &frame, protection),
            };
        }
        taken
    }

    /// Takes what is complete, or a piece of a packet.
    pub(super) fn take_inner(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        frame: &Frame<'_>,
        protection: Protection,
    ) -> bool {
        match *frame {
            Frame::Segment(ref segment) => return self.take_empty(cx, segment, protection),
            Frame::Opaque { bump, packet } => self.take_packet(cx, bump, packet, protection),
            Frame::Fragment { id, .. } if is_opaque(id) => {
                match self.reassemble(cx, frame, protection) {
                    Ok((bytes, _)) => {
                        if let Some((&bump, packet)) = bytes.split_first() {
                            self.take_packet(cx, bump, packet, protection);
                        }
                    }
                    Err(taken) => return taken,
                }
            }
            // Also pieces of chunks among what was split: that is cut beforehand, or its shares are.
            _ => cx.shared.count(Counter::PeerContradiction),
        }
        true
    }

    /// Adds a piece to its whole: that and the length of its header block, or whether the piece counts as received.
    fn reassemble(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        piece: &Frame<'_>,
        protection: Protection,
    ) -> Result<(Vec<u8>, usize), bool> {
        let reason = match self
            .reassembly
            .add(cx.now, &mut cx.shared.journal, piece, protection)
        {
            Assembled::Whole(bytes, header) => return Ok((bytes, header)),
            Assembled::Partly => return Err(true),
            Assembled::NoRoom => Counter::StoreFull,
            Assembled::Contradiction => Counter::PeerContradiction,
        };
        cx.shared.count(reason);
        Err(reason != Counter::StoreFull)
    }

    /// Hands a packet on that was not cut.
    pub(super) fn take_packet(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        bump: u8,
        bytes: &[u8],
        protection: Protection,
    ) {
        let refused = match self.judge(cx, bump, bytes, protection) {
            Ok((bump, packet)) => {
                return cx
                    .shared
                    .injector
                    .opaque(&mut cx.shared.pool, bump, &packet);
            }
            Err(reason) => reason,
        };
        cx.shared.count(refused);
    }

    /// The packet that `bytes` begin with and its bump, or why it is not to be handed on.
    fn judge<'a>(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        bump: u8,
        bytes: &'a [u8],
        protection: Protection,
    ) -> Result<(BumpId, Cow<'a, [u8]>), Counter> {
        let packet = packet::parse(bytes).map_err(|_| Counter::FrameMalformed)?;
        let bytes = bytes.get(..packet.own_len());
        let bytes = bytes.filter(|b| b.len() <= MAX_PACKET);
        let bytes = bytes.ok_or(Counter::FrameMalformed)?;
        let bumps = Arc::clone(&cx.shared.setup.bumps);
        let bump = bumps.named(bump).ok_or(Counter::BumpUnknown)?;
        if !protection.satisfies(bump) {
            return Err(Counter::CoverMissing);
        }
        let bytes = match &packet {
            Packet::Tcp(segment) => {
                let theirs = segment.tuple.reversed();
                if begins(segment.flags) {
                    names::begin(cx.flows, &theirs);
                }
                let ours = names::ours(cx, theirs)?;
                if ours != theirs {
                    // The answer has to find the name.
                    let key = self.conn(cx, ours, bump.number);
                    names::note(cx, key, theirs);
                }
                names::inward(bytes, segment, ours)
            }
            Packet::Opaque(opaque) => names::inward_error(cx, opaque, bytes)?,
        };
        let packet = packet::parse(&bytes).map_err(|_| Counter::FrameMalformed)?;
        if let Packet::Opaque(opaque) = &packet {
            if !(cx.hosts).may_reach(&cx.shared.setup, opaque.src, opaque.dst) {
                return Err(Counter::InnerAddress);
            }
            cx.hosts.may_come(&cx.shared.setup, opaque)?;
        }
        match cx.hosts.refuses_whole(&cx.shared.setup, &packet) {
            true => Err(Counter::ConnectionRefused),
            false => Ok((bump.number, bytes)),
        }
    }
}

/// True if a piece with this number is one of a packet that is carried whole.
const fn is_opaque(id: u32) -> bool {
    id.is_multiple_of(2)
}
