//! Where the paths of this host meet those of another.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use super::{Attachment, Introduction, Way};
use crate::Trust;

/// A path of this host.
#[derive(Clone, Debug)]
pub struct OwnPath {
    /// Name in the configuration.
    pub name: String,
    /// Its label here.
    pub trust: Trust,
    /// Networks of its interface.
    pub attachments: Vec<Attachment>,
}

impl OwnPath {
    /// True if an address is in a network of this path, and another host's.
    pub(crate) fn faces(&self, other: IpAddr) -> bool {
        self.attachments.iter().any(|at| at.faces(other))
    }
}

/// A path of this host that gets to one of the other's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting<'a> {
    /// The path's name here.
    pub path: String,
    /// Its label here.
    pub trust: Trust,
    /// The path there.
    pub way: &'a Way,
    /// Address at which the other host listens.
    pub endpoint: SocketAddr,
}

/// Reason for a path of this host to get no endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unmet<'a> {
    /// No address of its interface.
    NoAddress,
    /// Another label of the path of the other host that it gets to, at this endpoint.
    Labels(&'a Way, SocketAddr),
    /// No path of the other host that it gets to.
    Unreached,
}

/// Paths of this host beside those of another.
pub struct Meetings<'a, R> {
    /// Paths here.
    pub own: &'a [OwnPath],
    /// Networks of interfaces that are no path.
    pub elsewhere: &'a [Attachment],
    /// The other host, as its line says.
    pub other: &'a Introduction,
    /// Answer whether the path of that index reaches an endpoint over a router.
    pub routed: R,
}

impl<'a, R: Fn(usize, SocketAddr) -> bool> Meetings<'a, R> {
    /// Finds for each path an address of the other's to call. An address in the same network comes first. Else it is one
    /// of a path with the same label that nothing here faces, and that is reached over a router. Private addresses are
    /// taken to be reached only from private ones of trusted paths, because others lead to the internet.
    pub fn met(&self) -> Vec<Meeting<'a>> {
        let own = self.own.iter().enumerate();
        let met = own.filter_map(|(index, path)| {
            let (way, endpoint) = self
                .in_network(path)
                .or_else(|| self.by_router(index, |way| way.trust == path.trust))?;
            Some(Meeting {
                path: path.name.clone(),
                trust: path.trust,
                way,
                endpoint,
            })
        });
        met.collect()
    }

    /// Paths that get to none of the other's, and why.
    pub fn unmet(&self, met: &[Meeting<'a>]) -> Vec<(&'a OwnPath, Unmet<'a>)> {
        let own = self.own.iter().enumerate();
        let unmet = own.filter(|(_, path)| !met.iter().any(|met| met.path == path.name));
        let why = |(index, path): (usize, &'a OwnPath)| {
            let why = match self.by_router(index, |way| way.trust != path.trust) {
                _ if path.attachments.is_empty() => Unmet::NoAddress,
                Some((way, endpoint)) => Unmet::Labels(way, endpoint),
                None => Unmet::Unreached,
            };
            (path, why)
        };
        unmet.map(why).collect()
    }

    /// Addresses of a path of the other's that are not this host's as well.
    fn endpoints(&self, way: &'a Way) -> impl Iterator<Item = (&'a Way, SocketAddr)> {
        let mine: BTreeSet<IpAddr> = { self.own.iter() }
            .flat_map(|path| &path.attachments)
            .map(|attachment| attachment.address)
            .collect();
        let foreign = { way.addresses.iter() }.filter(move |address| !mine.contains(address));
        let port = self.other.port;
        foreign.map(move |address| (way, SocketAddr::new(*address, port)))
    }

    fn in_network(&self, path: &OwnPath) -> Option<(&'a Way, SocketAddr)> {
        let ways = self.other.ways.iter();
        let mut endpoints = ways.flat_map(|way| self.endpoints(way));
        endpoints.find(|(_, endpoint)| path.faces(endpoint.ip()))
    }

    fn by_router(
        &self,
        index: usize,
        fits: impl Fn(&Way) -> bool,
    ) -> Option<(&'a Way, SocketAddr)> {
        let ways = { self.other.ways.iter() }.filter(|way| fits(way) && !self.is_faced(way));
        let OwnPath {
            attachments, trust, ..
        } = &self.own[index];
        let from = |at: &Attachment, to: IpAddr| {
            let within = *trust == Trust::Trusted && is_private(at.address);
            at.address.is_ipv4() == to.is_ipv4() && (within || !is_private(to))
        };
        let mut endpoints = ways.flat_map(|way| self.endpoints(way)).filter(|(_, to)| {
            !self.elsewhere.iter().any(|at| at.faces(to.ip()))
                && attachments.iter().any(|at| from(at, to.ip()))
        });
        endpoints.find(|(_, endpoint)| (self.routed)(index, *endpoint))
    }

    /// True if a path of this host is in a network with this one of the other host.
    fn is_faced(&self, way: &Way) -> bool {
        let mut addresses = way.addresses.iter();
        addresses.any(|address| self.own.iter().any(|path| path.faces(*address)))
    }
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
pub(super) mod tests {
    use super::*;
    use crate::PrivateKey;
    use crate::setup::{Claims, claims};

    pub(in crate::setup) fn attached(nets: &[&str]) -> Vec<Attachment> {
        let nets = nets.iter().map(|net| net.parse::<ipnet::IpNet>().unwrap());
        nets.map(|net| Attachment {
            address: net.addr(),
            network: net.trunc(),
        })
        .collect()
    }

    pub(in crate::setup) fn path(name: &str, trust: Trust, nets: &[&str]) -> OwnPath {
        OwnPath {
            name: name.to_owned(),
            trust,
            attachments: attached(nets),
        }
    }

    pub(in crate::setup) fn host(ways: &[(&str, Trust, &[&str])]) -> Introduction {
        let way = |(name, trust, addresses): &(&str, Trust, &[&str])| Way {
            name: (*name).to_owned(),
            trust: *trust,
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        };
        Introduction {
            name: "b".to_owned(),
            public_key: PrivateKey::generate().public(),
            port: 5300,
            exit: false,
            token: None,
            ways: ways.iter().map(way).collect(),
        }
    }

    pub(in crate::setup) fn between<'a, R: Fn(usize, SocketAddr) -> bool>(
        own: &'a [OwnPath],
        other: &'a Introduction,
        routed: R,
    ) -> Meetings<'a, R> {
        Meetings {
            own,
            elsewhere: &[],
            other,
            routed,
        }
    }

    fn endpoints(met: &[Meeting<'_>]) -> Vec<(String, String)> {
        let endpoint = |met: &Meeting<'_>| (met.path.clone(), met.endpoint.to_string());
        met.iter().map(endpoint).collect()
    }

    fn taken(claims: &Claims) -> Vec<String> {
        let taken = claims.taken.iter();
        taken.map(|taken| taken.address.to_string()).collect()
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
        let meetings = between(&own, &other, |_, _| false);
        let met = meetings.met();
        let expected = [("eth0", "10.0.1.2:5300"), ("wlan0", "10.0.2.2:5300")];
        let expected = expected.map(|(path, to)| (path.to_owned(), to.to_owned()));
        assert_eq!(endpoints(&met), expected);
        let [(left, why)] = &meetings.unmet(&met)[..] else {
            panic!("{:?}", meetings.unmet(&met))
        };
        assert_eq!((&*left.name, why), ("wwan0", &Unmet::Unreached));
        let claims = claims(&meetings, &met, |a| a == IpAddr::from([192, 168, 5, 5]));
        let mut addresses = taken(&claims);
        addresses.sort();
        assert_eq!(addresses, ["10.0.1.2", "10.0.2.2", "fd00:1::2"]);
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
        let asked = std::cell::RefCell::new(Vec::new());
        let met = between(&own, &other, |index, endpoint| {
            asked.borrow_mut().push((index, endpoint.to_string()));
            true
        })
        .met();
        let expected = [("eth0", "10.2.0.7:5300"), ("wan0", "198.51.100.7:5300")];
        let expected = expected.map(|(path, to)| (path.to_owned(), to.to_owned()));
        assert_eq!(endpoints(&met), expected);
        // A private address is not looked for in the internet, nor IPv6 from where there is none.
        assert_eq!(asked.borrow().len(), 2, "{asked:?}");
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
        let met = between(&own, &other, |_, _| true).met();
        assert_eq!(met.len(), 1, "{met:?}");
        assert_eq!(met[0].path, "eth0");
    }

    #[test]
    fn a_path_without_an_endpoint_says_why() {
        let own = [
            path("wlan0", Trusted, &["192.168.1.20/24"]),
            path("lte0", Untrusted, &["100.70.1.2/32"]),
            path("eth0", Trusted, &[]),
        ];
        let other = host(&[("ens3", Trusted, &["203.0.113.5"])]);
        let meetings = between(&own, &other, |_, _| true);
        let met = meetings.met();
        assert_eq!(
            endpoints(&met),
            [("wlan0".to_owned(), "203.0.113.5:5300".to_owned())]
        );
        let unmet: Vec<_> = { meetings.unmet(&met).into_iter() }
            .map(|(path, why)| (path.name.as_str(), why))
            .collect();
        let endpoint = "203.0.113.5:5300".parse().unwrap();
        let expected = [
            ("lte0", Unmet::Labels(&other.ways[0], endpoint)),
            ("eth0", Unmet::NoAddress),
        ];
        assert_eq!(unmet, expected);
    }
}
