//! What a peer may open here (docs/threat-model.md, "The peer").

use core::fmt;
use std::net::{IpAddr, SocketAddr};

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

/// Where a peer may begin connections to.
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
    /// What a peer may open if nothing is said of it.
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

    /// Whether it is one for a connection to there, where some addresses are reachable.
    pub(super) fn admits(
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
