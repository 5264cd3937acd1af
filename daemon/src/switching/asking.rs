//! What a peer is asked for its part, and who leaves first.

use std::collections::HashSet;
use std::time::Duration;

use super::{Answer, Mark};
use crate::conns::{Pair, Socket, Version};
use crate::daemon::{Daemon, Unanswered};
use crate::live::Live;
use crate::messages::{Body, MAX_ENTRIES, Named, Outcome, Switch};
use crate::plausible::Implausible;

/// A connection whose kernel has sent no byte for as long sends nothing now.
const SENDS_WITHIN: Duration = Duration::from_millis(200);
/// Connections that move at once: between the first word about one and the last its two ends are apart, so
/// it is not to wait for many others. As many messages as a peer takes at once, and not more than chains
/// whose start it can hold back.
pub(crate) const ROUND: usize = 12 * MAX_ENTRIES;

/// A connection that something is to be done with: this one, and no later one of the same ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meant {
    /// Its ends.
    pub(crate) pair: Pair,
    /// Its socket here.
    pub(crate) socket: Socket,
}

impl From<&Live> for Meant {
    fn from(live: &Live) -> Self {
        Self {
            pair: live.pair,
            socket: live.socket,
        }
    }
}

impl Daemon {
    /// Asks a peer for its part. Connections that leave their bump while their kernel sends have left
    /// when this returns, if the peer agreed to follow: those are returned, too.
    pub(super) async fn negotiate(
        &self,
        peer: usize,
        lives: &[Live],
        bump: u8,
        explicit: bool,
    ) -> (Vec<(Pair, Version, Answer)>, HashSet<Pair>) {
        let pairs: Vec<Pair> = lives.iter().map(|live| live.pair).collect();
        self.unlock_leaving(&pairs, bump).await;
        let sending = match self.is_outside(bump) {
            true => self.sending().await,
            false => HashSet::new(),
        };
        let (first, others): (Vec<&Live>, Vec<&Live>) =
            { lives.iter() }.partition(|live| sending.contains(&live.pair));
        let meant = |lives: &[&Live]| lives.iter().copied().map(Meant::from).collect::<Vec<_>>();
        let whether = |ready| Switch {
            bump,
            explicit,
            ready,
        };
        let others = meant(&others);
        let mut results = self.ask_all(peer, &others, whether(false)).await;
        let mut agreed = HashSet::new();
        for (pair, version, answer) in self.ask_all(peer, &meant(&first), whether(true)).await {
            match answer {
                Ok((Outcome::Done, _)) => {
                    agreed.insert(pair);
                }
                refused => results.push((pair, version, refused)),
            }
        }
        let leaving = first.into_iter().filter(|live| agreed.contains(&live.pair));
        let leaving: Vec<&Live> = leaving.collect();
        self.silence(leaving.iter().copied()).await;
        let leaving = meant(&leaving);
        let left = self.leave(&leaving, bump, explicit).await;
        results.extend(self.ask_all(peer, &leaving, whether(false)).await);
        (results, left)
    }

    /// Has connections that fell silent leave their bump, but those of which the peer chose otherwise
    /// meanwhile. Those that have.
    async fn leave(&self, silent: &[Meant], bump: u8, explicit: bool) -> HashSet<Pair> {
        let still = self.still_there(silent).await;
        let _turn = self.marking.lock().await;
        let (leaving, kept): (Vec<Meant>, Vec<Meant>) = {
            let choices = &self.state.borrow().choices;
            let stands = |conn: &Meant| {
                let choice = choices.of(&conn.pair, conn.socket);
                !explicit || choice.is_some_and(|choice| choice.bump == bump)
            };
            still.into_iter().partition(stands)
        };
        kept.iter().for_each(|conn| self.end_drains(&conn.pair));
        let pairs: Vec<Pair> = leaving.iter().map(|conn| conn.pair).collect();
        let marked = match explicit {
            true => {
                let mark = |pair: &Pair| Mark {
                    pair: *pair,
                    bump,
                    explicit,
                };
                self.mark(&pairs.iter().map(mark).collect::<Vec<_>>()).await
            }
            false => self.mark_leaving(&pairs, bump).await,
        };
        for error in marked.into_iter().filter_map(Result::err) {
            tracing::warn!("{error}");
        }
        pairs.into_iter().collect()
    }

    /// Those of these connections that are not over.
    async fn still_there(&self, meant: &[Meant]) -> Vec<Meant> {
        let pairs: Vec<Pair> = meant.iter().map(|conn| conn.pair).collect();
        let lives = match self.sockets_of(&pairs).await {
            Ok(lives) => lives,
            Err(error) => {
                tracing::warn!("{error}");
                return Vec::new();
            }
        };
        let is_there = |conn: &&Meant| {
            let live = lives.get(&conn.pair);
            live.is_some_and(|live| live.socket == conn.socket)
        };
        meant.iter().filter(is_there).copied().collect()
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
            .map(|conn| Pair {
                local: (conn.tuple.src, conn.tuple.sport).into(),
                remote: (conn.tuple.dst, conn.tuple.dport).into(),
            })
            .collect()
    }

    /// Asks a peer for its part; once more where it knew of a later choice.
    async fn ask_all(
        &self,
        peer: usize,
        conns: &[Meant],
        switch: Switch,
    ) -> Vec<(Pair, Version, Answer)> {
        let mut results = Vec::new();
        let mut again = Vec::new();
        let answers = self.ask_versions(peer, conns, switch).await;
        for (conn, (pair, version, answer)) in conns.iter().zip(answers) {
            match answer {
                Ok((Outcome::Older, generation)) if switch.explicit => {
                    let mut state = self.state.borrow_mut();
                    // Unless that later choice has come here meanwhile: then it stands.
                    let known = state.choices.of(&pair, conn.socket);
                    let near = { &state.choices }.may_be(&pair, conn.socket, generation);
                    if !near {
                        state.refused.note(Implausible::Generation);
                    }
                    if let Some(known) = known.filter(|known| near && known.version == version) {
                        let (bump, host) = (switch.bump, self.host);
                        { &mut state.choices }.propose(pair, conn.socket, bump, host, generation);
                        again.push((*conn, known));
                    } else {
                        results.push((pair, version, Ok((Outcome::Older, generation))));
                    }
                }
                other => results.push((pair, version, other)),
            }
        }
        if again.is_empty() {
            return results;
        }
        // Or the next daemon would give the version that the peer knows to another choice.
        if let Err(error) = self.save() {
            tracing::warn!("{error:#}");
            let choices = &mut self.state.borrow_mut().choices;
            for (Meant { pair, .. }, known) in again {
                choices.restore(pair, known);
                let older = (Outcome::Older, known.version.generation);
                results.push((pair, known.version, Ok(older)));
            }
            return results;
        }
        let again: Vec<Meant> = again.into_iter().map(|(conn, _)| conn).collect();
        results.extend(self.ask_versions(peer, &again, switch).await);
        results
    }

    /// Asks with the versions that our choices have; the answer for each connection with its version.
    async fn ask_versions(
        &self,
        peer: usize,
        conns: &[Meant],
        switch: Switch,
    ) -> Vec<(Pair, Version, Answer)> {
        let conns: Vec<(Meant, Version)> = {
            let state = self.state.borrow();
            let ours = Version {
                generation: 0,
                host: self.host,
            };
            let version = |conn: &Meant| match state.choices.of(&conn.pair, conn.socket) {
                Some(choice) if switch.explicit && choice.version.host == self.host => {
                    choice.version
                }
                _ => ours,
            };
            conns.iter().map(|conn| (*conn, version(conn))).collect()
        };
        let answers = self.ask_switch(peer, &conns, switch).await;
        let answers = conns.into_iter().zip(answers);
        answers
            .map(|((conn, version), answer)| (conn.pair, version, answer))
            .collect()
    }

    /// Asks with SWITCHes, of up to [`ROUND`] connections.
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

    /// Asks about up to [`ROUND`] connections, by the names that the peer gives its sockets. What it
    /// cannot tell by its name it is asked again with the right one, if the connection here is still the
    /// one that is meant. `body` has the question from the names, with the index of each.
    pub(crate) async fn ask_about(
        &self,
        peer: usize,
        conns: &[Meant],
        body: impl Fn(&[(usize, Named)]) -> Body,
    ) -> Vec<Answer> {
        let ask_some = async |indices: &[usize]| -> Vec<Answer> {
            let named: Vec<(usize, Named)> = { indices.iter() }
                .map(|index| (*index, self.name(&conns[*index])))
                .collect();
            match self.ask(peer, body(&named)).await {
                // An answer that is too short is no answer for the rest.
                Ok(outcomes) => { outcomes.into_iter().map(Ok) }
                    .chain(std::iter::repeat(Err(Unanswered::Silent)))
                    .take(indices.len())
                    .collect(),
                Err(error) => vec![Err(error); indices.len()],
            }
        };
        let ask = async |indices: &[usize]| {
            let asked = indices.chunks(MAX_ENTRIES).map(&ask_some);
            futures_util::future::join_all(asked).await.concat()
        };
        let all: Vec<usize> = (0..conns.len()).collect();
        let mut answers: Vec<Answer> = ask(&all).await;
        let renamed = |(index, answer): (usize, &Answer)| match answer {
            Ok((Outcome::OtherSocket, name)) => Some((index, Socket(u32::try_from(*name).ok()?))),
            _ => None,
        };
        let renamed: Vec<(usize, Socket)> =
            answers.iter().enumerate().filter_map(renamed).collect();
        if renamed.is_empty() {
            return answers;
        }
        let meant: Vec<Meant> = renamed.iter().map(|(index, _)| conns[*index]).collect();
        let still = self.still_there(&meant).await;
        let still: HashSet<Pair> = still.iter().map(|conn| conn.pair).collect();
        let mut again = Vec::new();
        for (index, theirs) in renamed {
            let Meant { pair, socket } = conns[index];
            if !still.contains(&pair) {
                answers[index] = Ok((Outcome::NoConnection, 0));
                continue;
            }
            self.state.borrow_mut().names.learn(pair, socket, theirs);
            again.push(index);
        }
        if !again.is_empty() {
            let later = ask(&again).await;
            for (index, answer) in again.into_iter().zip(later) {
                answers[index] = answer;
            }
        }
        answers
    }

    /// How a question names a connection.
    pub(super) fn name(&self, conn: &Meant) -> Named {
        let names = &self.state.borrow().names;
        Named {
            pair: conn.pair,
            socket: names.get(&conn.pair, conn.socket),
        }
    }
}
