//! Whose hosts a peer speaks for, and where it may begin connections to.

use std::net::{IpAddr, Ipv4Addr};

use super::Shared;
use super::accept::Opening;
use crate::prefix::Prefix;

/// See the module.
pub(super) struct Hosts {
    prefixes: Vec<Prefix>,
    /// Those of the other peers: what a longer one of these holds is not this peer's.
    foreign: Vec<Prefix>,
    accept: Vec<Opening>,
}

impl Hosts {
    pub(super) const fn new(prefixes: Vec<Prefix>, accept: Vec<Opening>) -> Self {
        Self {
            prefixes,
            foreign: Vec::new(),
            accept,
        }
    }

    pub(super) fn prefixes(&self) -> &[Prefix] {
        &self.prefixes
    }

    #[cfg(test)]
    pub(super) fn set_prefixes(&mut self, prefixes: Vec<Prefix>) {
        self.prefixes = prefixes;
    }

    pub(super) fn set_foreign(&mut self, prefixes: Vec<Prefix>) {
        self.foreign = prefixes;
    }

    /// Length of the longest prefix of this peer that `addr` lies in.
    pub(super) fn matches(&self, addr: IpAddr) -> Option<u8> {
        let matching = self.prefixes.iter().filter(|p| p.contains(addr));
        matching.map(Prefix::len).max()
    }

    /// Whether an inner address is one of this peer's hosts: by the longest prefix of all peers, so
    /// that none speaks for another (docs/threat-model.md, "The peer").
    pub(super) fn owns(&self, addr: IpAddr) -> bool {
        let Some(len) = self.matches(addr) else {
            return false;
        };
        let longer = |p: &Prefix| p.len() > len && p.contains(addr);
        !self.foreign.iter().any(longer)
    }

    /// Whether an inner source is one of this peer's hosts, whatever wide prefix it has.
    pub(super) fn speaks_for(&self, shared: &Shared, addr: IpAddr) -> bool {
        is_unicast(addr) && !shared.is_ours(addr) && self.owns(addr)
    }

    /// Whether the peer may begin a connection to there.
    pub(super) fn may_open(&self, shared: &Shared, to: (IpAddr, u16)) -> bool {
        let mut openings = self.accept.iter();
        openings.any(|opening| opening.admits(shared, to))
    }
}

/// Whether an address can be a single host's in a network.
pub(super) fn is_unicast(addr: IpAddr) -> bool {
    let broadcast = addr == IpAddr::V4(Ipv4Addr::BROADCAST);
    !(addr.is_loopback() || addr.is_multicast() || addr.is_unspecified() || broadcast)
}
