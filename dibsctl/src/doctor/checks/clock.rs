//! Whether the clock is right: handshakes carry the time, and a peer takes none older than the last.

use crate::doctor::finding::Finding;

/// The first of January 2025; no release of dibs is older.
const EARLIEST: f64 = 1_735_689_600.0;

/// By the time in seconds since 1970, and whether something keeps it right.
pub(crate) fn judge(now: f64, synchronized: bool) -> Finding {
    let set = "set it, and run a time service (systemd-timesyncd, chrony)";
    if now < EARLIEST {
        let found = "it shows a time before dibs existed: peers reject handshakes that are older than the latest";
        return Finding::failed("clock", found, set);
    }
    match synchronized {
        true => Finding::fine("clock", "a time service keeps it right"),
        false => Finding::warning(
            "clock",
            "no time service is running: if the clock goes back by N s, peers reject handshakes for N s",
            set,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    #[test]
    fn a_clock_that_stands_at_its_beginning() {
        assert_eq!(judge(0.0, true).outcome, Outcome::Failed);
        assert_eq!(judge(EARLIEST, true).outcome, Outcome::Ok);
        assert_eq!(judge(EARLIEST, false).outcome, Outcome::Warning);
    }
}
