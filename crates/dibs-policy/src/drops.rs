//! What our chains dropped, by reason.

use std::collections::BTreeMap;

use crate::iptables::Tables;
use crate::table::{REASONS, reason};

/// Packets that the kernel dropped for us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drops([u64; REASONS.len()]);

impl Default for Drops {
    fn default() -> Self {
        Self([0; REASONS.len()])
    }
}

impl Drops {
    /// Every reason with its count:
    ///
    /// | reason | packets |
    /// |---|---|
    /// | `plain_in_locked` | of a LOCKED connection, not come by its bump's device |
    /// | `plain_in_stray` | of a connection chosen for a bump whose conntrack entry was lost, or of none |
    /// | `plain_in_required` | that a rule requires to come by a bump, and did not |
    /// | `plain_out_required` | that a rule requires to leave by a bump, about to leave otherwise |
    /// | `plain_out_marked` | marked for a bump, about to leave otherwise |
    /// | `tun_in_foreign` | come out of a TUN, with addresses that its peers may not use |
    /// | `tun_forwarded` | come out of a TUN for another host, or from another host on the way into one |
    /// | `tun_out_unmarked` | fallen into a TUN without its mark, refused |
    /// | `quic_refused` | UDP to port 443, refused so that TCP is used |
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let reasons = REASONS.iter().map(|(reason, ..)| *reason);
        reasons.zip(self.0)
    }

    /// As a map.
    pub fn by_reason(&self) -> BTreeMap<&'static str, u64> {
        self.iter().collect()
    }

    /// Adds what the chains of one family count, as far as they are meant.
    pub(crate) fn add(&mut self, tables: &Tables, meant: impl Fn(&str) -> bool) {
        for ((table, name), rules) in &tables.chains {
            let Some(reason) = reason(*table, name) else {
                continue;
            };
            if meant(name) {
                let dropping = rules.iter().filter(|counted| {
                    counted.rule.ends_with("-j DROP") || counted.rule.contains("-j REJECT")
                });
                self.0[reason] += dropping.map(|counted| counted.packets).sum::<u64>();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_are_counted_by_chain_and_nothing_else_is() {
        let saved = "*mangle\n:DIBS-LOCKED - [0:0]\n:DIBS-IN-1 - [0:0]\n:DIBS-SET-1 - [0:0]\n\
             [7:1] -A DIBS-LOCKED -i dibs1 -m connmark --mark 0x1000000/0xf000000 -j RETURN\n\
             [3:1] -A DIBS-LOCKED -j DROP\n\
             [1:1] -A DIBS-IN-1 -d 127.0.0.0/8 -j DROP\n[2:1] -A DIBS-IN-1 -j DROP\n\
             [9:1] -A DIBS-SET-1 -j DROP\nCOMMIT\n";
        let tables = Tables::parse(saved);
        let mut drops = Drops::default();
        drops.add(&tables, |_| true);
        drops.add(&tables, |name| name == "DIBS-LOCKED");
        let counted: BTreeMap<_, _> = drops.iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(
            counted,
            BTreeMap::from([("plain_in_locked", 6), ("tun_in_foreign", 3)])
        );
        assert_eq!(drops.iter().count(), REASONS.len());
    }
}
