//! The machine that the engine works on: what a daemon knows, and a model of what it is on.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::slice;
use std::task::Poll;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::node::ConnSnapshot;
use dibs_settings::{BumpId, Level};
use dibs_switch::answering::Refusal;
use dibs_switch::asking::Conclusion;
use dibs_switch::conns::{Choice, Meant, Pair, Socket, Version};
use dibs_switch::engine::rules::Kept;
use dibs_switch::engine::{
    self, Failed, Found, Goal, Live as _, Machine, Mark as NewMark, News, Task, choices, locks,
    rules, stands_on, switches, wants,
};
use dibs_switch::knock;
use dibs_switch::messages::{ANSWER_TIMEOUT, Body, Message, Outcome, Switch, Unanswered};
use dibs_switch::plausible::Hosts;
use dibs_switch::rules::{Ruling, Wants, wanted};
use dibs_switch::table::{Conn, ConnTable};
use dibs_switch::tracked::{Entry, Tracked};
use futures_util::future::join_all;

use super::chains::Chains;
use super::knocking::Knocks;
use super::ruling::{Rule, Selected};
use super::{At, CARRIED, LOOK_EVERY, Mark, SESSION_EVERY, tuple};
use crate::coverage::Seen;

/// A connection whose kernel has sent no byte for as long sends nothing now.
const SENDS_WITHIN: Duration = Duration::from_millis(200);

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

/// What a task wants of the data path.
#[derive(Debug)]
pub(super) enum Command {
    /// A message is to be sent, for this request if somebody waits for that.
    Post(Option<u32>, Vec<u8>),
    /// All connections are to be listed.
    Conns,
    /// A connection is to fall silent.
    Drain(Pair),
    /// It is to go on.
    EndDrain(Pair),
    /// The kernel is to say where a connection stands that is on this bump.
    Solicit(Pair, BumpId),
}

/// What outlives the daemon.
#[derive(Debug, Default)]
struct File {
    choices: Vec<(Pair, Choice)>,
    rules: Vec<Rule>,
    /// What the peer's rules need.
    wants: u16,
    /// It takes nothing until then.
    unable_until: Option<Time>,
    /// There is more to be saved than it has.
    unsaved: bool,
}

/// What dies with the daemon.
#[derive(Debug, Default)]
struct Daemon {
    conns: ConnTable,
    rules: Vec<Rule>,
    wants: Wants,
    /// The peer has a session, and answers.
    answers: bool,
    /// Of the last WANT.
    sequence: u64,
    next_request: u32,
    /// Whether the messages of requests were sent.
    posted: BTreeMap<u32, bool>,
    /// Requests that wait for their answers, and these.
    asked: BTreeMap<u32, Option<Vec<(Outcome, u64)>>>,
    /// Questions of the peer that wait for their turn.
    questions: VecDeque<Message>,
    /// One is being dealt with.
    serving: bool,
    /// The bumps by which something of a connection may still be under way that falls silent.
    leaving: BTreeMap<Pair, BTreeSet<BumpId>>,
    knocks: Knocks,
    /// Who waits for a turn to change things: the first has it.
    turns: VecDeque<u32>,
    next_turn: u32,
    /// When peers are asked about what is not locked yet.
    look_at: Option<Time>,
    /// They are being asked.
    asking: bool,
    /// The session is new, and nobody has told the peer yet.
    is_new: bool,
    /// Somebody does.
    resyncing: bool,
    /// When the session is looked at again.
    session_at: Time,
    /// The peer has got a session, or lost it, and nobody has followed yet.
    turned: Option<bool>,
}

impl Daemon {
    /// Whether a rule asks for the session.
    fn prefers(&self) -> bool {
        self.rules.iter().any(|rule| rule.level == Level::Prefer)
    }
}

/// A host, as the tasks of its daemon see it.
#[derive(Default)]
pub(super) struct Host {
    /// Names it in versions.
    pub(super) own: u64,
    /// Names the other one.
    peer: u64,
    /// Users want connections in plain whether that carries them or not.
    forces: bool,
    chains: RefCell<Chains>,
    file: RefCell<File>,
    daemon: RefCell<Option<Daemon>>,
    /// The highest version that was in force, by connection.
    highest: RefCell<BTreeMap<Pair, Version>>,
    now: Cell<Time>,
    /// Connections that are alive, and whether they speak.
    found: RefCell<BTreeMap<Pair, (Socket, bool)>>,
    /// The data path's connections, if anybody has asked since the last input.
    listed: RefCell<Option<Rc<Vec<ConnSnapshot>>>>,
    commands: RefCell<Vec<Command>>,
    /// When tasks that wait are to look again.
    timers: RefCell<BTreeSet<Time>>,
    /// Something changed that a task may wait for.
    changed: Cell<bool>,
    sent: RefCell<Vec<Vec<u8>>>,
    knocked: RefCell<Vec<Vec<u8>>>,
}

/// A turn to change things, until it is dropped.
pub(super) struct Turn<'a>(&'a Host, u32);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(daemon) = &mut *self.0.daemon.borrow_mut() {
            daemon.turns.retain(|turn| *turn != self.1);
            self.0.changed.set(true);
        }
    }
}

impl Host {
    pub(super) fn new(own: u64, peer: u64, forces: bool) -> Self {
        Self {
            own,
            peer,
            forces,
            ..Self::default()
        }
    }

    pub(super) fn kernel(&self) -> Ref<'_, Chains> {
        self.chains.borrow()
    }

    pub(super) fn kernel_mut(&self) -> RefMut<'_, Chains> {
        self.chains.borrow_mut()
    }

    fn daemon(&self) -> RefMut<'_, Daemon> {
        RefMut::map(self.daemon.borrow_mut(), |daemon| {
            daemon.as_mut().expect("a host with a node has a daemon")
        })
    }

    pub(super) fn note(&self, seen: Seen) {
        self.chains.borrow_mut().seen.note(seen);
    }

    /// Learns what there is now.
    pub(super) fn refresh(&self, at: &At<'_>) {
        self.now.set(at.now);
        self.found.replace(at.found());
        self.listed.replace(None);
        let answers = { at.node.peers(at.now) }.iter().all(|peer| peer.reachable);
        if let Some(daemon) = &mut *self.daemon.borrow_mut() {
            daemon.session_at = at.now + SESSION_EVERY;
            if std::mem::replace(&mut daemon.answers, answers) != answers {
                daemon.turned = Some(answers);
            }
        }
    }

    /// Waits until something is so.
    pub(super) async fn until<T>(&self, mut ready: impl FnMut() -> Option<T>) -> T {
        poll_fn(|_| ready().map_or(Poll::Pending, Poll::Ready)).await
    }

    /// True once it is this time; until then a task that waits looks again by then.
    pub(super) fn is_time(&self, at: Time) -> bool {
        let is_time = self.now.get() >= at;
        if !is_time {
            self.timers.borrow_mut().insert(at);
        }
        is_time
    }

    pub(super) fn forget_timers(&self) {
        self.timers.borrow_mut().clear();
    }

    pub(super) fn take_changed(&self) -> bool {
        self.changed.take()
    }

    pub(super) fn take_commands(&self) -> Vec<Command> {
        self.commands.take()
    }

    pub(super) fn take_sent(&self) -> Vec<Vec<u8>> {
        self.sent.take()
    }

    pub(super) fn take_knocks(&self) -> Vec<Vec<u8>> {
        self.knocked.take()
    }

    fn command(&self, command: Command) {
        self.commands.borrow_mut().push(command);
    }

    /// Access to what is known of knocks.
    pub(super) fn knocks<R>(&self, access: impl FnOnce(&mut Knocks) -> R) -> R {
        access(&mut self.daemon().knocks)
    }

    /// Waits for a turn to change things.
    pub(super) async fn turn(&self) -> Turn<'_> {
        let turn = {
            let daemon = &mut *self.daemon();
            daemon.next_turn += 1;
            daemon.turns.push_back(daemon.next_turn);
            Turn(self, daemon.next_turn)
        };
        self.until(|| (self.daemon().turns.front() == Some(&turn.1)).then_some(()))
            .await;
        turn
    }

    /// The data path's connections.
    pub(super) async fn listed(&self) -> Rc<Vec<ConnSnapshot>> {
        if self.listed.borrow().is_none() {
            self.command(Command::Conns);
        }
        self.until(|| self.listed.borrow().clone()).await
    }

    pub(super) fn note_conns(&self, conns: Vec<ConnSnapshot>) {
        self.listed.replace(Some(Rc::new(conns)));
    }

    /// The socket of a connection that is alive here.
    pub(super) fn socket(&self, pair: &Pair) -> Option<Socket> {
        self.found.borrow().get(pair).map(|(socket, _)| *socket)
    }

    /// Connections that are alive and speak.
    fn speaking(&self) -> Vec<Live> {
        let found = self.found.borrow();
        let speaking = found.iter().filter(|(_, (_, speaks))| *speaks);
        let live = |(pair, (socket, _)): (&Pair, &(Socket, bool))| {
            let (pair, socket) = (*pair, *socket);
            Live(Meant { pair, socket })
        };
        speaking.map(live).collect()
    }

    fn is_there(&self, conn: &Meant) -> bool {
        self.socket(&conn.pair) == Some(conn.socket)
    }

    /// How the other end names its socket of a connection.
    pub(super) fn name_of(&self, pair: &Pair, socket: Socket) -> Socket {
        self.daemon().conns.get(pair).name(socket)
    }

    pub(super) fn choice(&self, pair: &Pair) -> Option<Choice> {
        match &*self.daemon.borrow() {
            Some(daemon) => daemon.conns.get(pair).choice.get(),
            None => {
                let file = self.file.borrow();
                let saved = file.choices.iter().find(|(p, _)| p == pair);
                saved.map(|(_, choice)| *choice)
            }
        }
    }

    pub(super) fn open(&self, pair: Pair, bump: Option<BumpId>, required: Option<BumpId>) {
        let mark = Mark {
            bump: required.or(bump),
            ..Mark::default()
        };
        self.chains.borrow_mut().marks.insert(pair, mark);
        if let Some(required) = required {
            let rule = Rule::requiring(pair, required);
            self.each_rules(|rules| rules.push(rule.clone()));
        }
    }

    pub(super) fn forget(&self, pair: &Pair) {
        self.chains.borrow_mut().marks.remove(pair);
        self.each_rules(|rules| rules.retain(|rule| !rule.is_only_of(pair)));
        let file = &mut *self.file.borrow_mut();
        file.choices.retain(|(p, _)| p != pair);
        self.highest.borrow_mut().remove(pair);
        if let Some(daemon) = &mut *self.daemon.borrow_mut() {
            daemon.conns.forget(pair);
            daemon.leaving.remove(pair);
            daemon.knocks.forget(pair);
            self.changed.set(true);
        }
    }

    fn each_rules(&self, mut change: impl FnMut(&mut Vec<Rule>)) {
        change(&mut self.chains.borrow_mut().rules);
        change(&mut self.file.borrow_mut().rules);
        if let Some(daemon) = &mut *self.daemon.borrow_mut() {
            change(&mut daemon.rules);
        }
    }

    pub(super) fn flush(&self, kept: impl Fn(&Pair) -> bool) {
        let Chains {
            marks, rules, seen, ..
        } = &mut *self.chains.borrow_mut();
        let daemon = self.daemon.borrow();
        for (pair, mark) in marks.iter_mut() {
            let marked = |daemon: &Daemon| daemon.conns.get(pair).is_marked();
            let is_kept = kept(pair)
                || daemon.as_ref().is_some_and(marked)
                || rules.iter().any(|rule| rule.means(pair));
            if !mark.chosen && mark.bump.is_some() && !is_kept {
                *mark = Mark::default();
                seen.note(Seen::MarkLost);
            }
        }
    }

    pub(super) fn unable(&self, until: Time) {
        let file = &mut *self.file.borrow_mut();
        file.unable_until = file.unable_until.max(Some(until));
    }

    pub(super) fn able(&self, now: Time) {
        let file = &mut *self.file.borrow_mut();
        file.unable_until = file.unable_until.min(Some(now));
    }

    pub(super) fn note_crash(&self) {
        if let Some(daemon) = &*self.daemon.borrow() {
            if !daemon.asked.is_empty() {
                self.note(Seen::CrashAsking);
            }
            if !daemon.leaving.is_empty() {
                self.note(Seen::CrashLeaving);
            }
        }
    }

    pub(super) fn stop(&self) {
        self.daemon.replace(None);
        self.commands.take();
        self.timers.take();
    }

    pub(super) fn start(&self, request: u32) {
        let mut daemon = Daemon {
            next_request: request,
            ..Daemon::default()
        };
        let now = self.now.get();
        let choices = {
            let file = &mut *self.file.borrow_mut();
            for (pair, choice) in &file.choices {
                { &mut daemon.conns }.update(pair, |conn| conn.choice.restore(*choice));
            }
            daemon.rules.clone_from(&file.rules);
            daemon.wants = Wants::restored(file.wants);
            // What could not be saved goes back, until the peer tells of it.
            if std::mem::take(&mut file.unsaved) {
                self.highest.borrow_mut().clear();
            }
            file.choices.clone()
        };
        let chains = &mut *self.chains.borrow_mut();
        chains.rules.clone_from(&daemon.rules);
        chains.answers = false;
        // What an earlier run left.
        for (pair, mark) in &chains.marks {
            let socket = self.socket(pair).unwrap_or(Socket::UNKNOWN);
            let live = Live(Meant {
                pair: *pair,
                socket,
            });
            let by = { mark.bump }.and_then(|bump| ruling(&daemon, &live).hand_of(bump));
            daemon.conns.update(pair, |conn| {
                if mark.chosen {
                    conn.note_mark(mark.bump, true, now);
                }
                match mark.bump {
                    None if mark.chosen && conn.choice.get().is_none() => conn.move_to_left(now),
                    None => {}
                    Some(_) => conn.adopt_mark(mark.seen(), socket, by),
                }
            });
        }
        daemon.look_at = Some(now + LOOK_EVERY);
        self.daemon.replace(Some(daemon));
        // The peer may not have heard of them; it is told with the next session.
        for (pair, choice) in choices {
            self.put_choice(chains, pair);
            self.solicit(&pair, choice.bump);
        }
    }

    /// Puts the choice for a connection into the kernel, if there is one that is not pending.
    fn put_choice(&self, chains: &mut Chains, pair: Pair) {
        let choice = self.choice(&pair).filter(|choice| !choice.pending);
        if let Some(choice) = choice {
            let highest = &mut *self.highest.borrow_mut();
            let highest = highest.entry(pair).or_default();
            *highest = (*highest).max(choice.version);
            self.put(chains, NewMark::chosen(pair, choice.bump));
        }
    }

    /// A connection's mark says this from now on.
    fn put(&self, chains: &mut Chains, mark: NewMark) {
        let NewMark {
            pair,
            bump,
            explicit,
        } = mark;
        let daemon = &mut *self.daemon();
        let (new, lock) = daemon.conns.update(&pair, |conn| {
            conn.lock.enter(bump);
            let new = conn.move_to_mark(bump, explicit, self.now.get());
            (new, conn.lock.locked())
        });
        let known = chains.marks.entry(pair).or_default();
        (known.bump, known.chosen) = (bump, new.chosen);
        chains.set_lock(&pair, lock);
        daemon.look_at = Some(self.now.get());
        if bump.is_none() {
            self.command(Command::EndDrain(pair));
        }
    }

    pub(super) fn next_request(&self) -> u32 {
        let daemon = &mut *self.daemon();
        let request = daemon.next_request;
        daemon.next_request = request.wrapping_add(1);
        request
    }

    /// Sends a message for whose sending nobody waits.
    pub(super) fn post(&self, message: Message) {
        self.command(Command::Post(None, message.encode()));
    }

    /// A message was sent, or could not be.
    pub(super) fn note_posted(&self, request: Option<u32>, sent: Option<Vec<u8>>) {
        if let Some(request) = request {
            self.daemon().posted.insert(request, sent.is_some());
        }
        self.sent.borrow_mut().extend(sent);
    }

    pub(super) fn take_message(&self, message: Message) {
        let daemon = &mut *self.daemon();
        match message.body {
            Body::Answer(outcomes) => match daemon.asked.get_mut(&message.request) {
                Some(asked) => *asked = Some(outcomes),
                None => self.note(Seen::LateAnswer),
            },
            _ => daemon.questions.push_back(message),
        }
    }

    pub(super) fn note_drained(&self, pair: &Pair, bump: BumpId) {
        let daemon = &mut *self.daemon();
        if let Some(bumps) = daemon.leaving.get_mut(pair) {
            bumps.remove(&bump);
            if bumps.is_empty() {
                daemon.leaving.remove(pair);
                self.note(Seen::Drained);
            }
        }
    }

    pub(super) fn note_session(&self, restarted: bool) {
        let daemon = &mut *self.daemon();
        daemon.is_new = true;
        if restarted {
            daemon.wants.handle_restart();
        }
    }

    /// A packet came in by the ordinary route. Whether anybody waits for one like it.
    pub(super) fn hear(&self, now: Time, packet: &[u8]) -> bool {
        let Some((pair, numbers)) = knock::read(packet) else {
            return false;
        };
        self.daemon().knocks.handle_heard(&pair, numbers, now)
    }

    /// When something is due.
    pub(super) fn due(&self) -> Option<Time> {
        let daemon = self.daemon.borrow();
        let daemon = daemon.as_ref()?;
        let file = self.file.borrow();
        let dues = [
            file.unable_until.filter(|_| file.unsaved),
            daemon.look_at.filter(|_| !daemon.asking),
            daemon.conns.next_lock(),
            daemon.conns.next_moved(),
            daemon.conns.next_telling(),
            daemon.knocks.due(),
            daemon.prefers().then_some(daemon.session_at),
            self.timers.borrow().first().copied(),
        ];
        dues.into_iter().flatten().min()
    }

    /// Does what is due that no task waits for.
    pub(super) fn handle_due(&self, now: Time) {
        let retries = {
            let file = self.file.borrow();
            file.unsaved && file.unable_until.is_none_or(|until| until <= now)
        };
        if retries {
            let _ = self.save();
        }
        self.knocked
            .borrow_mut()
            .extend(self.daemon().knocks.handle_timeout(now));
        if { self.daemon().conns.next_lock() }.is_some_and(|due| due <= now) {
            self.set_locks(now);
        }
    }

    /// Brings LOCKED in the kernel to what is due.
    fn set_locks(&self, now: Time) {
        let chains = &mut *self.chains.borrow_mut();
        let tracked = tracked(chains, chains.marks.keys());
        let lives = |pair: &Pair| self.socket(pair).map(|_| true);
        let conns = &mut self.daemon().conns;
        for (pair, _) in conns.mend_locks(now, &tracked, lives, |_| false) {
            chains.set_lock(&pair, conns.get(&pair).lock.locked());
        }
    }

    /// What rules moved of which the peer is to be asked again by now, unless something moves.
    pub(super) fn take_moved(&self, now: Time) -> Vec<(Pair, Option<BumpId>)> {
        self.daemon().conns.take_moved(now)
    }

    pub(super) fn begin_serving(&self) -> bool {
        let daemon = &mut *self.daemon();
        let begins = !daemon.serving && !daemon.questions.is_empty();
        daemon.serving |= begins;
        begins
    }

    pub(super) fn begin_resync(&self) -> bool {
        let daemon = &mut *self.daemon();
        let begins = daemon.is_new && !daemon.resyncing;
        if begins {
            (daemon.is_new, daemon.resyncing) = (false, true);
        }
        begins
    }

    pub(super) fn end_resync(&self) {
        self.daemon().resyncing = false;
    }

    pub(super) fn turned(&self) -> Option<bool> {
        self.daemon().turned.take()
    }

    /// Whether the peer is to be asked by now about what is not locked.
    pub(super) fn begin_asking(&self, now: Time) -> bool {
        let daemon = &mut *self.daemon();
        let begins = daemon.look_at.is_some_and(|look| look <= now) && !daemon.asking;
        if begins {
            daemon.asking = true;
            // Also of those that have not begun here.
            let any_left = daemon.conns.iter().any(|(_, conn)| conn.has_left());
            daemon.look_at = any_left.then_some(now + LOOK_EVERY);
            let chains = &mut *self.chains.borrow_mut();
            let left = daemon.conns.iter().filter(|(_, conn)| conn.may_follow(now));
            for pair in left.map(|(pair, _)| *pair).collect::<Vec<_>>() {
                let follow = |conn: &mut Conn| {
                    conn.take_left();
                    let chosen = conn.choice.get().is_some();
                    if !chosen {
                        conn.note_mark(None, false, now);
                    }
                    chosen
                };
                if !daemon.conns.update(&pair, follow) {
                    chains.marks.entry(pair).or_default().chosen = false;
                }
            }
        }
        begins
    }

    pub(super) fn end_asking(&self) {
        self.daemon().asking = false;
    }

    /// A user moves a connection.
    pub(super) async fn choose(&self, conn: Meant, bump: Option<BumpId>) {
        let _turn = self.turn().await;
        if !self.is_there(&conn) {
            return;
        }
        let (live, force) = (Live(conn), self.forces);
        let origin = stands_on(self, &live);
        match choices::choose(self, &[live], Goal { bump, force }, |_, _| ()).await {
            Err(_) => self.note(Seen::FailedHere),
            Ok(_) if bump != origin && bump.is_some() && origin.is_some() => {
                self.note(Seen::BumpToBump);
            }
            Ok(_) => {}
        }
    }

    /// Users have these rules from now on.
    pub(super) async fn change_rules(&self, rules: Vec<Rule>) {
        let _turn = self.turn().await;
        self.note(Seen::RulesChanged);
        let gone: Vec<Rule> = {
            let daemon = self.daemon();
            let known = daemon.rules.iter();
            let stays =
                |rule: &&Rule| rules.contains(rule) || matches!(rule.meant, Selected::One(_));
            known.filter(|rule| !stays(rule)).cloned().collect()
        };
        let gone = rules::Gone {
            rules: &gone,
            force: self.forces,
        };
        if rules::replace(self, rules, gone, &self.speaking())
            .await
            .is_err()
        {
            self.note(Seen::FailedHere);
        }
    }

    /// The peer has a session now, or none: rules that prefer their bump ask for it.
    pub(super) async fn follow_session(&self, answers: bool) {
        let _turn = self.turn().await;
        self.chains.borrow_mut().answers = answers;
        let prefers = self.daemon().prefers();
        if answers && prefers {
            rules::follow_ruled(self, &self.speaking()).await;
        }
    }

    /// Deals with the peer's questions, one after the other.
    pub(super) async fn serve(&self) {
        loop {
            let next = self.daemon().questions.pop_front();
            let Some(Message { request, body }) = next else {
                self.daemon().serving = false;
                return;
            };
            let outcomes = match body {
                Body::Switch { switch, conns } => switches::answer(self, 0, switch, conns).await,
                Body::Confirm { bump, conns } => locks::answer(self, 0, bump, &conns).await,
                Body::Knock(conns) => {
                    let answers = conns.into_iter().map(|conn| self.answer_knock(conn));
                    join_all(answers).await
                }
                Body::Want {
                    sequence, bumps, ..
                } => vec![(wants::answer(self, 0, sequence, bumps).await, 0)],
                // The simulator's hosts have no firewall.
                Body::Silent { .. } => vec![(Outcome::Done, 0)],
                Body::Answer(_) => unreachable!("answers are taken before"),
            };
            let body = Body::Answer(outcomes);
            self.post(Message { request, body });
        }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let (daemon, chains) = (self.daemon.borrow(), self.chains.borrow());
        let Some(daemon) = &*daemon else {
            return Ok(());
        };
        let highest = self.highest.borrow();
        for (pair, choice) in daemon.conns.choices() {
            let mark = chains.mark(&pair);
            if mark.locked && daemon.conns.get(&pair).lock.locked() != mark.bump {
                return Err(format!(
                    "{pair:?} is locked to where the peer did not say that it was: {mark:?}"
                ));
            }
            if highest.get(&pair).is_some_and(|h| *h > choice.version) && !choice.pending {
                return Err(format!(
                    "the choice for {pair:?} went back to {:?}",
                    choice.version
                ));
            }
        }
        Ok(())
    }
}

/// A connection, beside the rules that hold.
fn ruling<'a>(daemon: &'a Daemon, live: &'a Live) -> Ruling<'a, slice::Iter<'a, Rule>, Live> {
    Ruling {
        rules: daemon.rules.iter(),
        live,
        socket: live.0.socket,
        known: daemon.conns.get(&live.0.pair),
        wants: daemon.wants,
        answers: daemon.answers,
    }
}

/// What the kernel has of these connections.
fn tracked<'a>(chains: &Chains, pairs: impl Iterator<Item = &'a Pair>) -> Tracked {
    let entry = |pair: &Pair| {
        let mark = chains.marks.get(pair)?.seen();
        let closed = false;
        Some((*pair, Entry { mark, closed }))
    };
    Tracked::new(pairs.filter_map(entry).collect())
}

impl Machine for Host {
    type Live = Live;
    type Rule = Rule;
    type Rules<'a> = slice::Iter<'a, Rule>;
    type Book = Vec<Rule>;
    type Fault = Unable;
    type MarkFault = Unable;
    type Why = &'static str;

    fn now(&self) -> Time {
        self.now.get()
    }

    fn peers(&self) -> usize {
        1
    }

    fn peer_of(&self, _: &Pair) -> Option<usize> {
        Some(0)
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
        rules.retain(|rule| !matches!(rule.meant, Selected::One(_)));
        let ones = { daemon.rules.iter() }.filter(|rule| matches!(rule.meant, Selected::One(_)));
        rules.extend(ones.cloned());
        std::mem::replace(&mut daemon.rules, rules)
    }

    fn rules_want(&self, _: usize) -> u16 {
        wanted(self.daemon().rules.iter())
    }

    fn book_wants(&self, rules: &Vec<Rule>, _: usize) -> u16 {
        wanted(rules.iter())
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

    fn save(&self) -> Result<(), Unable> {
        let daemon = self.daemon();
        let choices = daemon.conns.choices().map(|(pair, choice)| {
            let pending = false;
            (pair, Choice { pending, ..choice })
        });
        let choices: Vec<_> = choices.collect();
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
        Ok(())
    }

    async fn install(&self) -> Result<(), Unable> {
        Ok(())
    }

    async fn steer(&self) -> Result<(), Unable> {
        let (daemon, mut chains) = (self.daemon(), self.chains.borrow_mut());
        chains.rules.clone_from(&daemon.rules);
        chains.answers = daemon.answers;
        Ok(())
    }

    async fn lives(&self) -> Result<Vec<Live>, Unable> {
        Ok(self.speaking())
    }

    async fn find(&self, pairs: &[Pair]) -> Result<Found<Self>, Unable> {
        let live = |pair: &Pair| {
            let socket = self.socket(pair)?;
            let pair = *pair;
            Some((pair, Live(Meant { pair, socket })))
        };
        Ok(pairs.iter().filter_map(live).collect())
    }

    async fn look_up(&self, pairs: &[Pair]) -> Result<(Found<Self>, Tracked), Unable> {
        let found: HashMap<Pair, Live> = self.find(pairs).await?;
        Ok((found, tracked(&self.chains.borrow(), pairs.iter())))
    }

    /// Only of those that are chosen or ruled here: the daemon puts marks of others back as well when they are lost
    /// (`daemon/src/tracking.rs`), which is not modelled, and locked they would wait for them.
    async fn bumped<T>(
        &self,
        pick: impl Fn(&Live, &Tracked) -> Option<T>,
    ) -> Result<Vec<T>, Unable> {
        let lives = self.speaking();
        let chains = self.chains.borrow();
        let tracked = tracked(&chains, chains.marks.keys());
        let mut picked = Vec::new();
        for live in lives {
            let pair = live.pair();
            let is_known = {
                let daemon = &mut *self.daemon();
                let conn = daemon.conns.get(&pair);
                let ruled = ruling(daemon, &live).deciding().is_some();
                let is_known = ruled || conn.choice.get().is_some();
                let bump = tracked.bump(&pair);
                if is_known && bump.is_some() && conn.lock.locked() != bump {
                    // Also of one that may come about yet.
                    daemon.look_at = Some(self.now.get() + LOOK_EVERY);
                }
                is_known
            };
            if is_known {
                picked.extend(pick(&live, &tracked));
            }
        }
        Ok(picked)
    }

    async fn sending(&self, pairs: &[Pair]) -> BTreeSet<Pair> {
        let conns = self.listed().await;
        let sends = |pair: &&Pair| {
            let mut spoke = conns.iter().filter(|conn| conn.tuple == tuple(pair));
            spoke.any(|conn| { conn.spoke }.is_some_and(|t| self.now.get().since(t) < SENDS_WITHIN))
        };
        pairs.iter().filter(sends).copied().collect()
    }

    async fn refused(
        &self,
        lives: &[Live],
        goal: Goal,
    ) -> Result<BTreeMap<Pair, &'static str>, Unable> {
        let mut refused = BTreeMap::new();
        for live in lives {
            let (required, standing, pending) = {
                let daemon = self.daemon();
                let marked = self.marked(live);
                let ruling = ruling(&daemon, live);
                let required = ruling.requirement().map(|rule| rule.bump);
                let choice = daemon.conns.get(&live.pair()).choice.of(live.0.socket);
                let pending = choice.is_some_and(|choice| choice.pending);
                (required, ruling.stands_on(marked), pending)
            };
            let leaves = goal.bump.is_none() && standing.is_some() && !goal.force;
            let why = if required.is_some_and(|bump| Some(bump) != goal.bump) {
                Seen::RequiredKept
            } else if pending {
                Seen::BusyRefused
            } else if leaves && self.knock(live.0).await.is_some() {
                Seen::PlainRefused
            } else {
                continue;
            };
            self.note(why);
            refused.insert(live.pair(), why.name());
        }
        Ok(refused)
    }

    async fn steerable(&self, lives: &[Live], _: Option<BumpId>) -> Vec<Live> {
        lives.to_vec()
    }

    async fn uncarried(&self, lives: &[Live]) -> Kept {
        let bumped = lives.iter().filter(|live| stands_on(self, live).is_some());
        let knocked = bumped.map(async |live| {
            let why = self.knock(live.0).await?;
            self.note(Seen::PlainRefused);
            Some((live.pair(), why))
        });
        join_all(knocked).await.into_iter().flatten().collect()
    }

    async fn unfit(&self, _: usize, _: Option<BumpId>, _: &[Pair]) -> Option<Refusal> {
        None
    }

    async fn mark(&self, marks: impl FnOnce() -> Vec<NewMark>) -> Failed<Self> {
        let marks = marks();
        let chains = &mut *self.chains.borrow_mut();
        marks.into_iter().for_each(|mark| self.put(chains, mark));
        Failed::<Self>::new()
    }

    async fn mark_choices(&self, pairs: &[Pair]) -> Failed<Self> {
        let chains = &mut *self.chains.borrow_mut();
        pairs.iter().for_each(|pair| self.put_choice(chains, *pair));
        Failed::<Self>::new()
    }

    async fn unlock(&self, pairs: &[Pair]) {
        let chains = &mut *self.chains.borrow_mut();
        pairs.iter().for_each(|pair| chains.set_lock(pair, None));
        // If nothing comes of it, it is locked again.
        self.daemon().look_at = Some(self.now.get() + LOOK_EVERY);
    }

    async fn silence(&self, lives: &[Live]) {
        for live in lives {
            let leaving = &mut self.daemon().leaving;
            leaving.entry(live.pair()).or_default().extend(CARRIED);
            self.command(Command::Drain(live.pair()));
        }
        self.until(|| {
            let leaving = &self.daemon().leaving;
            let waits = lives.iter().any(|live| leaving.contains_key(&live.pair()));
            (!waits).then_some(())
        })
        .await;
    }

    fn end_drains(&self, pair: &Pair) {
        self.command(Command::EndDrain(*pair));
    }

    fn solicit(&self, pair: &Pair, bump: Option<BumpId>) {
        if let Some(bump) = bump {
            self.command(Command::Solicit(*pair, bump));
        }
    }

    fn expect_rates(&self, _: &[Live]) {}

    async fn ask(&self, _: usize, body: Body) -> Result<Vec<(Outcome, u64)>, Unanswered> {
        let request = self.next_request();
        let bytes = Message { request, body }.encode();
        self.command(Command::Post(Some(request), bytes));
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

    async fn sleep(&self, time: Duration) {
        let until = self.now.get() + time;
        self.until(|| self.is_time(until).then_some(())).await;
    }

    fn wake(&self, task: Task) {
        if task == Task::Confirm {
            self.daemon().look_at = Some(self.now.get());
        }
        self.changed.set(true);
    }

    fn tell(&self, news: News<'_, Live, Rule>) {
        let seen = match news {
            News::LeftFirst => Seen::LeftFirst,
            News::AskedAgain => Seen::AskedAgain,
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
            News::RuleAgain => Seen::RuleAgain,
            News::Wanted => Seen::Wanted,
            News::ToldAgain => Seen::ToldAgain,
            News::Switched { .. } | News::Kept { .. } | News::Peer { .. } | News::Fault(_) => {
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
