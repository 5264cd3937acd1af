//! A node, its kernel, and a peer with valid keys that says whatever it likes.

mod encounter;
mod frames;

use std::time::Duration;

use dibs_core::session::Hello;
use dibs_wire::frame::Frame;

use crate::attacker::hello;
use crate::host::{BUMP, inner, tuple};
use crate::input::Input;
use crate::traffic::{self, CONNS};
use encounter::{EFFORT, Encounter, encode, place};

/// Operations of one input.
const OPERATIONS: usize = 64;

/// The first byte sets the scene; operations follow.
pub fn datagrams(data: &[u8]) {
    let mut input = Input::new(data);
    let mut encounter = Encounter::new(input.u8());
    input.each(OPERATIONS, |input| {
        encounter.step(input);
        encounter.settle();
        encounter.victim.check_bounds(encounter.now);
        encounter.effort <= EFFORT
    });
}

impl Encounter {
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
                    self.wait(due.at.since(self.now));
                }
            }
            16 => self.shake_hands(input),
            17 => self.command(input),
            18 => self.again(input),
            _ => self.answer(input),
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
                let _ = node.send_control(now, 0, input.block(), None);
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
