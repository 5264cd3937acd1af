//! Marks: the kernel, the backstop and the data path are told of connections that move, and which of them are on bumps, by
//! choice or because they follow.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use dibs_config::Level;
use dibs_control::RuleOrigin;
use dibs_policy::conntrack::Conntrack;
use dibs_policy::{Backstop, Desired, Error, Known, Place, Standing};
use dibs_settings::BumpId;
use dibs_switch::conns::{Choice, Socket};
use dibs_switch::engine::entries::Ends;
use dibs_switch::engine::{Mark, renumbered};
use dibs_switch::table::Conn;
use dibs_wire::FlowKey;

use crate::data::bumps::marks;
use crate::host::live::Live;
use crate::host::process::now;
use crate::kernel::{backstop_info, connections};
use crate::rulebook::rules::Rule;
use crate::switch::{Daemon, State, Task};

/// Connections whose marks change together, at most.
pub(crate) const TOGETHER: usize = 256;
/// Words for a connection whose numbers something in plain changes.
pub(crate) const RENUMBERED: &str = "something between the two hosts changes TCP's sequence numbers (a firewall that randomizes \
     them?), so no bump can carry it";

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

/// What a user chooses here is later than what other programs chose before.
pub(crate) async fn overrule(daemon: &Daemon, lives: &[Live]) -> Result<(), dibs_policy::Error> {
    let _turn = daemon.kernel.marking().await;
    let mut conntrack = daemon.kernel.conntrack()?;
    for Live { pair, .. } in lives {
        if let Some(bump) = taken(daemon, &mut conntrack, pair).await? {
            daemon.update(pair, |conn| conn.place.move_to_chosen(bump));
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
    let mark = entry.map(|entry| daemon.seen(&entry));
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
    note_places(daemon, &mut backstop, &leaving).await;
    if release_leaving(daemon, marks) {
        tell_locks(daemon, &mut backstop).await;
    }
    let coming = marks.iter().filter(|mark| mark.bump.is_some());
    let coming = coming.map(|mark| (mark.pair, true));
    note_names(daemon, &mut backstop, coming).await;
    let (mut bumped, mut failed) = (Vec::new(), Failed::new());
    let mut renamed = false;
    for mark in marks {
        match put_one(daemon, conntrack, mark, looks, &mut renamed).await {
            Ok(None) => {}
            Ok(Some(_)) => bumped.push((mark.pair, Place::Bumped)),
            Err(error) => drop(failed.insert(mark.pair, Arc::new(error))),
        }
    }
    note_places(daemon, &mut backstop, &bumped).await;
    if renamed {
        daemon.save_or_warn();
    }
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
    renamed: &mut bool,
) -> Result<Option<BumpId>, dibs_policy::Error> {
    let Mark {
        pair, bump, leads, ..
    } = *mark;
    if looks && let Some(other) = taken(daemon, conntrack, &pair).await? {
        tracing::debug!(
            ?pair,
            ?bump,
            ?other,
            "another program moved it at the same time: repeat the command"
        );
        end_drains(daemon, &pair);
        return Ok(other);
    }
    let new = daemon.update(&pair, |conn| conn.move_to_mark(mark, now()));
    let layout = marks(&daemon.config);
    let (value, mask) = layout.whole(bump, new.chosen, new.locked);
    let elsewhere = daemon.bumps.device_of(bump).is_none();
    if elsewhere && daemon.bumps.device_of(new.was).is_some() {
        crate::kernel::devices::forget_mtus();
    }
    let Some(id) = bump else {
        let marked = conntrack.set_mark(&pair, value, mask).await;
        if !leads {
            end_drains(daemon, &pair);
        }
        return marked.map(|_| bump);
    };
    if new.was != bump {
        // Without the data path nothing is known of it.
        let _ = daemon.driver.enter(id, pair, new.was);
    }
    let installed = !daemon.state.borrow().installed.is_empty();
    let marked = conntrack.set_mark(&pair, value, mask).await?;
    if !marked && installed {
        let adopted = match daemon.host.masqueraded(&pair) {
            None => conntrack.adopt(&pair, value).await?,
            Some(known) => conntrack.adopt_translated(&known, value).await?,
        };
        if adopted {
            rename(daemon, &pair, id).await?;
            *renamed = true;
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
            let choice = |pair: &FlowKey| Some((*pair, known.get(pair).in_force()?));
            pairs.iter().filter_map(choice).collect()
        };
        let chosen: Vec<FlowKey> = choices.iter().map(|(pair, _)| *pair).collect();
        let lives = match connections::sockets_of(&daemon.kernel, &chosen).await {
            Ok(lives) => lives,
            Err(error) => {
                failed.extend(all_fail(chosen.into_iter(), error));
                continue;
            }
        };
        let (mut standing, mut renamed) = (Vec::new(), false);
        for (pair, choice) in choices {
            let live = lives.get(&pair);
            renamed |= live.is_some() && choice.socket == Socket::UNKNOWN;
            // One that ended while no daemon looked needs no mark, and would be tracked for days with one.
            if live.is_none() && !may_live(daemon, &pair) {
                continue;
            }
            if !live.is_some_and(|live| has_taken(daemon, live, choice)) {
                standing.push(Mark::new(pair, choice.bump, true));
            } else if let Err(error) = forget_choice(daemon, &pair, choice).await {
                failed.insert(pair, error);
            }
        }
        failed.extend(mark(daemon, &standing).await);
        if renamed {
            daemon.save_or_warn();
        }
    }
    failed
}

/// Another connection has taken the ends of one that something was chosen for: it inherits neither
/// that nor the lock. Where it is by its own rules it stays.
async fn forget_choice(daemon: &Daemon, pair: &FlowKey, choice: Choice) -> Result<(), MarkError> {
    let given_up = daemon.update(pair, |conn| {
        let given_up = conn.choice.take_back(choice.version, None);
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
    note_places(daemon, &mut backstop, &[place]).await;
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
/// what follows may be quicker. Their kernels send nothing new until they are [marked](mark), and take nothing more by bumps of those
/// that are `refusing`.
pub(crate) async fn silence(
    daemon: &Daemon,
    lives: impl Iterator<Item = &Live>,
    refusing: &BTreeSet<FlowKey>,
) {
    let drains = lives.flat_map(|live| {
        let (pair, scale) = (live.pair, live.counts.window_scale);
        let refuses = refusing.contains(&pair);
        let bumps = daemon.bumps.all().iter();
        bumps.map(move |bump| daemon.driver.drain(bump.id, pair, scale, refuses))
    });
    // Without the data path nothing is under way.
    let _ = futures_util::future::join_all(drains).await;
}

impl State {
    /// The connections that the backstop knows by name.
    pub(crate) fn known(&self) -> Known {
        let mut known = Known::default();
        for (pair, conn) in self.conns.iter() {
            let chosen = conn.in_force();
            match chosen.map_or(conn.place.followed(), |choice| choice.bump) {
                Some(_) => known.bumped.insert(*pair),
                None if chosen.is_some() => known.plain.insert(*pair),
                None => false,
            };
        }
        known
    }
}

/// Brings the backstop to `wish`; whether others had undone it. Steering works without it, so where that
/// fails it is told and tried again.
pub(crate) async fn set(daemon: &Daemon, wish: &Desired) -> bool {
    let mut backstop = daemon.kernel.backstop().await;
    let known = Known {
        locked: locked_passing(daemon),
        ..daemon.state.borrow().known()
    };
    let bumped = known.bumped.iter().map(|pair| (*pair, true));
    let names = names(daemon, bumped).into_iter().map(|(name, _)| name);
    let known = Known {
        masqueraded: names.collect(),
        ..known
    };
    let before = backstop.standing().clone();
    let set = backstop.set(wish, &known).await;
    tell_standing(daemon, &before, backstop.standing());
    match (set, backstop.standing()) {
        (Ok(undone), _) => undone,
        (Err(error), Standing::Idle) => {
            daemon.events.note("clear nftables", Err(error));
            false
        }
        (Err(_), _) => false,
    }
}

/// Tells whether the backstop stands, if that is news.
pub(crate) fn tell_standing(daemon: &Daemon, before: &Standing, now: &Standing) {
    if before == now {
        return;
    }
    const KIND: &str = "backstop";
    const PLAIN: &str =
        "if another program flushes the firewall, protected connections may continue in plain";
    let state = backstop_info(now).state;
    let announce = |text| {
        daemon
            .events
            .announce(KIND, text, &[("state", state.to_string())])
    };
    match now {
        Standing::Idle => {}
        Standing::Stands(strength) => {
            let text = format!("the kill switch in nftables {strength}");
            tracing::info!(dibs.event = KIND, "{text}");
            announce(text);
        }
        Standing::Missing => {
            let text = format!("{}: {PLAIN}", Error::NoNftables);
            tracing::warn!(dibs.event = KIND, "{text}");
            announce(text);
        }
        Standing::Failed(why) => {
            let text = format!("{why}: {PLAIN}");
            tracing::error!(dibs.event = KIND, "{text}");
            announce(text);
            daemon.wakers.wake(Task::Repair);
        }
    }
}

/// Why the kernel would not take the backstop of all that is wanted and of a rule more; see [`Kernel::unbacked`](crate::kernel::Kernel::unbacked).
pub(crate) async fn unbacked(daemon: &Daemon, added: Option<&Rule>) -> Option<String> {
    daemon.kernel.unbacked(&daemon.wish(added)).await
}

/// To be called before the kernel is brought to what is wanted.
///
/// # Errors
/// A rule of the file requires its bump, and the kernel would not take what is to hold it when others
/// flush the firewall.
pub(crate) async fn ensure_backed(daemon: &Daemon) -> anyhow::Result<()> {
    let required = {
        let state = daemon.state.borrow();
        let is_required =
            |rule: &&Rule| rule.origin == RuleOrigin::Config && rule.level == Level::Require;
        state
            .rules
            .all()
            .iter()
            .find(is_required)
            .map(|rule| rule.id)
    };
    let Some(id) = required else { return Ok(()) };
    match unbacked(daemon, None).await {
        None => Ok(()),
        Some(why) => Err(daemon
            .config
            .refuse(
                &format!("rule.{}.require", id - 1),
                format!("rule {id} does not survive a flush of the firewall: {why}"),
                None,
            )
            .into()),
    }
}

/// Tells the backstop where connections are; its caller holds it while the marks change too.
pub(crate) async fn note_places(
    daemon: &Daemon,
    backstop: &mut Backstop,
    places: &[(FlowKey, Place)],
) {
    let places: Vec<(FlowKey, Place)> = {
        let conns = &daemon.state.borrow().conns;
        let decided = |(pair, place): &&(FlowKey, Place)| {
            *place != Place::Elsewhere || conns.get(pair).choice.get().is_none()
        };
        places.iter().filter(decided).copied().collect()
    };
    let before = backstop.standing().clone();
    // What failed shows in how it stands now, and is tried again.
    let _ = backstop.note(&places).await;
    let bumped = places.iter();
    let bumped = bumped.map(|(pair, place)| (*pair, *place == Place::Bumped));
    note_names(daemon, backstop, bumped).await;
    tell_standing(daemon, &before, backstop.standing());
}

/// Notes where the kernel has put a connection, by rules here or because the peer began it.
pub(crate) async fn note_followed(daemon: &Daemon, ends: &Ends, bump: Option<BumpId>) {
    // As it sends: of this host, or of a host behind it.
    let is_ours = |pair: &&FlowKey| {
        daemon.host.has(pair.src) && daemon.host.peer_of(pair).is_some()
            || connections::passes(&daemon.host, pair)
    };
    let Some(pair) = ends.iter().find(is_ours) else {
        return;
    };
    let mut backstop = daemon.kernel.backstop().await;
    let was = daemon.update(pair, |conn| conn.place.handle_followed(bump));
    let chosen = daemon.state.borrow().conns.get(pair).choice.get();
    let place = match (bump, was) {
        (Some(_), None) => Place::Bumped,
        (None, Some(_)) => Place::Elsewhere,
        _ => return,
    };
    if chosen.is_none() {
        note_places(daemon, &mut backstop, &[(*pair, place)]).await;
    }
}

/// Both names of those connections that this host masquerades, and what is said of them.
fn names(daemon: &Daemon, of: impl Iterator<Item = (FlowKey, bool)>) -> Vec<(FlowKey, bool)> {
    let known = of.filter_map(|(pair, said)| Some((pair, daemon.host.masqueraded(&pair)?, said)));
    known
        .flat_map(|(pair, entry, said)| [pair, entry.original].map(|name| (name, said)))
        .collect()
}

/// Tells the backstop of connections that this host masquerades, and whether they are on a bump, or are to be.
pub(crate) async fn note_names(
    daemon: &Daemon,
    backstop: &mut Backstop,
    bumped: impl Iterator<Item = (FlowKey, bool)>,
) {
    // What failed shows in how it stands now, and is tried again.
    let _ = backstop.note_masqueraded(&names(daemon, bumped)).await;
}

/// Brings the backstop to what is locked of connections that pass: what is forged of others their
/// sockets sort out.
pub(crate) async fn note_locks(daemon: &Daemon) {
    let mut backstop = daemon.kernel.backstop().await;
    tell_locks(daemon, &mut backstop).await;
}

/// As [`note_locks`], for those who hold the backstop.
pub(crate) async fn tell_locks(daemon: &Daemon, backstop: &mut Backstop) {
    let before = backstop.standing().clone();
    // What failed shows in how it stands now, and is tried again.
    let _ = backstop.set_locked(locked_passing(daemon)).await;
    tell_standing(daemon, &before, backstop.standing());
}

/// Whether a connection that has no entry may live all the same.
pub(crate) fn may_live(daemon: &Daemon, pair: &FlowKey) -> bool {
    connections::passes(&daemon.host, pair) && !daemon.state.borrow().conns.get(pair).has_ended()
}

/// Whether a choice for the connection `live` was made for an earlier one. What passes and has a new
/// entry, by our hand or its next packet, is named anew.
pub(crate) fn has_taken(daemon: &Daemon, live: &Live, choice: Choice) -> bool {
    if live.uid.is_none() && live.established && choice.socket == Socket::UNKNOWN {
        daemon.update(&live.pair, |conn| conn.choice.rename(live.socket));
        return false;
    }
    live.socket != choice.socket
}

/// A connection that passes has a new entry, by our hand: what was chosen for it stands, and if its
/// host does not know it any more it says so.
pub(crate) async fn rename(daemon: &Daemon, pair: &FlowKey, bump: BumpId) -> Result<(), Error> {
    for live in connections::passing_of(&daemon.kernel, std::slice::from_ref(pair)).await? {
        daemon.update(pair, |conn| conn.choice.rename(live.socket));
        if !daemon.bumps.is_outside(bump) {
            // Without the data path nobody can be asked.
            let _ = daemon.driver.solicit(bump, *pair);
        }
    }
    Ok(())
}

/// The connections that pass and are locked.
pub(crate) fn locked_passing(daemon: &Daemon) -> BTreeSet<FlowKey> {
    let locked: Vec<FlowKey> = daemon.state.borrow().conns.locked().collect();
    { locked.into_iter() }
        .filter(|pair| {
            connections::passes(&daemon.host, pair)
                || daemon.host.translated.borrow().contains_key(pair)
        })
        .collect()
}

/// Takes a connection that the data path found to be renumbered back to plain, and says so.
pub(crate) async fn leave_renumbered(
    daemon: &Daemon,
    bump: BumpId,
    pair: FlowKey,
) -> anyhow::Result<()> {
    let Some((live, has_left)) = renumbered::leave(daemon, bump, pair).await? else {
        return Ok(());
    };
    let then = match has_left {
        true => "it is in plain",
        false => {
            "it stays and moves nothing, because a rule requires that, or the peer did not follow"
        }
    };
    let name = daemon.bumps.name_of(Some(bump));
    daemon.events.tell_of_conns(
        std::iter::once(live.uid),
        "renumbered",
        |_| format!("{pair} does not get on by {name}: {RENUMBERED}; {then}"),
        &[("bump", name.to_owned())],
    );
    Ok(())
}

/// True if a choice for a connection is under way.
pub(crate) fn is_moving(daemon: &Daemon, live: &Live) -> bool {
    let conns = &daemon.state.borrow().conns;
    conns.get(&live.pair).phase.asked().is_some()
}
