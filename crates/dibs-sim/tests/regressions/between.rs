//! Devices on the ordinary route, and connections that two hosts call by different names.

use super::*;

/// A router that translates, takes up nothing in its midst, and resets what it does not know.
const RESETS: Between = Between {
    translates: true,
    tracks: false,
    forgets: None,
    adopts: false,
    resets: true,
    renumbers: false,
    lost: 0.0,
    late: None,
    forges: false,
};

fn behind(between: Between) -> Setup {
    Setup {
        follow: true,
        leaving: Leaving::Proved,
        between,
        ..setup(vec![path(true, clean()), path(false, clean())])
    }
}

fn begins(bump: Option<BumpId>, bytes: [u64; 2]) -> Plan {
    Plan {
        bump: [bump; 2],
        ..lingering(bytes)
    }
}

/// A reset of the connection before pulled a connection of the same ends to a bump, which the far end knew by another name: its
/// handshake never ended (seeds 1099511631322, 2199023257600).
#[test]
fn a_late_reset_takes_no_later_connection_to_its_bump() {
    let mut again = 0;
    for after in 5..16 {
        let before = Plan {
            lingers: false,
            ..begins(SEAL, [600_000, 0])
        };
        let later = Plan {
            port_of: Some(0),
            ..begins(PLAIN, [3000, 3000])
        };
        let ops = vec![
            (at(1000), Op::Open(before)),
            // What A has sent by then B answers with resets.
            (at(1060), Op::Abort(0, 1)),
            (at(1060 + after), Op::Open(later)),
        ];
        let report = run(behind(RESETS), with_rest(ops));
        again += report.coverage.get(Seen::PortsAgain);
    }
    assert!(again > 0);
}

/// Histories that no few lines show.
///
/// - What came late of a connection was compared with the numbers of the next one of the same ends, on another bump (1099511633084).
/// - No path carried anything just when both ends saw that no bump carries a connection, and nobody tried again (2199023262600).
/// - A host that had started again told its peer of a choice by a name that the peer did not know, and then not again
///   (1099511636148).
/// - A host that had not heard of its peer's abort started again, and called the connection by a name that the peer refuses: shares
///   of what it sent again and again wait there for ten seconds each (1099511628689).
/// - A reset in answer to a forged packet closed a router's entry for good; a forged packet was none (2199023264562, 2199023262716).
#[test]
fn seeds_that_failed_keep_all_promises() {
    for seed in [
        1_099_511_633_084,
        2_199_023_262_600,
        1_099_511_636_148,
        1_099_511_628_689,
        2_199_023_264_562,
        2_199_023_262_716,
    ] {
        dibs_sim::run(seed).unwrap_or_else(|fault| panic!("{fault}"));
    }
}
