//! Loss detection by reordering and by time: RFC 9002, 6.1, with thresholds that learn.
//!
//! A datagram declared lost whose acknowledgement comes later was late, not lost. Each such case
//! widens the thresholds so that this much reordering is waited for; losses that stay losses narrow
//! them again.

use super::rtt::{GRANULARITY, Rtt};
use super::sent::{Fate, Sent, SentRing};
use crate::time::Time;
use core::time::Duration;

/// Reordering that is always waited for, in datagrams (RFC 9002, 6.1.1).
const MIN_PACKET_THRESHOLD: u64 = 3;

/// Reordering waited for at most. Beyond it a loss is better repaired twice than late.
const MAX_PACKET_THRESHOLD: u64 = 256;

/// Time threshold, in eighths of the round trip (RFC 9002, 6.1.2).
const MIN_TIME_EIGHTHS: u32 = 9;
const MAX_TIME_EIGHTHS: u32 = 16;

/// True losses after which the thresholds narrow by one step.
const CALM: u32 = 64;

/// What has been acknowledged, and from it what is lost.
#[derive(Debug)]
pub(super) struct LossDetector {
    largest_acked: Option<u64>,
    /// No datagram below this number is waiting.
    cursor: u64,
    packet_threshold: u64,
    time_eighths: u32,
    true_losses: u32,
    /// When the earliest datagram overtaken by an acknowledged one is to be declared lost.
    due_at: Option<Time>,
}

impl LossDetector {
    pub(super) const fn new() -> Self {
        Self {
            largest_acked: None,
            cursor: 0,
            packet_threshold: MIN_PACKET_THRESHOLD,
            time_eighths: MIN_TIME_EIGHTHS,
            true_losses: 0,
            due_at: None,
        }
    }

    /// When [`Self::detect`] is to be called at the latest.
    pub(super) const fn due_at(&self) -> Option<Time> {
        self.due_at
    }

    /// Takes note of the largest number of a report.
    pub(super) fn on_acked(&mut self, largest: u64) {
        self.largest_acked = self.largest_acked.max(Some(largest));
    }

    /// A datagram declared lost was acknowledged after all.
    pub(super) fn on_spurious(&mut self, seq: u64) {
        self.true_losses = 0;
        self.time_eighths = (self.time_eighths + 1).min(MAX_TIME_EIGHTHS);
        let distance = self.largest_acked.map_or(0, |l| l.saturating_sub(seq));
        self.packet_threshold = self
            .packet_threshold
            .max(distance + 1)
            .min(MAX_PACKET_THRESHOLD);
    }

    /// Finds what is lost now, marks it and calls `lost` with it.
    pub(super) fn detect(
        &mut self,
        now: Time,
        rtt: &Rtt,
        ring: &mut SentRing,
        mut lost: impl FnMut(&Sent),
    ) {
        self.due_at = None;
        let Some(largest) = self.largest_acked else {
            return;
        };
        let patience = self.patience(rtt);
        self.cursor = self.cursor.max(ring.base());
        let mut passed = true;
        let mut seq = self.cursor;
        while seq < largest {
            let Some(sent) = ring.get_mut(seq) else { break };
            if sent.fate == Fate::Waiting {
                let due = sent.at + patience;
                if largest - seq >= self.packet_threshold || due <= now {
                    sent.fate = Fate::Lost;
                    lost(sent);
                    self.on_true_loss();
                } else {
                    // In number order is in time order: the first is the earliest due.
                    self.due_at = self.due_at.or(Some(due));
                    passed = false;
                }
            }
            seq += 1;
            if passed {
                self.cursor = seq;
            }
        }
    }

    fn patience(&self, rtt: &Rtt) -> Duration {
        (rtt.smoothed().max(rtt.latest()) * self.time_eighths / 8).max(GRANULARITY)
    }

    fn on_true_loss(&mut self) {
        self.true_losses += 1;
        if self.true_losses == CALM {
            self.true_losses = 0;
            self.packet_threshold = (self.packet_threshold / 2).max(MIN_PACKET_THRESHOLD);
            self.time_eighths = (self.time_eighths - 1).max(MIN_TIME_EIGHTHS);
        }
    }
}
