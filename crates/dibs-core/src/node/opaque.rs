//! Packets that are carried whole, in pieces where a datagram is too small for them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame};
use dibs_wire::packet;
use dibs_wire::virtio::{self, VirtioHdr};

use super::flows::FlowTable;
use super::names;
use super::protection::Protection;
use super::shared::{Journal, Shared};
use crate::buffer::Buffer;
use crate::bump::Method;
use crate::counters::Counter;
use crate::time::Time;

/// Bytes of opaque packets that wait for a trusted path, at most.
const QUEUE_LIMIT: usize = 512 * 1024;
/// Unfinished wholes, and their bytes, at most.
const MAX_WHOLES: usize = 1024;
const MAX_BYTES: usize = 4 << 20;
/// Pieces of a whole: twice as many as the smallest path makes of the longest, so that those who cut
/// it into crumbs cost neither memory nor time.
const MAX_PARTS: usize = 128;
/// Longest whole: header block and payload of a chunk, or an IP packet with its frame.
const MAX_TOTAL: u32 = 66 * 1024;
/// A whole that is not complete by then never will be.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many [`OpaqueQueues`] there are.
const QUEUES: u32 = 3;

/// Packets that are not cut, by who may carry them.
pub(super) struct OpaqueQueues {
    /// Trusted paths.
    pub(super) plain: OpaqueQueue,
    /// All: their bump encrypts them.
    pub(super) sealed: OpaqueQueue,
    /// Several at once: their bump splits them.
    pub(super) split: OpaqueQueue,
}

impl OpaqueQueues {
    /// Takes a packet of the local kernel: header and packet stand in `buffer[..len]`.
    pub(super) fn take(
        &mut self,
        shared: &mut Shared,
        flows: &FlowTable,
        bump: BumpId,
        header: VirtioHdr,
        (mut buffer, len): (Buffer, usize),
    ) {
        let packet = &mut buffer[virtio::LEN..len];
        let complete = header.gso_size == 0
            && (!header.needs_csum || dibs_wire::emit::complete_checksum(&header, packet));
        let queue = match shared.setup.bumps.get(bump).map(|bump| &bump.method) {
            Some(Method::Seal(_)) => &mut self.sealed,
            Some(Method::Split(_)) => &mut self.split,
            Some(Method::Chain(_)) | None => &mut self.plain,
        };
        let parsed = packet::parse(packet).expect("it was parsed before");
        if !complete || !queue.push(bump, &names::outward(flows, &parsed, packet)) {
            shared.count(Counter::OpaqueQueueFull);
        }
        shared.pool.give(buffer);
    }
}

impl Default for OpaqueQueues {
    fn default() -> Self {
        Self {
            plain: OpaqueQueue::new(0),
            sealed: OpaqueQueue::new(1),
            split: OpaqueQueue::new(2),
        }
    }
}

/// Opaque packets on their way out.
pub(super) struct OpaqueQueue {
    packets: VecDeque<(BumpId, Box<[u8]>)>,
    bytes: usize,
    /// How much of the first one is out, and under which number.
    sent: usize,
    number: u32,
}

/// What to send next of the first packet.
pub(super) struct Part<'a> {
    /// Its bump.
    pub(super) bump: BumpId,
    /// All of it.
    pub(super) packet: &'a [u8],
    /// Names the whole.
    pub(super) number: u32,
    /// Where the piece begins.
    pub(super) at: usize,
}

impl Part<'_> {
    /// A header block of at most `room` bytes with the packet, or its next piece, and how much of it
    /// that takes.
    pub(super) fn block(&self, room: usize) -> (Vec<u8>, usize) {
        let Self {
            bump,
            packet,
            number,
            at: from,
        } = *self;
        let whole = frame::OPAQUE_OVERHEAD + packet.len();
        if from == 0 && whole <= room {
            let mut block = vec![0; whole];
            let bump = bump.get();
            let opaque = Frame::Opaque { bump, packet };
            frame::encode(&opaque, &mut Writer::new(&mut block));
            return (block, packet.len());
        }
        let len = (packet.len() - from).min(room - frame::FRAGMENT_OVERHEAD - 1);
        // The whole is an opaque frame without its length: bump, then packet.
        let mut bytes = Vec::with_capacity(len + 1);
        let first = from == 0;
        if first {
            bytes.push(bump.get());
        }
        bytes.extend_from_slice(&packet[from..from + len]);
        let piece = Frame::Fragment {
            id: number,
            at: if first { 0 } else { from as u32 + 1 },
            total: packet.len() as u32 + 1,
            header: 0,
            bytes: &bytes,
        };
        let mut block = vec![0; frame::FRAGMENT_OVERHEAD + bytes.len()];
        frame::encode(&piece, &mut Writer::new(&mut block));
        (block, len)
    }
}

impl OpaqueQueue {
    /// The queue of this number of [`QUEUES`]: they never give the same number to two packets.
    pub(super) const fn new(queue: u32) -> Self {
        assert!(queue < QUEUES);
        Self {
            packets: VecDeque::new(),
            bytes: 0,
            sent: 0,
            number: 2 * queue,
        }
    }

    /// Appends a packet; false if it does not fit.
    pub(super) fn push(&mut self, bump: BumpId, packet: &[u8]) -> bool {
        if self.bytes + packet.len() > QUEUE_LIMIT {
            return false;
        }
        self.bytes += packet.len();
        self.packets.push_back((bump, packet.into()));
        true
    }

    /// The packet at the head.
    pub(super) fn head(&self) -> Option<Part<'_>> {
        let (bump, packet) = self.packets.front()?;
        Some(Part {
            bump: *bump,
            packet,
            number: self.number,
            at: self.sent,
        })
    }

    /// `len` more bytes of the head are out.
    pub(super) fn consume(&mut self, len: usize) {
        self.sent += len;
        if self
            .packets
            .front()
            .is_some_and(|(_, p)| self.sent >= p.len())
        {
            let (_, packet) = self.packets.pop_front().expect("it was just seen");
            self.bytes -= packet.len();
            self.sent = 0;
            // Even numbers are opaque packets, odd ones chunks.
            self.number = self.number.wrapping_add(2 * QUEUES);
        }
    }
}

struct Whole {
    /// Its place in [`Reassembly::order`].
    serial: u64,
    header: u16,
    bytes: Vec<u8>,
    /// Parts that are there, by start; they do not overlap. And how many bytes they are.
    parts: BTreeMap<u32, u32>,
    have: usize,
}

/// What a whole is known by: its number, and what protected each of its fragments. Those with another protection
/// are of another whole, so none counts for more than it was sent with.
type Name = (u32, Protection);

/// Puts fragments together, within bounds.
#[derive(Default)]
pub(super) struct Reassembly {
    wholes: BTreeMap<Name, Whole>,
    bytes: usize,
    /// Opaque packets, then chunks, as they began.
    order: [BTreeMap<u64, (Time, Name)>; 2],
    /// Wholes that began so far.
    began: u64,
}

/// What came of a fragment.
pub(super) enum Assembled {
    /// More is needed.
    Partly,
    /// It was the last one: the whole, and the length of its header block.
    Whole(Vec<u8>, usize),
    /// There is no room for it: it counts as not received.
    NoRoom,
    /// It contradicts itself or an earlier one.
    Contradiction,
}

impl Reassembly {
    /// Adds a fragment that came with this protection.
    ///
    /// # Panics
    /// The frame is another one.
    pub(super) fn add(
        &mut self,
        now: Time,
        journal: &mut Journal,
        fragment: &Frame<'_>,
        protection: Protection,
    ) -> Assembled {
        let Frame::Fragment {
            id,
            at,
            total,
            header,
            bytes,
        } = *fragment
        else {
            panic!("the caller has a fragment");
        };
        let name = (id, protection);
        let end = u64::from(at) + bytes.len() as u64;
        if total > MAX_TOTAL
            || end > u64::from(total)
            || bytes.is_empty()
            || u32::from(header) > total
        {
            return Assembled::Contradiction;
        }
        if !self.wholes.contains_key(&name) {
            while self.wholes.len() >= MAX_WHOLES || self.bytes + total as usize > MAX_BYTES {
                // Nobody sends an opaque packet again. What there is of a chunk was acknowledged, and must stay.
                let Some((_, (_, oldest))) = self.order[0].pop_first() else {
                    return Assembled::NoRoom;
                };
                self.remove(oldest);
                journal.count(Counter::FragmentsExpired);
            }
            self.bytes += total as usize;
            self.began += 1;
            self.order[kind(id)].insert(self.began, (now, name));
            let whole = Whole {
                serial: self.began,
                header,
                bytes: vec![0; total as usize],
                parts: BTreeMap::new(),
                have: 0,
            };
            self.wholes.insert(name, whole);
        }
        let whole = self.wholes.get_mut(&name).expect("it was just made");
        if whole.bytes.len() != total as usize || whole.header != header {
            return Assembled::Contradiction;
        }
        let end = end as u32;
        let before = whole.parts.range(..end).next_back();
        if let Some((&start, &stop)) = before
            && stop > at
        {
            // Seen before, or cut otherwise than the first time.
            return if start == at && stop == end {
                Assembled::Partly
            } else {
                Assembled::Contradiction
            };
        }
        if whole.parts.len() == MAX_PARTS {
            return Assembled::Contradiction;
        }
        whole.bytes[at as usize..end as usize].copy_from_slice(bytes);
        whole.parts.insert(at, end);
        whole.have += bytes.len();
        if whole.have < whole.bytes.len() {
            return Assembled::Partly;
        }
        let header = usize::from(whole.header);
        Assembled::Whole(self.remove(name), header)
    }

    fn remove(&mut self, name: Name) -> Vec<u8> {
        let whole = self.wholes.remove(&name).expect("the caller saw it");
        self.order[kind(name.0)].remove(&whole.serial);
        self.bytes -= whole.bytes.len();
        whole.bytes
    }

    /// Wholes, their bytes, and pieces.
    #[cfg(test)]
    pub(super) fn held(&self) -> (usize, usize, usize) {
        let parts = self.wholes.values().map(|w| w.parts.len()).sum();
        (self.wholes.len(), self.bytes, parts)
    }

    /// When the oldest one is given up.
    pub(super) fn expires_at(&self) -> Option<Time> {
        let oldest = self.order.iter().filter_map(BTreeMap::first_key_value);
        oldest.map(|(_, (since, _))| *since + PATIENCE).min()
    }

    /// Gives up what is too old.
    pub(super) fn expire(&mut self, now: Time, journal: &mut Journal) {
        for kind in 0..self.order.len() {
            while let Some((_, &(since, name))) = self.order[kind].first_key_value()
                && since + PATIENCE <= now
            {
                self.remove(name);
                journal.count(Counter::FragmentsExpired);
            }
        }
    }
}

/// Kind of a number: an opaque packet's (0) or a chunk's (1).
const fn kind(number: u32) -> usize {
    (number % 2) as usize
}
