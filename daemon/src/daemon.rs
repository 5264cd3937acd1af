//! What the main thread holds, and the few things that everything else is made of: saving, telling who follows the
//! events; steering (`kernel`), asking a peer's daemon (`peers`), what the rules come to (`state`).
//!
//! All of it runs on one thread. State is borrowed only between two waits; what must not interleave
//! takes a lock: `changes` (one request of a user at a time, root's first) or `steerer`. What peers ask is dealt with
//! without `changes`, so that two daemons that ask each other do not wait for each other.

mod kernel;
mod peers;
mod state;
mod telling;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use dibs_config::Config;
use dibs_core::node::FlowScheduler;
use dibs_policy::Backstop;
use dibs_policy::conntrack::Conntrack;
use tokio::sync::{Mutex, Notify, broadcast};

use crate::bumps::{Carried, carried};
use crate::control_socket::{CLIENTS_OF_UID, TurnedAway};
use crate::devices::Answers;
use crate::driver::Driver;
use crate::fresh::Fresh;
use crate::interfaces::{Interfaces, own_addresses};
use crate::listing::Dropped;
use crate::live::Registry;
use crate::preferences::Preferences;
use crate::state_file::{Saved, SavedChoice, StateFile};
use crate::steering::Steerer;
use crate::turns::Turns;

pub(crate) use kernel::Steered;
use peers::Question;
pub(crate) use state::{PeerState, Refused, State, Written};
pub(crate) use telling::{Audience, Told};

/// Changes that a member of the group may have under way.
const CHANGES_OF_UID: usize = 4;
/// What is counted by the kernel is asked for as often.
const DROPPED_FOR: Duration = Duration::from_secs(1);
/// Events that wait for a slow follower.
const EVENTS: usize = 256;

/// The main thread's side of the daemon.
pub struct Daemon {
    /// As read at the start.
    pub config: Config,
    /// What connections can be put on.
    pub(crate) bumps: Vec<Carried>,
    /// The data path.
    pub driver: Driver,
    pub(crate) interfaces: Interfaces,
    /// Names this host in versions.
    pub(crate) host: u64,
    pub(crate) started: Instant,
    pub(crate) state: RefCell<State>,
    /// How paths are used.
    pub(crate) preferences: RefCell<Preferences>,
    /// The schedulers of rules that the data path was told of last.
    pub(crate) flow_schedulers: RefCell<Vec<FlowScheduler>>,
    pub(crate) registry: RefCell<Registry>,
    /// Taken while a user's request changes something.
    pub(crate) changes: Turns,
    /// Taken while a member of the group is told what is found out for him.
    pub(crate) looks: Turns,
    /// What the kernel dropped for us.
    pub(crate) dropped: Fresh<Dropped>,
    /// Clients of the control socket that were let go.
    pub(crate) turned_away: TurnedAway,
    pub(crate) steerer: Mutex<Steerer>,
    /// Held while the kernel is told of a choice or a lock.
    pub(crate) marking: Mutex<()>,
    /// What conntrack is asked by, while nobody does.
    pub(crate) conntracks: RefCell<Vec<Conntrack>>,
    /// Held while all connections are looked through, of which there may be thousands: one list at a time.
    pub(crate) looking: Mutex<()>,
    /// Held while the paths' sockets are looked after.
    pub(crate) linking: Mutex<()>,
    /// What stands when others flush the firewall. Held while a connection's mark and what the
    /// backstop knows of it change together.
    pub(crate) backstop: Mutex<Backstop>,
    /// Things that others removed and we put back.
    pub(crate) restored: Cell<u64>,
    /// Messages of peers' daemons that are none, and answers to them for which those do not make room.
    pub(crate) messages_malformed: Cell<u64>,
    pub(crate) messages_dropped: Cell<u64>,
    /// Wakes who asks peers to confirm.
    pub(crate) confirmations_due: Notify,
    /// Wakes who tells peers of choices.
    pub(crate) tellings_due: Notify,
    /// Whether anything comes back by devices.
    pub(crate) answers: RefCell<Answers>,
    /// Wakes who locks.
    pub(crate) locks_due: Notify,
    /// Wakes who looks at the time of day.
    pub(crate) hours_due: Notify,
    /// Wakes who looks which peers have a session.
    pub(crate) sessions_due: Notify,
    /// Wakes who counts what paths carry.
    pub(crate) volumes_due: Notify,
    pub(crate) file: StateFile,
    questions: RefCell<HashMap<u32, Question>>,
    next_request: Cell<u32>,
    next_want: Cell<u64>,
    /// The kernel is left alone from now on: nothing is steered any more.
    let_go: Cell<bool>,
    /// Why the kernel could not be brought to what is wanted the last time, and what wakes who tries again.
    amiss: RefCell<Option<String>>,
    pub(crate) amiss_noted: Notify,
    /// How often a program that steers did not come to its end.
    timeouts: Cell<u64>,
    /// What was said of peers' addresses that are this host's.
    own_addresses: RefCell<Vec<String>>,
    /// What failed when it was last tried, and why.
    troubles: RefCell<BTreeMap<&'static str, String>>,
    events: broadcast::Sender<Told>,
}

impl Daemon {
    #[expect(clippy::too_many_arguments, reason = "called once, by the start")]
    pub(crate) fn new(
        config: Config,
        driver: Driver,
        interfaces: Interfaces,
        steerer: Steerer,
        backstop: Backstop,
        file: StateFile,
        state: State,
        preferences: Preferences,
        host: u64,
        first_request: u32,
    ) -> Self {
        Self {
            bumps: carried(&config),
            config,
            driver,
            interfaces,
            host,
            started: Instant::now(),
            state: RefCell::new(state),
            preferences: RefCell::new(preferences),
            flow_schedulers: RefCell::default(),
            registry: RefCell::default(),
            changes: Turns::new(CHANGES_OF_UID),
            looks: Turns::new(CLIENTS_OF_UID),
            dropped: Fresh::new(DROPPED_FOR),
            turned_away: TurnedAway::default(),
            steerer: Mutex::new(steerer),
            marking: Mutex::new(()),
            conntracks: RefCell::default(),
            looking: Mutex::new(()),
            linking: Mutex::new(()),
            backstop: Mutex::new(backstop),
            restored: Cell::new(0),
            messages_malformed: Cell::new(0),
            messages_dropped: Cell::new(0),
            confirmations_due: Notify::new(),
            tellings_due: Notify::new(),
            answers: RefCell::default(),
            locks_due: Notify::new(),
            hours_due: Notify::new(),
            sessions_due: Notify::new(),
            volumes_due: Notify::new(),
            file,
            questions: RefCell::default(),
            next_request: Cell::new(first_request),
            next_want: Cell::new(1),
            let_go: Cell::new(false),
            amiss: RefCell::default(),
            amiss_noted: Notify::new(),
            timeouts: Cell::new(0),
            own_addresses: RefCell::default(),
            troubles: RefCell::default(),
            events: broadcast::channel(EVENTS).0,
        }
    }

    /// The peer that an address is behind, by index: the longest prefix decides.
    pub(crate) fn peer_of(&self, address: IpAddr) -> Option<usize> {
        let lengths = self
            .config
            .peers
            .iter()
            .enumerate()
            .flat_map(|(index, peer)| peer.addresses.iter().map(move |net| (index, net)))
            .filter(|(_, net)| net.contains(&address));
        lengths
            .max_by_key(|(_, net)| net.prefix_len())
            .map(|(index, _)| index)
    }

    /// The name of a peer.
    pub(crate) fn peer_name(&self, peer: usize) -> &str {
        &self.config.peers[peer].name
    }

    /// Writes what is to outlive us; the sweep does so again if that fails.
    pub(crate) fn save(&self) -> anyhow::Result<()> {
        let state = self.state.borrow();
        let engaged = state.peers.iter().zip(&self.config.peers);
        let saved = Saved {
            next_rule: state.next_rule,
            rules: state.user_rules.clone(),
            choices: state
                .choices
                .iter()
                .map(|(conn, choice)| SavedChoice { conn, choice })
                .collect(),
            engaged: engaged
                .filter(|(state, _)| state.engaged != 0)
                .map(|(state, peer)| (peer.public_key.to_string(), state.engaged))
                .collect(),
            addresses: state.addresses.clone(),
            devices: self.device_names(),
            preferences: self.preferences.borrow().wishes().clone(),
            ..Saved::default()
        };
        self.file.save(saved)
    }

    /// Logs why something that is tried again and again failed, unless that is known.
    pub(crate) fn note(&self, what: &'static str, done: Result<(), impl Into<anyhow::Error>>) {
        let why = done.err().map(|error| format!("{:#}", error.into()));
        let mut troubles = self.troubles.borrow_mut();
        match why {
            None => drop(troubles.remove(what)),
            Some(why) if troubles.get(what) == Some(&why) => {}
            Some(why) => {
                tracing::warn!("cannot {what}: {why}");
                troubles.insert(what, why);
            }
        }
    }

    /// Warns of addresses that the file gives to peers and this host has, once of each while it has it.
    pub(crate) fn tell_own_addresses(&self) {
        let faults = own_addresses(&self.config, &self.state.borrow().inventory);
        let before = self.own_addresses.replace(faults.clone());
        for fault in faults.iter().filter(|fault| !before.contains(fault)) {
            tracing::warn!("{fault}");
        }
    }
}
