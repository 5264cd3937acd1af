//! Address prefixes.

use core::fmt;
use core::net::IpAddr;

/// An address prefix, such as `10.0.1.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    addr: IpAddr,
    len: u8,
}

impl Prefix {
    /// The prefix of the first `len` bits of `addr`; `None` if an address has fewer.
    pub const fn new(addr: IpAddr, len: u8) -> Option<Self> {
        let bits = if addr.is_ipv4() { 32 } else { 128 };
        if len > bits {
            None
        } else {
            Some(Self { addr, len })
        }
    }

    /// Number of bits.
    pub const fn len(&self) -> u8 {
        self.len
    }

    /// True if it has no bits: it contains every address of its family.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if `addr` lies in it.
    pub fn contains(&self, addr: IpAddr) -> bool {
        match (self.addr, addr) {
            (IpAddr::V4(p), IpAddr::V4(a)) => {
                let shift = 32 - u32::from(self.len);
                p.to_bits().checked_shr(shift) == a.to_bits().checked_shr(shift)
            }
            (IpAddr::V6(p), IpAddr::V6(a)) => {
                let shift = 128 - u32::from(self.len);
                p.to_bits().checked_shr(shift) == a.to_bits().checked_shr(shift)
            }
            _ => false,
        }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::Prefix;

    #[test]
    fn contains_what_shares_its_bits() {
        let p = |a: &str, len| Prefix::new(a.parse().unwrap(), len).unwrap();
        let has = |p: Prefix, a: &str| p.contains(a.parse().unwrap());
        assert!(has(p("10.0.1.0", 24), "10.0.1.255"));
        assert!(!has(p("10.0.1.0", 24), "10.0.2.0"));
        assert!(has(p("0.0.0.0", 0), "255.1.2.3"));
        assert!(has(p("fd00::1", 128), "fd00::1"));
        assert!(!has(p("fd00::1", 128), "fd00::2"));
        assert!(!has(p("::", 0), "10.0.0.1"));
        assert_eq!(Prefix::new("10.0.0.1".parse().unwrap(), 33), None);
    }
}
