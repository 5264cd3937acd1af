//! What the main thread holds: the owners of all that it knows, by subject.
//!
//! All of it runs on one thread. State is borrowed only between two waits; what must not interleave takes a turn of
//! the users' ([`Users`]) or of the [`Kernel`]'s. What peers ask is dealt with without a turn of the users', so that two
//! daemons that ask each other do not wait for each other. What needs several owners is a function of the module of its
//! subject.
//!
//! Beside them stand what follows from that state, which bumps are in use and what is to be steered, and what wakes the tasks
//! that go on by themselves.

pub(crate) mod entries;
pub(crate) mod knocking;
pub(crate) mod listing;
pub(crate) mod machine;
pub(crate) mod marking;
pub(crate) mod messages;
pub(crate) mod paths;
pub(crate) mod requests;
pub(crate) mod rule_changes;
pub mod run;
pub(crate) mod sessions;
pub mod startup;
pub(crate) mod steering;
pub(crate) mod switching;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dibs_config::Config;
use dibs_core::node::MovedPort;
use dibs_policy::conntrack::Connection;
use dibs_policy::{Binding, ClassRule, Desired};
use dibs_settings::BumpId;
use dibs_switch::conns::Choice;
use dibs_switch::marks::SeenMark;
use dibs_switch::matching::Matched;
use dibs_switch::plausible::Implausible;
use dibs_switch::rules::{Ruling, Wants};
use dibs_switch::silence;
use dibs_switch::table::{self, Conn, ConnTable};
use dibs_switch::tracked::{Entry, Tracked};
use dibs_wire::FlowKey;
use ipnet::IpNet;
use tokio::sync::Notify;

use crate::control::Users;
use crate::control::events::{Events, PeerWarnings};
use crate::data::bumps::{self, Bumps, marks, of_mask};
use crate::data::{Driver, Rpc};
use crate::host::Host;
use crate::host::endpoints::Endpoints;
use crate::host::interfaces::Inventory;
use crate::host::live::{Answers, Live, Registry};
use crate::host::preferences::Preferences;
use crate::host::process::now;
use crate::kernel::{Kernel, connections};
use crate::rulebook::kept::{Keeper, desired};
use crate::rulebook::rules::Rule;
use crate::rulebook::state_file::{Saved, SavedChoice, SavedMatch, SavedPort, StateFile};
use crate::rulebook::{Active, FlowSchedulers, RuleBook};

/// The main thread's side of the daemon.
pub(crate) struct Daemon {
    /// As read at the start.
    pub(crate) config: Rc<Config>,
    /// Names this host in versions.
    pub(crate) host_id: u64,
    pub(crate) started: Instant,
    pub(crate) bumps: Bumps,
    /// The data path.
    pub(crate) driver: Driver,
    pub(crate) endpoints: Endpoints,
    pub(crate) host: Rc<Host>,
    pub(crate) kernel: Kernel,
    pub(crate) state: RefCell<State>,
    pub(crate) file: StateFile,
    /// Wishes kept for the guard, as last written.
    pub(crate) kept: Keeper,
    /// How paths are used.
    pub(crate) preferences: RefCell<Preferences>,
    pub(crate) flow_schedulers: FlowSchedulers,
    /// Numbers of connections, for users.
    pub(crate) registry: RefCell<Registry>,
    /// Whether anything comes back by devices.
    pub(crate) answers: RefCell<Answers>,
    pub(crate) users: Users,
    /// What is said to peers' daemons.
    pub(crate) rpc: Rpc,
    pub(crate) wakers: Wakers,
    pub(crate) events: Events,
    pub(crate) peer_warnings: PeerWarnings,
}

impl Daemon {
    /// Steering that is wanted now, and a rule more.
    pub(crate) fn wish(&self, added: Option<&Rule>) -> Desired {
        let state = self.state.borrow();
        let (inventory, addresses) = (self.host.inventory(), self.host.addresses());
        let mut wish = state.wish(&self.config, &inventory, &addresses, added);
        wish.translates = connections::is_forwarding();
        // The router that a matched connection comes through is a host of the peer, as far as marks go. Others are behind it, too.
        let matched = self.host.matched();
        let ends: BTreeSet<IpAddr> = matched.keys().map(|pair| pair.dst).collect();
        let routers = ends
            .into_iter()
            .filter(|end| self.host.peer_behind(*end).is_none());
        wish.shared = routers.map(IpNet::from).collect();
        for bump in &mut wish.bumps {
            bump.peers.extend(&wish.shared);
        }
        wish
    }

    /// The name of a peer.
    pub(crate) fn peer_name(&self, peer: usize) -> &str {
        &self.config.peers[peer].name
    }

    /// Warns of something that a peer causes.
    pub(crate) fn warn_of_peer(&self, peer: usize, text: &str) {
        let of = (peer, self.peer_name(peer));
        self.peer_warnings.warn(now(), of, text);
    }

    /// All connections to peers, those that are over included, with their marks. One in plain that would reach others by a
    /// peer is not among them: the peer does not know it.
    pub(crate) async fn connections(&self) -> anyhow::Result<Vec<Live>> {
        let are_marked = !self.state.borrow().installed.is_empty();
        let mut lives = connections::all(&self.kernel, are_marked).await?;
        let (marks, state) = (marks(&self.config), self.state.borrow());
        lives.retain(|live| {
            let mut known = state.conns.get(&live.pair).bumps();
            let is_on_a_bump = marks.bump_of(live.mark).is_some() || known.next().is_some();
            is_on_a_bump || !self.host.is_by_exit(&live.pair)
        });
        Ok(lives)
    }

    /// The bump that a connection is on, if it is on one.
    pub(crate) fn bump_of(&self, live: &Live) -> Option<BumpId> {
        let marked = marks(&self.config).bump_of(live.mark);
        self.state.borrow().ruling(live).is_on(marked)
    }

    /// What a tracked connection's mark says.
    pub(crate) fn seen(&self, entry: &Connection) -> SeenMark {
        let marks = marks(&self.config);
        let bump = marks.bump_of(entry.mark);
        SeenMark {
            bump,
            chosen: entry.mark & marks.override_bit() != 0,
            locked: entry.mark & marks.locked_bit() != 0,
            carried: bump.is_none() || self.bumps.get(bump).is_some(),
            told: entry.mark_told,
        }
    }

    /// What there is to look at of an entry.
    pub(crate) fn entry(&self, found: &Connection) -> Entry {
        Entry {
            mark: self.seen(found),
            closed: found.was_closed(),
            finished: found.has_finished(),
        }
    }

    /// Entries that conntrack has of these connections, looked up one by one.
    pub(crate) async fn got(&self, pairs: &[FlowKey]) -> Result<Tracked, dibs_policy::Error> {
        let mut conntrack = self.kernel.conntrack()?;
        let mut tracked = Vec::new();
        for pair in pairs {
            if let Some(found) = conntrack.get(pair).await? {
                tracked.push((*pair, self.entry(&found)));
            }
        }
        Ok(Tracked::new(tracked))
    }

    /// What is alive of these connections, and what conntrack has of them.
    pub(crate) async fn looked_up(
        &self,
        pairs: &[FlowKey],
    ) -> anyhow::Result<(HashMap<FlowKey, Live>, Tracked)> {
        let tracked = self.got(pairs).await?;
        Ok((connections::sockets_of(&self.kernel, pairs).await?, tracked))
    }

    /// Changes what is known of a connection.
    pub(crate) fn update<R>(&self, pair: &FlowKey, change: impl FnOnce(&mut Conn) -> R) -> R {
        self.state.borrow_mut().conns.update(pair, change)
    }

    /// Writes what is to outlive us; the sweep does so again if that fails.
    pub(crate) fn save(&self) -> anyhow::Result<()> {
        let state = self.state.borrow();
        let engaged = state.peers.iter().zip(&self.config.peers);
        let matched = self.host.matched();
        let as_saved = |(conn, known): (&FlowKey, &Matched)| SavedMatch {
            conn: *conn,
            theirs: known.theirs,
            peer: self.config.peers[known.peer].public_key.to_string(),
            socket: known.socket,
        };
        let moved = state.peers.iter().zip(&self.config.peers);
        let moved = moved.flat_map(|(state, peer)| {
            state.moved_ports.iter().map(|port| SavedPort {
                conn: port.ours,
                theirs: port.theirs,
                peer: peer.public_key.to_string(),
            })
        });
        let saved = Saved {
            next_rule: state.rules.next(),
            rules: state.rules.saved().to_vec(),
            choices: state
                .conns
                .saved()
                .map(|(conn, saved)| SavedChoice {
                    conn,
                    choice: saved.choice,
                    asked: saved.asked,
                    stood: saved.stood,
                })
                .collect(),
            engaged: engaged
                .map(|(state, peer)| (peer.public_key.to_string(), state.wants.bumps()))
                .filter(|(_, bumps)| *bumps != 0)
                .collect(),
            addresses: self.host.addresses().clone(),
            devices: { self.bumps.device_names().into_iter() }
                .map(|(bump, name)| (bump.get(), name))
                .collect(),
            preferences: self.preferences.borrow().wishes().clone(),
            matched: matched.iter().map(as_saved).collect(),
            moved: moved.collect(),
            ..Saved::default()
        };
        self.file.save(saved)
    }

    /// As [`save`](Self::save), where nobody waits for it.
    pub(crate) fn save_or_warn(&self) {
        self.events.note("save", self.save());
    }
}

/// Rule number of connections that have [a rule of their own](ConnTable::pins).
const PIN: u32 = 0;

/// How many versions of choices were refused, out of messages and out of the file, and how many hosts that would join.
#[derive(Clone, Copy, Default)]
pub(crate) struct Refused {
    /// For their generation.
    pub(crate) generations: u64,
    /// For the host that they name.
    pub(crate) hosts: u64,
    /// For their token.
    pub(crate) tokens: u64,
}

impl Refused {
    /// Counts one.
    pub(crate) fn note(&mut self, why: Implausible) {
        match why {
            Implausible::Generation => self.generations += 1,
            Implausible::Host => self.hosts += 1,
        }
    }
}

/// What changes.
pub(crate) struct State {
    pub(crate) rules: RuleBook,
    /// What is known of connections, and under way with them.
    pub(crate) conns: ConnTable,
    /// Versions that nobody can have given to a choice.
    pub(crate) refused: Refused,
    /// By index of the configuration.
    pub(crate) peers: Vec<PeerState>,
    /// Bumps that are installed, with the number of sweeps that found no use for them.
    pub(crate) installed: BTreeMap<BumpId, u32>,
    /// Connections that have a rule of their own in the kernel, and its bump.
    pub(crate) pinned: BTreeMap<FlowKey, BumpId>,
}

/// What is known of a peer beside the node.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerState {
    /// When the session was established, in seconds since 1970.
    pub(crate) since: Option<f64>,
    /// It has a session, and answers.
    pub(crate) answers: bool,
    /// Its calls are older than its latest by so much, as far as is known, since it last had a session.
    pub(crate) outdated: Option<Duration>,
    /// Bumps that rules here which are about to be in force need there, bit n for number n.
    pub(crate) coming: u16,
    /// Bumps that its rules use.
    pub(crate) wants: Wants,
    /// Our numbers of the bumps that are devices, by its numbers of them.
    pub(crate) devices: BTreeMap<BumpId, BumpId>,
    /// Ports of this host that do not answer it.
    pub(crate) silent_here: silence::Here,
    /// Ports of it that do not answer this host.
    pub(crate) silent_there: silence::There,
    /// Connections that have another port here than there.
    pub(crate) moved_ports: Vec<MovedPort>,
}

impl State {
    /// A connection, beside the rules that hold.
    pub(crate) fn ruling<'a>(&'a self, live: &'a Live) -> Ruling<'a, Active<'a>, Live> {
        let peer = &self.peers[live.peer];
        Ruling {
            rules: self.rules.active(),
            live,
            socket: live.socket,
            known: self.conns.get(&live.pair),
            wants: peer.wants,
            answers: peer.answers,
        }
    }

    /// The bumps that something here or at a peer uses.
    pub(crate) fn in_use(&self) -> BTreeSet<BumpId> {
        let ruled = self.rules.in_force().filter_map(Rule::bump_id);
        let conns = self.conns.iter().flat_map(|(_, conn)| conn.bumps());
        let engaged = self
            .peers
            .iter()
            .flat_map(|peer| of_mask(peer.wants.bumps()));
        ruled.chain(conns).chain(engaged).collect()
    }
}

/// The rule of a single connection.
fn pin(pair: &FlowKey, bump: BumpId) -> ClassRule {
    ClassRule {
        dport: Some(pair.dport.into()),
        sport: Some(pair.sport.into()),
        destination: Some(IpNet::from(pair.dst)),
        source: Some(IpNet::from(pair.src)),
        binding: Binding::Pinned,
        ..ClassRule::tcp(PIN, bump)
    }
}

impl State {
    /// Steering that is wanted now, with these interfaces and addresses of this host, and a rule more.
    pub(crate) fn wish(
        &self,
        config: &Config,
        inventory: &Inventory,
        addresses: &[IpAddr],
        added: Option<&Rule>,
    ) -> Desired {
        let mut bumps = self.in_use();
        bumps.extend(self.installed.keys());
        bumps.extend(added.and_then(Rule::bump_id));
        let pins = self.conns.pins();
        let pins = pins.iter().map(|(pair, bump)| pin(pair, *bump));
        let offset = self.rules.utc_offset();
        let rules = self.rules.in_force().chain(added);
        let rules = rules.flat_map(move |rule| rule.classes_here(offset, inventory));
        let wish = desired(config, inventory, pins.chain(rules), &bumps, addresses);
        let peers = config.peers.iter().zip(&self.peers);
        let sessions = peers.flat_map(|(peer, state)| {
            let net = |net: &IpNet| (*net, state.answers);
            peer.addresses.iter().map(net)
        });
        Desired {
            sessions: sessions.collect(),
            ..wish
        }
    }

    /// Whether all bumps in use are installed.
    pub(crate) fn is_installed(&self) -> bool {
        let mut used = self.in_use().into_iter();
        used.all(|bump| self.installed.contains_key(&bump))
    }

    /// Whether the kernel has rules of their own for other connections than it should.
    pub(crate) fn pins_are_stale(&self) -> bool {
        self.conns.pins() != self.pinned
    }
}

/// What the last run left, and the rules of the file.
pub(crate) fn initial_state(config: &Config, saved: &Saved) -> anyhow::Result<State> {
    let carried = bumps::carried(config);
    let rules = RuleBook::restored(config, &carried, saved)?;
    let mut conns = ConnTable::default();
    // The file may have had them in another order.
    let devices = saved.devices(&carried);
    for saved in &saved.choices {
        let translated = |choice: Choice| {
            let bump = { choice.bump }.map(|bump| bumps::translated(&devices, bump));
            let is_carried = bump.is_none_or(|bump| carried.iter().any(|known| known.id == bump));
            is_carried.then_some(Choice { bump, ..choice })
        };
        let stood = saved.stood.and_then(translated);
        let (choice, asked) = match translated(saved.choice) {
            Some(choice) => (choice, saved.asked),
            // What the peer was asked for cannot be had any more.
            None if let Some(stood) = stood => (stood, false),
            None => continue,
        };
        let known = table::Saved {
            choice,
            asked,
            stood,
        };
        conns.update(&saved.conn, |conn| conn.restore(&known));
    }
    let peer_state = |peer: &dibs_config::PeerConfig| {
        let engaged = saved.engaged.get(&peer.public_key.to_string());
        let engaged = engaged.copied().unwrap_or(0);
        let engaged = bumps::translated_mask(&devices, engaged) & !(1 << bumps::NOBODYS.get());
        PeerState {
            wants: Wants::restored(engaged),
            moved_ports: saved.moved_ports(&peer.public_key),
            ..PeerState::default()
        }
    };
    Ok(State {
        rules,
        conns,
        refused: Refused::default(),
        peers: config.peers.iter().map(peer_state).collect(),
        installed: Default::default(),
        pinned: Default::default(),
    })
}

/// A task that waits until it is told that there is something to do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// Asks peers to confirm.
    Confirm,
    /// Tells peers of choices.
    Tell,
    /// Locks connections.
    Lock,
    /// Follows the time of day.
    Hours,
    /// Follows which peers have a session.
    Sessions,
    /// Counts what paths carry.
    Volumes,
    /// Tries again what the kernel did not take.
    Repair,
    /// Looks for users whom rules name.
    Users,
    /// Looks why ports do not answer peers.
    Silence,
    /// Looks up the names of endpoints.
    Names,
    /// Starts the daemon again, because peers came or went.
    Restart,
    /// Shows connections in plain.
    Shadow,
    /// Waits for peers to show connections.
    Match,
}

impl Task {
    /// Number of tasks: the last one stands here.
    const COUNT: usize = Self::Match as usize + 1;
}

/// One of them for each [`Task`].
#[derive(Default)]
pub(crate) struct Wakers([Notify; Task::COUNT]);

impl Wakers {
    /// Wakes the task, now or as soon as it waits.
    pub(crate) fn wake(&self, task: Task) {
        self.0[task as usize].notify_one();
    }

    /// Waits until the task is woken.
    pub(crate) async fn woken(&self, task: Task) {
        self.0[task as usize].notified().await;
    }
}
