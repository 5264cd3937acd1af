//! From tables to a [`Config`]: the sections one by one, each against those before it.

use std::path::PathBuf;

use dibs_settings::{Handshake, Opening, Place, Role, Scheduler};
use ipnet::IpNet;

use crate::bumps;
use crate::check;
use crate::endpoint;
use crate::error::Error;
use crate::table::{Source, Table, Value, Wrong, meant};
use crate::{
    BumpConfig, Config, Daemon, Endpoint, Fail, Integrity, Level, MatchExpr, OnTrustedDown,
    PathConfig, PeerConfig, PortRange, Protocol, RuleConfig, STATE_DIR, Selection, Trust, usage,
};

const SECTIONS: &[&str] = &["daemon", "path", "prefer", "peer", "bump", "rule"];
const DAEMON: &[&str] = &[
    "private_key_file",
    "control_socket",
    "state_dir",
    "port",
    "mark_mask",
    "table_base",
    "fail",
    "integrity",
    "handshake",
    "scheduler",
    "trusted_share",
    "on_trusted_down",
    "default_bump",
    "gateway",
    "metrics",
];
const PATH: &[&str] = &[
    "name",
    "interface",
    "address",
    "trust",
    "role",
    "rate",
    "volume",
];
const PEER: &[&str] = &[
    "name",
    "public_key",
    "preshared_key_file",
    "addresses",
    "accept",
    "endpoints",
];
const RULE: &[&str] = &[
    "bump",
    "protocol",
    "all",
    "dport",
    "sport",
    "uid",
    "user",
    "gid",
    "source",
    "destination",
    "interface",
    "dscp",
    "time",
    "match",
    "priority",
    "require",
    "prefer",
    "scheduler",
];

/// Enough for any order, and short in listings.
const MOST_PRIORITY: i32 = 1_000_000;

/// Tables 253 to 255 are the kernel's.
const LOWEST_TABLE: u32 = 256;

pub(crate) fn config(name: &str, text: &str) -> Result<Config, Error> {
    let source = Source::new(name, text);
    let mut root = source.root(SECTIONS)?;

    let (daemon, handshake, [default_bump, gateway]) = daemon(root.take("daemon"))?;
    let paths = paths(tables(&mut root, "path", "[[path]]", PATH)?)?;
    let prefer = root.take("prefer");
    let prefer = prefer
        .map(|value| usage::prefer(value, &paths))
        .transpose()?;
    let peers = peers(tables(&mut root, "peer", "[[peer]]", PEER)?, &paths)?;
    let gateway = match gateway {
        Some(value) => networks_behind(value, &peers)?,
        None => Vec::new(),
    };
    let bumps = tables(&mut root, "bump", "[[bump]]", &bumps::keys())?;
    let bumps = bumps::bumps(bumps, &paths)?;
    let default_bump = default_bump
        .map(|value| bumps::known(&value, &bumps))
        .transpose()?;
    let rules = tables(&mut root, "rule", "[[rule]]", RULE)?;
    let rules = rules
        .into_iter()
        .map(|table| rule(table, &bumps))
        .collect::<Result<_, _>>()?;

    let has_trusted = paths.iter().any(|path| path.trust == Trust::Trusted);
    let handshake = handshake.unwrap_or(match has_trusted {
        true => Handshake::Chained,
        false => Handshake::Any,
    });
    let daemon = Daemon {
        handshake,
        default_bump,
        gateway,
        ..daemon
    };
    let config = Config {
        daemon,
        paths,
        prefer,
        peers,
        bumps,
        rules,
        origin: source.into_origin(),
    };
    if config.paths.is_empty() {
        let hint = "write a [[path]] with name, interface and trust";
        let message = "no path is listed, and nothing would be carried".to_owned();
        return Err(config.refuse("path.0.trust", message, Some(hint.to_owned())));
    }
    config.check_handshake()?;
    let never = |path: &PathConfig| path.usage.role == Role::Never;
    if config.paths.iter().all(never) {
        return Err(config.refuse(
            "path.0.role",
            "every path has the role never, and nothing would be carried".to_owned(),
            Some("give one of them another role".to_owned()),
        ));
    }
    contradictions(&config)?;
    let requires = |rule: &RuleConfig| rule.level == Level::Require;
    let requiring = config.rules.iter().position(requires);
    if let (Some(index), Some((message, hint))) = (requiring, config.excludes_require()) {
        let hint = format!("{hint} in [daemon], or leave require out");
        return Err(config.refuse(&format!("rule.{index}.require"), message, Some(hint)));
    }
    Ok(config)
}

fn tables<'a>(
    root: &mut Table<'a>,
    key: &'static str,
    title: &'static str,
    known: &[&'static str],
) -> Result<Vec<Table<'a>>, Error> {
    root.take(key)
        .map_or(Ok(Vec::new()), |value| value.tables(title, known))
}

/// The section; by which paths keys are agreed, if it says that; and its default bump and networks, to be checked once
/// bumps and peers are known.
type DaemonSection<'a> = (Daemon, Option<Handshake>, [Option<Value<'a>>; 2]);

fn daemon(section: Option<Value<'_>>) -> Result<DaemonSection<'_>, Error> {
    let mut daemon = Daemon {
        private_key_file: PathBuf::from("/etc/dibs/private.key"),
        control_socket: PathBuf::from("/run/dibs/dibsd.sock"),
        state_dir: PathBuf::from(STATE_DIR),
        port: 5300,
        mark_mask: 0x3f00_0000,
        table_base: 5200,
        fail: Fail::Closed,
        integrity: Integrity::On,
        handshake: Handshake::Chained,
        scheduler: Scheduler::default(),
        trusted_share: 0.05,
        on_trusted_down: OnTrustedDown::Hold,
        default_bump: None,
        gateway: Vec::new(),
        metrics: None,
    };
    let Some(section) = section else {
        return Ok((daemon, None, [None, None]));
    };
    let mut table = section.table("[daemon]", DAEMON)?;
    if let Some(value) = table.take("private_key_file") {
        daemon.private_key_file = file(&value)?;
    }
    if let Some(value) = table.take("control_socket") {
        daemon.control_socket = socket(&value)?;
    }
    if let Some(value) = table.take("state_dir") {
        daemon.state_dir = absolute(&value)?;
    }
    if let Some(value) = table.take("port") {
        daemon.port = port(&value)?;
    }
    if let Some(value) = table.take("mark_mask") {
        let mask = value.integer(0..=u32::MAX)?;
        daemon.mark_mask = check::mark_mask(mask).map_err(|wrong| value.error(wrong))?;
    }
    if let Some(value) = table.take("table_base") {
        daemon.table_base = value.integer(LOWEST_TABLE..=u32::MAX - 16)?;
    }
    if let Some(value) = table.take("fail") {
        daemon.fail = value.one_of(&[("closed", Fail::Closed), ("open", Fail::Open)])?;
    }
    if let Some(value) = table.take("integrity") {
        daemon.integrity = value.one_of(&[("on", Integrity::On), ("off", Integrity::Off)])?;
    }
    let handshake = table.take("handshake").map(|value| {
        let words = Handshake::ALL.map(|one| (one.name(), one));
        value.one_of(&words)
    });
    let handshake = handshake.transpose()?;
    if let Some(value) = table.take("scheduler") {
        daemon.scheduler = usage::scheduler(&value)?;
    }
    if let Some(value) = table.take("trusted_share") {
        daemon.trusted_share = value.number(0.0..=1.0)?;
    }
    if let Some(value) = table.take("on_trusted_down") {
        daemon.on_trusted_down = value.one_of(&[
            ("hold", OnTrustedDown::Hold),
            ("untrusted", OnTrustedDown::Untrusted),
        ])?;
    }
    if let Some(value) = table.take("metrics") {
        daemon.metrics = Some(value.parse(check::loopback)?);
    }
    let default_bump = table.take("default_bump");
    Ok((daemon, handshake, [default_bump, table.take("gateway")]))
}

/// The networks that this host forwards for: none may be behind a peer too, for what comes from there
/// by a bump is for here, and the other way round.
fn networks_behind(value: Value<'_>, peers: &[PeerConfig]) -> Result<Vec<IpNet>, Error> {
    let mut networks = Vec::new();
    for value in value.list()? {
        let net = value.parse(check::steered_prefix)?;
        let meets = |other: &IpNet| other.contains(&net) || net.contains(other);
        let behind = |peer: &&PeerConfig| peer.addresses.iter().any(meets);
        let wrong = match peers.iter().find(behind) {
            Some(peer) => Wrong::new(
                format!("has {net}, of which addresses are peer \"{}\"'s", peer.name),
                "name the networks behind this host alone, and behind each peer its own",
            ),
            None if networks.contains(&net) => Wrong::bare(format!("has {net} twice")),
            None => {
                networks.push(net);
                continue;
            }
        };
        return Err(value.error(wrong));
    }
    Ok(networks)
}

fn paths(tables: Vec<Table<'_>>) -> Result<Vec<PathConfig>, Error> {
    let mut paths: Vec<PathConfig> = Vec::new();
    // An address-only path, refused as soon as two labels are seen.
    let mut unbound = None;
    for mut table in tables {
        let name = unique_name(&table.require("name")?, paths.iter().map(|path| &path.name))?;
        let interface = table.take("interface");
        let address = table.take("address");
        let label = table.require("trust")?;
        let path = PathConfig {
            name,
            interface: interface
                .as_ref()
                .map(|v| v.parse(check::interface))
                .transpose()?,
            address: address
                .as_ref()
                .map(|v| v.parse(check::local_address))
                .transpose()?,
            trust: label.one_of(&[("trusted", Trust::Trusted), ("untrusted", Trust::Untrusted)])?,
            usage: usage::usage(&mut table)?,
        };
        let same = paths.iter().find(|other| {
            other.interface == path.interface
                && (other.address == path.address
                    || other.address.is_none()
                    || path.address.is_none())
        });
        if let Some(other) = same {
            let value = interface.as_ref().or(address.as_ref());
            let wrong = Wrong::new(
                format!("is that of path \"{}\" too", other.name),
                "paths over one interface each need an address of their own",
            );
            return Err(match value {
                Some(value) => value.error(wrong),
                None => lacks_interface(&table),
            });
        }
        if path.interface.is_none() {
            let Some(address) = address else {
                return Err(lacks_interface(&table));
            };
            unbound.get_or_insert(address);
        }
        paths.push(path);
    }
    // A socket that is bound to an address only leaves by another link when its own is down.
    if let (Some(address), Some((first, rest))) = (unbound, paths.split_first())
        && rest.iter().any(|path| path.trust != first.trust)
    {
        return Err(address.error(Wrong::new(
            "alone does not keep a path to its link, which matters as paths differ in trust",
            "name the path's interface too",
        )));
    }
    Ok(paths)
}

fn lacks_interface(table: &Table<'_>) -> Error {
    table.error("[[path]] lacks \"interface\"".to_owned(), None)
}

fn peers(tables: Vec<Table<'_>>, paths: &[PathConfig]) -> Result<Vec<PeerConfig>, Error> {
    let mut peers: Vec<PeerConfig> = Vec::new();
    for mut table in tables {
        let name = unique_name(&table.require("name")?, peers.iter().map(|peer| &peer.name))?;
        let key = table.require("public_key")?;
        let public_key = key.parse(|text| {
            text.parse().map_err(|error: crate::KeyError| {
                Wrong::new(
                    error.to_string(),
                    "`dibsctl pubkey` prints it, 44 characters long",
                )
            })
        })?;
        if let Some(other) = peers.iter().find(|peer| peer.public_key == public_key) {
            return Err(key.error(Wrong::bare(format!(
                "is that of peer \"{}\" too",
                other.name
            ))));
        }
        let preshared_key_file = table
            .take("preshared_key_file")
            .map(|value| file(&value))
            .transpose()?;
        let mut addresses = Vec::new();
        for value in table.require("addresses")?.list()? {
            let prefix = value.parse(check::steered_prefix)?;
            let owner = peers.iter().find(|peer| peer.addresses.contains(&prefix));
            let wrong = match owner {
                Some(peer) => format!("has {prefix}, which is peer \"{}\"'s", peer.name),
                None if addresses.contains(&prefix) => format!("has {prefix} twice"),
                None => {
                    addresses.push(prefix);
                    continue;
                }
            };
            return Err(value.error(Wrong::bare(wrong)));
        }
        let endpoints = match table.take("endpoints") {
            Some(value) => endpoints(value.table("[peer.endpoints]", &[])?, paths)?,
            None => Vec::new(),
        };
        let accept = match table.take("accept") {
            Some(value) if value.is_empty_list() => Vec::new(),
            Some(value) => {
                let openings = value.one_or_many()?;
                openings.iter().map(opening).collect::<Result<_, _>>()?
            }
            None => vec![Opening::PATHS],
        };
        peers.push(PeerConfig {
            accept,
            name,
            public_key,
            preshared_key_file,
            addresses,
            endpoints,
        });
    }
    Ok(peers)
}

/// `22`, or what [`check::opening`] reads.
fn opening(value: &Value<'_>) -> Result<Opening, Error> {
    if value.is_string() {
        return value.parse(check::opening);
    }
    let port = port(value)?;
    Ok(Opening {
        place: Place::Paths,
        first: port,
        last: port,
    })
}

fn endpoints(table: Table<'_>, paths: &[PathConfig]) -> Result<Vec<(String, Endpoint)>, Error> {
    let mut endpoints = Vec::new();
    for value in table.rest() {
        let Some(path) = paths.iter().find(|path| path.name == value.key()) else {
            let names: Vec<_> = paths.iter().map(|path| path.name.as_str()).collect();
            let message = format!("there is no path \"{}\"", value.key().escape_debug());
            return Err(value.key_error(message, Some(meant(value.key(), &names))));
        };
        let endpoint = value.parse(endpoint::endpoint)?;
        // Of a name, the resolver says which it is.
        if let (Some(own), Some(its)) = (path.address, endpoint.address())
            && own.is_ipv4() != its.is_ipv4()
        {
            return Err(value.error(Wrong::bare(format!(
                "is {endpoint}, which the address of path \"{}\" cannot reach: one is IPv4, the \
                 other IPv6",
                path.name
            ))));
        }
        endpoints.push((path.name.clone(), endpoint));
    }
    Ok(endpoints)
}

fn rule(mut table: Table<'_>, bumps: &[BumpConfig]) -> Result<RuleConfig, Error> {
    let bump = bumps::known(&table.require("bump")?, bumps)?;
    if let Some(value) = table.take("protocol") {
        value.one_of(&[("tcp", ())])?;
    }
    let all = table.take("all");
    let uid = table.take("uid").map(|value| number(&value)).transpose()?;
    let user = match table.take("user") {
        Some(value) if uid.is_some() => {
            return Err(value.key_error(
                "a rule has uid or user, not both".to_owned(),
                Some("delete one of them".to_owned()),
            ));
        }
        Some(value) => Some(value.parse(check::user)?),
        None => None,
    };
    fn parsed<T>(
        value: Option<Value<'_>>,
        parse: impl FnOnce(&str) -> Result<T, Wrong>,
    ) -> Result<Option<T>, Error> {
        value.map(|value| value.parse(parse)).transpose()
    }
    let selection = Selection {
        sport: ports(table.take("sport"))?,
        dport: ports(table.take("dport"))?,
        source: prefixes(table.take("source"))?,
        destination: prefixes(table.take("destination"))?,
        uid,
        user,
        gid: table.take("gid").map(|value| number(&value)).transpose()?,
        interface: parsed(table.take("interface"), check::steered_interface)?,
        dscp: table.take("dscp").map(|value| dscp(&value)).transpose()?,
        time: parsed(table.take("time"), check::day_span)?,
        match_expr: parsed(table.take("match"), MatchExpr::parse)?,
    };
    let priority = table.take("priority");
    let priority = priority.map(|value| value.signed(-MOST_PRIORITY..=MOST_PRIORITY));
    let required = table.take("require");
    let preferred = table.take("prefer");
    let is_on = |value: &Option<Value<'_>>| match value {
        Some(value) => value.boolean(),
        None => Ok(false),
    };
    let level = match (is_on(&required)?, is_on(&preferred)?) {
        (true, true) => {
            let value = preferred.as_ref().expect("it is on");
            return Err(value.key_error(
                "a rule requires its bump or prefers it, not both".to_owned(),
                Some("delete one of them".to_owned()),
            ));
        }
        (true, false) => Level::Require,
        (false, true) => Level::Prefer,
        (false, false) => Level::Usual,
    };
    if let (Level::Require, Some(key), Some(value)) =
        (level, selection.shows_only_sending(), &required)
    {
        return Err(value.key_error(
            format!(
                "a rule with {key} cannot require its bump: whether a connection is meant shows \
                 only as it sends"
            ),
            Some("name it by ports, addresses, uid or user, time".to_owned()),
        ));
    }
    let scheduler = usage::scheduler_of_rule(table.take("scheduler"), &selection)?;
    selects(&table, all, &selection)?;
    Ok(RuleConfig {
        bump,
        protocol: Protocol::Tcp,
        selection,
        priority: priority.transpose()?.unwrap_or(0),
        level,
        scheduler,
    })
}

/// Refuses a rule that selects nothing, by neglect or because nothing can match. The command line asks for `--all`
/// where every connection is meant, and the file for `all = true`.
fn selects(table: &Table<'_>, all: Option<Value<'_>>, selection: &Selection) -> Result<(), Error> {
    let is_all = all.as_ref().map_or(Ok(false), Value::boolean)?;
    if !is_all && selection.terms().is_empty() {
        return Err(table.error(
            "[[rule]] names no connections: it has neither ports, addresses nor users".to_owned(),
            Some(
                "name them, such as dport = 443, or write all = true for every TCP connection to the peers"
                    .to_owned(),
            ),
        ));
    }
    if let (true, Some(all), Some(key)) = (is_all, &all, selection.names_ends()) {
        return Err(all.key_error(
            format!("a rule with all = true selects every connection, and {key} does not"),
            Some("delete one of them".to_owned()),
        ));
    }
    if !selection.can_match() {
        return Err(table.error(
            "[[rule]] selects nothing: each source is of another IP version than each destination"
                .to_owned(),
            Some("name a source and a destination of one IP version".to_owned()),
        ));
    }
    Ok(())
}

/// Refuses rules that stand against each other, at the later one.
fn contradictions(config: &Config) -> Result<(), Error> {
    for (index, rule) in config.rules.iter().enumerate() {
        for (number, earlier) in config.rules[..index].iter().enumerate() {
            if let Some(conflict) = rule.claim().conflict(earlier.claim()) {
                let message = format!(
                    "rule {} {conflict} as rule {}, which puts them on \"{}\"",
                    index + 1,
                    number + 1,
                    earlier.bump
                );
                let hint =
                    "give them one bump, one level and one scheduler, or let them select apart";
                let key = format!("rule.{index}.bump");
                return Err(config.refuse(&key, message, Some(hint.to_owned())));
            }
        }
    }
    Ok(())
}

fn prefixes(value: Option<Value<'_>>) -> Result<Vec<ipnet::IpNet>, Error> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let values = value.one_or_many()?;
    let parse = |value: &Value<'_>| value.parse(check::steered_prefix);
    values.iter().map(parse).collect()
}

fn dscp(value: &Value<'_>) -> Result<u8, Error> {
    if value.is_string() {
        return value.parse(check::dscp);
    }
    let number = value.integer(0..=63)?;
    Ok(u8::try_from(number).expect("integer() keeps to its range"))
}

fn ports(value: Option<Value<'_>>) -> Result<Vec<PortRange>, Error> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let range = |value: &Value<'_>| {
        if value.is_string() {
            return value.parse(check::port_range);
        }
        let port = port(value)?;
        Ok(PortRange {
            first: port,
            last: port,
        })
    };
    value.one_or_many()?.iter().map(range).collect()
}

fn port(value: &Value<'_>) -> Result<u16, Error> {
    let port = value.integer(1..=u32::from(u16::MAX))?;
    Ok(u16::try_from(port).expect("integer() keeps to its range"))
}

/// The number of a user or group; the highest is the kernel's "none".
fn number(value: &Value<'_>) -> Result<u32, Error> {
    value.integer(0..=u32::MAX - 1)
}

fn file(value: &Value<'_>) -> Result<PathBuf, Error> {
    value.parse(|text| match text {
        "" => Err(Wrong::bare("is empty")),
        text if text.contains('\0') => Err(Wrong::bare("has a zero byte")),
        text => Ok(PathBuf::from(text)),
    })
}

/// From wherever the daemon starts, it is to be the same.
fn absolute(value: &Value<'_>) -> Result<PathBuf, Error> {
    let path = file(value)?;
    match path.is_absolute() {
        true => Ok(path),
        false => Err(value.error(Wrong::bare("is not an absolute path"))),
    }
}

/// A socket's address has room for 107 bytes and a zero: unix(7). The daemon keeps its state and its lock
/// beside the socket, in files that have its name but for these endings.
fn socket(value: &Value<'_>) -> Result<PathBuf, Error> {
    // Choices lie beside it: from another directory the next daemon would not find them.
    let path = absolute(value)?;
    if let Some(taken) = { path.extension() }.filter(|end| *end == "state" || *end == "lock") {
        return Err(value.error(Wrong::bare(format!(
            "ends in .{}, as the file beside it that the daemon keeps",
            taken.display()
        ))));
    }
    match path.as_os_str().len() {
        0..=107 => Ok(path),
        long => Err(value.error(Wrong::bare(format!(
            "is {long} bytes long, and the path of a socket at most 107"
        )))),
    }
}

fn unique_name<'n>(
    value: &Value<'_>,
    mut taken: impl Iterator<Item = &'n String>,
) -> Result<String, Error> {
    let name = value.parse(check::name)?;
    if taken.any(|other| *other == name) {
        return Err(value.error(Wrong::bare(format!("\"{name}\" is taken by another"))));
    }
    Ok(name)
}
