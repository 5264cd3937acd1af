//! The rules of the backstop, and how they are told the kernel.

use std::fmt::Write as _;
use std::net::IpAddr;

use crate::desired::{Binding, BumpRoute, ClassRule, DeviceOwner, Fail, Hours, Protocol, widest};
use crate::nft::{Attributes, Change, Kind};
use crate::{Desired, Family, Prefix};

/// Its name in nftables.
pub(super) const TABLE: &str = "dibs";

const PRE_ROUTING: u32 = 0;
const LOCAL_IN: u32 = 1;
const FORWARD: u32 = 2;
const LOCAL_OUT: u32 = 3;
const POST_ROUTING: u32 = 4;

/// The verdict register, and the one where other values begin.
const VERDICT: u32 = 0;
const REGISTER: u32 = 1;
/// Registers of four bytes; the first of them is where [`REGISTER`] begins.
const WORDS: u32 = 8;

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

/// Matches and what follows from them, as expressions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    label: String,
    expressions: Attributes,
    drops: bool,
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
            rules.push(bumped.ct_mark(mask, 0, false).drops());
        }
        for near in widest(&desired.gateway, family) {
            rules.extend(by_class(desired, family, Some(near)));
        }
    }
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

/// How long after its last packet such a connection is known, in milliseconds: for as long as Linux answers a
/// SYN again and again.
const UNTRACKED_FOR: u64 = 120_000;

/// Such a connection has no mark to follow by. What this host sends of it is known by these sets, so that it is
/// dropped unless a choice or a class rule marks it.
fn untracked(desired: &Desired) -> Vec<Rule> {
    let mut rules = Vec::new();
    for (family, set) in UNTRACKED {
        for bump in &desired.bumps {
            let came = Rule::new(format!("untracked, by bump {}", bump.id))
                .untracked()
                .device(Meta::InName, bump);
            let peers = match bump.owner {
                DeviceOwner::Ours => vec![family.any()],
                DeviceOwner::Foreign => widest(&bump.peers, family),
            };
            for peer in peers {
                let came = came.clone().family(family).protocol(libc::IPPROTO_TCP);
                let came = came.prefix(peer, false);
                let key = came.clone().connection_back(family);
                rules.push(key.remember(set).returns());
                // There is no room for it.
                rules.push(came.drops());
            }
        }
    }
    rules
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
    let mut rules = untracked(desired);
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
            rules.push(to("marked for a bump").ct_mark(mask, 0, false).drops());
        }
        rules.extend(by_class(desired, family, None));
    }
    for (family, set) in UNTRACKED {
        let connection = Rule::new("came by a bump, untracked").connection(family);
        rules.push(connection.among(set).drops());
    }
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

/// Keys of the `meta` expression.
#[derive(Clone, Copy)]
enum Meta {
    Mark = 3,
    InName = 6,
    OutName = 7,
    Uid = 10,
    Gid = 11,
    Family = 15,
    Protocol = 16,
    Hour = 32,
}

impl Rule {
    fn new(label: impl Into<String>) -> Self {
        Self {
            label: label.into(),
            expressions: Attributes::default(),
            drops: false,
        }
    }

    fn of_class(class: &ClassRule, family: Family, destination: Prefix) -> Self {
        let mut rule = Self::new(format!("dibs-rule-{}", class.id)).family(family);
        let protocol = match class.protocol {
            Protocol::Tcp => Some(libc::IPPROTO_TCP),
            Protocol::Udp => Some(libc::IPPROTO_UDP),
            Protocol::Any => None,
        };
        if let Some(protocol) = protocol {
            rule = rule.protocol(protocol);
        }
        rule = rule.destination(destination);
        if let Some(source) = class.source {
            rule = rule.prefix(source, false);
        }
        for (port, offset) in [(class.sport, 0), (class.dport, 2)] {
            if let Some(port) = port {
                let loaded = rule.payload(REGISTER, Base::Transport, offset, 2);
                rule = loaded.compare(&port.to_be_bytes(), true);
            }
        }
        for (key, id) in [(Meta::Uid, class.uid), (Meta::Gid, class.gid)] {
            if let Some(id) = id {
                rule = rule.meta(key).compare(&id.to_ne_bytes(), true);
            }
        }
        if let Some(interface) = &class.interface {
            rule = rule.name(Meta::OutName, interface.as_str());
        }
        if let Some(dscp) = class.dscp {
            rule = rule.dscp(family, dscp);
        }
        match class.hours {
            Some(hours) => rule.hours(hours),
            None => rule,
        }
    }

    /// In nft(8)'s listing; differs where the rule does.
    fn comment(&self) -> String {
        // FNV-1a.
        let hash = self.expressions.0.iter();
        let hash = hash.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        });
        let mut comment = self.label.clone();
        write!(comment, " #{hash:016x}").expect("writing to a String cannot fail");
        comment
    }

    pub(super) fn make(&self, chain: &str) -> Change {
        let comment = self.comment();
        let length = u8::try_from(comment.len() + 1).expect("labels are short");
        let mut data = vec![0, length];
        data.extend(comment.as_bytes());
        data.push(0);
        let attributes = Attributes::default().text(1, TABLE).text(2, chain);
        let attributes = attributes.nested(4, self.expressions.clone());
        Change {
            kind: Kind::NewRule,
            attributes: attributes.bytes(7, &data),
        }
    }

    fn expression(mut self, name: &str, data: Attributes) -> Self {
        // NFTA_LIST_ELEM; NFTA_EXPR_NAME, NFTA_EXPR_DATA.
        let expression = Attributes::default().text(1, name).nested(2, data);
        self.expressions = self.expressions.nested(1, expression);
        self
    }

    fn meta(self, key: Meta) -> Self {
        let data = Attributes::default().number(1, REGISTER);
        self.expression("meta", data.number(2, key as u32))
    }

    fn compare(self, value: &[u8], equal: bool) -> Self {
        let data = Attributes::default()
            .number(1, REGISTER)
            .number(2, u32::from(!equal))
            .nested(3, Attributes::default().bytes(1, value));
        self.expression("cmp", data)
    }

    /// `register & mask ^ flip`.
    fn bitwise(self, mask: &[u8], flip: &[u8]) -> Self {
        let length = u32::try_from(mask.len()).expect("an address at most");
        let data = Attributes::default()
            .number(1, REGISTER)
            .number(2, REGISTER)
            .number(3, length)
            .nested(4, Attributes::default().bytes(1, mask))
            .nested(5, Attributes::default().bytes(1, flip));
        self.expression("bitwise", data)
    }

    /// Six bits of the second byte (IPv4), or across the first two (IPv6).
    fn dscp(self, family: Family, dscp: u8) -> Self {
        match family {
            Family::V4 => self
                .payload(REGISTER, Base::Network, 1, 1)
                .bitwise(&[0xfc], &[0])
                .compare(&[dscp << 2], true),
            Family::V6 => self
                .payload(REGISTER, Base::Network, 0, 2)
                .bitwise(&0x0fc0_u16.to_be_bytes(), &[0; 2])
                .compare(&(u16::from(dscp) << 6).to_be_bytes(), true),
        }
    }

    /// The kernel counts the seconds of the day in UTC.
    fn hours(self, hours: Hours) -> Self {
        let (first, last) = (hours.start, hours.last());
        // Past midnight: outside of what lies between.
        let (outside, from, to) = match first <= last {
            true => (false, first, last),
            false => (true, last + 1, first - 1),
        };
        // NFTA_BYTEORDER_SREG, _DREG, _OP (to network order), _LEN, _SIZE.
        let order = Attributes::default()
            .number(1, REGISTER)
            .number(2, REGISTER)
            .number(3, 1)
            .number(4, 4)
            .number(5, 4);
        // NFTA_RANGE_SREG, _OP, _FROM_DATA, _TO_DATA.
        let value = |seconds: u32| Attributes::default().bytes(1, &seconds.to_be_bytes());
        let range = Attributes::default()
            .number(1, REGISTER)
            .number(2, u32::from(outside))
            .nested(3, value(from))
            .nested(4, value(to));
        self.meta(Meta::Hour)
            .expression("byteorder", order)
            .expression("range", range)
    }

    fn payload(self, register: u32, base: Base, offset: u32, length: u32) -> Self {
        let data = Attributes::default()
            .number(1, register)
            .number(2, base as u32)
            .number(3, offset)
            .number(4, length);
        self.expression("payload", data)
    }

    fn masked(self, mask: u32, value: u32, equal: bool) -> Self {
        self.bitwise(&mask.to_ne_bytes(), &[0; 4])
            .compare(&value.to_ne_bytes(), equal)
    }

    fn mark(self, mask: u32, value: u32, equal: bool) -> Self {
        self.meta(Meta::Mark).masked(mask, value, equal)
    }

    /// Register and key (NFT_CT_MARK).
    fn ct_mark(self, mask: u32, value: u32, equal: bool) -> Self {
        let data = Attributes::default().number(1, REGISTER).number(2, 3);
        self.expression("ct", data).masked(mask, value, equal)
    }

    /// Key NFT_CT_STATE; NF_CT_STATE_UNTRACKED_BIT.
    fn untracked(self) -> Self {
        let data = Attributes::default().number(1, REGISTER).number(2, 0);
        self.expression("ct", data).masked(1 << 6, 0, false)
    }

    fn set_ct_mark(self, mask: u32, value: u32) -> Self {
        let load = Attributes::default().number(1, REGISTER).number(2, 3);
        let store = Attributes::default().number(2, 3).number(4, REGISTER);
        self.expression("ct", load)
            .bitwise(&(!mask).to_ne_bytes(), &value.to_ne_bytes())
            .expression("ct", store)
    }

    /// A connection that is on no bump and not plain by choice goes to this one.
    fn follows(self, desired: &Desired, bump: &BumpRoute) -> Self {
        let marks = desired.marks;
        self.ct_mark(marks.bump_mask() | marks.override_bit(), 0, true)
            .set_ct_mark(marks.bump_mask(), marks.bump(bump.id))
    }

    fn device(self, key: Meta, bump: &BumpRoute) -> Self {
        self.name(key, bump.device.as_str())
    }

    fn name(self, key: Meta, device: &str) -> Self {
        let mut name = device.as_bytes().to_vec();
        name.resize(16, 0);
        self.meta(key).compare(&name, true)
    }

    fn family(self, family: Family) -> Self {
        self.meta(Meta::Family).compare(&[number(family)], true)
    }

    fn protocol(self, protocol: i32) -> Self {
        let protocol = u8::try_from(protocol).expect("a byte in the header");
        self.meta(Meta::Protocol).compare(&[protocol], true)
    }

    fn destination(self, prefix: Prefix) -> Self {
        self.prefix(prefix, true)
    }

    fn prefix(self, prefix: Prefix, destination: bool) -> Self {
        if prefix.length() == 0 {
            return self;
        }
        let address = bytes(prefix.address());
        let all = IpAddr::from([0xff; 16]);
        let ones = match prefix.family() {
            Family::V4 => IpAddr::from([0xff; 4]),
            Family::V6 => all,
        };
        let mask = Prefix::new(ones, prefix.length()).expect("it is a prefix's length");
        let loaded = self.address(REGISTER, prefix.family(), destination);
        loaded
            .bitwise(&bytes(mask.address()), &vec![0; address.len()])
            .compare(&address, true)
    }

    fn address(self, register: u32, family: Family, destination: bool) -> Self {
        let (source, length) = match family {
            Family::V4 => (12, 4),
            Family::V6 => (8, 16),
        };
        let offset = if destination { source + length } else { source };
        self.payload(register, Base::Network, offset, length)
    }

    /// Loads what names a TCP connection, as the keys of the sets have it.
    fn connection(self, family: Family) -> Self {
        self.ends(family, false)
    }

    /// The same of a packet of the far end.
    fn connection_back(self, family: Family) -> Self {
        self.ends(family, true)
    }

    fn ends(self, family: Family, back: bool) -> Self {
        let address = match family {
            Family::V4 => 1,
            Family::V6 => 4,
        };
        let (local, remote) = if back { (2, 0) } else { (0, 2) };
        self.family(family)
            .protocol(libc::IPPROTO_TCP)
            .address(WORDS, family, back)
            .payload(WORDS + address, Base::Transport, local, 2)
            .address(WORDS + address + 1, family, !back)
            .payload(WORDS + 2 * address + 1, Base::Transport, remote, 2)
    }

    fn among(self, set: &str) -> Self {
        let data = Attributes::default().text(1, set).number(2, REGISTER);
        self.expression("lookup", data)
    }

    /// Puts what was loaded into a set, for some time; fails, as a match does, if the set is full.
    fn remember(self, set: &str) -> Self {
        // NFTA_DYNSET_SET_NAME, _OP (update), _SREG_KEY, _TIMEOUT.
        let data = Attributes::default()
            .text(1, set)
            .number(3, 1)
            .number(4, REGISTER)
            .bytes(6, &UNTRACKED_FOR.to_be_bytes());
        self.expression("dynset", data)
    }

    /// No route leads back to the source by the device that the packet came by.
    fn no_way_back(self) -> Self {
        // NFTA_FIB_DREG, _RESULT (a device), _FLAGS (source address, by this device, whether at all).
        let data = Attributes::default().number(1, REGISTER).number(2, 1);
        self.expression("fib", data.number(3, 0b10_1001))
            .compare(&[0], true)
    }

    fn verdict(self, code: i32) -> Self {
        // NFTA_IMMEDIATE_DREG, _DATA; NFTA_DATA_VERDICT; NFTA_VERDICT_CODE.
        let code = Attributes::default().bytes(1, &code.to_be_bytes());
        let data = Attributes::default().nested(2, code);
        let data = Attributes::default().number(1, VERDICT).nested(2, data);
        self.expression("immediate", data)
    }

    /// Back to what else looks at the packet.
    fn returns(self) -> Self {
        self.verdict(-5)
    }

    fn drops(self) -> Self {
        let counted = self.expression("counter", Attributes::default());
        Self {
            drops: true,
            ..counted.verdict(0)
        }
    }

    /// Source NAT to the source that it has.
    fn keep_source(self, family: Family) -> Self {
        // NFTA_NAT_TYPE (source), _FAMILY, _REG_ADDR_MIN.
        let data = Attributes::default()
            .number(1, 0)
            .number(2, u32::from(number(family)))
            .number(3, REGISTER);
        self.address(REGISTER, family, false)
            .expression("nat", data)
    }
}

/// Where an offset counts from.
#[derive(Clone, Copy)]
enum Base {
    Network = 1,
    Transport = 2,
}

fn number(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
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
