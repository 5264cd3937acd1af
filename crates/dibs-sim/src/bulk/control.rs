//! Which congestion controller a sender has.

use std::time::Duration;

use dibs_core::Time;
use dibs_netem::rng::Rng;

use super::bbr::Bbr;
use super::cubic::Cubic;
use super::event::{Event, Window};
use super::segment::MSS;

/// Which controller a sender has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// CUBIC with HyStart (RFC 9438; Linux's `tcp_cubic.c`).
    Cubic,
    /// BBR of version 1 (Linux's `tcp_bbr.c`).
    Bbr,
}

#[derive(Debug)]
pub(super) enum Control {
    Cubic(Cubic),
    Bbr(Box<Bbr>),
}

impl Control {
    pub(super) fn new(algorithm: Algorithm, now: Time, rng: Rng) -> Self {
        match algorithm {
            Algorithm::Cubic => Self::Cubic(Cubic::new(now)),
            Algorithm::Bbr => Self::Bbr(Box::new(Bbr::new(now, rng))),
        }
    }

    /// An acknowledgement was taken, and its consequences for what is lost.
    pub(super) fn on_ack(&mut self, event: &Event, window: &mut Window) {
        match self {
            Self::Cubic(cubic) => cubic.on_ack(event, window),
            Self::Bbr(bbr) => bbr.on_ack(event, window),
        }
    }

    /// A loss: the threshold that it leaves.
    pub(super) fn on_loss(&mut self, window: &mut Window) -> u64 {
        match self {
            Self::Cubic(cubic) => cubic.reduce(window.cwnd),
            Self::Bbr(bbr) => {
                bbr.save(window);
                window.ssthresh
            }
        }
    }

    /// A timeout.
    pub(super) fn on_timeout(&mut self, now: Time) {
        match self {
            Self::Cubic(cubic) => cubic.reset(now),
            Self::Bbr(bbr) => bbr.on_timeout(),
        }
    }

    /// A loss turned out to be none: the window that is put back.
    pub(super) fn on_undo(&mut self, window: &Window) -> u64 {
        match self {
            Self::Cubic(_) => window.cwnd.max(window.prior),
            Self::Bbr(bbr) => {
                bbr.on_undo();
                window.cwnd
            }
        }
    }

    /// Whether it says itself what a loss makes of the window.
    pub(super) const fn rules_losses(&self) -> bool {
        matches!(self, Self::Bbr(_))
    }

    /// Bytes a second at which segments leave, where they are paced.
    pub(super) fn pacing(&self) -> Option<f64> {
        match self {
            Self::Cubic(_) => None,
            Self::Bbr(bbr) => Some(bbr.pacing_rate()),
        }
    }

    /// Segments of a superpacket: about a millisecond, and more where the round trip is short
    /// (`tcp_tso_autosize`).
    pub(super) fn burst(&self, window: &Window, smoothed: Duration, least: Duration) -> u64 {
        const MOST: u64 = 65_000;
        if let Self::Bbr(bbr) = self {
            return bbr.burst();
        }
        let gain = if window.cwnd < window.ssthresh / 2 {
            2.0
        } else {
            1.2
        };
        let rate = gain * (window.cwnd * MSS) as f64 / smoothed.as_secs_f64().max(1e-4);
        let near = MOST
            .checked_shr((least.as_micros() >> 9) as u32)
            .unwrap_or(0);
        let bytes = ((rate / 1024.0) as u64 + near).min(MOST);
        (bytes / MSS).max(2)
    }

    /// How it stands, for who looks for a fault.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Cubic(cubic) => cubic.describe(),
            Self::Bbr(bbr) => bbr.describe(),
        }
    }
}
