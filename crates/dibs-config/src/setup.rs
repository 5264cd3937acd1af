//! Setting up two hosts: the line by which a host introduces itself to another, where their paths meet,
//! and the texts for the configuration file that come of it. Pure: whoever calls knows the host.

mod claims;
mod line;
mod meeting;
mod text;

use std::net::IpAddr;

use ipnet::IpNet;

pub use claims::{Claims, Ground, Left, Refusal, Taken, claims};
pub use line::{BadLine, Introduction, Way};
pub use meeting::{Meeting, Meetings, OwnPath, Unmet};
pub use text::{Addresses, NewPath, configuration, peer_section};

/// An address of this host's, and the network that is reached without a router by its interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// This host's.
    pub address: IpAddr,
    /// Network in which others answer for themselves.
    pub network: IpNet,
}

impl Attachment {
    /// True if another host with this address is in the network.
    pub fn faces(&self, other: IpAddr) -> bool {
        self.network.contains(&other) && self.address != other
    }
}

/// True if other hosts can reach somebody at this address: neither loopback nor link-local, nor of many.
pub fn is_routable(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !link_local && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}

/// Addresses that can stand for those of a host that has none of its own, one of each IP version. `is_taken` says which
/// cannot be had; one is left.
pub fn lent(is_taken: impl Fn(IpAddr) -> bool) -> [IpAddr; 2] {
    // 10.77.0.2 and fd77::2.
    let both = |net: u8, host: u8| -> [IpAddr; 2] {
        let v6 = [0xfd70 + u16::from(net % 10), 0, 0, 0, 0, 0, 0, host.into()];
        [IpAddr::from([10, net, 0, host]), IpAddr::from(v6)]
    };
    let mut all = (77..=79).flat_map(|net| (2..=254).map(move |host| both(net, host)));
    let free = all.find(|both| !both.iter().any(|address| is_taken(*address)));
    free.expect("no host is in all these networks and has hundreds of peers")
}

/// A name for a path, peer or bump that is like `wanted`, and none of those that are taken.
pub fn free_name(wanted: &str, taken: impl Fn(&str) -> bool) -> String {
    const LONGEST: usize = 32;
    let fit = |c: char| match c {
        c if c.is_ascii_alphanumeric() || "_.-".contains(c) => c,
        _ => '-',
    };
    let name: String = wanted.chars().map(fit).take(LONGEST).collect();
    let name = match name.trim_start_matches(['-', '.']) {
        "" => "host",
        name => name,
    };
    if !taken(name) {
        return name.to_owned();
    }
    let numbered = (2..).map(|number: u32| {
        let end = format!("-{number}");
        let start: String = name.chars().take(LONGEST - end.len()).collect();
        start + &end
    });
    let mut free = numbered.filter(|name| !taken(name));
    free.next().expect("numbers do not end before names do")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check;

    #[test]
    fn addresses_are_lent_that_nobody_has() {
        let net: IpNet = "10.77.0.0/16".parse().unwrap();
        let first = lent(|_| false);
        assert_eq!(first.map(|one| one.to_string()), ["10.77.0.2", "fd77::2"]);
        let second = lent(|address| first.contains(&address));
        assert_eq!(second.map(|one| one.to_string()), ["10.77.0.3", "fd77::3"]);
        let other = lent(|address| net.contains(&address));
        assert_eq!(other.map(|one| one.to_string()), ["10.78.0.2", "fd78::2"]);
    }

    #[test]
    fn names_are_made_fit_and_unique() {
        let free = |wanted: &str, taken: &[&str]| free_name(wanted, |name| taken.contains(&name));
        assert_eq!(free("server", &[]), "server");
        assert_eq!(free("server", &["server"]), "server-2");
        assert_eq!(free("server", &["server", "server-2"]), "server-3");
        assert_eq!(free("eth0:1", &[]), "eth0-1");
        assert_eq!(free("-..x", &[]), "x");
        assert_eq!(free("", &[]), "host");
        let long = "l".repeat(64);
        let first = free(&long, &[]);
        let second = free(&long, &[&first]);
        assert_ne!(first, second);
        for name in [
            first,
            second,
            free("a b\"\n", &[]),
            free("\u{e9}t\u{e9}", &[]),
        ] {
            assert_eq!(check::name(&name).unwrap(), name);
        }
    }
}
