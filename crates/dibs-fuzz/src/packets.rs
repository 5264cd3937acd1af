//! Two nodes with a bad network between them. Whatever the kernels send into their TUNs, and whatever
//! is lost, delayed, repeated or changed on the way: what comes out at the far end is what went in.

use std::collections::{HashSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use dibs_core::counters::Counter;
use dibs_core::session::Integrity;
use dibs_core::{Time, bump};
use dibs_wire::packet::{self, Packet, flags};
use dibs_wire::{FlowKey, virtio};

use crate::host::{Host, Outputs, addr, integrity, tuple};
use crate::input::Input;
use crate::traffic::{self, CONNS, Kernel, content};
use crate::views;

/// Operations of one input.
const OPERATIONS: usize = 48;
/// Bytes that one input may send, so that none is slow.
const EFFORT: usize = 2 << 20;
/// What a datagram costs beside its bytes.
const EACH: usize = 1024;
/// What is long enough for all that was sent to arrive.
const LONG: Duration = Duration::from_secs(5);
/// Steps of virtual time within one wait, after which the two are taken to keep each other busy.
const ENDLESS: usize = 50_000;

/// What never happens between two honest nodes.
const NEVER: [Counter; 9] = [
    Counter::AckRefused,
    Counter::BumpUnknown,
    Counter::CoverMissing,
    Counter::CrcMismatch,
    Counter::FrameMalformed,
    // What the peer would refuse is not sent.
    Counter::InnerProtocol,
    Counter::KeysExhausted,
    Counter::PeerContradiction,
    Counter::ShareMismatch,
];
/// Each says that something was dropped, and is left to TCP.
const DROPS: [Counter; 16] = [
    Counter::ChunkGivenUp,
    Counter::CodelDropped,
    Counter::DatagramExpired,
    Counter::EpochEnded,
    Counter::FlowOld,
    Counter::FlowUnknown,
    Counter::FragmentsExpired,
    Counter::OpaqueQueueFull,
    Counter::PeerRestarts,
    Counter::QueueFull,
    Counter::SetsExpired,
    Counter::SilenceBroken,
    Counter::StoreFull,
    Counter::TunMalformed,
    Counter::TunNoSession,
    Counter::WrongPath,
];

struct InFlight {
    due: Time,
    to: usize,
    path: usize,
    from: SocketAddr,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Link {
    delay: Duration,
    /// Every so manieth datagram is lost, late, repeated, changed; zero: none.
    loses: u8,
    delays: u8,
    repeats: u8,
    changes: u8,
    count: u64,
}

/// A good one.
impl Default for Link {
    fn default() -> Self {
        Self {
            delay: Duration::from_millis(1),
            loses: 0,
            delays: 0,
            repeats: 0,
            changes: 0,
            count: 0,
        }
    }
}

struct Network {
    now: Time,
    hosts: [Host; 2],
    kernels: [Kernel; 2],
    wire: VecDeque<InFlight>,
    links: [Link; 2],
    /// Opaque packets that a host may get.
    whole: [HashSet<Vec<u8>>; 2],
    /// Per host: stretches of streams that its kernel sent, and that it got.
    sent: [Vec<(FlowKey, u32, u32)>; 2],
    got: [Vec<(FlowKey, u32, u32)>; 2],
    tsval: [Vec<(FlowKey, u32)>; 2],
    /// What the hosts' kernels say to have, true or not.
    acked: Vec<(FlowKey, u32)>,
    /// The numbers of FINs that the hosts' kernels sent.
    fins: Vec<(FlowKey, u32)>,
    /// A kernel sent a byte by the number of a FIN: that stream is two, and neither can be restored.
    contradicted: bool,
    /// Some of what passes is not authenticated.
    bare: bool,
    /// Some of that was changed on the way.
    changed: bool,
    /// All that is sent has to arrive.
    reliable: bool,
    effort: usize,
    restarts: u8,
}

/// The first byte sets the scene; operations follow.
pub fn packets(data: &[u8]) {
    let mut input = Input::new(data);
    let mut network = Network::new(input.u8());
    input.each(OPERATIONS, |input| {
        network.step(input);
        network.outputs();
        network.effort <= EFFORT
    });
    network.finish();
}

impl Network {
    fn new(scene: u8) -> Self {
        let bump = match scene >> 6 {
            2 => bump::SHARE,
            3 => bump::SEAL,
            _ => bump::SCRAMBLE,
        };
        let integrity = integrity(scene);
        let mut network = Self {
            now: Time::ZERO + Duration::from_secs(1),
            hosts: [0, 1].map(|n| {
                let calls = n == 0 || scene & 2 != 0;
                let mut host = Host::new(n, calls, integrity, n as u8 + 1);
                host.bump = bump;
                host
            }),
            kernels: [Kernel::new(0), Kernel::new(1)],
            wire: VecDeque::new(),
            links: [Link::default(); 2],
            whole: Default::default(),
            sent: Default::default(),
            got: Default::default(),
            tsval: Default::default(),
            acked: Vec::new(),
            fins: Vec::new(),
            contradicted: false,
            bare: scene & 1 != 0,
            changed: false,
            reliable: true,
            effort: 0,
            restarts: 0,
        };
        network.run(Duration::from_millis(300));
        for host in &network.hosts {
            let paths = host.node.paths();
            let open = paths.iter().filter(|p| p.state == "active").count();
            assert_eq!(open, 2, "{paths:?}");
        }
        network
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let host = input.below(2);
        match input.u8() % 12 {
            0..=3 => {
                let frame = self.kernels[host].segment(input);
                self.tun(host, &frame);
            }
            4 => {
                let frame = traffic::raw_frame(input);
                self.tun(host, &frame);
            }
            5 => {
                let frame = traffic::opaque_frame(host, input);
                self.tun(host, &frame);
            }
            6..=8 => {
                let millis = match input.u8() {
                    250.. => u64::from(input.u16()),
                    n => u64::from(n),
                };
                self.run(Duration::from_millis(millis));
            }
            9 => {
                let link = &mut self.links[input.below(2)];
                link.delay = Duration::from_micros(u64::from(input.u16()));
                [link.loses, link.delays, link.repeats, link.changes] = input.array();
            }
            10 => self.command(host, input),
            _ => {
                if input.u8() == 255 {
                    // The daemon was killed and comes back, and never draws the same numbers.
                    self.restarts += 1;
                    let bump = self.hosts[host].bump;
                    self.hosts[host] = Host::new(host, true, Integrity::On, 16 + self.restarts);
                    self.hosts[host].bump = bump;
                    self.tsval[1 - host].clear();
                    self.tsval[host].clear();
                    self.reliable = false;
                }
            }
        }
    }

    fn command(&mut self, host: usize, input: &mut Input<'_>) {
        let (now, conn) = (self.now, tuple(host, input.below(CONNS)));
        let bump = self.hosts[host].bump;
        let node = &mut self.hosts[host].node;
        match input.u8() % 5 {
            0 => {
                let up = input.flag();
                node.set_path(now, input.below(2), up, 1280 + u16::from(input.u8()) % 221);
                self.reliable &= up;
            }
            1 => {
                node.datagram_too_big(now, input.below(2), usize::from(input.u16()));
            }
            2 => node.drain(now, bump, conn, input.u8()),
            3 => node.end_drain(bump, conn),
            _ => {
                let _ = node.send_control(now, 0, input.block(), None);
            }
        }
    }

    fn tun(&mut self, host: usize, frame: &[u8]) {
        self.effort += frame.len();
        let packet = frame.get(virtio::LEN..).unwrap_or(&[]);
        if let Ok(Packet::Tcp(segment)) = packet::parse(packet) {
            if segment.flags & (flags::SYN | flags::RST) != 0 {
                // What is left of the connection before it is of no use.
                self.reliable = false;
            }
            let (tuple, seq) = (segment.tuple, segment.seq.raw());
            let end = seq.wrapping_add(segment.payload.len() as u32);
            if segment.flags & flags::ACK != 0 {
                self.acked.push((tuple.reversed(), segment.ack.raw()));
            }
            let covers = |from: u32, end: u32, number: u32| {
                number.wrapping_sub(from) < end.wrapping_sub(from)
            };
            let taken = |&(of, fin): &(FlowKey, u32)| of == tuple && covers(seq, end, fin);
            self.contradicted |= self.fins.iter().any(taken);
            if segment.flags & flags::FIN != 0 {
                let sent =
                    |&(of, from, to): &(FlowKey, u32, u32)| of == tuple && covers(from, to, end);
                self.contradicted |= self.sent[host].iter().any(sent);
                self.fins.push((tuple, end));
            }
            let known = (0..CONNS).any(|c| crate::host::tuple(host, c) == tuple);
            if known && seq != end {
                self.sent[host].push((tuple, seq, end));
            }
        }
        if let Some(whole) = views::whole_packet(frame) {
            self.whole[1 - host].insert(whole);
        }
        self.hosts[host].hand_tun(self.now, frame);
    }

    fn outputs(&mut self) {
        for host in 0..2 {
            let out = self.hosts[host].outputs(self.now);
            self.take(host, out);
        }
    }

    fn take(&mut self, host: usize, out: Outputs) {
        for (path, to, bytes) in out.datagrams {
            assert_eq!(to, addr(1 - host, path), "where the peer is");
            self.effort += EACH + bytes.len();
            self.send(host, path, bytes);
        }
        for frame in out.frames {
            self.injected(host, &frame);
        }
    }

    /// Puts a datagram on the wire, as that link treats it.
    fn send(&mut self, host: usize, path: usize, mut bytes: Vec<u8>) {
        let link = &mut self.links[path];
        link.count += 1;
        let count = link.count;
        let is = |every: u8| every != 0 && count.is_multiple_of(u64::from(every) + 1);
        let link = *link;
        if is(link.loses) {
            return;
        }
        let late = if is(link.delays) { 5 } else { 1 };
        if is(link.changes) {
            let at = (count as usize * 31) % bytes.len();
            bytes[at] ^= 1 << (count % 8);
            self.changed |= self.bare;
        }
        let copies = if is(link.repeats) { 2 } else { 1 };
        for copy in 1..=copies {
            let due = self.now + link.delay * late * copy;
            let at = self.wire.partition_point(|w| w.due <= due);
            let from = addr(host, path);
            let bytes = bytes.clone();
            self.wire.insert(
                at,
                InFlight {
                    due,
                    to: 1 - host,
                    path,
                    from,
                    bytes,
                },
            );
        }
    }

    fn run(&mut self, span: Duration) {
        let end = self.now + span;
        self.outputs();
        for _ in 0..ENDLESS {
            let timers = self
                .hosts
                .iter()
                .filter_map(|h| h.node.poll_timeout())
                .map(|due| due.at);
            let next = timers.chain(self.wire.front().map(|w| w.due)).min();
            let Some(next) = next.filter(|t| *t <= end) else {
                self.now = end;
                return;
            };
            self.now = self.now.max(next);
            while self.wire.front().is_some_and(|w| w.due <= self.now) {
                let mut w = self.wire.pop_front().expect("it was just seen");
                let node = &mut self.hosts[w.to].node;
                node.handle_datagram(self.now, w.path, w.from, &mut w.bytes);
                if self.effort > EFFORT {
                    // No more than what is on its way already.
                    self.reliable = false;
                }
            }
            self.outputs();
            for host in 0..2 {
                let mut outputs = Vec::new();
                self.hosts[host].timeouts(self.now, |out| outputs.push(out));
                for out in outputs {
                    self.take(host, out);
                }
            }
        }
        panic!("the two keep each other busy");
    }

    /// What a host's kernel was given is what the other one sent.
    fn injected(&mut self, host: usize, frame: &[u8]) {
        let bytes = &frame[virtio::LEN..];
        let Ok(Packet::Tcp(segment)) = packet::parse(bytes) else {
            assert!(
                self.whole[host].contains(bytes),
                "an opaque packet that was sent"
            );
            return;
        };
        self.kernels[host].take(&segment);
        let (tuple, seq) = (segment.tuple, segment.seq.raw());
        let wrong = (0..)
            .zip(segment.payload)
            .find(|(at, byte)| content(&tuple, seq.wrapping_add(*at)) != **byte);
        assert_eq!(wrong, None, "of {} bytes at {seq}", segment.payload.len());
        let end = seq.wrapping_add(segment.payload.len() as u32);
        self.got[host].push((tuple, seq, end));
        if frame[..virtio::LEN] == [0; virtio::LEN] {
            // It was not cut, and may be older than what was.
            assert!(self.whole[host].contains(bytes), "a packet that was sent");
            return;
        }
        let last = &mut self.tsval[host];
        if segment.flags & flags::SYN != 0 {
            // A connection begins with time stamps of its own, or none, whatever an earlier one had.
            last.retain(|(t, _)| *t != tuple);
        }
        if let Some((tsval, _)) = segment.timestamps {
            match last.iter_mut().find(|(t, _)| *t == tuple) {
                Some((_, last)) => {
                    let back = last.wrapping_sub(tsval);
                    assert!(
                        back == 0 || back >= 1 << 31,
                        "TSval goes back from {last} to {tsval}"
                    );
                    *last = tsval;
                }
                None => last.push((tuple, tsval)),
            }
        }
    }

    /// With the network good again, all that nobody says to have dropped arrives.
    fn finish(&mut self) {
        self.links = [Link::default(); 2];
        for host in &mut self.hosts {
            for path in 0..2 {
                host.node.set_path(self.now, path, true, crate::host::MTU);
            }
        }
        self.run(LONG);
        for host in &self.hosts {
            host.check_bounds(self.now);
            let counters = host.node.counters();
            for counter in NEVER {
                let count = counters.get(counter);
                let excused = self.changed || self.contradicted;
                assert!(count == 0 || excused, "{}: {count}", counter.name());
            }
            self.reliable &= !self.changed && !self.contradicted;
            self.reliable &= DROPS.iter().all(|c| counters.get(*c) == 0);
        }
        if !self.reliable {
            return;
        }
        for host in 0..2 {
            for &(tuple, seq, end) in &self.sent[host] {
                // What a kernel says to have it does not need.
                let needed = |at: &u32| {
                    let has = |&(of, ack): &(FlowKey, u32)| {
                        of == tuple && ack.wrapping_sub(*at).wrapping_sub(1) < 1 << 31
                    };
                    !self.acked.iter().any(has)
                };
                let missing = missing(&self.got[1 - host], tuple, seq, end).filter(needed);
                assert_eq!(
                    missing, None,
                    "of {seq} to {end} of {tuple:?} nobody says that it was dropped"
                );
            }
        }
    }
}

/// The first number from `seq` up to `end` that is in none of the stretches.
fn missing(got: &[(FlowKey, u32, u32)], tuple: FlowKey, mut seq: u32, end: u32) -> Option<u32> {
    while seq != end {
        let covers = |(t, from, to): &&(FlowKey, u32, u32)| {
            let len = to.wrapping_sub(*from);
            *t == tuple && seq.wrapping_sub(*from) < len
        };
        let Some((_, _, to)) = got.iter().find(covers) else {
            return Some(seq);
        };
        if end.wrapping_sub(seq) <= to.wrapping_sub(seq) {
            return None;
        }
        seq = *to;
    }
    None
}
