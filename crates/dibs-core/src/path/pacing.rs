//! Pacing: a leaky bucket kept as the time at which it is empty (GCRA).

use crate::time::Time;
use core::time::Duration;

/// Capacity that may be caught up with beyond a burst: a timer that fires late.
const CATCH_UP: Duration = Duration::from_millis(1);

/// Bytes of one burst at most: what one send with UDP_SEGMENT takes.
const MAX_QUANTUM: u64 = 64 * 1024;

/// Binary places of the time that a byte takes.
const SCALE: u32 = 20;

/// Milliseconds for which a flow has the path before it is another one's turn.
const TURN: u64 = 6;

/// Releases bytes at a rate, in bursts.
#[derive(Debug)]
pub(super) struct Pacer {
    /// The time up to which capacity is used. Behind `now`: credit; ahead of it: debt.
    used_until: Time,
    /// Nanoseconds that a byte takes, in units of 2^-SCALE.
    per_byte: u64,
    rate: u64,
    quantum: u64,
}

impl Pacer {
    pub(super) fn new(now: Time, rate: u64, mtu: u64) -> Self {
        let mut pacer = Self {
            used_until: now,
            per_byte: 0,
            rate: 0,
            quantum: 0,
        };
        pacer.set_rate(rate, mtu);
        pacer
    }

    /// Sets the rate in bytes a second, not zero.
    pub(super) fn set_rate(&mut self, rate: u64, mtu: u64) {
        self.rate = rate;
        // Upwards: a rate beyond what the scale tells apart is no reason to divide by zero.
        self.per_byte = (1_000_000_000u64 << SCALE).div_ceil(rate);
        let in_a_tick = rate / 1000;
        // Two datagrams may be longer than that: on loopback, for one.
        self.quantum = in_a_tick.min(MAX_QUANTUM).max(2 * mtu);
    }

    /// Bytes a second.
    pub(super) const fn rate(&self) -> u64 {
        self.rate
    }

    /// Bytes of a turn: what is sent in some milliseconds, at least a burst. Objects of a page, which are about as long,
    /// then come one after another. With shorter turns they would all come when the last one does, and whoever asks for
    /// more after each one would leave the path idle for a round trip.
    pub(super) const fn turn(&self) -> u64 {
        let in_ticks = self.rate / 1000 * TURN;
        if in_ticks < self.quantum {
            self.quantum
        } else {
            in_ticks
        }
    }

    /// Bytes of a burst.
    pub(super) const fn quantum(&self) -> u64 {
        self.quantum
    }

    /// Time that `bytes` take.
    pub(super) fn duration_of(&self, bytes: u64) -> Duration {
        Duration::from_nanos(((u128::from(bytes) * u128::from(self.per_byte)) >> SCALE) as u64)
    }

    /// Credit at most.
    fn depth(&self) -> Duration {
        self.duration_of(self.quantum) + CATCH_UP
    }

    /// Bytes that may go now.
    pub(super) fn credit(&self, now: Time) -> u64 {
        let unused = now.since(self.used_until).min(self.depth());
        ((unused.as_nanos() << SCALE) / u128::from(self.per_byte)) as u64
    }

    /// True if more capacity has passed unused than may be caught up with, of that since `held_until`: before, something
    /// else was in the way.
    pub(super) fn is_full(&self, now: Time, held_until: Time) -> bool {
        now.since(self.used_until.max(held_until)) > self.depth()
    }

    /// When there will be credit for `bytes`, at most a burst.
    pub(super) fn ready_at(&self, bytes: u64) -> Time {
        // One nanosecond for the fraction that was cut off.
        self.used_until + self.duration_of(bytes.min(self.quantum)) + Duration::from_nanos(1)
    }

    /// Takes note of `bytes` sent, let go or not.
    pub(super) fn on_sent(&mut self, now: Time, bytes: u64) {
        self.used_until = self.used_until.max(now - self.depth()) + self.duration_of(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTU: u64 = 1400;

    #[test]
    fn holds_the_rate_and_lets_go_in_bursts() {
        for rate in [20_000, 125_000, 12_500_000, 1_250_000_000] {
            let mut now = Time::from_nanos(5_000_000_000);
            let start = now;
            let mut p = Pacer::new(now, rate, MTU);
            let (mut sent, mut bursts) = (0, 0);
            while now.since(start) < Duration::from_secs(2) {
                let credit = p.credit(now);
                if credit < p.quantum() {
                    now = p.ready_at(p.quantum());
                    assert!(p.credit(now) >= p.quantum());
                    continue;
                }
                p.on_sent(now, credit);
                sent += credit;
                bursts += 1;
            }
            let want = rate as f64 * now.since(start).as_secs_f64();
            assert!(
                (sent as f64 - want).abs() < 0.002 * want + 3.0 * MTU as f64,
                "{rate}: {sent}"
            );
            let burst = sent / bursts;
            assert!(
                (2 * MTU..=MAX_QUANTUM + 1).contains(&burst),
                "{rate}: {burst}"
            );
        }
    }

    #[test]
    fn no_rate_is_too_high() {
        let now = Time::from_nanos(1_000_000_000);
        for rate in [1 << 49, 1 << 50, 1 << 51, u64::MAX] {
            let mut p = Pacer::new(now, rate, MTU);
            p.on_sent(now, p.quantum());
            let later = now + Duration::from_millis(1);
            assert!(p.credit(later) >= p.quantum(), "{rate}");
            assert!(p.ready_at(p.quantum()) <= later, "{rate}");
        }
    }

    #[test]
    fn idle_time_is_caught_up_with_for_a_moment_only() {
        let now = Time::from_nanos(1_000_000_000);
        let p = Pacer::new(now, 125_000_000, MTU);
        let most = p.quantum() + 125_000;
        assert!(!p.is_full(now + Duration::from_micros(1500), now));
        let later = now + Duration::from_secs(1);
        assert!(p.is_full(later, now));
        assert!(!p.is_full(later, later));
        assert!(
            (most - 1..=most).contains(&p.credit(later)),
            "{}",
            p.credit(later)
        );
    }
}
