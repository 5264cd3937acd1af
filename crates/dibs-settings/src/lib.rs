//! What users say of paths, peers and rules: data alone, which the configuration file names and the node keeps to.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU8;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

mod match_expr;
mod reach;
mod term;
mod wrong;

pub use match_expr::MatchExpr;
pub use reach::{Nearest, left_out};
pub use term::{
    DaySpan, Form, PortRange, Selection, Shows, Term, interface, interfaces, is_like, port_range,
    steered_prefix,
};
pub use wrong::{Wrong, meant, no_such_word};

/// A bump's number in marks and in what daemons say to each other: 1 to 14. 0 is plain, 15 the daemon's own sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BumpId(NonZeroU8);

impl BumpId {
    /// The number of `scramble`.
    pub const SCRAMBLE: Self = Self(NonZeroU8::new(1).expect("a number"));
    /// The number of `share`.
    pub const SHARE: Self = Self(NonZeroU8::new(2).expect("a number"));
    /// The number of `seal`.
    pub const SEAL: Self = Self(NonZeroU8::new(3).expect("a number"));

    /// The id `id`, if it is one a bump may have.
    pub const fn new(id: u8) -> Option<Self> {
        match NonZeroU8::new(id) {
            Some(number) if id <= 14 => Some(Self(number)),
            _ => None,
        }
    }

    /// All of them, from the lowest.
    pub fn all() -> impl Iterator<Item = Self> {
        (1..=14).filter_map(Self::new)
    }

    /// The number.
    pub const fn get(self) -> u8 {
        self.0.get()
    }

    /// The name of its TUN: what comes by the bump comes out of this device.
    pub fn tun_name(self) -> String {
        format!("dibs{self}")
    }

    /// True if a device is a bump's TUN, by its name.
    pub fn is_tun(name: &str) -> bool {
        Self::all().any(|id| id.tun_name() == name)
    }
}

impl fmt::Display for BumpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How new data is shared out over the paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheduler {
    /// Earliest predicted delivery within the windows; a slower path where the sender has enough under way for it.
    #[default]
    Balanced,
    /// The lowest smoothed round trip that has room, as MPTCP's default of old.
    LowestRtt,
    /// In turn, those that have room.
    RoundRobin,
    /// Each chunk by every path that its placement allows; the first copy counts.
    Redundant,
    /// The fastest path, or another one if what that takes meanwhile leaves the sender's window free for it
    /// (Ferlin et al. 2016).
    Blest,
}

/// Names of each value, in the configuration and for users.
macro_rules! names {
    ($($type:ident[$count:literal] { $($value:ident: $name:literal),* })*) => {$(
        impl $type {
            /// All of them.
            pub const ALL: [Self; $count] = [$(Self::$value),*];

            /// As the configuration names it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name),*
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = UnknownName;

            fn from_str(name: &str) -> Result<Self, UnknownName> {
                let mut all = Self::ALL.into_iter();
                all.find(|one| one.name() == name).ok_or(UnknownName)
            }
        }
    )*};
}

names! {
    Scheduler[5] {
        Balanced: "balanced", LowestRtt: "lowest-rtt", RoundRobin: "round-robin", Redundant: "redundant", Blest: "blest"
    }
    Handshake[3] { Trusted: "trusted", Chained: "chained", Any: "any" }
    Role[4] { Primary: "primary", Secondary: "secondary", Backup: "backup", Never: "never" }
}

/// The paths by which keys may be agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Handshake {
    /// Paths that both ends call trusted.
    Trusted,
    /// Any, if a secret of an earlier handshake or a preshared key is in it; without those trusted ones.
    Chained,
    /// Any.
    Any,
}

/// Role of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Data.
    #[default]
    Primary,
    /// Data that the primary paths have no room for.
    Secondary,
    /// Data while no primary or secondary path may carry it.
    Backup,
    /// Nothing: as if its interface were down.
    Never,
}

/// Trust in a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Trust {
    /// Nobody listens.
    Trusted,
    /// Somebody may be listening.
    Untrusted,
}

impl Trust {
    /// Word of it in the file.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Trusted => "trusted",
            Self::Untrusted => "untrusted",
        }
    }
}

/// Integrity of data that is not encrypted (docs/protocol.md, 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Integrity {
    /// Every datagram is authenticated.
    On = 0,
    /// Bare data datagrams are allowed, the papers' scheme.
    Off = 1,
}

/// Origin of a session's keys, beside the static keys of both ends; the strongest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyOrigin {
    /// Their handshake went by a path that both ends call trusted.
    Trusted,
    /// A secret of an earlier handshake is in them. Keys of the first kind may have one too.
    Chained,
    /// The preshared key is in them.
    Preshared,
    /// None of these.
    Untrusted,
}

/// Fate of steered packets that cannot leave by their bump's device, as while the daemon is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fail {
    /// Packets are dropped.
    Closed,
    /// Packets leave in plain by the ordinary route.
    Open,
}

/// Name in the place of a bump, for rules whose connections leave directly.
pub const DIRECT: &str = "direct";

/// How firmly a rule holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    /// By this bump only, both ways, whatever else is chosen.
    Require,
    /// By this bump, waiting where its peer has no session, unless a connection's user chose otherwise.
    #[default]
    Usual,
    /// By this bump once there is a session; what begins without one is plain until then.
    Prefer,
}

impl Level {
    /// As the file names it; nothing for the usual one.
    pub fn key(self) -> Option<&'static str> {
        match self {
            Self::Require => Some("require"),
            Self::Usual => None,
            Self::Prefer => Some("prefer"),
        }
    }
}

/// Nothing has such a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nothing has such a name")]
pub struct UnknownName;

/// The user's hint (Liyanage et al. 2021): new data by this path as long as it is usable. It is soft: trust, roles
/// and paths that do not answer stand above it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hint {
    /// The local path.
    pub path: usize,
    /// Probes of it, when it stops answering, whose interval does not grow.
    pub weight: u32,
    /// Limit of its smoothed round trip, as a multiple of the least one of all paths, up to which it is usable.
    pub delta: f64,
}

impl Hint {
    /// [`weight`](Self::weight) where nothing is said.
    pub const WEIGHT: u32 = 100;
    /// [`delta`](Self::delta) where nothing is said.
    pub const DELTA: f64 = 2.0;
}

/// Addresses of this host, or behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Those of the paths' interfaces, and of networks that the host forwards for.
    Paths,
    /// All.
    Any,
    /// This one.
    Address(IpAddr),
}

/// Opening: addresses and ports to which a peer may begin connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The addresses.
    pub place: Place,
    /// The lowest port.
    pub first: u16,
    /// The highest port.
    pub last: u16,
}

impl Opening {
    /// Opening of a peer of which nothing is said.
    pub const PATHS: Self = Self::all(Place::Paths);
    /// Everything.
    pub const ANY: Self = Self::all(Place::Any);

    const fn all(place: Place) -> Self {
        Self {
            place,
            first: 0,
            last: u16::MAX,
        }
    }

    /// True if it is one for a connection to there, where some addresses are reachable.
    pub fn admits(
        &self,
        is_reachable: impl Fn(IpAddr) -> bool,
        (addr, port): (IpAddr, u16),
    ) -> bool {
        let there = match self.place {
            Place::Paths => is_reachable(addr),
            Place::Any => true,
            Place::Address(only) => only == addr,
        };
        there && (self.first..=self.last).contains(&port)
    }
}

/// As the configuration has it.
impl fmt::Display for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            _ if *self == Self::PATHS => return f.write_str("paths"),
            Place::Any => return f.write_str("any"),
            Place::Paths => write!(f, "{}", self.first)?,
            Place::Address(addr) => write!(f, "{}", SocketAddr::new(addr, self.first))?,
        }
        match self.first == self.last {
            true => Ok(()),
            false => write!(f, "-{}", self.last),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_and_the_daemons_own_mark_are_no_bumps() {
        for id in [0, 15, u8::MAX] {
            assert_eq!(BumpId::new(id), None);
        }
        assert_eq!(BumpId::new(14).map(BumpId::get), Some(14));
        assert_eq!(size_of::<Option<BumpId>>(), 1);
    }
}
