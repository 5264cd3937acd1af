//! The iptables chains that carry out a wish, rule by rule, in the form in which iptables-save prints them.
//!
//! A packet on its way out (mangle OUTPUT): own datagrams and everything not meant for a peer pass
//! untouched; then the rules that require a bump, the connection's OVERRIDE, the other class rules in
//! order, the followed ctmark of a TCP connection. Each of the four leaves the bump id in the packet's
//! mark, and only there. The guard (mangle POSTROUTING) drops what carries a bump's id and does not leave by its device, and
//! what is required and does not.
//!
//! On its way in (mangle PREROUTING): what belongs to a LOCKED connection, or is required, and did not
//! come by its bump's device is dropped; then (mangle INPUT) what came by such a device makes a TCP
//! connection without a bump follow it.
//!
//! On its way through a gateway: what the networks behind it send the peers' is marked as on its way out,
//! but before it is routed (mangle PREROUTING), and makes its connection follow in mangle FORWARD.

use crate::desired::{Binding, BumpRoute, ClassRule, DeviceOwner, Protocol, widest};
use crate::guards::{FORWARD, LOCKED, PLAIN, REQUIRED_IN, REQUIRED_OUT, guards, required};
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
        let guard = matches!(
            name,
            "DIBS-POSTROUTING"
                | "DIBS-PREROUTING"
                | "DIBS-REFUSE"
                | FORWARD
                | LOCKED
                | PLAIN
                | REQUIRED_IN
                | REQUIRED_OUT
        ) || name.starts_with("DIBS-IN-");
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

pub(crate) fn chain(table: Table, name: impl Into<String>, rules: Vec<String>) -> Chain {
    Chain {
        table,
        name: name.into(),
        hook: None,
        rules,
    }
}

pub(crate) fn hooked(table: Table, name: &str, hook: &'static str, rules: Vec<String>) -> Chain {
    Chain {
        hook: Some(hook),
        ..chain(table, name, rules)
    }
}

/// What belongs to a TCP connection: its packets, and ICMP errors about it.
const OF_TCP: &str = "-m conntrack --ctproto 6";

fn markers(desired: &Desired, family: Family) -> Vec<Chain> {
    let marks = desired.marks;
    let mask = marks.bump_mask();
    let mut chains = vec![chain(
        Table::Mangle,
        "DIBS-FOLLOW",
        vec![format!(
            "{OF_TCP} -j CONNMARK --restore-mark --nfmask {mask:#x} --ctmask {mask:#x}"
        )],
    )];
    for bump in &desired.bumps {
        let id = bump.id;
        let used = |binding: fn(Binding) -> bool| {
            let mut rules = desired.rules.iter().filter(|rule| rule.bump == id);
            rules.any(|rule| {
                binding(rule.binding) && !class_matches(desired, rule, bump, family, "").is_empty()
            })
        };
        let set = |value: u32, mask: u32| format!("--set-xmark {value:#x}/{mask:#x}");
        let value = marks.bump(id);
        if used(|binding| binding != Binding::Required) {
            let set = set(value, mask);
            let rules = vec![format!("-j CONNMARK {set}"), format!("-j MARK {set}")];
            chains.push(chain(Table::Mangle, format!("DIBS-SET-{id}"), rules));
        }
        if used(|binding| binding == Binding::Required) {
            let locked = marks.locked_bit();
            let rules = vec![
                format!("-j CONNMARK {}", set(value | locked, mask | locked)),
                format!("-j MARK {}", set(value, mask)),
            ];
            chains.push(chain(Table::Mangle, format!("DIBS-LOCK-{id}"), rules));
        }
        if used(|binding| binding == Binding::Preferred) {
            let where_to = |(prefix, up): (Prefix, bool)| {
                let chain = if up {
                    format!("DIBS-SET-{id}")
                } else {
                    "DIBS-FOLLOW".to_owned()
                };
                words([to(prefix), format!("-g {chain}")])
            };
            let rules = desired.sessions_of(bump, family).into_iter().map(where_to);
            let name = format!("DIBS-PREFER-{id}");
            chains.push(chain(Table::Mangle, name, rules.collect()));
        }
    }
    let passages = desired.passages(&desired.peers(family), family);
    // A peer's prefix may hold addresses of this very host.
    let own = steer(desired, family, "-o lo -j RETURN", |_| true);
    chains.push(chain(Table::Mangle, "DIBS-STEER", own));
    if !passages.is_empty() {
        let own = "-m addrtype --dst-type LOCAL -j RETURN";
        let of_others = steer(desired, family, own, |rule| !rule.is_of_sockets());
        chains.push(chain(Table::Mangle, "DIBS-PASS", of_others));
    }

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
    if !passages.is_empty() {
        let entered =
            |(near, far): (Prefix, Prefix)| words([from(near), to(far), "-g DIBS-PASS".to_owned()]);
        let rules = passages.into_iter().map(entered).collect();
        let (name, hook) = ("DIBS-GATEWAY", "PREROUTING");
        chains.push(hooked(Table::Mangle, name, hook, rules));
        let bumps = desired.bumps.iter();
        let rules = bumps.flat_map(|bump| follow_passing(desired, bump, family));
        let (name, hook) = ("DIBS-PASSING", "FORWARD");
        chains.push(hooked(Table::Mangle, name, hook, rules.collect()));
    }
    chains
}

/// The rules in the order in which they decide, behind what returns packets that are not to be steered.
fn steer(
    desired: &Desired,
    family: Family,
    returned: &str,
    meant: impl Fn(&ClassRule) -> bool,
) -> Vec<String> {
    let marks = desired.marks;
    let (mask, chosen) = (marks.bump_mask(), marks.override_bit());
    let mut steer = vec![returned.to_owned()];
    let required = required(desired, family).into_iter();
    for (rule, bump) in required.filter(|(rule, _)| meant(rule)) {
        let matches = class_matches(desired, rule, bump, family, "");
        steer.extend(
            matches
                .into_iter()
                .map(|matched| words([matched, format!("-g DIBS-LOCK-{}", rule.bump)])),
        );
    }
    steer.push(format!(
        "-m connmark --mark {chosen:#x}/{chosen:#x} -g DIBS-FOLLOW"
    ));
    for rule in desired.rules.iter().filter(|rule| meant(rule)) {
        let bump = desired.bumps.iter().find(|bump| bump.id == rule.bump);
        let bump = bump.filter(|_| rule.binding != Binding::Required);
        let matches = bump.map(|bump| class_matches(desired, rule, bump, family, ""));
        for matched in matches.into_iter().flatten() {
            let how = match rule.binding {
                Binding::Preferred => "PREFER",
                _ => "SET",
            };
            steer.push(words([matched, format!("-g DIBS-{how}-{}", rule.bump)]));
        }
    }
    steer.push(format!("-m connmark ! --mark 0x0/{mask:#x} -g DIBS-FOLLOW"));
    steer
}

/// What came in by a bump's device pulls its TCP connection there, unless it has a bump already or its
/// user chose plain (docs/switching.md). Of a foreign device only what peers send counts, for it may carry
/// things of others; by our own TUN nothing else gets this far.
fn follow_up(desired: &Desired, bump: &BumpRoute, family: Family) -> Vec<String> {
    match bump.owner {
        DeviceOwner::Ours => vec![followed(desired, bump, String::new(), OF_TCP)],
        DeviceOwner::Foreign => widest(&bump.peers, family)
            .into_iter()
            .map(|peer| followed(desired, bump, from(peer), "-p tcp"))
            .collect(),
    }
}

/// The same of what is forwarded.
fn follow_passing(desired: &Desired, bump: &BumpRoute, family: Family) -> Vec<String> {
    let protocol = match bump.owner {
        DeviceOwner::Ours => OF_TCP,
        DeviceOwner::Foreign => "-p tcp",
    };
    let passages = desired.passages(&bump.peers, family).into_iter();
    let ends = passages.map(|(near, far)| words([from(far), to(near)]));
    ends.map(|ends| followed(desired, bump, ends, protocol))
        .collect()
}

fn followed(desired: &Desired, bump: &BumpRoute, ends: String, protocol: &str) -> String {
    let marks = desired.marks;
    let free = marks.bump_mask() | marks.override_bit();
    words([
        ends,
        format!("-i {}", bump.device),
        protocol.to_owned(),
        format!("-m connmark --mark 0x0/{free:#x}"),
        format!(
            "-j CONNMARK --set-xmark {:#x}/{:#x}",
            marks.bump(bump.id),
            marks.bump_mask()
        ),
    ])
}

/// The matches of a class rule: one for each destination that both the rule and its bump mean. `device`
/// is what else is said of it.
pub(crate) fn class_matches(
    desired: &Desired,
    rule: &ClassRule,
    bump: &BumpRoute,
    family: Family,
    device: &str,
) -> Vec<String> {
    let source = rule.source.map(from).unwrap_or_default();
    let device = match &rule.interface {
        Some(interface) => format!("-o {interface}"),
        None => device.to_owned(),
    };
    let rest = further_matches(rule);
    destinations(desired, rule, bump, family)
        .into_iter()
        .map(|d| words([source.clone(), to(d), device.clone(), rest.clone()]))
        .collect()
}

/// The same for what the far end sends. Whose socket a packet is for is not known that early, and what
/// shows only in what this host sends not at all, so a rule that names such has none.
pub(crate) fn inbound_matches(
    desired: &Desired,
    rule: &ClassRule,
    bump: &BumpRoute,
    family: Family,
    device: &str,
) -> Vec<String> {
    if rule.uid.is_some() || rule.shows_only_sending() {
        return Vec::new();
    }
    let far = ClassRule {
        dport: rule.sport,
        sport: rule.dport,
        ..rule.clone()
    };
    let local = rule.source.map(to).unwrap_or_default();
    let rest = further_matches(&far);
    destinations(desired, rule, bump, family)
        .into_iter()
        .map(|d| words([from(d), local.clone(), device.to_owned(), rest.clone()]))
        .collect()
}

/// The destinations that both a rule and its bump mean.
fn destinations(
    desired: &Desired,
    rule: &ClassRule,
    bump: &BumpRoute,
    family: Family,
) -> Vec<Prefix> {
    if !rule.concerns(family) {
        return Vec::new();
    }
    let wanted = rule.destination.unwrap_or(family.any());
    let reached = widest(&bump.peers, family);
    if reached == desired.peers(family) {
        // The chains are entered for these only, so the rule need not say it again.
        return vec![wanted];
    }
    reached
        .into_iter()
        .filter_map(|peer| peer.common(wanted))
        .collect()
}

/// All that a rule names but addresses and devices.
pub(crate) fn further_matches(rule: &ClassRule) -> String {
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
    text.extend(rule.dscp.map(|dscp| format!("-m dscp --dscp {dscp:#04x}")));
    text.extend(rule.hours.map(|hours| {
        let (first, last) = (time(hours.start), time(hours.last()));
        format!("-m time --timestart {first} --timestop {last}")
    }));
    text.extend(rule.matches.iter().cloned());
    text.push(format!("-m comment --comment dibs-rule-{}", rule.id));
    text.join(" ")
}

/// As iptables writes seconds after midnight.
fn time(seconds: u32) -> String {
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}", seconds % 60)
}

pub(crate) fn jump(chain: &str) -> String {
    format!("-j {chain}")
}

pub(crate) fn to(prefix: Prefix) -> String {
    if prefix.length() == 0 {
        String::new()
    } else {
        format!("-d {prefix}")
    }
}

pub(crate) fn from(prefix: Prefix) -> String {
    if prefix.length() == 0 {
        String::new()
    } else {
        format!("-s {prefix}")
    }
}

pub(crate) fn words<const N: usize>(parts: [String; N]) -> String {
    let given: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    given.join(" ")
}

#[cfg(test)]
#[path = "rules/tests.rs"]
mod tests;
