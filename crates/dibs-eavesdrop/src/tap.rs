//! Sorts what passes a path: by direction what dibs sends, and what TCP sends in plain.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::attack::Attacker;
use crate::datagram::{CLEAR, Datagram, Key, TAG, apart};
use crate::frame::{Link, Packet, Payload};
use crate::report::{Counts, Direction, Report};

/// Bytes that are kept; more are counted only.
const MOST: usize = 64 << 20;
/// Directions that are told apart: each takes up to a minute to read, and whoever sends on the path can make up any
/// number of them.
const DIRECTIONS: usize = 64;
/// Bytes of plain TCP that are kept.
const PLAIN: usize = 4 << 20;

/// Part of a path's traffic that is listened to.
#[derive(Clone, Copy, Debug)]
pub struct Only {
    /// Ends of the TCP connection.
    pub ends: [SocketAddr; 2],
    /// Host whose datagrams of dibs are heard, sent or received: they do not tell which connection they are of.
    pub host: IpAddr,
}

impl Only {
    fn is_of(&self, packet: &Packet<'_>) -> bool {
        match packet.payload {
            Payload::Tcp(_) => {
                [[packet.from, packet.to], [packet.to, packet.from]].contains(&self.ends)
            }
            Payload::Udp(_) => [packet.from.ip(), packet.to.ip()].contains(&self.host),
        }
    }
}

/// Listens to one path.
#[derive(Debug)]
pub struct Tap {
    port: u16,
    only: Option<Only>,
    ways: BTreeMap<Key, BTreeMap<u64, Datagram>>,
    plain: Vec<Vec<u8>>,
    plain_bytes: u64,
    plain_kept: usize,
    kept: usize,
    counts: Counts,
}

impl Tap {
    /// For datagrams from or to this UDP port.
    pub fn new(port: u16) -> Self {
        Self {
            port,
            only: None,
            ways: BTreeMap::new(),
            plain: Vec::new(),
            plain_bytes: 0,
            plain_kept: 0,
            kept: 0,
            counts: Counts::default(),
        }
    }

    /// For this part of what passes; the rest is not counted.
    pub fn only(self, only: Only) -> Self {
        Self {
            only: Some(only),
            ..self
        }
    }

    /// Takes a frame that passed at this time, since whenever. A superpacket is taken apart; what passes twice, as where
    /// both ends of a link are heard, counts once.
    pub fn frame(&mut self, at: Duration, link: Link, frame: &[u8]) {
        let packet = Packet::of(link, frame);
        if let Some(only) = &self.only
            && !packet.as_ref().is_some_and(|packet| only.is_of(packet))
        {
            return;
        }
        self.counts.packets += 1;
        match packet {
            Some(packet) => self.packet(at, &packet),
            None => self.counts.others += 1,
        }
    }

    /// Says what can be made of all, with this much plaintext known to pass.
    pub fn report(&self, attacker: &Attacker, known: &[u8]) -> Report {
        let ways = self.ways.iter();
        let directions = ways.map(|(key, way)| Direction::of(attacker, known, *key, way));
        Report::of(
            self.counts,
            self.plain_bytes,
            &self.plain,
            directions.collect(),
        )
    }

    fn packet(&mut self, at: Duration, packet: &Packet<'_>) {
        match packet.payload {
            Payload::Tcp(bytes) => {
                self.plain_bytes += bytes.len() as u64;
                if !bytes.is_empty() && self.plain_kept + bytes.len() <= PLAIN {
                    self.plain_kept += bytes.len();
                    self.plain.push(bytes.to_vec());
                }
            }
            Payload::Udp(bytes) if [packet.from.port(), packet.to.port()].contains(&self.port) => {
                match bytes.first() {
                    Some(1..=3) => self.counts.handshakes += 1,
                    Some(4..=6) if bytes.len() >= CLEAR + TAG => self.datagrams(at, packet, bytes),
                    _ => self.counts.others += 1,
                }
            }
            Payload::Udp(_) => self.counts.others += 1,
        }
    }

    fn datagrams(&mut self, at: Duration, packet: &Packet<'_>, bytes: &[u8]) {
        for bytes in apart(bytes) {
            if self.kept + bytes.len() > MOST {
                self.counts.beyond += 1;
                continue;
            }
            let number = |range: std::ops::Range<usize>| {
                let bytes = bytes[range].iter();
                bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
            };
            let key = Key {
                from: packet.from,
                to: packet.to,
                path: bytes[1],
                index: number(4..8) as u32,
            };
            if self.ways.len() == DIRECTIONS && !self.ways.contains_key(&key) {
                self.counts.further += 1;
                continue;
            }
            let way = self.ways.entry(key).or_default();
            way.entry(number(8..16)).or_insert_with(|| {
                self.kept += bytes.len();
                Datagram {
                    at,
                    bytes: bytes.to_vec(),
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_directions_are_counted_beyond_a_number() {
        let mut tap = Tap::new(5300);
        let end = |last| SocketAddr::from(([10, 0, 0, last], 5300));
        let mut hear = |receiver: u32, sequence| {
            let mut datagram = [0; CLEAR + TAG];
            (datagram[0], datagram[15]) = (4, sequence);
            datagram[4..8].copy_from_slice(&receiver.to_be_bytes());
            let packet = Packet {
                from: end(1),
                to: end(2),
                payload: Payload::Udp(&datagram),
            };
            tap.packet(Duration::ZERO, &packet);
        };
        for receiver in 0..1000 {
            hear(receiver, 0);
            // A direction that is known goes on.
            hear(0, 1);
        }
        assert_eq!(tap.ways.len(), DIRECTIONS);
        let kept: Vec<usize> = tap.ways.values().map(BTreeMap::len).collect();
        assert_eq!((kept[0], kept[1]), (2, 1));
        assert_eq!(tap.counts.further, 1000 - DIRECTIONS as u64);
    }

    #[test]
    fn of_one_connection_its_segments_count_and_what_its_peer_sends() {
        let end = |last: u8, port| SocketAddr::from(([10, 0, 0, last], port));
        let only = Only {
            ends: [end(1, 4000), end(2, 80)],
            host: end(2, 0).ip(),
        };
        let packet = |from, to, payload| Packet { from, to, payload };
        let is_of = |from, to, payload| only.is_of(&packet(from, to, payload));
        let (tcp, udp) = (Payload::Tcp(b"x"), Payload::Udp(b"x"));
        assert!(is_of(end(1, 4000), end(2, 80), tcp));
        assert!(is_of(end(2, 80), end(1, 4000), tcp));
        assert!(!is_of(end(1, 4001), end(2, 80), tcp));
        assert!(is_of(end(2, 5300), end(1, 5300), udp));
        assert!(!is_of(end(1, 5300), end(3, 5300), udp));
    }
}
