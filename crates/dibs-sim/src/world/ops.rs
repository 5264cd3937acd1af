//! What happens to the world: the operations of a history.

use std::net::IpAddr;

use dibs_core::session::Integrity;
use dibs_wire::checksum;

use super::{World, addresses, endpoint};
use crate::conn::Conn;
use crate::emulator::Conditions;
use crate::history::{Op, calm};
use crate::offload;
use crate::payload::{Kind, Stream};

impl World {
    pub(super) fn apply(&mut self, op: &Op) -> Result<(), String> {
        let now = self.now;
        match op {
            Op::Open(plan) => {
                let number = self.conns.len();
                let ports = (20_000 + number as u16, 30_000 + number as u16);
                let ports = self.free_ports(plan.port_of, plan.client).unwrap_or(ports);
                let [a, b] = &mut self.hosts;
                let kernels = [&mut a.kernel, &mut b.kernel];
                let conn = Conn::open(number, *plan, ports, addresses(), kernels);
                self.conns.push(conn);
            }
            Op::Abort(conn, end) => {
                let conn = &mut self.conns[*conn];
                if !conn.is_done() {
                    let host = conn.host(*end);
                    conn.abort(*end, &mut self.hosts[host].kernel);
                }
            }
            Op::Switch(conn, host, bump) => self.conns[*conn].bump[*host] = *bump,
            Op::Restart(host, gap) => {
                self.restarts += 1;
                let h = &mut self.hosts[*host];
                h.node = None;
                h.starts_at = Some(now + *gap);
                h.kernel.forget_floors();
            }
            Op::Interface(host, path, up) => self.set_interface(*host, *path, *up),
            Op::Outage(path, out) => {
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
                self.links[*path].mtu = *mtu;
                for h in self.hosts.iter_mut().filter(|_| *told) {
                    h.mtu[*path] = *mtu;
                    let up = h.up[*path];
                    if let Some(node) = &mut h.node {
                        node.set_path(now, *path, up, *mtu);
                    }
                }
            }
            Op::Opaque(host, len, v6) => {
                let packet = self.opaque_packet(*host, *len, *v6);
                self.opaque.insert(packet.clone(), 0);
                self.tun(*host, &offload::plain_frame(&packet));
            }
            Op::Attack(host, count) => self.attack(*host, *count),
            Op::Control(host, len) => {
                let mut message = vec![0; *len];
                let key = self.rng.word();
                let kind = Kind::Marked;
                Stream { key, kind }.fill(0, &mut message);
                if let Some(node) = &mut self.hosts[*host].node
                    && node.send_control(now, 0, &message).is_ok()
                {
                    self.controls.entry(message).or_default();
                }
            }
        }
        self.pump(0)?;
        self.pump(1)
    }

    /// Sends a daemon what it must not be impressed by: old datagrams, on any path and from
    /// anywhere, whole or spoilt, and noise.
    pub(super) fn attack(&mut self, host: usize, count: usize) {
        // Without integrity an attacker has his way with data; that is what was agreed to.
        if self.setup.integrity == Integrity::Off {
            return;
        }
        for _ in 0..count {
            let dice = &mut self.rng;
            let path = dice.below(self.links.len() as u64) as usize;
            let mut from = endpoint(path, 1 - host, self.links[path].v6);
            if dice.chance(0.3) {
                from.set_port(dice.range(1, 65_535) as u16);
            }
            let mut bytes = match self.seen.len() as u64 {
                0 => vec![0; 64],
                n => self.seen[dice.below(n) as usize].clone(),
            };
            for _ in 0..dice.below(3) {
                let at = dice.below(bytes.len() as u64) as usize;
                bytes[at] = dice.word() as u8;
            }
            if dice.chance(0.1) {
                bytes.truncate(dice.below(bytes.len() as u64) as usize);
            }
            let h = &mut self.hosts[host];
            if let Some(node) = h.node.as_mut().filter(|_| h.up[path]) {
                node.handle_datagram(self.now, path, from, &mut bytes);
            }
        }
    }

    /// The ports of an earlier connection of the same client, if it is over.
    pub(super) fn free_ports(
        &mut self,
        earlier: Option<usize>,
        client: usize,
    ) -> Option<(u16, u16)> {
        let [a, b] = &mut self.hosts;
        let conn = self.conns.get_mut(earlier?)?;
        let over = conn.is_over([&a.kernel, &b.kernel]);
        if !over || conn.host(0) != client {
            return None;
        }
        let ports = conn.ports;
        for conn in self.conns.iter_mut().filter(|c| c.ports == ports) {
            if !conn.is_over([&a.kernel, &b.kernel]) {
                return None;
            }
            conn.remove([&mut a.kernel, &mut b.kernel]);
        }
        Some(ports)
    }

    pub(super) fn set_interface(&mut self, host: usize, path: usize, up: bool) {
        let h = &mut self.hosts[host];
        h.up[path] = up;
        let mtu = h.mtu[path];
        if let Some(node) = &mut h.node {
            node.set_path(self.now, path, up, mtu);
        }
    }

    /// A UDP packet of recognisable bytes.
    pub(super) fn opaque_packet(&mut self, host: usize, len: usize, v6: bool) -> Vec<u8> {
        let ends = addresses();
        let (src, dst) = (ends[host][usize::from(v6)], ends[1 - host][usize::from(v6)]);
        let udp_len = 8 + len;
        let mut p = Vec::new();
        match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                p.extend_from_slice(&[0x45, 0]);
                p.extend_from_slice(&((20 + udp_len) as u16).to_be_bytes());
                p.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0]);
                p.extend_from_slice(&src.octets());
                p.extend_from_slice(&dst.octets());
                let sum = !checksum::fold(checksum::sum(&p));
                p[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                p.extend_from_slice(&[0x60, 0, 0, 0]);
                p.extend_from_slice(&(udp_len as u16).to_be_bytes());
                p.extend_from_slice(&[17, 64]);
                p.extend_from_slice(&src.octets());
                p.extend_from_slice(&dst.octets());
            }
            _ => unreachable!("both addresses are of the family asked for"),
        }
        let at = p.len();
        p.extend_from_slice(&[0x10, 0, 0x20, 0]);
        p.extend_from_slice(&(udp_len as u16).to_be_bytes());
        p.extend_from_slice(&[0, 0]);
        p.resize(at + udp_len, 0);
        let key = self.rng.word();
        let kind = Kind::Marked;
        Stream { key, kind }.fill(0, &mut p[at + 8..]);
        p
    }

    /// Everything that disturbs comes to an end.
    pub(super) fn calm(&mut self) {
        for link in &mut self.links {
            for conditions in &mut link.conditions {
                *conditions = calm(conditions);
                conditions.outage = false;
            }
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
