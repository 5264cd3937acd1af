//! HIDE: connections that rules here require on bumps, of which peers are to show nothing in plain either.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use dibs_core::Time;
use dibs_settings::Level;
use dibs_wire::FlowKey;

use super::tasks::Busy;
use super::{Live as _, Machine, News, ROUND, Task, asks};
use crate::messages::{Body, Named, Outcome};
use crate::shadow::{HIDDEN_FOR, Shadow};

/// Time after which a peer is told again.
const TOLD_EACH: Duration = Duration::from_secs(20);
const _: () = assert!(TOLD_EACH.as_nanos() < HIDDEN_FOR.as_nanos() / 2);

/// Connections that peers were told of, and when.
#[derive(Debug, Default)]
pub(super) struct Told {
    at: RefCell<BTreeMap<FlowKey, Time>>,
    busy: Busy,
}

/// Tells peers what rules require by now. Of connections that both hosts call alike, nothing is shown unless one of them asks for that.
pub(super) async fn tell<M: Machine + 'static>(m: &Rc<M>, told: &Rc<Told>) -> Result<(), M::Fault> {
    let mut bumped = match m.has_rule(Level::Require) {
        true => m.matched(),
        false => Vec::new(),
    };
    m.conns(|conns| bumped.retain(|pair| !m.is_outside(conns.get(pair).place.marked())));
    if bumped.is_empty() {
        told.at.take();
        return Ok(());
    }
    let mut required = m.find(&bumped).await?;
    required.retain(|_, live| m.ruling(live, |ruling| ruling.requirement().is_some()));
    let now = m.now();
    let due = {
        let at = &mut *told.at.borrow_mut();
        at.retain(|pair, at| required.contains_key(pair) && now.since(*at) < TOLD_EACH);
        required.retain(|pair, _| !at.contains_key(pair));
        required
    };
    for (peer, lives) in asks::by_peer::<M>(due.into_values()) {
        if !told.busy.begin(peer) {
            continue;
        }
        let (own, told) = (Rc::clone(m), Rc::clone(told));
        m.spawn(async move {
            tell_peer(&*own, peer, &lives, &told).await;
            if told.busy.end(peer) {
                own.wake(Task::Confirm);
            }
        });
    }
    Ok(())
}

/// Tells one peer, until it does not answer.
async fn tell_peer<M: Machine>(m: &M, peer: usize, lives: &[M::Live], told: &Told) {
    for lives in lives.chunks(ROUND) {
        let conns: Vec<_> = lives.iter().map(|live| live.meant()).collect();
        let body =
            |named: &[(usize, Named)]| Body::Hide(named.iter().map(|(_, named)| *named).collect());
        let answers = asks::ask_about(m, peer, &conns, body).await;
        let answered = { conns.iter().zip(&answers) }.filter(|(_, answer)| answer.is_ok());
        let answered = answered.map(|(conn, _)| (conn.pair, m.now()));
        told.at.borrow_mut().extend(answered);
        if answers.iter().any(Result::is_err) {
            break;
        }
    }
}

/// Shows nothing of these connections for a while, as a rule of the peer wants. Returns what it is answered.
pub(super) async fn answer<M: Machine>(m: &M, peer: usize, conns: &[Named]) -> Vec<(Outcome, u64)> {
    let pairs: Vec<FlowKey> = conns.iter().map(|named| named.pair.reversed()).collect();
    let lives = match m.find(&pairs).await {
        Ok(found) => found,
        Err(fault) => {
            let why = &format!("{fault:#}");
            m.tell(News::Peer { peer, why });
            return vec![(Outcome::Failed, 0); pairs.len()];
        }
    };
    let answer = |(pair, named): (&FlowKey, &Named)| {
        let Some(live) = lives.get(pair).filter(|live| live.peer() == peer) else {
            return (Outcome::NoConnection, 0);
        };
        let own = live.meant().socket;
        if own != named.socket {
            return (Outcome::OtherSocket, own.0.into());
        }
        if m.keeps_plain_open() {
            let now = m.now();
            m.shadows(|shadows| {
                let shadow = shadows.entry(*pair);
                shadow.or_insert_with(|| Shadow::new(None, now)).hide(now);
            });
        }
        (Outcome::Done, 0)
    };
    let answers = pairs.iter().zip(conns).map(answer).collect();
    m.wake(Task::Shadow);
    answers
}
