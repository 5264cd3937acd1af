//! The chains that drop: what may not leave but by its bump's device, what may not come in but by it,
//! and what may not come out of a TUN.

use crate::chains::{
    Chain, Table, chain, class_matches, from, hooked, inbound_matches, jump, to, words,
};
use crate::desired::{Binding, BumpRoute, ClassRule, DeviceOwner, Fail, widest};
use crate::{Desired, Family};

/// Packets of LOCKED connections.
pub(crate) const LOCKED: &str = "DIBS-LOCKED";
/// Packets of peers that came by none of our TUNs.
pub(crate) const PLAIN: &str = "DIBS-PLAIN";
/// Packets of peers, as far as rules require a bump.
pub(crate) const REQUIRED_IN: &str = "DIBS-REQUIRED-IN";
/// Packets to peers, likewise.
pub(crate) const REQUIRED_OUT: &str = "DIBS-REQUIRED-OUT";
/// Packets that would pass this host by a TUN of ours.
pub(crate) const FORWARD: &str = "DIBS-FORWARD";

/// The guards of `family`, those that others refer to first.
pub(crate) fn guards(desired: &Desired, family: Family) -> Vec<Chain> {
    let mut chains = Vec::new();
    let ours = || {
        desired
            .bumps
            .iter()
            .filter(|bump| bump.owner == DeviceOwner::Ours)
    };
    for bump in ours() {
        chains.push(chain(
            Table::Mangle,
            format!("DIBS-IN-{}", bump.id),
            inbound(desired, bump, family),
        ));
    }
    let closed = desired.fail == Fail::Closed;
    if closed {
        chains.extend(closed_guards(desired, family));
    }
    let entering = entering(desired, family);
    if !entering.is_empty() {
        chains.push(hooked(
            Table::Mangle,
            "DIBS-PREROUTING",
            "PREROUTING",
            entering,
        ));
    }
    let refusals: Vec<String> = ours().map(|bump| refusal(desired, bump, family)).collect();
    if !refusals.is_empty() {
        chains.push(hooked(Table::Filter, "DIBS-REFUSE", "OUTPUT", refusals));
        let passing = ours().flat_map(|bump| passing(desired, bump, family));
        let passing = passing.collect();
        chains.push(hooked(Table::Filter, FORWARD, "FORWARD", passing));
    }
    if closed {
        chains.push(hooked(
            Table::Mangle,
            "DIBS-POSTROUTING",
            "POSTROUTING",
            guard(desired, family),
        ));
    }
    chains
}

/// Where packets that come in are sorted.
fn entering(desired: &Desired, family: Family) -> Vec<String> {
    let mut rules = Vec::new();
    let closed = desired.fail == Fail::Closed;
    let peers = desired.peers(family);
    if closed {
        let locked = desired.marks.locked_bit();
        rules.push(format!(
            "-m connmark --mark {locked:#x}/{locked:#x} -j {LOCKED}"
        ));
        if !required(desired, family).is_empty() {
            rules.extend(peers.iter().map(|p| words([from(*p), jump(REQUIRED_IN)])));
        }
    }
    let ours = desired
        .bumps
        .iter()
        .filter(|bump| bump.owner == DeviceOwner::Ours);
    rules.extend(ours.map(|bump| format!("-i {} -g DIBS-IN-{}", bump.device, bump.id)));
    if closed {
        rules.extend(
            peers
                .iter()
                .map(|p| words([from(*p), format!("-g {PLAIN}")])),
        );
    }
    rules
}

/// What is dropped unless steering fails open: then plain packets must be taken as they are sent.
fn closed_guards(desired: &Desired, family: Family) -> Vec<Chain> {
    let marks = desired.marks;
    let by_its_device = |bump: &BumpRoute| {
        format!(
            "-i {} -m connmark --mark {:#x}/{:#x} -j RETURN",
            bump.device,
            marks.bump(bump.id),
            marks.bump_mask()
        )
    };
    // Without a bump LOCKED means nothing: somebody else may have taken the bump away.
    let free = format!("-m connmark --mark 0x0/{:#x} -j RETURN", marks.bump_mask());
    // This host itself says so where a segment is too long for a device: TCP has to hear of it.
    let mut locked = vec![free, "-i lo -j RETURN".to_owned()];
    // What the networks behind this host send, unless it comes from elsewhere in their name.
    let passages = desired.passages(&desired.peers(family), family);
    locked.extend(
        passages
            .into_iter()
            .map(|(near, far)| words([from(near), to(far), "-m rpfilter -j RETURN".to_owned()])),
    );
    locked.extend(desired.bumps.iter().map(by_its_device));
    locked.push("-j DROP".to_owned());
    let mut chains = vec![chain(Table::Mangle, LOCKED, locked)];

    // No TCP sends these, but Linux takes the RST in them, and conntrack knows them for no connection's.
    let mut plain: Vec<String> = ["SYN,RST", "FIN,RST", "RST,URG"]
        .map(|flags| format!("-p tcp -m tcp --tcp-flags {flags} {flags} -j DROP"))
        .into();
    let pinned: Vec<String> = rules_of(desired, family, Binding::Pinned)
        .flat_map(|(rule, bump)| {
            let elsewhere = match bump.owner {
                DeviceOwner::Ours => String::new(),
                DeviceOwner::Foreign => format!("! -i {}", bump.device),
            };
            inbound_matches(desired, rule, bump, family, &elsewhere)
        })
        .map(|matched| format!("{matched} -j DROP"))
        .collect();
    if !pinned.is_empty() {
        let chosen = marks.override_bit();
        plain.push(format!(
            "-m connmark --mark {chosen:#x}/{chosen:#x} -j RETURN"
        ));
        plain.extend(pinned);
    }
    chains.push(chain(Table::Mangle, PLAIN, plain));

    let required = required(desired, family);
    if !required.is_empty() {
        let inbound = required.iter().flat_map(|(rule, bump)| {
            inbound_matches(
                desired,
                rule,
                bump,
                family,
                &format!("! -i {}", bump.device),
            )
        });
        let inbound = inbound.map(|matched| format!("{matched} -j DROP"));
        chains.push(chain(Table::Mangle, REQUIRED_IN, inbound.collect()));
        let outbound = required.iter().flat_map(|(rule, bump)| {
            class_matches(
                desired,
                rule,
                bump,
                family,
                &format!("! -o {}", bump.device),
            )
        });
        let outbound = outbound.map(|matched| format!("{matched} -j DROP"));
        // A peer's prefix may hold addresses of this very host.
        let rules = ["-o lo -j RETURN".to_owned()].into_iter().chain(outbound);
        chains.push(chain(Table::Mangle, REQUIRED_OUT, rules.collect()));
    }
    chains
}

/// The rules of a binding that concern `family`, with their bumps.
fn rules_of(
    desired: &Desired,
    family: Family,
    binding: Binding,
) -> impl Iterator<Item = (&ClassRule, &BumpRoute)> {
    let bump_of = |rule: &ClassRule| desired.bumps.iter().find(|bump| bump.id == rule.bump);
    desired
        .rules
        .iter()
        .filter(move |rule| rule.binding == binding)
        .filter_map(move |rule| Some((rule, bump_of(rule)?)))
        .filter(move |(rule, bump)| !class_matches(desired, rule, bump, family, "").is_empty())
}

/// The rules that require a bump.
pub(crate) fn required(desired: &Desired, family: Family) -> Vec<(&ClassRule, &BumpRoute)> {
    rules_of(desired, family, Binding::Required).collect()
}

/// What may come out of a TUN of ours (docs/threat-model.md, "The peer").
fn inbound(desired: &Desired, bump: &BumpRoute, family: Family) -> Vec<String> {
    let (loopback, redirect) = match family {
        Family::V4 => ("127.0.0.0/8", "-p icmp -m icmp --icmp-type 5"),
        Family::V6 => ("::1/128", "-p ipv6-icmp -m icmp6 --icmpv6-type 137"),
    };
    let mut rules = vec![
        format!("-d {loopback} -j DROP"),
        format!("{redirect} -j DROP"),
    ];
    // Not to all hosts of a network at once.
    let passages = desired.passages(&bump.peers, family).into_iter();
    rules.extend(passages.map(|(near, far)| {
        let unicast = "-m addrtype --dst-type UNICAST -j RETURN".to_owned();
        words([from(far), to(near), unicast])
    }));
    rules.push("-m addrtype ! --dst-type LOCAL -j DROP".to_owned());
    rules.extend(
        widest(&bump.peers, family)
            .iter()
            .map(|p| words([from(*p), "-j RETURN".into()])),
    );
    rules.push("-j DROP".to_owned());
    rules
}

/// What came out of a TUN of ours was for this host, until some rule of DNAT gave it another destination;
/// what others send has no business in one (docs/threat-model.md, "The peer"), but for the networks that this host
/// forwards for, to those behind the peers and back.
fn passing(desired: &Desired, bump: &BumpRoute, family: Family) -> Vec<String> {
    let device = &bump.device;
    let mark = desired.marks.bump(bump.id);
    let mask = desired.marks.bump_mask();
    let mut rules = Vec::new();
    for (near, far) in desired.passages(&bump.peers, family) {
        let comes = format!("-i {device} -j RETURN");
        rules.push(words([from(far), to(near), comes]));
        let goes = format!("-o {device} -m mark --mark {mark:#x}/{mask:#x} -j RETURN");
        rules.push(words([from(near), to(far), goes]));
    }
    rules.extend(["-i", "-o"].map(|way| format!("{way} {device} -j DROP")));
    rules
}

/// Plain packets that fall into a TUN of ours get an ICMP error, as from a host that is not reachable.
fn refusal(desired: &Desired, bump: &BumpRoute, family: Family) -> String {
    let answer = match family {
        Family::V4 => "icmp-host-unreachable",
        Family::V6 => "icmp6-addr-unreachable",
    };
    let plain = desired.marks.bump_mask();
    format!(
        "-o {} -m mark --mark 0x0/{plain:#x} -j REJECT --reject-with {answer}",
        bump.device
    )
}

/// The guard: plain and own packets pass, marked ones by their bump's device only. Each bump has a drop
/// rule of its own so that its counter tells; the last one is for ids that no bump has.
fn guard(desired: &Desired, family: Family) -> Vec<String> {
    let marks = desired.marks;
    let mask = marks.bump_mask();
    let plain = format!("-m mark --mark 0x0/{mask:#x} -j RETURN");
    let own = format!("-m mark --mark {:#x}/{mask:#x} -j RETURN", marks.own());
    let mut rules = Vec::new();
    if required(desired, family).is_empty() {
        rules.extend([plain, own]);
    } else {
        let peers = desired.peers(family);
        rules.push(own);
        rules.extend(peers.iter().map(|p| words([to(*p), jump(REQUIRED_OUT)])));
        rules.push(plain);
    }
    for bump in &desired.bumps {
        let mark = marks.bump(bump.id);
        rules.push(format!(
            "-o {} -m mark --mark {mark:#x}/{mask:#x} -j RETURN",
            bump.device
        ));
        rules.push(format!("-m mark --mark {mark:#x}/{mask:#x} -j DROP"));
    }
    rules.push("-j DROP".to_owned());
    rules
}
