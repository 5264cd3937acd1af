//! Ports whose kernel does not answer: of this host, which a firewall keeps from answering what peers send by a bump,
//! and of peers, as they say.

use std::rc::Rc;
use std::time::Duration;

use dibs_control::SilentPortInfo;
use dibs_core::node::{PeerSnapshot, SilentPort};
use dibs_policy::sockets;
use dibs_settings::BumpId;
use dibs_switch::messages::{Body, Unanswered};
use dibs_switch::silence::{Change, Port};

use crate::host::live::Live;
use crate::rulebook::rules::Rule;
use crate::switch::wakers::Task;
use crate::switch::{Daemon, sessions};

/// A peer is told again no sooner.
const PACE: Duration = Duration::from_secs(1);

/// Takes what the node says of this host's ports.
pub(crate) fn handle_report(daemon: &Daemon, peer: usize, ports: &[SilentPort]) {
    let ports = ports
        .iter()
        .map(|&SilentPort { bump, port, .. }| Port { bump, port });
    let state = &mut daemon.state.borrow_mut().peers[peer];
    state.silent_here.handle_report(ports);
    daemon.wakers.wake(Task::Silence);
}

/// Looks why ports of this host are silent, tells it, and has peers told.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
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
            tell(&daemon, peer);
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
pub(crate) fn tell(daemon: &Rc<Daemon>, peer: usize) {
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
}

const HERE: Saying = Saying {
    silent: "port_silent",
    answers: "port_answers",
    text: |peer, port, bump, device| {
        format!(
            "this host's kernel does not answer connections of peer {peer} to port {port} by {bump}: most likely \
             a firewall here drops what arrives on {device}; see dibsctl doctor"
        )
    },
};

const THERE: Saying = Saying {
    silent: "peer_port_silent",
    answers: "peer_port_answers",
    text: |peer, port, bump, device| {
        format!(
            "connections to port {port} of {peer} by {bump} get no answer from its kernel: most likely a firewall \
             on {peer} drops what arrives on {device}"
        )
    },
};

impl Saying {
    fn text(&self, daemon: &Daemon, peer: usize, port: Port) -> String {
        let bump = daemon.bumps.name_of(Some(port.bump));
        let device = port.bump.tun_name();
        (self.text)(daemon.peer_name(peer), port.port, bump, &device)
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
            "port {}, by {}, is not silent any more",
            port.port,
            daemon.bumps.name_of(Some(port.bump))
        );
        daemon.events.tell(say.answers, text, &fields(port));
    }
}

/// Warnings of all ports that are silent now, here and at peers.
pub(crate) fn warnings(daemon: &Daemon) -> Vec<String> {
    let mut warnings = Vec::new();
    for (peer, state) in daemon.state.borrow().peers.iter().enumerate() {
        let of = |say: &'static Saying| move |port| say.text(daemon, peer, port);
        warnings.extend(state.silent_here.ports().map(of(&HERE)));
        warnings.extend(state.silent_there.ports().map(of(&THERE)));
    }
    warnings
}

/// The same for programs, with what the node has counted of each peer.
pub(crate) fn infos(daemon: &Daemon, seen: &[PeerSnapshot]) -> Vec<SilentPortInfo> {
    let mut infos = Vec::new();
    let peers = &daemon.state.borrow().peers;
    for (peer, (state, seen)) in peers.iter().zip(seen).enumerate() {
        let info = |Port { bump, port }, here| SilentPortInfo {
            peer: daemon.peer_name(peer).to_owned(),
            bump: daemon.bumps.name_of(bump).to_owned(),
            device: bump.tun_name(),
            port,
            here,
            connections: None,
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
            at.bump == rule.bump_id()
                && classes.any(|class| {
                    class.dport.is_none_or(|ports| ports.contains(at.port)) && { class.destination }
                        .is_none_or(|to| sessions::leads_to(daemon, peer, to))
                })
        };
        let silent = state.silent_there.ports().filter(is_meant);
        warnings.extend(silent.map(|port| THERE.text(daemon, peer, port)));
    }
    warnings
}

/// Why a connection on this bump does not come about, as far as the peer has told.
pub(crate) fn reason(daemon: &Daemon, live: &Live, bump: Option<BumpId>) -> Option<String> {
    let bump = bump.filter(|_| live.opening)?;
    let port = Port {
        bump,
        port: live.pair.dport,
    };
    let peers = &daemon.state.borrow().peers;
    let is_silent = peers[live.peer].silent_there.contains(port);
    is_silent.then(|| THERE.text(daemon, live.peer, port))
}
