//! The table of nftables as it is to be: chains with what stands in them.

use crate::Family;
use crate::nft::{Attributes, Change, Kind};
use crate::rule::Set;
use crate::rule::nftables::Printed;

/// Its name in nftables.
pub(crate) const TABLE: &str = "dibs";
/// A table that is never made: the kernel is only asked whether it would.
pub(super) const PROBE: &str = "dibs-probe";

/// All rules, by chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ruleset {
    /// Ordered by name.
    pub(crate) chains: Vec<Chain>,
}

/// A chain with its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) name: String,
    pub(crate) rules: Vec<Printed>,
}

impl Ruleset {
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
        let comments = |chain: &Chain| chain.rules.iter().map(Printed::comment).collect();
        self.chains
            .iter()
            .map(|chain| (chain.name.clone(), comments(chain)))
            .collect()
    }

    /// The same, without rules that drop and are not in `other`.
    pub(super) fn without_drops_beyond(&self, other: &Self) -> Self {
        let stays = |chain: &Chain, rule: &Printed| {
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

impl Chain {
    /// Type, hook (linux/netfilter.h) and priority, if packets enter here.
    pub(crate) fn base(&self) -> Option<(&'static str, u32, i32)> {
        const FILTER: &str = "filter";
        Some(match self.name.as_str() {
            // Before conntrack, which would believe it.
            "prerouting" => (FILTER, 0, -300),
            "input" => (FILTER, 1, -140),
            // Behind everything that may mark a packet.
            "forward" => (FILTER, 2, 300),
            "output" => (FILTER, 3, 300),
            "postrouting" => (FILTER, 4, -140),
            // Before the user's source NAT, at 100.
            "source" => ("nat", 4, 99),
            _ => return None,
        })
    }

    pub(super) fn make(&self) -> Change {
        let mut attributes = Attributes::default().text(1, TABLE).text(3, &self.name);
        if let Some((kind, hook, priority)) = self.base() {
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
    let all = { Set::ALL.into_iter() }.flat_map(|set| Family::BOTH.map(|family| (set, family)));
    all.zip(1..).map(|((set, family), number)| {
        let (address, length) = match family {
            Family::V4 => (7, 16),
            Family::V6 => (8, 40),
        };
        let is_dynamic = matches!(set, Set::Untracked | Set::Translated);
        let flags = if is_dynamic { DYNAMIC } else { 0 };
        let kind = ((address << 6 | PORT) << 6 | address) << 6 | PORT;
        Change {
            kind: Kind::NewSet,
            // _TABLE, _NAME, _FLAGS, _KEY_TYPE, _KEY_LEN, _DESC (_SIZE; those filled by us need none), _ID.
            attributes: Attributes::default()
                .text(1, TABLE)
                .text(2, set.name(family))
                .number(3, flags)
                .number(4, kind)
                .number(5, length)
                .nested(9, size(flags))
                .number(10, number),
        }
    })
}
