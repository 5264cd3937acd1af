//! What the main thread holds, and the few things that everything else is made of: saving, steering,
//! asking a peer's daemon, telling who follows the events.
//!
//! All of it runs on one thread. State is borrowed only between two waits; what must not interleave
//! takes a lock: `changes` (one request of a user at a time) or `steerer`. What peers ask is dealt with
//! without `changes`, so that two daemons that ask each other do not wait for each other.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dibs_config::{Config, Level};
use dibs_control::{Event, RuleId, RuleOrigin};
use dibs_core::node::ControlError;
use dibs_policy::conntrack::Conntrack;
use dibs_policy::{Backstop, Binding, BumpId, ClassRule, Desired, Prefix};
use dibs_switch::locks::Locks;
use tokio::sync::{Mutex, Notify, broadcast, oneshot};

use crate::bumps::{Carried, carried};
use crate::conns::{Choices, Names, Pair};
use crate::driver::{Driver, Gone};
use crate::interfaces::{Interfaces, Inventory, own_addresses};
use crate::live::{Live, Registry};
use crate::messages::{Body, Message, Outcome};
use crate::paths::Link;
use crate::rules::Rule;
use crate::startup::policy_prefix;
use crate::state::{Forward, Saved, SavedChoice, SavedRule, StateFile};
use crate::steering::{Steerer, desired};
use crate::switching::Call;

/// How long a peer's daemon has for an answer; `dibsctl` waits longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that may have a rule of their own: each costs the packets of all others a comparison.
const PINS: usize = 32;
/// The rule number of those.
const PIN: u32 = 0;
/// Events that wait for a slow follower.
const EVENTS: usize = 256;

/// The main thread's side of the daemon.
pub struct Daemon {
    /// As read at the start.
    pub config: Config,
    /// What connections can be put on.
    pub(crate) bumps: Vec<Carried>,
    /// The data path.
    pub driver: Driver,
    pub(crate) interfaces: Interfaces,
    /// Names this host in versions.
    pub(crate) host: u64,
    pub(crate) started: Instant,
    pub(crate) state: RefCell<State>,
    pub(crate) registry: RefCell<Registry>,
    /// Held while a user's request changes something.
    pub(crate) changes: Mutex<()>,
    pub(crate) steerer: Mutex<Steerer>,
    /// Held while the kernel is told of a choice or a lock.
    pub(crate) marking: Mutex<()>,
    /// What conntrack is asked by, while nobody does.
    pub(crate) conntracks: RefCell<Vec<Conntrack>>,
    /// Held while all connections are looked through, of which there may be thousands: one list at a time.
    pub(crate) looking: Mutex<()>,
    /// Held while the paths' sockets are looked after.
    pub(crate) linking: Mutex<()>,
    /// What stands when others flush the firewall. Held while a connection's mark and what the
    /// backstop knows of it change together.
    pub(crate) backstop: Mutex<Backstop>,
    /// Things that others removed and we put back.
    pub(crate) restored: Cell<u64>,
    /// Messages of peers' daemons that are none, and those that came before earlier ones were dealt with.
    pub(crate) messages_malformed: Cell<u64>,
    pub(crate) messages_dropped: Cell<u64>,
    /// Wakes who asks peers to confirm.
    pub(crate) confirmations_due: Notify,
    /// Choices that peers are still to be told, and what wakes who tells them.
    pub(crate) calls: RefCell<Vec<Call>>,
    pub(crate) calls_due: Notify,
    /// Wakes who locks.
    pub(crate) locks_due: Notify,
    /// Wakes who looks at the time of day.
    pub(crate) hours_due: Notify,
    /// Wakes who looks which peers have a session.
    pub(crate) sessions_due: Notify,
    file: StateFile,
    questions: RefCell<HashMap<u32, Question>>,
    next_request: Cell<u32>,
    next_want: Cell<u64>,
    /// The kernel is left alone from now on: nothing is steered any more.
    let_go: Cell<bool>,
    /// Why the kernel could not be brought to what is wanted the last time, and what wakes who tries again.
    amiss: RefCell<Option<String>>,
    pub(crate) amiss_noted: Notify,
    /// How often a program that steers did not come to its end.
    timeouts: Cell<u64>,
    /// As last saved.
    clock: Cell<Option<Forward>>,
    /// What was said of peers' addresses that are this host's.
    own_addresses: RefCell<Vec<String>>,
    /// What failed when it was last tried, and why.
    troubles: RefCell<BTreeMap<&'static str, String>>,
    events: broadcast::Sender<Event>,
}

/// What changes.
pub(crate) struct State {
    /// In the order in which they are tried.
    pub(crate) rules: Vec<Rule>,
    pub(crate) user_rules: Vec<SavedRule>,
    pub(crate) next_rule: RuleId,
    /// What local time is ahead of UTC, in seconds, as the kernel's rules have it.
    pub(crate) utc_offset: i32,
    pub(crate) choices: Choices,
    /// How peers name their sockets.
    pub(crate) names: Names,
    /// Which connections take nothing in plain.
    pub(crate) locks: Locks,
    /// Connections on a bump neither by choice nor by a rule of ours: by the peer's, or by the hand of
    /// another program.
    pub(crate) handed: BTreeMap<Pair, Handed>,
    /// What connections' marks are known to say, which what is decided now may be ahead of.
    pub(crate) written: BTreeMap<Pair, Written>,
    /// What other programs chose and we have not taken up yet: their bumps are in use.
    pub(crate) awaited: BTreeMap<Pair, u8>,
    /// Connections that left their bumps for plain, not by choice, a moment ago: their marks say that
    /// what still comes by a bump does not pull them back.
    pub(crate) leaving: BTreeMap<Pair, Instant>,
    /// Connections that a peer moves to a bump, until the kernel knows: what it sent before is still to
    /// come in plain.
    pub(crate) arriving: BTreeSet<Pair>,
    /// Connections that are on their way because rules changed: their marks are ahead of our record, or
    /// behind it.
    pub(crate) moving: BTreeSet<Pair>,
    /// By index of the configuration.
    pub(crate) peers: Vec<PeerState>,
    pub(crate) inventory: Inventory,
    /// By index of the configuration's paths.
    pub(crate) links: Vec<Link>,
    /// Of this host, as far as steered connections may use them.
    pub(crate) addresses: Vec<IpAddr>,
    /// Bumps that are installed, with the number of sweeps that found no use for them.
    pub(crate) installed: BTreeMap<BumpId, u32>,
    /// Connections that are on a bump without a choice: by rules, here or at the peer.
    pub(crate) followed: BTreeMap<Pair, BumpId>,
    /// Connections that passed this host and were seen to end: of the others without an entry in conntrack
    /// nobody knows.
    pub(crate) ended: BTreeSet<Pair>,
    /// Connections that have a rule of their own in the kernel, and its bump.
    pub(crate) pinned: BTreeMap<Pair, BumpId>,
    /// The rules of the file wait for the next start or SIGHUP: the user had everything removed.
    pub(crate) suspended: bool,
}

/// What we gave a connection's mark last, or took up from another program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    /// 0: none.
    pub(crate) bump: u8,
    /// It has OVERRIDE.
    pub(crate) chosen: bool,
    pub(crate) at: Instant,
}

/// See [`State::handed`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handed {
    /// Never 0.
    pub(crate) bump: u8,
    /// Who put it there.
    pub(crate) by: Hand,
}

/// Who puts connections on bumps beside choices, and rules that the daemon can follow itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hand {
    /// The peer.
    Peer,
    /// A rule that only the kernel can follow.
    Rule,
    /// Another program.
    Other,
}

/// What is known of a peer beside the node.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerState {
    /// When the session was established, in seconds since 1970.
    pub(crate) since: Option<f64>,
    /// It has a session, and answers.
    pub(crate) answers: bool,
    /// Its calls are older than its latest by so much, as far as is known, since it last had a session.
    pub(crate) outdated: Option<Duration>,
    /// Bumps that its rules use, bit n for bump n.
    pub(crate) engaged: u16,
    /// Of its latest WANT.
    pub(crate) want: u64,
    /// Our numbers of the bumps that are devices, by its numbers of them.
    pub(crate) devices: BTreeMap<u8, u8>,
    /// Sessions that it has been told all in, or is being told.
    pub(crate) told: u64,
}

struct Question {
    peer: usize,
    answer: oneshot::Sender<Vec<(Outcome, u64)>>,
}

/// What [`Daemon::steer`] did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Steered {
    /// Changes of the kernel's state. 0: everything was as wanted.
    pub(crate) steps: u64,
}

/// Why a peer's daemon gave no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unanswered {
    #[error("there is no session with it")]
    NoSession,
    #[error("its daemon did not answer within {} s", PATIENCE.as_secs())]
    Silent,
    #[error("too many messages wait for its daemon")]
    Full,
    #[error("the data path has ended")]
    Ended,
    #[error("its daemon did not answer for others, and was not asked for it")]
    NotAsked,
}

impl From<Gone> for Unanswered {
    fn from(_: Gone) -> Self {
        Self::Ended
    }
}

impl From<ControlError> for Unanswered {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::NoSession => Self::NoSession,
            ControlError::TooMany => Self::Full,
            ControlError::UnknownPeer | ControlError::TooLong => {
                panic!("messages are short and for known peers: {error}")
            }
        }
    }
}

/// Seconds since 1970.
pub(crate) fn wall() -> f64 {
    since_1970().as_secs_f64()
}

/// By the host's clock.
pub(crate) fn since_1970() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}

impl State {
    /// The rules in force, whatever the time of day.
    pub(crate) fn rules_in_force(&self) -> impl Iterator<Item = &Rule> {
        let suspended = self.suspended;
        let active = move |rule: &&Rule| !(suspended && rule.origin == RuleOrigin::Config);
        self.rules.iter().filter(active)
    }

    /// The rules that hold now.
    pub(crate) fn active_rules(&self) -> impl Iterator<Item = &Rule> {
        self.rules_in_force().filter(|rule| rule.holds)
    }

    /// The rule that requires its bump of a connection, if one does.
    pub(crate) fn requirement(&self, live: &Live) -> Option<&Rule> {
        self.active_rules()
            .find(|rule| rule.level == Level::Require && rule.means(live))
    }

    /// The rule that decides over a connection for which nothing is chosen, if one does.
    pub(crate) fn ruling(&self, live: &Live) -> Option<&Rule> {
        let handed = self.handed.get(&live.pair);
        let by_rule = handed.filter(|handed| handed.by == Hand::Rule);
        let means = |rule: &&Rule| match rule.is_the_kernels() {
            true => by_rule.is_some_and(|handed| rule.may_have(live, handed.bump)),
            false => rule.means(live),
        };
        self.requirement(live)
            .or_else(|| self.active_rules().find(means))
    }

    /// The bump that a connection is to be on by rules now; none where the rule waits for a session.
    pub(crate) fn ruled_bump(&self, live: &Live) -> Option<u8> {
        let rule = self.ruling(live)?;
        let waits = rule.level == Level::Prefer && !self.peers[live.peer].answers;
        (!waits).then(|| rule.bump_id().get())
    }

    /// Who put a connection on a bump for which nothing is chosen; none: a rule that holds now, which
    /// needs no note.
    pub(crate) fn hand_of(&self, live: &Live, bump: u8) -> Option<Hand> {
        let of_bump = |rule: &&Rule| rule.bump_id().get() == bump && rule.means(live);
        if self.active_rules().any(|rule| of_bump(&rule)) {
            None
        } else if self.active_rules().any(|rule| rule.may_have(live, bump)) {
            Some(Hand::Rule)
        } else if self.peers[live.peer].engaged & 1 << bump != 0 {
            Some(Hand::Peer)
        } else {
            Some(Hand::Other)
        }
    }

    /// The bumps that something here or at a peer uses.
    fn in_use(&self) -> BTreeSet<BumpId> {
        let ruled = self.rules_in_force().map(Rule::bump_id);
        let chosen = self
            .choices
            .iter()
            .filter_map(|(_, choice)| BumpId::new(choice.bump));
        let followed = self.handed.values();
        let followed = followed.filter_map(|followed| BumpId::new(followed.bump));
        let awaited = self.awaited.values().filter_map(|bump| BumpId::new(*bump));
        let engaged = self.peers.iter().flat_map(|peer| bits(peer.engaged));
        let here = ruled.chain(chosen).chain(followed).chain(awaited);
        here.chain(engaged).collect()
    }
}

/// The rule of a single connection.
fn pin(pair: &Pair, bump: BumpId) -> ClassRule {
    ClassRule {
        dport: Some(pair.remote.port()),
        sport: Some(pair.local.port()),
        destination: Some(Prefix::host(pair.remote.ip())),
        source: Some(Prefix::host(pair.local.ip())),
        binding: Binding::Pinned,
        ..ClassRule::tcp(PIN, bump)
    }
}

impl State {
    /// Connections on a bump by choice that get a rule of their own: where the kernel loses the entry that
    /// holds their mark, no packet leaves in plain until it is made again.
    fn pins(&self) -> BTreeMap<Pair, BumpId> {
        let chosen = self
            .choices
            .iter()
            .filter(|(pair, choice)| !choice.pending && !self.arriving.contains(pair))
            .filter_map(|(pair, choice)| Some((pair, BumpId::new(choice.bump)?)));
        chosen.take(PINS).collect()
    }

    /// What is to be steered now.
    pub(crate) fn wish(&self, config: &Config) -> Desired {
        let mut bumps = self.in_use();
        bumps.extend(self.installed.keys());
        let pins = self.pins();
        let pins = pins.iter().map(|(pair, bump)| pin(pair, *bump));
        let offset = self.utc_offset;
        let rules = self.rules_in_force();
        let rules = rules.flat_map(move |rule| rule.kernel_classes(offset));
        let wish = desired(config, pins.chain(rules), &bumps, &self.addresses);
        let peers = config.peers.iter().zip(&self.peers);
        let sessions = peers.flat_map(|(peer, state)| {
            let net = |net| (policy_prefix(net), state.answers);
            peer.addresses.iter().map(net)
        });
        Desired {
            sessions: sessions.collect(),
            ..wish
        }
    }

    /// Whether all bumps in use are installed.
    fn is_installed(&self) -> bool {
        let mut used = self.in_use().into_iter();
        used.all(|bump| self.installed.contains_key(&bump))
    }

    /// Whether the kernel has rules of their own for other connections than it should.
    pub(crate) fn pins_are_stale(&self) -> bool {
        self.pins() != self.pinned
    }
}

fn bits(bumps: u16) -> impl Iterator<Item = BumpId> {
    (1..15)
        .filter(move |n| bumps & 1 << n != 0)
        .filter_map(BumpId::new)
}

impl Daemon {
    #[expect(clippy::too_many_arguments, reason = "called once, by the start")]
    pub(crate) fn new(
        config: Config,
        driver: Driver,
        interfaces: Interfaces,
        steerer: Steerer,
        backstop: Backstop,
        file: StateFile,
        state: State,
        host: u64,
        first_request: u32,
        clock: Option<Forward>,
    ) -> Self {
        Self {
            bumps: carried(&config),
            config,
            driver,
            interfaces,
            host,
            started: Instant::now(),
            state: RefCell::new(state),
            registry: RefCell::default(),
            changes: Mutex::new(()),
            steerer: Mutex::new(steerer),
            marking: Mutex::new(()),
            conntracks: RefCell::default(),
            looking: Mutex::new(()),
            linking: Mutex::new(()),
            backstop: Mutex::new(backstop),
            restored: Cell::new(0),
            messages_malformed: Cell::new(0),
            messages_dropped: Cell::new(0),
            confirmations_due: Notify::new(),
            calls: RefCell::default(),
            calls_due: Notify::new(),
            locks_due: Notify::new(),
            hours_due: Notify::new(),
            sessions_due: Notify::new(),
            file,
            questions: RefCell::default(),
            next_request: Cell::new(first_request),
            next_want: Cell::new(1),
            let_go: Cell::new(false),
            amiss: RefCell::default(),
            amiss_noted: Notify::new(),
            timeouts: Cell::new(0),
            clock: Cell::new(clock),
            own_addresses: RefCell::default(),
            troubles: RefCell::default(),
            events: broadcast::channel(EVENTS).0,
        }
    }

    /// The peer that an address is behind, by index: the longest prefix decides.
    pub(crate) fn peer_of(&self, address: IpAddr) -> Option<usize> {
        let lengths = self
            .config
            .peers
            .iter()
            .enumerate()
            .flat_map(|(index, peer)| peer.addresses.iter().map(move |net| (index, net)))
            .filter(|(_, net)| net.contains(&address));
        lengths
            .max_by_key(|(_, net)| net.prefix_len())
            .map(|(index, _)| index)
    }

    /// The name of a peer.
    pub(crate) fn peer_name(&self, peer: usize) -> &str {
        &self.config.peers[peer].name
    }

    /// Writes what is to outlive us.
    pub(crate) fn save(&self) -> anyhow::Result<()> {
        let state = self.state.borrow();
        let engaged = state.peers.iter().zip(&self.config.peers);
        let saved = Saved {
            next_rule: state.next_rule,
            rules: state.user_rules.clone(),
            choices: state
                .choices
                .iter()
                .map(|(conn, choice)| SavedChoice { conn, choice })
                .collect(),
            engaged: engaged
                .filter(|(state, _)| state.engaged != 0)
                .map(|(state, peer)| (peer.public_key.to_string(), state.engaged))
                .collect(),
            addresses: state.addresses.clone(),
            devices: self.device_names(),
            clock: Some(self.clock()),
            ..Saved::default()
        };
        self.file.save(&saved)
    }

    /// How late it is, for calls.
    fn clock(&self) -> Forward {
        let uptime = Duration::from_nanos(dibs_io::boottime_ns());
        let clock = Forward::now(since_1970(), uptime, self.clock.get());
        self.clock.set(Some(clock));
        clock
    }

    /// Brings the kernel to what is wanted. A bump that nothing uses any more stays, see
    /// [`retire`](Self::retire).
    pub(crate) async fn steer(&self) -> anyhow::Result<Steered> {
        let done = self.steer_once().await;
        let why = done.as_ref().err().map(|error| format!("{error:#}"));
        if let Err(error) = &done
            && matches!(
                error.downcast_ref(),
                Some(dibs_policy::Error::TimedOut { .. })
            )
        {
            self.timeouts.update(|count| count + 1);
        }
        if why.is_some() {
            self.amiss_noted.notify_one();
        }
        *self.amiss.borrow_mut() = why;
        done
    }

    /// Logs why something that is tried again and again failed, unless that is known.
    pub(crate) fn note(&self, what: &'static str, done: Result<(), impl Into<anyhow::Error>>) {
        let why = done.err().map(|error| format!("{:#}", error.into()));
        let mut troubles = self.troubles.borrow_mut();
        match why {
            None => drop(troubles.remove(what)),
            Some(why) if troubles.get(what) == Some(&why) => {}
            Some(why) => {
                tracing::warn!("cannot {what}: {why}");
                troubles.insert(what, why);
            }
        }
    }

    /// Warns of addresses that the file gives to peers and this host has, once of each while it has it.
    pub(crate) fn tell_own_addresses(&self) {
        let faults = own_addresses(&self.config, &self.state.borrow().inventory);
        let before = self.own_addresses.replace(faults.clone());
        for fault in faults.iter().filter(|fault| !before.contains(fault)) {
            tracing::warn!("{fault}");
        }
    }

    /// Why the kernel is not as it is wanted, if that is known.
    pub(crate) fn amiss(&self) -> Option<String> {
        self.amiss.borrow().clone()
    }

    async fn steer_once(&self) -> anyhow::Result<Steered> {
        let before = self.timeouts.get();
        let mut steerer = self.steerer.lock().await;
        // What kept whoever was there before us would keep us as long.
        if let Some(why) = self.amiss().filter(|_| self.timeouts.get() > before) {
            anyhow::bail!(why);
        }
        if self.let_go.get() {
            return Ok(Steered::default());
        }
        let (wish, pins, fresh) = {
            let state = self.state.borrow();
            let fresh = state.installed.is_empty() && !state.in_use().is_empty();
            (state.wish(&self.config), state.pins(), fresh)
        };
        if let Err(error) = self.backstop.lock().await.narrow(&wish).await {
            tracing::warn!("{error}");
        }
        let report = steerer.set(&wish).await?;
        let undone = u64::from(self.set_backstop(&wish).await);
        {
            let mut state = self.state.borrow_mut();
            for bump in &wish.bumps {
                state.installed.entry(bump.id).or_default();
            }
            state.pinned = pins;
        }
        // While nothing was installed, the kernel forgot what was chosen.
        if fresh {
            self.mark_all_choices().await;
        }
        Ok(Steered {
            steps: report.steps.len() as u64 + undone,
        })
    }

    /// Whether the kernel was brought to all that is wanted now.
    pub(crate) fn is_settled(&self) -> bool {
        let state = self.state.borrow();
        !state.pins_are_stale() && state.is_installed()
    }

    /// Leaves the kernel as it is from now on, whatever becomes of it: TUNs that go with the daemon are not
    /// to be missed.
    pub(crate) fn let_go(&self) {
        self.let_go.set(true);
    }

    /// Removes everything of ours from the kernel; what is still in use comes back with the next
    /// [`steer`](Self::steer), unless this is `for_good`.
    pub(crate) async fn remove_all(&self, for_good: bool) -> anyhow::Result<()> {
        let mut steerer = self.steerer.lock().await;
        self.let_go.set(for_good);
        {
            let mut state = self.state.borrow_mut();
            state.installed.clear();
            state.pinned.clear();
            state.followed.clear();
        }
        self.backstop.lock().await.remove().await?;
        steerer.cleanup(&self.config).await.map(drop)
    }

    /// Has everything that is in use installed; quick if it is.
    pub(crate) async fn install(&self) -> anyhow::Result<()> {
        let installed = self.state.borrow().is_installed();
        if !installed {
            self.steer().await?;
        }
        Ok(())
    }

    /// Removes bumps that two sweeps in a row found unused (what is on its way has arrived by then), and
    /// brings rules for single connections up to date.
    pub(crate) async fn retire(&self) -> anyhow::Result<()> {
        let due = {
            let mut state = self.state.borrow_mut();
            let used = state.in_use();
            // While a peer is asked for its part, the connection stands where it stood: on any of them.
            let asked = state.choices.iter().any(|(_, choice)| choice.pending);
            for (bump, unused) in &mut state.installed {
                *unused = match asked || used.contains(bump) {
                    true => 0,
                    false => *unused + 1,
                };
            }
            let before = state.installed.len();
            state.installed.retain(|_, unused| *unused < 2);
            state.installed.len() < before || state.pins_are_stale()
        };
        if due {
            self.steer().await?;
        }
        Ok(())
    }

    /// Tells who follows, and the log.
    pub(crate) fn tell(&self, kind: &str, text: String, fields: &[(&str, String)]) {
        tracing::info!("{text}");
        let event = Event {
            time: wall(),
            kind: kind.to_owned(),
            text,
            fields: fields
                .iter()
                .map(|(key, value)| ((*key).to_owned(), value.clone()))
                .collect(),
        };
        // Nobody may be following.
        let _ = self.events.send(event);
    }

    /// Events from now on.
    pub(crate) fn follow(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// Asks a peer's daemon, and waits for the answer.
    pub(crate) async fn ask(
        &self,
        peer: usize,
        body: Body,
    ) -> Result<Vec<(Outcome, u64)>, Unanswered> {
        let request = self.next_request.get();
        self.next_request.set(request.wrapping_add(1));
        let (answer, answered) = oneshot::channel();
        self.questions
            .borrow_mut()
            .insert(request, Question { peer, answer });
        let asked = async {
            self.post(peer, Message { request, body }).await?;
            match tokio::time::timeout(PATIENCE, answered).await {
                Ok(Ok(outcomes)) => Ok(outcomes),
                _ => Err(Unanswered::Silent),
            }
        };
        let answer = asked.await;
        self.questions.borrow_mut().remove(&request);
        answer
    }

    /// Sends a message to a peer's daemon.
    pub(crate) async fn post(&self, peer: usize, message: Message) -> Result<(), Unanswered> {
        let sent = self.driver.send_control(peer, message.encode()).await?;
        sent.map_err(Unanswered::from)
    }

    /// Hands an answer to whoever asked.
    pub(crate) fn answered(&self, peer: usize, request: u32, outcomes: Vec<(Outcome, u64)>) {
        let mut questions = self.questions.borrow_mut();
        if questions.get(&request).is_some_and(|q| q.peer == peer) {
            let question = questions.remove(&request).expect("it was just seen");
            // Who asked may have given up.
            let _ = question.answer.send(outcomes);
        }
    }

    /// The bumps that our rules put connections of a peer into.
    pub(crate) fn wanted_of(&self, peer: usize) -> u16 {
        let state = self.state.borrow();
        let behind: Vec<_> = self.config.peers[peer]
            .addresses
            .iter()
            .map(policy_prefix)
            .collect();
        let concerns = |rule: &&Rule| {
            rule.classes.iter().any(|class| {
                class.destination.is_none_or(|to| {
                    behind
                        .iter()
                        .any(|net| net.contains(to) || to.contains(*net))
                })
            })
        };
        state
            .rules_in_force()
            .filter(concerns)
            .fold(0, |bumps, rule| bumps | 1 << rule.bump_id().get())
    }

    /// Has a peer's daemon make ready what our rules need there; waits until it has.
    pub(crate) async fn send_want(&self, peer: usize) -> Result<(), Unanswered> {
        let sequence = self.next_want.get();
        self.next_want.set(sequence + 1);
        let bumps = self.wanted_of(peer);
        let devices = self.device_names().into_iter().collect();
        let want = Body::Want {
            sequence,
            bumps,
            devices,
        };
        self.ask(peer, want).await.map(drop)
    }

    /// As [`send_want`](Self::send_want), to all peers with a session at once.
    pub(crate) async fn send_wants(&self) {
        let peers = 0..self.config.peers.len();
        let asked = peers.map(|peer| async move {
            match self.send_want(peer).await {
                // It hears of it as soon as there is a session.
                Ok(()) | Err(Unanswered::NoSession) => {}
                Err(error) => tracing::warn!(peer = self.peer_name(peer), "{error}"),
            }
        });
        futures_util::future::join_all(asked).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is the peer's doing that messages wait, or that of the trusted paths between us.
    #[test]
    fn messages_that_wait_are_no_fault_of_ours() {
        let full = Unanswered::from(ControlError::TooMany);
        assert_eq!(full, Unanswered::Full);
    }
}
