//! Scheduling: the choice of a path for the next bytes.
//!
//! Trust comes first: what a placement does not allow is no candidate. Then what the user says of their paths: roles,
//! and for new data the hint. Each path that is left makes an [`Offer`], and a scheduler, one module each, chooses among
//! those: a pure function of numbers.

mod balanced;
mod blest;
mod lowest_rtt;
mod round_robin;
#[cfg(test)]
mod tests;

use std::time::Duration;

use dibs_settings::{Role, Scheduler};
use smallvec::SmallVec;

use super::{Link, MAX_LINKS, PathSet};
use crate::chunk::Placement;
use crate::flow::queue::TARGET;
use crate::node::shared::Setup;
use crate::path::Blocked;
use crate::preference::Unused;
use crate::session::PathId;
use crate::time::Time;

/// A scheduler's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum Choice {
    /// By this path (index among the links), so many bytes at most.
    Send { link: usize, budget: usize },
    /// Not now; perhaps at that time, or when an acknowledgement comes.
    Wait(Option<Time>),
    /// No path may carry it.
    Nobody,
}

/// Paths that others should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum Avoid {
    /// None.
    Nothing,
    /// This one, if there is another: it lost what is to be sent.
    Link(PathId),
    /// The trusted ones, in any case: those wait for them that need them.
    Trusted,
}

/// Kind of what a connection sends, as far as it matters to the hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum Kind {
    /// The first words of a connection: not by the preferred path, if there is another.
    First,
    /// New data.
    New,
    /// Bytes that were sent before, or nobody's data: by any path.
    Other,
    /// A message of the daemons: by any path, though its volume is used up if there is no other.
    Message,
}

/// Demand for a path: what is to be sent.
#[derive(Clone, Copy, Debug)]
pub(in crate::node) struct Wanted {
    pub(in crate::node) placement: Placement,
    pub(in crate::node) kind: Kind,
    pub(in crate::node) scheduler: Scheduler,
    /// Its bytes.
    pub(in crate::node) bytes: usize,
    /// Bytes that wait in all, these included.
    pub(in crate::node) backlog: usize,
    pub(in crate::node) avoid: Avoid,
    /// Bytes that the flow's sender has under way, times the flows that have something to send. Its sender could have
    /// as much under way if it were alone.
    pub(in crate::node) under_way: usize,
}

impl Wanted {
    /// Something of its own, that no flow waits for: it is nobody's turn, and goes where it is delivered first.
    pub(in crate::node) const fn alone(placement: Placement, bytes: usize, avoid: Avoid) -> Self {
        Self {
            placement,
            kind: Kind::Other,
            scheduler: Scheduler::Balanced,
            bytes,
            backlog: bytes,
            avoid,
            under_way: 0,
        }
    }
}

/// Offer of a path that may carry it: the numbers that schedulers compare.
#[derive(Clone, Copy, Debug)]
struct Offer {
    /// Smoothed round trip.
    srtt: Duration,
    /// Bytes that may be in flight, and those that are.
    cwnd: u64,
    in_flight: u64,
    /// Bytes of the longest datagram.
    mtu: u16,
    /// Bytes a second that it is expected to deliver.
    rate: u64,
    /// Bytes that it takes now; none if it is busy.
    budget: usize,
    /// Time until it would deliver what is wanted; of a busy one, all that waits.
    delivery: Duration,
    /// Time until the acknowledgement of that would be here, by the quickest path.
    acknowledgement: Duration,
    /// Its turn: the higher, the later it was chosen for something.
    turn: u64,
    /// Trusted, and quicker than a processor sends.
    is_ample: bool,
    /// Path that lost what is to be sent: others go before it.
    is_avoided: bool,
    /// Role: secondary, for what others have no room for.
    is_secondary: bool,
    /// Silent for a probe timeout.
    is_unanswered: bool,
}

/// A scheduler's answer about offers, by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pick {
    /// This one carries it.
    Take(usize),
    /// This one has room, but what waits would be there earlier by others, which have none.
    PassOver(usize),
    /// None has room.
    Wait,
}

/// The first by some order of the offers with room, behind them those that others should go before.
fn first<K: Ord>(offers: &[Offer], key: impl Fn(&Offer) -> K) -> Option<usize> {
    let ready = offers.iter().enumerate().filter(|(_, one)| one.budget > 0);
    let first = ready.min_by_key(|(_, one)| (one.is_avoided, one.is_secondary, key(one)));
    first.map(|(at, _)| at)
}

/// Choice of a scheduler among offers.
fn pick(scheduler: Scheduler, offers: &[Offer], wanted: &Wanted) -> Pick {
    let choose = match scheduler {
        // What goes by all paths goes first by the one that delivers it first.
        Scheduler::Balanced | Scheduler::Redundant => balanced::choose,
        Scheduler::LowestRtt => lowest_rtt::choose,
        Scheduler::RoundRobin => round_robin::choose,
        Scheduler::Blest => blest::choose,
    };
    choose(offers, wanted)
}

/// Indices of links, at most as many as there are.
type Indices = SmallVec<[usize; MAX_LINKS]>;

/// Keeps the links that are such, if there are any.
fn prefer(all: &mut Indices, is_such: impl Fn(usize) -> bool) {
    if all.iter().any(|at| is_such(*at)) {
        all.retain(|at| is_such(*at));
    }
}

/// Bytes a second of a path that is not the limit: more than a processor sends.
const PLENTY: u64 = 2_000_000_000;
/// The most that deliveries by one path may be later than by another for a flow to have both: for more, a sender
/// would need a window that it has not soon.
const FAR: Duration = Duration::from_millis(100);

impl PathSet {
    /// The paths, by index, that the user would have carry what is allowed to go by them.
    pub(in crate::node) fn carriers(
        &self,
        setup: &Setup,
        placement: Placement,
        kind: Kind,
    ) -> Indices {
        let allowed = |at: &usize| {
            let link = &self.links[*at];
            let goes = match kind {
                Kind::Message => link.is_alive(setup),
                Kind::First | Kind::New | Kind::Other => link.is_active(setup),
            };
            placement.allows(link.id, link.trusted) && goes
        };
        let mut all: Indices = (0..self.links.len()).filter(allowed).collect();
        // A path that keeps silent may have died: what is given to it would perhaps wait until that is known.
        let answers = |at: usize| !self.links[at].path.is_unanswered();
        prefer(&mut all, answers);
        prefer(&mut all, |at| self.links[at].is_active(setup));
        let role = |at: usize| setup.local[self.links[at].local].usage.role;
        prefer(&mut all, |at| role(at) != Role::Backup);
        let is_hinted = matches!(kind, Kind::First | Kind::New);
        let Some(hint) = setup.policy.hint.filter(|_| is_hinted) else {
            return all;
        };
        let is_preferred = |at: usize| self.links[at].local.is_preferred(&hint);
        if kind == Kind::First || !all.iter().any(|at| is_preferred(*at) && answers(*at)) {
            prefer(&mut all, |at| !is_preferred(at));
        } else if { all.iter() }
            .any(|at| is_preferred(*at) && self.is_near(setup, &self.links[*at]))
        {
            prefer(&mut all, is_preferred);
        }
        all
    }

    /// True if a path's round trip is no longer than the hint allows.
    fn is_near(&self, setup: &Setup, link: &Link) -> bool {
        let active = self.links.iter().filter(|link| link.is_active(setup));
        let least = active.map(|link| link.path.srtt()).min();
        let delta = setup.policy.hint.map_or(f64::INFINITY, |hint| hint.delta);
        least.is_none_or(|least| link.path.srtt().as_secs_f64() <= least.as_secs_f64() * delta)
    }

    /// The path for what goes at once, whatever the windows: the one of the least round trip.
    pub(in crate::node) fn quickest(
        &self,
        setup: &Setup,
        placement: Placement,
        kind: Kind,
    ) -> Option<usize> {
        let carriers = self.carriers(setup, placement, kind);
        let is_secondary =
            |at: &usize| setup.local[self.links[*at].local].usage.role == Role::Secondary;
        let key = |at: &usize| (is_secondary(at), self.links[*at].path.srtt());
        carriers.into_iter().min_by_key(key)
    }

    /// Why new data does not go by this path; none if it may.
    pub(in crate::node) fn unused(&self, setup: &Setup, at: usize) -> Option<Unused> {
        let link = &self.links[at];
        let local = &setup.local[link.local];
        if local.usage.role == Role::Never {
            return Some(Unused::Never);
        }
        if local.usage.spent {
            return Some(Unused::Spent);
        }
        if !local.up {
            return Some(Unused::InterfaceDown);
        }
        if !link.is_open() && !link.is_silent() {
            return Some(Unused::Joining);
        }
        if !link.is_alive(setup) {
            return Some(Unused::Unanswered);
        }
        if link.is_spent_there() {
            return Some(Unused::SpentThere);
        }
        let carries = |kind| self.carriers(setup, Placement::Any, kind).contains(&at);
        let preferred = setup
            .policy
            .hint
            .is_some_and(|hint| link.local.is_preferred(&hint));
        if !carries(Kind::Other) {
            return Some(match link.path.is_unanswered() {
                true if preferred => Unused::PreferredUnanswered,
                true => Unused::Unanswered,
                false => Unused::Backup,
            });
        }
        match preferred {
            false if !carries(Kind::New) => Some(Unused::NotPreferred),
            true if link.path.is_unanswered() => Some(Unused::PreferredUnanswered),
            true if !self.is_near(setup, link) => Some(Unused::PreferredTooFar),
            _ => link.passed_over.then_some(Unused::Slower),
        }
    }

    /// The delay that may stand in the queue of a flow.
    ///
    /// A sender that answers a loss by having a third less under way, as CUBIC does, leaves a path idle after it unless
    /// half a round trip waited before. And where paths differ, it has the sum of them only if it has so much more under
    /// way that what goes by the shortest waits for as long as the longest takes longer.
    pub(in crate::node) fn standing(&self, setup: &Setup) -> Duration {
        let used = self.carriers(setup, Placement::Any, Kind::New);
        let trips = || used.iter().map(|at| self.links[*at].path.min_rtt());
        let least = trips().min().unwrap_or_default();
        let longer = trips()
            .map(|trip| trip - least)
            .filter(|more| *more <= 2 * FAR);
        TARGET.max(least / 2 + longer.max().unwrap_or_default())
    }

    /// The path for what is `wanted`.
    pub(in crate::node) fn choose(&mut self, setup: &Setup, now: Time, wanted: &Wanted) -> Choice {
        let back = self.active(setup).map(|link| link.path.min_rtt()).min();
        let back = back.unwrap_or_default() / 2;
        let mut carriers = self.carriers(setup, wanted.placement, wanted.kind);
        if wanted.avoid == Avoid::Trusted {
            carriers.retain(|at| !self.links[*at].trusted);
        }
        if carriers.is_empty() {
            return Choice::Nobody;
        }
        let mut offers: SmallVec<[Offer; MAX_LINKS]> = SmallVec::new();
        let mut release: Option<Time> = None;
        for at in &carriers {
            let link = &self.links[*at];
            let offer = Offer::of(link, setup, now, wanted, back);
            if offer.budget == 0
                && let Blocked::Pacing(t) = link.path.blocked_until(now, wanted.bytes)
            {
                release = Some(release.map_or(t, |r| r.min(t)));
            }
            offers.push(offer);
        }
        match pick(wanted.scheduler, &offers, wanted) {
            Pick::Take(at) => {
                let turn = self.links.iter().map(|link| link.turn).max().unwrap_or(0);
                let link = &mut self.links[carriers[at]];
                link.turn = turn + 1;
                link.passed_over = false;
                Choice::Send {
                    link: carriers[at],
                    budget: offers[at].budget,
                }
            }
            Pick::PassOver(at) => {
                self.links[carriers[at]].passed_over = true;
                Choice::Wait(release)
            }
            Pick::Wait => Choice::Wait(release),
        }
    }
}

impl Offer {
    fn of(link: &Link, setup: &Setup, now: Time, wanted: &Wanted, back: Duration) -> Self {
        let path = &link.path;
        let budget = path.budget(now, wanted.bytes);
        let awaited = match budget {
            0 => wanted.backlog.max(wanted.bytes),
            _ => wanted.bytes,
        };
        let delivery = path.predict_delivery(now, awaited).since(now);
        Self {
            srtt: path.srtt(),
            cwnd: path.cwnd(),
            in_flight: path.in_flight(),
            mtu: path.mtu(),
            rate: path.expected_rate(),
            budget,
            delivery,
            acknowledgement: delivery + back,
            turn: link.turn,
            is_ample: link.trusted && path.most_rate() >= PLENTY,
            is_avoided: wanted.avoid == Avoid::Link(link.id),
            is_secondary: setup.local[link.local].usage.role == Role::Secondary,
            is_unanswered: path.is_unanswered(),
        }
    }
}
