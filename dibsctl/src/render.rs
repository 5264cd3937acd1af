//! What the daemon tells, for people.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use dibs_config::{Rate, Volume};
use dibs_control::{
    BumpInfo, Changed, ConnInfo, ConnPathInfo, Event, PathChange, PathInfo, PathState, PathUsage,
    PeerInfo, Preferences, RuleGone, RuleInfo, RuleMade, RuleOrigin, Skipped, Status,
};

use dibs_settings::Role;

use crate::args::OFF;
use crate::table::{Table, table};
use crate::units::{age, bytes, count, micros, percent, printable, rate, volume, word};

pub(crate) fn status(status: &Status, now: f64) -> String {
    let mut text = format!(
        "dibsd {}, pid {}, up {}, integrity {}\n",
        printable(&status.version),
        status.pid,
        age(status.uptime),
        word(status.integrity)
    );
    text += &match &status.backstop.reason {
        Some(reason) => format!(
            "kill switch {}: {}\n",
            status.backstop.state,
            printable(reason)
        ),
        None => format!("kill switch {}\n", status.backstop.state),
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
    text.extend(status.peers.iter().map(|peer| uplinks(peer, &status.paths)));

    let counted: Vec<_> = status
        .counters
        .iter()
        .filter(|(_, value)| **value > 0)
        .collect();
    let counters = table!(counted, counter:
        "COUNTER", counter.0.clone();
        ">VALUE", counter.1.to_string();
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

/// `1 of 2 paths to b used, paced at 40 Mbit/s in all; not wlan: it is a backup, and other paths work`
fn uplinks(peer: &PeerInfo, paths: &[PathInfo]) -> String {
    let to_peer = paths.iter().filter(|path| path.peer == peer.name);
    let is_used = |path: &&PathInfo| path.state == PathState::Up && path.unused.is_none();
    let (used, others): (Vec<_>, Vec<_>) = to_peer.partition(is_used);
    let paths = count(used.len() + others.len(), "path");
    let mut text = format!("{} of {paths} to {} used", used.len(), peer.name);
    let paced = used.iter().filter_map(|path| path.pacing_rate).sum();
    if paced > 0 {
        text += &format!(", paced at {} in all", rate(paced));
    }
    for path in others {
        let why = path.reason.as_ref().or(path.unused.as_ref());
        let why = why.map_or(String::new(), |why| format!(": {why}"));
        text += &format!("; not {}{why}", path.name);
    }
    printable(&text) + "\n"
}

pub(crate) fn conns(conns: &[ConnInfo], now: f64) -> Table {
    let paths = |conn: &ConnInfo| {
        let path = |path: &ConnPathInfo| {
            let (sent, received) = (bytes(path.bytes_sent), bytes(path.bytes_received));
            format!("{} {sent}/{received}", path.name)
        };
        conn.paths.iter().map(path).collect::<Vec<_>>().join(", ")
    };
    let end = |here: SocketAddr, there: Option<SocketAddr>| match there {
        Some(there) => format!("{here} (there {there})"),
        None => here.to_string(),
    };
    table!(conns, conn:
        ">ID", conn.id.to_string();
        "LOCAL", end(conn.local, conn.local_there);
        "REMOTE", end(conn.remote, conn.remote_there);
        "PEER", conn.peer.clone();
        "PROCESS", process(conn);
        "BUMP", match conn.mptcp {
            Some(token) => format!("{} (MPTCP {token:08x})", conn.bump),
            None => conn.bump.clone(),
        };
        ">SINCE", since(conn.since, now);
        ">SENT", bytes(conn.bytes_sent);
        ">RECEIVED", bytes(conn.bytes_received);
        ">RETRANS", conn.retransmissions.to_string();
        "PATHS (SENT/RECEIVED)", paths(conn);
        "NOTE", note(conn, now);
    )
}

fn note(conn: &ConnInfo, now: f64) -> String {
    let plain = conn.plain.map(|plain| match plain.open {
        true => "plain open".to_owned(),
        false => format!("plain closed for {}", since(plain.heard, now)),
    });
    let notes: Vec<String> = conn.reason.clone().into_iter().chain(plain).collect();
    notes.join("; ")
}

pub(crate) fn changed(changed: &Changed, now: f64) -> String {
    let number = count(changed.connections.len(), "connection");
    let mut text = format!("{number} now on {}\n", printable(&changed.bump));
    if !changed.connections.is_empty() {
        text += &conns(&changed.connections, now).to_string();
    }
    write_skipped(&mut text, "skipped", &changed.skipped);
    text
}

/// A rule that was deleted, and connections that stay on its bump.
pub(crate) fn gone(gone: &RuleGone) -> String {
    let mut text = format!("rule {} is deleted\n", gone.id);
    write_skipped(&mut text, "kept", &gone.kept);
    text
}

/// Connections that a command left where they are, with the reason of several once.
fn write_skipped(text: &mut String, what: &str, skipped: &[Skipped]) {
    let mut by_reason: Vec<(&str, Vec<&Skipped>)> = Vec::new();
    for one in skipped {
        match by_reason
            .iter_mut()
            .find(|(reason, _)| *reason == one.reason)
        {
            Some((_, of_it)) => of_it.push(one),
            None => by_reason.push((&one.reason, vec![one])),
        }
    }
    let conn = |one: &Skipped| format!("{}: {} to {}", one.id, one.local, one.remote);
    for (reason, of_it) in by_reason {
        let reason = printable(reason);
        if let [one] = of_it[..] {
            *text += &format!("{what} {}: {reason}\n", conn(one));
            continue;
        }
        *text += &format!("{what} {}: {reason}\n", count(of_it.len(), "connection"));
        for one in of_it {
            *text += &format!("  {}\n", conn(one));
        }
    }
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
        text += &format!("rule {id} contradicted it and was deleted: {what}\n");
    }
    text
}

pub(crate) fn rules(rules: &[RuleInfo]) -> Table {
    let origin = |rule: &RuleInfo| match rule.origin {
        RuleOrigin::Config => "configuration",
        RuleOrigin::User => "dibsctl",
    };
    table!(rules, rule:
        ">ID", rule.id.to_string();
        "BUMP", rule_bump(rule);
        "SELECTOR", rule_selector(rule);
        "SCHEDULER", rule.scheduler.clone().unwrap_or_default();
        "MADE BY", origin(rule).to_owned();
        "NOTE", rule.note.clone().unwrap_or_default();
    )
}

pub(crate) fn paths(paths: &[PathInfo]) -> Table {
    let limit = |path: &PathInfo| path.rate_limit.map(|bits| rate(bits / 8));
    let volumes = |path: &PathInfo| {
        let used = volume(path.volume_used.unwrap_or_default());
        path.volume.map(|all| format!("{used} of {}", volume(all)))
    };
    let notes = |path: &PathInfo| {
        let preferred = path.preferred.then(|| "preferred".to_owned());
        // Where it is not up, the reason says why.
        let unused = path.unused.clone().filter(|_| path.state == PathState::Up);
        let notes = [preferred, path.reason.clone(), unused];
        Vec::from_iter(notes.into_iter().flatten()).join("; ")
    };
    table!(paths, path:
        "PATH", path.name.clone();
        "PEER", path.peer.clone();
        "TRUST", word(path.trust);
        "ROLE", role(&path.role).to_owned();
        "STATE", word(path.state);
        "REMOTE", path.remote.map(|remote| remote.to_string()).unwrap_or_default();
        ">RTT", path.srtt_us.map(micros).unwrap_or_default();
        ">LOSS", percent(path.loss);
        ">SENT", bytes(path.bytes_sent);
        ">RECEIVED", bytes(path.bytes_received);
        ">WINDOW", bytes(path.cwnd);
        ">IN FLIGHT", bytes(path.in_flight);
        ">PACED", path.pacing_rate.map(rate).unwrap_or_default();
        ">LIMIT", limit(path).unwrap_or_default();
        ">DATA CAP", volumes(path).unwrap_or_default();
        ">MTU", path.mtu.to_string();
        "NOTE", notes(path);
    )
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

/// Role as users call it.
fn role(name: &str) -> &str {
    match name == Role::Never.name() {
        true => OFF,
        false => name,
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
    let mut text = format!("path {}: {}", usage.name, role(&usage.role));
    if let Some(rate) = usage.rate_limit.and_then(|bits| Rate::new(bits).ok()) {
        text += &format!(", {rate} a second");
    }
    if let Some(volume) = usage.volume.and_then(|bytes| Volume::new(bytes).ok()) {
        text += &format!(", {volume} a month");
    }
    printable(&text) + "\n"
}

pub(crate) fn peers(peers: &[PeerInfo], now: f64) -> Table {
    let addresses = |peer: &PeerInfo| {
        let addresses = peer.addresses.iter().map(ToString::to_string);
        addresses.collect::<Vec<_>>().join(", ")
    };
    // Where there is no session, the reason says what is wrong with its endpoints.
    let notes = |peer: &PeerInfo| match &peer.reason {
        Some(reason) => reason.clone(),
        None => {
            let faults = peer.endpoints.iter().filter_map(|endpoint| {
                let (path, fault) = (&endpoint.path, endpoint.fault.as_ref()?);
                Some(format!("path {path}: {fault}"))
            });
            faults.collect::<Vec<_>>().join("; ")
        }
    };
    table!(peers, peer:
        "PEER", peer.name.clone();
        "STATE", word(peer.state);
        "KEYS", peer.keys.map(word).unwrap_or_default();
        ">SINCE", peer.since.map(|time| since(time, now)).unwrap_or_default();
        ">SENT", bytes(peer.bytes_sent);
        ">RECEIVED", bytes(peer.bytes_received);
        ">BUMPED", peer.connections.to_string();
        "ADDRESSES", addresses(peer);
        "NOTE", notes(peer);
    )
}

pub(crate) fn bumps(bumps: &[BumpInfo]) -> Table {
    let notes = |bump: &BumpInfo| {
        let shares = bump.needed.zip(bump.shares);
        let answers = bump
            .answers
            .map(|answers| if answers { "something" } else { "nothing" });
        let notes = [
            bump.default.then(|| "default".to_owned()),
            shares.map(|(needed, shares)| format!("{needed} of {shares} shares")),
            answers.map(|what| format!("{what} comes back over it")),
            bump.reason.clone(),
        ];
        Vec::from_iter(notes.into_iter().flatten()).join("; ")
    };
    table!(bumps, bump:
        "BUMP", bump.name.clone();
        "KIND", bump.kind.clone();
        "DEVICE", bump.device.clone().unwrap_or_default();
        ">CONNECTIONS", bump.connections.to_string();
        "NOTE", notes(bump);
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
