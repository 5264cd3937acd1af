//! Where the paths of this host meet those of another.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use super::{Attachment, Introduction, Way};
use crate::Trust;

/// A path of this host that gets to one of the other's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting<'a> {
    /// The path's name here.
    pub path: String,
    /// Its label here.
    pub trust: Trust,
    /// The path there.
    pub way: &'a Way,
    /// Where the other host listens.
    pub endpoint: SocketAddr,
}

/// Finds for each path of this host, by name, label and what its interface is attached to, an address of the
/// other's to call. An address in the same network comes first. Else it is one of a path with the same label that
/// nothing here faces, and that `routed` says is reached by the path of that index; private addresses are taken to
/// be reached only from private ones.
pub fn meetings<'a>(
    own: &[(String, Trust, Vec<Attachment>)],
    other: &'a Introduction,
    mut routed: impl FnMut(usize, SocketAddr) -> bool,
) -> Vec<Meeting<'a>> {
    let mine: BTreeSet<IpAddr> = { own.iter() }
        .flat_map(|(_, _, attachments)| attachments)
        .map(|attachment| attachment.address)
        .collect();
    let theirs = |way: &'a Way| {
        let foreign = way
            .addresses
            .iter()
            .filter(|address| !mine.contains(address));
        foreign.map(move |address| (way, SocketAddr::new(*address, other.port)))
    };
    let faced = |attachments: &[Attachment], endpoint: SocketAddr| {
        attachments.iter().any(|at| at.faces(endpoint.ip()))
    };
    let is_faced = |way: &Way| {
        let mut addresses = way.addresses.iter();
        addresses.any(|address| {
            let endpoint = SocketAddr::new(*address, other.port);
            own.iter().any(|(_, _, at)| faced(at, endpoint))
        })
    };
    let mut found = Vec::new();
    for (index, (path, trust, attachments)) in own.iter().enumerate() {
        let in_network = other
            .ways
            .iter()
            .flat_map(theirs)
            .find(|(_, endpoint)| faced(attachments, *endpoint));
        let by_router = || {
            let ways = other.ways.iter();
            let alike = ways.filter(|way| way.trust == *trust && !is_faced(way));
            let mut endpoints = alike.flat_map(theirs).filter(|(_, endpoint)| {
                let from = |at: &Attachment| {
                    at.address.is_ipv4() == endpoint.is_ipv4()
                        && (is_private(at.address) || !is_private(endpoint.ip()))
                };
                attachments.iter().any(from)
            });
            endpoints.find(|(_, endpoint)| routed(index, *endpoint))
        };
        found.extend(
            in_network
                .or_else(by_router)
                .map(|(way, endpoint)| Meeting {
                    path: path.clone(),
                    trust: *trust,
                    way,
                    endpoint,
                }),
        );
    }
    found
}

/// The addresses of the other host that connections take to it: all of the paths that are met, or else of its
/// trusted ones, but for those that this host has too.
pub fn met_addresses(
    met: &[Meeting<'_>],
    other: &Introduction,
    is_own: impl Fn(IpAddr) -> bool,
) -> Vec<IpAddr> {
    let ways: Vec<&Way> = match met {
        [] => { other.ways.iter() }
            .filter(|way| way.trust == Trust::Trusted)
            .collect(),
        _ => met.iter().map(|meeting| meeting.way).collect(),
    };
    let mut addresses = Vec::new();
    for address in ways.iter().flat_map(|way| &way.addresses) {
        if !is_own(*address) && !addresses.contains(address) {
            addresses.push(*address);
        }
    }
    addresses
}

/// Whether it is only unique within a site.
fn is_private(address: IpAddr) -> bool {
    match address {
        // 100.64.0.0/10 is what carriers put between them and their customers (RFC 6598).
        IpAddr::V4(a) => a.is_private() || a.octets()[0] == 100 && a.octets()[1] & 0xc0 == 64,
        IpAddr::V6(a) => a.is_unique_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PrivateKey;

    fn attached(nets: &[&str]) -> Vec<Attachment> {
        let nets = nets.iter().map(|net| net.parse::<ipnet::IpNet>().unwrap());
        nets.map(|net| Attachment {
            address: net.addr(),
            network: net.trunc(),
        })
        .collect()
    }

    fn path(name: &str, trust: Trust, nets: &[&str]) -> (String, Trust, Vec<Attachment>) {
        (name.to_owned(), trust, attached(nets))
    }

    fn host(ways: &[(&str, Trust, &[&str])]) -> Introduction {
        let way = |(name, trust, addresses): &(&str, Trust, &[&str])| Way {
            name: (*name).to_owned(),
            trust: *trust,
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        };
        Introduction {
            name: "b".to_owned(),
            public_key: PrivateKey::generate().public(),
            port: 5300,
            ways: ways.iter().map(way).collect(),
        }
    }

    fn endpoints(met: &[Meeting<'_>]) -> Vec<(String, String)> {
        let endpoint = |met: &Meeting<'_>| (met.path.clone(), met.endpoint.to_string());
        met.iter().map(endpoint).collect()
    }

    use Trust::{Trusted, Untrusted};

    #[test]
    fn paths_meet_in_their_networks_whatever_they_are_called() {
        let own = [
            path("eth0", Trusted, &["10.0.1.1/24", "fd00:1::1/64"]),
            path("wlan0", Untrusted, &["10.0.2.1/24"]),
            path("wwan0", Untrusted, &["100.64.3.4/30"]),
        ];
        let other = host(&[
            ("wlp2s0", Untrusted, &["10.0.2.2"]),
            ("enp1s0", Trusted, &["10.0.1.2", "fd00:1::2", "192.168.5.5"]),
        ]);
        let met = meetings(&own, &other, |_, _| false);
        let expected = [("eth0", "10.0.1.2:5300"), ("wlan0", "10.0.2.2:5300")];
        let expected = expected.map(|(path, to)| (path.to_owned(), to.to_owned()));
        assert_eq!(endpoints(&met), expected);
        let addresses = met_addresses(&met, &other, |a| a == IpAddr::from([192, 168, 5, 5]));
        let addresses: Vec<_> = addresses.iter().map(IpAddr::to_string).collect();
        assert_eq!(addresses, ["10.0.1.2", "fd00:1::2", "10.0.2.2"]);
    }

    #[test]
    fn routers_are_tried_between_paths_of_one_label() {
        let own = [
            path("eth0", Trusted, &["10.1.0.5/24"]),
            path("wan0", Untrusted, &["203.0.113.9/24"]),
        ];
        let other = host(&[
            ("eth0", Trusted, &["10.2.0.7"]),
            ("home0", Untrusted, &["192.168.1.5"]),
            ("wan0", Untrusted, &["2001:db8::7", "198.51.100.7"]),
        ]);
        let mut asked = Vec::new();
        let met = meetings(&own, &other, |index, endpoint| {
            asked.push((index, endpoint.to_string()));
            true
        });
        let expected = [("eth0", "10.2.0.7:5300"), ("wan0", "198.51.100.7:5300")];
        let expected = expected.map(|(path, to)| (path.to_owned(), to.to_owned()));
        assert_eq!(endpoints(&met), expected);
        // A private address is not looked for in the internet, nor IPv6 from where there is none.
        assert_eq!(asked.len(), 2, "{asked:?}");
    }

    #[test]
    fn an_address_of_both_hosts_is_nobodys_endpoint() {
        let own = [
            path("eth0", Trusted, &["10.0.1.1/24"]),
            path("virbr0", Untrusted, &["192.168.122.1/24"]),
        ];
        let other = host(&[
            ("virbr0", Untrusted, &["192.168.122.1"]),
            ("eth0", Trusted, &["10.0.1.2"]),
        ]);
        let met = meetings(&own, &other, |_, _| true);
        assert_eq!(met.len(), 1, "{met:?}");
        assert_eq!(met[0].path, "eth0");
    }

    #[test]
    fn a_host_that_only_calls_is_known_by_its_trusted_addresses() {
        let other = host(&[
            ("wg0", Trusted, &["10.8.0.2"]),
            ("eth0", Untrusted, &["192.168.1.5"]),
        ]);
        let addresses = met_addresses(&[], &other, |_| false);
        assert_eq!(addresses, [IpAddr::from([10, 8, 0, 2])]);
    }
}
