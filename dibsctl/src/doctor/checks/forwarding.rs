//! Whether this host does with others' packets what the configuration says.

use dibs_config::Config;

use crate::doctor::finding::Finding;

/// By sysctls, which `read` gives by their path below `/proc/sys`.
pub(crate) fn judge(config: &Config, read: impl Fn(&str) -> Option<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is = |path: &str, value: &str| read(path).as_deref() == Some(value);
    let what = if config.daemon.exit {
        "exit"
    } else {
        "gateway"
    };
    for key in (config.daemon).unforwarded(|key| read(&key.replace('.', "/"))) {
        findings.push(Finding::failed(
            what,
            format!("this host does not forward, because {key} is 0"),
            format!("run sysctl -w {key}=1, and keep it in /etc/sysctl.d"),
        ));
    }
    let uplinks = config
        .paths
        .iter()
        .filter_map(|path| path.interface.as_deref());
    for uplink in uplinks.filter(|_| config.daemon.forwards()) {
        // Linux learns its routes as a host does, unless it forwards.
        if is("net/ipv6/conf/all/forwarding", "1")
            && is(&format!("net/ipv6/conf/{uplink}/accept_ra"), "1")
        {
            findings.push(Finding::warning(
                what,
                format!("{uplink} takes no router advertisements while this host forwards IPv6"),
                format!(
                    "run sysctl -w net.ipv6.conf.{uplink}.accept_ra=2, and keep it in /etc/sysctl.d"
                ),
            ));
        }
    }
    let mut addresses = config.peers.iter().flat_map(|peer| &peer.addresses);
    let v6 = addresses.any(|net| net.addr().is_ipv6());
    if v6 && is("net/ipv6/conf/all/disable_ipv6", "1") {
        findings.push(Finding::warning(
            "ipv6",
            "peers have IPv6 addresses, but IPv6 is switched off on this host",
            "run sysctl -w net.ipv6.conf.all.disable_ipv6=0, or leave these addresses out",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_forwards() {
        let text = "[daemon]\ngateway = [\"192.168.7.0/24\"]\n\
                    [[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n";
        let config = dibs_config::parse("test", text).unwrap();
        let all = |value: &'static str| move |_: &str| Some(value.to_owned());
        assert_eq!(judge(&config, all("0")).len(), 1);
        let routed = |path: &str| {
            Some(
                if path.ends_with("accept_ra") {
                    "2"
                } else {
                    "1"
                }
                .to_owned(),
            )
        };
        assert_eq!(judge(&config, routed), []);
        assert_eq!(judge(&config, |_| None), []);
    }

    #[test]
    fn an_exit_keeps_its_own_ipv6_route() {
        let text = "[daemon]\nexit = true\n\
                    [[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n";
        let config = dibs_config::parse("test", text).unwrap();
        let with = |accepts: &'static str| {
            move |path: &str| {
                Some(
                    if path.ends_with("accept_ra") {
                        accepts
                    } else {
                        "1"
                    }
                    .to_owned(),
                )
            }
        };
        assert_eq!(judge(&config, with("1")).len(), 1);
        assert_eq!(judge(&config, with("2")), []);
    }
}
