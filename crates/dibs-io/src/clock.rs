//! The one clock of the data path.

use nix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC in nanoseconds. Does not count suspended time.
///
/// # Panics
/// Never on Linux, where this clock always exists.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("CLOCK_MONOTONIC exists on Linux");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

#[cfg(test)]
mod tests {
    use super::monotonic_ns;
    use std::time::{Duration, Instant};

    #[test]
    fn agrees_with_instant() {
        let outer = Instant::now();
        let from = monotonic_ns();
        let inner = Instant::now();
        while inner.elapsed() < Duration::from_millis(2) {}
        let least = inner.elapsed();
        let measured = Duration::from_nanos(monotonic_ns() - from);
        assert!(
            (least..=outer.elapsed()).contains(&measured),
            "{measured:?}"
        );
    }
}
