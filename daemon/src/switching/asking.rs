//! What a peer is asked for its part, and who leaves first.

use std::collections::HashSet;
use std::time::Duration;

use super::Answer;
use crate::conns::{Pair, Version};
use crate::daemon::{Daemon, Unanswered};
use crate::live::Live;
use crate::messages::{Body, MAX_ENTRIES, Outcome};

/// A connection whose kernel has sent no byte for as long sends nothing now.
const SENDS_WITHIN: Duration = Duration::from_millis(200);

impl Daemon {
    /// Asks a peer for its part. Connections that leave their bump while their kernel sends have left
    /// when this returns, if the peer agreed.
    pub(super) async fn negotiate(
        &self,
        peer: usize,
        lives: &[Live],
        bump: u8,
        explicit: bool,
    ) -> Vec<(Pair, Version, Answer)> {
        let pairs: Vec<Pair> = lives.iter().map(|live| live.pair).collect();
        self.unlock_leaving(&pairs, bump).await;
        let sending = match bump {
            0 => self.sending().await,
            _ => HashSet::new(),
        };
        let (first, others): (Vec<Live>, Vec<Live>) =
            lives.iter().partition(|live| sending.contains(&live.pair));
        let others: Vec<Pair> = others.iter().map(|live| live.pair).collect();
        let mut results = self.ask_all(peer, &others, bump, explicit, false).await;
        let pairs: Vec<Pair> = first.iter().map(|live| live.pair).collect();
        let mut leaving = Vec::new();
        for (pair, version, answer) in self.ask_all(peer, &pairs, bump, explicit, true).await {
            match answer {
                Ok((Outcome::Done, _)) => leaving.push(pair),
                refused => results.push((pair, version, refused)),
            }
        }
        self.silence(first.iter().filter(|live| leaving.contains(&live.pair)))
            .await;
        for pair in &leaving {
            let _turn = self.marking.lock().await;
            if let Err(error) = self.mark(pair, bump, explicit).await {
                tracing::warn!("{error}");
            }
        }
        results.extend(self.ask_all(peer, &leaving, bump, explicit, false).await);
        results
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
    pub(super) async fn ask_all(
        &self,
        peer: usize,
        pairs: &[Pair],
        bump: u8,
        explicit: bool,
        ready: bool,
    ) -> Vec<(Pair, Version, Answer)> {
        let mut results = Vec::new();
        for pairs in pairs.chunks(MAX_ENTRIES) {
            let mut again = Vec::new();
            let answers = self.ask_switch(peer, pairs, bump, explicit, ready).await;
            for (pair, version, answer) in answers {
                match answer {
                    Ok((Outcome::Older, generation)) if explicit => {
                        let mut state = self.state.borrow_mut();
                        // Unless that later choice has come here meanwhile: then it stands.
                        let known = state.choices.get(&pair);
                        if let Some(known) = known.filter(|known| known.version == version) {
                            state.choices.propose(pair, bump, self.host, generation);
                            again.push((pair, known));
                        } else {
                            results.push((pair, version, Ok((Outcome::Older, generation))));
                        }
                    }
                    other => results.push((pair, version, other)),
                }
            }
            if again.is_empty() {
                continue;
            }
            // Or the next daemon would give the version that the peer knows to another choice.
            if let Err(error) = self.save() {
                tracing::warn!("{error:#}");
                let choices = &mut self.state.borrow_mut().choices;
                for (pair, known) in again {
                    choices.restore(pair, known);
                    let older = (Outcome::Older, known.version.generation);
                    results.push((pair, known.version, Ok(older)));
                }
                continue;
            }
            let again: Vec<Pair> = again.into_iter().map(|(pair, _)| pair).collect();
            results.extend(self.ask_switch(peer, &again, bump, explicit, ready).await);
        }
        results
    }

    /// Sends one SWITCH; the answer for each connection with the version that it was asked for.
    async fn ask_switch(
        &self,
        peer: usize,
        pairs: &[Pair],
        bump: u8,
        explicit: bool,
        ready: bool,
    ) -> Vec<(Pair, Version, Answer)> {
        let conns: Vec<(Pair, Version)> = {
            let state = self.state.borrow();
            let ours = Version {
                generation: 0,
                host: self.host,
            };
            let version = |pair| match state.choices.get(pair) {
                Some(choice) if explicit && choice.version.host == self.host => choice.version,
                _ => ours,
            };
            pairs.iter().map(|pair| (*pair, version(pair))).collect()
        };
        let body = Body::Switch {
            bump,
            explicit,
            ready,
            conns: conns.clone(),
        };
        match self.ask(peer, body).await {
            Ok(outcomes) => {
                let mut outcomes = outcomes.into_iter();
                conns
                    .into_iter()
                    // An answer that is too short is no answer for the rest.
                    .map(|(pair, v)| (pair, v, outcomes.next().ok_or(Unanswered::Silent)))
                    .collect()
            }
            Err(error) => conns
                .into_iter()
                .map(|(pair, version)| (pair, version, Err(error)))
                .collect(),
        }
    }
}
