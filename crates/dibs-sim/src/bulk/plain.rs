//! A sender and its receiver with one link between them, and nothing else: what TCP has without dibs.

use std::time::Duration;

use dibs_core::Time;
use dibs_netem::{
    Conditions, Emulator, Fate,
    rng::{Rng, mix},
};

use super::receiver::Receiver;
use super::scenario::{Change, Link, SPAN};
use super::segment::{Ack, Burst, HEADERS, MSS};
use super::sender::{Sender, SenderStats};
use crate::queue::Queue;

/// Time for what is under way at the end.
const PATIENCE: Duration = Duration::from_secs(60);

enum What {
    Data(Burst),
    Ack(Ack),
}

/// A transfer over one link.
pub struct Plain {
    now: Time,
    sender: Sender,
    receiver: Receiver,
    emulators: [Emulator; 2],
    conditions: Conditions,
    changes: Vec<Change>,
    arrivals: Queue<What>,
}

/// Outcome of a transfer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Carried {
    /// Bytes read within the span.
    pub bytes: u64,
    /// The time that they took.
    pub took: Duration,
    /// Counts of the sender.
    pub sender: SenderStats,
}

impl Carried {
    /// Megabits a second.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 * 8e-6 / self.took.as_secs_f64()
    }
}

impl Plain {
    /// A sender of so many bytes, over a link that changes.
    pub fn new(seed: u64, link: &Link, changes: Vec<Change>, bytes: u64) -> Self {
        let mut rng = Rng::new(mix(seed ^ 0x91a1));
        Self {
            now: Time::ZERO,
            sender: Sender::new(Time::ZERO, bytes),
            receiver: Receiver::new(Time::ZERO),
            emulators: [(); 2].map(|()| Emulator::new(rng.word())),
            conditions: link.conditions(),
            changes,
            arrivals: Queue::default(),
        }
    }

    /// The sender, to look at.
    pub const fn sender(&self) -> &Sender {
        &self.sender
    }

    /// Bytes read so far.
    pub const fn read(&self) -> u64 {
        self.receiver.read()
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// It stalls.
    pub fn run(mut self) -> Result<Carried, String> {
        self.run_until(Time::ZERO + SPAN);
        let (bytes, took) = (self.read(), self.now.since(Time::ZERO));
        self.sender.stop();
        self.run_until(self.now + PATIENCE);
        if !self.sender.is_done() {
            return Err(format!("TCP stalls alone: {:?}", self.sender.stats()));
        }
        Ok(Carried {
            bytes,
            took,
            sender: self.sender.stats(),
        })
    }

    /// Lets time pass, or until there is nothing more to send.
    pub fn run_until(&mut self, end: Time) {
        self.pump();
        while !self.sender.is_done() {
            let timers = [
                self.arrivals.next(),
                self.sender.poll_timeout(),
                self.receiver.poll_timeout(),
                self.changes.first().map(|c| Time::ZERO + c.at),
            ];
            let next = timers.into_iter().flatten().min().unwrap_or(end);
            if next >= end {
                self.now = end;
                return;
            }
            self.now = self.now.max(next);
            self.step();
        }
    }

    fn step(&mut self) {
        let now = self.now;
        while self
            .changes
            .first()
            .is_some_and(|c| Time::ZERO + c.at <= now)
        {
            self.conditions = self.changes.remove(0).becomes.conditions();
        }
        while let Some(arrival) = self.arrivals.take(now) {
            match arrival {
                What::Ack(ack) => self.sender.handle_ack(now, &ack),
                What::Data(data) => {
                    let (span, stamps) = ((data.at, data.len, MSS), (data.tsval, data.tsecr));
                    self.receiver.handle_data(now, clock(now), span, stamps);
                    // Each packet is looked at when it comes.
                    self.answer();
                }
            }
        }
        if self.sender.poll_timeout().is_some_and(|t| t <= now) {
            self.sender.handle_timeout(now);
        }
        self.pump();
    }

    fn pump(&mut self) {
        while let Some(burst) = self.sender.poll_transmit(self.now, clock(self.now)) {
            let end = burst.at + burst.len;
            let mut at = burst.at;
            while at < end {
                let len = MSS.min(end - at);
                self.send(
                    0,
                    len as usize + HEADERS,
                    What::Data(Burst { at, len, ..burst }),
                );
                at += len;
            }
        }
        self.answer();
    }

    fn answer(&mut self) {
        if let Some(ack) = self.receiver.poll_ack(self.now, clock(self.now)) {
            let blocks = if ack.blocks.is_empty() {
                0
            } else {
                4 + 8 * ack.blocks.len()
            };
            self.send(1, HEADERS + blocks, What::Ack(ack));
        }
    }

    fn send(&mut self, host: usize, len: usize, what: What) {
        let now = self.now.since(Time::ZERO);
        let Fate::Delivered(d) = self.emulators[host].enter(&self.conditions, now, len) else {
            return;
        };
        self.arrivals.push(Time::ZERO + d.at, what);
    }
}

/// The clock of time stamps, in milliseconds.
pub(super) const fn clock(now: Time) -> u32 {
    (now.as_nanos() / 1_000_000) as u32 + 1
}
