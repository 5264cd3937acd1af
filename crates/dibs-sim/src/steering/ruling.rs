//! Rules of a host, which its users add, change and remove: what follows from them is decided by
//! [`dibs_switch::rules`], and carried out here.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;
use std::slice;
use std::time::Duration;

use dibs_core::Time;
use dibs_settings::{BumpId, Level};
use dibs_switch::asking::Negotiation;
use dibs_switch::conns::{Meant, Socket};
use dibs_switch::messages::{ANSWER_TIMEOUT, Answer, Body, Outcome, Unanswered};
use dibs_switch::rules::{self, Fit, Ruling, Wants};
use dibs_switch::telling::TELL_AGAIN;
use dibs_wire::FlowKey;

use super::knocking::Cause;
use super::{About, At, Daemon, Steering, Waiter};
use crate::coverage::Seen;
use crate::kernel::Way;

/// Between two looks at the session while a rule asks.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A rule that the daemon and the kernel can follow alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The bump that it puts connections on.
    pub bump: BumpId,
    /// How firmly.
    pub level: Level,
    /// Which.
    pub meant: Selected,
}

/// The connections that a rule means.
#[derive(Clone, Debug, PartialEq)]
pub enum Selected {
    /// By the numbers that their ports are made of.
    Ports(RangeInclusive<u16>),
    /// One.
    One(FlowKey),
}

impl Rule {
    /// Whether it means a connection.
    pub fn means(&self, pair: &FlowKey) -> bool {
        match &self.meant {
            // Clients have ports from 20,000 on, servers from 30,000 on, by number of the connection.
            Selected::Ports(numbers) => numbers.contains(&(pair.sport % 10_000)),
            Selected::One(meant) => pair == meant,
        }
    }
}

impl Rule {
    /// What requires a bump of one connection.
    pub(super) fn requiring(pair: FlowKey, bump: BumpId) -> Self {
        Self {
            bump,
            level: Level::Require,
            meant: Selected::One(pair),
        }
    }

    /// Whether it is for this connection alone.
    pub(super) fn is_only_of(&self, pair: &FlowKey) -> bool {
        matches!(&self.meant, Selected::One(one) if one == pair)
    }
}

impl rules::Rule<FlowKey> for Rule {
    fn bump(&self) -> BumpId {
        self.bump
    }

    fn level(&self) -> Level {
        self.level
    }

    fn fit(&self, live: &FlowKey) -> Fit {
        match self.means(live) {
            true => Fit::Means,
            false => Fit::Not,
        }
    }
}

/// What users want, one after the other.
#[derive(Clone, Debug)]
enum Change {
    Rules(Vec<Rule>),
    Choice(Meant, Option<BumpId>),
}

/// What the daemon knows of rules, its own and the peer's.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) rules: Vec<Rule>,
    pub(super) wants: Wants,
    /// The peer has a session, and answers.
    answers: bool,
    /// Of the last WANT.
    sequence: u64,
    waiting: VecDeque<Change>,
    /// Rules change: nothing else that users want begins before connections follow them.
    changing: bool,
    /// What a new session's peer is told next.
    resync: Resync,
    /// WANTs that wait for their answers.
    wantings: BTreeMap<u32, (Wanting, Time)>,
    /// When the session is looked at again.
    look_at: Time,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Resync {
    #[default]
    Over,
    /// The WANT again, from then on.
    Want(Time),
    /// What is chosen; and then what rules here say of it is carried out.
    Telling,
}

/// What a WANT is for.
#[derive(Debug)]
enum Wanting {
    /// Rules have changed, from these.
    Change(Vec<Rule>),
    /// The session is new.
    Session,
    /// What was to change does not.
    Nothing,
}

impl Daemon {
    /// A connection, beside the rules that hold.
    pub(super) fn ruling<'a>(
        &'a self,
        pair: &'a FlowKey,
        socket: Socket,
    ) -> Ruling<'a, slice::Iter<'a, Rule>, FlowKey> {
        Ruling {
            rules: self.known.rules.iter(),
            live: pair,
            socket,
            known: self.conns.get(pair),
            wants: self.known.wants,
            answers: self.known.answers,
        }
    }

    /// Whether a connection moves because of what was wanted here.
    fn moves_any(&self) -> bool {
        let mut asks = self.asks.values();
        let mut wantings = self.known.wantings.values();
        let mut waiters = self.leaving.values().flat_map(|leaving| &leaving.waiters);
        self.knocking.asks_any()
            || asks.any(|ask| matches!(ask.about, About::Switch(_)))
            || wantings.any(|(wanting, _)| matches!(wanting, Wanting::Change(_)))
            || waiters.any(|waiter| matches!(waiter, Waiter::Us(_)))
    }

    fn tells_any(&self) -> bool {
        let mut asks = self.asks.values();
        asks.any(|ask| matches!(ask.about, About::Telling(_)))
    }

    /// When something of this is due.
    pub(super) fn next_change(&self) -> Option<Time> {
        let ready = match self.known.waiting.front() {
            Some(Change::Rules(_)) => !self.moves_any(),
            Some(Change::Choice(..)) => !self.known.changing || !self.moves_any(),
            None => false,
        };
        let resync = match self.known.resync {
            _ if ready => Some(Time::ZERO),
            Resync::Over => None,
            Resync::Want(at) => Some(at),
            Resync::Telling => (!self.tells_any()).then_some(Time::ZERO),
        };
        let moved = self.conns.next_moved().filter(|_| !self.moves_any());
        let waits = self.known.wantings.values().map(|(_, until)| *until);
        let look = self.known.prefers().then_some(self.known.look_at);
        waits.chain(resync).chain(look).chain(moved).min()
    }
}

impl Known {
    /// What an earlier run knew.
    pub(super) fn restored(rules: &[Rule], wants: u16) -> Self {
        Self {
            rules: rules.to_vec(),
            wants: Wants::restored(wants),
            ..Self::default()
        }
    }

    fn prefers(&self) -> bool {
        self.rules.iter().any(|rule| rule.level == Level::Prefer)
    }
}

/// A user here moves a connection to a bump, or to plain, once it is his turn.
pub fn choose(steering: &mut Steering, at: &mut At<'_>, conn: Meant, bump: Option<BumpId>) {
    let waiting = &mut steering.daemon().known.waiting;
    waiting.push_back(Change::Choice(conn, bump));
    take_turns(steering, at);
}

/// Carries out what users want, as far as it is its turn, and tells a new session's peer what it is to be told.
pub(super) fn take_turns(steering: &mut Steering, at: &mut At<'_>) {
    if let Some(rules) = steering.wanted_rules.take() {
        let waiting = &mut steering.daemon().known.waiting;
        waiting.push_back(Change::Rules(rules));
    }
    loop {
        let daemon = steering.daemon();
        let moves = daemon.moves_any();
        daemon.known.changing &= moves;
        let blocked = match daemon.known.waiting.front() {
            Some(Change::Rules(_)) => moves,
            Some(Change::Choice(..)) => daemon.known.changing,
            None => true,
        };
        match daemon.known.waiting.pop_front_if(|_| !blocked) {
            Some(Change::Rules(rules)) => change_rules(steering, at, rules),
            Some(Change::Choice(conn, bump)) if at.is_there(&conn) => {
                steering.choose(at, conn, bump);
            }
            Some(Change::Choice(..)) => {}
            None => break,
        }
    }
    follow_again(steering, at);
    let daemon = steering.daemon();
    match daemon.known.resync {
        Resync::Want(due) if due <= at.now => want(steering, at, Wanting::Session),
        Resync::Telling if !daemon.tells_any() => {
            daemon.known.resync = Resync::Over;
            enforce(steering, at);
            follow_rules(steering, at);
        }
        _ => {}
    }
}

/// Does what is due.
pub(super) fn handle_timeout(steering: &mut Steering, at: &mut At<'_>) {
    let now = at.now;
    let late =
        |(request, (_, until)): (&u32, &(Wanting, Time))| (*until <= now).then_some(*request);
    while let Some(request) = { steering.daemon().known.wantings.iter() }.find_map(late) {
        handle_answer(steering, at, request, Err(Unanswered::Silent));
    }
    let known = &steering.daemon().known;
    if known.prefers() && known.look_at <= now {
        look_at_session(steering, at);
    }
    take_turns(steering, at);
}

fn change_rules(steering: &mut Steering, at: &mut At<'_>, mut rules: Vec<Rule>) {
    steering.seen.note(Seen::RulesChanged);
    let known = &mut steering.daemon().known;
    known.changing = true;
    // Those of single connections are not theirs.
    let ones = { known.rules.iter() }.filter(|rule| matches!(rule.meant, Selected::One(_)));
    rules.extend(ones.cloned());
    let before = std::mem::replace(&mut known.rules, rules);
    // The peer first: what comes to it by a bump finds it there.
    want(steering, at, Wanting::Change(before));
}

/// Has the peer's daemon make ready what our rules need there.
fn want(steering: &mut Steering, at: &mut At<'_>, wanting: Wanting) {
    let request = steering.next_request();
    let Daemon { known, conns, .. } = steering.daemon();
    let kept = conns
        .kept()
        .fold(0, |bumps, (_, bump)| bumps | 1 << bump.get());
    if matches!(wanting, Wanting::Session) {
        known.resync = Resync::Over;
    }
    known.sequence += 1;
    let body = Body::Want {
        sequence: known.sequence,
        bumps: rules::wanted(known.rules.iter()) | kept,
        devices: Vec::new(),
    };
    known
        .wantings
        .insert(request, (wanting, at.now + ANSWER_TIMEOUT));
    if !steering.post(at, request, body) {
        handle_answer(steering, at, request, Err(Unanswered::NoSession));
    }
}

/// The peer has answered a WANT, or not. False if it was none.
pub(super) fn handle_answer(
    steering: &mut Steering,
    at: &mut At<'_>,
    request: u32,
    answer: Answer,
) -> bool {
    let Some((wanting, _)) = steering.daemon().known.wantings.remove(&request) else {
        return false;
    };
    match (wanting, answer) {
        (Wanting::Session, Ok(_)) => {
            steering.daemon().known.resync = Resync::Telling;
            steering.tell_all(at);
        }
        (Wanting::Session, Err(Unanswered::Silent | Unanswered::Full)) => {
            steering.daemon().known.resync = Resync::Want(at.now + TELL_AGAIN);
        }
        (Wanting::Change(before), _) if steering.save(at.now) => {
            steering.rules.clone_from(&steering.saved_rules);
            follow_changed_rules(steering, at, before);
        }
        (Wanting::Change(before), _) => {
            steering.daemon().known.rules = before;
            steering.save(at.now);
            steering.seen.note(Seen::FailedHere);
            want(steering, at, Wanting::Nothing);
        }
        (Wanting::Session | Wanting::Nothing, _) => {}
    }
    true
}

fn follow_changed_rules(steering: &mut Steering, at: &mut At<'_>, before: Vec<Rule>) {
    look_at_session(steering, at);
    enforce(steering, at);
    for rule in before {
        if !steering.rules.contains(&rule) {
            for Meant { pair, socket } in at.lives() {
                let ruling = steering.daemon().ruling(&pair, socket);
                if ruling.is_left_to_choice(&rule) {
                    steering.seen.note(Seen::ChoiceLeft);
                    steering.mark_choice(at, pair);
                }
            }
            let freed = |daemon: &Daemon, conn: &Meant| {
                let ruling = daemon.ruling(&conn.pair, conn.socket);
                ruling.freed_of(&rule).map(|_| None)
            };
            move_by_rule(steering, at, freed, Seen::RuleFreed);
        }
    }
    follow_rules(steering, at);
}

/// A WANT of the peer's. What it is answered.
pub(super) fn on_want(steering: &mut Steering, now: Time, sequence: u64, bumps: u16) -> Outcome {
    let Daemon { known, conns, .. } = steering.daemon();
    let known = known.wants.handle_want(conns, sequence, bumps, |_| true);
    if known.is_none() {
        steering.seen.note(Seen::Wanted);
    }
    known.unwrap_or_else(|| match steering.save(now) {
        true => Outcome::Done,
        false => Outcome::Failed,
    })
}

/// The session is new: the peer is told all that concerns it.
pub fn on_peer_up(steering: &mut Steering, at: &mut At<'_>, restarted: bool) {
    if restarted {
        steering.daemon().known.wants.handle_restart();
    }
    look_at_session(steering, at);
    want(steering, at, Wanting::Session);
}

/// Chooses what rules require, where the choice stands against that.
fn enforce(steering: &mut Steering, at: &mut At<'_>) {
    for conn in at.lives() {
        let overruled = { steering.daemon() }
            .ruling(&conn.pair, conn.socket)
            .overruled_by();
        if let Some(bump) = overruled {
            steering.seen.note(Seen::ChoiceOverruled);
            steering.choose(at, conn, Some(bump));
        }
    }
}

/// Has connections go where rules have them.
fn follow_rules(steering: &mut Steering, at: &mut At<'_>) {
    let moved = |daemon: &Daemon, conn: &Meant| {
        let ruling = daemon.ruling(&conn.pair, conn.socket);
        ruling.moves_to().map(Some)
    };
    move_by_rule(steering, at, moved, Seen::RuleMoved);
}

/// Has connections that rules moved follow them again, whose peer could not do its part.
fn follow_again(steering: &mut Steering, at: &mut At<'_>) {
    if steering.daemon().moves_any() {
        return;
    }
    let moved = steering.daemon().conns.take_moved(at.now);
    let moved: BTreeMap<FlowKey, Option<BumpId>> = moved.into_iter().collect();
    let again = |daemon: &Daemon, conn: &Meant| {
        let ruling = daemon.ruling(&conn.pair, conn.socket);
        moved
            .get(&conn.pair)
            .and_then(|went| ruling.goes_again(*went))
    };
    if !moved.is_empty() {
        move_by_rule(steering, at, again, Seen::RuleAgain);
    }
}

fn move_by_rule(
    steering: &mut Steering,
    at: &mut At<'_>,
    to: impl Fn(&Daemon, &Meant) -> Option<Option<BumpId>>,
    what: Seen,
) {
    let moves = at.lives().into_iter();
    let moves = moves.filter_map(|conn| Some((conn, to(steering.daemon(), &conn)?)));
    for (conn, bump) in moves.collect::<Vec<_>>() {
        if what == Seen::RuleAgain || steering.mark(&conn.pair).bump != bump {
            steering.seen.note(what);
        }
        let leaves = bump.is_none() && steering.mark(&conn.pair).bump.is_some();
        if leaves && !steering.forces {
            if !steering.daemon().knocking.asks(&conn.pair) {
                steering.knock(at, conn, Cause::Rule);
            }
            continue;
        }
        let negotiation = Negotiation::by_rule(conn, bump, steering.host);
        steering.carry_on(at, negotiation);
    }
}

/// Whether the peer has a session, and answers: rules that prefer their bump ask for it.
pub fn look_at_session(steering: &mut Steering, at: &mut At<'_>) {
    let answers = { at.node.peers(at.now) }.iter().all(|peer| peer.reachable);
    let known = &mut steering.daemon().known;
    known.look_at = at.now + LOOK_EVERY;
    if std::mem::replace(&mut known.answers, answers) != answers && known.prefers() {
        steering.answers = answers;
        if answers {
            follow_rules(steering, at);
        }
    }
    steering.answers = answers;
}

/// Which way a packet of the local kernel takes: OUTPUT's order.
pub fn way(steering: &mut Steering, pair: &FlowKey) -> Way {
    let required = steering.requires(pair);
    let mark = steering.marks.entry(*pair).or_default();
    let mut rules = steering.rules.iter().filter(|rule| rule.means(pair));
    if let Some(required) = required {
        mark.bump = Some(required);
    } else if !mark.chosen
        && let Some(rule) = rules.next()
        && (rule.level != Level::Prefer || steering.answers)
    {
        mark.bump = Some(rule.bump);
    }
    match mark.bump {
        None => Way::Plain,
        Some(bump) => Way::Bump(bump),
    }
}
