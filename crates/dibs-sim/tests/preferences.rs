//! What users want of their paths, in histories of their own.

use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump::{SEAL, SHARE};
use dibs_core::preference::Usage;
use dibs_netem::Conditions;
use dibs_settings::{BumpId, Role};
use dibs_sim::coverage::Seen;
use dibs_sim::history::{Op, Order, PathSetup, Plan, Setup, Wish};
use dibs_sim::{History, Report, World};

fn at(millis: u64) -> Time {
    Time::ZERO + Duration::from_millis(millis)
}

/// Three paths, the first trusted.
fn paths() -> Vec<PathSetup> {
    let link = Conditions::new()
        .rate(50_000_000)
        .delay(Duration::from_millis(5));
    let path = |trusted| PathSetup {
        trusted: [trusted; 2],
        v6: false,
        mtu: 1500,
        link: [link.clone(), link.clone()],
    };
    [true, false, false].map(path).into()
}

/// A transfer on a bump, and before it what both users want.
fn transfer(bump: BumpId, wishes: &[Wish]) -> Report {
    let plan = Plan {
        bump: [Some(bump); 2],
        ..Plan::ordinary([300_000, 300_000], Order::Both, 64 << 10)
    };
    let wishes = wishes
        .iter()
        .flat_map(|wish| [0, 1].map(|host| (at(500), Op::Wish(host, wish.clone()))));
    let ops: Vec<_> = wishes.chain([(at(1000), Op::Open(plan))]).collect();
    let history = History {
        setup: Setup::ordinary(paths()),
        ops,
        quiet: at(5000),
    };
    World::run(1, &history).unwrap_or_else(|f| panic!("{} at {:?}\n{}", f.what, f.at, f.state))
}

fn role(path: usize, role: Role) -> Wish {
    let usage = Usage {
        role,
        ..Usage::default()
    };
    Wish::Usage(path, usage)
}

/// Shares took the paths that are configured first, backup or not.
#[test]
fn shares_leave_a_backup_alone_while_there_are_paths_enough() {
    for bump in [SHARE, SEAL] {
        for path in 0..3 {
            let report = transfer(bump, &[role(path, Role::Backup)]);
            assert_eq!(report.delivered, 600_000);
            assert_eq!(report.coverage.get(Seen::BackupUsed), 0, "path {path}");
            assert!(report.coverage.get(Seen::BackupSpared) > 100);
        }
        // Two shares need two paths.
        let wishes = [role(1, Role::Backup), role(2, Role::Never)];
        let used = transfer(bump, &wishes).coverage.get(Seen::BackupUsed);
        assert_eq!(used > 100, bump == SHARE, "{used}");
    }
}

/// Copies were given to a backup while no other path answered, and went by it after one did.
#[test]
fn a_backup_sends_no_copies_once_another_path_answers() {
    dibs_sim::run(90_014_972).unwrap_or_else(|fault| panic!("{fault}"));
}
