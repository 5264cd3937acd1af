//! What rules imply, here and at a peer; and what a peer is told whose session is new.

use std::collections::BTreeMap;

use super::Mark;
use super::asking::{Move, ROUND};
use crate::clock::now;
use crate::daemon::Daemon;
use crate::events::Audience;
use crate::live::Live;
use crate::wakers::Task;
use crate::wants;
use dibs_switch::asking::Negotiation;
use dibs_switch::conns::{Pair, Version};
use dibs_switch::marks::{Hand, Handed};
use dibs_switch::messages::{Answer, Unanswered};
use dibs_switch::telling::TELL_AGAIN;

impl Daemon {
    /// Moves connections here and at their peers because rules changed, not by choice.
    pub(crate) async fn follow_rules(&self, lives: &[Live], bump: u8) {
        let mut by_peer: BTreeMap<usize, Vec<Live>> = BTreeMap::new();
        for live in lives.iter().filter(|live| !live.bound) {
            by_peer.entry(live.peer).or_default().push(*live);
        }
        let moving: Vec<Pair> = by_peer.values().flatten().map(|live| live.pair).collect();
        self.update_each(&moving, |conn| conn.moving = true);
        for (peer, lives) in by_peer {
            let mut answers = true;
            for lives in lives.chunks(ROUND) {
                answers = self.follow_some(peer, lives, bump, answers).await;
            }
        }
        self.update_each(&moving, |conn| conn.moving = false);
        self.wakers.wake(Task::Confirm);
    }

    /// Up to [`ROUND`] connections of [`follow_rules`](Self::follow_rules). `ask`: the peer is asked for its
    /// part. Whether it answers.
    async fn follow_some(&self, peer: usize, lives: &[Live], bump: u8, ask: bool) -> bool {
        let by_rule = |live: &Live| {
            let mut negotiation = Negotiation::by_rule(live.into(), bump, self.host);
            if !ask {
                negotiation.handle_unasked();
            }
            (*live, negotiation)
        };
        let mut moves: Vec<Move> = lives.iter().map(by_rule).collect();
        self.carry_out(peer, &mut moves).await;
        let answers = moves
            .iter()
            .map(|(live, asked)| (live.pair, asked.answer()));
        let answers: Vec<(Pair, Answer)> = answers.collect();
        tracing::debug!(bump, ?answers, "rules move connections");
        answers.iter().any(|(_, answer)| answer.is_ok())
    }

    /// Keeps a connection on the bump that a rule of the peer wants it on: of what we sent in plain the
    /// peer would take nothing, or answer it by the bump.
    pub(super) async fn follow_peer(&self, pair: &Pair, own: u64) {
        let mut numbers = self.bumps.all().iter().map(|bump| bump.id.get());
        let Some(bump) = numbers.find(|bump| u64::from(*bump) == own) else {
            return tracing::warn!("a rule of a peer wants a bump that this host does not carry");
        };
        let by = Hand::Peer;
        self.update(pair, |conn| conn.hand_over(Some(Handed { bump, by })));
        let followed = async {
            self.install().await?;
            let _turn = self.marking.lock().await;
            self.mark_one(Mark::moved(*pair, bump)).await?;
            anyhow::Ok(())
        };
        if let Err(error) = followed.await {
            tracing::warn!("cannot follow a rule of a peer: {error:#}");
        }
    }

    /// A choice that the peer refuses for a rule of its own, having heard of it only now.
    pub(super) async fn give_in(&self, peer: usize, pair: Pair, version: Version, own: u64) {
        if !self.update(&pair, |conn| conn.choice.give_up(version)) {
            return;
        }
        self.save_or_warn();
        self.follow_peer(&pair, own).await;
        let name = self.peer_name(peer).to_owned();
        let lives = self.sockets_of(&[pair]).await.unwrap_or_default();
        self.events.tell_of(
            Audience::of(lives.get(&pair).and_then(|live| live.uid)),
            "choice_refused",
            format!(
                "a rule of peer {name} wants a connection on its bump, and not where it was chosen to be"
            ),
            &[("peer", name)],
        );
    }

    /// Tells a peer, whose session is new, all that concerns it, until it has answered; what it cannot do yet it is told
    /// [again](super::telling).
    pub(crate) async fn resync(&self, peer: usize) {
        let turn = {
            let known = &mut self.state.borrow_mut().peers[peer];
            known.told += 1;
            known.told
        };
        while let Err(error) = self.tell_all(peer).await {
            tracing::debug!(peer = self.peer_name(peer), "resync: {error}");
            // It is told with the next session.
            if !matches!(error, Unanswered::Silent | Unanswered::Full) {
                return;
            }
            tokio::time::sleep(TELL_AGAIN).await;
            if self.state.borrow().peers[peer].told != turn {
                return;
            }
        }
        self.enforce_all(peer).await;
        if let Err(error) = self.recover(peer).await {
            tracing::warn!("connections go on late: {error:#}");
        }
    }

    /// Tells a peer which bumps our rules use, and what was chosen for connections with it.
    async fn tell_all(&self, peer: usize) -> Result<(), Unanswered> {
        wants::send(self, peer).await?;
        {
            let conns = &mut self.state.borrow_mut().conns;
            let of_peer = |pair: &Pair| self.peer_of(pair.remote.ip()) == Some(peer);
            conns.tell_all(now(), of_peer);
        }
        self.wakers.wake(Task::Tell);
        let due = self.take_due(Some(peer)).remove(&peer).unwrap_or_default();
        self.tell_choices(peer, due).await
    }

    /// Carries out what rules here say of all connections with a peer.
    async fn enforce_all(&self, peer: usize) {
        match self.connections().await {
            Ok(mut lives) => {
                lives.retain(|live| live.peer == peer);
                self.enforce(&lives).await;
                let ruled = self.ruled(&lives).into_iter();
                for (bump, lives) in ruled.chain(self.followed_here(&lives)) {
                    self.follow_rules(&lives, bump).await;
                }
            }
            Err(error) => tracing::warn!("{error:#}"),
        }
    }
}
