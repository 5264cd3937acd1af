//! Whether two kinds of iptables keep rules on this host, each blind for the other's.

use crate::doctor::finding::Finding;
use crate::doctor::host::Tables;
use crate::doctor::netfilter;

/// By the rules of each kind.
pub(crate) fn judge(tables: &Tables) -> Finding {
    let Some(version) = &tables.version else {
        let found = "iptables is not installed, or cannot be run";
        return Finding::failed("iptables", found, "install the package iptables");
    };
    if tables.forbidden {
        return Finding::needs_root("iptables");
    }
    let count = |saved: &[Option<String>; 2]| -> usize {
        let saved = saved.iter().flatten();
        saved.map(|saved| netfilter::others(saved).count()).sum()
    };
    let (nft, legacy) = (count(&tables.nft), count(&tables.legacy));
    let version = version.trim();
    if nft > 0 && legacy > 0 {
        return Finding::warning(
            "iptables",
            format!(
                "{version}: other programs have rules with iptables-nft ({nft}) and with \
                 iptables-legacy ({legacy}); each shows only its own, and a packet has to pass both"
            ),
            "let all programs use one kind (update-alternatives --config iptables), and flush the other",
        );
    }
    Finding::fine("iptables", version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    const RULE: &str = "*filter\n-A INPUT -i eth9 -j DROP\nCOMMIT\n";
    const OURS: &str = "*mangle\n-A OUTPUT -j DIBS-OUTPUT\nCOMMIT\n";

    fn tables(nft: &str, legacy: &str) -> Tables {
        Tables {
            version: Some("iptables v1.8.9 (nf_tables)".to_owned()),
            nft: [Some(nft.to_owned()), None],
            legacy: [None, Some(legacy.to_owned())],
            forbidden: false,
        }
    }

    #[test]
    fn two_kinds_with_rules_disagree() {
        assert_eq!(judge(&tables(RULE, RULE)).outcome, Outcome::Warning);
        assert_eq!(judge(&tables(RULE, "")).outcome, Outcome::Ok);
        assert_eq!(judge(&tables(OURS, RULE)).outcome, Outcome::Ok);
        let absent = Tables::default();
        assert_eq!(judge(&absent).outcome, Outcome::Failed);
        let forbidden = Tables {
            forbidden: true,
            ..tables(RULE, RULE)
        };
        assert_eq!(judge(&forbidden).outcome, Outcome::Skipped);
    }
}
