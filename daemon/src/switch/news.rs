//! News of the data path.

use std::rc::Rc;

use dibs_core::node::Event;
use dibs_settings::BumpId;

use crate::data::notices::{Notice, Notices};
use crate::host::clock::wall;
use crate::switch::Daemon;
use crate::switch::messages::Desks;
use crate::switch::sessions::Resyncs;
use crate::switch::sessions::{UNSECURED, outdated};
use crate::switch::wakers::Task;
use crate::switch::{reconcile, silence};

/// Follows the data path until it ends.
pub(crate) async fn follow(daemon: Rc<Daemon>, mut notices: Notices) {
    let (desks, resyncs) = (Desks::open(&daemon), Resyncs::open(&daemon));
    while let Some(notice) = notices.next().await {
        match notice {
            Notice::Message { peer, message } => desks.take(&daemon, peer, message),
            Notice::Node(event) => note(&daemon, &resyncs, event),
            Notice::TunLost { bump, tun, error } => {
                let name = tun.name().to_owned();
                // Closed first, so that the name is free.
                drop(tun);
                let daemon = Rc::clone(&daemon);
                tokio::task::spawn_local(async move {
                    restore_tun(&daemon, bump, &name, &error).await;
                });
            }
        }
    }
}

fn note(daemon: &Rc<Daemon>, resyncs: &Resyncs, event: Event) {
    daemon.wakers.wake(Task::Sessions);
    daemon.wakers.wake(Task::Names);
    match event {
        Event::PeerUp { peer, restarted } => {
            {
                let state = &mut daemon.state.borrow_mut().peers[peer];
                state.since = Some(wall());
                state.outdated = None;
                if restarted {
                    state.wants.handle_restart();
                    state.silent_here.handle_restart();
                    state.silent_there.handle_restart();
                    state.devices.clear();
                }
            }
            let name = daemon.peer_name(peer).to_owned();
            let how = if restarted { " anew: it restarted" } else { "" };
            daemon.events.tell(
                "session_up",
                format!("the session with peer {name} is established{how}"),
                &[("peer", name)],
            );
            silence::tell(daemon, peer);
            resyncs.begin(peer);
        }
        Event::PeerDown { peer } => {
            daemon.state.borrow_mut().peers[peer].since = None;
            let name = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "session_down",
                format!("the session with peer {name} is down"),
                &[("peer", name)],
            );
        }
        Event::Outdated { peer, behind } => {
            let news = {
                let state = &mut daemon.state.borrow_mut().peers[peer];
                // Somebody repeats an old call of a peer that is there.
                !state.answers && state.outdated.replace(behind).is_none()
            };
            if news {
                tracing::warn!("peer {}: {}", daemon.peer_name(peer), outdated(behind));
            }
        }
        Event::Unsecured { peer } => {
            let name = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "handshake_unsecured",
                format!("no keys are agreed with peer {name}: nobody answers by a trusted path, and {UNSECURED}"),
                &[("peer", name)],
            );
        }
        Event::KeysExhausted { peer } => {
            let name = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "keys_exhausted",
                format!(
                    "the keys of the session with peer {name} are used up: nothing is sent until \
                     a new session is agreed"
                ),
                &[("peer", name)],
            );
        }
        Event::Path { peer, path, state } => {
            let name = daemon.config.paths[path].name.clone();
            let peer = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "path",
                format!("path {name} to peer {peer} is {state}"),
                &[("path", name), ("peer", peer), ("state", state.to_owned())],
            );
        }
        Event::SilentPorts { peer, ports } => silence::handle_report(daemon, peer, &ports),
        Event::Control { .. } | Event::Drained { .. } => {
            unreachable!("messages and ends of drains are taken before")
        }
    }
}

async fn restore_tun(daemon: &Daemon, bump: BumpId, name: &str, error: &std::io::Error) {
    daemon.events.tell(
        "tun_lost",
        format!("device {name} is gone ({error}); making it again"),
        &[("device", name.to_owned())],
    );
    daemon.kernel.steerer().await.tun_lost(bump);
    if let Err(error) = reconcile::steer(daemon).await {
        tracing::error!("cannot restore {name}: {error:#}");
    }
}
