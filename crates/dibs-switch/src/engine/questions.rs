//! Questions of a peer's daemon, which are dealt with one after the other; those that ask the same of other connections, and came
//! together, at once.

use std::collections::VecDeque;
use std::rc::Rc;

use super::matches::Shown;
use super::{Machine, ROUND, hides, knocks, locks, matches, switches, wants};
use crate::messages::{Body, Message};

/// Questions of one peer that wait for their turn.
#[derive(Debug, Default)]
pub struct Desk {
    waiting: VecDeque<Message>,
    shown: Shown,
}

/// Questions that are dealt with at once.
#[derive(Debug)]
pub struct Questions {
    /// Their numbers, and the number of outcomes that belong to each.
    parts: Vec<(u32, usize)>,
    /// All that they ask.
    body: Body,
    shown: Shown,
}

impl Desk {
    /// Has a question wait.
    pub fn push(&mut self, question: Message) {
        self.waiting.push_back(question);
    }

    /// Takes the next question, and those like it that came with it, up to a round.
    pub fn take(&mut self) -> Option<Questions> {
        let Message { request, mut body } = self.waiting.pop_front()?;
        let mut count = outcomes(&body);
        let mut parts = vec![(request, count)];
        while count < ROUND
            && let Some(next) = self.waiting.front_mut()
            && let Some(more) = join(&mut body, &mut next.body)
        {
            parts.push((next.request, more));
            count += more;
            self.waiting.pop_front();
        }
        let shown = Rc::clone(&self.shown);
        Some(Questions { parts, body, shown })
    }
}

/// Number of outcomes that a question is answered with, at most.
fn outcomes(body: &Body) -> usize {
    match body {
        Body::Switch { conns, .. } => conns.len(),
        Body::Knock(conns) => conns.len(),
        Body::Match(conns) => conns.len(),
        _ => usize::MAX,
    }
}

/// Adds to a question what another one asks, if that is the same of other connections. Returns their number.
fn join(body: &mut Body, other: &mut Body) -> Option<usize> {
    match (body, other) {
        (
            Body::Switch { switch, conns },
            Body::Switch {
                switch: same,
                conns: more,
            },
        ) if switch == same => Some(append(conns, more)),
        (Body::Knock(conns), Body::Knock(more)) => Some(append(conns, more)),
        (Body::Match(conns), Body::Match(more)) => Some(append(conns, more)),
        _ => None,
    }
}

fn append<T>(conns: &mut Vec<T>, more: &mut Vec<T>) -> usize {
    let count = more.len();
    conns.append(more);
    count
}

impl Questions {
    /// Number of the questions.
    pub fn count(&self) -> usize {
        self.parts.len()
    }

    /// Deals with them. Returns the answers.
    pub async fn answer<M: Machine + 'static>(self, shared: &Rc<M>, peer: usize) -> Vec<Message> {
        let m = &**shared;
        let outcomes = match self.body {
            Body::Switch { switch, conns } => switches::answer(m, peer, switch, conns).await,
            Body::Confirm { bump, conns } => locks::answer(m, peer, bump, &conns).await,
            Body::Knock(conns) => knocks::answer(m, peer, &conns).await,
            Body::Hide(conns) => hides::answer(m, peer, &conns).await,
            Body::Match(conns) => matches::answer(m, peer, &conns).await,
            Body::Seek(ports) => vec![matches::show(shared, peer, &ports, &self.shown).await],
            Body::Want {
                sequence, bumps, ..
            } => vec![(wants::answer(m, peer, sequence, bumps).await, 0)],
            other @ (Body::Silent { .. } | Body::Measure { .. }) => {
                m.answer_beside(peer, other).await
            }
            Body::Answer(_) => unreachable!("answers are taken before"),
        };
        let mut outcomes = outcomes.into_iter();
        let answer = |(request, count)| Message {
            request,
            body: Body::Answer(outcomes.by_ref().take(count).collect()),
        };
        self.parts.into_iter().map(answer).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use dibs_wire::FlowKey;

    use super::*;
    use crate::conns::Version;
    use crate::messages::{Ground, Named, Switch};

    fn switch(ready: bool) -> Switch {
        Switch {
            bump: None,
            explicit: true,
            ready,
            ground: Ground::Proved,
        }
    }

    fn question(request: u32, ready: bool, count: usize) -> Message {
        let end = |last: u8| SocketAddr::from(([10, 0, 0, last], 1));
        let pair = FlowKey::tcp(end(1), end(2));
        let socket = Default::default();
        let one = (Named { pair, socket }, Version::default());
        Message {
            request,
            body: Body::Switch {
                switch: switch(ready),
                conns: vec![one; count],
            },
        }
    }

    #[test]
    fn only_what_asks_the_same_is_dealt_with_at_once() {
        let mut desk = Desk::default();
        for (request, ready) in [(1, true), (2, true), (3, false), (4, true)] {
            desk.push(question(request, ready, 20));
        }
        let mut parts = Vec::new();
        while let Some(questions) = desk.take() {
            parts.push(questions.parts);
        }
        let expected = [vec![(1, 20), (2, 20)], vec![(3, 20)], vec![(4, 20)]];
        assert_eq!(parts, expected);
    }

    #[test]
    fn a_round_is_dealt_with_at_once_and_no_more() {
        let mut desk = Desk::default();
        (0..30).for_each(|request| desk.push(question(request, true, 20)));
        let counts = std::iter::from_fn(|| desk.take().map(|questions| questions.count()));
        assert_eq!(counts.collect::<Vec<_>>(), [12, 12, 6]);
    }
}
