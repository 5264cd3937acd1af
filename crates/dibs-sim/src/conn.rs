//! A connection between two applications, and whether it keeps its promises.

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::time::Duration;

use dibs_core::Time;
use dibs_netem::rng::mix;
use dibs_switch::conns::Socket;
use dibs_switch::matching::Carrying;
use dibs_wire::FlowKey;
use smoltcp::iface::SocketHandle;
use smoltcp::socket::tcp::{self, CongestionControl, State};
use smoltcp::time::Duration as SmolDuration;

use crate::history::{Order, Plan};
use crate::kernel::Kernel;
use crate::payload::Stream;

/// One end.
#[derive(Debug)]
struct End {
    host: usize,
    socket: SocketHandle,
    sends: Stream,
    receives: Stream,
    to_send: u64,
    sent: u64,
    expected: u64,
    received: u64,
    closed: bool,
    eof: bool,
    read_at: Time,
    stopped: bool,
}

/// Both ends of a connection.
#[derive(Debug)]
pub struct Conn {
    /// Plan.
    pub plan: Plan,
    /// Ports of client and server.
    pub ports: (u16, u16),
    /// The same at each host, with addresses.
    pub pairs: [FlowKey; 2],
    /// True if it is kept open although all has been said.
    pub lingers: bool,
    /// Both ends closed at once; one went on after the other had closed.
    pub closes: [bool; 2],
    /// A reader stopped for a while.
    pub stopped: bool,
    /// One of the ends gave up.
    pub aborted: bool,
    /// True if the connection was in plain, wherever it began.
    pub left: bool,
    number: u32,
    ends: [End; 2],
    pause_until: Option<Time>,
    removed: bool,
}

impl Conn {
    /// Opens it.
    pub fn open(
        number: usize,
        plan: Plan,
        ports: (u16, u16),
        addresses: [[IpAddr; 2]; 2],
        kernels: [&mut Kernel; 2],
    ) -> Self {
        let family = usize::from(plan.v6);
        let server = 1 - plan.client;
        let [a, b] = kernels;
        let (here, there) = if plan.client == 0 { (a, b) } else { (b, a) };
        let (rx, tx) = (plan.rx, plan.buffer);
        let sockets = [here.socket(rx, tx), there.socket(rx, tx)];
        let control = if plan.cubic {
            CongestionControl::Cubic
        } else {
            CongestionControl::None
        };
        for (kernel, socket) in [(&mut *here, sockets[0]), (&mut *there, sockets[1])] {
            let socket = kernel.sockets.get_mut::<tcp::Socket<'_>>(socket);
            socket.set_congestion_control(control);
            socket.set_keep_alive(
                plan.keepalive
                    .map(|t| SmolDuration::from_millis(t.as_millis() as u64)),
            );
        }
        if plan.urgent {
            here.urgent.insert(ports.0);
            there.urgent.insert(ports.1);
        }
        let from = (addresses[plan.client][family], ports.0);
        let to = (addresses[server][family], ports.1);
        there
            .sockets
            .get_mut::<tcp::Socket<'_>>(sockets[1])
            .listen(to)
            .expect("a fresh socket listens");
        here.connect(sockets[0], to, from);
        let pair = FlowKey::tcp(from, to);
        let stream = |end: usize| Stream {
            key: mix(2 * number as u64 + end as u64 + 1),
            kind: plan.kind,
        };
        let end = |end: usize, host| End {
            host,
            socket: sockets[end],
            sends: stream(end),
            receives: stream(1 - end),
            to_send: plan.bytes[end],
            sent: 0,
            expected: plan.bytes[1 - end],
            received: 0,
            closed: false,
            eof: false,
            read_at: Time::ZERO,
            stopped: false,
        };
        Self {
            plan,
            ports,
            pairs: match plan.client {
                0 => [pair, pair.reversed()],
                _ => [pair.reversed(), pair],
            },
            lingers: plan.lingers,
            closes: [false; 2],
            stopped: false,
            aborted: false,
            left: false,
            number: number as u32,
            ends: [end(0, plan.client), end(1, server)],
            pause_until: None,
            removed: false,
        }
    }

    /// Lets the application at `host` work.
    ///
    /// # Errors
    /// A promise is broken; the sentence says which.
    pub fn work(&mut self, now: Time, host: usize, kernel: &mut Kernel) -> Result<bool, String> {
        if self.removed {
            return Ok(false);
        }
        let end = usize::from(self.ends[0].host != host);
        let (paused, halfway) = (self.is_paused(now), self.halfway(end));
        let this = &mut self.ends[end];
        let socket = kernel.sockets.get_mut::<tcp::Socket<'_>>(this.socket);
        if this.is_done() && socket.state() == State::Closed {
            return Ok(false);
        }
        let mut worked = this.read(now, socket, &self.plan)?;
        self.stopped |= this.stopped;
        self.closes[0] |= socket.state() == State::Closing;
        self.closes[1] |= socket.state() == State::FinWait2 && this.received < this.expected;
        let may_speak = match (self.plan.order, end) {
            (Order::Both, _) | (Order::HalfClose | Order::Reply, 0) => true,
            (Order::HalfClose, _) => this.eof,
            (Order::Reply, _) => this.received == this.expected,
        };
        if may_speak && !paused {
            worked |= this.write(socket, halfway);
        }
        let waits_for_answer = self.plan.order == Order::Reply && end == 0;
        let said_all = this.sent == this.to_send && may_speak;
        // In LAST-ACK smoltcp sees no window open but by an acknowledgement of something new, and never sends
        // again what was lost before. Windows close where plans say so, and at each switch to plain. So
        // who is the second to close waits until all that it sent has been acknowledged.
        let first = self.plan.keepalive.is_none() && socket.state() != State::CloseWait;
        let may_close = first || socket.send_queue() == 0;
        if said_all
            && may_close
            && !self.lingers
            && !this.closed
            && (!waits_for_answer || this.received == this.expected)
            && socket.may_send()
        {
            socket.close();
            this.closed = true;
            worked = true;
        }
        let ended = socket.state() == State::Closed && !socket.can_recv();
        if ended && !this.is_done() && !self.aborted {
            return Err(format!(
                "a connection died at {}: sent {}, received {}, eof {}",
                crate::history::name(host),
                this.sent,
                this.received,
                this.eof
            ));
        }
        if self.plan.pause > Duration::ZERO
            && self.pause_until.is_none()
            && self.ends.iter().all(|e| e.sent >= e.to_send / 2)
        {
            self.pause_until = Some(now + self.plan.pause);
        }
        Ok(worked)
    }

    fn is_paused(&self, now: Time) -> bool {
        self.pause_until.is_some_and(|t| now < t)
    }

    /// Bytes that this end sends before the pause.
    fn halfway(&self, end: usize) -> u64 {
        let whole = self.plan.bytes[end];
        if self.plan.pause.is_zero() || self.pause_until.is_some() || self.plan.order != Order::Both
        {
            whole
        } else {
            whole / 2
        }
    }

    /// When an application wants to work although nothing arrived.
    pub fn wakes_at(&self, now: Time) -> Option<Time> {
        if self.is_done() {
            return None;
        }
        let pause = self.pause_until.filter(|t| *t > now);
        let reads = self.ends.iter().map(|e| e.read_at).filter(|t| *t > now);
        reads.chain(pause).min()
    }

    /// Gives it up at one end.
    pub fn abort(&mut self, end: usize, kernel: &mut Kernel) {
        if self.removed {
            return;
        }
        self.aborted = true;
        let socket = self.ends[end].socket;
        kernel.sockets.get_mut::<tcp::Socket<'_>>(socket).abort();
    }

    /// The host of an end.
    pub fn host(&self, end: usize) -> usize {
        self.ends[end].host
    }

    /// True if both ends have all that they were to get.
    pub fn is_done(&self) -> bool {
        self.aborted || self.ends.iter().all(End::is_done)
    }

    /// Takes the sockets away, for good: late packets find nothing.
    pub fn remove(&mut self, kernels: [&mut Kernel; 2]) {
        if !std::mem::replace(&mut self.removed, true) {
            let [a, b] = kernels;
            for end in &self.ends {
                let kernel = if end.host == 0 { &mut *a } else { &mut *b };
                kernel.sockets.remove(end.socket);
            }
        }
    }

    /// True if its sockets are in a state that needs no more packets.
    pub fn is_over(&self, kernels: [&Kernel; 2]) -> bool {
        self.removed
            || self.ends.iter().all(|e| {
                let socket = kernels[e.host].sockets.get::<tcp::Socket<'_>>(e.socket);
                socket.state() == State::Closed
            })
    }

    /// State of its socket at `host`.
    pub fn state(&self, host: usize, kernel: &Kernel) -> State {
        let end = &self.ends[usize::from(self.ends[0].host != host)];
        match self.removed {
            true => State::Closed,
            false => kernel.sockets.get::<tcp::Socket<'_>>(end.socket).state(),
        }
    }

    /// True if a socket at `host` is not closed.
    pub fn lives(&self, host: usize, kernel: &Kernel) -> bool {
        self.state(host, kernel) != State::Closed
    }

    /// True if its socket at a host waits for a call.
    pub fn listens(&self, host: usize, kernel: &Kernel) -> bool {
        self.state(host, kernel) == State::Listen
    }

    /// Has its socket at a host listen that answers a call. One of Linux listens beside what it answers, one of smoltcp does not.
    pub fn listen_again(&self, host: usize, kernel: &mut Kernel) {
        let end = &self.ends[usize::from(self.ends[0].host != host)];
        if self.state(host, kernel) == State::SynReceived {
            let socket = kernel.sockets.get_mut::<tcp::Socket<'_>>(end.socket);
            let local = socket.local_endpoint().expect("it answers from there");
            socket.abort();
            socket.listen(local).expect("a closed socket listens");
        }
    }

    /// True if its handshake is over at a host.
    pub fn is_open(&self, host: usize, kernel: &Kernel) -> bool {
        let begins = [State::Listen, State::SynSent, State::SynReceived];
        self.lives(host, kernel) && !begins.contains(&self.state(host, kernel))
    }

    /// Numbers that a host's kernel gives of its socket.
    pub fn carrying(&self, host: usize, kernel: &Kernel) -> Carrying {
        let end = &self.ends[usize::from(self.ends[0].host != host)];
        let waiting = match self.removed {
            true => 0,
            false => {
                let socket = kernel.sockets.get::<tcp::Socket<'_>>(end.socket);
                socket.recv_queue() as u64
            }
        };
        Carrying {
            socket: self.socket(host),
            sent: end.sent,
            received: end.received + waiting,
        }
    }

    /// How a host's kernel numbers its socket.
    pub fn socket(&self, host: usize) -> Socket {
        Socket(2 * self.number + host as u32 + 1)
    }

    /// Payload bytes that arrived.
    pub fn received(&self) -> u64 {
        self.ends.iter().map(|e| e.received).sum()
    }

    /// How far it has come, for who looks for a fault.
    pub fn describe(&self, kernels: [&Kernel; 2]) -> String {
        let ends = self.ends.iter().map(|e| {
            let state = if self.removed {
                State::Closed
            } else {
                let socket = kernels[e.host].sockets.get::<tcp::Socket<'_>>(e.socket);
                socket.state()
            };
            format!(
                "{} sent {}/{} received {}/{} eof {} {state}",
                crate::history::name(e.host),
                e.sent,
                e.to_send,
                e.received,
                e.expected,
                e.eof
            )
        });
        let ends: Vec<String> = ends.collect();
        format!("ports {:?}: {}", self.ports, ends.join("; "))
    }
}

impl End {
    fn read(
        &mut self,
        now: Time,
        socket: &mut tcp::Socket<'_>,
        plan: &Plan,
    ) -> Result<bool, String> {
        let mut worked = false;
        // When TIME-WAIT ends smoltcp forgets what was not read.
        let hurries = socket.state() == State::TimeWait;
        let slow = plan.slow.filter(|_| !hurries);
        if let Some(stop) = plan.stops
            && !self.stopped
            && self.expected > 0
            && self.received >= self.expected / 2
        {
            self.stopped = true;
            self.read_at = now + stop;
        }
        while socket.can_recv() && (hurries || now >= self.read_at) {
            let (at, stream) = (self.received, self.receives);
            let read = socket.recv(|bytes| {
                let take = if slow.is_some() {
                    bytes.len().min(1000)
                } else {
                    bytes.len()
                };
                let mut want = vec![0; take];
                stream.fill(at, &mut want);
                if want == bytes[..take] {
                    return (take, Ok(take));
                }
                let wrong = want.iter().zip(&*bytes).position(|(a, b)| a != b);
                (take, wrong.map_or(Ok(take), Err))
            });
            match read {
                Ok(Ok(len)) => self.received += len as u64,
                Ok(Err(wrong)) => {
                    return Err(format!(
                        "wrong bytes delivered from {} on",
                        at + wrong as u64
                    ));
                }
                Err(_) => break,
            }
            if let Some(interval) = slow {
                self.read_at = now + interval;
            }
            worked = true;
        }
        if self.received > self.expected {
            return Err(format!(
                "{} bytes delivered of {}",
                self.received, self.expected
            ));
        }
        let connected = !matches!(
            socket.state(),
            State::Listen | State::SynSent | State::SynReceived | State::Closed
        );
        if connected && !socket.may_recv() && !socket.can_recv() && !self.eof {
            self.eof = true;
            worked = true;
            if self.received < self.expected {
                return Err(format!(
                    "an end of stream at {} of {}",
                    self.received, self.expected
                ));
            }
        }
        // Both ends had closed before everything was read.
        self.eof |= self.closed
            && socket.state() == State::Closed
            && !socket.can_recv()
            && self.received == self.expected;
        Ok(worked)
    }

    fn write(&mut self, socket: &mut tcp::Socket<'_>, until: u64) -> bool {
        let mut worked = false;
        while self.sent < until && socket.can_send() {
            let left = until - self.sent;
            let (at, stream) = (self.sent, self.sends);
            let wrote = socket.send(|room| {
                let len = (room.len() as u64).min(left) as usize;
                stream.fill(at, &mut room[..len]);
                (len, len)
            });
            match wrote {
                Ok(len) if len > 0 => self.sent += len as u64,
                _ => break,
            }
            worked = true;
        }
        worked
    }

    fn is_done(&self) -> bool {
        self.closed && self.eof && self.received == self.expected && self.sent == self.to_send
    }
}
