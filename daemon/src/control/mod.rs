//! Users of the control socket: who asks and what they may see, whose turn it is, and who was let go.
//!
//! To have something done that takes the daemon a while, root goes first, then the members of the group, one user after the
//! other. What a uid asks for waits in a line of its own; the first of each such line waits in one of all members; and only
//! the first of that stands beside root, until it is done. So whoever asks without end holds root up by one change of the
//! members', and other users by one each.

pub(crate) mod events;
pub(crate) mod metrics;
pub(crate) mod socket;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use dibs_control::{ErrorKind, Failure};
use tokio::sync::{Mutex, MutexGuard, OwnedMutexGuard};

use crate::host::live::Live;

/// Clients of one uid that are served at once, and what they have looked up: they cannot keep other members out.
pub(crate) const CLIENTS_OF_UID: usize = 8;
/// Changes that a member of the group may have under way.
const CHANGES_OF_UID: usize = 4;

/// How many clients of members of the group were let go.
#[derive(Debug, Default)]
pub(crate) struct TurnedAway {
    /// For want of a place.
    pub(crate) refused: Cell<u64>,
    /// As they asked nothing, or did not read what they were told.
    pub(crate) idle: Cell<u64>,
}

/// Gives users their turns. A request waits for [`admit`](Self::admit), what the daemon changes by itself for
/// [`own_turn`](Self::own_turn); what peers ask waits for neither.
pub(crate) struct Users {
    /// Taken while a request changes something.
    changes: Turns,
    /// Taken while a member of the group is told what is found out for him.
    looks: Turns,
    turned_away: TurnedAway,
}

/// A request is served until this is dropped.
pub(crate) type Admitted<'a> = (Option<Turn<'a>>, Option<MemberTurn<'a>>);

impl Default for Users {
    fn default() -> Self {
        Self {
            changes: Turns::new(CHANGES_OF_UID),
            looks: Turns::new(CLIENTS_OF_UID),
            turned_away: TurnedAway::default(),
        }
    }
}

impl Users {
    /// Waits for the turn of a request.
    ///
    /// # Errors
    /// A member of the group has too much under way.
    pub(crate) async fn admit(
        &self,
        caller: Caller,
        changes: bool,
    ) -> Result<Admitted<'_>, Failure> {
        Ok(match changes {
            true => (Some(self.changes.take(caller).await?), None),
            false => (None, self.looks.member(caller).await?),
        })
    }

    /// Waits for a turn to change something that nobody asked for.
    pub(crate) async fn own_turn(&self) -> Turn<'_> {
        self.changes.own().await
    }

    /// Counts who is let go.
    pub(crate) fn turned_away(&self) -> &TurnedAway {
        &self.turned_away
    }

    /// For `status`, by name.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 3] {
        [
            ("changes_refused", self.changes.refused()),
            ("clients_refused", self.turned_away.refused.get()),
            ("clients_idle", self.turned_away.idle.get()),
        ]
    }
}

/// How far a change of many connections is, for whoever waits for it.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    of: Cell<usize>,
    done: Cell<usize>,
}

impl Progress {
    /// Number of connections that were dealt with, and of all.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.done.get() as u64, self.of.get() as u64)
    }

    /// So many more are dealt with, of so many.
    pub(crate) fn note(&self, more: usize, of: usize) {
        self.of.set(of);
        self.done.update(|done| done + more);
    }
}

/// The uid of root.
pub const ROOT: u32 = 0;

/// Who asks: the uid at the other end of the socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    /// Its user.
    pub(crate) uid: u32,
}

impl Caller {
    pub(crate) fn is_root(self) -> bool {
        self.uid == ROOT
    }

    /// Members of the group see and move what is their own (docs/threat-model.md, "Keys and the host"); what only passes is root's.
    pub(crate) fn may(self, uid: Option<u32>) -> bool {
        self.is_root() || Some(self.uid) == uid
    }

    /// True if a connection is alive, and they may see it.
    pub(crate) fn sees(self, live: &Live) -> bool {
        !live.over && self.may(live.uid)
    }
}

/// What a user is told of an error: one that is no [`Failure`] is that something which should work did not.
pub(crate) fn failure(error: anyhow::Error) -> Failure {
    let failed = |error| Failure::new(ErrorKind::Failed, format!("{error:#}"));
    error.downcast().unwrap_or_else(failed)
}

/// It cannot be as things are.
pub(crate) fn refused(message: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Refused, message)
}

/// Takes turns. One thing is done at a time.
pub(crate) struct Turns {
    /// Of one uid: what is done and what waits.
    most: usize,
    done: Mutex<()>,
    members: Mutex<()>,
    lines: RefCell<BTreeMap<u32, Line>>,
    refused: Cell<u64>,
}

/// What a uid asked for.
#[derive(Default)]
struct Line {
    length: usize,
    turn: Arc<Mutex<()>>,
}

/// It is somebody's turn until this is dropped: no other member waits beside root.
pub(crate) struct Turn<'a> {
    _done: MutexGuard<'a, ()>,
    _member: Option<MemberTurn<'a>>,
}

/// It is a uid's turn among the members until this is dropped.
pub(crate) struct MemberTurn<'a> {
    _members: MutexGuard<'a, ()>,
    _line: OwnedMutexGuard<()>,
    _place: Place<'a>,
}

struct Place<'a> {
    turns: &'a Turns,
    uid: u32,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut lines = self.turns.lines.borrow_mut();
        let line = lines
            .get_mut(&self.uid)
            .expect("a line is there while somebody is in it");
        line.length -= 1;
        if line.length == 0 {
            lines.remove(&self.uid);
        }
    }
}

impl Turns {
    /// At most so many of a uid are done or wait.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            most,
            done: Mutex::new(()),
            members: Mutex::new(()),
            lines: RefCell::default(),
            refused: Cell::new(0),
        }
    }

    /// Waits for a turn.
    ///
    /// # Errors
    /// A member of the group has too much under way.
    pub(crate) async fn take(&self, caller: Caller) -> Result<Turn<'_>, Failure> {
        let member = self.member(caller).await?;
        Ok(Turn {
            _done: self.done.lock().await,
            _member: member,
        })
    }

    /// Waits for a turn of root's, or of the daemon's own.
    pub(crate) async fn own(&self) -> Turn<'_> {
        Turn {
            _done: self.done.lock().await,
            _member: None,
        }
    }

    /// Waits for a turn among the members of the group; root need not.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub(crate) async fn member(&self, caller: Caller) -> Result<Option<MemberTurn<'_>>, Failure> {
        if caller.is_root() {
            return Ok(None);
        }
        let (place, line) = self.line_up(caller.uid)?;
        let line = line.lock_owned().await;
        Ok(Some(MemberTurn {
            _members: self.members.lock().await,
            _line: line,
            _place: place,
        }))
    }

    fn line_up(&self, uid: u32) -> Result<(Place<'_>, Arc<Mutex<()>>), Failure> {
        let mut lines = self.lines.borrow_mut();
        let line = lines.entry(uid).or_default();
        if line.length >= self.most {
            self.refused.update(|count| count + 1);
            let most = self.most;
            return Err(Failure::new(
                ErrorKind::Refused,
                format!(
                    "{most} changes of uid {uid} are in progress, which is the limit: try again when one is done"
                ),
            ));
        }
        line.length += 1;
        let turn = Arc::clone(&line.turn);
        Ok((Place { turns: self, uid }, turn))
    }

    /// How many were refused.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.get()
    }
}

/// Whom an event concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// All who may follow.
    All,
    /// Root.
    Root,
    /// Root, and this user.
    User(u32),
    /// This user; root knows.
    UserAlone(u32),
}

impl Audience {
    /// Of what concerns connections of this owner; none: it only passes this host.
    pub(crate) fn of(uid: Option<u32>) -> Self {
        match uid {
            Some(uid) if uid != ROOT => Self::User(uid),
            _ => Self::Root,
        }
    }

    pub(crate) fn includes(self, caller: Caller) -> bool {
        match self {
            Self::All => true,
            Self::Root => caller.is_root(),
            Self::User(uid) => caller.is_root() || caller.uid == uid,
            Self::UserAlone(uid) => caller.uid == uid,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use futures_util::FutureExt as _;
    use tokio::task::{LocalSet, yield_now};

    use super::*;

    const ROOT: Caller = Caller { uid: 0 };
    const MANY: usize = 1000;

    /// What is served, in order.
    type Served = Rc<RefCell<Vec<u32>>>;

    /// Asks `times` times, each once the one before is done.
    async fn ask(turns: Rc<Turns>, uid: u32, times: usize, served: Served) {
        for _ in 0..times {
            let turn = turns.take(Caller { uid }).await.expect("it is in bounds");
            served.borrow_mut().push(uid);
            // As what is done waits for the kernel.
            for _ in 0..3 {
                yield_now().await;
            }
            drop(turn);
        }
    }

    fn run(body: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        LocalSet::new().block_on(&runtime.expect("a runtime"), body);
    }

    #[test]
    fn root_waits_for_what_is_under_way_and_nothing_else() {
        run(async {
            let (turns, served) = (Rc::new(Turns::new(4)), Served::default());
            let mut loops = Vec::new();
            for uid in [1000, 1000, 1000, 1000, 1001, 1001, 1002] {
                let asking = ask(Rc::clone(&turns), uid, MANY, Rc::clone(&served));
                loops.push(tokio::task::spawn_local(asking));
            }
            for _ in 0..20 {
                // The loops are in their midst.
                while !served.borrow().len().is_multiple_of(7) {
                    yield_now().await;
                }
                yield_now().await;
                let before = served.borrow().len();
                ask(Rc::clone(&turns), ROOT.uid, 1, Rc::clone(&served)).await;
                let served = served.borrow();
                let at = served[before..].iter().position(|uid| *uid == 0);
                assert_eq!(at, Some(0), "{:?}", &served[before..]);
            }
            loops.iter().for_each(|asking| asking.abort());
        });
    }

    #[test]
    fn members_take_turns_by_user_however_many_requests_one_has() {
        run(async {
            let (turns, served) = (Rc::new(Turns::new(4)), Served::default());
            let mut loops = Vec::new();
            for uid in [1000, 1000, 1000, 1000, 1001] {
                let asking = ask(Rc::clone(&turns), uid, MANY, Rc::clone(&served));
                loops.push(tokio::task::spawn_local(asking));
            }
            while served.borrow().len() < 200 {
                yield_now().await;
            }
            loops.iter().for_each(|asking| asking.abort());
            let served = served.borrow();
            let few = served.iter().filter(|uid| **uid == 1001).count();
            assert!(few >= 99, "{few} of {}", served.len());
        });
    }

    #[test]
    fn what_a_user_has_under_way_is_bounded_and_places_come_back() {
        run(async {
            let turns = Rc::new(Turns::new(2));
            let member = Caller { uid: 1000 };
            for round in 1..=3 {
                let first = turns.take(member).await.expect("room");
                let other = Rc::clone(&turns);
                let second = tokio::task::spawn_local(async move {
                    drop(other.take(member).await.expect("room"));
                });
                yield_now().await;
                let third = turns.take(member).now_or_never();
                let Some(Err(refused)) = third else {
                    panic!("a third waits");
                };
                assert_eq!(
                    refused.message,
                    "2 changes of uid 1000 are in progress, which is the limit: try again when one is done"
                );
                assert_eq!(turns.refused(), round);
                drop(first);
                second.await.expect("it is done");
            }
            // Who does not wait any more has no place.
            let first = turns.take(member).await.expect("room");
            let other = Rc::clone(&turns);
            let gone = tokio::task::spawn_local(async move { drop(other.take(member).await) });
            yield_now().await;
            gone.abort();
            assert!(gone.await.is_err());
            drop(first);
            drop(turns.take(member).await.expect("room"));
            assert!(turns.lines.borrow().is_empty());
        });
    }
}
