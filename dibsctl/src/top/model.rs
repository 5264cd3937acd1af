//! What flowed between two looks at the daemon.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::time::Instant;

use clap::ValueEnum as _;
use dibs_control::{ConnId, ConnInfo, PathInfo, PathState, Status};

use crate::render::process;
use crate::table::{Table, table};
use crate::units::{age, count, micros, percent, printable, rate, word};

/// Bytes a second that a path sends without data: pings, and acknowledgements.
const IDLE: f64 = 10_000.0;

/// A look.
#[derive(Clone)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) status: Status,
    pub(super) conns: Vec<ConnInfo>,
}

/// Column that connections are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Sort {
    /// Traffic both ways
    Rate,
    /// Traffic sent
    Sent,
    /// Traffic received
    Received,
    /// Segments that the kernel sent again
    Retrans,
    /// Time on its bump
    Age,
    /// Name of the process
    Process,
    /// Name of the bump
    Bump,
    /// The far end
    Remote,
}

impl Sort {
    /// The next one, after the last the first.
    pub(super) fn next(self) -> Self {
        let all = Self::value_variants();
        let at = all.iter().position(|sort| *sort == self);
        all[at.map_or(0, |at| (at + 1) % all.len())]
    }
}

impl fmt::Display for Sort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("none is hidden");
        f.write_str(value.get_name())
    }
}

/// Order of connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) by: Sort,
    pub(super) reverse: bool,
}

/// Traffic of this host. Rates are bytes a second.
#[derive(Debug, serde::Serialize)]
pub(super) struct View {
    /// The daemon in a line.
    #[serde(skip)]
    pub(super) daemon: String,
    /// Warnings for the user.
    pub(super) warnings: Vec<String>,
    pub(super) paths: Vec<PathRow>,
    pub(super) bumps: Vec<BumpRow>,
    pub(super) devices: Vec<DeviceRow>,
    pub(super) connections: Vec<ConnRow>,
}

/// Datagrams of a path.
#[derive(Debug, serde::Serialize)]
pub(super) struct PathRow {
    pub(super) name: String,
    pub(super) peer: String,
    pub(super) state: PathState,
    pub(super) srtt_us: Option<u64>,
    /// Part of the datagrams that were lost lately.
    pub(super) loss: f64,
    pub(super) sent_rate: f64,
    pub(super) received_rate: f64,
    /// Why it carries no new data, or less than it could.
    pub(super) why: Option<String>,
}

/// Traffic of a bump.
#[derive(Debug, serde::Serialize)]
pub(super) struct BumpRow {
    pub(super) name: String,
    pub(super) connections: u64,
    pub(super) sent_rate: f64,
    pub(super) received_rate: f64,
}

/// Traffic of a host for which this one forwards, the busiest first.
#[derive(Debug, serde::Serialize)]
pub(super) struct DeviceRow {
    pub(super) address: IpAddr,
    pub(super) connections: u64,
    pub(super) sent_rate: f64,
    pub(super) received_rate: f64,
    /// Part of each path, both ways.
    pub(super) path_rates: BTreeMap<String, f64>,
}

/// Traffic of a connection; nothing is known of plain ones.
#[derive(Debug, serde::Serialize)]
pub(super) struct ConnRow {
    pub(super) id: ConnId,
    pub(super) process: String,
    pub(super) local: String,
    pub(super) remote: String,
    pub(super) bump: String,
    pub(super) sent_rate: f64,
    pub(super) received_rate: f64,
    pub(super) retransmissions: u64,
    /// Seconds on the bump.
    pub(super) age: u64,
    /// Names of the paths that carried it in between.
    pub(super) paths: Vec<String>,
}

impl View {
    pub(super) fn between(before: &Sample, latest: &Sample, order: Order, now: f64) -> Self {
        let seconds = latest.at.duration_since(before.at).as_secs_f64();
        let rate = |before: u64, latest: u64| match seconds > 0.0 {
            // What began anew has no past.
            true => latest.saturating_sub(before) as f64 / seconds,
            false => 0.0,
        };
        let paths = latest.status.paths.iter().map(|path| {
            let is_same = |other: &&PathInfo| {
                (&other.name, &other.peer, other.remote) == (&path.name, &path.peer, path.remote)
            };
            let past = before.status.paths.iter().find(is_same).unwrap_or(path);
            let sent_rate = rate(past.bytes_sent, path.bytes_sent);
            // Why it carries nothing new right now is news only of one that is idle.
            let unused = path.unused.as_ref().filter(|_| sent_rate < IDLE);
            let why = path.reason.as_ref().or(unused);
            PathRow {
                name: printable(&path.name),
                peer: printable(&path.peer),
                state: path.state,
                srtt_us: path.srtt_us,
                loss: path.loss,
                sent_rate,
                received_rate: rate(past.bytes_received, path.bytes_received),
                why: why.map(|why| printable(why)),
            }
        });
        let past: HashMap<_, _> = before.conns.iter().map(|conn| (conn.id, conn)).collect();
        let exits = exits(&latest.status);
        let mut devices: BTreeMap<IpAddr, DeviceRow> = BTreeMap::new();
        let conns = latest.conns.iter().map(|conn| {
            // One that is new, or came to another bump, counts from its beginning on.
            let past = past.get(&conn.id).filter(|past| past.bump == conn.bump);
            let sent = past.map_or(0, |past| past.bytes_sent);
            let received = past.map_or(0, |past| past.bytes_received);
            let carried = |name: &str| {
                let of = |conn: &ConnInfo| {
                    let path = conn.paths.iter().find(|path| path.name == name);
                    path.map_or(0, |path| path.bytes_sent + path.bytes_received)
                };
                rate(past.map_or(0, |past| of(past)), of(conn))
            };
            let (sent_rate, received_rate) = (
                rate(sent, conn.bytes_sent),
                rate(received, conn.bytes_received),
            );
            if is_forwarded(conn, &exits) {
                let address = conn.local.ip();
                let device = devices.entry(address);
                let device = device.or_insert_with(|| DeviceRow::new(address));
                device.add((sent_rate, received_rate), conn, carried);
            }
            ConnRow {
                id: conn.id,
                process: printable(&process(conn)),
                local: conn.local.to_string(),
                remote: conn.remote.to_string(),
                bump: printable(&conn.bump),
                sent_rate,
                received_rate,
                retransmissions: conn.retransmissions,
                age: (now - conn.since).max(0.0) as u64,
                paths: { conn.paths.iter() }
                    .filter(|path| carried(&path.name) > 0.0)
                    .map(|path| printable(&path.name))
                    .collect(),
            }
        });
        let mut connections: Vec<_> = conns.collect();
        connections.sort_by(|a, b| {
            let order_of = compare(order.by, a, b).then_with(|| a.id.cmp(&b.id));
            if order.reverse {
                order_of.reverse()
            } else {
                order_of
            }
        });
        let mut devices: Vec<_> = devices.into_values().collect();
        devices.sort_by(|a, b| b.both().total_cmp(&a.both()));
        let bumps = latest.status.bumps.iter().map(|bump| {
            let on = || connections.iter().filter(|conn| conn.bump == bump.name);
            BumpRow {
                name: printable(&bump.name),
                connections: bump.connections,
                sent_rate: on().map(|conn| conn.sent_rate).sum(),
                received_rate: on().map(|conn| conn.received_rate).sum(),
            }
        });
        Self {
            daemon: daemon(&latest.status),
            warnings: { latest.status.warnings.iter() }
                .map(|warning| printable(warning))
                .collect(),
            bumps: bumps.collect(),
            paths: paths.collect(),
            devices,
            connections,
        }
    }
}

impl DeviceRow {
    const fn new(address: IpAddr) -> Self {
        Self {
            address,
            connections: 0,
            sent_rate: 0.0,
            received_rate: 0.0,
            path_rates: BTreeMap::new(),
        }
    }

    /// Adds a connection: what it sent and received, and what each path carried of it.
    fn add(&mut self, (sent, received): (f64, f64), conn: &ConnInfo, by: impl Fn(&str) -> f64) {
        self.connections += 1;
        self.sent_rate += sent;
        self.received_rate += received;
        for path in &conn.paths {
            *self.path_rates.entry(printable(&path.name)).or_default() += by(&path.name);
        }
    }

    fn both(&self) -> f64 {
        self.sent_rate + self.received_rate
    }
}

/// Names of peers that lead to the Internet.
fn exits(status: &Status) -> Vec<&str> {
    let exits = status.peers.iter().filter(|peer| peer.is_exit());
    exits.map(|peer| &*peer.name).collect()
}

/// True for a connection of a device behind this host: it has no owner here, and its end there is private, or it goes to
/// the Internet by one of these exits.
fn is_forwarded(conn: &ConnInfo, exits: &[&str]) -> bool {
    let is_private = match conn.local.ip() {
        IpAddr::V4(address) => address.is_private(),
        IpAddr::V6(address) => address.is_unique_local(),
    };
    conn.uid.is_none() && (is_private || exits.contains(&&*conn.peer))
}

fn daemon(status: &Status) -> String {
    let connections = usize::try_from(status.connections).unwrap_or(usize::MAX);
    let bumped: u64 = status.bumps.iter().map(|bump| bump.connections).sum();
    format!(
        "dibsd {}, up {}, {} to peers, {bumped} on a bump",
        printable(&status.version),
        age(status.uptime),
        count(connections, "connection"),
    )
}

/// Of numbers the greatest first, of names the first.
fn compare(by: Sort, a: &ConnRow, b: &ConnRow) -> Ordering {
    match by {
        Sort::Rate => {
            let both = |row: &ConnRow| row.sent_rate + row.received_rate;
            both(b).total_cmp(&both(a))
        }
        Sort::Sent => b.sent_rate.total_cmp(&a.sent_rate),
        Sort::Received => b.received_rate.total_cmp(&a.received_rate),
        Sort::Retrans => b.retransmissions.cmp(&a.retransmissions),
        Sort::Age => b.age.cmp(&a.age),
        Sort::Process => a.process.cmp(&b.process),
        Sort::Bump => a.bump.cmp(&b.bump),
        Sort::Remote => a.remote.cmp(&b.remote),
    }
}

/// A rate, or nothing if nothing flows.
pub(super) fn flow(bytes: f64) -> String {
    match bytes.round() as u64 {
        0 => String::new(),
        bytes => rate(bytes),
    }
}

impl View {
    pub(super) fn paths(&self) -> Table {
        table!(self.paths, path:
            "PATH", path.name.clone();
            "PEER", path.peer.clone();
            "STATE", word(path.state);
            ">RTT", path.srtt_us.map(micros).unwrap_or_default();
            ">LOSS", percent(path.loss);
            ">SENT", flow(path.sent_rate);
            ">RECEIVED", flow(path.received_rate);
            "WHY NOT USED", path.why.clone().unwrap_or_default();
        )
    }

    pub(super) fn bumps(&self) -> Table {
        table!(self.bumps, bump:
            "BUMP", bump.name.clone();
            ">CONNECTIONS", bump.connections.to_string();
            ">SENT", flow(bump.sent_rate);
            ">RECEIVED", flow(bump.received_rate);
        )
    }

    pub(super) fn devices(&self) -> Table {
        let parts = |device: &DeviceRow| {
            let parts = device.path_rates.iter().filter(|(_, rate)| **rate >= 1.0);
            let parts = parts.map(|(path, rate)| format!("{path} {}", flow(*rate)));
            parts.collect::<Vec<_>>().join(", ")
        };
        table!(self.devices, device:
            "DEVICE", device.address.to_string();
            ">CONNECTIONS", device.connections.to_string();
            ">SENT", flow(device.sent_rate);
            ">RECEIVED", flow(device.received_rate);
            "OF THIS BY PATH", parts(device);
        )
    }

    pub(super) fn connections(&self) -> Table {
        table!(self.connections, conn:
            ">ID", conn.id.to_string();
            "PROCESS", conn.process.clone();
            "LOCAL", conn.local.clone();
            "REMOTE", conn.remote.clone();
            "BUMP", conn.bump.clone();
            ">SENT", flow(conn.sent_rate);
            ">RECEIVED", flow(conn.received_rate);
            ">RETRANS", conn.retransmissions.to_string();
            ">SINCE", age(conn.age);
            "PATHS", conn.paths.join(" ");
        )
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.daemon)?;
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        let (paths, bumps) = (self.paths(), self.bumps());
        write!(f, "\n{paths}\n{bumps}\n")?;
        if !self.devices.is_empty() {
            writeln!(f, "{}", self.devices())?;
        }
        write!(f, "{}", self.connections())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dibs_control::ConnPathInfo;

    use super::*;

    fn conn(id: &str, bump: &str, sent: u64, paths: [u64; 2]) -> ConnInfo {
        let by = |(name, sent): (&str, u64)| ConnPathInfo {
            name: name.to_owned(),
            bytes_sent: sent,
            bytes_received: 0,
        };
        ConnInfo {
            id: id.parse().expect("an id"),
            peer: "server".to_owned(),
            local: "10.0.1.1:5000".parse().expect("an address"),
            remote: "10.0.1.2:80".parse().expect("an address"),
            local_there: None,
            remote_there: None,
            plain: None,
            bump: bump.to_owned(),
            process: Some("curl".to_owned()),
            pid: Some(7),
            uid: None,
            mptcp: None,
            since: 90.0,
            bytes_sent: sent,
            bytes_received: 0,
            retransmissions: 0,
            paths: ["eth", "wlan"].into_iter().zip(paths).map(by).collect(),
            reason: None,
        }
    }

    fn sample(at: Instant, conns: Vec<ConnInfo>) -> Sample {
        let status = serde_json::json!({
            "version": "0.1.0", "pid": 1, "uptime": 60, "integrity": "on", "warnings": [], "peers": [],
            "paths": [], "connections": conns.len(), "counters": {},
            "bumps": [{ "name": "seal", "kind": "seal", "device": null, "needed": null, "shares": null,
                "default": true, "connections": 2, "answers": null, "reason": null }],
            "backstop": { "state": "lasting", "reason": null },
        });
        Sample {
            at,
            status: serde_json::from_value(status).expect("a status"),
            conns,
        }
    }

    #[test]
    fn rates_are_what_passed_between_the_looks() {
        let start = Instant::now();
        let before = vec![
            conn("1", "seal", 1000, [1000, 0]),
            conn("2", "share", 9000, [9000, 0]),
        ];
        // The second came to another bump and counts anew, the third is new.
        let latest = vec![
            conn("1", "seal", 5000, [1000, 4000]),
            conn("2", "seal", 600, [600, 0]),
            conn("3", "plain", 0, [0, 0]),
        ];
        let (before, latest) = (
            sample(start, before),
            sample(start + Duration::from_secs(2), latest),
        );
        let order = |by, reverse| Order { by, reverse };
        let view = View::between(&before, &latest, order(Sort::Rate, false), 100.0);
        let of: Vec<_> = { view.connections.iter() }
            .map(|conn| (conn.id.to_string(), conn.sent_rate, conn.paths.join(" ")))
            .collect();
        let is = |id: &str, rate: f64, paths: &str| (id.to_owned(), rate, paths.to_owned());
        assert_eq!(
            of,
            [
                is("1", 2000.0, "wlan"),
                is("2", 300.0, "eth"),
                is("3", 0.0, "")
            ]
        );
        assert_eq!(view.bumps[0].sent_rate, 2300.0);
        // They have no owner here, so they are of a device.
        let [device] = &view.devices[..] else {
            panic!("{:?}", view.devices);
        };
        assert_eq!((device.connections, device.sent_rate), (3, 2300.0));
        assert_eq!(device.path_rates["eth"], 300.0);
        assert_eq!(device.path_rates["wlan"], 2000.0);
        let parts = "eth 2.4 kbit/s, wlan 16 kbit/s";
        assert!(view.to_string().contains(parts), "{view}");
        assert_eq!(view.connections[0].age, 10);
        let view = View::between(&before, &latest, order(Sort::Bump, true), 100.0);
        assert_eq!(view.connections[2].bump, "plain");
        // Twice the same look: nothing is known to flow.
        let view = View::between(&latest, &latest, order(Sort::Rate, false), 100.0);
        assert!(view.connections.iter().all(|conn| conn.sent_rate == 0.0));
    }

    #[test]
    fn each_way_to_sort_leads_to_the_next_and_around() {
        let mut by = Sort::Rate;
        for sort in Sort::value_variants() {
            assert_eq!(by, *sort);
            by = by.next();
        }
        assert_eq!((by, by.to_string()), (Sort::Rate, "rate".to_owned()));
    }
}
