//! The data path: one thread that owns the node, the TUNs and the sockets of the paths.
//!
//! It waits for packets, for commands of the main thread and for the node's deadline, and moves what
//! there is in rounds that are bounded, so that neither side starves. It takes no locks and, once its
//! buffers have grown, allocates nothing for a packet. It never waits for the main thread: what that
//! has to know goes by a bounded channel, and waits here while that is full.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dibs_core::Time;
use dibs_core::buffer::Buffer;
use dibs_core::node::{Event, Node};
use dibs_io::{
    Endpoint, Family, Interest, PathSocket, Poller, RECV_BATCH, RecvBatch, Tun, boottime_ns,
    precise_timers,
};
use dibs_settings::BumpId;
use dibs_switch::messages::Message;
use dibs_wire::FlowKey;
use tokio::sync::oneshot;

use crate::data::priority::Priority;
use crate::data::socket::{PathIo, unscoped};
use crate::data::{
    Command, Drain, Driver, DriverCounters, Notice, Notices, Snapshot, Teller, notice_channel,
};

/// Receive calls for one socket in a round: each brings a quarter of a MiB at most.
const RECEIVES: usize = 3;
/// Datagrams in a receive call behind which more will have come meanwhile. They go into the same round,
/// whose acknowledgements go together.
const MORE_COME_BEHIND: usize = 32;
/// Packets read from one TUN in a round.
const READS: usize = 64;
/// Bytes read from one TUN in a round, about: what is read is sent while it is in the cache.
const READ_BYTES: usize = 256 << 10;
/// Sends in a round; each may be a run of 64 KiB.
const SENDS: usize = 32;

/// Paths that the tokens have room for.
pub(crate) const MAX_PATHS: usize = 32;
/// Bump ids, 0 (plain) among them.
const BUMPS: usize = 16;

const WAKER: u64 = 0;
const TUNS: u64 = 1 << 8;
const SOCKETS: u64 = 1 << 16;

/// Where a bump's TUN stands.
fn place(bump: BumpId) -> usize {
    bump.get().into()
}

fn socket_token(path: usize, family: Family) -> u64 {
    SOCKETS + 2 * path as u64 + u64::from(family == Family::V6)
}

/// What a wait found, a bit for each token of a kind.
#[derive(Default)]
struct Ready {
    woken: bool,
    tuns: u16,
    readable: u64,
    writable: u64,
}

struct DataPath {
    node: Node,
    poller: Poller,
    commands: Receiver<Command>,
    teller: Teller,
    /// What the main thread is to be told before anything else: a TUN is lost once until it is given another.
    lost_tuns: VecDeque<Notice>,
    paths: Vec<PathIo>,
    tuns: [Option<Tun>; BUMPS],
    batch: RecvBatch,
    /// A buffer that no packet was read into.
    spare: Option<Buffer>,
    /// Since 1970: before that an earlier daemon called peers, which refuse older calls.
    earliest: Duration,
    /// Who waits for connections to have nothing under way.
    drains: Vec<(BumpId, FlowKey, oneshot::Sender<()>)>,
    counters: DriverCounters,
    priority: Option<Priority>,
}

/// Starts the thread of the data path. Its notices end with it; the handle gives its error. Whatever the
/// clock says, the node is told that it is `earliest` at least, since 1970.
pub(crate) fn start(
    node: Node,
    names: Vec<String>,
    earliest: Duration,
) -> io::Result<(Driver, Notices, JoinHandle<io::Result<()>>)> {
    let poller = Poller::new()?;
    let waker = poller.waker(WAKER)?;
    let (commands, inbox) = channel();
    let (teller, told) = notice_channel(waker.clone());
    let thread = std::thread::Builder::new()
        .name("data".to_owned())
        .spawn(move || {
            precise_timers()?;
            data_path(node, poller, inbox, teller, names, earliest).run()
        })?;
    Ok((Driver::new(commands, waker), told, thread))
}

fn data_path(
    node: Node,
    poller: Poller,
    commands: Receiver<Command>,
    teller: Teller,
    names: Vec<String>,
    earliest: Duration,
) -> DataPath {
    DataPath {
        node,
        earliest,
        poller,
        commands,
        teller,
        lost_tuns: VecDeque::new(),
        paths: names.into_iter().map(PathIo::new).collect(),
        tuns: Default::default(),
        batch: RecvBatch::new(),
        spare: None,
        drains: Vec::new(),
        counters: DriverCounters::default(),
        // A kernel without it tells nobody what the scheduler does.
        priority: Priority::new(Time::from_nanos(boottime_ns())).ok(),
    }
}

impl DataPath {
    /// Runs until it is told to stop.
    fn run(&mut self) -> io::Result<()> {
        let mut more = false;
        loop {
            let ready = self.wait(more)?;
            let now = Time::from_nanos(boottime_ns());
            if let Some(priority) = &mut self.priority {
                priority.look(now);
            }
            if ready.woken && !self.take_commands(now) {
                return Ok(());
            }
            self.receive(now, ready.readable);
            let more_comes = self.read_tuns(now, ready.tuns);
            self.node.set_more_comes(more_comes);
            if self.node.poll_timeout().is_some_and(|due| due.at <= now) {
                let wall = SystemTime::now().duration_since(UNIX_EPOCH);
                let wall = wall.unwrap_or_default().max(self.earliest);
                self.node.handle_timeout(now, wall);
            }
            self.node.flush_injections();
            self.inject();
            self.drain_backlogs(ready.writable)?;
            more = self.transmit(now)? || more_comes;
            self.report();
        }
    }

    /// Waits for readiness and the node's deadline; not at all if there is more to send.
    fn wait(&mut self, more: bool) -> io::Result<Ready> {
        let timeout = if more {
            Some(Duration::ZERO)
        } else {
            let due = self.node.poll_timeout();
            tracing::trace!(?due, "the data thread waits");
            due.map(|due| due.at.since(Time::from_nanos(boottime_ns())))
        };
        self.poller.wait(timeout)?;
        let mut ready = Ready::default();
        for event in self.poller.events() {
            match event.token {
                WAKER => ready.woken = true,
                token if token >= SOCKETS => {
                    let bit = 1u64 << (token - SOCKETS);
                    ready.readable |= if event.readable { bit } else { 0 };
                    ready.writable |= if event.writable { bit } else { 0 };
                }
                token => ready.tuns |= 1 << (token - TUNS),
            }
        }
        Ok(ready)
    }

    fn receive(&mut self, now: Time, readable: u64) {
        for index in 0..self.paths.len() {
            for family in [Family::V4, Family::V6] {
                if readable & 1 << (socket_token(index, family) - SOCKETS) != 0 {
                    self.receive_from(now, index, family);
                }
            }
        }
    }

    fn receive_from(&mut self, now: Time, index: usize, family: Family) {
        for _ in 0..RECEIVES {
            let Some(socket) = &mut self.paths[index].socket else {
                return;
            };
            match socket.recv(family, &mut self.batch) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return self.paths[index].note_error("receive", &error, now),
            }
            let (mut runs, mut datagrams) = (0, 0);
            for mut run in self.batch.iter_mut() {
                let (from, marked) = (unscoped(run.remote), run.marked);
                let node = &mut self.node;
                for datagram in run.datagrams() {
                    match marked {
                        false => node.handle_datagram(now, index, from, datagram),
                        true => node.handle_marked_datagram(now, index, from, datagram),
                    }
                    datagrams += 1;
                }
                runs += 1;
            }
            // What is complete goes on while it is in the cache.
            self.inject();
            if runs < RECV_BATCH && datagrams < MORE_COME_BEHIND {
                return;
            }
        }
    }

    /// Reads what the kernel has, up to a bound; true if there may be more.
    fn read_tuns(&mut self, now: Time, ready: u16) -> bool {
        let mut more = false;
        for bump in BumpId::all() {
            if ready & 1 << bump.get() != 0 {
                more |= self.read_tun(now, bump);
            }
        }
        more
    }

    fn read_tun(&mut self, now: Time, bump: BumpId) -> bool {
        let mut bytes = 0;
        for _ in 0..READS {
            if bytes >= READ_BYTES {
                break;
            }
            let Some(tun) = &self.tuns[place(bump)] else {
                return false;
            };
            let mut buffer = match self.spare.take() {
                Some(buffer) => buffer,
                None => self.node.tun_buffer(),
            };
            match tun.recv(&mut buffer) {
                Ok(len) => {
                    bytes += len;
                    self.node.handle_tun(now, bump, buffer, len);
                }
                Err(error) => {
                    self.spare = Some(buffer);
                    match error.kind() {
                        io::ErrorKind::WouldBlock => {}
                        io::ErrorKind::Interrupted => continue,
                        // The device is gone: somebody deleted it.
                        _ => self.lose_tun(bump, error),
                    }
                    return false;
                }
            }
        }
        true
    }

    /// A TUN that cannot be read would be reported as ready for ever.
    fn lose_tun(&mut self, bump: BumpId, error: io::Error) {
        if let Some(tun) = self.tuns[place(bump)].take() {
            // Fails only if the descriptor is not watched.
            let _ = self.poller.remove(&tun);
            self.lost_tuns.push_back(Notice::TunLost {
                bump,
                tun: Box::new(tun),
                error,
            });
        }
    }

    fn inject(&mut self) {
        while let Some(injection) = self.node.poll_injection() {
            match &mut self.tuns[place(injection.bump)] {
                Some(tun) => {
                    if tun.send(injection.frame()).is_err() {
                        self.counters.tun_write_refused += 1;
                    }
                }
                None => self.counters.tun_missing += 1,
            }
            self.node.recycle(injection);
        }
    }

    /// Sends what the node has, up to a bound; true if there may be more.
    fn transmit(&mut self, now: Time) -> io::Result<bool> {
        for _ in 0..SENDS {
            let Some(transmit) = self.node.poll_transmit(now) else {
                return Ok(false);
            };
            let index = transmit.path;
            let path = &mut self.paths[index];
            let was_blocked = path.is_blocked();
            let to = Endpoint {
                ect: transmit.ect,
                ..Endpoint::from(transmit.to)
            };
            let too_big = path.send(now, to, transmit.bytes, transmit.segment);
            if path.is_blocked() && !was_blocked {
                self.watch(index, Interest::ReadWrite)?;
            }
            if let Some(size) = too_big {
                self.node.datagram_too_big(now, index, size);
            }
        }
        Ok(true)
    }

    /// Sends what a full socket did not take before.
    fn drain_backlogs(&mut self, writable: u64) -> io::Result<()> {
        for index in 0..self.paths.len() {
            let bits = 0b11 << (2 * index);
            if writable & bits != 0 && self.paths[index].is_blocked() {
                self.paths[index].drain();
                if !self.paths[index].is_blocked() {
                    self.watch(index, Interest::Read)?;
                }
            }
        }
        Ok(())
    }

    fn watch(&self, index: usize, interest: Interest) -> io::Result<()> {
        let Some(socket) = &self.paths[index].socket else {
            return Ok(());
        };
        for family in [Family::V4, Family::V6] {
            if let Some(fd) = socket.fd(family) {
                self.poller
                    .modify(fd, socket_token(index, family), interest)?;
            }
        }
        Ok(())
    }

    /// Tells what there is room for; the rest waits, in the node if it comes from there.
    fn report(&mut self) {
        while self.teller.has_room() {
            if let Some(notice) = self.lost_tuns.pop_front() {
                self.teller.tell(notice);
                continue;
            }
            match self.node.poll_event() {
                Some(Event::Drained { bump, tuple, .. }) => self.drained(bump, tuple),
                Some(Event::Control { peer, bytes }) => {
                    let message = self.decode(peer, &bytes);
                    self.teller.tell(Notice::Message { peer, message });
                }
                Some(event) => self.teller.tell(Notice::Node(event)),
                None => return,
            }
        }
    }

    /// A message as it goes to a peer: connections are called there as the peer calls them.
    fn encode(&self, peer: usize, mut message: Message) -> Vec<u8> {
        for named in message.body.named_mut() {
            named.pair = self.node.theirs(peer, named.pair);
        }
        message.encode()
    }

    /// The message that a peer sent, unless it is none: connections are called as they are here.
    fn decode(&self, peer: usize, bytes: &[u8]) -> Option<Message> {
        let mut message = Message::decode(bytes).ok()?;
        for named in message.body.named_mut() {
            named.pair = self.node.ours(peer, named.pair.reversed()).reversed();
        }
        Some(message)
    }

    fn drain(&mut self, now: Time, drain: Drain, done: oneshot::Sender<()>) {
        let Drain { bump, tuple, .. } = drain;
        self.drains.retain(|(.., done)| !done.is_closed());
        self.drains.push((bump, tuple, done));
        self.node.drain(now, bump, tuple, drain.window_scale);
        if drain.refuses {
            self.node.refuse(bump, tuple);
        }
    }

    fn drained(&mut self, bump: BumpId, tuple: FlowKey) {
        while let Some(at) = self
            .drains
            .iter()
            .position(|(b, t, _)| (*b, *t) == (bump, tuple))
        {
            // Whoever asked may have given up waiting.
            let _ = self.drains.swap_remove(at).2.send(());
        }
    }

    /// Carries out what waits; false: to stop.
    fn take_commands(&mut self, now: Time) -> bool {
        loop {
            let command = match self.commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            };
            // Whoever asked may have given up waiting for the answer.
            match command {
                Command::AddTun { bump, tun, done } => {
                    let _ = done.send(self.add_tun(bump, *tun));
                }
                Command::RemoveTun { bump, done } => {
                    let tun = self.tuns[place(bump)].take();
                    if let Some(tun) = &tun {
                        let _ = self.poller.remove(tun);
                    }
                    let _ = done.send(tun.map(Box::new));
                }
                Command::SetSocket { path, socket, done } => {
                    let _ = done.send(self.set_socket(path, *socket));
                }
                Command::SetPath {
                    path,
                    up,
                    mtu,
                    addresses,
                } => {
                    self.node.set_path_addresses(now, path, addresses);
                    self.node.set_path(now, path, up, mtu);
                    if let Some(socket) = &mut self.paths[path].socket {
                        socket.retry_offloads();
                    }
                }
                Command::SetUsage { path, usage } => self.node.set_usage(now, path, usage),
                Command::SetEndpoints { peer, endpoints } => {
                    self.node.set_endpoints(now, peer, endpoints);
                }
                Command::SetScheduler(scheduler) => self.node.set_scheduler(scheduler),
                Command::SetFlowSchedulers(schedulers) => {
                    self.node.set_flow_schedulers(schedulers);
                }
                Command::Prefer(hint) => self.node.prefer(hint),
                Command::ExpectRate {
                    path,
                    to,
                    bytes_per_second,
                } => self.node.expect_rate(now, path, to, bytes_per_second),
                Command::SetAddresses(addresses) => self.node.set_addresses(addresses),
                Command::SetReachable(addresses) => self.node.set_reachable(addresses),
                Command::SendControl {
                    peer,
                    message,
                    patience,
                    done,
                } => {
                    let bytes = self.encode(peer, message);
                    let _ = done.send(self.node.send_control(now, peer, &bytes, patience));
                }
                Command::ControlDone { peer } => self.node.control_done(peer),
                Command::Drain(drain, done) => self.drain(now, drain, done),
                Command::EndDrain { bump, tuple } => self.node.end_drain(bump, tuple),
                Command::Resume {
                    bump,
                    tuple,
                    outstanding,
                } => self.node.resume(now, bump, tuple, outstanding),
                Command::Match { peer, ours, theirs } => self.node.match_names(peer, ours, theirs),
                Command::ForgetMatch { peer, ours } => self.node.forget_match(peer, ours),
                Command::Enter { bump, tuple, was } => self.node.enter(now, bump, tuple, was),
                Command::Solicit { bump, tuple } => self.node.solicit(bump, tuple),
                Command::Measure { peer, load, done } => {
                    let _ = done.send(self.node.measure(now, peer, load.0, &load.1));
                }
                Command::Snapshot(done) => {
                    let _ = done.send(self.snapshot(now));
                }
                Command::Conns(done) => {
                    let _ = done.send((now, self.node.conns()));
                }
                Command::Seen {
                    bump,
                    mut tuples,
                    done,
                } => {
                    tuples.retain(|tuple| self.node.is_seen(bump, *tuple));
                    let _ = done.send(tuples);
                }
                Command::Ping(done) => {
                    let _ = done.send(());
                }
                Command::Stop => return false,
            }
        }
    }

    fn add_tun(&mut self, bump: BumpId, tun: Tun) -> io::Result<()> {
        self.poller
            .add(&tun, TUNS + u64::from(bump.get()), Interest::Read)?;
        self.tuns[place(bump)] = Some(tun);
        Ok(())
    }

    /// Puts a path's socket in place of the one before, whose descriptor is closed with it.
    fn set_socket(&mut self, path: usize, socket: PathSocket) -> io::Result<()> {
        for family in [Family::V4, Family::V6] {
            if let Some(fd) = socket.fd(family) {
                self.poller
                    .add(fd, socket_token(path, family), Interest::Read)?;
            }
        }
        self.paths[path].replace(socket);
        Ok(())
    }

    fn snapshot(&self, now: Time) -> Snapshot {
        let mut counters: Vec<(&'static str, u64)> = self.node.counters().iter().collect();
        counters.extend(self.counters.named());
        let taken = self.priority.as_ref().map_or(0, |p| p.taken);
        counters.push(("processor_scarce", taken));
        let tuns = || self.tuns.iter().flatten();
        counters.push((
            "tun_gso_refused",
            tuns().map(|tun| tun.counters().gso_refused).sum(),
        ));
        Snapshot {
            now,
            peers: self.node.peers(now),
            paths: self.node.paths(),
            sockets: self.paths.iter().map(PathIo::snapshot).collect(),
            carried: self.node.carried().to_vec(),
            counters,
        }
    }
}
