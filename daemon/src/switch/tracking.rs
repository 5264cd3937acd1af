//! Follows the conntrack table while anything is installed: entries of connections on a bump that vanish
//! are made again, and what others do to marks is noticed, and told to the peer.

use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use dibs_policy::conntrack::{self, Connection, Events};
use dibs_settings::BumpId;
use dibs_switch::conns::Socket;
use dibs_switch::engine::{Machine as _, Mark, rules, switches};
use dibs_switch::marks::{Foreign, Hand, Handed};
use dibs_switch::table::Conn;
use dibs_switch::tracked::Mend;
use dibs_wire::FlowKey;
use tokio::time::sleep;

use crate::control::{Audience, Progress};
use crate::data::bumps::marks;
use crate::host::live::Live;
use crate::host::process::{now, or_warn};
use crate::kernel::connections;
use crate::switch::marking::{MarkError, all_of};
use crate::switch::switching::Moved;
use crate::switch::{Daemon, locking, marking, steering, switching};

/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Follows the table for good.
pub(crate) async fn follow(daemon: Rc<Daemon>) {
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
                let goes_on = lose(daemon, &entry).await;
                for pair in entry.ends() {
                    restore(daemon, pair, goes_on).await?;
                }
            }
            conntrack::Event::New(entry) => {
                marking::note_followed(daemon, &entry).await;
                let chosen = daemon.seen(&entry).chosen;
                let settled = |pair: &&FlowKey| {
                    let choice = daemon.state.borrow().conns.get(pair).choice.get();
                    choice.is_some_and(|choice| !choice.pending)
                };
                match entry.ends().iter().find(settled) {
                    // It has no mark of ours yet, whatever rules set.
                    Some(pair) if !chosen => restore(daemon, *pair, false).await?,
                    _ => note_update(daemon, &entry).await?,
                }
                let conns = &mut daemon.state.borrow_mut().conns;
                conns.update_each(&entry.ends(), |conn| conn.ended = false);
            }
            conntrack::Event::Update(entry) => {
                marking::note_followed(daemon, &entry).await;
                note_update(daemon, &entry).await?;
            }
            conntrack::Event::Lost => catch_up(daemon).await?,
        }
    }
}

/// The entry of a connection that passes is gone. Whether the connection goes on, as far as anybody
/// knows; otherwise nothing of the next one with its ends is dropped for that.
async fn lose(daemon: &Daemon, entry: &Connection) -> bool {
    let Some(Live { pair, .. }) = connections::passing(&daemon.host, entry) else {
        return false;
    };
    let goes_on = connections::was_passing(&daemon.host, entry);
    {
        let state = &mut *daemon.state.borrow_mut();
        if goes_on {
            // Its next entry has another name.
            let rename = |conn: &mut Conn| conn.choice.rename(Socket::UNKNOWN);
            state.conns.update(&pair, rename);
        } else {
            state.conns.update(&pair, |conn| {
                conn.ended |= conn.is_marked();
                conn.lock.release();
            });
        }
    }
    if !goes_on {
        marking::note_locks(daemon).await;
    }
    goes_on
}

/// Brings marks and our records together where events were missed.
async fn catch_up(daemon: &Rc<Daemon>) -> anyhow::Result<()> {
    marking::find_followed(daemon).await?;
    let mut conntrack = daemon.kernel.conntrack()?;
    let chosen = marks(&daemon.config).override_bit();
    for entry in conntrack.marked(chosen, chosen, Some).await? {
        note_update(daemon, &entry).await?;
    }
    marking::mark_all_choices(daemon).await;
    // One that follows has no choice to say where it belongs, and while this end alone sends, nothing
    // comes that it could follow anew.
    let followed: Vec<FlowKey> = {
        let state = daemon.state.borrow();
        let followed = { state.conns.iter() }.filter(|(_, conn)| conn.followed().is_some());
        followed.map(|(pair, _)| *pair).collect()
    };
    for pair in followed {
        if conntrack.get(&pair).await?.is_none() {
            restore(daemon, pair, marking::may_live(daemon, &pair)).await?;
        }
    }
    Ok(())
}

/// The entry of a connection that was chosen or follows is gone; the connection may not be. `passes`: it
/// has no socket here that would say so, and goes on.
async fn restore(daemon: &Daemon, pair: FlowKey, passes: bool) -> anyhow::Result<()> {
    let (chosen, followed) = {
        let state = daemon.state.borrow();
        let conn = state.conns.get(&pair);
        (conn.choice.get().is_some(), conn.followed())
    };
    if !chosen && followed.is_none() {
        return Ok(());
    }
    let lives = connections::sockets_of(&daemon.kernel, &[pair]).await?;
    let lives = passes || lives.get(&pair).is_some_and(|live| !live.over);
    match followed {
        _ if lives && chosen => marking::mark_choice(daemon, &pair).await?,
        Some(bump) if lives => {
            all_of(daemon.mark(|| vec![Mark::moved(pair, Some(bump))]).await)?;
        }
        Some(_) => marking::forget_followed(daemon, &pair).await,
        None => {}
    }
    Ok(())
}

/// An entry that was made anew has no LOCKED.
async fn relock(daemon: &Daemon, found: &Connection) -> anyhow::Result<()> {
    let entry = daemon.entry(found);
    for pair in found.ends() {
        let lock = daemon.state.borrow().conns.get(&pair).lock;
        let mend = lock.mend(entry, Some(false));
        if let Some(Mend::Lock(bump)) = mend {
            locking::lock(daemon, &mut *daemon.kernel.conntrack()?, &pair, bump).await?;
        }
    }
    Ok(())
}

/// A mark that says otherwise than our record was set by another program.
async fn note_update(daemon: &Rc<Daemon>, entry: &Connection) -> anyhow::Result<()> {
    let knows = |entry: &Connection| {
        let mark = daemon.seen(entry);
        daemon
            .state
            .borrow()
            .conns
            .either(&entry.ends())
            .knows(mark)
    };
    if knows(entry) {
        return relock(daemon, entry).await;
    }
    let entry = {
        // What the event tells may have been put right since.
        let _turn = daemon.kernel.marking().await;
        let entry = daemon.kernel.conntrack()?.get(&entry.original).await?;
        match entry.filter(|entry| !knows(entry)) {
            Some(entry) => entry,
            None => return Ok(()),
        }
    };
    let mark = daemon.seen(&entry);
    let ends: Vec<FlowKey> = connections::ends_to_peers(&daemon.host, &entry).collect();
    let lives = connections::sockets_of(&daemon.kernel, &ends).await?;
    let Some(live) = lives.into_values().next() else {
        return Ok(());
    };
    if live.over || !mark.carried {
        return Ok(());
    }
    let required = {
        let state = daemon.state.borrow();
        state.ruling(&live).requirement().map(|rule| rule.id)
    };
    if let Some(rule) = required {
        // The kernel's own rule puts it back with the next packet.
        tracing::debug!(
            rule,
            "another program changed the mark of a required connection"
        );
        return Ok(());
    }
    let mut was = None;
    let foreign = {
        let state = &mut *daemon.state.borrow_mut();
        if mark.bump.is_none() {
            was = state.ruling(&live).stands_on(None);
        }
        let by = { mark.bump }.and_then(|bump| state.ruling(&live).hand_of(bump));
        let handle = |conn: &mut Conn| conn.handle_mark(mark, by, now());
        state.conns.update(&live.pair, handle)
    };
    match foreign {
        Foreign::Chosen => chosen_elsewhere(daemon, live, mark.bump),
        Foreign::Lost => {
            let installed = !daemon.state.borrow().installed.is_empty();
            if installed {
                marking::mark_choice(daemon, &live.pair).await?;
            }
        }
        Foreign::Straggler => {
            all_of(switches::mark_moved(&**daemon, &[live.pair], None).await)?;
        }
        Foreign::News => followed_elsewhere(daemon, live, was, mark.bump),
        Foreign::Known => {}
    }
    Ok(())
}

/// The user chose with another program: the same as `enable` and `disable`.
fn chosen_elsewhere(daemon: &Rc<Daemon>, live: Live, bump: Option<BumpId>) {
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
async fn follow_mark(
    daemon: &Daemon,
    live: Live,
    bump: Option<BumpId>,
) -> anyhow::Result<Vec<Moved>> {
    let _turn = daemon.users.own_turn().await;
    let marks = marks(&daemon.config);
    {
        let _turn = daemon.kernel.marking().await;
        let entry = daemon.kernel.conntrack()?.get(&live.pair).await?;
        let (value, mask) = marks.choice(bump);
        let stands = entry.is_some_and(|entry| entry.mark & mask == value);
        let known = daemon.state.borrow().conns.get(&live.pair).choice.get();
        if !stands || known.is_some_and(|choice| choice.bump == bump) {
            return Ok(Vec::new());
        }
        marking::note_mark(daemon, &live.pair, bump, true);
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
    if bump.is_none() {
        put_back(daemon, &live).await?;
    }
    switching::choose(daemon, &[live], bump.into(), &Progress::default()).await
}

/// Puts a connection back on its bump that another program took to plain: it leaves again only if plain carries it.
async fn put_back(daemon: &Daemon, live: &Live) -> Result<(), MarkError> {
    let (on, chosen) = {
        let state = daemon.state.borrow();
        let choice = state.conns.get(&live.pair).choice.of(live.socket);
        // The mark as we know it says plain by now.
        (state.ruling(live).stands_on(None), choice.is_some())
    };
    if daemon.bumps.inside(on).is_none() {
        return Ok(());
    }
    let _turn = daemon.kernel.marking().await;
    let mark = match chosen {
        true => Mark::chosen(live.pair, on),
        false => Mark::moved(live.pair, on),
    };
    all_of(marking::write(daemon, &[mark]).await)
}

/// Tells the peer of a move that neither end knows of. `was`: the bump that another program took the connection from.
fn followed_elsewhere(daemon: &Rc<Daemon>, live: Live, was: Option<BumpId>, bump: Option<BumpId>) {
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
        if let Some(was) = daemon.bumps.inside(was) {
            let (bump, by) = (was, Hand::Kept);
            daemon.update(&live.pair, |conn| conn.hand_over(Some(Handed { bump, by })));
            or_warn(put_back(&daemon, &live).await);
        }
        or_warn(steering::install(&daemon).await);
        rules::follow(&*daemon, &[live], bump.into()).await;
    });
}
