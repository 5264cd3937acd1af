//! What the owner is told.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::FlowKey;

use super::association::Ticket;
use super::name_table::MovedPort;
use super::silence::SilentPort;
use crate::session::PublicKey;

/// Something that happened; peers and paths by their index in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A session with a peer is in use for the first time since it was down, or it restarted.
    PeerUp {
        /// The peer.
        peer: usize,
        /// It is not the instance that we knew.
        restarted: bool,
    },
    /// The last session with a peer expired.
    PeerDown {
        /// The peer.
        peer: usize,
    },
    /// A peer's call is refused, for it is older than its latest by so much: somebody repeats it, or the
    /// peer's clock was set back. Told from time to time.
    Outdated {
        /// The peer.
        peer: usize,
        /// Between the two calls, by the peer's clock.
        behind: Duration,
    },
    /// No keys are agreed with a peer: a handshake by an untrusted path has neither a secret of an earlier one nor a
    /// preshared key in it, and one of these is wanted. Told from time to time.
    Unsecured {
        /// The peer.
        peer: usize,
    },
    /// A host that is no peer calls with a ticket.
    Stranger {
        /// Its public key; it has the private one.
        key: PublicKey,
        /// Not looked into.
        ticket: Ticket,
    },
    /// The keys of the session with a peer have sealed all that they may: nothing is sent until
    /// there is another session.
    KeysExhausted {
        /// The peer.
        peer: usize,
    },
    /// A path changed its state.
    Path {
        /// The peer.
        peer: usize,
        /// The local path.
        path: usize,
        /// What it is now: "active", "suspect", "down", "joining".
        state: &'static str,
    },
    /// A trusted path does not come about: the peer asks for it at an address that does not tell that this is the path. Told once of an
    /// address.
    Misdirected {
        /// The peer.
        peer: usize,
        /// The local path by which it asked.
        path: usize,
        /// The address.
        to: IpAddr,
    },
    /// Other ports than before do not answer what the peer sends there: these are all.
    SilentPorts {
        /// The peer.
        peer: usize,
        /// At most [`MAX_SILENT`](super::MAX_SILENT).
        ports: Vec<SilentPort>,
    },
    /// Other connections than before have another port here than at the peer: these are all. An owner that gives them to its next
    /// instance ([`Node::set_moved_ports`](super::Node::set_moved_ports)) keeps them from changing places.
    MovedPorts {
        /// The peer.
        peer: usize,
        /// At most [`MAX_MOVED`](super::MAX_MOVED), the earliest first.
        ports: Vec<MovedPort>,
    },
    /// A message of the peer's daemon, once. [`Node::control_done`](super::Node::control_done) makes room for
    /// another one.
    Control {
        /// The peer.
        peer: usize,
        /// The message.
        bytes: Vec<u8>,
    },
    /// The kernels of both ends do not count the bytes of a connection alike, which came from plain: something there changes TCP's
    /// numbers, so a bump cannot carry it.
    Renumbered {
        /// The bump.
        bump: BumpId,
        /// The connection as the local host sends.
        tuple: FlowKey,
    },
    /// Nothing of a connection that is to leave its bump is under way any more.
    Drained {
        /// The peer.
        peer: usize,
        /// The bump.
        bump: BumpId,
        /// The connection as the local host sends.
        tuple: FlowKey,
    },
}

/// What the owner has not asked for yet. Whoever comes late, or never, loses nothing that matters and finds no
/// more than a bounded number: of what is said of a peer's session, its silent and its moved ports, a path, and of strangers, the last stands for all
/// before it; messages have a [bound](super::messages::MAX_TAKEN) of their own; and a drain ends once.
#[derive(Default)]
pub(crate) struct Events(VecDeque<Event>);

impl Events {
    /// The next one, in the order in which they happened.
    pub(super) fn pop(&mut self) -> Option<Event> {
        self.0.pop_front()
    }

    pub(crate) fn push(&mut self, mut event: Event) {
        self.0.retain(|earlier| !event.absorb(earlier));
        self.0.push_back(event);
    }
}

impl Event {
    /// True if whoever hears of this need not hear of what happened `earlier`. That the peer is another instance since
    /// is not lost with it.
    fn absorb(&mut self, earlier: &Event) -> bool {
        match (self, earlier) {
            (
                Self::PeerUp { peer, restarted },
                Self::PeerUp {
                    peer: of,
                    restarted: before,
                },
            ) if peer == of => {
                *restarted |= before;
                true
            }
            (new @ Self::Renumbered { .. }, earlier) => *new == *earlier,
            // One that restarted, and is down now, was another instance all the same.
            (
                Self::PeerDown { peer },
                Self::PeerUp {
                    peer: of,
                    restarted,
                },
            ) => peer == of && !restarted,
            (Self::PeerUp { peer, .. } | Self::PeerDown { peer }, Self::PeerDown { peer: of })
            | (Self::Outdated { peer, .. }, Self::Outdated { peer: of, .. })
            | (Self::SilentPorts { peer, .. }, Self::SilentPorts { peer: of, .. })
            | (Self::MovedPorts { peer, .. }, Self::MovedPorts { peer: of, .. })
            | (Self::Unsecured { peer }, Self::Unsecured { peer: of })
            | (Self::KeysExhausted { peer }, Self::KeysExhausted { peer: of }) => peer == of,
            (
                Self::Path { peer, path, .. },
                Self::Path {
                    peer: of, path: by, ..
                },
            )
            | (
                Self::Misdirected { peer, path, .. },
                Self::Misdirected {
                    peer: of, path: by, ..
                },
            ) => peer == of && path == by,
            (Self::Stranger { .. }, Self::Stranger { .. }) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::{Random, SeededRandom};

    #[test]
    fn who_comes_late_hears_how_things_stand_and_that_a_peer_restarted() {
        let mut rng = SeededRandom::new([9; 32]);
        let mut draw = |below: u8| {
            let mut byte = [0];
            rng.fill(&mut byte);
            byte[0] % below
        };
        let mut events = Events::default();
        // Whether each peer is up, as it is and as it was told; and whether it restarted since.
        let (mut is, mut told) = ([false; 2], [false; 2]);
        let mut restarts = [false; 2];
        let (mut path_is, mut path_told) = (["joining"; 2], ["joining"; 2]);
        for _ in 0..100_000 {
            let peer = usize::from(draw(2));
            match draw(6) {
                0 => {
                    let restarted = draw(2) == 0;
                    // A session of one that is up is news only if it restarted.
                    if restarted || !is[peer] {
                        is[peer] = true;
                        restarts[peer] |= restarted;
                        events.push(Event::PeerUp { peer, restarted });
                    }
                }
                1 if is[peer] => {
                    is[peer] = false;
                    events.push(Event::PeerDown { peer });
                }
                2 => events.push(Event::KeysExhausted { peer }),
                3 => {
                    path_is[peer] = ["active", "suspect", "down"][usize::from(draw(3))];
                    let state = path_is[peer];
                    events.push(Event::Path {
                        peer,
                        path: 0,
                        state,
                    });
                }
                _ => {}
            }
            assert!(events.0.len() <= 2 * 4, "{:?}", events.0);
            if draw(40) > 0 {
                continue;
            }
            while let Some(event) = events.pop() {
                match event {
                    Event::PeerUp { peer, restarted } => {
                        told[peer] = true;
                        restarts[peer] &= !restarted;
                    }
                    Event::PeerDown { peer } => told[peer] = false,
                    Event::Path { peer, state, .. } => path_told[peer] = state,
                    _ => {}
                }
            }
            assert_eq!((told, path_told), (is, path_is));
            assert_eq!(restarts, [false; 2], "a restart was not told");
        }
    }
}
