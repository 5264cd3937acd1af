//! A bulk sender as a Linux socket is one: what it sends, and when.

mod losses;

use std::time::Duration;

use dibs_core::Time;

use super::cubic::Cubic;
use super::event::{Event, INITIAL_WINDOW, NO_THRESHOLD, State, Window};
use super::recovery::{Recovery, Signs};
use super::rtt::Rtt;
use super::scoreboard::{Board, News};
use super::segment::{Ack, Burst, MSS};

/// What a socket has under way or ready, at most (`tcp_wmem`).
const SEND_BUFFER: u64 = (4 << 20) / MSS;
/// What a receiver takes before it has said so.
const FIRST_WINDOW: u64 = 64 << 10;

/// Counts of a sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderStats {
    /// Segments sent.
    pub segments: u64,
    /// Segments sent again.
    pub again: u64,
    /// Times that it began to recover from a loss.
    pub recoveries: u64,
    /// Timeouts.
    pub timeouts: u64,
    /// Losses that turned out to be none.
    pub undone: u64,
}

/// When what is due.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Timers {
    pub(super) timeout: Option<Time>,
    /// Of the tail.
    pub(super) probe: Option<Time>,
    pub(super) reorder: Option<Time>,
}

/// A sender that always has more to send, until it is told otherwise.
///
/// [`handle_ack`](Self::handle_ack) and [`handle_timeout`](Self::handle_timeout) (when
/// [`poll_timeout`](Self::poll_timeout) says so) are inputs; after each of them
/// [`poll_transmit`](Self::poll_transmit) is asked until it has nothing.
#[derive(Debug)]
pub struct Sender {
    board: Board,
    cubic: Cubic,
    window: Window,
    rtt: Rtt,
    recovery: Recovery,
    stats: SenderStats,
    /// Segments that there are to send in all.
    limit: u64,
    /// First byte that is not acknowledged.
    una: u64,
    /// Where the receiver's window ends.
    edge: u64,
    /// TSval of the latest acknowledgement.
    echo: u32,
    /// Segments that the receiver has.
    delivered: u64,
    /// The window kept it from sending.
    limited: bool,
    /// Most segments out in the round that ends when `usage_end` is acknowledged.
    usage: u64,
    usage_end: u64,
    timers: Timers,
    /// A probe of the tail is due.
    probe: bool,
    /// When the probe is acknowledged, and whether it was sent again.
    probed: Option<(u64, bool)>,
}

impl Sender {
    /// A sender of so many bytes, rounded up to whole segments.
    pub fn new(now: Time, bytes: u64) -> Self {
        Self {
            board: Board::default(),
            cubic: Cubic::new(now),
            window: Window {
                cwnd: INITIAL_WINDOW,
                ssthresh: NO_THRESHOLD,
                prior: 0,
                limits: true,
            },
            rtt: Rtt::default(),
            recovery: Recovery::default(),
            stats: SenderStats::default(),
            limit: bytes.div_ceil(MSS),
            una: 0,
            edge: FIRST_WINDOW,
            echo: 0,
            delivered: 0,
            limited: true,
            usage: 0,
            usage_end: 0,
            timers: Timers::default(),
            probe: false,
            probed: None,
        }
    }

    /// Counts so far.
    pub const fn stats(&self) -> SenderStats {
        self.stats
    }

    /// Bytes that it has sent at least once.
    pub fn sent(&self) -> u64 {
        self.board.next() * MSS
    }

    /// Nothing new is to be sent any more.
    pub fn stop(&mut self) {
        self.limit = self.board.next();
    }

    /// True if all that there was to send has been acknowledged.
    pub fn is_done(&self) -> bool {
        self.board.out() == 0 && self.board.next() == self.limit
    }

    /// The congestion window in segments, and whether it is in slow start.
    pub const fn window(&self) -> (u64, bool) {
        (self.window.cwnd, self.window.slow_start())
    }

    /// Takes an acknowledgement.
    pub fn handle_ack(&mut self, now: Time, ack: &Ack) {
        let advanced = ack.upto > self.una;
        if ack.upto > self.board.next() * MSS {
            return;
        }
        self.echo = ack.tsval;
        let opened = ack.upto >= self.una && ack.upto + ack.window > self.edge;
        self.edge = self.edge.max(ack.upto + ack.window);
        self.una = self.una.max(ack.upto);
        let least = self.rtt.least().unwrap_or_default();
        let prior_head = self.board.head_sent();
        let news = self.board.take(ack, now, least, self.recovery.high);
        let rtt = self.take_rtt(now, &news, ack, prior_head);
        let delivered = news.acked + news.sacked;
        self.delivered += delivered;
        let signs = Signs {
            advanced,
            opened,
            repeated: ack.repeated().is_some(),
            echo: ack.tsecr,
            news,
        };
        let lost = self.recover(now, &signs);
        let event = Event {
            now,
            state: self.recovery.state,
            delivered,
            rtt,
            una: self.una / MSS,
            next: self.board.next(),
            may_grow: match self.recovery.reorders() {
                true => delivered > 0,
                false => news.acked > 0,
            },
        };
        self.window.limits = self.is_limited();
        self.reduce(delivered, lost, advanced);
        self.cubic.on_ack(&event, &mut self.window);
        if self.board.out() == 0 {
            self.timers = Timers::default();
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.timers.reorder.is_some_and(|t| t <= now) {
            self.timers.reorder = None;
            self.on_reorder_timeout(now);
        }
        if self.timers.probe.is_some_and(|t| t <= now) {
            self.timers.probe = None;
            self.probe = true;
        }
        if self.timers.timeout.is_some_and(|t| t <= now) {
            self.on_timeout(now);
        }
    }

    /// When it wants to work next, acknowledgements aside.
    pub fn poll_timeout(&self) -> Option<Time> {
        let Timers {
            timeout,
            probe,
            reorder,
        } = self.timers;
        [timeout, probe, reorder].into_iter().flatten().min()
    }

    /// The next superpacket, if one may leave; `clock`: milliseconds for its time stamp.
    pub fn poll_transmit(&mut self, now: Time, clock: u32) -> Option<Burst> {
        if self.probe {
            return self.send_probe(now, clock);
        }
        let room = self.window.cwnd.saturating_sub(self.board.in_flight());
        let most = self.most_at_once().min(room);
        if most > 0
            && self.recovery.state >= State::Recovery
            && let Some((first, count)) = self.board.next_lost(most)
        {
            return Some(self.send_again(now, clock, first, count));
        }
        let count = most.min(self.available());
        if count == 0 {
            self.validate(room);
            return None;
        }
        Some(self.send_new(now, clock, count))
    }

    /// Segments of a superpacket: about a millisecond, and more where the round trip is short (`tcp_tso_autosize`).
    fn most_at_once(&self) -> u64 {
        const MOST: u64 = 65_000;
        let cwnd = self.window.cwnd;
        let gain = if cwnd < self.window.ssthresh / 2 {
            2.0
        } else {
            1.2
        };
        let rate = gain * (cwnd * MSS) as f64 / self.rtt.smoothed().as_secs_f64().max(1e-4);
        let least = self.rtt.least().unwrap_or_default();
        let near = MOST
            .checked_shr((least.as_micros() >> 9) as u32)
            .unwrap_or(0);
        let bytes = ((rate / 1024.0) as u64 + near).min(MOST);
        (bytes / MSS).max(2)
    }

    /// New segments that the buffer and the receiver have room for.
    fn available(&self) -> u64 {
        let next = self.board.next();
        let end = self
            .limit
            .min(self.una / MSS + SEND_BUFFER)
            .min(self.edge / MSS);
        end.saturating_sub(next)
    }

    fn send_new(&mut self, now: Time, clock: u32, count: u64) -> Burst {
        let first = self.board.next();
        if self.board.out() == 0 {
            self.timers.timeout = Some(now + self.rtt.timeout());
        }
        for _ in 0..count {
            self.board.send_new(now, self.delivered);
        }
        self.arm_probe(now);
        self.burst(clock, first, count)
    }

    fn send_again(&mut self, now: Time, clock: u32, first: u64, count: u64) -> Burst {
        if first * MSS <= self.una {
            self.timers.timeout = Some(now + self.rtt.timeout());
        }
        for number in first..first + count {
            self.board.send_again(now, number, self.delivered);
        }
        self.recovery.note_again(clock, count);
        self.stats.again += count;
        self.burst(clock, first, count)
    }

    /// A new segment if there is one, or the last one again (RFC 8985, 7.3).
    fn send_probe(&mut self, now: Time, clock: u32) -> Option<Burst> {
        self.probe = false;
        if self.board.out() == 0 || self.probed.is_some() {
            return None;
        }
        let new = self.available() > 0;
        let burst = match new {
            true => self.send_new(now, clock, 1),
            false => self.send_again(now, clock, self.board.next() - 1, 1),
        };
        self.probed = Some((self.board.next(), !new));
        self.timers.probe = None;
        self.timers.timeout = Some(now + self.rtt.timeout());
        Some(burst)
    }

    fn burst(&mut self, clock: u32, first: u64, count: u64) -> Burst {
        self.recovery.note_sent(count);
        self.stats.segments += count;
        let at = (first * MSS).max(self.una);
        let len = (first + count) * MSS - at;
        Burst {
            at,
            len,
            tsval: clock,
            tsecr: self.echo,
        }
    }

    /// Nothing more can be sent now: whether that is the window's doing (`tcp_cwnd_validate`).
    fn validate(&mut self, room: u64) {
        let limits = room == 0;
        let over = self.una / MSS > self.usage_end;
        if over || limits || (!self.limited && self.board.out() > self.usage) {
            self.limited = limits;
            self.usage = self.board.out();
            self.usage_end = self.board.next();
        }
    }

    fn is_limited(&self) -> bool {
        let doubles = self.window.slow_start() && self.window.cwnd < 2 * self.usage;
        self.limited || doubles
    }

    /// Takes the round trips that an acknowledgement shows; the one for the controller comes back.
    fn take_rtt(
        &mut self,
        now: Time,
        news: &News,
        ack: &Ack,
        prior_head: Option<Time>,
    ) -> Option<Duration> {
        let acked = news.acked_span.filter(|_| !news.again);
        let spans = [acked, news.sacked_span];
        let first = spans.iter().flatten().next().map(|span| now.since(span.0));
        let last = spans.iter().flatten().last().map(|span| now.since(span.1));
        if let Some(rtt) = first {
            self.rtt.sample(rtt.max(Duration::from_micros(1)));
        } else if news.acked > 0 {
            // Only time stamps tell which of the copies it was.
            let clock = (now.as_nanos() / 1_000_000) as u32;
            let millis = clock.wrapping_sub(ack.tsecr);
            self.rtt
                .sample(Duration::from_millis(u64::from(millis.max(1))));
        }
        let fresh = prior_head.is_none_or(|head| first.is_some_and(|rtt| rtt > now.since(head)));
        if news.acked > 0 || (news.sacked > 0 && fresh) {
            self.timers.timeout = Some(now + self.rtt.timeout());
            self.arm_probe(now);
        }
        last
    }

    /// A probe of the tail waits only while all goes well (`tcp_schedule_loss_probe`).
    fn arm_probe(&mut self, now: Time) {
        let well = self.recovery.state == State::Open;
        let at = now + self.rtt.probe_after(self.board.out() == 1);
        let at = self.timers.timeout.map_or(at, |timeout| at.min(timeout));
        self.timers.probe = (well && self.probed.is_none() && self.board.out() > 0).then_some(at);
    }

    /// First byte that is not acknowledged.
    pub(super) const fn una(&self) -> u64 {
        self.una
    }
}
