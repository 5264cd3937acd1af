//! What the peer asks for, and how a connection falls silent: `daemon/src/switching/answering.rs`.

use dibs_switch::conns::{Choice, Pair, Socket, Version};
use dibs_switch::messages::{Body, Message, Outcome, Switch};
use dibs_switch::plausible::Hosts;
use dibs_wire::Tuple;

use super::{Ask, At, CARRIED, LOOK_EVERY, Steering, TELL_AGAIN, Waiter, end_drains, tuple};
use crate::coverage::Seen;

impl Steering {
    /// A message of the peer's daemon; `socket` knows those of live connections. False if it is none of
    /// ours.
    pub fn on_message(
        &mut self,
        at: &mut At<'_>,
        bytes: &[u8],
        socket: impl Fn(&Pair) -> Option<Socket>,
    ) -> bool {
        let Ok(Message { request, body }) = Message::decode(bytes) else {
            return false;
        };
        match body {
            Body::Switch { switch, conns } => {
                let Switch { bump, ready, .. } = switch;
                for (named, version) in conns {
                    let pair = named.pair.reversed();
                    let socket = match socket(&pair) {
                        Some(socket) if socket == named.socket => socket,
                        Some(socket) => {
                            self.seen.note(Seen::SocketNamed);
                            let other = (Outcome::OtherSocket, socket.0.into());
                            self.post(at, request, Body::Answer(vec![other]));
                            continue;
                        }
                        None => {
                            self.seen.note(Seen::SwitchRefused);
                            let none = (Outcome::NoConnection, 0);
                            self.post(at, request, Body::Answer(vec![none]));
                            continue;
                        }
                    };
                    self.on_switch(at, (request, ready), (pair, socket), bump, version);
                }
            }
            Body::Answer(outcomes) => {
                let confirm = self.daemon().confirms.remove(&request);
                if let Some((confirm, outcome)) = confirm.zip(outcomes.first()) {
                    self.on_confirmed(at, confirm, *outcome);
                    return true;
                }
                let ask = self.daemon().asks.remove(&request);
                if let Some((ask, &(outcome, generation))) = ask.zip(outcomes.first()) {
                    self.on_answer(at, ask, outcome, generation);
                } else {
                    self.seen.note(Seen::LateAnswer);
                }
            }
            Body::Confirm { bump, conns } => {
                let outcomes = conns.iter().map(|named| {
                    let socket = socket(&named.pair.reversed());
                    self.on_confirm(at, bump, named, socket)
                });
                let answer = Body::Answer(outcomes.collect());
                self.post(at, request, answer);
            }
            Body::Want { .. } => {}
        }
        true
    }

    fn on_switch(
        &mut self,
        at: &mut At<'_>,
        (request, ready): (u32, bool),
        (pair, socket): (Pair, Socket),
        bump: u8,
        version: Version,
    ) {
        let before = self.daemon().choices.of(&pair, socket);
        let hosts = Hosts {
            own: self.host,
            peer: self.peer,
        };
        if { &self.daemon().choices }
            .check(&pair, socket, version, hosts)
            .is_err()
        {
            self.seen.note(Seen::VersionRefused);
            self.post(at, request, Body::Answer(vec![(Outcome::Failed, 0)]));
            return;
        }
        let own = self.requires(&pair).filter(|own| *own != bump);
        let refused = if let Some(own) = own {
            Some((Outcome::OwnRule, own.into()))
        } else if ready {
            let known = self.daemon().choices.get(&pair);
            let later = known.filter(|known| known.version > version);
            later.map(|known| (Outcome::Older, known.version.generation))
        } else {
            let accepted = self.daemon().choices.accept(pair, socket, bump, version);
            accepted
                .err()
                .map(|known| (Outcome::Older, known.version.generation))
        };
        if let Some(refused) = refused {
            if refused.0 == Outcome::Older {
                self.tell_later(at, pair);
            }
            self.seen.note(match refused.0 {
                Outcome::Older => Seen::OlderRefused,
                _ => Seen::SwitchRefused,
            });
            self.post(at, request, Body::Answer(vec![refused]));
            return;
        }
        self.unlock_leaving(&pair, bump);
        if bump == 0 {
            self.seen.note(match ready {
                true => Seen::GotReady,
                false => Seen::SwitchedOut,
            });
            let waiter = Waiter::Peer {
                request,
                version,
                ready,
                before,
            };
            self.silence(at, pair, waiter);
            // If nothing comes of it, it is locked again.
            self.daemon().look_at = Some(at.now + LOOK_EVERY);
            return;
        }
        self.seen.note(Seen::SwitchedIn);
        self.follow(at, request, pair, version, before);
    }

    /// The peer does not know of a choice that is in force here: unless a later one comes of that, it is told.
    fn tell_later(&mut self, at: &mut At<'_>, pair: Pair) {
        let known = self.daemon().choices.get(&pair).filter(|c| !c.pending);
        let tellings = &mut self.daemon().tellings;
        if let Some(Choice { version, .. }) = known
            && !tellings.iter().any(|(_, p, v)| (*p, *v) == (pair, version))
        {
            tellings.push((at.now + TELL_AGAIN, pair, version));
        }
    }

    /// Carries out what the peer chose, and answers.
    fn follow(
        &mut self,
        at: &mut At<'_>,
        request: u32,
        pair: Pair,
        version: Version,
        before: Option<Choice>,
    ) {
        let outcome = if self.is_unable(at.now) {
            self.seen.note(Seen::Failed);
            // Otherwise it falls silent for the one that stands by now.
            if self.daemon().choices.refuse(&pair, version, before) {
                self.save(at.now);
                self.highest.remove(&pair);
                self.mark_choice(at, pair);
                end_drains(at, &pair);
            }
            Outcome::Failed
        } else {
            self.save(at.now);
            self.mark_choice(at, pair);
            Outcome::Done
        };
        let answer = (outcome, version.generation);
        self.post(at, request, Body::Answer(vec![answer]));
    }

    /// Has a connection fall silent.
    pub(super) fn silence(&mut self, at: &mut At<'_>, pair: Pair, waiter: Waiter) {
        self.unlock(&pair);
        let leaving = self.daemon().leaving.entry(pair).or_default();
        leaving.waiters.push(waiter);
        leaving.bumps.extend(CARRIED);
        let scale = at.kernel.window_scale(&tuple(&pair));
        for bump in CARRIED {
            at.node.drain(at.now, bump, tuple(&pair), scale);
        }
    }

    /// What a connection sent by a bump has arrived.
    pub fn on_drained(&mut self, at: &mut At<'_>, bump: u8, tuple: Tuple) {
        let pair = Pair {
            local: (tuple.src, tuple.sport).into(),
            remote: (tuple.dst, tuple.dport).into(),
        };
        let Some(leaving) = self.daemon().leaving.get_mut(&pair) else {
            return;
        };
        leaving.bumps.remove(&bump);
        if !leaving.bumps.is_empty() {
            return;
        }
        let leaving = self.daemon().leaving.remove(&pair).expect("it is there");
        for waiter in leaving.waiters {
            self.seen.note(Seen::Drained);
            match waiter {
                Waiter::Us(ask) => {
                    // The peer may have chosen otherwise while it fell silent.
                    let stands = self.daemon().choices.of(&pair, ask.socket);
                    let left = stands.is_some_and(|choice| choice.bump == ask.bump);
                    if left {
                        self.seen.note(Seen::LeftFirst);
                        self.leave(at, pair);
                    } else {
                        end_drains(at, &pair);
                    }
                    self.ask(
                        at,
                        Ask {
                            ready: false,
                            left,
                            ..ask
                        },
                    );
                }
                Waiter::Peer {
                    request,
                    version,
                    ready,
                    before,
                } => match ready {
                    true => {
                        let done = (Outcome::Done, version.generation);
                        self.post(at, request, Body::Answer(vec![done]));
                    }
                    false => self.follow(at, request, pair, version, before),
                },
            }
        }
    }
}
