//! What the peer says in its datagrams: frames, whole and in pieces.

use dibs_core::bump;
use dibs_core::path::{AckFrame, SeqRange};
use dibs_wire::checksum::crc32c;
use dibs_wire::frame::{BASE_OFFSET, Chunk, EmptySegment, FlowId, Frame, Open, Share, TcpFields};
use dibs_wire::packet::IpMeta;
use dibs_wire::{SeqNumber, packet};

use super::encounter::{EFFORT, Encounter, MAX_BLOCK, encode, place, socket_of};
use crate::host::{BUMP, addr, inner, tuple};
use crate::input::Input;
use crate::traffic::{self, CONNS};

impl Encounter {
    /// A header block and payload that may be anything.
    pub(super) fn any_block(&mut self, input: &mut Input<'_>) {
        let (id, kind) = (self.some_path(input), input.u8());
        let (socket, from) = place(input);
        let header = input.block();
        let mut payload = pattern(input);
        payload.truncate(MAX_BLOCK - header.len());
        let (inside, bare) = (kind & 1 != 0, kind & 6 == 6);
        let sealed = self
            .attacker
            .seal(self.now, id, header, &payload, inside, bare);
        if let Some(mut datagram) = sealed {
            if kind & 0x18 == 0x18 {
                // Bits of the clear header, which only the tag protects.
                datagram[usize::from(kind >> 5)] ^= 1 << (kind >> 5);
            }
            self.deliver(socket, from, datagram);
        }
    }

    pub(super) fn some_frames(&mut self, input: &mut Input<'_>) {
        let id = self.some_path(input);
        let mut header = Vec::new();
        for _ in 0..=input.below(5) {
            self.frame(input, id, &mut header);
        }
        // What follows on the same frames, without an end of its own.
        if input.below(4) == 3 {
            header = header.repeat(1 + input.below(20));
        }
        header.truncate(MAX_BLOCK / 2);
        let mut payload = pattern(input);
        payload.truncate(MAX_BLOCK - header.len());
        self.sealed(id, &header, &payload);
    }

    fn frame(&mut self, input: &mut Input<'_>, id: u8, out: &mut Vec<u8>) {
        let (flow, incarnation, epoch) = self.chain(input);
        let memory = self.attacker.path(id);
        let challenge = if input.flag() {
            memory.challenge
        } else {
            input.array()
        };
        let nonce = if input.flag() {
            memory.nonce
        } else {
            input.array()
        };
        let trusted = input.flag();
        let kind = input.u8();
        let frame = match kind % 16 {
            _ if kind >= 250 => Frame::Share(Share {
                fleeting: input.flag(),
                bump: input.u8() % 5,
                set: input.small_or_any() as u32,
                index: input.u8() % 2,
                needed: 2,
                shares: 2 + input.u8() % 2,
            }),
            0 if trusted => Frame::Ping,
            0 => Frame::PingSpent,
            1 => Frame::Ack(input.block()),
            2 | 3 => {
                let offset = offset(input, BASE_OFFSET);
                let (bits, crc) = (input.u8(), input.u32());
                let (tcp, open) = (fields(input), self.open(input));
                Frame::Chunk(Chunk {
                    flow,
                    incarnation,
                    solo: bits & 1 != 0,
                    ahead: if bits & 1 != 0 { crc } else { 0 },
                    first: bits & 2 != 0,
                    detached: bits & 3 != 0 && bits & 4 != 0,
                    withheld: bits & 7 == 4,
                    epoch,
                    offset,
                    crc,
                    tcp,
                    open,
                })
            }
            4 | 5 => Frame::Segment(EmptySegment {
                flow,
                incarnation,
                seq: SeqNumber::new(input.u32()),
                tcp: fields(input),
                open: self.open(input),
            }),
            6 => Frame::Opaque {
                bump: input.u8() % 5,
                packet: input.block(),
            },
            7 => Frame::Fragment {
                id: u32::from(input.u8()),
                at: input.small_or_any() as u32,
                total: input.small_or_any() as u32,
                header: input.small_or_any() as u16,
                bytes: input.block(),
            },
            8 => Frame::Control {
                id: input.small_or_any() as u32,
                bytes: input.block(),
            },
            9 => Frame::FlowUnknown { flow, incarnation },
            10 => Frame::EpochBroken {
                flow,
                incarnation,
                epoch,
            },
            11 => Frame::PathJoin {
                nonce,
                trusted,
                to: addr(1, input.below(3)).ip(),
            },
            12 => Frame::PathAccept {
                nonce,
                challenge,
                trusted,
            },
            13 => Frame::PathConfirm { challenge },
            14 => Frame::PathChallenge { challenge },
            _ => Frame::PathResponse { challenge },
        };
        out.extend(encode(&[frame]));
    }

    /// A flow, incarnation and epoch: one of the attacker's, or one that the victim sends.
    fn chain(&self, input: &mut Input<'_>) -> (FlowId, u16, u32) {
        match input.u8() {
            200..=239 => self.attacker.heard,
            240.. => (
                FlowId::new(input.small_or_any() as u32),
                input.small_or_any() as u16,
                input.small_or_any() as u32,
            ),
            n => (
                FlowId::new(u32::from(n) % CONNS as u32),
                u16::from(n >> 6),
                u32::from(n >> 4 & 3),
            ),
        }
    }

    fn open(&self, input: &mut Input<'_>) -> Option<Open> {
        let kind = input.u8();
        if kind < 64 {
            return None;
        }
        let mut tuple = tuple(0, usize::from(kind) % CONNS);
        match kind {
            240..=247 => tuple = tuple.reversed(),
            248..=251 => tuple.dst = inner(0, tuple.dst.is_ipv6()),
            252.. => tuple.sport = input.u16(),
            _ => {}
        }
        Some(Open {
            bump: if kind & 0x30 == 0x30 {
                input.u8()
            } else {
                BUMP.get()
            },
            tuple,
            meta: meta(input),
            base_seq: SeqNumber::new(if kind & 1 == 0 { 1000 } else { input.u32() }),
            session: if kind == 255 {
                input.u64()
            } else {
                self.attacker.session()
            },
        })
    }

    /// A chunk that restores: its CRC is that of its plaintext.
    pub(super) fn chunk(&mut self, input: &mut Input<'_>) {
        let chain = self.chain(input);
        let id = self.paths[input.below(3)];
        let bits = input.u8();
        let solo = bits & 1 != 0;
        let next = &mut self.offsets[chain.0.get() as usize % CONNS];
        let offset = offset(input, *next);
        let plain = pattern(input);
        let tcp = fields(input);
        if !solo && offset == *next {
            *next += plain.len() as u64 + u64::from(tcp.flags & packet::flags::FIN != 0);
        }
        let first = !solo && (bits & 2 != 0 || offset == BASE_OFFSET);
        if first {
            self.attacker.restart_chain(chain);
        }
        let bytes = self
            .attacker
            .scramble(chain, solo.then_some(offset), &plain);
        let chunk = Chunk {
            flow: chain.0,
            incarnation: chain.1,
            solo,
            ahead: if solo { u32::from(bits) << 8 } else { 0 },
            first,
            detached: (solo || first) && bits & 4 != 0,
            withheld: !solo && !first && bits & 4 != 0,
            epoch: chain.2,
            offset,
            crc: crc32c(&plain) ^ u32::from(bits == 255),
            tcp,
            open: self.open(input),
        };
        let header = encode(&[Frame::Chunk(chunk)]);
        if bits & 0x78 == 0x78 || header.len() + bytes.len() > MAX_BLOCK {
            self.pieces(id, 2 * u32::from(bits) + 1, &header, &bytes, 1200);
            return;
        }
        let bare = bits & 0x18 == 0x18;
        let sealed = self
            .attacker
            .seal(self.now, id, &header, &bytes, false, bare);
        if let Some(datagram) = sealed {
            let socket = socket_of(id);
            self.deliver(socket, addr(0, socket), datagram);
        }
    }

    /// Two shares that fit together, of what may be anything.
    pub(super) fn shares(&mut self, input: &mut Input<'_>) {
        let mut header = Vec::new();
        for _ in 0..=input.below(4) {
            self.frame(input, self.paths[0], &mut header);
        }
        let mut payload = pattern(input);
        payload.truncate(600);
        header.truncate(600);
        let said = match input.u8() {
            0..=239 => payload.len() as u16,
            _ => input.u16(),
        };
        let whole = [&said.to_be_bytes()[..], &payload, &header].concat();
        let pad = input.u8();
        let other: Vec<u8> = whole.iter().map(|byte| byte ^ pad).collect();
        let set = input.small_or_any() as u32;
        for (index, share) in [vec![pad; whole.len()], other].iter().enumerate() {
            let frame = Frame::Share(Share {
                fleeting: input.u8() == 255,
                bump: bump::SHARE.get(),
                set,
                index: index as u8,
                needed: 2,
                shares: 2,
            });
            self.sealed(self.paths[index], &encode(&[frame]), share);
        }
    }

    /// Reports on what the victim sent by a path, true or not.
    pub(super) fn acknowledge(&mut self, input: &mut Input<'_>) {
        let id = self.paths[input.below(3)];
        let delay = input.small_or_any() as u32;
        let Some(seen) = self.attacker.path(id).seen else {
            return;
        };
        let mut ranges = Vec::new();
        let mut end = match input.u8() {
            0..=239 => Some(seen.saturating_sub(u64::from(input.u8() & 3))),
            _ => Some(seen.saturating_add(input.small_or_any())),
        };
        for _ in 0..=input.below(4) {
            let Some(last) = end else { break };
            let start = last.saturating_sub(input.small_or_any());
            ranges.push(SeqRange { start, end: last });
            end = start.checked_sub(2 + u64::from(input.u8() & 7));
        }
        let Some(ack) = AckFrame::new(delay, &ranges) else {
            return;
        };
        let mut body = Vec::new();
        ack.encode(&mut body);
        self.frames(id, &[Frame::Ack(&body)]);
    }

    /// An opaque packet, or what pretends to be one, in pieces.
    pub(super) fn fragments(&mut self, input: &mut Input<'_>) {
        let id = self.paths[input.below(2)];
        let number = input.small_or_any() as u32;
        let size = 64 + input.below(250) * 5;
        let packet = match input.u8() {
            0..=63 => {
                let mut packet = input.block().to_vec();
                packet.resize(packet.len() + usize::from(input.u16()) * 67_000 / 65_536, 0);
                packet
            }
            _ => traffic::opaque_frame(0, input)[10..].to_vec(),
        };
        let trailing = match input.u8() {
            0..=239 => 0,
            n => usize::from(n - 239) * 40,
        };
        let mut whole = [&[BUMP.get()][..], &packet].concat();
        whole.resize(whole.len() + trailing, 7);
        self.pieces(id, number, &[], &whole, size);
    }

    pub(super) fn pieces(
        &mut self,
        id: u8,
        number: u32,
        header: &[u8],
        payload: &[u8],
        size: usize,
    ) {
        let whole = [header, payload].concat();
        for (at, piece) in whole.chunks(size).enumerate() {
            if self.effort > EFFORT {
                return;
            }
            let fragment = Frame::Fragment {
                id: number,
                at: (at * size) as u32,
                total: whole.len() as u32,
                header: header.len() as u16,
                bytes: piece,
            };
            self.frames(id, &[fragment]);
        }
    }
}

/// Mostly near `next`.
fn offset(input: &mut Input<'_>, next: u64) -> u64 {
    match input.u8() {
        0..=159 => next,
        160..=199 => next.saturating_add(u64::from(input.u16())),
        200..=239 => next.saturating_sub(u64::from(input.u16())),
        240..=247 => u64::MAX - u64::from(input.u8()),
        _ => input.u64(),
    }
}

/// Payload of a length that the fuzzer chooses at little expense.
pub(super) fn pattern(input: &mut Input<'_>) -> Vec<u8> {
    let len = match input.u8() {
        0..=39 => 0,
        40..=139 => usize::from(input.u8()),
        140..=239 => usize::from(input.u16()) % 1400,
        // Longer than an IP packet, as only fragments can bring it.
        _ => usize::from(input.u16()) * 67_000 / 65_536,
    };
    let seed = input.u8();
    (0..len).map(|at| (at as u8).wrapping_mul(seed)).collect()
}

fn meta(input: &mut Input<'_>) -> IpMeta {
    IpMeta {
        tos: input.u8(),
        ttl: input.u8(),
        flow_label: u32::from(input.u16()),
    }
}

fn fields<'a>(input: &mut Input<'a>) -> TcpFields<'a> {
    let parts = input.u8();
    let flags = match input.u8() {
        0..=179 => packet::flags::ACK,
        n @ 180..=229 => packet::flags::ACK | u16::from(n) & 0xf,
        _ => input.u16() & 0x0fff,
    };
    let raw = if parts & 4 != 0 { input.block() } else { &[] };
    TcpFields {
        flags,
        window: 1000,
        ack: SeqNumber::new(if parts & 0x40 != 0 { input.u32() } else { 1000 }),
        timestamps: (parts & 1 != 0).then(|| (input.u32(), u32::from(input.u8()))),
        meta: (parts & 0x22 == 0x22).then(|| meta(input)),
        options: (parts & 4 != 0).then(|| &raw[..raw.len().min(40) / 4 * 4]),
        urgent: (parts & 0x18 == 0x18).then(|| input.u16()),
    }
}
