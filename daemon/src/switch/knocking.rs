//! Packets that the daemon sends and hears in plain, for [`dibs_switch::engine::knocks`], [`dibs_switch::engine::matches`] and
//! [`dibs_switch::engine::shadows`]; and the names of connections that peers call by other addresses, over a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::iter;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context as _;
use dibs_core::Time;
use dibs_io::{PacketEar, PacketSender, SetupError};
use dibs_settings::BumpId;
use dibs_switch::engine;
use dibs_switch::knock::Standing;
use dibs_switch::matching::{self, Matched, Stand};
use dibs_wire::packet::{self, Packet};
use dibs_wire::{FlowKey, readdress};
use futures_util::future::select_all;
use nix::net::if_::if_nametoindex;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep, sleep_until};

use crate::data::bumps::marks;
use crate::host::process::{instant, now};
use crate::kernel::connections;
use crate::rulebook::state_file::SavedMatch;
use crate::switch::Daemon;

/// Time for the kernel to say where a connection stands. It says so twice a second at most.
const TOLD_WITHIN: Duration = Duration::from_millis(1500);
/// Time before the kernel is asked again.
const SOLICIT_EVERY: Duration = Duration::from_millis(600);
/// Time between two looks at what it said.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Connections that [`breaks_in_plain`] names, each with its reason.
const MOST_NAMED: usize = 8;

/// Words for the connections on bumps that plain does not carry, or of which nobody can say whether it does, since their peers
/// have no session.
pub(super) async fn breaks_in_plain(daemon: &Daemon) -> anyhow::Result<Option<String>> {
    let stuck = engine::knocks::refusals(daemon, &daemon.connections().await?).await?;
    if stuck.is_empty() {
        return Ok(None);
    }
    let named = stuck.iter().take(MOST_NAMED);
    let named: Vec<String> = named
        .map(|(pair, why)| format!("the one from {pair}: {why}"))
        .collect();
    let others = match stuck.len() - named.len() {
        0 => String::new(),
        others => format!("; and {others} more"),
    };
    Ok(Some(format!(
        "{} connection(s) may break: {}{others}",
        stuck.len(),
        named.join("; "),
    )))
}

/// Has the nat table translate these connections whatever their numbers are. Otherwise it does not if those are old or far.
async fn make_liberal(
    daemon: &Daemon,
    pairs: impl Iterator<Item = &FlowKey>,
) -> anyhow::Result<()> {
    let translated = |pair: &&FlowKey| daemon.host.translated.borrow().contains_key(pair);
    for pair in pairs.filter(translated) {
        daemon.kernel.conntrack()?.make_liberal(pair).await?;
    }
    Ok(())
}

/// Numbers and windows of connections that are on bumps, as far as the data path knows or the kernel says.
pub(crate) async fn numbers_of(
    daemon: &Daemon,
    pairs: &[FlowKey],
) -> anyhow::Result<BTreeMap<FlowKey, Standing>> {
    // The connection goes on while it is knocked for.
    make_liberal(daemon, pairs.iter()).await?;
    let begin = Instant::now();
    let mut solicited: Option<Instant> = None;
    let bumps: Vec<BumpId> = {
        let state = daemon.state.borrow();
        let installed = state.installed.keys().copied();
        installed.filter_map(|id| daemon.bumps.inside(id)).collect()
    };
    loop {
        let (_, conns) = daemon.driver.conns().await?;
        let known = Standing::latest(&conns, pairs);
        let unknown: Vec<&FlowKey> = { pairs.iter() }
            .filter(|pair| !known.contains_key(pair))
            .collect();
        if unknown.is_empty() || begin.elapsed() >= TOLD_WITHIN {
            return Ok(known);
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
    // The ends may have been matched anew meanwhile.
    let still = |pair: &FlowKey, known: &Matched| daemon.host.matched().get(pair) == Some(known);
    let over = known.iter().filter(|(pair, known)| !lives_on(pair, known));
    for (pair, _) in over.filter(|(pair, known)| still(pair, known)) {
        daemon.host.forget_match(pair)?;
    }
    match daemon.host.matched().len() < known.len() {
        true => daemon.save(),
        false => Ok(()),
    }
}

/// States of connections in plain by the words of the kernel here; nothing of those of which it does not say it.
pub(crate) async fn stands_of(
    daemon: &Daemon,
    pairs: &BTreeSet<FlowKey>,
) -> anyhow::Result<BTreeMap<FlowKey, Stand>> {
    let mut found = BTreeMap::new();
    make_liberal(daemon, pairs.iter()).await?;
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
    /// Connections that this host translates: it takes their packets as they are sent here.
    translated: BTreeMap<FlowKey, FlowKey>,
}

impl Senders {
    fn open<'a>(daemon: &Daemon, pairs: impl Iterator<Item = &'a FlowKey>) -> anyhow::Result<Self> {
        let own = marks(&daemon.config).own();
        let pairs: Vec<&FlowKey> = pairs.collect();
        let versions: BTreeSet<bool> = pairs.iter().map(|pair| pair.dst.is_ipv4()).collect();
        let open = |is_v4| Ok((is_v4, PacketSender::open(is_v4, own)?));
        let sockets: anyhow::Result<_> = versions.into_iter().map(open).collect();
        let known = daemon.host.translated.borrow();
        let as_sent = |pair: &FlowKey| Some((*pair, connections::as_sent(pair, known.get(pair)?)));
        Ok(Self {
            sockets: sockets?,
            translated: pairs.into_iter().filter_map(as_sent).collect(),
        })
    }

    /// Sends a packet of a connection; what cannot be sent is not heard.
    fn send(&self, pair: &FlowKey, packet: &[u8]) {
        let ends = self.translated.get(pair).unwrap_or(pair);
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

/// Sockets that send packets in plain, and hear them.
pub(crate) struct Plain {
    senders: Senders,
    ears: Vec<AsyncFd<PacketEar>>,
    bumps: BTreeSet<u32>,
}

impl Plain {
    /// Sockets for these connections.
    pub(crate) fn open(
        daemon: &Daemon,
        pairs: impl Iterator<Item = FlowKey>,
    ) -> anyhow::Result<Self> {
        let pairs: Vec<FlowKey> = pairs.collect();
        let senders = Senders::open(daemon, pairs.iter())?;
        let ears = ears_of(pairs.iter().map(|pair| (*pair, ())), |is_v4, conns| {
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

    /// Sockets that hear what peers show of these connections.
    pub(crate) fn by_numbers(daemon: &Daemon, conns: &[(FlowKey, Stand)]) -> anyhow::Result<Self> {
        let ears = ears_of(conns.iter().copied(), |is_v4, conns| {
            let shown: Vec<Stand> = conns.iter().map(|(_, stand)| stand.shown()).collect();
            let numbers: Vec<(u32, u32)> = shown.iter().map(|it| (it.seq, it.ack)).collect();
            let tsvals = shown.iter().filter_map(|it| Some(it.timestamps?.0));
            PacketEar::by_numbers(is_v4, &numbers, &Vec::from_iter(tsvals))
        })?;
        Ok(Self {
            senders: Senders::open(daemon, iter::empty())?,
            ears,
            bumps: bump_interfaces(daemon),
        })
    }
}

impl engine::Plain for Plain {
    fn now(&self) -> Time {
        now()
    }

    fn send(&self, pair: &FlowKey, packet: &[u8]) {
        self.senders.send(pair, packet);
    }

    async fn hear(&self, due: Option<Time>) -> Option<Vec<u8>> {
        let mut late = std::pin::pin!(until(due));
        loop {
            tokio::select! {
                biased;
                (bytes, interface) = next_packet(&self.ears) => {
                    if !self.bumps.contains(&interface) {
                        return Some(bytes);
                    }
                    // A busy bump does not hold it up.
                    if due.is_some_and(|due| now() >= due) {
                        return None;
                    }
                }
                () = &mut late => return None,
            }
        }
    }
}
