//! The one clock of the data path; and the local time, by which people make rules.

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

/// The time of day on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTime {
    /// Seconds after midnight by local time, below 86,400.
    pub second_of_day: u32,
    /// Nanoseconds beyond.
    pub nanos: u32,
    /// Time that local time is ahead of UTC, in seconds.
    pub utc_offset: i32,
}

#[allow(unsafe_code)]
unsafe extern "C" {
    /// Reads TZ and the host's time zone again (POSIX); the libc crate has no binding.
    fn tzset();
}

/// The time of day now, in the host's time zone as it is now.
///
/// # Panics
/// Never: the years of clocks fit.
pub fn local_time() -> LocalTime {
    let now = clock_gettime(ClockId::CLOCK_REALTIME).expect("CLOCK_REALTIME exists");
    let seconds: libc::time_t = now.tv_sec();
    let offset = utc_offset(seconds);
    let of_day = (seconds + i64::from(offset)).rem_euclid(86_400);
    LocalTime {
        second_of_day: u32::try_from(of_day).expect("a day has few seconds"),
        nanos: u32::try_from(now.tv_nsec()).expect("less than a second"),
        utc_offset: offset,
    }
}

/// What local time is ahead of UTC at a time, in seconds.
#[allow(unsafe_code)]
fn utc_offset(at: libc::time_t) -> i32 {
    // SAFETY: all of `tm` may be zero: numbers and a pointer.
    let mut broken: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: nobody changes the environment, which tzset reads; both arguments are ours.
    let done = unsafe {
        tzset();
        libc::localtime_r(&at, &mut broken)
    };
    assert!(!done.is_null(), "the year fits");
    i32::try_from(broken.tm_gmtoff).expect("a zone is less than a day off")
}

/// True if something keeps the clock of this host right, such as a time service.
#[allow(unsafe_code)]
pub fn is_clock_synchronized() -> bool {
    // SAFETY: all of `timex` may be zero: numbers alone. Without a mode nothing is changed.
    let mut state: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the argument is ours.
    let answer = unsafe { libc::adjtimex(&mut state) };
    answer >= 0 && state.status & libc::STA_UNSYNC == 0
}

#[cfg(test)]
mod tests {
    use super::{boottime_ns, local_time};
    use std::time::{Duration, Instant};

    #[test]
    fn the_time_of_day_is_utc_and_the_zone() {
        let unix = || {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since.unwrap().as_secs() as i64
        };
        let before = unix();
        let local = local_time();
        let after = unix();
        let utc = i64::from(local.second_of_day) - i64::from(local.utc_offset);
        let fits = |at: i64| (at - utc).rem_euclid(86_400) == 0;
        assert!((before..=after).any(fits), "{local:?} at {before}");
    }

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
