//! The tables of iptables that hold chains of ours, and which of these drop.

/// An iptables table that holds chains of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// Marks and guards.
    Mangle,
    /// The only table that can answer with an ICMP error.
    Filter,
    /// The only table that can translate addresses.
    Nat,
}

impl Table {
    pub(crate) const ALL: [Table; 3] = [Table::Mangle, Table::Filter, Table::Nat];

    /// The table's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Table::Mangle => "mangle",
            Table::Filter => "filter",
            Table::Nat => "nat",
        }
    }
}

/// Each reason and its chain; a name that ends in a dash stands for all that begin with it.
pub(crate) const REASONS: [(&str, &str, Table); 9] = [
    ("plain_in_locked", "DIBS-LOCKED", Table::Mangle),
    ("plain_in_stray", "DIBS-PLAIN", Table::Mangle),
    ("plain_in_required", "DIBS-REQUIRED-IN", Table::Mangle),
    ("plain_out_required", "DIBS-REQUIRED-OUT", Table::Mangle),
    ("plain_out_marked", "DIBS-POSTROUTING", Table::Mangle),
    ("tun_in_foreign", "DIBS-IN-", Table::Mangle),
    ("tun_forwarded", "DIBS-FORWARD", Table::Filter),
    ("tun_out_unmarked", "DIBS-REFUSE", Table::Filter),
    ("quic_refused", "DIBS-QUIC-", Table::Filter),
];

/// Why a chain drops, as its place among the reasons; none: it is none that does.
pub(crate) fn reason(table: Table, name: &str) -> Option<usize> {
    REASONS.iter().position(|(_, chain, of)| {
        *of == table && (*chain == name || chain.ends_with('-') && name.starts_with(chain))
    })
}
