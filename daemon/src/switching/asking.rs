//! Peers are asked about many connections at once: a driver of the machines that know what each is asked, and what
//! follows from its answer ([`dibs_switch::asking`], [`dibs_switch::naming`]).

use std::collections::HashSet;
use std::time::Duration;

use super::Mark;
use crate::daemon::{Daemon, State};
use crate::live::Live;
use crate::terms::pair_of;
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
    /// Asks a peer for its part in up to [`ROUND`] moves, all to one bump. Connections that leave their bump while their
    /// kernel sends have left when this returns, if the peer agreed to follow.
    pub(super) async fn negotiate(&self, peer: usize, moves: &mut [Move]) {
        let Some(switch) = moves.first().map(|(_, first)| first.switch(false)) else {
            return;
        };
        let bump = switch.bump;
        let pairs: Vec<Pair> = moves.iter().map(|(live, _)| live.pair).collect();
        self.unlock_leaving(&pairs, bump).await;
        let sending = match self.bumps.is_outside(bump) {
            true => self.sending().await,
            false => HashSet::new(),
        };
        for (live, negotiation) in &mut *moves {
            negotiation.begin(sending.contains(&live.pair));
        }
        while let Some(step) = moves
            .iter()
            .map(|(_, negotiation)| negotiation.next())
            .min()
        {
            let turn = |(_, negotiation): &&mut Move| negotiation.next() == step;
            let turn: Vec<&mut Move> = moves.iter_mut().filter(turn).collect();
            match step {
                Step::Save => self.save_versions(turn),
                Step::Ask { ready } => {
                    let switch = Switch { ready, ..switch };
                    self.ask_for_part(peer, turn, switch).await;
                }
                Step::Drain => self.leave(turn, switch).await,
                Step::Conclude => return,
            }
        }
    }

    fn save_versions(&self, moves: Vec<&mut Move>) {
        let saved = self.save();
        let conns = &mut self.state.borrow_mut().conns;
        for (_, negotiation) in moves {
            negotiation.handle_saved(conns, saved.is_ok());
        }
        if let Err(error) = saved {
            tracing::warn!("{error:#}");
        }
    }

    async fn ask_for_part(&self, peer: usize, moves: Vec<&mut Move>, switch: Switch) {
        let conn = |(_, negotiation): &&mut Move| (negotiation.conn(), negotiation.version());
        let conns: Vec<(Meant, Version)> = moves.iter().map(conn).collect();
        let answers = self.ask_switch(peer, &conns, switch).await;
        let State { conns, refused, .. } = &mut *self.state.borrow_mut();
        for ((_, negotiation), answer) in moves.into_iter().zip(answers) {
            if let Err(why) = negotiation.handle_answer(conns, answer) {
                refused.note(why);
            }
        }
    }

    /// Has connections fall silent and leave their bump, but those of which the peer chose otherwise meanwhile.
    async fn leave(&self, moves: Vec<&mut Move>, switch: Switch) {
        let Switch { bump, explicit, .. } = switch;
        self.silence(moves.iter().map(|(live, _)| live)).await;
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
        let marked = match explicit {
            true => {
                let mark = |pair: &Pair| Mark {
                    pair: *pair,
                    bump,
                    explicit,
                };
                self.mark(&leaving.iter().map(mark).collect::<Vec<_>>())
                    .await
            }
            false => self.mark_leaving(&leaving, bump).await,
        };
        for error in marked.into_iter().filter_map(Result::err) {
            tracing::warn!("{error}");
        }
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
