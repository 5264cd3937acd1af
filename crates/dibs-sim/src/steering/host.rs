//! A host: what its daemon knows, and a model of what that runs on.

use dibs_wire::FlowKey;
use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::task::Poll;

use dibs_core::Time;
use dibs_core::node::ConnSnapshot;
use dibs_settings::BumpId;
use dibs_switch::conns::{Choice, Meant, Socket, Version};
use dibs_switch::engine::entries;
use dibs_switch::engine::questions::Desk;
use dibs_switch::engine::shadows::Shadows;
use dibs_switch::engine::{self, Machine as _, Mark as NewMark};
use dibs_switch::marks::{Hand, SeenMark};
use dibs_switch::matching::{Matched, Stand};
use dibs_switch::messages::{Body, Message, Outcome};
use dibs_switch::rules::Wants;
use dibs_switch::table::{ConnTable, Saved};
use dibs_switch::tracked::Entry;

use super::chains::{Chains, Event};
use super::knocking::Ears;
use super::machine::Live;
use super::ruling::Rule;
use super::{At, Found, Mark, Task};
use crate::coverage::Seen;
use crate::world::ROUTER;

/// Wish of a task to the data path.
#[derive(Debug)]
pub(super) enum Command {
    /// A message is to be sent, for this request if somebody waits for that.
    Post(Option<u32>, Message),
    /// All connections are to be listed.
    Conns,
    /// A connection is to fall silent, and takes nothing more by bumps if it `refuses` that.
    Drain { pair: FlowKey, refuses: bool },
    /// A connection is to go on.
    EndDrain(FlowKey),
    /// A connection comes to this bump from another one, or from plain.
    Enter(FlowKey, BumpId, Option<BumpId>),
    /// The kernel is to say where a connection stands that is on this bump.
    Solicit(FlowKey, BumpId),
    /// A connection that this daemon found on this bump goes on.
    Resume(FlowKey, BumpId),
    /// The kernel is to say where these connections stand.
    Stands(BTreeSet<FlowKey>, Stands),
    /// The peer calls a connection so; none: it is over.
    Name(FlowKey, Option<FlowKey>),
}

/// Answer of the kernel, once it is there.
pub(super) type Stands = Rc<RefCell<Option<BTreeMap<FlowKey, Stand>>>>;

/// State file: it outlives the daemon.
#[derive(Debug, Default)]
pub(super) struct File {
    pub(super) choices: Vec<(FlowKey, Saved)>,
    pub(super) rules: Vec<Rule>,
    /// Bumps that the peer's rules need.
    pub(super) wants: u16,
    pub(super) matched: BTreeMap<FlowKey, Matched>,
    /// Time until which it takes nothing.
    pub(super) unable_until: Option<Time>,
    /// There is more to be saved than it has.
    pub(super) unsaved: bool,
}

/// Knowledge that dies with the daemon.
#[derive(Debug, Default)]
pub(super) struct Daemon {
    pub(super) conns: ConnTable,
    pub(super) rules: Vec<Rule>,
    /// Bumps that rules which are about to be in force need at the peer, bit n for number n.
    pub(super) coming: u16,
    pub(super) wants: Wants,
    /// The peer has a session, and answers.
    pub(super) answers: bool,
    /// Number of the last WANT.
    pub(super) sequence: u64,
    pub(super) next_request: u32,
    /// Requests, and whether their messages were sent.
    pub(super) posted: BTreeMap<u32, bool>,
    /// Requests that wait for their answers, and these.
    pub(super) asked: BTreeMap<u32, Option<Vec<(Outcome, u64)>>>,
    /// Questions of the peer that wait for their turn.
    pub(super) questions: Desk,
    /// The bumps by which something of a connection may still be under way that falls silent.
    pub(super) leaving: BTreeMap<FlowKey, BTreeSet<BumpId>>,
    /// Tasks that wait for a turn to change things: the first has it.
    pub(super) turns: VecDeque<u32>,
    pub(super) next_turn: u32,
    /// Time at which users try again to change rules; none: they do not wait.
    pub(super) change_at: Option<Time>,
    /// The session is new, and nobody has told the peer yet.
    pub(super) is_new: bool,
}

/// A host, as the tasks of its daemon see it.
#[derive(Default)]
pub(super) struct Host {
    pub(super) me: Weak<Self>,
    /// A router gives connections of the peer addresses that are not known to be the peer's.
    pub(super) strange: bool,
    /// Names it in versions.
    pub(super) own: u64,
    /// Names the other one.
    pub(super) peer: u64,
    /// Users want connections in plain whether that carries them or not.
    pub(super) forces: bool,
    /// Rules that users want, and that are not saved yet.
    pub(super) wanted: RefCell<Option<Vec<Rule>>>,
    pub(super) chains: RefCell<Chains>,
    pub(super) file: RefCell<File>,
    pub(super) daemon: RefCell<Option<Daemon>>,
    /// The highest version that was in force, by connection.
    pub(super) highest: RefCell<BTreeMap<FlowKey, Version>>,
    pub(super) now: Cell<Time>,
    /// The peer has a session, and answers.
    pub(super) reachable: Cell<bool>,
    /// Connections that are alive.
    pub(super) found: RefCell<BTreeMap<FlowKey, Found>>,
    /// The data path's connections, if anybody has asked since the last input.
    pub(super) listed: RefCell<Option<Rc<Vec<ConnSnapshot>>>>,
    pub(super) commands: RefCell<Vec<Command>>,
    /// When tasks that wait are to look again.
    pub(super) timers: RefCell<BTreeSet<Time>>,
    /// Something changed that a task may wait for.
    pub(super) changed: Cell<bool>,
    pub(super) sent: RefCell<Vec<Vec<u8>>>,
    pub(super) knocked: RefCell<Vec<Vec<u8>>>,
    /// Ears for what comes in plain.
    pub(super) ears: RefCell<Vec<Weak<Ears>>>,
    pub(super) matched: RefCell<BTreeMap<FlowKey, Matched>>,
    pub(super) shadows: RefCell<Shadows>,
    /// Tasks of the engine that are to look.
    pub(super) woken: RefCell<BTreeSet<engine::Task>>,
    /// Tasks that others began.
    pub(super) spawned: RefCell<Vec<Task>>,
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
    pub(super) fn new(
        me: &Weak<Self>,
        (own, peer): (u64, u64),
        forces: bool,
        strange: bool,
    ) -> Self {
        let shared = if strange { ROUTER.to_vec() } else { Vec::new() };
        let chains = Chains {
            shared,
            ..Chains::default()
        };
        Self {
            me: Weak::clone(me),
            chains: RefCell::new(chains),
            strange,
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

    pub(super) fn daemon(&self) -> RefMut<'_, Daemon> {
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
        self.reachable.set(answers);
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

    pub(super) fn command(&self, command: Command) {
        self.commands.borrow_mut().push(command);
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
    pub(super) fn socket(&self, pair: &FlowKey) -> Option<Socket> {
        self.found
            .borrow()
            .get(pair)
            .map(|found| found.carrying.socket)
    }

    /// Connections that are alive and speak, or will.
    pub(super) fn speaking(&self) -> Vec<Live> {
        let found = self.found.borrow();
        let speaking = { found.iter() }.filter(|(_, found)| found.speaks || found.opens());
        let speaking = speaking.filter(|(pair, _)| self.peer_of(pair).is_some());
        let live = |(pair, found): (&FlowKey, &Found)| {
            let (pair, socket) = (*pair, found.carrying.socket);
            Live(Meant { pair, socket })
        };
        speaking.map(live).collect()
    }

    pub(super) fn is_there(&self, conn: &Meant) -> bool {
        self.peer_of(&conn.pair).is_some() && self.socket(&conn.pair) == Some(conn.socket)
    }

    /// How the other end names its socket of a connection.
    pub(super) fn name_of(&self, pair: &FlowKey, socket: Socket) -> Socket {
        self.daemon().conns.get(pair).name(socket)
    }

    /// True if a connection stays on its bump because plain does not carry it, as far as a daemon knows.
    pub(super) fn is_kept(&self, pair: &FlowKey) -> bool {
        let daemon = self.daemon.borrow();
        let kept = |daemon: &Daemon| daemon.conns.get(pair).place.handed_by(Hand::Kept);
        daemon.as_ref().is_none_or(|daemon| kept(daemon).is_some())
    }

    pub(super) fn choice(&self, pair: &FlowKey) -> Option<Choice> {
        match &*self.daemon.borrow() {
            Some(daemon) => daemon.conns.get(pair).in_force(),
            None => {
                let file = self.file.borrow();
                let saved = file.choices.iter().find(|(p, _)| p == pair);
                saved.map(|(_, saved)| saved.choice)
            }
        }
    }

    pub(super) fn open(&self, pair: FlowKey, bump: Option<BumpId>, required: Option<BumpId>) {
        let mark = Mark {
            bump: required.or(bump),
            ..Mark::default()
        };
        self.kernel_mut().begin(pair, mark);
        if let Some(required) = required {
            let rule = Rule::requiring(pair, required);
            self.each_rules(|rules| rules.push(rule.clone()));
        }
    }

    pub(super) fn forget(&self, pair: &FlowKey) {
        self.chains.borrow_mut().forget(pair);
        self.each_rules(|rules| rules.retain(|rule| !rule.is_only_of(pair)));
        let file = &mut *self.file.borrow_mut();
        file.choices.retain(|(p, _)| p != pair);
        file.matched.remove(pair);
        self.highest.borrow_mut().remove(pair);
        if let Some(daemon) = &mut *self.daemon.borrow_mut() {
            daemon.conns.forget(pair);
            daemon.leaving.remove(pair);
            self.shadows.borrow_mut().remove(pair);
            if self.matched.borrow_mut().remove(pair).is_some() {
                self.command(Command::Name(*pair, None));
            }
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

    /// All entries are lost. Without a daemon nobody makes them again: what keeps those in that a daemon knew is not
    /// modelled, so they stay.
    pub(super) fn flush(&self, awake: bool, kept: impl Fn(&FlowKey) -> bool) {
        let (is_up, chains) = (self.is_up() && awake, &mut *self.chains.borrow_mut());
        let stays = |(pair, mark): &(&FlowKey, &Mark)| {
            let is_ruled = || chains.rules.iter().any(|rule| rule.means(pair));
            !is_up && (mark.chosen || kept(pair) || is_ruled())
        };
        let lost = chains.marks.iter().filter(|entry| !stays(entry));
        for pair in lost.map(|(pair, _)| *pair).collect::<Vec<_>>() {
            if chains.mark(&pair).bump.is_some() {
                chains.seen.note(Seen::MarkLost);
            }
            chains.lose(&pair);
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
        self.matched.take();
        self.shadows.take();
        self.spawned.take();
        self.woken.take();
    }

    pub(super) fn start(&self, request: u32) {
        let mut chains = self.chains.borrow_mut();
        chains
            .by_others
            .values_mut()
            .for_each(|missed| *missed = true);
        drop(chains);
        let mut daemon = Daemon {
            next_request: request,
            ..Daemon::default()
        };
        {
            let file = &mut *self.file.borrow_mut();
            for (pair, saved) in &file.choices {
                { &mut daemon.conns }.update(pair, |conn| conn.restore(saved));
            }
            daemon.rules.clone_from(&file.rules);
            daemon.wants = Wants::restored(file.wants);
            // What could not be saved goes back, until the peer tells of it.
            if std::mem::take(&mut file.unsaved) {
                self.highest.borrow_mut().clear();
            }
        }
        {
            let chains = &mut *self.chains.borrow_mut();
            chains.rules.clone_from(&daemon.rules);
            chains.answers = false;
            chains.events.clear();
        }
        daemon.change_at = Some(Time::ZERO);
        self.daemon.replace(Some(daemon));
        let matched = self.file.borrow().matched.clone();
        let live = matched.into_iter();
        for (pair, known) in live.filter(|(pair, known)| self.socket(pair) == Some(known.socket)) {
            self.match_names(pair, known).expect("a model takes all");
        }
    }

    /// Takes up what an earlier run left, and follows conntrack.
    pub(super) async fn begin(&self) {
        entries::adopt(self).await.expect("a model says all");
        for Live(Meant { pair, .. }) in self.speaking() {
            let bump = self.daemon().conns.get(&pair).place.marked();
            if let Some(bump) = bump {
                self.command(Command::Resume(pair, bump));
            }
        }
        let choices: Vec<(FlowKey, Choice)> = self.daemon().conns.choices().collect();
        // The peer may not have heard of them; it is told with the next session.
        for (pair, choice) in choices {
            self.mark_choices(&[pair]).await;
            self.solicit(&pair, choice.bump);
        }
        let me = self.me.upgrade().expect("it runs");
        let mut event = entries::Event::Lost;
        loop {
            let handled = entries::handle(&me, event).await;
            handled.expect("a model takes all");
            let next = || self.chains.borrow_mut().events.pop_front();
            let (pair, next) = self.until(next).await;
            let ends = [pair, pair.reversed()];
            let entry = |mark: Mark, told| Entry {
                mark: SeenMark {
                    told,
                    ..mark.seen()
                },
                closed: false,
                finished: false,
            };
            event = match next {
                Event::New(mark) => entries::Event::New(ends, entry(mark, mark != Mark::default())),
                Event::Update(mark) => entries::Event::Update(ends, entry(mark, true)),
                Event::Destroyed => entries::Event::Destroyed(ends, None),
            };
        }
    }

    /// Puts the choice for a connection into the kernel, if there is one that is not pending.
    pub(super) fn put_choice(&self, chains: &mut Chains, pair: FlowKey) {
        if let Some(choice) = self.choice(&pair) {
            let highest = &mut *self.highest.borrow_mut();
            let highest = highest.entry(pair).or_default();
            *highest = (*highest).max(choice.version);
            self.put(chains, NewMark::new(pair, choice.bump, true));
        }
    }

    /// The bump that another program chose for a connection meanwhile, if one did: that is not written over.
    pub(super) fn taken(&self, chains: &Chains, pair: &FlowKey) -> Option<Option<BumpId>> {
        let seen = chains.marks.get(pair)?.seen();
        let elsewhere = self.daemon().conns.get(pair).is_chosen_elsewhere(seen);
        elsewhere.then_some(seen.bump)
    }

    /// A connection's mark says this from now on, unless another program has chosen otherwise.
    pub(super) fn put(&self, chains: &mut Chains, mark: NewMark) {
        if self.taken(chains, &mark.pair).is_some() {
            self.command(Command::EndDrain(mark.pair));
            return;
        }
        self.write(chains, mark);
    }

    /// A connection's mark says this from now on, whoever has chosen otherwise.
    pub(super) fn write(&self, chains: &mut Chains, mark: NewMark) {
        let NewMark { pair, bump, .. } = mark;
        let daemon = &mut *self.daemon();
        let (new, lock) = daemon.conns.update(&pair, |conn| {
            conn.lock.enter(bump);
            let new = conn.move_to_mark(&mark, self.now.get());
            (new, conn.lock.locked())
        });
        if !chains.marks.contains_key(&pair) {
            chains.loose.insert(pair);
        }
        chains.change(&pair, |known| {
            (known.bump, known.chosen) = (bump, new.chosen)
        });
        let stays = |missed: &bool| *missed && bump.is_none();
        if !chains.by_others.get(&pair).is_some_and(stays) {
            chains.by_others.remove(&pair);
        }
        chains.set_lock(&pair, lock);
        self.wake(engine::Task::Confirm);
        self.wake(engine::Task::Shadow);
        match bump {
            None if mark.leads => {}
            None => self.command(Command::EndDrain(pair)),
            Some(bump) if new.was != Some(bump) => {
                self.command(Command::Enter(pair, bump, new.was));
            }
            Some(_) => {}
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
        self.command(Command::Post(None, message));
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
            _ => daemon.questions.push(message),
        }
    }

    pub(super) fn note_drained(&self, pair: &FlowKey, bump: BumpId) {
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

    /// True if it has a daemon.
    pub(super) fn is_up(&self) -> bool {
        self.daemon.borrow().is_some()
    }

    /// When something is due.
    pub(super) fn due(&self) -> Option<Time> {
        let daemon = self.daemon.borrow();
        let daemon = daemon.as_ref()?;
        let file = self.file.borrow();
        let dues = [
            file.unable_until.filter(|_| file.unsaved),
            { daemon.change_at }.filter(|_| self.wanted.borrow().is_some()),
            (!self.chains.borrow().events.is_empty()).then_some(Time::ZERO),
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
    }

    /// Rules that users want by now, unless they wait for other ones to be changed.
    pub(super) fn begin_changing(&self, now: Time) -> Option<Vec<Rule>> {
        let wanted = self.wanted.borrow().clone()?;
        let daemon = &mut *self.daemon();
        daemon.change_at.take_if(|at| *at <= now)?;
        Some(wanted)
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let (daemon, chains) = (self.daemon.borrow(), self.chains.borrow());
        let Some(daemon) = &*daemon else {
            return Ok(());
        };
        let highest = self.highest.borrow();
        for (pair, choice) in daemon.conns.choices() {
            let asked = daemon.conns.get(&pair).is_asked();
            let mark = chains.mark(&pair);
            if mark.locked && daemon.conns.get(&pair).lock.locked() != mark.bump {
                return Err(format!(
                    "{pair:?} is locked to where the peer did not say that it was: {mark:?}"
                ));
            }
            if highest.get(&pair).is_some_and(|h| *h > choice.version) && !asked {
                return Err(format!(
                    "the choice for {pair:?} went back to {:?}",
                    choice.version
                ));
            }
        }
        Ok(())
    }
}
