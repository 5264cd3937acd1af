//! Round-trip time: RFC 9002, 5.

use core::time::Duration;

/// What is assumed before the first sample.
pub(super) const INITIAL_RTT: Duration = Duration::from_millis(50);

/// Coarsest timer that is relied upon (RFC 9002, 6.1.2).
pub(super) const GRANULARITY: Duration = Duration::from_millis(1);

/// Smoothed round-trip time and its variance.
#[derive(Debug)]
pub(super) struct Rtt {
    latest: Duration,
    smoothed: Option<Duration>,
    variance: Duration,
    min: Duration,
}

impl Rtt {
    pub(super) const fn new() -> Self {
        Self {
            latest: INITIAL_RTT,
            smoothed: None,
            variance: Duration::from_nanos(INITIAL_RTT.as_nanos() as u64 / 2),
            min: Duration::MAX,
        }
    }

    /// Takes a sample; `ack_delay` is what the peer says to have waited before it reported.
    pub(super) fn update(&mut self, sample: Duration, ack_delay: Duration) {
        self.latest = sample;
        self.min = self.min.min(sample);
        let Some(smoothed) = self.smoothed else {
            self.smoothed = Some(sample);
            self.variance = sample / 2;
            return;
        };
        let adjusted = match sample.checked_sub(ack_delay) {
            Some(d) if d >= self.min => d,
            _ => sample,
        };
        self.variance = (self.variance * 3 + smoothed.abs_diff(adjusted)) / 4;
        self.smoothed = Some((smoothed * 7 + adjusted) / 8);
    }

    /// The latest sample, not adjusted.
    pub(super) const fn latest(&self) -> Duration {
        self.latest
    }

    pub(super) fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or(INITIAL_RTT)
    }

    pub(super) const fn variance(&self) -> Duration {
        self.variance
    }

    /// The least sample since the path exists.
    pub(super) fn min(&self) -> Duration {
        if self.smoothed.is_some() {
            self.min
        } else {
            INITIAL_RTT
        }
    }

    /// Whether there is a sample.
    pub(super) const fn is_measured(&self) -> bool {
        self.smoothed.is_some()
    }

    /// Probe timeout without backoff (RFC 9002, 6.2.1).
    pub(super) fn pto(&self, max_ack_delay: Duration) -> Duration {
        self.smoothed() + (self.variance * 4).max(GRANULARITY) + max_ack_delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn smooths_and_subtracts_the_ack_delay() {
        let mut rtt = Rtt::new();
        assert_eq!(rtt.smoothed(), INITIAL_RTT);
        rtt.update(10 * MS, 5 * MS);
        assert_eq!((rtt.smoothed(), rtt.variance()), (10 * MS, 5 * MS));
        rtt.update(20 * MS, 10 * MS);
        assert_eq!(rtt.smoothed(), 10 * MS, "20 ms of which 10 were the peer's");
        assert_eq!((rtt.latest(), rtt.min()), (20 * MS, 10 * MS));
    }

    #[test]
    fn an_ack_delay_that_would_go_below_the_minimum_is_not_believed() {
        let mut rtt = Rtt::new();
        rtt.update(10 * MS, Duration::ZERO);
        rtt.update(12 * MS, 11 * MS);
        assert!(rtt.smoothed() > 10 * MS);
    }

    #[test]
    fn the_probe_timeout_has_a_floor() {
        let mut rtt = Rtt::new();
        for _ in 0..100 {
            rtt.update(MS / 20, Duration::ZERO);
        }
        let pto = rtt.pto(MS);
        assert!(pto > 2 * MS && pto < 3 * MS, "{pto:?}");
    }
}
