//! Entries of conntrack: their LOCKED is set once both ends are on the bump, cleared before either leaves it, and set again
//! where it got lost; and their events are followed while anything is installed. What follows from these says
//! [`dibs_switch::engine::entries`].

use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use dibs_config::Fail;
use dibs_policy::conntrack::{Connection, Conntrack, Event, Events, LOOKUPS};
use dibs_settings::BumpId;
use dibs_switch::engine::entries::{self, Marked, Passing};
use dibs_switch::tracked::{Mend, Tracked};
use dibs_wire::FlowKey;
use tokio::time::sleep;

use crate::data::bumps::{marks, translated};
use crate::host::live::Live;
use crate::host::process::{instant, now, or_warn};
use crate::kernel::connections;
use crate::rulebook::state_file::Saved;
use crate::switch::{Daemon, Task, marking};

/// Between two looks that nothing gave cause for.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Looks of which one is at all of conntrack, also for what we know nothing of.
const LOOKS_PER_WHOLE: u32 = 30;

/// Whether anything is locked at all: who lets packets out in plain has to take them in plain.
pub(crate) fn locks(daemon: &Daemon) -> bool {
    daemon.config.daemon.fail == Fail::Closed
}

/// Has the kernel's marks follow where the file gives devices other numbers than it did: what was on a
/// device that it names no more goes nowhere.
pub(crate) async fn renumber(daemon: &Daemon, saved: &Saved) -> Result<(), dibs_policy::Error> {
    let layout = marks(&daemon.config);
    let devices = saved.devices(daemon.bumps.all());
    let mut moves = Vec::new();
    for bump in saved.devices.keys().copied().filter_map(BumpId::new) {
        let ours = translated(&devices, bump);
        if ours != bump {
            let tracked = tracked_on(daemon, &[bump]).await?;
            moves.extend(tracked.iter().map(|(pair, _)| (*pair, ours)));
        }
    }
    let mut conntrack = daemon.kernel.conntrack()?;
    for (pair, bump) in moves {
        let (mark, mask) = (layout.bump(bump), layout.bump_mask());
        conntrack.set_mark(&pair, mark, mask).await?;
    }
    Ok(())
}

/// What conntrack has of connections to peers on any bump.
async fn tracked(daemon: &Daemon) -> Result<Tracked, dibs_policy::Error> {
    let bumps: Vec<BumpId> = daemon.state.borrow().installed.keys().copied().collect();
    tracked_on(daemon, &bumps).await
}

/// As [`tracked`], on these bumps.
async fn tracked_on(daemon: &Daemon, bumps: &[BumpId]) -> Result<Tracked, dibs_policy::Error> {
    let layout = marks(&daemon.config);
    let mut conntrack = daemon.kernel.conntrack()?;
    let mut tracked = Vec::new();
    for bump in bumps {
        let note = |found: Connection| {
            let ends = connections::ends_to_peers(&daemon.host, &found);
            tracked.extend(ends.map(|pair| (pair, daemon.entry(&found))));
            None::<()>
        };
        let (value, mask) = (layout.bump(*bump), layout.bump_mask());
        conntrack.marked(value, mask, note).await?;
    }
    Ok(Tracked::new(tracked))
}

/// As [`tracked`], at least of these connections.
pub(crate) async fn tracked_of(
    daemon: &Daemon,
    pairs: &[FlowKey],
) -> Result<Tracked, dibs_policy::Error> {
    if pairs.len() > LOOKUPS {
        return tracked(daemon).await;
    }
    let mut tracked = daemon.got(pairs).await?;
    let state = daemon.state.borrow();
    tracked.retain_on(|bump| state.installed.contains_key(&bump));
    Ok(tracked)
}

/// Locks what is due.
async fn lock_due(daemon: &Daemon) -> anyhow::Result<()> {
    let now = now();
    let due: Vec<FlowKey> = daemon.state.borrow().conns.locks_due(now).collect();
    let (lives, tracked) = daemon.looked_up(&due).await?;
    let is_on = |pair: &FlowKey, bump| lives.contains_key(pair) && tracked.bump(pair) == Some(bump);
    let due = daemon.state.borrow_mut().conns.lock_due(now, is_on);
    let due: Vec<(FlowKey, Mend)> = { due.into_iter() }
        .map(|(pair, bump)| (pair, Mend::Lock(bump)))
        .collect();
    mend(daemon, &due).await?;
    marking::note_locks(daemon).await;
    Ok(())
}

/// Brings LOCKED in the kernel to what is due, and mends what was done to the entries: of connections that are
/// alive or that we know to be locked, or of the `whole` table.
async fn set_locks(daemon: &Daemon, whole: bool) -> anyhow::Result<()> {
    if daemon.state.borrow().installed.is_empty() {
        return Ok(());
    }
    let now = now();
    let _looking = daemon.kernel.looking().await;
    // Before the sockets: what is locked and has none has ended.
    let mut known: Vec<FlowKey> = {
        let conns = &daemon.state.borrow().conns;
        conns.locked().chain(conns.locks_due(now)).collect()
    };
    let ends = |live: Live| Some((live.pair, live.established));
    let mut lives = connections::sockets_as(&daemon.kernel, ends).await?;
    lives.sort_unstable();
    let tracked = if whole {
        tracked(daemon).await?
    } else {
        known.extend(lives.iter().map(|(pair, _)| *pair));
        known.sort_unstable();
        known.dedup();
        tracked_of(daemon, &known).await?
    };
    let lives = |pair: &FlowKey| {
        let at = lives.binary_search_by_key(pair, |(pair, _)| *pair).ok()?;
        Some(lives[at].1)
    };
    let passes = |pair: &FlowKey| connections::passes(&daemon.host, pair);
    let mends = {
        let conns = &mut daemon.state.borrow_mut().conns;
        conns.mend_locks(now, &tracked, lives, passes)
    };
    mend(daemon, &mends).await?;
    marking::note_locks(daemon).await;
    Ok(())
}

/// Corrects entries.
pub(crate) async fn mend(daemon: &Daemon, mends: &[(FlowKey, Mend)]) -> anyhow::Result<()> {
    let mut conntrack = daemon.kernel.conntrack()?;
    for (pair, mend) in mends {
        match mend {
            Mend::Lock(bump) => lock(daemon, &mut conntrack, pair, *bump).await?,
            Mend::Revive => drop(conntrack.revive(pair).await?),
            Mend::Unlock => {
                let _turn = daemon.kernel.marking().await;
                let bit = marks(&daemon.config).locked_bit();
                conntrack.set_mark(pair, 0, bit).await?;
            }
        }
    }
    Ok(())
}

/// Sets LOCKED of a connection that is locked on `bump` by our record.
async fn lock(
    daemon: &Daemon,
    conntrack: &mut Conntrack,
    pair: &FlowKey,
    bump: BumpId,
) -> Result<(), dibs_policy::Error> {
    let _turn = daemon.kernel.marking().await;
    if daemon.state.borrow().conns.get(pair).lock.locked() != Some(bump) {
        return Ok(());
    }
    let bit = marks(&daemon.config).locked_bit();
    conntrack.set_mark(pair, bit, bit).await.map(drop)
}

/// Keeps LOCKED in the kernel as it should be.
pub(crate) async fn keep_locks(daemon: Rc<Daemon>) {
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
            lock_due(&daemon).await
        } else {
            let kept = set_locks(&daemon, looks == 0).await;
            looks = (looks + 1) % LOOKS_PER_WHOLE;
            look = tokio::time::Instant::now() + LOOK_EVERY;
            kept
        };
        daemon.events.note("lock connections", kept);
    }
}

/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Follows the table for good.
pub(crate) async fn follow_entries(daemon: Rc<Daemon>) {
    loop {
        let Err(error) = follow_once(&daemon).await;
        daemon.events.note("follow the conntrack table", Err(error));
        sleep(RETRY).await;
    }
}

async fn follow_once(daemon: &Rc<Daemon>) -> anyhow::Result<Infallible> {
    let mut events = Events::open()?;
    follow_apart(daemon, entries::catch_up(&**daemon).await?);
    daemon
        .events
        .note("follow the conntrack table", anyhow::Ok(()));
    loop {
        let marked = match events.next().await? {
            Event::Destroyed(entry) => {
                let called = entry.original.reversed();
                daemon.host.published.borrow_mut().remove(&called);
                let passing = passing(daemon, &entry);
                entries::handle_destroyed(&**daemon, &entry.ends(), passing).await?;
                Vec::new()
            }
            Event::New(found) => {
                daemon.note_published(&found);
                let entry = daemon.entry(&found);
                Vec::from_iter(entries::handle_new(&**daemon, &found.ends(), entry).await?)
            }
            Event::Update(found) => {
                daemon.note_published(&found);
                let entry = daemon.entry(&found);
                Vec::from_iter(entries::handle_update(&**daemon, &found.ends(), entry).await?)
            }
            Event::Lost => entries::catch_up(&**daemon).await?,
        };
        follow_apart(daemon, marked);
    }
}

fn passing(daemon: &Daemon, entry: &Connection) -> Option<Passing> {
    let Live { pair, .. } = connections::passing(&daemon.host, entry)?;
    // Nothing translates what the nat table led elsewhere, once the entry is gone.
    let goes_on = connections::was_passing(entry) && connections::passes(&daemon.host, &pair);
    Some(Passing { pair, goes_on })
}

/// Has marks of other programs followed while more events come.
fn follow_apart(daemon: &Rc<Daemon>, marked: Vec<Marked<Live>>) {
    for marked in marked {
        let daemon = Rc::clone(daemon);
        tokio::task::spawn_local(async move {
            let _turn = match marked.chosen {
                true => Some(daemon.users.own_turn().await),
                false => None,
            };
            or_warn(entries::follow(&*daemon, marked).await);
        });
    }
}
