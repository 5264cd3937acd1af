//! Finds out whether plain carries connections, before they leave their bumps for plain: a driver of
//! [`dibs_switch::knock`], here and for peers that ask.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context as _;
use dibs_core::Time;
use dibs_io::{PacketEar, PacketSender};
use dibs_settings::BumpId;
use dibs_switch::conns::Meant;
use dibs_switch::engine::asks;
use dibs_switch::engine::knocks::Heard;
use dibs_switch::engine::rules::Kept;
use dibs_switch::knock::{self, Knock, Numbers, Refusal};
use dibs_switch::messages::{Body, Named, Outcome};
use dibs_wire::FlowKey;
use nix::net::if_::if_nametoindex;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep, sleep_until};

use crate::data::bumps::marks;
use crate::host::live::Live;
use crate::host::process::{instant, now};
use crate::switch::Daemon;

/// Time for the kernel to say where a connection stands. It says so twice a second at most.
const TOLD_WITHIN: Duration = Duration::from_millis(1500);
/// Time before the kernel is asked again.
const SOLICIT_EVERY: Duration = Duration::from_millis(600);
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
fn watched(ear: PacketEar) -> io::Result<AsyncFd<PacketEar>> {
    // SAFETY: the descriptor is the ear's own from its making to its end, and the ear is the AsyncFd's from here on.
    unsafe { AsyncFd::register(ear) }.map_err(Into::into)
}

/// Addresses that acknowledgements come from, and their ports (source, destination).
type Listened = (BTreeSet<IpAddr>, BTreeSet<(u16, u16)>);

/// Sockets that send acknowledgements in plain, and hear them.
struct Plain {
    senders: Vec<(bool, PacketSender)>,
    ears: Vec<AsyncFd<PacketEar>>,
    /// Interfaces that are bumps: what comes in by them came by no ordinary route.
    bumps: BTreeSet<u32>,
}

impl Plain {
    fn open<'a>(
        daemon: &Daemon,
        pairs: impl Iterator<Item = &'a FlowKey> + Clone,
    ) -> anyhow::Result<Self> {
        let own = marks(&daemon.config).own();
        let mut heard: BTreeMap<bool, Listened> = BTreeMap::new();
        for pair in pairs {
            let (sources, ports) = heard.entry(pair.dst.is_ipv4()).or_default();
            sources.insert(pair.dst);
            ports.insert((pair.dport, pair.sport));
        }
        let (mut senders, mut ears) = (Vec::new(), Vec::new());
        for (is_v4, (sources, ports)) in heard {
            senders.push((is_v4, PacketSender::open(is_v4, own)?));
            let (sources, ports) = (Vec::from_iter(sources), Vec::from_iter(ports));
            let ear = PacketEar::open(is_v4, &sources, &ports)?;
            ears.push(watched(ear).context("cannot wait for a packet socket")?);
        }
        let index = |name: String| if_nametoindex(name.as_str()).ok();
        let name = |id: BumpId| match daemon.bumps.device_of(id) {
            Some(device) => device.to_owned(),
            None => id.tun_name(),
        };
        let bumps = daemon.bumps.all().iter().map(|bump| name(bump.id));
        Ok(Self {
            senders,
            ears,
            bumps: bumps.filter_map(index).collect(),
        })
    }

    /// Sends what is due.
    fn send_due(&self, knocks: &mut Knocks) {
        let now = now();
        for (pair, knock) in knocks {
            while let Some(own) = knock.poll_send(now) {
                let (from, to) = (pair.src, pair.dst);
                let sender = self
                    .senders
                    .iter()
                    .find(|(is_v4, _)| *is_v4 == to.is_ipv4());
                let (_, sender) = sender.expect("there is one for each IP version that is meant");
                // What cannot be sent is not heard.
                for packet in knock::packets(pair, own) {
                    if let Err(error) = sender.send(from, to, &packet) {
                        tracing::debug!("cannot send an acknowledgement in plain to {to}: {error}");
                    }
                }
            }
        }
    }

    /// Hands over what arrives, until something is due or arrived.
    async fn hear_until_due(&self, knocks: &mut Knocks) {
        let due = knocks.values().filter_map(Knock::due).min();
        let timer = async {
            match due {
                Some(due) => sleep_until(instant(due)).await,
                None => std::future::pending().await,
            }
        };
        let ears = self.ears.iter().map(|ear| Box::pin(self.heard(ear)));
        tokio::select! {
            () = timer => {}
            ((pair, numbers), ..) = futures_util::future::select_all(ears) => {
                if let Some(knock) = knocks.get_mut(&pair) {
                    knock.handle_heard(numbers, now());
                }
            }
        }
    }

    async fn heard(&self, ear: &AsyncFd<PacketEar>) -> (FlowKey, Numbers) {
        loop {
            // Only without a runtime there is none.
            let Ok(mut ready) = ear.readable().await else {
                return std::future::pending().await;
            };
            match ready.try_io(|ear| ear.get_ref().hear()) {
                Ok(Ok((bytes, interface))) if !self.bumps.contains(&interface) => {
                    if let Some(heard) = knock::read(&bytes) {
                        return heard;
                    }
                }
                // The network of an interface went down.
                Ok(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => {
                    tracing::debug!("cannot hear what arrives in plain: {error}");
                }
                Ok(_) | Err(_) => {}
            }
        }
    }
}
