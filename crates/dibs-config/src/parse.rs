//! From the file as it is read to a [`Config`]: the sections one by one, each against those before it.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::LazyLock;

use dibs_settings::{DIRECT, Handshake, Role, Scheduler, Selection, Shows, Term, Wrong, meant};
use ipnet::IpNet;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::bumps::{self, BumpTable};
use crate::check::read::{self, OfKey};
use crate::error::Error;
use crate::table::Origin;
use crate::{
    BumpConfig, Config, Daemon, Level, PathConfig, PathUsage, PeerConfig, Prefer, Rate, RuleConfig,
    Trust, Volume,
};

/// The whole file, each value right by itself.
#[derive(Default, Deserialize)]
#[serde(rename = "the file", default)]
struct File {
    daemon: Daemon,
    path: Vec<PathConfig>,
    prefer: Option<Prefer>,
    peer: Vec<PeerConfig>,
    bump: Vec<BumpTable>,
    rule: Vec<RuleTable>,
}

#[derive(Deserialize)]
#[serde(rename = "[[path]]")]
pub(crate) struct PathTable {
    #[serde(deserialize_with = "read::name")]
    name: String,
    #[serde(default, deserialize_with = "read::interface")]
    interface: Option<String>,
    #[serde(default, deserialize_with = "read::local_address")]
    address: Option<IpAddr>,
    #[serde(default, deserialize_with = "read::hosts")]
    public: Vec<IpAddr>,
    trust: Trust,
    #[serde(default)]
    role: Role,
    #[serde(default, deserialize_with = "read::rate")]
    rate: Option<Rate>,
    #[serde(default, deserialize_with = "read::volume")]
    volume: Option<Volume>,
}

impl From<PathTable> for PathConfig {
    fn from(table: PathTable) -> Self {
        PathConfig {
            name: table.name,
            interface: table.interface,
            address: table.address,
            public: table.public,
            trust: table.trust,
            usage: PathUsage {
                role: table.role,
                rate: table.rate,
                volume: table.volume,
            },
        }
    }
}

/// A `[[rule]]`.
struct RuleTable {
    bump: String,
    all: bool,
    selection: Selection,
    priority: i32,
    require: bool,
    prefer: bool,
    scheduler: Option<Scheduler>,
}

/// Keys of a rule that are no terms: those that stand before them where all are named, and those behind.
const RULE: [&[&str]; 2] = [
    &["bump", "protocol", "all"],
    &["priority", "require", "prefer", "scheduler"],
];

/// TCP is the only one that is steered.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Protocol {
    Tcp,
}

/// Enough for any order, and short in listings.
#[derive(Deserialize)]
struct Priority(#[serde(deserialize_with = "read::whole::<-1_000_000, 1_000_000, i32, _, _>")] i32);

impl<'de> Deserialize<'de> for RuleTable {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        static KEYS: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
            let [first, last] = RULE.map(|keys| keys.iter().copied());
            first.chain(Term::keys()).chain(last).collect()
        });
        from.deserialize_struct("[[rule]]", &KEYS, RuleVisitor)
    }
}

struct RuleVisitor;

impl<'de> Visitor<'de> for RuleVisitor {
    type Value = RuleTable;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a rule")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<RuleTable, M::Error> {
        let (mut bump, mut all, mut priority, mut scheduler) = (None, false, 0, None);
        let (mut require, mut prefer, mut selection) = (false, false, Selection::default());
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "bump" => bump = Some(map.next_value()?),
                "protocol" => {
                    let Protocol::Tcp = map.next_value()?;
                }
                "all" => all = map.next_value()?,
                "priority" => Priority(priority) = map.next_value()?,
                "require" => require = map.next_value()?,
                "prefer" => prefer = map.next_value()?,
                "scheduler" => scheduler = Some(map.next_value()?),
                key => { map.next_value_seed(OfKey(key))? }
                    .into_iter()
                    .for_each(|term| selection.add(term)),
            }
        }
        Ok(RuleTable {
            bump: bump.ok_or_else(|| M::Error::missing_field("bump"))?,
            all,
            selection,
            priority,
            require,
            prefer,
            scheduler,
        })
    }
}

pub(crate) fn config(name: &str, text: &str) -> Result<Config, Error> {
    let origin = Origin::new(name, text);
    let mut file: File = origin.read()?;
    check_paths(&file.path, &origin)?;
    check_translated(&mut file, &origin)?;
    if let Some(prefer) = &file.prefer {
        check_prefer(prefer, &file.path, &origin)?;
    }
    check_peers(&file.peer, &file.path, &origin)?;
    check_gateway(&file.daemon.gateway, &file.peer, &origin)?;
    let bumps = bumps::bumps(&file.bump, &file.path, &origin)?;
    if let Some(default) = &file.daemon.default_bump {
        bumps::check_known(default, &bumps, "daemon.default_bump", &origin)?;
    }
    let rules = file.rule.into_iter().enumerate();
    let rules = rules
        .map(|(index, table)| rule(table, index, &bumps, &origin))
        .collect::<Result<_, _>>()?;
    let mut config = Config {
        daemon: file.daemon,
        paths: file.path,
        prefer: file.prefer,
        peers: file.peer,
        bumps,
        rules,
        origin,
    };
    if !config.has_trusted() && !config.origin.has("daemon.handshake") {
        config.daemon.handshake = Handshake::Any;
    }
    if config.paths.is_empty() {
        let hint = "add a [[path]] with name, interface and trust";
        let message = "the file has no [[path]], so no connection could be protected".to_owned();
        return Err(config.refuse("path.0.trust", message, Some(hint.to_owned())));
    }
    config.check_handshake()?;
    let never = |path: &PathConfig| path.usage.role == Role::Never;
    if config.paths.iter().all(never) {
        return Err(config.refuse(
            "path.0.role",
            "every path has the role never, so no connection could be protected".to_owned(),
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

/// Refuses networks that this host forwards for and that are behind a peer too, for what comes from there
/// by a bump is for here, and the other way round.
fn check_gateway(networks: &[IpNet], peers: &[PeerConfig], origin: &Origin) -> Result<(), Error> {
    for (index, net) in networks.iter().enumerate() {
        // Everywhere else may be behind a peer.
        let is_around = |other: &IpNet| other.contains(net) && other.prefix_len() > 0;
        let meets = |other: &IpNet| is_around(other) || net.contains(other);
        let behind = |peer: &&PeerConfig| peer.addresses.iter().any(meets);
        let wrong = match peers.iter().find(behind) {
            Some(peer) => Wrong::new(
                format!(
                    "has {net}, which shares addresses with peer \"{}\"",
                    peer.name
                ),
                "list only networks behind this host here, and those behind a peer in its addresses",
            ),
            None if networks[..index].contains(net) => Wrong::bare(format!("has {net} twice")),
            None => continue,
        };
        return Err(origin.wrong(&format!("daemon.gateway.{index}"), wrong));
    }
    Ok(())
}

fn check_paths(paths: &[PathConfig], origin: &Origin) -> Result<(), Error> {
    check_names("path", paths.iter().map(|path| &path.name), origin)?;
    for (index, path) in paths.iter().enumerate() {
        let key = match (&path.interface, path.address) {
            (Some(_), _) => "interface",
            (None, Some(_)) => "address",
            (None, None) => {
                let message = "[[path]] lacks \"interface\"".to_owned();
                let hint = Some("ip link shows the names, such as eth0".to_owned());
                return Err(origin.at_value(&format!("path.{index}"), message, hint));
            }
        };
        let same = paths[..index].iter().find(|other| {
            path.pattern().is_none()
                && other.interface == path.interface
                && (other.address == path.address
                    || other.address.is_none()
                    || path.address.is_none())
        });
        if let Some(other) = same {
            let wrong = Wrong::new(
                format!("is also that of path \"{}\"", other.name),
                "paths over one interface each need an address of their own",
            );
            return Err(origin.wrong(&format!("path.{index}.{key}"), wrong));
        }
    }
    // A socket that is bound to an address only leaves by another link when its own is down.
    let unbound = paths.iter().position(|path| path.interface.is_none());
    match unbound {
        Some(index) if paths.iter().any(|path| path.trust != paths[0].trust) => Err(origin.wrong(
            &format!("path.{index}.address"),
            Wrong::new(
                "is not enough, because paths differ in trust, and an address alone does not bind a path to its \
                 network",
                "add the interface of the path",
            ),
        )),
        _ => Ok(()),
    }
}

/// Refuses addresses that cannot stand for others, and adds those that stand for a peer's to what is behind it.
fn check_translated(file: &mut File, origin: &Origin) -> Result<(), Error> {
    let wrong = |key: String, message: String| Err(origin.wrong(&key, Wrong::bare(message)));
    let twice = |addresses: &[IpAddr]| {
        let families = addresses.iter().map(IpAddr::is_ipv4);
        families.collect::<BTreeSet<_>>().len() < addresses.len()
    };
    for (index, path) in file.path.iter().enumerate() {
        if twice(&path.public) {
            let message = "has more than one address of an IP version".to_owned();
            return wrong(format!("path.{index}.public"), message);
        }
        let taken = |other: &&PathConfig| other.public.iter().any(|one| path.public.contains(one));
        if let Some(other) = file.path[..index].iter().find(taken) {
            let message = format!("has an address of path \"{}\"", other.name);
            return wrong(format!("path.{index}.public"), message);
        }
    }
    for (index, peer) in file.peer.iter_mut().enumerate() {
        if peer.addresses.is_empty() && peer.appears_as.is_empty() {
            let hint = "add the peer's addresses, or appears_as if the peer is behind NAT";
            let message = "[[peer]] lacks \"addresses\"".to_owned();
            return Err(origin.at_key(&format!("peer.{index}"), message, Some(hint.to_owned())));
        }
        if twice(&peer.appears_as) {
            let message = "has more than one address of an IP version".to_owned();
            return wrong(format!("peer.{index}.appears_as"), message);
        }
        peer.addresses
            .extend(peer.appears_as.iter().map(|host| IpNet::from(*host)));
        // It speaks for the whole Internet, so it could call in any name.
        let is_wide = peer.addresses.iter().any(|net| net.prefix_len() == 0);
        if is_wide && !origin.has(&format!("peer.{index}.accept")) {
            peer.accept.clear();
        }
    }
    Ok(())
}

fn check_names<'n>(
    section: &str,
    names: impl Iterator<Item = &'n String>,
    origin: &Origin,
) -> Result<(), Error> {
    let mut taken = BTreeSet::new();
    for (index, name) in names.enumerate() {
        if !taken.insert(name) {
            let taken = format!("\"{name}\" is taken by another");
            let wrong = Wrong::new(taken, "give each its own name");
            return Err(origin.wrong(&format!("{section}.{index}.name"), wrong));
        }
    }
    Ok(())
}

/// Refuses to prefer what is no path, or is never used.
fn check_prefer(prefer: &Prefer, paths: &[PathConfig], origin: &Origin) -> Result<(), Error> {
    let name = &prefer.path;
    let wrong = match paths.iter().find(|path| path.name == *name) {
        Some(path) if path.usage.role != Role::Never => return Ok(()),
        Some(_) => Wrong::new(
            format!("\"{name}\" is never used"),
            "give it another role, or prefer another path",
        ),
        None => Wrong::new(
            format!("\"{}\" is no path", name.escape_debug()),
            meant(name, &names(paths)),
        ),
    };
    Err(origin.wrong("prefer.path", wrong))
}

fn names(paths: &[PathConfig]) -> Vec<&str> {
    paths.iter().map(|path| path.name.as_str()).collect()
}

fn check_peers(peers: &[PeerConfig], paths: &[PathConfig], origin: &Origin) -> Result<(), Error> {
    check_names("peer", peers.iter().map(|peer| &peer.name), origin)?;
    for (index, peer) in peers.iter().enumerate() {
        let others = &peers[..index];
        let wrong = |key: &str, message: String| {
            origin.wrong(&format!("peer.{index}.{key}"), Wrong::bare(message))
        };
        if let Some(other) = others
            .iter()
            .find(|other| other.public_key == peer.public_key)
        {
            let message = format!("is also that of peer \"{}\"", other.name);
            return Err(wrong("public_key", message));
        }
        for (at, prefix) in peer.addresses.iter().enumerate() {
            let owner = others.iter().find(|other| other.addresses.contains(prefix));
            let message = match owner {
                Some(owner) => format!("has {prefix}, which is peer \"{}\"'s", owner.name),
                None if peer.addresses[..at].contains(prefix) => format!("has {prefix} twice"),
                None => continue,
            };
            // The last ones are those that stand for others.
            let key = match at.checked_sub(peer.addresses.len() - peer.appears_as.len()) {
                Some(at) => format!("appears_as.{at}"),
                None => format!("addresses.{at}"),
            };
            return Err(wrong(&key, message));
        }
        for (name, endpoint) in &peer.endpoints {
            let key = format!("endpoints.{name}");
            let Some(path) = paths.iter().find(|path| path.name == *name) else {
                let message = format!("there is no path \"{}\"", name.escape_debug());
                let hint = Some(meant(name, &names(paths)));
                return Err(origin.at_key(&format!("peer.{index}.{key}"), message, hint));
            };
            // Of a name, the resolver says which it is.
            if let (Some(own), Some(its)) = (path.address, endpoint.address())
                && own.is_ipv4() != its.is_ipv4()
            {
                let message = format!(
                    "is {endpoint}, which the address of path \"{name}\" cannot reach: one is IPv4, the other IPv6"
                );
                return Err(wrong(&key, message));
            }
        }
    }
    Ok(())
}

fn rule(
    table: RuleTable,
    index: usize,
    bumps: &[BumpConfig],
    origin: &Origin,
) -> Result<RuleConfig, Error> {
    let at = |key: &str| format!("rule.{index}.{key}");
    let wrong = |key: &str, message: &str, hint: &str| {
        Err(origin.at_key(&at(key), message.to_owned(), Some(hint.to_owned())))
    };
    let is_direct = table.bump == DIRECT;
    if !is_direct {
        bumps::check_known(&table.bump, bumps, &at("bump"), origin)?;
    }
    let selection = table.selection;
    if selection.uid().is_some() && selection.user().is_some() {
        return wrong("user", "a rule has both uid and user", "delete one of them");
    }
    let level = match (table.require, table.prefer) {
        (true, true) => {
            let message = "a rule has both require and prefer";
            return wrong("prefer", message, "delete one of them");
        }
        (true, false) => Level::Require,
        (false, true) => Level::Prefer,
        (false, false) => Level::Usual,
    };
    if let (true, Some(key)) = (
        is_direct,
        level.key().or(table.scheduler.map(|_| "scheduler")),
    ) {
        let message =
            "a rule that lets connections leave directly has nothing beside its selection";
        return wrong(key, message, "delete this line");
    }
    if let (true, Some(key)) = (is_direct, selection.shows(&[Shows::Sending])) {
        let message = format!("a rule with {key} cannot let connections leave directly");
        return wrong(
            key,
            &message,
            "name them by ports, addresses, uid or user, time",
        );
    }
    if let (Level::Require, Some(key)) = (level, selection.shows(&[Shows::Sending])) {
        let message = format!(
            "a rule with {key} cannot require its bump, because {key} is known only when a packet is sent"
        );
        let hint = "select by ports, addresses, uid or user, time";
        return wrong("require", &message, hint);
    }
    if let (Some(_), Some(key)) = (
        table.scheduler,
        selection.shows(&[Shows::Socket, Shows::Sending]),
    ) {
        let message = format!(
            "a rule with {key} cannot have a scheduler, because the scheduler sees only addresses and ports"
        );
        return wrong("scheduler", &message, "select by ports, addresses, time");
    }
    // A rule that selects nothing, by neglect or because nothing can match. The command line asks for `--all` where
    // every connection is meant, and the file for `all = true`.
    let nothing = |message: &str, hint: &str| {
        let place = format!("rule.{index}");
        Err(origin.at_value(&place, message.to_owned(), Some(hint.to_owned())))
    };
    if !table.all && selection.terms().is_empty() {
        return nothing(
            "[[rule]] names no connections: it has neither ports, addresses nor users",
            "name them, such as dport = 443, or write all = true for every TCP connection to the peers",
        );
    }
    if let (true, Some(key)) = (table.all, selection.shows(&[Shows::Ends, Shows::Socket])) {
        let message =
            format!("a rule with all = true selects every connection, and {key} does not");
        return wrong("all", &message, "delete one of them");
    }
    if !selection.can_match() {
        return nothing(
            "[[rule]] selects nothing: each source is of another IP version than each destination",
            "name a source and a destination of one IP version",
        );
    }
    Ok(RuleConfig {
        bump: table.bump,
        selection,
        priority: table.priority,
        level,
        scheduler: table.scheduler,
    })
}

/// Refuses rules that stand against each other, at the later one.
fn contradictions(config: &Config) -> Result<(), Error> {
    for (index, rule) in config.rules.iter().enumerate() {
        for (number, earlier) in config.rules[..index].iter().enumerate() {
            if let Some(conflict) = rule.claim().conflict(earlier.claim()) {
                let message = format!(
                    "rule {} {conflict} as rule {}, for \"{}\"",
                    index + 1,
                    number + 1,
                    earlier.bump
                );
                let hint = "give both the same bump, require or prefer, and scheduler, or let them select different connections";
                let key = format!("rule.{index}.bump");
                return Err(config.refuse(&key, message, Some(hint.to_owned())));
            }
        }
    }
    Ok(())
}
