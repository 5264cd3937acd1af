//! What happens to the world: the operations of a history.

use std::net::IpAddr;

use dibs_netem::Conditions;
use dibs_settings::BumpId;
use dibs_switch::conns::Meant;
use etherparse::{PacketBuilder, TcpHeader};
use smoltcp::socket::tcp::State;

use super::route::{lent, translated};
use super::{World, addresses, attacks};
use crate::conn::Conn;
use crate::coverage::Seen;
use crate::history::{Between, Leaving, Op, calm};
use crate::offload;
use crate::payload::{Kind, Stream};
use crate::steering::{At, Sockets};

impl World {
    #[expect(clippy::too_many_lines, reason = "a table of operations")]
    pub(super) fn apply(&mut self, op: &Op) -> Result<(), String> {
        let now = self.now;
        let at = match *op {
            Op::Control(host, _)
            | Op::Opaque(host, ..)
            | Op::Attack(host, _)
            | Op::Plain(host, ..)
            | Op::Foreign(host, _) => Some(host),
            _ => None,
        };
        if at.is_some_and(|host| self.hosts[host].asleep_until > now) {
            return Ok(());
        }
        match op {
            Op::Open(plan) => {
                let number = self.conns.len();
                let ports = (20_000 + number as u16, 30_000 + number as u16);
                let again = self.free_ports(plan.port_of, plan.client);
                if again.is_some() {
                    self.coverage.note(Seen::PortsAgain);
                }
                let ports = again.unwrap_or(ports);
                let [a, b] = &mut self.hosts;
                let kernels = [&mut a.kernel, &mut b.kernel];
                let conn = Conn::open(number, *plan, ports, addresses(), kernels);
                let [here, there] = conn.pairs;
                let names = match self.setup.between.translates {
                    // A connection that begins in plain, and one that begins on a bump.
                    true => vec![(0, here), (1, translated(&here)), (1, lent(&here))],
                    false => vec![(0, here), (1, there)],
                };
                for (host, pair) in names {
                    let (bump, required) = (plan.bump[host], plan.require[host]);
                    self.hosts[host].steering.open(pair, bump, required);
                    self.by_pair[host].insert(pair, number);
                    self.on_bump[host].remove(&pair);
                    self.last.remove(&pair);
                }
                self.plain.open(conn.pairs[0], plan.buffer as u32);
                self.shown.remove(&number);
                self.conns.push(conn);
                self.coverage.note(Seen::Opened);
            }
            Op::Abort(conn, end) => {
                let conn = &mut self.conns[*conn];
                if !conn.is_done() {
                    let host = conn.host(*end);
                    conn.abort(*end, &mut self.hosts[host].kernel);
                    self.coverage.note(Seen::Aborted);
                }
            }
            Op::Mark(conn, host, bump, chosen) => {
                let pair = self.conns[*conn].pairs[*host];
                // What only listens has no entry in conntrack.
                let state = self.conns[*conn].state(*host, &self.hosts[*host].kernel);
                let may = !self.begins(&self.conns[*conn]) && state != State::Listen;
                let h = &mut self.hosts[*host];
                if may && self.by_pair[*host].get(&pair) == Some(conn) && h.asleep_until <= now {
                    h.steering.set_by_hand(pair, *bump, *chosen);
                    self.excused.insert(*conn);
                }
            }
            Op::Choose(conn, host, bump) => {
                self.choose(*conn, *host, *bump);
            }
            Op::Outbid(conn, host, bump, by) => {
                let (conn, h) = (&self.conns[*conn], &mut self.hosts[*host]);
                let (pair, socket) = (conn.pairs[*host], conn.socket(*host));
                if let Some(node) = &mut h.node {
                    let kernel = &h.kernel;
                    let sockets = Sockets(&self.conns, &self.by_pair[*host], *host);
                    let at = &mut At::new(now, node, kernel, sockets);
                    h.steering.outbid(at, pair, socket, *bump, *by);
                }
            }
            Op::Cross(conn, bumps) => {
                let a = self.choose(*conn, 0, bumps[0]);
                let b = self.choose(*conn, 1, bumps[1]);
                if a && b {
                    self.coverage.note(Seen::Crossed);
                }
            }
            Op::Flush(host) => {
                // What the far end requires and this one only followed stalls until the far end
                // speaks again.
                let (conns, pairs) = (&self.conns, &self.by_pair[*host]);
                let is_open = self.setup.between == Between::default();
                let stays =
                    self.setup.leaving == Leaving::Firewalled || !is_open || !self.setup.follow;
                let kept = |pair: &_| {
                    let conn = pairs.get(pair).map(|c| &conns[*c]);
                    stays || conn.is_some_and(|c| c.plan.require[1 - host].is_some())
                };
                let h = &mut self.hosts[*host];
                h.steering.flush(h.asleep_until <= now, kept);
            }
            Op::Suspend(host, time) => {
                self.coverage.note(Seen::Suspended);
                let h = &mut self.hosts[*host];
                h.asleep_until = h.asleep_until.max(now + *time);
            }
            Op::Unable(host, time) => {
                self.hosts[*host].steering.unable(now + *time);
            }
            Op::Cut(time) => {
                self.coverage.note(Seen::Cut);
                self.cut_until = self.cut_until.max(now + *time);
            }
            Op::Tamper(path, host, tamper) => {
                self.links[*path].tamper[*host] = Some(tamper.clone());
            }
            Op::Plain(host, conn, forged, again) => {
                attacks::forge_plain(self, *host, *conn, *forged)?;
                attacks::replay_plain(self, *host, *again)?;
            }
            Op::Foreign(host, count) => attacks::foreign(self, *host, *count)?,
            Op::Restart(host, gap) => {
                self.said.restarts += 1;
                self.coverage.note(Seen::Crash);
                if self.hosts[1 - host].node.is_none() {
                    self.coverage.note(Seen::CrashBoth);
                }
                let h = &mut self.hosts[*host];
                if let Some(node) = h.node.take() {
                    self.coverage.add_counters(node.counters());
                }
                h.steering.crash();
                (h.malformed, h.stray) = (0, 0);
                h.injected.clear();
                h.events.clear();
                h.starts_at = Some(now + *gap);
                h.kernel.forget_floors();
            }
            Op::Interface(host, path, up) => {
                if !up {
                    self.coverage.note(Seen::InterfaceDown);
                }
                self.set_interface(*host, *path, *up);
            }
            Op::Outage(path, out) => {
                if *out {
                    self.coverage.note(Seen::Outage);
                }
                for conditions in &mut self.links[*path].conditions {
                    conditions.outage = *out;
                }
            }
            Op::Link(path, host, conditions) => {
                let outage = self.links[*path].conditions[*host].outage;
                self.links[*path].conditions[*host] = Conditions {
                    outage,
                    ..conditions.clone()
                };
            }
            Op::Mtu(path, mtu, told) => {
                self.coverage.note(Seen::Mtu);
                self.links[*path].mtu = *mtu;
                for h in self.hosts.iter_mut().filter(|_| *told) {
                    h.mtu[*path] = *mtu;
                    let up = h.up[*path];
                    if let Some(node) = &mut h.node {
                        node.set_path(now, *path, up, *mtu);
                    }
                }
            }
            Op::Opaque(host, len, v6, bump) => {
                let packet = self.opaque_packet(*host, *len, *v6);
                self.said.opaque.insert(packet.clone(), *bump);
                self.coverage.note(Seen::Opaque);
                self.tun(*host, *bump, &offload::plain_frame(&packet));
            }
            Op::Attack(host, count) => attacks::attack(self, *host, *count)?,
            Op::Rules(host, rules) => {
                let calls = |conn: &Conn| !conn.is_done() && self.begins(conn);
                if !self.conns.iter().any(calls) {
                    self.hosts[*host].steering.want_rules(rules.clone());
                }
            }
            Op::Wish(host, wish) => self.hosts[*host].wish(now, wish),
            Op::Control(host, len) => {
                let mut message = vec![0; *len];
                let key = self.rng.word();
                let kind = Kind::Marked;
                Stream { key, kind }.fill(0, &mut message);
                if let Some(node) = &mut self.hosts[*host].node
                    && node.send_control(now, 0, &message, None).is_ok()
                {
                    self.said.controls.entry(message).or_default();
                }
            }
        }
        for host in 0..2 {
            self.steer(host);
        }
        self.pump(0)?;
        self.pump(1)?;
        for node in self.hosts.iter().filter_map(|h| h.node.as_ref()) {
            if node.paths().iter().any(|path| path.short_of_paths) {
                self.coverage.note(Seen::ShareWaited);
            }
        }
        Ok(())
    }

    /// The ports of an earlier connection of the same client, if it is over.
    pub(super) fn free_ports(
        &mut self,
        earlier: Option<usize>,
        client: usize,
    ) -> Option<(u16, u16)> {
        let [a, b] = &mut self.hosts;
        let conn = self.conns.get_mut(earlier?)?;
        // What has not been read yet would go with the sockets.
        let over = conn.is_over([&a.kernel, &b.kernel]) && conn.is_done();
        if !over || conn.host(0) != client {
            return None;
        }
        let ports = conn.ports;
        let mut those = self.conns.iter().filter(|c| c.ports == ports);
        if !those.all(|conn| conn.is_over([&a.kernel, &b.kernel]) && conn.is_done()) {
            return None;
        }
        for conn in self.conns.iter_mut().filter(|c| c.ports == ports) {
            conn.remove([&mut a.kernel, &mut b.kernel]);
            a.steering.forget(&conn.pairs[0]);
            b.steering.forget(&conn.pairs[1]);
            for other in [translated(&conn.pairs[0]), lent(&conn.pairs[0])] {
                b.steering.forget(&other);
                self.by_pair[1].remove(&other);
            }
            // Nothing is required of it any more, were the next one of the other family.
            self.by_pair[0].remove(&conn.pairs[0]);
            self.by_pair[1].remove(&conn.pairs[1]);
        }
        Some(ports)
    }

    /// True if a call would change its way: it would come by another name, or with other numbers.
    fn begins(&self, conn: &Conn) -> bool {
        let is_open = |host: usize| conn.is_open(host, &self.hosts[host].kernel);
        let Between {
            translates,
            renumbers,
            ..
        } = self.setup.between;
        (translates || renumbers) && !(is_open(0) && is_open(1))
    }

    /// A user moves a connection, if there is one and a daemon; true if so.
    fn choose(&mut self, conn: usize, host: usize, bump: Option<BumpId>) -> bool {
        let now = self.now;
        let conn = &self.conns[conn];
        // An end that only listens has no connection yet.
        let state = conn.state(host, &self.hosts[host].kernel);
        let is_found = ![State::Closed, State::Listen].contains(&state) && !self.begins(conn);
        let h = &mut self.hosts[host];
        let awake = h.asleep_until <= now && is_found;
        let Some(node) = h.node.as_mut().filter(|_| awake) else {
            return false;
        };
        let (pair, socket) = (conn.pairs[host], conn.socket(host));
        let kernel = &h.kernel;
        let sockets = Sockets(&self.conns, &self.by_pair[host], host);
        let at = &mut At::new(now, node, kernel, sockets);
        h.steering.choose(at, Meant { pair, socket }, bump);
        self.coverage.note(match bump {
            None => Seen::ChosenOut,
            Some(_) => Seen::ChosenIn,
        });
        true
    }

    pub(super) fn set_interface(&mut self, host: usize, path: usize, up: bool) {
        let h = &mut self.hosts[host];
        h.up[path] = up;
        let mtu = h.mtu[path];
        if let Some(node) = &mut h.node {
            node.set_path(self.now, path, up, mtu);
        }
    }

    /// A TCP segment that is signed (RFC 2385), so that nobody may cut it, of recognisable bytes.
    pub(super) fn opaque_packet(&mut self, host: usize, len: usize, v6: bool) -> Vec<u8> {
        let ends = addresses();
        let (src, dst) = (ends[host][usize::from(v6)], ends[1 - host][usize::from(v6)]);
        let mut tcp = TcpHeader::new(4096, 8192, 1, 256);
        (tcp.acknowledgment_number, tcp.ack) = (1, true);
        // Two bytes of nothing, and the signature.
        let options = [&[1, 1, 19, 18][..], &[0; 16]].concat();
        tcp.set_options_raw(&options).expect("whole words");
        let mut payload = vec![0; len];
        let (key, kind) = (self.rng.word(), Kind::Marked);
        Stream { key, kind }.fill(0, &mut payload);
        let ip = match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                PacketBuilder::ipv4(src.octets(), dst.octets(), 64)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                PacketBuilder::ipv6(src.octets(), dst.octets(), 64)
            }
            _ => unreachable!("both addresses are of the family asked for"),
        };
        let mut packet = Vec::new();
        let written = ip.tcp_header(tcp).write(&mut packet, &payload);
        written.expect("it is shorter than a packet may be");
        packet
    }

    /// Everything that disturbs comes to an end.
    pub(super) fn calm(&mut self) {
        self.cut_until = self.now;
        for h in &mut self.hosts {
            h.asleep_until = h.asleep_until.min(self.now);
            h.steering.able(self.now);
            h.calm_wishes(self.now);
        }
        for link in &mut self.links {
            for conditions in &mut link.conditions {
                *conditions = calm(conditions);
                conditions.outage = false;
            }
            link.tamper = [None, None];
        }
        for path in 0..self.links.len() {
            for host in 0..2 {
                if !self.hosts[host].up[path] {
                    self.set_interface(host, path, true);
                }
            }
        }
    }
}
