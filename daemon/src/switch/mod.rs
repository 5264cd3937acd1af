//! What the main thread holds: the owners of all that it knows, by subject.
//!
//! All of it runs on one thread. State is borrowed only between two waits; what must not interleave takes a turn of
//! the users' ([`Users`]) or of the [`Kernel`]'s. What peers ask is dealt with without a turn of the users', so that two
//! daemons that ask each other do not wait for each other. What needs several owners is a function of the module of its
//! subject.

pub(crate) mod answers;
pub(crate) mod backstop;
pub(crate) mod conditions;
pub mod guard;
pub(crate) mod hearing;
pub(crate) mod host_changes;
pub(crate) mod knocking;
pub(crate) mod listing;
pub(crate) mod locking;
pub(crate) mod machine;
pub(crate) mod marking;
pub(crate) mod messages;
pub(crate) mod metering;
pub(crate) mod names;
pub(crate) mod news;
pub(crate) mod reconcile;
pub(crate) mod requests;
pub(crate) mod rule_changes;
pub mod run;
pub(crate) mod sessions;
pub(crate) mod silence;
pub mod startup;
pub(crate) mod state;
pub(crate) mod sweep;
pub(crate) mod switching;
pub(crate) mod tracking;
pub(crate) mod wakers;

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Instant;

use dibs_config::Config;
use dibs_settings::BumpId;
use dibs_switch::table::Conn;
use dibs_wire::FlowKey;
pub(crate) use state::State;

use crate::control::Users;
use crate::control::events::{Events, PeerWarnings};
use crate::data::bumps::{Bumps, marks};
use crate::data::{Driver, Rpc};
use crate::host::Host;
use crate::host::clock::now;
use crate::host::endpoints::Endpoints;
use crate::host::live::{Live, Registry};
use crate::host::preferences::Preferences;
use crate::kernel::{Kernel, connections};
use crate::rulebook::FlowSchedulers;
use crate::rulebook::kept::Keeper;
use crate::rulebook::state_file::{Saved, SavedChoice, StateFile};
use crate::switch::answers::Answers;
use crate::switch::wakers::Wakers;

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
    /// The peer that an address is behind, by index: the longest prefix decides.
    pub(crate) fn peer_of(&self, address: IpAddr) -> Option<usize> {
        self.host.peer_of(address)
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

    /// All connections to peers, those that are over included, with their marks.
    pub(crate) async fn connections(&self) -> anyhow::Result<Vec<Live>> {
        let are_marked = !self.state.borrow().installed.is_empty();
        connections::all(&self.kernel, are_marked).await
    }

    /// The bump that a connection is on, if it is on one.
    pub(crate) fn bump_of(&self, live: &Live) -> Option<BumpId> {
        let marked = marks(&self.config).bump_of(live.mark);
        self.state.borrow().ruling(live).is_on(marked)
    }

    /// Changes what is known of a connection.
    pub(crate) fn update<R>(&self, pair: &FlowKey, change: impl FnOnce(&mut Conn) -> R) -> R {
        self.state.borrow_mut().conns.update(pair, change)
    }

    /// Writes what is to outlive us; the sweep does so again if that fails.
    pub(crate) fn save(&self) -> anyhow::Result<()> {
        let state = self.state.borrow();
        let engaged = state.peers.iter().zip(&self.config.peers);
        let saved = Saved {
            next_rule: state.rules.next(),
            rules: state.rules.saved().to_vec(),
            choices: state
                .conns
                .choices()
                .map(|(conn, choice)| SavedChoice { conn, choice })
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
            ..Saved::default()
        };
        self.file.save(saved)
    }

    /// As [`save`](Self::save), where nobody waits for it.
    pub(crate) fn save_or_warn(&self) {
        self.events.note("save", self.save());
    }
}
