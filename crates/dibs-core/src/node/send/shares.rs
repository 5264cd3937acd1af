//! Shares: each piece that is split becomes one for each of several paths.

use std::collections::VecDeque;
use std::sync::Arc;

use dibs_settings::{BumpId, Role};
use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame, Share};

use super::carrier::{Carrier, Links, PREFIX, SHARE_OVERHEAD};
use super::context::SendCx;
use super::datagram::{Asks, Seal};
use super::empty_segments::{MAX_PACK, pack};
use crate::bump::Split;
use crate::chunk::{Content, Placement, ShareOf};
use crate::node::empty::EmptyOut;
use crate::node::out::{Out, Source};
use crate::node::paths::Link;
use crate::path::Blocked;
use crate::session::{CLEAR_HEADER_LEN, TAG_LEN};
use crate::slab::Key;

/// Shares on their way out: sets of which not all have gone.
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

impl Shares {
    /// The shares of one set, or of a run of them, are to go.
    pub(super) fn push(&mut self, out: Out) {
        self.out.push_back(out);
    }

    /// The next of them.
    pub(super) fn pop(&mut self, cx: &SendCx<'_>) -> Option<Out> {
        loop {
            let out = self.out.pop_front()?;
            match out.source {
                // It was given up before it could leave.
                Source::Batch(batch, _) if !cx.in_flight.has_batch(batch) => {}
                _ => return Some(out),
            }
        }
    }

    /// The next number of a set.
    pub(super) const fn take_set(&mut self) -> u32 {
        let set = self.next_set as u32;
        self.next_set += 1;
        set
    }

    /// The paths for the next set. Fewer than are needed: none, for fewer shares would be a weaker split.
    fn bundle<'a>(&mut self, cx: &SendCx<'_>, split: &'a dyn Split) -> Option<Carrier<'a>> {
        let links = apart(cx, usize::from(split.shares()));
        if links.len() < usize::from(split.needed()) {
            self.short_of_paths = true;
            return None;
        }
        Some(Carrier::bundle(cx.paths, links, split))
    }

    /// The same, once all of them may carry so many bytes.
    pub(super) fn bundle_for<'a>(
        &mut self,
        cx: &mut SendCx<'_>,
        split: &'a dyn Split,
        wanted: usize,
    ) -> Option<Carrier<'a>> {
        let mut bundle = self.bundle(cx, split)?;
        let mut release = None;
        for &at in &bundle.links {
            let path = &cx.paths[at].path;
            bundle.budget = bundle.budget.min(path.budget(cx.now, wanted));
            if let Blocked::Pacing(t) = path.blocked_until(cx.now, wanted) {
                release = release.max(Some(t));
            }
        }
        if bundle.budget == 0 {
            cx.paths.wait_until(release);
            return None;
        }
        Some(bundle)
    }

    /// TCP segments without payload of flows that are split, as many as fit one datagram.
    pub(super) fn send_segments(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        let bump = loop {
            let head = self.segments.front()?;
            match cx.flows.get(head.conn) {
                Some(conn) => break conn.bump,
                None => self.segments.pop_front(),
            };
        };
        let bumps = Arc::clone(&cx.shared.setup.bumps);
        let split = bumps.of(bump).split().expect("these are split");
        let bundle = self.bundle(cx, split)?;
        let room = bundle.room().min(MAX_PACK);
        let mut block = Vec::new();
        let (segments, session) = (&mut self.segments, &*cx.sealer.session);
        let opened = pack(cx.flows, segments, session, room, &mut block, |of| {
            of == bump
        });
        self.send_block(cx, (bump, split), &bundle.links, &block, opened, true)
    }

    /// Splits a header block without payload; nobody keeps it.
    pub(super) fn send_block(
        &mut self,
        cx: &mut SendCx<'_>,
        (bump, split): (BumpId, &dyn Split),
        links: &[usize],
        block: &[u8],
        opened: Option<(Key, u16)>,
        fleeting: bool,
    ) -> Option<Out> {
        let set = self.take_set();
        let scratch = &mut cx.shared.scratch.datagrams;
        scratch.clear();
        scratch.extend_from_slice(&[0; PREFIX]);
        scratch.extend_from_slice(block);
        let len = cx.shared.scratch.split(&mut cx.shared.pads, split);
        // An opening asks for an acknowledgement, so that it need not be repeated for ever.
        let fleeting = fleeting && opened.is_none();
        for (index, &at) in links.iter().enumerate() {
            let link = &mut cx.paths[at];
            let asks = match opened {
                Some((conn, incarnation)) => {
                    let opened = Content::Opened {
                        conn,
                        incarnation,
                        set: Some(set),
                    };
                    Asks::AckOf(cx.in_flight.add(opened, Placement::Only(link.id)))
                }
                None if fleeting => Asks::Nothing,
                None => Asks::Ack,
            };
            let size = SHARE_OVERHEAD + len;
            let mut buffer = cx.shared.pool.take_for(size);
            let datagram = &mut buffer[..size];
            datagram[CLEAR_HEADER_LEN..CLEAR_HEADER_LEN + len]
                .copy_from_slice(cx.shared.scratch.share(index, len));
            let frame = share_frame(split, bump, (set, index as u8), fleeting);
            frame::encode(
                &frame,
                &mut Writer::new(&mut datagram[CLEAR_HEADER_LEN + len..]),
            );
            let sealer = &mut cx.sealer;
            if !sealer.seal(link, datagram, frame::SHARE_LEN, asks, Seal::Headers) {
                cx.shared.pool.give(buffer);
                break;
            }
            self.push(Out::by(link, size, Source::Once(buffer, size)));
        }
        self.pop(cx)
    }
}

/// Active paths that share neither end, `most` of them: backups last, then those configured first.
fn apart(cx: &SendCx<'_>, most: usize) -> Links {
    let is_active = |at: &usize| cx.paths[*at].is_active(&cx.shared.setup);
    let mut active: Links = (0..cx.paths.len()).filter(is_active).collect();
    active.sort_by_key(|at| {
        let Link { local, id, .. } = cx.paths[*at];
        let is_backup = cx.shared.setup.local[local].usage.role == Role::Backup;
        (is_backup, local, id)
    });
    let mut chosen = Links::new();
    for at in active {
        let link = &cx.paths[at];
        let apart = |other: &usize| {
            let other = &cx.paths[*other];
            other.local != link.local && other.remote.ip() != link.remote.ip()
        };
        if chosen.len() < most && chosen.iter().all(apart) {
            chosen.push(at);
        }
    }
    chosen
}

/// Sends again what `key` names, by the path at `at`.
pub(super) fn retransmit(cx: &mut SendCx<'_>, at: usize, key: Key, share: &ShareOf) -> Option<Out> {
    let block = share_block(cx, share);
    let from = share.at as usize;
    let bytes = &cx.in_flight.batch(share.batch)[from..from + usize::from(share.len)];
    let datagram = &mut cx.shared.scratch.datagrams;
    datagram.clear();
    datagram.resize(CLEAR_HEADER_LEN, 0);
    datagram.extend_from_slice(bytes);
    datagram.extend_from_slice(&block);
    datagram.resize(datagram.len() + TAG_LEN, 0);
    let (link, size) = (&mut cx.paths[at], datagram.len());
    let asks = Asks::AckOf(key);
    cx.sealer
        .seal(link, datagram, block.len(), asks, Seal::Headers)
        .then(|| Out::by(link, size, Source::Scratch))
}

/// The header block of a share that is sent again.
pub(super) fn share_block(cx: &SendCx<'_>, share: &ShareOf) -> [u8; frame::SHARE_LEN] {
    let conn = cx.in_flight.segment_of_share(share).conn;
    let bump = cx.flows.get(conn).expect("it is not stale").bump;
    let split = cx.shared.setup.bumps.of(bump).split();
    let split = split.expect("a share is of what is split");
    let mut block = [0; frame::SHARE_LEN];
    let frame = share_frame(split, bump, (share.set, share.index), false);
    frame::encode(&frame, &mut Writer::new(&mut block));
    block
}

/// The frame behind a share: which it is of its set.
pub(super) fn share_frame(
    split: &dyn Split,
    bump: BumpId,
    (set, index): (u32, u8),
    fleeting: bool,
) -> Frame<'static> {
    Frame::Share(Share {
        fleeting,
        bump: bump.get(),
        set,
        index,
        needed: split.needed(),
        shares: split.shares(),
    })
}
