//! Two hosts, the paths between them, and time that jumps from one event to the next.

mod attacks;
mod checks;
mod network;
mod ops;
mod preferences;
mod route;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump::{self, Bump, Pads, Scheme};
use dibs_core::node::{Event, LocalPath, Node, NodeConfig, PeerConfig};
use dibs_core::session::{PublicKey, Secret, StaticSecret};
use dibs_netem::{
    Conditions, Emulator,
    rng::{Rng, mix},
};
use dibs_settings::{BumpId, Opening};
use dibs_wire::FlowKey;

use crate::adversary::{Adversary, Tamper};
use crate::conn::Conn;
use crate::coverage::{Coverage, Seen};
use crate::history::{History, Leaving, Preferences, Setup, name};
use crate::kernel::Kernel;
use crate::observer::{self, Observer};
use crate::queue::Queue;
use crate::steering::{At, Sockets, Steering};
use network::Arrival;
use preferences::Bucket;
use route::PlainRoute;
pub(crate) use route::{LENT, ROUTER};

/// Longest time that a transfer may take once nothing disturbs it: TCP's own timeouts have doubled
/// up to a minute by then, and a few of them may meet losses again.
const PATIENCE: Duration = Duration::from_secs(900);
/// Time for what is left to be acknowledged and forgotten.
const SETTLING: Duration = Duration::from_secs(150);
/// Everything is looked at for so long.
const SILENCE: Duration = Duration::from_secs(10);
/// Time for the daemons to agree once nothing disturbs them.
const AGREEING: Duration = Duration::from_secs(60);
/// The UDP port of the daemons.
const PORT: u16 = 5300;

/// Report of a run that kept all promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// All datagrams of the run, their order and their content, as one number.
    pub digest: u64,
    /// Virtual time that it took to deliver everything.
    pub took: Duration,
    /// Bytes that reached applications.
    pub delivered: u64,
    /// Payload bytes that the kernels sent again.
    pub retransmitted: u64,
    /// Datagrams between the daemons.
    pub datagrams: u64,
    /// Bytes of datagrams on trusted and on untrusted paths.
    pub bytes: [u64; 2],
    /// Connections that stayed on bumps where nothing kept them.
    pub unkept: usize,
    /// Coverage of what happened.
    pub coverage: Coverage,
}

/// A broken promise.
#[derive(Clone, Debug)]
pub struct Failure {
    /// When.
    pub at: Time,
    /// Promise that was broken.
    pub what: String,
    /// State of the daemons and connections.
    pub state: String,
}

struct Host {
    kernel: Kernel,
    node: Option<Node>,
    /// It does nothing until then.
    asleep_until: Time,
    /// When the next daemon starts.
    starts_at: Option<Time>,
    /// Interfaces by path.
    up: Vec<bool>,
    mtu: Vec<u16>,
    instances: u64,
    spins: u32,
    steering: Steering,
    /// What the node has put out and nobody has looked at yet.
    injected: Vec<(BumpId, Vec<u8>)>,
    events: Vec<Event>,
    preferences: Preferences,
    /// By path, where its rate is limited.
    sent_of_limit: Vec<Bucket>,
    /// Packets that fell into the TUN and are no packets.
    malformed: u64,
    stray: u64,
}

struct Link {
    emulators: [Emulator; 2],
    conditions: [Conditions; 2],
    mtu: u16,
    trusted: bool,
    /// Labels by host.
    labels: [bool; 2],
    v6: bool,
    /// Who sits on it, by sending host.
    tamper: [Option<Tamper>; 2],
}

/// What was sent, so that nothing else arrives.
#[derive(Default)]
struct Said {
    /// Opaque packets by content, with the bump that each was sent by.
    opaque: BTreeMap<Vec<u8>, BumpId>,
    /// Messages, with the number of times they came.
    controls: BTreeMap<Vec<u8>, u32>,
    /// Messages about switches.
    switches: BTreeSet<Vec<u8>>,
    /// Daemons that began anew: a message may come once more for each.
    restarts: u64,
}

impl Said {
    /// Whether a message that arrived is one about a switch.
    fn take_message(&mut self, bytes: &[u8]) -> Result<bool, String> {
        let Some(count) = self.controls.get_mut(bytes) else {
            return match self.switches.contains(bytes) {
                true => Ok(true),
                false => Err("a message that nobody sent".into()),
            };
        };
        *count += 1;
        if u64::from(*count) > 1 + self.restarts {
            return Err(format!("a message came {count} times"));
        }
        Ok(false)
    }
}

/// A run as it goes on.
pub struct World {
    now: Time,
    rng: Rng,
    setup: Setup,
    seed: u64,
    hosts: [Host; 2],
    links: Vec<Link>,
    plain: PlainRoute,
    arrivals: Queue<Arrival>,
    /// Of all arrivals.
    digest: u64,
    conns: Vec<Conn>,
    observer: Observer,
    said: Said,
    adversary: Adversary,
    /// Bytes that came from addresses of his, and went there: by host, path, address.
    lures: BTreeMap<(usize, usize, SocketAddr), (u64, u64)>,
    /// The last packet of each end of a connection.
    last: BTreeMap<FlowKey, Vec<u8>>,
    by_pair: [BTreeMap<FlowKey, usize>; 2],
    /// Time since which a host's kernel sends a connection by bumps.
    on_bump: [BTreeMap<FlowKey, Time>; 2],
    /// Time at which something that a daemon sent of a connection last arrived in plain.
    shown: BTreeMap<usize, Time>,
    /// Connections that go to plain without that being seen to carry them: renumbered ones, and those that another program moves.
    excused: BTreeSet<usize>,
    /// Dice for what becomes of packets that daemons send in plain.
    mishaps: Rng,
    /// All paths are cut until then.
    cut_until: Time,
    /// Packets of others were put into a TUN of each host.
    foreign: [bool; 2],
    coverage: Coverage,
}

/// Addresses by host and family. The prefix of IPv6 has no run of zeros: the observer looks for it, and
/// sequence numbers have such runs.
pub(crate) fn addresses() -> [[IpAddr; 2]; 2] {
    [1, 2].map(|host| {
        let v6 = [0xfd4d, 0x9c3b, 0x61f7, 0x2ae5, 0, 0, 0, u16::from(host)];
        [
            IpAddr::V4(Ipv4Addr::new(10, 1, 0, host)),
            IpAddr::V6(Ipv6Addr::from(v6)),
        ]
    })
}

/// Where a host's path ends.
fn endpoint(path: usize, host: usize, v6: bool) -> SocketAddr {
    let (p, h) = (path as u8, host as u8 + 1);
    let ip = if v6 {
        IpAddr::V6(Ipv6Addr::new(
            0xfd02,
            u16::from(p),
            0,
            0,
            0,
            0,
            0,
            u16::from(h),
        ))
    } else {
        IpAddr::V4(Ipv4Addr::new(10, 2, p, h))
    };
    SocketAddr::new(ip, PORT)
}

fn private(seed: u64, host: usize) -> [u8; 32] {
    Rng::new(mix(seed ^ 0x5ec4e7 ^ host as u64)).bytes32()
}

fn preshared(seed: u64) -> [u8; 32] {
    Rng::new(mix(seed ^ 0x95c)).bytes32()
}

/// What both hosts carry.
fn bumps(setup: &Setup) -> Vec<Bump> {
    let (needed, shares) = setup.share;
    let scheme = Scheme::new(needed, shares).expect("a setup has a scheme");
    vec![
        bump::scramble(),
        bump::share(scheme),
        bump::seal(setup.padding),
    ]
}

impl World {
    /// Two hosts that have not spoken yet.
    pub fn new(seed: u64, setup: &Setup) -> Self {
        let mut rng = Rng::new(mix(seed ^ 0x3091d));
        let links = setup.paths.iter().map(|p| Link {
            emulators: [(); 2].map(|()| Emulator::new(rng.word())),
            conditions: p.link.clone(),
            mtu: p.mtu,
            trusted: p.trusted == [true; 2],
            labels: p.trusted,
            v6: p.v6,
            tamper: [None, None],
        });
        let links: Vec<Link> = links.collect();
        let mut observer = Observer::new(setup);
        observer.guard(&private(seed, 0));
        observer.guard(&private(seed, 1));
        let [a, b] = addresses();
        for pair in a.into_iter().zip(b) {
            observer.guard_addresses(pair);
        }
        if setup.preshared {
            observer.guard(&preshared(seed));
        }
        let hosts = [0, 1].map(|host| Host {
            kernel: Kernel::new(
                rng.word(),
                &addresses()[host],
                setup.mtu[host],
                setup.clock[host],
            ),
            node: None,
            asleep_until: Time::ZERO,
            starts_at: Some(Time::ZERO),
            up: vec![true; links.len()],
            mtu: setup.paths.iter().map(|p| p.mtu).collect(),
            instances: 0,
            spins: 0,
            steering: {
                let forces = setup.leaving == Leaving::Forced;
                let strange = host == 1 && setup.between.translates;
                Steering::new(host as u64 + 1, 2 - host as u64, forces, strange)
            },
            injected: Vec::new(),
            events: Vec::new(),
            preferences: setup.preferences[host].clone(),
            sent_of_limit: vec![Bucket::default(); links.len()],
            malformed: 0,
            stray: 0,
        });
        let adversary = Adversary::new(rng.fork());
        Self {
            now: Time::ZERO,
            plain: PlainRoute::new(&mut rng, setup),
            rng,
            setup: setup.clone(),
            seed,
            hosts,
            links,
            arrivals: Queue::default(),
            digest: 0,
            conns: Vec::new(),
            observer,
            said: Said::default(),
            adversary,
            lures: BTreeMap::new(),
            last: BTreeMap::new(),
            by_pair: [BTreeMap::new(), BTreeMap::new()],
            on_bump: [BTreeMap::new(), BTreeMap::new()],
            shown: BTreeMap::new(),
            excused: BTreeSet::new(),
            mishaps: Rng::new(mix(seed ^ 0x5403)),
            cut_until: Time::ZERO,
            foreign: [false; 2],
            coverage: Coverage::default(),
        }
    }

    /// Runs a history to its end.
    ///
    /// # Errors
    /// A promise was broken.
    pub fn run(seed: u64, history: &History) -> Result<Report, Failure> {
        let mut world = Self::new(seed, &history.setup);
        world.drive(history).map_err(|what| Failure {
            at: world.now,
            what,
            state: checks::describe(&world),
        })
    }

    fn drive(&mut self, history: &History) -> Result<Report, String> {
        for (at, op) in &history.ops {
            self.run_until(*at)?;
            self.apply(op)?;
        }
        self.run_until(history.quiet)?;
        self.calm();
        let mut unkept = 0;
        if self.conns.iter().any(|c| c.lingers) {
            let patience = self.now + AGREEING;
            // Before that they may agree on what a word under way is about to change.
            self.run_until(self.now + AGREEING / 4)?;
            while checks::check_agreement(self).is_err() && self.now < patience {
                self.run_until(self.now + AGREEING / 12)?;
            }
            checks::check_agreement(self)?;
            unkept = checks::unkept(self);
            self.conns.iter_mut().for_each(|c| c.lingers = false);
            self.pump(0)?;
            self.pump(1)?;
        }
        let deadline = self.now + PATIENCE;
        while !{ self.conns.iter() }.all(|conn| conn.is_done() || checks::is_forgotten(self, conn))
        {
            let next = self.next_event();
            if next.is_none_or(|t| t > deadline) {
                return Err("a transfer stalls".into());
            }
            self.step(next.expect("it was just checked"))?;
        }
        let took = self.now.since(Time::ZERO);
        let patience = self.now + SETTLING;
        loop {
            let before = self.observer.datagrams;
            self.run_until(self.now + SILENCE)?;
            let at_last = self.now > patience;
            match checks::check_rest(self, self.observer.datagrams - before, at_last) {
                Ok(()) => break,
                Err(fault) if at_last => return Err(fault),
                Err(_) => {}
            }
        }
        checks::gather(self);
        Ok(Report {
            digest: self.digest ^ self.observer.digest,
            took,
            delivered: self.conns.iter().map(Conn::received).sum(),
            retransmitted: self.hosts.iter().map(|h| h.kernel.retransmitted).sum(),
            datagrams: self.observer.datagrams,
            bytes: self.observer.bytes,
            unkept,
            coverage: self.coverage,
        })
    }

    /// Lets time pass.
    ///
    /// # Errors
    /// A promise was broken.
    pub fn run_until(&mut self, until: Time) -> Result<(), String> {
        while let Some(next) = self.next_event()
            && next <= until
        {
            self.step(next)?;
        }
        self.now = self.now.max(until);
        Ok(())
    }

    fn next_event(&mut self) -> Option<Time> {
        let now = self.now;
        let mut next = self.arrivals.next();
        let mut consider = |t: Option<Time>| {
            if let Some(t) = t {
                next = Some(next.map_or(t, |n| n.min(t)));
            }
        };
        for host in &mut self.hosts {
            if host.asleep_until > now {
                consider(Some(host.asleep_until));
                continue;
            }
            // A stack that asks for now although it has just worked can wait a moment.
            let least = now + Duration::from_millis(1);
            let kernel = host.kernel.poll_at(now);
            consider(kernel.map(|t| if t <= now { least } else { t }));
            consider(host.starts_at);
            consider(host.steering.poll_timeout());
            consider(
                host.node
                    .as_ref()
                    .and_then(Node::poll_timeout)
                    .map(|due| due.at),
            );
        }
        // Who sleeps is not woken by his applications.
        let awake = self.hosts.iter().all(|h| h.asleep_until <= now);
        for conn in self.conns.iter().filter(|_| awake) {
            consider(conn.wakes_at(now));
        }
        next.map(|t| t.max(now))
    }

    fn step(&mut self, at: Time) -> Result<(), String> {
        if at > self.now {
            self.hosts.iter_mut().for_each(|h| h.spins = 0);
        }
        self.now = at;
        while let Some(arrival) = self.arrivals.take(at) {
            self.digest = mix(self.digest ^ at.as_nanos()).wrapping_add(arrival.host as u64);
            self.arrive(arrival)?;
        }
        for host in 0..2 {
            if self.hosts[host].asleep_until > at {
                continue;
            }
            self.start_due(host);
            let (now, wall) = (self.now, self.wall());
            let h = &mut self.hosts[host];
            if let Some(node) = &mut h.node
                && node.poll_timeout().is_some_and(|due| due.at <= now)
            {
                h.spins += 1;
                if h.spins > 50 {
                    let due = node.poll_timeout();
                    return Err(format!(
                        "the daemon of {} is busy doing nothing, due {due:?}",
                        name(host)
                    ));
                }
                node.handle_timeout(now, wall);
            }
            self.steer(host);
            self.pump(host)?;
        }
        Ok(())
    }

    /// Has the daemon of a host do what is due.
    fn steer(&mut self, host: usize) {
        let now = self.now;
        let Self { hosts, conns, .. } = self;
        let h = &mut hosts[host];
        if let Some(node) = &mut h.node
            && h.asleep_until <= now
            && h.steering.poll_timeout().is_some_and(|t| t <= now)
        {
            let sockets = Sockets(conns, &self.by_pair[host], host);
            let at = &mut At::new(now, node, &h.kernel, sockets);
            h.steering.handle_timeout(at);
        }
    }

    fn wall(&self) -> Duration {
        Duration::from_secs(1_700_000_000) + self.now.since(Time::ZERO)
    }

    fn start_due(&mut self, host: usize) {
        let now = self.now;
        if self.hosts[host].starts_at.is_some_and(|t| t <= now) {
            self.hosts[host].starts_at = None;
            let node = self.node(host);
            let h = &mut self.hosts[host];
            let node = h.node.insert(node);
            let kernel = &h.kernel;
            let request = mix(self.seed ^ 0x9e57 ^ h.instances << 8 ^ host as u64) as u32;
            let sockets = Sockets(&self.conns, &self.by_pair[host], host);
            let at = &mut At::new(now, node, kernel, sockets);
            h.steering.start(at, request);
        }
    }

    fn node(&mut self, host: usize) -> Node {
        let h = &mut self.hosts[host];
        h.instances += 1;
        let mut rng = Rng::new(mix(self.seed ^ h.instances << 8 ^ host as u64));
        let (seed, pads) = (rng.bytes32(), Pads::new(&rng.bytes32()));
        let paths = self
            .setup
            .paths
            .iter()
            .enumerate()
            .map(|(at, p)| LocalPath {
                trusted: p.trusted[host],
                mtu: h.mtu[at],
                up: h.up[at],
                usage: h.preferences.usage(at),
                addresses: vec![endpoint(at, host, p.v6).ip()],
                public: Vec::new(),
            });
        let endpoints = if self.setup.calls[host] {
            let ends = self.links.iter().enumerate();
            ends.map(|(at, link)| (at, endpoint(at, 1 - host, link.v6)))
                .collect()
        } else {
            Vec::new()
        };
        let is_lent = host == 1 && self.setup.between.translates;
        let appears = if is_lent { LENT } else { addresses()[1 - host] };
        let peer = PeerConfig {
            public: PublicKey::from(&StaticSecret::from(private(self.seed, 1 - host))),
            preshared: self
                .setup
                .preshared
                .then(|| Box::new(Secret::new(preshared(self.seed)))),
            prefixes: appears.map(Into::into).to_vec(),
            accept: vec![Opening::ANY],
            endpoints,
            appears_as: if is_lent { LENT.to_vec() } else { Vec::new() },
        };
        let config = NodeConfig {
            private: Box::new(StaticSecret::from(private(self.seed, host))),
            suite: self.setup.suite[host],
            integrity: self.setup.integrity,
            handshake: self.setup.handshake,
            paths: paths.collect(),
            peers: vec![peer],
            addresses: addresses()[host].to_vec(),
            reachable: Vec::new(),
            gateway: Vec::new(),
            exit: Vec::new(),
            trusted_share: self.setup.trusted_share,
            bumps: bumps(&self.setup),
            pads,
            hold_without_trusted: self.setup.hold_without_trusted,
            scheduler: h.preferences.scheduler,
            hint: h.preferences.hint,
        };
        let node = Node::new(self.now, config, seed).expect("two different keys");
        let mut node = node.with_key_limits(self.setup.keys);
        self.hosts[host].tell_flows(&mut node);
        node
    }

    /// Lets a host work until it has nothing to do.
    fn pump(&mut self, host: usize) -> Result<(), String> {
        if self.hosts[host].asleep_until > self.now {
            return Ok(());
        }
        for round in 0..10_000 {
            let mut worked = false;
            for conn in &mut self.conns {
                worked |= conn.work(self.now, host, &mut self.hosts[host].kernel)?;
            }
            let packets = self.hosts[host].kernel.poll(self.now);
            worked |= !packets.is_empty();
            self.route(host, packets)?;
            worked |= self.drain(host, round == 0 || worked)?;
            if !worked {
                return Ok(());
            }
        }
        Err(format!("{} works without end", name(host)))
    }

    /// Takes what a node has for the network, its kernel and its owner. Unless something was put in, or
    /// comes out, it has not changed since its bounds were looked at.
    fn drain(&mut self, host: usize, changed: bool) -> Result<bool, String> {
        let now = self.now;
        let mut worked = false;
        let before = self.hosts[host].reasons();
        let h = &mut self.hosts[host];
        let Some(node) = &mut h.node else {
            return Ok(false);
        };
        while let Some(tap) = node.poll_tap() {
            self.observer.tap(host, h.instances, tap);
        }
        let mut sends = Vec::new();
        // At first as if there were more to come, as a busy host has it.
        for more_comes in [true, false] {
            node.set_more_comes(more_comes);
            while let Some(t) = node.poll_transmit(now) {
                let whole = t.bytes.chunks(t.segment.max(1));
                sends.extend(whole.map(|d| (t.path, t.to, d.to_vec())));
                if sends.len() > 200_000 {
                    return Err("a node sends without end".into());
                }
            }
        }
        node.flush_injections();
        let mut injected = std::mem::take(&mut h.injected);
        while let Some(injection) = node.poll_injection() {
            injected.push((injection.bump, injection.frame().to_vec()));
            node.recycle(injection);
        }
        let mut events = std::mem::take(&mut h.events);
        while let Some(event) = node.poll_event() {
            events.push(event);
        }
        let reasons = [before, h.reasons()];
        for (bump, frame) in injected {
            worked = true;
            self.inject(host, bump, &frame)?;
        }
        for (path, to, datagram) in sends {
            worked = true;
            let len = datagram.len();
            let held = self.send(host, path, to, datagram)?;
            let shares = self.setup.share.1;
            let by = (name(host), path);
            let seen = self.hosts[host].check_wishes(now, by, (held, len), &reasons, shares)?;
            self.coverage.note_all(seen);
        }
        self.observer.settle()?;
        let changed = changed || worked || !events.is_empty();
        for event in events {
            self.note(host, event)?;
        }
        self.note_sent(host);
        if changed {
            checks::check_bounds(self, host)?;
        }
        Ok(worked)
    }

    fn note(&mut self, host: usize, event: Event) -> Result<(), String> {
        let now = self.now;
        let Self { hosts, conns, .. } = self;
        let sockets = Sockets(conns, &self.by_pair[host], host);
        let h = &mut hosts[host];
        let Some(node) = &mut h.node else {
            return Ok(());
        };
        let kernel = &h.kernel;
        let at = &mut At::new(now, node, kernel, sockets);
        match event {
            Event::Control { peer, bytes } => {
                at.node.control_done(peer);
                self.coverage.note(Seen::ControlArrived);
                if self.said.take_message(&bytes)? {
                    h.steering.on_message(at, &bytes);
                }
            }
            Event::Drained { bump, tuple, .. } => h.steering.on_drained(at, bump, tuple),
            Event::PeerUp { restarted, .. } => h.steering.on_peer_up(at, restarted),
            Event::PeerDown { .. } => h.steering.look_at_sessions(at),
            Event::Renumbered { bump, tuple } => {
                if !self.setup.between.renumbers {
                    return Err(format!("nobody changes TCP's numbers: {event:?}"));
                }
                self.coverage.note(Seen::Renumbered);
                self.excused.extend(self.by_pair[host].get(&tuple));
                h.steering.on_renumbered(at, bump, tuple);
            }
            _ => {}
        }
        self.note_sent(host);
        Ok(())
    }

    /// Learns what a host's daemon has said, and sends what it sends in plain.
    fn note_sent(&mut self, host: usize) {
        let steering = &mut self.hosts[host].steering;
        self.said.switches.extend(steering.take_sent());
        for packet in steering.take_knocks() {
            self.show(host, packet);
        }
    }
}

/// A number that stands for a run's report.
pub fn fingerprint(report: &Report) -> u64 {
    observer::digest(format!("{report:?}").as_bytes())
}
