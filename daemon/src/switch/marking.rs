//! What the kernel and the data path are told of a connection that moves.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use dibs_policy::Place;
use dibs_policy::conntrack::{Connection, Conntrack};
use dibs_settings::BumpId;
use dibs_switch::conns::Choice;
use dibs_switch::engine::Mark;
use dibs_switch::marks::SeenMark;
use dibs_switch::table::Conn;
use dibs_wire::FlowKey;

use crate::host::clock::now;
use crate::host::live::Live;
use crate::kernel::steering::marks;
use crate::kernel::{backstop, connections, gateway};
use crate::switch::Daemon;

/// Connections whose marks change together, at most.
const TOGETHER: usize = 256;

/// Why the kernel did not take a mark: one reason may stand in the way of many.
pub(crate) type MarkError = Arc<dibs_policy::Error>;

/// Of which connections it did not.
pub(crate) type Failed = BTreeMap<FlowKey, MarkError>;

/// Whether it took all.
pub(crate) fn all_of(failed: Failed) -> Result<(), MarkError> {
    failed.into_values().next().map_or(Ok(()), Err)
}

/// Logs what it did not take.
pub(crate) fn warn_of(failed: &Failed) {
    failed.values().for_each(|error| tracing::warn!("{error}"));
}

fn all_fail(pairs: impl Iterator<Item = FlowKey>, error: dibs_policy::Error) -> Failed {
    let error = Arc::new(error);
    pairs.map(|pair| (pair, Arc::clone(&error))).collect()
}

/// What a tracked connection's mark says.
pub(crate) fn seen(daemon: &Daemon, entry: &Connection) -> SeenMark {
    let marks = marks(&daemon.config);
    let bump = marks.bump_of(entry.mark);
    SeenMark {
        bump,
        chosen: entry.mark & marks.override_bit() != 0,
        locked: entry.mark & marks.locked_bit() != 0,
        carried: bump.is_none() || daemon.bumps.get(bump).is_some(),
        told: entry.mark_told,
    }
}

/// Notes what a connection's mark says from now on.
pub(crate) fn note_mark(daemon: &Daemon, pair: &FlowKey, bump: Option<BumpId>, chosen: bool) {
    daemon.update(pair, |conn| conn.note_mark(bump, chosen, now()));
}

/// What a user chooses here is later than what other programs chose before.
pub(crate) async fn overrule(daemon: &Daemon, lives: &[Live]) -> Result<(), dibs_policy::Error> {
    let _turn = daemon.kernel.marking().await;
    let mut conntrack = daemon.kernel.conntrack()?;
    for Live { pair, .. } in lives {
        if let Some(bump) = taken(daemon, &mut conntrack, pair).await? {
            note_mark(daemon, pair, bump, true);
        }
    }
    Ok(())
}

/// Whether another program chose for a connection, and which bump: that is to be taken up, and not
/// written over. Its event comes, or waits for its turn.
async fn taken(
    daemon: &Daemon,
    conntrack: &mut Conntrack,
    pair: &FlowKey,
) -> Result<Option<Option<BumpId>>, dibs_policy::Error> {
    let entry = conntrack.get(pair).await?;
    let mark = entry.map(|entry| seen(daemon, &entry));
    let state = daemon.state.borrow();
    let taken = mark.filter(|mark| state.conns.get(pair).is_chosen_elsewhere(*mark));
    Ok(taken.map(|mark| mark.bump))
}

/// As [`write()`], but for those for which another program has chosen otherwise by now. In
/// [`marking`](crate::kernel::Kernel::marking)'s turn, or what another task of ours writes meanwhile looks like that.
pub(crate) async fn mark(daemon: &Daemon, marks: &[Mark]) -> Failed {
    put(daemon, marks, true).await
}

/// Sets the bumps of connections in their ctmarks, which are made where they are not tracked. Those
/// that leave their bumps go on.
pub(crate) async fn write(daemon: &Daemon, marks: &[Mark]) -> Failed {
    put(daemon, marks, false).await
}

/// So many at a time that no other has to wait for long.
async fn put(daemon: &Daemon, marks: &[Mark], looks: bool) -> Failed {
    let mut failed = Failed::new();
    for some in marks.chunks(TOGETHER) {
        match daemon.kernel.conntrack() {
            Ok(mut conntrack) => failed.extend(put_some(daemon, &mut conntrack, some, looks).await),
            Err(error) => failed.extend(all_fail(some.iter().map(|mark| mark.pair), error)),
        }
    }
    failed
}

/// The backstop is told of all at once: of what goes before its mark does, and of what comes after
/// its mark has.
async fn put_some(
    daemon: &Daemon,
    conntrack: &mut Conntrack,
    marks: &[Mark],
    looks: bool,
) -> Failed {
    let mut backstop = daemon.kernel.backstop().await;
    let mut leaving = Vec::new();
    for mark in marks.iter().filter(|mark| mark.bump.is_none()) {
        if !(looks && matches!(taken(daemon, conntrack, &mark.pair).await, Ok(Some(_)))) {
            let place = match mark.explicit {
                true => Place::Plain,
                false => Place::Elsewhere,
            };
            leaving.push((mark.pair, place));
        }
    }
    backstop::note_places(daemon, &mut backstop, &leaving).await;
    if release_leaving(daemon, marks) {
        backstop::tell_locks(daemon, &mut backstop).await;
    }
    let (mut bumped, mut failed) = (Vec::new(), Failed::new());
    for mark in marks {
        match put_one(daemon, conntrack, mark, looks).await {
            Ok(None) => {}
            Ok(Some(_)) => bumped.push((mark.pair, Place::Bumped)),
            Err(error) => drop(failed.insert(mark.pair, Arc::new(error))),
        }
    }
    backstop::note_places(daemon, &mut backstop, &bumped).await;
    failed
}

/// Forgets locks of what goes elsewhere; whether there were such.
fn release_leaving(daemon: &Daemon, marks: &[Mark]) -> bool {
    let conns = &mut daemon.state.borrow_mut().conns;
    let released = |any, mark: &Mark| {
        let enter = |conn: &mut Conn| conn.lock.enter(mark.bump);
        conns.update(&mark.pair, enter) || any
    };
    marks.iter().fold(false, released)
}

/// The bump that the mark says afterwards, which is not the one that was wanted where another program has
/// chosen otherwise.
async fn put_one(
    daemon: &Daemon,
    conntrack: &mut Conntrack,
    mark: &Mark,
    looks: bool,
) -> Result<Option<BumpId>, dibs_policy::Error> {
    let Mark {
        pair,
        bump,
        explicit,
    } = *mark;
    if looks && let Some(other) = taken(daemon, conntrack, &pair).await? {
        tracing::debug!(?pair, ?bump, ?other, "another program has chosen otherwise");
        end_drains(daemon, &pair);
        return Ok(other);
    }
    let new = daemon.update(&pair, |conn| conn.move_to_mark(bump, explicit, now()));
    let layout = marks(&daemon.config);
    let (value, mask) = layout.whole(bump, new.chosen, new.locked);
    let elsewhere = daemon.bumps.device_of(bump).is_none();
    if elsewhere && daemon.bumps.device_of(new.was).is_some() {
        crate::host::devices::forget_mtus();
    }
    let Some(id) = bump else {
        let marked = conntrack.set_mark(&pair, value, mask).await;
        end_drains(daemon, &pair);
        return marked.map(|_| bump);
    };
    let installed = !daemon.state.borrow().installed.is_empty();
    let marked = conntrack.set_mark(&pair, value, mask).await?;
    if !marked && installed {
        if conntrack.adopt(&pair, value).await? {
            gateway::rename(daemon, &pair, id).await?;
        } else {
            conntrack.set_mark(&pair, value, mask).await?;
        }
    }
    if daemon.bumps.is_outside(bump) {
        end_drains(daemon, &pair);
    }
    Ok(bump)
}

/// Lets a connection go on that was to fall silent.
pub(crate) fn end_drains(daemon: &Daemon, pair: &FlowKey) {
    for bump in daemon.bumps.all() {
        // Without the data path nothing is held back.
        let _ = daemon.driver.end_drain(bump.id, *pair);
    }
}

/// Puts the choices for connections into the kernel, where there is one that is not pending. One task at a
/// time, and whichever is in force by then: so the last one that the kernel is told is the latest.
/// One that was for an earlier connection of the same ends is forgotten instead. What failed, and why.
pub(crate) async fn mark_choices(daemon: &Daemon, pairs: &[FlowKey]) -> Failed {
    let mut failed = Failed::new();
    for pairs in pairs.chunks(TOGETHER) {
        let _turn = daemon.kernel.marking().await;
        let choices: Vec<(FlowKey, Choice)> = {
            let known = &daemon.state.borrow().conns;
            let settled = pairs
                .iter()
                .filter_map(|pair| Some((*pair, known.get(pair).choice.get()?)));
            settled.filter(|(_, choice)| !choice.pending).collect()
        };
        let chosen: Vec<FlowKey> = choices.iter().map(|(pair, _)| *pair).collect();
        let lives = match connections::sockets_of(daemon, &chosen).await {
            Ok(lives) => lives,
            Err(error) => {
                failed.extend(all_fail(chosen.into_iter(), error));
                continue;
            }
        };
        let mut standing = Vec::new();
        for (pair, choice) in choices {
            let live = lives.get(&pair);
            // One that ended while no daemon looked needs no mark, and would be tracked for days with one.
            if live.is_none() && !gateway::may_live(daemon, &pair) {
                continue;
            }
            if !live.is_some_and(|live| gateway::has_taken(daemon, live, choice)) {
                standing.push(Mark::chosen(pair, choice.bump));
            } else if let Err(error) = forget_choice(daemon, &pair, choice).await {
                failed.insert(pair, error);
            }
        }
        failed.extend(mark(daemon, &standing).await);
    }
    failed
}

/// Another connection has taken the ends of one that something was chosen for: it inherits neither
/// that nor the lock. Where it is by its own rules it stays.
async fn forget_choice(daemon: &Daemon, pair: &FlowKey, choice: Choice) -> Result<(), MarkError> {
    let given_up = daemon.update(pair, |conn| {
        let given_up = conn.choice.give_up(choice.version);
        if given_up {
            conn.lock.release();
        }
        given_up
    });
    if !given_up {
        return Ok(());
    }
    daemon.save_or_warn();
    let entry = daemon.kernel.conntrack()?.get(pair).await?;
    let (value, mask) = marks(&daemon.config).choice(choice.bump);
    if entry.is_some_and(|entry| entry.mark & mask == value) {
        return all_of(write(daemon, &[Mark::moved(*pair, None)]).await);
    }
    let mut backstop = daemon.kernel.backstop().await;
    let place = (*pair, Place::Elsewhere);
    backstop::note_places(daemon, &mut backstop, &[place]).await;
    Ok(())
}

/// Puts all choices into the kernel again.
pub(crate) async fn mark_all_choices(daemon: &Daemon) {
    let choices: Vec<FlowKey> = {
        let conns = &daemon.state.borrow().conns;
        conns.choices().map(|(pair, _)| pair).collect()
    };
    warn_of(&mark_choices(daemon, &choices).await);
}

/// Tells the paths that connections come from, in plain, what these sent by them: the path's own
/// congestion control has had nothing to learn from.
pub(crate) fn expect_rates<'a>(daemon: &Daemon, lives: impl Iterator<Item = &'a Live>) {
    let inventory = daemon.host.inventory();
    let mut rates: HashMap<(usize, IpAddr), u64> = HashMap::new();
    for live in lives {
        let local = live.pair.src;
        let path = daemon.config.paths.iter().position(|path| {
            let interface = inventory.of_path(path);
            interface.is_some_and(|interface| interface.addresses.contains(&local))
        });
        if let Some(path) = path {
            let to = live.pair.dst;
            *rates.entry((path, to)).or_default() += live.counts.delivery_rate;
        }
    }
    for ((path, to), rate) in rates {
        // Without the data path nothing is sent.
        let _ = daemon.driver.expect_rate(path, to, rate);
    }
}

/// Waits until nothing that connections sent by their bumps can be overtaken any more: in plain,
/// what follows may be quicker. Their kernels send nothing new until they are [marked](mark).
pub(crate) async fn silence(daemon: &Daemon, lives: impl Iterator<Item = &Live>) {
    let drains = lives.flat_map(|live| {
        daemon.bumps.all().iter().map(|bump| {
            let scale = live.counts.window_scale;
            daemon.driver.drain(bump.id, live.pair, scale)
        })
    });
    // Without the data path nothing is under way.
    let _ = futures_util::future::join_all(drains).await;
}
