//! Whether source NAT keeps connections to peers from being moved.

use crate::doctor::finding::Finding;

/// By the rules that translate what this host sends to peers: the peer, and the rule.
pub(crate) fn judge(translated: &[(String, String)]) -> Vec<Finding> {
    let finding = |(peer, rule): &(String, String)| {
        Finding::warning(
            "nat",
            format!("\"{rule}\" translates connections to the peer, so they cannot be protected"),
            "exclude the peer's addresses from that rule",
        )
        .about(peer)
    };
    translated.iter().map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_is_named() {
        let rule = "-A POSTROUTING -o eth0 -j MASQUERADE".to_owned();
        let findings = judge(&[("server".to_owned(), rule)]);
        assert!(findings[0].found.contains("MASQUERADE"));
        assert_eq!(judge(&[]), []);
    }
}
