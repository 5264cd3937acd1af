//! Whether this host's firewall lets through what dibs needs: what comes out of a TUN and goes into it, and
//! the datagrams of the paths.

use dibs_config::Config;

use crate::doctor::finding::Finding;
use crate::doctor::host::{Host, Way};
use crate::doctor::rules::{Chain, Packet, Verdict, verdict};
use crate::doctor::{netfilter, nft};

const CHECK: &str = "firewall";

/// The device of most bumps.
const TUN: &str = "dibs1";

/// By the rules of iptables and nftables.
pub(crate) fn judge(host: &Host, config: &Config, ways: &[Way]) -> Vec<Finding> {
    if !host.root {
        return vec![Finding::needs_root(CHECK)];
    }
    let chains = |v6| -> Vec<Chain> {
        let saved = host.tables.of(v6).flat_map(netfilter::parse);
        saved.chain(host.nft.iter().flat_map(nft::parse)).collect()
    };
    let both = [chains(false), chains(true)];
    let of = |packet: &Packet| {
        let address = packet.source.or(packet.destination);
        let v6 = address.is_some_and(|address| address.is_ipv6());
        verdict(&both[usize::from(v6)], packet)
    };
    let wanted = wanted(config, ways);
    let mut findings: Vec<Finding> = { wanted.into_iter() }
        .filter_map(|(subject, what, packet)| told(&subject, &what, &packet, of(&packet)))
        .collect();
    if findings.is_empty() {
        let fine = "it lets through what comes by dibs1 and the datagrams of the paths";
        findings.push(Finding::fine(CHECK, fine));
    }
    if host.nft.is_none() {
        findings.push(Finding::skipped(
            CHECK,
            "rules of nftables cannot be read",
            "install the package nftables",
        ));
    }
    findings
}

/// What has to get through: what it is about, what it is called, and how it looks.
fn wanted(config: &Config, ways: &[Way]) -> Vec<(String, String, Packet)> {
    let mut wanted = Vec::new();
    for peer in &config.peers {
        for net in &peer.addresses {
            let inward = Packet {
                inbound: true,
                interface: TUN.to_owned(),
                protocol: "tcp",
                source: Some(net.addr()),
                destination: None,
                dport: None,
                state: "established",
            };
            let outward = Packet {
                inbound: false,
                source: None,
                destination: Some(net.addr()),
                ..inward.clone()
            };
            let from = format!("what {} sends by a bump", net.addr());
            let to = format!("what goes to {} by a bump", net.addr());
            wanted.push((peer.name.clone(), from, inward));
            wanted.push((peer.name.clone(), to, outward));
        }
    }
    for way in ways {
        let (Some(interface), Some(remote)) = (&way.interface, way.remote) else {
            continue;
        };
        let outward = Packet {
            inbound: false,
            interface: interface.clone(),
            protocol: "udp",
            source: None,
            destination: Some(remote.ip()),
            dport: Some(remote.port()),
            state: "established",
        };
        let inward = Packet {
            inbound: true,
            source: Some(remote.ip()),
            destination: None,
            dport: Some(config.daemon.port),
            ..outward.clone()
        };
        let called = Packet {
            state: "new",
            ..inward.clone()
        };
        let name = way.path.clone();
        wanted.push((name.clone(), format!("datagrams to {remote}"), outward));
        wanted.push((name.clone(), format!("datagrams from {remote}"), inward));
        wanted.push((name, format!("calls from {}", remote.ip()), called));
    }
    wanted
}

/// What it means that a packet gets through or not.
fn told(subject: &str, what: &str, packet: &Packet, verdict: Verdict) -> Option<Finding> {
    let interface = &packet.interface;
    let option = if packet.inbound { "-i" } else { "-o" };
    let chain = if packet.inbound { "INPUT" } else { "OUTPUT" };
    let protocol = packet.protocol;
    let advice = format!(
        "let it through before that, such as: iptables -I {chain} {option} {interface} -p {protocol} -j ACCEPT"
    );
    let finding = match verdict {
        Verdict::Passes => return None,
        // Whom this host calls need not call it.
        Verdict::Dropped(by) if packet.state == "new" => Finding::warning(
            CHECK,
            format!("{what} on {interface}: dropped by {by}"),
            advice,
        ),
        Verdict::Dropped(by) => Finding::failed(
            CHECK,
            format!("{what} on {interface}: dropped by {by}"),
            advice,
        ),
        Verdict::Perhaps(_) if packet.state == "new" => return None,
        Verdict::Perhaps(by) => Finding::warning(
            CHECK,
            format!(
                "{what} on {interface}: may be dropped by {by}, which doctor does not understand"
            ),
            "see whether it matches; dibsctl enable says when nothing is acknowledged",
        ),
    };
    Some(finding.about(subject))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;
    use crate::doctor::host::{Managers, Tables};

    fn outcomes(rules: &str) -> Vec<(Option<String>, Outcome)> {
        let text = "[[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n\
                    [[peer]]\nname = \"server\"\n\
                    public_key = \"Z7di2cstr/9mOBVZdefFsSHj9M56dAUbCXAbv8M28CU=\"\n\
                    addresses = [\"10.0.1.2/32\"]\n[peer.endpoints]\neth = \"10.0.1.2:5300\"\n";
        let config = dibs_config::parse("test", text).unwrap();
        let saved = format!("*filter\n{rules}COMMIT\n");
        let host = Host {
            root: true,
            release: String::new(),
            tables: Tables {
                nft: [Some(saved), None],
                ..Tables::default()
            },
            nft: Some(serde_json::json!({"nftables": []})),
            network: None,
            managers: Managers::default(),
            now: 0.0,
            synchronized: true,
            congestion: None,
        };
        let way = Way {
            path: "eth".to_owned(),
            interface: Some("eth0".to_owned()),
            remote: Some("10.0.1.2:5300".parse().unwrap()),
            ..Way::default()
        };
        let findings = judge(&host, &config, &[way]);
        { findings.into_iter() }
            .map(|finding| (finding.subject, finding.outcome))
            .collect()
    }

    #[test]
    fn who_drops_on_the_device_or_the_port_is_told() {
        let about = |name: &str, outcome| (Some(name.to_owned()), outcome);
        assert_eq!(outcomes(""), [(None, Outcome::Ok)]);
        assert_eq!(
            outcomes(":INPUT ACCEPT [0:0]\n-A INPUT -i dibs1 -j DROP\n"),
            [about("server", Outcome::Failed)]
        );
        assert_eq!(
            outcomes(
                ":OUTPUT ACCEPT [0:0]\n-A OUTPUT -o eth0 -p udp -m udp --dport 5300 -j REJECT\n"
            ),
            [about("eth", Outcome::Failed)]
        );
        let usual = ":INPUT DROP [0:0]\n-A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT\n";
        assert_eq!(outcomes(usual), [about("eth", Outcome::Warning)]);
        let open = format!("{usual}-A INPUT -p udp -m udp --dport 5300 -j ACCEPT\n");
        assert_eq!(outcomes(&open), [(None, Outcome::Ok)]);
    }
}
