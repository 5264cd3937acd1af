//! Passage by this host's firewall of what dibs needs: what comes out of a TUN and goes into it, for this host or for
//! others, and the datagrams of the paths.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use dibs_config::{BumpConfig, Config};
use dibs_control::SilentPortInfo;

use crate::doctor::finding::Finding;
use crate::doctor::host::{Host, Way};
use crate::doctor::rules::{Chain, Packet, dropped_by};
use crate::doctor::{netfilter, nft};

const CHECK: &str = "firewall";

/// By the rules of iptables and nftables; `silent` are ports that do not answer, as a running daemon says.
pub(crate) fn judge(
    host: &Host,
    config: &Config,
    ways: &[Way],
    silent: &[SilentPortInfo],
    leading: &[String],
) -> Vec<Finding> {
    if !host.root {
        return vec![Finding::needs_root(CHECK)];
    }
    let filter = Filter::of(host);
    let devices = devices(config);
    let mut findings = of_peers(&filter, config, &devices);
    findings.extend(of_passing(&filter, config, ways, &devices));
    findings.extend(of_ways(&filter, config, ways));
    findings.extend(of_silent(&filter, config, silent, leading));
    if findings.is_empty() {
        let fine = format!(
            "no rule drops what arrives on {} or the datagrams of the paths",
            devices.join(", ")
        );
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

/// The TUNs of the bumps that this host carries: each bump has one, and a firewall tells them apart.
fn devices(config: &Config) -> Vec<String> {
    let bumps = config
        .bumps
        .iter()
        .filter(|bump| config.lack(bump).is_none());
    let built_in = bumps.filter_map(BumpConfig::built_in);
    built_in.map(|bump| bump.number().tun_name()).collect()
}

/// The rules of this host.
struct Filter {
    /// For IPv4 and for IPv6.
    chains: [Vec<Chain>; 2],
}

impl Filter {
    fn of(host: &Host) -> Self {
        let chains = |v6| {
            let saved = host.tables.of(v6).flat_map(netfilter::parse);
            saved.chain(host.nft.iter().flat_map(nft::parse)).collect()
        };
        Self {
            chains: [chains(false), chains(true)],
        }
    }

    /// The rule that drops a packet.
    fn dropped_by(&self, packet: &Packet) -> Option<String> {
        let address = packet.source.or(packet.destination);
        let v6 = address.is_some_and(|address| address.is_ipv6());
        dropped_by(&self.chains[usize::from(v6)], packet)
    }

    /// The rule that drops a packet on each of these interfaces: those with the same one together.
    fn dropped_on(&self, packet: &Packet, on: &[String]) -> Vec<(Option<String>, Vec<String>)> {
        let mut all: Vec<(Option<String>, Vec<String>)> = Vec::new();
        for interface in on {
            let packet = Packet {
                interface: interface.clone(),
                ..packet.clone()
            };
            let by = self.dropped_by(&packet);
            match all.iter_mut().find(|(known, _)| *known == by) {
                Some((_, interfaces)) => interfaces.push(interface.clone()),
                None => all.push((by, vec![interface.clone()])),
            }
        }
        all
    }

    /// How to let something in: by the program that makes the rules, as far as it is known by its chains.
    fn remedy(&self, packet: &Packet, interface: &str) -> String {
        let made_by = |part: &str| {
            let mut chains = self.chains.iter().flatten();
            chains.any(
                |Chain {
                     name: (table, chain),
                     ..
                 }| table.contains(part) || chain.starts_with(part),
            )
        };
        let port = packet.dport;
        let (chain, verb) = match packet.inbound {
            _ if packet.passes => ("FORWARD", "route allow"),
            true => ("INPUT", "allow"),
            false => ("OUTPUT", "allow"),
        };
        let (option, way) = match packet.inbound {
            true => ("-i", "in"),
            false => ("-o", "out"),
        };
        let device = if interface.ends_with('+') {
            "dibs1"
        } else {
            interface
        };
        let is_theirs = packet.inbound || packet.passes;
        if is_theirs && made_by("ufw-") {
            let port = port.map_or_else(String::new, |port| format!(" to any port {port}"));
            return format!("allow it, for each device: ufw {verb} {way} on {device}{port}");
        }
        if is_theirs && made_by("firewalld") {
            return format!(
                "allow it, for each device: firewall-cmd --permanent --zone=trusted --add-interface={device}, then \
                 firewall-cmd --reload"
            );
        }
        let dport = port.map_or_else(String::new, |port| format!(" --dport {port}"));
        format!(
            "allow it before that, such as: iptables -I {chain} {option} {interface} -p {}{dport} -j ACCEPT",
            packet.protocol
        )
    }
}

/// The devices as a rule names them: all of them have one name.
fn named(some: &[String], all: &[String]) -> String {
    match some.len() == all.len() && some.len() > 1 {
        true => "dibs+".to_owned(),
        false => some.first().cloned().unwrap_or_default(),
    }
}

/// Packets that come by the TUNs, of connections that are there.
fn of_peers(filter: &Filter, config: &Config, devices: &[String]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for peer in &config.peers {
        for net in &peer.addresses {
            let inward = Packet {
                inbound: true,
                passes: false,
                interface: String::new(),
                other: None,
                protocol: "tcp",
                source: Some(net.addr()),
                destination: None,
                dport: None,
                state: "established",
            };
            let outward = Packet {
                inbound: false,
                passes: false,
                source: None,
                destination: Some(net.addr()),
                ..inward.clone()
            };
            let from = format!("decrypted packets of {}", net.addr());
            let to = format!("packets to {} on a bump", net.addr());
            for (what, packet) in [(from, inward), (to, outward)] {
                for (by, on) in filter.dropped_on(&packet, devices) {
                    let what = format!("{what} on {}", on.join(", "));
                    let advice = filter.remedy(&packet, &named(&on, devices));
                    findings.extend(by.map(|by| told(&peer.name, &what, &packet, by, advice)));
                }
            }
        }
    }
    findings
}

/// Packets that this host forwards: of the peers of an exit, and of the networks behind a gateway.
fn of_passing(filter: &Filter, config: &Config, ways: &[Way], devices: &[String]) -> Vec<Finding> {
    let daemon = &config.daemon;
    let uplink = ways.iter().find_map(|way| way.interface.clone());
    let of_peers = config.peers.iter().flat_map(|peer| &peer.addresses);
    let exit = of_peers.filter(|_| daemon.exit).map(|net| {
        let begins = Packet {
            other: uplink.clone(),
            ..passing(net.addr(), true)
        };
        ("exit", begins)
    });
    let gateway = daemon
        .gateway
        .iter()
        .map(|net| ("gateway", passing(net.addr(), false)));
    let mut findings: Vec<Finding> = Vec::new();
    for (subject, begins) in exit.chain(gateway) {
        let answer = Packet {
            inbound: !begins.inbound,
            source: begins.destination,
            destination: begins.source,
            dport: None,
            state: "established",
            ..begins.clone()
        };
        for (what, packet) in [
            ("forwarded connections", begins),
            ("answers to forwarded connections", answer),
        ] {
            let way = if packet.inbound { "from" } else { "to" };
            for (by, on) in filter.dropped_on(&packet, devices) {
                let found = by.map(|by| format!("{what} {way} {}: dropped by {by}", on.join(", ")));
                let any_port = Packet {
                    dport: None,
                    ..packet.clone()
                };
                let advice = filter.remedy(&any_port, &named(&on, devices));
                let told = found.map(|found| Finding::failed(CHECK, found, advice).about(subject));
                // Other addresses fare alike.
                findings.extend(told.filter(|told| !findings.contains(told)));
            }
        }
    }
    findings
}

/// Packet that begins a connection of `from` to a web server, by a TUN; `inbound`: it comes out of that.
fn passing(from: IpAddr, inbound: bool) -> Packet {
    let anywhere: IpAddr = match from {
        IpAddr::V4(_) => Ipv4Addr::new(9, 9, 9, 9).into(),
        IpAddr::V6(_) => Ipv6Addr::new(0x2620, 0xfe, 0, 0, 0, 0, 0, 0xfe).into(),
    };
    Packet {
        inbound,
        passes: true,
        interface: String::new(),
        other: None,
        protocol: "tcp",
        source: Some(from),
        destination: Some(anywhere),
        dport: Some(443),
        state: "new",
    }
}

/// The datagrams of the paths.
fn of_ways(filter: &Filter, config: &Config, ways: &[Way]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for way in ways {
        let (Some(interface), Some(remote)) = (&way.interface, way.remote) else {
            continue;
        };
        let outward = Packet {
            inbound: false,
            passes: false,
            interface: interface.clone(),
            other: None,
            protocol: "udp",
            source: None,
            destination: Some(remote.ip()),
            dport: Some(remote.port()),
            state: "established",
        };
        let inward = Packet {
            inbound: true,
            passes: false,
            source: Some(remote.ip()),
            destination: None,
            dport: Some(config.daemon.port),
            ..outward.clone()
        };
        let called = Packet {
            state: "new",
            ..inward.clone()
        };
        for (what, packet) in [
            (format!("datagrams to {remote} on {interface}"), outward),
            (format!("datagrams from {remote} on {interface}"), inward),
            (
                format!("handshakes from {} on {interface}", remote.ip()),
                called,
            ),
        ] {
            let advice = filter.remedy(&packet, interface);
            let by = filter.dropped_by(&packet);
            findings.extend(by.map(|by| told(&way.path, &what, &packet, by, advice)));
        }
    }
    findings
}

/// Ports that do not answer connections that come by a bump. Of those that refuse the daemon warns.
fn of_silent(
    filter: &Filter,
    config: &Config,
    silent: &[SilentPortInfo],
    leading: &[String],
) -> Vec<Finding> {
    let here = silent.iter().filter(|at| at.here && !at.refuses);
    let judged = here.map(|at| {
        let SilentPortInfo {
            peer: name,
            bump,
            device,
            port,
            ..
        } = at;
        let peer = config.peers.iter().find(|peer| peer.name == *name);
        let led = { leading.iter() }.find(|rule| rule.contains(&format!(" --dport {port} ")));
        let to = led.and_then(|rule| rule.split(" --to-destination ").nth(1));
        let to = to.and_then(|to| to.parse::<SocketAddr>().ok());
        let packet = Packet {
            inbound: true,
            passes: to.is_some(),
            interface: device.clone(),
            other: None,
            protocol: "tcp",
            source: peer.and_then(|peer| Some(peer.addresses.first()?.addr())),
            destination: to.map(|to| to.ip()),
            dport: Some(to.map_or(*port, |to| to.port())),
            state: "new",
        };
        let led = led.map_or_else(String::new, |rule| {
            format!(", which \"{rule}\" leads elsewhere")
        });
        let what =
            format!("connections of {name} to port {port} on {bump} ({device}){led} get no answer");
        let (found, advice) = match filter.dropped_by(&packet) {
            Some(by) => (
                format!("{what}: dropped by {by}"),
                filter.remedy(&packet, device),
            ),
            None => (
                format!("{what}, although doctor found no rule that drops them"),
                format!("check whether they arrive: tcpdump -i {device} tcp port {port}"),
            ),
        };
        Finding::failed(CHECK, found, advice).about(name)
    });
    judged.collect()
}

/// Meaning of a packet that is dropped.
fn told(subject: &str, what: &str, packet: &Packet, by: String, advice: String) -> Finding {
    let found = format!("{what}: dropped by {by}");
    let finding = match packet.state {
        // Whom this host calls need not call it.
        "new" => Finding::warning(CHECK, found, advice),
        _ => Finding::failed(CHECK, found, advice),
    };
    finding.about(subject)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;
    use crate::doctor::host::{Managers, Tables};

    fn found(rules: &str, silent: &[SilentPortInfo]) -> Vec<Finding> {
        found_with("", rules, silent)
    }

    /// `daemon`: lines of `[daemon]`.
    fn found_with(daemon: &str, rules: &str, silent: &[SilentPortInfo]) -> Vec<Finding> {
        let rest = "[[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n\
                    [[peer]]\nname = \"server\"\n\
                    public_key = \"Z7di2cstr/9mOBVZdefFsSHj9M56dAUbCXAbv8M28CU=\"\n\
                    addresses = [\"10.0.1.2/32\"]\n[peer.endpoints]\neth = \"10.0.1.2:5300\"\n";
        let config = dibs_config::parse("test", &format!("[daemon]\n{daemon}{rest}")).unwrap();
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
        judge(&host, &config, &[way], silent, &[])
    }

    fn outcomes(rules: &str) -> Vec<(Option<String>, Outcome)> {
        { found(rules, &[]).into_iter() }
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

    /// Drops by Docker, ufw and firewalld of what an exit or a gateway forwards, each with the way to let it through.
    #[test]
    fn a_firewall_that_forwards_for_nobody_is_told() {
        let docker = ":FORWARD DROP [0:0]\n:DOCKER - [0:0]\n:DOCKER-USER - [0:0]\n\
                      -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
                      -A FORWARD -o docker0 -j DOCKER\n-A FORWARD -j DOCKER-USER\n\
                      -A FORWARD -i docker0 ! -o docker0 -j ACCEPT\n\
                      -A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT\n\
                      -A DOCKER-USER -j RETURN\n";
        let said = |daemon: &str, rules: &str| -> Vec<(Option<String>, Option<String>)> {
            let found = found_with(daemon, rules, &[]).into_iter();
            { found.filter(|finding| finding.outcome == Outcome::Failed) }
                .map(|finding| (finding.subject, finding.advice))
                .collect()
        };
        let iptables = |option: &str| {
            let what = format!("iptables -I FORWARD {option} dibs+ -p tcp -j ACCEPT");
            Some(format!("allow it before that, such as: {what}"))
        };
        let exit = Some("exit".to_owned());
        let both = [
            (exit.clone(), iptables("-i")),
            (exit.clone(), iptables("-o")),
        ];
        assert_eq!(said("exit = true\n", docker), both);
        assert_eq!(said("", docker), []);
        let accepted = "-A FORWARD -i dibs+ -j ACCEPT\n-A FORWARD -o dibs+ -j ACCEPT\n-A FORWARD";
        let open = docker.replacen("-A FORWARD", accepted, 1);
        assert_eq!(said("exit = true\n", &open), []);
        let ufw = ":FORWARD DROP [0:0]\n:ufw-before-forward - [0:0]\n-A FORWARD -j ufw-before-forward\n\
                   -A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n";
        let route = |way: &str| {
            Some(format!(
                "allow it, for each device: ufw route allow {way} on dibs1"
            ))
        };
        assert_eq!(said("exit = true\n", ufw), [(exit, route("in"))]);
        let gateway = "gateway = [\"192.168.7.0/24\"]\n";
        assert_eq!(
            said(gateway, ufw),
            [(Some("gateway".to_owned()), route("out"))]
        );
    }

    /// The rules of ufw, shortened, with one for PostgreSQL on an interface.
    const UFW: &str = ":INPUT DROP [0:0]\n:ufw-before-input - [0:0]\n:ufw-not-local - [0:0]\n\
                       :ufw-user-input - [0:0]\n:ufw-after-input - [0:0]\n\
                       :ufw-skip-to-policy-input - [0:0]\n\
                       -A INPUT -j ufw-before-input\n-A INPUT -j ufw-after-input\n\
                       -A ufw-before-input -i lo -j ACCEPT\n\
                       -A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
                       -A ufw-before-input -m conntrack --ctstate INVALID -j DROP\n\
                       -A ufw-before-input -j ufw-not-local\n\
                       -A ufw-before-input -j ufw-user-input\n\
                       -A ufw-not-local -m addrtype --dst-type LOCAL -j RETURN\n\
                       -A ufw-not-local -m addrtype --dst-type MULTICAST -j RETURN\n\
                       -A ufw-not-local -j DROP\n\
                       -A ufw-user-input -p udp -m udp --dport 5300 -j ACCEPT\n\
                       -A ufw-user-input -i eth0 -p tcp -m tcp --dport 5432 -j ACCEPT\n\
                       -A ufw-after-input -m addrtype --dst-type BROADCAST -j ufw-skip-to-policy-input\n\
                       -A ufw-skip-to-policy-input -j DROP\n";

    #[test]
    fn a_port_that_does_not_answer_is_told_with_the_rule() {
        let silent = |port| SilentPortInfo {
            refuses: false,
            peer: "server".to_owned(),
            bump: "seal".to_owned(),
            device: "dibs3".to_owned(),
            port,
            here: true,
            connections: Some(2),
        };
        let said = found(UFW, &[silent(5432)]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(said[0].outcome, Outcome::Failed);
        for part in ["port 5432", "dibs3", "the policy of INPUT"] {
            assert!(said[0].found.contains(part), "{part}: {said:?}");
        }
        let advice = said[0].advice.clone().unwrap_or_default();
        assert!(
            advice.contains("ufw allow in on dibs3 to any port 5432"),
            "{advice}"
        );
        // Nothing listens at the port, and no rule drops there: something else does.
        let said = found("", &[silent(22)]);
        assert!(said[0].found.contains("no rule"), "{said:?}");
        let elsewhere = SilentPortInfo {
            here: false,
            ..silent(5432)
        };
        assert_eq!(found("", &[elsewhere])[0].outcome, Outcome::Ok);
    }
}
