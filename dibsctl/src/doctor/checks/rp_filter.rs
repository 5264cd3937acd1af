//! Whether the kernel drops what comes by a path, as it would not answer by it.

use crate::doctor::finding::Finding;
use crate::doctor::host::Way;

const STRICT: u8 = 1;

/// By the interface's reverse path filter, and how this host itself would reach the peer.
pub(crate) fn judge(way: &Way) -> Option<Finding> {
    let interface = way.interface.as_ref()?;
    let check = "rp_filter";
    if way.rp_filter? != STRICT || way.remote.is_some_and(|remote| remote.is_ipv6()) {
        let found = format!("{interface} accepts what arrives");
        return Some(Finding::fine(check, found).about(&way.path));
    }
    let loosen = format!(
        "run sysctl -w net.ipv4.conf.{interface}.rp_filter=2, and keep it in /etc/sysctl.d"
    );
    let finding = match (&way.remote, &way.unbound) {
        (Some(remote), Some(Ok(hop))) if hop.device != *interface => Finding::failed(
            check,
            format!(
                "the filter of {interface} is strict, but {} is routed over {}: what it sends is dropped",
                remote.ip(),
                hop.device
            ),
            loosen,
        ),
        (Some(remote), Some(Err(why))) => Finding::failed(
            check,
            format!(
                "the filter of {interface} is strict, but there is no route to {}: {why}",
                remote.ip()
            ),
            loosen,
        ),
        (None, _) => Finding::warning(
            check,
            format!(
                "the filter of {interface} is strict: handshakes of a peer are dropped if this host would answer \
                 over another interface"
            ),
            loosen,
        ),
        _ => Finding::fine(
            check,
            format!("the filter of {interface} is strict, and the peer is routed over it"),
        ),
    };
    Some(finding.about(&way.path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;
    use crate::doctor::host::Hop;

    fn outcome(filter: u8, routed_by: Option<&str>, remote: Option<&str>) -> Outcome {
        let hop = |device: &str| Hop {
            device: device.to_owned(),
            source: None,
            mtu: None,
        };
        let way = Way {
            interface: Some("wlan0".to_owned()),
            rp_filter: Some(filter),
            remote: remote.map(|remote| remote.parse().unwrap()),
            unbound: Some(
                routed_by
                    .map(hop)
                    .ok_or("Network is unreachable".to_owned()),
            ),
            ..Way::default()
        };
        judge(&way).unwrap().outcome
    }

    #[test]
    fn strict_matters_where_routes_differ() {
        let peer = Some("10.0.2.2:5300");
        assert_eq!(outcome(1, Some("eth0"), peer), Outcome::Failed);
        assert_eq!(outcome(1, None, peer), Outcome::Failed);
        assert_eq!(outcome(1, Some("wlan0"), peer), Outcome::Ok);
        assert_eq!(outcome(1, Some("wlan0"), None), Outcome::Warning);
        assert_eq!(outcome(2, Some("eth0"), peer), Outcome::Ok);
        assert_eq!(outcome(1, None, Some("[fd00::2]:5300")), Outcome::Ok);
    }
}
