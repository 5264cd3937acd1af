//! TCP sequence numbers.

use core::fmt;

/// A TCP sequence number: 32 bits, modular (RFC 9293, 3.4).
///
/// It has no `Ord`: order is only defined relative to a nearby number, by [`distance_from`].
///
/// [`distance_from`]: Self::distance_from
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SeqNumber(u32);

impl SeqNumber {
    /// The number as on the wire.
    pub const fn new(raw: u32) -> Self {
        Self(raw)
    }

    /// The number as on the wire.
    pub const fn raw(self) -> u32 {
        self.0
    }

    /// The number `bytes` further on, modulo 2^32.
    pub const fn add(self, bytes: u32) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    /// Signed distance from `earlier` to `self`, exact while the two are less than 2^31 apart.
    pub const fn distance_from(self, earlier: Self) -> i32 {
        self.0.wrapping_sub(earlier.0) as i32
    }

    /// True if `self` lies after `other`.
    pub const fn is_after(self, other: Self) -> bool {
        self.distance_from(other) > 0
    }
}

impl fmt::Debug for SeqNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::SeqNumber;

    #[test]
    fn order_holds_over_the_wrap() {
        let before = SeqNumber::new(u32::MAX - 1);
        let after = before.add(5);
        assert_eq!(after.raw(), 3);
        assert_eq!(after.distance_from(before), 5);
        assert_eq!(before.distance_from(after), -5);
        assert!(after.is_after(before));
        assert!(!before.is_after(after));
    }
}
