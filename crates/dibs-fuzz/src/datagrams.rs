//! A node, its kernel, and a peer with valid keys that says whatever it likes.

use std::net::SocketAddr;
use std::time::Duration;

use dibs_core::path::{AckFrame, SeqRange};
use dibs_core::session::{Hello, Integrity, PublicKey};
use dibs_core::{Time, bump};
use dibs_wire::bytes::Writer;
use dibs_wire::checksum::crc32c;
use dibs_wire::frame::{self, BASE_OFFSET, Chunk, EmptySegment, Frame, Open, Share, TcpFields};
use dibs_wire::packet::IpMeta;
use dibs_wire::{SeqNumber, packet};

use crate::attacker::{Attacker, hello};
use crate::host::{BUMP, Host, Outputs, addr, inner, key, tuple};
use crate::input::Input;
use crate::traffic::{self, CONNS, Kernel};

/// Operations of one input.
const OPERATIONS: usize = 64;
/// Bytes that one input may send or make, so that none is slow.
const EFFORT: usize = 2 << 20;
/// What a datagram costs beside its bytes.
const EACH: usize = 2048;
/// What a handshake message does, which takes far longer than another datagram.
const HANDSHAKE: usize = 16 * 1024;
/// Header block and payload of the longest UDP datagram.
const MAX_BLOCK: usize = 65_507 - dibs_core::session::OVERHEAD;
/// Datagrams that may be sent again.
const KEPT: usize = 64;

struct World {
    now: Time,
    victim: Host,
    kernel: Kernel,
    attacker: Attacker,
    /// Path ids that frames are usually about: three of the attacker, which come first, two of the
    /// victim, and one more. They take turns with the sockets.
    paths: [u8; 6],
    /// Socket and source of every datagram, for repeating.
    sent: Vec<(usize, SocketAddr, Vec<u8>)>,
    /// Where the attacker's chains stand, by flow.
    offsets: [u64; CONNS],
    effort: usize,
}

/// The first byte sets the scene; operations follow.
pub fn datagrams(data: &[u8]) {
    let mut input = Input::new(data);
    let mut world = World::new(input.u8());
    input.each(OPERATIONS, |input| {
        world.step(input);
        world.settle();
        world.victim.check_bounds(world.now);
        world.effort <= EFFORT
    });
}

/// What a datagram takes.
fn cost(datagram: &[u8]) -> usize {
    let each = match datagram.first() {
        Some(1 | 2) => HANDSHAKE,
        _ => EACH,
    };
    each + datagram.len()
}

impl World {
    fn new(scene: u8) -> Self {
        let integrity = if scene & 1 == 0 {
            Integrity::On
        } else {
            Integrity::Off
        };
        let now = Time::ZERO + Duration::from_secs(1);
        let mut world = Self {
            now,
            victim: Host::new(1, scene & 2 != 0, integrity, 2),
            kernel: Kernel::new(1),
            attacker: Attacker::new(now, integrity, scene & 4 != 0),
            paths: if has_smaller_key() {
                [0, 2, 4, 1, 3, 255]
            } else {
                [1, 3, 5, 0, 2, 254]
            },
            sent: Vec::new(),
            offsets: [BASE_OFFSET; CONNS],
            effort: 0,
        };
        if scene & 2 == 0 {
            let call = world.attacker.call(now);
            world.deliver(0, addr(0, 0), call);
        }
        world.settle();
        // A call, its answer, the first questions for paths.
        for _ in 0..3 {
            world.wait(Duration::ZERO);
        }
        if scene & 8 == 0 {
            for (socket, trusted) in [(0, true), (1, false)] {
                world.open_path(socket, trusted, scene & 2 != 0);
            }
            let paths = world.victim.node.paths();
            let open = paths.iter().filter(|p| p.state == "active").count();
            assert_eq!(open, 2, "{paths:?}");
        }
        world
    }

    /// Does what an honest peer would do so that a path is open.
    fn open_path(&mut self, socket: usize, trusted: bool, victim_calls: bool) {
        if victim_calls {
            let id = self.paths[3 + socket];
            let nonce = self.attacker.path(id).nonce;
            let challenge = [5; 8];
            self.frames(
                id,
                &[Frame::PathAccept {
                    nonce,
                    challenge,
                    trusted,
                }],
            );
        } else {
            let (id, nonce) = (self.paths[socket], [1; 8]);
            let to = addr(1, socket).ip();
            self.frames(id, &[Frame::PathJoin { nonce, trusted, to }]);
            self.wait(Duration::ZERO);
            let challenge = self.attacker.path(id).challenge;
            self.frames(id, &[Frame::PathConfirm { challenge }]);
        }
        self.settle();
    }

    fn some_path(&self, input: &mut Input<'_>) -> u8 {
        self.paths[input.below(self.paths.len())]
    }

    /// Lets the attacker hear what the victim says.
    fn settle(&mut self) {
        // An answer to a call may lead to one more.
        for _ in 0..4 {
            let out = self.victim.outputs(self.now);
            if !self.hear(out) {
                return;
            }
        }
    }

    /// Whether something was answered.
    fn hear(&mut self, out: Outputs) -> bool {
        for frame in &out.frames {
            self.effort += frame.len();
            if let Ok(packet::Packet::Tcp(segment)) = packet::parse(&frame[10..]) {
                self.kernel.take(&segment);
            }
        }
        let mut answered = false;
        for (path, _, datagram) in out.datagrams {
            self.effort += cost(&datagram);
            if let Some(reply) = self.attacker.take(self.now, datagram) {
                self.deliver(path, addr(0, path), reply);
                answered = true;
            }
        }
        answered
    }

    fn deliver(&mut self, socket: usize, from: SocketAddr, mut datagram: Vec<u8>) {
        self.effort += cost(&datagram);
        if self.sent.len() == KEPT {
            self.sent.remove(0);
        }
        self.sent.push((socket, from, datagram.clone()));
        self.victim
            .node
            .handle_datagram(self.now, socket, from, &mut datagram);
    }

    /// Seals and delivers by the socket that the path id stands for.
    fn sealed(&mut self, id: u8, header: &[u8], payload: &[u8]) {
        let datagram = self
            .attacker
            .seal(self.now, id, header, payload, false, false);
        if let Some(datagram) = datagram {
            let socket = socket_of(id);
            self.deliver(socket, addr(0, socket), datagram);
        }
    }

    fn frames(&mut self, id: u8, frames: &[Frame<'_>]) {
        self.sealed(id, &encode(frames), &[]);
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let kind = input.u8();
        if kind >= 250 {
            return self.shares(input);
        }
        match kind % 20 {
            0 => {
                let (socket, from) = place(input);
                let bytes = input.block().to_vec();
                self.deliver(socket, from, bytes);
            }
            1 => self.any_block(input),
            2..=4 => self.some_frames(input),
            5..=7 => self.chunk(input),
            8 => self.acknowledge(input),
            9 => self.fragments(input),
            10 | 11 => {
                let frame = self.kernel.segment(input);
                self.tun(&frame);
            }
            12 => {
                let frame = traffic::raw_frame(input);
                self.tun(&frame);
            }
            13 => {
                let frame = traffic::opaque_frame(1, input);
                self.tun(&frame);
            }
            14 => {
                let millis = match input.u8() {
                    250.. => u64::from(input.u16()) * 10,
                    n => u64::from(n),
                };
                self.wait(Duration::from_millis(millis));
            }
            15 => {
                for _ in 0..=input.below(16) {
                    let Some(due) = self.victim.node.poll_timeout() else {
                        break;
                    };
                    self.wait(due.since(self.now));
                }
            }
            16 => self.shake_hands(input),
            17 => self.command(input),
            18 => self.again(input),
            _ => self.answer(input),
        }
    }

    fn tun(&mut self, frame: &[u8]) {
        self.effort += frame.len();
        self.victim.hand_tun(self.now, frame);
    }

    fn wait(&mut self, span: Duration) {
        self.now += span;
        self.settle();
        let mut heard = Vec::new();
        self.victim.timeouts(self.now, |out| heard.push(out));
        for out in heard {
            self.hear(out);
        }
    }

    /// A header block and payload that may be anything.
    fn any_block(&mut self, input: &mut Input<'_>) {
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

    fn some_frames(&mut self, input: &mut Input<'_>) {
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
            0 => Frame::Ping,
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
    fn chain(&self, input: &mut Input<'_>) -> (u32, u16, u32) {
        match input.u8() {
            200..=239 => self.attacker.heard,
            240.. => (
                input.small_or_any() as u32,
                input.small_or_any() as u16,
                input.small_or_any() as u32,
            ),
            n => (
                u32::from(n) % CONNS as u32,
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
                BUMP
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
    fn chunk(&mut self, input: &mut Input<'_>) {
        let chain = self.chain(input);
        let id = self.paths[input.below(3)];
        let bits = input.u8();
        let solo = bits & 1 != 0;
        let next = &mut self.offsets[chain.0 as usize % CONNS];
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
    fn shares(&mut self, input: &mut Input<'_>) {
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
                bump: bump::SHARE,
                set,
                index: index as u8,
                needed: 2,
                shares: 2,
            });
            self.sealed(self.paths[index], &encode(&[frame]), share);
        }
    }

    /// Reports on what the victim sent by a path, true or not.
    fn acknowledge(&mut self, input: &mut Input<'_>) {
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
    fn fragments(&mut self, input: &mut Input<'_>) {
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
        let mut whole = [&[BUMP][..], &packet].concat();
        whole.resize(whole.len() + trailing, 7);
        self.pieces(id, number, &[], &whole, size);
    }

    fn pieces(&mut self, id: u8, number: u32, header: &[u8], payload: &[u8], size: usize) {
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

    fn shake_hands(&mut self, input: &mut Input<'_>) {
        let said = match input.u8() {
            0..=199 => hello(1, input.small_or_any() as u32),
            200..=229 => hello(input.small_or_any(), 32 << 10),
            _ => input.block().to_vec(),
        };
        self.attacker.hello = Hello::new(said).unwrap_or_default();
        let call = self.attacker.call(self.now);
        let (socket, from) = place(input);
        self.deliver(socket, from, call);
    }

    /// What the victim's owner may ask of it.
    fn command(&mut self, input: &mut Input<'_>) {
        let (now, conn) = (self.now, tuple(1, input.below(CONNS)));
        let node = &mut self.victim.node;
        match input.u8() % 7 {
            0 => {
                let _ = node.send_control(now, 0, input.block());
            }
            1 => node.drain(now, BUMP, conn, input.u8()),
            2 => node.end_drain(BUMP, conn),
            // The interfaces' MTU only shrinks in appearance: outputs are held to the largest.
            3 => node.set_path(
                now,
                input.below(2),
                input.flag(),
                1280 + u16::from(input.u8()) % 221,
            ),
            4 => node.datagram_too_big(now, input.below(2), usize::from(input.u16())),
            5 => {
                let ipv6 = input.flag();
                node.set_addresses(if input.flag() {
                    vec![inner(1, false), inner(1, true)]
                } else {
                    vec![inner(1, ipv6)]
                });
            }
            _ => {
                let id = self.some_path(input);
                let numbers = input.small_or_any();
                self.attacker.skip(id, numbers);
            }
        }
    }

    /// An earlier datagram, as it was or changed, from where it came or from elsewhere.
    fn again(&mut self, input: &mut Input<'_>) {
        let back = 1 + usize::from(input.u8());
        let Some(at) = self.sent.len().checked_sub(back) else {
            return;
        };
        let (socket, from, mut datagram) = self.sent[at].clone();
        let (other, place) = (input.below(4), place(input));
        if other == 1 && !datagram.is_empty() {
            let at = usize::from(input.u16()) % datagram.len();
            datagram[at] ^= input.u8();
        }
        if other == 2 {
            datagram.truncate(usize::from(input.u16()));
        }
        let (socket, from) = if other == 3 { place } else { (socket, from) };
        self.deliver(socket, from, datagram);
    }

    /// Does what an honest peer would do next on a path.
    fn answer(&mut self, input: &mut Input<'_>) {
        let id = self.some_path(input);
        let memory = self.attacker.path(id);
        let (challenge, nonce) = (memory.challenge, memory.nonce);
        let (socket, from) = place(input);
        let frames = match input.u8() % 4 {
            0 => vec![Frame::PathConfirm { challenge }],
            1 => vec![Frame::PathAccept {
                nonce,
                challenge: [5; 8],
                trusted: input.flag(),
            }],
            2 => vec![Frame::PathResponse { challenge }, Frame::Ping],
            _ => vec![Frame::Ping],
        };
        let header = encode(&frames);
        let sealed = self.attacker.seal(self.now, id, &header, &[], false, false);
        if let Some(datagram) = sealed {
            self.deliver(socket, from, datagram);
        }
    }
}

/// Whether the attacker's key is the smaller one, so that its path ids are even.
fn has_smaller_key() -> bool {
    let public = |host| PublicKey::from(&key(host)).to_bytes();
    public(0) < public(1)
}

/// The socket that a path's datagrams usually come in by.
fn socket_of(id: u8) -> usize {
    usize::from(id >> 1 & 1)
}

fn encode(frames: &[Frame<'_>]) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let mut w = Writer::new(&mut bytes);
    for frame in frames {
        frame::encode(frame, &mut w);
    }
    let len = w.len();
    bytes.truncate(len);
    bytes
}

/// The socket that a datagram comes in by, and where from.
fn place(input: &mut Input<'_>) -> (usize, SocketAddr) {
    let n = input.u8();
    let socket = usize::from(n & 1);
    let from = match n {
        0..=199 => addr(0, socket),
        _ => SocketAddr::from(([10, 9, 8, n & 7], 5300)),
    };
    (socket, from)
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
fn pattern(input: &mut Input<'_>) -> Vec<u8> {
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
