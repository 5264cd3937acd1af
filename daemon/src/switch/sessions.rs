//! Sessions with peers: which stand, what a peer lacks for a bump and which bumps rules need there, and what is done when
//! one is new: connections go on at once after an outage, and not when TCP tries again by itself
//! (`dibs_core::node::Node::solicit`).
//!
//! A peer may begin a session with each handshake. So that is done for one session of a peer at a time, and once a second
//! at most; sessions that begin meanwhile are dealt with together.
//!
//! Ports may be silent whose kernel does not answer: of this host, which a firewall keeps from answering what peers send by
//! a bump, and of peers, as they say.

use std::rc::Rc;
use std::time::Duration;

use dibs_control::{PeerState, SilentPortInfo};
use dibs_core::node::{PeerSnapshot, SilentPort};
use dibs_core::session;
use dibs_policy::sockets;
use dibs_settings::{BumpId, Level};
use dibs_switch::engine::tells;
use dibs_switch::messages::{Body, Unanswered};
use dibs_switch::silence::{Change, Port};
use dibs_switch::{engine, rules};
use ipnet::IpNet;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::data::Gone;
use crate::data::bumps::of_mask;
use crate::host::live::Live;
use crate::rulebook::rules::Rule;
use crate::switch::{Daemon, Task};

/// How a peer stands: a session alone does not mean that it answers.
pub(crate) fn peer_state(peer: &PeerSnapshot) -> PeerState {
    match peer.state {
        session::PeerState::Established if peer.reachable => PeerState::Established,
        session::PeerState::Established | session::PeerState::Connecting => PeerState::Connecting,
        session::PeerState::Down => PeerState::Down,
    }
}

/// Why the calls of a peer come to nothing, and what helps.
pub(crate) fn outdated(behind: Duration) -> String {
    format!(
        "its handshakes are rejected: their timestamp is {} s behind its latest one; if its clock was set \
         back, correct it, or restart dibsd here, which forgets the latest one; otherwise somebody replays \
         old ones",
        behind.as_secs()
    )
}

/// Why no keys are agreed with a peer by an untrusted path, and what helps.
pub(crate) const UNSECURED: &str = "nothing secures a handshake over an untrusted path: there was no earlier session, and there is no \
                                    preshared key; repair the trusted path, or at both ends set preshared_key_file for the peer, or \
                                    handshake = \"any\" in [daemon]";

/// Why a peer that this host joins may not answer, and what helps.
pub(crate) const UNJOINED: &str = "; if none comes, the join token is used up or older than an hour: print a new one with dibsctl init --exit there";

/// Which peers have a session and answer, by index.
pub(crate) async fn sessions(daemon: &Daemon) -> Result<Vec<bool>, Gone> {
    let snapshot = daemon.driver.snapshot().await?;
    let up = |peer| peer_state(peer) == PeerState::Established;
    Ok(snapshot.peers.iter().map(up).collect())
}

/// Why a peer that has a session cannot have a connection on this bump.
pub(crate) fn lacks(
    daemon: &Daemon,
    peer: &PeerSnapshot,
    index: usize,
    bump: Option<BumpId>,
) -> Option<String> {
    let bump = bump?;
    let own = daemon.bumps.split_of(bump)?;
    if peer_state(peer) != PeerState::Established {
        return None;
    }
    let name = daemon.peer_name(index);
    let carried = daemon.bumps.name_of(bump);
    let Some(theirs) = peer.bumps.iter().find(|other| other.number == bump.get()) else {
        return Some(format!("peer {name} does not carry the bump \"{carried}\""));
    };
    (theirs.shares != own).then(|| {
        let say = |shares: Option<(u8, u8)>| {
            let (needed, shares) = shares.unwrap_or_default();
            format!("{needed} of {shares} shares")
        };
        format!(
            "peer {name} needs {}, this host {}: list {carried} with the same shares and \
             needed as a [[bump]] at both",
            say(theirs.shares),
            say(own)
        )
    })
}

/// Tells of bumps that our rules put connections of a peer into, and that it cannot follow.
pub(crate) async fn tell_lacks(daemon: &Daemon, peer: usize) {
    let Ok(snapshot) = daemon.driver.snapshot().await else {
        return;
    };
    let wanted = engine::wants::wanted_of(daemon, peer);
    let seen = &snapshot.peers[peer];
    for bump in of_mask(wanted) {
        if let Some(why) = lacks(daemon, seen, peer, Some(bump)) {
            let name = daemon.bumps.name_of(bump).to_owned();
            daemon.events.tell("bump_refused", why, &[("bump", name)]);
        }
    }
}

/// Why no peer that a rule could be for and that has a session can have its connections on this
/// bump.
pub(crate) async fn lacking(
    daemon: &Daemon,
    peer: Option<&str>,
    bump: BumpId,
) -> Result<Option<String>, Gone> {
    let seen = daemon.driver.snapshot().await?.peers;
    let meant = |index: &usize| peer.is_none_or(|name| daemon.peer_name(*index) == name);
    let meant = (0..seen.len())
        .filter(meant)
        .filter(|index| peer_state(&seen[*index]) == PeerState::Established);
    let mut whys: Vec<_> = meant
        .map(|index| lacks(daemon, &seen[index], index, Some(bump)))
        .collect();
    let all = whys.iter().all(Option::is_some);
    Ok(whys.pop().flatten().filter(|_| all))
}

/// Bumps that these rules put connections of a peer into; bit n for number n.
pub(crate) fn bumps_of<'a>(
    daemon: &Daemon,
    in_force: impl Iterator<Item = &'a Rule>,
    peer: usize,
) -> u16 {
    let concerns = |rule: &&Rule| {
        let mut to = rule.classes.iter().map(|class| class.destination);
        to.any(|to| to.is_none_or(|to| leads_to(daemon, peer, to)))
    };
    rules::wanted(in_force.filter(concerns))
}

/// True if some of these addresses are behind a peer.
pub(crate) fn leads_to(daemon: &Daemon, peer: usize, to: IpNet) -> bool {
    let mut behind = daemon.config.peers[peer].addresses.iter();
    behind.any(|net| net.contains(&to) || to.contains(net))
}

/// Takes up the connections that were on bumps before this daemon started, and those that rules bring there now. To be called once
/// the kernel steers, and before any path is up.
pub(crate) async fn take_up(daemon: &Daemon) -> anyhow::Result<()> {
    for (live, bump) in bumped(daemon).await? {
        let outstanding = live.counts.outstanding;
        daemon.driver.resume(bump, live.pair, outstanding)?;
        let was = daemon.state.borrow().conns.get(&live.pair).place.marked();
        if was != Some(bump) {
            daemon.driver.enter(bump, live.pair, was)?;
        }
    }
    Ok(())
}

/// The connections that the data path carries, with their bumps.
async fn bumped(daemon: &Daemon) -> anyhow::Result<Vec<(Live, BumpId)>> {
    let lives = daemon.connections().await?.into_iter();
    let lives = lives.filter(|live| !live.over && !live.bound);
    let inside = |live| {
        let bump = daemon.bump_of(&live);
        Some((live, daemon.bumps.inside(bump)?))
    };
    Ok(lives.filter_map(inside).collect())
}

/// Least time between the sessions of a peer that are dealt with.
const SPACING: Duration = Duration::from_secs(1);

/// New sessions of all peers, by index.
pub(crate) struct Resyncs(Vec<Rc<Notify>>);

impl Resyncs {
    /// Has new sessions dealt with from now on.
    pub(crate) fn open(daemon: &Rc<Daemon>) -> Self {
        let open = |peer| {
            let (daemon, begun) = (Rc::clone(daemon), Rc::new(Notify::new()));
            let asked = Rc::clone(&begun);
            tokio::task::spawn_local(async move {
                merged(&asked, async || greet(&daemon, peer).await).await;
            });
            begun
        };
        Self((0..daemon.config.peers.len()).map(open).collect())
    }

    /// A peer has a new session.
    pub(crate) fn begin(&self, peer: usize) {
        self.0[peer].notify_one();
    }
}

/// Does the work each time that it is asked for: never twice at once, once in [`SPACING`] at most, and once for all
/// that asked meanwhile.
async fn merged(asked: &Notify, mut work: impl AsyncFnMut()) {
    loop {
        asked.notified().await;
        let begin = Instant::now();
        work().await;
        sleep_until(begin + SPACING).await;
    }
}

/// Takes up what there is with a peer whose session is new.
async fn greet(daemon: &Daemon, peer: usize) {
    // How late it was when we called.
    daemon.events.note("save", daemon.save());
    tell_lacks(daemon, peer).await;
    tells::resync(daemon, peer).await;
}

/// A peer is told again no sooner.
const PACE: Duration = Duration::from_secs(1);

/// Takes what the node says of this host's ports.
pub(crate) fn handle_report(daemon: &Daemon, peer: usize, ports: &[SilentPort]) {
    let ports = ports.iter().map(|port| Port {
        bump: port.bump,
        port: port.port,
        refuses: port.refuses,
    });
    let state = &mut daemon.state.borrow_mut().peers[peer];
    state.silent_here.handle_report(ports);
    daemon.wakers.wake(Task::Silence);
}

/// Looks why ports of this host are silent, tells it, and has peers told.
pub(crate) async fn follow_silence(daemon: Rc<Daemon>) {
    loop {
        daemon.wakers.woken(Task::Silence).await;
        let is_new = || {
            let state = daemon.state.borrow();
            state.peers.iter().any(|peer| peer.silent_here.has_news())
        };
        let busy = match is_new() {
            true => sockets::full_listeners().await,
            false => Ok(Default::default()),
        };
        // Without them nobody is excused.
        let full = busy.as_ref().cloned().unwrap_or_default();
        daemon.events.note("look at what listens", busy.map(drop));
        for peer in 0..daemon.config.peers.len() {
            let change = {
                let state = &mut daemon.state.borrow_mut().peers[peer];
                state.silent_here.settle(|port| full.contains(&port))
            };
            tell_change(&daemon, peer, &change, &HERE);
            tell_silence(&daemon, peer);
        }
    }
}

/// Takes what a peer says of its ports.
pub(crate) fn handle_message(daemon: &Daemon, peer: usize, sequence: u64, ports: Vec<Port>) {
    let change = {
        let state = &mut daemon.state.borrow_mut().peers[peer];
        state.silent_there.handle_message(sequence, ports)
    };
    tell_change(daemon, peer, &change, &THERE);
}

/// Tells a peer of this host's ports, if it does not know, until it does.
pub(crate) fn tell_silence(daemon: &Rc<Daemon>, peer: usize) {
    if !daemon.state.borrow_mut().peers[peer]
        .silent_here
        .begin_telling()
    {
        return;
    }
    let daemon = Rc::clone(daemon);
    tokio::task::spawn_local(async move {
        loop {
            let told = daemon.state.borrow_mut().peers[peer]
                .silent_here
                .poll_telling();
            let Some(ports) = told else { return };
            let body = Body::Silent {
                sequence: daemon.rpc.next_sequence(),
                ports: ports.clone(),
            };
            let answer = daemon.rpc.ask(peer, body).await;
            {
                let here = &mut daemon.state.borrow_mut().peers[peer].silent_here;
                match answer {
                    Ok(_) => here.handle_told(ports),
                    Err(Unanswered::Silent | Unanswered::Full) => {}
                    Err(_) => return here.give_up(),
                }
            }
            tokio::time::sleep(PACE).await;
        }
    });
}

/// How it is said of one of both hosts.
struct Saying {
    silent: &'static str,
    answers: &'static str,
    text: fn(&str, u16, &str, &str) -> String,
    /// The same of a port that refuses.
    refuses: fn(&str, u16, &str, &str) -> String,
}

const HERE: Saying = Saying {
    silent: "port_silent",
    answers: "port_answers",
    text: |peer, port, bump, device| {
        format!(
            "this host does not answer connections of peer {peer} to port {port} on {bump}: most likely a \
             firewall here drops what arrives on {device}; see dibsctl doctor"
        )
    },
    refuses: |peer, port, bump, device| {
        format!(
            "this host refuses connections of peer {peer} to port {port} on {bump}: nothing here listens on it. A router or a \
             nat rule that does not mean {device} may lead the port to another one. If so, let rules of this host put them on \
             {bump} (dibsctl rule add --sport, with the port of the service), and none of {peer}"
        )
    },
};

const THERE: Saying = Saying {
    silent: "peer_port_silent",
    answers: "peer_port_answers",
    text: |peer, port, bump, device| {
        format!(
            "connections to port {port} of {peer} on {bump} get no answer: most likely a firewall on {peer} \
             drops what arrives on {device}; run dibsctl doctor there"
        )
    },
    refuses: |peer, port, bump, device| {
        format!(
            "{peer} refuses connections to its port {port} on {bump}: nothing there listens on it. A router or a nat rule that \
             does not mean {device} may lead the port to another one. If so, let rules of {peer} put them on {bump} (dibsctl rule \
             add --sport, with the port of the service), and none of this host"
        )
    },
};

impl Saying {
    fn text(&self, daemon: &Daemon, peer: usize, port: Port) -> String {
        let bump = daemon.bumps.name_of(Some(port.bump));
        let device = port.bump.tun_name();
        let text = if port.refuses {
            self.refuses
        } else {
            self.text
        };
        text(daemon.peer_name(peer), port.port, bump, &device)
    }
}

fn tell_change(daemon: &Daemon, peer: usize, change: &Change, say: &Saying) {
    let name = daemon.peer_name(peer);
    let fields = |port: &Port| {
        [
            ("peer", name.to_owned()),
            ("bump", daemon.bumps.name_of(Some(port.bump)).to_owned()),
            ("port", port.port.to_string()),
            ("device", port.bump.tun_name()),
        ]
    };
    for port in &change.silent {
        let text = say.text(daemon, peer, *port);
        daemon.warn_of_peer(peer, &text);
        daemon.events.announce(say.silent, text, &fields(port));
    }
    for port in &change.ended {
        let text = format!(
            "port {} on {} answers again",
            port.port,
            daemon.bumps.name_of(Some(port.bump))
        );
        daemon.events.tell(say.answers, text, &fields(port));
    }
}

/// Warnings of all ports that are silent now, here and at peers.
pub(crate) fn silence_warnings(daemon: &Daemon) -> Vec<String> {
    let mut warnings = Vec::new();
    for (peer, state) in daemon.state.borrow().peers.iter().enumerate() {
        let of = |say: &'static Saying| move |port| say.text(daemon, peer, port);
        warnings.extend(state.silent_here.ports().map(of(&HERE)));
        warnings.extend(state.silent_there.ports().map(of(&THERE)));
    }
    warnings
}

/// The same for programs, with what the node has counted of each peer.
pub(crate) fn silence_infos(daemon: &Daemon, seen: &[PeerSnapshot]) -> Vec<SilentPortInfo> {
    let mut infos = Vec::new();
    let peers = &daemon.state.borrow().peers;
    for (peer, (state, seen)) in peers.iter().zip(seen).enumerate() {
        let info = |at: Port, here| SilentPortInfo {
            peer: daemon.peer_name(peer).to_owned(),
            bump: daemon.bumps.name_of(at.bump).to_owned(),
            device: at.bump.tun_name(),
            port: at.port,
            here,
            connections: None,
            refuses: at.refuses,
        };
        let calls = |at: &Port| {
            let mut counted = seen.silent.iter();
            let counted = counted.find(|seen| (seen.bump, seen.port) == (at.bump, at.port));
            counted.map(|seen| seen.calls)
        };
        infos.extend(state.silent_here.ports().map(|port| SilentPortInfo {
            connections: calls(&port),
            ..info(port, true)
        }));
        infos.extend(state.silent_there.ports().map(|port| info(port, false)));
    }
    infos
}

/// Warnings of peers' ports that are silent where a new rule sends connections.
pub(crate) fn in_the_way(daemon: &Daemon, rule: &Rule) -> Vec<String> {
    let peers = &daemon.state.borrow().peers;
    let mut warnings = Vec::new();
    for (peer, state) in peers.iter().enumerate() {
        let is_meant = |at: &Port| {
            let mut classes = rule.classes.iter();
            Some(at.bump) == rule.bump_id()
                && classes.any(|class| {
                    class.dport.is_none_or(|ports| ports.contains(at.port)) && { class.destination }
                        .is_none_or(|to| leads_to(daemon, peer, to))
                })
        };
        let silent = state.silent_there.ports().filter(is_meant);
        warnings.extend(silent.map(|port| THERE.text(daemon, peer, port)));
    }
    warnings
}

/// Warnings that a new rule cannot require its bump from the first packet on: of what peers behind routers begin here.
pub(crate) fn shown_late(daemon: &Daemon, rule: &Rule) -> Vec<String> {
    let is_meant = |peer: usize| {
        let mut classes = rule.classes.iter();
        classes.any(|class| {
            class.dport.is_none() && { class.destination }
                .is_none_or(|to| leads_to(daemon, peer, to))
        })
    };
    let peers = daemon.config.peers.iter().enumerate();
    peers
        .filter(|(index, peer)| {
            rule.level == Level::Require && !peer.appears_as.is_empty() && is_meant(*index)
        })
        .map(|(_, peer)| {
            format!(
                "what {name} begins in plain through its router stays there for some seconds, until {name} has shown that it is its own: \
                 add the rule on {name}, too",
                name = peer.name
            )
        })
        .collect()
}

/// Why a connection on this bump does not come about, as far as the peer has told.
pub(crate) fn silence_reason(daemon: &Daemon, live: &Live, bump: Option<BumpId>) -> Option<String> {
    let bump = bump.filter(|_| live.opening)?;
    let peers = &daemon.state.borrow().peers;
    let port = live.pair.dport;
    let is_silent = peers[live.peer].silent_there.contains(bump, port);
    let port = Port {
        bump,
        port,
        refuses: false,
    };
    is_silent.then(|| THERE.text(daemon, live.peer, port))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::sleep;

    use super::*;

    /// A peer restarts 1000 times within ten seconds, and telling it takes 300 ms.
    #[tokio::test(flavor = "current_thread", start_paused = true)]
    async fn sessions_that_begin_meanwhile_are_one() {
        let (asked, begun, under_way) = (Notify::new(), Cell::new(0), Cell::new(0));
        let work = async || {
            begun.update(|count| count + 1);
            under_way.update(|count| count + 1);
            assert_eq!(under_way.get(), 1, "one at a time");
            sleep(Duration::from_millis(300)).await;
            under_way.update(|count| count - 1);
        };
        let restarts = async {
            for _ in 0..1000 {
                asked.notify_one();
                sleep(Duration::from_millis(10)).await;
            }
            sleep(3 * SPACING).await;
        };
        tokio::select! {
            () = merged(&asked, work) => unreachable!("it goes on"),
            () = restarts => {}
        }
        assert_eq!(begun.get(), 11, "one a second, and one for the last");
        // The next one does not wait.
        let next = async {
            asked.notify_one();
            sleep(Duration::from_millis(1)).await;
        };
        tokio::select! {
            () = merged(&asked, async || begun.set(0)) => unreachable!("it goes on"),
            () = next => assert_eq!(begun.get(), 0),
        }
    }
}
