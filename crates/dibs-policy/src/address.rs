//! Families, prefixes and names that go into commands: checked once, here.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// IPv4 or IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both, IPv4 first.
    pub const BOTH: [Family; 2] = [Family::V4, Family::V6];

    /// The family of `address`.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() {
            Family::V4
        } else {
            Family::V6
        }
    }

    /// The prefix that holds every address.
    pub fn any(self) -> Prefix {
        let address = match self {
            Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        Prefix { address, length: 0 }
    }

    fn bits(self) -> u8 {
        match self {
            Family::V4 => 32,
            Family::V6 => 128,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::V4 => "-4",
            Family::V6 => "-6",
        })
    }
}

/// A network: an address whose host bits are zero, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Prefix {
    address: IpAddr,
    length: u8,
}

/// Text or numbers that make no prefix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not an address or a prefix")]
pub struct BadPrefix(pub String);

impl Prefix {
    /// The network of `length` bits that `address` is in.
    pub fn new(address: IpAddr, length: u8) -> Result<Self, BadPrefix> {
        if length > Family::of(address).bits() {
            return Err(BadPrefix(format!("{address}/{length}")));
        }
        let address = match address {
            IpAddr::V4(a) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
                IpAddr::V4((u32::from(a) & mask).into())
            }
            IpAddr::V6(a) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0);
                IpAddr::V6((u128::from(a) & mask).into())
            }
        };
        Ok(Self { address, length })
    }

    /// The prefix that holds only `address`.
    pub fn host(address: IpAddr) -> Self {
        Self {
            address,
            length: Family::of(address).bits(),
        }
    }

    /// The network's address.
    pub fn address(self) -> IpAddr {
        self.address
    }

    /// The network's length in bits.
    pub fn length(self) -> u8 {
        self.length
    }

    /// IPv4 or IPv6.
    pub fn family(self) -> Family {
        Family::of(self.address)
    }

    /// True if every address of `other` is in this network.
    pub fn contains(self, other: Prefix) -> bool {
        self.length <= other.length
            && Prefix::new(other.address, self.length).is_ok_and(|cut| cut == self)
    }

    /// What this network and another have in common: the narrower, where one holds the other.
    pub(crate) fn common(self, other: Prefix) -> Option<Prefix> {
        match (self.contains(other), other.contains(self)) {
            (true, _) => Some(other),
            (_, true) => Some(self),
            _ => None,
        }
    }

    /// True if `address` is in this network.
    pub fn holds(self, address: IpAddr) -> bool {
        self.contains(Prefix::host(address))
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl FromStr for Prefix {
    type Err = BadPrefix;

    fn from_str(text: &str) -> Result<Self, BadPrefix> {
        let bad = || BadPrefix(text.to_owned());
        match text.split_once('/') {
            Some((address, length)) => Prefix::new(
                address.parse().map_err(|_| bad())?,
                length.parse().map_err(|_| bad())?,
            ),
            None => Ok(Prefix::host(text.parse().map_err(|_| bad())?)),
        }
    }
}

impl TryFrom<String> for Prefix {
    type Error = BadPrefix;

    fn try_from(text: String) -> Result<Self, BadPrefix> {
        text.parse()
    }
}

impl From<Prefix> for String {
    fn from(prefix: Prefix) -> Self {
        prefix.to_string()
    }
}

/// The name of a network device, safe as a word of a command and as part of a path under /proc/sys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceName(String);

impl TryFrom<String> for DeviceName {
    type Error = BadDeviceName;

    fn try_from(name: String) -> Result<Self, BadDeviceName> {
        Self::new(&name)
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.0
    }
}

/// A device name that dibs does not pass on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a usable device name: 1 to 15 letters, digits, '.', '_', '-', '@'")]
pub struct BadDeviceName(pub String);

impl DeviceName {
    /// Checks `name`. Stricter than the kernel: iptables reads a trailing `+` as a wildcard, and
    /// white space, quotes and control characters end a word (docs/threat-model.md, "Keys and the host").
    pub fn new(name: &str) -> Result<Self, BadDeviceName> {
        let usable = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '@');
        let ok = (1..=15).contains(&name.len())
            && name.chars().all(usable)
            && name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && !matches!(name, "all" | "default" | "lo");
        if ok {
            Ok(Self(name.to_owned()))
        } else {
            Err(BadDeviceName(name.to_owned()))
        }
    }

    /// The device by which a host speaks to itself; nobody is given it as a device of theirs.
    pub(crate) fn loopback() -> Self {
        Self("lo".to_owned())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_lose_their_host_bits() {
        let p: Prefix = "10.1.2.3/8".parse().unwrap();
        assert_eq!(p.to_string(), "10.0.0.0/8");
        assert_eq!(
            "fd00::1".parse::<Prefix>().unwrap().to_string(),
            "fd00::1/128"
        );
        assert_eq!("1.2.3.4/0".parse::<Prefix>().unwrap(), Family::V4.any());
        assert_eq!("ffff::/0".parse::<Prefix>().unwrap(), Family::V6.any());
        assert!(p.holds("10.255.0.1".parse().unwrap()));
        assert!(!p.holds("11.0.0.1".parse().unwrap()));
        assert!(!p.holds("fd00::1".parse().unwrap()));
        assert!(!Prefix::host("10.0.0.0".parse().unwrap()).contains(p));
    }

    #[test]
    fn bad_prefixes_are_refused() {
        for text in [
            "",
            "10.0.0.1/33",
            "fd00::/129",
            "10.0.0.0/-1",
            "10.0.0.0/8 ",
            "host",
        ] {
            assert_eq!(text.parse::<Prefix>(), Err(BadPrefix(text.to_owned())));
        }
    }

    #[test]
    fn names_that_could_be_more_than_a_word_are_refused() {
        for name in ["dibs1", "tun9", "eth0.100", "wg_home", "a-b@c"] {
            assert_eq!(DeviceName::new(name).unwrap().as_str(), name);
        }
        for name in [
            "",
            "a b",
            "a\n-j ACCEPT",
            "x\"y",
            "eth+",
            "!eth0",
            "-j",
            "a/b",
            "..",
            "lo",
            "all",
            "é0",
            "0123456789abcdef",
        ] {
            assert_eq!(DeviceName::new(name), Err(BadDeviceName(name.to_owned())));
        }
    }
}
