//! A host's steering: the marks of its kernel, and the part of its daemon that sets them.
//!
//! What is known of connections, the steps of a switch and the messages about it are the daemon's own
//! ([`dibs_switch`]). What carries the steps out (`daemon/src/switching/`) is a driver of its own here, for it speaks
//! to tokio there; the kernel (`dibs-policy`: the order of the chains, the guard, LOCKED) is modelled.

mod answering;
mod asking;
mod knocking;
mod locking;
pub mod ruling;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump;
use dibs_core::node::Node;
use dibs_settings::{BumpId, Level};
use dibs_switch::answering::Following;
use dibs_switch::asking::Negotiation;
use dibs_switch::conns::{Choice, Meant, Socket, Version};
use dibs_switch::knock::Numbers;
use dibs_switch::marks::SeenMark;
use dibs_switch::messages::{Message, Unanswered};
use dibs_switch::naming::Query;
use dibs_switch::table::{self, ConnTable};
use dibs_wire::FlowKey;

use crate::conn::Conn;
use crate::coverage::{Coverage, Seen};
use crate::kernel::{Kernel, Way};
use knocking::Knocking;
use ruling::{Known, Rule};

/// The bumps that a host carries.
const CARRIED: [BumpId; 3] = [bump::SCRAMBLE, bump::SHARE, bump::SEAL];
/// A connection whose kernel has sent no byte for as long sends nothing now.
const SENDS_WITHIN: Duration = Duration::from_millis(200);
/// Before the peer is asked again about what is not locked yet.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What the kernel knows of a connection (docs/switching.md).
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

/// A question that waits for its answer.
#[derive(Clone, Copy, Debug)]
struct Ask {
    query: Query,
    about: About,
    until: Time,
}

/// What a question is about.
#[derive(Clone, Copy, Debug)]
enum About {
    /// The peer's part in a switch.
    Switch(Negotiation),
    /// A choice that is in force, which the peer may not know of.
    Telling(Choice),
    /// Whether the peer has the connection on this bump, too.
    Confirm(BumpId),
    /// True if the peer hears an acknowledgement of these numbers in plain.
    Knock(Numbers),
}

/// What goes on once a connection has fallen silent.
#[derive(Clone, Copy, Debug)]
enum Waiter {
    /// We leave, and ask the peer to follow.
    Us(Negotiation),
    /// The peer is answered; it only asked whether we would follow, or we do.
    Peer(u32, Following),
}

/// A connection that falls silent.
#[derive(Debug, Default)]
struct Leaving {
    waiters: Vec<Waiter>,
    /// The bumps by which something of it may still be under way.
    bumps: BTreeSet<BumpId>,
}

/// What dies with the daemon.
#[derive(Debug, Default)]
struct Daemon {
    conns: ConnTable,
    next_request: u32,
    /// Questions of the peer that wait for their turn.
    waiting: VecDeque<Message>,
    /// The connection that is to fall silent for the question whose turn it is.
    serving: Option<FlowKey>,
    asks: BTreeMap<u32, Ask>,
    leaving: BTreeMap<FlowKey, Leaving>,
    knocking: Knocking,
    /// When peers are asked about what is not locked yet.
    look_at: Option<Time>,
    known: Known,
}

/// One host's steering.
#[derive(Debug, Default)]
pub struct Steering {
    /// Names this host in versions.
    host: u64,
    /// Names the other one.
    peer: u64,
    marks: BTreeMap<FlowKey, Mark>,
    /// The kernel's rules, in the order in which they are tried.
    rules: Vec<Rule>,
    /// The kernel has been told that the peer has a session, for those that prefer their bump.
    answers: bool,
    /// What users want the rules to be, whom no daemon has heard yet.
    pub wanted_rules: Option<Vec<Rule>>,
    /// The state file.
    saved: Vec<(FlowKey, Choice)>,
    /// The same, of rules.
    saved_rules: Vec<Rule>,
    /// The same, of what the peer's rules need.
    saved_wants: u16,
    daemon: Option<Daemon>,
    /// The state file takes nothing until then.
    unable_until: Option<Time>,
    /// There is more to be saved than it has.
    unsaved: bool,
    /// Messages sent, so that the world knows them.
    pub sent: Vec<Vec<u8>>,
    /// Users want connections in plain whether that carries them or not.
    pub forces: bool,
    /// Packets that the daemon sends by the ordinary route.
    pub knocks: Vec<Vec<u8>>,
    /// What happened.
    pub seen: Coverage,
    /// The highest version that was in force, by connection.
    highest: BTreeMap<FlowKey, Version>,
}

/// What the steering needs beside itself.
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

/// Which sockets a host's connections have: all connections, the numbers of those of the host as it sends, and the
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

    /// The socket of a connection that is alive here.
    fn socket(&self, pair: &FlowKey) -> Option<Socket> {
        let Sockets(conns, numbers, host) = self.sockets;
        let conn = &conns[*numbers.get(pair)?];
        conn.lives(host, self.kernel).then(|| conn.socket(host))
    }

    /// All that are alive.
    fn lives(&self) -> Vec<Meant> {
        let Sockets(_, numbers, _) = self.sockets;
        let live = |pair: &FlowKey| {
            let (pair, socket) = (*pair, self.socket(pair)?);
            let speaks = self.kernel.speaks(&pair);
            speaks.then_some(Meant { pair, socket })
        };
        numbers.keys().filter_map(live).collect()
    }

    /// Whether a connection is not over.
    fn is_there(&self, conn: &Meant) -> bool {
        self.socket(&conn.pair) == Some(conn.socket)
    }
}

impl Steering {
    /// Of a host where nothing was chosen.
    pub fn new(host: u64, peer: u64) -> Self {
        Self {
            host,
            peer,
            ..Self::default()
        }
    }

    /// A connection is about to be opened: what rules say of it.
    pub fn open(&mut self, pair: FlowKey, bump: Option<BumpId>, required: Option<BumpId>) {
        self.forget(&pair);
        let mark = Mark {
            bump: required.or(bump),
            ..Mark::default()
        };
        self.marks.insert(pair, mark);
        if let Some(required) = required {
            let rule = Rule::requiring(pair, required);
            for rules in self.all_rules() {
                rules.push(rule.clone());
            }
        }
    }

    /// The connection is over, and its conntrack entry and the choice for it are swept.
    pub fn forget(&mut self, pair: &FlowKey) {
        self.marks.remove(pair);
        for rules in self.all_rules() {
            rules.retain(|rule| !rule.is_only_of(pair));
        }
        self.saved.retain(|(p, _)| p != pair);
        self.highest.remove(pair);
        if let Some(daemon) = &mut self.daemon {
            daemon.conns.forget(pair);
            daemon.asks.retain(|_, ask| ask.query.conn().pair != *pair);
            daemon.leaving.remove(pair);
            daemon.knocking.forget(pair);
            daemon.serving = daemon.serving.filter(|p| p != pair);
        }
    }

    /// The kernel's mark of a connection.
    pub fn mark(&self, pair: &FlowKey) -> Mark {
        self.marks.get(pair).copied().unwrap_or_default()
    }

    fn all_rules(&mut self) -> impl Iterator<Item = &mut Vec<Rule>> {
        let known = self.daemon.as_mut().map(|daemon| &mut daemon.known.rules);
        [&mut self.rules, &mut self.saved_rules]
            .into_iter()
            .chain(known)
    }

    /// The bump that a rule of this host requires, by the kernel.
    pub fn requires(&self, pair: &FlowKey) -> Option<BumpId> {
        let requires = |rule: &&Rule| rule.level == Level::Require && rule.means(pair);
        self.rules.iter().find(requires).map(|rule| rule.bump)
    }

    /// The bump that the first of this host's rules has a connection on, by the kernel.
    pub fn ruled(&self, pair: &FlowKey) -> Option<BumpId> {
        let first = self.rules.iter().find(|rule| rule.means(pair));
        self.requires(pair).or(first.map(|rule| rule.bump))
    }

    /// The choice in force here.
    pub fn choice(&self, pair: &FlowKey) -> Option<Choice> {
        match &self.daemon {
            Some(daemon) => daemon.conns.get(pair).choice.get(),
            None => self.saved.iter().find(|(p, _)| p == pair).map(|(_, c)| *c),
        }
    }

    /// Whether a packet that came in this way gets to the local kernel: PREROUTING and INPUT.
    pub fn admits(&mut self, pair: &FlowKey, way: Way, follow: bool) -> bool {
        let required = self.requires(pair);
        let mark = self.marks.entry(*pair).or_default();
        let came = match way {
            Way::Plain => None,
            Way::Bump(bump) => Some(bump),
        };
        if mark.locked && mark.bump.is_some() && came != mark.bump {
            self.seen.note(match way {
                Way::Plain => Seen::LockedDropped,
                Way::Bump(_) => Seen::LockedElsewhere,
            });
            return false;
        }
        if required.is_some() && came != required {
            self.seen.note(match way {
                Way::Plain => Seen::RequiredDropped,
                Way::Bump(_) => Seen::RequiredElsewhere,
            });
            return false;
        }
        if came.is_some() && follow && mark.bump.is_none() && !mark.chosen {
            mark.bump = came;
            self.seen.note(Seen::Followed);
        }
        true
    }

    /// Somebody sets a mark by hand; what was chosen with the daemon stays.
    pub fn set_by_hand(&mut self, pair: FlowKey, bump: Option<BumpId>) {
        let required = self.requires(&pair).is_some();
        let mark = self.marks.entry(pair).or_default();
        if !mark.chosen && !mark.locked && !required && mark.bump != bump {
            mark.bump = bump;
            self.seen.note(Seen::MarkedByHand);
        }
    }

    /// All conntrack entries are lost; the daemon puts those of explicit choices back at once, what it moved by rules,
    /// and `kept` ones.
    pub fn flush(&mut self, kept: impl Fn(&FlowKey) -> bool) {
        let Self { rules, daemon, .. } = &*self;
        let is_kept = |pair: &FlowKey| {
            let marked = |daemon: &Daemon| daemon.conns.get(pair).is_marked();
            kept(pair)
                || daemon.as_ref().is_some_and(marked)
                || rules.iter().any(|rule| rule.means(pair))
        };
        let lost: Vec<FlowKey> = { self.marks.iter() }
            .filter(|(pair, mark)| !mark.chosen && mark.bump.is_some() && !is_kept(pair))
            .map(|(pair, _)| *pair)
            .collect();
        for pair in lost {
            self.marks.insert(pair, Mark::default());
            self.seen.note(Seen::MarkLost);
        }
    }

    /// The state file takes nothing until then: no choice can be carried out.
    pub fn unable(&mut self, until: Time) {
        self.unable_until = self.unable_until.max(Some(until));
    }

    /// The state file can be written again.
    pub fn able(&mut self, now: Time) {
        self.unable_until = self.unable_until.min(Some(now));
    }

    fn is_unable(&self, now: Time) -> bool {
        self.unable_until.is_some_and(|until| now < until)
    }

    /// The daemon is gone; marks and the state file stay.
    pub fn crash(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            if !daemon.asks.is_empty() {
                self.seen.note(Seen::CrashAsking);
            }
            if !daemon.leaving.is_empty() {
                self.seen.note(Seen::CrashLeaving);
            }
        }
    }

    /// A daemon starts, and puts in force what it finds. Its questions are numbered from `request` on,
    /// which is drawn: answers to those of the daemon before may still be under way.
    pub fn start(&mut self, at: &mut At<'_>, request: u32) {
        let mut daemon = Daemon {
            next_request: request,
            ..Daemon::default()
        };
        for (pair, choice) in &self.saved {
            { &mut daemon.conns }.update(pair, |conn| conn.choice.restore(*choice));
        }
        daemon.known = Known::restored(&self.saved_rules, self.saved_wants);
        self.rules.clone_from(&self.saved_rules);
        self.answers = false;
        // What could not be saved goes back, until the peer tells of it.
        if std::mem::take(&mut self.unsaved) {
            self.highest.clear();
        }
        // What an earlier run left.
        for (pair, mark) in &self.marks {
            let socket = at.socket(pair).unwrap_or(Socket::UNKNOWN);
            let by = { mark.bump }.and_then(|bump| daemon.ruling(pair, socket).hand_of(bump));
            daemon.conns.update(pair, |conn| {
                if mark.chosen {
                    conn.note_mark(mark.bump, true, at.now);
                }
                match mark.bump {
                    None if mark.chosen && conn.choice.get().is_none() => conn.move_to_left(at.now),
                    None => {}
                    Some(_) => conn.adopt_mark(mark.seen(), socket, by),
                }
            });
        }
        daemon.look_at = Some(at.now + LOOK_EVERY);
        self.daemon = Some(daemon);
        // The peer may not have heard of them; it is told with the next session.
        for (pair, _) in self.saved.clone() {
            self.mark_choice(at, pair);
        }
    }

    /// Changes what its daemon knows of a connection.
    fn update<R>(&mut self, pair: &FlowKey, change: impl FnOnce(&mut table::Conn) -> R) -> R {
        self.daemon().conns.update(pair, change)
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon
            .as_mut()
            .expect("a host with a node has a daemon")
    }

    /// Writes what is to outlive the daemon; false if that cannot be done.
    fn save(&mut self, now: Time) -> bool {
        let conns = &self.daemon().conns;
        let choices = conns.choices().map(|(pair, choice)| {
            let pending = false;
            (pair, Choice { pending, ..choice })
        });
        let choices: Vec<_> = choices.collect();
        let Known { rules, wants, .. } = &self.daemon().known;
        let (rules, wants) = (rules.clone(), wants.bumps());
        let able = !self.is_unable(now);
        if able {
            (self.saved, self.saved_rules, self.saved_wants) = (choices, rules, wants);
        } else {
            let known = (&self.saved, &self.saved_rules, self.saved_wants);
            self.unsaved = known != (&choices, &rules, wants);
            return false;
        }
        self.unsaved = false;
        true
    }

    fn next_request(&mut self) -> u32 {
        let request = self.daemon().next_request;
        self.daemon().next_request = request.wrapping_add(1);
        request
    }

    /// Puts the choice for a connection into the kernel, if there is one that is not pending.
    fn mark_choice(&mut self, at: &mut At<'_>, pair: FlowKey) {
        let choice = self.choice(&pair).filter(|choice| !choice.pending);
        let Some(choice) = choice else {
            return;
        };
        let highest = self.highest.entry(pair).or_default();
        *highest = (*highest).max(choice.version);
        self.write(at, pair, choice.bump, true);
        if let Some(bump) = choice.bump {
            // What it acknowledged last went another way: the data path may wait for a word of it.
            at.node.solicit(bump, pair);
        }
    }

    /// Puts a connection on a bump, or on none, by no choice.
    fn move_to(&mut self, at: &mut At<'_>, pair: FlowKey, bump: Option<BumpId>) {
        if bump.is_none() {
            self.update(&pair, |conn| conn.move_to_left(at.now));
        }
        self.write(at, pair, bump, false);
    }

    /// A connection's mark says this bump from now on, by choice if `explicit`.
    fn write(&mut self, at: &mut At<'_>, pair: FlowKey, bump: Option<BumpId>, explicit: bool) {
        let new = self.update(&pair, |conn| {
            conn.lock.enter(bump);
            conn.move_to_mark(bump, explicit, at.now)
        });
        let mark = self.marks.entry(pair).or_default();
        (mark.bump, mark.chosen) = (bump, new.chosen);
        locking::note_lock(self, &pair);
        self.daemon().look_at = Some(at.now);
        if bump.is_none() {
            end_drains(at, &pair);
        }
    }

    /// When something is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        let daemon = self.daemon.as_ref()?;
        let asks = daemon.asks.values().map(|a| a.until);
        let save = self.unable_until.filter(|_| self.unsaved);
        let tellings = daemon.conns.next_telling();
        // The connection that the others waited for may have ended.
        let serves = daemon.serving.is_none() && !daemon.waiting.is_empty();
        let serves = serves.then_some(Time::ZERO);
        let wanted = self.wanted_rules.as_ref().map(|_| Time::ZERO);
        let looks = [
            wanted,
            daemon.look_at,
            daemon.conns.next_lock(),
            daemon.next_change(),
            tellings,
            save,
            serves,
            daemon.knocking.next(),
        ];
        asks.chain(looks.into_iter().flatten()).min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, at: &mut At<'_>) {
        let now = at.now;
        if self.unsaved && !self.is_unable(now) {
            self.save(now);
        }
        let due = |d: &Daemon| {
            let late = d.asks.iter().find(|(_, a)| a.until <= now);
            late.map(|(request, _)| *request)
        };
        while let Some(request) = due(self.daemon()) {
            let ask = self.daemon().asks.remove(&request).expect("it is due");
            self.handle_answer(at, ask, Err(Unanswered::Silent));
        }
        self.tell_due(at);
        self.serve(at);
        self.go_on_knocking(at);
        if self
            .daemon()
            .conns
            .next_lock()
            .is_some_and(|due| due <= now)
        {
            locking::set_locks(self, at);
        }
        if self.daemon().look_at.is_some_and(|look| look <= now) {
            locking::let_follow(self, now);
            locking::ask_confirmations(self, at);
        }
        ruling::handle_timeout(self, at);
    }

    /// That versions in force never go back (docs/simulator.md), and that what is locked is so by both ends' word.
    ///
    /// # Errors
    /// They did.
    pub fn check(&self) -> Result<(), String> {
        let Some(daemon) = &self.daemon else {
            return Ok(());
        };
        for (pair, choice) in daemon.conns.choices() {
            let mark = self.mark(&pair);
            if mark.locked && daemon.conns.get(&pair).lock.locked() != mark.bump {
                return Err(format!(
                    "{pair:?} is locked to where the peer did not say that it was: {mark:?}"
                ));
            }
            if self.highest.get(&pair).is_some_and(|h| *h > choice.version) && !choice.pending {
                return Err(format!(
                    "the choice for {pair:?} went back to {:?}",
                    choice.version
                ));
            }
        }
        Ok(())
    }
}

fn end_drains(at: &mut At<'_>, pair: &FlowKey) {
    for bump in CARRIED {
        at.node.end_drain(bump, *pair);
    }
}
