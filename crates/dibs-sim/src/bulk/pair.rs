//! A bulk transfer through two nodes: what their kernels, the links and the clock do around them.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump::{self, Pads};
use dibs_core::counters::Counter;
use dibs_core::node::{Event, LocalPath, Node, NodeConfig, PathSnapshot, PeerConfig};
use dibs_core::preference::Usage;
use dibs_core::session::{Integrity, PublicKey, StaticSecret, Suite};
use dibs_netem::{
    Conditions, Emulator, Fate,
    rng::{Rng, mix},
};
use dibs_settings::{BumpId, Handshake, Opening, Scheduler};

use super::plain::clock;
use super::receiver::{Receiver, ReceiverStats};
use super::scenario::{Change, SPAN, Scenario};
use super::sender::{Sender, SenderStats};
use super::wire::{Wire, address};
use crate::queue::Queue;

/// The transfer begins when session and paths stand.
const START: Time = Time::from_nanos(4_000_000_000);
/// Time for what is under way at the end.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time without a new byte for the application.
const LONGEST_GAP: Duration = Duration::from_secs(3);
/// A host looks at what has arrived so often.
const TICK: u64 = 50_000;
/// What a daemon reads of a TUN at once.
const TUN_ROUND: usize = 256 << 10;
/// Bytes of an IPv4 and a UDP header.
const UDP: usize = 28;
const PORT: u16 = 5300;
/// How often is looked whether a node found fault with the other.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Between honest ends none of these is counted.
const FAULTS: [Counter; 7] = [
    Counter::CrcMismatch,
    Counter::PeerContradiction,
    Counter::AckRefused,
    Counter::FrameMalformed,
    Counter::TunMalformed,
    Counter::TunRefused,
    Counter::InnerAddress,
];

/// Outcome of a transfer through two nodes.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Bytes read within the span.
    pub bytes: u64,
    /// The time that they took.
    pub took: Duration,
    /// Counts of the sender.
    pub sender: SenderStats,
    /// Counts of the receiver.
    pub receiver: ReceiverStats,
    /// Datagrams that paths of the sender's node declared lost, and those of them that arrived.
    pub path_losses: [u64; 2],
}

impl Outcome {
    /// Megabits a second.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 * 8e-6 / self.took.as_secs_f64()
    }
}

struct Road {
    emulators: [Emulator; 2],
    conditions: Conditions,
}

struct Arrival {
    host: usize,
    path: usize,
    bytes: Vec<u8>,
}

/// Two hosts of which one sends to the other.
pub struct Pair {
    now: Time,
    bump: BumpId,
    nodes: [Node; 2],
    roads: Vec<Road>,
    changes: VecDeque<Change>,
    sender: Sender,
    receiver: Receiver,
    wire: Wire,
    arrivals: Queue<Arrival>,
    spins: u32,
    look_at: Time,
}

fn endpoint(path: usize, host: usize) -> SocketAddr {
    let ip = Ipv4Addr::new(10, 2, path as u8, host as u8 + 1);
    SocketAddr::new(IpAddr::V4(ip), PORT)
}

fn node(scenario: &Scenario, host: usize) -> Node {
    let private = |host: usize| {
        let mut rng = Rng::new(mix(scenario.seed ^ 0xb01c ^ host as u64));
        StaticSecret::from(rng.bytes32())
    };
    let path = |(at, link): (usize, &super::scenario::Link)| LocalPath {
        trusted: link.trusted,
        mtu: 1500,
        up: true,
        usage: Usage::default(),
        addresses: vec![endpoint(at, host).ip()],
        public: Vec::new(),
    };
    let paths: Vec<_> = scenario.links.iter().enumerate().map(path).collect();
    let endpoints = |count: usize| (0..count).map(|at| (at, endpoint(at, 1))).collect();
    let mut rng = Rng::new(mix(scenario.seed ^ 0xd1ce ^ host as u64));
    let seed = rng.bytes32();
    let config = NodeConfig {
        private: Box::new(private(host)),
        suite: Suite::Aes256Gcm,
        integrity: Integrity::On,
        handshake: Handshake::Chained,
        peers: vec![PeerConfig {
            public: PublicKey::from(&private(1 - host)),
            preshared: None,
            prefixes: vec![address(1 - host).into()],
            accept: vec![Opening::ANY],
            endpoints: if host == 0 {
                endpoints(paths.len())
            } else {
                Vec::new()
            },
            appears_as: Vec::new(),
        }],
        paths,
        addresses: vec![address(host)],
        reachable: Vec::new(),
        gateway: Vec::new(),
        exit: Vec::new(),
        trusted_share: 0.05,
        bumps: bump::ordinary(),
        pads: Pads::new(&rng.bytes32()),
        hold_without_trusted: true,
        scheduler: Scheduler::default(),
        hint: None,
    };
    Node::new(Time::ZERO, config, seed).expect("two different keys")
}

impl Pair {
    /// Two hosts before the transfer.
    pub fn new(scenario: &Scenario) -> Self {
        let mut rng = Rng::new(mix(scenario.seed ^ 0x9a17));
        let road = |link: &super::scenario::Link, rng: &mut Rng| Road {
            emulators: [(); 2].map(|()| Emulator::new(rng.word())),
            conditions: link.conditions(),
        };
        let roads = scenario
            .links
            .iter()
            .map(|link| road(link, &mut rng))
            .collect();
        Self {
            now: Time::ZERO,
            bump: scenario.bump,
            nodes: [0, 1].map(|host| node(scenario, host)),
            roads,
            changes: scenario.changes.iter().cloned().collect(),
            sender: Sender::new(START, scenario.bytes),
            receiver: Receiver::new(START),
            wire: Wire::new(&mut rng),
            arrivals: Queue::default(),
            spins: 0,
            look_at: START,
        }
    }

    /// Runs the transfer.
    ///
    /// # Errors
    /// A byte differs, it stalls, or a gap is too long; with how the nodes stand.
    pub fn run(mut self) -> Result<Outcome, String> {
        let outcome = self.transfer();
        outcome.map_err(|fault| format!("{fault} (at {:?})\n{}", self.now, self.describe()))
    }

    fn transfer(&mut self) -> Result<Outcome, String> {
        self.run_until(START)?;
        let open = |path: &PathSnapshot| path.state == "active";
        if self.nodes.iter().any(|n| !n.paths().iter().any(open)) {
            return Err("no path stands".into());
        }
        self.run_until(START + SPAN)?;
        let (bytes, took) = (self.receiver.read(), self.now.since(START));
        self.sender.stop();
        self.run_until(self.now + PATIENCE)?;
        if !self.sender.is_done() || self.receiver.read() != self.sender.sent() {
            return Err(format!(
                "{} bytes arrived, and it stalls",
                self.receiver.read()
            ));
        }
        let receiver = self.receiver.stats();
        if receiver.longest_gap > LONGEST_GAP {
            return Err(format!(
                "nothing arrived for {:?} until {:?}",
                receiver.longest_gap, receiver.gap_ended
            ));
        }
        if receiver.beyond > 0 {
            return Err(format!("{} bytes beyond the window", receiver.beyond));
        }
        let paths = self.nodes[0].paths();
        let sum = |of: fn(&PathSnapshot) -> u64| paths.iter().map(of).sum();
        Ok(Outcome {
            bytes,
            took,
            sender: self.sender.stats(),
            receiver,
            path_losses: [sum(|p| p.stats.lost), sum(|p| p.stats.spurious)],
        })
    }

    fn run_until(&mut self, end: Time) -> Result<(), String> {
        self.pump()?;
        while self.now < START || !self.sender.is_done() {
            let next = self.next_event().unwrap_or(end);
            if next >= end {
                self.now = end;
                return Ok(());
            }
            self.step(self.now.max(next))?;
        }
        Ok(())
    }

    fn next_event(&self) -> Option<Time> {
        let began = self.now >= START;
        let nodes = self
            .nodes
            .iter()
            .map(|node| node.poll_timeout().map(|due| due.at));
        let others = [
            self.arrivals.next(),
            self.changes.front().map(|change| START + change.at),
            self.sender.poll_timeout().filter(|_| began),
            self.receiver.poll_timeout(),
            Some(self.look_at),
        ];
        nodes.chain(others).flatten().min()
    }

    fn step(&mut self, now: Time) -> Result<(), String> {
        self.spins = if now > self.now { 0 } else { self.spins + 1 };
        self.now = now;
        if self.spins > 1000 {
            let due = self.nodes.each_ref().map(Node::poll_timeout);
            return Err(format!("the hosts are busy doing nothing, due {due:?}"));
        }
        while self.changes.front().is_some_and(|c| START + c.at <= now) {
            let change = self.changes.pop_front().expect("it was just seen");
            self.roads[change.link].conditions = change.becomes.conditions();
        }
        while let Some(mut a) = self.arrivals.take(now) {
            let from = endpoint(a.path, 1 - a.host);
            self.nodes[a.host].handle_datagram(now, a.path, from, &mut a.bytes);
        }
        let wall = Duration::from_secs(1_700_000_000) + now.since(Time::ZERO);
        for node in &mut self.nodes {
            if node.poll_timeout().is_some_and(|due| due.at <= now) {
                node.handle_timeout(now, wall);
            }
        }
        if now >= START && self.sender.poll_timeout().is_some_and(|t| t <= now) {
            self.sender.handle_timeout(now);
        }
        self.pump()?;
        if now >= self.look_at {
            self.look()?;
        }
        Ok(())
    }

    /// Lets both hosts work until they have nothing to do.
    fn pump(&mut self) -> Result<(), String> {
        let mut worked = true;
        while worked {
            worked = self.work(0)?;
            worked |= self.work(1)?;
        }
        Ok(())
    }

    fn work(&mut self, host: usize) -> Result<bool, String> {
        // What came is given to the kernel first: so it acknowledges much at once.
        let mut worked = self.inject(host)?;
        loop {
            let more = match host {
                0 => self.send_data(),
                _ => self.send_ack(),
            };
            self.transmit(host);
            if !more {
                break;
            }
            worked = true;
        }
        while let Some(event) = self.nodes[host].poll_event() {
            if let Event::Control { peer, .. } = event {
                self.nodes[host].control_done(peer);
            }
        }
        Ok(worked)
    }

    /// The daemon reads what the sender's kernel has, up to a bound; false if there was nothing.
    fn send_data(&mut self) -> bool {
        let (now, node) = (self.now, &mut self.nodes[0]);
        if now < START {
            return false;
        }
        let mut read = 0;
        while read < TUN_ROUND
            && let Some(burst) = self.sender.poll_transmit(now, clock(now))
        {
            read += burst.len as usize;
            let mut buffer = node.tun_buffer();
            let len = self.wire.write_data(&burst, &mut buffer);
            node.handle_tun(now, self.bump, buffer, len);
        }
        node.set_more_comes(read >= TUN_ROUND);
        read > 0
    }

    fn send_ack(&mut self) -> bool {
        let (now, node) = (self.now, &mut self.nodes[1]);
        let Some(ack) = self.receiver.poll_ack(now, clock(now)) else {
            return false;
        };
        let mut buffer = node.tun_buffer();
        let len = self.wire.write_ack(&ack, &mut buffer);
        node.handle_tun(now, self.bump, buffer, len);
        true
    }

    fn transmit(&mut self, host: usize) {
        let now = self.now;
        while let Some(t) = self.nodes[host].poll_transmit(now) {
            let road = &mut self.roads[t.path];
            for datagram in t.bytes.chunks(t.segment.max(1)) {
                let time = now.since(Time::ZERO);
                let len = datagram.len() + UDP;
                let fate = road.emulators[host].enter(&road.conditions, time, len);
                let Fate::Delivered(delivery) = fate else {
                    continue;
                };
                let at = (delivery.at.as_nanos() as u64).next_multiple_of(TICK);
                let arrival = Arrival {
                    host: 1 - host,
                    path: t.path,
                    bytes: datagram.to_vec(),
                };
                self.arrivals.push(Time::from_nanos(at), arrival);
            }
        }
    }

    fn inject(&mut self, host: usize) -> Result<bool, String> {
        let (now, node) = (self.now, &mut self.nodes[host]);
        let mut worked = false;
        node.flush_injections();
        while let Some(injection) = node.poll_injection() {
            worked = true;
            if host == 0 {
                let ack = self.wire.read_ack(injection.frame())?;
                self.sender.handle_ack(now, &ack);
            } else {
                let data = self.wire.read_data(injection.frame())?;
                self.receiver
                    .handle_data(now, clock(now), data.span, data.stamps);
            }
            node.recycle(injection);
            if host == 1 {
                // Acknowledged as it comes; the daemon reads that afterwards.
                while let Some(ack) = self.receiver.poll_ack(now, clock(now)) {
                    let mut buffer = node.tun_buffer();
                    let len = self.wire.write_ack(&ack, &mut buffer);
                    node.handle_tun(now, self.bump, buffer, len);
                }
            }
        }
        Ok(worked)
    }

    /// Checks what must hold.
    fn look(&mut self) -> Result<(), String> {
        self.look_at += LOOK_EVERY;
        for node in &self.nodes {
            for counter in FAULTS {
                if node.counters().get(counter) > 0 {
                    return Err(format!("{} between honest ends", counter.name()));
                }
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let mut text = format!("sender: {:?}\n", self.sender.stats());
        text += &format!("receiver: {:?}\n", self.receiver.stats());
        for node in &self.nodes {
            text += &format!("{:?}\n", node.peers(self.now));
            for path in node.paths() {
                text += &format!("  {path:?}\n");
            }
            let counts = node.counters().iter().filter(|(_, n)| *n > 0);
            for (counter, n) in counts {
                text += &format!("  {counter} {n}");
            }
            text += "\n";
        }
        text
    }
}
