//! What the peer's kernel sent, by itself or put together of shares.

use std::sync::Arc;

use dibs_wire::frame::{EmptySegment, Frame, Frames, Share};
use dibs_wire::packet::{self, Packet, flags};
use smallvec::SmallVec;

use super::streams::is_for_us;
use crate::bump::{Bump, Method};
use crate::counters::Counter;
use crate::flow::echo_filter::{self};
use crate::flow::inject::MAX_PACKET;
use crate::node::opaque::{Assembled, Fragment};
use crate::node::peer::Peer;
use crate::node::sets::Added;
use crate::node::shared::Shared;
use crate::time::Time;

/// What protected the bytes of a chunk on their way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::node) enum Protection {
    /// Nothing: whoever was on the path may have made them.
    None,
    /// They were seen, not changed.
    Authentic,
    /// They were not seen either.
    Encrypted,
    /// They were put together of what several paths carried, for this bump.
    Split(u8),
}

impl Protection {
    /// Whether a flow of this bump may have bytes that came like this: never less than it promises.
    pub(super) fn satisfies(self, bump: &Bump) -> bool {
        match bump.method {
            Method::Chain(_) => true,
            Method::Seal(_) => self == Self::Encrypted,
            Method::Split(_) => self == Self::Split(bump.number),
        }
    }
}

impl Peer {
    /// Takes what the peer's kernel sent, other than a chunk.
    pub(super) fn take_inner(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        frame: &Frame<'_>,
        protection: Protection,
    ) -> bool {
        match *frame {
            Frame::Segment(ref segment) => self.take_empty(now, shared, segment, protection),
            Frame::Opaque { bump, packet } => {
                self.take_packet(shared, bump, packet, protection);
                true
            }
            Frame::Fragment {
                id,
                at,
                total,
                header,
                bytes,
            } => {
                let fragment = Fragment {
                    id,
                    at,
                    total,
                    header,
                    bytes,
                };
                self.take_fragment(now, shared, path, &fragment, protection)
            }
            _ => {
                shared.count(Counter::PeerContradiction);
                true
            }
        }
    }

    /// Takes a share; false if it counts as not received.
    pub(super) fn take_share(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        share: &Share,
        bytes: &[u8],
    ) -> bool {
        let bumps = Arc::clone(&shared.bumps);
        let Some(split) = bumps.get(share.bump).and_then(Bump::split) else {
            shared.count(Counter::BumpUnknown);
            return true;
        };
        if (share.needed, share.shares) != (split.needed(), split.shares()) {
            shared.count(Counter::ShareMismatch);
            return true;
        }
        let mut whole = std::mem::take(&mut shared.scratch.joined);
        let number = (share.set, share.index);
        let taken = match self.sets.add(now, split, number, bytes, &mut whole) {
            Added::Partly => true,
            Added::Whole(set) => {
                let taken = self.take_whole(now, shared, path, share.bump, &whole);
                if taken {
                    self.sets.finish(set);
                }
                taken
            }
            Added::Late => {
                shared.count(Counter::ShareLate);
                true
            }
            Added::NoRoom => {
                shared.count(Counter::StoreFull);
                false
            }
            Added::Contradiction => {
                shared.count(Counter::PeerContradiction);
                true
            }
        };
        shared.scratch.joined = whole;
        taken
    }

    /// Takes what was put together: the length of a payload, the payload, a header block.
    pub(super) fn take_whole(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        bump: u8,
        whole: &[u8],
    ) -> bool {
        let protection = Protection::Split(bump);
        let parts = whole
            .split_first_chunk()
            .and_then(|(len, rest)| rest.split_at_checked(usize::from(u16::from_be_bytes(*len))));
        let Some((payload, block)) = parts else {
            shared.count(Counter::FrameMalformed);
            return true;
        };
        let mut payload = Some(payload);
        let mut taken = true;
        for frame in Frames::new(block) {
            taken &= match (&frame, payload) {
                (Ok(Frame::Chunk(chunk)), Some(bytes)) => {
                    payload = None;
                    self.take_chunk(now, shared, path, chunk, (bytes, protection))
                }
                (Ok(Frame::Chunk(_)) | Err(_), _) => {
                    shared.count(Counter::FrameMalformed);
                    true
                }
                (Ok(frame), _) => self.take_inner(now, shared, path, frame, protection),
            };
        }
        taken
    }

    /// Takes a segment without payload; false if it counts as not received.
    pub(super) fn take_empty(
        &mut self,
        now: Time,
        shared: &mut Shared,
        segment: &EmptySegment<'_>,
        protection: Protection,
    ) -> bool {
        let EmptySegment {
            flow,
            incarnation,
            seq,
            tcp,
            open,
        } = segment;
        let before = { self.flows.by_peers_number(*flow) }.and_then(|key| self.flows.get(key));
        let before = before.and_then(|conn| Some(conn.inc.as_ref()?.incarnation));
        let key = match self.incoming_conn(now, shared, *flow, *incarnation, open.as_ref()) {
            Ok(key) => key,
            Err(taken) => return taken,
        };
        if tcp.flags & flags::SYN != 0 && before != Some(*incarnation) {
            self.flows.forget_floor(key, tcp);
        }
        if self.hosts.refuses(shared, self.flows.get(key), tcp.flags) {
            shared.count(Counter::ConnectionRefused);
            return true;
        }
        let conn = self.flows.get_mut(key).expect("it was just found");
        if !protection.satisfies(shared.bumps.of(conn.bump)) {
            shared.count(Counter::CoverMissing);
            return true;
        }
        conn.last_seen = now;
        let inc = conn
            .inc
            .as_mut()
            .expect("an incoming flow leads to its connection");
        let mut tcp = *tcp;
        let mut scratch = SmallVec::new();
        // An old one is handed on as it is: TCP counts repetitions of the latest.
        inc.ack_floor.hear(&tcp, conn.sent_end);
        echo_filter::adapt(&mut conn.echo_filter, now, &mut tcp, &mut scratch);
        if let Some(clamp) = &mut conn.clamp {
            clamp.limit(&mut tcp);
        }
        let floor = &mut conn.tsval_floor;
        shared
            .injector
            .empty_segment(&mut shared.pool, inc.template, *seq, &tcp, floor);
        true
    }

    /// Takes a packet that was not cut.
    pub(super) fn take_packet(
        &mut self,
        shared: &mut Shared,
        bump: u8,
        bytes: &[u8],
        protection: Protection,
    ) {
        let Ok(packet) = packet::parse(bytes) else {
            return shared.count(Counter::FrameMalformed);
        };
        let Some(bytes) = bytes
            .get(..packet.own_len())
            .filter(|b| b.len() <= MAX_PACKET)
        else {
            return shared.count(Counter::FrameMalformed);
        };
        let (src, dst, passes) = match packet {
            Packet::Tcp(s) => (s.tuple.src, s.tuple.dst, Ok(())),
            Packet::Opaque(o) => (o.src, o.dst, self.hosts.may_come(shared, &o)),
        };
        let Some(carried) = shared.bumps.get(bump) else {
            return shared.count(Counter::BumpUnknown);
        };
        if !protection.satisfies(carried) {
            return shared.count(Counter::CoverMissing);
        }
        if !self.hosts.speaks_for(shared, src) || !is_for_us(shared, dst) {
            return shared.count(Counter::InnerAddress);
        }
        if let Err(reason) = passes {
            return shared.count(reason);
        }
        if self.hosts.refuses_whole(shared, &packet) {
            return shared.count(Counter::ConnectionRefused);
        }
        shared.injector.opaque(&mut shared.pool, bump, bytes);
    }

    /// Takes a piece of an opaque packet or of a chunk.
    pub(super) fn take_fragment(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        fragment: &Fragment<'_>,
        protection: Protection,
    ) -> bool {
        let opaque = fragment.id.is_multiple_of(2);
        if !opaque && matches!(protection, Protection::Split(_)) {
            // What is split is cut beforehand, or its shares are.
            shared.count(Counter::PeerContradiction);
            return true;
        }
        let mut reassembly = std::mem::take(&mut self.reassembly);
        let assembled = reassembly.add(now, shared, fragment, protection);
        self.reassembly = reassembly;
        match assembled {
            Assembled::Partly => true,
            Assembled::NoRoom => {
                shared.count(Counter::StoreFull);
                false
            }
            Assembled::Contradiction => {
                shared.count(Counter::PeerContradiction);
                true
            }
            Assembled::Whole(bytes, _) if opaque => {
                if let Some((&bump, packet)) = bytes.split_first() {
                    self.take_packet(shared, bump, packet, protection);
                }
                true
            }
            Assembled::Whole(bytes, header) => {
                let (block, payload) = bytes.split_at(header);
                match Frames::new(block).next() {
                    Some(Ok(Frame::Share(share))) => {
                        self.take_share(now, shared, path, &share, payload)
                    }
                    Some(Ok(Frame::Chunk(chunk))) => {
                        self.take_chunk(now, shared, path, &chunk, (payload, protection))
                    }
                    _ => {
                        shared.count(Counter::FrameMalformed);
                        true
                    }
                }
            }
        }
    }
}
