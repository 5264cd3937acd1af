//! Commands about how paths are used.

use dibs_control::{Limit, PathChange, PathInfo, PathState, Reply, Request};
use serde_json::Value;

use crate::daemon::{Daemon, path, preferences};
use crate::run;

/// What is asked for, and what is told of it.
#[track_caller]
fn changes(args: &[&str], change: PathChange, told: &str) {
    let daemon = Daemon::answering(Ok(Reply::Preferences(preferences())));
    let (run, asked) = daemon.run(args);
    assert_eq!(asked, Request::PathChange(change));
    assert_eq!(run.good(), told);
}

#[test]
fn paths_are_preferred_and_limited_as_asked() {
    let wlan = || "wlan".to_owned();
    let preferred = "path wlan is preferred (weight 100, delta 2.5)\n";
    let prefer = |weight, delta| PathChange::Prefer {
        path: wlan(),
        weight,
        delta,
    };
    changes(&["path", "prefer", "wlan"], prefer(None, None), preferred);
    let args = ["path", "prefer", "wlan", "--weight", "7", "--delta", "2.5"];
    changes(&args, prefer(Some(7), Some(2.5)), preferred);
    changes(&["path", "unprefer"], PathChange::Unprefer, preferred);
    let scheduler = PathChange::Scheduler {
        name: "lowest-rtt".to_owned(),
    };
    let args = ["path", "scheduler", "lowest-rtt"];
    changes(&args, scheduler, "the scheduler is lowest-rtt\n");
    let usage = "path wlan: backup, 20 Mbit a second, 10 GB a month\n";
    let role = PathChange::Role {
        path: wlan(),
        role: "backup".to_owned(),
    };
    changes(&["path", "role", "wlan", "backup"], role, usage);
    let limit = |rate, volume| PathChange::Limit {
        path: wlan(),
        rate,
        volume,
    };
    let args = ["path", "limit", "wlan", "--rate", "20 Mbit"];
    changes(&args, limit(Some(Limit::At(20_000_000)), None), usage);
    let args = [
        "path", "limit", "wlan", "--rate", "none", "--volume", "1.5GB",
    ];
    let both = limit(Some(Limit::None), Some(Limit::At(1_500_000_000)));
    changes(&args, both, usage);
    let all = "as in the configuration file: the scheduler is lowest-rtt\n\
               path wlan is preferred (weight 100, delta 2.5)\n\
               path eth: primary\n\
               path wlan: backup, 20 Mbit a second, 10 GB a month\n";
    changes(&["path", "reset"], PathChange::Reset, all);
}

#[test]
fn the_scheduler_in_force_is_told() {
    let reply = || Ok(Reply::Preferences(preferences()));
    let (run, asked) = Daemon::answering(reply()).run(&["path", "scheduler"]);
    assert_eq!(asked, Request::PathPreferences);
    let told = "lowest-rtt; path wlan is preferred (weight 100, delta 2.5)\n";
    assert_eq!(run.good(), told);
    let (run, _) = Daemon::answering(reply()).run(&["path", "scheduler", "--json"]);
    let told: Value = serde_json::from_str(&run.good()).unwrap();
    for key in ["scheduler", "prefer", "paths", "changed", "warnings"] {
        assert!(told.get(key).is_some(), "{key}: {told}");
    }
    let mut warned = preferences();
    warned.warnings = vec!["nothing is left".to_owned()];
    let daemon = Daemon::answering(Ok(Reply::Preferences(warned)));
    let (run, _) = daemon.run(&["path", "role", "eth", "never"]);
    let said = (run.out.as_str(), run.err.as_str());
    assert_eq!(said, ("path eth: primary\n", "warning: nothing is left\n"));
}

#[test]
fn why_a_path_is_not_used_is_listed_once() {
    let wlan = |state, reason: Option<&str>| PathInfo {
        name: "wlan".to_owned(),
        preferred: false,
        state,
        role: "backup".to_owned(),
        rate_limit: Some(20_000_000),
        volume: Some(10_000_000_000),
        volume_used: Some(1_500_000_000),
        unused: Some("it is a backup, and other paths work".to_owned()),
        reason: reason.map(str::to_owned),
        ..path()
    };
    let list = |path| {
        let daemon = Daemon::answering(Ok(Reply::Paths(vec![path])));
        daemon.run(&["path", "list"]).0.good()
    };
    let out = list(wlan(PathState::Up, None));
    for part in [
        "trusted  backup  up ",
        "20 Mbit/s  1.5 GB of 10 GB",
        "1452  it is a backup, and other paths work\n",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    let out = list(wlan(PathState::Down, Some("its role is off")));
    assert!(out.ends_with("1452  its role is off\n"), "{out}");
}

#[test]
fn what_is_no_amount_is_no_limit() {
    for (args, said) in [
        (&["wlan"][..], "--rate"),
        (
            &["wlan", "--rate", "20 MB"],
            "write a number with kbit, Mbit or Gbit",
        ),
        (
            &["wlan", "--volume", "10"],
            "write a number with MB, GB or TB",
        ),
        (&["wlan", "--rate", "1 Tbit"], "write a number"),
    ] {
        let run = run(&[&["path", "limit"], args].concat());
        assert!(
            run.code == 2 && run.err.contains(said),
            "{args:?}: {}",
            run.err
        );
    }
    for args in [
        &["path", "role", "wlan", "spare"][..],
        &["path", "scheduler", "fastest"],
        &["path", "prefer", "wlan", "--weight", "10001"],
    ] {
        let run = run(args);
        assert_eq!(run.code, 2, "{args:?}: {}", run.err);
    }
}
