//! What the daemons of peers are asked and told.

use tokio::sync::oneshot;

use super::Daemon;
use crate::driver::Gone;
use crate::rules::Rule;
use crate::terms::policy_prefix;
use dibs_switch::asking::{PATIENCE, Unanswered};
use dibs_switch::messages::{Body, Message, Outcome};

/// Who waits for a peer's answer.
pub(super) struct Question {
    peer: usize,
    answer: oneshot::Sender<Vec<(Outcome, u64)>>,
}

impl From<Gone> for Unanswered {
    fn from(_: Gone) -> Self {
        Self::Ended
    }
}

impl Daemon {
    /// Asks a peer's daemon, and waits for the answer.
    pub(crate) async fn ask(
        &self,
        peer: usize,
        body: Body,
    ) -> Result<Vec<(Outcome, u64)>, Unanswered> {
        let request = self.next_request.get();
        self.next_request.set(request.wrapping_add(1));
        let (answer, answered) = oneshot::channel();
        self.questions
            .borrow_mut()
            .insert(request, Question { peer, answer });
        let asked = async {
            self.post(peer, Message { request, body }).await?;
            match tokio::time::timeout(PATIENCE, answered).await {
                Ok(Ok(outcomes)) => Ok(outcomes),
                _ => Err(Unanswered::Silent),
            }
        };
        let answer = asked.await;
        self.questions.borrow_mut().remove(&request);
        answer
    }

    /// Sends a message to a peer's daemon.
    pub(crate) async fn post(&self, peer: usize, message: Message) -> Result<(), Unanswered> {
        let sent = self.driver.send_control(peer, message.encode()).await?;
        sent.map_err(Unanswered::from)
    }

    /// Hands an answer to whoever asked.
    pub(crate) fn answered(&self, peer: usize, request: u32, outcomes: Vec<(Outcome, u64)>) {
        let mut questions = self.questions.borrow_mut();
        if questions.get(&request).is_some_and(|q| q.peer == peer) {
            let question = questions.remove(&request).expect("it was just seen");
            // Who asked may have given up.
            let _ = question.answer.send(outcomes);
        }
    }

    /// The bumps that our rules put connections of a peer into.
    pub(crate) fn wanted_of(&self, peer: usize) -> u16 {
        let state = self.state.borrow();
        let behind: Vec<_> = self.config.peers[peer]
            .addresses
            .iter()
            .map(policy_prefix)
            .collect();
        let concerns = |rule: &&Rule| {
            rule.classes.iter().any(|class| {
                class.destination.is_none_or(|to| {
                    behind
                        .iter()
                        .any(|net| net.contains(to) || to.contains(*net))
                })
            })
        };
        state
            .rules_in_force()
            .filter(concerns)
            .fold(0, |bumps, rule| bumps | 1 << rule.bump_id().get())
    }

    /// Has a peer's daemon make ready what our rules need there; waits until it has.
    pub(crate) async fn send_want(&self, peer: usize) -> Result<(), Unanswered> {
        let sequence = self.next_want.get();
        self.next_want.set(sequence + 1);
        let bumps = self.wanted_of(peer);
        let devices = self.device_names().into_iter().collect();
        let want = Body::Want {
            sequence,
            bumps,
            devices,
        };
        self.ask(peer, want).await.map(drop)
    }

    /// As [`send_want`](Self::send_want), to all peers with a session at once.
    pub(crate) async fn send_wants(&self) {
        let peers = 0..self.config.peers.len();
        let asked = peers.map(|peer| async move {
            match self.send_want(peer).await {
                // It hears of it as soon as there is a session.
                Ok(()) | Err(Unanswered::NoSession) => {}
                Err(error) => {
                    let name = self.peer_name(peer);
                    tracing::warn!(dibs.peer = name, "peer {name}: {error}");
                }
            }
        });
        futures_util::future::join_all(asked).await;
    }
}
