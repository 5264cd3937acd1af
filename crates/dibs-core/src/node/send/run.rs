//! A run: datagrams for one carrier that go in one send.

use smallvec::SmallVec;

use super::carrier::{Carrier, SHARE_OVERHEAD};
use super::context::SendCx;
use super::datagram::{MAX_BATCH, MAX_SEGMENTS};
use super::shares::Shares;
use crate::bump::Bump;
use crate::node::out::{Out, Source};
use crate::slab::Key;

/// Datagrams of one carrier that go in one send, being filled.
pub(super) struct Run<'a> {
    pub(super) carrier: Carrier<'a>,
    /// The bump of all that goes.
    pub(super) bump: &'a Bump,
    /// Permission to carry what is for trusted paths.
    pub(super) allowed: bool,
    /// The longest piece.
    pub(super) longest: usize,
    /// Pieces, at most.
    pub(super) most: usize,
    /// Batches that hold the datagrams, one for each path.
    pub(super) batches: SmallVec<[Key; 4]>,
    /// Bytes of datagrams filled, of each path.
    pub(super) at: usize,
    /// Bytes of what is encrypted as they were, filled in the batch: the datagrams lie elsewhere.
    pub(super) kept: usize,
    /// Length of all pieces but the last.
    pub(super) stride: usize,
    pub(super) pieces: usize,
    /// The batches hold nothing.
    pub(super) unused: bool,
    /// Some were left to a trusted path.
    pub(super) deferred: bool,
    /// Nothing more fits.
    pub(super) full: bool,
}

impl<'a> Run<'a> {
    /// One of `wanted` pieces at most.
    pub(super) fn new(
        cx: &mut SendCx<'_>,
        carrier: Carrier<'a>,
        bump: &'a Bump,
        wanted: usize,
    ) -> Self {
        let budget = carrier.burst(cx.paths).min(MAX_BATCH);
        let most = (budget / carrier.mtu).clamp(1, MAX_SEGMENTS).min(wanted);
        let batches = carrier.links.iter().map(|_| {
            let buffer = cx.shared.pool.take_for(most * carrier.mtu);
            cx.in_flight.add_batch(buffer)
        });
        Self {
            batches: batches.collect(),
            bump,
            allowed: carrier.links.iter().all(|at| cx.paths[*at].trusted) || cx.is_lax(),
            longest: carrier.longest(),
            most,
            carrier,
            at: 0,
            kept: 0,
            stride: 0,
            pieces: 0,
            unused: true,
            deferred: false,
            full: false,
        }
    }

    /// The first send of what was filled; the others of a bundle follow.
    pub(super) fn finish(self, cx: &mut SendCx<'_>, shares: &mut Shares) -> Option<Out> {
        let is_sealed = self.bump.is_sealed();
        let used = if is_sealed { self.kept } else { self.at };
        let pool = &mut cx.shared.pool;
        for &batch in &self.batches {
            if self.unused {
                cx.in_flight.drop_empty_batch(batch, pool);
            } else if cx.in_flight.has_batch(batch) {
                cx.in_flight.shrink_batch(batch, used, pool);
            }
        }
        if self.pieces == 0 {
            return None;
        }
        let link = &cx.paths[self.carrier.links[0]];
        let Some(split) = self.carrier.split else {
            let source = match is_sealed {
                true => Source::Scratch,
                false => Source::Batch(self.batches[0], self.at),
            };
            return Some(Out::by(link, self.stride, source));
        };
        let segment = SHARE_OVERHEAD + split.share_len(self.stride);
        for (&link, batch) in self.carrier.links.iter().zip(self.batches) {
            let source = Source::Batch(batch, self.at);
            shares.push(Out::by(&cx.paths[link], segment, source));
        }
        shares.pop(cx)
    }
}
