//! Networks that a wide prefix does not mean: addresses that others elsewhere have too, or nobody.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::LazyLock;

use ipnet::IpNet;

/// Private, shared, link-local, loopback, benchmark, multicast and reserved networks (RFC 6890). The IPv6 addresses that
/// hold one of IPv4 are among them: mapped ones and those of NAT64 in `::/8`, and 6to4.
static LOCAL: LazyLock<Vec<IpNet>> = LazyLock::new(|| {
    let nets = [
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "224.0.0.0/3",
        "::/8",
        "2002::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    ];
    nets.map(|net| net.parse().expect("a prefix")).into()
});

/// Networks that these prefixes leave out: local ones in a wider prefix of these, but for what they name more specifically.
pub fn left_out(prefixes: &[IpNet]) -> Vec<IpNet> {
    let in_wider = |net: &&IpNet| {
        let mut prefixes = prefixes.iter();
        prefixes.any(|wide| wide.prefix_len() < net.prefix_len() && wide.contains(*net))
    };
    let left = LOCAL.iter().filter(in_wider);
    left.flat_map(|net| without(*net, prefixes)).collect()
}

/// Parts of a network that are in none of these that it holds.
fn without(net: IpNet, named: &[IpNet]) -> Vec<IpNet> {
    if named.contains(&net) {
        return Vec::new();
    }
    if !named.iter().any(|named| net.contains(named)) {
        return vec![net];
    }
    let halves = net.subnets(net.prefix_len() + 1).into_iter().flatten();
    halves.flat_map(|half| without(half, named)).collect()
}

/// Networks and their owners; the longest one that holds an address decides. A look-up takes the same time however many they are.
#[derive(Clone, Debug)]
pub struct Nearest<T>(BTreeMap<Reverse<u8>, HashMap<IpNet, T>>);

impl<T: Copy> Nearest<T> {
    /// The longest network that holds an address, and its owner.
    pub fn holding(&self, address: IpAddr) -> Option<(IpNet, T)> {
        self.0.iter().find_map(|(Reverse(length), nets)| {
            let net = IpNet::new(address, *length).ok()?.trunc();
            Some((net, *nets.get(&net)?))
        })
    }
}

/// Networks and their owners; the last of two equal networks counts.
impl<T> FromIterator<(IpNet, T)> for Nearest<T> {
    fn from_iter<I: IntoIterator<Item = (IpNet, T)>>(nets: I) -> Self {
        let mut all: BTreeMap<_, HashMap<_, _>> = BTreeMap::new();
        for (net, owner) in nets {
            let alike = all.entry(Reverse(net.prefix_len())).or_default();
            alike.insert(net.trunc(), owner);
        }
        Self(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_network_decides() {
        let all = nets(&[
            "0.0.0.0/0",
            "10.77.0.2/32",
            "10.77.0.3/32",
            "10.0.0.9/8",
            "10.77.0.0/16",
            "10.77.0.3/32",
            "fd77::2/128",
            "fd00::/8",
        ]);
        let nearest: Nearest<usize> = { all.iter().copied() }.zip(0..).collect();
        for address in [
            "10.77.0.2",
            "10.77.0.3",
            "10.77.0.4",
            "10.1.2.3",
            "192.0.2.80",
            "fd77::2",
            "fd77::3",
            "2001:db8::1",
            "::",
        ] {
            let address: IpAddr = address.parse().unwrap();
            let holding = (0..).zip(&all).filter(|(_, net)| net.contains(&address));
            let longest = holding.max_by_key(|(_, net)| net.prefix_len());
            let longest = longest.map(|(owner, net)| (net.trunc(), owner));
            assert_eq!(nearest.holding(address), longest, "{address}");
        }
    }

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn holds(nets: &[IpNet], addr: &str) -> bool {
        let addr: IpAddr = addr.parse().unwrap();
        nets.iter().any(|net| net.contains(&addr))
    }

    #[test]
    fn everywhere_is_the_internet_alone() {
        let left = left_out(&nets(&["0.0.0.0/0", "::/0"]));
        for local in [
            "10.1.2.3",
            "127.0.0.1",
            "169.254.169.254",
            "172.31.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "239.255.255.250",
            "255.255.255.255",
            "::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "2002:a00:1::1",
            "fd00::1",
            "fe80::1",
            "ff02::1",
        ] {
            assert!(holds(&left, local), "{local}");
        }
        for far in [
            "9.255.255.255",
            "11.0.0.0",
            "172.32.0.1",
            "203.0.113.7",
            "2001:db8::1",
        ] {
            assert!(!holds(&left, far), "{far}");
        }
        assert_eq!(
            left_out(&nets(&["0.0.0.0/0"]))
                .iter()
                .filter(|net| net.addr().is_ipv6())
                .count(),
            0
        );
    }

    #[test]
    fn named_networks_are_meant() {
        assert_eq!(
            left_out(&nets(&["10.0.0.0/8", "10.1.0.0/16", "fd00::/8"])),
            []
        );
        let left = left_out(&nets(&[
            "0.0.0.0/0",
            "10.9.0.0/16",
            "192.168.0.0/16",
            "172.16.0.1/32",
        ]));
        for local in ["10.8.255.255", "10.10.0.0", "172.16.0.0", "172.16.0.2"] {
            assert!(holds(&left, local), "{local}");
        }
        for named in ["10.9.0.0", "10.9.255.255", "192.168.7.1", "172.16.0.1"] {
            assert!(!holds(&left, named), "{named}");
        }
    }
}
