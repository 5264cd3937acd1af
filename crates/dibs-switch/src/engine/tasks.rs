//! Tasks that go on for good beside all else. Each looks when something is due, and when it is woken. One peer that does not answer
//! holds up no other.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use dibs_core::Time;
use dibs_settings::Level;
use futures_util::future::{Either, select};

use super::strangers::Strangers;
use super::{Machine, Task, ended, entries, hides, locks, or_warn, rules, shadows, tells};

/// Time between two looks that nothing gave cause for, at least.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Longest time between two of them.
const LOOK_AT_LAST: Duration = Duration::from_secs(10);
/// Rest after such a look, in lengths of it: there may be thousands of connections, on a small router.
const RESTS: u32 = 100;
/// Time between two looks at sessions while a rule asks for one.
const SESSIONS_EVERY: Duration = Duration::from_millis(500);
/// Pause after a look, in lengths of it: looks take a fifth of the time at most.
const PAUSES: u32 = 4;
/// Pauses that may be put off: a few looks have none.
const PUT_OFF: Duration = Duration::from_secs(1);

/// Rest after a look that nothing gave cause for and that began then.
pub(super) fn rest<M: Machine>(m: &M, began: Time) -> Duration {
    let rests = m.now().since(began) * RESTS;
    rests.clamp(LOOK_EVERY, LOOK_AT_LAST)
}

/// Begins all of them.
pub fn begin<M: Machine + 'static>(m: &Rc<M>) {
    let own = || Rc::clone(m);
    if m.keeps_plain_open() {
        let own = own();
        m.spawn(async move { shadows::keep(&*own).await });
    }
    let (sessions, telling, asking, locks) = (own(), own(), own(), own());
    let (forgetting, seeking) = (own(), own());
    m.spawn(async move { keep_sessions(&*sessions).await });
    m.spawn(async move { keep_telling(&telling).await });
    m.spawn(async move { keep_asking(&asking).await });
    m.spawn(async move { keep_locks(&*locks).await });
    m.spawn(async move { keep_forgetting(&*forgetting).await });
    m.spawn(async move { keep_seeking(&seeking).await });
}

/// Waits until then, or for ever without a time; but no longer than until a task is woken. True if it was not.
async fn is_due<M: Machine>(m: &M, task: Task, due: Option<Time>) -> bool {
    let woken = pin!(m.woken(task));
    let Some(due) = due else {
        woken.await;
        return false;
    };
    let late = pin!(m.sleep(due.since(m.now())));
    matches!(select(late, woken).await, Either::Left(_))
}

/// Tells peers of choices, and has connections follow their rules again.
async fn keep_telling<M: Machine + 'static>(m: &Rc<M>) {
    loop {
        let due = m.conns(|conns| {
            let dues = conns.next_telling().into_iter();
            dues.chain(conns.next_moved()).min()
        });
        if !is_due(&**m, Task::Tell, due).await {
            continue;
        }
        let moved = m.conns(|conns| conns.take_moved(m.now()));
        if !moved.is_empty() {
            let own = Rc::clone(m);
            m.spawn(async move {
                or_warn(&*own, rules::follow_again(&*own, moved).await);
            });
        }
        for (peer, due) in tells::take_due(&**m, None) {
            let own = Rc::clone(m);
            m.spawn(async move {
                // What it does not answer it is told again.
                let _ = tells::tell_choices(&*own, peer, due).await;
            });
        }
    }
}

/// Asks peers to confirm where connections are, after each switch and from time to time, and tells them what rules require; lets
/// those follow again before that left their bumps a while ago.
async fn keep_asking<M: Machine + 'static>(m: &Rc<M>) {
    let (busy, told) = (Rc::new(Busy::default()), Rc::new(hides::Told::default()));
    let mut pace = Pace::default();
    loop {
        is_due(&**m, Task::Confirm, Some(m.now() + LOOK_EVERY)).await;
        m.note_done(
            "let connections follow again",
            entries::let_follow(&**m).await,
        );
        let began = m.now();
        m.note_done("ask peers to confirm", ask(m, &busy).await);
        let hidden = hides::tell(m, &told).await;
        m.note_done("tell peers what rules require", hidden);
        // A look lists all connections, and each new one is a cause for one.
        m.sleep(pace.pause(began, m.now())).await;
    }
}

/// Pace of looks for which there is cause again and again.
#[derive(Debug, Default)]
struct Pace {
    /// Pauses that were due when the last look ended.
    due: Duration,
    ended: Time,
}

impl Pace {
    /// Pause after a look between these two times.
    fn pause(&mut self, began: Time, ended: Time) -> Duration {
        let left = self.due.saturating_sub(began.since(self.ended));
        self.due = left + ended.since(began) * PAUSES;
        self.ended = ended;
        self.due.saturating_sub(PUT_OFF)
    }
}

async fn ask<M: Machine + 'static>(m: &Rc<M>, busy: &Rc<Busy>) -> Result<(), M::Fault> {
    for (peer, asked) in locks::unconfirmed(&**m).await? {
        if !busy.begin(peer) {
            continue;
        }
        let (own, busy) = (Rc::clone(m), Rc::clone(busy));
        m.spawn(async move {
            let confirmed = locks::ask(&*own, peer, &asked).await;
            own.note_done("lock what peers confirmed", confirmed);
            if busy.end(peer) {
                own.wake(Task::Confirm);
            }
        });
    }
    Ok(())
}

/// Has rules follow what comes from peers' routers.
async fn keep_seeking<M: Machine + 'static>(m: &Rc<M>) {
    let mut strangers = Strangers::default();
    m.sleep(LOOK_EVERY).await;
    loop {
        let began = m.now();
        let looked = strangers.look(m).await;
        m.note_done("look for connections from peers' routers", looked);
        m.sleep(rest(&**m, began)).await;
    }
}

/// Peers that are being asked. True: a look passed over one meanwhile.
#[derive(Debug, Default)]
pub(super) struct Busy(RefCell<BTreeMap<usize, bool>>);

impl Busy {
    /// Begins to ask a peer. False if it is being asked: that it was passed over is told at the end.
    pub(super) fn begin(&self, peer: usize) -> bool {
        let peers = &mut *self.0.borrow_mut();
        let known = peers.get_mut(&peer).map(|passed_over| *passed_over = true);
        known.is_none() && peers.insert(peer, false).is_none()
    }

    /// Ends to ask a peer. True if it was passed over meanwhile.
    pub(super) fn end(&self, peer: usize) -> bool {
        self.0.borrow_mut().remove(&peer) == Some(true)
    }
}

/// Locks connections that are on their bumps at both ends, and mends what is done to locks.
async fn keep_locks<M: Machine>(m: &M) {
    let mut looks = locks::Looks::default();
    loop {
        // Woken for more that will be due, and there may be thousands: nothing is looked at for that.
        let due = m.conns(|conns| looks.due(conns));
        if is_due(m, Task::Lock, Some(due)).await {
            m.note_done("lock connections", looks.look(m).await);
        }
    }
}

/// Forgets connections that ended.
async fn keep_forgetting<M: Machine>(m: &M) {
    m.sleep(LOOK_EVERY).await;
    loop {
        let began = m.now();
        m.note_done("look for connections that ended", ended::forget(m).await);
        m.sleep(rest(m, began)).await;
    }
}

/// Has rules that prefer their bump follow which peers have a session.
async fn keep_sessions<M: Machine>(m: &M) {
    loop {
        let looked = rules::look_at_sessions(m).await;
        m.note_done("apply rules that prefer their bump", looked);
        let next = m.has_rule(Level::Prefer).then(|| m.now() + SESSIONS_EVERY);
        is_due(m, Task::Sessions, next).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_follow_each_other_take_a_fifth_of_the_time_and_few_have_no_pause() {
        for took in [1, 10, 100, 3000].map(Duration::from_millis) {
            let (mut pace, mut now) = (Pace::default(), Time::ZERO);
            let mut look = || {
                let pause = pace.pause(now, now + took);
                now = now + took + pause;
                pause
            };
            let free = (0..1000).take_while(|_| look().is_zero()).count();
            assert_eq!(free as u128, 250 / took.as_millis(), "{took:?}");
            for _ in 0..100 {
                assert_eq!(look(), took * 4);
            }
        }
        // As many again after a while.
        let mut pace = Pace::default();
        for second in (0..100).step_by(2) {
            let began = Time::ZERO + Duration::from_secs(second);
            let ended = began + Duration::from_millis(250);
            assert!(pace.pause(began, ended).is_zero());
        }
    }

    /// Peer 0 says nothing, look after look; peer 1 is asked and answers at each of them.
    #[test]
    fn a_silent_peer_keeps_nobody_from_being_asked() {
        let busy = Busy::default();
        assert!(busy.begin(0));
        for _ in 0..3 {
            assert!(busy.begin(1));
            assert!(!busy.end(1), "nobody looked meanwhile");
            assert!(!busy.begin(0), "it is being asked");
        }
        assert!(busy.end(0), "what came meanwhile is asked once it answered");
        assert!(busy.begin(0));
        assert!(!busy.end(0));
    }
}
