//! Datagrams without payload: what keeps paths, segments without payload, messages between the
//! daemons, packets that are not cut.

use std::collections::VecDeque;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, EmptySegment, Frame};

use super::super::flows::FlowTable;
use super::super::out::{Out, Source};
use super::super::paths::{Avoid, Choice, Link, Wanted};
use super::super::peer::Peer;
use super::run::padding;
use super::{CLEAR, SendCx, token};
use crate::chunk::{Content, Message, Pending, Placement};
use crate::counters::Counter;

use crate::node::peer::EmptyOut;
use crate::session::{OVERHEAD, Session};
use crate::slab::Key;
use crate::time::Time;

/// Length of an acknowledgement frame's content, at most.
const ACK_BYTES: usize = 300;
/// Length of the whole frame, at most.
pub(super) const MOST_ACK: usize = ACK_BYTES + frame::ACK_OVERHEAD;
/// A header block of segments without payload, at most: as long as any path takes. Nobody hears whether it
/// arrives, so nothing would show that a path takes less than it did.
pub(super) const LONGEST_PACK: usize = 1024 - OVERHEAD;

impl Peer {
    /// Frames that belong to one path: joining, probes, acknowledgements.
    pub(super) fn send_link_frames(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        // An acknowledgement goes along with segments that go that way anyhow.
        let carrier = match self.segments.is_empty() {
            true => None,
            false => self.quickest(cx.shared, Placement::Any),
        };
        for at in 0..self.paths.len() {
            let link = &mut self.paths[at];
            if !cx.shared.local[link.local].is_usable() {
                continue;
            }
            if let Some((to, challenge)) = link.poll_challenge(cx.now) {
                let mut block = [0; 16];
                let mut w = Writer::new(&mut block);
                frame::encode(&Frame::PathChallenge { challenge }, &mut w);
                let len = w.len();
                let out = self.finish(cx, at, &block[..len], false, 0)?;
                return Some(Out {
                    to,
                    ect: false,
                    ..out
                });
            }
            if link.is_open()
                && let Some(size) = link.path.poll_mtu_probe(cx.now)
            {
                return self.send_mtu_probe(cx, at, size);
            }
            let ack = link.is_open() && link.path.ack_due(cx.now) && carrier != Some(at);
            let probe = link.is_open() && link.probe;
            if link.frames.is_empty() && !probe && !ack {
                continue;
            }
            if !link.spend(OVERHEAD + link.frames.len()) {
                continue;
            }
            let mut block = std::mem::take(&mut link.frames);
            if link.is_open() {
                put_ack(cx.now, link, &mut block);
            }
            if probe {
                link.probe = false;
                block.push(frame::PING);
            }
            if block.is_empty() {
                self.paths[at].frames = block;
                continue;
            }
            let out = self.finish(cx, at, &block, probe, 0);
            block.clear();
            self.paths[at].frames = block;
            return out;
        }
        None
    }

    fn send_mtu_probe(&mut self, cx: &mut SendCx<'_>, at: usize, size: u16) -> Option<Out> {
        let link = &mut self.paths[at];
        let len = usize::from(size);
        cx.shared.scratch.datagrams.clear();
        // A ping, and padding, which is zero.
        cx.shared.scratch.datagrams.resize(len, 0);
        cx.shared.scratch.datagrams[CLEAR] = frame::PING;
        let seq = link.path.on_mtu_probe_sent(cx.now, size);
        if cx
            .session
            .seal(
                &mut cx.shared.scratch.datagrams,
                link.id,
                seq,
                len - OVERHEAD,
                false,
            )
            .is_err()
        {
            cx.shared.count(Counter::KeysExhausted);
            return None;
        }
        Some(Out::by(link, len, Source::Scratch))
    }

    /// TCP segments without payload, as many as may go in one datagram, and notices.
    pub(super) fn send_segments(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        if self.segments.is_empty() && self.notices.is_empty() {
            return None;
        }
        let at = self.quickest(cx.shared, Placement::Any)?;
        let mut block = std::mem::take(&mut self.notices);
        let mut padded = false;
        let bumps = &cx.shared.bumps;
        let (conns, queue) = (&mut self.flows, &mut self.segments);
        let opened = pack_segments(conns, queue, cx.session, LONGEST_PACK, &mut block, |bump| {
            padded |= bumps.of(bump).is_padded();
            true
        });
        if block.is_empty() {
            return None;
        }
        // An opening asks for an acknowledgement, so that it need not be repeated for ever.
        let key = opened.map(|(conn, incarnation)| {
            self.in_flight.add(
                Content::Opened {
                    conn,
                    incarnation,
                    set: None,
                },
                Placement::Any,
            )
        });
        if block.len() + MOST_ACK <= LONGEST_PACK {
            put_ack(cx.now, &mut self.paths[at], &mut block);
        }
        let proof =
            key.is_none() && block.len() < LONGEST_PACK && self.paths[at].path.wants_proof(cx.now);
        if proof {
            block.push(frame::PING);
        }
        if padded {
            pad(&mut block, LONGEST_PACK);
        }
        let eliciting = proof || key.is_some();
        let out = self.finish(cx, at, &block, eliciting, key.map_or(0, token));
        block.clear();
        self.notices = block;
        out
    }

    /// Messages between the daemons: reliable, by trusted paths.
    pub(super) fn send_control(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        if !self.messages.is_due() {
            return None;
        }
        let at = self.quickest(cx.shared, Placement::TrustedOnly)?;
        let key = self.in_flight.add_message(self.messages.pop()?);
        self.transmit_message(cx, at, key)
    }

    pub(super) fn transmit_message(
        &mut self,
        cx: &mut SendCx<'_>,
        at: usize,
        key: Key,
    ) -> Option<Out> {
        let Some(Pending {
            content: Content::Control(message),
            ..
        }) = self.in_flight.get(key)
        else {
            return None;
        };
        let Message { id, bytes } = self.in_flight.message(*message);
        let mut block = vec![0; frame::CONTROL_OVERHEAD + bytes.len()];
        frame::encode(
            &Frame::Control { id: *id, bytes },
            &mut Writer::new(&mut block),
        );
        self.finish(cx, at, &block, true, token(key))
    }

    /// A packet that is not cut, or its next piece: by a trusted path unless its bump encrypts it.
    pub(super) fn send_opaque(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        self.send_opaque_by(cx, Placement::TrustedOnly)
            .or_else(|| self.send_opaque_by(cx, Placement::Any))
    }

    fn send_opaque_by(&mut self, cx: &mut SendCx<'_>, placement: Placement) -> Option<Out> {
        let queue = match placement {
            Placement::Any => &mut self.opaque.sealed,
            _ => &mut self.opaque.plain,
        };
        let head = queue.head()?;
        let wanted = head.packet.len() - head.at + OVERHEAD;
        let wanted = Wanted::alone(placement, wanted, Avoid::Nothing);
        let choice = self.paths.choose(cx.shared, cx.now, &wanted);
        let at = match choice {
            Choice::Send { link, .. } => link,
            Choice::Wait(at) => {
                self.paths.wait_until(at);
                return None;
            }
            Choice::Nobody => return None,
        };
        let room = usize::from(self.paths[at].path.mtu()) - OVERHEAD;
        let padded = cx.shared.bumps.of(head.bump).is_padded();
        let (mut block, taken) = head.block(room);
        queue.consume(taken);
        if padded {
            pad(&mut block, room);
        }
        self.finish(cx, at, &block, true, 0)
    }
}

/// Moves segments without payload from a queue into a header block of at most `room` bytes, as long as
/// `fits` says so of their bumps. One that opens its flow goes alone: that connection and incarnation.
pub(super) fn pack_segments(
    conns: &mut FlowTable,
    queue: &mut VecDeque<EmptyOut>,
    session: &Session,
    room: usize,
    block: &mut Vec<u8>,
    mut fits: impl FnMut(u8) -> bool,
) -> Option<(Key, u16)> {
    while let Some(head) = queue.front() {
        let Some(conn) = conns.get_mut(head.conn) else {
            queue.pop_front();
            continue;
        };
        if conn.out.secrets.is_none() {
            // The peer forgot the flow since this was queued.
            conn.open(session.epoch_secrets().clone(), conn.out.meta);
            conn.out.stream.begin_at(head.seq);
        }
        let tcp = head.tcp.get();
        let open = conn.open_frame();
        let len = frame::segment_len(&tcp, open.as_ref());
        let alone = open.is_some() && !block.is_empty();
        if block.len() + len > room || alone || !fits(conn.bump) {
            break;
        }
        let frame = EmptySegment {
            flow: conn.out.flow,
            incarnation: conn.out.stream.incarnation(),
            seq: head.seq,
            tcp,
            open,
        };
        let start = block.len();
        block.resize(start + len, 0);
        frame.encode(&mut Writer::new(&mut block[start..]));
        let opened = open.map(|_| (head.conn, frame.incarnation));
        queue.pop_front();
        if opened.is_some() {
            return opened;
        }
    }
    None
}

/// Brings a header block that is sent alone to one of the lengths that an observer may see.
pub(super) fn pad(block: &mut Vec<u8>, room: usize) {
    let len = block.len() + OVERHEAD;
    block.resize(block.len() + padding(len, room + OVERHEAD), 0);
}

/// Appends an acknowledgement frame, if there is anything to acknowledge.
pub(super) fn put_ack(now: Time, link: &mut Link, block: &mut Vec<u8>) {
    let start = block.len();
    block.extend_from_slice(&[frame::ACK, 0, 0]);
    if link.path.encode_ack(now, ACK_BYTES, block) {
        let len = (block.len() - start - 3) as u16;
        block[start + 1..start + 3].copy_from_slice(&len.to_be_bytes());
    } else {
        block.truncate(start);
    }
}
