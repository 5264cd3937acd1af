//! The iptables chains that carry out a wish, rule by rule, in the form in which iptables-save prints them.
//!
//! A packet on its way out (mangle OUTPUT): own datagrams and everything not meant for a peer pass
//! untouched; then the connection's OVERRIDE, the class rules in order, the followed ctmark. Each of the
//! three leaves the bump id in the packet's mark, and only there. On its way in (mangle INPUT): what came
//! by a bump's device makes a connection without a bump follow it. The guard (mangle POSTROUTING) drops
//! what carries a bump's id and does not leave by its device.

use crate::desired::{BumpRoute, ClassRule, DeviceOwner, Fail, Protocol, widest};
use crate::{Desired, Family, Prefix};

/// An iptables table that holds chains of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// Marks and guards.
    Mangle,
    /// The only table that can answer with an ICMP error.
    Filter,
}

impl Table {
    pub(crate) const ALL: [Table; 2] = [Table::Mangle, Table::Filter];

    /// The table's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Table::Mangle => "mangle",
            Table::Filter => "filter",
        }
    }
}

/// What a chain is for: guards are installed before markers and removed after them, so that no marked
/// packet is ever without a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Drops or refuses.
    Guard,
    /// Sets marks.
    Marker,
}

impl Role {
    /// The role of one of our chains, found by name in the kernel.
    pub(crate) fn of(name: &str) -> Self {
        let guard = matches!(name, "DIBS-POSTROUTING" | "DIBS-PREROUTING" | "DIBS-REFUSE")
            || name.starts_with("DIBS-IN-");
        if guard { Role::Guard } else { Role::Marker }
    }
}

/// One of our chains as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its table.
    pub table: Table,
    /// Its name, which begins with `DIBS-`.
    pub name: String,
    /// The built-in chain whose first rule jumps here, if any.
    pub hook: Option<&'static str>,
    /// Its rules, without `-A NAME`.
    pub rules: Vec<String>,
}

/// The chains of `family`, those that others refer to first.
pub(crate) fn chains(desired: &Desired, family: Family) -> Vec<Chain> {
    if desired.peers(family).is_empty() {
        return Vec::new();
    }
    let mut chains = guards(desired, family);
    chains.extend(markers(desired, family));
    chains
}

fn chain(table: Table, name: impl Into<String>, rules: Vec<String>) -> Chain {
    Chain {
        table,
        name: name.into(),
        hook: None,
        rules,
    }
}

fn hooked(table: Table, name: &str, hook: &'static str, rules: Vec<String>) -> Chain {
    Chain {
        hook: Some(hook),
        ..chain(table, name, rules)
    }
}

fn guards(desired: &Desired, family: Family) -> Vec<Chain> {
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
            inbound(bump, family),
        ));
    }
    if !chains.is_empty() {
        let entries = ours().map(|bump| format!("-i {} -g DIBS-IN-{}", bump.device, bump.id));
        chains.push(hooked(
            Table::Mangle,
            "DIBS-PREROUTING",
            "PREROUTING",
            entries.collect(),
        ));
        let refusals = ours().map(|bump| refusal(desired, bump, family)).collect();
        chains.push(hooked(Table::Filter, "DIBS-REFUSE", "OUTPUT", refusals));
    }
    if desired.fail == Fail::Closed {
        chains.push(hooked(
            Table::Mangle,
            "DIBS-POSTROUTING",
            "POSTROUTING",
            guard(desired),
        ));
    }
    chains
}

/// What may come out of a TUN of ours (SECURITY.md 6).
fn inbound(bump: &BumpRoute, family: Family) -> Vec<String> {
    let (loopback, redirect) = match family {
        Family::V4 => ("127.0.0.0/8", "-p icmp -m icmp --icmp-type 5"),
        Family::V6 => ("::1/128", "-p ipv6-icmp -m icmp6 --icmpv6-type 137"),
    };
    let mut rules = vec![
        format!("-d {loopback} -j DROP"),
        "-m addrtype ! --dst-type LOCAL -j DROP".to_owned(),
        format!("{redirect} -j DROP"),
    ];
    rules.extend(
        widest(&bump.peers, family)
            .iter()
            .map(|p| words([from(*p), "-j RETURN".into()])),
    );
    rules.push("-j DROP".to_owned());
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
fn guard(desired: &Desired) -> Vec<String> {
    let marks = desired.marks;
    let mask = marks.bump_mask();
    let mut rules = vec![
        format!("-m mark --mark 0x0/{mask:#x} -j RETURN"),
        format!("-m mark --mark {:#x}/{mask:#x} -j RETURN", marks.own()),
    ];
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

fn markers(desired: &Desired, family: Family) -> Vec<Chain> {
    let marks = desired.marks;
    let mask = marks.bump_mask();
    let chosen = marks.override_bit();
    let mut chains = vec![chain(
        Table::Mangle,
        "DIBS-FOLLOW",
        vec![format!(
            "-j CONNMARK --restore-mark --nfmask {mask:#x} --ctmask {mask:#x}"
        )],
    )];
    let mut steer = vec![
        // A peer's prefix may hold addresses of this very host.
        "-o lo -j RETURN".to_owned(),
        format!("-m connmark --mark {chosen:#x}/{chosen:#x} -g DIBS-FOLLOW"),
    ];
    for bump in &desired.bumps {
        let matches: Vec<String> = desired
            .rules
            .iter()
            .filter(|rule| rule.bump == bump.id)
            .flat_map(|rule| class_matches(desired, rule, bump, family))
            .collect();
        if !matches.is_empty() {
            let value = format!("--set-xmark {:#x}/{mask:#x}", marks.bump(bump.id));
            chains.push(chain(
                Table::Mangle,
                format!("DIBS-SET-{}", bump.id),
                vec![format!("-j CONNMARK {value}"), format!("-j MARK {value}")],
            ));
        }
    }
    for rule in &desired.rules {
        let bump = desired.bumps.iter().find(|bump| bump.id == rule.bump);
        let matches = bump.map(|bump| class_matches(desired, rule, bump, family));
        for matched in matches.into_iter().flatten() {
            steer.push(words([matched, format!("-g DIBS-SET-{}", rule.bump)]));
        }
    }
    steer.push(format!("-m connmark ! --mark 0x0/{mask:#x} -g DIBS-FOLLOW"));
    chains.push(chain(Table::Mangle, "DIBS-STEER", steer));

    let mut output = vec![format!(
        "-m mark --mark {:#x}/{mask:#x} -j RETURN",
        marks.own()
    )];
    let peers = desired.peers(family);
    output.extend(
        peers
            .iter()
            .map(|p| words([to(*p), "-g DIBS-STEER".into()])),
    );
    chains.push(hooked(Table::Mangle, "DIBS-OUTPUT", "OUTPUT", output));

    let input = desired
        .bumps
        .iter()
        .flat_map(|bump| follow_up(desired, bump, family))
        .collect();
    chains.push(hooked(Table::Mangle, "DIBS-INPUT", "INPUT", input));
    chains
}

/// What came in by a bump's device pulls its connection there, unless it has a bump already or its
/// user chose plain (SECURITY.md 5). Of a foreign device only what the peers send counts; on our
/// own TUN nothing else gets this far.
fn follow_up(desired: &Desired, bump: &BumpRoute, family: Family) -> Vec<String> {
    let marks = desired.marks;
    let free = marks.bump_mask() | marks.override_bit();
    let rule = |source: String| {
        words([
            source,
            format!("-i {} -m connmark --mark 0x0/{free:#x}", bump.device),
            format!(
                "-j CONNMARK --set-xmark {:#x}/{:#x}",
                marks.bump(bump.id),
                marks.bump_mask()
            ),
        ])
    };
    match bump.owner {
        DeviceOwner::Ours => vec![rule(String::new())],
        DeviceOwner::Foreign => widest(&bump.peers, family)
            .into_iter()
            .map(|peer| rule(from(peer)))
            .collect(),
    }
}

/// The matches of a class rule: one for each destination that both the rule and its bump mean.
fn class_matches(
    desired: &Desired,
    rule: &ClassRule,
    bump: &BumpRoute,
    family: Family,
) -> Vec<String> {
    if rule.source.is_some_and(|source| source.family() != family) {
        return Vec::new();
    }
    let wanted = rule.destination.unwrap_or(family.any());
    if wanted.family() != family {
        return Vec::new();
    }
    let reached = widest(&bump.peers, family);
    let destinations = if reached == desired.peers(family) {
        // DIBS-STEER is entered for these only, so the rule need not say it again.
        vec![wanted]
    } else {
        let narrower = |peer: Prefix| match (wanted.contains(peer), peer.contains(wanted)) {
            (true, _) => Some(peer),
            (_, true) => Some(wanted),
            _ => None,
        };
        reached.into_iter().filter_map(narrower).collect()
    };
    let rest = socket_matches(rule);
    let source = rule.source.map(from).unwrap_or_default();
    destinations
        .into_iter()
        .map(|d| words([source.clone(), to(d), rest.clone()]))
        .collect()
}

fn socket_matches(rule: &ClassRule) -> String {
    let mut text = Vec::new();
    let protocol = match rule.protocol {
        Protocol::Tcp => Some("tcp"),
        Protocol::Udp => Some("udp"),
        Protocol::Any => None,
    };
    if let Some(protocol) = protocol {
        text.push(format!("-p {protocol}"));
        if rule.sport.is_some() || rule.dport.is_some() {
            text.push(format!("-m {protocol}"));
        }
    }
    text.extend(rule.sport.map(|port| format!("--sport {port}")));
    text.extend(rule.dport.map(|port| format!("--dport {port}")));
    if rule.uid.is_some() || rule.gid.is_some() {
        text.push("-m owner".to_owned());
    }
    text.extend(rule.uid.map(|uid| format!("--uid-owner {uid}")));
    text.extend(rule.gid.map(|gid| format!("--gid-owner {gid}")));
    text.push(format!("-m comment --comment dibs-rule-{}", rule.id));
    text.join(" ")
}

fn to(prefix: Prefix) -> String {
    if prefix.length() == 0 {
        String::new()
    } else {
        format!("-d {prefix}")
    }
}

fn from(prefix: Prefix) -> String {
    if prefix.length() == 0 {
        String::new()
    } else {
        format!("-s {prefix}")
    }
}

fn words<const N: usize>(parts: [String; N]) -> String {
    let given: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    given.join(" ")
}
