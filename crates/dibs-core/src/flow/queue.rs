//! One flow's queue between the TUN and the paths.
//!
//! The TUN's own ring drops whole superpackets without a word, so it is always read and the queue
//! stands here: bounded, and short by CoDel (RFC 8289). This is where the end-to-end TCP learns to
//! slow down.

use std::collections::VecDeque;
use std::time::Duration;

use dibs_wire::SeqNumber;

use crate::buffer::Buffer;
use crate::stream::tx::TxStream;
use crate::time::Time;

/// Acceptable standing delay, at least (RFC 8289, 4.4).
pub const TARGET: Duration = Duration::from_millis(5);
/// Time in which a good queue falls below the target at least once, at least (RFC 8289, 4.3).
pub const INTERVAL: Duration = Duration::from_millis(100);
/// A queue that was not looked at for so long stood still: no path was there, or the host slept.
const STANDSTILL: Duration = Duration::from_secs(1);
/// For so long after that nothing that waited is dropped. Linux has marked it as lost by then, takes that back
/// when it hears that it was not (`tcp_undo_cwnd_reduction`), and from then on looks for none of it but with its
/// timer, which has measured the outage as a round trip.
const SETTLING: Duration = Duration::from_secs(1);
/// Most bytes in one queue.
const LIMIT: usize = 4 << 20;
/// Most packets in one queue.
const MAX_PACKETS: usize = 1024;

/// A packet that waits.
#[derive(Debug)]
pub struct Waiting {
    /// The buffer that holds it.
    pub buffer: Buffer,
    /// The number of its first payload byte.
    pub seq: SeqNumber,
    /// Bytes of its payload.
    pub len: usize,
    /// Rest of it.
    pub rest: Rest,
    arrived: Time,
}

/// Rest of a packet's payload, which was not sent yet.
#[derive(Debug)]
pub struct Rest {
    /// Bytes; with none, a FIN.
    pub left: usize,
    /// The first of them that the receiver's kernel is not to get.
    pub withheld: usize,
    /// Bytes of one of the segments that the packet stands for.
    pub mss: usize,
}

impl Rest {
    /// So many bytes go now.
    pub const fn advance(&mut self, len: usize) {
        self.left -= len;
        self.withheld = self.withheld.saturating_sub(len);
    }

    /// Bytes that go the same way, at most.
    pub fn limit(&self) -> usize {
        match self.withheld {
            0 => self.left,
            withheld => withheld.min(self.left),
        }
    }
}

impl Waiting {
    fn new(arrived: Time, buffer: Buffer, seq: SeqNumber, len: usize, mss: usize) -> Self {
        let rest = Rest {
            left: len,
            withheld: 0,
            mss,
        };
        Self {
            buffer,
            seq,
            len,
            rest,
            arrived,
        }
    }

    /// Offset in its stream at which the rest of it begins.
    pub fn offset(&self, stream: &mut TxStream) -> u64 {
        stream.offset_of(self.seq) + (self.len - self.rest.left) as u64
    }

    /// How long it has been waiting.
    pub const fn sojourn(&self, now: Time) -> Duration {
        now.since(self.arrived)
    }
}

/// Limits below which CoDel does not act on a queue.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Bytes that are sent at once.
    pub burst: usize,
    /// Acceptable standing delay.
    pub target: Duration,
}

impl Patience {
    /// Time in which a good queue falls below the target at least once: a round trip, what waits included.
    fn interval(self) -> Duration {
        INTERVAL.max(2 * self.target)
    }
}

/// Verdict of CoDel at a dequeue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send.
    Pass,
    /// Mark congestion experienced, or drop one segment where that cannot be.
    Signal,
}

/// A bounded queue with CoDel.
#[derive(Debug, Default)]
pub struct Queue {
    items: VecDeque<Waiting>,
    /// Below [`LIMIT`].
    bytes: u32,
    /// At most [`MAX_PACKETS`] buffers.
    memory: u32,
    codel: Codel,
}

/// A packet that found the queue full comes back.
#[derive(Debug)]
pub struct Full(pub Buffer);

impl Queue {
    /// Appends a packet with `len` bytes of payload, the first of which has this number.
    pub fn push(
        &mut self,
        now: Time,
        buffer: Buffer,
        seq: SeqNumber,
        len: usize,
        mss: usize,
    ) -> Result<(), Full> {
        if self.bytes() + len > LIMIT || self.items.len() >= MAX_PACKETS {
            return Err(Full(buffer));
        }
        self.bytes += len as u32;
        self.memory += buffer.len() as u32;
        if self.items.capacity() == 0 {
            // Most connections never have more than one packet waiting, and there may be thousands.
            self.items.reserve_exact(1);
        }
        let waiting = Waiting::new(now, buffer, seq, len, mss);
        self.items.push_back(waiting);
        Ok(())
    }

    /// Puts such a packet in front of the others, of which it says nothing: for CoDel it is as old as they are.
    pub fn push_front(&mut self, now: Time, buffer: Buffer, seq: SeqNumber, len: usize) {
        let arrived = self.items.front().map_or(now, |head| head.arrived);
        self.put_back(Waiting::new(arrived, buffer, seq, len, len));
    }

    /// The packet at the head.
    pub fn head(&mut self) -> Option<&mut Waiting> {
        self.items.front_mut()
    }

    /// Verdict of CoDel on the packet at the head; asked once per packet sent.
    pub fn judge(&mut self, now: Time, patience: Patience) -> Verdict {
        let Some(head) = self.items.front() else {
            return Verdict::Pass;
        };
        let sojourn = now.since(head.arrived);
        let short = self.is_short(patience.burst);
        self.codel.judge(now, sojourn, short, patience)
    }

    /// True if no more waits than goes at once: among many flows that may be long from now, and a sender can do nothing about
    /// it.
    fn is_short(&self, burst: usize) -> bool {
        let head = self.items.front().map_or(0, |head| head.rest.mss);
        self.bytes() <= burst.max(2 * head.max(1500))
    }

    /// Takes `len` payload bytes off the head, which leaves when it is empty.
    pub fn consume(&mut self, len: usize) -> Option<Buffer> {
        let head = self
            .items
            .front_mut()
            .expect("consumed bytes were at the head");
        head.rest.advance(len);
        self.bytes -= len as u32;
        if head.rest.left > 0 {
            return None;
        }
        self.pop().map(|head| head.buffer)
    }

    /// True if all that waits came just now.
    pub fn is_fresh(&self, now: Time) -> bool {
        self.items.front().is_some_and(|head| head.arrived == now)
    }

    /// True if there is a packet at the head that CoDel has nothing to say of.
    pub fn passes(&mut self, now: Time, patience: Patience) -> bool {
        let waited = self.items.front().map(|head| now.since(head.arrived));
        let silent = waited.is_some_and(|t| t < patience.target || self.is_short(patience.burst));
        silent && self.judge(now, patience) == Verdict::Pass
    }

    /// Takes the packet at the head.
    pub fn pop(&mut self) -> Option<Waiting> {
        let head = self.items.pop_front()?;
        self.bytes -= head.rest.left as u32;
        self.memory -= head.buffer.len() as u32;
        Some(head)
    }

    /// Puts back what was taken, or what is left of it.
    pub fn put_back(&mut self, head: Waiting) {
        self.bytes += head.rest.left as u32;
        self.memory += head.buffer.len() as u32;
        self.items.push_front(head);
    }

    /// Payload bytes waiting.
    pub const fn bytes(&self) -> usize {
        self.bytes as usize
    }

    /// Gives back the memory for what does not wait.
    pub fn shrink(&mut self, now: Time) {
        self.items.shrink_to_fit();
        self.codel.shrink(now);
    }

    /// Bytes of the buffers that they lie in.
    pub const fn memory(&self) -> usize {
        self.memory as usize
    }

    /// True if nothing waits.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}

/// CoDel's control law (RFC 8289, 5).
#[derive(Debug, Default)]
struct Codel {
    judged: Time,
    /// None of a queue that did not stand lately: most are never longer than their turn.
    standing: Option<Box<Standing>>,
}

/// How a queue stood.
#[derive(Debug, Default)]
struct Standing {
    first_above: Option<Time>,
    dropping: Option<Dropping>,
    last_count: u32,
    last_end: Time,
    settled: Time,
}

#[derive(Clone, Copy, Debug)]
struct Dropping {
    next: Time,
    count: u32,
}

impl Codel {
    fn judge(
        &mut self,
        now: Time,
        sojourn: Duration,
        nearly_empty: bool,
        patience: Patience,
    ) -> Verdict {
        let unseen = now.since(std::mem::replace(&mut self.judged, now));
        let stood_still = unseen >= STANDSTILL;
        let is_good = sojourn < patience.target || nearly_empty;
        if self.standing.is_none() && is_good && !(stood_still && sojourn >= STANDSTILL) {
            return Verdict::Pass;
        }
        let standing = self.standing.get_or_insert_default();
        standing.judge(now, sojourn, (is_good, stood_still), patience)
    }

    /// Forgets how a queue stood that has long been good.
    fn shrink(&mut self, now: Time) {
        if now.since(self.judged) >= STANDSTILL + SETTLING {
            self.standing = None;
        }
    }
}

impl Standing {
    fn judge(
        &mut self,
        now: Time,
        sojourn: Duration,
        (is_good, stood_still): (bool, bool),
        patience: Patience,
    ) -> Verdict {
        if stood_still {
            // The senders are not to blame, and what they sent again is not to be lost once more.
            self.first_above = None;
            self.dropping = None;
            if sojourn >= STANDSTILL {
                self.settled = now + SETTLING;
            }
        }
        if is_good {
            self.first_above = None;
            if let Some(d) = self.dropping.take() {
                self.last_count = d.count;
                self.last_end = now;
            }
            return Verdict::Pass;
        }
        if now < self.settled {
            return Verdict::Pass;
        }
        let due = *self.first_above.get_or_insert(now + patience.interval());
        match &mut self.dropping {
            None if now >= due => {
                // Soon after the last time: take up near where it left off.
                let recent = now.since(self.last_end) < INTERVAL * 16 && self.last_count > 2;
                let count = if recent { self.last_count - 2 } else { 1 };
                self.dropping = Some(Dropping {
                    next: now + control_law(count),
                    count,
                });
                Verdict::Signal
            }
            Some(d) if now >= d.next => {
                d.count += 1;
                d.next += control_law(d.count);
                Verdict::Signal
            }
            _ => Verdict::Pass,
        }
    }
}

fn control_law(count: u32) -> Duration {
    INTERVAL.div_f64(f64::from(count.max(1)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{BUFFER_LEN, Pool};

    const SEQ: SeqNumber = SeqNumber::new(0);

    const USUAL: Patience = Patience {
        burst: 16 << 10,
        target: TARGET,
    };

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn where_paths_are_far_apart_more_may_stand_and_for_longer() {
        let patient = Patience {
            target: Duration::from_millis(60),
            ..USUAL
        };
        let signals = |sojourn: u64| {
            let mut codel = Codel::default();
            let sojourn = Duration::from_millis(sojourn);
            let mut judge = |ms: &u64| codel.judge(at(*ms), sojourn, false, patient);
            (0..1000).find(|ms| judge(ms) == Verdict::Signal)
        };
        assert_eq!((signals(59), signals(60)), (None, Some(120)));
    }

    #[test]
    fn a_standing_queue_is_signalled_ever_more_often() {
        let mut codel = Codel::default();
        let signals: Vec<u64> = (0..1000)
            .filter(|&ms| {
                codel.judge(at(ms), Duration::from_millis(20), false, USUAL) == Verdict::Signal
            })
            .collect();
        assert_eq!(signals[0], 100);
        assert!(signals.len() > 10, "{signals:?}");
        let gaps: Vec<u64> = signals.windows(2).map(|w| w[1] - w[0]).collect();
        assert!(gaps.windows(2).all(|w| w[1] <= w[0] + 1), "{gaps:?}");
    }

    #[test]
    fn a_queue_that_stood_still_is_left_alone_at_first() {
        let mut codel = Codel::default();
        let mut signals = |from: u64, sojourn: u64| {
            let times = (from..from + 90).filter(|&ms| {
                let sojourn = Duration::from_millis(sojourn);
                codel.judge(at(ms), sojourn, false, USUAL) == Verdict::Signal
            });
            times.count()
        };
        assert_eq!(signals(0, 20), 0);
        assert!(signals(90, 20) > 0, "it stands");
        assert_eq!(signals(5000, 4900), 0, "there was an outage");
        let settling: usize = (1..11).map(|n| signals(5000 + 90 * n, 20)).sum();
        assert_eq!(settling, 0, "and what was sent before is not to be missed");
        let after: usize = (11..14).map(|n| signals(5000 + 90 * n, 20)).sum();
        assert!(after > 0, "it stands again");
        assert_eq!(signals(9000, 20), 0, "there was nothing to send");
        assert!(signals(9090, 20) > 0, "so it is as any other");
    }

    #[test]
    fn a_short_queue_is_left_alone() {
        let mut codel = Codel::default();
        for ms in 0..1000 {
            assert_eq!(
                codel.judge(at(ms), Duration::from_millis(4), false, USUAL),
                Verdict::Pass
            );
        }
    }

    #[test]
    fn an_idle_queue_has_little_memory_and_gives_it_back() {
        let (mut pool, mut queue) = (Pool::new(4), Queue::default());
        let pushed = queue.push(Time::ZERO, pool.take_for(100), SEQ, 60, 60);
        assert!(pushed.is_ok() && queue.consume(60).is_some());
        assert_eq!(queue.items.capacity(), 1);
        queue.shrink(Time::ZERO);
        assert_eq!(queue.items.capacity(), 0);
    }

    #[test]
    fn the_queue_is_bounded_and_gives_the_buffer_back() {
        let mut pool = Pool::new(4);
        let mut queue = Queue::default();
        let mut pushed = 0;
        loop {
            match queue.push(Time::ZERO, pool.take(), SEQ, BUFFER_LEN - 40, 1400) {
                Ok(()) => pushed += BUFFER_LEN - 40,
                Err(Full(buffer)) => {
                    assert_eq!(buffer.len(), BUFFER_LEN);
                    break;
                }
            }
        }
        assert_eq!(pushed, queue.bytes());
        assert!(pushed <= LIMIT && pushed + BUFFER_LEN > LIMIT);
        assert!(queue.consume(100).is_none());
        assert!(queue.consume(BUFFER_LEN - 140).is_some());
        assert_eq!(queue.bytes(), pushed - (BUFFER_LEN - 40));
    }
}
