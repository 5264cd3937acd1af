//! LOCKED in the kernel: set once both ends are on the bump, cleared before either leaves it, set again
//! where it got lost.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::time::Duration;

use dibs_config::Fail;
use dibs_policy::BumpId;
use dibs_policy::conntrack::{Connection, Conntrack, LOOKUPS};

use crate::bumps::translated;
use crate::clock::{instant, now};
use crate::daemon::Daemon;
use crate::live::Live;
use crate::state_file::Saved;
use crate::switching::ROUND;
use crate::terms::{ends, marks, tuple};
use crate::wakers::Task;
use dibs_switch::conns::{Meant, Pair};
use dibs_switch::locks::{self, Here};
use dibs_switch::marks::{Handed, SeenMark};
use dibs_switch::messages::{Answer, Body, Named, Outcome};

/// Between two looks that nothing gave cause for.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Looks of which one is at all of conntrack, also for what we know nothing of.
const LOOKS_PER_WHOLE: u32 = 30;
/// Connections that peers are asked about at one look; the others wait for the next.
const MOST_ASKED: usize = 512;

/// What conntrack has of connections on bumps, as this host sends, in their order: there may be thousands, and
/// a hash table would be twice as large.
#[derive(Default)]
struct Tracked(Vec<(Pair, Entry)>);

impl Tracked {
    /// The last word on each connection counts.
    fn new(mut found: Vec<(Pair, Entry)>) -> Self {
        found.reverse();
        found.sort_by_key(|(pair, _)| *pair);
        found.dedup_by_key(|(pair, _)| *pair);
        Self(found)
    }

    /// The entry of a connection that is on a bump.
    fn get(&self, pair: &Pair) -> Option<&Entry> {
        let at = self
            .0
            .binary_search_by_key(pair, |(known, _)| *known)
            .ok()?;
        Some(&self.0[at].1).filter(|entry| entry.mark.bump != 0)
    }

    /// The bump that the kernel has a connection on.
    fn bump(&self, pair: &Pair) -> Option<u8> {
        self.get(pair).map(|entry| entry.mark.bump)
    }

    fn iter(&self) -> impl Iterator<Item = &(Pair, Entry)> {
        self.0.iter()
    }

    fn into_pairs(self) -> impl Iterator<Item = Pair> {
        self.0.into_iter().map(|(pair, _)| pair)
    }
}

/// Of an entry of conntrack, what there is to look at.
struct Entry {
    mark: SeenMark,
    /// Conntrack saw a RST of it.
    closed: bool,
}

impl Daemon {
    /// Whether anything is locked at all: who lets packets out in plain has to take them in plain.
    fn locks(&self) -> bool {
        self.config.daemon.fail == Fail::Closed
    }

    /// Takes over what an earlier run locked, what is on a bump for no reason that outlives the daemon, and
    /// what has just left one; before anything changes marks.
    pub(crate) async fn adopt_marks(&self) -> anyhow::Result<()> {
        let layout = marks(&self.config);
        let bumps: Vec<BumpId> = self.bumps.all().iter().map(|bump| bump.id).collect();
        let tracked = self.tracked_on(&bumps).await?;
        let plain = self.tracked_as([layout.choice(None)]).await?;
        let lives = self.sockets().await?;
        // What an earlier run wrote is not the choice of another program.
        for (pair, entry) in tracked.iter().chain(plain.iter()) {
            if entry.mark.chosen {
                self.note_mark(pair, entry.mark.bump, true);
            }
        }
        let mut state = self.state.borrow_mut();
        // OVERRIDE that nobody chose: we were killed before we lifted it, see `mark_moved`.
        for pair in plain.into_pairs() {
            state.conns.update(&pair, |conn| {
                if conn.choice.get().is_none() {
                    conn.move_to_left(now());
                }
            });
        }
        for live in lives {
            let Some(&Entry { mark, .. }) = tracked.get(&live.pair) else {
                continue;
            };
            let SeenMark { bump, locked, .. } = mark;
            if locked {
                state.conns.update(&live.pair, |conn| conn.lock.adopt(bump));
            }
            let choice = state.conns.get(&live.pair).choice.of(live.socket);
            let chosen = mark.chosen || choice.is_some();
            if !chosen && let Some(by) = state.hand_of(&live, bump) {
                let handed = Some(Handed { bump, by });
                state
                    .conns
                    .update(&live.pair, |conn| conn.hand_over(handed));
            }
        }
        Ok(())
    }

    /// Has the kernel's marks follow where the file gives devices other numbers than it did: what was on a
    /// device that it names no more goes nowhere.
    pub(crate) async fn renumber(&self, saved: &Saved) -> Result<(), dibs_policy::Error> {
        let layout = marks(&self.config);
        let devices = saved.devices(self.bumps.all());
        let mut moves = Vec::new();
        for number in saved.devices.keys().copied() {
            let ours = translated(&devices, number);
            if let (true, Some(id)) = (ours != number, BumpId::new(number)) {
                let tracked = self.tracked_on(&[id]).await?;
                moves.extend(tracked.into_pairs().map(|pair| (pair, ours)));
            }
        }
        let mut conntrack = self.conntrack()?;
        for (pair, number) in moves {
            let mark = BumpId::new(number).map_or(0, |id| layout.bump(id));
            let mask = layout.bump_mask();
            conntrack.set_mark(&tuple(&pair), mark, mask).await?;
        }
        Ok(())
    }

    /// Lets what is about to leave its bump for another or for plain take plain packets.
    pub(crate) async fn unlock_leaving(&self, pairs: &[Pair], bump: u8) {
        let holds_back = |pair: &&Pair| self.state.borrow().conns.get(pair).lock.holds_back(bump);
        let leaving: Vec<Pair> = pairs.iter().filter(holds_back).copied().collect();
        if leaving.is_empty() {
            return;
        }
        self.update_each(&leaving, |conn| conn.lock.release());
        self.note_locks().await;
        let _turn = self.marking.lock().await;
        let cleared = async {
            let mut conntrack = self.conntrack()?;
            let locked = marks(&self.config).locked_bit();
            for pair in &leaving {
                conntrack.set_mark(&tuple(pair), 0, locked).await?;
            }
            Ok::<_, dibs_policy::Error>(())
        };
        if let Err(error) = cleared.await {
            // It is cleared with the bump; until then plain packets are lost.
            tracing::warn!("cannot unlock connections: {error}");
        }
    }

    /// Asks peers about connections that are on a bump here, and notes which are there too.
    async fn ask_confirmations(&self) -> anyhow::Result<()> {
        if !self.locks() || self.state.borrow().installed.is_empty() {
            return Ok(());
        }
        let mut asking: BTreeMap<(usize, u8), Vec<Meant>> = BTreeMap::new();
        {
            let _turn = self.looking.lock().await;
            let pairs = self.sockets_as(|live| Some(live.pair)).await?;
            let tracked = self.tracked_of(&pairs).await?;
            let now = now();
            let wants_asking = |live: Live| {
                let bump = self.stays_on(&live, &tracked)?;
                let state = self.state.borrow();
                let wants = state.conns.get(&live.pair).lock.wants_asking(bump, now);
                wants.then(|| (live.peer, bump, Meant::from(&live)))
            };
            let mut wanting = self.sockets_as(wants_asking).await?;
            wanting.truncate(MOST_ASKED);
            for (peer, bump, conn) in wanting {
                asking.entry((peer, bump)).or_default().push(conn);
            }
        }
        let asked = asking
            .iter()
            .map(|((peer, bump), conns)| self.ask_confirmation(*peer, *bump, conns));
        let answers = futures_util::future::join_all(asked).await.concat();
        let confirmed = { answers.iter() }
            .filter(|(.., answer)| matches!(answer, Ok((Outcome::Done, _))))
            .map(|(_, conn, _)| conn.pair);
        // It may have left while the peer was asked.
        let confirmed: Vec<Pair> = confirmed.collect();
        let (lives, tracked) = match confirmed.is_empty() {
            true => Default::default(),
            false => self.looked_up(&confirmed).await?,
        };
        for (bump, Meant { pair, socket }, answer) in answers {
            let live = lives.get(&pair).filter(|live| live.socket == socket);
            let stays_on = live.and_then(|live| self.stays_on(live, &tracked));
            self.update(&pair, |conn| {
                conn.lock.handle_answer(bump, answer, stays_on, now());
            });
        }
        self.wakers.wake(Task::Lock);
        Ok(())
    }

    /// Asks one peer, until it does not answer.
    async fn ask_confirmation(
        &self,
        peer: usize,
        bump: u8,
        conns: &[Meant],
    ) -> Vec<(u8, Meant, Answer)> {
        let mut answers = Vec::new();
        for conns in conns.chunks(ROUND) {
            let body = |named: &[(usize, Named)]| Body::Confirm {
                bump,
                conns: named.iter().map(|(_, named)| *named).collect(),
            };
            let some = self.ask_about(peer, conns, body).await;
            let answers_none = some.iter().any(Result::is_err);
            let some = conns.iter().zip(some);
            answers.extend(some.map(|(conn, answer)| (bump, *conn, answer)));
            if answers_none {
                break;
            }
        }
        answers
    }

    /// Answers whether connections are on a bump here; those that are, the peer just said, are so at both
    /// ends.
    pub(crate) async fn on_confirm(
        &self,
        peer: usize,
        bump: u8,
        conns: Vec<Named>,
    ) -> Vec<(Outcome, u64)> {
        let pairs: Vec<Pair> = conns.iter().map(|named| named.pair.reversed()).collect();
        let (lives, tracked) = match self.looked_up(&pairs).await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!("{error:#}");
                return vec![(Outcome::Failed, 0); pairs.len()];
            }
        };
        let mut outcomes = Vec::with_capacity(pairs.len());
        for (pair, named) in pairs.into_iter().zip(conns) {
            let live = lives.get(&pair).filter(|live| live.peer == peer);
            let here = live.map(|live| Here {
                socket: live.socket,
                stays_on: self.stays_on(live, &tracked),
            });
            let answer = locks::answer(bump, &named, here);
            if answer.0 == Outcome::Done && self.locks() {
                self.update(&pair, |conn| conn.lock.confirm(bump, now()));
                self.wakers.wake(Task::Lock);
            }
            outcomes.push(answer);
        }
        outcomes
    }

    /// The bump that a connection is on, unless it is about to leave it or not there yet.
    fn stays_on(&self, live: &Live, tracked: &Tracked) -> Option<u8> {
        let on = tracked.bump(&live.pair);
        let state = self.state.borrow();
        let choice = state.conns.get(&live.pair).choice.of(live.socket);
        let is_required = state.requirement(live).is_some();
        locks::stays_on(
            on.filter(|_| !live.over && !live.bound),
            choice,
            is_required,
        )
    }

    /// What conntrack has of connections to peers on any bump.
    async fn tracked(&self) -> Result<Tracked, dibs_policy::Error> {
        let bumps: Vec<BumpId> = self.state.borrow().installed.keys().copied().collect();
        self.tracked_on(&bumps).await
    }

    /// As [`tracked`](Self::tracked), on these bumps.
    async fn tracked_on(&self, bumps: &[BumpId]) -> Result<Tracked, dibs_policy::Error> {
        let layout = marks(&self.config);
        let marks = bumps
            .iter()
            .map(|bump| (layout.bump(*bump), layout.bump_mask()));
        self.tracked_as(marks).await
    }

    /// As [`tracked`](Self::tracked), with these values in these bits of their marks.
    async fn tracked_as(
        &self,
        marks: impl IntoIterator<Item = (u32, u32)>,
    ) -> Result<Tracked, dibs_policy::Error> {
        let mut conntrack = self.conntrack()?;
        let mut tracked = Vec::new();
        for (value, mask) in marks {
            let note = |found: Connection| {
                let ends = self.ends_to_peers(&found);
                tracked.extend(ends.map(|pair| (pair, self.entry(&found))));
                None::<()>
            };
            conntrack.marked(value, mask, note).await?;
        }
        Ok(Tracked::new(tracked))
    }

    /// As [`tracked`](Self::tracked), at least of these connections.
    async fn tracked_of(&self, pairs: &[Pair]) -> Result<Tracked, dibs_policy::Error> {
        if pairs.len() > LOOKUPS {
            return self.tracked().await;
        }
        let mut tracked = self.got(pairs).await?;
        let state = self.state.borrow();
        tracked.0.retain(|(_, entry)| {
            let bump = BumpId::new(entry.mark.bump);
            bump.is_some_and(|bump| state.installed.contains_key(&bump))
        });
        Ok(tracked)
    }

    fn entry(&self, found: &Connection) -> Entry {
        Entry {
            mark: self.seen(found),
            closed: found.was_closed(),
        }
    }

    /// What conntrack has of these connections, one by one.
    async fn got(&self, pairs: &[Pair]) -> Result<Tracked, dibs_policy::Error> {
        let mut conntrack = self.conntrack()?;
        let mut tracked = Vec::new();
        for pair in pairs {
            if let Some(found) = conntrack.get(&tuple(pair)).await? {
                tracked.push((*pair, self.entry(&found)));
            }
        }
        Ok(Tracked::new(tracked))
    }

    /// The bumps that the kernel has these connections on; 0: plain.
    pub(crate) async fn bumps_of(
        &self,
        pairs: &[Pair],
    ) -> Result<Vec<(Pair, u8)>, dibs_policy::Error> {
        let tracked = self.got(pairs).await?;
        let bump = |(pair, entry): &(Pair, Entry)| (*pair, entry.mark.bump);
        Ok(tracked.iter().map(bump).collect())
    }

    /// What is alive of these connections, and what conntrack has of them.
    async fn looked_up(&self, pairs: &[Pair]) -> anyhow::Result<(HashMap<Pair, Live>, Tracked)> {
        let tracked = self.got(pairs).await?;
        Ok((self.sockets_of(pairs).await?, tracked))
    }

    /// A tracked connection as either end may have begun it, if the other is behind a peer.
    pub(crate) fn ends_to_peers(&self, entry: &Connection) -> impl Iterator<Item = Pair> {
        let to_peer = |pair: &Pair| self.peer_of(pair.remote.ip()).is_some();
        ends(entry).into_iter().filter(to_peer)
    }

    /// Locks what is due.
    async fn lock_due(&self) -> anyhow::Result<()> {
        let now = now();
        let due: Vec<Pair> = self.state.borrow().conns.locks_due(now).collect();
        let (lives, tracked) = self.looked_up(&due).await?;
        let is_on =
            |pair: &Pair, bump| lives.contains_key(pair) && tracked.bump(pair) == Some(bump);
        let due = self.state.borrow_mut().conns.lock_due(now, is_on);
        let mut conntrack = self.conntrack()?;
        for (pair, bump) in due {
            self.lock(&mut conntrack, &pair, bump).await?;
        }
        self.note_locks().await;
        Ok(())
    }

    /// Brings LOCKED in the kernel to what is due, and mends what was done to the entries: of connections that are
    /// alive or that we know to be locked, or of the `whole` table.
    async fn set_locks(&self, whole: bool) -> anyhow::Result<()> {
        if self.state.borrow().installed.is_empty() {
            return Ok(());
        }
        let now = now();
        let _looking = self.looking.lock().await;
        // Before the sockets: what is locked and has none has ended.
        let mut known: Vec<Pair> = {
            let conns = &self.state.borrow().conns;
            conns.locked().chain(conns.locks_due(now)).collect()
        };
        let ends = |live: Live| Some((live.pair, live.established));
        let mut lives = self.sockets_as(ends).await?;
        lives.sort_unstable();
        let tracked = if whole {
            self.tracked().await?
        } else {
            known.extend(lives.iter().map(|(pair, _)| *pair));
            known.sort_unstable();
            known.dedup();
            self.tracked_of(&known).await?
        };
        let is_alive = |pair: &Pair| lives.binary_search_by_key(pair, |(pair, _)| *pair).is_ok();
        let is_on = |pair: &Pair, bump| is_alive(pair) && tracked.bump(pair) == Some(bump);
        self.state.borrow_mut().conns.lock_due(now, is_on);
        let mut conntrack = self.conntrack()?;
        for (pair, established) in &lives {
            let Some(Entry { mark, closed }) = tracked.get(pair) else {
                continue;
            };
            if !mark.locked {
                self.lock(&mut conntrack, pair, mark.bump).await?;
            } else if *established && *closed {
                // A plain RST that was dropped, but had been seen by conntrack before.
                conntrack.revive(&tuple(pair)).await?;
            }
        }
        // Another connection of the same ends is not to inherit it.
        for (pair, entry) in tracked.iter() {
            if entry.mark.locked && !is_alive(pair) && !is_alive(&pair.reversed()) {
                let _turn = self.marking.lock().await;
                let bit = marks(&self.config).locked_bit();
                conntrack.set_mark(&tuple(pair), 0, bit).await?;
            }
        }
        let locked: Vec<Pair> = self.state.borrow().conns.locked().collect();
        let passing: BTreeSet<Pair> = { locked.into_iter() }
            .filter(|pair| self.may_live(pair))
            .collect();
        let lives = |pair: &Pair| is_alive(pair) || passing.contains(pair);
        let on = |pair: &Pair| tracked.bump(pair);
        self.state.borrow_mut().conns.sweep_locks(lives, on);
        self.note_locks().await;
        Ok(())
    }

    /// Sets LOCKED of a connection that is locked on `bump` by our record.
    pub(crate) async fn lock(
        &self,
        conntrack: &mut Conntrack,
        pair: &Pair,
        bump: u8,
    ) -> Result<(), dibs_policy::Error> {
        let _turn = self.marking.lock().await;
        if self.state.borrow().conns.get(pair).lock.locked() != Some(bump) {
            return Ok(());
        }
        let bit = marks(&self.config).locked_bit();
        conntrack.set_mark(&tuple(pair), bit, bit).await.map(drop)
    }
}

/// Asks peers to confirm, after each switch and from time to time.
pub async fn ask(daemon: Rc<Daemon>) {
    loop {
        let woken = daemon.wakers.woken(Task::Confirm);
        let _ = tokio::time::timeout(LOOK_EVERY, woken).await;
        daemon
            .events
            .note("ask peers to confirm", daemon.ask_confirmations().await);
    }
}

/// Keeps LOCKED in the kernel as it should be.
pub async fn keep(daemon: Rc<Daemon>) {
    let mut look = tokio::time::Instant::now();
    let mut looks = 0;
    loop {
        let due = daemon.state.borrow().conns.next_lock();
        let until = due.map_or(look, |due| look.min(instant(due)));
        // Told of more that will be due, and there may be thousands: nothing is looked at for that.
        let told = daemon.wakers.woken(Task::Lock);
        if tokio::time::timeout_at(until, told).await.is_ok() {
            continue;
        }
        let kept = if until < look {
            daemon.lock_due().await
        } else {
            let kept = daemon.set_locks(looks == 0).await;
            looks = (looks + 1) % LOOKS_PER_WHOLE;
            look = tokio::time::Instant::now() + LOOK_EVERY;
            kept
        };
        daemon.events.note("lock connections", kept);
    }
}
