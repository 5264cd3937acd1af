//! Whether the kernel is new enough.

use crate::doctor::finding::Finding;

/// By its release, such as `6.18.1-amd64`.
pub(crate) fn judge(release: &str) -> Finding {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next()?.parse::<u32>().ok();
    let Some(version) = number().zip(number()) else {
        let found = format!("the kernel's version {release:?} cannot be read");
        return Finding::warning("kernel", found, "see docs/steering.md");
    };
    match version {
        (6, 9..) | (7.., _) => Finding::fine("kernel", format!("Linux {release}")),
        (6, _) | (5, 12..) => Finding::fine(
            "kernel",
            format!("Linux {release}: the kill switch ends with the daemon (before 6.9)"),
        ),
        _ => Finding::warning(
            "kernel",
            format!("Linux {release}: nft flush ruleset removes the kill switch too (before 5.12)"),
            "use Linux 5.12 or later, better 6.9",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    #[test]
    fn old_kernels_are_told() {
        for (release, outcome) in [
            ("6.18.1-amd64", Outcome::Ok),
            ("7.0", Outcome::Ok),
            ("5.12.0", Outcome::Ok),
            ("5.10.0-30-amd64", Outcome::Warning),
            ("4.19", Outcome::Warning),
            ("unknown", Outcome::Warning),
            ("", Outcome::Warning),
        ] {
            assert_eq!(judge(release).outcome, outcome, "{release}");
        }
        assert!(judge("6.1.0").found.contains("ends with the daemon"));
    }
}
