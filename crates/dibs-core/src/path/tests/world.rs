//! Helpers of this module's tests: a seeded generator, and two paths joined by links in virtual time.

use super::super::{AckFrame, Blocked, Path, PathConfig, TimeoutAction};
use crate::time::Time;
use core::time::Duration;
use std::collections::BTreeMap;

/// A small seeded generator (splitmix64).
#[derive(Debug)]
pub(in crate::path) struct Rng(u64);

impl Rng {
    pub(in crate::path) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(in crate::path) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub(in crate::path) const fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// True in `fraction` of the calls.
    pub(in crate::path) fn chance(&mut self, fraction: f64) -> bool {
        ((self.next() >> 11) as f64) < fraction * (1u64 << 53) as f64
    }
}

/// One direction between two hosts.
#[derive(Debug)]
pub(in crate::path) struct Link {
    /// Bits a second; zero: unlimited.
    pub(in crate::path) rate: u64,
    pub(in crate::path) delay: Duration,
    /// Added to the delay of each datagram, evenly from zero to this: it reorders.
    pub(in crate::path) jitter: Duration,
    /// Unused time that may be made up for at once, as a token bucket does.
    pub(in crate::path) burst: Duration,
    /// Bytes that the queue holds.
    pub(in crate::path) queue: u64,
    /// Fraction lost before the queue.
    pub(in crate::path) loss: f64,
    /// Largest datagram that passes, headers included.
    pub(in crate::path) mtu: u16,
    pub(in crate::path) down: bool,
    /// Wait in the queue from which on what says ECT is marked, and whether such a datagram is dropped.
    pub(in crate::path) marks: Option<Duration>,
    pub(in crate::path) drops_ect: bool,
    free_at: Time,
    rng: Rng,
    /// What each datagram waited in the queue, in microseconds, and how many did not fit.
    pub(in crate::path) waits: Vec<u32>,
    pub(in crate::path) overflows: u64,
}

impl Link {
    pub(in crate::path) fn new(rate: u64, delay: Duration, queue: Duration) -> Self {
        Self {
            rate,
            delay,
            jitter: Duration::ZERO,
            burst: Duration::ZERO,
            queue: (rate as f64 / 8.0 * queue.as_secs_f64()) as u64,
            loss: 0.0,
            mtu: 1500,
            down: false,
            marks: None,
            drops_ect: false,
            free_at: Time::ZERO,
            rng: Rng::new(42),
            waits: Vec::new(),
            overflows: 0,
        }
    }

    /// When a datagram sent now arrives, if it does, and whether it is marked then.
    fn send(&mut self, now: Time, bytes: u16, ect: bool) -> Option<(Time, bool)> {
        let limit = self.marks.filter(|_| ect);
        let marked = limit.is_some_and(|limit| self.free_at.since(now) > limit);
        if ect && self.drops_ect || self.down || bytes > self.mtu || self.rng.chance(self.loss) {
            return None;
        }
        let mut out = now;
        if self.rate > 0 {
            let wait = self.free_at.since(now);
            let backlog = (wait.as_secs_f64() * self.rate as f64 / 8.0) as u64;
            if backlog + u64::from(bytes) > self.queue.max(3000) {
                self.overflows += 1;
                return None;
            }
            self.waits.push(wait.as_micros() as u32);
            let busy = Duration::from_nanos(u64::from(bytes) * 8_000_000_000 / self.rate);
            self.free_at = self.free_at.max(now - self.burst) + busy;
            out = self.free_at.max(now);
        }
        let jitter = self.jitter.as_nanos() as u64;
        let late = if jitter > 0 {
            self.rng.below(jitter)
        } else {
            0
        };
        Some((out + self.delay + Duration::from_nanos(late), marked))
    }

    /// The wait in the queue that `fraction` of the datagrams stayed below.
    pub(in crate::path) fn wait(&mut self, fraction: f64) -> Duration {
        if self.waits.is_empty() {
            return Duration::ZERO;
        }
        let at = ((self.waits.len() - 1) as f64 * fraction) as usize;
        let (_, &mut us, _) = self.waits.select_nth_unstable(at);
        Duration::from_micros(us.into())
    }
}

/// Bytes of IP and UDP header.
const OVERHEAD: u16 = 28;

const PING: u16 = 64;

/// What travels.
#[derive(Debug)]
enum Event {
    ToB {
        seq: u64,
        bytes: u16,
        elicits: bool,
        marked: bool,
    },
    ToA {
        seq: u64,
        ack: Vec<u8>,
    },
    WakeA,
    WakeB,
}

/// Kinds of datagrams that A sends.
#[derive(Clone, Copy)]
enum What {
    Data,
    Ping,
    MtuProbe,
}

/// What was told of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Nothing,
    Lost,
    Arrived,
}

/// Two paths, the first of which sends, and the links between them.
#[derive(Debug)]
pub(in crate::path) struct World {
    pub(in crate::path) now: Time,
    pub(in crate::path) a: Path,
    pub(in crate::path) b: Path,
    pub(in crate::path) ab: Link,
    pub(in crate::path) ba: Link,
    /// Bytes a second that A has to send; `None`: any amount.
    pub(in crate::path) demand: Option<u64>,
    /// Bytes that A has under way at most: it waits for something else than the path.
    pub(in crate::path) window: u64,
    /// B handles what has come in at multiples of this.
    pub(in crate::path) lump: Duration,
    /// B stands still for the second of these in each of the first.
    pub(in crate::path) pause: [Duration; 2],
    /// A wakes at multiples of this.
    pub(in crate::path) tick: Duration,
    /// Bytes on the wire that arrived at B, and datagrams of A told to be acknowledged and lost.
    pub(in crate::path) arrived: u64,
    pub(in crate::path) acked: u64,
    pub(in crate::path) lost: u64,
    /// By token; the first is of pings, of which nothing is told. Each arrives once, and is lost once, before that if at all.
    told: Vec<Told>,
    offered: u64,
    wake_a: Option<Time>,
    wake_b: Option<Time>,
    /// By time and order of creation.
    events: BTreeMap<(Time, u64), Event>,
    order: u64,
    acked_tokens: Vec<u64>,
    lost_tokens: Vec<u64>,
}

impl World {
    pub(in crate::path) fn new(ab: Link, ba: Link) -> Self {
        let now = Time::from_nanos(1_000_000_000);
        let config = PathConfig {
            longest: 1500 - OVERHEAD,
        };
        let (mut a, b) = (Path::new(now, config), Path::new(now, config));
        a.on_validated(now, ab.delay + ba.delay + Duration::from_micros(100));
        let mut world = Self {
            now,
            a,
            b,
            ab,
            ba,
            demand: None,
            window: u64::MAX,
            lump: Duration::from_nanos(1),
            pause: [Duration::from_secs(1), Duration::ZERO],
            tick: Duration::from_nanos(1),
            arrived: 0,
            acked: 0,
            lost: 0,
            told: vec![Told::Arrived],
            offered: 0,
            wake_a: None,
            wake_b: None,
            events: BTreeMap::new(),
            order: 0,
            acked_tokens: Vec::new(),
            lost_tokens: Vec::new(),
        };
        world.at(now, Event::WakeA);
        world
    }

    fn at(&mut self, time: Time, event: Event) {
        self.order += 1;
        self.events.insert((time, self.order), event);
    }

    /// Lets `time` pass.
    pub(in crate::path) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(first) = self.events.first_entry()
            && first.key().0 <= end
        {
            let ((at, _), event) = first.remove_entry();
            self.now = at;
            match event {
                Event::ToB {
                    seq,
                    bytes,
                    elicits,
                    marked,
                } => {
                    self.arrived += u64::from(bytes + OVERHEAD);
                    self.b.on_received(at, seq, elicits);
                    if marked {
                        self.b.on_marked();
                    }
                    self.serve_b();
                }
                Event::ToA { seq, ack } => {
                    self.a.on_received(at, seq, false);
                    let frame = AckFrame::decode(&ack).expect("what was encoded");
                    self.a
                        .on_ack(at, &frame, &mut self.acked_tokens, &mut self.lost_tokens)
                        .expect("only what was sent is acknowledged");
                    self.take_tokens();
                    self.serve_a();
                }
                Event::WakeA => {
                    self.wake_a = None;
                    self.serve_a();
                }
                Event::WakeB => {
                    self.wake_b = None;
                    self.serve_b();
                }
            }
        }
        self.now = end;
    }

    /// Lets `time` pass; the fraction of the link's rate that arrived.
    pub(in crate::path) fn utilisation(&mut self, time: Duration) -> f64 {
        let before = self.arrived;
        self.run(time);
        (self.arrived - before) as f64 * 8.0 / (self.ab.rate as f64 * time.as_secs_f64())
    }

    fn take_tokens(&mut self) {
        self.acked += self.acked_tokens.len() as u64;
        self.lost += self.lost_tokens.len() as u64;
        for token in self.lost_tokens.drain(..).filter(|t| *t != 0) {
            let told = std::mem::replace(&mut self.told[token as usize], Told::Lost);
            assert_eq!(told, Told::Nothing, "token {token}");
        }
        for token in self.acked_tokens.drain(..).filter(|t| *t != 0) {
            let told = std::mem::replace(&mut self.told[token as usize], Told::Arrived);
            assert_ne!(told, Told::Arrived, "token {token}");
        }
    }

    /// Tokens of which nothing has been told yet.
    pub(in crate::path) fn untold(&self) -> usize {
        self.told.iter().filter(|t| **t == Told::Nothing).count()
    }

    fn send_a(&mut self, bytes: u16, what: What) {
        let ect = self.a.is_ect();
        let seq = match what {
            What::MtuProbe => self.a.on_mtu_probe_sent(self.now, bytes),
            What::Ping => self.a.on_sent(self.now, bytes, 0, true),
            What::Data => {
                self.told.push(Told::Nothing);
                self.a
                    .on_sent(self.now, bytes, self.told.len() as u64 - 1, true)
            }
        };
        if let Some((t, marked)) = self.ab.send(self.now, bytes + OVERHEAD, ect) {
            let grid = self.lump.as_nanos() as u64;
            let mut t = Time::from_nanos(t.as_nanos().div_ceil(grid) * grid);
            let [period, pause] = self.pause.map(|d| d.as_nanos() as u64);
            let into = t.as_nanos() % period;
            if into < pause {
                t += Duration::from_nanos(pause - into);
            }
            self.at(
                t,
                Event::ToB {
                    seq,
                    bytes,
                    elicits: true,
                    marked,
                },
            );
        }
    }

    /// A sends one datagram, whatever its budget.
    pub(in crate::path) fn send_one(&mut self) {
        self.send_a(PING, What::Data);
        self.serve_a();
    }

    /// A asks whether the path is still there.
    pub(in crate::path) fn ping(&mut self) {
        self.send_a(PING, What::Ping);
        self.serve_a();
    }

    fn wanted(&self) -> usize {
        let due = match self.demand {
            None => usize::MAX,
            Some(rate) => {
                let due = rate as f64 * (self.now.as_nanos() - 1_000_000_000) as f64 / 1e9;
                (due as usize).saturating_sub(self.offered as usize)
            }
        };
        due.min(self.window.saturating_sub(self.a.stats().in_flight) as usize)
    }

    fn serve_a(&mut self) {
        let now = self.now;
        if self.a.poll_timeout().is_some_and(|t| t <= now) {
            let action = self.a.on_timeout(now, &mut self.lost_tokens);
            self.take_tokens();
            if action == TimeoutAction::Probe {
                self.send_a(PING, What::Data);
            }
        }
        if let Some(size) = self.a.poll_mtu_probe(now) {
            self.send_a(size, What::MtuProbe);
        }
        let mtu = self.a.mtu();
        while self.wanted() >= usize::from(mtu) {
            let wanted = self.wanted();
            let budget = self.a.budget(now, wanted);
            if budget < usize::from(mtu) {
                break;
            }
            for _ in 0..budget.min(wanted) / usize::from(mtu) {
                self.send_a(mtu, What::Data);
                self.offered += u64::from(mtu);
            }
        }
        let mut wake = self.a.poll_timeout();
        let paced = match self.a.blocked_until(now, self.wanted()) {
            Blocked::Pacing(t) => Some(t),
            Blocked::No => Some(now + Duration::from_millis(1)),
            Blocked::Window | Blocked::Inactive => None,
        };
        wake = [wake, paced].into_iter().flatten().min();
        if let Some(t) = wake {
            let grid = self.tick.as_nanos() as u64;
            let t = Time::from_nanos(t.as_nanos().div_ceil(grid) * grid).max(now);
            if self.wake_a.is_none_or(|w| t < w) {
                self.wake_a = Some(t);
                self.at(t, Event::WakeA);
            }
        }
    }

    fn serve_b(&mut self) {
        let now = self.now;
        if self.b.ack_due(now) {
            let mut ack = Vec::new();
            assert!(self.b.encode_ack(now, 1000, &mut ack));
            let bytes = ack.len() as u16 + 30;
            let seq = self.b.on_sent(now, bytes, 0, false);
            if let Some((t, _)) = self.ba.send(now, bytes + OVERHEAD, false) {
                self.at(t, Event::ToA { seq, ack });
            }
        }
        if let Some(t) = self.b.next_ack_time()
            && self.wake_b.is_none_or(|w| t < w)
        {
            self.wake_b = Some(t.max(now));
            self.at(t.max(now), Event::WakeB);
        }
    }
}
