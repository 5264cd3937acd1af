//! Entries of conntrack: those that vanish are made again, and marks that others set are followed, or put back.

use dibs_wire::FlowKey;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use dibs_settings::BumpId;

use super::{
    Live, Machine, Mark, News, all_of, choices, or_warn, rules, switches, update, warn_of,
};
use crate::marks::{Foreign, Hand, SeenMark};
use crate::rules::Rule;
use crate::table::Conn;
use crate::tracked::{Entry, Mend};

/// A connection as either of its ends may have begun it.
pub type Ends = [FlowKey; 2];

/// Mark of another program that is to be [followed](follow), beside whatever else goes on.
#[derive(Clone, Copy, Debug)]
pub struct Marked<L> {
    /// The connection.
    pub conn: L,
    /// The bump; none: plain.
    pub bump: Option<BumpId>,
    /// Choice, as opposed to another move.
    pub chosen: bool,
    /// The bump that the connection was taken from.
    was: Option<BumpId>,
}

/// A connection that passes this host between others, and whose entry is gone.
#[derive(Clone, Copy, Debug)]
pub struct Passing {
    /// Ends of the connection.
    pub pair: FlowKey,
    /// Flush of the entry: the connection goes on, as far as anybody knows.
    pub goes_on: bool,
}

/// An event of the table of entries.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// Entry that is new.
    New(Ends, Entry),
    /// Entry that has changed.
    Update(Ends, Entry),
    /// Entry that is gone; of a connection that passes this host, whose.
    Destroyed(Ends, Option<Passing>),
    /// Loss of events, or the beginning.
    Lost,
}

/// Takes an event. Marks of other programs are followed beside what comes next.
///
/// # Errors
/// The kernel does not say, or does not take what stands.
pub async fn handle<M: Machine + 'static>(m: &Rc<M>, event: Event) -> Result<(), M::Fault> {
    let marked = match event {
        Event::New(ends, entry) => Vec::from_iter(handle_new(&**m, &ends, entry).await?),
        Event::Update(ends, entry) => Vec::from_iter(handle_update(&**m, &ends, entry).await?),
        Event::Destroyed(ends, passing) => {
            handle_destroyed(&**m, &ends, passing).await?;
            Vec::new()
        }
        Event::Lost => catch_up(&**m).await?,
    };
    for marked in marked {
        let own = Rc::clone(m);
        m.spawn(async move {
            or_warn(&*own, follow(&*own, marked).await);
        });
    }
    Ok(())
}

/// Takes an entry that is new. Returns the mark of another program that it may have.
async fn handle_new<M: Machine>(
    m: &M,
    ends: &Ends,
    entry: Entry,
) -> Result<Option<Marked<M::Live>>, M::Fault> {
    m.note_followed(ends, entry.mark.bump).await;
    let settled = m.conns(|conns| {
        let is_settled = |pair: &&FlowKey| conns.get(pair).in_force().is_some();
        ends.iter().find(is_settled).copied()
    });
    let marked = match settled {
        // It has no mark of ours yet, whatever rules set.
        Some(pair) if !entry.mark.chosen => restore(m, pair, false).await.map(|()| None),
        _ => handle_mark(m, ends, entry, None).await,
    };
    m.conns(|conns| conns.update_each(ends, Conn::begin));
    marked
}

/// Takes an entry that has changed. Returns the mark of another program that it may have.
async fn handle_update<M: Machine>(
    m: &M,
    ends: &Ends,
    entry: Entry,
) -> Result<Option<Marked<M::Live>>, M::Fault> {
    let had = m.conns(|conns| conns.either(ends).place.followed());
    m.note_followed(ends, entry.mark.bump).await;
    note_finished(m, ends, entry);
    handle_mark(m, ends, entry, had).await
}

/// Notes connections that pass this host and have ended. Nobody may hear that their entries expire, and an entry that is missing is made
/// again, by which a later connection of the same ends comes to nothing.
fn note_finished<M: Machine>(m: &M, ends: &Ends, entry: Entry) {
    for pair in ends.iter().filter(|pair| entry.finished && m.passes(pair)) {
        update(m, pair, Conn::finish);
    }
}

/// The entry of a connection is gone: it is made again if the connection is chosen or follows, and goes on.
async fn handle_destroyed<M: Machine>(
    m: &M,
    ends: &Ends,
    passing: Option<Passing>,
) -> Result<(), M::Fault> {
    if let Some(Passing { pair, goes_on }) = passing {
        update(m, &pair, |conn| conn.lose_entry(goes_on));
        if !goes_on {
            m.unlock(&[pair]).await;
        }
    }
    for pair in ends {
        restore(m, *pair, passing.is_some_and(|passing| passing.goes_on)).await?;
    }
    Ok(())
}

/// Brings marks and the record together where changes were missed. Returns marks of other programs.
async fn catch_up<M: Machine>(m: &M) -> Result<Vec<Marked<M::Live>>, M::Fault> {
    let entries = m.entries().await?;
    let mut marked = Vec::new();
    for (ends, entry) in &entries {
        m.note_followed(ends, entry.mark.bump).await;
        note_finished(m, ends, *entry);
        if entry.mark.chosen {
            marked.extend(handle_mark(m, ends, *entry, None).await?);
        }
    }
    let chosen: Vec<FlowKey> = m.conns(|conns| conns.choices().map(|(pair, _)| pair).collect());
    warn_of(m, &m.mark_choices(&chosen).await);
    let tracked: BTreeSet<FlowKey> = entries.into_iter().flat_map(|(ends, _)| ends).collect();
    // One that follows has no choice to say where it belongs, and while this end alone sends, nothing comes that it could
    // follow anew.
    let lost: Vec<FlowKey> = m.conns(|conns| {
        let follows = |conn: &Conn| conn.place.followed().is_some();
        let lost = { conns.iter() }.filter(|(pair, conn)| follows(conn) && !tracked.contains(pair));
        lost.map(|(pair, _)| *pair).collect()
    });
    for pair in lost {
        let passes = m.passes(&pair) && !m.conns(|conns| conns.get(&pair).has_ended());
        restore(m, pair, passes).await?;
    }
    Ok(marked)
}

/// Takes over what an earlier run locked, what is on a bump for no reason that outlives the daemon, and what has just left
/// one; before anything changes marks. Questions that it did not live to conclude are over.
///
/// # Errors
/// The kernel does not say.
pub async fn adopt<M: Machine>(m: &M) -> Result<(), M::Fault> {
    let entries = m.entries().await;
    let known = entries.as_ref().map_or(&[][..], Vec::as_slice);
    let ends = { known.iter() }.flat_map(|(ends, entry)| ends.map(|pair| (pair, entry.mark.bump)));
    let on: HashMap<FlowKey, Option<BumpId>> = ends.collect();
    m.conns(|conns| {
        conns.update_all(|pair, conn| conn.end_question(on.get(pair).copied().flatten()));
    });
    let mut entries = entries?;
    let is_marked = |mark: SeenMark| mark.carried && (mark.bump.is_some() || mark.chosen);
    entries.retain(|(_, entry)| is_marked(entry.mark));
    for (ends, entry) in &entries {
        m.note_followed(ends, entry.mark.bump).await;
    }
    let of_peers = entries.iter().flat_map(|(ends, entry)| {
        let of_peers = ends.iter().filter(|pair| m.peer_of(pair).is_some());
        of_peers.map(|pair| (*pair, entry.mark))
    });
    let marks: Vec<(FlowKey, SeenMark)> = of_peers.collect();
    let pairs: Vec<FlowKey> = marks.iter().map(|(pair, _)| *pair).collect();
    let lives = m.find(&pairs).await?;
    for (pair, mark) in marks {
        let live = lives.get(&pair);
        let by = { live.zip(mark.bump) }
            .and_then(|(live, bump)| m.ruling(live, |ruling| ruling.hand_of(bump)));
        let socket = live.map(|live| live.meant().socket);
        update(m, &pair, |conn| conn.adopt_mark(mark, socket, by, m.now()));
    }
    for (ends, entry) in &entries {
        note_finished(m, ends, *entry);
    }
    Ok(())
}

/// Takes what other programs chose for connections that were not known to be of a peer's: all that is chosen for them from
/// now on is later.
pub(super) async fn take_up<M: Machine>(m: &M, pairs: &[FlowKey]) -> Result<(), M::Fault> {
    for pair in pairs {
        let mark = m.entry(pair).await?.map(|entry| entry.mark);
        let chosen = |conn: &Conn| mark.filter(|mark| conn.is_chosen_elsewhere(*mark));
        if let Some(mark) = m.conns(|conns| chosen(conns.get(pair))) {
            update(m, pair, |conn| conn.place.move_to_chosen(mark.bump));
        }
    }
    Ok(())
}

/// Lets connections follow again that left their bumps a while ago.
pub(super) async fn let_follow<M: Machine>(m: &M) -> Result<(), M::Fault> {
    let marks = || -> Vec<Mark> {
        let now = m.now();
        m.conns(|conns| {
            let is_over = |conn: &Conn| conn.place.may_follow(now) && conn.choice.get().is_none();
            let left = conns.iter().filter(|(_, conn)| is_over(conn));
            left.map(|(pair, _)| Mark::moved(*pair, None)).collect()
        })
    };
    let leaving: Vec<FlowKey> = marks().iter().map(|mark| mark.pair).collect();
    if leaving.is_empty() {
        return Ok(());
    }
    m.unpin(&leaving).await?;
    let failed = m.mark(marks).await;
    m.conns(|conns| conns.update_each(failed.keys(), |conn| conn.place.move_to_left(m.now())));
    all_of::<M>(failed)
}

/// The entry of a connection that was chosen or follows is gone; the connection may not be. `passes`: it has no socket
/// here that would say so, and goes on.
async fn restore<M: Machine>(m: &M, pair: FlowKey, passes: bool) -> Result<(), M::Fault> {
    let (settled, had) = m.conns(|conns| {
        let conn = conns.get(&pair);
        (conn.settled().is_some(), conn.had())
    });
    if !settled && had.is_none() {
        return Ok(());
    }
    let found = m.find(&[pair]).await?;
    let lives = passes || found.get(&pair).is_some_and(|live| !live.is_over());
    match had {
        _ if lives => mark_as_it_stands(m, pair, None).await,
        Some(_) => {
            m.note_followed(&[pair, pair.reversed()], None).await;
            update(m, &pair, Conn::forget_end);
            Ok(())
        }
        None => Ok(()),
    }
}

/// Gives a connection the mark of its choice; where that is not settled, the one that it had, by the record, or else this bump.
async fn mark_as_it_stands<M: Machine>(
    m: &M,
    pair: FlowKey,
    was: Option<BumpId>,
) -> Result<(), M::Fault> {
    if m.conns(|conns| conns.get(&pair).settled().is_some()) {
        return all_of::<M>(m.mark_choices(&[pair]).await);
    }
    // It may leave while this waits for its turn.
    let mark = || {
        let had = m.conns(|conns| conns.get(&pair).had());
        let had = had.or(was.map(|bump| (Some(bump), false)));
        let mark = had.map(|(bump, explicit)| Mark::new(pair, bump, explicit));
        Vec::from_iter(mark)
    };
    all_of::<M>(m.mark(mark).await)
}

/// A mark that says otherwise than the record was set by another program. Returns it, if it is to be followed.
/// `had`: the bump that the kernel had the connection on before.
async fn handle_mark<M: Machine>(
    m: &M,
    ends: &Ends,
    entry: Entry,
    had: Option<BumpId>,
) -> Result<Option<Marked<M::Live>>, M::Fault> {
    let is_known = |conn: &Conn, mark| {
        let is_off = had.is_some() && conn.is_taken_off(mark);
        !is_off && conn.knows(mark)
    };
    let knows = |mark| m.conns(|conns| is_known(conns.either(ends), mark));
    if knows(entry.mark) {
        return relock(m, ends, entry).await.map(|()| None);
    }
    // It may have been put right since.
    let entry = m.entry(&ends[0]).await?;
    let Some(Entry { mark, .. }) = entry.filter(|entry| !knows(entry.mark)) else {
        return Ok(None);
    };
    let of_peers = ends.iter().filter(|pair| m.peer_of(pair).is_some());
    let found = m.find(&Vec::from_iter(of_peers.copied())).await?;
    let Some(live) = found.into_values().next() else {
        return Ok(None);
    };
    if live.is_over() || !mark.carried {
        return Ok(None);
    }
    let pair = live.pair();
    // The kernel's own rule would put it back only with the next packet, and may be gone by then.
    let ruled = m.ruling(&live, |ruling| {
        let required = ruling.requirement().and_then(Rule::bump);
        required.or(ruling.moves_to().filter(|_| !mark.chosen))
    });
    if ruled.is_some() && mark.bump != ruled {
        if mark.chosen {
            // Otherwise it is not written over.
            update(m, &pair, |conn| conn.place.move_to_chosen(mark.bump));
        }
        let back = || vec![Mark::moved(pair, ruled)];
        return all_of::<M>(m.mark(back).await).map(|()| None);
    }
    let was = m.ruling(&live, |ruling| ruling.stands_on(had));
    let by = { mark.bump }.and_then(|bump| m.ruling(&live, |ruling| ruling.hand_of(bump)));
    let foreign = update(m, &pair, |conn| conn.handle_mark(mark, by, m.now()));
    match foreign {
        Foreign::Chosen => update(m, &pair, |conn| conn.phase.move_to_awaited(mark.bump)),
        Foreign::News => {}
        Foreign::Lost if m.is_steering() => {
            let was = was.filter(|_| mark.bump.is_none());
            mark_as_it_stands(m, pair, was).await?;
        }
        Foreign::Straggler => all_of::<M>(switches::mark_moved(m, &[pair], None).await)?,
        Foreign::Lost | Foreign::Known => {}
    }
    let is_followed = matches!(foreign, Foreign::Chosen | Foreign::News);
    Ok(is_followed.then_some(Marked {
        conn: live,
        bump: mark.bump,
        chosen: mark.chosen,
        was,
    }))
}

/// An entry that was made anew has no LOCKED.
async fn relock<M: Machine>(m: &M, ends: &Ends, entry: Entry) -> Result<(), M::Fault> {
    let mends: Vec<(FlowKey, Mend)> = m.conns(|conns| {
        let mend = |pair: &FlowKey| Some((*pair, conns.get(pair).lock.mend(entry, Some(false))?));
        ends.iter().filter_map(mend).collect()
    });
    match mends.is_empty() {
        true => Ok(()),
        false => m.mend(&mends).await,
    }
}

/// Follows a mark of another program. A choice becomes one as `enable` and `disable` make it; of another move, which neither
/// end knows of, the peer is told.
async fn follow<M: Machine>(m: &M, marked: Marked<M::Live>) -> Result<(), M::Fault> {
    let Marked {
        conn, bump, was, ..
    } = marked;
    if marked.chosen {
        let followed = follow_choice(m, marked).await;
        update(m, &conn.pair(), |conn| conn.phase.end_awaited(bump));
        return followed;
    }
    m.tell(News::Marked(marked));
    let left = was.filter(|_| bump.is_none() && !m.is_outside(was));
    if let Some(bump) = left {
        let keep = |conn: &mut Conn| conn.place.hand_over(Hand::Kept.on(bump));
        update(m, &conn.pair(), keep);
        let back = Vec::from_iter(way_back(m, &conn, was));
        or_warn(m, all_of::<M>(m.mark(|| back).await));
    }
    or_warn(m, m.install().await);
    // The kernel has it where a rule wants it with the next packet.
    let ruled = m.ruling(&conn, |ruling| ruling.moves_to());
    rules::follow(m, &[conn], ruled.or(bump).into()).await;
    Ok(())
}

/// Makes a choice of another program ours, if it still stands: it may have been our own, and `cleanup` have taken it back.
async fn follow_choice<M: Machine>(m: &M, marked: Marked<M::Live>) -> Result<(), M::Fault> {
    let Marked {
        conn: live,
        bump,
        was,
        ..
    } = marked;
    let pair = live.pair();
    let has = async |bump, chosen| -> Result<bool, M::Fault> {
        let is = |Entry { mark, .. }: Entry| mark.bump == bump && mark.chosen == chosen;
        Ok(m.entry(&pair).await?.is_some_and(is))
    };
    let mut stands = (bump, true);
    // Plain may not carry it, and others may have their turn for long.
    if bump.is_none() && has(bump, true).await? {
        let back = way_back(m, &live, was);
        // Otherwise it is not written over.
        update(m, &pair, |conn| conn.place.move_to_chosen(bump));
        if let Some(back) = back {
            stands = (back.bump, back.explicit);
            all_of::<M>(m.mark(|| vec![back]).await)?;
        }
    }
    let written = || m.conns(|conns| conns.get(&pair).place.written());
    let earlier = written();
    let _turn = m.turn().await;
    let known = m.conns(|conns| conns.get(&pair).choice.get());
    if !has(stands.0, stands.1).await? || known.is_some_and(|choice| choice.bump == bump) {
        return Ok(());
    }
    let before = match bump {
        // The record says plain already, as the mark does.
        None => m.ruling(&live, |ruling| ruling.stands_on(was)),
        // The kernel has it on the new bump already, which no record but that of an entry that was made again says.
        Some(_) => { written().filter(|written| *written != bump) }
            .or(earlier)
            .unwrap_or(was),
    };
    if bump.is_some() {
        update(m, &pair, |conn| conn.place.move_to_chosen(bump));
    }
    m.tell(News::Marked(marked));
    let fault = match choices::choose(m, &[live], bump.into(), |_, _| ()).await {
        Ok(moved) => moved.into_iter().find_map(|(_, outcome)| outcome.fault()),
        Err(fault) => Some(format!("{fault:#}")),
    };
    if let Some(why) = fault {
        let why = format!("another program's move of a connection was undone: {why}");
        m.tell(News::Fault(&why));
        if bump.is_some() || before.is_none() {
            switches::put_back(m, [(pair, before)].into_iter()).await;
        }
        warn_of(m, &m.mark_choices(&[pair]).await);
    }
    Ok(())
}

/// Mark that puts a connection back on its bump that another program took to plain: it leaves again only if plain carries it.
/// `was`: the bump, if nothing else says where it is to be.
fn way_back<M: Machine>(m: &M, live: &M::Live, was: Option<BumpId>) -> Option<Mark> {
    let pair = live.pair();
    let bump = m.ruling(live, |ruling| ruling.stands_on(was));
    let explicit = m.conns(|conns| {
        let conn = conns.get(&pair);
        match conn.is_asked() {
            // That one is to come.
            true => conn.place.is_chosen(bump),
            false => conn.choice.of(live.meant().socket).is_some(),
        }
    });
    (!m.is_outside(bump)).then(|| Mark::new(pair, bump, explicit))
}
