//! Families and names that go into commands: checked once, here.

use std::fmt;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
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
    pub fn any(self) -> IpNet {
        match self {
            Family::V4 => Ipv4Net::default().into(),
            Family::V6 => Ipv6Net::default().into(),
        }
    }
}

/// The part that two networks have in common: the narrower, where one holds the other.
pub(crate) fn common(a: IpNet, b: IpNet) -> Option<IpNet> {
    match (a.contains(&b), b.contains(&a)) {
        (true, _) => Some(b),
        (_, true) => Some(a),
        _ => None,
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
