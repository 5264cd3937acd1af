//! Peers are asked about many connections at once: a driver of the machines that know what each is asked, and what
//! follows from its answer ([`dibs_switch::asking`], [`dibs_switch::naming`]).

use std::collections::HashSet;
use std::time::Duration;

use super::marking::{Failed, Mark, warn_of};
use crate::clock::now;
use crate::daemon::{Daemon, State};
use crate::live::Live;
use crate::terms::pair_of;
use crate::wakers::Task;
use dibs_switch::asking::{Negotiation, Step};
use dibs_switch::conns::{Meant, Pair, Version};
use dibs_switch::messages::{Answer, Body, MAX_ENTRIES, Named, Switch, Unanswered};
use dibs_switch::naming::{Next, Query};

/// A connection whose kernel has sent no byte for as long sends nothing now.
const SENDS_WITHIN: Duration = Duration::from_millis(200);
/// Connections that move at once: between the first word about one and the last its two ends are apart, so
/// it is not to wait for many others. As many messages as a peer takes at once, and not more than chains
/// whose start it can hold back.
pub(crate) const ROUND: usize = 12 * MAX_ENTRIES;

/// A connection that moves, and what its peer is asked for that.
pub(super) type Move = (Live, Negotiation);

impl Daemon {
    /// Carries up to [`ROUND`] moves with a peer out, all to one bump: as it agrees. What the kernel did not take of
    /// choices, and why.
    pub(super) async fn carry_out(&self, peer: usize, moves: &mut [Move]) -> Failed {
        let mut failed = Failed::new();
        while let Some(step) = moves
            .iter()
            .map(|(_, negotiation)| negotiation.next())
            .min()
        {
            let turn = |(_, negotiation): &&mut Move| negotiation.next() == step;
            let mut turn: Vec<&mut Move> = moves.iter_mut().filter(turn).collect();
            let pairs: Vec<Pair> = turn.iter().map(|(live, _)| live.pair).collect();
            let switch = turn[0].1.switch(false);
            match step {
                Step::Unlock => self.unlock_leaving(&pairs, switch.bump).await,
                Step::Look => {
                    let sending = match self.bumps.is_outside(switch.bump) {
                        true => self.sending().await,
                        false => HashSet::new(),
                    };
                    for (live, negotiation) in &mut turn {
                        negotiation.handle_look(sending.contains(&live.pair));
                    }
                }
                Step::Save => self.save_versions(&mut turn),
                Step::Ask { ready } => {
                    let switch = Switch { ready, ..switch };
                    self.ask_for_part(peer, &mut turn, switch).await;
                }
                Step::Drain => self.silence(turn.iter().map(|(live, _)| live)).await,
                Step::Leave => self.leave(&mut turn, switch).await,
                Step::Conclude => {
                    let conns = &mut self.state.borrow_mut().conns;
                    for (_, negotiation) in &mut turn {
                        negotiation.conclude(conns);
                    }
                }
                Step::PutBack(bump) => {
                    let back = pairs.into_iter().map(|pair| (pair, bump));
                    self.put_back(back.collect()).await;
                }
                Step::Mark => {
                    failed.extend(self.mark_choices(&pairs).await);
                    let conns = &mut self.state.borrow_mut().conns;
                    for (_, negotiation) in &mut turn {
                        negotiation.handle_marked(conns, now());
                    }
                    self.wakers.wake(Task::Tell);
                }
                Step::GiveIn(own) => {
                    for (live, negotiation) in &turn {
                        match negotiation.stood() {
                            Some(version) => self.give_in(peer, live.pair, version, own).await,
                            None => self.follow_peer(&live.pair, own).await,
                        }
                    }
                }
                Step::Move => warn_of(&self.mark_moved(&pairs, switch.bump).await),
                Step::Done => break,
            }
            // Of what else was done there is nothing to say.
            let same = turn
                .into_iter()
                .filter(|(_, negotiation)| negotiation.next() == step);
            same.for_each(|(_, negotiation)| negotiation.handle_done());
        }
        failed
    }

    fn save_versions(&self, moves: &mut [&mut Move]) {
        let saved = self.save();
        let conns = &mut self.state.borrow_mut().conns;
        for (_, negotiation) in moves {
            negotiation.handle_saved(conns, saved.is_ok());
        }
        if let Err(error) = saved {
            tracing::warn!("{error:#}");
        }
    }

    async fn ask_for_part(&self, peer: usize, moves: &mut [&mut Move], switch: Switch) {
        let conns: Vec<(Meant, Version)> = { moves.iter() }
            .map(|(_, negotiation)| (negotiation.conn(), negotiation.version()))
            .collect();
        let answers = self.ask_switch(peer, &conns, switch).await;
        let State { conns, refused, .. } = &mut *self.state.borrow_mut();
        for ((_, negotiation), answer) in moves.iter_mut().zip(answers) {
            if let Err(why) = negotiation.handle_answer(conns, answer) {
                refused.note(why);
            }
        }
    }

    /// Has connections that fell silent leave their bump, but those of which the peer chose otherwise meanwhile.
    async fn leave(&self, moves: &mut [&mut Move], switch: Switch) {
        let Switch { bump, explicit, .. } = switch;
        let conns: Vec<Meant> = moves.iter().map(|(live, _)| live.into()).collect();
        let still = self.still_there(&conns).await;
        let _turn = self.marking.lock().await;
        let mut leaving = Vec::new();
        {
            let conns = &self.state.borrow().conns;
            for (live, negotiation) in moves {
                let is_there = still.contains(&live.pair);
                if negotiation.handle_silent(conns, is_there) {
                    leaving.push(live.pair);
                } else if is_there {
                    self.end_drains(&live.pair);
                }
            }
        }
        warn_of(&match explicit {
            true => {
                let chosen = leaving.iter().map(|pair| Mark::chosen(*pair, bump));
                self.mark(&chosen.collect::<Vec<_>>()).await
            }
            false => self.mark_leaving(&leaving, bump).await,
        });
    }

    /// Those of these connections that are not over.
    async fn still_there(&self, conns: &[Meant]) -> HashSet<Pair> {
        let pairs: Vec<Pair> = conns.iter().map(|conn| conn.pair).collect();
        let lives = match self.sockets_of(&pairs).await {
            Ok(lives) => lives,
            Err(error) => {
                tracing::warn!("{error}");
                return HashSet::new();
            }
        };
        let is_there = |conn: &&Meant| {
            let live = lives.get(&conn.pair);
            live.is_some_and(|live| live.socket == conn.socket)
        };
        conns
            .iter()
            .filter(is_there)
            .map(|conn| conn.pair)
            .collect()
    }

    /// The connections whose kernels here send by a bump now.
    async fn sending(&self) -> HashSet<Pair> {
        // Without the data path nothing is under way.
        let Ok((now, conns)) = self.driver.conns().await else {
            return HashSet::new();
        };
        let sends = |spoke| now.since(spoke) < SENDS_WITHIN;
        conns
            .iter()
            .filter(|conn| conn.spoke.is_some_and(sends))
            .map(|conn| pair_of(&conn.tuple))
            .collect()
    }

    /// Asks with SWITCHes, of up to [`ROUND`] connections; the answer for each.
    pub(super) async fn ask_switch(
        &self,
        peer: usize,
        conns: &[(Meant, Version)],
        switch: Switch,
    ) -> Vec<Answer> {
        let meant: Vec<Meant> = conns.iter().map(|(conn, _)| *conn).collect();
        let body = |named: &[(usize, Named)]| Body::Switch {
            switch,
            conns: { named.iter() }
                .map(|(index, named)| (*named, conns[*index].1))
                .collect(),
        };
        self.ask_about(peer, &meant, body).await
    }

    /// Asks about up to [`ROUND`] connections, by the names that the peer gives its sockets. `body` has the
    /// question from the names, with the index of each.
    pub(crate) async fn ask_about(
        &self,
        peer: usize,
        conns: &[Meant],
        body: impl Fn(&[(usize, Named)]) -> Body,
    ) -> Vec<Answer> {
        let ask_some = async |indices: &[usize]| -> Vec<Answer> {
            let named: Vec<(usize, Named)> = {
                let known = &self.state.borrow().conns;
                { indices.iter() }
                    .map(|index| (*index, known.named(&conns[*index])))
                    .collect()
            };
            match self.rpc.ask(peer, body(&named)).await {
                // An answer that is too short is no answer for the rest.
                Ok(outcomes) => { outcomes.into_iter().map(Ok) }
                    .chain(std::iter::repeat(Err(Unanswered::Silent)))
                    .take(indices.len())
                    .collect(),
                Err(error) => vec![Err(error); indices.len()],
            }
        };
        let mut queries: Vec<Query> = conns.iter().copied().map(Query::new).collect();
        loop {
            let wants = |next| {
                let wants = queries.iter().enumerate();
                let wants = wants.filter(move |(_, query)| query.next() == next);
                wants.map(|(index, _)| index).collect::<Vec<usize>>()
            };
            let (asking, looking) = (wants(Next::Ask), wants(Next::Look));
            if !asking.is_empty() {
                let asked = asking.chunks(MAX_ENTRIES).map(&ask_some);
                let answers = futures_util::future::join_all(asked).await.concat();
                for (index, answer) in asking.into_iter().zip(answers) {
                    queries[index].handle_answer(answer);
                }
            } else if !looking.is_empty() {
                let meant: Vec<Meant> = looking.iter().map(|index| conns[*index]).collect();
                let still = self.still_there(&meant).await;
                let known = &mut self.state.borrow_mut().conns;
                for index in looking {
                    let is_there = still.contains(&conns[index].pair);
                    queries[index].handle_look(known, is_there);
                }
            } else {
                return queries.iter().filter_map(Query::answer).collect();
            }
        }
    }
}
