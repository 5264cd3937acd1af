//! One peer: all that is known of it, and where what comes from it and from the local kernel goes.

use dibs_settings::BumpId;
use dibs_wire::frame::{Chunk, Frame, Frames};
use dibs_wire::packet::{IpMeta, Segment, flags};
use dibs_wire::virtio::{self, VirtioHdr};

use super::association::{Association, News};
use super::deadline::{Deadline, Reason};
use super::empty::EmptyOut;
use super::flows::FlowTable;
use super::fq::SegmentPayload;
use super::handover::Handover;
use super::hosts::Hosts;
use super::notice::Event;
use super::out::Out;
use super::paths::{Arrival, Link, PathSet, Verdict, is_joining};
use super::protection::Protection;
use super::receive::{ReceiveCx, Receiver};
use super::send::{self, NOT_BARE, Queues, Sealer, SendCx, Shares, key_of};
use super::shared::{Setup, Shared};
use crate::buffer::Buffer;
use crate::chunk::Content;
use crate::counters::Counter;
use crate::flow::numbers::Compared;
use crate::in_flight::InFlight;
use crate::path::AckFrame;
use crate::path_index::PathIndex;
use crate::session::{Established, Opened, PathId, PeerId, Received, Session, SessionId};
use crate::slab::Key;
use crate::tcp_fields::{self, OwnedFields};
use crate::time::Time;

/// Fate of a segment from the TUN.
pub(crate) enum Taken {
    /// Dealt with.
    Done,
    /// To be queued.
    Queue(SegmentPayload),
    /// Not to be cut: as it is.
    Opaque,
}

/// Peer, as the node knows it.
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(super) hosts: Hosts,
    pub(super) association: Association,
    pub(super) paths: PathSet,
    pub(super) flows: FlowTable,
    pub(crate) in_flight: InFlight,
    pub(super) queues: Queues,
    pub(super) handover: Handover,
    pub(super) receiver: Receiver,
}

impl Peer {
    pub(crate) fn new(now: Time, id: PeerId, hosts: Hosts, paths: PathSet, setup: &Setup) -> Self {
        Self {
            id,
            hosts,
            association: Association::new(now),
            paths,
            flows: FlowTable::new(setup.hash_keys),
            in_flight: InFlight::default(),
            queues: Queues::default(),
            handover: Handover::default(),
            receiver: Receiver::new(now),
        }
    }

    /// The receiver, and what it works on.
    pub(super) fn receiving<'a>(
        &'a mut self,
        now: Time,
        shared: &'a mut Shared,
    ) -> (&'a mut Receiver, ReceiveCx<'a>) {
        let cx = ReceiveCx {
            now,
            peer: self.id.index(),
            shared,
            hosts: &self.hosts,
            paths: &self.paths,
            association: &self.association,
            flows: &mut self.flows,
            fq: &mut self.queues.fq,
        };
        (&mut self.receiver, cx)
    }

    /// Drops what waits of these connections, which is of an earlier time: TCP sends it again, or it is of others between the same ports.
    pub(super) fn forget_waiting(&mut self, shared: &mut Shared, conns: &[Key]) {
        let queues = &mut self.queues;
        for waiting in [&mut queues.segments, &mut queues.shares.segments] {
            waiting.retain(|empty| !conns.contains(&empty.conn));
        }
        for key in conns {
            if let Some(conn) = self.flows.get_mut(*key) {
                let segments = queues.fq.forget(&mut shared.pool, *key, &mut conn.out);
                shared.journal.counters.add(Counter::EpochEnded, segments);
            }
        }
    }

    /// Queues a segment without data, beside the stream.
    fn queue_empty(
        &mut self,
        shared: &mut Shared,
        bump: BumpId,
        key: Key,
        segment: &Segment<'_>,
        meta: IpMeta,
    ) {
        let empty = EmptyOut {
            conn: key,
            seq: segment.seq,
            tcp: OwnedFields::new(&tcp_fields::of_segment(segment, meta)),
        };
        let waiting = match shared.setup.bumps.of(bump).split() {
            Some(_) => &mut self.queues.shares.segments,
            None => &mut self.queues.segments,
        };
        if !empty.queue(waiting) {
            shared.count(Counter::QueueFull);
        }
    }

    /// Takes a TCP segment of the local kernel.
    pub(crate) fn take_segment(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: Option<&Session>,
        bump: BumpId,
        segment: &Segment<'_>,
        gso_size: u16,
    ) -> Taken {
        if shared.setup.bumps.get(bump).is_none() {
            return Taken::Opaque;
        }
        let (receiver, mut cx) = self.receiving(now, shared);
        let key = receiver.conn(&mut cx, segment.tuple, bump);
        receiver.on_local_answer(&mut cx, key, segment);
        let (conn, _, floor) = cx.flows.with_ends(key).expect("it was just found");
        let begins = conn.note_segment(now, segment, session);
        let silenced = conn.silenced(segment);
        if let Some((_, tsecr)) = segment.timestamps
            && segment.has(flags::ACK)
        {
            floor.raise(tsecr);
        }
        let syn = segment.has(flags::SYN);
        if syn {
            // What is left of an older connection between the same ports is of no use.
            let segments = cx.fq.forget(&mut cx.shared.pool, key, &mut conn.out);
            cx.shared
                .journal
                .counters
                .add(Counter::EpochEnded, segments);
        }
        if begins {
            end_elsewhere(&mut cx, key);
        }
        if segment.has(flags::ACK) {
            receiver.on_local_ack(&mut cx, key, segment.ack);
        }
        // The far end may have left already: what it acknowledged of this in plain would be more than routers there have seen. But what
        // this acknowledges may be all that the far kernel waits for.
        if let Some(bare) = silenced {
            shared.count(Counter::SilenceBroken);
            let meta = self.flows.get(key).map(|conn| conn.out.meta);
            let meta = meta.expect("it was just found");
            self.queue_empty(shared, bump, key, &bare, meta);
            return Taken::Done;
        }
        let conn = self.flows.note_sent(key, segment);
        if conn.compare(now, None) == Compared::Differ {
            let tuple = segment.tuple;
            { &mut shared.journal.events }.push(Event::Renumbered { bump, tuple });
        }
        if segment.payload.is_empty() {
            // FIN and RST keep their place behind the bytes before them.
            let in_stream = segment.flags & (flags::FIN | flags::RST) != 0
                && !syn
                && (conn.out.stream.base().is_some() || !conn.out.queue.is_empty());
            if !in_stream {
                let meta = conn.out.meta;
                self.queue_empty(shared, bump, key, segment, meta);
                return Taken::Done;
            }
        } else if syn {
            // TCP fast open: rare, and not worth a stream that begins twice.
            return Taken::Opaque;
        }
        conn.note_payload(segment.payload.len());
        self.handover.hear(now, key);
        let len = segment.payload.len();
        Taken::Queue(SegmentPayload {
            conn: key,
            seq: segment.seq,
            len,
            end: virtio::LEN + segment.payload_at + len,
            mss: match gso_size {
                0 => len.max(1),
                size => size.into(),
            },
        })
    }

    /// Takes a packet of the local kernel that is carried whole; header and packet stand in `buffer[..len]`.
    pub(crate) fn take_whole(
        &mut self,
        shared: &mut Shared,
        bump: BumpId,
        header: VirtioHdr,
        packet: (Buffer, usize),
    ) {
        let Self { queues, flows, .. } = self;
        queues.opaque.take(shared, flows, bump, header, packet);
    }

    /// True if a datagram of path `id` may come by this local path.
    pub(super) fn expects(&self, id: PathId, local: PathIndex) -> bool {
        let known = self.paths.iter().find(|l| l.id == id);
        // Somebody may have brought the first question here by another interface. And who has
        // restarted numbers its paths anew; that it has, only what it sends now proves.
        known.is_none_or(|l| l.local == local || l.is_accepting())
            || self.association.may_have_restarted()
    }

    /// Takes a datagram that belongs to a session with this peer.
    pub(crate) fn receive(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        received: &Received<'_>,
    ) {
        let opened = &received.opened;
        if opened.authenticated {
            self.on_used(now, shared, received.session, received.confirmed);
        }
        if !self.association.counts(received.session) {
            return shared.count(Counter::DatagramExpired);
        }
        if let Err(given_up) = self.paths.admit(now, shared, arrival, opened) {
            return self.abandon(shared, given_up);
        }
        if let Some(verdict) = self.take_frames(now, shared, arrival, opened)
            && verdict.taken
            && let Some(link) = self.paths.by_id(opened.path_id)
            && link.is_open()
        {
            let marked = arrival.marked && opened.authenticated;
            link.on_taken(now, &shared.setup, opened.seq, verdict, marked);
        }
    }

    /// Takes the frames of a datagram; none if it is dropped, which is counted.
    fn take_frames(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        opened: &Opened<'_>,
    ) -> Option<Verdict> {
        let dropped = |shared: &mut Shared, reason| {
            shared.count(reason);
            None
        };
        let mut verdict = Verdict {
            taken: true,
            eliciting: false,
            used: false,
        };
        let protection = match (opened.authenticated, opened.payload_inside) {
            (false, _) => Protection::None,
            (true, false) => Protection::Authentic,
            (true, true) => Protection::Encrypted,
        };
        // At most one frame describes it.
        let mut payload = Some(&*opened.payload);
        let mut frames = Frames::new(opened.header);
        let mut chunk = Chunk::EMPTY;
        loop {
            let other = match frames.chunk(&mut chunk) {
                Some(Ok(())) => None,
                Some(Err(_)) => return dropped(shared, Counter::FrameMalformed),
                None => match frames.next() {
                    Some(Ok(frame)) => Some(frame),
                    Some(Err(_)) => return dropped(shared, Counter::FrameMalformed),
                    None => return Some(verdict),
                },
            };
            if !opened.authenticated {
                let len = payload.map_or(0, <[u8]>::len);
                if other.is_some() || !is_bare_data(&chunk, len) {
                    return dropped(shared, Counter::BareRefused);
                }
            }
            verdict.eliciting |= other.as_ref().is_none_or(Frame::is_ack_eliciting);
            verdict.used |= other.as_ref().is_none_or(is_of_connection);
            // A path that was proved may have taken the place of others.
            let at = self.paths.position(opened.path_id)?;
            if !self.paths[at].is_open() && !other.as_ref().is_some_and(is_joining) {
                if opened.authenticated {
                    self.paths[at].on_early_data();
                }
                return dropped(shared, Counter::PathNotValidated);
            }
            let described = match &other {
                None | Some(Frame::Share(_)) => match payload.take() {
                    Some(bytes) => bytes,
                    None => return dropped(shared, Counter::FrameMalformed),
                },
                Some(_) => &[],
            };
            verdict.taken &= match &other {
                None => {
                    let (receiver, mut cx) = self.receiving(now, shared);
                    receiver.take_chunk(&mut cx, arrival.path, &chunk, (described, protection))
                }
                Some(frame) => self.take_frame(now, shared, arrival, at, (frame, described)),
            };
        }
    }

    /// Takes a frame other than a chunk, by the path at `at`; false if it counts as not received.
    fn take_frame(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        at: usize,
        (frame, payload): (&Frame<'_>, &[u8]),
    ) -> bool {
        match *frame {
            Frame::Chunk(_)
            | Frame::Share(_)
            | Frame::Segment(_)
            | Frame::Opaque { .. }
            | Frame::Fragment { .. } => {
                let (receiver, mut cx) = self.receiving(now, shared);
                return receiver.take(&mut cx, arrival.path, frame, payload);
            }
            Frame::Control { id, bytes } => {
                return self
                    .queues
                    .messages
                    .receive(&mut shared.journal, self.id, (id, bytes));
            }
            Frame::Ack(bytes) => self.take_ack(now, shared, at, bytes),
            Frame::FlowUnknown { flow, incarnation } => self.flows.on_unknown(flow, incarnation),
            Frame::EpochBroken {
                flow,
                incarnation,
                epoch,
            } => self.flows.on_broken(flow, incarnation, epoch),
            Frame::Ping
            | Frame::PingSpent
            | Frame::PathJoin { .. }
            | Frame::PathAccept { .. }
            | Frame::PathConfirm { .. }
            | Frame::PathChallenge { .. }
            | Frame::PathResponse { .. } => {
                let given_up = self.paths.take_frame(now, shared, arrival, at, frame);
                self.abandon(shared, given_up);
            }
        }
        if let Some(link) = self.paths.get_mut(at) {
            link.note_state(shared, self.id);
        }
        true
    }

    /// Takes what the peer says that it has.
    fn take_ack(&mut self, now: Time, shared: &mut Shared, at: usize, bytes: &[u8]) {
        let Ok(ack) = AckFrame::decode(bytes) else {
            return shared.count(Counter::FrameMalformed);
        };
        let link = &mut self.paths[at];
        let mut acked = std::mem::take(&mut shared.scratch.acked);
        let mut lost = std::mem::take(&mut shared.scratch.lost);
        if link.path.on_ack(now, &ack, &mut acked, &mut lost).is_err() {
            shared.count(Counter::AckRefused);
        }
        let id = link.id;
        let flows = &mut self.flows;
        let mut confirmed = None;
        for token in acked.drain(..) {
            let Some(key) = key_of(token) else { continue };
            let Some(pending) = self.in_flight.get(key) else {
                continue;
            };
            match &pending.content {
                Content::Chunk(chunk) => {
                    let segment = self.in_flight.segment(chunk);
                    let of = (segment.conn, segment.chain.incarnation);
                    if confirmed != Some(of) {
                        confirmed = Some(of);
                        flows.confirm(of.0, of.1);
                    }
                }
                Content::Share(share) if share.opens => {
                    let segment = self.in_flight.segment_of_share(share);
                    let incarnation = segment.chain.incarnation;
                    flows.confirm_share(&shared.setup.bumps, segment.conn, incarnation, share.set);
                }
                Content::Opened {
                    conn,
                    incarnation,
                    set,
                } => match set {
                    None => flows.confirm(*conn, *incarnation),
                    Some(set) => {
                        flows.confirm_share(&shared.setup.bumps, *conn, *incarnation, *set)
                    }
                },
                Content::Control(_) | Content::Share(_) | Content::Fragment { .. } => {}
            }
            self.in_flight.remove(key, &mut shared.pool);
        }
        self.take_lost(shared, id, &mut lost);
        shared.scratch.acked = acked;
        shared.scratch.lost = lost;
    }

    /// A session came about.
    pub(crate) fn on_established(
        &mut self,
        now: Time,
        shared: &mut Shared,
        established: Established,
    ) {
        if let Some(news) = self
            .association
            .on_established(&mut shared.journal, established)
        {
            self.take_news(now, shared, news);
        }
    }

    /// The peer used a session that we answered.
    pub(super) fn on_used(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: SessionId,
        confirmed: bool,
    ) {
        if let Some(news) = self
            .association
            .on_used(&mut shared.journal, session, confirmed)
        {
            self.take_news(now, shared, news);
        }
    }

    fn take_news(&mut self, now: Time, shared: &mut Shared, news: News) {
        let News { restarted, is_up } = news;
        if restarted {
            self.forget(shared);
        }
        if is_up {
            let peer = self.id.index();
            shared
                .journal
                .events
                .push(Event::PeerUp { peer, restarted });
        }
        self.paths.dial_at_once(now);
        let given_up = self.paths.use_session(now, shared);
        self.abandon(shared, given_up);
    }

    /// The session has expired.
    pub(crate) fn on_down(&mut self, shared: &mut Shared) {
        if self.association.on_down() {
            let peer = self.id.index();
            shared.journal.events.push(Event::PeerDown { peer });
        }
    }

    /// The peer restarted: it knows nothing of what we had with it.
    fn forget(&mut self, shared: &mut Shared) {
        self.paths.clear();
        self.queues.segments.clear();
        self.queues.lost.clear();
        self.queues.shares = Shares::default();
        self.queues
            .messages
            .restart(self.in_flight.drain(&mut shared.pool));
        self.receiver.restart(&mut self.flows);
    }

    /// A local interface came or went.
    pub(crate) fn on_local_change(&mut self, now: Time, shared: &mut Shared, local: PathIndex) {
        self.paths.dial_at_once(now);
        let up = shared.setup.local[local].is_usable();
        let mut lost = std::mem::take(&mut shared.scratch.lost);
        for at in 0..self.paths.len() {
            let link = &mut self.paths[at];
            if link.local != local {
                continue;
            }
            if up {
                link.on_up(now);
            } else {
                // What is on its way there goes by the others at once.
                link.path.abandon(&mut lost);
            }
            let id = link.id;
            link.note_state(shared, self.id);
            self.take_lost(shared, id, &mut lost);
        }
        shared.scratch.lost = lost;
        if !up {
            self.paths.ask_idle(now);
        }
    }

    /// Lets what given up paths carried go by the others.
    pub(super) fn abandon(
        &mut self,
        shared: &mut Shared,
        given_up: impl IntoIterator<Item = Link>,
    ) {
        for mut link in given_up {
            let mut lost = std::mem::take(&mut shared.scratch.lost);
            link.path.abandon(&mut lost);
            self.take_lost(shared, link.id, &mut lost);
            shared.scratch.lost = lost;
            // What it had lost before can go nowhere now.
            for share in link.shares {
                let parts = (&mut self.paths, &mut self.flows, &mut self.in_flight);
                send::lose_share(shared, parts, link.id, share);
            }
        }
    }

    /// The next send, or none if nothing may go now.
    pub(super) fn poll_transmit(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
    ) -> Option<Out> {
        let cx = &mut SendCx {
            now,
            shared,
            sealer: Sealer {
                now,
                session,
                refused: 0,
            },
            paths: &mut self.paths,
            flows: &mut self.flows,
            in_flight: &mut self.in_flight,
        };
        let store = self.association.store();
        self.queues
            .poll_transmit(cx, &mut self.receiver.notices, store)
    }

    /// Deals with what a path declared lost.
    fn take_lost(&mut self, shared: &mut Shared, path: PathId, lost: &mut Vec<u64>) {
        let parts = (&mut self.paths, &mut self.flows, &mut self.in_flight);
        self.queues.lost.on_lost(shared, parts, path, lost);
    }

    /// True if anything can be sent by this local path.
    fn may_use(&self, setup: &Setup, local: PathIndex) -> bool {
        self.association.is_up() && setup.local[local].is_usable()
    }

    /// Deadline of the next [`handle_timeout`](Self::handle_timeout).
    pub(crate) fn poll_timeout(&self, setup: &Setup) -> Option<Deadline> {
        let Self {
            paths,
            flows,
            in_flight,
            ..
        } = self;
        let drain = self.handover.poll_timeout(setup, flows, paths, in_flight);
        let due = [
            paths.poll_timeout(setup, self.association.is_up()),
            Reason::Call.at(self.association.poll_timeout()),
            Reason::Receiver.at(self.receiver.poll_timeout()),
            Reason::Handover.at(drain),
            Reason::Dropped.at(self.queues.fq.poll_timeout()),
            Reason::Message.at(self.queues.lost.poll_timeout()),
        ];
        due.into_iter().flatten().min()
    }

    /// Does what is due.
    pub(crate) fn handle_timeout(&mut self, now: Time, shared: &mut Shared) {
        self.paths.release(now);
        for at in 0..self.paths.len() {
            if !self.may_use(&shared.setup, self.paths[at].local) {
                continue;
            }
            let mut lost = std::mem::take(&mut shared.scratch.lost);
            self.paths.handle_timeout(now, shared, at, &mut lost);
            let id = self.paths[at].id;
            self.take_lost(shared, id, &mut lost);
            shared.scratch.lost = lost;
            self.paths[at].note_state(shared, self.id);
        }
        if now >= self.paths.dials_at() && !self.paths.endpoints().is_empty() {
            if self.association.is_up() {
                let given_up = self.paths.dial(now, shared);
                self.abandon(shared, given_up);
            } else {
                self.paths.put_off_dialling(now);
            }
        }
        self.queues
            .lost
            .handle_timeout(now, &mut shared.pool, &self.flows, &mut self.in_flight);
        let turn = self.paths.turn();
        self.queues
            .fq
            .handle_timeout(now, shared, &mut self.flows, turn);
        let (receiver, mut cx) = self.receiving(now, shared);
        receiver.handle_timeout(&mut cx);
        let (flows, paths) = (&mut self.flows, &self.paths);
        self.handover
            .handle_timeout(now, shared, self.id, flows, paths, &self.in_flight);
    }
}

/// The local kernel begins a connection by a bump: what waits by the others is of an earlier one between the same ports.
fn end_elsewhere(cx: &mut ReceiveCx<'_>, key: Key) {
    for other in cx.flows.elsewhere(key) {
        let conn = cx.flows.get_mut(other).expect("it was just found");
        let segments = cx.fq.forget(&mut cx.shared.pool, other, &mut conn.out);
        cx.shared
            .journal
            .counters
            .add(Counter::EpochEnded, segments);
        conn.end();
    }
}

/// True for a frame, other than a chunk, that carries something of a connection's.
const fn is_of_connection(frame: &Frame<'_>) -> bool {
    matches!(
        frame,
        Frame::Chunk(_)
            | Frame::Share(_)
            | Frame::Segment(_)
            | Frame::Opaque { .. }
            | Frame::Fragment { .. }
    )
}

/// What may come without authentication: data of the scramble bump in the midst of an epoch of a
/// flow that an authenticated frame opened (docs/protocol.md, 9). It neither opens nor closes anything.
fn is_bare_data(chunk: &Chunk<'_>, payload: usize) -> bool {
    let data = payload > 0 && chunk.tcp.flags & NOT_BARE == 0;
    data && !chunk.solo && !chunk.first && chunk.open.is_none()
}
