//! The sender's side of a stream.

use dibs_wire::SeqNumber;
use dibs_wire::frame::BASE_OFFSET;

use super::MAX_WINDOW;
use crate::bump::Encode;

/// A run of retransmitted bytes as long as this is worth an epoch of its own.
const SOLO_RUN: u64 = 256 * 1024;

/// Epochs of an incarnation. A connection comes near that only if its peer complains as fast as it can, for hours.
const WORN: u32 = 1 << 31;

/// How the next bytes of a segment go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Stream offset.
    pub offset: u64,
    /// On its own (a kernel retransmission) or in the chain.
    pub solo: bool,
    /// On its own: how far the chain has come beyond the offset.
    pub ahead: u32,
    /// The chain begins here.
    pub first: bool,
    /// Bytes in front of the chain go another way.
    pub detached: bool,
    /// No more bytes than this go the same way.
    pub limit: usize,
}

impl Position {
    /// In the chain, and not its start.
    pub const fn is_inside(&self) -> bool {
        !self.solo && !self.first
    }
}

/// Stream of the local kernel's segments.
///
/// No plaintext is kept but what a chain needs of it.
#[derive(Debug, Default)]
pub struct TxStream {
    incarnation: u16,
    /// The number that [`BASE_OFFSET`] stands for; none before the first segment.
    base: Option<SeqNumber>,
    epoch: u32,
    chain: Option<Chain>,
    /// Highest offset sent so far.
    top: u64,
    /// Where the run of retransmitted bytes ends, and how long it is.
    solo_end: u64,
    solo_run: u64,
    /// A segment was dropped on our side: what is missing comes by us again.
    dropped: bool,
    /// The stream began with a SYN that came by us.
    whole: bool,
}

#[derive(Debug)]
struct Chain {
    start: u64,
    detached: bool,
    next: u64,
    encoder: Option<Box<dyn Encode>>,
}

impl TxStream {
    /// A stream of the given incarnation with no segment yet.
    pub fn new(incarnation: u16) -> Self {
        Self {
            incarnation,
            ..Self::default()
        }
    }

    /// Counts the connections of this flow.
    pub const fn incarnation(&self) -> u16 {
        self.incarnation
    }

    /// The current epoch; epochs count from 1.
    pub const fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The base sequence number, set by the first segment.
    pub const fn base(&self) -> Option<SeqNumber> {
        self.base
    }

    /// Begins a new incarnation with the base unset: a SYN, or a peer that forgot the flow.
    pub fn reincarnate(&mut self) {
        *self = Self::new(self.incarnation.wrapping_add(1));
    }

    /// A SYN came by: the stream begins with `seq`.
    pub fn begin(&mut self, seq: SeqNumber) {
        self.offset_of(seq);
        self.whole = true;
    }

    /// A segment was dropped before it was sent.
    pub fn note_drop(&mut self) {
        self.dropped = true;
    }

    /// Ends the chain, so that the next byte begins a new epoch.
    pub fn break_chain(&mut self) {
        self.chain = None;
    }

    /// True if the peer had so many chains broken that a new incarnation is due, before its epochs come to their end.
    pub const fn is_worn(&self) -> bool {
        self.epoch >= WORN
    }

    /// True if `epoch` is the chain being sent.
    pub fn is_current(&self, epoch: u32) -> bool {
        self.chain.is_some() && self.epoch == epoch
    }

    /// Sets the base, unless it is set.
    pub fn begin_at(&mut self, seq: SeqNumber) {
        if self.base.is_none() {
            self.base = Some(seq);
            self.top = BASE_OFFSET;
        }
    }

    /// The offset of `seq`, taken near the highest one sent, and no more than a window below it; the first call
    /// sets the base.
    pub fn offset_of(&mut self, seq: SeqNumber) -> u64 {
        self.begin_at(seq);
        let base = self.base.expect("it was just set");
        let top_seq = base.add((self.top - BASE_OFFSET) as u32);
        let distance = i64::from(seq.distance_from(top_seq));
        // It went on elsewhere for a while.
        let beyond = if distance < -MAX_WINDOW { 1 << 32 } else { 0 };
        self.top.wrapping_add_signed(distance + beyond)
    }

    /// True if bytes beyond `offset` have gone out.
    pub const fn is_passed(&self, offset: u64) -> bool {
        offset < self.top
    }

    /// True if the byte at `offset` is the chain's next, and not its first.
    pub fn continues_at(&self, offset: u64) -> bool {
        let chain = self.chain.as_ref();
        chain.is_some_and(|c| c.next == offset && c.start != offset)
    }

    /// Says how the next bytes, `len` of them at `offset`, go, and opens an epoch where one is
    /// needed.
    pub fn position(&mut self, offset: u64, len: usize) -> Position {
        let distance = self
            .chain
            .as_ref()
            .map(|c| offset.wrapping_sub(c.next) as i64);
        match distance {
            Some(0) => {}
            Some(below) if below < 0 && below > -MAX_WINDOW && !self.is_long_run(offset) => {
                let ahead = below.unsigned_abs();
                let limit = len.min(ahead as usize);
                return Position {
                    offset,
                    solo: true,
                    ahead: ahead as u32,
                    first: false,
                    detached: false,
                    limit,
                };
            }
            _ => {
                // A first byte without a SYN, or one beyond the last: the bump was put in under way.
                let gap = distance.is_some_and(|d| d > 0);
                let late = self.epoch == 0 && !self.whole;
                self.open(offset, (gap || late) && !self.dropped);
            }
        }
        let chain = self.chain.as_ref().expect("it is open");
        let first = chain.start == offset;
        let detached = first && chain.detached;
        Position {
            offset,
            solo: false,
            ahead: 0,
            first,
            detached,
            limit: len,
        }
    }

    fn is_long_run(&self, offset: u64) -> bool {
        offset == self.solo_end && self.solo_run >= SOLO_RUN
    }

    fn open(&mut self, offset: u64, detached: bool) {
        self.dropped = false;
        self.epoch = self
            .epoch
            .checked_add(1)
            .expect("an incarnation has fewer than 2^32 epochs");
        self.chain = Some(Chain {
            start: offset,
            detached,
            next: offset,
            encoder: None,
        });
        self.solo_run = 0;
    }

    /// True if bytes at `offset` belong to the first `guarded` bytes of the current epoch.
    pub fn is_guarded(&self, offset: u64, guarded: u64) -> bool {
        self.chain
            .as_ref()
            .is_some_and(|c| offset.wrapping_sub(c.start) < guarded)
    }

    /// The chain's encoder, which is `new`'s where the chain has none yet.
    ///
    /// # Panics
    /// Without an open chain, see [`position`](Self::position).
    pub fn encoder(&mut self, new: impl FnOnce() -> Box<dyn Encode>) -> &mut dyn Encode {
        let chain = self.chain.as_mut().expect("chained bytes have a chain");
        &mut **chain.encoder.get_or_insert_with(new)
    }

    /// `len` bytes (and the number of a FIN) at `offset` have gone out.
    pub fn advance(&mut self, offset: u64, len: u64, solo: bool) {
        let end = offset + len;
        if solo {
            self.solo_run = if offset == self.solo_end {
                self.solo_run + len
            } else {
                len
            };
            self.solo_end = end;
        } else if let Some(chain) = &mut self.chain {
            debug_assert_eq!(chain.next, offset, "chained bytes go in order");
            chain.next = end;
        }
        self.top = self.top.max(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(s: &mut TxStream, seq: u32, len: usize) -> Vec<(u64, bool, u32, usize)> {
        let mut offset = s.offset_of(SeqNumber::new(seq));
        let mut left = len;
        let mut out = Vec::new();
        while left > 0 {
            let p = s.position(offset, left);
            s.advance(offset, p.limit as u64, p.solo);
            out.push((offset - BASE_OFFSET, p.solo, s.epoch(), p.limit));
            offset += p.limit as u64;
            left -= p.limit;
        }
        out
    }

    #[test]
    fn in_order_bytes_form_one_chain_over_the_wrap() {
        let mut s = TxStream::new(0);
        assert_eq!(send(&mut s, u32::MAX - 9, 10), [(0, false, 1, 10)]);
        assert_eq!(send(&mut s, 0, 10), [(10, false, 1, 10)]);
        assert!(s.is_guarded(BASE_OFFSET + 64, 65));
        assert!(!s.is_guarded(BASE_OFFSET + 65, 65));
    }

    #[test]
    fn what_lies_beyond_next_opens_an_epoch() {
        let mut s = TxStream::new(0);
        send(&mut s, 0, 10);
        assert_eq!(send(&mut s, 20, 5), [(20, false, 2, 5)]);
    }

    #[test]
    fn a_stream_whose_epochs_come_to_their_end_begins_anew() {
        let mut s = TxStream {
            epoch: WORN - 1,
            ..TxStream::new(7)
        };
        assert!(!s.is_worn());
        send(&mut s, 5, 10);
        assert!(s.is_worn() && s.is_current(WORN));
        s.reincarnate();
        assert!(!s.is_worn());
    }

    #[test]
    fn what_went_on_elsewhere_for_gigabytes_lies_beyond() {
        for gone in [1 << 30, 5 << 29, 11 << 28] {
            let mut s = TxStream::new(0);
            send(&mut s, 5, 10);
            let seq = 5 + gone as u32;
            assert_eq!(send(&mut s, seq, 5), [(gone, false, 2, 5)], "{gone}");
            assert!(s.is_passed(BASE_OFFSET + gone));
        }
    }

    #[test]
    fn a_straddling_segment_is_cut_in_two() {
        let mut s = TxStream::new(0);
        send(&mut s, 0, 100);
        assert_eq!(
            send(&mut s, 60, 50),
            [(60, true, 1, 40), (100, false, 1, 10)]
        );
    }

    #[test]
    fn a_long_run_of_retransmissions_becomes_an_epoch() {
        let mut s = TxStream::new(0);
        send(&mut s, 0, 4 << 20);
        let run = SOLO_RUN as u32;
        assert_eq!(send(&mut s, 0, run as usize), [(0, true, 1, run as usize)]);
        assert_eq!(send(&mut s, run, 1000), [(u64::from(run), false, 2, 1000)]);
        assert_eq!(
            send(&mut s, run + 1000, 1000),
            [(u64::from(run) + 1000, false, 2, 1000)]
        );
    }

    #[test]
    fn a_broken_chain_opens_the_next_epoch() {
        let mut s = TxStream::new(0);
        send(&mut s, 0, 100);
        s.break_chain();
        assert_eq!(send(&mut s, 100, 100), [(100, false, 2, 100)]);
        s.reincarnate();
        assert_eq!((s.incarnation(), s.epoch()), (1, 0));
    }

    #[test]
    fn an_epoch_says_whether_what_is_before_it_goes_another_way() {
        let detached = |s: &mut TxStream, offset| {
            let p = s.position(BASE_OFFSET + offset, 10);
            s.advance(p.offset, 10, p.solo);
            p.detached
        };
        let mut late = TxStream::new(0);
        late.offset_of(SeqNumber::new(7));
        assert!(detached(&mut late, 0), "begun without a SYN");
        assert!(!detached(&mut late, 10));
        assert!(detached(&mut late, 50), "bytes went in plain between");
        late.note_drop();
        assert!(!detached(&mut late, 80), "bytes were dropped here");
        late.break_chain();
        assert!(!detached(&mut late, 90));
        let mut whole = TxStream::new(0);
        whole.begin(SeqNumber::new(7));
        assert!(!detached(&mut whole, 0));
    }
}
