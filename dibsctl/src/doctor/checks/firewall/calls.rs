//! Connections that peers begin by a bump: what comes out of a TUN comes in by no interface of a path.

use std::collections::BTreeSet;

use dibs_config::{Config, PeerConfig};
use dibs_control::SilentPortInfo;

use super::{CHECK, Filter, named};
use crate::doctor::finding::Finding;
use crate::doctor::host::Way;
use crate::doctor::rules::{Packet, Verdict};

/// Ports of one peer that are looked at, at most.
const PORTS: usize = 256;

/// Ports that do not answer, and those that would not.
pub(super) fn judge(
    filter: &Filter,
    (config, devices): (&Config, &[String]),
    ways: &[Way],
    (listening, silent): (&BTreeSet<u16>, &[SilentPortInfo]),
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for peer in &config.peers {
        let silent = silent.iter().filter(|at| at.here && at.peer == peer.name);
        let silent: Vec<&SilentPortInfo> = silent.collect();
        findings.extend(silent.iter().map(|at| of_silent(filter, peer, at)));
        let is_told = |port: u16| silent.iter().any(|at| at.port == port);
        let admits = |port: u16| {
            let mut accept = peer.accept.iter();
            accept.any(|opening| (opening.first..=opening.last).contains(&port))
        };
        let ports = { listening.iter().copied() }
            .filter(|port| admits(*port) && !is_told(*port))
            .take(PORTS);
        findings.extend(of_listeners(filter, peer, devices, ways, ports));
    }
    findings
}

fn call(peer: &PeerConfig, port: u16) -> Packet {
    Packet {
        inbound: true,
        interface: String::new(),
        protocol: "tcp",
        source: peer.addresses.first().map(ipnet::IpNet::addr),
        destination: None,
        dport: Some(port),
        state: "new",
    }
}

/// Verdicts on a call at each device but those where all that the peer sends is dropped: that is told as it is, and
/// what lets that in lets calls in.
fn verdicts(filter: &Filter, call: &Packet, devices: &[String]) -> Vec<(Verdict, Vec<String>)> {
    let any = Packet {
        dport: None,
        state: "established",
        ..call.clone()
    };
    let judged = filter.verdicts(&any, devices).into_iter();
    let others = judged.filter(|(verdict, _)| !matches!(verdict, Verdict::Dropped(_)));
    let others: Vec<String> = others.flat_map(|(_, on)| on).collect();
    filter.verdicts(call, &others)
}

fn of_silent(filter: &Filter, peer: &PeerConfig, silent: &SilentPortInfo) -> Finding {
    let SilentPortInfo {
        bump, device, port, ..
    } = silent;
    let packet = Packet {
        interface: device.clone(),
        ..call(peer, *port)
    };
    let what = format!(
        "connections of {} to port {port} by {bump} get no answer, on {device}",
        peer.name
    );
    let remedy = filter.remedy(&packet, device);
    let (found, advice) = match filter.verdict(&packet) {
        Verdict::Dropped(by) => (format!("{what}: dropped by {by}"), remedy),
        Verdict::Perhaps(by) => (format!("{what}: may be dropped by {by}"), remedy),
        Verdict::Passes => (
            format!("{what}, though no rule that doctor understands drops them"),
            format!("see whether they arrive: tcpdump -i {device} tcp port {port}"),
        ),
    };
    Finding::failed(CHECK, found, advice).about(&peer.name)
}

/// Ports at which somebody listens whom the peer reaches in plain by a path, and not by a bump.
fn of_listeners(
    filter: &Filter,
    peer: &PeerConfig,
    devices: &[String],
    ways: &[Way],
    ports: impl Iterator<Item = u16>,
) -> Vec<Finding> {
    let paths: Vec<String> = ways
        .iter()
        .filter_map(|way| way.interface.clone())
        .collect();
    let mut closed: Vec<Closed> = Vec::new();
    for port in ports {
        let packet = call(peer, port);
        let open = filter.verdicts(&packet, &paths).into_iter();
        let open = open.filter(|(verdict, _)| *verdict == Verdict::Passes);
        let Some(path) = open.flat_map(|(_, on)| on).next() else {
            continue;
        };
        for (verdict, on) in verdicts(filter, &packet, devices) {
            let Verdict::Dropped(by) = verdict else {
                continue;
            };
            let same =
                |known: &&mut Closed| (&known.by, &known.on, &known.path) == (&by, &on, &path);
            match closed.iter_mut().find(same) {
                Some(known) => known.ports.push(port),
                None => closed.push(Closed {
                    by,
                    on,
                    path: path.clone(),
                    ports: vec![port],
                }),
            }
        }
    }
    let finding = |closed: Closed| {
        let Closed {
            by,
            on,
            path,
            ports,
        } = closed;
        let list: Vec<String> = ports.iter().map(u16::to_string).collect();
        let found = format!(
            "connections of {} to port {} by a bump arrive on {} and are dropped by {by}, though {path} lets them in",
            peer.name,
            list.join(", "),
            on.join(", ")
        );
        let first = ports.first().copied().unwrap_or_default();
        let advice = filter.remedy(&call(peer, first), &named(&on, devices));
        Finding::warning(CHECK, found, advice).about(&peer.name)
    };
    closed.into_iter().map(finding).collect()
}

/// Ports that are closed in the same way.
struct Closed {
    /// The rule that drops.
    by: String,
    /// The devices of the bumps.
    on: Vec<String>,
    /// An interface of a path by which they are open.
    path: String,
    ports: Vec<u16>,
}
