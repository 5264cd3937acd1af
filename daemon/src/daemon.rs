//! What the main thread holds, and the few things that everything else is made of: saving, telling who follows the
//! events; steering (`kernel`), asking a peer's daemon (`peers`), what the rules come to (`state`).
//!
//! All of it runs on one thread. State is borrowed only between two waits; what must not interleave
//! takes a lock: `changes` (one request of a user at a time, root's first) or `steerer`. What peers ask is dealt with
//! without `changes`, so that two daemons that ask each other do not wait for each other.

mod kernel;
mod state;

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use dibs_config::Config;
use dibs_core::node::FlowScheduler;
use dibs_policy::Backstop;
use dibs_policy::conntrack::Conntrack;
use tokio::sync::Mutex;

use crate::bumps::Bumps;
use crate::devices::Answers;
use crate::driver::Driver;
use crate::events::Events;
use crate::fresh::Fresh;
use crate::interfaces::Interfaces;
use crate::listing::Dropped;
use crate::live::Registry;
use crate::preferences::Preferences;
use crate::rpc::Rpc;
use crate::state_file::{Saved, SavedChoice, StateFile};
use crate::steering::Steerer;
use crate::users::Users;
use crate::wakers::Wakers;
use dibs_switch::conns::Pair;
use dibs_switch::table::Conn;

pub(crate) use kernel::Steered;
pub(crate) use state::{PeerState, Refused, State};

/// What is counted by the kernel is asked for as often.
const DROPPED_FOR: Duration = Duration::from_secs(1);

/// The main thread's side of the daemon.
pub struct Daemon {
    /// As read at the start.
    pub config: Config,
    /// What connections can be put on.
    pub(crate) bumps: Bumps,
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
    pub(crate) users: Users,
    /// What is said to peers' daemons.
    pub(crate) rpc: Rpc,
    pub(crate) wakers: Wakers,
    pub(crate) events: Events,
    /// What the kernel dropped for us.
    pub(crate) dropped: Fresh<Dropped>,
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
    /// Whether anything comes back by devices.
    pub(crate) answers: RefCell<Answers>,
    pub(crate) file: StateFile,
    /// The kernel is left alone from now on: nothing is steered any more.
    let_go: Cell<bool>,
    /// Why the kernel could not be brought to what is wanted the last time, and what wakes who tries again.
    amiss: RefCell<Option<String>>,
    /// How often a program that steers did not come to its end.
    timeouts: Cell<u64>,
}

impl Daemon {
    #[expect(clippy::too_many_arguments, reason = "called once, by the start")]
    pub(crate) fn new(
        config: Config,
        driver: Driver,
        rpc: Rpc,
        interfaces: Interfaces,
        steerer: Steerer,
        backstop: Backstop,
        file: StateFile,
        state: State,
        preferences: Preferences,
        host: u64,
    ) -> Self {
        Self {
            bumps: Bumps::of(&config),
            config,
            driver,
            interfaces,
            host,
            started: Instant::now(),
            state: RefCell::new(state),
            preferences: RefCell::new(preferences),
            flow_schedulers: RefCell::default(),
            registry: RefCell::default(),
            users: Users::default(),
            rpc,
            wakers: Wakers::default(),
            events: Events::default(),
            dropped: Fresh::new(DROPPED_FOR),
            steerer: Mutex::new(steerer),
            marking: Mutex::new(()),
            conntracks: RefCell::default(),
            looking: Mutex::new(()),
            linking: Mutex::new(()),
            backstop: Mutex::new(backstop),
            restored: Cell::new(0),
            answers: RefCell::default(),
            file,
            let_go: Cell::new(false),
            amiss: RefCell::default(),
            timeouts: Cell::new(0),
        }
    }

    /// Changes what is known of a connection.
    pub(crate) fn update<R>(&self, pair: &Pair, change: impl FnOnce(&mut Conn) -> R) -> R {
        self.state.borrow_mut().conns.update(pair, change)
    }

    /// Changes what is known of these connections.
    pub(crate) fn update_each(&self, pairs: &[Pair], change: impl FnMut(&mut Conn)) {
        self.state.borrow_mut().conns.update_each(pairs, change);
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

    /// As [`save`](Self::save), where nobody waits for it.
    pub(crate) fn save_or_warn(&self) {
        if let Err(error) = self.save() {
            tracing::warn!("{error:#}");
        }
    }

    /// Writes what is to outlive us; the sweep does so again if that fails.
    pub(crate) fn save(&self) -> anyhow::Result<()> {
        let state = self.state.borrow();
        let engaged = state.peers.iter().zip(&self.config.peers);
        let saved = Saved {
            next_rule: state.next_rule,
            rules: state.user_rules.clone(),
            choices: state
                .conns
                .choices()
                .map(|(conn, choice)| SavedChoice { conn, choice })
                .collect(),
            engaged: engaged
                .filter(|(state, _)| state.engaged != 0)
                .map(|(state, peer)| (peer.public_key.to_string(), state.engaged))
                .collect(),
            addresses: state.addresses.clone(),
            devices: self.bumps.device_names(),
            preferences: self.preferences.borrow().wishes().clone(),
            ..Saved::default()
        };
        self.file.save(saved)
    }
}
