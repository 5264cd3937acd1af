//! Follows the conntrack table while anything is installed: entries of connections on a bump that vanish
//! are made again, and what others do to marks is noticed, and told to the peer.

use std::convert::Infallible;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::time::Duration;

use dibs_policy::BumpId;
use dibs_policy::conntrack::{self, Connection, Conntrack, Events};
use tokio::time::sleep;

use crate::clock::now;
use crate::daemon::Daemon;
use crate::events::Audience;
use crate::live::Live;
use crate::switching::{Mark, Marked, Moved, Progress};
use crate::terms::{ends, marks, tuple};
use dibs_switch::conns::{Choice, Pair};
use dibs_switch::marks::{Hand, Handed};

/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// What came by a bump after its connection had left it does not pull it back for so long.
pub(crate) const STRAGGLERS: Duration = Duration::from_secs(5);

/// Questions to conntrack that are kept open, at most.
const MOST_KEPT: usize = 4;

/// A socket to ask conntrack by, which others use after. To close one takes as long as the kernel needs to
/// clear away what the backstop was told to forget: some hundredths of a second.
pub(crate) struct Asking<'a> {
    daemon: &'a Daemon,
    conntrack: Option<Conntrack>,
}

impl Deref for Asking<'_> {
    type Target = Conntrack;

    fn deref(&self) -> &Conntrack {
        self.conntrack
            .as_ref()
            .expect("it is given back at the end")
    }
}

impl DerefMut for Asking<'_> {
    fn deref_mut(&mut self) -> &mut Conntrack {
        self.conntrack
            .as_mut()
            .expect("it is given back at the end")
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let kept = &mut *self.daemon.conntracks.borrow_mut();
        if kept.len() < MOST_KEPT {
            kept.extend(self.conntrack.take().filter(Conntrack::is_idle));
        }
    }
}

impl Daemon {
    /// Something to ask conntrack by.
    pub(crate) fn conntrack(&self) -> Result<Asking<'_>, dibs_policy::Error> {
        let kept = self.conntracks.borrow_mut().pop();
        let conntrack = Some(kept.map_or_else(Conntrack::open, Ok)?);
        let daemon = self;
        Ok(Asking { daemon, conntrack })
    }
}

/// Follows the table for good.
pub async fn follow(daemon: Rc<Daemon>) {
    let mut missed = false;
    loop {
        let Err(error) = follow_once(&daemon, missed).await;
        daemon.events.note("follow the conntrack table", Err(error));
        missed = true;
        sleep(RETRY).await;
    }
}

/// `missed`: events may have passed that nobody saw.
async fn follow_once(daemon: &Rc<Daemon>, missed: bool) -> anyhow::Result<Infallible> {
    let mut events = Events::open()?;
    if missed {
        catch_up(daemon).await?;
        daemon
            .events
            .note("follow the conntrack table", anyhow::Ok(()));
    }
    loop {
        match events.next().await? {
            conntrack::Event::Destroyed(entry) => {
                let goes_on = daemon.lose(&entry).await;
                for pair in ends(&entry) {
                    restore(daemon, pair, goes_on).await?;
                }
            }
            conntrack::Event::New(entry) => {
                daemon.note_followed(&entry).await;
                let chosen = entry.mark & marks(&daemon.config).override_bit() != 0;
                match choice_of(daemon, &entry) {
                    // It has no mark of ours yet, whatever rules set.
                    Some((pair, choice)) if !chosen && !agrees(daemon, &entry, choice) => {
                        restore(daemon, pair, false).await?;
                    }
                    _ => note_update(daemon, &entry).await?,
                }
                let conns = &mut daemon.state.borrow_mut().conns;
                conns.update_each(&ends(&entry), |conn| conn.set_ended(false));
            }
            conntrack::Event::Update(entry) => {
                daemon.note_followed(&entry).await;
                note_update(daemon, &entry).await?;
            }
            conntrack::Event::Lost => catch_up(daemon).await?,
        }
    }
}

/// Brings marks and our records together where events were missed.
async fn catch_up(daemon: &Rc<Daemon>) -> anyhow::Result<()> {
    daemon.find_followed().await?;
    let mut conntrack = daemon.conntrack()?;
    let chosen = marks(&daemon.config).override_bit();
    for entry in conntrack.marked(chosen, chosen, Some).await? {
        note_update(daemon, &entry).await?;
    }
    daemon.mark_all_choices().await;
    // One that follows has no choice to say where it belongs, and while this end alone sends, nothing
    // comes that it could follow anew.
    let followed: Vec<Pair> = {
        let state = daemon.state.borrow();
        let followed = { state.conns.iter() }.filter(|(_, conn)| conn.followed().is_some());
        followed.map(|(pair, _)| *pair).collect()
    };
    for pair in followed {
        let tuple = tuple(&pair);
        if conntrack.get(&tuple).await?.is_none() {
            restore(daemon, pair, daemon.may_live(&pair)).await?;
        }
    }
    Ok(())
}

/// The choice for a tracked connection.
fn choice_of(daemon: &Daemon, entry: &Connection) -> Option<(Pair, Choice)> {
    let state = daemon.state.borrow();
    let known = |pair: Pair| Some((pair, state.conns.get(&pair).choice.get()?));
    ends(entry).into_iter().find_map(known)
}

/// Whether an entry says what was chosen, or what stood before while the peer is asked. Another choice than
/// these is another program's, and later.
fn agrees(daemon: &Daemon, entry: &Connection, choice: Choice) -> bool {
    let marks = marks(&daemon.config);
    let bump = bump_of(daemon, entry);
    match entry.mark & marks.override_bit() {
        0 => choice.pending,
        _ => bump == choice.bump || was_written(daemon, entry, bump),
    }
}

/// Whether we gave an entry its bump, and nothing has changed it since.
fn was_written(daemon: &Daemon, entry: &Connection, bump: u8) -> bool {
    let state = daemon.state.borrow();
    let written = ends(entry)
        .iter()
        .find_map(|pair| Some(state.conns.get(pair).written()?.bump));
    written == Some(bump)
}

/// The bump that an entry names; 0: none.
fn bump_of(daemon: &Daemon, entry: &Connection) -> u8 {
    let bump = marks(&daemon.config).bump_of(entry.mark);
    bump.map_or(0, |bump| bump.get())
}

/// The entry of a connection that was chosen or follows is gone; the connection may not be. `passes`: it
/// has no socket here that would say so, and goes on.
async fn restore(daemon: &Daemon, pair: Pair, passes: bool) -> anyhow::Result<()> {
    let (chosen, followed) = {
        let state = daemon.state.borrow();
        let conn = state.conns.get(&pair);
        (conn.choice.get().is_some(), conn.followed())
    };
    if !chosen && followed.is_none() {
        return Ok(());
    }
    let lives = daemon.sockets_of(&[pair]).await?;
    let lives = passes || lives.get(&pair).is_some_and(|live| !live.over);
    match followed {
        _ if lives && chosen => daemon.mark_choice(&pair).await?,
        Some(bump) if lives => {
            let _turn = daemon.marking.lock().await;
            let explicit = false;
            daemon
                .mark_one(Mark {
                    pair,
                    bump,
                    explicit,
                })
                .await?;
        }
        Some(_) => daemon.forget_followed(&pair).await,
        None => {}
    }
    Ok(())
}

/// An entry that was made anew has no LOCKED.
async fn relock(daemon: &Daemon, entry: &Connection) -> anyhow::Result<()> {
    let bump = bump_of(daemon, entry);
    if bump == 0 || entry.mark & marks(&daemon.config).locked_bit() != 0 {
        return Ok(());
    }
    for pair in ends(entry) {
        let locked = daemon.state.borrow().conns.get(&pair).lock.locked();
        if locked == Some(bump) {
            daemon.lock(&mut *daemon.conntrack()?, &pair, bump).await?;
        }
    }
    Ok(())
}

/// A mark that says otherwise than our record was set by another program.
async fn note_update(daemon: &Rc<Daemon>, entry: &Connection) -> anyhow::Result<()> {
    if is_known(daemon, entry) {
        return relock(daemon, entry).await;
    }
    let now = {
        // What the event tells may have been put right since.
        let _turn = daemon.marking.lock().await;
        let now = daemon.conntrack()?.get(&entry.original).await?;
        match now.filter(|now| !is_known(daemon, now)) {
            Some(now) => now,
            None => return Ok(()),
        }
    };
    let bump = bump_of(daemon, &now);
    let ends: Vec<Pair> = daemon.ends_to_peers(&now).collect();
    let lives = daemon.sockets_of(&ends).await?;
    let Some(live) = lives.into_values().next() else {
        return Ok(());
    };
    if live.over || (bump != 0 && daemon.bumps.get(bump).is_none()) {
        return Ok(());
    }
    let required = daemon.state.borrow().requirement(&live).map(|rule| rule.id);
    if let Some(rule) = required {
        // The kernel's own rule puts it back with the next packet.
        tracing::debug!(
            rule,
            "another program changed the mark of a required connection"
        );
        return Ok(());
    }
    let marks = marks(&daemon.config);
    if now.mark & marks.override_bit() != 0 {
        chosen_elsewhere(daemon, live, bump);
    } else if choice_of(daemon, &now).is_some() {
        // Cleared with a bump that went, or by hand: a choice outlives that, as long as it matters.
        let installed = !daemon.state.borrow().installed.is_empty();
        if installed {
            daemon.mark_choice(&live.pair).await?;
        }
    } else if has_just_left(daemon, &live, bump) {
        let moved = daemon.mark_moved(&[live.pair], 0).await;
        moved.into_iter().collect::<Marked>()?;
    } else {
        followed_elsewhere(daemon, live, bump);
    }
    Ok(())
}

/// Whether a connection is on a bump only for a straggler that came by it after it had left.
fn has_just_left(daemon: &Daemon, live: &Live, bump: u8) -> bool {
    let state = daemon.state.borrow();
    let written = state.conns.get(&live.pair).written();
    let left = written.is_some_and(|mark| mark.bump == 0 && now().since(mark.at) < STRAGGLERS);
    let ruled = matches!(state.hand_of(live, bump), None | Some(Hand::Rule));
    bump != 0 && left && !ruled
}

/// Whether a mark is as our record has it, or as the kernel's rules make it.
fn is_known(daemon: &Daemon, entry: &Connection) -> bool {
    let moves = |pair: &Pair| {
        let moves = daemon.state.borrow().conns.get(pair).is_moving();
        moves && !daemon.is_chosen_elsewhere(pair, entry.mark)
    };
    if ends(entry).iter().any(moves) {
        return true;
    }
    if let Some((_, choice)) = choice_of(daemon, entry) {
        return agrees(daemon, entry, choice);
    }
    let bump = bump_of(daemon, entry);
    if entry.mark & marks(&daemon.config).override_bit() != 0 {
        let state = daemon.state.borrow();
        let leaves = |pair: &Pair| state.conns.get(pair).left().is_some();
        return bump == 0 && ends(entry).iter().any(leaves);
    }
    if was_written(daemon, entry, bump) {
        return true;
    }
    let state = daemon.state.borrow();
    let followed = ends(entry)
        .iter()
        .find_map(|pair| Some(state.conns.get(pair).handed()?.bump));
    match bump {
        // Events of other things leave a mark of 0 out.
        0 => !entry.mark_told || followed.is_none(),
        _ => followed == Some(bump),
    }
}

/// The user chose with another program: the same as `enable` and `disable`.
fn chosen_elsewhere(daemon: &Rc<Daemon>, live: Live, bump: u8) {
    let daemon = Rc::clone(daemon);
    daemon.update(&live.pair, |conn| conn.move_to_awaited(bump));
    tokio::task::spawn_local(async move {
        let followed = follow_mark(&daemon, live, bump).await;
        daemon.update(&live.pair, |conn| conn.end_awaited(bump));
        match followed {
            Ok(moved) => moved
                .into_iter()
                .filter_map(|(_, outcome)| outcome.err())
                .for_each(|why| tracing::warn!("what another program chose is undone: {why}")),
            Err(error) => tracing::warn!("{error:#}"),
        }
    });
}

/// Makes a choice of another program ours, if it still stands once it is its turn: it may have been our
/// own, and `cleanup` have taken it back.
async fn follow_mark(daemon: &Daemon, live: Live, bump: u8) -> anyhow::Result<Vec<Moved>> {
    let _turn = daemon.users.own_turn().await;
    let marks = marks(&daemon.config);
    let tuple = tuple(&live.pair);
    {
        let _turn = daemon.marking.lock().await;
        let entry = daemon.conntrack()?.get(&tuple).await?;
        let (value, mask) = marks.choice(BumpId::new(bump));
        let stands = entry.is_some_and(|entry| entry.mark & mask == value);
        let known = daemon.state.borrow().conns.get(&live.pair).choice.get();
        if !stands || known.is_some_and(|choice| choice.bump == bump) {
            return Ok(Vec::new());
        }
        daemon.note_mark(&live.pair, bump, true);
    }
    daemon.events.tell_of(
        Audience::of(live.uid),
        "marked",
        format!(
            "another program moved a connection to {}",
            daemon.bumps.name_of(bump)
        ),
        &[("bump", daemon.bumps.name_of(bump).to_owned())],
    );
    daemon.choose(&[live], bump, &Progress::default()).await
}

/// A mark without OVERRIDE: set by a rule of ours, by what came from the peer, or by another program.
/// Only what neither end knows of is news to the peer.
fn followed_elsewhere(daemon: &Rc<Daemon>, live: Live, bump: u8) {
    let pair = live.pair;
    let known = {
        let mut state = daemon.state.borrow_mut();
        if bump == 0 {
            state.conns.update(&pair, |conn| conn.hand_over(None));
            false
        } else {
            let by = state.hand_of(&live, bump);
            if let Some(by) = by {
                let handed = Some(Handed { bump, by });
                state.conns.update(&pair, |conn| conn.hand_over(handed));
            }
            // What a rule takes from another bump the peer does not follow by itself.
            matches!(by, None | Some(Hand::Peer))
        }
    };
    if known {
        return;
    }
    daemon.events.tell_of(
        Audience::of(live.uid),
        "marked",
        format!(
            "a connection is on {} now, not by choice",
            daemon.bumps.name_of(bump)
        ),
        &[("bump", daemon.bumps.name_of(bump).to_owned())],
    );
    let daemon = Rc::clone(daemon);
    tokio::task::spawn_local(async move {
        if let Err(error) = daemon.install().await {
            tracing::warn!("{error:#}");
        }
        daemon.follow_rules(&[live], bump).await;
    });
}
