//! What a link does to a packet: a pure function of time, length, and a seed.
//!
//! No clock and no IO: time is a [`Duration`] since the link's start, and every random decision
//! depends only on the seed, the packet's number and the kind of decision. The same packets at the
//! same times meet the same fate, and a change of one condition leaves the dice of the others alone.

pub mod rng;

use std::ops::Range;
use std::time::Duration;

use rng::mix;

/// The state of a link in one direction. Probabilities are between 0 and 1, for each packet alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Conditions {
    /// Bits per second, over whole frames; none: unlimited.
    pub rate: Option<u64>,
    /// Bytes that may wait for the rate, the packet being sent included; none: 50 ms of the rate,
    /// at least 64 KiB.
    pub queue: Option<usize>,
    /// Propagation delay, after the rate.
    pub delay: Duration,
    /// The delay varies by up to this, either way, uniformly; packets keep their order, so the slow
    /// ones hold up those behind them.
    pub jitter: Duration,
    /// Lost after having taken their time on the wire, as on a radio link.
    pub loss: f64,
    /// Held back by [`reorder_by`](Self::reorder_by), so that others overtake.
    pub reorder: f64,
    /// How long a reordered packet is held back.
    pub reorder_by: Duration,
    /// Delivered twice.
    pub duplicate: f64,
    /// Delivered with one bit flipped behind the link-layer header.
    pub corrupt: f64,
    /// Nothing that enters the link passes, now.
    pub outage: bool,
    /// The same at these times since the link's start.
    pub outages: Vec<Range<Duration>>,
}

impl Default for Conditions {
    fn default() -> Self {
        Self {
            rate: None,
            queue: None,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: 0.0,
            reorder: 0.0,
            reorder_by: Duration::from_millis(2),
            duplicate: 0.0,
            corrupt: 0.0,
            outage: false,
            outages: Vec::new(),
        }
    }
}

impl Conditions {
    /// A perfect link: no limit, no delay, no loss.
    pub fn new() -> Self {
        Self::default()
    }

    /// Limits the rate to so many bits per second.
    pub fn rate(mut self, bits_per_second: u64) -> Self {
        self.rate = Some(bits_per_second);
        self
    }

    /// Limits the queue before the rate to so many bytes.
    pub fn queue(mut self, bytes: usize) -> Self {
        self.queue = Some(bytes);
        self
    }

    /// Delays each packet.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Varies the delay.
    pub fn jitter(mut self, jitter: Duration) -> Self {
        self.jitter = jitter;
        self
    }

    /// Loses packets with this probability.
    pub fn loss(mut self, probability: f64) -> Self {
        self.loss = probability;
        self
    }

    /// Holds packets back by `late` with this probability.
    pub fn reorder(mut self, probability: f64, late: Duration) -> Self {
        self.reorder = probability;
        self.reorder_by = late;
        self
    }

    /// Duplicates packets with this probability.
    pub fn duplicate(mut self, probability: f64) -> Self {
        self.duplicate = probability;
        self
    }

    /// Flips a bit with this probability.
    pub fn corrupt(mut self, probability: f64) -> Self {
        self.corrupt = probability;
        self
    }

    /// Schedules an outage, in time since the link's start.
    pub fn outage(mut self, when: Range<Duration>) -> Self {
        self.outages.push(when);
        self
    }

    fn is_out(&self, now: Duration) -> bool {
        self.outage || self.outages.iter().any(|outage| outage.contains(&now))
    }

    /// The queue's limit in time at `rate`.
    fn longest_wait(&self, rate: u64) -> Duration {
        match self.queue {
            Some(bytes) => transmission(bytes, rate),
            None => Duration::from_millis(50).max(transmission(64 << 10, rate)),
        }
    }
}

/// Fate of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is not delivered.
    Dropped(Cause),
    /// It arrives.
    Delivered(Delivery),
}

/// Why a packet does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The link was out when the packet came.
    Outage,
    /// The queue was full.
    Queue,
    /// The dice said so.
    Loss,
}

/// How a packet arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// When, since the link's start.
    pub at: Duration,
    /// True if a second copy arrives with it.
    pub duplicate: bool,
    /// True if it was held back so that others overtake.
    pub late: bool,
    /// A random number that picks the bit to flip, if one is.
    pub corrupt: Option<u64>,
}

/// One direction of a link.
#[derive(Clone, Debug)]
pub struct Emulator {
    seed: u64,
    /// Packets seen; the number of the next one.
    packets: u64,
    /// When the transmitter has sent what it has.
    free_at: Duration,
    /// The latest delivery of a packet that keeps its order.
    latest: Duration,
}

/// Kinds of decision; each has dice of its own.
#[derive(Clone, Copy)]
enum Dice {
    Loss,
    Jitter,
    Reorder,
    Duplicate,
    Corrupt,
    CorruptBit,
}

impl Emulator {
    /// A link at rest.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            packets: 0,
            free_at: Duration::ZERO,
            latest: Duration::ZERO,
        }
    }

    /// Decides the fate of a packet of `len` bytes that enters the link at `now`, time since its
    /// start, which must not go back.
    pub fn enter(&mut self, conditions: &Conditions, now: Duration, len: usize) -> Fate {
        let packet = self.packets;
        self.packets += 1;
        if conditions.is_out(now) {
            return Fate::Dropped(Cause::Outage);
        }
        let mut sent = now;
        if let Some(rate) = conditions.rate {
            sent = self.free_at.max(now) + transmission(len, rate);
            // An idle transmitter takes any packet, however small the queue.
            if self.free_at > now && sent - now > conditions.longest_wait(rate) {
                return Fate::Dropped(Cause::Queue);
            }
            self.free_at = sent;
        }
        if self.chance(packet, Dice::Loss) < conditions.loss {
            return Fate::Dropped(Cause::Loss);
        }
        let late = self.chance(packet, Dice::Reorder) < conditions.reorder;
        let varied = conditions
            .jitter
            .mul_f64(2.0 * self.chance(packet, Dice::Jitter));
        let arrival = sent + (conditions.delay + varied).saturating_sub(conditions.jitter);
        let at = if late {
            arrival + conditions.reorder_by
        } else {
            self.latest = self.latest.max(arrival);
            self.latest
        };
        Fate::Delivered(Delivery {
            at,
            duplicate: self.chance(packet, Dice::Duplicate) < conditions.duplicate,
            late,
            corrupt: (self.chance(packet, Dice::Corrupt) < conditions.corrupt)
                .then(|| self.roll(packet, Dice::CorruptBit)),
        })
    }

    /// A number in 0..1.
    fn chance(&self, packet: u64, dice: Dice) -> f64 {
        (self.roll(packet, dice) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// SplitMix64 (Steele, Lea, Flood 2014), used as a function of its counter.
    fn roll(&self, packet: u64, dice: Dice) -> u64 {
        let counter = packet.wrapping_mul(8).wrapping_add(dice as u64 + 1);
        mix(self
            .seed
            .wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }
}

/// Time on the wire of `len` bytes at `rate` bits per second.
fn transmission(len: usize, rate: u64) -> Duration {
    Duration::from_nanos((len as u128 * 8 * 1_000_000_000 / u128::from(rate.max(1))) as u64)
}

#[cfg(test)]
mod tests;
