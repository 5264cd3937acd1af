//! Between the hosts: the paths with who sits on them, and the ordinary route.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump::SCRAMBLE;
use dibs_core::counters::Counter;
use dibs_core::session::Integrity;
use dibs_netem::rng::mix;
use dibs_netem::{Cause, Fate};
use dibs_settings::BumpId;
use dibs_wire::FlowKey;
use dibs_wire::packet::{Segment, flags};
use smoltcp::socket::tcp::State;

use super::route::Crossed;
use super::{World, endpoint};
use crate::adversary::Put;
use crate::coverage::Seen;
use crate::history::{Between, name, on};
use crate::kernel::Way;
use crate::observer::Held;
use crate::offload;
use crate::steering::{At, Sockets};

/// What may go to an unproved address beyond three times what came from it: frames that were on
/// their way there already.
const SLACK: u64 = 1500;
/// Time after which a connection that came from plain has to be seen to be carried there.
const PROVED: Duration = Duration::from_secs(120);
/// Packets in plain of which somebody sends the like, at most.
const MOST_FORGED: u64 = 300;
/// Of so many datagrams a router marks one for congestion.
const MARKED: u64 = 64;
/// Where a datagram without effect is counted.
const DROPS: [Counter; 26] = [
    Counter::HandshakeUntrusted,
    Counter::HandshakeUnsecured,
    Counter::HandshakeUnused,
    Counter::HandshakeMalformed,
    Counter::HandshakeMac1,
    Counter::HandshakeIntegrity,
    Counter::HandshakeCookie,
    Counter::HandshakeUnauthentic,
    Counter::HandshakeUnknownPeer,
    Counter::HandshakeReplayed,
    Counter::HandshakeCrossed,
    Counter::HandshakeUnknownIndex,
    Counter::HandshakeOverload,
    Counter::PathRefused,
    Counter::PathMisdirected,
    Counter::DatagramMalformed,
    Counter::DatagramUnknownIndex,
    Counter::DatagramExpired,
    Counter::DatagramReplayed,
    Counter::DatagramUnauthentic,
    Counter::BareRefused,
    Counter::WrongPath,
    Counter::PathNotValidated,
    Counter::FrameMalformed,
    Counter::PeerContradiction,
    Counter::AckRefused,
];

/// What is under way.
pub(super) enum What {
    Datagram(Put),
    Packet(Vec<u8>),
    /// Packets that the other host's daemon sent in plain.
    Shown(Vec<u8>),
}

/// The same, to a host.
pub(super) struct Arrival {
    pub(super) host: usize,
    pub(super) what: What,
}

impl World {
    pub(super) fn arrive(&mut self, arrival: Arrival) -> Result<(), String> {
        let Arrival { host, what } = arrival;
        if self.hosts[host].asleep_until > self.now {
            return Ok(());
        }
        match what {
            What::Packet(packet) => self.arrive_plain(host, packet),
            What::Shown(packet) => {
                let shown = offload::tcp(&packet).map(|s| s.tuple.reversed());
                let conn = shown.and_then(|pair| self.conn_of(host, &pair));
                self.shown.extend(conn.map(|conn| (conn, self.now)));
                self.arrive_plain(host, packet)
            }
            What::Datagram(put) => self.arrive_datagram(put),
        }
    }

    pub(super) fn arrive_plain(&mut self, host: usize, packet: Vec<u8>) -> Result<(), String> {
        self.hear_plain(host, &packet);
        if let Some(s) = offload::tcp(&packet) {
            let pair = s.tuple.reversed();
            if !self.is_called(host, &pair, s.has(flags::SYN)) {
                return Ok(());
            }
            let follow = self.follows(host, &pair);
            if !self.hosts[host].steering.admits(&pair, Way::Plain, follow) {
                return Ok(());
            }
            if self.required(host, &pair).is_some() {
                return Err(format!(
                    "{} took a plain packet of a required connection",
                    name(host)
                ));
            }
        }
        self.hosts[host].kernel.receive(packet, Way::Plain)
    }

    /// The daemon hears what comes in, before the kernel drops any of it.
    fn hear_plain(&mut self, host: usize, packet: &[u8]) {
        let now = self.now;
        let Self { hosts, conns, .. } = self;
        let sockets = Sockets(conns, &self.by_pair[host], host);
        let h = &mut hosts[host];
        if let Some(node) = &mut h.node {
            let at = &mut At::new(now, node, &h.kernel, sockets);
            h.steering.on_plain(at, packet);
        }
        self.note_sent(host);
    }

    /// The bump that this host requires by a connection's plan, if any.
    fn required(&self, host: usize, pair: &FlowKey) -> Option<BumpId> {
        let conn = self.conn_of(host, pair);
        self.conns[conn?].plan.require[host]
    }

    /// True if a call in plain is of a stranger behind the peer's public address, for whom rules hold no requirement: the model has only
    /// the one socket, which waits for the peer's.
    pub(super) fn is_anothers(&self, host: usize, call: &Segment<'_>) -> bool {
        let pair = call.tuple.reversed();
        self.required(host, &pair).is_some() && self.hosts[host].steering.requires(&pair).is_none()
    }

    /// Whether what comes by a bump pulls a connection there. Where only one end requires the bump,
    /// it has to.
    fn follows(&self, host: usize, pair: &FlowKey) -> bool {
        self.setup.follow || self.required(1 - host, &self.far(host, pair)).is_some()
    }

    /// A host's connection as the other one calls it, as that one sends.
    pub(super) fn far(&self, host: usize, pair: &FlowKey) -> FlowKey {
        let conn = self.conn_of(host, pair);
        conn.map_or_else(|| pair.reversed(), |conn| self.conns[conn].pairs[1 - host])
    }

    /// True if a host's kernel calls its connection so. The first call decides which of two names it has.
    fn is_called(&mut self, host: usize, pair: &FlowKey, calls: bool) -> bool {
        let Some(conn) = self.conn_of(host, pair) else {
            return true;
        };
        let conn = &mut self.conns[conn];
        if calls && conn.listens(host, &self.hosts[host].kernel) {
            conn.pairs[host] = *pair;
        }
        conn.pairs[host] == *pair
    }

    /// A call came by a bump. If the socket answers one by another name, that was a copy of an earlier connection's: such come in plain.
    fn listen_beside(&mut self, host: usize, pair: &FlowKey) {
        let conn = self.conn_of(host, pair).map(|conn| &self.conns[conn]);
        if let Some(conn) = conn.filter(|conn| conn.pairs[host] != *pair) {
            conn.listen_again(host, &mut self.hosts[host].kernel);
        }
    }

    /// The latest connection of these ends.
    pub(super) fn conn_of(&self, host: usize, pair: &FlowKey) -> Option<usize> {
        self.by_pair[host].get(pair).copied()
    }

    pub(super) fn arrive_datagram(&mut self, put: Put) -> Result<(), String> {
        let Put {
            host,
            path,
            from,
            mut bytes,
            forged,
            ..
        } = put;
        let link = &self.links[path];
        let (trusted, there) = (link.trusted, endpoint(path, 1 - host, link.v6));
        let h = &mut self.hosts[host];
        let Some(node) = h.node.as_mut().filter(|_| h.up[path]) else {
            return Ok(());
        };
        if let Some(from) = from {
            let (came, _) = self.lures.entry((host, path, from)).or_default();
            *came += bytes.len() as u64;
        }
        let drops = |node: &dibs_core::node::Node| -> u64 {
            DROPS.iter().map(|c| node.counters().get(*c)).sum()
        };
        // The second MAC of a handshake's message is read only under load: spoilt there alone it counts
        // as true.
        let handshake = matches!(bytes.first(), Some(1 | 2));
        let before = drops(node);
        let from = from.unwrap_or(there);
        // Dice of their own, so that all else that a seed draws is as without them.
        let dice = mix(self.now.as_nanos() ^ bytes.len() as u64);
        if self.setup.marks && dice.is_multiple_of(MARKED) {
            self.coverage.note(Seen::LinkMarked);
            node.handle_marked_datagram(self.now, path, from, &mut bytes);
        } else {
            node.handle_datagram(self.now, path, from, &mut bytes);
        }
        while let Some(tap) = node.poll_tap() {
            self.observer.tap(host, h.instances, tap);
        }
        let counted = drops(node) - before;
        if forged && counted != 1 && !(handshake && counted == 0) {
            return Err(format!(
                "a forged datagram of {} bytes at {} was counted {} times",
                bytes.len(),
                name(host),
                counted
            ));
        }
        let known = h.injected.len();
        while let Some(injection) = node.poll_injection() {
            h.injected
                .push((injection.bump, injection.frame().to_vec()));
            node.recycle(injection);
        }
        // What is encrypted whole, or split, may take any path.
        let opaque = |(bump, frame): &(BumpId, Vec<u8>)| {
            *bump == SCRAMBLE && offload::tcp(&frame[dibs_wire::virtio::LEN..]).is_none()
        };
        if !trusted && h.injected[known..].iter().any(opaque) {
            return Err(format!("an opaque packet came by untrusted path {path}"));
        }
        while let Some(event) = node.poll_event() {
            h.events.push(event);
        }
        Ok(())
    }

    /// Sends each packet of a kernel the way that its connection goes on this host.
    pub(super) fn route(&mut self, host: usize, packets: Vec<Vec<u8>>) -> Result<(), String> {
        let mut bumped: BTreeMap<BumpId, Vec<Vec<u8>>> = BTreeMap::new();
        for packet in packets {
            let pair = offload::tcp(&packet).map(|s| s.tuple);
            let Some(pair) = pair else {
                self.send_plain(host, packet);
                continue;
            };
            if self.by_pair[host].contains_key(&pair) {
                self.last.insert(pair, packet.clone());
            }
            self.excuse_half_open(host, &packet);
            let required = self.required(host, &pair);
            match self.hosts[host].steering.way(&pair) {
                Way::Bump(bump) if required.is_none_or(|required| required == bump) => {
                    self.on_bump[host].entry(pair).or_insert(self.now);
                    bumped.entry(bump).or_default().push(packet);
                }
                Way::Plain if required.is_none() => {
                    let has_data = offload::tcp(&packet).is_some_and(|s| !s.payload.is_empty());
                    // What another program does is not ours, until we could put it right.
                    let far = self.far(host, &pair);
                    let is_lost = self.hosts[1 - host].steering.is_lost(&far);
                    let is_ours = !(is_lost || self.hosts[host].steering.is_by_others(&pair));
                    let since = self.on_bump[host].remove(&pair);
                    // What ended is reset by whichever way.
                    let ended = offload::tcp(&packet).is_some_and(|s| s.has(flags::RST));
                    if let Some(since) = since.filter(|_| is_ours && !ended) {
                        self.check_leaving(host, &pair, since)?;
                    }
                    if !self.send_plain(host, packet)
                        && has_data
                        && is_ours
                        && !self.setup.between.tracks
                    {
                        return Err(format!(
                            "{} sent data in plain that plain does not carry",
                            name(host)
                        ));
                    }
                }
                way => {
                    return Err(format!(
                        "{} sent a packet of a connection that requires {} by {way:?}",
                        name(host),
                        on(required)
                    ));
                }
            }
        }
        for (bump, packets) in bumped {
            for segment in packets.iter().filter_map(|packet| offload::tcp(packet)) {
                let seen = self.hosts[host].schedulers_of(&segment.tuple);
                self.coverage.note_all(seen);
            }
            for frame in offload::frames(packets, &mut self.rng) {
                self.tun(host, bump, &frame);
            }
        }
        Ok(())
    }

    pub(super) fn tun(&mut self, host: usize, bump: BumpId, frame: &[u8]) {
        if let Some(node) = &mut self.hosts[host].node {
            let mut buffer = node.tun_buffer();
            buffer[..frame.len()].copy_from_slice(frame);
            node.handle_tun(self.now, bump, buffer, frame.len());
        }
    }

    /// Proof that a connection goes to plain by our doing only if plain was seen to carry it since it is on a bump.
    fn check_leaving(&mut self, host: usize, pair: &FlowKey, since: Time) -> Result<(), String> {
        let conn = self.conn_of(host, pair);
        let is_open = self.setup.between == Between::default();
        let Some(conn) = conn.filter(|conn| !is_open && !self.conns[*conn].aborted) else {
            return Ok(());
        };
        let known = &mut self.conns[conn];
        let began = known.plan.bump[known.plan.client].is_some();
        let is_from_plain = !began || std::mem::replace(&mut known.left, true);
        let is_fresh = is_from_plain && self.now.since(since) < PROVED;
        let is_shown = self.shown.get(&conn).is_some_and(|at| *at >= since);
        if is_fresh || is_shown || self.excused.contains(&conn) {
            return Ok(());
        }
        Err(format!(
            "{} took {pair} to plain, of which nothing had arrived there since {since:?}",
            name(host)
        ))
    }

    /// Sends a packet by the ordinary route. False if a device on the way drops it.
    pub(super) fn send_plain(&mut self, host: usize, packet: Vec<u8>) -> bool {
        self.cross(host, packet).is_some_and(|packet| {
            let now = self.now.since(Time::ZERO);
            if let Some(at) = self.plain.send(host, now, &packet) {
                self.schedule(1 - host, at, What::Packet(packet));
            }
            true
        })
    }

    /// Packet of `host` as it comes to the other one, unless a device on the way drops it.
    fn cross(&mut self, host: usize, packet: Vec<u8>) -> Option<Vec<u8>> {
        let now = self.now.since(Time::ZERO);
        match self.plain.cross(host, packet, now) {
            Crossed::Passes(packet) => Some(packet),
            Crossed::Dropped(reset) => {
                self.coverage.note(Seen::FirewallDropped);
                if let Some(reset) = reset {
                    self.coverage.note(Seen::RouterReset);
                    self.schedule(host, now + Duration::from_millis(1), What::Packet(reset));
                }
                None
            }
        }
    }

    /// Sends a packet of a host's daemon by the ordinary route, where it may be lost, late or doubled, and somebody may send the
    /// like.
    pub(super) fn show(&mut self, host: usize, packet: Vec<u8>) {
        let Some(packet) = self.cross(host, packet) else {
            return;
        };
        let now = self.now.since(Time::ZERO);
        let sent = self.plain.send(host, now, &packet);
        let Between {
            lost, late, forges, ..
        } = self.setup.between;
        // What answers the like of it is sent the like of again.
        if forges && self.coverage.get(Seen::ShownForged) < MOST_FORGED {
            self.forge_shown(1 - host, &packet);
        }
        let Some(at) = sent.filter(|_| !self.mishaps.chance(lost)) else {
            return;
        };
        let mut at = vec![at];
        if let Some(late) = late {
            self.coverage.note(Seen::ShownLate);
            let by = late.mul_f64(self.mishaps.unit());
            match self.mishaps.chance(0.5) {
                true => at.push(at[0] + by),
                false => at[0] += by,
            }
        }
        for at in at {
            self.schedule(1 - host, at, What::Shown(packet.clone()));
        }
    }

    /// Somebody sends a host the like of a packet that the other one's daemon sends: under the ends of another connection, or
    /// with other numbers.
    fn forge_shown(&mut self, host: usize, packet: &[u8]) {
        let dice = &mut self.mishaps;
        let others: Vec<FlowKey> = self.conns.iter().map(|conn| conn.pairs[host]).collect();
        let (under, far) = (dice.chance(0.7), dice.pick(&[1, 1000, 1 << 31, u32::MAX]));
        let late = Duration::from_micros(dice.magnitude(1, 3_000_000));
        let other = dice.pick(&others).reversed();
        let forged = offload::rewrite(packet, |headers, payload| match under {
            // Under its own ends it would be no other packet.
            true if headers.tuple != other => headers.tuple = other,
            // A byte would be data to a connection in plain.
            _ => {
                headers.seq = headers.seq.add(far);
                payload.clear();
            }
        });
        self.coverage.note(Seen::ShownForged);
        let at = self.now.since(Time::ZERO) + late;
        self.schedule(host, at, What::Packet(forged));
    }

    pub(super) fn schedule(&mut self, host: usize, at: Duration, what: What) {
        // The receiver looks at what has arrived now and then.
        let tick = self.setup.tick[host].as_nanos() as u64;
        let at = (at.as_nanos() as u64).div_ceil(tick) * tick;
        self.arrivals
            .push(Time::from_nanos(at), Arrival { host, what });
    }

    /// A host resets a connection whose handshake it has not seen the end of: another way brought the last of it, with other numbers
    /// (RFC 9293, 3.10.7.4).
    fn excuse_half_open(&mut self, host: usize, packet: &[u8]) {
        let reset = offload::tcp(packet).filter(|s| s.has(flags::RST));
        let Some(conn) = reset.and_then(|s| self.conn_of(host, &s.tuple)) else {
            return;
        };
        let conn = &mut self.conns[conn];
        let state = conn.state(host, &self.hosts[host].kernel);
        let is_half_open = [State::SynSent, State::SynReceived].contains(&state);
        if is_half_open && self.setup.between.renumbers {
            (conn.aborted, conn.lingers) = (true, false);
        }
    }

    /// What a bump's TUN hands to a kernel.
    pub(super) fn inject(&mut self, host: usize, bump: BumpId, frame: &[u8]) -> Result<(), String> {
        for packet in offload::segments(frame)? {
            let Some(s) = offload::tcp(&packet) else {
                if self.said.opaque.get(&packet) != Some(&bump) {
                    return Err(format!("an opaque packet that nobody sent by {}", on(bump)));
                }
                self.coverage.note(Seen::OpaqueArrived);
                continue;
            };
            let pair = s.tuple.reversed();
            if s.flags & (flags::SYN | flags::ACK) == flags::SYN {
                self.listen_beside(host, &pair);
            }
            if !self.is_called(host, &pair, s.has(flags::SYN)) {
                continue;
            }
            if s.has(flags::URG) {
                let at = s.seq.add(u32::from(s.urgent));
                let far = &self.hosts[1 - host].kernel;
                // An earlier connection of these ends may have had another name there.
                let mut conns = self.conns.iter().filter(|conn| conn.pairs[host] == pair);
                if !conns.any(|conn| far.said_urgent(&conn.pairs[1 - host], at)) {
                    return Err(format!("an urgent pointer to {} that nobody set", at.raw()));
                }
            }
            // A reset ends its connection, or is of an earlier one of the same ends.
            let follow = self.follows(host, &pair) && !s.has(flags::RST);
            let h = &mut self.hosts[host];
            // What conntrack takes for invalid belongs to no entry whose mark it could set.
            let is_valid = s.has(flags::SYN) || h.kernel.is_near(&pair, s.seq);
            let follow = follow && (is_valid || h.steering.takes_all(&pair));
            if h.steering.admits(&pair, Way::Bump(bump), follow) {
                h.kernel.receive(packet, Way::Bump(bump))?;
            }
        }
        Ok(())
    }

    /// A datagram leaves by a path; what is in it.
    pub(super) fn send(
        &mut self,
        host: usize,
        path: usize,
        to: SocketAddr,
        datagram: Vec<u8>,
    ) -> Result<Held, String> {
        let link = &mut self.links[path];
        let secrecy = (link.labels[host], link.trusted);
        let held = self.observer.see(host, path, secrecy, &datagram)?;
        let there = endpoint(path, 1 - host, link.v6);
        if to != there {
            self.send_elsewhere(host, path, to, datagram.len() as u64)?;
            return Ok(held);
        }
        self.send_there(host, path, datagram)?;
        Ok(held)
    }

    /// A datagram to where the path ends.
    fn send_there(&mut self, host: usize, path: usize, datagram: Vec<u8>) -> Result<(), String> {
        let link = &mut self.links[path];
        self.adversary.read(host, &datagram);
        let size = datagram.len() + if link.v6 { 48 } else { 28 };
        let h = &mut self.hosts[host];
        if !h.up[path] {
            return Err(format!(
                "a datagram by path {path}, whose interface is down"
            ));
        }
        if size > usize::from(h.mtu[path]) {
            self.coverage.note(Seen::TooBig);
            if let Some(node) = &mut h.node {
                node.datagram_too_big(self.now, path, datagram.len());
            }
            return Ok(());
        }
        if size > usize::from(link.mtu) {
            self.coverage.note(Seen::TooBig);
            return Ok(());
        }
        let now = self.now.since(Time::ZERO);
        let delivery = match link.emulators[host].enter(&link.conditions[host], now, size) {
            Fate::Delivered(delivery) => delivery,
            Fate::Dropped(cause) => {
                if cause != Cause::Outage {
                    self.coverage.note(Seen::LinkLost);
                }
                return Ok(());
            }
        };
        if self.now < self.cut_until {
            return Ok(());
        }
        let forging = self.setup.integrity == Integrity::On;
        let put = |bytes, forged| Put {
            host: 1 - host,
            path,
            from: None,
            after: Duration::ZERO,
            bytes,
            forged,
        };
        if delivery.late {
            self.coverage.note(Seen::LinkLate);
        }
        if delivery.duplicate {
            self.coverage.note(Seen::LinkDoubled);
            let copy = put(datagram.clone(), false);
            self.schedule(1 - host, delivery.at, What::Datagram(copy));
        }
        if let Some(dice) = delivery.corrupt {
            // Without integrity, all that is left is the checksum of UDP, and it sees one bit.
            if forging {
                self.coverage.note(Seen::LinkCorrupted);
                let mut bytes = datagram;
                let bit = (dice % (bytes.len() as u64 * 8)) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
                self.schedule(1 - host, delivery.at, What::Datagram(put(bytes, true)));
            }
            return Ok(());
        }
        let Some(tamper) = &self.links[path].tamper[host] else {
            self.schedule(1 - host, delivery.at, What::Datagram(put(datagram, false)));
            return Ok(());
        };
        let at = (host, path, self.links.len());
        let (puts, did) = self.adversary.meddle(tamper, at, forging, datagram);
        for act in did {
            self.coverage.note(act);
        }
        for put in puts {
            self.schedule(put.host, delivery.at + put.after, What::Datagram(put));
        }
        Ok(())
    }

    /// A datagram to somewhere that is not the other end's: only where somebody sent the peer's own
    /// datagrams from, and not much.
    fn send_elsewhere(
        &mut self,
        host: usize,
        path: usize,
        to: SocketAddr,
        len: u64,
    ) -> Result<(), String> {
        self.coverage.note(Seen::Lured);
        let Some((came, went)) = self.lures.get_mut(&(host, path, to)) else {
            return Err(format!("a datagram on path {path} to {to}"));
        };
        *went += len;
        if *went > 3 * *came + SLACK {
            return Err(format!(
                "{went} bytes went on path {path} to {to}, from where {came} came"
            ));
        }
        Ok(())
    }
}
