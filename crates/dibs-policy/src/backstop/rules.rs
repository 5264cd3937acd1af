//! The chains of the backstop and the rules in them.

use super::rule::{Meta, Rule};
use crate::desired::{Binding, BumpRoute, ClassRule, DeviceOwner, Fail, widest};
use crate::nft::{Attributes, Change, Kind};
use crate::{Desired, Family, Prefix};

/// Its name in nftables.
pub(super) const TABLE: &str = "dibs";
/// A table that is never made: the kernel is only asked whether it would.
pub(super) const PROBE: &str = "dibs-probe";

const PRE_ROUTING: u32 = 0;
const LOCAL_IN: u32 = 1;
const FORWARD: u32 = 2;
const LOCAL_OUT: u32 = 3;
const POST_ROUTING: u32 = 4;

/// All rules, by chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ruleset {
    /// Ordered by name; those that others go to come first.
    pub(super) chains: Vec<Chain>,
}

/// A chain with its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) name: String,
    /// Type, hook and priority, if packets enter here.
    base: Option<(&'static str, u32, i32)>,
    pub(super) rules: Vec<Rule>,
}

impl Ruleset {
    /// What `desired` needs; empty where it wants nothing. Not every kernel can do source NAT.
    pub(super) fn of(desired: &Desired, nat: bool) -> Self {
        let gateway = !desired.gateway.is_empty();
        if desired.bumps.is_empty() && !gateway {
            return Self::default();
        }
        let base = |name: &str, kind, hook, priority, rules| Chain {
            name: name.to_owned(),
            base: Some((kind, hook, priority)),
            rules,
        };
        let mut chains = Vec::new();
        if gateway {
            // Connections that pass have no socket to be found by: so they are tracked, bump or no bump.
            chains.push(base("forward", "filter", FORWARD, 300, passing(desired)));
        }
        if desired.fail == Fail::Closed && gateway {
            // Before they are tracked.
            chains.push(base(
                "prerouting",
                "filter",
                PRE_ROUTING,
                -300,
                forged(desired),
            ));
        }
        if desired.fail == Fail::Closed && !desired.bumps.is_empty() {
            // Behind everything that may mark a packet.
            chains.extend([
                base("input", "filter", LOCAL_IN, -140, follow(desired)),
                base("output", "filter", LOCAL_OUT, 300, unmarked(desired)),
                base("postrouting", "filter", POST_ROUTING, -140, astray(desired)),
            ]);
        }
        if nat && !desired.bumps.is_empty() {
            // Before the user's source NAT, at 100.
            chains.push(base(
                "source",
                "nat",
                POST_ROUTING,
                99,
                keep_source(desired),
            ));
        }
        chains.sort_by(|a, b| a.name.cmp(&b.name));
        Self { chains }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    pub(super) fn has(&self, chain: &str) -> bool {
        self.chains.iter().any(|known| known.name == chain)
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.chains.iter().map(|chain| chain.name.clone()).collect()
    }

    /// As the kernel shows it.
    pub(super) fn comments(&self) -> Vec<(String, Vec<String>)> {
        let comments = |chain: &Chain| chain.rules.iter().map(Rule::comment).collect();
        self.chains
            .iter()
            .map(|chain| (chain.name.clone(), comments(chain)))
            .collect()
    }

    /// The same, without rules that drop and are not in `other`.
    pub(super) fn without_drops_beyond(&self, other: &Self) -> Self {
        let stays = |chain: &Chain, rule: &Rule| {
            let same = other.chains.iter().find(|found| found.name == chain.name);
            !rule.drops || same.is_some_and(|same| same.rules.contains(rule))
        };
        let narrowed = |chain: &Chain| Chain {
            rules: chain
                .rules
                .iter()
                .filter(|rule| stays(chain, rule))
                .cloned()
                .collect(),
            ..chain.clone()
        };
        Self {
            chains: self.chains.iter().map(narrowed).collect(),
        }
    }
}

/// What passes a gateway: it follows and is kept in as what is this host's own.
fn passing(desired: &Desired) -> Vec<Rule> {
    let marks = desired.marks;
    let (mask, chosen) = (marks.bump_mask(), marks.override_bit());
    if desired.bumps.is_empty() || desired.fail == Fail::Open {
        return vec![Rule::new("tracked").ct_mark(mask, 0, true).returns()];
    }
    let mut rules = Vec::new();
    for (family, set) in UNTRACKED {
        for bump in &desired.bumps {
            for (near, far) in desired.passages(&bump.peers, family) {
                let came = untracked(bump, family).prefix(far, false);
                rules.extend(remembered(came.destination(near), family, set));
            }
        }
    }
    for bump in &desired.bumps {
        for family in Family::BOTH {
            for (near, far) in desired.passages(&bump.peers, family) {
                let came = Rule::new(format!("follow bump {}", bump.id));
                let came = came.device(Meta::InName, bump).family(family);
                let came = match bump.owner {
                    DeviceOwner::Ours => came,
                    DeviceOwner::Foreign => came.protocol(libc::IPPROTO_TCP),
                };
                let came = came.prefix(far, false).destination(near);
                rules.push(came.follows(desired, bump));
            }
        }
    }
    rules.push(Rule::new("marked").mark(mask, 0, false).returns());
    for (family, bumped, plain) in SETS {
        let connection = |label: &str, set| Rule::new(label).connection(family).among(set);
        rules.push(connection("on a bump", bumped).drops());
        rules.push(connection("plain by choice", plain).returns());
        for (near, far) in desired.passages(&desired.peers(family), family) {
            let from_near = |label: &str| {
                let rule = Rule::new(label).family(family);
                rule.prefix(near, false).destination(far)
            };
            let plain = from_near("marked plain by choice");
            rules.push(plain.ct_mark(mask | chosen, chosen, true).returns());
            let bumped = from_near("marked for a bump");
            rules.push(bumped.of_tcp().ct_mark(mask, 0, false).drops());
        }
        for near in widest(&desired.gateway, family) {
            rules.extend(by_class(desired, family, Some(near)));
        }
    }
    rules.extend(UNTRACKED.map(answers));
    rules
}

/// What comes in plain of connections that pass here and are locked, or from elsewhere in the name of who
/// is behind this host. conntrack would believe it, and nobody could say better, for their sockets
/// are not here.
fn forged(desired: &Desired) -> Vec<Rule> {
    let mut rules: Vec<Rule> = desired
        .bumps
        .iter()
        .map(|bump| {
            let came = Rule::new(format!("came by bump {}", bump.id));
            came.device(Meta::InName, bump).returns()
        })
        .collect();
    for (family, set) in [(Family::V4, "locked4"), (Family::V6, "locked6")] {
        let came = Rule::new("locked").connection_back(family).among(set);
        rules.push(came.drops());
        let sent = Rule::new("sent from elsewhere").connection(family);
        rules.push(sent.among(set).no_way_back().drops());
    }
    rules
}

/// The sets of each family: of connections on bumps, and of those that are plain by choice.
const SETS: [(Family, &str, &str); 2] = [
    (Family::V4, "bumped4", "plain4"),
    (Family::V6, "bumped6", "plain6"),
];

/// The sets of connections that came by a bump and that the user exempts from tracking (NOTRACK).
const UNTRACKED: [(Family, &str); 2] = [(Family::V4, "untracked4"), (Family::V6, "untracked6")];

/// What comes in by a bump's device and is exempt from tracking. Such a connection has no mark to follow by.
fn untracked(bump: &BumpRoute, family: Family) -> Rule {
    Rule::new(format!("untracked, by bump {}", bump.id))
        .untracked()
        .device(Meta::InName, bump)
        .family(family)
        .protocol(libc::IPPROTO_TCP)
}

/// Such connections are remembered; those for which there is no room are dropped.
fn remembered(came: Rule, family: Family, set: &'static str) -> [Rule; 2] {
    let key = came.clone().connection_back(family);
    [key.remember(set).returns(), came.drops()]
}

/// What is sent in answer to them is dropped, unless a choice or a class rule marks it.
fn answers((family, set): (Family, &'static str)) -> Rule {
    let connection = Rule::new("came by a bump, untracked").connection(family);
    connection.among(set).drops()
}

/// What comes in by a bump's device makes its connection follow, as DIBS-INPUT does.
fn follow(desired: &Desired) -> Vec<Rule> {
    let of_bump = |bump: &BumpRoute| {
        let came = Rule::new(format!("follow bump {}", bump.id)).device(Meta::InName, bump);
        let came = match bump.owner {
            DeviceOwner::Ours => vec![came],
            DeviceOwner::Foreign => {
                let of_peer = |peer: &Prefix| {
                    let came = came.clone().family(peer.family());
                    came.protocol(libc::IPPROTO_TCP).prefix(*peer, false)
                };
                bump.peers.iter().map(of_peer).collect()
            }
        };
        let follows = came.into_iter().map(|rule| rule.follows(desired, bump));
        follows.collect::<Vec<_>>()
    };
    let mut rules = Vec::new();
    for (family, set) in UNTRACKED {
        for bump in &desired.bumps {
            let peers = match bump.owner {
                DeviceOwner::Ours => vec![family.any()],
                DeviceOwner::Foreign => widest(&bump.peers, family),
            };
            for peer in peers {
                let came = untracked(bump, family).prefix(peer, false);
                rules.extend(remembered(came, family, set));
            }
        }
    }
    rules.extend(desired.bumps.iter().flat_map(of_bump));
    rules
}

/// What this host sends, and no chain of ours has marked although it should be.
fn unmarked(desired: &Desired) -> Vec<Rule> {
    let marks = desired.marks;
    let (mask, chosen) = (marks.bump_mask(), marks.override_bit());
    let mut rules = vec![
        Rule::new("marked").mark(mask, 0, false).returns(),
        Rule::new("local").name(Meta::OutName, "lo").returns(),
    ];
    for (family, bumped, plain) in SETS {
        let connection = |label: &str, set| Rule::new(label).connection(family).among(set);
        rules.push(connection("on a bump", bumped).drops());
        rules.push(connection("plain by choice", plain).returns());
        for peer in desired.peers(family) {
            let to = |label: &str| Rule::new(label).family(family).destination(peer);
            let plain = to("marked plain by choice").ct_mark(mask | chosen, chosen, true);
            rules.push(plain.returns());
            let bumped = to("marked for a bump").of_tcp();
            rules.push(bumped.ct_mark(mask, 0, false).drops());
        }
        rules.extend(by_class(desired, family, None));
    }
    rules.extend(UNTRACKED.map(answers));
    rules
}

/// What is unmarked against class rules, in the order of DIBS-STEER, or of DIBS-PASS for what comes from
/// the network `near`: the first decides.
fn by_class(desired: &Desired, family: Family, near: Option<Prefix>) -> Vec<Rule> {
    let mut rules = Vec::new();
    let meant = |class: &&ClassRule| near.is_none() || !class.is_of_sockets();
    let is_required = |class: &&ClassRule| class.binding == Binding::Required;
    let all = desired.rules.iter().filter(meant);
    let required = all.clone().filter(is_required);
    let others = all.filter(|class| !is_required(class));
    // What iptables alone understands stays its business: without that, a rule would mean more.
    for class in required.chain(others).filter(|c| c.matches.is_empty()) {
        let Some(bump) = desired.bumps.iter().find(|bump| bump.id == class.bump) else {
            continue;
        };
        let source = match (class.source, near) {
            (Some(source), Some(near)) => match source.common(near) {
                Some(both) => Some(both),
                None => continue,
            },
            (source, near) => source.or(near),
        };
        let class = &ClassRule {
            source,
            ..class.clone()
        };
        let to = |destination| Rule::of_class(class, family, destination);
        let meant = destinations(class, bump, family);
        if class.binding != Binding::Preferred {
            rules.extend(meant.into_iter().map(|destination| to(destination).drops()));
            continue;
        }
        for (prefix, up) in desired.sessions_of(bump, family) {
            for destination in meant.iter().filter_map(|net| net.common(prefix)) {
                let rule = to(destination);
                rules.push(if up { rule.drops() } else { rule.returns() });
            }
        }
    }
    rules
}

/// The guard once more: what carries a bump's mark leaves by that bump's device.
fn astray(desired: &Desired) -> Vec<Rule> {
    let marks = desired.marks;
    let mask = marks.bump_mask();
    let mut rules = vec![
        Rule::new("unmarked").mark(mask, 0, true).returns(),
        Rule::new("own").mark(mask, marks.own(), true).returns(),
    ];
    rules.extend(desired.bumps.iter().map(|bump| {
        Rule::new(format!("bump {}", bump.id))
            .mark(mask, marks.bump(bump.id), true)
            .device(Meta::OutName, bump)
            .returns()
    }));
    rules.push(Rule::new("astray").drops());
    rules
}

/// The far end knows a steered connection by its own address: source NAT that the user has for others
/// finds it done. This accepts nothing: other hooks and tables see the packet all the same.
fn keep_source(desired: &Desired) -> Vec<Rule> {
    let marks = desired.marks;
    let of_bump = |bump: &BumpRoute| {
        let rule = |family| {
            let leaves = Rule::new("keep the source").device(Meta::OutName, bump);
            let leaves = match bump.owner {
                DeviceOwner::Ours => leaves,
                // What else goes by it is not ours.
                DeviceOwner::Foreign => leaves.mark(marks.bump_mask(), marks.bump(bump.id), true),
            };
            leaves.family(family).keep_source(family)
        };
        let leaving = Family::BOTH.map(rule).into_iter();
        leaving.chain(keep_passing(desired, bump))
    };
    desired.bumps.iter().flat_map(of_bump).collect()
}

/// The same of what came by a bump for a network behind this host: what its hosts answered to another
/// address would not be known for theirs.
fn keep_passing(desired: &Desired, bump: &BumpRoute) -> Vec<Rule> {
    let marks = desired.marks;
    let of_family = |family| {
        let passages = desired.passages(&bump.peers, family).into_iter();
        passages.map(move |(near, far)| {
            let comes = Rule::new("keep the source").family(family);
            comes
                .ct_mark(marks.bump_mask(), marks.bump(bump.id), true)
                .prefix(far, false)
                .destination(near)
                .keep_source(family)
        })
    };
    Family::BOTH.into_iter().flat_map(of_family).collect()
}

/// The destinations that both a class rule and its bump mean.
fn destinations(rule: &ClassRule, bump: &BumpRoute, family: Family) -> Vec<Prefix> {
    if !rule.concerns(family) {
        return Vec::new();
    }
    let wanted = rule.destination.unwrap_or(family.any());
    let reached = widest(&bump.peers, family);
    reached
        .into_iter()
        .filter_map(|peer| peer.common(wanted))
        .collect()
}

impl Chain {
    pub(super) fn make(&self) -> Change {
        let mut attributes = Attributes::default().text(1, TABLE).text(3, &self.name);
        if let Some((kind, hook, priority)) = self.base {
            // NFTA_HOOK_HOOKNUM, _PRIORITY.
            let hook = Attributes::default().number(1, hook);
            let hook = hook.bytes(2, &priority.to_be_bytes());
            attributes = attributes.nested(4, hook).text(7, kind);
        }
        Change {
            kind: Kind::NewChain,
            attributes,
        }
    }
}

/// Of a set that rules fill: how many connections, so that it is bounded.
fn size(flags: u32) -> Attributes {
    match flags {
        0 => Attributes::default(),
        _ => Attributes::default().number(1, 65_536),
    }
}

/// The sets of connections.
pub(super) fn sets() -> impl Iterator<Item = Change> {
    // nft(8)'s numbers of types, six bits each: ipv4_addr, ipv6_addr, inet_service.
    const PORT: u32 = 13;
    // Filled by rules, for a time.
    const DYNAMIC: u32 = 0x30;
    let kinds = [
        ("bumped4", 7, 16, 0),
        ("bumped6", 8, 40, 0),
        ("plain4", 7, 16, 0),
        ("plain6", 8, 40, 0),
        ("locked4", 7, 16, 0),
        ("locked6", 8, 40, 0),
        ("untracked4", 7, 16, DYNAMIC),
        ("untracked6", 8, 40, DYNAMIC),
    ];
    kinds
        .into_iter()
        .enumerate()
        .map(|(n, (name, address, length, flags))| {
            let kind = ((address << 6 | PORT) << 6 | address) << 6 | PORT;
            let number = u32::try_from(n).expect("a few") + 1;
            Change {
                kind: Kind::NewSet,
                // _TABLE, _NAME, _FLAGS, _KEY_TYPE, _KEY_LEN, _DESC (_SIZE; those filled by us need none), _ID.
                attributes: Attributes::default()
                    .text(1, TABLE)
                    .text(2, name)
                    .number(3, flags)
                    .number(4, kind)
                    .number(5, length)
                    .nested(9, size(flags))
                    .number(10, number),
            }
        })
}
