//! What an acknowledgement means to a congestion controller, and the window that it sets.

use std::time::Duration;

use dibs_core::Time;

/// Segments that a sender begins with (RFC 6928).
pub(super) const INITIAL_WINDOW: u64 = 10;
/// `ssthresh` as long as there is none.
pub(super) const NO_THRESHOLD: u64 = u64::MAX >> 1;

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

/// What an acknowledgement means to a controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) now: Time,
    pub(super) state: State,
    /// Segments newly delivered.
    pub(super) delivered: u64,
    pub(super) rtt: Option<Duration>,
    /// The first segment not acknowledged, and the next new one.
    pub(super) una: u64,
    pub(super) next: u64,
    /// The window may grow (`tcp_may_raise_cwnd`).
    pub(super) may_grow: bool,
}
