//! The receiver: what a Linux socket acknowledges, and when, and the window that it offers.

use std::collections::BTreeMap;
use std::time::Duration;

use dibs_core::Time;

use super::segment::{Ack, BLOCKS, MSS};

/// The largest window (`tcp_rmem`).
const MOST_WINDOW: u64 = 6 << 20;
/// The first one.
const FIRST_WINDOW: u64 = 64 << 10;
/// An acknowledgement is delayed so long at most.
const DELAY: Duration = Duration::from_millis(40);
/// Segments that are acknowledged at once at the start.
const QUICK: u64 = 16;
/// Acknowledgements out of order that go at once (`TCP_FASTRETRANS_THRESH`); and those after them that one stands
/// for at most, for so long (`tcp_comp_sack_nr`, `tcp_comp_sack_delay_ns`).
const ALONE: u32 = 3;
const COMPRESSED: u32 = 44;
const COMPRESSED_FOR: Duration = Duration::from_millis(1);
/// Ranges whose order of arrival is remembered.
const RECENT: usize = 4;

/// Counts of a receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverStats {
    /// Bytes that had come before.
    pub repeated: u64,
    /// Pieces whose time stamp was older than that of what had been acknowledged (PAWS, RFC 7323, 5).
    pub outdated: u64,
    /// Bytes beyond the window.
    pub beyond: u64,
    /// Pieces that came out of order.
    pub early: u64,
    /// The longest time between two pieces of the stream becoming readable.
    pub longest_gap: Duration,
    /// When the longest gap ended.
    pub gap_ended: Time,
}

/// A receiver whose application reads at once.
#[derive(Debug)]
pub struct Receiver {
    next: u64,
    /// What lies beyond, by its start.
    early: BTreeMap<u64, u64>,
    /// Starts of ranges there, the one that grew last first.
    recent: Vec<u64>,
    repeated: Option<(u64, u64)>,
    edge: u64,
    stats: ReceiverStats,
    read_at: Option<Time>,
    /// Up to where it has acknowledged.
    told: u64,
    /// Payload of a segment, as far as it can tell.
    mss: u64,
    quick: u64,
    alone: u32,
    compressed: u32,
    now: bool,
    delayed: Option<Time>,
    /// The time stamp to echo.
    latest: Option<u32>,
    window: Growth,
}

/// The window's growth (`tcp_rcv_space_adjust`).
#[derive(Debug)]
struct Growth {
    space: u64,
    size: u64,
    began: Time,
    from: u64,
    rtt: Option<Duration>,
}

impl Receiver {
    /// A receiver that has nothing yet.
    pub fn new(now: Time) -> Self {
        Self {
            next: 0,
            early: BTreeMap::new(),
            recent: Vec::new(),
            repeated: None,
            edge: FIRST_WINDOW,
            stats: ReceiverStats::default(),
            read_at: None,
            told: 0,
            mss: MSS,
            quick: QUICK,
            alone: 0,
            compressed: 0,
            now: false,
            delayed: None,
            latest: None,
            window: Growth {
                space: 10 * MSS,
                size: FIRST_WINDOW,
                began: now,
                from: 0,
                rtt: None,
            },
        }
    }

    /// Bytes that the application has read.
    pub const fn read(&self) -> u64 {
        self.next
    }

    /// Counts so far.
    pub const fn stats(&self) -> ReceiverStats {
        self.stats
    }

    /// Takes what came at once, in segments of `mss` bytes; false if nothing of it could be used. `clock`:
    /// milliseconds of its time stamps.
    pub fn handle_data(
        &mut self,
        now: Time,
        clock: u32,
        (at, len, mss): (u64, u64, u64),
        (tsval, tsecr): (u32, u32),
    ) -> bool {
        let end = at + len;
        self.mss = mss.clamp(1, MSS);
        // Linux allows for a tick.
        if self
            .latest
            .is_some_and(|latest| (tsval.wrapping_sub(latest) as i32) < -1)
        {
            self.stats.outdated += 1;
            self.now = true;
            return false;
        }
        if at <= self.told
            && self
                .latest
                .is_none_or(|t| (tsval.wrapping_sub(t) as i32) >= 0)
        {
            self.latest = Some(tsval);
        }
        if end > self.edge {
            self.stats.beyond += end - self.edge;
            self.now = true;
            return false;
        }
        if tsecr != 0 {
            let rtt = Duration::from_millis(u64::from(clock.wrapping_sub(tsecr).max(1)));
            let slow = self.window.rtt.map(|known| (known * 7 + rtt) / 8);
            self.window.rtt = Some(slow.unwrap_or(rtt).min(rtt.max(Duration::from_millis(1))));
        }
        if end <= self.next {
            self.repeat(at, end);
            return false;
        }
        if at > self.next {
            self.take_early(now, at, end);
        } else {
            if at < self.next {
                self.stats.repeated += self.next - at;
            }
            self.take_next(now, end);
        }
        true
    }

    /// The acknowledgement that is due; `clock`: milliseconds for its time stamp.
    pub fn poll_ack(&mut self, now: Time, clock: u32) -> Option<Ack> {
        let late = self.delayed.is_some_and(|t| t <= now);
        if !std::mem::take(&mut self.now) && !late {
            return None;
        }
        self.delayed = None;
        self.compressed = 0;
        self.quick = self
            .quick
            .saturating_sub((self.next - self.told).div_ceil(MSS));
        self.told = self.next;
        let early: u64 = self.early.iter().map(|(from, to)| to - from).sum();
        let room = self.window.size.saturating_sub(early);
        self.edge = self.edge.max(self.next + room);
        let mut blocks: Vec<_> = self.repeated.take().into_iter().collect();
        let recent = self.recent.iter();
        blocks.extend(recent.filter_map(|at| Some((*at, *self.early.get(at)?))));
        blocks.truncate(BLOCKS);
        Some(Ack {
            upto: self.next,
            window: self.edge - self.next,
            blocks,
            tsval: clock,
            tsecr: self.latest.unwrap_or(0),
        })
    }

    /// When an acknowledgement is due that waits.
    pub const fn poll_timeout(&self) -> Option<Time> {
        self.delayed
    }

    fn repeat(&mut self, at: u64, end: u64) {
        self.stats.repeated += end - at;
        self.repeated = Some((at, end));
        self.now = true;
    }

    fn take_early(&mut self, now: Time, at: u64, end: u64) {
        self.stats.early += 1;
        let (mut from, mut to) = (at, end);
        let mut had = 0;
        while let Some((&start, &stop)) = self.early.range(..=to).next_back()
            && stop >= from
        {
            had += stop.min(end).saturating_sub(start.max(at));
            self.early.remove(&start);
            self.recent.retain(|known| *known != start);
            (from, to) = (from.min(start), to.max(stop));
        }
        self.early.insert(from, to);
        self.recent.insert(0, from);
        self.recent.truncate(RECENT);
        if had > 0 {
            self.stats.repeated += had;
            self.repeated = Some((at, end));
        }
        self.acknowledge_early(now);
    }

    /// Each of the first ones out of order, then one for many.
    fn acknowledge_early(&mut self, now: Time) {
        if self.alone < ALONE || self.compressed >= COMPRESSED || self.repeated.is_some() {
            self.alone += 1;
            self.now = true;
            return;
        }
        self.compressed += 1;
        let twentieth = self.window.rtt.unwrap_or(COMPRESSED_FOR) / 20;
        let due = now + COMPRESSED_FOR.min(twentieth);
        self.delayed = Some(self.delayed.map_or(due, |at| at.min(due)));
    }

    fn take_next(&mut self, now: Time, end: u64) {
        self.next = end;
        let waited = !self.early.is_empty();
        while let Some((&start, &stop)) = self.early.first_key_value()
            && start <= self.next
        {
            self.early.remove(&start);
            self.next = self.next.max(stop);
        }
        let gap = self.read_at.map_or(Duration::ZERO, |at| now.since(at));
        if gap > self.stats.longest_gap {
            (self.stats.longest_gap, self.stats.gap_ended) = (gap, now);
        }
        self.read_at = Some(now);
        self.grow(now);
        self.alone = 0;
        let much = self.next - self.told > self.mss;
        let filled = waited && self.early.is_empty();
        if much || filled || self.quick > 0 {
            self.now = true;
        } else if self.early.is_empty() {
            self.delayed.get_or_insert(now + DELAY);
        } else {
            self.acknowledge_early(now);
        }
    }

    /// Room for twice what was read in the last round trip, and more as that grows.
    fn grow(&mut self, now: Time) {
        let w = &mut self.window;
        let Some(rtt) = w.rtt else { return };
        if now.since(w.began) < rtt {
            return;
        }
        let read = self.next - w.from;
        if read > w.space {
            let twice = 2 * read + 16 * MSS;
            let more = twice as u128 * u128::from(read - w.space) / u128::from(w.space);
            let early = self.early.last_key_value();
            let early = early.map_or(0, |(_, end)| end - self.next);
            w.size = (twice + 2 * more as u64 + early).clamp(w.size, MOST_WINDOW.max(w.size));
            w.space = read;
        }
        (w.began, w.from) = (now, self.next);
    }
}
