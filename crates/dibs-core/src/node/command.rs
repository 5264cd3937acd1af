//! What the owner asks for.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dibs_settings::{BumpId, Hint, Scheduler};
use dibs_wire::FlowKey;

use super::association::Ticket;
use super::dispatch::{Node, route, route_conn};
use super::flow_scheduler::FlowScheduler;
use super::messages::{ControlError, MAX_CONTROL};
use super::name_table::MovedPort;
use super::notice::Event;
use super::paths::{Link, longest};
use super::send::Load;
use super::solicit;
use crate::flow::echo_filter::EchoFilter;
use crate::path_index::PathIndex;
use crate::preference::Usage;
use crate::session::{Hurry, PathId};
use crate::time::Time;

impl Node {
    /// Sends a message to the peer's daemon, reliably, once, by a trusted path if there is one. Messages may arrive
    /// in another order. It is not sent, nor sent again, once nobody waits for what comes of it after his `patience`; none:
    /// it is sent until it arrives.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing was sent then.
    pub fn send_control(
        &mut self,
        now: Time,
        peer: usize,
        message: &[u8],
        patience: Option<Duration>,
    ) -> Result<(), ControlError> {
        let peer = self.peers.get_mut(peer).ok_or(ControlError::UnknownPeer)?;
        if self.sessions.sending(now, peer.id).is_none() {
            return Err(ControlError::NoSession);
        }
        if message.len() > MAX_CONTROL {
            return Err(ControlError::TooLong);
        }
        let until = patience.map(|patience| now + patience);
        match peer.queues.messages.push(message, until) {
            true => Ok(()),
            false => Err(ControlError::TooMany),
        }
    }

    /// The owner has dealt with a message of the peer's daemon ([`Event::Control`](super::Event::Control)):
    /// there is room for another one.
    pub fn control_done(&mut self, peer: usize) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.queues.messages.on_done();
        }
    }

    /// The interface of a local path came or went, or its MTU changed.
    pub fn set_path(&mut self, now: Time, path: usize, up: bool, mtu: u16) {
        let path = PathIndex::new(path);
        let local = &mut self.shared.setup.local[path];
        let (was, resized) = (local.is_usable(), local.mtu != mtu);
        local.up = up;
        local.mtu = mtu;
        let changed = local.is_usable() != was;
        if resized {
            let links = self.peers.iter_mut().flat_map(|peer| peer.paths.iter_mut());
            for link in links.filter(|link| link.local == path) {
                link.path.set_longest(longest(mtu, link.remote));
            }
        }
        if changed {
            self.on_local_change(now, path);
        }
    }

    fn on_local_change(&mut self, now: Time, path: PathIndex) {
        for peer in &mut self.peers {
            peer.on_local_change(now, &mut self.shared, path);
        }
        if self.shared.setup.local[path].is_usable() {
            self.hurry(now);
        }
    }

    /// Peers that do not answer may be within reach of this host as it stands now.
    fn hurry(&mut self, now: Time) {
        for peer in &self.peers {
            self.sessions.hurry(now, peer.id, Hurry::Reachable);
        }
    }

    /// Sets the usage that the user lets a local path have.
    pub fn set_usage(&mut self, now: Time, path: usize, usage: Usage) {
        let path = PathIndex::new(path);
        let local = &mut self.shared.setup.local[path];
        let was = local.is_usable();
        let was_spent = std::mem::replace(&mut local.usage, usage).spent;
        let changed = local.is_usable() != was;
        for peer in &mut self.peers {
            for link in peer.paths.iter_mut().filter(|link| link.local == path) {
                link.path.set_rate_limit(usage.rate);
                if usage.spent != was_spent {
                    // The ping tells it to the peer.
                    link.elicit_ack();
                    link.note_state(&mut self.shared, peer.id);
                }
            }
        }
        if changed {
            self.on_local_change(now, path);
        }
    }

    /// New data is shared out by this scheduler from now on, but for connections that have [one of their
    /// own](Self::set_flow_schedulers).
    pub fn set_scheduler(&mut self, scheduler: Scheduler) {
        self.shared.setup.policy.scheduler = scheduler;
    }

    /// New data of connections that one of these selects is shared out by its scheduler from now on, the first of
    /// them if there are several; that of all others by the [general one](Self::set_scheduler).
    pub fn set_flow_schedulers(&mut self, schedulers: Vec<FlowScheduler>) {
        let shared = &mut self.shared;
        shared.setup.policy.flow_schedulers = schedulers;
        for peer in &mut self.peers {
            let scheduler_of = |tuple: &FlowKey| shared.setup.policy.scheduler_of(tuple);
            peer.flows.set_schedulers(scheduler_of);
        }
    }

    /// New data goes by this path from now on as long as that is usable; none: as the scheduler chooses.
    pub fn prefer(&mut self, hint: Option<Hint>) {
        self.shared.setup.policy.hint = hint;
        for link in self.peers.iter_mut().flat_map(|peer| peer.paths.iter_mut()) {
            link.path
                .set_probes(self.shared.setup.probes_of(link.local));
        }
    }

    /// The addresses of a local path. If they are others than before, peers are told at once where its datagrams come
    /// from now.
    pub fn set_path_addresses(&mut self, now: Time, path: usize, addresses: Vec<IpAddr>) {
        let path = PathIndex::new(path);
        let before = &mut self.shared.setup.local[path].addresses;
        if *before == addresses {
            return;
        }
        *before = addresses;
        let links = self.peers.iter_mut().flat_map(|peer| peer.paths.iter_mut());
        links
            .filter(|link| link.local == path)
            .for_each(Link::elicit_ack);
        self.hurry(now);
    }

    /// Replaces the endpoints of a peer, by index of our local path.
    pub fn set_endpoints(&mut self, now: Time, peer: usize, endpoints: Vec<(usize, SocketAddr)>) {
        let Self { shared, peers, .. } = self;
        let Some(peer) = peers.get_mut(peer) else {
            return;
        };
        let endpoints = endpoints.into_iter();
        let endpoints = endpoints.map(|(path, to)| (PathIndex::new(path), to));
        let endpoints: Vec<_> = endpoints.collect();
        if peer.paths.endpoints() == endpoints {
            return;
        }
        let given_up = peer.paths.set_endpoints(now, endpoints);
        peer.abandon(shared, given_up);
        self.sessions.hurry(now, peer.id, Hurry::Reachable);
    }

    /// A path to the host `to` has just carried so many bytes of payload a second for others:
    /// connections that come over from there need not begin slowly. A little more is taken for
    /// granted, for what we put beside the payload and for what waits until the first of it goes: at
    /// just this rate a queue would stand until the path is probed, and over a far one CoDel
    /// does not wait for that.
    pub fn expect_rate(&mut self, now: Time, path: usize, to: IpAddr, bytes_per_second: u64) {
        let rate = bytes_per_second.saturating_add(bytes_per_second / 8);
        let links = route(&mut self.peers, to).map(|peer| peer.paths.iter_mut());
        for link in links.into_iter().flatten() {
            if link.local == PathIndex::new(path) {
                link.path.begin_at(now, rate);
            }
        }
    }

    /// Puts load on paths to a peer, by their ids, so that they can be measured; on no other ones any more. It ends after
    /// 2 s, unless this is repeated. `run` names the measurement. False, and nothing was done, during another one.
    pub fn measure(&mut self, now: Time, peer: usize, run: u64, paths: &[u8]) -> bool {
        let mut loads = self.peers.iter().map(|peer| &peer.queues.load);
        let is_free = !loads.any(|load| load.is_of_other(now, run));
        if is_free && let Some(peer) = self.peers.get_mut(peer) {
            let paths = paths.iter().map(|id| PathId::new(*id));
            peer.queues.load = Load::new(now, run, paths.collect());
        }
        is_free
    }

    /// Has calls to a peer carry a ticket, until it answers.
    pub fn set_ticket(&mut self, peer: usize, ticket: Ticket) {
        self.peers[peer].association.ticket = ticket;
    }

    /// The addresses of this host, to which inner packets may go.
    pub fn set_addresses(&mut self, addresses: Vec<IpAddr>) {
        self.shared.setup.own.addresses = addresses;
    }

    /// Sets the addresses that the paths' interfaces have, see [`NodeConfig::reachable`](super::NodeConfig::reachable).
    pub fn set_reachable(&mut self, addresses: Vec<IpAddr>) {
        self.shared.setup.own.reachable = addresses;
    }

    /// Prepares a connection to leave its bump: its kernel, which shifts the windows that it is
    /// given by `window_scale` (RFC 7323), is kept from sending more, and [`Event::Drained`] tells when
    /// what it sent is not overtaken any more, or that this takes too long. Then the packets may be steered elsewhere, and
    /// [`end_drain`](Self::end_drain) lets the connection go on; after a moment it goes on anyhow.
    pub fn drain(&mut self, now: Time, bump: BumpId, tuple: FlowKey, window_scale: u8) {
        let Self { shared, peers, .. } = self;
        let Some(peer) = route_conn(peers, &tuple) else {
            return;
        };
        let begins = peer.flows.find(tuple, bump).is_some_and(|key| {
            let (paths, flows) = (&peer.paths, &mut peer.flows);
            let handover = &mut peer.handover;
            handover.begin(now, shared, paths, flows, (key, window_scale))
        });
        if !begins {
            let peer = peer.id.index();
            shared
                .journal
                .events
                .push(Event::Drained { peer, bump, tuple });
        }
    }

    /// Gives the kernel no data by this bump of a connection that leaves it for plain before its peer, which is to be silent, until
    /// the connection [goes on](Self::end_drain) or [comes back](Self::enter). The far TCP sends again what it sends even so.
    pub fn refuse(&mut self, bump: BumpId, tuple: FlowKey) {
        self.set_refuses(bump, &tuple, true);
    }

    fn set_refuses(&mut self, bump: BumpId, tuple: &FlowKey, refuses: bool) {
        if let Some(peer) = route_conn(&mut self.peers, tuple)
            && let Some(key) = peer.flows.find(*tuple, bump)
            && let Some(conn) = peer.flows.get_mut(key)
        {
            conn.refuses = refuses;
        }
    }

    /// Lets a connection go on after [`drain`](Self::drain).
    pub fn end_drain(&mut self, bump: BumpId, tuple: FlowKey) {
        self.set_refuses(bump, &tuple, false);
        let Self { shared, peers, .. } = self;
        if let Some(peer) = route_conn(peers, &tuple)
            && let Some(key) = peer.flows.find(tuple, bump)
        {
            peer.handover.end(shared, peer.id, &mut peer.flows, key);
        }
    }

    /// As [`solicit`](Self::solicit) for a connection that went on before this daemon started, of
    /// which the kernel has `outstanding` bytes under way. To be called before any path is up: what
    /// the kernel says waits until the peer is there.
    pub fn resume(&mut self, now: Time, bump: BumpId, tuple: FlowKey, outstanding: u32) {
        let Self { shared, peers, .. } = self;
        let Some(peer) = route_conn(peers, &tuple) else {
            return;
        };
        let (receiver, mut cx) = peer.receiving(now, shared);
        let key = receiver.conn(&mut cx, tuple, bump);
        let conn = cx.flows.get_mut(key).expect("it was just found");
        conn.echo_filter = Some(Box::new(EchoFilter::anew(outstanding)));
        // Data that was lost meanwhile is long in coming, as if the local kernel did not take it.
        conn.skip_comparison();
        self.solicit(bump, tuple);
    }

    /// Notes that a connection is about to come to `bump` from the bump `was`, or from plain, so what is known of an earlier time
    /// there says nothing any more. Numbers that fitted on the bump before fit on this one. `tuple` is as the local host sends.
    pub fn enter(&mut self, now: Time, bump: BumpId, tuple: FlowKey, was: Option<BumpId>) {
        let Self { shared, peers, .. } = self;
        let Some(peer) = route_conn(peers, &tuple) else {
            return;
        };
        if was.is_none() {
            let earlier = peer.flows.leave_plain(now, &tuple, bump);
            peer.forget_waiting(shared, &earlier);
        }
        let before = was.and_then(|was| peer.flows.find(tuple, was));
        let before = before.and_then(|key| peer.flows.get(key));
        let fits = before.is_some_and(|conn| conn.fits());
        let stood = before.and_then(|conn| conn.sent_end.zip(conn.acked));
        let (receiver, mut cx) = peer.receiving(now, shared);
        let key = receiver.conn(&mut cx, tuple, bump);
        let conn = cx.flows.get_mut(key).expect("it was just found");
        conn.since = now;
        conn.refuses = false;
        match fits {
            true => conn.skip_comparison(),
            false => conn.compare_anew(),
        }
        if let Some((sent_end, acked)) = stood {
            conn.note_stood(sent_end, acked);
        }
    }

    /// Has the local kernel say by `bump` where a connection stands. `tuple` is as the local host
    /// sends; the connection has to exist, or the kernel answers with a reset.
    pub fn solicit(&mut self, bump: BumpId, tuple: FlowKey) {
        let Self { shared, peers, .. } = self;
        let Some(peer) = route_conn(peers, &tuple) else {
            return;
        };
        let conn = peer.flows.find(tuple, bump);
        let conn = conn.and_then(|key| peer.flows.get(key));
        solicit::solicit(shared, bump, tuple, conn);
    }

    /// Notes that the connection that the local kernel calls `ours` is the one that the peer calls `theirs`, which was proved
    /// (`dibs_switch::matching`); both as the local host sends.
    pub fn match_names(&mut self, peer: usize, ours: FlowKey, theirs: FlowKey) {
        let peer = &mut self.peers[peer];
        let opened = peer.flows.match_names(ours, theirs);
        peer.receiver.forget(opened);
    }

    /// Forgets a [match](Self::match_names), because the connection is over.
    pub fn forget_match(&mut self, peer: usize, ours: FlowKey) {
        self.peers[peer].flows.forget_match(&ours);
    }

    /// Gives a peer's connections the ports that they had with an earlier instance ([`Event::MovedPorts`]), as far as their addresses
    /// are still lent to it.
    pub fn set_moved_ports(&mut self, peer: usize, ports: &[MovedPort]) {
        let peer = &mut self.peers[peer];
        for port in ports {
            if peer.hosts.lent(port.ours.dst) == Some(port.ours.dst) {
                peer.flows.note_name(port.ours, port.theirs);
            }
        }
    }

    /// The system refused a datagram of `size` bytes on a local path (EMSGSIZE).
    pub fn datagram_too_big(&mut self, now: Time, path: usize, size: usize) {
        for peer in &mut self.peers {
            for link in peer.paths.iter_mut().filter(|l| l.local.get() == path) {
                link.path
                    .on_message_too_big(now, size.min(usize::from(u16::MAX)) as u16);
            }
        }
    }
}
