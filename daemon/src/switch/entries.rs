//! Entries of conntrack: their LOCKED is set once both ends are on the bump, cleared before either leaves it, and set again
//! where it got lost; and their events are followed while anything is installed. What follows from these says
//! [`dibs_switch::engine::entries`].

use std::collections::HashMap;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use dibs_config::Fail;
use dibs_policy::conntrack::{Connection, Conntrack, Event, Events, LOOKUPS};
use dibs_settings::BumpId;
use dibs_switch::engine::entries::{self, Passing};
use dibs_switch::tracked::{Mend, Tracked};
use dibs_wire::FlowKey;
use tokio::time::sleep;

use crate::data::bumps::{marks, translated};
use crate::host::live::Live;
use crate::kernel::connections;
use crate::rulebook::state_file::Saved;
use crate::switch::{Daemon, marking};

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
    if moves.is_empty() {
        return Ok(());
    }
    let mut conntrack = daemon.kernel.conntrack()?;
    for (pair, bump) in moves {
        let (mark, mask) = (layout.bump(bump), layout.bump_mask());
        conntrack.set_mark(&pair, mark, mask).await?;
    }
    // The next daemon is not to do so again.
    daemon.save_or_warn();
    Ok(())
}

/// What conntrack has of connections to peers on any bump.
pub(crate) async fn tracked(daemon: &Daemon) -> Result<Tracked, dibs_policy::Error> {
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

/// Corrects entries, and tells the backstop of locks.
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
    marking::note_locks(daemon).await;
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

/// Has the kernel translate connections wherever they leave, before they move to a bump: it ends a masqueraded one that leaves by
/// another interface. Returns all of them, by the names of their entries then.
pub(crate) async fn unbind(
    daemon: &Daemon,
    lives: &[Live],
    bump: Option<BumpId>,
) -> Result<Vec<Live>, dibs_policy::Error> {
    let pairs: Vec<FlowKey> = lives.iter().map(|live| live.pair).collect();
    let unbound = unbind_pairs(daemon, &pairs, bump).await?;
    let unbound = connections::passing_of(&daemon.kernel, &unbound).await?;
    let unbound: HashMap<FlowKey, Live> =
        unbound.into_iter().map(|live| (live.pair, live)).collect();
    let now = |live: &Live| unbound.get(&live.pair).copied().unwrap_or(*live);
    Ok(lives.iter().map(now).collect())
}

/// The same; returns the connections that this concerns.
pub(crate) async fn unbind_pairs(
    daemon: &Daemon,
    pairs: &[FlowKey],
    bump: Option<BumpId>,
) -> Result<Vec<FlowKey>, dibs_policy::Error> {
    let is_meant = |pair: &&FlowKey| bump.is_some() && daemon.host.masqueraded(pair).is_some();
    let meant: Vec<FlowKey> = pairs.iter().filter(is_meant).copied().collect();
    for meant in meant.chunks(marking::TOGETHER) {
        let _turn = daemon.kernel.marking().await;
        let mut backstop = daemon.kernel.backstop().await;
        let mut conntrack = daemon.kernel.conntrack()?;
        let mut bound = Vec::new();
        for pair in meant {
            let entry = conntrack.get(pair).await?;
            bound.extend(
                entry
                    .filter(|entry| !entry.made)
                    .map(|entry| (*pair, entry)),
            );
        }
        let told = |said| bound.iter().map(move |(pair, _)| (*pair, said));
        marking::note_names(daemon, &mut backstop, told(true)).await;
        let mut done = Ok(());
        for (_, entry) in &bound {
            daemon.host.replaced.borrow_mut().insert(entry.id);
            done = done.and(
                conntrack
                    .adopt_translated(entry, entry.mark)
                    .await
                    .map(drop),
            );
        }
        marking::note_names(daemon, &mut backstop, told(false)).await;
        done?;
    }
    Ok(meant)
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
    entries::handle(daemon, entries::Event::Lost).await?;
    daemon
        .events
        .note("follow the conntrack table", anyhow::Ok(()));
    loop {
        let event = match events.next().await? {
            Event::Destroyed(entry) if daemon.host.replaced.borrow_mut().remove(&entry.id) => {
                continue;
            }
            Event::Destroyed(entry) => {
                let ends = connections::ends(&daemon.host, &entry);
                let passing = passing(daemon, &entry);
                let followed = marks(&daemon.config).bump_of(entry.mark).is_some();
                let is_marked = |pair: &_| daemon.state.borrow().conns.get(pair).is_marked();
                let is_lost =
                    passing.is_some_and(|it| it.goes_on && (followed || is_marked(&it.pair)));
                if !is_lost {
                    connections::forget(&daemon.host, &entry);
                }
                entries::Event::Destroyed(ends, passing)
            }
            Event::New(found) => {
                connections::note(&daemon.host, &found);
                let ends = connections::ends(&daemon.host, &found);
                entries::Event::New(ends, daemon.entry(&found))
            }
            Event::Update(found) => {
                connections::note(&daemon.host, &found);
                let ends = connections::ends(&daemon.host, &found);
                entries::Event::Update(ends, daemon.entry(&found))
            }
            Event::Lost => {
                daemon.host.replaced.borrow_mut().clear();
                entries::Event::Lost
            }
        };
        entries::handle(daemon, event).await?;
    }
}

fn passing(daemon: &Daemon, entry: &Connection) -> Option<Passing> {
    let Live { pair, .. } = connections::passing(&daemon.host, entry)?;
    // Nothing translates what the nat table led elsewhere, once the entry is gone.
    let goes_on = connections::was_passing(entry) && connections::passes(&daemon.host, &pair);
    Some(Passing { pair, goes_on })
}
