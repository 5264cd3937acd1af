//! The live TCP connections to peers: sockets, and those of others that this host forwards, between the networks behind it and
//! hosts behind peers. Their sockets are elsewhere, so what conntrack has of them stands for these.
//!
//! Connections of the networks behind this host that it masquerades are known by the address that they have at the far end. Others
//! whose addresses it translates cannot be moved. New ones on a bump keep their address
//! (`dibs-policy/src/rules/nftables_only.rs`). A subflow of an MPTCP connection that goes by a bump while
//! another one goes in plain shows in plain what the bump hides, so all subflows of a connection move, or none.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hasher as _;
use std::net::{IpAddr, SocketAddr};

use dibs_config::Config;
use dibs_policy::conntrack::{Connection, LOOKUPS};
use dibs_policy::sockets::{self, TcpCounts, TcpSocket};
use dibs_policy::{Error, translation};
use dibs_settings::BumpId;
use dibs_switch::conns::Socket;
use dibs_switch::engine::entries::Ends;
use dibs_switch::knock::Refusal;
use dibs_switch::matching::Carrying;
use dibs_wire::FlowKey;

use crate::host::Host;
use crate::host::live::Live;
use crate::host::process::or_warn;
use crate::kernel::Kernel;

/// The kernel's TCP states, include/net/tcp_states.h.
const TIME_WAIT: u8 = 6;
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;

/// All connections to peers, those that are over included, with their marks if there are such.
pub(crate) async fn all(kernel: &Kernel, are_marked: bool) -> anyhow::Result<Vec<Live>> {
    let mut lives = sockets(kernel).await?;
    if are_marked && lives.len() <= LOOKUPS {
        let mut conntrack = kernel.conntrack()?;
        for live in &mut lives {
            let entry = conntrack.get(&live.pair).await?;
            live.mark = entry.map_or(0, |entry| entry.mark);
        }
    } else if are_marked {
        let mut tracked = HashMap::new();
        let marks = |entry: Connection| {
            let ends = ends_to_peers(kernel.host(), &entry);
            tracked.extend(ends.map(|pair| (pair, entry.mark)));
            None::<()>
        };
        kernel.conntrack()?.list(marks).await?;
        for live in &mut lives {
            live.mark = tracked.get(&live.pair).copied().unwrap_or(0);
        }
    }
    Ok(lives)
}

/// As [`connections`](all), without looking at marks.
pub(crate) async fn sockets(kernel: &Kernel) -> anyhow::Result<Vec<Live>> {
    sockets_as(kernel, Some).await
}

/// What `pick` makes of [`sockets()`]: there may be thousands.
pub(crate) async fn sockets_as<U>(
    kernel: &Kernel,
    pick: impl Fn(Live) -> Option<U>,
) -> anyhow::Result<Vec<U>> {
    let mut found = sockets::list(|socket| pick(live(kernel.host(), socket)?)).await?;
    found.extend(all_passing(kernel).await?.into_iter().filter_map(pick));
    Ok(found)
}

/// Those of these connections that there are, without looking at marks.
pub(crate) async fn sockets_of(
    kernel: &Kernel,
    pairs: &[FlowKey],
) -> Result<HashMap<FlowKey, Live>, dibs_policy::Error> {
    let found = sockets::find(pairs).await?.into_iter();
    let lives = found.filter_map(|socket| live(kernel.host(), socket));
    let mut lives: HashMap<FlowKey, Live> = lives.map(|live| (live.pair, live)).collect();
    let rest = pairs.iter().filter(|pair| !lives.contains_key(pair));
    let passing = passing_of(kernel, &Vec::from_iter(rest.copied())).await?;
    lives.extend(passing.into_iter().map(|live| (live.pair, live)));
    Ok(lives)
}

/// Results of `pick` for [`sockets_of()`]; if they are many, for all that there are.
pub(crate) async fn sockets_of_as<U>(
    kernel: &Kernel,
    pairs: &[FlowKey],
    pick: impl Fn(Live) -> U,
) -> anyhow::Result<Vec<U>> {
    // To list all takes the kernel milliseconds, however few there are.
    if pairs.len() > LOOKUPS {
        return sockets_as(kernel, |live| Some(pick(live))).await;
    }
    let found = sockets_of(kernel, pairs).await?;
    Ok(found.into_values().map(pick).collect())
}

/// Open connections to this host that come from the address of a router of peers, and that no peer is known to have: as if they were each
/// such peer's.
pub(crate) async fn strange(
    kernel: &Kernel,
    routers: &HashMap<IpAddr, BTreeSet<usize>>,
) -> Result<Vec<Live>, Error> {
    let host = kernel.host();
    let is_strange =
        |pair: &FlowKey| routers.contains_key(&pair.dst) && host.peer_of(pair).is_none();
    let strange = |socket: TcpSocket| {
        let is_meant = socket.state == ESTABLISHED && is_strange(&socket.key);
        is_meant.then(|| live_of(usize::MAX, socket))
    };
    let mut found = match routers.is_empty() {
        true => return Ok(Vec::new()),
        false => sockets::list(strange).await?,
    };
    if is_forwarding() {
        let led = |entry: Connection| {
            let pair = led_elsewhere(host, &entry).filter(is_strange)?;
            let live = forwarded(&entry, pair, usize::MAX, None);
            Some(live).filter(|live| live.established)
        };
        found.extend(kernel.conntrack()?.list(led).await?);
    }
    let of_each = |live: Live| {
        let peers = routers[&live.pair.dst].iter();
        peers.map(move |peer| Live {
            peer: *peer,
            ..live
        })
    };
    Ok(found.into_iter().flat_map(of_each).collect())
}

/// Open connections of this host to peers' addresses of IPv4 that a router translates from IPv6 (NAT64).
pub(crate) async fn through_nat64(kernel: &Kernel) -> Result<Vec<Live>, Error> {
    let host = kernel.host();
    let through = |socket: TcpSocket| {
        let peer = host.peer_behind(inside_nat64(socket.key.dst)?)?;
        (socket.state == ESTABLISHED).then(|| live_of(peer, socket))
    };
    sockets::list(through).await
}

/// IPv4 address inside one of NAT64's well-known prefix (64:ff9b::/96, RFC 6052 section 2.1).
fn inside_nat64(address: IpAddr) -> Option<IpAddr> {
    let IpAddr::V6(address) = address else {
        return None;
    };
    let rest = address.octets();
    let v4 = rest.strip_prefix(&[0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0])?;
    Some(<[u8; 4]>::try_from(v4).ok()?.into())
}

/// Bytes that those of these connections carried that the nat table leads elsewhere. Such connections are noted, too.
pub(crate) async fn carried_elsewhere(
    kernel: &Kernel,
    pairs: impl Iterator<Item = FlowKey>,
) -> Result<Vec<(FlowKey, Carrying)>, Error> {
    let mut found = Vec::new();
    if !is_forwarding() {
        return Ok(found);
    }
    for pair in pairs {
        let entry = kernel.conntrack()?.get(&pair).await?;
        let host = kernel.host();
        let entry = entry.filter(|entry| led_elsewhere(host, entry) == Some(pair));
        found.extend(entry.map(|entry| {
            host.translated.borrow_mut().insert(pair, entry);
            // With headers: no less than the payload. Of what is not counted, anything is possible.
            let [received, sent] = entry.bytes.unwrap_or([u64::MAX; 2]);
            let carrying = Carrying {
                socket: name(&entry),
                sent,
                received,
            };
            (pair, carrying)
        }));
    }
    Ok(found)
}

fn live(host: &Host, socket: TcpSocket) -> Option<Live> {
    Some(live_of(host.peer_of(&socket.key)?, socket))
}

fn live_of(peer: usize, socket: TcpSocket) -> Live {
    Live {
        pair: socket.key,
        behind: None,
        peer,
        socket: Socket(socket.cookie as u32),
        uid: Some(socket.uid),
        inode: socket.inode,
        bound: socket.bound_device != 0,
        mptcp: socket.mptcp,
        over: socket.state == TIME_WAIT,
        established: socket.state == ESTABLISHED,
        opening: socket.state == SYN_SENT,
        counts: socket.counts.unwrap_or_default(),
        mark: 0,
    }
}

/// A tracked connection as either end may have begun it, if the other is behind a peer.
pub(crate) fn ends_to_peers(host: &Host, entry: &Connection) -> impl Iterator<Item = FlowKey> {
    let to_peer = |pair: &FlowKey| host.peer_of(pair).is_some();
    ends(host, entry).into_iter().filter(to_peer)
}

/// conntrack's TCP states, include/uapi/linux/netfilter/nf_conntrack_tcp.h.
const CT_SYN_SENT: u8 = 1;
const CT_ESTABLISHED: u8 = 3;
const CT_CLOSE_WAIT: u8 = 5;
const CT_TIME_WAIT: u8 = 7;
const CT_CLOSE: u8 = 8;

/// What conntrack is to note of each connection: when it began, which tells two of the same ends apart,
/// and its bytes.
const NOTES: [&str; 2] = [
    "/proc/sys/net/netfilter/nf_conntrack_timestamp",
    "/proc/sys/net/netfilter/nf_conntrack_acct",
];

/// True if an address is behind this host, or beyond it, by its configuration.
fn is_behind(host: &Host, address: IpAddr) -> bool {
    let mut gateway = host.config().daemon.gateway.iter();
    gateway.any(|net| net.contains(&address)) || host.is_beyond(address)
}

/// Why this host does not forward what its configuration says it forwards, one sentence each.
pub(crate) fn faults(config: &Config) -> Vec<String> {
    let read = |key: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/{}", key.replace('.', "/")));
        text.ok().map(|text| text.trim().to_owned())
    };
    let what = if config.daemon.exit {
        "exit"
    } else {
        "gateway"
    };
    let say = |key: &str| {
        format!("{what}: this host does not forward, because {key} is 0: run `sysctl -w {key}=1`")
    };
    { config.daemon.unforwarded(read).into_iter() }
        .map(say)
        .collect()
}

/// Has the kernel note what there is no socket to ask for. To be called once rules stand, for only
/// then it tracks anything.
pub(crate) fn note_passing(config: &Config) {
    if !config.daemon.forwards() && !is_forwarding() {
        return;
    }
    for note in NOTES {
        if let Err(error) = std::fs::write(note, "1") {
            tracing::warn!(
                "{note}: {error}: a new forwarded connection may be taken for an old one with the same ports"
            );
        }
    }
}

/// True if the kernel forwards at all.
pub(crate) fn is_forwarding() -> bool {
    let keys = ["ipv4/ip_forward", "ipv6/conf/all/forwarding"];
    keys.iter().any(|key| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/{key}"));
        text.is_ok_and(|text| text.trim() != "0")
    })
}

/// Name of a tracked connection that somebody opened to this host, and that the nat table leads elsewhere.
fn led_elsewhere(host: &Host, entry: &Connection) -> Option<FlowKey> {
    let (called, to) = (entry.original.reversed(), entry.reply.src);
    let is_elsewhere = to != called.src && !host.has(to) && !to.is_loopback();
    (is_elsewhere && host.has(called.src)).then_some(called)
}

/// The same, if a peer opened it.
pub(crate) fn published(host: &Host, entry: &Connection) -> Option<FlowKey> {
    led_elsewhere(host, entry).filter(|called| host.peer_of(called).is_some())
}

/// Name of a tracked connection of a network behind this host that goes on with an address of this host, as the peer knows it.
pub(crate) fn masqueraded(host: &Host, entry: &Connection) -> Option<FlowKey> {
    let (sent, called) = (entry.original, entry.reply.reversed());
    let is_given = sent.destination() == called.destination() && sent.source() != called.source();
    if !is_given || host.has(sent.src) {
        return None;
    }
    let mut gateway = host.config().daemon.gateway.iter();
    let is_known = host.has(called.src) || host.masqueraded(&called).is_some();
    let is_meant = is_known && gateway.any(|net| net.contains(&sent.src));
    (is_meant && host.peer_of(&called).is_some() && !host.is_by_exit(&called)).then_some(called)
}

/// A tracked connection as either end may have begun it, by the name that the peer has for it if this host masquerades it.
pub(crate) fn ends(host: &Host, entry: &Connection) -> Ends {
    let masqueraded = masqueraded(host, entry).map(|called| [called, called.reversed()]);
    masqueraded.unwrap_or(entry.ends())
}

/// Name that the peer has for a tracked connection whose addresses this host translates, and that can move.
fn called(host: &Host, entry: &Connection) -> Option<FlowKey> {
    published(host, entry).or_else(|| masqueraded(host, entry))
}

/// Notes a tracked connection if this host translates its addresses.
pub(crate) fn note(host: &Host, entry: &Connection) {
    let called = called(host, entry).map(|called| (called, *entry));
    host.translated.borrow_mut().extend(called);
}

/// Forgets a connection whose entry is gone.
pub(crate) fn forget(host: &Host, entry: &Connection) {
    if let Some(called) = led_elsewhere(host, entry).or_else(|| masqueraded(host, entry)) {
        host.translated.borrow_mut().remove(&called);
    }
}

/// Ends of a connection that this host translates, as they are on this side of it.
pub(crate) fn as_sent(called: &FlowKey, entry: &Connection) -> FlowKey {
    match entry.original.destination() == called.destination() {
        true => entry.original,
        false => entry.reply,
    }
}

/// Whether a connection is not this host's own, but passes it.
pub(crate) fn passes(host: &Host, pair: &FlowKey) -> bool {
    let local = pair.src;
    let is_behind = is_behind(host, local) && !host.has(local) && host.peer_of(pair).is_some();
    is_behind || host.masqueraded(pair).is_some()
}

/// A tracked connection that passes this host.
pub(crate) fn passing(host: &Host, entry: &Connection) -> Option<Live> {
    note(host, entry);
    let masqueraded = masqueraded(host, entry);
    let passing = || entry.ends().into_iter().find(|pair| passes(host, pair));
    let pair = masqueraded.or_else(passing);
    let pair = pair.or_else(|| published(host, entry))?;
    let behind = masqueraded.map(|_| entry.original.source());
    Some(forwarded(entry, pair, host.peer_of(&pair)?, behind))
}

/// A tracked connection that this host forwards, by the name that a peer has for it.
fn forwarded(entry: &Connection, pair: FlowKey, peer: usize, behind: Option<SocketAddr>) -> Live {
    let began = entry.original.destination() == pair.destination();
    let in_order = |[first, second]: [u64; 2]| match began {
        true => (first, second),
        false => (second, first),
    };
    let (sent, received) = in_order(entry.bytes.unwrap_or_default());
    // It shifts the windows that the far end gives.
    let (_, scale) = in_order(entry.window_scales.map(u64::from));
    let state = entry.tcp_state.unwrap_or(CT_ESTABLISHED);
    Live {
        pair,
        behind,
        peer,
        socket: name(entry),
        uid: None,
        inode: 0,
        bound: false,
        mptcp: None,
        over: matches!(state, CT_TIME_WAIT | CT_CLOSE),
        established: state == CT_ESTABLISHED,
        opening: state == CT_SYN_SENT,
        counts: TcpCounts {
            window_scale: u8::try_from(scale).expect("it was a byte"),
            bytes_acked: sent,
            bytes_received: received,
            ..TcpCounts::default()
        },
        mark: entry.mark,
    }
}

/// All connections that pass this host.
pub(crate) async fn all_passing(kernel: &Kernel) -> Result<Vec<Live>, Error> {
    let host = kernel.host();
    let published: Vec<FlowKey> = host.translated.borrow().keys().copied().collect();
    if !host.config().daemon.forwards() && published.len() <= LOOKUPS {
        return passing_of(kernel, &published).await;
    }
    let listed = |entry| passing(host, &entry);
    kernel.conntrack()?.list(listed).await
}

/// Those of these connections that pass this host.
pub(crate) async fn passing_of(kernel: &Kernel, pairs: &[FlowKey]) -> Result<Vec<Live>, Error> {
    let mut found = Vec::new();
    let host = kernel.host();
    // A peer may call one so that the nat table leads elsewhere, and that nobody has looked at yet.
    let may_pass = |pair: &&FlowKey| {
        let is_translated = || host.translated.borrow().contains_key(pair);
        passes(host, pair) || is_translated() || host.matched().contains_key(pair)
    };
    for pair in pairs.iter().filter(may_pass) {
        let entry = kernel.conntrack()?.get(pair).await?;
        let entry = entry.filter(|entry| !is_foreign(host, entry, pair));
        found.extend(entry.and_then(|entry| passing(host, &entry)));
    }
    Ok(found)
}

/// True if the connection of an entry that is gone goes on as far as anybody knows: somebody flushed the table.
pub(crate) fn was_passing(entry: &Connection) -> bool {
    let went_on = |state| (CT_ESTABLISHED..=CT_CLOSE_WAIT).contains(&state);
    entry.tcp_state.is_some_and(went_on)
}

/// What tells a tracked connection from others of the same ends, before and after it.
fn name(entry: &Connection) -> Socket {
    // The kernel makes its number of the entry's place in memory and its ends, which may both come again.
    let mut hash = std::hash::DefaultHasher::new();
    hash.write_u32(entry.id);
    hash.write_u64(entry.since.unwrap_or(0));
    // 0 is nobody's name.
    Socket((hash.finish() as u32).max(1))
}

/// True if the peer knows a connection by addresses that steering here does not know.
fn is_foreign(host: &Host, entry: &Connection, pair: &FlowKey) -> bool {
    // As its answers come, if they came here untranslated.
    let is_translated = entry.reply != entry.original.reversed();
    // The peer knows a masqueraded connection as this host sends it.
    let is_sent_on = || {
        let as_sent = entry.reply.source() == entry.original.destination();
        host.is_beyond(pair.src) && as_sent
    };
    is_translated && !is_sent_on() && called(host, entry) != Some(*pair)
}

/// Why connections cannot be moved to a bump whose source is translated here.
pub(crate) async fn translated(
    kernel: &Kernel,
    lives: &[Live],
) -> anyhow::Result<HashMap<FlowKey, String>> {
    let mut refused = HashMap::new();
    let mut conntrack = kernel.conntrack()?;
    for pair in lives.iter().map(|live| live.pair) {
        let entry = conntrack.get(&pair).await?;
        let Some(entry) = entry.filter(|entry| is_foreign(kernel.host(), entry, &pair)) else {
            continue;
        };
        let seen = match entry.original.source() == pair.source() {
            true => entry.reply.destination(),
            false => entry.original.destination(),
        };
        let rule = translation::rule_for(pair.source(), pair.destination()).await?;
        let by = rule.map_or("a rule of the nat table".to_owned(), |r| format!("`{r}`"));
        refused.insert(
            pair,
            format!(
                "{by} translates its address, so the peer sees {seen}: exclude {} from that rule, and open the \
                 connection again",
                pair.dst
            ),
        );
    }
    Ok(refused)
}

/// Why connections cannot move.
pub(crate) type Refused = BTreeMap<FlowKey, String>;

/// Connections of `all` that are meant, or are subflows of a connection of which one is.
pub(crate) fn united(all: &[Live], meant: impl Fn(&Live) -> bool) -> Vec<&Live> {
    let is_meant = |live: &&Live| meant(live);
    let tokens: BTreeSet<u32> = { all.iter().filter(is_meant) }
        .filter_map(|live| live.mptcp)
        .collect();
    let is_united = |live: &Live| live.mptcp.is_some_and(|token| tokens.contains(&token));
    let chosen = all.iter().filter(|live| meant(live) || is_united(live));
    chosen.collect()
}

/// Has none of a connection's subflows move where one cannot.
pub(crate) fn spread(lives: &[Live], refused: &mut Refused) {
    let mut whys: BTreeMap<u32, String> = BTreeMap::new();
    for live in lives {
        if let Some((token, why)) = live.mptcp.zip(refused.get(&live.pair)) {
            whys.entry(token).or_insert_with(|| {
                format!(
                    "another subflow of its MPTCP connection ({}) cannot move: {why}",
                    live.pair
                )
            });
        }
    }
    for live in lives {
        if let Some(why) = live.mptcp.and_then(|token| whys.get(&token)) {
            refused.entry(live.pair).or_insert_with(|| why.clone());
        }
    }
}

/// The same, of those that plain does not carry.
pub(crate) fn spread_refusals(
    lives: &[Live],
    mut refusals: BTreeMap<FlowKey, Refusal>,
) -> BTreeMap<FlowKey, Refusal> {
    let of_subflow = |live: &Live| Some((live.mptcp?, *refusals.get(&live.pair)?));
    let whys: BTreeMap<u32, Refusal> = lives.iter().filter_map(of_subflow).collect();
    for live in lives {
        if let Some(why) = live.mptcp.and_then(|token| whys.get(&token)) {
            refusals.entry(live.pair).or_insert(*why);
        }
    }
    refusals
}

/// Why connections cannot go to a bump of which other subflows are beyond the reach of bumps: bound to a device, or to
/// hosts that are no peer's.
pub(crate) async fn out_of_reach(host: &Host, lives: &[Live]) -> anyhow::Result<Refused> {
    let tokens: BTreeSet<u32> = lives.iter().filter_map(|live| live.mptcp).collect();
    if tokens.is_empty() {
        return Ok(Refused::new());
    }
    let is_meant = |token: u32| tokens.contains(&token);
    let beyond = sockets::list(|socket| {
        let token = socket.mptcp.filter(|token| is_meant(*token))?;
        let subflow = format!("another subflow of its MPTCP connection ({})", socket.key);
        if socket.bound_device != 0 {
            return Some((token, format!("{subflow} is bound to a device")));
        }
        let is_to_peer = host.peer_of(&socket.key).is_some();
        (!is_to_peer).then(|| (token, format!("{subflow} goes to a host that is no peer's")))
    });
    let beyond: BTreeMap<u32, String> = beyond.await?.into_iter().collect();
    let why = |live: &Live| Some((live.pair, beyond.get(&live.mptcp?)?.clone()));
    Ok(lives.iter().filter_map(why).collect())
}

/// Connections of these that can be steered there: of an MPTCP connection all subflows or none.
pub(crate) async fn steerable(host: &Host, lives: &[Live], bump: Option<BumpId>) -> Vec<Live> {
    let mut refused = match bump {
        None => Refused::new(),
        Some(_) => or_warn(out_of_reach(host, lives).await).unwrap_or_default(),
    };
    let bound = lives.iter().filter(|live| live.bound);
    let why = |live: &Live| (live.pair, "its socket is bound to a device".to_owned());
    refused.extend(bound.map(why));
    spread(lives, &mut refused);
    for (pair, why) in &refused {
        tracing::debug!(?pair, "rules do not move a connection: {why}");
    }
    let is_able = |live: &&Live| !refused.contains_key(&live.pair);
    lives.iter().filter(is_able).copied().collect()
}

/// Connections that moved while another subflow of the same connection did not, by what the peer or the kernel
/// said.
pub(crate) fn torn(moved: &[(Live, Result<(), String>)]) -> Vec<(Live, String)> {
    let mut refused = Refused::new();
    let failed = moved.iter().filter_map(|(live, outcome)| {
        let why = outcome.as_ref().err()?;
        Some((live.pair, why.clone()))
    });
    refused.extend(failed);
    let lives: Vec<Live> = moved.iter().map(|(live, _)| *live).collect();
    spread(&lives, &mut refused);
    let is_torn = |(live, outcome): &(Live, Result<(), String>)| {
        let why = refused.get(&live.pair).filter(|_| outcome.is_ok())?;
        Some((*live, why.clone()))
    };
    moved.iter().filter_map(is_torn).collect()
}

#[cfg(test)]
mod tests {
    use dibs_policy::sockets::TcpCounts;
    use dibs_switch::conns::Socket;

    use super::*;

    #[test]
    fn the_address_inside_nat64s_prefix_is_found() {
        let inside = |text: &str| inside_nat64(text.parse().expect("an address"));
        let v4 = IpAddr::from([203, 0, 113, 7]);
        assert_eq!(inside("64:ff9b::203.0.113.7"), Some(v4));
        for other in [
            "203.0.113.7",
            "64:ff9b:1::203.0.113.7",
            "::ffff:203.0.113.7",
        ] {
            assert_eq!(inside(other), None, "{other}");
        }
    }

    fn live(port: u16, mptcp: Option<u32>) -> Live {
        Live {
            pair: FlowKey::tcp(([10, 0, 1, 1], port), ([10, 0, 1, 2], 80)),
            behind: None,
            peer: 0,
            socket: Socket(port.into()),
            uid: Some(0),
            inode: 1,
            bound: false,
            mptcp,
            over: false,
            established: true,
            opening: false,
            counts: TcpCounts::default(),
            mark: 0,
        }
    }

    #[test]
    fn subflows_are_meant_and_refused_together() {
        let lives = [
            live(1, Some(7)),
            live(2, Some(7)),
            live(3, Some(8)),
            live(4, None),
        ];
        let ports =
            |lives: &[&Live]| -> Vec<u16> { lives.iter().map(|live| live.pair.sport).collect() };
        let port = |port| move |live: &Live| live.pair.sport == port;
        assert_eq!(ports(&united(&lives, port(1))), [1, 2]);
        assert_eq!(ports(&united(&lives, port(4))), [4]);

        let mut refused = Refused::from([
            (lives[0].pair, "it is bound".to_owned()),
            (lives[3].pair, "it has ended".to_owned()),
        ]);
        spread(&lives, &mut refused);
        assert_eq!(refused[&lives[0].pair], "it is bound");
        assert!(refused[&lives[1].pair].contains("10.0.1.1:1") && refused.len() == 3);

        let failed = |live: Live| (live, Err("no".to_owned()));
        let moved = [
            (lives[0], Ok(())),
            failed(lives[1]),
            (lives[2], Ok(())),
            failed(lives[3]),
        ];
        let torn = torn(&moved);
        let torn: Vec<&Live> = torn.iter().map(|(live, _)| live).collect();
        assert_eq!(ports(&torn), [1]);
    }
}
