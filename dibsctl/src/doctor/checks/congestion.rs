//! Whether the hosts' TCP stands what several paths do to round trips.

use crate::doctor::finding::Finding;

/// Those that take a longer round trip for a full queue.
const BY_DELAY: [&str; 5] = ["vegas", "lp", "nv", "dctcp", "cdg"];

/// By the name of the congestion control in use.
pub(crate) fn judge(name: Option<&str>) -> Finding {
    let check = "congestion_control";
    match name {
        Some(name) if BY_DELAY.contains(&name) => Finding::warning(
            check,
            format!("{name} is slow if round trips differ, as they do over several paths"),
            "run sysctl -w net.ipv4.tcp_congestion_control=cubic, or bbr",
        ),
        Some(name) => Finding::fine(check, name),
        None => Finding::skipped(check, "it cannot be read", "mount /proc"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    #[test]
    fn those_that_go_by_delay_are_told() {
        assert_eq!(judge(Some("cubic")).outcome, Outcome::Ok);
        assert_eq!(judge(Some("bbr")).outcome, Outcome::Ok);
        assert_eq!(judge(Some("vegas")).outcome, Outcome::Warning);
        assert_eq!(judge(None).outcome, Outcome::Skipped);
    }
}
