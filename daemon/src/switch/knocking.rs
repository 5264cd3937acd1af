//! Finds out whether plain carries connections, before they leave their bumps for plain, and which connections peers call by
//! other addresses: a driver of [`dibs_switch::knock`] and [`dibs_switch::matching`], here and for peers that ask.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::iter;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context as _;
use dibs_core::Time;
use dibs_core::node::ConnSnapshot;
use dibs_io::{PacketEar, PacketSender};
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
use dibs_wire::{FlowKey, SeqNumber};
use futures_util::future::{join_all, select_all};
use nix::net::if_::if_nametoindex;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep, sleep_until};

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
/// Between two looks at how far connections have moved on bumps.
const SHOWN_EACH: Duration = Duration::from_millis(50);
/// Between two looks at which connections are shown in plain.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Between two looks at what it said.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The knocks of some connections that go on together.
type Knocks = BTreeMap<FlowKey, Knock>;

/// Knocks at one peer, for up to [`ROUND`] connections; those that plain does not carry.
pub(crate) async fn knock(daemon: &Daemon, peer: usize, lives: &[Live]) -> anyhow::Result<Kept> {
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
        if knocks.values().all(|knock| knock.outcome(at).is_some()) {
            break;
        }
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
    let numbers = numbers_of(daemon, &bumped).await?;
    let begin = now();
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

/// Numbers of connections that are on bumps, as far as the data path knows or the kernel says.
async fn numbers_of(
    daemon: &Daemon,
    pairs: &[FlowKey],
) -> anyhow::Result<HashMap<FlowKey, Numbers>> {
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
    let conns = Vec::from_iter(stands_of(daemon, &pairs).await?);
    let ask = async |conns: &[(FlowKey, Stand)]| -> Vec<Answer> {
        match daemon.rpc.ask(peer, Body::Match(conns.to_vec())).await {
            Ok(outcomes) => { outcomes.into_iter().map(Ok) }
                .chain(iter::repeat(Err(Unanswered::Silent)))
                .take(conns.len())
                .collect(),
            Err(error) => vec![Err(error); conns.len()],
        }
    };
    let senders = Senders::open(daemon, conns.iter().map(|(pair, _)| pair))?;
    let (begin, number) = (now(), SeqNumber::new);
    let numbers = |stand: &Stand| Numbers::of(number(stand.seq), number(stand.ack));
    let mut shows: Vec<Knock> = { conns.iter() }
        .map(|(_, stand)| Knock::ask(begin, numbers(stand)))
        .collect();
    let mut asked = std::pin::pin!(join_all(conns.chunks(MAX_MATCHES).map(ask)));
    loop {
        let at = now();
        for ((pair, stand), show) in conns.iter().zip(&mut shows) {
            while show.poll_send(at).is_some() {
                senders.send(pair, &stand.shown().packet(pair));
            }
        }
        let due = shows.iter().filter_map(Knock::due).min();
        tokio::select! {
            answers = &mut asked => {
                let named = conns.iter().map(|(pair, _)| *pair);
                let answers: BTreeMap<FlowKey, Answer> = named.zip(answers.into_iter().flatten()).collect();
                for live in lives {
                    if matches!(answers.get(&live.pair), Some(Ok((Outcome::Done, _)))) {
                        let theirs = live.pair;
                        let known = Matched { peer, theirs, socket: live.socket };
                        daemon.host.match_names(live.pair, known)?;
                        let shadow = Shadow::new(live.counts.window_scale, plain_at(&conns, &live.pair));
                        daemon.host.shadows.borrow_mut().insert(live.pair, shadow);
                    }
                }
                daemon.save_or_warn();
                daemon.wakers.wake(Task::Shadow);
                return Ok(answers);
            }
            () = until(due) => {}
        }
    }
}

/// Answers a peer that shows these connections, which it calls so, in plain: whether one here is each of them.
pub(crate) async fn answer_match(
    daemon: &Daemon,
    peer: usize,
    conns: &[(FlowKey, Stand)],
) -> Vec<(Outcome, u64)> {
    let names = find_names(daemon, peer, conns).await;
    let found = match names {
        Ok(names) => names,
        Err(error) => {
            daemon.warn_of_peer(peer, &format!("cannot look for its connections: {error:#}"));
            return vec![(Outcome::Failed, 0); conns.len()];
        }
    };
    let outcome =
        |found: &Result<_, Outcome>| (found.as_ref().err().copied().unwrap_or(Outcome::Done), 0);
    let outcomes = found.iter().map(outcome).collect();
    let mut is_new = false;
    for (found, (theirs, _)) in found.into_iter().zip(conns) {
        let Ok(Found {
            pair,
            socket,
            shadow,
        }) = found
        else {
            continue;
        };
        let known = Matched {
            peer,
            theirs: theirs.reversed(),
            socket,
        };
        daemon.host.shadows.borrow_mut().insert(pair, shadow);
        is_new |= daemon.host.matched().get(&pair) != Some(&known);
        // Without the data path nothing moves.
        let _ = daemon.host.match_names(pair, known);
    }
    if is_new {
        daemon.save_or_warn();
        daemon.wakers.wake(Task::Shadow);
        if !daemon.state.borrow().installed.is_empty() {
            daemon.events.note("steer", daemon.steer().await);
        }
    }
    outcomes
}

/// A connection here that a peer showed.
struct Found {
    pair: FlowKey,
    socket: Socket,
    shadow: Shadow,
}

/// Where a connection stood when it left plain.
fn plain_at(stands: &[(FlowKey, Stand)], pair: &FlowKey) -> Option<shadow::Numbers> {
    let (_, stand) = stands.iter().find(|(known, _)| known == pair)?;
    let (given, acked) = (SeqNumber::new(stand.seq), SeqNumber::new(stand.ack));
    Some(shadow::Numbers { given, acked })
}

/// Connections here that a peer shows; or why there is none.
async fn find_names(
    daemon: &Daemon,
    peer: usize,
    conns: &[(FlowKey, Stand)],
) -> anyhow::Result<Vec<Result<Found, Outcome>>> {
    let mut search = Search::new(conns.iter().map(|(_, stand)| stand.shown()).collect());
    let mut ears = Vec::new();
    for is_v4 in [true, false] {
        let of_version = || {
            let of_version = conns.iter().filter(|(pair, _)| pair.src.is_ipv4() == is_v4);
            of_version.map(|(_, stand)| stand.shown())
        };
        let numbers: Vec<(u32, u32)> = of_version().map(|shown| (shown.seq, shown.ack)).collect();
        let tsvals: Vec<u32> = of_version()
            .filter_map(|shown| Some(shown.timestamps?.0))
            .collect();
        if !numbers.is_empty() {
            ears.push(watched(PacketEar::by_numbers(is_v4, &numbers, &tsvals)?)?);
        }
    }
    let bumps = bump_interfaces(daemon);
    let mut end = Instant::now() + matching::WITHIN;
    let mut is_complete = false;
    while Instant::now() < end {
        tokio::select! {
            (bytes, interface) = next_packet(&ears) => {
                if let Some((pair, stand)) = Stand::read(&bytes).filter(|_| !bumps.contains(&interface)) {
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
    let found = sockets::find(&candidates).await?.into_iter();
    let is_free = |pair: &FlowKey| daemon.host.peer_of(pair).is_none_or(|known| known == peer);
    let found: BTreeMap<FlowKey, TcpSocket> = found
        .filter(|socket| is_free(&socket.key))
        .map(|socket| (socket.key, socket))
        .collect();
    let stands = stands_of(daemon, &found.keys().copied().collect()).await?;
    let listed: Vec<(FlowKey, Stand)> =
        stands.iter().map(|(pair, stand)| (*pair, *stand)).collect();
    let name = |(index, (_, asking)): (usize, &(FlowKey, Stand))| {
        let pair = search.name(index, asking, &stands)?;
        let socket = &found[&pair];
        let scale = socket
            .counts
            .as_ref()
            .map_or(0, |counts| counts.window_scale);
        Ok(Found {
            pair,
            socket: Socket(socket.cookie as u32),
            shadow: Shadow::new(scale, plain_at(&listed, &pair)),
        })
    };
    Ok(conns.iter().enumerate().map(name).collect())
}

/// Shows connections in plain that the two hosts call by different addresses while they are on a bump, so that routers do
/// not lose track of them.
pub(crate) async fn keep_shadows(daemon: Rc<Daemon>) {
    loop {
        if daemon.host.matched().is_empty() {
            daemon.wakers.woken(Task::Shadow).await;
        }
        match Shown::look(&daemon).await {
            Ok(shown) if !shown.pairs.is_empty() => shown.keep(&daemon).await,
            Ok(_) => sleep(SHOWN_EACH).await,
            Err(error) => {
                tracing::debug!("cannot show connections in plain: {error:#}");
                sleep(LOOK_AGAIN).await;
            }
        }
    }
}

/// Connections that are shown in plain until the next look at which those are.
struct Shown {
    pairs: BTreeSet<FlowKey>,
    plain: Plain,
}

impl Shown {
    /// Looks which are on a bump, but for those of which a rule requires that nothing be seen in plain.
    async fn look(daemon: &Daemon) -> anyhow::Result<Self> {
        let is_bumped = |pair: &&FlowKey| {
            let state = daemon.state.borrow();
            let bump = state.conns.get(pair).marked();
            daemon.bumps.inside(bump).is_some()
        };
        let bumped: Vec<FlowKey> = {
            let matched = daemon.host.matched();
            matched.keys().filter(is_bumped).copied().collect()
        };
        let lives = match bumped.is_empty() {
            true => HashMap::new(),
            false => connections::sockets_of(&daemon.kernel, &bumped).await?,
        };
        let state = daemon.state.borrow();
        let may_show = |live: &&Live| state.ruling(live).requirement().is_none();
        let shows: Vec<&Live> = lives.values().filter(may_show).collect();
        let pairs: BTreeSet<FlowKey> = shows.iter().map(|live| live.pair).collect();
        let mut shadows = daemon.host.shadows.borrow_mut();
        for live in shows {
            let shadow = || Shadow::new(live.counts.window_scale, None);
            shadows.entry(live.pair).or_insert_with(shadow);
        }
        // In plain the routers see the connection itself.
        shadows.retain(|pair, shadow| pairs.contains(pair) || shadow.heard_at().is_none());
        let plain = Plain::open(daemon, pairs.iter())?;
        Ok(Self { pairs, plain })
    }

    /// Shows them for a while.
    async fn keep(&self, daemon: &Daemon) {
        let end = Instant::now() + LOOK_AGAIN;
        while Instant::now() < end {
            // Without the data path nothing moves.
            let Ok((_, conns)) = daemon.driver.conns().await else {
                return;
            };
            self.show(daemon, &conns);
            tokio::select! {
                (bytes, interface) = next_packet(&self.plain.ears) => {
                    let heard = shadow::Numbers::read(&bytes);
                    let heard = heard.filter(|_| !self.plain.bumps.contains(&interface));
                    if let Some((pair, numbers)) = heard
                        && let Some(shadow) = daemon.host.shadows.borrow_mut().get_mut(&pair)
                    {
                        shadow.handle_heard(numbers, now());
                    }
                }
                () = sleep(SHOWN_EACH) => {}
            }
        }
    }

    /// Shows what is due.
    fn show(&self, daemon: &Daemon, conns: &[ConnSnapshot]) {
        let mut latest: BTreeMap<FlowKey, &ConnSnapshot> = BTreeMap::new();
        for conn in conns.iter().filter(|conn| self.pairs.contains(&conn.tuple)) {
            let known = latest.entry(conn.tuple).or_insert(conn);
            if known.last_seen <= conn.last_seen {
                *known = conn;
            }
        }
        let (mut shadows, at) = (daemon.host.shadows.borrow_mut(), now());
        for (pair, conn) in latest {
            if let Some(((_, acked), given)) = conn.stands.zip(conn.given)
                && let Some(shadow) = shadows.get_mut(&pair)
                && let Some(numbers) = shadow.poll(shadow::Numbers { given, acked }, at)
            {
                self.plain.senders.send(&pair, &numbers.packet(&pair));
            }
        }
    }
}

/// Has routers hear of all of these connections, which are about to go to plain.
fn ask_shadows<'a>(daemon: &Daemon, pairs: impl Iterator<Item = &'a FlowKey>) {
    let mut shadows = daemon.host.shadows.borrow_mut();
    for pair in pairs {
        if let Some(shadow) = shadows.get_mut(pair) {
            shadow.ask(now());
        }
    }
}

/// Takes up connections that peers call by other addresses, as an earlier run left them.
pub(crate) async fn restore(daemon: &Daemon, saved: &[SavedMatch]) -> anyhow::Result<()> {
    let sockets = sockets_of(&saved.iter().map(|saved| saved.conn).collect::<Vec<_>>()).await?;
    for saved in saved {
        let is_peer = |key: &dibs_config::PeerConfig| key.public_key.to_string() == saved.peer;
        let peer = daemon.config.peers.iter().position(is_peer);
        let lives = sockets.get(&saved.conn) == Some(&saved.socket);
        if let Some(peer) = peer.filter(|_| lives) {
            let known = Matched {
                peer,
                theirs: saved.theirs,
                socket: saved.socket,
            };
            daemon.host.match_names(saved.conn, known)?;
        }
    }
    Ok(())
}

/// Forgets names of connections that ended: others may have their ends by now.
pub(crate) async fn forget_ended(daemon: &Daemon) -> anyhow::Result<()> {
    let known: Vec<(FlowKey, Socket)> = {
        let matched = daemon.host.matched();
        let known = matched.iter();
        known.map(|(pair, known)| (*pair, known.socket)).collect()
    };
    if known.is_empty() {
        return Ok(());
    }
    let sockets = sockets_of(&known.iter().map(|(pair, _)| *pair).collect::<Vec<_>>()).await?;
    let is_over = |(pair, socket): &&(FlowKey, Socket)| sockets.get(pair) != Some(socket);
    let over: Vec<FlowKey> = known
        .iter()
        .filter(is_over)
        .map(|(pair, _)| *pair)
        .collect();
    for pair in &over {
        daemon.host.forget_match(pair)?;
    }
    match over.is_empty() {
        true => Ok(()),
        false => daemon.save(),
    }
}

async fn sockets_of(pairs: &[FlowKey]) -> Result<HashMap<FlowKey, Socket>, dibs_policy::Error> {
    let found = sockets::find(pairs).await?.into_iter();
    Ok(found
        .map(|socket| (socket.key, Socket(socket.cookie as u32)))
        .collect())
}

/// Where connections in plain stand by the words of the kernel here; nothing of those of which it does not say it.
async fn stands_of(
    daemon: &Daemon,
    pairs: &BTreeSet<FlowKey>,
) -> anyhow::Result<BTreeMap<FlowKey, Stand>> {
    let mut found = BTreeMap::new();
    let mut ears = Vec::new();
    for is_v4 in [true, false] {
        let of_version = pairs.iter().filter(|pair| pair.src.is_ipv4() == is_v4);
        let ports: Vec<(u16, u16)> = of_version.map(|pair| (pair.sport, pair.dport)).collect();
        if !ports.is_empty() {
            ears.push(watched(PacketEar::of_own(is_v4, &ports)?)?);
        }
    }
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

/// The next packet that any of these hears, and its interface.
async fn next_packet(ears: &[AsyncFd<PacketEar>]) -> (Vec<u8>, u32) {
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
struct Senders(Vec<(bool, PacketSender)>);

impl Senders {
    fn open<'a>(daemon: &Daemon, pairs: impl Iterator<Item = &'a FlowKey>) -> anyhow::Result<Self> {
        let own = marks(&daemon.config).own();
        let versions: BTreeSet<bool> = pairs.map(|pair| pair.dst.is_ipv4()).collect();
        let open = |is_v4| Ok((is_v4, PacketSender::open(is_v4, own)?));
        let senders: anyhow::Result<_> = versions.into_iter().map(open).collect();
        Ok(Self(senders?))
    }

    /// Sends a packet of a connection; what cannot be sent is not heard.
    fn send(&self, pair: &FlowKey, packet: &[u8]) {
        let (from, to) = (pair.src, pair.dst);
        let sender = self.0.iter().find(|(is_v4, _)| *is_v4 == to.is_ipv4());
        let (_, sender) = sender.expect("there is one for each IP version that is meant");
        if let Err(error) = sender.send(from, to, packet) {
            tracing::debug!("cannot send an acknowledgement in plain to {to}: {error}");
        }
    }
}

/// Addresses that acknowledgements come from, and their ports (source, destination).
type Listened = (BTreeSet<IpAddr>, BTreeSet<(u16, u16)>);

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
        let mut heard: BTreeMap<bool, Listened> = BTreeMap::new();
        for pair in pairs {
            let (sources, ports) = heard.entry(pair.dst.is_ipv4()).or_default();
            sources.insert(pair.dst);
            ports.insert((pair.dport, pair.sport));
        }
        let mut ears = Vec::new();
        for (is_v4, (sources, ports)) in heard {
            let (sources, ports) = (Vec::from_iter(sources), Vec::from_iter(ports));
            ears.push(watched(PacketEar::open(is_v4, &sources, &ports)?)?);
        }
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
