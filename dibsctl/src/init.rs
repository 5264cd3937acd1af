//! `init`: a key, a configuration, and the line by which the other host gets to know this one.

pub(crate) mod files;
pub(crate) mod interfaces;
mod report;

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};
use dibs_config::joining::Store;
use dibs_config::setup::{
    self, Addresses, Claims, Ground, Introduction, Meeting, Meetings, NewPath, OwnPath, Unmet, Way,
};
use dibs_config::{Config, Endpoint, Error, PeerConfig, PublicKey, Trust};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use self::interfaces::Interface;
use self::report::{ByLine, Peer, Report};
use crate::doctor;
use crate::output::say;

/// Options for what `init` cannot find out.
#[derive(clap::Args)]
pub(crate) struct Wishes {
    /// Add the other host, with the join token that `dibsctl init` printed there
    #[arg(long, value_name = "TOKEN")]
    peer: Option<Introduction>,
    /// Join the server that printed this join token with `dibsctl init --exit`, once and within an hour
    #[arg(long, value_name = "TOKEN", conflicts_with = "peer")]
    join: Option<Introduction>,
    /// Interfaces where nobody can eavesdrop, up to the other host [default: with --peer or --join, those that share a network
    /// with a trusted interface of the other host]
    #[arg(long, value_name = "INTERFACE", value_delimiter = ',')]
    trusted: Vec<String>,
    /// Interfaces where somebody may eavesdrop, or "none" [default: all others that lead out of this host]
    #[arg(long, value_name = "INTERFACE", value_delimiter = ',')]
    untrusted: Vec<String>,
    /// Public address that NAT translates to an address of this host, as in a cloud or behind a port forwarding; name
    /// its interface if there are several
    #[arg(long, value_name = "[INTERFACE=]ADDRESS", value_delimiter = ',')]
    public: Vec<Public>,
    /// Interface of a network whose devices this host forwards for; not a path
    #[arg(long, value_name = "INTERFACE", value_delimiter = ',')]
    gateway: Vec<String>,
    /// Let peers reach the Internet through this host, with its address
    #[arg(long)]
    exit: bool,
    /// Configuration file to write; private.key is made beside it, and the state is kept there in lib if this is not the
    /// usual file
    #[arg(
        long = "config",
        value_name = "FILE",
        default_value = "/etc/dibs/dibsd.toml"
    )]
    file: PathBuf,
    /// Replace an existing configuration; the old one is kept as FILE.old, and the key is not changed
    #[arg(long)]
    force: bool,
}

impl Wishes {
    /// The other host.
    fn other(&self) -> Option<&Introduction> {
        self.peer.as_ref().or(self.join.as_ref())
    }
}

/// An address that is translated on the way here, and the interface that it leads to.
#[derive(Clone)]
struct Public {
    interface: Option<String>,
    address: IpAddr,
}

impl FromStr for Public {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (interface, address) = match text.rsplit_once('=') {
            Some((interface, address)) => (Some(interface.to_owned()), address),
            None => (None, text),
        };
        let parsed = address.parse().ok();
        let address = parsed.filter(|address| setup::is_routable(*address));
        let address = address.ok_or("it is no address by which other hosts reach this one")?;
        Ok(Self { interface, address })
    }
}

/// File in which the daemon looks for its key unless the file says otherwise.
const USUAL_KEY: &str = "/etc/dibs/private.key";

/// The one word of `--untrusted` that is no interface.
const NONE: &str = "none";

pub(crate) fn run(wishes: &Wishes, json: bool) -> Result<()> {
    let is_once = |other: &Introduction| other.token.is_some();
    ensure!(
        wishes.join.as_ref().is_none_or(is_once),
        "the join token works with --peer, not with --join: only what `dibsctl init --exit` prints works once"
    );
    ensure!(
        !wishes.peer.as_ref().is_some_and(is_once),
        "the join token works with --join, not with --peer: one host joins by what `dibsctl init --exit` prints"
    );
    let interfaces = interfaces::list()?;
    let is_there = files::is_there(&wishes.file)?;
    let report = if is_there && !wishes.force {
        extend(wishes, &interfaces)?
    } else {
        begin(wishes, &interfaces)?
    };
    report.show(json)
}

/// Writes a new configuration.
fn begin(wishes: &Wishes, interfaces: &[Interface]) -> Result<Report> {
    let file = &wishes.file;
    let gateway = gateway(wishes, interfaces)?;
    let (paths, by_line) = new_paths(wishes, interfaces)?;
    let key_file = file.with_file_name("private.key");
    let named = file.parent().filter(|_| key_file != Path::new(USUAL_KEY));
    let mut text = setup::configuration(&paths, named, wishes.exit, &gateway);
    let config = checked(file, &text)?;
    // A key that cannot be used, or one of the peer's, is found before anything is written.
    let known = files::is_there(&key_file)?.then(|| files::key(&key_file));
    let known = known.transpose()?.map(|(key, _)| key);
    let peer = match wishes.other() {
        Some(other) => {
            let met = meet(&config, other, interfaces, known)?;
            text += &met.section;
            checked(file, &text)?;
            Some(met.peer)
        }
        None => None,
    };
    let (public_key, key_made) = files::key(&key_file)?;
    let replaced = wishes.force && files::is_there(file)?;
    files::create(file, &text, wishes.force)?;
    Ok(Report {
        file: file.clone(),
        changed: true,
        new: true,
        old: replaced.then(|| files::old(file)),
        key_file,
        key_made,
        line: introduce(wishes, &config, public_key, interfaces)?,
        by_line,
        peer,
        joins: wishes.join.is_some(),
        gateway,
        unforwarded: config.daemon.unforwarded(doctor::sysctl),
    })
}

/// Adds a peer to the configuration that is there, or only tells of it.
fn extend(wishes: &Wishes, interfaces: &[Interface]) -> Result<Report> {
    let file = &wishes.file;
    let shown = file.display();
    ensure!(
        [&wishes.trusted, &wishes.untrusted, &wishes.gateway]
            .iter()
            .all(|names| names.is_empty())
            && wishes.public.is_empty(),
        "{shown} exists already and defines paths and networks: edit it, or replace it with --force, which keeps the old one as {}",
        files::old(file).display()
    );
    ensure!(
        !wishes.exit || checked(file, &fs::read_to_string(file)?)?.daemon.exit,
        "{shown} is there already: write exit = true under [daemon] there, and repeat this without --exit"
    );
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
    let config = checked(file, &text)?;
    let key_file = config.daemon.private_key_file.clone();
    let (public_key, key_made) = files::key(&key_file)?;
    let mut changed = false;
    let peer = match wishes.other() {
        Some(other) => {
            let mut met = meet(&config, other, interfaces, Some(public_key))?;
            let same = |peer: &&PeerConfig| peer.public_key == other.public_key;
            if let Some(there) = config.peers.iter().find(same) {
                let endpoints = met.peer.endpoints.iter();
                let endpoints = endpoints.map(|(path, to)| (path.clone(), Endpoint::from(*to)));
                let endpoints: BTreeMap<String, Endpoint> = endpoints.collect();
                let known: BTreeMap<String, Endpoint> = there.endpoints.iter().cloned().collect();
                let same = match &met.addresses {
                    Addresses::Own(own) => *own == there.addresses,
                    Addresses::Lent(_) => !there.appears_as.is_empty(),
                };
                ensure!(
                    same && endpoints == known,
                    "{shown} already has this host as peer \"{}\", with other addresses or endpoints: edit that [[peer]], \
                     or delete it and repeat this command",
                    there.name
                );
                met.peer.name.clone_from(&there.name);
            } else {
                let mut text = text.clone();
                if !text.is_empty() && !text.ends_with('\n') {
                    text.push('\n');
                }
                text += &met.section;
                dibs_config::parse(&shown.to_string(), &text)
                    .with_context(|| format!("cannot add peer \"{}\"", met.peer.name))?;
                files::change(file, &text)?;
                changed = true;
            }
            Some(met.peer)
        }
        None => None,
    };
    Ok(Report {
        file: file.clone(),
        changed,
        new: false,
        old: None,
        key_file,
        key_made,
        line: introduce(wishes, &config, public_key, interfaces)?,
        by_line: Vec::new(),
        peer,
        joins: wishes.join.is_some(),
        gateway: Vec::new(),
        unforwarded: config.daemon.unforwarded(doctor::sysctl),
    })
}

/// Configuration of `text`, or its fault with the place.
fn checked(file: &Path, text: &str) -> Result<Config> {
    dibs_config::parse(&file.display().to_string(), text).map_err(|error| {
        if let Error::Invalid(fault) = &error {
            say(&fault.excerpt());
        }
        error.into()
    })
}

/// Networks of the interfaces that the user named for them.
fn gateway(wishes: &Wishes, interfaces: &[Interface]) -> Result<Vec<IpNet>> {
    let mut networks = Vec::new();
    for name in &wishes.gateway {
        let interface = called(name, interfaces)?;
        let mut paths = wishes.trusted.iter().chain(&wishes.untrusted);
        ensure!(
            !paths.any(|path| interface.is_called(path)) && !interface.is_uplink(),
            "{name} leads to the Internet or to peers, so it is a path: name the interface of the network behind this host \
             with --gateway"
        );
        ensure!(
            !interface.attachments.is_empty(),
            "{name} has no address: give it one of its network, as with `ip address add 192.168.1.1/24 dev {name}`, and \
             repeat this"
        );
        networks.extend(interface.attachments.iter().map(|at| at.network));
    }
    networks.sort_unstable();
    networks.dedup();
    Ok(networks)
}

/// The interface of this name.
fn called<'a>(name: &str, interfaces: &'a [Interface]) -> Result<&'a Interface> {
    let found = interfaces
        .iter()
        .find(|interface| interface.is_called(name));
    found.ok_or_else(|| {
        say(&report::offer(interfaces).to_string());
        anyhow!("this host has no interface \"{name}\": choose from the list above")
    })
}

/// The paths that the user named, those that the other host shows to be trusted, and the other ways out; and which are
/// trusted on the other host's word alone.
fn new_paths(wishes: &Wishes, interfaces: &[Interface]) -> Result<(Vec<NewPath>, Vec<ByLine>)> {
    for name in wishes.trusted.iter().chain(&wishes.untrusted) {
        if name != NONE {
            called(name, interfaces)?;
        }
    }
    let both = { wishes.trusted.iter() }.find(|name| wishes.untrusted.contains(name));
    if let Some(name) = both {
        bail!("{name} is in both --trusted and --untrusted: name it once");
    }
    let faces_trusted = |interface: &Interface| {
        let ways = wishes.other().into_iter().flat_map(|peer| &peer.ways);
        let trusted = ways.filter(|way| way.trust == Trust::Trusted);
        let mut addresses = trusted.flat_map(|way| way.addresses.iter().map(move |to| (way, *to)));
        addresses.find(|(_, to)| faces(interface, *to))
    };
    let mut by_line = Vec::new();
    let mut trust = |interface: &Interface| {
        let named = |names: &[String]| names.iter().any(|name| interface.is_called(name));
        if named(&wishes.gateway) {
            return None;
        }
        if named(&wishes.trusted) {
            return Some(Trust::Trusted);
        }
        if named(&wishes.untrusted) {
            return Some(Trust::Untrusted);
        }
        let shown = { faces_trusted(interface) }.filter(|_| wishes.trusted.is_empty());
        if let Some((way, address)) = shown {
            by_line.push(ByLine {
                interface: interface.name.clone(),
                way: way.name.clone(),
                address,
            });
            return Some(Trust::Trusted);
        }
        let offered = wishes.untrusted.is_empty() && interface.is_way_out(interfaces);
        offered.then_some(Trust::Untrusted)
    };
    let mut paths: Vec<NewPath> = Vec::new();
    for interface in interfaces {
        let Some(trust) = trust(interface) else {
            continue;
        };
        let taken = |name: &str| paths.iter().any(|path| path.name == name);
        paths.push(NewPath {
            name: setup::free_name(&interface.name, taken),
            interface: interface.name.clone(),
            trust,
            addresses: interface.addresses(),
            public: Vec::new(),
        });
    }
    if paths.is_empty() {
        say(&report::offer(interfaces).to_string());
        bail!(
            "no interface of this host has an address and leads out of it: choose one from the list above with --untrusted, \
             or with --trusted if nobody can eavesdrop there"
        );
    }
    for public in &wishes.public {
        let named = |path: &&mut NewPath| {
            { public.interface.as_ref() }.is_none_or(|name| path.interface == *name)
        };
        let several = public.interface.is_none() && paths.len() > 1;
        let shown = public.address;
        ensure!(
            !several,
            "{shown} may belong to several interfaces: name one with --public INTERFACE={shown}"
        );
        let path = paths.iter_mut().find(named);
        let path = path.with_context(|| {
            let name = public.interface.as_deref().unwrap_or_default();
            format!(
                "{shown} cannot belong to {name}, which is no path: name an interface that is one"
            )
        })?;
        path.public.push(shown);
    }
    Ok((paths, by_line))
}

fn faces(interface: &Interface, other: IpAddr) -> bool {
    interface.attachments.iter().any(|at| at.faces(other))
}

/// A peer as it would be added.
struct Met {
    peer: Peer,
    addresses: Addresses,
    section: String,
}

/// Finds where the other host is met, and how it is called here.
fn meet(
    config: &Config,
    other: &Introduction,
    interfaces: &[Interface],
    own_key: Option<PublicKey>,
) -> Result<Met> {
    ensure!(
        own_key != Some(other.public_key),
        "this is the join token of this host: paste the one that `dibsctl init` prints on the other host"
    );
    let own: Vec<OwnPath> = { config.paths.iter() }
        .map(|path| OwnPath {
            name: path.name.clone(),
            trust: path.trust,
            attachments: interfaces::attachments(path, interfaces),
        })
        .collect();
    let is_of_path = |at: &setup::Attachment| own.iter().any(|path| path.attachments.contains(at));
    let elsewhere = interfaces
        .iter()
        .flat_map(|interface| &interface.attachments);
    let elsewhere: Vec<_> = elsewhere.filter(|at| !is_of_path(at)).copied().collect();
    let hosts = Meetings {
        own: &own,
        elsewhere: &elsewhere,
        other,
        routed: |index: usize, endpoint| {
            interfaces::is_routed(&config.paths[index], interfaces, endpoint)
        },
    };
    let met = hosts.met();
    let is_own = |address| { interfaces.iter() }.any(|i| i.addresses().contains(&address));
    let claims = setup::claims(&hosts, &met, is_own);
    let lends = claims.taken.is_empty() && met.is_empty();
    if claims.taken.is_empty() && !lends {
        let left = { claims.left.iter() }.map(|left| format!("{}: {}", left.address, left.refusal));
        let left: Vec<_> = left.collect();
        let left = match &left[..] {
            [] => "it names none".to_owned(),
            left => left.join("; "),
        };
        return Err(anyhow!(
            "the join token of {} names no address that this host can use ({left}): give its interfaces addresses in a \
             network with a path here, and run `dibsctl init` again there",
            other.name
        ));
    }
    let taken = |name: &str| config.peers.iter().any(|peer| peer.name == name);
    let name = setup::free_name(&other.name, taken);
    of_no_other_peer(config, other, &claims)
        .with_context(|| format!("cannot add peer \"{name}\""))?;
    let own = claims.taken.iter().map(|taken| IpNet::from(taken.address));
    let everywhere = [Ipv4Net::default().into(), Ipv6Net::default().into()];
    let everywhere = everywhere.into_iter().filter(|_| other.exit);
    let addresses = match lends {
        false => Addresses::Own(own.chain(everywhere).collect()),
        true => Addresses::Lent(setup::lent(|address| {
            let mut nets = { interfaces.iter() }
                .flat_map(|interface| &interface.attachments)
                .map(|at| at.network)
                .chain(
                    config
                        .peers
                        .iter()
                        .flat_map(|peer| peer.addresses.iter().copied()),
                )
                .filter(|net| net.prefix_len() > 0);
            nets.any(|net| net.contains(&address))
        })),
    };
    let section = setup::peer_section(&name, (other.public_key, other.exit), &met, &addresses);
    let endpoints = { met.iter() }.map(|met| (met.path.clone(), met.endpoint));
    let mut warnings = warnings(config, &name, &met);
    // It calls, by whatever path.
    let unmet = { hosts.unmet(&met).into_iter() }.filter(|_| !lends);
    warnings.extend(unmet.map(|(path, why)| without_endpoint(&name, other, path, &why)));
    if { claims.taken.iter() }.any(|taken| taken.ground == Ground::Word) {
        warnings.push(format!(
            "no path here leads to {name}: its addresses are taken from its join token alone, and may belong to a third host"
        ));
    }
    let exit = other.exit && !lends;
    let mut reached = other.ways.iter().flat_map(|way| &way.addresses);
    if exit && !reached.any(IpAddr::is_ipv6) {
        warnings.push(format!(
            "{name} names no IPv6 address: if it has none, take ::/0 out of its addresses; then IPv6 connections leave \
             directly, unprotected"
        ));
    }
    Ok(Met {
        peer: Peer {
            endpoints: endpoints.collect(),
            public_key: other.public_key,
            exit,
            claims,
            lent: match &addresses {
                Addresses::Own(_) => Vec::new(),
                Addresses::Lent(lent) => lent.to_vec(),
            },
            warnings,
            name,
        },
        addresses,
        section,
    })
}

/// Refuses addresses that are another peer's, or in a network behind one.
fn of_no_other_peer(config: &Config, other: &Introduction, claims: &Claims) -> Result<()> {
    for taken in &claims.taken {
        let peers = { config.peers.iter() }.filter(|peer| peer.public_key != other.public_key);
        for peer in peers {
            let mut narrow = { peer.addresses.iter() }.filter(|net| net.prefix_len() > 0);
            let within = narrow.find(|net| net.contains(&taken.address));
            if let Some(net) = within {
                bail!(
                    "the join token of {} names {}, in {net}, which is peer \"{}\"'s: nothing was changed; if the token is \
                     right, first correct the addresses of that peer",
                    other.name,
                    taken.address,
                    peer.name
                );
            }
        }
    }
    Ok(())
}

/// Warning of a path by which the other host is not called.
fn without_endpoint(name: &str, other: &Introduction, path: &OwnPath, why: &Unmet<'_>) -> String {
    let own = &path.name;
    match why {
        Unmet::NoAddress => format!(
            "path {own} gets no endpoint of {name}: its interface has no address now; write {own} = \"ADDRESS:{}\" under \
             [peer.endpoints], unless {name} has an endpoint of this host there",
            other.port
        ),
        Unmet::Labels(way, endpoint) => format!(
            "path {own} gets no endpoint of {name}: it is {} here, but {}, which it reaches there, is {}; if the two belong \
             together, write {own} = \"{endpoint}\" under [peer.endpoints] (the path counts as untrusted)",
            path.trust.as_str(),
            way.name,
            way.trust.as_str()
        ),
        Unmet::Unreached => format!(
            "path {own} gets no endpoint of {name}: it reaches no address of {name}; write {own} = \"ADDRESS:{}\" under \
             [peer.endpoints], unless {name} has an endpoint of this host there",
            other.port
        ),
    }
}

/// Warnings for the user about how the hosts meet.
fn warnings(config: &Config, name: &str, met: &[Meeting<'_>]) -> Vec<String> {
    let both = |met: &&Meeting<'_>| [met.trust, met.way.trust] == [Trust::Trusted; 2];
    let mut warnings = Vec::new();
    let trusts = { config.paths.iter() }.any(|path| path.trust == Trust::Trusted);
    if trusts && !met.iter().any(|met| both(&met)) {
        warnings.push(format!(
            "no path that both hosts trust leads to {name}: connections cannot be protected until {name} contacts this host \
             over one, or [peer.endpoints] names its address there"
        ));
    }
    let apart = met.iter().filter(|met| met.trust != met.way.trust);
    warnings.extend(apart.map(|met| {
        format!(
            "path {} is {} here but {} on {name} (as {}): it counts as untrusted",
            met.path,
            met.trust.as_str(),
            met.way.trust.as_str(),
            met.way.name
        )
    }));
    warnings
}

/// This host, as it says to others: an exit lets one of them join by that. The token by which this one joins is kept.
fn introduce(
    wishes: &Wishes,
    config: &Config,
    public_key: PublicKey,
    interfaces: &[Interface],
) -> Result<Introduction> {
    let way = |path: &dibs_config::PathConfig| Way {
        name: path.name.clone(),
        trust: path.trust,
        addresses: {
            let own = interfaces::attachments(path, interfaces).into_iter();
            let own = own.map(|attachment| attachment.address);
            path.public.iter().copied().chain(own).collect()
        },
    };
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = host.trim_end().split('.').next().unwrap_or_default();
    let name = setup::free_name(name, |_| false);
    let store = Store::new(config.daemon.state_dir.clone());
    let directory = || format!("cannot write to {}", config.daemon.state_dir.display());
    if let Some(server) = &wishes.join
        && let Some(token) = &server.token
    {
        let kept = store.keep(&server.public_key, token, &name);
        kept.with_context(directory)?;
    }
    // Where a path is trusted, the host that joins would have to be called a peer before.
    let joins = config.daemon.exit && wishes.other().is_none() && !config.has_trusted();
    let token = joins.then(|| {
        let all = interfaces
            .iter()
            .flat_map(|interface| &interface.attachments);
        let networks: Vec<IpNet> = all.map(|at| at.network).collect();
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        store.offer(now, &networks).with_context(directory)
    });
    Ok(Introduction {
        name,
        public_key,
        port: config.daemon.port,
        exit: config.daemon.exit,
        token: token.transpose()?,
        ways: config.paths.iter().map(way).collect(),
    })
}
