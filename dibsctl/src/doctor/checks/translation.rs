//! Check whether NAT keeps connections with peers from being moved.

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

/// By the rules that lead what is sent to this host elsewhere: those of one interface.
pub(crate) fn judge_leading(leading: &[String]) -> Vec<Finding> {
    let is_of_interface = |rule: &&String| {
        let mut names = rule
            .split(" -i ")
            .skip(1)
            .map(|rest| rest.starts_with("dibs"));
        names.next() == Some(false) && !rule.contains("! -i ")
    };
    let finding = |rule: &String| {
        Finding::warning(
            "nat",
            format!("\"{rule}\" does not hold of connections on a bump"),
            "write the rule without -i, or once more with -i dibs+",
        )
    };
    leading
        .iter()
        .filter(is_of_interface)
        .map(finding)
        .collect()
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
        let leads = |way: &str| {
            format!("-A PREROUTING {way}-p tcp --dport 80 -j DNAT --to-destination 172.17.0.2:80")
        };
        let rules = ["", "! -i docker0 ", "-i eth0 ", "-i dibs+ "].map(leads);
        let findings = judge_leading(&rules);
        assert!(
            findings.len() == 1 && findings[0].found.contains("eth0"),
            "{findings:?}"
        );
    }
}
