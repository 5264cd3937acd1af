//! The node and its peer, and what passes between them.

use std::net::SocketAddr;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::session::PublicKey;
use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, BASE_OFFSET, Frame};
use dibs_wire::packet;

use crate::attacker::Attacker;
use crate::host::{Host, Outputs, addr, integrity, key};
use crate::input::Input;
use crate::traffic::{CONNS, Kernel};

/// Bytes that one input may send or make, so that none is slow.
pub(super) const EFFORT: usize = 2 << 20;
/// What a datagram costs beside its bytes.
const EACH: usize = 2048;
/// What a handshake message does, which takes far longer than another datagram.
const HANDSHAKE: usize = 16 * 1024;
/// Header block and payload of the longest UDP datagram.
pub(super) const MAX_BLOCK: usize = 65_507 - dibs_core::session::OVERHEAD;
/// Datagrams that may be sent again.
const KEPT: usize = 64;

pub(super) struct Encounter {
    pub(super) now: Time,
    pub(super) victim: Host,
    pub(super) kernel: Kernel,
    pub(super) attacker: Attacker,
    /// Path ids that frames are usually about: three of the attacker, which come first, two of the
    /// victim, and one more. They take turns with the sockets.
    pub(super) paths: [u8; 6],
    /// Socket and source of every datagram, for repeating.
    pub(super) sent: Vec<(usize, SocketAddr, Vec<u8>)>,
    /// Where the attacker's chains stand, by flow.
    pub(super) offsets: [u64; CONNS],
    pub(super) effort: usize,
}

impl Encounter {
    pub(super) fn new(scene: u8) -> Self {
        let integrity = integrity(scene);
        let now = Time::ZERO + Duration::from_secs(1);
        let mut encounter = Self {
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
            let call = encounter.attacker.call(now);
            encounter.deliver(0, addr(0, 0), call);
        }
        encounter.settle();
        // A call, its answer, the first questions for paths.
        for _ in 0..3 {
            encounter.wait(Duration::ZERO);
        }
        if scene & 8 == 0 {
            for (socket, trusted) in [(0, true), (1, false)] {
                encounter.open_path(socket, trusted, scene & 2 != 0);
            }
            let paths = encounter.victim.node.paths();
            let open = paths.iter().filter(|p| p.state == "active").count();
            assert_eq!(open, 2, "{paths:?}");
        }
        encounter
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

    pub(super) fn some_path(&self, input: &mut Input<'_>) -> u8 {
        self.paths[input.below(self.paths.len())]
    }

    /// Lets the attacker hear what the victim says.
    pub(super) fn settle(&mut self) {
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

    pub(super) fn deliver(&mut self, socket: usize, from: SocketAddr, mut datagram: Vec<u8>) {
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
    pub(super) fn sealed(&mut self, id: u8, header: &[u8], payload: &[u8]) {
        let datagram = self
            .attacker
            .seal(self.now, id, header, payload, false, false);
        if let Some(datagram) = datagram {
            let socket = socket_of(id);
            self.deliver(socket, addr(0, socket), datagram);
        }
    }

    pub(super) fn frames(&mut self, id: u8, frames: &[Frame<'_>]) {
        self.sealed(id, &encode(frames), &[]);
    }

    pub(super) fn tun(&mut self, frame: &[u8]) {
        self.effort += frame.len();
        self.victim.hand_tun(self.now, frame);
    }

    pub(super) fn wait(&mut self, span: Duration) {
        self.now += span;
        self.settle();
        let mut heard = Vec::new();
        self.victim.timeouts(self.now, |out| heard.push(out));
        for out in heard {
            self.hear(out);
        }
    }
}

/// What a datagram takes.
fn cost(datagram: &[u8]) -> usize {
    let each = match datagram.first() {
        Some(1 | 2) => HANDSHAKE,
        _ => EACH,
    };
    each + datagram.len()
}

/// Whether the attacker's key is the smaller one, so that its path ids are even.
fn has_smaller_key() -> bool {
    let public = |host| PublicKey::from(&key(host)).to_bytes();
    public(0) < public(1)
}

/// The socket that a path's datagrams usually come in by.
pub(super) fn socket_of(id: u8) -> usize {
    usize::from(id >> 1 & 1)
}

pub(super) fn encode(frames: &[Frame<'_>]) -> Vec<u8> {
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
pub(super) fn place(input: &mut Input<'_>) -> (usize, SocketAddr) {
    let n = input.u8();
    let socket = usize::from(n & 1);
    let from = match n {
        0..=199 => addr(0, socket),
        _ => SocketAddr::from(([10, 9, 8, n & 7], 5300)),
    };
    (socket, from)
}
