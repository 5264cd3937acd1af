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
use crate::switching::{Mark, Moved, Progress, all_of};
use crate::terms::{ends, marks, tuple};
use dibs_switch::conns::Pair;
use dibs_switch::marks::{Foreign, SeenMark};
use dibs_switch::table::Conn;

/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);
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
                let chosen = daemon.seen(&entry).chosen;
                let settled = |pair: &&Pair| {
                    let choice = daemon.state.borrow().conns.get(pair).choice.get();
                    choice.is_some_and(|choice| !choice.pending)
                };
                match ends(&entry).iter().find(settled) {
                    // It has no mark of ours yet, whatever rules set.
                    Some(pair) if !chosen => restore(daemon, *pair, false).await?,
                    _ => note_update(daemon, &entry).await?,
                }
                let conns = &mut daemon.state.borrow_mut().conns;
                conns.update_each(&ends(&entry), |conn| conn.ended = false);
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
            daemon.mark_one(Mark::moved(pair, bump)).await?;
        }
        Some(_) => daemon.forget_followed(&pair).await,
        None => {}
    }
    Ok(())
}

/// An entry that was made anew has no LOCKED.
async fn relock(daemon: &Daemon, entry: &Connection) -> anyhow::Result<()> {
    let SeenMark { bump, locked, .. } = daemon.seen(entry);
    if bump == 0 || locked {
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
    let knows = |entry: &Connection| {
        let mark = daemon.seen(entry);
        daemon.state.borrow().conns.either(&ends(entry)).knows(mark)
    };
    if knows(entry) {
        return relock(daemon, entry).await;
    }
    let entry = {
        // What the event tells may have been put right since.
        let _turn = daemon.marking.lock().await;
        let entry = daemon.conntrack()?.get(&entry.original).await?;
        match entry.filter(|entry| !knows(entry)) {
            Some(entry) => entry,
            None => return Ok(()),
        }
    };
    let mark = daemon.seen(&entry);
    let ends: Vec<Pair> = daemon.ends_to_peers(&entry).collect();
    let lives = daemon.sockets_of(&ends).await?;
    let Some(live) = lives.into_values().next() else {
        return Ok(());
    };
    if live.over || !mark.carried {
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
    let foreign = {
        let state = &mut *daemon.state.borrow_mut();
        let by = state.hand_of(&live, mark.bump);
        let handle = |conn: &mut Conn| conn.handle_mark(mark, by, now());
        state.conns.update(&live.pair, handle)
    };
    match foreign {
        Foreign::Chosen => chosen_elsewhere(daemon, live, mark.bump),
        Foreign::Lost => {
            let installed = !daemon.state.borrow().installed.is_empty();
            if installed {
                daemon.mark_choice(&live.pair).await?;
            }
        }
        Foreign::Straggler => {
            all_of(daemon.mark_moved(&[live.pair], 0).await)?;
        }
        Foreign::News => followed_elsewhere(daemon, live, mark.bump),
        Foreign::Known => {}
    }
    Ok(())
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

/// What neither end knows of is news to the peer.
fn followed_elsewhere(daemon: &Rc<Daemon>, live: Live, bump: u8) {
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
