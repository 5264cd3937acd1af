//! The paths to a peer: which there are, where they are asked for, which of them make room for others, and which
//! carries what.
//!
//! In go answers of the peer, times, and what local interfaces do; out come the path for the next bytes, times, and the
//! paths that were given up, whose losses are the caller's to deal with.

mod joins;
mod link;
mod schedule;

use std::net::{IpAddr, SocketAddr};
use std::ops::{Index, IndexMut};
use std::time::Duration;

pub(super) use self::joins::{Arrival, is_joining};
pub(super) use self::link::{Link, PROOF_SPACING, Verdict, longest};
pub(super) use self::schedule::{Avoid, Choice, Kind, Wanted};
use super::deadline::{Deadline, Reason};
use super::notice::Event;
use super::shared::{Setup, Shared};
use crate::path::{PathState, TimeoutAction};
use crate::path_index::PathIndex;
use crate::session::{PathId, PeerId};
use crate::time::Time;

/// Bytes that a flow may send in one round, at most.
const MAX_TURN: usize = 32 * 1024;
/// Bytes up to which a queue is short, at most.
const MAX_BURST: usize = 16 * 1024;
/// The wait before a path that could not be had is asked for again.
const REDIAL: Duration = Duration::from_secs(1);
/// A path by which nothing goes is asked whether it is still there: after the first of these, and then after as long
/// as it has been unused, up to the second. A router that translates addresses forgets a path by which nothing went
/// for 30 s.
const KEEPALIVE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(20)];
/// The end that did not ask for the path leaves that to the one that did, and asks only where that one is late: both
/// at once would cost twice as much.
const KEEPALIVE_OF_ACCEPTING: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(22)];
/// Times that a join is repeated before another endpoint of the peer on the same local path has its turn.
const JOINS_IN_TURN: u32 = 4;
/// Paths to a peer, those included that are being opened.
pub(super) const MAX_LINKS: usize = 16;

/// Place of a peer: the local path that leads there, and the peer's address.
pub(super) type PeerPlace = (PathIndex, SocketAddr);

/// Paths that were given up.
pub(super) type GivenUp = Vec<Link>;

/// There is no room for one more path, and all are of use.
pub(super) struct Full;

/// See the module. Paths are told apart by their place here, which changes when one goes, and by their id on the wire.
pub(super) struct PathSet {
    links: Vec<Link>,
    /// Where the peer is, by local path.
    endpoints: Vec<(PathIndex, SocketAddr)>,
    /// Ties between the two ends go our way.
    smaller_key: bool,
    next_id: u8,
    /// Where the numbers of a path id go on if it is opened again: a nonce serves once.
    next_seq: Box<[u64; 256]>,
    redial_at: Time,
    /// When a pacer lets the next data go.
    paced_until: Option<Time>,
    peer: PeerId,
    /// Trusted local paths that did not come about since, and by which address of this host the peer asked for each last.
    misdirected: Vec<(PathIndex, IpAddr)>,
}

impl Index<usize> for PathSet {
    type Output = Link;

    fn index(&self, at: usize) -> &Link {
        &self.links[at]
    }
}

impl IndexMut<usize> for PathSet {
    fn index_mut(&mut self, at: usize) -> &mut Link {
        &mut self.links[at]
    }
}

impl PathSet {
    pub(super) fn new(
        now: Time,
        peer: PeerId,
        endpoints: Vec<(PathIndex, SocketAddr)>,
        smaller_key: bool,
    ) -> Self {
        Self {
            links: Vec::new(),
            endpoints,
            smaller_key,
            next_id: u8::from(!smaller_key),
            next_seq: Box::new([0; 256]),
            redial_at: now,
            paced_until: None,
            peer,
            misdirected: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.links.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Link> {
        self.links.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.links.iter_mut()
    }

    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Link> {
        self.links.get_mut(at)
    }

    /// Those that new data may go by.
    pub(super) fn active(&self, setup: &Setup) -> impl Iterator<Item = &Link> {
        self.iter().filter(|link| link.is_active(setup))
    }

    /// The place of the path with this id.
    pub(super) fn position(&self, id: PathId) -> Option<usize> {
        self.links.iter().position(|link| link.id == id)
    }

    /// The path with this id.
    pub(super) fn by_id(&mut self, id: PathId) -> Option<&mut Link> {
        self.links.iter_mut().find(|link| link.id == id)
    }

    /// Bytes that a flow may send in one round: a turn of the fastest path, so that none takes long.
    pub(super) fn turn(&self) -> usize {
        let turns = self.iter().map(|link| link.path.turn());
        turns.max().unwrap_or(MAX_TURN).min(MAX_TURN)
    }

    /// Bytes that the fastest path sends at once.
    pub(super) fn burst(&self) -> usize {
        let bursts = self.iter().map(|link| link.path.quantum());
        bursts.max().unwrap_or(MAX_BURST).min(MAX_BURST)
    }

    /// The round trips of the shortest and the longest active path.
    pub(super) fn trips(&self, setup: &Setup) -> (Duration, Duration) {
        let trips = self.active(setup).map(|link| link.path.stats().srtt);
        trips.fold((Duration::MAX, Duration::ZERO), |(low, high), trip| {
            (low.min(trip), high.max(trip))
        })
    }

    /// True if new data may go by a trusted one.
    pub(super) fn has_trusted(&self, setup: &Setup) -> bool {
        self.active(setup).any(|link| link.trusted)
    }

    /// Where the peer is, by local path.
    pub(super) fn endpoints(&self) -> &[(PathIndex, SocketAddr)] {
        &self.endpoints
    }

    /// Places where the peer may be called: at its endpoints, and by local paths that have none where it has proved to be.
    pub(super) fn places(&self) -> impl Iterator<Item = PeerPlace> {
        let has_endpoint = |local| self.endpoints.iter().any(|(of, _)| *of == local);
        let proved = self.iter().filter(|link| link.is_open());
        let proved = proved.filter(move |link| !has_endpoint(link.local));
        let proved = proved.map(|link| (link.local, link.remote));
        self.endpoints.iter().copied().chain(proved)
    }

    /// The round trip to a place, if a path leads there.
    pub(super) fn round_trip(&self, (local, remote): PeerPlace) -> Option<Duration> {
        let mut open = self.iter().filter(|link| link.is_open());
        let link = open.find(|link| link.local == local && link.remote == remote)?;
        Some(link.path.srtt())
    }

    /// True if the peer is there, by this local path, as far as is known.
    pub(super) fn is_place(&self, place: PeerPlace) -> bool {
        let proved = self.iter().filter(|link| link.is_open());
        let mut proved = proved.map(|link| (link.local, link.remote));
        self.endpoints.contains(&place) || proved.any(|there| there == place)
    }

    /// True if this is where the peer is by this local path; none if nobody has said where that is.
    pub(super) fn is_endpoint(&self, local: PathIndex, remote: SocketAddr) -> Option<bool> {
        let known = self.endpoints.iter().filter(|(l, _)| *l == local);
        known.map(|(_, to)| *to == remote).reduce(|a, b| a || b)
    }

    /// True if the peer is, or may be, at this address.
    pub(super) fn is_at(&self, addr: IpAddr) -> bool {
        let is_proved = |link: &Link| link.is_open() && link.remote.ip() == addr;
        self.endpoints.iter().any(|(_, to)| to.ip() == addr) || self.iter().any(is_proved)
    }

    /// Address of this host for which one stands that is none of its own, because it is translated on the way here: as the
    /// user says of a local path, or by which the peer asked for a path that is open.
    pub(super) fn stands_for(&self, setup: &Setup, public: IpAddr) -> Option<IpAddr> {
        let mut locals = setup.local.iter();
        let told = locals.find(|(_, path)| path.public.contains(&public));
        let asked = || {
            self.iter()
                .find(|link| link.is_open() && link.is_called(public))
        };
        let local = match told {
            Some((local, _)) => local,
            None => asked()?.local,
        };
        let mut addresses = setup.local[local].addresses.iter();
        addresses
            .find(|own| own.is_ipv4() == public.is_ipv4())
            .copied()
    }

    /// Trusted local paths that did not come about, by the address of this host at which the peer asked for each.
    pub(super) fn misdirected(&self) -> &[(PathIndex, IpAddr)] {
        &self.misdirected
    }

    /// Notes that a trusted path does not come about, since the peer asked for it at this address; the owner is told of another one.
    fn note_misdirected(&mut self, shared: &mut Shared, path: PathIndex, to: IpAddr) {
        if self.misdirected.contains(&(path, to)) {
            return;
        }
        self.misdirected.retain(|(of, _)| *of != path);
        self.misdirected.push((path, to));
        shared.journal.events.push(Event::Misdirected {
            peer: self.peer.index(),
            path: path.get(),
            to,
        });
    }

    /// True if a path id is one of those that this end gives: the smaller key's are even.
    pub(super) const fn numbers(&self, id: PathId) -> bool {
        id.get().is_multiple_of(2) == self.smaller_key
    }

    pub(super) fn add(&mut self, link: Link) {
        let seq = self.next_seq[link.id.index()];
        self.links.push(link.starting_at(seq));
    }

    pub(super) fn remove(&mut self, at: usize) -> Link {
        let link = self.links.remove(at);
        self.next_seq[link.id.index()] = link.path.next_seq();
        link
    }

    /// The peer knows nothing of them any more.
    pub(super) fn clear(&mut self) {
        while !self.links.is_empty() {
            self.remove(0);
        }
    }

    /// Lets paths be asked for at once, where there are none.
    pub(super) fn dial_at_once(&mut self, now: Time) {
        self.redial_at = now;
    }

    /// When paths, or the peer, are to be asked for.
    pub(super) fn dials_at(&self) -> Time {
        self.redial_at
    }

    /// Puts off asking for a while.
    pub(super) fn put_off_dialling(&mut self, now: Time) {
        self.redial_at = now + REDIAL;
    }

    /// Replaces the endpoints. Paths that lead to a former one, and are asked for or not answered, are given up.
    pub(super) fn set_endpoints(
        &mut self,
        now: Time,
        endpoints: Vec<(PathIndex, SocketAddr)>,
    ) -> GivenUp {
        let mut given_up = GivenUp::new();
        let is_former = |l: &Link, known: &[_]| {
            let place = (l.local, l.remote);
            let has_left = known.contains(&place) && !endpoints.contains(&place);
            has_left && (l.is_joining() || l.is_lost())
        };
        let of_former = |set: &Self| {
            let mut links = set.links.iter();
            links.position(|link| is_former(link, &set.endpoints))
        };
        while let Some(at) = of_former(self) {
            given_up.push(self.remove(at));
        }
        self.endpoints = endpoints;
        self.dial_at_once(now);
        given_up
    }

    /// Asks for a path over every local one that has an endpoint and no path. Of several endpoints each has its turn.
    pub(super) fn dial(&mut self, now: Time, shared: &mut Shared) -> GivenUp {
        self.put_off_dialling(now);
        let mut given_up = GivenUp::new();
        for at in 0..self.endpoints.len() {
            let (local, _) = self.endpoints[at];
            let of_local = |(other, _): &&(PathIndex, SocketAddr)| *other == local;
            let had_turn = self.endpoints[..at].iter().any(|other| of_local(&other));
            if had_turn || !shared.setup.local[local].is_usable() {
                continue;
            }
            let several = self.endpoints.iter().filter(of_local).count() > 1;
            // What nobody answered is asked anew: its id may be that of a path that the peer has still.
            let unanswered = |l: &Link| {
                let had_turn = several && l.has_asked(JOINS_IN_TURN);
                l.local == local && l.is_joining() && (l.is_lost() || had_turn)
            };
            let unanswered = self.links.iter().position(unanswered);
            let unanswered = unanswered.map(|at| self.remove(at));
            if !self.iter().any(|l| l.local == local && self.suffices(l))
                && let Ok(instead) = self.make_room()
            {
                let asked = unanswered.as_ref().map(|link| link.remote);
                let remote = self.endpoint_after(local, asked);
                given_up.extend(instead);
                let id = self.free_id();
                let mut link = Link::join(now, shared, id, local, remote);
                if let Some(before) = &unanswered {
                    link = link.instead_of(before);
                }
                let of_local = self.links.iter_mut().filter(|l| l.local == local);
                of_local.for_each(Link::on_asked_anew);
                self.add(link);
            }
            given_up.extend(unanswered);
        }
        given_up
    }

    /// True if this path makes another one over its interface unnecessary: it is not lost, and it answers or leads to
    /// an endpoint of the peer.
    fn suffices(&self, link: &Link) -> bool {
        let answers = !link.is_open() || link.path.state() == PathState::Active;
        !link.is_lost() && (answers || self.is_endpoint(link.local, link.remote) == Some(true))
    }

    /// The endpoint whose turn it is after this one of the same local path, which has some.
    fn endpoint_after(&self, local: PathIndex, asked: Option<SocketAddr>) -> SocketAddr {
        let of_local = || self.endpoints.iter().filter(|(other, _)| *other == local);
        let next = of_local()
            .skip_while(|(_, to)| Some(*to) != asked)
            .nth(1)
            .or_else(|| of_local().next());
        next.expect("the caller found one").1
    }

    /// The next id of those that this end gives that no path has. They come round: a path is asked for
    /// anew after each long outage.
    fn free_id(&mut self) -> PathId {
        loop {
            let id = PathId::new(self.next_id);
            self.next_id = self.next_id.wrapping_add(2);
            if self.position(id).is_none() {
                return id;
            }
        }
    }

    /// Sees to it that there may be one more path: gives up one whose peer has not proved itself, or the
    /// one that has been down the longest, which may lead to where the peer once was.
    pub(super) fn make_room(&mut self) -> Result<Option<Link>, Full> {
        if self.links.len() < MAX_LINKS {
            return Ok(None);
        }
        let unproved = self.links.iter().position(Link::is_accepting);
        let down = || {
            let down = self.iter().enumerate().filter(|(_, l)| l.is_down());
            let longest = down.min_by_key(|(_, l)| l.path.silent_since());
            longest.map(|(at, _)| at)
        };
        let at = unproved.or_else(down).ok_or(Full)?;
        Ok(Some(self.remove(at)))
    }

    /// True if a path that the peer opens goes before one that we ask for between the same places: both ends called.
    pub(super) fn resolve_crossed(&mut self, local: PathIndex, remote: SocketAddr) -> bool {
        let ours = |l: &Link| l.local == local && l.remote == remote && l.is_joining();
        let Some(at) = self.links.iter().position(ours) else {
            return true;
        };
        if !self.smaller_key {
            self.remove(at);
        }
        !self.smaller_key
    }

    /// A path has been proved: what there was between the same places is of no use any more.
    pub(super) fn supersede(&mut self, id: PathId) -> GivenUp {
        let mut given_up = GivenUp::new();
        let Some(link) = self.iter().find(|l| l.id == id) else {
            return given_up;
        };
        let (local, remote, trusted) = (link.local, link.remote, link.trusted);
        self.misdirected.retain(|(of, _)| *of != local || !trusted);
        let older = |l: &Link| l.id != id && l.is_of(local, remote);
        while let Some(at) = self.links.iter().position(older) {
            given_up.push(self.remove(at));
        }
        given_up
    }

    /// The session is new, and is to be used at once, so that the peer confirms it.
    pub(super) fn use_session(&mut self, now: Time, shared: &mut Shared) -> GivenUp {
        // By one that carries something, if there is such a one: the peer is to hear of it.
        let active = self
            .links
            .iter()
            .position(|link| link.is_active(&shared.setup));
        let open = || self.links.iter().position(Link::is_open);
        if let Some(at) = active.or_else(open) {
            self.links[at].elicit_ack();
            return GivenUp::new();
        }
        // What was asked by an earlier session may have been for nobody.
        self.iter_mut().for_each(|link| link.ask_again(now));
        self.dial(now, shared)
    }

    /// Data waits for a pacer until then.
    pub(super) fn wait_until(&mut self, at: Option<Time>) {
        if let Some(at) = at {
            self.paced_until = Some(self.paced_until.map_or(at, |p| p.min(at)));
        }
    }

    /// Deadline of what is due first: of the paths only if there is a session.
    pub(super) fn poll_timeout(&self, setup: &Setup, has_session: bool) -> Option<Deadline> {
        let usable = |link: &&Link| has_session && setup.local[link.local].is_usable();
        let links = self.iter().filter(usable).flat_map(|l| {
            [
                l.timer(),
                l.path.poll_timeout(),
                l.path.next_ack_time(),
                l.path.next_ping(self.keepalive(l.id)),
            ]
        });
        let dial = (!self.endpoints.is_empty()).then_some(self.redial_at);
        let due = [
            Reason::Path.at(links.flatten().min()),
            Reason::Pacer.at(self.paced_until),
            Reason::Dial.at(dial),
        ];
        due.into_iter().flatten().min()
    }

    /// How long the path with this id may be idle before it is asked whether it is still there.
    const fn keepalive(&self, id: PathId) -> [Duration; 2] {
        match self.numbers(id) {
            true => KEEPALIVE,
            false => KEEPALIVE_OF_ACCEPTING,
        }
    }

    /// A path has failed: asks those that are idle, by which others may be carried now, whether they are still there.
    pub(super) fn ask_idle(&mut self, now: Time) {
        let open = self.links.iter_mut().filter(|link| link.is_open());
        for link in open.filter(|link| link.path.is_idle(now, KEEPALIVE[0])) {
            link.elicit_ack();
        }
    }

    /// Data need not wait for a pacer any more.
    pub(super) fn release(&mut self, now: Time) {
        if self.paced_until.is_some_and(|t| t <= now) {
            self.paced_until = None;
        }
    }

    /// Does what is due of one path; adds what that takes for lost.
    pub(super) fn handle_timeout(
        &mut self,
        now: Time,
        shared: &mut Shared,
        at: usize,
        lost: &mut Vec<u64>,
    ) {
        let others = || self.iter().enumerate().filter(|(other, _)| *other != at);
        let answers = |other: &Link| other.is_active(&shared.setup) && !other.path.is_unanswered();
        let elsewhere = others().any(|(_, other)| answers(other));
        let keepalive = self.keepalive(self.links[at].id);
        let link = &mut self.links[at];
        link.on_timer(now, shared);
        let was = link.path.state();
        if link.path.poll_timeout().is_some_and(|t| t <= now)
            && link.path.on_timeout(now, lost) == TimeoutAction::Probe
        {
            link.elicit_ack();
            if elsewhere {
                link.path.abandon_unanswered(now, lost);
            }
        }
        if link.is_open() && link.path.wants_ping(now, keepalive) {
            link.elicit_ack();
        }
        if was == PathState::Active && link.path.state() == PathState::Suspect {
            self.ask_idle(now);
        }
    }
}
