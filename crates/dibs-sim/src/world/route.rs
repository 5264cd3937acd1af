//! The ordinary route between the hosts: devices that follow, translate or renumber connections, and somebody who remembers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use dibs_netem::rng::{Rng, mix};
use dibs_netem::{Conditions, Emulator, Fate};
use dibs_wire::packet::{Segment, flags};
use dibs_wire::{FlowKey, SeqNumber};

use super::addresses;
use crate::history::{Between, Leaving, Setup};
use crate::kernel::scale_of;
use crate::offload;

/// Plain packets that somebody on the ordinary route remembers.
const PLAIN_SEEN: usize = 64;
/// Bytes that an acknowledgement may be behind (Linux, MAXACKWINDOW).
const MOST_BEHIND: u32 = 66_000;
/// Least bytes by which a firewall moves numbers: those that it moves by less are taken to be what is under way.
const LEAST_MOVED: u32 = 1 << 17;
/// Distance at which a node takes the numbers of both ends for those of one stream (`flow/numbers.rs` in dibs-core).
const NEAR: u32 = 1 << 16;
/// Difference between a port and the one that a router gives a connection; rules take both for the same.
const PORTS: u16 = 20_000;

/// Addresses of the router that translates those of host 0, by family.
pub(crate) const ROUTER: [IpAddr; 2] = [
    IpAddr::V4(std::net::Ipv4Addr::new(198, 51, 100, 9)),
    IpAddr::V6(std::net::Ipv6Addr::new(0xfd55, 1, 2, 3, 4, 5, 6, 9)),
];
/// Addresses that host 1 lends host 0 for connections that begin on a bump.
pub(crate) const LENT: [IpAddr; 2] = [
    IpAddr::V4(std::net::Ipv4Addr::new(10, 77, 0, 2)),
    IpAddr::V6(std::net::Ipv6Addr::new(0xfd77, 1, 2, 3, 4, 5, 6, 2)),
];

/// The connection of host 0 as host 1 calls it, as host 1 sends, if a router translates.
pub(super) fn translated(pair: &FlowKey) -> FlowKey {
    let family = usize::from(pair.src.is_ipv6());
    FlowKey {
        src: ROUTER[family],
        sport: pair.sport + PORTS,
        ..*pair
    }
    .reversed()
}

/// The same of a connection that began on a bump.
pub(super) fn lent(pair: &FlowKey) -> FlowKey {
    let src = LENT[usize::from(pair.src.is_ipv6())];
    FlowKey { src, ..*pair }.reversed()
}

/// State that a router keeps of each end (Linux, `struct ip_ct_tcp_state`).
#[derive(Clone, Copy, Debug, Default)]
struct Side {
    end: SeqNumber,
    max_end: SeqNumber,
    max_window: u32,
    scale: u8,
}

/// Connection that a device knows.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    sides: [Side; 2],
    /// Time at which something of it last passed.
    used: Duration,
    /// Connection taken up in its midst: any number fits.
    is_adopted: bool,
    /// A reset passed: the next SYN begins another one (Linux, 10 s later at most).
    is_closed: bool,
}

/// Numbers of a segment: its first, the one behind it, and what it acknowledges.
type Numbers = (SeqNumber, SeqNumber, SeqNumber);

impl Entry {
    /// True if a segment of this end fits what was seen, as `tcp_in_window` in net/netfilter/nf_conntrack_proto_tcp.c judges.
    fn takes(&mut self, from: usize, s: &Segment<'_>, (seq, end, ack): Numbers) -> bool {
        let (mut sender, mut receiver) = (self.sides[from], self.sides[1 - from]);
        let is_syn = s.has(flags::SYN);
        let scale = if is_syn { 0 } else { sender.scale };
        let window = u32::from(s.window) << scale;
        let ack = if s.has(flags::ACK) { ack } else { receiver.end };
        if sender.max_window == 0 {
            (sender.end, sender.max_end) = (end, end);
            sender.max_window = window.max(1);
            sender.scale = if is_syn { scale_of(s.options) } else { 0 };
            if !is_syn || s.has(flags::ACK) {
                sender.max_end = if is_syn { end } else { end.add(window) };
                if receiver.max_window == 0 {
                    receiver.end = ack;
                }
            }
        }
        let least = sender.end.add(receiver.max_window.wrapping_neg());
        let oldest = receiver
            .end
            .add(sender.max_window.max(MOST_BEHIND).wrapping_neg());
        let fits = !seq.is_after(sender.max_end)
            && !least.is_after(end)
            && !ack.is_after(receiver.end)
            && !oldest.is_after(ack);
        if !fits {
            return false;
        }
        sender.max_window = sender.max_window.max(window);
        if end.is_after(sender.end) {
            sender.end = end;
        }
        if end.is_after(sender.max_end) {
            receiver.max_window += end.distance_from(sender.max_end).unsigned_abs();
        }
        let edge = ack.add(window.max(1));
        if edge.is_after(receiver.max_end) {
            receiver.max_end = edge;
        }
        (self.sides[from], self.sides[1 - from]) = (sender, receiver);
        true
    }
}

/// Packet behind the devices on the route.
pub(super) enum Crossed {
    /// Packet that goes on, as the other host sees it.
    Passes(Vec<u8>),
    /// Packet that is dropped; its sender may get this for it.
    Dropped(Option<Vec<u8>>),
}

/// The ordinary route between the hosts.
pub(super) struct PlainRoute {
    /// Emulators of each way, by sending host.
    emulators: [Emulator; 2],
    conditions: Conditions,
    /// The connections that a firewall has seen begin, as host 0 sends, if there is one.
    known: Option<BTreeSet<FlowKey>>,
    /// The latest packets, with the host that they went to.
    seen: VecDeque<(usize, Vec<u8>)>,
    between: Between,
    /// Connections that a router follows, as host 0 sends.
    entries: BTreeMap<FlowKey, Entry>,
    /// Bytes by which a firewall moves the numbers of each host in a connection, as host 0 sends.
    offsets: BTreeMap<FlowKey, [u32; 2]>,
    /// Most bytes that each host has under way in a connection, as host 0 sends.
    under_way: BTreeMap<FlowKey, u32>,
}

impl PlainRoute {
    pub(super) fn new(rng: &mut Rng, setup: &Setup) -> Self {
        Self {
            emulators: [(); 2].map(|()| Emulator::new(rng.word())),
            conditions: setup.direct.clone(),
            known: (setup.leaving == Leaving::Firewalled).then(BTreeSet::new),
            seen: VecDeque::new(),
            between: setup.between,
            entries: BTreeMap::new(),
            offsets: BTreeMap::new(),
            under_way: BTreeMap::new(),
        }
    }

    /// A connection, as host 0 sends, is about to be opened, of which each host may have so much under way.
    pub(super) fn open(&mut self, pair: FlowKey, under_way: u32) {
        self.under_way.insert(pair, under_way);
    }

    /// Packet of `host` behind the devices.
    pub(super) fn cross(&mut self, host: usize, packet: Vec<u8>, now: Duration) -> Crossed {
        let Some(s) = offload::tcp(&packet) else {
            return Crossed::Passes(packet);
        };
        let Some(tuple) = self.translate(host, s.tuple) else {
            return Crossed::Dropped(None);
        };
        let pair = match host {
            0 => s.tuple,
            _ => tuple.reversed(),
        };
        let begins = s.has(flags::SYN);
        if let Some(known) = &mut self.known {
            if begins {
                known.insert(pair);
            }
            if !known.contains(&pair) {
                return Crossed::Dropped(None);
            }
        }
        let Some(offsets) = self.offsets_of(&pair, &s) else {
            return Crossed::Dropped(None);
        };
        let (seq, ack) = (
            s.seq.add(offsets[host]),
            s.ack.add(offsets[1 - host].wrapping_neg()),
        );
        // The router is between host 0 and the firewall.
        let numbers = if host == 0 {
            (s.seq, s.ack)
        } else {
            (seq, ack)
        };
        let is_untouched = tuple == s.tuple && offsets == [0; 2];
        if !self.follow(host, (pair, numbers), &s, now) {
            // A router that follows numbers drops what does not fit, but takes it for its own where it would have translated it.
            let Between {
                translates,
                tracks,
                resets,
                ..
            } = self.between;
            let resets = resets && (!tracks || translates && host == 1);
            let resets = resets && !s.has(flags::RST) && s.has(flags::ACK);
            let reset = resets.then(|| {
                offload::rewrite(&packet, |headers, payload| {
                    (headers.tuple, headers.seq) = (s.tuple.reversed(), s.ack);
                    (headers.flags, headers.urgent) = (flags::RST, 0);
                    (headers.timestamps, headers.options) = (None, None);
                    payload.clear();
                })
            });
            return Crossed::Dropped(reset);
        }
        if is_untouched {
            return Crossed::Passes(packet);
        }
        Crossed::Passes(offload::rewrite(&packet, |headers, _| {
            (headers.tuple, headers.seq) = (tuple, seq);
            if headers.flags & flags::ACK != 0 {
                headers.ack = ack;
            }
        }))
    }

    /// The ends that a packet of `host` has at the other one, if it gets there.
    fn translate(&self, host: usize, tuple: FlowKey) -> Option<FlowKey> {
        if !self.between.translates {
            return Some(tuple);
        }
        let family = usize::from(tuple.src.is_ipv6());
        if host == 0 {
            return Some(translated(&tuple).reversed());
        }
        let is_known = tuple.dst == ROUTER[family];
        is_known.then(|| FlowKey {
            dst: addresses()[0][family],
            dport: tuple.dport - PORTS,
            ..tuple
        })
    }

    /// Offsets of a connection, if a firewall lets it pass that renumbers those whose beginning it saw.
    fn offsets_of(&mut self, pair: &FlowKey, s: &Segment<'_>) -> Option<[u32; 2]> {
        if !self.between.renumbers {
            return Some([0; 2]);
        }
        if s.flags & (flags::SYN | flags::ACK) == flags::SYN {
            let dice = mix(u64::from(s.seq.raw()) ^ u64::from(pair.sport) << 32);
            let under_way = self.under_way.get(pair).copied().unwrap_or_default();
            // Up or down, and as often within a long window as far beyond it.
            let far = |dice: u32| {
                let least = LEAST_MOVED << (dice % 14);
                let mut offset = least + (dice >> 5) % least;
                // By chance one of 2^15 offsets is as near to what is under way, which nobody can tell from numbers that fit.
                if offset <= under_way + NEAR {
                    offset += under_way;
                }
                if dice & 16 == 0 {
                    offset
                } else {
                    offset.wrapping_neg()
                }
            };
            let both = [far(dice as u32), far((dice >> 32) as u32)];
            // A proxy that answers in place of the server moves one direction.
            let moved = match dice >> 62 {
                0 => [both[0], 0],
                1 => [0, both[1]],
                _ => both,
            };
            self.offsets.insert(*pair, moved);
        }
        let known = self.offsets.get(pair).copied();
        known.or(self.between.adopts.then_some([0; 2]))
    }

    /// True if a router lets a segment of `host` pass, whose number and acknowledgement are these there.
    fn follow(
        &mut self,
        host: usize,
        (pair, (seq, ack)): (FlowKey, (SeqNumber, SeqNumber)),
        s: &Segment<'_>,
        now: Duration,
    ) -> bool {
        let Between {
            translates,
            tracks,
            forgets,
            adopts,
            ..
        } = self.between;
        if !translates && !tracks && forgets.is_none() {
            return true;
        }
        let end = seq.add(s.payload.len() as u32 + u32::from(s.has(flags::SYN)));
        let numbers = (seq, end.add(u32::from(s.has(flags::FIN))), ack);
        let is_call = s.flags & (flags::SYN | flags::ACK) == flags::SYN;
        let is_inside = host == 0 || !translates;
        let is_idle = |entry: &Entry| forgets.is_some_and(|idle| now - entry.used > idle);
        let known = self.entries.get(&pair).copied().filter(|it| !is_idle(it));
        let takes = |mut entry: Entry| {
            let fits = entry.takes(host, s, numbers);
            entry.is_closed |= s.has(flags::RST);
            (fits || !tracks || entry.is_adopted).then_some(entry)
        };
        let begun = || {
            let is_adopted = !is_call;
            let may = is_inside && (is_call || adopts && !s.has(flags::RST) && !s.has(flags::SYN));
            takes(Entry {
                is_adopted,
                ..Entry::default()
            })
            .filter(|_| may)
        };
        let entry = match known {
            None => begun(),
            Some(entry) if is_call && entry.is_closed => begun(),
            Some(entry) => takes(entry).or_else(|| is_call.then(begun).flatten()),
        };
        let Some(entry) = entry else {
            return false;
        };
        self.entries.insert(pair, Entry { used: now, ..entry });
        true
    }

    /// Time at which a packet of `host`, which the other one sees so, arrives, if it does.
    pub(super) fn send(&mut self, host: usize, now: Duration, packet: &[u8]) -> Option<Duration> {
        if self.seen.len() == PLAIN_SEEN {
            self.seen.pop_front();
        }
        self.seen.push_back((1 - host, packet.to_vec()));
        match self.emulators[host].enter(&self.conditions, now, packet.len()) {
            Fate::Delivered(delivery) => Some(delivery.at),
            Fate::Dropped(_) => None,
        }
    }

    /// Copy of one of the latest packets, and the host that it went to.
    pub(super) fn draw(&self, rng: &mut Rng) -> Option<(usize, &[u8])> {
        let seen = self.seen.len().checked_sub(1)?;
        let at = rng.below(seen as u64 + 1) as usize;
        let (to, packet) = &self.seen[at];
        Some((*to, packet))
    }
}
