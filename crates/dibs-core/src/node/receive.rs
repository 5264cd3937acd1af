//! What came from the peer.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Chunk, EmptySegment, Frame, Frames, Open, Share, TcpFields};
use dibs_wire::packet::{self, Packet};
use smallvec::SmallVec;

use super::Shared;
use super::handover::MAX_GATES;
use super::inner;
use super::links::Link;
use super::notice::Event;
use super::opaque::{Assembled, Fragment};
use super::peer::Peer;
use super::send::NOT_BARE;
use super::sets::Added;
use crate::buffer::Pool;
use crate::bump::{Bump, Method};
use crate::chunk::Content;
use crate::counters::Counter;
use crate::flow::clamp::Clamp;
use crate::flow::conn::{Conn, Incoming, IncomingDecoders};
use crate::flow::inject::{Injector, MAX_PACKET, Template};
use crate::flow::resume::{self, Resume};
use crate::path::{AckFrame, PathState};
use crate::session::Received;
use crate::slab::Key;
use crate::stream::rx::{Outcome, Piece, RxStream, Sink};
use crate::time::Time;

/// How often a peer is told of the same broken epoch.
const COMPLAINT_SPACING: std::time::Duration = std::time::Duration::from_millis(20);
/// Bytes of notices that wait to be sent, at most.
const MAX_NOTICES: usize = 512;
/// Paths to a peer, those included that are being opened.
const MAX_LINKS: usize = 16;
/// Messages whose repetitions are recognised.
const CONTROLS_SEEN: usize = 256;

/// Where a datagram came in.
#[derive(Clone, Copy)]
struct Arrival {
    path: usize,
    from: SocketAddr,
}

/// What protected the bytes of a chunk on their way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cover {
    /// Nothing: whoever was on the path may have made them.
    None,
    /// They were seen, not changed.
    Authentic,
    /// They were not seen either.
    Encrypted,
    /// They were put together of what several paths carried, for this bump.
    Split(u8),
}

impl Cover {
    /// Whether a flow of this bump may have bytes that came like this: never less than it promises.
    fn suits(self, bump: &Bump) -> bool {
        match bump.method {
            Method::Chain(_) => true,
            Method::Seal(_) => self == Self::Encrypted,
            Method::Split(_) => self == Self::Split(bump.number),
        }
    }
}

/// What the frames of a datagram come to.
struct Verdict {
    /// Its content was taken, so it may be acknowledged.
    taken: bool,
    /// It asks for that.
    eliciting: bool,
}

impl Peer {
    /// Takes a datagram that belongs to a session with this peer.
    pub(crate) fn receive(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        from: SocketAddr,
        received: &Received<'_>,
    ) {
        let arrival = Arrival { path, from };
        if self.has_unconfirmed() && received.opened.authenticated {
            self.on_used(now, shared, received.session, received.confirmed);
        }
        // What an instance that is gone left on the way speaks of paths that are gone.
        if !self
            .secrets
            .iter()
            .any(|(_, s)| s.session() == received.session)
        {
            return shared.count(Counter::DatagramExpired);
        }
        let opened = &received.opened;
        let Some(at) = self.links.iter().position(|l| l.id == opened.path_id) else {
            if opened.authenticated {
                let len = opened.header.len() + opened.payload.len() + crate::session::OVERHEAD;
                let (id, header) = (opened.path_id, opened.header);
                self.receive_join(now, shared, arrival, len as u64, id, header);
            } else {
                shared.count(Counter::BareRefused);
            }
            return;
        };
        let len = (opened.header.len() + opened.payload.len() + crate::session::OVERHEAD) as u64;
        if self.links[at].local != path {
            // It may wait to be proved, and have been asked for elsewhere at first.
            if !opened.authenticated || !self.links[at].is_accepting() {
                return shared.count(Counter::WrongPath);
            }
            return self.receive_join(now, shared, arrival, len, opened.path_id, opened.header);
        }
        if opened.authenticated {
            self.links[at].on_source(now, shared, opened.seq, from, len);
        } else if !self.links[at].expects_bare(opened.seq, from) {
            return shared.count(Counter::BareRefused);
        }
        self.links[at].bytes_received += len;
        let mut verdict = Verdict {
            taken: true,
            eliciting: false,
        };
        let cover = match (opened.authenticated, opened.payload_inside) {
            (false, _) => Cover::None,
            (true, false) => Cover::Authentic,
            (true, true) => Cover::Encrypted,
        };
        let mut payload = Some(&*opened.payload);
        for frame in Frames::new(opened.header) {
            let Ok(frame) = frame else {
                shared.count(Counter::FrameMalformed);
                return;
            };
            if !opened.authenticated && !is_bare_data(&frame, payload.map_or(0, <[u8]>::len)) {
                return shared.count(Counter::BareRefused);
            }
            verdict.eliciting |= frame.is_ack_eliciting();
            // A path that was proved may have taken the place of others.
            let Some(at) = self.links.iter().position(|l| l.id == opened.path_id) else {
                return;
            };
            let open = self.links[at].is_open();
            if !open && !is_joining(&frame) {
                shared.count(Counter::PathNotValidated);
                if opened.authenticated {
                    self.links[at].on_early_data();
                }
                return;
            }
            verdict.taken &= match &frame {
                Frame::Chunk(_) | Frame::Share(_) => {
                    // At most one frame describes the payload.
                    let Some(bytes) = payload.take() else {
                        return shared.count(Counter::FrameMalformed);
                    };
                    match &frame {
                        Frame::Share(share) => self.take_share(now, shared, path, share, bytes),
                        Frame::Chunk(chunk) => {
                            self.take_chunk(now, shared, path, chunk, (bytes, cover))
                        }
                        _ => unreachable!("it is one of these"),
                    }
                }
                frame => self.take_frame(now, shared, arrival, at, frame),
            };
        }
        if verdict.taken
            && let Some(link) = self.links.iter_mut().find(|l| l.id == opened.path_id)
            && link.is_open()
        {
            link.path.on_received(now, opened.seq, verdict.eliciting);
            // It is there again: an answer to a question of ours makes it ours to use.
            link.probe |= verdict.eliciting && link.path.state() != PathState::Active;
        }
    }

    /// A datagram of a path that we do not know can only ask to open it.
    fn receive_join(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        len: u64,
        id: u8,
        header: &[u8],
    ) {
        let Some(Ok(Frame::PathJoin { nonce, trusted })) = Frames::new(header).next() else {
            return shared.count(Counter::WrongPath);
        };
        if self.numbers(id) || !self.resolve_crossed(arrival.path, arrival.from) {
            return shared.count(Counter::PathRefused);
        }
        if let Some(at) = self.links.iter().position(|l| l.id == id) {
            self.remove_link(at);
        }
        if self.links.len() >= MAX_LINKS {
            let unproved = self.links.iter().position(Link::is_accepting);
            let Some(unproved) = unproved else {
                return shared.count(Counter::PathRefused);
            };
            self.remove_link(unproved);
        }
        let Arrival { path, from } = arrival;
        let link = Link::accept(now, shared, id, path, from, len, nonce, trusted);
        self.add_link(link);
    }

    fn take_frame(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        at: usize,
        frame: &Frame<'_>,
    ) -> bool {
        let link = &mut self.links[at];
        match *frame {
            Frame::Ping => {}
            Frame::Ack(bytes) => self.take_ack(now, shared, at, bytes),
            Frame::Chunk(_) | Frame::Share(_) => {
                unreachable!("the caller keeps what has a payload to itself")
            }
            Frame::Segment(_) | Frame::Opaque { .. } | Frame::Fragment { .. } => {
                // Header blocks are encrypted, always.
                return self.take_inner(now, shared, arrival.path, frame, Cover::Encrypted);
            }
            Frame::Control { id, bytes } => {
                if !self.control_seen.contains(&id) {
                    if self.control_seen.len() == CONTROLS_SEEN {
                        self.control_seen.pop_front();
                    }
                    self.control_seen.push_back(id);
                    let peer = self.id.index();
                    shared.events.push_back(Event::Control {
                        peer,
                        bytes: bytes.to_vec(),
                    });
                }
            }
            Frame::FlowUnknown { flow, incarnation } => {
                if let Some(conn) = self
                    .outgoing
                    .get(&flow)
                    .and_then(|k| self.conns.get_mut(*k))
                    && conn.out.stream.incarnation() == incarnation
                {
                    conn.out.stream.reincarnate();
                    conn.out.secrets = None;
                    conn.out.unconfirm();
                }
            }
            Frame::EpochBroken {
                flow,
                incarnation,
                epoch,
            } => {
                if let Some(conn) = self
                    .outgoing
                    .get(&flow)
                    .and_then(|k| self.conns.get_mut(*k))
                    && conn.out.stream.incarnation() == incarnation
                    && conn.out.stream.is_current(epoch)
                {
                    conn.out.stream.break_chain();
                }
            }
            Frame::PathJoin { nonce, trusted } => link.on_join(now, shared, nonce, trusted),
            Frame::PathAccept {
                nonce,
                challenge,
                trusted,
            } => {
                let id = link.id;
                if link.on_accept(now, shared, nonce, challenge, trusted) {
                    self.supersede(shared, id);
                } else {
                    shared.count(Counter::PeerContradiction);
                }
            }
            Frame::PathConfirm { challenge } => {
                let id = link.id;
                if link.on_confirm(now, challenge) {
                    self.supersede(shared, id);
                } else {
                    shared.count(Counter::PathNotValidated);
                }
            }
            Frame::PathChallenge { challenge } => {
                link.push_frame(shared, &Frame::PathResponse { challenge });
            }
            Frame::PathResponse { challenge } => {
                shared.count(match link.on_response(arrival.from, challenge) {
                    true => Counter::EndpointMoved,
                    false => Counter::PeerContradiction,
                });
            }
        }
        let peer = self.id.index();
        if let Some(link) = self.links.get_mut(at) {
            link.note_state(shared, peer);
        }
        true
    }

    /// Takes what the peer's kernel sent, other than a chunk.
    fn take_inner(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        frame: &Frame<'_>,
        cover: Cover,
    ) -> bool {
        match *frame {
            Frame::Segment(ref segment) => self.take_empty(now, shared, segment, cover),
            Frame::Opaque { bump, packet } => {
                self.take_packet(shared, bump, packet, cover);
                true
            }
            Frame::Fragment {
                id,
                at,
                total,
                header,
                bytes,
            } => {
                let fragment = Fragment {
                    id,
                    at,
                    total,
                    header,
                    bytes,
                };
                self.take_fragment(now, shared, path, &fragment, cover)
            }
            _ => {
                shared.count(Counter::PeerContradiction);
                true
            }
        }
    }

    /// Takes a share; false if it counts as not received.
    fn take_share(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        share: &Share,
        bytes: &[u8],
    ) -> bool {
        let bumps = Arc::clone(&shared.bumps);
        let Some(split) = bumps.get(share.bump).and_then(Bump::split) else {
            shared.count(Counter::BumpUnknown);
            return true;
        };
        if (share.needed, share.shares) != (split.needed(), split.shares()) {
            shared.count(Counter::ShareMismatch);
            return true;
        }
        let mut whole = std::mem::take(&mut shared.joined);
        let number = (share.set, share.index);
        let taken = match self.sets.add(now, split, number, bytes, &mut whole) {
            Added::Partly => true,
            Added::Whole(set) => {
                let taken = self.take_whole(now, shared, path, share.bump, &whole);
                if taken {
                    self.sets.finish(set);
                }
                taken
            }
            Added::Late => {
                shared.count(Counter::ShareLate);
                true
            }
            Added::NoRoom => {
                shared.count(Counter::StoreFull);
                false
            }
            Added::Contradiction => {
                shared.count(Counter::PeerContradiction);
                true
            }
        };
        shared.joined = whole;
        taken
    }

    /// Takes what was put together: the length of a payload, the payload, a header block.
    fn take_whole(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        bump: u8,
        whole: &[u8],
    ) -> bool {
        let cover = Cover::Split(bump);
        let parts = whole
            .split_first_chunk()
            .and_then(|(len, rest)| rest.split_at_checked(usize::from(u16::from_be_bytes(*len))));
        let Some((payload, block)) = parts else {
            shared.count(Counter::FrameMalformed);
            return true;
        };
        let mut payload = Some(payload);
        let mut taken = true;
        for frame in Frames::new(block) {
            taken &= match (&frame, payload) {
                (Ok(Frame::Chunk(chunk)), Some(bytes)) => {
                    payload = None;
                    self.take_chunk(now, shared, path, chunk, (bytes, cover))
                }
                (Ok(Frame::Chunk(_)) | Err(_), _) => {
                    shared.count(Counter::FrameMalformed);
                    true
                }
                (Ok(frame), _) => self.take_inner(now, shared, path, frame, cover),
            };
        }
        taken
    }

    fn take_ack(&mut self, now: Time, shared: &mut Shared, at: usize, bytes: &[u8]) {
        let Ok(ack) = AckFrame::decode(bytes) else {
            return shared.count(Counter::FrameMalformed);
        };
        let link = &mut self.links[at];
        let mut acked = std::mem::take(&mut self.acked);
        let mut lost = std::mem::take(&mut self.lost);
        if link.path.on_ack(now, &ack, &mut acked, &mut lost).is_err() {
            shared.count(Counter::AckRefused);
        }
        let id = link.id;
        let mut confirmed = None;
        for token in acked.drain(..) {
            let Some(key) = super::send::key_of(token) else {
                continue;
            };
            if let Some(pending) = self.waiting.get(key)
                && let Content::Chunk(chunk) = &pending.content
            {
                let head = self.waiting.head(chunk);
                let of = (head.conn, head.strand.incarnation);
                if confirmed != Some(of) {
                    confirmed = Some(of);
                    self.confirm(of.0, of.1);
                }
            } else if let Some(Content::Share(share)) = self.waiting.get(key).map(|p| &p.content)
                && share.opens
            {
                let head = self.waiting.head_of_share(share);
                let (conn, incarnation) = (head.conn, head.strand.incarnation);
                self.confirm_share(shared, conn, incarnation, share.set);
            }
            let Some(pending) = self.waiting.remove(key, &mut shared.pool) else {
                continue;
            };
            match pending.content {
                Content::Opened {
                    conn,
                    incarnation,
                    set,
                } => match set {
                    None => self.confirm(conn, incarnation),
                    Some(set) => self.confirm_share(shared, conn, incarnation, set),
                },
                Content::Control { .. } => self.controls_waiting -= 1,
                Content::Share(_) | Content::Chunk(_) | Content::Fragment(_) => {}
            }
        }
        self.take_lost(shared, id, &mut lost);
        self.acked = acked;
        self.lost = lost;
    }

    fn confirm_share(&mut self, shared: &Shared, conn: Key, incarnation: u16, set: u32) {
        if let Some(conn) = self.conns.get_mut(conn)
            && conn.out.stream.incarnation() == incarnation
            && let Some(split) = shared.bumps.of(conn.bump).split()
        {
            conn.out.confirm_share(set, split.needed());
        }
    }

    fn confirm(&mut self, conn: Key, incarnation: u16) {
        if let Some(conn) = self.conns.get_mut(conn)
            && conn.out.stream.incarnation() == incarnation
        {
            conn.out.confirm();
        }
    }

    /// The connection that a frame belongs to, its flow opened if the frame does that.
    fn incoming_conn(
        &mut self,
        now: Time,
        shared: &mut Shared,
        flow: u32,
        incarnation: u16,
        open: Option<&Open>,
    ) -> Result<Key, bool> {
        let known = match self.last_incoming {
            Some((last, key)) if last == flow => Some(key),
            _ => self.incoming.get(&flow).copied(),
        };
        self.last_incoming = known.map(|key| (flow, key));
        let current = known.and_then(|key| Some((key, self.conns.get(key)?.inc.as_ref()?)));
        if let Some((key, inc)) = current {
            match incarnation.wrapping_sub(inc.incarnation) as i16 {
                0 => return Ok(key),
                older if older < 0 => {
                    shared.count(Counter::FlowOld);
                    return Err(true);
                }
                _ => {}
            }
        }
        let Some(open) = open else {
            shared.count(Counter::FlowUnknown);
            self.notice(shared, &Frame::FlowUnknown { flow, incarnation });
            return Err(false);
        };
        self.open_incoming(now, shared, flow, incarnation, open)
    }

    fn open_incoming(
        &mut self,
        now: Time,
        shared: &mut Shared,
        flow: u32,
        incarnation: u16,
        open: &Open,
    ) -> Result<Key, bool> {
        if shared.bumps.get(open.bump).is_none() {
            shared.count(Counter::BumpUnknown);
            return Err(true);
        }
        let may_pass =
            self.is_from_here(shared, open.tuple.src) && is_for_us(shared, open.tuple.dst);
        if !may_pass {
            shared.count(Counter::InnerAddress);
            return Err(true);
        }
        let Some(secrets) = self
            .secrets
            .iter()
            .map(|(_, s)| s)
            .find(|s| s.session().as_u64() == open.session)
        else {
            // Opened under a session that is gone: to be opened again under this one.
            shared.count(Counter::FlowUnknown);
            self.notice(shared, &Frame::FlowUnknown { flow, incarnation });
            return Err(false);
        };
        let secrets = secrets.clone();
        let key = self.conn(now, shared, open.tuple.reversed(), open.bump);
        let conn = self.conns.get_mut(key).expect("it was just found");
        if let Some(mut old) = conn.inc.take() {
            old.stream.clear(&mut self.store);
            self.incoming.remove(&old.flow);
            self.last_incoming = None;
        }
        conn.inc = Some(Incoming {
            flow,
            incarnation,
            template: Template {
                bump: open.bump,
                tuple: open.tuple,
                meta: open.meta,
            },
            base: open.base_seq,
            secrets,
            stream: RxStream::default(),
            top: frame::BASE_OFFSET,
        });
        self.incoming.insert(flow, key);
        self.last_incoming = None;
        shared.events.push_back(Event::Opened {
            peer: self.id.index(),
            bump: open.bump,
            tuple: conn.tuple,
        });
        Ok(key)
    }

    /// Whether an inner source is one of this peer's hosts, whatever wide prefix it has (SECURITY 6).
    fn is_from_here(&self, shared: &Shared, addr: IpAddr) -> bool {
        is_unicast(addr) && !shared.is_ours(addr) && self.owns(addr)
    }

    /// Takes a chunk; false if it counts as not received.
    fn take_chunk(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        chunk: &Chunk<'_>,
        (bytes, cover): (&[u8], Cover),
    ) -> bool {
        let key = match self.incoming_conn(
            now,
            shared,
            chunk.flow,
            chunk.incarnation,
            chunk.open.as_ref(),
        ) {
            Ok(key) => key,
            Err(taken) => return taken && cover != Cover::None,
        };
        let conn = self.conns.get_mut(key).expect("it was just found");
        let possible = |inc: &Incoming| {
            inc.template.fits(&chunk.tcp, bytes.len())
                && chunk.offset.checked_add(bytes.len() as u64 + 1).is_some()
        };
        if !conn.inc.as_ref().is_some_and(possible) {
            shared.count(Counter::PeerContradiction);
            return true;
        }
        if !cover.suits(shared.bumps.of(conn.bump)) {
            shared.count(Counter::CoverMissing);
            return cover != Cover::None;
        }
        conn.last_seen = now;
        conn.by_path.entry(path).received += bytes.len() as u64;
        let base = conn.inc.as_ref().map(|inc| inc.seq(chunk.offset));
        let piece = Piece {
            solo: chunk.solo,
            first: chunk.first,
            early: chunk.detached
                && self.gates.len() < MAX_GATES
                && base
                    .zip(conn.acked)
                    .is_some_and(|(base, acked)| base.is_after(acked)),
            epoch: chunk.epoch,
            offset: chunk.offset,
            crc: chunk.crc,
            tcp: chunk.tcp,
            bytes,
        };
        let (stream, decoders, mut sink) =
            incoming(now, shared, key, conn).expect("an incoming flow leads to its connection");
        match stream.chunk(&piece, &decoders, &mut self.store, &mut sink) {
            Outcome::Restored => {}
            Outcome::Held => {
                if stream.gate().is_some() {
                    self.note_gate(now, key);
                }
            }
            Outcome::Duplicate => shared.count(Counter::ChunkDuplicate),
            Outcome::NoRoom => {
                shared.count(Counter::StoreFull);
                return false;
            }
            Outcome::Broken => {
                shared.count(Counter::EpochEnded);
                self.complain(now, shared, key, chunk.epoch);
            }
            Outcome::Corrupt => {
                shared.count(Counter::CrcMismatch);
                self.complain(now, shared, key, chunk.epoch);
            }
            Outcome::Contradiction => shared.count(Counter::PeerContradiction),
        }
        let abandoned = self.store.take_abandoned();
        shared.counters.add(Counter::EpochEnded, abandoned);
        true
    }

    /// Takes a segment without payload; false if it counts as not received.
    fn take_empty(
        &mut self,
        now: Time,
        shared: &mut Shared,
        segment: &EmptySegment<'_>,
        cover: Cover,
    ) -> bool {
        let EmptySegment {
            flow,
            incarnation,
            seq,
            tcp,
            open,
        } = segment;
        let key = match self.incoming_conn(now, shared, *flow, *incarnation, open.as_ref()) {
            Ok(key) => key,
            Err(taken) => return taken,
        };
        let conn = self.conns.get_mut(key).expect("it was just found");
        if !cover.suits(shared.bumps.of(conn.bump)) {
            shared.count(Counter::CoverMissing);
            return true;
        }
        conn.last_seen = now;
        let mut tcp = *tcp;
        let mut scratch = SmallVec::new();
        resume::adapt(&mut conn.resume, now, &mut tcp, &mut scratch);
        if let Some(clamp) = &mut conn.clamp {
            clamp.limit(&mut tcp);
        }
        let inc = conn
            .inc
            .as_ref()
            .expect("an incoming flow leads to its connection");
        let floor = &mut conn.tsval_floor;
        shared
            .injector
            .empty_segment(&mut shared.pool, inc.template, *seq, &tcp, floor);
        true
    }

    /// Takes a packet that was not cut.
    fn take_packet(&mut self, shared: &mut Shared, bump: u8, bytes: &[u8], cover: Cover) {
        let Ok(packet) = packet::parse(bytes) else {
            return shared.count(Counter::FrameMalformed);
        };
        let Some(bytes) = bytes
            .get(..packet.own_len())
            .filter(|b| b.len() <= MAX_PACKET)
        else {
            return shared.count(Counter::FrameMalformed);
        };
        let (src, dst, whole) = match packet {
            Packet::Tcp(s) => (s.tuple.src, s.tuple.dst, true),
            Packet::Opaque(o) => (o.src, o.dst, inner::may_pass(self, shared, &o)),
        };
        let Some(carried) = shared.bumps.get(bump) else {
            return shared.count(Counter::BumpUnknown);
        };
        if !cover.suits(carried) {
            return shared.count(Counter::CoverMissing);
        }
        if !whole || !self.is_from_here(shared, src) || !is_for_us(shared, dst) {
            return shared.count(Counter::InnerAddress);
        }
        shared.injector.opaque(&mut shared.pool, bump, bytes);
    }

    /// Takes a piece of an opaque packet or of a chunk.
    fn take_fragment(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        fragment: &Fragment<'_>,
        cover: Cover,
    ) -> bool {
        let opaque = fragment.id.is_multiple_of(2);
        if !opaque && matches!(cover, Cover::Split(_)) {
            // What is split is cut beforehand, or its shares are.
            shared.count(Counter::PeerContradiction);
            return true;
        }
        let mut reassembly = std::mem::take(&mut self.reassembly);
        let assembled = reassembly.add(now, shared, fragment);
        self.reassembly = reassembly;
        match assembled {
            Assembled::Partly => true,
            Assembled::Contradiction => {
                shared.count(Counter::PeerContradiction);
                true
            }
            Assembled::Whole(bytes, _) if opaque => {
                if let Some((&bump, packet)) = bytes.split_first() {
                    self.take_packet(shared, bump, packet, cover);
                }
                true
            }
            Assembled::Whole(bytes, header) => {
                let (block, payload) = bytes.split_at(header);
                match Frames::new(block).next() {
                    Some(Ok(Frame::Share(share))) => {
                        self.take_share(now, shared, path, &share, payload)
                    }
                    Some(Ok(Frame::Chunk(chunk))) => {
                        self.take_chunk(now, shared, path, &chunk, (payload, cover))
                    }
                    _ => {
                        shared.count(Counter::FrameMalformed);
                        true
                    }
                }
            }
        }
    }

    /// Tells the peer that an epoch cannot be restored, now and then.
    pub(super) fn complain(&mut self, now: Time, shared: &mut Shared, key: Key, epoch: u32) {
        let conn = self.conns.get_mut(key).expect("the caller has it");
        let Some(inc) = &conn.inc else { return };
        if conn
            .complained
            .is_some_and(|(e, t)| e == epoch && now.since(t) < COMPLAINT_SPACING)
        {
            return;
        }
        conn.complained = Some((epoch, now));
        let (flow, incarnation) = (inc.flow, inc.incarnation);
        self.notice(
            shared,
            &Frame::EpochBroken {
                flow,
                incarnation,
                epoch,
            },
        );
    }

    fn notice(&mut self, shared: &mut Shared, frame: &Frame<'_>) {
        let mut bytes = [0; 32];
        let mut w = Writer::new(&mut bytes);
        frame::encode(frame, &mut w);
        let len = w.len();
        if self.notices.len() + len <= MAX_NOTICES {
            self.notices.extend_from_slice(&bytes[..len]);
        } else {
            shared.count(Counter::NoticeDropped);
        }
    }
}

/// What may come without authentication: data of the scramble bump in the midst of an epoch of a
/// flow that an authenticated frame opened (SECURITY 3). It neither opens nor closes anything.
fn is_bare_data(frame: &Frame<'_>, payload: usize) -> bool {
    let Frame::Chunk(chunk) = frame else {
        return false;
    };
    let data = payload > 0 && chunk.tcp.flags & NOT_BARE == 0;
    data && !chunk.solo && !chunk.first && chunk.open.is_none()
}

fn is_joining(frame: &Frame<'_>) -> bool {
    matches!(
        frame,
        Frame::PathJoin { .. }
            | Frame::PathAccept { .. }
            | Frame::PathConfirm { .. }
            | Frame::PathChallenge { .. }
            | Frame::PathResponse { .. }
            | Frame::Ack(_)
    )
}

/// An inner destination must be an address of this host, or of one that it forwards for, and nothing
/// else (SECURITY 6).
fn is_for_us(shared: &Shared, addr: IpAddr) -> bool {
    is_unicast(addr) && shared.is_ours(addr)
}

fn is_unicast(addr: IpAddr) -> bool {
    let broadcast = addr == IpAddr::V4(Ipv4Addr::BROADCAST);
    !(addr.is_loopback() || addr.is_multicast() || addr.is_unspecified() || broadcast)
}

/// The incoming stream of a connection, how it is restored, and where its bytes go.
pub(super) fn incoming<'a>(
    now: Time,
    shared: &'a mut Shared,
    key: Key,
    conn: &'a mut Conn,
) -> Option<(&'a mut RxStream, IncomingDecoders<'a>, ConnSink<'a>)> {
    let Incoming {
        flow,
        incarnation,
        template,
        base,
        secrets,
        stream,
        top,
    } = conn.inc.as_mut()?;
    let sink = ConnSink {
        injector: &mut shared.injector,
        pool: &mut shared.pool,
        owner: key.to_u64(),
        template: *template,
        now,
        resume: &mut conn.resume,
        base: *base,
        floor: &mut conn.tsval_floor,
        clamp: conn.clamp.as_deref_mut(),
        top,
        received: &mut conn.stats.bytes_received,
        last: 0,
    };
    let bump = shared.bumps.of(conn.bump);
    let decoders = IncomingDecoders::new(bump, secrets, *flow, *incarnation);
    Some((stream, decoders, sink))
}

/// Hands restored bytes of one connection to the injector.
pub(super) struct ConnSink<'a> {
    injector: &'a mut Injector,
    pool: &'a mut Pool,
    owner: u64,
    template: Template,
    now: Time,
    resume: &'a mut Option<Box<Resume>>,
    base: dibs_wire::SeqNumber,
    floor: &'a mut Option<u32>,
    clamp: Option<&'a mut Clamp>,
    top: &'a mut u64,
    received: &'a mut u64,
    last: u64,
}

impl Sink for ConnSink<'_> {
    fn room(&mut self, offset: u64, tcp: &TcpFields<'_>, len: usize) -> &mut [u8] {
        self.last = len as u64;
        *self.top = (*self.top).max(offset + len as u64);
        let seq = self
            .base
            .add(offset.wrapping_sub(frame::BASE_OFFSET) as u32);
        let mut scratch = SmallVec::new();
        let mut changed;
        let tcp = match (self.resume.is_some(), &mut self.clamp) {
            // As nearly always: nothing to copy.
            (false, None) => tcp,
            (_, clamp) => {
                changed = *tcp;
                resume::adapt(self.resume, self.now, &mut changed, &mut scratch);
                if let Some(clamp) = clamp {
                    clamp.limit(&mut changed);
                }
                &changed
            }
        };
        self.injector.room(
            self.pool,
            self.owner,
            self.template,
            seq,
            tcp,
            self.floor,
            len,
        )
    }

    fn commit(&mut self) {
        *self.received += self.last;
    }

    fn retract(&mut self) {
        self.injector.retract(self.pool);
    }
}

#[cfg(test)]
mod tests;
