//! What changes while the daemon runs, and what follows from it: which bumps are in use, what is to be steered.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use dibs_config::Config;
use dibs_policy::{Binding, ClassRule, Desired};
use dibs_settings::BumpId;
use dibs_switch::plausible::Implausible;
use dibs_switch::rules::{Ruling, Wants};
use dibs_switch::table::ConnTable;
use dibs_switch::{conns, silence};
use dibs_wire::FlowKey;
use ipnet::IpNet;

use crate::data::bumps::{self, of_mask};
use crate::host::interfaces::Inventory;
use crate::host::live::Live;
use crate::rulebook::kept::desired;
use crate::rulebook::rules::Rule;
use crate::rulebook::state_file::Saved;
use crate::rulebook::{Active, RuleBook};

/// Connections that may have a rule of their own: each costs the packets of all others a comparison.
const PINS: usize = 32;
/// The rule number of those.
const PIN: u32 = 0;

/// How many versions of choices were refused, out of messages and out of the file.
#[derive(Clone, Copy, Default)]
pub(crate) struct Refused {
    /// For their generation.
    pub(crate) generations: u64,
    /// For the host that they name.
    pub(crate) hosts: u64,
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
    /// Bumps that its rules use.
    pub(crate) wants: Wants,
    /// Our numbers of the bumps that are devices, by its numbers of them.
    pub(crate) devices: BTreeMap<BumpId, BumpId>,
    /// Ports of this host that do not answer it.
    pub(crate) silent_here: silence::Here,
    /// Ports of it that do not answer this host.
    pub(crate) silent_there: silence::There,
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
        let ruled = self.rules.in_force().map(Rule::bump_id);
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
    /// Connections on a bump by choice that get a rule of their own: where the kernel loses the entry that
    /// holds their mark, no packet leaves in plain until it is made again.
    pub(crate) fn pins(&self) -> BTreeMap<FlowKey, BumpId> {
        let chosen = self
            .conns
            .iter()
            .filter_map(|(pair, conn)| Some((*pair, conn.settled()?.bump?)));
        chosen.take(PINS).collect()
    }

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
        bumps.extend(added.map(Rule::bump_id));
        let pins = self.pins();
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
        self.pins() != self.pinned
    }
}

/// What the last run left, and the rules of the file.
pub(crate) fn initial_state(config: &Config, saved: &Saved) -> anyhow::Result<State> {
    let carried = bumps::carried(config);
    let rules = RuleBook::restored(config, &carried, saved)?;
    let mut conns = dibs_switch::table::ConnTable::default();
    // The file may have had them in another order.
    let devices = saved.devices(&carried);
    for saved in &saved.choices {
        let bump = { saved.choice.bump }.map(|bump| bumps::translated(&devices, bump));
        if bump.is_none_or(|bump| carried.iter().any(|carried| carried.id == bump)) {
            let choice = conns::Choice {
                bump,
                ..saved.choice
            };
            conns.update(&saved.conn, |conn| conn.choice.restore(choice));
        }
    }
    let peer_state = |peer: &dibs_config::PeerConfig| {
        let engaged = saved.engaged.get(&peer.public_key.to_string());
        let engaged = engaged.copied().unwrap_or(0);
        let engaged = bumps::translated_mask(&devices, engaged) & !(1 << bumps::NOBODYS.get());
        PeerState {
            wants: Wants::restored(engaged),
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
