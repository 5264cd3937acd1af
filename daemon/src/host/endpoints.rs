//! Endpoints of the peers: the file's addresses, and the resolver's answers for its names. A name is looked up at first, when
//! the network has changed, and as long as it does not serve.

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use dibs_config::{Config, Endpoint};
use dibs_control::EndpointInfo;

use crate::data::socket::unscoped;
use crate::data::{Driver, Gone};
use crate::host::interfaces::Inventory;

/// The addresses of each IP version that are used of a name.
const ADDRESSES: usize = 4;

/// An endpoint that is a name.
#[derive(Debug)]
struct Named {
    /// By index of the configuration.
    peer: usize,
    path: usize,
    host: String,
    port: u16,
    /// The resolver's last answer, in its order.
    found: Vec<IpAddr>,
    /// Reason why the last lookup brought nothing. Earlier answers hold on.
    fault: Option<String>,
    schedule: Schedule,
}

/// A name to look up.
pub(crate) struct Lookup {
    /// For the answer.
    pub(crate) number: usize,
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// The endpoints of all peers. Inputs are [`note_silence`](Self::note_silence), [`note_network`](Self::note_network) and
/// [`note_answer`](Self::note_answer); then [`tell`](Self::tell) has the data path know what is new, and
/// [`poll_lookup`](Self::poll_lookup) and [`due`](Self::due) say what to look up, and when.
pub(crate) struct Endpoints {
    named: RefCell<Vec<Named>>,
    /// Endpoints that the data path knows, by index of the peer.
    told: RefCell<Vec<Vec<(usize, SocketAddr)>>>,
}

/// The number of a path of the configuration.
fn path_index(config: &Config, name: &str) -> usize {
    let found = config.paths.iter().position(|path| path.name == *name);
    found.expect("the configuration was checked: endpoints name paths")
}

/// The endpoints of a peer that are addresses, by index of the local path.
pub(crate) fn addresses(config: &Config, peer: usize) -> Vec<(usize, SocketAddr)> {
    let endpoints = config.peers[peer].endpoints.iter();
    let addresses = endpoints.filter_map(|(path, endpoint)| {
        let address = unscoped(endpoint.address()?);
        Some((path_index(config, path), address))
    });
    addresses.collect()
}

impl Endpoints {
    /// Before any name is looked up.
    pub(crate) fn of(config: &Config) -> Self {
        let peers = config.peers.iter().enumerate();
        let named = peers.flat_map(|(peer, of)| {
            of.endpoints.iter().filter_map(move |(path, endpoint)| {
                Some(Named {
                    peer,
                    path: path_index(config, path),
                    host: endpoint.host()?.to_owned(),
                    port: endpoint.port(),
                    found: Vec::new(),
                    fault: None,
                    schedule: Schedule::new(),
                })
            })
        });
        let told = (0..config.peers.len()).map(|peer| addresses(config, peer));
        Self {
            named: RefCell::new(named.collect()),
            told: RefCell::new(told.collect()),
        }
    }

    /// True if none of them is a name.
    pub(crate) fn are_addresses(&self) -> bool {
        self.named.borrow().is_empty()
    }

    /// Takes note of which peers are silent on which paths, by index of both.
    pub(crate) fn note_silence(&self, now: Instant, is_silent: impl Fn(usize, usize) -> bool) {
        for named in self.named.borrow_mut().iter_mut() {
            let is_silent = named.fault.is_some() || is_silent(named.peer, named.path);
            named.schedule.note_silence(now, is_silent);
        }
    }

    /// Takes note of a change of the network: names may have other answers there.
    pub(crate) fn note_network(&self) {
        let mut named = self.named.borrow_mut();
        named
            .iter_mut()
            .for_each(|named| named.schedule.note_network());
    }

    /// The next name to look up.
    pub(crate) fn poll_lookup(&self, now: Instant) -> Option<Lookup> {
        let mut all = self.named.borrow_mut();
        let is_due = |named: &Named| named.schedule.due(now).is_some_and(|due| due <= now);
        let number = all.iter().position(is_due)?;
        let named = &mut all[number];
        named.schedule.begin();
        Some(Lookup {
            number,
            host: named.host.clone(),
            port: named.port,
        })
    }

    /// Time of the next lookup.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        let named = self.named.borrow();
        named
            .iter()
            .filter_map(|named| named.schedule.due(now))
            .min()
    }

    /// Takes the answer of a [`Lookup`].
    pub(crate) fn note_answer(
        &self,
        now: Instant,
        number: usize,
        answer: Result<Vec<IpAddr>, String>,
    ) {
        let named = &mut self.named.borrow_mut()[number];
        named.schedule.end(now);
        named.fault = None;
        match answer.map(some_of_each) {
            Ok(found) if found.is_empty() => named.fault = Some("it has no address".to_owned()),
            // A resolver gives them in turns.
            Ok(found) if is_same(&found, &named.found) => {}
            Ok(found) => named.found = found,
            Err(why) => named.fault = Some(why),
        }
    }

    /// Tells the data path where peers listen, if that is news; returns that for the log.
    pub(crate) fn tell(
        &self,
        config: &Config,
        inventory: &Inventory,
        driver: &Driver,
    ) -> Result<Vec<String>, Gone> {
        let mut news = Vec::new();
        let named = self.named.borrow();
        let mut peers: Vec<usize> = named.iter().map(|named| named.peer).collect();
        peers.dedup();
        for peer in peers {
            let mut endpoints = addresses(config, peer);
            for named in named.iter().filter(|named| named.peer == peer) {
                let found = named.usable(config, inventory);
                endpoints.extend(found.map(|to| (named.path, to)));
            }
            let told = &mut self.told.borrow_mut()[peer];
            if *told == endpoints {
                continue;
            }
            let answered = { named.iter() }.filter(|of| of.peer == peer && !of.is_new());
            news.extend(answered.map(|named| {
                let (peer, path) = (&config.peers[peer].name, &config.paths[named.path].name);
                let shown = named.shown(config, inventory);
                format!("peer {peer}, path {path}: {shown}")
            }));
            driver.set_endpoints(peer, endpoints.clone())?;
            *told = endpoints;
        }
        Ok(news)
    }

    /// Fault of a peer's endpoint, by index of peer and path; none for an address.
    pub(crate) fn fault(
        &self,
        config: &Config,
        inventory: &Inventory,
        peer: usize,
        path: usize,
    ) -> Option<String> {
        let named = self.named.borrow();
        let of = |named: &&Named| (named.peer, named.path) == (peer, path);
        named.iter().find(of)?.lack(config, inventory)
    }

    /// Faults of all endpoints, each with its peer and path.
    pub(crate) fn faults(&self, config: &Config, inventory: &Inventory) -> Vec<String> {
        let named = self.named.borrow();
        let answered = named.iter().filter(|named| !named.is_new());
        let faults = answered.filter_map(|named| {
            let fault = named.lack(config, inventory)?;
            let (peer, path) = (&config.peers[named.peer], &config.paths[named.path]);
            Some(format!("peer {}, path {}: {fault}", peer.name, path.name))
        });
        faults.collect()
    }

    /// The endpoints of a peer, in the order of the file.
    pub(crate) fn infos(
        &self,
        config: &Config,
        inventory: &Inventory,
        peer: usize,
    ) -> Vec<EndpointInfo> {
        let named = self.named.borrow();
        let info = |(name, endpoint): &(String, Endpoint)| {
            let path = path_index(config, name);
            let of = |named: &&Named| (named.peer, named.path) == (peer, path);
            let named = named.iter().find(of).filter(|_| endpoint.host().is_some());
            EndpointInfo {
                path: name.clone(),
                endpoint: endpoint.to_string(),
                addresses: match named {
                    Some(named) => named.usable(config, inventory).collect(),
                    None => endpoint.address().into_iter().collect(),
                },
                fault: named.and_then(|named| named.lack(config, inventory)),
            }
        };
        config.peers[peer].endpoints.iter().map(info).collect()
    }
}

impl Named {
    /// Addresses of the peer, as far as the path has one of the same IP version.
    fn usable(&self, config: &Config, inventory: &Inventory) -> impl Iterator<Item = SocketAddr> {
        let [v4, v6] = inventory.path_versions(&config.paths[self.path]);
        let fits = move |address: &&IpAddr| if address.is_ipv4() { v4 } else { v6 };
        let port = self.port;
        let found = self.found.iter().filter(fits);
        found.map(move |address| SocketAddr::new(*address, port))
    }

    /// `home.example.net is at 192.0.2.7:5300, [2001:db8::7]:5300`
    fn shown(&self, config: &Config, inventory: &Inventory) -> String {
        let found: Vec<String> = { self.usable(config, inventory) }
            .map(|address| address.to_string())
            .collect();
        match found.is_empty() {
            true => format!("{} is nowhere", self.host),
            false => format!("{} is at {}", self.host, found.join(", ")),
        }
    }

    /// True until the resolver has said something of it.
    fn is_new(&self) -> bool {
        self.found.is_empty() && self.fault.is_none()
    }

    /// Reason why it does not serve, or may be out of date.
    fn lack(&self, config: &Config, inventory: &Inventory) -> Option<String> {
        let host = &self.host;
        if let Some(why) = &self.fault {
            return Some(format!("the name {host} cannot be resolved: {why}"));
        }
        if self.is_new() {
            return Some(format!("the name {host} is being resolved"));
        }
        if self.usable(config, inventory).next().is_some() {
            return None;
        }
        let (its, ours) = match self.found[0].is_ipv4() {
            true => ("IPv4", "IPv6"),
            false => ("IPv6", "IPv4"),
        };
        let path = &config.paths[self.path].name;
        Some(format!(
            "the name {host} has {its} addresses alone, and path {path} has {ours} addresses alone"
        ))
    }
}

/// The first few addresses of each IP version, of those that a host can have.
fn some_of_each(found: Vec<IpAddr>) -> Vec<IpAddr> {
    let mut kept: Vec<IpAddr> = Vec::new();
    for address in found {
        let address = address.to_canonical();
        let alike = { kept.iter() }.filter(|other| other.is_ipv4() == address.is_ipv4());
        let is_hosts = !address.is_unspecified() && !address.is_multicast();
        if is_hosts && alike.count() < ADDRESSES && !kept.contains(&address) {
            kept.push(address);
        }
    }
    kept
}

/// True if both are the same, in whatever order.
fn is_same(one: &[IpAddr], other: &[IpAddr]) -> bool {
    one.len() == other.len() && one.iter().all(|address| other.contains(address))
}

/// The silence after which a name is looked up again.
const SILENCE: Duration = Duration::from_secs(10);
/// The longest wait between two lookups of a name that does not serve; it doubles up to this.
const LONGEST: Duration = Duration::from_secs(60);

/// See the module. Inputs are `note_*`, [`begin`](Self::begin) and [`end`](Self::end); [`due`](Self::due) says when to
/// begin.
#[derive(Debug)]
struct Schedule {
    under_way: bool,
    /// The name was never looked up, or the network has changed since.
    at_once: bool,
    /// Since when nobody has answered where it leads, or it has led nowhere.
    silent_since: Option<Instant>,
    /// The end of the last lookup.
    looked_up: Option<Instant>,
    wait: Duration,
}

impl Schedule {
    const fn new() -> Self {
        Self {
            under_way: false,
            at_once: true,
            silent_since: None,
            looked_up: None,
            wait: SILENCE,
        }
    }

    /// Takes note of whether it serves now.
    fn note_silence(&mut self, now: Instant, is_silent: bool) {
        match is_silent {
            true => {
                self.silent_since.get_or_insert(now);
            }
            false => {
                self.silent_since = None;
                self.wait = SILENCE;
            }
        }
    }

    /// Another network may have another resolver, and others answers.
    const fn note_network(&mut self) {
        self.at_once = true;
        self.wait = SILENCE;
    }

    /// Time of the next lookup; none: not before something is noted.
    fn due(&self, now: Instant) -> Option<Instant> {
        if self.under_way {
            return None;
        }
        if self.at_once {
            return Some(now);
        }
        let silent = self.silent_since? + SILENCE;
        let again = self.looked_up.map(|at| at + self.wait);
        Some(again.map_or(silent, |again| silent.max(again)))
    }

    /// Begins a lookup.
    fn begin(&mut self) {
        self.under_way = true;
        if !std::mem::take(&mut self.at_once) {
            self.wait = (self.wait * 2).min(LONGEST);
        }
    }

    /// The resolver has answered, or given up.
    const fn end(&mut self, now: Instant) {
        self.under_way = false;
        self.looked_up = Some(now);
    }
}

#[cfg(test)]
mod tests;
