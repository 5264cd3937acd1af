//! What the local kernel has for a peer: its connections, and their segments on the way in.

use dibs_wire::frame::TcpFields;
use dibs_wire::packet::{Segment, flags};
use dibs_wire::virtio::{self, VirtioHdr};
use dibs_wire::{SeqNumber, Tuple};

use super::super::fq::SegmentPayload;
use super::Peer;
use crate::buffer::Buffer;
use crate::bump::Method;
use crate::counters::Counter;
use crate::flow::conn::moves_on;
use crate::flow::fields::{self, OwnedFields};
use crate::node::receive::incoming;
use crate::node::shared::Shared;
use crate::session::Session;
use crate::slab::Key;
use crate::time::Time;

/// Segments without payload that wait to be sent, at most.
const MAX_SEGMENTS: usize = 4096;
/// What became of a segment from the TUN.
pub(crate) enum Taken {
    /// Dealt with.
    Done,
    /// To be queued.
    Queue(SegmentPayload),
    /// Not to be cut: as it is.
    Opaque,
}

/// A segment without payload that waits to be sent.
pub(in crate::node) struct EmptyOut {
    pub(in crate::node) conn: Key,
    pub(in crate::node) seq: SeqNumber,
    pub(in crate::node) tcp: OwnedFields,
}

impl EmptyOut {
    /// Whether `later` says all that this says: both only acknowledge, and it acknowledges more.
    /// Equal ones are no repetitions for TCP, which counts them.
    fn is_surpassed_by(&self, later: &Self) -> bool {
        let only_acknowledges = |tcp: &TcpFields<'_>| {
            tcp.flags == flags::ACK && tcp.options.is_none() && tcp.urgent.is_none()
        };
        let (one, other) = (self.tcp.get(), later.tcp.get());
        self.conn == later.conn
            && self.seq == later.seq
            && only_acknowledges(&one)
            && only_acknowledges(&other)
            && other.ack.is_after(one.ack)
    }
}

impl Peer {
    pub(super) fn remove_conn(&mut self, shared: &mut Shared, key: Key) {
        let Some(mut conn) = self.flows.remove(key) else {
            return;
        };
        self.fq.forget(&mut shared.pool, key, &mut conn.out);
        if let Some(mut inc) = conn.inc {
            inc.stream.clear(&mut self.store);
        }
    }

    /// The connection of this tuple in this bump, made if it is new.
    pub(in crate::node) fn conn(
        &mut self,
        now: Time,
        shared: &mut Shared,
        tuple: Tuple,
        bump: u8,
    ) -> Key {
        if let Some(key) = self.flows.find(tuple, bump) {
            return key;
        }
        if let Some(oldest) = self.flows.surplus(|| shared.random_u64()) {
            self.remove_conn(shared, oldest);
            shared.count(Counter::FlowEvicted);
        }
        let key = self.flows.add(now, tuple, bump);
        let conn = self.flows.get_mut(key).expect("it was just added");
        conn.out.scheduler = shared.policy.scheduler_of(&tuple);
        key
    }

    /// Takes a TCP segment of the local kernel.
    pub(crate) fn take_segment(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: Option<&Session>,
        bump: u8,
        segment: &Segment<'_>,
        gso_size: u16,
    ) -> Taken {
        if shared.bumps.get(bump).is_none() {
            return Taken::Opaque;
        }
        let key = self.conn(now, shared, segment.tuple, bump);
        let conn = self.flows.get_mut(key).expect("it was just found");
        conn.last_seen = now;
        if let Some((_, tsecr)) = segment.timestamps
            && segment.has(flags::ACK)
        {
            conn.raise_floor(tsecr);
        }
        if let Some((tsval, _)) = segment.timestamps {
            conn.tsval = Some(tsval);
        }
        if let Some(resume) = &mut conn.echo_filter {
            resume.note(segment);
        }
        let syn = segment.has(flags::SYN);
        if syn {
            conn.acked = None;
            conn.sent_end = None;
            conn.out.stream.reincarnate();
            // What is left of an older connection between the same ports is of no use.
            self.fq.forget(&mut shared.pool, key, &mut conn.out);
        }
        match session {
            Some(session) if syn || conn.out.secrets.is_none() => {
                conn.open(session.epoch_secrets().clone(), segment.meta);
            }
            // It waits, and is opened by the session that it goes by.
            None if syn || conn.out.secrets.is_none() => {
                conn.out.meta = segment.meta;
                conn.out.secrets = None;
            }
            _ => {}
        }
        // The stream's first byte follows the SYN. Whatever opens the flow tells the base.
        conn.out.stream.begin_at(segment.seq.add(u32::from(syn)));
        if segment.has(flags::ACK) {
            self.note_local_ack(now, shared, key, segment.ack);
        }
        let conn = self.flows.get_mut(key).expect("it was just found");
        conn.note_sent(segment);
        if segment.payload.is_empty() {
            // FIN and RST keep their place behind the bytes before them.
            let in_stream = segment.flags & (flags::FIN | flags::RST) != 0
                && !syn
                && (conn.out.stream.base().is_some() || !conn.out.queue.is_empty());
            if !in_stream {
                let tcp = OwnedFields::new(&fields::of_segment(segment, conn.out.meta));
                let empty = EmptyOut {
                    conn: key,
                    seq: segment.seq,
                    tcp,
                };
                let waiting = match shared.bumps.of(bump).split() {
                    Some(_) => &mut self.shares.segments,
                    None => &mut self.segments,
                };
                if let Some(last) = waiting.back_mut()
                    && last.is_surpassed_by(&empty)
                {
                    *last = empty;
                    return Taken::Done;
                }
                if waiting.len() >= MAX_SEGMENTS {
                    waiting.pop_front();
                    shared.count(Counter::QueueFull);
                }
                waiting.push_back(empty);
                return Taken::Done;
            }
        } else if syn {
            // TCP fast open: rare, and not worth a stream that begins twice.
            return Taken::Opaque;
        }
        conn.stats.bytes_sent += segment.payload.len() as u64;
        conn.spoke = Some(now);
        self.handover.hear(now, key);
        let len = segment.payload.len();
        Taken::Queue(SegmentPayload {
            conn: key,
            seq: segment.seq,
            len,
            end: virtio::LEN + segment.payload_at + len,
            mss: if gso_size == 0 {
                len.max(1)
            } else {
                usize::from(gso_size)
            },
        })
    }

    /// What the local kernel acknowledges may prove that a gap was filled past us.
    fn note_local_ack(&mut self, now: Time, shared: &mut Shared, key: Key, ack: SeqNumber) {
        let conn = self.flows.get_mut(key).expect("the caller has it");
        if moves_on(conn.acked, ack) {
            conn.acked = Some(ack);
        }
        if !conn.inc.as_ref().is_some_and(|inc| inc.stream.is_waiting()) {
            return;
        }
        self.flows.meet_floor(key);
        let conn = self.flows.get_mut(key).expect("the caller has it");
        let inc = conn.inc.as_ref().expect("it was just seen");
        let offset = inc.offset_of(ack);
        let (stream, _, mut sink) =
            incoming(now, shared, key, conn).expect("the connection has an incoming flow");
        if let Some(epoch) = stream.local_ack(offset, &mut self.store, &mut sink) {
            self.report_broken_epoch(now, shared, key, epoch);
        } else if stream.held_start().is_some_and(|start| offset >= start) {
            self.release_start(now, shared, key);
        }
    }

    /// Queues a segment's payload.
    pub(crate) fn enqueue(
        &mut self,
        now: Time,
        shared: &mut Shared,
        payload: SegmentPayload,
        buffer: Buffer,
    ) {
        let quantum = self.paths.quantum();
        self.fq
            .enqueue(now, shared, &mut self.flows, payload, (buffer, quantum));
    }

    /// Takes a packet that is not cut.
    pub(crate) fn take_opaque(
        &mut self,
        shared: &mut Shared,
        bump: u8,
        header: VirtioHdr,
        mut buffer: Buffer,
        len: usize,
    ) {
        let packet = &mut buffer[virtio::LEN..len];
        let complete = header.gso_size == 0
            && (!header.needs_csum || dibs_wire::emit::complete_checksum(&header, packet));
        let queue = match shared.bumps.get(bump).map(|bump| &bump.method) {
            Some(Method::Seal(_)) => &mut self.opaque.sealed,
            Some(Method::Split(_)) => &mut self.opaque.split,
            Some(Method::Chain(_)) | None => &mut self.opaque.plain,
        };
        if !complete || !queue.push(bump, packet) {
            shared.count(Counter::OpaqueQueueFull);
        }
        shared.pool.give(buffer);
    }
}
