//! Whether a path is alive.

use super::rtt::Rtt;
use crate::time::Time;
use core::time::Duration;

/// How a path stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    /// The peer's address has not proved to be the peer's. Nothing but challenges goes there.
    Unvalidated,
    /// In use.
    Active,
    /// Has not answered for several probe timeouts: gets no new data, is probed often.
    Suspect,
    /// Has not answered for seconds: is probed now and then.
    Down,
}

/// Probe timeouts in a row without an answer that make a path suspect, if it has also been silent
/// for [`SUSPECT_SILENCE`]: on a quick path several timeouts fit into one pause of a busy peer.
const SUSPECT_PTOS: u32 = 2;
const SUSPECT_SILENCE: Duration = Duration::from_millis(60);

/// Silence after which a suspect path is down.
const DOWN_SILENCE: Duration = Duration::from_secs(5);

/// Spacing of the probes of a suspect path: a round trip within these bounds.
const SUSPECT_PROBE: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(250)];

/// Spacing of the probes of a path that is down: this part of its silence, within these bounds. What
/// it takes to notice that the path is back stays small beside the outage, and a path that is down for
/// days costs no more than one that is idle.
const DOWN_PROBE_SHARE: u32 = 64;
const DOWN_PROBE: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(6)];

/// Doublings of the probe timeout, at most.
const MAX_BACKOFF: u32 = 6;

/// The state and its timer.
#[derive(Debug)]
pub(super) struct Liveness {
    inner: Inner,
    /// Since when an answer is waited for: the latest answer, or the first datagram after none was
    /// in flight.
    silent_since: Time,
    /// Probes at one interval once the peer does not answer, if the user has said.
    probes: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
enum Inner {
    Unvalidated,
    Active { ptos: u32, timer_from: Time },
    Suspect { probed_at: Time, probed: u32 },
    Down { probed_at: Time, probed: u32 },
}

/// What the timer calls for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alarm {
    Probe,
    /// As well as a probe: nothing in flight is expected to arrive any more.
    ProbeAndAbandon,
}

impl Liveness {
    pub(super) const fn new(now: Time) -> Self {
        Self {
            inner: Inner::Unvalidated,
            silent_since: now,
            probes: None,
        }
    }

    /// How many probes go at one interval; see [`Path::set_probes`](super::Path::set_probes).
    pub(super) const fn set_probes(&mut self, probes: Option<u32>) {
        self.probes = probes;
    }

    /// Whether a timer has fired since the peer answered last.
    pub(super) const fn is_unanswered(&self) -> bool {
        match self.inner {
            Inner::Active { ptos, .. } => ptos > 0,
            _ => true,
        }
    }

    pub(super) const fn state(&self) -> PathState {
        match self.inner {
            Inner::Unvalidated => PathState::Unvalidated,
            Inner::Active { .. } => PathState::Active,
            Inner::Suspect { .. } => PathState::Suspect,
            Inner::Down { .. } => PathState::Down,
        }
    }

    pub(super) const fn silent_since(&self) -> Time {
        self.silent_since
    }

    pub(super) const fn is_active(&self) -> bool {
        matches!(self.inner, Inner::Active { .. })
    }

    /// The peer has answered. True if the path was not active.
    pub(super) fn move_to_active(&mut self, now: Time) -> bool {
        let revived = !self.is_active();
        self.inner = Inner::Active {
            ptos: 0,
            timer_from: now,
        };
        self.silent_since = now;
        revived
    }

    /// This host slept until `now`; the peer's silence begins anew.
    pub(super) fn on_sleep(&mut self, now: Time) {
        self.silent_since = now;
        if let Inner::Active { timer_from, .. } = &mut self.inner {
            *timer_from = now;
        }
    }

    /// A datagram that asks for an answer was sent while none was in flight.
    pub(super) fn on_first_in_flight(&mut self, now: Time) {
        if let Inner::Active { timer_from, ptos } = &mut self.inner {
            *timer_from = now;
            if *ptos == 0 {
                self.silent_since = now;
            }
        }
    }

    /// When the timer fires. Unlike in RFC 9002 sending does not put it off: after an answer the
    /// next is due within a round trip as long as anything is in flight, and a path that a steady
    /// trickle is sent on must not look alive by that.
    pub(super) fn due_at(
        &self,
        rtt: &Rtt,
        max_ack_delay: Duration,
        in_flight: bool,
    ) -> Option<Time> {
        match self.inner {
            Inner::Unvalidated => None,
            Inner::Active { ptos, timer_from } => in_flight.then(|| {
                let backoff = ptos.saturating_sub(1).min(MAX_BACKOFF);
                timer_from + rtt.pto(max_ack_delay) * (1 << backoff)
            }),
            Inner::Suspect { probed_at, probed } => {
                let [least, most] = SUSPECT_PROBE;
                let usual = rtt.smoothed().clamp(least, most);
                Some(probed_at + usual.min(self.hinted(rtt, probed)))
            }
            Inner::Down { probed_at, probed } => {
                let [least, most] = DOWN_PROBE;
                let silence = probed_at.since(self.silent_since);
                let usual = (silence / DOWN_PROBE_SHARE).clamp(least, most);
                Some(probed_at + usual.min(self.hinted(rtt, probed)))
            }
        }
    }

    /// The interval before the next probe of a path that the user prefers, after so many: it doubles once, stays for
    /// as many as he said, and doubles with each again (Liyanage et al. 2021). It begins with half a round trip, as
    /// others begin with a whole one.
    fn hinted(&self, rtt: &Rtt, probed: u32) -> Duration {
        let Some(probes) = self.probes else {
            return Duration::MAX;
        };
        let [least, most] = SUSPECT_PROBE;
        let trip = rtt.smoothed().clamp(least, most);
        match probed {
            0 => trip / 2,
            _ => trip * (1 << probed.saturating_sub(probes).min(MAX_BACKOFF)),
        }
    }

    /// The timer has fired.
    pub(super) fn on_alarm(&mut self, now: Time) -> Alarm {
        let silence = now.since(self.silent_since);
        match &mut self.inner {
            Inner::Unvalidated => Alarm::Probe,
            Inner::Active { ptos, timer_from } => {
                *ptos += 1;
                *timer_from = now;
                if *ptos < SUSPECT_PTOS || silence < SUSPECT_SILENCE {
                    return Alarm::Probe;
                }
                self.inner = Inner::Suspect {
                    probed_at: now,
                    probed: 0,
                };
                Alarm::ProbeAndAbandon
            }
            Inner::Suspect { probed_at, probed } => {
                *probed_at = now;
                *probed = probed.saturating_add(1);
                if silence >= DOWN_SILENCE {
                    self.inner = Inner::Down {
                        probed_at: now,
                        probed: *probed,
                    };
                }
                Alarm::ProbeAndAbandon
            }
            Inner::Down { probed_at, probed } => {
                *probed_at = now;
                *probed = probed.saturating_add(1);
                Alarm::ProbeAndAbandon
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The times between the probes of a path of 40 ms that does not answer, for so long.
    fn intervals(probes: Option<u32>, span: Duration) -> Vec<Duration> {
        let start = Time::ZERO + Duration::from_secs(1);
        let mut rtt = Rtt::new();
        rtt.update(40 * MS, Duration::ZERO);
        let mut liveness = Liveness::new(start);
        liveness.set_probes(probes);
        liveness.move_to_active(start);
        let mut times = vec![start];
        while let Some(due) = liveness.due_at(&rtt, Duration::ZERO, true)
            && due.since(start) < span
        {
            liveness.on_alarm(due);
            if liveness.state() != PathState::Active {
                times.push(due);
            }
        }
        times.windows(2).map(|w| w[1].since(w[0])).skip(1).collect()
    }

    #[test]
    fn a_preferred_path_is_probed_as_often_as_the_user_said_before_it_is_probed_less() {
        let span = Duration::from_secs(20);
        let (usual, hinted) = (intervals(None, span), intervals(Some(200), span));
        assert_eq!(usual[..3], [40 * MS; 3]);
        assert_eq!(hinted[..3], [20 * MS, 40 * MS, 40 * MS]);
        assert!(hinted[..200].iter().all(|t| *t <= 40 * MS), "{hinted:?}");
        // In the fifth second the others are probed less.
        assert!(usual[150] > 200 * MS, "{usual:?}");
        assert_eq!(hinted[201], 80 * MS);
        assert_eq!(hinted.last(), usual.last(), "in the end no less than usual");
    }
}
