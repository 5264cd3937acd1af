//! What the daemon wants steered. Plain data, complete each time; how to get there is not its business.

use std::fmt;
use std::net::IpAddr;

pub use dibs_settings::Fail;
use dibs_settings::{BumpId, Shows, Term, left_out};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::address::common;
use crate::{DeviceName, Family, MarkLayout};

/// The whole of what should be steered on this host. Without bumps: nothing, and nothing is installed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Desired {
    /// The field used in fwmark and ctmark.
    pub marks: MarkLayout,
    /// Routing table of bump `id` is `table_base + id`; `table_base` itself holds the backup routes.
    pub table_base: u32,
    /// Priority of the RPDB rules that send marked packets to their table.
    pub rule_priority: u32,
    /// Fate of steered packets when their device is missing.
    pub fail: Fail,
    /// Networks that this host forwards for: what their hosts and those of the peers send each other is
    /// steered too. None: only what is this host's own.
    pub gateway: Vec<IpNet>,
    /// Networks that peers reach by this host in its name, without those that [`left_out`] says and without the peers'.
    #[serde(default)]
    pub exit: Vec<IpNet>,
    /// UDP to port 443 is refused, where TCP would go to a peer that has everything.
    #[serde(default)]
    pub refuse_quic: bool,
    /// The kernel forwards, so the nat table may give connections of peers to this host another destination.
    #[serde(default)]
    pub translates: bool,
    /// Hosts behind the peers whose address others have as well, such as routers that translate: only their connections that are
    /// on a bump are the peers'.
    #[serde(default)]
    pub shared: Vec<IpNet>,
    /// The bumps in use.
    pub bumps: Vec<BumpRoute>,
    /// Class rules, in the order in which they are tried; the first that matches decides.
    pub rules: Vec<ClassRule>,
    /// The hosts behind the peers, the longest prefix counting, and whether there is a session: rules
    /// that prefer their bump ask for one.
    pub sessions: Vec<(IpNet, bool)>,
}

impl Default for Desired {
    fn default() -> Self {
        Self {
            marks: MarkLayout::default(),
            table_base: 5200,
            rule_priority: 5200,
            fail: Fail::Closed,
            gateway: Vec::new(),
            exit: Vec::new(),
            refuse_quic: false,
            translates: false,
            shared: Vec::new(),
            bumps: Vec::new(),
            rules: Vec::new(),
            sessions: Vec::new(),
        }
    }
}

/// How packets marked for one bump leave this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BumpRoute {
    /// The bump's number in the marks.
    #[serde(with = "number")]
    pub id: BumpId,
    /// The device its packets leave by.
    pub device: DeviceName,
    /// Whose device that is.
    pub owner: DeviceOwner,
    /// This host's addresses that steered connections use. They stand on a TUN of ours as well, so that
    /// a connection outlives the interface it began on.
    pub addresses: Vec<IpAddr>,
    /// The hosts behind the peers that this bump reaches. Only traffic to them is ever steered, and
    /// only traffic from them comes out of a TUN of ours.
    pub peers: Vec<IpNet>,
}

/// Maker of a bump's device, who may set it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceOwner {
    /// A TUN of the daemon's: given MTU, qdisc, sysctls, addresses and input filter.
    Ours,
    /// Another program's device (a VPN): only routed to, never changed.
    Foreign,
}

/// New and established connections that match are moved to a bump. What is `None` matches everything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassRule {
    /// The number under which the user knows the rule; it stands in the rule's comment.
    pub id: u32,
    /// Bump of matching connections.
    #[serde(with = "number")]
    pub bump: BumpId,
    /// Destination ports of outgoing packets.
    pub dport: Option<Ports>,
    /// Source ports of outgoing packets.
    pub sport: Option<Ports>,
    /// Destination of outgoing packets.
    pub destination: Option<IpNet>,
    /// Source of outgoing packets.
    pub source: Option<IpNet>,
    /// Owner of the local socket.
    pub uid: Option<u32>,
    /// The device by which the ordinary route of outgoing packets leads.
    pub interface: Option<DeviceName>,
    /// When it holds.
    pub hours: Option<Hours>,
    /// Further terms, which the kernel alone looks at: [`Term::is_as_written`].
    pub terms: Vec<Term>,
    /// The only family in which iptables takes it.
    pub family: Option<Family>,
    /// Binding: what stands above the rule, and what the rule keeps out.
    pub binding: Binding,
}

/// How firmly a class rule holds (docs/steering.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Binding {
    /// An explicit choice stands above it, and what comes in plain is let in.
    Loose,
    /// The rule of one connection that is on the bump by choice. Where the kernel lost the entry that
    /// holds the choice, what comes of the connection in plain is dropped.
    Pinned,
    /// As loose, where the peer has a session ([`Desired::sessions`]); elsewhere what is on a bump
    /// stays there, and what is not is plain.
    Preferred,
    /// It stands above explicit choices; what matches never leaves but by the bump's device, and never
    /// comes in but by it, from the first packet on.
    Required,
    /// Nothing is moved: a connection on a bump stays there, and any other is plain.
    Direct,
}

impl Binding {
    /// True if what matches is blocked rather than plain where nothing carries it.
    pub fn blocks(self) -> bool {
        !matches!(self, Self::Preferred | Self::Direct)
    }
}

/// Ports `first..=last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ports {
    /// Lowest.
    pub first: u16,
    /// Highest, at least `first`.
    pub last: u16,
}

impl Ports {
    /// True if a port is one of these.
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

impl From<u16> for Ports {
    fn from(port: u16) -> Self {
        Self {
            first: port,
            last: port,
        }
    }
}

/// As iptables has it.
impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{}:{}", self.first, self.last),
        }
    }
}

/// A part of each day in UTC, in seconds after midnight, from `start` up to, not including, `end`. `end`
/// below `start` reaches into the next day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hours {
    /// Below 86,400.
    pub start: u32,
    /// Below 86,400, not `start`.
    pub end: u32,
}

impl Hours {
    /// The last second within.
    pub(crate) fn last(self) -> u32 {
        (self.end + DAY - 1) % DAY
    }
}

/// Seconds.
const DAY: u32 = 86_400;

impl ClassRule {
    /// True if one of its terms shows only in packets that this host sends.
    pub fn shows_only_sending(&self) -> bool {
        let mut terms = self.terms.iter();
        self.interface.is_some() || terms.any(|term| term.shows() == Shows::Sending)
    }

    /// True if only connections of this host's own have one of its terms: a socket, or the device that is found before
    /// the packet is marked.
    pub fn is_of_sockets(&self) -> bool {
        let of_device = self.uid.is_some() || self.interface.is_some();
        of_device || self.terms.iter().any(Term::is_of_sockets)
    }

    /// True if it can match packets of a family.
    pub fn concerns(&self, family: Family) -> bool {
        let named = [self.source, self.destination];
        let mut named = named
            .into_iter()
            .flatten()
            .map(|net| Family::of(net.addr()));
        named.all(|of| of == family) && self.family.is_none_or(|of| of == family)
    }

    /// Rule for all TCP of this one's ports and addresses, whatever else this one names: it matches whatever this one does,
    /// and asks nothing of the host's users or of iptables' modules.
    pub fn coarse(&self) -> Self {
        Self {
            dport: self.dport,
            sport: self.sport,
            destination: self.destination,
            source: self.source,
            binding: self.binding,
            ..Self::tcp(self.id, self.bump)
        }
    }

    /// All TCP connections to the bump's peers.
    pub fn tcp(id: u32, bump: BumpId) -> Self {
        Self {
            id,
            bump,
            dport: None,
            sport: None,
            destination: None,
            source: None,
            uid: None,
            interface: None,
            hours: None,
            terms: Vec::new(),
            family: None,
            binding: Binding::Loose,
        }
    }
}

/// A wish that cannot be carried out: the caller's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Two bumps with one number.
    #[error("bump id {0} is used twice")]
    DuplicateBump(BumpId),
    /// Two bumps with one device: the guard could not tell their packets apart.
    #[error("device {0} serves two bumps")]
    DuplicateDevice(DeviceName),
    /// A rule names a bump that is not there.
    #[error("rule {rule} names bump {bump}, which is not in use")]
    UnknownBump {
        /// The rule's number.
        rule: u32,
        /// The bump it names.
        bump: BumpId,
    },
    /// The last port is below the first.
    #[error("rule {0} names a range of ports that has none")]
    NoPort(u32),
    /// Source and destination of different families.
    #[error("rule {0} mixes IPv4 and IPv6")]
    MixedFamilies(u32),
    /// Whose packets would come in by a bump, and leave by it?
    #[error("{0} is behind this host and behind a peer")]
    BehindBoth(IpNet),
    /// Loopback, multicast or unspecified addresses are never steered (docs/threat-model.md, "The peer").
    #[error("{0} cannot be steered: it is loopback, multicast or unspecified")]
    Unsteerable(IpNet),
    /// What is required would leave in plain while the device is missing.
    #[error("rule {0} requires its bump, which cannot be with steering that fails open")]
    RequiredButOpen(u32),
    /// What comes in cannot be told from what is required.
    #[error(
        "rule {0} requires its bump of what shows only as it sends: a group, interface, DSCP or match"
    )]
    RequiredUnseen(u32),
    /// No such time of day.
    #[error("rule {0} names a time of day that is none")]
    NoTime(u32),
    /// The sixteen tables from here would include one of the kernel's.
    #[error("table_base {0} leaves no sixteen free tables (0 and 253 to 255 are the kernel's)")]
    TableBase(u32),
    /// The rules would not stand between the local and the main table.
    #[error("rule priority {0} is not between 1 and 32765")]
    RulePriority(u32),
}

impl Desired {
    /// Refuses what the kernel would take but nobody can mean.
    pub fn validate(&self) -> Result<(), Invalid> {
        let last = self
            .table_base
            .checked_add(15)
            .ok_or(Invalid::TableBase(self.table_base))?;
        if self.table_base == 0 || (self.table_base <= 255 && last >= 253) {
            return Err(Invalid::TableBase(self.table_base));
        }
        if !(1..=32765).contains(&self.rule_priority) {
            return Err(Invalid::RulePriority(self.rule_priority));
        }
        for (n, bump) in self.bumps.iter().enumerate() {
            let others = &self.bumps[..n];
            if others.iter().any(|other| other.id == bump.id) {
                return Err(Invalid::DuplicateBump(bump.id));
            }
            if others.iter().any(|other| other.device == bump.device) {
                return Err(Invalid::DuplicateDevice(bump.device.clone()));
            }
            let addresses = bump.addresses.iter().map(|&address| IpNet::from(address));
            bump.peers
                .iter()
                .copied()
                .chain(addresses)
                .try_for_each(steerable)?;
            // Everywhere else is behind a peer by which this host reaches the Internet.
            let narrow = || bump.peers.iter().filter(|peer| peer.prefix_len() > 0);
            let both = |net: &&IpNet| narrow().any(|peer| common(*peer, **net).is_some());
            if let Some(net) = self.gateway.iter().find(both) {
                return Err(Invalid::BehindBoth(*net));
            }
        }
        self.gateway.iter().copied().try_for_each(steerable)?;
        for rule in &self.rules {
            let id = rule.id;
            let is_direct = rule.binding == Binding::Direct;
            if !is_direct && !self.bumps.iter().any(|bump| bump.id == rule.bump) {
                return Err(Invalid::UnknownBump {
                    rule: id,
                    bump: rule.bump,
                });
            }
            if rule.binding == Binding::Required && self.fail == Fail::Open {
                return Err(Invalid::RequiredButOpen(id));
            }
            if rule.binding == Binding::Required && rule.shows_only_sending() {
                return Err(Invalid::RequiredUnseen(id));
            }
            if rule
                .hours
                .is_some_and(|h| h.start >= DAY || h.end >= DAY || h.start == h.end)
            {
                return Err(Invalid::NoTime(id));
            }
            let ports = [rule.sport, rule.dport].into_iter().flatten();
            if ports.into_iter().any(|ports| ports.first > ports.last) {
                return Err(Invalid::NoPort(id));
            }
            if let (Some(source), Some(destination)) = (rule.source, rule.destination)
                && Family::of(source.addr()) != Family::of(destination.addr())
            {
                return Err(Invalid::MixedFamilies(id));
            }
        }
        Ok(())
    }

    /// The hosts of `family` behind a bump's peers, longest prefixes first, and whether there is a
    /// session with them.
    pub(crate) fn sessions_of(&self, bump: &BumpRoute, family: Family) -> Vec<(IpNet, bool)> {
        let reached = |prefix: &IpNet| bump.peers.iter().any(|net| net.contains(prefix));
        let mut sessions: Vec<(IpNet, bool)> = self
            .sessions
            .iter()
            .filter(|(prefix, _)| Family::of(prefix.addr()) == family && reached(prefix))
            .copied()
            .collect();
        sessions.sort_by_key(|(prefix, _)| (std::cmp::Reverse(prefix.prefix_len()), *prefix));
        sessions
    }

    /// Where forwarded packets of `family` that are steered come from and go to: each network behind
    /// this host, or beyond it, with each that one of `peers` is.
    pub(crate) fn passages(&self, peers: &[IpNet], family: Family) -> Vec<(IpNet, IpNet)> {
        let peers = widest(peers, family);
        let near = self.behind(family).into_iter();
        near.flat_map(|near| peers.iter().map(move |far| (near, *far)))
            .collect()
    }

    /// True if this host forwards for others.
    pub(crate) fn forwards(&self) -> bool {
        !self.gateway.is_empty() || !self.exit.is_empty()
    }

    /// Networks of `family` behind this host or beyond it.
    pub(crate) fn behind(&self, family: Family) -> Vec<IpNet> {
        widest(self.gateway.iter().chain(&self.exit), family)
    }

    /// Networks that are closed to peers where this host is their exit.
    pub(crate) fn closed(&self, family: Family) -> Vec<IpNet> {
        if self.exit.is_empty() {
            return Vec::new();
        }
        let open = [&self.exit[..], &self.gateway].concat();
        let peers = self.bumps.iter().flat_map(|bump| &bump.peers);
        widest(left_out(&open).iter().chain(peers), family)
    }

    /// Every prefix of `family` that some bump reaches, without those inside another.
    pub fn peers(&self, family: Family) -> Vec<IpNet> {
        widest(self.bumps.iter().flat_map(|bump| &bump.peers), family)
    }
}

/// Bump by its number.
mod number {
    use dibs_settings::BumpId;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    pub(super) fn serialize<S: Serializer>(bump: &BumpId, to: S) -> Result<S::Ok, S::Error> {
        bump.get().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<BumpId, D::Error> {
        let number = u8::deserialize(from)?;
        let bump = BumpId::new(number);
        bump.ok_or_else(|| de::Error::custom(format_args!("no bump is {number}")))
    }
}

fn steerable(prefix: IpNet) -> Result<(), Invalid> {
    let address = prefix.addr();
    let unspecified = address.is_unspecified() && prefix.prefix_len() > 0;
    if address.is_loopback() || address.is_multicast() || unspecified {
        return Err(Invalid::Unsteerable(prefix));
    }
    Ok(())
}

/// The prefixes of `family`, ordered, without those inside another.
pub(crate) fn widest<'a>(
    prefixes: impl IntoIterator<Item = &'a IpNet>,
    family: Family,
) -> Vec<IpNet> {
    let mut all: Vec<IpNet> = prefixes
        .into_iter()
        .copied()
        .filter(|p| Family::of(p.addr()) == family)
        .collect();
    all.sort_unstable();
    all.dedup();
    let inside = |p: &IpNet| all.iter().any(|other| other != p && other.contains(p));
    all.iter().filter(|p| !inside(p)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish() -> Desired {
        let bump = |id, device| BumpRoute {
            id: BumpId::new(id).unwrap(),
            device: DeviceName::new(device).unwrap(),
            owner: DeviceOwner::Ours,
            addresses: vec!["10.0.1.1".parse().unwrap()],
            peers: vec!["10.0.1.2/32".parse().unwrap(), "fd00::/64".parse().unwrap()],
        };
        Desired {
            bumps: vec![bump(1, "dibs1"), bump(2, "dibs2")],
            ..Desired::default()
        }
    }

    #[test]
    fn contradictions_are_named() {
        assert_eq!(wish().validate(), Ok(()));
        let fault = |change: fn(&mut Desired)| {
            let mut wish = wish();
            change(&mut wish);
            wish.validate().unwrap_err().to_string()
        };
        assert_eq!(
            fault(|w| w.bumps[1].id = w.bumps[0].id),
            "bump id 1 is used twice"
        );
        assert_eq!(
            fault(|w| w.bumps[1].device = w.bumps[0].device.clone()),
            "device dibs1 serves two bumps"
        );
        assert_eq!(
            fault(|w| w.rules.push(ClassRule::tcp(7, BumpId::new(3).unwrap()))),
            "rule 7 names bump 3, which is not in use"
        );
        assert_eq!(
            fault(|w| w.bumps[0].peers.push("127.0.0.0/8".parse().unwrap())),
            "127.0.0.0/8 cannot be steered: it is loopback, multicast or unspecified"
        );
        assert_eq!(
            fault(|w| {
                w.fail = Fail::Open;
                w.rules.push(ClassRule {
                    binding: Binding::Required,
                    ..ClassRule::tcp(4, w.bumps[0].id)
                });
            }),
            "rule 4 requires its bump, which cannot be with steering that fails open"
        );
        assert!(fault(|w| w.table_base = 240).starts_with("table_base 240"));
        assert!(fault(|w| w.table_base = u32::MAX - 3).starts_with("table_base"));
        assert!(fault(|w| w.rule_priority = 40000).starts_with("rule priority"));
    }

    #[test]
    fn peers_inside_others_are_left_out() {
        let mut wish = wish();
        wish.bumps[0].peers.push("10.0.0.0/16".parse().unwrap());
        assert_eq!(wish.peers(Family::V4), ["10.0.0.0/16".parse().unwrap()]);
        assert_eq!(wish.peers(Family::V6), ["fd00::/64".parse().unwrap()]);
    }
}
