//! The one clock of the data path.

use nix::time::{ClockId, clock_gettime};

/// CLOCK_BOOTTIME in nanoseconds. It counts the time that the host is suspended: keys grow old
/// meanwhile, and the peer goes on.
///
/// # Panics
/// Never on Linux, where this clock always exists.
pub fn boottime_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("CLOCK_BOOTTIME exists on Linux");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

#[cfg(test)]
mod tests {
    use super::boottime_ns;
    use std::time::{Duration, Instant};

    #[test]
    fn agrees_with_instant() {
        let outer = Instant::now();
        let from = boottime_ns();
        let inner = Instant::now();
        while inner.elapsed() < Duration::from_millis(2) {}
        let least = inner.elapsed();
        let measured = Duration::from_nanos(boottime_ns() - from);
        assert!(
            (least..=outer.elapsed()).contains(&measured),
            "{measured:?}"
        );
    }
}
