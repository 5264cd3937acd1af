//! What a congestion controller is told, and what it decides.

use std::time::Duration;

use dibs_core::Time;
use dibs_netem::rng::Rng;

use super::bbr::Bbr;
use super::cubic::Cubic;
use super::segment::MSS;

/// Segments that a sender begins with (RFC 6928).
pub(super) const INITIAL_WINDOW: u64 = 10;
/// `ssthresh` as long as there is none.
pub(super) const NO_THRESHOLD: u64 = u64::MAX >> 1;

/// Which controller a sender has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// CUBIC with HyStart (RFC 9438; Linux's `tcp_cubic.c`).
    Cubic,
    /// BBR of version 1 (Linux's `tcp_bbr.c`).
    Bbr,
}

/// How a sender stands to its losses (Linux's `enum tcp_ca_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    Open,
    /// Something was acknowledged out of order.
    Disorder,
    Recovery,
    /// After a timeout.
    Loss,
}

/// The congestion window, in segments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) cwnd: u64,
    pub(super) ssthresh: u64,
    /// The window before it was reduced.
    pub(super) prior: u64,
    /// It keeps the sender from sending, as Linux sees it.
    pub(super) limits: bool,
}

impl Window {
    pub(super) const fn slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }
}

/// The delivery rate that an acknowledgement shows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    /// Segments, in the time.
    pub(super) delivered: u64,
    pub(super) interval: Duration,
    /// What had been delivered when its first one was sent.
    pub(super) prior: u64,
    pub(super) app_limited: bool,
}

/// What an acknowledgement means to a controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) now: Time,
    pub(super) state: State,
    /// Segments newly delivered, and newly marked as lost.
    pub(super) delivered: u64,
    pub(super) lost: u64,
    /// Delivered in all.
    pub(super) total: u64,
    pub(super) in_flight: u64,
    /// Before this acknowledgement.
    pub(super) prior_in_flight: u64,
    pub(super) rtt: Option<Duration>,
    pub(super) rate: Option<Rate>,
    /// The first segment not acknowledged, and the next new one.
    pub(super) una: u64,
    pub(super) next: u64,
    /// The window may grow (`tcp_may_raise_cwnd`).
    pub(super) may_grow: bool,
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
