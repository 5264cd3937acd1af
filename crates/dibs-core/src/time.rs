//! Time as the core sees it: an argument, never a clock.

use core::fmt;
use core::num::NonZeroU64;
use core::ops::{Add, AddAssign, Sub};
use core::time::Duration;

/// A point in time, in nanoseconds since an origin that only the caller knows.
///
/// The daemon passes the monotonic clock, the simulator its virtual clock.
// One more than that, so that an `Option` of it is no longer: tables of connections have many.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(NonZeroU64);

impl Default for Time {
    fn default() -> Self {
        Self::ZERO
    }
}

impl Time {
    /// The origin.
    pub const ZERO: Self = Self(NonZeroU64::MIN);

    /// A point `nanos` nanoseconds after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(NonZeroU64::MIN.saturating_add(nanos))
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0.get() - 1
    }

    /// The time passed since `earlier`; zero if `earlier` lies ahead.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, rhs: Duration) -> Self {
        let nanos = u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

impl AddAssign<Duration> for Time {
    fn add_assign(&mut self, rhs: Duration) {
        *self = *self + rhs;
    }
}

impl Sub<Duration> for Time {
    type Output = Self;

    fn sub(self, rhs: Duration) -> Self {
        let nanos = u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX);
        Self::from_nanos(self.as_nanos().saturating_sub(nanos))
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6}s", self.as_nanos() as f64 / 1e9)
    }
}
