//! Builds the packets that go into the TUN: restored pieces that follow each other become one
//! superpacket.

use std::collections::VecDeque;

use dibs_settings::BumpId;
use dibs_wire::emit::MAX_HEADERS;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::{FlowKey, IpMeta, flags};
use dibs_wire::{SeqNumber, virtio};
use smallvec::SmallVec;

use super::tsval_floor::TsvalFloor;
use crate::buffer::{Buffer, Pool};
use crate::tcp_fields::{OwnedFields, headers};

/// Most bytes of an IP packet, superpackets included.
pub(crate) const MAX_PACKET: usize = 65535;

/// A packet ready for a TUN.
#[derive(Debug)]
pub struct Injection {
    /// The bump whose TUN it goes to.
    pub bump: BumpId,
    buffer: Buffer,
    start: usize,
    end: usize,
}

impl Injection {
    /// Virtio header and packet.
    pub fn frame(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }
}

/// Fields that all packets of a direction of a connection share.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    /// The bump.
    pub bump: BumpId,
    /// Addresses and ports.
    pub tuple: FlowKey,
    /// IP fields unless a piece says otherwise.
    pub meta: IpMeta,
}

impl Template {
    /// True if a packet with these fields and `len` bytes of payload is none too long.
    pub fn fits(&self, tcp: &TcpFields<'_>, len: usize) -> bool {
        headers(self.tuple, self.meta, SeqNumber::default(), tcp).encoded_len() - virtio::LEN + len
            <= MAX_PACKET
    }
}

#[derive(Debug)]
struct Building {
    template: Template,
    /// Names the connection: pieces of another one do not join.
    owner: u64,
    seq: SeqNumber,
    fields: OwnedFields,
    /// Payload of the first piece, which all but the last must have.
    piece: usize,
    len: usize,
    pieces: usize,
    last: usize,
    closed: bool,
    buffer: Buffer,
}

/// Collects what is to be injected.
#[derive(Debug, Default)]
pub struct Injector {
    building: Option<Building>,
    done: VecDeque<Injection>,
}

/// Payload begins here in every buffer, so that it can be written before the headers are known.
const PAYLOAD_AT: usize = MAX_HEADERS;

impl Injector {
    /// Room for a piece of `len` bytes; it joins the superpacket being built where it can. The piece
    /// counts from now on, see [`retract`](Self::retract). `floor` is the connection's lowest TSval
    /// and is raised.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call a piece, each value from elsewhere"
    )]
    pub fn room(
        &mut self,
        pool: &mut Pool,
        owner: u64,
        template: Template,
        seq: SeqNumber,
        tcp: &TcpFields<'_>,
        floor: &mut TsvalFloor,
        len: usize,
    ) -> &mut [u8] {
        let mut scratch = SmallVec::new();
        let mut changed;
        let tcp = match tcp.timestamps {
            // As nearly always: nothing to copy.
            Some((val, _)) if floor.admits(val) => {
                floor.raise(val);
                tcp
            }
            _ => {
                changed = *tcp;
                floor.hold(&mut changed, &mut scratch);
                &changed
            }
        };
        if !self
            .building
            .as_ref()
            .is_some_and(|b| b.takes(owner, template.bump, seq, tcp, len))
        {
            self.flush();
            self.building = Some(Building {
                template,
                owner,
                seq,
                fields: OwnedFields::new(tcp),
                piece: len,
                len: 0,
                pieces: 0,
                last: 0,
                closed: false,
                buffer: pool.take(),
            });
        }
        let b = self.building.as_mut().expect("it was just made");
        if b.pieces > 0 {
            b.fields.merge_last(tcp.flags);
        }
        b.closed = len != b.piece || tcp.flags & (flags::PSH | flags::FIN | flags::URG) != 0;
        b.last = len;
        b.pieces += 1;
        b.len += len;
        let end = PAYLOAD_AT + b.len;
        &mut b.buffer[end - len..end]
    }

    /// Takes the last piece back: its bytes are not valid. What was built before it is finished.
    pub fn retract(&mut self, pool: &mut Pool) {
        let b = self
            .building
            .as_mut()
            .expect("a piece is taken back right after it was added");
        b.len -= b.last;
        b.pieces -= 1;
        if b.pieces == 0 {
            let b = self.building.take().expect("it was just seen");
            pool.give(b.buffer);
        } else {
            // The flags were merged; a PSH too many is harmless and FIN cannot have been.
            b.fields.clear_fin();
            self.flush();
        }
    }

    /// Adds a segment without payload, behind everything added so far.
    pub fn empty_segment(
        &mut self,
        pool: &mut Pool,
        template: Template,
        seq: SeqNumber,
        tcp: &TcpFields<'_>,
        floor: &mut TsvalFloor,
    ) {
        self.flush();
        let mut tcp = *tcp;
        let mut scratch = SmallVec::new();
        floor.hold(&mut tcp, &mut scratch);
        let mut buffer = pool.take_for(PAYLOAD_AT);
        let headers = headers(template.tuple, template.meta, seq, &tcp);
        let start = PAYLOAD_AT - headers.encoded_len();
        headers.write(&mut buffer[start..PAYLOAD_AT], 0, 0);
        self.done.push_back(Injection {
            bump: template.bump,
            buffer,
            start,
            end: PAYLOAD_AT,
        });
    }

    /// Adds a whole packet as it is; its checksums are its own.
    pub fn opaque(&mut self, pool: &mut Pool, bump: BumpId, packet: &[u8]) {
        self.flush();
        let end = virtio::LEN + packet.len();
        let mut buffer = pool.take_for(end);
        buffer[..virtio::LEN].fill(0);
        buffer[virtio::LEN..end].copy_from_slice(packet);
        self.done.push_back(Injection {
            bump,
            buffer,
            start: 0,
            end,
        });
    }

    /// Finishes the superpacket being built.
    pub fn flush(&mut self) {
        let Some(mut b) = self.building.take() else {
            return;
        };
        let tcp = b.fields.get();
        let headers = headers(b.template.tuple, b.template.meta, b.seq, &tcp);
        let start = PAYLOAD_AT - headers.encoded_len();
        let gso = if b.pieces > 1 { b.piece as u16 } else { 0 };
        headers.write(&mut b.buffer[start..PAYLOAD_AT], b.len, gso);
        let end = PAYLOAD_AT + b.len;
        self.done.push_back(Injection {
            bump: b.template.bump,
            buffer: b.buffer,
            start,
            end,
        });
    }

    /// The next packet for a TUN.
    pub fn pop(&mut self) -> Option<Injection> {
        self.done.pop_front()
    }

    /// Gives the buffer of an injected packet back.
    pub fn recycle(pool: &mut Pool, injection: Injection) {
        pool.give(injection.buffer);
    }

    /// True if nothing waits.
    pub fn is_empty(&self) -> bool {
        self.done.is_empty() && self.building.is_none()
    }
}

impl Building {
    fn takes(
        &self,
        owner: u64,
        bump: BumpId,
        seq: SeqNumber,
        tcp: &TcpFields<'_>,
        len: usize,
    ) -> bool {
        // SYN, RST, URG and CWR stand on a segment of their own or on a first one.
        let mergeable = tcp.flags & !(flags::PSH | flags::FIN | flags::ACK | flags::ECE) == 0;
        !self.closed
            && self.owner == owner
            && self.template.bump == bump
            && mergeable
            && len > 0
            && len <= self.piece
            && self.seq.add(self.len as u32) == seq
            && self.fields.joins(tcp)
            && PAYLOAD_AT - virtio::LEN + self.len + len <= MAX_PACKET
    }
}

#[cfg(test)]
mod tests;
