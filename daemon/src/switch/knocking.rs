//! Finds out whether plain carries connections, before they leave their bumps for plain, and which connections peers call by
//! other addresses: a driver of [`dibs_switch::knock`], [`dibs_switch::matching`] and [`dibs_switch::shadow`], here and for peers
//! that ask.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::iter;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context as _;
use dibs_core::Time;
use dibs_core::node::ConnSnapshot;
use dibs_io::{PacketEar, PacketSender, SetupError};
use dibs_policy::sockets::{self, TcpSocket};
use dibs_settings::BumpId;
use dibs_switch::conns::{Meant, Socket};
use dibs_switch::engine::knocks::Heard;
use dibs_switch::engine::rules::Kept;
use dibs_switch::engine::{Machine as _, asks};
use dibs_switch::knock::{self, Knock, Numbers, Refusal};
use dibs_switch::matching::{self, Search, Stand};
use dibs_switch::messages::{Answer, Body, MAX_MATCHES, Named, Outcome, Unanswered};
use dibs_switch::shadow::{self, Shadow};
use dibs_wire::packet::{self, Packet};
use dibs_wire::{FlowKey, SeqNumber, readdress};
use futures_util::future::{join_all, select_all};
use nix::net::if_::if_nametoindex;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep, sleep_until};

use crate::data::Gone;
use crate::data::bumps::marks;
use crate::host::live::{Live, Matched};
use crate::host::process::{instant, now};
use crate::kernel::connections;
use crate::rulebook::state_file::SavedMatch;
use crate::switch::{Daemon, Task};

/// Time for the kernel to say where a connection stands. It says so twice a second at most.
const TOLD_WITHIN: Duration = Duration::from_millis(1500);
/// Time before the kernel is asked again.
const SOLICIT_EVERY: Duration = Duration::from_millis(600);
/// Time between two looks at how far connections have moved on bumps.
const SHOWN_EACH: Duration = Duration::from_millis(50);
/// Time between two looks at which connections are shown in plain.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Time for routers to hear of all that a connection has sent.
const LEVEL_WITHIN: Duration = Duration::from_millis(300);
/// Time between two looks at what it said.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Time after which a firewall may have lost track of a connection for which a knock was not heard.
const CATCH_UP_AFTER: Duration = Duration::from_millis(100);

/// The knocks of some connections that go on together.
type Knocks = BTreeMap<FlowKey, Knock>;

/// Knocks at one peer, for up to [`ROUND`] connections; those that plain does not carry. It knocks again as long as routers get to
/// know what went by the bump.
pub(crate) async fn knock(daemon: &Daemon, peer: usize, lives: &[Live]) -> anyhow::Result<Kept> {
    let begin = now();
    let mut refused = Kept::new();
    let mut meant = lives.to_vec();
    loop {
        let since = now();
        refused.extend(knock_once(daemon, peer, &meant).await?);
        let shadows = daemon.host.shadows.borrow();
        meant.retain(|live| {
            let not_heard = Refusal::Peer(Ok((Outcome::NotHeard, 0)));
            let why = refused.get_mut(&live.pair).filter(|why| **why == not_heard);
            let behind = shadows
                .get(&live.pair)
                .and_then(|shadow| shadow.behind(since));
            let Some((why, bytes)) = why.zip(behind) else {
                return false;
            };
            if bytes > 0 {
                *why = Refusal::Behind(bytes);
            }
            true
        });
        if meant.is_empty() || now().since(begin) >= shadow::CATCH_UP_WITHIN {
            return Ok(refused);
        }
        for live in &meant {
            refused.remove(&live.pair);
        }
    }
}

async fn knock_once(daemon: &Daemon, peer: usize, lives: &[Live]) -> anyhow::Result<Kept> {
    let pairs = lives.iter().map(|live| live.pair);
    let (exits, pairs): (Vec<FlowKey>, Vec<FlowKey>) =
        pairs.partition(|pair| daemon.host.is_by_exit(pair));
    let numbers = numbers_of(daemon, &pairs).await?;
    let unknown = pairs.iter().filter(|pair| !numbers.contains_key(pair));
    let mut refused: Kept = unknown.map(|pair| (*pair, Refusal::Unknown)).collect();
    refused.extend(exits.into_iter().map(|pair| (pair, Refusal::Exit)));
    let known = lives.iter().filter(|live| numbers.contains_key(&live.pair));
    let meant: Vec<Meant> = known.map(Meant::from).collect();
    if meant.is_empty() {
        return Ok(refused);
    }
    let plain = Plain::open(daemon, meant.iter().map(|conn| &conn.pair))?;
    ask_shadows(daemon, meant.iter().map(|conn| &conn.pair));
    let begin = now();
    let mut late = Late(Some(begin));
    let start = |conn: &Meant| (conn.pair, Knock::ask(begin, numbers[&conn.pair]));
    let mut knocks: Knocks = meant.iter().map(start).collect();
    let body = |named: &[(usize, Named)]| {
        let numbers = |index: usize| numbers[&meant[index].pair];
        let conns = named.iter().map(|(index, named)| (*named, numbers(*index)));
        Body::Knock(conns.collect())
    };
    let mut asked = std::pin::pin!(asks::ask_about(daemon, peer, &meant, body));
    let mut is_answered = false;
    loop {
        plain.send_due(&mut knocks);
        let at = now();
        let mut unheard = { knocks.iter() }
            .filter(|(_, knock)| knock.outcome(at).is_none())
            .peekable();
        if unheard.peek().is_none() {
            break;
        }
        late.show(daemon, unheard.map(|(pair, _)| pair));
        tokio::select! {
            answers = &mut asked, if !is_answered => {
                is_answered = true;
                for (conn, answer) in meant.iter().zip(answers) {
                    let knock = knocks.get_mut(&conn.pair);
                    knock.expect("each that is asked about knocks").handle_answer(answer);
                }
            }
            () = plain.hear_until_due(&mut knocks) => {}
        }
    }
    let at = now();
    for (pair, knock) in knocks {
        match knock.outcome(at) {
            Some(Ok((Outcome::Done, _))) | None => {}
            Some(answer) => drop(refused.insert(pair, Refusal::Peer(answer))),
        }
    }
    Ok(refused)
}

/// Answers to a peer that sends these acknowledgements; none for those of which the kernel here does not say
/// where they stand.
pub(crate) async fn hear(
    daemon: &Daemon,
    heard: &Heard,
) -> anyhow::Result<HashMap<FlowKey, (Outcome, u64)>> {
    let mut replies = HashMap::new();
    if heard.is_empty() {
        return Ok(replies);
    }
    let plain = Plain::open(daemon, heard.keys())?;
    ask_shadows(daemon, heard.keys());
    let bumped = heard.iter().filter(|(_, (_, is_bumped))| *is_bumped);
    let bumped: Vec<FlowKey> = bumped.map(|(pair, _)| *pair).collect();
    tell_shadows(daemon, bumped.iter(), Shadow::handle_knock);
    let numbers = numbers_of(daemon, &bumped).await?;
    let begin = now();
    let mut late = Late(Some(begin));
    let mut knocks = Knocks::new();
    for (pair, (theirs, is_bumped)) in heard {
        let own = numbers.get(pair).copied();
        // What is in plain here already has to be heard, and not to be proved.
        if own.is_some() || !is_bumped {
            knocks.insert(*pair, Knock::answer(begin, own, *theirs));
        }
    }
    loop {
        plain.send_due(&mut knocks);
        let at = now();
        replies.extend(
            { knocks.iter_mut() }.filter_map(|(pair, knock)| Some((*pair, knock.reply(at)?))),
        );
        if replies.len() == knocks.len() {
            break;
        }
        let is_unheard =
            |pair: &&FlowKey| numbers.contains_key(*pair) && !replies.contains_key(*pair);
        late.show(daemon, knocks.keys().filter(is_unheard));
        plain.hear_until_due(&mut knocks).await;
    }
    // The answer is not to wait for the last repetitions.
    tokio::task::spawn_local(async move {
        while knocks.values().any(|knock| knock.due().is_some()) {
            plain.hear_until_due(&mut knocks).await;
            plain.send_due(&mut knocks);
        }
    });
    Ok(replies)
}

/// Time at which knocks began, until it is late enough to show routers what went by the bump.
struct Late(Option<Time>);

impl Late {
    fn show<'a>(&mut self, daemon: &Daemon, unheard: impl Iterator<Item = &'a FlowKey>) {
        let is_late = |begin: &mut Time| now().since(*begin) >= CATCH_UP_AFTER;
        if self.0.take_if(is_late).is_some() {
            tell_shadows(daemon, unheard, Shadow::ask);
        }
    }
}

/// Numbers of connections that are on bumps, as far as the data path knows or the kernel says.
async fn numbers_of(
    daemon: &Daemon,
    pairs: &[FlowKey],
) -> anyhow::Result<HashMap<FlowKey, Numbers>> {
    let published = |pair: &&FlowKey| daemon.host.published.borrow().contains_key(pair);
    for pair in pairs.iter().filter(published) {
        // The connection goes on while it is knocked for, and the nat table translates nothing whose numbers are old.
        daemon.kernel.conntrack()?.loosen(pair).await?;
    }
    let begin = Instant::now();
    let mut solicited: Option<Instant> = None;
    let bumps: Vec<BumpId> = {
        let state = daemon.state.borrow();
        let installed = state.installed.keys().copied();
        installed.filter_map(|id| daemon.bumps.inside(id)).collect()
    };
    loop {
        let mut known: HashMap<FlowKey, (Time, Numbers)> = HashMap::new();
        let (_, conns) = daemon.driver.conns().await?;
        for conn in conns {
            let Some((sent_end, acked)) = conn.stands else {
                continue;
            };
            let found = (conn.last_seen, Numbers::of(sent_end, acked));
            let latest = known.entry(conn.tuple).or_insert(found);
            *latest = (*latest).max(found);
        }
        let unknown: Vec<&FlowKey> = { pairs.iter() }
            .filter(|pair| !known.contains_key(pair))
            .collect();
        if unknown.is_empty() || begin.elapsed() >= TOLD_WITHIN {
            let numbers = { pairs.iter() }.filter_map(|pair| Some((*pair, known.get(pair)?.1)));
            return Ok(numbers.collect());
        }
        if solicited.is_none_or(|at| at.elapsed() >= SOLICIT_EVERY) {
            solicited = Some(Instant::now());
            for pair in unknown {
                for bump in &bumps {
                    daemon.driver.solicit(*bump, *pair)?;
                }
            }
        }
        sleep(LOOK_EVERY).await;
    }
}

/// An ear whose packets the runtime tells of.
#[allow(unsafe_code)]
fn watched(ear: PacketEar) -> anyhow::Result<AsyncFd<PacketEar>> {
    // SAFETY: the descriptor is the ear's own from its making to its end, and the ear is the AsyncFd's from here on.
    let watched = unsafe { AsyncFd::register(ear) }.map_err(io::Error::from);
    watched.context("cannot wait for a packet socket")
}

/// Has a peer find connections in plain that it calls by other addresses. Returns what it answers, of those of which the
/// kernel here says where they stand.
pub(crate) async fn match_names(
    daemon: &Daemon,
    peer: usize,
    lives: &[Live],
) -> anyhow::Result<BTreeMap<FlowKey, Answer>> {
    let pairs = lives.iter().map(|live| live.pair).collect();
    let stands = stands_of(daemon, &pairs).await?;
    if stands.is_empty() {
        return Ok(BTreeMap::new());
    }
    let conns: Vec<(FlowKey, Stand)> = stands.iter().map(|(pair, at)| (*pair, *at)).collect();
    let ask = async |conns: &[(FlowKey, Stand)]| -> Vec<Answer> {
        match daemon.rpc.ask(peer, Body::Match(conns.to_vec())).await {
            Ok(outcomes) => { outcomes.into_iter().map(Ok) }
                .chain(iter::repeat(Err(Unanswered::Silent)))
                .take(conns.len())
                .collect(),
            Err(error) => vec![Err(error); conns.len()],
        }
    };
    let mut asked = std::pin::pin!(join_all(conns.chunks(MAX_MATCHES).map(ask)));
    let senders = Senders::open(daemon, stands.keys())?;
    let begin = now();
    let show = |stand: &Stand| {
        let (seq, ack) = (SeqNumber::new(stand.seq), SeqNumber::new(stand.ack));
        Knock::ask(begin, Numbers::of(seq, ack))
    };
    let mut shows: Vec<Knock> = stands.values().map(show).collect();
    let answers = loop {
        let at = now();
        for ((pair, stand), show) in stands.iter().zip(&mut shows) {
            while show.poll_send(at).is_some() {
                senders.send(pair, &stand.shown().packet(pair));
            }
        }
        let due = shows.iter().filter_map(Knock::due).min();
        tokio::select! {
            answers = &mut asked => break answers,
            () = until(due) => {}
        }
    };
    let answers: BTreeMap<FlowKey, Answer> = { stands.keys().copied() }
        .zip(answers.into_iter().flatten())
        .collect();
    let is_found = |live: &&Live| matches!(answers.get(&live.pair), Some(Ok((Outcome::Done, _))));
    for live in lives.iter().filter(is_found) {
        let found = Found {
            pair: live.pair,
            socket: live.socket,
            stand: stands[&live.pair],
        };
        // Over the wire it has the name that it has here.
        note_match(daemon, peer, &found, live.pair)?;
    }
    daemon.save_or_warn();
    Ok(answers)
}

/// A connection of which both names are known now.
struct Found {
    pair: FlowKey,
    socket: Socket,
    /// State in plain.
    stand: Stand,
}

/// Notes a match. `theirs`: its name over the wire.
fn note_match(daemon: &Daemon, peer: usize, found: &Found, theirs: FlowKey) -> Result<(), Gone> {
    let Found {
        pair,
        socket,
        stand,
    } = *found;
    if daemon.config.daemon.keep_plain_open {
        let shadow = Shadow::new(Some(stand.into()), now());
        daemon.host.shadows.borrow_mut().insert(pair, shadow);
    }
    let known = Matched {
        peer,
        theirs,
        socket,
    };
    daemon.host.match_names(pair, known)
}

/// Answers a peer that shows these connections, which it calls so, in plain: whether one here is each of them.
pub(crate) async fn answer_match(
    daemon: &Daemon,
    peer: usize,
    conns: &[(FlowKey, Stand)],
) -> Vec<(Outcome, u64)> {
    let found = match look_for(daemon, peer, conns).await {
        Ok(found) => found,
        Err(error) => {
            daemon.warn_of_peer(peer, &format!("cannot look for its connections: {error:#}"));
            return vec![(Outcome::Failed, 0); conns.len()];
        }
    };
    let mut is_new = false;
    let mut note = |found: Result<Found, Outcome>, theirs: FlowKey| {
        let found = found?;
        is_new |= !daemon.host.matched().contains_key(&found.pair);
        note_match(daemon, peer, &found, theirs).map_err(|Gone| Outcome::Failed)
    };
    let noted = { found.into_iter() }
        .zip(conns)
        .map(|(found, (theirs, _))| note(found, theirs.reversed()));
    let outcomes = noted.map(|noted| (noted.err().unwrap_or(Outcome::Done), 0));
    let outcomes = outcomes.collect();
    if is_new {
        daemon.save_or_warn();
    }
    if is_new && daemon.is_steering() {
        daemon.events.note("steer", daemon.steer().await);
    }
    outcomes
}

/// Looks for connections that a peer shows. What comes from an address that the peer's datagrams come from, too, is
/// translated by nobody, and is looked for in vain.
async fn look_for(
    daemon: &Daemon,
    peer: usize,
    conns: &[(FlowKey, Stand)],
) -> anyhow::Result<Vec<Result<Found, Outcome>>> {
    let paths = daemon.driver.snapshot().await?.paths;
    let of_peer = paths.iter().filter(|path| path.peer == peer);
    let own: BTreeSet<IpAddr> = of_peer.map(|path| path.remote.ip()).collect();
    let is_translated = |(pair, _): &&(FlowKey, Stand)| !own.contains(&pair.src);
    let shown: Vec<(FlowKey, Stand)> = conns.iter().filter(is_translated).copied().collect();
    let mut found = match shown.is_empty() {
        true => Vec::new(),
        false => find_shown(daemon, peer, &shown).await?,
    }
    .into_iter();
    let each = |conn: &(FlowKey, Stand)| match is_translated(&conn) {
        true => found.next().expect("each that is shown is looked for"),
        false => Err(Outcome::NoConnection),
    };
    Ok(conns.iter().map(each).collect())
}

/// Connections here that a peer shows; or why there is none.
async fn find_shown(
    daemon: &Daemon,
    peer: usize,
    conns: &[(FlowKey, Stand)],
) -> anyhow::Result<Vec<Result<Found, Outcome>>> {
    let mut search = Search::new(conns.iter().map(|(_, stand)| stand.shown()).collect());
    let ears = ears_of(conns.iter().copied(), |is_v4, conns| {
        let shown: Vec<Stand> = conns.iter().map(|(_, stand)| stand.shown()).collect();
        let numbers: Vec<(u32, u32)> = shown.iter().map(|it| (it.seq, it.ack)).collect();
        let tsvals = shown.iter().filter_map(|it| Some(it.timestamps?.0));
        PacketEar::by_numbers(is_v4, &numbers, &Vec::from_iter(tsvals))
    })?;
    let bumps = bump_interfaces(daemon);
    let mut end = Instant::now() + matching::WITHIN;
    let mut is_complete = false;
    while Instant::now() < end {
        tokio::select! {
            (bytes, interface) = next_packet(&ears) => {
                let stand = Stand::read(&bytes).filter(|_| !bumps.contains(&interface));
                if let Some((pair, stand)) = stand {
                    search.handle_heard(pair, &stand);
                }
            }
            () = sleep_until(end) => {}
        }
        if !is_complete && search.is_complete() {
            // Another address may show the same.
            is_complete = true;
            end = end.min(Instant::now() + matching::GRACE);
        }
    }
    let candidates = Vec::from_iter(search.candidates());
    let is_free = |pair: &FlowKey| daemon.host.peer_of(pair).is_none_or(|known| known == peer);
    let sockets: BTreeMap<FlowKey, TcpSocket> = { sockets::find(&candidates).await?.into_iter() }
        .filter(|socket| is_free(&socket.key))
        .map(|socket| (socket.key, socket))
        .collect();
    let stands = stands_of(daemon, &sockets.keys().copied().collect()).await?;
    let find = |(index, (_, asking)): (usize, &(FlowKey, Stand))| {
        let pair = search.name(index, asking, &stands)?;
        let cookie = sockets[&pair].cookie;
        Ok(Found {
            pair,
            socket: Socket(cookie as u32),
            stand: stands[&pair],
        })
    };
    let found: Vec<Result<Found, Outcome>> = conns.iter().enumerate().map(find).collect();
    let names = found.iter().flatten().map(|found| found.pair).collect();
    let [left_out, unfit] = search.copies(&names);
    let known = daemon.host.copies.get();
    let copies = [known[0] + left_out, known[1] + unfit];
    daemon.host.copies.set(copies);
    Ok(found)
}

/// Shows connections in plain while they are on a bump, so that routers do not lose track of them: those that the two hosts call by
/// different addresses, and others while they are to go to plain.
pub(crate) async fn keep_shadows(daemon: Rc<Daemon>) {
    let mut shown = None;
    loop {
        while daemon.host.matched().is_empty() && daemon.host.shadows.borrow().is_empty() {
            daemon.wakers.woken(Task::Shadow).await;
        }
        match Shown::look(&daemon, shown.take()).await {
            Ok(Some(some)) => shown.insert(some).keep(&daemon).await,
            Ok(None) => wait_for_look(&daemon).await,
            Err(error) => {
                tracing::debug!("cannot show connections in plain: {error:#}");
                wait_for_look(&daemon).await;
            }
        }
    }
}

/// Waits until it is time to look which connections are shown in plain.
async fn wait_for_look(daemon: &Daemon) {
    // Woken where connections are moved.
    let woken = daemon.wakers.woken(Task::Shadow);
    let _ = tokio::time::timeout(LOOK_AGAIN, woken).await;
}

/// Connections that are shown in plain until the next look at which those are.
struct Shown {
    /// The connections, and by how much each shifts the windows of its far end.
    pairs: BTreeMap<FlowKey, u8>,
    plain: Plain,
}

impl Shown {
    /// Looks which are on a bump, but for those of which a rule requires that nothing be seen in plain. `before`: those until now,
    /// whose sockets stay open if they are the same.
    async fn look(daemon: &Daemon, before: Option<Self>) -> anyhow::Result<Option<Self>> {
        let is_bumped = |pair: &&FlowKey| {
            let state = daemon.state.borrow();
            let bump = state.conns.get(pair).place.marked();
            daemon.bumps.inside(bump).is_some()
        };
        let bumped: Vec<FlowKey> = {
            let (matched, shadows) = (daemon.host.matched(), daemon.host.shadows.borrow());
            let known = shadows.keys().filter(|pair| !matched.contains_key(pair));
            let known = matched.keys().chain(known);
            known.filter(is_bumped).copied().collect()
        };
        let lives = match bumped.is_empty() {
            true => HashMap::new(),
            false => connections::sockets_of(&daemon.kernel, &bumped).await?,
        };
        let (state, at) = (daemon.state.borrow(), now());
        let may_show = |live: &&Live| state.ruling(live).requirement().is_none();
        let shows: Vec<&Live> = lives.values().filter(may_show).collect();
        let shows = shows
            .iter()
            .map(|live| (live.pair, live.counts.window_scale));
        let mut pairs = BTreeMap::from_iter(shows);
        // In plain the routers see the connection itself.
        let mut shadows = daemon.host.shadows.borrow_mut();
        shadows.retain(|pair, shadow| pairs.contains_key(pair) || shadow.is_fresh(at));
        let matched = daemon.host.matched();
        let is_on_demand = |pair: &FlowKey| shadows.get(pair).is_some_and(|it| it.is_on_demand(at));
        pairs.retain(|pair, _| matched.contains_key(pair) || is_on_demand(pair));
        if pairs.is_empty() {
            return Ok(None);
        }
        if let Some(before) = before.filter(|before| before.pairs == pairs) {
            return Ok(Some(before));
        }
        let plain = Plain::open(daemon, pairs.keys())?;
        Ok(Some(Self { pairs, plain }))
    }

    /// Shows them for a while.
    async fn keep(&self, daemon: &Daemon) {
        let mut over = std::pin::pin!(wait_for_look(daemon));
        loop {
            // Without the data path nothing moves.
            let Ok((_, conns)) = daemon.driver.conns().await else {
                return;
            };
            let each = self.show(daemon, &conns);
            tokio::select! {
                () = &mut over => return,
                (bytes, interface) = next_packet(&self.plain.ears) => {
                    let heard = shadow::Numbers::read(&bytes);
                    let heard = heard.filter(|_| !self.plain.bumps.contains(&interface));
                    if let Some((pair, numbers)) = heard
                        && let Some(shadow) = daemon.host.shadows.borrow_mut().get_mut(&pair)
                    {
                        shadow.handle_heard(numbers, now());
                    }
                }
                () = sleep(each) => {}
            }
        }
    }

    /// Shows what is due. Returns the time until the next look.
    fn show(&self, daemon: &Daemon, conns: &[ConnSnapshot]) -> Duration {
        let mut latest: BTreeMap<FlowKey, &ConnSnapshot> = BTreeMap::new();
        for conn in conns
            .iter()
            .filter(|conn| self.pairs.contains_key(&conn.tuple))
        {
            let known = latest.entry(conn.tuple).or_insert(conn);
            if known.last_seen <= conn.last_seen {
                *known = conn;
            }
        }
        let (matched, at) = (daemon.host.matched(), now());
        let mut shadows = daemon.host.shadows.borrow_mut();
        let mut each = SHOWN_EACH;
        for (pair, conn) in latest {
            let shadow = shadows.entry(pair);
            let shadow = shadow.or_insert_with(|| Shadow::new(None, at));
            if let Some((given, acked)) = conn.entered {
                shadow.handle_left(shadow::Numbers { given, acked });
            }
            if shadow.is_asked(at) {
                each = LOOK_EVERY;
            } else if !matched.contains_key(&pair) {
                continue;
            }
            if let Some(((_, acked), given)) = conn.stands.zip(conn.given)
                && let Some(numbers) =
                    shadow.poll(shadow::Numbers { given, acked }, self.pairs[&pair], at)
            {
                self.plain.senders.send(&pair, &numbers.packet(&pair));
            }
        }
        each
    }
}

/// Has routers hear of all of those of these connections that are shown, which are about to go to plain.
fn ask_shadows<'a>(daemon: &Daemon, pairs: impl Iterator<Item = &'a FlowKey>) {
    let shown: Vec<&FlowKey> = pairs.filter(|pair| daemon.host.is_shown(pair)).collect();
    tell_shadows(daemon, shown.into_iter(), Shadow::ask);
}

/// Tells the shadows of these connections, which begin with that.
fn tell_shadows<'a>(
    daemon: &Daemon,
    pairs: impl Iterator<Item = &'a FlowKey>,
    tell: fn(&mut Shadow, Time),
) {
    if !daemon.config.daemon.keep_plain_open {
        return;
    }
    let (mut shadows, at) = (daemon.host.shadows.borrow_mut(), now());
    for pair in pairs {
        let shadow = shadows.entry(*pair);
        tell(shadow.or_insert_with(|| Shadow::new(None, at)), at);
    }
    daemon.wakers.wake(Task::Shadow);
}

/// Waits until the peer has shown in plain that it has all that these connections, which are silent, have sent: then routers on
/// the way have seen it, too.
pub(crate) async fn level_shadows(daemon: &Daemon, pairs: &BTreeSet<FlowKey>) {
    let is_behind = |conn: &ConnSnapshot| {
        let shadows = daemon.host.shadows.borrow();
        let shadow = shadows.get(&conn.tuple).zip(conn.stands);
        let is_level = shadow.is_none_or(|(shadow, (sent, _))| shadow.is_level(sent));
        !is_level && pairs.contains(&conn.tuple) && daemon.host.is_shown(&conn.tuple)
    };
    ask_shadows(daemon, pairs.iter());
    let end = Instant::now() + LEVEL_WITHIN;
    while Instant::now() < end && !daemon.host.shadows.borrow().is_empty() {
        // Without the data path nothing is under way.
        match daemon.driver.conns().await {
            Ok((_, conns)) if conns.iter().any(is_behind) => sleep(LOOK_EVERY).await,
            Ok(_) | Err(Gone) => return,
        }
    }
}

/// Takes up connections that peers call by other addresses, as an earlier run left them.
pub(crate) async fn restore(daemon: &Daemon, saved: &[SavedMatch]) -> anyhow::Result<()> {
    for saved in saved {
        let mut peers = daemon.config.peers.iter();
        let peer = peers.position(|peer| peer.public_key.to_string() == saved.peer);
        if let Some(peer) = peer {
            let (theirs, socket) = (saved.theirs, saved.socket);
            let known = Matched {
                peer,
                theirs,
                socket,
            };
            daemon.host.match_names(saved.conn, known)?;
        }
    }
    forget_ended(daemon).await
}

/// Forgets names of connections that ended: others may have their ends by now.
pub(crate) async fn forget_ended(daemon: &Daemon) -> anyhow::Result<()> {
    let known = daemon.host.matched().clone();
    if known.is_empty() {
        return Ok(());
    }
    let pairs: Vec<FlowKey> = known.keys().copied().collect();
    let lives = connections::sockets_of(&daemon.kernel, &pairs).await?;
    let lives_on = |pair: &FlowKey, known: &Matched| {
        let live = lives.get(pair);
        live.is_some_and(|live| live.socket == known.socket)
    };
    let mut over = known.iter().filter(|(pair, known)| !lives_on(pair, known));
    over.try_for_each(|(pair, _)| daemon.host.forget_match(pair))?;
    match daemon.host.matched().len() < known.len() {
        true => daemon.save(),
        false => Ok(()),
    }
}

/// States of connections in plain by the words of the kernel here; nothing of those of which it does not say it.
async fn stands_of(
    daemon: &Daemon,
    pairs: &BTreeSet<FlowKey>,
) -> anyhow::Result<BTreeMap<FlowKey, Stand>> {
    let mut found = BTreeMap::new();
    let conns = pairs.iter().map(|pair| (*pair, ()));
    let ears = ears_of(conns, |is_v4, conns| {
        let ports = conns.iter().map(|(pair, ())| (pair.sport, pair.dport));
        PacketEar::of_own(is_v4, &Vec::from_iter(ports))
    })?;
    let senders = Senders::open(daemon, pairs.iter())?;
    let end = Instant::now() + TOLD_WITHIN;
    while found.len() < pairs.len() && Instant::now() < end {
        for pair in pairs.iter().filter(|pair| !found.contains_key(*pair)) {
            // As the far end would send it; the kernel takes it by the loopback interface.
            for packet in matching::probes(pair) {
                senders.send(&pair.reversed(), &packet);
            }
        }
        let again = end.min(Instant::now() + SOLICIT_EVERY);
        while found.len() < pairs.len() && Instant::now() < again {
            tokio::select! {
                (bytes, _) = next_packet(&ears) => {
                    let stand = Stand::read(&bytes);
                    found.extend(stand.filter(|(pair, _)| pairs.contains(pair)));
                }
                () = sleep_until(again) => {}
            }
        }
    }
    Ok(found)
}

/// Waits until that time; without one, for ever.
async fn until(due: Option<Time>) {
    match due {
        Some(due) => sleep_until(instant(due)).await,
        None => std::future::pending().await,
    }
}

/// Ears for connections, one for each IP version among them.
fn ears_of<T>(
    conns: impl Iterator<Item = (FlowKey, T)>,
    open: impl Fn(bool, &[(FlowKey, T)]) -> Result<PacketEar, SetupError>,
) -> anyhow::Result<Vec<AsyncFd<PacketEar>>> {
    let (v4, v6): (Vec<_>, Vec<_>) = conns.partition(|(pair, _)| pair.src.is_ipv4());
    let meant = [(true, v4), (false, v6)].into_iter();
    let meant = meant.filter(|(_, conns)| !conns.is_empty());
    meant
        .map(|(is_v4, conns)| watched(open(is_v4, &conns)?))
        .collect()
}

/// The next packet that any of these hears, and its interface.
async fn next_packet(ears: &[AsyncFd<PacketEar>]) -> (Vec<u8>, u32) {
    if ears.is_empty() {
        return std::future::pending().await;
    }
    let heard = ears.iter().map(|ear| Box::pin(heard(ear)));
    select_all(heard).await.0
}

async fn heard(ear: &AsyncFd<PacketEar>) -> (Vec<u8>, u32) {
    loop {
        // Only without a runtime there is none.
        let Ok(mut ready) = ear.readable().await else {
            return std::future::pending().await;
        };
        match ready.try_io(|ear| ear.get_ref().hear()) {
            Ok(Ok(packet)) => return packet,
            // The network of an interface went down.
            Ok(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => {
                tracing::debug!("cannot hear what arrives in plain: {error}");
            }
            Ok(Err(_)) | Err(_) => {}
        }
    }
}

/// Interfaces that are bumps: what comes in by them came by no ordinary route.
fn bump_interfaces(daemon: &Daemon) -> BTreeSet<u32> {
    let index = |name: String| if_nametoindex(name.as_str()).ok();
    let name = |id: BumpId| match daemon.bumps.device_of(id) {
        Some(device) => device.to_owned(),
        None => id.tun_name(),
    };
    let bumps = daemon.bumps.all().iter().map(|bump| name(bump.id));
    bumps.filter_map(index).collect()
}

/// Sockets that send packets in plain, for each IP version that is meant.
struct Senders {
    sockets: Vec<(bool, PacketSender)>,
    /// Connections that the nat table leads elsewhere: it takes their packets as they are sent there.
    published: BTreeMap<FlowKey, FlowKey>,
}

impl Senders {
    fn open<'a>(daemon: &Daemon, pairs: impl Iterator<Item = &'a FlowKey>) -> anyhow::Result<Self> {
        let own = marks(&daemon.config).own();
        let pairs: Vec<&FlowKey> = pairs.collect();
        let versions: BTreeSet<bool> = pairs.iter().map(|pair| pair.dst.is_ipv4()).collect();
        let open = |is_v4| Ok((is_v4, PacketSender::open(is_v4, own)?));
        let sockets: anyhow::Result<_> = versions.into_iter().map(open).collect();
        let known = daemon.host.published.borrow();
        let published = pairs.into_iter();
        let published = published.filter_map(|pair| Some((*pair, *known.get(pair)?)));
        Ok(Self {
            sockets: sockets?,
            published: published.collect(),
        })
    }

    /// Sends a packet of a connection; what cannot be sent is not heard.
    fn send(&self, pair: &FlowKey, packet: &[u8]) {
        let ends = self.published.get(pair).unwrap_or(pair);
        let (from, to, mut packet) = (ends.src, ends.dst, packet.to_vec());
        if let Ok(Packet::Tcp(segment)) = packet::parse(&packet) {
            let at = segment.tcp_at();
            readdress::segment(&mut packet, at, ends);
        }
        let mut sockets = self.sockets.iter();
        let sender = sockets.find(|(is_v4, _)| *is_v4 == to.is_ipv4());
        let (_, sender) = sender.expect("there is one for each IP version that is meant");
        if let Err(error) = sender.send(from, to, &packet) {
            tracing::debug!("cannot send an acknowledgement in plain to {to}: {error}");
        }
    }
}

/// Sockets that send acknowledgements in plain, and hear them.
struct Plain {
    senders: Senders,
    ears: Vec<AsyncFd<PacketEar>>,
    bumps: BTreeSet<u32>,
}

impl Plain {
    fn open<'a>(
        daemon: &Daemon,
        pairs: impl Iterator<Item = &'a FlowKey> + Clone,
    ) -> anyhow::Result<Self> {
        let senders = Senders::open(daemon, pairs.clone())?;
        let ears = ears_of(pairs.map(|pair| (*pair, ())), |is_v4, conns| {
            let sources: BTreeSet<IpAddr> = conns.iter().map(|(pair, ())| pair.dst).collect();
            let ports = conns.iter().map(|(pair, ())| (pair.dport, pair.sport));
            let ports: BTreeSet<(u16, u16)> = ports.collect();
            PacketEar::open(is_v4, &Vec::from_iter(sources), &Vec::from_iter(ports))
        })?;
        Ok(Self {
            senders,
            ears,
            bumps: bump_interfaces(daemon),
        })
    }

    /// Sends what is due.
    fn send_due(&self, knocks: &mut Knocks) {
        let now = now();
        for (pair, knock) in knocks {
            while let Some(own) = knock.poll_send(now) {
                for packet in knock::packets(pair, own) {
                    self.senders.send(pair, &packet);
                }
            }
        }
    }

    /// Hands over what arrives, until something is due or arrived.
    async fn hear_until_due(&self, knocks: &mut Knocks) {
        let due = knocks.values().filter_map(Knock::due).min();
        tokio::select! {
            () = until(due) => {}
            (bytes, interface) = next_packet(&self.ears) => {
                let heard = knock::read(&bytes).filter(|_| !self.bumps.contains(&interface));
                if let Some((pair, numbers)) = heard
                    && let Some(knock) = knocks.get_mut(&pair)
                {
                    knock.handle_heard(numbers, now());
                }
            }
        }
    }
}
