//! Whether the datagrams of dibs fit.

use crate::doctor::finding::Finding;
use crate::doctor::host::Way;

/// The least UDP payload that every path has to carry (docs/protocol.md).
const BASE: u32 = 1200;

/// By the MTU of the interface, and of the route if it has one of its own.
pub(crate) fn judge(way: &Way) -> Option<Finding> {
    let mut mtu = way.link?.mtu;
    if let Some(Ok(hop)) = &way.bound {
        mtu = hop.mtu.map_or(mtu, |of_route| of_route.min(mtu));
    }
    let v6 = way.remote.is_some_and(|remote| remote.is_ipv6());
    let headers = if v6 { 40 + 8 } else { 20 + 8 };
    let payload = mtu.saturating_sub(headers);
    let finding = if payload < BASE {
        Finding::failed(
            "mtu",
            format!("an MTU of {mtu} leaves {payload} bytes for a datagram, but {BASE} are needed"),
            format!(
                "give it an MTU of {} at least (ip link set dev {} mtu 1280), or leave the path out",
                BASE + headers,
                way.interface.as_deref().unwrap_or("INTERFACE"),
            ),
        )
    } else {
        Finding::fine("mtu", format!("{mtu}"))
    };
    Some(finding.about(&way.path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;
    use crate::doctor::host::{Hop, Link};

    fn outcome(mtu: u32, route: Option<u32>, remote: &str) -> Outcome {
        let way = Way {
            link: Some(Link {
                up: true,
                carrier: true,
                mtu,
            }),
            remote: Some(remote.parse().unwrap()),
            bound: Some(Ok(Hop {
                device: "eth0".to_owned(),
                source: None,
                mtu: route,
            })),
            ..Way::default()
        };
        judge(&way).unwrap().outcome
    }

    #[test]
    fn the_least_datagram_has_to_fit() {
        let (v4, v6) = ("10.0.1.2:5300", "[fd00::2]:5300");
        assert_eq!(outcome(1228, None, v4), Outcome::Ok);
        assert_eq!(outcome(1227, None, v4), Outcome::Failed);
        assert_eq!(outcome(1248, None, v6), Outcome::Ok);
        assert_eq!(outcome(1247, None, v6), Outcome::Failed);
        assert_eq!(outcome(1500, Some(1000), v4), Outcome::Failed);
        assert_eq!(outcome(0, None, v4), Outcome::Failed);
    }
}
