//! The engine for switching: what is done for connections that move, in which order, and what goes on beside it.
//!
//! Decisions about one connection are made by small machines ([`Negotiation`](crate::asking::Negotiation),
//! [`Following`](crate::answering::Following), [`Query`](crate::naming::Query)). The engine orders their steps: for many
//! connections at once, for users, rules and peers. It does nothing itself. A [`Machine`] carries each step out: that
//! of the daemon with a kernel, a data path and a clock, that of the simulator with models of them. So the order that
//! is simulated is the order that ships.
//!
//! Functions wait for their machine as `async` functions do; they know no executor: a machine has [tasks] go on.
//! State is borrowed from the machine between two waits only.

use dibs_wire::FlowKey;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::node::ConnSnapshot;
use dibs_settings::{BumpId, Level};

use crate::answering::Refusal;
use crate::asking::Conclusion;
use crate::conns::{Meant, Socket};
use crate::knock::{self, Standing};
use crate::matching::{Carrying, Matched, Stand};
use crate::messages::{Body, Ground, Outcome, Switch, Unanswered};
use crate::plausible::{Hosts, Implausible};
use crate::rules::{Rule, Ruling, Wants};
use crate::table::ConnTable;
use crate::tracked::{Entry, Mend, Tracked};

pub mod asks;
pub mod choices;
pub mod ended;
pub mod entries;
mod hides;
pub mod knocks;
pub mod locks;
pub mod matches;
pub mod questions;
pub mod renumbered;
pub mod rules;
pub mod shadows;
mod strangers;
pub mod switches;
pub mod tasks;
pub mod tells;
pub mod wants;

pub use crate::marks::Mark;
pub use asks::ROUND;
use entries::{Ends, Marked};
use shadows::Shadows;

/// A live connection, as a machine knows it.
pub trait Live: Copy {
    /// Its ends and its socket here.
    fn meant(&self) -> Meant;
    /// Index of the peer that it goes to.
    fn peer(&self) -> usize;
    /// True if its socket is bound to a device, so that it cannot be steered.
    fn is_bound(&self) -> bool;
    /// True if it only waits for stray packets.
    fn is_over(&self) -> bool;

    /// Its ends.
    fn pair(&self) -> FlowKey {
        self.meant().pair
    }
}

/// A goal of connections that move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goal {
    /// The bump; none: plain.
    pub bump: Option<BumpId>,
    /// If they go to plain: why they may.
    pub ground: Ground,
}

impl From<Option<BumpId>> for Goal {
    /// To plain only where that carries them.
    fn from(bump: Option<BumpId>) -> Self {
        let ground = Ground::Proved;
        Self { bump, ground }
    }
}

/// A task of the machine that has something to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Task {
    /// Peers are told of choices, and asked again for what rules moved.
    Tell,
    /// Peers are asked to confirm where connections are.
    Confirm,
    /// Connections are locked.
    Lock,
    /// Connections are shown in plain.
    Shadow,
    /// A peer calls connections here otherwise.
    Match,
    /// Rules that prefer their bump follow the sessions.
    Sessions,
    /// Rules have changed: everything that follows them looks again, sessions included.
    Rules,
}

/// An event that users, logs or counters hear of.
#[derive(Clone, Copy, Debug)]
pub enum News<'a, L, R> {
    /// This host leaves a bump before its peer, whose kernel sends nothing.
    LeftFirst,
    /// Routers have not heard of all that a connection sent by its bump, on which it goes on for now.
    Behind,
    /// The peer knew of a later choice, and is asked again with one above that.
    AskedAgain,
    /// A switch that began here is over.
    Concluded(Conclusion),
    /// The peer claims a version that nobody can have given.
    Implausible(Implausible),
    /// A connection does not follow a SWITCH of the peer.
    Refused(Refusal),
    /// Connections follow a SWITCH of the peer, or get ready for that.
    Follows(Switch),
    /// Connections that followed it, of which nobody here knew that they would.
    Switched {
        /// The peer that asked.
        peer: usize,
        /// The bump; none: plain.
        bump: Option<BumpId>,
        /// The connections.
        conns: &'a [L],
    },
    /// Another program gave a connection this mark, which is followed.
    Marked(Marked<L>),
    /// Connections that could not follow it are put back.
    Undone(&'a [FlowKey]),
    /// A choice is given up for a rule of the peer.
    GivenUp {
        /// The peer with the rule.
        peer: usize,
        /// Its ends.
        pair: FlowKey,
        /// The connection, if it is still there.
        conn: Option<L>,
    },
    /// A choice gives way to what a rule requires.
    Overruled,
    /// A choice counts again that a rule stood against.
    ChoiceLeft,
    /// A rule moves a connection that goes elsewhere so far.
    RuleMoves,
    /// A connection is free of a rule that does not hold any more.
    RuleFrees,
    /// A connection begins in plain, because its rule waits for a session.
    RuleWaits,
    /// The peer is asked again for its part where a rule moved a connection.
    RuleAgain,
    /// Connections of a rule that does not hold any more stay on its bump, because plain does not carry them.
    Kept {
        /// The rule.
        rule: &'a R,
        /// Their number.
        count: usize,
        /// One reason.
        why: knock::Refusal,
    },
    /// A connection stays in plain that a rule would bring to a bump, because its peer knows it by another name and did not find it.
    Unfound {
        /// The connection.
        conn: &'a L,
        /// The reason.
        why: Outcome,
    },
    /// The peer's rules need other bumps here.
    Wanted,
    /// A peer whose session is new is told of choices.
    ToldAgain,
    /// Something is wrong with a peer, or by its doing.
    Peer {
        /// The peer.
        peer: usize,
        /// The fault.
        why: &'a str,
    },
    /// Something is wrong here.
    Fault(&'a str),
}

/// Connections whose marks could not be set, and why.
pub type Failed<M> = BTreeMap<FlowKey, <M as Machine>::MarkFault>;

/// Connections by their ends. For lookups alone: it has no order.
pub type Found<M> = HashMap<FlowKey, <M as Machine>::Live>;

/// News of a machine.
pub type NewsOf<'a, M> = News<'a, <M as Machine>::Live, <M as Machine>::Rule>;

/// Sockets that send packets of connections in plain, and hear those of their far ends.
#[allow(
    async_fn_in_trait,
    reason = "an engine stays on the thread of its machine"
)]
pub trait Plain {
    /// Now.
    fn now(&self) -> Time;
    /// Sends a packet of a connection; what cannot be sent is not heard.
    fn send(&self, pair: &FlowKey, packet: &[u8]);
    /// Waits for a packet that arrives in plain, but no longer than until then; what has arrived is heard before. What comes by
    /// bumps is left out.
    async fn hear(&self, until: Option<Time>) -> Option<Vec<u8>>;
}

/// A machine that the engine works on: a host's kernel, data path, state file, peers and clock.
///
/// Its functions give what the system did or knows; none decides what comes next.
#[allow(
    async_fn_in_trait,
    reason = "an engine stays on the thread of its machine"
)]
pub trait Machine {
    /// A live connection.
    type Live: Live;
    /// A rule of this host.
    type Rule: Rule<Self::Live>;
    /// Rules that hold, in the order in which they are tried.
    type Rules<'a>: Iterator<Item = &'a Self::Rule> + Clone
    where
        Self: 'a;
    /// All rules of this host.
    type Book;
    /// A fault of the system.
    type Fault: fmt::Display;
    /// A fault of the kernel with a mark; it may concern many.
    type MarkFault: fmt::Display + Clone + Into<Self::Fault>;
    /// A reason, for users, why a connection cannot move.
    type Why: fmt::Display;
    /// Sockets that send and hear packets in plain.
    type Plain: Plain + 'static;
    /// A turn to change things that peers did not ask for, until it is dropped.
    type Turn<'a>
    where
        Self: 'a;

    /// Waits for a turn.
    async fn turn(&self) -> Self::Turn<'_>;

    /// Now.
    fn now(&self) -> Time;
    /// Number of peers.
    fn peers(&self) -> usize;
    /// The peer that a connection goes to.
    fn peer_of(&self, pair: &FlowKey) -> Option<usize>;
    /// This host and a peer, as versions name them.
    fn hosts(&self, peer: usize) -> Hosts;
    /// True if this host's data path does not carry a bump: it is plain, or a device of another program.
    fn is_outside(&self, bump: Option<BumpId>) -> bool;
    /// True if this host carries a bump.
    fn carries(&self, bump: BumpId) -> bool;
    /// True if connections are locked to their bumps.
    fn locks(&self) -> bool;
    /// True if any bump is installed.
    fn is_steering(&self) -> bool;
    /// True if connections between these ends pass this host, between others.
    fn passes(&self, pair: &FlowKey) -> bool;
    /// True if a rule of this level is in force.
    fn has_rule(&self, level: Level) -> bool;
    /// Access to what is known of a peer's session: there is one, and the peer answers.
    fn answers<R>(&self, peer: usize, access: impl FnOnce(&mut bool) -> R) -> R;
    /// Looks which peers have a session and answer, by index.
    ///
    /// # Errors
    /// The system does not say.
    async fn sessions(&self) -> Result<Vec<bool>, Self::Fault>;

    /// Access to all that is known of connections.
    fn conns<R>(&self, access: impl FnOnce(&mut ConnTable) -> R) -> R;
    /// A connection beside the rules that hold.
    fn ruling<R>(
        &self,
        live: &Self::Live,
        ask: impl for<'a> FnOnce(Ruling<'a, Self::Rules<'a>, Self::Live>) -> R,
    ) -> R;
    /// Puts these rules in the place of all there are, which it returns.
    fn replace_rules(&self, rules: Self::Book) -> Self::Book;
    /// Bumps that the rules in force need at a peer, bit n for number n.
    fn rules_want(&self, peer: usize) -> u16;
    /// Bumps that these rules would need, were they in force.
    fn book_wants(&self, rules: &Self::Book, peer: usize) -> u16;
    /// Access to the bumps that rules which are about to be in force need at a peer, bit n for number n.
    fn coming<R>(&self, peer: usize, access: impl FnOnce(&mut u16) -> R) -> R;
    /// Access to what a peer's rules need here.
    fn wants<R>(&self, peer: usize, access: impl FnOnce(&mut Wants, &mut ConnTable) -> R) -> R;
    /// The WANT that says this to a peer.
    fn want(&self, bumps: u16) -> Body;
    /// The bump of a connection by its mark, as it was when the connection was found.
    fn marked(&self, live: &Self::Live) -> Option<BumpId>;
    /// True if nothing of a connection but its SYN is under way.
    fn is_opening(&self, live: &Self::Live) -> bool;

    /// Writes what is to outlive the daemon.
    ///
    /// # Errors
    /// The file cannot be written; the machine tries again by itself.
    fn save(&self) -> Result<(), Self::Fault>;
    /// Installs all bumps that are in use.
    ///
    /// # Errors
    /// The kernel does not take them.
    async fn install(&self) -> Result<(), Self::Fault>;
    /// Brings the kernel to what rules want.
    ///
    /// # Errors
    /// The kernel does not take it.
    async fn steer(&self) -> Result<(), Self::Fault>;
    /// Has the kernel go by the marks of these connections alone: what was chosen for them has no [rule of its own](ConnTable::pins) any more.
    ///
    /// # Errors
    /// The kernel does not take it.
    async fn unpin(&self, pairs: &[FlowKey]) -> Result<(), Self::Fault>;

    /// All live connections.
    ///
    /// # Errors
    /// The kernel does not say.
    async fn lives(&self) -> Result<Vec<Self::Live>, Self::Fault>;
    /// Connections of these that there are, without their marks.
    ///
    /// # Errors
    /// As of [`lives`](Self::lives).
    async fn find(&self, pairs: &[FlowKey]) -> Result<Found<Self>, Self::Fault>
    where
        Self: Sized;
    /// As [`find`](Self::find), with what the kernel's entries say of them.
    ///
    /// # Errors
    /// As of [`lives`](Self::lives).
    async fn look_up(&self, pairs: &[FlowKey]) -> Result<(Found<Self>, Tracked), Self::Fault>
    where
        Self: Sized;
    /// Open connections to this host that come from addresses of peers' routers, and that no peer is known to have: as if they were each
    /// such peer's, of those with a session.
    ///
    /// # Errors
    /// As of [`lives`](Self::lives).
    async fn strangers(&self) -> Result<Vec<Self::Live>, Self::Fault>;
    /// Connections of `known` that there are, and how this host names their sockets; of others as well, if that is no more work.
    ///
    /// # Errors
    /// As of [`lives`](Self::lives).
    async fn alive(&self, known: &[FlowKey]) -> Result<Vec<(FlowKey, Socket)>, Self::Fault>;
    /// Entry of a connection, once nobody of ours changes its mark.
    ///
    /// # Errors
    /// As of [`lives`](Self::lives).
    async fn entry(&self, pair: &FlowKey) -> Result<Option<Entry>, Self::Fault>;
    /// All entries.
    ///
    /// # Errors
    /// As of [`lives`](Self::lives).
    async fn entries(&self) -> Result<Vec<(Ends, Entry)>, Self::Fault>;
    /// Sockets, and whether neither end has begun to end them, and the entries that are on bumps: of `known`, and of others if that
    /// is no more work; or, without that, all.
    ///
    /// # Errors
    /// As of [`lives`](Self::lives).
    async fn survey(
        &self,
        known: Option<&[FlowKey]>,
    ) -> Result<(Vec<(FlowKey, bool)>, Tracked), Self::Fault>;
    /// Connections of these that a bump carries something of now, either way.
    async fn active(&self, pairs: &[FlowKey]) -> BTreeSet<FlowKey>;

    /// Reasons why connections cannot go where a user wants them, as far as this host knows, or finds out before it asks
    /// the peer for its part. Plain has to be seen to carry what goes there.
    ///
    /// # Errors
    /// The system does not say.
    async fn refused(
        &self,
        lives: &[Self::Live],
        goal: Goal,
    ) -> Result<BTreeMap<FlowKey, Self::Why>, Self::Fault>;
    /// Connections of these that rules can move to a bump.
    async fn steerable(&self, lives: &[Self::Live], bump: Option<BumpId>) -> Vec<Self::Live>;
    /// Connections of these that plain does not carry, as far as anybody can say.
    async fn uncarried(&self, lives: &[Self::Live]) -> BTreeMap<FlowKey, knock::Refusal>;
    /// Sockets for these connections in plain.
    ///
    /// # Errors
    /// The system has none.
    fn plain(&self, pairs: impl Iterator<Item = FlowKey>) -> Result<Self::Plain, Self::Fault>;
    /// Sockets that hear acknowledgements in plain, from wherever they come, that have any of the numbers that peers
    /// [show](Stand::shown).
    ///
    /// # Errors
    /// The system has none.
    fn plain_by_numbers(&self, conns: &[(FlowKey, Stand)]) -> Result<Self::Plain, Self::Fault>;
    /// Numbers and windows of connections that are on bumps, as far as the data path knows or the kernel says.
    ///
    /// # Errors
    /// The system does not say.
    async fn numbers(&self, pairs: &[FlowKey]) -> Result<BTreeMap<FlowKey, Standing>, Self::Fault>;
    /// States of connections in plain by the words of the kernel here; nothing of those of which it does not say it.
    ///
    /// # Errors
    /// The system does not say.
    async fn stands(
        &self,
        pairs: &BTreeSet<FlowKey>,
    ) -> Result<BTreeMap<FlowKey, Stand>, Self::Fault>;
    /// Sockets here of these connections, to whomever they go, and what they carry.
    ///
    /// # Errors
    /// As of [`lives`](Self::lives).
    async fn sockets(&self, pairs: &[FlowKey]) -> Result<BTreeMap<FlowKey, Carrying>, Self::Fault>;
    /// Addresses that a peer's datagrams come from.
    ///
    /// # Errors
    /// There is no data path.
    async fn addresses_of(&self, peer: usize) -> Result<BTreeSet<IpAddr>, Self::Fault>;
    /// Connections that the data path knows; none without a data path.
    async fn carried(&self) -> Option<Vec<ConnSnapshot>>;
    /// Number of bits by which this host shifts the windows of a connection's far end.
    fn window_scale(&self, live: &Self::Live) -> u8;
    /// Reason why plain cannot carry a connection, whoever listens there, if there is one.
    fn lacks_plain(&self, pair: &FlowKey) -> Option<knock::Refusal>;
    /// True if plain is to be kept open for connections that left it.
    fn keeps_plain_open(&self) -> bool;
    /// Connections that a peer calls by other addresses.
    fn matched(&self) -> Vec<FlowKey>;
    /// True if that is one of them.
    fn is_matched(&self, pair: &FlowKey) -> bool;
    /// Notes that a peer calls a connection otherwise, and tells the data path.
    ///
    /// # Errors
    /// There is no data path.
    fn match_names(&self, pair: FlowKey, known: Matched) -> Result<(), Self::Fault>;
    /// Counts [copies](crate::matching::Search::copies) of what a peer shows.
    fn note_copies(&self, copies: [u64; 2]);
    /// Access to the shadows of connections.
    fn shadows<R>(&self, access: impl FnOnce(&mut Shadows) -> R) -> R;
    /// Reason why none of these connections can follow a SWITCH to a bump.
    async fn unfit(&self, peer: usize, bump: Option<BumpId>, pairs: &[FlowKey]) -> Option<Refusal>;

    /// Sets marks, once it is the caller's turn: what they are is decided then. One that another program has set
    /// meanwhile stays.
    async fn mark(&self, marks: impl FnOnce() -> Vec<Mark>) -> Failed<Self>
    where
        Self: Sized;
    /// Has marks say what is chosen by then, where nothing is pending.
    async fn mark_choices(&self, pairs: &[FlowKey]) -> Failed<Self>
    where
        Self: Sized;
    /// Takes the marks of connections that are gone, once it is the caller's turn: which these are is decided then. One that
    /// another program has set goes, too.
    async fn clear(&self, gone: impl FnOnce() -> Vec<FlowKey>) -> Failed<Self>
    where
        Self: Sized;
    /// Notes where the kernel has a connection, by rules or because the peer began it, and has whatever keeps it there
    /// know.
    async fn note_followed(&self, ends: &Ends, bump: Option<BumpId>);
    /// Corrects entries, and has whatever keeps locks know of them; one is locked only as long as the record says so.
    ///
    /// # Errors
    /// The kernel does not take it.
    async fn mend(&self, mends: &[(FlowKey, Mend)]) -> Result<(), Self::Fault>;
    /// Takes the locks off that the record has released.
    async fn unlock(&self, pairs: &[FlowKey]);
    /// Waits until nothing that connections sent by bumps can be overtaken. Their kernels send nothing new until they
    /// are marked, or [go on](Self::end_drains). Those that are `refusing` are given no data by bumps until then, because their peers
    /// are silent already: a peer whose window has opened meanwhile sends it again.
    async fn silence(&self, lives: &[Self::Live], refusing: &BTreeSet<FlowKey>);
    /// Has a connection go on that was to fall silent.
    fn end_drains(&self, pair: &FlowKey);
    /// Has this host's kernel tell the peer's where a connection stands that has just come to a bump.
    fn solicit(&self, pair: &FlowKey, bump: Option<BumpId>);
    /// Tells the data path that a connection may come to a bump from plain: what is known of an earlier time there says nothing any more.
    fn expect(&self, pair: &FlowKey, bump: BumpId);
    /// Tells paths what connections sent in plain that come from there.
    fn expect_rates(&self, lives: &[Self::Live]);

    /// Asks a peer, and waits for the answer.
    ///
    /// # Errors
    /// There is none.
    async fn ask(&self, peer: usize, body: Body) -> Result<Vec<(Outcome, u64)>, Unanswered>;
    /// Answers a question of a peer that is not about switching.
    async fn answer_beside(&self, peer: usize, question: Body) -> Vec<(Outcome, u64)>;
    /// Waits for so long.
    async fn sleep(&self, time: Duration);
    /// Has a task of the machine look.
    fn wake(&self, task: Task);
    /// Waits until a task is to look.
    async fn woken(&self, task: Task);
    /// Has the rest of something go on by itself.
    fn spawn(&self, rest: impl Future<Output = ()> + 'static);
    /// Notes what came of something that is done again and again.
    fn note_done(&self, what: &'static str, done: Result<(), Self::Fault>);
    /// Tells whom it concerns.
    fn tell(&self, news: NewsOf<'_, Self>)
    where
        Self: Sized;
}

/// Changes what is known of one connection.
fn update<M: Machine, R>(
    m: &M,
    pair: &FlowKey,
    change: impl FnOnce(&mut crate::table::Conn) -> R,
) -> R {
    m.conns(|conns| conns.update(pair, change))
}

/// Tells of marks that could not be set.
fn warn_of<M: Machine>(m: &M, failed: &Failed<M>) {
    for fault in failed.values() {
        m.tell(News::Fault(&fault.to_string()));
    }
}

/// The first fault of marks that could not be set.
fn all_of<M: Machine>(failed: Failed<M>) -> Result<(), M::Fault> {
    let fault = failed.into_values().next();
    fault.map_or(Ok(()), |fault| Err(fault.into()))
}

/// Tells of a fault for which nothing else is to be done.
fn or_warn<M: Machine, T>(m: &M, result: Result<T, M::Fault>) -> Option<T> {
    if let Err(fault) = &result {
        m.tell(News::Fault(&format!("{fault:#}")));
    }
    result.ok()
}

/// The bump that a connection stands on, by whatever reason. It may have come to one since it was found.
pub fn stands_on<M: Machine>(m: &M, live: &M::Live) -> Option<BumpId> {
    let known = || m.conns(|conns| conns.get(&live.pair()).place.marked());
    let marked = m.marked(live).or_else(known);
    m.ruling(live, |ruling| ruling.stands_on(marked))
}
