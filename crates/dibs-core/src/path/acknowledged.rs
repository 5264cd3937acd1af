//! What an acknowledgement tells a path: what has arrived, how fast, and what is lost.

use core::time::Duration;

use super::Path;
use super::ack::{AckError, AckFrame};
use super::bbr::AckEvent;
use super::ranges::SeqRange;
use super::sent::Fate;
use super::state::PathState;
use crate::time::Time;

/// Delay of a report that is believed at most: several times what a peer should take.
const CREDIBLE_ACK_DELAY: Duration = Duration::from_millis(10);

/// What one acknowledgement frame says that was not known.
#[derive(Default)]
struct News {
    /// Ack-eliciting, late ones included.
    datagrams: u64,
    bytes: u64,
    /// Of these, what was in flight.
    settled: u64,
    settled_bytes: u64,
    spurious: u64,
    /// Something was acknowledged, be it what elicits none.
    any: bool,
    /// The ack-eliciting one sent last.
    newest: Option<u64>,
    /// When the largest was sent, if that is news.
    largest_at: Option<Time>,
}

impl Path {
    /// Takes an acknowledgement; appends the tokens of what it says to have arrived to `acked`, also if they were told to
    /// be lost before, and of what is lost by it to `lost`. Refused without any effect if it cannot be true.
    pub fn on_ack(
        &mut self,
        now: Time,
        frame: &AckFrame,
        acked: &mut Vec<u64>,
        lost: &mut Vec<u64>,
    ) -> Result<(), AckError> {
        let largest = frame.largest();
        if largest >= self.sent.next() {
            return Err(AckError::NeverSent(largest));
        }
        self.note_held(now);
        self.loss.on_acked(largest);
        let news = self.settle(now, frame, acked);
        self.in_flight -= news.settled_bytes;
        self.waiting -= news.settled;
        self.count.spurious += news.spurious;
        if news.any {
            self.last.heard = now;
            self.last.busy = now;
            if self.state() != PathState::Unvalidated {
                self.revive(now);
            }
        }
        self.ecn.on_acked(frame.ranges());
        if self.ecn.on_reported(frame.marked()) {
            self.bbr.on_marked();
        }
        let newest = news
            .newest
            .and_then(|seq| Some((self.sent.get(seq)?.at, self.sent.rate(seq)?)));
        let ack_delay = Duration::from_micros(frame.delay_us().into()).min(CREDIBLE_ACK_DELAY);
        let mut rtt = None;
        let awake = |at: &Time| self.slept_until.is_none_or(|until| *at > until);
        if let (Some(_), Some(at)) = (newest, news.largest_at.filter(awake)) {
            let sample = now.since(at);
            self.rtt.update(sample, ack_delay);
            let flight = self.in_flight + news.settled_bytes;
            self.usual_flight = (7 * self.usual_flight + flight) / 8;
            rtt = Some(sample);
        }
        self.detect_loss(now, lost);
        if let Some((sent_at, known)) = newest {
            // The delay is no part of the interval.
            let min_rtt = self
                .bbr
                .min_rtt()
                .unwrap_or_default()
                .saturating_sub(ack_delay);
            let rate = self
                .rate
                .on_delivered(now - ack_delay, news.bytes, sent_at, known, min_rtt);
            self.bbr.on_ack(&AckEvent {
                now,
                bytes: news.bytes,
                datagrams: news.datagrams,
                delivered: self.rate.delivered(),
                in_flight: self.in_flight,
                rtt,
                rate,
                app_limited: self.rate.is_app_limited(),
                mtu: self.mtu().into(),
                quantum: self.pacer.quantum(),
            });
            self.update_pacing();
        }
        self.forget_sent(now);
        Ok(())
    }

    /// Marks what an acknowledgement says to have arrived; appends its tokens to `acked`.
    fn settle(&mut self, now: Time, frame: &AckFrame, acked: &mut Vec<u64>) -> News {
        let largest = frame.largest();
        let mut news = News::default();
        let base = self.sent.base();
        for range in frame.ranges().iter().take_while(|r| r.end >= base) {
            let range = SeqRange {
                start: range.start.max(base),
                end: range.end,
            };
            let (ring, mtud, loss, bbr) = (
                &mut self.sent,
                &mut self.mtud,
                &mut self.loss,
                &mut self.bbr,
            );
            self.acked.insert(range, |added| {
                for seq in added.start..=added.end {
                    let Some(sent) = ring.get_mut(seq) else {
                        continue;
                    };
                    news.any = true;
                    if seq == largest {
                        news.largest_at = Some(sent.at);
                    }
                    match core::mem::replace(&mut sent.fate, Fate::Done) {
                        Fate::Done => continue,
                        Fate::Lost => {
                            news.spurious += 1;
                            loss.on_spurious(seq);
                            bbr.on_spurious();
                        }
                        Fate::Waiting => {
                            news.settled += 1;
                            news.settled_bytes += u64::from(sent.bytes);
                        }
                    }
                    if sent.mtu_probe {
                        mtud.on_probe_acked(now, sent.bytes);
                    } else {
                        acked.push(sent.token);
                        mtud.on_acked(sent.bytes);
                    }
                    news.datagrams += 1;
                    news.bytes += u64::from(sent.bytes);
                    news.newest = news.newest.max(Some(seq));
                }
            });
        }
        news
    }

    pub(super) fn detect_loss(&mut self, now: Time, lost: &mut Vec<u64>) {
        self.note_held(now);
        let mut smallest = u16::MAX;
        let mut datagrams = 0;
        let (in_flight, waiting, mtud) = (&mut self.in_flight, &mut self.waiting, &mut self.mtud);
        self.loss.detect(now, &self.rtt, &mut self.sent, |sent| {
            *in_flight -= u64::from(sent.bytes);
            *waiting -= 1;
            if sent.mtu_probe {
                mtud.on_probe_lost(now, sent.bytes);
            } else {
                smallest = smallest.min(sent.bytes);
                datagrams += 1;
                lost.push(sent.token);
            }
        });
        if datagrams > 0 {
            self.count.lost += datagrams;
            self.bbr.on_lost(datagrams);
            self.mtud.on_lost(now, smallest);
        }
    }
}
