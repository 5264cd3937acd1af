//! The machine that the engine works on.

use dibs_wire::FlowKey;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::rc::Rc;
use std::slice;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::node::ConnSnapshot;
use dibs_settings::{BumpId, Level};
use dibs_switch::answering::Refusal;
use dibs_switch::asking::Conclusion;
use dibs_switch::conns::{Meant, Socket};
use dibs_switch::engine::entries::{Ends, Marked};
use dibs_switch::engine::rules::Kept;
use dibs_switch::engine::shadows::Shadows;
use dibs_switch::engine::{
    self, Failed, Found, Goal, Live as _, Machine, Mark, News, Task, knocks,
};
use dibs_switch::knock::{self, Standing};
use dibs_switch::matching::{Carrying, Matched, Stand};
use dibs_switch::messages::{ANSWER_TIMEOUT, Body, Ground, Message, Outcome, Switch, Unanswered};
use dibs_switch::plausible::Hosts;
use dibs_switch::rules::{Ruling, Wants, wanted};
use dibs_switch::table::ConnTable;
use dibs_switch::tracked::{Entry, Mend, Tracked};
use smoltcp::socket::tcp::State;

use super::CARRIED;
use super::chains::Chains;
use super::host::{Command, Daemon, Host, Stands, Turn};
use super::knocking::Plain;
use super::ruling::Rule;
use crate::coverage::Seen;
use crate::world::ROUTER;

/// A connection that nothing was seen of for as long is idle.
const ACTIVE_WITHIN: Duration = Duration::from_millis(200);

/// Time that a look for connections that ended takes a host that has many.
const LOOK_TAKES: Duration = Duration::from_millis(300);

/// A connection that is alive.
#[derive(Clone, Copy, Debug)]
pub struct Live(pub Meant);

impl engine::Live for Live {
    fn meant(&self) -> Meant {
        self.0
    }

    fn peer(&self) -> usize {
        0
    }

    fn is_bound(&self) -> bool {
        false
    }

    fn is_over(&self) -> bool {
        false
    }
}
/// A connection, beside the rules that hold.
pub(super) fn ruling<'a>(
    daemon: &'a Daemon,
    live: &'a Live,
) -> Ruling<'a, slice::Iter<'a, Rule>, Live> {
    Ruling {
        rules: daemon.rules.iter(),
        live,
        socket: live.0.socket,
        known: daemon.conns.get(&live.0.pair),
        wants: daemon.wants,
        answers: daemon.answers,
    }
}

/// Entries that the kernel has of these connections.
pub(super) fn tracked<'a>(chains: &Chains, pairs: impl Iterator<Item = &'a FlowKey>) -> Tracked {
    let entry = |pair: &FlowKey| {
        let mark = chains.marks.get(pair)?.seen();
        let (closed, finished) = (false, false);
        let entry = Entry {
            mark,
            closed,
            finished,
        };
        Some((*pair, entry))
    };
    Tracked::new(pairs.filter_map(entry).collect())
}

impl Host {
    /// Connections of these that plain does not carry.
    async fn stuck(&self, lives: &[Live]) -> Kept {
        let refusals = knocks::refusals(self, lives).await;
        let refusals = refusals.expect("a model finds out");
        let is_bumped = |live: &&Live| engine::stands_on(self, *live).is_some();
        let bumped = lives.iter().filter(is_bumped);
        let proved = bumped.filter(|live| !refusals.contains_key(&live.pair()));
        proved.for_each(|_| self.note(Seen::PlainProved));
        refusals
    }
}

impl Machine for Host {
    type Live = Live;
    type Rule = Rule;
    type Rules<'a> = slice::Iter<'a, Rule>;
    type Book = Vec<Rule>;
    type Fault = Unable;
    type MarkFault = Unable;
    type Why = &'static str;
    type Plain = Plain;
    type Turn<'a> = Turn<'a>;

    async fn turn(&self) -> Turn<'_> {
        self.turn().await
    }

    fn now(&self) -> Time {
        self.now.get()
    }

    fn peers(&self) -> usize {
        1
    }

    fn peer_of(&self, pair: &FlowKey) -> Option<usize> {
        let is_known = !self.strange || !ROUTER.contains(&pair.dst) || self.is_matched(pair);
        is_known.then_some(0)
    }

    fn hosts(&self, _: usize) -> Hosts {
        Hosts {
            own: self.own,
            peer: self.peer,
        }
    }

    fn is_outside(&self, bump: Option<BumpId>) -> bool {
        bump.is_none()
    }

    fn carries(&self, bump: BumpId) -> bool {
        CARRIED.contains(&bump)
    }

    fn locks(&self) -> bool {
        true
    }

    fn is_steering(&self) -> bool {
        true
    }

    fn passes(&self, _: &FlowKey) -> bool {
        false
    }

    fn has_rule(&self, level: Level) -> bool {
        let rules = &self.daemon().rules;
        rules.iter().any(|rule| rule.level == level)
    }

    fn answers<R>(&self, _: usize, access: impl FnOnce(&mut bool) -> R) -> R {
        access(&mut self.daemon().answers)
    }

    async fn sessions(&self) -> Result<Vec<bool>, Unable> {
        Ok(vec![self.reachable.get()])
    }

    fn conns<R>(&self, access: impl FnOnce(&mut ConnTable) -> R) -> R {
        access(&mut self.daemon().conns)
    }

    fn ruling<R>(
        &self,
        live: &Live,
        ask: impl for<'a> FnOnce(Ruling<'a, slice::Iter<'a, Rule>, Live>) -> R,
    ) -> R {
        ask(ruling(&self.daemon(), live))
    }

    fn replace_rules(&self, mut rules: Vec<Rule>) -> Vec<Rule> {
        let daemon = &mut *self.daemon();
        // Those of single connections are not the users'.
        rules.retain(|rule| !rule.is_of_one());
        let ones = { daemon.rules.iter() }.filter(|rule| rule.is_of_one());
        rules.extend(ones.cloned());
        std::mem::replace(&mut daemon.rules, rules)
    }

    fn rules_want(&self, _: usize) -> u16 {
        wanted(self.daemon().rules.iter())
    }

    fn book_wants(&self, rules: &Vec<Rule>, _: usize) -> u16 {
        wanted(rules.iter())
    }

    fn coming<R>(&self, _: usize, access: impl FnOnce(&mut u16) -> R) -> R {
        access(&mut self.daemon().coming)
    }

    fn wants<R>(&self, _: usize, access: impl FnOnce(&mut Wants, &mut ConnTable) -> R) -> R {
        let Daemon { wants, conns, .. } = &mut *self.daemon();
        access(wants, conns)
    }

    fn want(&self, bumps: u16) -> Body {
        let daemon = &mut *self.daemon();
        daemon.sequence += 1;
        Body::Want {
            sequence: daemon.sequence,
            bumps,
            devices: Vec::new(),
        }
    }

    fn marked(&self, live: &Live) -> Option<BumpId> {
        self.chains.borrow().mark(&live.pair()).bump
    }

    fn is_opening(&self, live: &Live) -> bool {
        let found = self.found.borrow();
        { found.get(&live.pair()) }.is_some_and(|found| found.state == State::SynSent)
    }

    fn save(&self) -> Result<(), Unable> {
        let daemon = self.daemon();
        let choices: Vec<_> = daemon.conns.saved().collect();
        let file = &mut *self.file.borrow_mut();
        let wants = daemon.wants.bumps();
        if file
            .unable_until
            .is_some_and(|until| self.now.get() < until)
        {
            let known = (&file.choices, &file.rules, file.wants);
            file.unsaved = known != (&choices, &daemon.rules, wants);
            return Err(Unable);
        }
        (file.choices, file.wants, file.unsaved) = (choices, wants, false);
        file.rules.clone_from(&daemon.rules);
        file.matched.clone_from(&self.matched.borrow());
        Ok(())
    }

    async fn install(&self) -> Result<(), Unable> {
        Ok(())
    }

    async fn steer(&self) -> Result<(), Unable> {
        let (daemon, mut chains) = (self.daemon(), self.chains.borrow_mut());
        chains.rules.clone_from(&daemon.rules);
        chains.answers = daemon.answers;
        chains.pinned = daemon.conns.pins();
        Ok(())
    }

    async fn unpin(&self, _: &[FlowKey]) -> Result<(), Unable> {
        self.kernel_mut().pinned = self.daemon().conns.pins();
        Ok(())
    }

    async fn lives(&self) -> Result<Vec<Live>, Unable> {
        Ok(self.speaking())
    }

    async fn strangers(&self) -> Result<Vec<Live>, Unable> {
        let found = self.found.borrow();
        let strange = { found.iter() }
            .filter(|(pair, found)| found.speaks && self.peer_of(pair).is_none())
            .filter(|_| self.reachable.get());
        let meant = strange.map(|(pair, found)| Meant {
            pair: *pair,
            socket: found.carrying.socket,
        });
        let strangers: Vec<Live> = meant.map(Live).collect();
        if !strangers.is_empty() {
            self.note(Seen::Strangers);
        }
        Ok(strangers)
    }

    async fn find(&self, pairs: &[FlowKey]) -> Result<Found<Self>, Unable> {
        let live = |pair: &FlowKey| {
            let socket = self.socket(pair)?;
            let pair = *pair;
            self.peer_of(&pair)?;
            Some((pair, Live(Meant { pair, socket })))
        };
        Ok(pairs.iter().filter_map(live).collect())
    }

    async fn look_up(&self, pairs: &[FlowKey]) -> Result<(Found<Self>, Tracked), Unable> {
        let found: HashMap<FlowKey, Live> = self.find(pairs).await?;
        Ok((found, tracked(&self.chains.borrow(), pairs.iter())))
    }

    async fn alive(&self, known: &[FlowKey]) -> Result<Vec<(FlowKey, Socket)>, Unable> {
        let socket = |pair: &FlowKey| Some((*pair, self.socket(pair)?));
        let alive = known.iter().filter_map(socket).collect();
        // Others come meanwhile.
        self.sleep(LOOK_TAKES).await;
        Ok(alive)
    }

    async fn entry(&self, pair: &FlowKey) -> Result<Option<Entry>, Unable> {
        let (closed, finished) = (false, false);
        let chains = self.chains.borrow();
        let entry = |mark: &super::Mark| Entry {
            mark: mark.seen(),
            closed,
            finished,
        };
        Ok(chains.marks.get(pair).map(entry))
    }

    async fn entries(&self) -> Result<Vec<(Ends, Entry)>, Unable> {
        let chains = self.chains.borrow();
        let tracked = tracked(&chains, chains.marks.keys());
        let entry = |(pair, entry): &(FlowKey, Entry)| ([*pair, pair.reversed()], *entry);
        Ok(tracked.iter().map(entry).collect())
    }

    async fn survey(
        &self,
        known: Option<&[FlowKey]>,
    ) -> Result<(Vec<(FlowKey, bool)>, Tracked), Unable> {
        let (found, chains) = (self.found.borrow(), self.chains.borrow());
        let known: Option<BTreeSet<&FlowKey>> = known.map(|known| known.iter().collect());
        let is_meant = |pair: &&FlowKey| known.as_ref().is_none_or(|known| known.contains(*pair));
        let lives = found.iter().filter(|(pair, _)| is_meant(pair));
        let lives = lives.map(|(pair, found)| (*pair, found.state == State::Established));
        let meant = chains.marks.keys().filter(is_meant);
        Ok((lives.collect(), tracked(&chains, meant)))
    }

    async fn active(&self, pairs: &[FlowKey]) -> BTreeSet<FlowKey> {
        let conns = self.listed().await;
        let is_active = |pair: &&FlowKey| {
            let mut seen = conns.iter().filter(|conn| conn.tuple == **pair);
            seen.any(|conn| self.now.get().since(conn.last_seen) < ACTIVE_WITHIN)
        };
        pairs.iter().filter(is_active).copied().collect()
    }

    async fn refused(
        &self,
        lives: &[Live],
        goal: Goal,
    ) -> Result<BTreeMap<FlowKey, &'static str>, Unable> {
        let stuck = match goal {
            Goal {
                bump: None,
                ground: Ground::Proved,
            } => self.stuck(lives).await,
            _ => Kept::new(),
        };
        let why = |live: &Live| {
            let pair = live.pair();
            let daemon = self.daemon();
            let required = ruling(&daemon, live).requirement().map(|rule| rule.bump);
            let why = if required.is_some_and(|bump| Some(bump) != goal.bump) {
                Seen::RequiredKept
            } else if daemon.conns.get(&pair).phase.asked().is_some() {
                Seen::BusyRefused
            } else if stuck.contains_key(&pair) {
                Seen::PlainRefused
            } else {
                return None;
            };
            self.note(why);
            Some((pair, why.name()))
        };
        Ok(lives.iter().filter_map(why).collect())
    }

    async fn steerable(&self, lives: &[Live], _: Option<BumpId>) -> Vec<Live> {
        lives.to_vec()
    }

    async fn uncarried(&self, lives: &[Live]) -> Kept {
        let refusals = self.stuck(lives).await;
        refusals.iter().for_each(|_| self.note(Seen::PlainRefused));
        refusals
    }

    fn plain(&self, pairs: impl Iterator<Item = FlowKey>) -> Result<Plain, Unable> {
        Ok(self.open_plain(Some(pairs.collect())))
    }

    fn plain_by_numbers(&self, _: &[(FlowKey, Stand)]) -> Result<Plain, Unable> {
        Ok(self.open_plain(None))
    }

    async fn numbers(&self, pairs: &[FlowKey]) -> Result<BTreeMap<FlowKey, Standing>, Unable> {
        Ok(Standing::latest(&self.listed().await, pairs))
    }

    async fn stands(&self, pairs: &BTreeSet<FlowKey>) -> Result<BTreeMap<FlowKey, Stand>, Unable> {
        let stands = Stands::default();
        self.command(Command::Stands(pairs.clone(), Rc::clone(&stands)));
        Ok(self.until(|| stands.take()).await)
    }

    async fn sockets(&self, pairs: &[FlowKey]) -> Result<BTreeMap<FlowKey, Carrying>, Unable> {
        let found = self.found.borrow();
        let carrying = |pair: &FlowKey| Some((*pair, found.get(pair)?.carrying));
        Ok(pairs.iter().filter_map(carrying).collect())
    }

    async fn addresses_of(&self, _: usize) -> Result<BTreeSet<IpAddr>, Unable> {
        Ok(BTreeSet::new())
    }

    async fn carried(&self) -> Option<Vec<ConnSnapshot>> {
        Some(self.listed().await.to_vec())
    }

    fn window_scale(&self, live: &Live) -> u8 {
        let found = self.found.borrow();
        found
            .get(&live.pair())
            .map_or(0, |found| found.window_scale)
    }

    fn lacks_plain(&self, _: &FlowKey) -> Option<knock::Refusal> {
        None
    }

    fn keeps_plain_open(&self) -> bool {
        true
    }

    fn matched(&self) -> Vec<FlowKey> {
        self.matched.borrow().keys().copied().collect()
    }

    fn is_matched(&self, pair: &FlowKey) -> bool {
        self.matched.borrow().contains_key(pair)
    }

    fn match_names(&self, pair: FlowKey, known: Matched) -> Result<(), Unable> {
        self.note(Seen::Matched);
        let matched = &mut *self.matched.borrow_mut();
        matched.retain(|_, other| other.theirs != known.theirs);
        matched.insert(pair, known);
        if known.theirs != pair {
            self.command(Command::Name(pair, Some(known.theirs)));
        }
        Ok(())
    }

    fn note_copies(&self, copies: [u64; 2]) {
        if copies != [0; 2] {
            self.note(Seen::CopyMatchedNothing);
        }
    }

    fn shadows<R>(&self, access: impl FnOnce(&mut Shadows) -> R) -> R {
        access(&mut self.shadows.borrow_mut())
    }

    async fn unfit(&self, _: usize, _: Option<BumpId>, _: &[FlowKey]) -> Option<Refusal> {
        None
    }

    async fn mark(&self, marks: impl FnOnce() -> Vec<Mark>) -> Failed<Self> {
        let marks = marks();
        let chains = &mut *self.chains.borrow_mut();
        marks.into_iter().for_each(|mark| self.put(chains, mark));
        Failed::<Self>::new()
    }

    async fn mark_choices(&self, pairs: &[FlowKey]) -> Failed<Self> {
        let chains = &mut *self.chains.borrow_mut();
        pairs.iter().for_each(|pair| self.put_choice(chains, *pair));
        Failed::<Self>::new()
    }

    async fn clear(&self, gone: impl FnOnce() -> Vec<FlowKey>) -> Failed<Self> {
        let chains = &mut *self.chains.borrow_mut();
        for pair in gone() {
            self.write(chains, Mark::moved(pair, None));
        }
        Failed::<Self>::new()
    }

    async fn note_followed(&self, ends: &Ends, bump: Option<BumpId>) {
        let conns = &mut self.daemon().conns;
        conns.update(&ends[0], |conn| conn.place.handle_followed(bump));
    }

    async fn mend(&self, mends: &[(FlowKey, Mend)]) -> Result<(), Unable> {
        let chains = &mut *self.chains.borrow_mut();
        for (pair, _) in mends {
            let lock = self.daemon().conns.get(pair).lock;
            chains.set_lock(pair, lock.locked());
        }
        Ok(())
    }

    async fn unlock(&self, pairs: &[FlowKey]) {
        let chains = &mut *self.chains.borrow_mut();
        pairs.iter().for_each(|pair| chains.set_lock(pair, None));
    }

    async fn silence(&self, lives: &[Live], refusing: &BTreeSet<FlowKey>) {
        for live in lives {
            let pair = live.pair();
            let leaving = &mut self.daemon().leaving;
            leaving.entry(pair).or_default().extend(CARRIED);
            let refuses = refusing.contains(&pair);
            self.command(Command::Drain { pair, refuses });
        }
        self.until(|| {
            let leaving = &self.daemon().leaving;
            let waits = lives.iter().any(|live| leaving.contains_key(&live.pair()));
            (!waits).then_some(())
        })
        .await;
    }

    fn end_drains(&self, pair: &FlowKey) {
        self.command(Command::EndDrain(*pair));
    }

    fn solicit(&self, pair: &FlowKey, bump: Option<BumpId>) {
        // While a handshake goes on Linux answers such a segment as any other, smoltcp with a RST.
        let found = self.found.borrow();
        let opens = found.get(pair).is_some_and(|found| found.opens());
        if let Some(bump) = bump.filter(|_| !opens) {
            let kernel = self.kernel();
            let has_it = kernel.mark(pair).bump.is_some() || kernel.ruled(pair) == Some(bump);
            // Its entry may be gone, or another program changed it, and the daemon has not heard of that.
            let written = self.daemon().conns.get(pair).place.written();
            assert!(
                has_it || written == Some(Some(bump)),
                "{pair} is asked by {bump:?}, which would take it there"
            );
            self.command(Command::Solicit(*pair, bump));
        }
    }

    fn expect(&self, pair: &FlowKey, bump: BumpId) {
        self.command(Command::Enter(*pair, bump, None));
    }

    fn expect_rates(&self, _: &[Live]) {}

    async fn ask(&self, _: usize, body: Body) -> Result<Vec<(Outcome, u64)>, Unanswered> {
        let request = self.next_request();
        self.command(Command::Post(Some(request), Message { request, body }));
        if !{ self.until(|| self.daemon().posted.remove(&request)) }.await {
            self.note(Seen::NoSession);
            return Err(Unanswered::NoSession);
        }
        let until = self.now.get() + ANSWER_TIMEOUT;
        self.daemon().asked.insert(request, None);
        let answer = self.until(|| {
            let answer = self.daemon().asked.get_mut(&request)?.take();
            answer
                .map(Ok)
                .or_else(|| self.is_time(until).then_some(Err(Unanswered::Silent)))
        });
        let answer = answer.await;
        self.daemon().asked.remove(&request);
        answer
    }

    async fn answer_beside(&self, _: usize, _: Body) -> Vec<(Outcome, u64)> {
        // The simulator's hosts have no firewall.
        vec![(Outcome::Done, 0)]
    }

    async fn sleep(&self, time: Duration) {
        let until = self.now.get() + time;
        self.until(|| self.is_time(until).then_some(())).await;
    }

    fn wake(&self, task: Task) {
        let task = match task {
            Task::Rules => Task::Sessions,
            task => task,
        };
        self.woken.borrow_mut().insert(task);
        self.changed.set(true);
    }

    async fn woken(&self, task: Task) {
        let woken = || self.woken.borrow_mut().remove(&task);
        self.until(|| woken().then_some(())).await;
    }

    fn spawn(&self, rest: impl Future<Output = ()> + 'static) {
        self.spawned.borrow_mut().push(Box::pin(rest));
        self.changed.set(true);
    }

    fn note_done(&self, _: &'static str, _: Result<(), Unable>) {}

    fn tell(&self, news: News<'_, Live, Rule>) {
        let seen = match news {
            News::LeftFirst => Seen::LeftFirst,
            News::AskedAgain => Seen::AskedAgain,
            News::Behind => Seen::RoutersBehind,
            News::Concluded(Conclusion::InForce) => return,
            News::Concluded(Conclusion::Superseded) => Seen::Superseded,
            News::Concluded(Conclusion::TakenBack) => Seen::Refused,
            News::Concluded(Conclusion::PutBack(_)) => Seen::PutBack,
            News::Concluded(Conclusion::BroughtBack(_)) => Seen::Unanswered,
            News::Implausible(_) | News::Refused(Refusal::Implausible(_)) => Seen::VersionRefused,
            News::Refused(Refusal::OtherSocket(_)) => Seen::SocketNamed,
            News::Refused(Refusal::Older(_)) => Seen::OlderRefused,
            News::Refused(_) => Seen::SwitchRefused,
            News::Follows(Switch { ready: true, .. }) => Seen::GotReady,
            News::Follows(Switch { bump: None, .. }) => Seen::SwitchedOut,
            News::Follows(Switch { explicit: true, .. }) => Seen::SwitchedIn,
            News::Follows(_) => Seen::RuleFollowed,
            News::Marked(Marked { chosen: true, .. }) => Seen::MarkChosen,
            News::Marked(_) => Seen::MarkFollowed,
            News::Undone(pairs) => {
                let highest = &mut *self.highest.borrow_mut();
                highest.retain(|pair, _| !pairs.contains(pair));
                Seen::Failed
            }
            News::GivenUp { pair, .. } => {
                self.highest.borrow_mut().remove(&pair);
                Seen::OwnRule
            }
            News::Overruled => Seen::ChoiceOverruled,
            News::ChoiceLeft => Seen::ChoiceLeft,
            News::RuleMoves => Seen::RuleMoved,
            News::RuleFrees => Seen::RuleFreed,
            News::RuleWaits => Seen::RuleWaited,
            News::RuleAgain => Seen::RuleAgain,
            News::Wanted => Seen::Wanted,
            News::ToldAgain => Seen::ToldAgain,
            News::Switched { .. }
            | News::Unfound { .. }
            | News::Kept { .. }
            | News::Peer { .. }
            | News::Fault(_) => {
                return;
            }
        };
        self.note(seen);
    }
}

/// The state file takes nothing now.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the state file takes nothing now")]
pub(super) struct Unable;
