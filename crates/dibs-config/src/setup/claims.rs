//! Addresses that a line names for its host: which of them connections to it have here, and why others are left out.
//!
//! Whoever names the address of a third host would get the connections to that host. So an address counts where a path here
//! faces it, in one network with it; one over a router only if it is called there; others of the line do not.

use std::fmt;
use std::net::IpAddr;

use super::{Meeting, Meetings, Way};
use crate::Trust;

/// Reason for taking an address to be the other host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ground {
    /// Membership in the network of this path.
    Network(String),
    /// Call of this path, over a router.
    Called(String),
    /// Word of the line alone: no path here leads to the other host, which trusts the path that has the address.
    Word,
}

/// Reason for leaving an address out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Address of this host.
    Own,
    /// Network of this host that is no path: a third host's address.
    Elsewhere,
    /// No path here in its network, of those that lead to the path that has it.
    Unfaced,
}

/// Address that connections to the other host have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Address as the line has it.
    pub address: IpAddr,
    /// Reason for counting it.
    pub ground: Ground,
}

/// Address that the line names, and that does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Address as the line has it.
    pub address: IpAddr,
    /// Name of the path that has it, as the line says.
    pub way: String,
    /// Reason for leaving it out.
    pub refusal: Refusal,
}

/// Addresses of a line, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// Addresses that count, in the order of the line.
    pub taken: Vec<Taken>,
    /// Other addresses of the line.
    pub left: Vec<Left>,
}

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ground::Network(path) => write!(f, "in the network of path {path}"),
            Ground::Called(path) => write!(
                f,
                "reached over path {path} and a router: only the join token says whose it is"
            ),
            Ground::Word => {
                f.write_str("no path here leads to it: only the join token says whose it is")
            }
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::Own => "this host has it",
            Refusal::Elsewhere => "it is in a network of this host that is no path",
            Refusal::Unfaced => "it is in no network of a path here that leads there",
        })
    }
}

/// Judges the addresses of the other host, whose paths are met so; `is_own` says which this host has.
pub fn claims<R>(
    hosts: &Meetings<'_, R>,
    met: &[Meeting<'_>],
    is_own: impl Fn(IpAddr) -> bool,
) -> Claims {
    let judged = |way: &Way, address: IpAddr| {
        if is_own(address) {
            return Err(Refusal::Own);
        }
        let mut of_way = met.iter().filter(|met| met.way == way);
        let faces = |met: &&Meeting<'_>| {
            let mut own = hosts.own.iter().filter(|path| path.name == met.path);
            own.any(|path| path.faces(address))
        };
        if let Some(met) = of_way.clone().find(faces) {
            return Ok(Ground::Network(met.path.clone()));
        }
        if hosts.elsewhere.iter().any(|at| at.faces(address)) {
            return Err(Refusal::Elsewhere);
        }
        if let Some(met) = of_way.find(|met| met.endpoint.ip() == address) {
            return Ok(Ground::Called(met.path.clone()));
        }
        match met.is_empty() && way.trust == Trust::Trusted {
            true => Ok(Ground::Word),
            false => Err(Refusal::Unfaced),
        }
    };
    let mut claims = Claims::default();
    for way in &hosts.other.ways {
        for &address in &way.addresses {
            if claims.taken.iter().any(|taken| taken.address == address) {
                continue;
            }
            match judged(way, address) {
                Ok(ground) => {
                    claims.left.retain(|left| left.address != address);
                    claims.taken.push(Taken { address, ground });
                }
                Err(_) if claims.left.iter().any(|left| left.address == address) => {}
                Err(refusal) => claims.left.push(Left {
                    address,
                    way: way.name.clone(),
                    refusal,
                }),
            }
        }
    }
    claims
}

#[cfg(test)]
mod tests {
    use super::super::meeting::tests::{attached, between, host, path};
    use super::*;
    use Trust::{Trusted, Untrusted};

    fn said(claims: &Claims) -> (Vec<String>, Vec<String>) {
        let taken = claims.taken.iter();
        let left = claims.left.iter();
        (
            taken
                .map(|t| format!("{} {}", t.address, t.ground))
                .collect(),
            left.map(|l| format!("{} of {}: {}", l.address, l.way, l.refusal))
                .collect(),
        )
    }

    #[test]
    fn addresses_count_where_the_path_in_question_faces_them() {
        let own = [
            path("eth0", Trusted, &["10.0.1.1/24", "fd00:1::1/64"]),
            path("wan0", Untrusted, &["203.0.113.9/24"]),
        ];
        let other = host(&[
            // A third host in the network of eth0, the resolver, and one's own container.
            (
                "eth0",
                Trusted,
                &["10.0.1.2", "8.8.8.8", "172.17.0.2", "fd00:1::2"],
            ),
            ("fake0", Trusted, &["10.0.1.50"]),
            ("wan0", Untrusted, &["198.51.100.7", "198.51.100.8"]),
            ("virbr0", Untrusted, &["192.168.122.1"]),
        ]);
        let docker = attached(&["172.17.0.1/16"]);
        let hosts = Meetings {
            elsewhere: &docker,
            ..between(&own, &other, |_, _| true)
        };
        let met = hosts.met();
        let claims = claims(&hosts, &met, |a| a == IpAddr::from([192, 168, 122, 1]));
        let (taken, left) = said(&claims);
        let expected = [
            "10.0.1.2 in the network of path eth0",
            "fd00:1::2 in the network of path eth0",
            "198.51.100.7 reached over path wan0 and a router: only the join token says whose it is",
        ];
        assert_eq!(taken, expected);
        let expected = [
            "8.8.8.8 of eth0: it is in no network of a path here that leads there",
            "172.17.0.2 of eth0: it is in a network of this host that is no path",
            "10.0.1.50 of fake0: it is in no network of a path here that leads there",
            "198.51.100.8 of wan0: it is in no network of a path here that leads there",
            "192.168.122.1 of virbr0: this host has it",
        ];
        assert_eq!(left, expected);
    }

    #[test]
    fn a_network_that_is_no_path_is_not_called_over_a_router() {
        let own = [path("wan0", Untrusted, &["10.9.0.9/24"])];
        let other = host(&[("wan0", Untrusted, &["172.17.0.2"])]);
        let docker = attached(&["172.17.0.1/16"]);
        let hosts = Meetings {
            elsewhere: &docker,
            ..between(&own, &other, |_, _| true)
        };
        assert_eq!(hosts.met(), []);
        assert_eq!(claims(&hosts, &[], |_| false).taken, []);
    }

    #[test]
    fn a_host_that_only_calls_is_known_by_its_trusted_addresses() {
        let other = host(&[
            ("wg0", Trusted, &["10.8.0.2"]),
            ("eth0", Untrusted, &["192.168.1.5"]),
        ]);
        let hosts = between(&[], &other, |_, _| false);
        let claims = claims(&hosts, &[], |_| false);
        let (taken, left) = said(&claims);
        assert_eq!(taken.len(), 1);
        assert!(
            taken[0].starts_with("10.8.0.2 no path here leads to it"),
            "{taken:?}"
        );
        assert_eq!(left.len(), 1);
    }
}
