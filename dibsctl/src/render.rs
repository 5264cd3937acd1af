//! What the daemon tells, for people.

use std::fmt::Write;
use std::time::{Duration, SystemTime};

use dibs_config::{Rate, Volume};
use dibs_control::{
    BumpInfo, Changed, ConnInfo, Event, Integrity, PathChange, PathInfo, PathState, PathUsage,
    PeerInfo, PeerState, Preferences, RuleInfo, RuleMade, RuleOrigin, Status, Trust,
};

use crate::table::Table;
use crate::units::{age, bytes, count, micros, percent, printable, rate, volume};

pub(crate) fn status(status: &Status, now: f64) -> String {
    let mut text = format!(
        "dibsd {}, pid {}, up {}, integrity {}\n",
        printable(&status.version),
        status.pid,
        age(status.uptime),
        match status.integrity {
            Integrity::On => "on",
            Integrity::Off => "off",
        }
    );
    text += &match &status.backstop.reason {
        Some(reason) => format!(
            "backstop {}: {}\n",
            status.backstop.state,
            printable(reason)
        ),
        None => format!("backstop {}\n", status.backstop.state),
    };
    for warning in &status.warnings {
        text += &format!("warning: {}\n", printable(warning));
    }
    let bumped: u64 = status.bumps.iter().map(|bump| bump.connections).sum();
    let connections = usize::try_from(status.connections).unwrap_or(usize::MAX);
    text += &format!(
        "{} to peers, {bumped} on a bump\n",
        count(connections, "connection")
    );

    let counted: Vec<_> = status
        .counters
        .iter()
        .filter(|(_, value)| **value > 0)
        .collect();
    let counters = Table::new(
        ["COUNTER", ">VALUE"],
        counted
            .iter()
            .map(|(name, value)| [(*name).clone(), value.to_string()]),
    );
    for (table, filled) in [
        (peers(&status.peers, now), !status.peers.is_empty()),
        (paths(&status.paths), !status.paths.is_empty()),
        (bumps(&status.bumps), !status.bumps.is_empty()),
        (counters, !counted.is_empty()),
    ] {
        if filled {
            text += &format!("\n{table}");
        }
    }
    text
}

pub(crate) fn conns(conns: &[ConnInfo], now: f64) -> Table {
    let headers = [
        ">ID",
        "LOCAL",
        "REMOTE",
        "PEER",
        "PROCESS",
        "BUMP",
        ">SINCE",
        ">SENT",
        ">RECEIVED",
        ">RETRANS",
        "PATHS (SENT/RECEIVED)",
    ];
    let row = |conn: &ConnInfo| {
        let paths: Vec<_> = conn
            .paths
            .iter()
            .map(|path| {
                let (sent, received) = (bytes(path.bytes_sent), bytes(path.bytes_received));
                format!("{} {sent}/{received}", path.name)
            })
            .collect();
        [
            conn.id.to_string(),
            conn.local.to_string(),
            conn.remote.to_string(),
            conn.peer.clone(),
            process(conn),
            conn.bump.clone(),
            since(conn.since, now),
            bytes(conn.bytes_sent),
            bytes(conn.bytes_received),
            conn.retransmissions.to_string(),
            paths.join(", "),
        ]
    };
    Table::new(headers, conns.iter().map(row))
}

pub(crate) fn changed(changed: &Changed, now: f64) -> String {
    let number = count(changed.connections.len(), "connection");
    let mut text = format!("{number} now on {}\n", printable(&changed.bump));
    if !changed.connections.is_empty() {
        text += &conns(&changed.connections, now).to_string();
    }
    for skipped in &changed.skipped {
        let (local, remote, reason) = (skipped.local, skipped.remote, printable(&skipped.reason));
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "skipped {}: {local} to {remote}: {reason}",
            skipped.id
        );
    }
    text
}

/// `dport 80 uid 1000 -> scramble`
pub(crate) fn rule(rule: &RuleInfo) -> String {
    let mut text = format!("{} -> {}", rule_selector(rule), rule_bump(rule));
    if let Some(scheduler) = &rule.scheduler {
        text += &format!(", scheduler {scheduler}");
    }
    printable(&text)
}

/// A new rule, and those that gave way to it.
pub(crate) fn made(made: &RuleMade) -> String {
    let mut text = format!("rule {}: {}\n", made.rule.id, rule(&made.rule));
    for gone in &made.displaced {
        let (id, what) = (gone.id, rule(gone));
        text += &format!("rule {id} gave way to it and is gone: {what}\n");
    }
    text
}

pub(crate) fn rules(rules: &[RuleInfo]) -> Table {
    let row = |rule: &RuleInfo| {
        let origin = match rule.origin {
            RuleOrigin::Config => "configuration",
            RuleOrigin::User => "dibsctl",
        };
        [
            rule.id.to_string(),
            rule_bump(rule),
            rule_selector(rule),
            rule.scheduler.clone().unwrap_or_default(),
            origin.to_owned(),
        ]
    };
    Table::new(
        [">ID", "BUMP", "SELECTOR", "SCHEDULER", "MADE BY"],
        rules.iter().map(row),
    )
}

pub(crate) fn paths(paths: &[PathInfo]) -> Table {
    let headers = [
        "PATH",
        "PEER",
        "TRUST",
        "ROLE",
        "STATE",
        "REMOTE",
        ">RTT",
        ">LOSS",
        ">SENT",
        ">RECEIVED",
        ">WINDOW",
        ">IN FLIGHT",
        ">PACED",
        ">LIMIT",
        ">VOLUME",
        ">MTU",
        "NOTE",
    ];
    let row = |path: &PathInfo| {
        let trust = match path.trust {
            Trust::Trusted => "trusted",
            Trust::Untrusted => "untrusted",
        };
        let state = match path.state {
            PathState::Up => "up",
            PathState::Validating => "validating",
            PathState::Down => "down",
        };
        let notes: Vec<_> = path
            .preferred
            .then_some("preferred")
            .into_iter()
            .chain(path.reason.as_deref())
            // Where it is not up, the reason says why.
            .chain({ path.unused.as_deref() }.filter(|_| path.state == PathState::Up))
            .collect();
        [
            path.name.clone(),
            path.peer.clone(),
            trust.to_owned(),
            path.role.clone(),
            state.to_owned(),
            path.remote
                .map(|remote| remote.to_string())
                .unwrap_or_default(),
            path.srtt_us.map(micros).unwrap_or_default(),
            percent(path.loss),
            bytes(path.bytes_sent),
            bytes(path.bytes_received),
            bytes(path.cwnd),
            bytes(path.in_flight),
            path.pacing_rate.map(rate).unwrap_or_default(),
            { path.rate_limit }.map_or_else(String::new, |bits| rate(bits / 8)),
            { path.volume }.map_or_else(String::new, |all| {
                let used = volume(path.volume_used.unwrap_or_default());
                format!("{used} of {}", volume(all))
            }),
            path.mtu.to_string(),
            notes.join("; "),
        ]
    };
    Table::new(headers, paths.iter().map(row))
}

/// How new data is shared out.
pub(crate) fn scheduler(now: &Preferences) -> String {
    match &now.prefer {
        Some(_) => format!("{}; {}", printable(&now.scheduler), preferred(now)),
        None => format!("{}\n", printable(&now.scheduler)),
    }
}

/// What a change of the use of paths came to.
pub(crate) fn path_change(change: &PathChange, now: &Preferences) -> String {
    match change {
        PathChange::Prefer { .. } | PathChange::Unprefer => preferred(now),
        PathChange::Scheduler { .. } => {
            format!("the scheduler is {}\n", printable(&now.scheduler))
        }
        PathChange::Role { path, .. } | PathChange::Limit { path, .. } => {
            let changed = now.paths.iter().filter(|usage| usage.name == *path);
            changed.map(usage).collect()
        }
        PathChange::Reset => {
            let paths: String = now.paths.iter().map(usage).collect();
            let scheduler = printable(&now.scheduler);
            let preferred = preferred(now);
            format!(
                "as in the configuration file: the scheduler is {scheduler}\n{preferred}{paths}"
            )
        }
    }
}

fn preferred(now: &Preferences) -> String {
    match &now.prefer {
        Some(prefer) => format!(
            "path {} is preferred (weight {}, delta {})\n",
            printable(&prefer.path),
            prefer.weight,
            prefer.delta
        ),
        None => "no path is preferred\n".to_owned(),
    }
}

/// `path wlan: backup, 20 Mbit a second, 10 GB a month`
fn usage(usage: &PathUsage) -> String {
    let mut text = format!("path {}: {}", usage.name, usage.role);
    if let Some(rate) = usage.rate_limit.and_then(|bits| Rate::new(bits).ok()) {
        text += &format!(", {rate} a second");
    }
    if let Some(volume) = usage.volume.and_then(|bytes| Volume::new(bytes).ok()) {
        text += &format!(", {volume} a month");
    }
    printable(&text) + "\n"
}

pub(crate) fn peers(peers: &[PeerInfo], now: f64) -> Table {
    let headers = [
        "PEER",
        "STATE",
        ">SINCE",
        ">SENT",
        ">RECEIVED",
        ">BUMPED",
        "ADDRESSES",
        "NOTE",
    ];
    let row = |peer: &PeerInfo| {
        let state = match peer.state {
            PeerState::Established => "established",
            PeerState::Connecting => "connecting",
            PeerState::Down => "down",
        };
        let addresses: Vec<_> = peer.addresses.iter().map(ToString::to_string).collect();
        [
            peer.name.clone(),
            state.to_owned(),
            peer.since.map(|time| since(time, now)).unwrap_or_default(),
            bytes(peer.bytes_sent),
            bytes(peer.bytes_received),
            peer.connections.to_string(),
            addresses.join(", "),
            peer.reason.clone().unwrap_or_default(),
        ]
    };
    Table::new(headers, peers.iter().map(row))
}

pub(crate) fn bumps(bumps: &[BumpInfo]) -> Table {
    let row = |bump: &BumpInfo| {
        let shares = bump.needed.zip(bump.shares);
        let notes: Vec<_> = (bump.default.then(|| "default".to_owned()))
            .into_iter()
            .chain(shares.map(|(needed, shares)| format!("{needed} of {shares} shares")))
            .chain(bump.answers.map(|answers| {
                let what = if answers { "something" } else { "nothing" };
                format!("{what} comes back by it")
            }))
            .chain(bump.reason.clone())
            .collect();
        [
            bump.name.clone(),
            bump.kind.clone(),
            bump.device.clone().unwrap_or_default(),
            bump.connections.to_string(),
            notes.join("; "),
        ]
    };
    Table::new(
        ["BUMP", "KIND", "DEVICE", ">CONNECTIONS", "NOTE"],
        bumps.iter().map(row),
    )
}

/// One line: when (UTC), what, and what about.
pub(crate) fn event(event: &Event) -> String {
    // The year 9999 is as far as the format reaches.
    let seconds = event.time.clamp(0.0, 253_402_300_799.0);
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds);
    let mut line = format!("{}  {}", humantime::format_rfc3339_millis(time), event.text);
    for (name, value) in &event.fields {
        line += &format!("  {name}={value}");
    }
    printable(&line)
}

pub(crate) fn process(conn: &ConnInfo) -> String {
    match (&conn.process, conn.pid) {
        (Some(name), Some(pid)) => format!("{name} ({pid})"),
        (Some(name), None) => name.clone(),
        (None, Some(pid)) => format!("({pid})"),
        (None, None) => String::new(),
    }
}

fn rule_bump(rule: &RuleInfo) -> String {
    let level = match (rule.require, rule.prefer) {
        (true, _) => " (required)",
        (_, true) => " (preferred)",
        _ => "",
    };
    let not_now = if rule.active { "" } else { ", not now" };
    format!("{}{level}{not_now}", rule.bump)
}

fn rule_selector(rule: &RuleInfo) -> String {
    if rule.selector.is_empty() {
        return "all".to_owned();
    }
    let terms: Vec<_> = rule
        .selector
        .iter()
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    terms.join(" ")
}

fn since(time: f64, now: f64) -> String {
    // A clock that was set back shows as no time at all.
    age((now - time).max(0.0) as u64)
}
