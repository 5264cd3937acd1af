//! A host's steering: the marks of its kernel, and the daemon that sets them.
//!
//! The daemon is the engine of [`dibs_switch`], as it ships, on a [`machine`] that is a model: its kernel
//! (`dibs-policy`: the order of the chains, the guard, LOCKED), its state file and its clock. Tasks of the daemon go on
//! whenever something comes in or is due.

mod chains;
mod host;
mod knocking;
pub mod machine;
pub mod ruling;
mod tasks;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Waker};

use dibs_core::Time;
use dibs_core::bump;
use dibs_core::node::Node;
use dibs_settings::BumpId;
use dibs_switch::conns::{Choice, Meant, Socket, Version};
use dibs_switch::engine::{self, Machine as _, locks, renumbered};
use dibs_switch::marks::SeenMark;
use dibs_switch::matching::{Carrying, Matched};
use dibs_switch::messages::{ANSWER_TIMEOUT, Body, Ground, Message, Named, Switch};
use dibs_wire::FlowKey;
use smoltcp::socket::tcp::State;

use crate::conn::Conn;
use crate::coverage::Coverage;
use crate::kernel::{Kernel, Way};
use host::{Command, Host};
use ruling::Rule;

/// The bumps that a host carries.
const CARRIED: [BumpId; 3] = [bump::SCRAMBLE, bump::SHARE, bump::SEAL];
/// Rounds of tasks at one time: more are a loop without end.
const MOST_ROUNDS: usize = 10_000;

/// Mark that the kernel has of a connection (docs/switching.md).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The bump that it is on, if it is on one.
    pub bump: Option<BumpId>,
    /// A user chose so: OVERRIDE.
    pub chosen: bool,
    /// Nothing of it comes in but by the bump: LOCKED.
    pub locked: bool,
}

impl Mark {
    /// As the daemon sees it.
    fn seen(self) -> SeenMark {
        SeenMark {
            bump: self.bump,
            chosen: self.chosen,
            locked: self.locked,
            carried: true,
            told: true,
        }
    }
}

/// Surroundings of the steering.
pub struct At<'a> {
    /// Now.
    pub now: Time,
    /// The daemon's data path.
    pub node: &'a mut Node,
    /// Its kernel.
    pub kernel: &'a Kernel,
    /// The sockets of its connections.
    pub sockets: Sockets<'a>,
}

/// Sockets of a host's connections: all connections, the numbers of those of the host as it sends, and the
/// host.
pub struct Sockets<'a>(pub &'a [Conn], pub &'a BTreeMap<FlowKey, usize>, pub usize);

impl<'a> At<'a> {
    /// A host with a daemon.
    pub fn new(now: Time, node: &'a mut Node, kernel: &'a Kernel, sockets: Sockets<'a>) -> Self {
        Self {
            now,
            node,
            kernel,
            sockets,
        }
    }

    /// All that are alive.
    fn found(&self) -> BTreeMap<FlowKey, Found> {
        let Sockets(conns, numbers, host) = self.sockets;
        let found = |(pair, number): (&FlowKey, &usize)| {
            let found = Found {
                carrying: conns[*number].carrying(host, self.kernel),
                speaks: self.kernel.speaks(pair),
                window_scale: self.kernel.window_scale(pair),
                state: conns[*number].state(host, self.kernel),
            };
            (*pair, found)
        };
        let found = numbers.iter().map(found);
        let is_named = |pair: &FlowKey| conns[numbers[pair]].pairs[host] == *pair;
        // A socket that listens is that of no connection (`connected` in dibs-policy's sockets.rs).
        let is_one = |found: &Found| ![State::Closed, State::Listen].contains(&found.state);
        { found.filter(|(pair, found)| is_one(found) && is_named(pair)) }.collect()
    }
}

/// A socket that is not closed, and does not listen.
#[derive(Clone, Copy, Debug)]
struct Found {
    carrying: Carrying,
    /// Socket that may still send or get something.
    speaks: bool,
    state: State,
    /// Number of bits by which it shifts the far end's windows.
    window_scale: u8,
}

impl Found {
    /// True if its handshake is not over yet.
    fn opens(&self) -> bool {
        [State::SynSent, State::SynReceived].contains(&self.state)
    }
}

/// A task of a daemon.
type Task = Pin<Box<dyn Future<Output = ()>>>;

/// One host's steering.
#[derive(Default)]
pub struct Steering {
    host: Rc<Host>,
    /// Tasks of the daemon that are not over, in the order in which they began.
    tasks: Vec<Task>,
}

impl Steering {
    /// Steering of a host where nothing was chosen. `forces`: users want connections in plain whether that carries them or not.
    /// `strange`: addresses that connections of the peer come from are not known to be its.
    pub fn new(host: u64, peer: u64, forces: bool, strange: bool) -> Self {
        Self {
            host: Rc::new_cyclic(|me| Host::new(me, (host, peer), forces, strange)),
            ..Self::default()
        }
    }

    /// A connection is about to be opened: what rules say of it.
    pub fn open(&mut self, pair: FlowKey, bump: Option<BumpId>, required: Option<BumpId>) {
        self.forget(&pair);
        self.host.open(pair, bump, required);
    }

    /// The connection is over, and its conntrack entry and the choice for it are swept.
    pub fn forget(&mut self, pair: &FlowKey) {
        self.host.forget(pair);
    }

    /// The kernel's mark of a connection.
    pub fn mark(&self, pair: &FlowKey) -> Mark {
        self.host.kernel().mark(pair)
    }

    /// The bump that a rule of this host requires, by the kernel.
    pub fn requires(&self, pair: &FlowKey) -> Option<BumpId> {
        self.host.kernel().requires(pair)
    }

    /// The bump that the first of this host's rules has a connection on, by the kernel.
    pub fn ruled(&self, pair: &FlowKey) -> Option<BumpId> {
        self.host.kernel().ruled(pair)
    }

    /// The choice in force here.
    pub fn choice(&self, pair: &FlowKey) -> Option<Choice> {
        self.host.choice(pair)
    }

    /// Users have these rules from now on, as soon as a daemon has heard of it and could save them. The kernel looks at the
    /// time of day by itself.
    pub fn want_rules(&mut self, rules: Vec<Rule>) {
        let known = &mut self.host.kernel_mut().rules;
        let users = known.iter().filter(|rule| !rule.is_of_one()).count();
        if ruling::are_turned(&rules, &known[..users]) {
            known[..users].clone_from_slice(&rules);
        }
        self.host.wanted.replace(Some(rules));
    }

    /// True if a packet that came in this way gets to the local kernel: PREROUTING and INPUT.
    pub fn admits(&mut self, pair: &FlowKey, way: Way, follow: bool) -> bool {
        self.host.kernel_mut().admits(pair, way, follow)
    }

    /// True if conntrack takes a connection's packets for valid whatever their numbers.
    pub fn takes_all(&self, pair: &FlowKey) -> bool {
        self.host.kernel().takes_all(pair)
    }

    /// Way that a packet of the local kernel takes: OUTPUT's order.
    pub fn way(&mut self, pair: &FlowKey) -> Way {
        self.host.kernel_mut().way(pair)
    }

    /// Another program sets a mark; without a daemon nobody would put it right.
    pub fn set_by_hand(&mut self, pair: FlowKey, bump: Option<BumpId>, chosen: bool) {
        if self.host.is_up() {
            self.host.kernel_mut().set_by_hand(pair, bump, chosen);
        }
    }

    /// True if the mark is another program's, of which the daemon has made nothing yet.
    pub fn is_by_others(&self, pair: &FlowKey) -> bool {
        self.host.kernel().by_others.contains_key(pair)
    }

    /// True if a connection may stay on a bump though no rule and no choice says so: plain does not carry it, or another program put
    /// it there.
    pub fn is_kept(&self, pair: &FlowKey) -> bool {
        self.host.is_kept(pair) || self.host.kernel().meddled.contains(pair)
    }

    /// True if another program took a connection to plain, and the daemon was started since and cannot know.
    pub fn is_lost(&self, pair: &FlowKey) -> bool {
        self.host.kernel().by_others.get(pair) == Some(&true)
    }

    /// All entries of conntrack are lost; without a daemon that is `awake` those stay that are `kept`.
    pub fn flush(&mut self, awake: bool, kept: impl Fn(&FlowKey) -> bool) {
        self.host.flush(awake, kept);
    }

    /// The state file takes nothing until then: no choice can be carried out.
    pub fn unable(&mut self, until: Time) {
        self.host.unable(until);
    }

    /// The state file can be written again.
    pub fn able(&mut self, now: Time) {
        self.host.able(now);
    }

    /// Messages sent since the last call, so that the world knows them.
    pub fn take_sent(&mut self) -> Vec<Vec<u8>> {
        self.host.take_sent()
    }

    /// Packets that the daemon has sent by the ordinary route since the last call.
    pub fn take_knocks(&mut self) -> Vec<Vec<u8>> {
        self.host.take_knocks()
    }

    /// Events so far.
    pub fn seen(&self) -> Coverage {
        self.host.kernel().seen
    }

    /// The daemon is gone; marks and the state file stay.
    pub fn crash(&mut self) {
        self.host.note_crash();
        self.tasks.clear();
        self.host.stop();
    }

    /// A daemon starts, and puts in force what it finds. Its questions are numbered from `request` on,
    /// which is drawn: answers to those of the daemon before may still be under way.
    pub fn start(&mut self, at: &mut At<'_>, request: u32) {
        self.host.refresh(at);
        self.host.start(request);
        let host = Rc::clone(&self.host);
        self.spawn(async move { host.begin().await });
        let host = Rc::clone(&self.host);
        self.spawn(async move { host.serve().await });
        let host = Rc::clone(&self.host);
        self.spawn(async move { host.greet().await });
        let host = Rc::clone(&self.host);
        self.spawn(async move { host.keep_pinned().await });
        engine::tasks::begin(&self.host);
        self.run(at);
    }

    /// A user moves a connection to a bump, or to plain, once it is his turn.
    pub fn choose(&mut self, at: &mut At<'_>, conn: Meant, bump: Option<BumpId>) {
        let host = Rc::clone(&self.host);
        self.spawn(async move { host.choose(conn, bump).await });
        self.run(at);
    }

    /// A message of the peer's daemon. False if it is none of ours.
    pub fn on_message(&mut self, at: &mut At<'_>, bytes: &[u8]) -> bool {
        let Ok(mut message) = Message::decode(bytes) else {
            return false;
        };
        for named in message.body.named_mut() {
            named.pair = at.node.ours(0, named.pair.reversed()).reversed();
        }
        self.host.take_message(message);
        self.run(at);
        true
    }

    /// Everything that a connection sent by a bump has arrived.
    pub fn on_drained(&mut self, at: &mut At<'_>, bump: BumpId, pair: FlowKey) {
        self.host.note_drained(&pair, bump);
        self.run(at);
    }

    /// A packet came in by the ordinary route, whatever the kernel makes of it.
    pub fn on_plain(&mut self, at: &mut At<'_>, packet: &[u8]) {
        if self.host.hear(packet) {
            self.run(at);
        }
    }

    /// The data path found that something in plain changes the numbers of a connection.
    pub fn on_renumbered(&mut self, at: &mut At<'_>, bump: BumpId, pair: FlowKey) {
        let host = Rc::clone(&self.host);
        self.spawn(async move {
            // Its state file may take nothing.
            let _ = renumbered::leave(&*host, bump, pair).await;
        });
        self.run(at);
    }

    /// Names at the peer of connections that were matched.
    pub fn matched(&self) -> BTreeMap<FlowKey, Matched> {
        self.host.matched.borrow().clone()
    }

    /// The session is new: the peer is told all that concerns it.
    pub fn on_peer_up(&mut self, at: &mut At<'_>, restarted: bool) {
        self.host.note_session(restarted);
        if restarted && self.host.is_up() {
            locks::handle_restart(&*self.host, 0);
        }
        self.look_at_sessions(at);
    }

    /// A session may stand, or not stand any more.
    pub fn look_at_sessions(&mut self, at: &mut At<'_>) {
        if self.host.is_up() {
            self.host.wake(engine::Task::Sessions);
        }
        self.run(at);
    }

    /// This host's daemon is not what it should be, and says that a choice was made, by whomever and as the latest of
    /// all.
    pub fn outbid(
        &mut self,
        at: &mut At<'_>,
        pair: FlowKey,
        socket: Socket,
        bump: Option<BumpId>,
        host: u64,
    ) {
        let named = Named {
            pair,
            socket: self.host.name_of(&pair, socket),
        };
        let version = Version {
            generation: if host == self.host.own { u64::MAX } else { 2 },
            host,
        };
        let switch = Switch {
            bump,
            explicit: true,
            ready: false,
            ground: Ground::Proved,
        };
        let body = Body::Switch {
            switch,
            conns: vec![(named, version)],
        };
        let request = self.host.next_request();
        self.host.post(Message { request, body });
        self.run(at);
    }

    /// When something is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        if !self.host.is_up() {
            return None;
        }
        self.host.due()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, at: &mut At<'_>) {
        self.run(at);
    }

    fn spawn(&mut self, task: impl Future<Output = ()> + 'static) {
        self.tasks.push(Box::pin(task));
    }

    /// Has tasks go on as far as they wait for nothing but this.
    fn run(&mut self, at: &mut At<'_>) {
        self.host.refresh(at);
        for _ in 0..MOST_ROUNDS {
            let begun = self.begin_due(at.now);
            let before = self.tasks.len();
            self.host.forget_timers();
            let cx = &mut Context::from_waker(Waker::noop());
            self.tasks
                .retain_mut(|task| task.as_mut().poll(cx).is_pending());
            let ended = self.tasks.len() < before;
            let executed = self.execute(at);
            if !(begun || ended || executed || self.host.take_changed()) {
                return;
            }
        }
        panic!("the tasks of a daemon do not come to rest");
    }

    /// Begins what is due; whether anything is.
    fn begin_due(&mut self, now: Time) -> bool {
        let before = self.tasks.len();
        let host = Rc::clone(&self.host);
        self.tasks.append(&mut host.spawned.borrow_mut());
        self.host.handle_due(now);
        if let Some(rules) = self.host.begin_changing(now) {
            self.spawn(async move { host.change_rules(rules).await });
        }
        self.tasks.len() > before
    }

    /// Carries out what tasks want of the data path; whether they want anything.
    fn execute(&mut self, at: &mut At<'_>) -> bool {
        let commands = self.host.take_commands();
        let any = !commands.is_empty();
        for command in commands {
            match command {
                Command::Post(request, mut message) => {
                    for named in message.body.named_mut() {
                        named.pair = at.node.theirs(0, named.pair);
                    }
                    let bytes = message.encode();
                    let patience = request.and_then(|_| message.body.expires(ANSWER_TIMEOUT));
                    let node = &mut *at.node;
                    let sent = node.send_control(at.now, 0, &bytes, patience).is_ok();
                    self.host.note_posted(request, sent.then_some(bytes));
                }
                Command::Conns => self.host.note_conns(at.node.conns()),
                Command::Drain { pair, refuses } => {
                    let scale = at.kernel.window_scale(&pair);
                    for bump in CARRIED {
                        at.node.drain(at.now, bump, pair, scale);
                        if refuses {
                            at.node.refuse(bump, pair);
                        }
                    }
                }
                Command::EndDrain(pair) => {
                    for bump in CARRIED {
                        at.node.end_drain(bump, pair);
                    }
                }
                Command::Enter(pair, bump, was) => at.node.enter(at.now, bump, pair, was),
                Command::Solicit(pair, bump) => at.node.solicit(bump, pair),
                Command::Resume(pair, bump) => {
                    let outstanding = at.kernel.outstanding(&pair);
                    at.node.resume(at.now, bump, pair, outstanding);
                }
                Command::Stands(pairs, stands) => {
                    let stand = |pair: FlowKey| Some((pair, at.kernel.stand(&pair, at.now)?));
                    stands.replace(Some(pairs.into_iter().filter_map(stand).collect()));
                }
                Command::Name(pair, Some(theirs)) => at.node.match_names(0, pair, theirs),
                Command::Name(pair, None) => at.node.forget_match(0, pair),
            }
        }
        any
    }

    /// That versions in force never go back (docs/simulator.md), and that what is locked is so by both ends' word.
    ///
    /// # Errors
    /// They did.
    pub fn check(&self) -> Result<(), String> {
        self.host.check()
    }
}
