//! What is split over several paths: each datagram becomes a share for each of them.

use std::collections::VecDeque;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame, Share};
use dibs_wire::packet::{Segment, flags};
use smallvec::SmallVec;

use dibs_settings::Role;

use super::super::fq::parsed;
use super::super::out::{Out, Source};
use super::super::paths::Link;
use super::super::peer::{EmptyOut, Peer};
use super::super::shared::Shared;
use super::cutter::{Rest, strand};
use super::run::{MAX_BATCH, MAX_SEGMENTS, MOST_BESIDE, MOST_PADDED};
use super::small::{LONGEST_PACK, pack_segments};
use super::{CLEAR, SendCx, token};
use crate::bump::Split;
use crate::chunk::{Chunk, Content, Head, Pending, Placement, ShareOf};
use crate::counters::Counter;
use crate::flow::fields::{self, OwnedFields};
use crate::path::Blocked;
use crate::session::{OVERHEAD, TAG_LEN};
use crate::slab::Key;
use crate::time::Time;

/// Bytes of a datagram beside the share in it.
const BESIDE: usize = OVERHEAD + frame::SHARE_LEN;
/// A whole begins with the length of its payload; payload and header block follow.
const PREFIX: usize = 2;
/// Bytes of a piece's header block, usually.
const MOST_HEADER: usize = 64;

/// The links of a set, by index of the share that each carries.
type Links = SmallVec<[usize; 4]>;

/// What is split over paths on its way out.
#[derive(Default)]
pub(in crate::node) struct Shares {
    /// Sends of which others of the same set have gone.
    out: VecDeque<Out>,
    next_set: u64,
    /// Segments without payload of flows that are split.
    pub(in crate::node) segments: VecDeque<EmptyOut>,
    /// There are too few paths for what should be split.
    pub(in crate::node) short_of_paths: bool,
}

impl Peer {
    /// Sends the other shares of what was split.
    pub(super) fn send_splits(&mut self) -> Option<Out> {
        loop {
            let out = self.shares.out.pop_front()?;
            match out.source {
                // It was given up before it could leave.
                Source::Batch(batch, _) if !self.in_flight.has_batch(batch) => {}
                _ => return Some(out),
            }
        }
    }

    /// New data of a flow that is split, from the head of its queue.
    pub(super) fn send_split(
        &mut self,
        cx: &mut SendCx<'_>,
        key: Key,
        split: &dyn Split,
    ) -> Option<Out> {
        let conn = self.flows.get_mut(key).expect("the caller has it");
        let wanted = conn.out.queue.head()?.left() + MOST_BESIDE;
        let (links, budget) = self.place_split(cx.now, cx.shared, split, wanted)?;
        if self.judge(cx, key) {
            // What was dropped may have been all.
            self.flows.get_mut(key)?.out.queue.head()?;
        }
        self.fill_split(cx, key, split, &links, budget)
    }

    /// The paths for the next set, and the bytes that each may carry. Fewer than are needed: none, for
    /// fewer shares would be a weaker split.
    fn place_split(
        &mut self,
        now: Time,
        shared: &Shared,
        split: &dyn Split,
        wanted: usize,
    ) -> Option<(Links, usize)> {
        let links = self.split_links(shared, usize::from(split.shares()));
        if links.len() < usize::from(split.needed()) {
            self.shares.short_of_paths = true;
            return None;
        }
        let mut least = usize::MAX;
        let mut release = None;
        for &at in &links {
            let path = &self.paths[at].path;
            least = least.min(path.budget(now, wanted));
            if let Blocked::Pacing(t) = path.blocked_until(now, wanted) {
                release = release.max(Some(t));
            }
        }
        if least == 0 {
            self.paths.wait_until(release);
            return None;
        }
        Some((links, least))
    }

    /// Active paths that share neither end, `most` of them: backups last, then those configured first.
    fn split_links(&self, shared: &Shared, most: usize) -> Links {
        let mut active: Links = (0..self.paths.len())
            .filter(|at| self.paths[*at].is_active(shared))
            .collect();
        active.sort_by_key(|at| {
            let Link { local, id, .. } = self.paths[*at];
            (shared.local[local].usage.role == Role::Backup, local, id)
        });
        let mut chosen = Links::new();
        for at in active {
            let link = &self.paths[at];
            let apart = |other: &usize| {
                let other = &self.paths[*other];
                other.local != link.local && other.remote.ip() != link.remote.ip()
            };
            if chosen.len() < most && chosen.iter().all(apart) {
                chosen.push(at);
            }
        }
        chosen
    }

    /// The next number of a set.
    fn take_set(&mut self) -> u32 {
        let set = self.shares.next_set as u32;
        self.shares.next_set += 1;
        set
    }

    fn fill_split(
        &mut self,
        cx: &mut SendCx<'_>,
        key: Key,
        split: &dyn Split,
        links: &Links,
        budget: usize,
    ) -> Option<Out> {
        let paths = links.iter().map(|at| &self.paths[*at].path);
        let (mtu, quantum) = paths.fold((usize::MAX, usize::MAX), |(mtu, quantum), path| {
            (
                mtu.min(usize::from(path.mtu())),
                quantum.min(path.quantum()),
            )
        });
        let budget = budget.min(quantum.max(mtu)).min(MAX_BATCH);
        let conn = self.flows.get_mut(key).expect("the caller has it");
        let capacity = split.capacity(mtu - BESIDE);
        let pieces = conn.out.queue.bytes().div_ceil(capacity - MOST_HEADER) + 1;
        let most = (budget / mtu).clamp(1, MAX_SEGMENTS).min(pieces);
        let runs = links.iter().map(|&link| Run {
            link,
            batch: self
                .in_flight
                .add_batch(cx.shared.pool.take_for(most * mtu)),
            end: 0,
        });
        let mut run = SplitRun {
            key,
            split,
            runs: runs.collect(),
            capacity,
            most,
            whole: 0,
            pieces: 0,
            full: false,
        };
        let held = self.fq.watch(&conn.out.queue);
        loop {
            let conn = self.flows.get_mut(key).expect("the caller has it");
            let Some(mut head) = conn.out.queue.pop() else {
                break;
            };
            let mut rest = Rest {
                left: head.left(),
                withheld: head.withheld,
                mss: head.mss,
            };
            let done = self.cut_split(cx, &mut run, &parsed(&head.buffer), &mut rest);
            let conn = self.flows.get_mut(key).expect("the caller has it");
            if !done {
                (head.payload_at, head.withheld) = (head.end - rest.left, rest.withheld);
                conn.out.queue.put_back(head);
                break;
            }
            cx.shared.pool.give(head.buffer);
            if run.full || conn.out.deficit <= 0 || !conn.out.queue.passes(cx.now, cx.patience) {
                break;
            }
        }
        let conn = self.flows.get_mut(key).expect("the caller has it");
        self.fq.settle(&held, &conn.out.queue);
        let segment = CLEAR + split.share_len(run.whole) + frame::SHARE_LEN + TAG_LEN;
        for Run { link, batch, end } in run.runs {
            if end == 0 {
                self.in_flight.drop_empty_batch(batch, &mut cx.shared.pool);
                continue;
            }
            let link = &self.paths[link];
            self.shares
                .out
                .push_back(Out::by(link, segment, Source::Batch(batch, end)));
        }
        self.send_splits()
    }

    /// Cuts what is left of a segment; false if not all of it.
    fn cut_split(
        &mut self,
        cx: &mut SendCx<'_>,
        run: &mut SplitRun<'_>,
        segment: &Segment<'_>,
        rest: &mut Rest,
    ) -> bool {
        let total = segment.payload.len();
        loop {
            if run.full || run.pieces == run.most {
                run.full = true;
                return false;
            }
            let conn = self.flows.get_mut(run.key).expect("the caller has it");
            if conn.out.secrets.is_none() {
                // The peer restarted since this was queued.
                conn.open(cx.session.epoch_secrets().clone(), segment.meta);
                // What is split tells of its base itself.
                conn.out.stream.begin_at(segment.seq);
            }
            let open = conn.open_frame();
            let out = &mut conn.out;
            let tcp = fields::of_segment(segment, out.meta);
            let header = frame::chunk_len(&tcp, true, open.as_ref());
            // As of what is not split, no longer than its sender makes them.
            let room = (run.capacity - PREFIX - header).min(rest.mss.max(1));
            let even = total.div_ceil(total.div_ceil(room).max(1));
            let done = total - rest.left;
            let offset = out.stream.offset_of(segment.seq) + done as u64;
            let epoch = out.stream.epoch();
            let position = out.stream.position(offset, (total - done).max(1));
            let len = room.min(even).min(position.limit).min(rest.limit());
            let mut whole = PREFIX + len + header;
            let short = run.whole.saturating_sub(whole);
            if short <= run.whole / MOST_PADDED {
                whole += short;
            }
            // The datagrams of one send are equally long, but for the last.
            if run.pieces > 0 && whole > run.whole {
                run.full = true;
                return false;
            }
            conn.stats.epochs += u64::from(out.stream.epoch() != epoch);
            conn.stats.retransmissions += u64::from(position.solo);
            let bytes = &segment.payload[done..done + len];
            let last = done + len == total;
            let tcp = fields::of_piece(&tcp, done, last);
            let numbers = len as u64 + u64::from(last && tcp.flags & flags::FIN != 0);
            let strand = strand(out);
            let chunk = Chunk {
                offset,
                batch: run.runs[0].batch,
                at: 0,
                crc: dibs_wire::checksum::crc32c(bytes),
                len: len as u16,
                head: 0,
                flags: tcp.flags,
                solo: position.solo,
                ahead: position.ahead,
                first: position.first,
                detached: position.detached,
                withheld: rest.withheld > 0 && position.is_inside(),
            };
            let scratch = &mut cx.shared.scratch.datagrams;
            scratch.clear();
            scratch.extend_from_slice(&(len as u16).to_be_bytes());
            scratch.extend_from_slice(bytes);
            scratch.resize(whole, 0);
            chunk
                .frame(strand, tcp, open)
                .encode(&mut Writer::new(&mut scratch[PREFIX + len..]));
            out.stream.advance(offset, numbers, position.solo);
            let head = Head {
                conn: run.key,
                strand,
                tcp: OwnedFields::new(&tcp),
            };
            out.deficit -= (whole * run.runs.len()) as i64;
            if !self.send_whole(cx, run, &head, open.is_some()) {
                // Nothing leaves without protection; the stream is ahead of what left.
                let conn = self.flows.get_mut(run.key).expect("the caller has it");
                conn.out.stream.break_chain();
                run.full = true;
                return false;
            }
            run.pieces += 1;
            run.whole = run.whole.max(whole);
            run.full = whole < run.whole;
            rest.advance(len);
            if last {
                return true;
            }
        }
    }

    /// Splits the whole in the scratch buffer into the next datagrams of a run; false if there are no
    /// keys for them.
    fn send_whole(
        &mut self,
        cx: &mut SendCx<'_>,
        run: &mut SplitRun<'_>,
        head: &Head,
        opens: bool,
    ) -> bool {
        let (split, set) = (run.split, self.take_set());
        let len = cx.shared.split_scratch(split);
        let bump = self.flows.get(run.key).expect("the caller has it").bump;
        for (index, of) in run.runs.iter_mut().enumerate() {
            let number = self.in_flight.add_head(of.batch, head.clone());
            let share = ShareOf {
                batch: of.batch,
                at: (of.end + CLEAR) as u32,
                set,
                len: len as u16,
                head: number,
                index: index as u8,
                opens,
            };
            let link = &mut self.paths[of.link];
            let placement = Placement::Only(link.id);
            let pending = self.in_flight.add(Content::Share(share), placement);
            let range = of.end..of.end + BESIDE + len;
            let datagram = &mut self.in_flight.batch_mut(of.batch)[range];
            datagram[CLEAR..CLEAR + len].copy_from_slice(cx.shared.share(index, len));
            put_frame(&mut datagram[CLEAR + len..], split, bump, &share);
            let size = (BESIDE + len) as u16;
            let seq = link.path.on_sent(cx.now, size, token(pending), true);
            let sealed = cx
                .session
                .seal(datagram, link.id, seq, frame::SHARE_LEN, false);
            if sealed.is_err() {
                cx.shared.count(Counter::KeysExhausted);
                return false;
            }
            of.end += BESIDE + len;
            let conn = self.flows.get_mut(run.key).expect("the caller has it");
            conn.by_path.entry(link.local).sent += len as u64;
        }
        true
    }

    /// TCP segments without payload of flows that are split, as many as fit one datagram.
    pub(super) fn send_split_segments(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        let bumps = std::sync::Arc::clone(&cx.shared.bumps);
        let bump = loop {
            let head = self.shares.segments.front()?;
            match self.flows.get(head.conn) {
                Some(conn) => break conn.bump,
                None => self.shares.segments.pop_front(),
            };
        };
        let split = bumps.of(bump).split().expect("these are split");
        let links = self.split_links(cx.shared, usize::from(split.shares()));
        if links.len() < usize::from(split.needed()) {
            self.shares.short_of_paths = true;
            return None;
        }
        let room = self.split_room(&links, split).min(LONGEST_PACK);
        let mut block = Vec::new();
        let (conns, queue) = (&mut self.flows, &mut self.shares.segments);
        let opened = pack_segments(conns, queue, cx.session, room, &mut block, |of| of == bump);
        self.send_block(cx, (bump, split), &links, &block, opened, true)
    }

    /// A packet that is not cut, or its next piece, of a bump that splits.
    pub(super) fn send_split_opaque(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        let bumps = std::sync::Arc::clone(&cx.shared.bumps);
        let head = self.opaque.split.head()?;
        let (bump, wanted) = (head.bump, head.packet.len() - head.at + BESIDE);
        let split = bumps.of(bump).split().expect("these are split");
        let (links, _) = self.place_split(cx.now, cx.shared, split, wanted)?;
        let room = self.split_room(&links, split);
        let (block, taken) = self.opaque.split.head()?.block(room);
        self.opaque.split.consume(taken);
        self.send_block(cx, (bump, split), &links, &block, None, false)
    }

    /// Room for a header block without payload.
    fn split_room(&self, links: &Links, split: &dyn Split) -> usize {
        let mtus = links.iter().map(|at| self.paths[*at].path.mtu());
        let mtu = usize::from(mtus.min().expect("a set has links"));
        split.capacity(mtu - BESIDE) - PREFIX
    }

    /// Splits a header block without payload; nobody keeps it.
    fn send_block(
        &mut self,
        cx: &mut SendCx<'_>,
        (bump, split): (u8, &dyn Split),
        links: &Links,
        block: &[u8],
        opened: Option<(Key, u16)>,
        fleeting: bool,
    ) -> Option<Out> {
        let set = self.take_set();
        let scratch = &mut cx.shared.scratch.datagrams;
        scratch.clear();
        scratch.extend_from_slice(&[0; PREFIX]);
        scratch.extend_from_slice(block);
        let len = cx.shared.split_scratch(split);
        // An opening asks for an acknowledgement, so that it need not be repeated for ever.
        let fleeting = fleeting && opened.is_none();
        for (index, &at) in links.iter().enumerate() {
            let link = &mut self.paths[at];
            let key = opened.map(|(conn, incarnation)| {
                let set = Some(set);
                let opened = Content::Opened {
                    conn,
                    incarnation,
                    set,
                };
                self.in_flight.add(opened, Placement::Only(link.id))
            });
            let size = BESIDE + len;
            let mut buffer = cx.shared.pool.take_for(size);
            let datagram = &mut buffer[..size];
            datagram[CLEAR..CLEAR + len].copy_from_slice(cx.shared.share(index, len));
            let share = Frame::Share(Share {
                fleeting,
                bump,
                set,
                index: index as u8,
                needed: split.needed(),
                shares: split.shares(),
            });
            frame::encode(&share, &mut Writer::new(&mut datagram[CLEAR + len..]));
            let token = key.map_or(0, token);
            let seq = link.path.on_sent(cx.now, size as u16, token, !fleeting);
            let sealed = cx
                .session
                .seal(datagram, link.id, seq, frame::SHARE_LEN, false);
            if sealed.is_err() {
                cx.shared.count(Counter::KeysExhausted);
                cx.shared.pool.give(buffer);
                break;
            }
            self.shares
                .out
                .push_back(Out::by(link, size, Source::Once(buffer, size)));
        }
        self.send_splits()
    }

    /// Sends again a share that its path lost, by that path.
    pub(super) fn retransmit_shares(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        for at in 0..self.paths.len() {
            if !self.paths[at].is_active(cx.shared) {
                continue;
            }
            while let Some(&key) = self.paths[at].shares.front() {
                let Some(pending) = self.in_flight.get(key) else {
                    self.paths[at].shares.pop_front();
                    continue;
                };
                let path = &self.paths[at].path;
                let (mtu, len) = (usize::from(path.mtu()), pending.content.payload_len());
                if self.is_stale(pending) {
                    self.paths[at].shares.pop_front();
                    self.in_flight.remove(key, &mut cx.shared.pool);
                    continue;
                }
                if path.budget(cx.now, BESIDE + len) == 0 {
                    if let Blocked::Pacing(t) = path.blocked_until(cx.now, BESIDE + len) {
                        self.paths.wait_until(Some(t));
                    }
                    break;
                }
                let share = match pending.content {
                    Content::Share(share) => Some(share),
                    _ => None,
                };
                self.paths[at].shares.pop_front();
                cx.shared.count(Counter::ChunkResent);
                let Some(share) = share else {
                    return self.send_fragment(cx, at, key);
                };
                let conn = self.in_flight.head_of_share(&share).conn;
                let bump = self.flows.get(conn).expect("it is not stale").bump;
                let block = share_block(cx.shared, bump, &share);
                if BESIDE + len <= mtu {
                    return self.retransmit_share(cx, at, key, &block);
                }
                // It was cut for a larger path, and no other may carry it.
                let payload = (share.batch, share.at as usize, len);
                let pieces = self.cut_to_fragments(cx.shared, key, &block, payload);
                for piece in pieces.into_iter().rev() {
                    self.paths[at].shares.push_front(piece);
                }
            }
        }
        None
    }

    fn retransmit_share(
        &mut self,
        cx: &mut SendCx<'_>,
        at: usize,
        key: Key,
        block: &[u8],
    ) -> Option<Out> {
        let Some(Pending {
            content: Content::Share(share),
            ..
        }) = self.in_flight.get(key)
        else {
            panic!("the caller saw a share");
        };
        let from = share.at as usize;
        let bytes = &self.in_flight.batch(share.batch)[from..from + usize::from(share.len)];
        let datagram = &mut cx.shared.scratch.datagrams;
        datagram.clear();
        datagram.resize(CLEAR, 0);
        datagram.extend_from_slice(bytes);
        datagram.extend_from_slice(block);
        datagram.resize(datagram.len() + TAG_LEN, 0);
        let size = datagram.len();
        let link = &mut self.paths[at];
        let seq = link.path.on_sent(cx.now, size as u16, token(key), true);
        let sealed = cx
            .session
            .seal(datagram, link.id, seq, frame::SHARE_LEN, false);
        if sealed.is_err() {
            cx.shared.count(Counter::KeysExhausted);
            return None;
        }
        Some(Out::by(link, size, Source::Scratch))
    }

    /// Deals with a share that its path lost: it waits for that path.
    pub(in crate::node) fn lose_share(&mut self, shared: &mut Shared, key: Key) {
        let Some(pending) = self.in_flight.get(key) else {
            return;
        };
        let Placement::Only(id) = pending.placement else {
            panic!("a share has a path");
        };
        let origin = self.in_flight.origin(&pending.content);
        match self.paths.by_id(id) {
            Some(link) => link.shares.push_back(key),
            // No other may carry it.
            None => {
                self.in_flight.remove(key, &mut shared.pool);
                if let Some(origin) = origin {
                    self.give_up(shared, origin);
                }
            }
        }
    }
}

/// A run of datagrams over several paths, being filled.
struct SplitRun<'a> {
    key: Key,
    split: &'a dyn Split,
    runs: SmallVec<[Run; 4]>,
    /// The longest whole.
    capacity: usize,
    /// Datagrams of each path, at most.
    most: usize,
    /// Length of all wholes but the last.
    whole: usize,
    pieces: usize,
    /// Nothing more fits.
    full: bool,
}

/// One path's part of a run.
struct Run {
    link: usize,
    batch: Key,
    /// Bytes filled.
    end: usize,
}

/// The header block of a share that is sent again.
fn share_block(shared: &Shared, bump: u8, share: &ShareOf) -> [u8; frame::SHARE_LEN] {
    let split = shared.bumps.of(bump).split();
    let split = split.expect("a share is of what is split");
    let mut block = [0; frame::SHARE_LEN];
    put_frame(&mut block, split, bump, share);
    block
}

fn put_frame(to: &mut [u8], split: &dyn Split, bump: u8, share: &ShareOf) {
    let frame = Frame::Share(Share {
        fleeting: false,
        bump,
        set: share.set,
        index: share.index,
        needed: split.needed(),
        shares: split.shares(),
    });
    frame::encode(&frame, &mut Writer::new(to));
}
