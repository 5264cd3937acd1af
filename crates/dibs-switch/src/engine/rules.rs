//! Rules that come, change and go, and the connections that follow them.

use dibs_wire::FlowKey;
use std::collections::{BTreeMap, BTreeSet};

use dibs_core::Time;
use dibs_settings::{BumpId, Level};

use super::asks::{self, Move, ROUND, by_peer};
use super::{
    Goal, Live as _, Machine, Mark, News, Shadows, Task, all_of, choices, matches, or_warn,
    stands_on, switches, update, wants, warn_of,
};
use crate::asking::{Conclusion, Negotiation};
use crate::knock::Refusal;
use crate::marks::Hand;
use crate::messages::{Ground, Outcome, Unanswered};
use crate::phase::Moving;
use crate::rules::Fit;

/// Connections that stay on their bumps only because plain does not carry them, and why.
pub type Kept = BTreeMap<FlowKey, Refusal>;

/// Outcome of rules that took the place of others.
#[derive(Debug, Default)]
pub struct Replaced {
    /// Number of connections of rules that are gone that leave their bumps.
    pub freed: usize,
    /// Connections of these that stay.
    pub kept: Kept,
    /// Connections that stay in plain, though a rule is for them: their peers do not find them, for this reason.
    pub unfound: BTreeMap<FlowKey, Outcome>,
}

/// Rules that do not hold any more.
#[derive(Debug)]
pub struct Gone<'a, R> {
    /// Rules that held.
    pub rules: &'a [R],
    /// Their connections go to plain whether that carries them or not.
    pub force: bool,
}

impl<R> Clone for Gone<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Gone<'_, R> {}

impl<'a, R> From<&'a [R]> for Gone<'a, R> {
    /// Connections that plain does not carry stay.
    fn from(rules: &'a [R]) -> Self {
        let force = false;
        Self { rules, force }
    }
}

/// Has these rules take the place of all there are. Connections follow them; those of rules that are `gone` and that
/// nothing else keeps go back to plain.
///
/// # Errors
/// The kernel does not take them, or they cannot be saved: what was there before stands again.
pub async fn replace<M: Machine>(
    m: &M,
    rules: M::Book,
    gone: Gone<'_, M::Rule>,
    lives: &[M::Live],
) -> Result<Replaced, M::Fault> {
    // Peers first: what comes to them by a bump finds it there, and what leaves one does not lose it before. Until they
    // are ready the rules are not in the book: what else has the kernel steered meanwhile would bring them there.
    wants::note_coming(m, |peer| m.book_wants(&rules, peer));
    wants::send_all(m).await;
    let (rules, unfound) = introduce(m, rules).await;
    let replaced = put(m, rules, gone, lives, M::save).await?;
    Ok(Replaced {
        unfound,
        ..replaced
    })
}

/// Introduces connections in plain that these rules bring to bumps to their peers, which may know them by other addresses. Returns
/// the rules, and connections that peers did not find.
async fn introduce<M: Machine>(m: &M, mut rules: M::Book) -> (M::Book, BTreeMap<FlowKey, Outcome>) {
    let (mut known, mut unfound) = (BTreeSet::new(), BTreeMap::new());
    while let Some(mut lives) = or_warn(m, m.lives().await) {
        lives.retain(|live| known.insert(live.pair()));
        let before = m.replace_rules(rules);
        let leaving = leaving_plain(m, &lives);
        rules = m.replace_rules(before);
        if leaving.is_empty() {
            break;
        }
        // Others may begin meanwhile.
        unfound.extend(matches::introduce(m, &leaving).await);
    }
    (rules, unfound)
}

/// Connections of these in plain that the kernel moves with their next packet once it has the rules.
fn leaving_plain<M: Machine>(m: &M, lives: &[M::Live]) -> Vec<M::Live> {
    let leaves = |live: &&M::Live| {
        let goes = m.ruling(live, |ruling| ruling.moves_to());
        let marked = || m.conns(|conns| conns.get(&live.pair()).place.marked());
        let is_plain = m.marked(live).or_else(marked).is_none();
        !live.is_over() && is_plain && goes.is_some() && !m.is_outside(goes)
    };
    lives.iter().filter(leaves).copied().collect()
}

/// As [`replace`], where the same rules only mean more or less: they begin or end to hold with the time of day. Nothing of
/// that is saved, and peers are ready for it at all times.
///
/// # Errors
/// The kernel does not take them: what was there before stands again.
pub async fn turn<M: Machine>(
    m: &M,
    rules: M::Book,
    gone: Gone<'_, M::Rule>,
    lives: &[M::Live],
) -> Result<Replaced, M::Fault> {
    let (rules, _) = introduce(m, rules).await;
    put(m, rules, gone, lives, |_| Ok(())).await
}

async fn put<M: Machine>(
    m: &M,
    rules: M::Book,
    gone: Gone<'_, M::Rule>,
    lives: &[M::Live],
    save: fn(&M) -> Result<(), M::Fault>,
) -> Result<Replaced, M::Fault> {
    wants::note_coming(m, |_| 0);
    let wanted = wants::wanted(m);
    let before = m.replace_rules(rules);
    let carried_out = async {
        save(m)?;
        unlock_moving(m, lives).await;
        m.steer().await
    };
    if let Err(fault) = carried_out.await {
        m.replace_rules(before);
        // Or the next start would find them in the file.
        or_warn(m, save(m));
        // Some of it may be in the kernel.
        or_warn(m, m.steer().await);
        wants::send_all(m).await;
        return Err(fault);
    }
    // What a rule requires on its bump is not shown in plain from now on.
    m.wake(Task::Shadow);
    m.wake(Task::Confirm);
    // Connections may have begun while peers made ready.
    let known = m.lives().await;
    let lives = known.as_deref().unwrap_or(lives);
    let replaced = follow_changed(m, gone, lives).await;
    if wants::wanted(m) != wanted {
        wants::send_all(m).await;
    }
    m.wake(Task::Rules);
    Ok(replaced)
}

/// Unlocks connections that the kernel takes to the bumps of rules with their next packet: LOCKED stays in their marks, and peers are asked
/// about one bump after the other.
async fn unlock_moving<M: Machine>(m: &M, lives: &[M::Live]) {
    let goes =
        |live: &M::Live| m.ruling(live, |ruling| ruling.overruled_by().or(ruling.moves_to()));
    for (bump, lives) in by_bump::<M>(lives, goes) {
        let pairs: Vec<FlowKey> = lives.iter().map(|live| live.pair()).collect();
        switches::unlock_leaving(m, &pairs, Some(bump)).await;
    }
}

/// Has connections follow the rules as they are by now; of those that are `gone`, back to plain.
async fn follow_changed<M: Machine>(m: &M, gone: Gone<'_, M::Rule>, lives: &[M::Live]) -> Replaced {
    enforce(m, lives).await;
    let mut replaced = Replaced::default();
    for rule in gone.rules {
        let (freed, kept) = let_go(m, rule, lives, gone.force).await;
        replaced.freed += freed;
        replaced.kept.extend(kept);
    }
    follow_ruled(m, lives).await;
    replaced
}

/// Chooses what rules require where a choice stands against that: the peer would not follow the rule against the choice.
async fn enforce<M: Machine>(m: &M, lives: &[M::Live]) {
    let overruled = |live: &M::Live| m.ruling(live, |ruling| ruling.overruled_by());
    for (bump, lives) in by_bump::<M>(lives, overruled) {
        lives.iter().for_each(|_| m.tell(News::Overruled));
        let moved = choices::choose(m, &lives, Some(bump).into(), |_, _| ()).await;
        let Some(moved) = or_warn(m, moved) else {
            let unasked = choices::Outcome::Answered(Err(Unanswered::NotAsked));
            { lives.iter() }.for_each(|live| enforce_later(m, live, bump, &unasked));
            continue;
        };
        for (live, outcome) in &moved {
            let Some(why) = outcome.fault() else { continue };
            // What the peer refuses is blocked by the rule.
            m.tell(News::Fault(&format!(
                "a connection whose rule requires a bump is blocked: {why}"
            )));
            enforce_later(m, live, bump, outcome);
        }
    }
}

/// Notes that a choice stands against what a rule requires, because this came of the choice that was to end that.
fn enforce_later<M: Machine>(m: &M, live: &M::Live, bump: BumpId, came: &choices::Came<M>) {
    let answer = match came {
        choices::Outcome::Answered(answer) => *answer,
        _ => Err(Unanswered::NotAsked),
    };
    let now = m.now();
    update(m, &live.pair(), |conn| {
        conn.telling.handle_moved(Some(bump), answer, now)
    });
    m.wake(Task::Tell);
}

/// Has connections that rules decide over go where the first rule that matches has them.
pub async fn follow_ruled<M: Machine>(m: &M, lives: &[M::Live]) {
    let moves_to = |live: &M::Live| m.ruling(live, |ruling| ruling.moves_to());
    for (bump, lives) in by_bump::<M>(lives, moves_to) {
        let elsewhere = lives.iter().filter(|live| m.marked(live) != Some(bump));
        elsewhere.for_each(|_| m.tell(News::RuleMoves));
        follow(m, &lives, Some(bump).into()).await;
    }
}

/// Carries out what rules here say of all connections with a peer whose session is new.
///
/// # Errors
/// The kernel does not say which connections there are.
pub async fn follow_at_peer<M: Machine>(m: &M, peer: usize) -> Result<(), M::Fault> {
    let mut lives = m.lives().await?;
    lives.retain(|live| live.peer() == peer);
    enforce(m, &lives).await;
    follow_ruled(m, &lives).await;
    let by_others = |live: &M::Live| {
        let is_free = |_: &BumpId| m.ruling(live, |ruling| ruling.deciding().is_none());
        m.conns(|conns| conns.get(&live.pair()).place.handed_by(Hand::Other))
            .filter(is_free)
    };
    for (bump, lives) in by_bump::<M>(&lives, by_others) {
        follow(m, &lives, Some(bump).into()).await;
    }
    Ok(())
}

/// Looks which peers have a session, and answer. Rules that prefer their bump move connections with a peer that answers
/// again; with one that does not any more connections begin in plain.
///
/// # Errors
/// The system does not say, or cannot follow; it does with the next look.
pub async fn look_at_sessions<M: Machine>(m: &M) -> Result<(), M::Fault> {
    let mut turned = note_sessions(m).await?;
    if turned.is_empty() || !m.has_rule(Level::Prefer) {
        return Ok(());
    }
    let followed = follow_sessions(m, &mut turned).await;
    if followed.is_err() {
        let forget = |peer: usize| m.answers(peer, |known| *known = !*known);
        turned.into_iter().for_each(forget);
    }
    followed
}

/// Notes which peers answer. Returns those of which that is new.
async fn note_sessions<M: Machine>(m: &M) -> Result<BTreeSet<usize>, M::Fault> {
    let answers = m.sessions().await?.into_iter().enumerate();
    let turned = answers.filter(|(peer, answers)| {
        m.answers(*peer, |known| {
            std::mem::replace(known, *answers) != *answers
        })
    });
    Ok(turned.map(|(peer, _)| peer).collect())
}

async fn follow_sessions<M: Machine>(m: &M, turned: &mut BTreeSet<usize>) -> Result<(), M::Fault> {
    let _turn = m.turn().await;
    // It may have taken until a peer is back, and what began with it goes on by then.
    turned.extend(note_sessions(m).await?);
    let answers = |live: &M::Live| m.answers(live.peer(), |known| *known);
    let mut lives = m.lives().await?;
    lives.retain(|live| turned.contains(&live.peer()) && answers(live));
    matches::introduce(m, &leaving_plain(m, &lives)).await;
    unlock_moving(m, &lives).await;
    m.steer().await?;
    let mut lives = m.lives().await?;
    lives.retain(|live| turned.contains(&live.peer()));
    let (met, left) = lives.into_iter().partition::<Vec<_>, _>(answers);
    let begun = begin_plain(m, &left).await;
    follow_ruled(m, &met).await;
    begun
}

/// Connections that a rule put on its bump before anybody knew that the peer is gone, and of which nothing but a SYN is
/// under way, begin in plain like those after them.
async fn begin_plain<M: Machine>(m: &M, lives: &[M::Live]) -> Result<(), M::Fault> {
    let opening: Vec<FlowKey> = { lives.iter() }
        .filter(|live| m.is_opening(*live))
        .map(|live| live.pair())
        .collect();
    // The peer may be back, and have answered.
    let found = m.find(&opening).await?;
    let waits = |live: &&M::Live| {
        let found = found.get(&live.pair());
        let still = found.is_some_and(|it| it.meant() == live.meant() && m.is_opening(it));
        still && m.ruling(live, |ruling| ruling.may_begin_plain())
    };
    let marks = || {
        let waiting = lives.iter().filter(waits);
        let on_bump = waiting.inspect(|live| {
            // What comes by the bump yet is no straggler, but the answer to its SYN, of which plain knows nothing.
            update(m, &live.pair(), |conn| conn.place.forget_mark());
            m.marked(live).iter().for_each(|_| m.tell(News::RuleWaits));
        });
        on_bump.map(|live| Mark::moved(live.pair(), None)).collect()
    };
    all_of::<M>(m.mark(marks).await)
}

/// Connections of these that go on, by the bump that each is meant to be on, if any.
fn by_bump<M: Machine>(
    lives: &[M::Live],
    bump: impl Fn(&M::Live) -> Option<BumpId>,
) -> BTreeMap<BumpId, Vec<M::Live>> {
    let mut meant: BTreeMap<BumpId, Vec<M::Live>> = BTreeMap::new();
    for live in lives.iter().filter(|live| !live.is_over()) {
        if let Some(bump) = bump(live) {
            meant.entry(bump).or_default().push(*live);
        }
    }
    meant
}

/// Has connections go where they are to be without a rule that does not hold any more: where they were chosen to be, or
/// where a rule of the peer wants them, or, if nothing keeps them, back to plain. Returns how many do that, and those that stay.
async fn let_go<M: Machine>(
    m: &M,
    rule: &M::Rule,
    lives: &[M::Live],
    force: bool,
) -> (usize, Kept) {
    let is_left = |live: &&M::Live| {
        !live.is_over() && m.ruling(live, |ruling| ruling.is_left_to_choice(rule))
    };
    let chosen: Vec<FlowKey> = lives
        .iter()
        .filter(is_left)
        .map(|live| live.pair())
        .collect();
    chosen.iter().for_each(|_| m.tell(News::ChoiceLeft));
    warn_of(m, &m.mark_choices(&chosen).await);
    // The peer may have given it up for that rule.
    m.conns(|conns| conns.update_each(&chosen, |conn| conn.telling.tell_all(m.now())));
    m.wake(Task::Tell);
    let freed = freed(m, rule, lives);
    // Where a rule of the peer wants them the peer says: what it said earlier may not hold any more.
    let (bump, ground) = (None, Ground::forced(force));
    let kept = follow(m, &freed, Goal { bump, ground }).await;
    if let Some(why) = kept.values().next() {
        let (count, why) = (kept.len(), *why);
        m.tell(News::Kept { rule, count, why });
    }
    (freed.len() - kept.len(), kept)
}

/// The connections that nothing keeps on the bump of a rule that does not hold any more.
fn freed<M: Machine>(m: &M, rule: &M::Rule, lives: &[M::Live]) -> Vec<M::Live> {
    let mut freed = Vec::new();
    for live in lives.iter().filter(|live| !live.is_over()) {
        let Some(fit) = m.ruling(live, |ruling| ruling.freed_of(rule)) else {
            continue;
        };
        if fit == Fit::May {
            // Where another rule of the kernel's wants it, the next packet puts it back.
            update(m, &live.pair(), |conn| conn.place.hand_over(None));
        }
        if m.marked(live).is_some() {
            m.tell(News::RuleFrees);
        }
        freed.push(*live);
    }
    freed
}

/// Has connections that rules moved follow them again, whose peers could not do their part by now, and chooses again what
/// rules require.
///
/// # Errors
/// The kernel does not say which connections there are: they follow later.
pub async fn follow_again<M: Machine>(
    m: &M,
    moved: Vec<(FlowKey, Option<BumpId>)>,
) -> Result<(), M::Fault> {
    // Nobody changes rules meanwhile.
    let _turn = m.turn().await;
    let moved: BTreeMap<FlowKey, Option<BumpId>> = moved.into_iter().collect();
    let mut meant: BTreeMap<Option<BumpId>, Vec<M::Live>> = BTreeMap::new();
    let lives = m.lives().await;
    if lives.is_err() {
        let answer = Err(Unanswered::NotAsked);
        for (pair, bump) in &moved {
            let now = m.now();
            update(m, pair, |conn| {
                conn.telling.handle_moved(*bump, answer, now)
            });
        }
    }
    let mut lives = lives?;
    lives.retain(|live| moved.contains_key(&live.pair()));
    enforce(m, &lives).await;
    for live in lives {
        let went = moved.get(&live.pair()).filter(|_| !live.is_over());
        let goes = |went: &Option<BumpId>| m.ruling(&live, |ruling| ruling.goes_again(*went));
        if let Some(bump) = went.and_then(goes) {
            m.tell(News::RuleAgain);
            meant.entry(bump).or_default().push(live);
        }
    }
    for (bump, lives) in meant {
        follow(m, &lives, bump.into()).await;
    }
    Ok(())
}

/// Moves connections here and at their peers because rules changed, not by choice. Returns those that stay on their
/// bumps, because plain does not carry them.
pub async fn follow<M: Machine>(m: &M, lives: &[M::Live], goal: Goal) -> Kept {
    let bump = goal.bump;
    let mut lives: Vec<M::Live> = m.steerable(lives, bump).await;
    let moving = |live: &M::Live| {
        let ruled = bump.is_some() && m.ruling(live, |ruling| ruling.bump()) == bump;
        (live.pair(), Moving { bump, ruled })
    };
    // Where the same move is under way, another question about it would be answered after what the peer says next.
    lives.retain(|live| {
        let (pair, moving) = moving(live);
        bump.is_none() || m.conns(|conns| conns.get(&pair).phase.moving()) != Some(moving)
    });
    let moving: Vec<(FlowKey, Moving)> = lives.iter().map(moving).collect();
    for (live, (pair, moving)) in lives.iter().zip(&moving) {
        let is_plain = bump.is_some() && m.marked(live).is_none();
        update(m, pair, |conn| {
            if is_plain && conn.place.marked().is_none() {
                conn.place.note_plain(m.now());
            }
            conn.phase.move_to_moving(*moving);
        });
    }
    let mut kept = match bump.is_none() && goal.ground == Ground::Proved {
        true => keep_all_uncarried(m, &lives).await,
        false => Kept::new(),
    };
    // The peer may have ended it meanwhile.
    let goes_on = |(pair, moving): &(FlowKey, Moving)| {
        m.conns(|conns| conns.get(pair).phase.moving()) == Some(*moving) && !kept.contains_key(pair)
    };
    let going: BTreeMap<FlowKey, Moving> = { moving.iter().copied() }.filter(goes_on).collect();
    lives.retain(|live| going.contains_key(&live.pair()));
    for (peer, lives) in by_peer::<M>(lives.into_iter()) {
        let mut answers = true;
        for lives in lives.chunks(ROUND) {
            let moves = follow_some(m, peer, lives, (&going, goal.ground), answers).await;
            let behind = behind(m, &moves);
            keep(m, lives, &behind);
            kept.extend(behind);
            answers = moves.iter().any(|(_, asked)| asked.answer().is_ok());
        }
    }
    for (pair, moving) in &moving {
        update(m, pair, |conn| conn.phase.end_moving(*moving));
    }
    m.wake(Task::Confirm);
    kept
}

/// As [`keep_uncarried`], until none of them has come to a bump while others were looked at.
async fn keep_all_uncarried<M: Machine>(m: &M, lives: &[M::Live]) -> Kept {
    let (mut kept, mut rest) = (Kept::new(), lives.to_vec());
    loop {
        let is_bumped = |live: &M::Live| !m.is_outside(stands_on(m, live));
        let (on, off) = rest.into_iter().partition::<Vec<_>, _>(is_bumped);
        if on.is_empty() {
            return kept;
        }
        kept.extend(keep_uncarried(m, &on).await);
        rest = off;
    }
}

/// Has those of these connections stay on their bumps that plain does not carry, as far as anybody can say.
async fn keep_uncarried<M: Machine>(m: &M, lives: &[M::Live]) -> Kept {
    let refusals = m.uncarried(lives).await;
    let stuck = { lives.iter() }.filter(|live| refusals.contains_key(&live.pair()));
    // A rule of the peer may want them on its bump.
    let mut ruled = BTreeSet::new();
    for (peer, lives) in by_peer::<M>(stuck.copied()) {
        for (live, answer) in asks::ask_whether(m, peer, &lives).await {
            if let Ok((Outcome::OwnRule, own)) = answer {
                switches::follow_peer(m, peer, live.pair(), own).await;
                ruled.insert(live.pair());
            }
        }
    }
    let unruled = { lives.iter() }.filter(|live| !ruled.contains(&live.pair()));
    keep(m, unruled, &refusals);
    refusals
}

/// Notes that connections stay on their bumps for these reasons: their peers are to have the bumps ready although no rule needs them any more.
fn keep<'a, M: Machine<Live: 'a>>(
    m: &M,
    lives: impl IntoIterator<Item = &'a M::Live>,
    refusals: &Kept,
) {
    for live in lives {
        let pair = live.pair();
        if let Some((why, bump)) = refusals.get(&pair).zip(stands_on(m, live)) {
            let now = m.now();
            update(m, &pair, |conn| conn.keep_on(bump, why.answer(), now));
        }
    }
    m.wake(Task::Tell);
}

/// Moves of these that came to nothing, because routers had not heard of all that went by the bump.
fn behind<M: Machine>(m: &M, moves: &[Move<M>]) -> Kept {
    let came_back = |(_, asked): &&Move<M>| asked.conclusion() == Some(Conclusion::TakenBack);
    let unshown = |pair: &FlowKey| {
        let unshown = |shadows: &mut Shadows| shadows.get(pair)?.behind(Time::ZERO);
        m.shadows(unshown).unwrap_or(0)
    };
    let why = |(live, _): &Move<M>| {
        let pair = live.pair();
        (pair, Refusal::Behind(unshown(&pair).max(1)))
    };
    moves.iter().filter(came_back).map(why).collect()
}

/// Moves up to [`ROUND`] connections of [`follow`]. `ask`: the peer is asked for its part.
async fn follow_some<M: Machine>(
    m: &M,
    peer: usize,
    lives: &[M::Live],
    (going, ground): (&BTreeMap<FlowKey, Moving>, Ground),
    ask: bool,
) -> Vec<Move<M>> {
    let by_rule = |live: &M::Live| {
        let (moving, own) = (going[&live.pair()], m.hosts(peer).own);
        let mut asked = Negotiation::by_rule(live.meant(), moving, own).on_ground(ground);
        if !ask {
            asked.handle_unasked();
        }
        (*live, asked)
    };
    let mut moves: Vec<Move<M>> = lives.iter().map(by_rule).collect();
    asks::carry_out(m, peer, &mut moves).await;
    moves
}
