//! What stands beside single choices: what rules want, and what other programs did to marks.

use std::collections::{BTreeMap, HashMap};

use dibs_settings::BumpId;
use dibs_switch::asking::Negotiation;
use dibs_switch::knock::Refusal;
use dibs_switch::marks::Hand;
use dibs_switch::messages::{Answer, Unanswered};
use dibs_switch::rules::Fit;
use dibs_switch::table::Conn;
use dibs_wire::FlowKey;

use crate::clock::now;
use crate::daemon::Daemon;
use crate::events::Audience;
use crate::live::Live;
use crate::log::or_warn;
use crate::marking::warn_of;
use crate::rule_book::Rules;
use crate::rules::Rule;
use crate::subflows::{self, Refused};
use crate::switching::asking::{self, Move, ROUND};
use crate::switching::{Goal, Progress};
use crate::wakers::Task;
use crate::{connections, knocking, marking, reconcile, switching, wants};

/// Connections that nothing but plain not carrying them keeps on their bumps, and why.
pub(crate) type Kept = HashMap<FlowKey, Refusal>;

/// Rules that do not hold any more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gone<'a> {
    /// Rules that held.
    pub(crate) rules: &'a [Rule],
    /// Their connections go to plain whether that carries them or not.
    pub(crate) force: bool,
}

impl<'a> From<&'a [Rule]> for Gone<'a> {
    /// Connections that plain does not carry stay.
    fn from(rules: &'a [Rule]) -> Self {
        let force = false;
        Self { rules, force }
    }
}

/// Has these rules take the place of all there are. Connections follow them; those
/// of rules that are `gone` and that nothing else keeps go back to plain. How many do that, and those that stay.
///
/// # Errors
/// The kernel does not take them, or they cannot be saved: what was there before stands again.
pub(crate) async fn replace_rules(
    daemon: &Daemon,
    rules: Rules,
    gone: Gone<'_>,
    lives: &[Live],
) -> anyhow::Result<(usize, Kept)> {
    let wanted = wants::wanted(daemon);
    let before = daemon.state.borrow_mut().rules.replace(rules);
    // Peers first: what comes to them by a bump finds it there, and what leaves one does not lose it before.
    wants::send_all_beside(daemon, &wanted).await;
    let carried_out = async {
        daemon.save()?;
        reconcile::steer(daemon).await
    };
    if let Err(error) = carried_out.await {
        daemon.state.borrow_mut().rules.replace(before);
        // Or the next start would find them in the file.
        daemon.save_or_warn();
        // Some of it may be in the kernel.
        if let Err(error) = reconcile::steer(daemon).await {
            tracing::warn!("cannot take back what rules were to be: {error:#}");
        }
        wants::send_all(daemon).await;
        return Err(error);
    }
    let followed = follow_changed_rules(daemon, gone, lives).await;
    if wants::wanted(daemon) != wanted {
        wants::send_all(daemon).await;
    }
    daemon.wakers.wake(Task::Hours);
    daemon.wakers.wake(Task::Sessions);
    daemon.wakers.wake(Task::Users);
    Ok(followed)
}

/// Has connections follow the rules as they are by now; of those that are `gone`, back to plain. How many do that, and
/// those that stay.
pub(crate) async fn follow_changed_rules(
    daemon: &Daemon,
    gone: Gone<'_>,
    lives: &[Live],
) -> (usize, Kept) {
    enforce(daemon, lives).await;
    let (mut freed, mut kept) = (0, Kept::new());
    for rule in gone.rules {
        let (of_rule, stay) = let_go(daemon, rule, lives, gone.force).await;
        freed += of_rule;
        kept.extend(stay);
    }
    for (bump, lives) in ruled(daemon, lives) {
        follow_rules(daemon, &lives, Some(bump).into()).await;
    }
    (freed, kept)
}

/// Where a choice stands against what a rule requires, chooses that: the peer would not follow the
/// rule against the choice.
pub(crate) async fn enforce(daemon: &Daemon, lives: &[Live]) {
    let required = by_bump(lives, |live| {
        daemon.state.borrow().ruling(live).overruled_by()
    });
    for (bump, lives) in required {
        match switching::choose(daemon, &lives, Some(bump).into(), &Progress::default()).await {
            // What the peer refuses is blocked by the rule.
            Ok(moved) => moved
                .into_iter()
                .filter_map(|(_, outcome)| outcome.err())
                .for_each(|why| tracing::warn!("a required connection waits: {why}")),
            Err(error) => tracing::warn!("{error:#}"),
        }
    }
}

/// The connections that are on a bump by the hand of another program here.
pub(crate) fn followed_here(daemon: &Daemon, lives: &[Live]) -> BTreeMap<BumpId, Vec<Live>> {
    by_bump(lives, |live| {
        let handed = daemon.state.borrow().conns.get(&live.pair).handed()?;
        (handed.by == Hand::Other).then_some(handed.bump)
    })
}

/// The connections that rules decide over, by the bump of the first rule that matches.
pub(crate) fn ruled(daemon: &Daemon, lives: &[Live]) -> BTreeMap<BumpId, Vec<Live>> {
    by_bump(lives, |live| daemon.state.borrow().ruling(live).moves_to())
}

/// Those of these connections that go on, by the bump that each is meant to be on, if any.
fn by_bump(lives: &[Live], bump: impl Fn(&Live) -> Option<BumpId>) -> BTreeMap<BumpId, Vec<Live>> {
    let mut meant: BTreeMap<BumpId, Vec<Live>> = BTreeMap::new();
    for live in lives.iter().filter(|live| !live.over) {
        if let Some(bump) = bump(live) {
            meant.entry(bump).or_default().push(*live);
        }
    }
    meant
}

/// Has connections go where they are to be without a rule that does not hold any more: where they were chosen to be,
/// or, if nothing keeps them, back to plain. How many do that, and those that stay.
async fn let_go(daemon: &Daemon, rule: &Rule, lives: &[Live], force: bool) -> (usize, Kept) {
    let chosen: Vec<FlowKey> = {
        let state = daemon.state.borrow();
        let is_left = |live: &&Live| !live.over && state.ruling(live).is_left_to_choice(rule);
        lives.iter().filter(is_left).map(|live| live.pair).collect()
    };
    warn_of(&marking::mark_choices(daemon, &chosen).await);
    let freed = freed(daemon, rule, lives);
    let bump = None;
    let kept = follow_rules(daemon, &freed, Goal { bump, force }).await;
    if let Some(why) = kept.values().next() {
        let (count, id) = (kept.len(), rule.id);
        daemon.events.tell_of(
            Audience::of_rule(rule),
            "kept",
            format!(
                "{count} connection(s) of rule {id}, which holds no more, stay on {}: {why}",
                rule.bump
            ),
            &[("rule", id.to_string()), ("bump", rule.bump.clone())],
        );
    }
    (freed.len() - kept.len(), kept)
}

/// The connections that nothing keeps on the bump of a rule that does not hold any more.
fn freed(daemon: &Daemon, rule: &Rule, lives: &[Live]) -> Vec<Live> {
    let mut state = daemon.state.borrow_mut();
    let mut freed = Vec::new();
    for live in lives.iter().filter(|live| !live.over) {
        let Some(fit) = state.ruling(live).freed_of(rule) else {
            continue;
        };
        if fit == Fit::May {
            // Where another rule of the kernel's wants it, the next packet puts it back.
            state.conns.update(&live.pair, |conn| conn.hand_over(None));
        }
        freed.push(*live);
    }
    freed
}

/// Has connections that rules moved follow them again, whose peers could not do their part.
pub(crate) async fn follow_again(
    daemon: &Daemon,
    moved: Vec<(FlowKey, Option<BumpId>)>,
) -> anyhow::Result<()> {
    // Nobody changes rules meanwhile.
    let _turn = daemon.users.own_turn().await;
    let moved: BTreeMap<FlowKey, Option<BumpId>> = moved.into_iter().collect();
    let mut meant: BTreeMap<Option<BumpId>, Vec<Live>> = BTreeMap::new();
    let lives = connections::all(daemon).await;
    if lives.is_err() {
        let later = |conn: &mut Conn, bump| {
            conn.telling
                .handle_moved(bump, Err(Unanswered::NotAsked), now());
        };
        for (pair, bump) in &moved {
            daemon.update(pair, |conn| later(conn, *bump));
        }
    }
    for live in lives? {
        let goes = |went| daemon.state.borrow().ruling(&live).goes_again(went);
        let went = moved.get(&live.pair).filter(|_| !live.over);
        if let Some(bump) = went.and_then(|went| goes(*went)) {
            meant.entry(bump).or_default().push(live);
        }
    }
    for (bump, lives) in meant {
        follow_rules(daemon, &lives, bump.into()).await;
    }
    Ok(())
}

/// Moves connections here and at their peers because rules changed, not by choice. Those that stay on their bumps,
/// because plain does not carry them.
pub(crate) async fn follow_rules(daemon: &Daemon, lives: &[Live], goal: Goal) -> Kept {
    let bump = goal.bump;
    let mut lives: Vec<Live> = steerable(daemon, lives, bump).await;
    let moving: Vec<FlowKey> = lives.iter().map(|live| live.pair).collect();
    daemon.update_each(&moving, |conn| conn.moving = true);
    let kept = match bump.is_none() && !goal.force {
        true => keep_uncarried(daemon, &lives).await,
        false => Kept::new(),
    };
    lives.retain(|live| !kept.contains_key(&live.pair));
    let mut by_peer: BTreeMap<usize, Vec<Live>> = BTreeMap::new();
    for live in lives {
        by_peer.entry(live.peer).or_default().push(live);
    }
    for (peer, lives) in by_peer {
        let mut answers = true;
        for lives in lives.chunks(ROUND) {
            answers = follow_some(daemon, peer, lives, bump, answers).await;
        }
    }
    daemon.update_each(&moving, |conn| conn.moving = false);
    daemon.wakers.wake(Task::Confirm);
    kept
}

/// Connections of these that can be steered there: of an MPTCP connection all subflows or none.
async fn steerable(daemon: &Daemon, lives: &[Live], bump: Option<BumpId>) -> Vec<Live> {
    let mut refused = match bump {
        None => Refused::new(),
        Some(_) => or_warn(subflows::out_of_reach(daemon, lives).await).unwrap_or_default(),
    };
    let bound = lives.iter().filter(|live| live.bound);
    let why = |live: &Live| (live.pair, "its socket is bound to a device".to_owned());
    refused.extend(bound.map(why));
    subflows::spread(lives, &mut refused);
    for (pair, why) in &refused {
        tracing::debug!(?pair, "rules do not move a connection: {why}");
    }
    let is_able = |live: &&Live| !refused.contains_key(&live.pair);
    lives.iter().filter(is_able).copied().collect()
}

/// Has those of these connections stay on their bumps that plain does not carry, as far as anybody can say.
async fn keep_uncarried(daemon: &Daemon, lives: &[Live]) -> Kept {
    let refusals = knocking::refusals(daemon, lives).await;
    let refusals = refusals.unwrap_or_else(|error| {
        tracing::warn!("cannot find out whether plain carries connections: {error:#}");
        { lives.iter() }
            .map(|live| (live.pair, Refusal::Unknown))
            .collect()
    });
    let refusals = subflows::spread_refusals(lives, refusals);
    for live in lives {
        let on = connections::stands_on(daemon, live);
        if let Some((why, bump)) = refusals.get(&live.pair).zip(on) {
            let keep = |conn: &mut Conn| conn.keep_on(bump, why.answer(), now());
            daemon.update(&live.pair, keep);
        }
    }
    daemon.wakers.wake(Task::Tell);
    refusals
}

/// Up to [`ROUND`] connections of [`follow_rules`]. `ask`: the peer is asked for its
/// part. Whether it answers.
async fn follow_some(
    daemon: &Daemon,
    peer: usize,
    lives: &[Live],
    bump: Option<BumpId>,
    ask: bool,
) -> bool {
    let by_rule = |live: &Live| {
        let mut negotiation = Negotiation::by_rule(live.into(), bump, daemon.host_id);
        if !ask {
            negotiation.handle_unasked();
        }
        (*live, negotiation)
    };
    let mut moves: Vec<Move> = lives.iter().map(by_rule).collect();
    asking::carry_out(daemon, peer, &mut moves).await;
    let answers = moves
        .iter()
        .map(|(live, asked)| (live.pair, asked.answer()));
    let answers: Vec<(FlowKey, Answer)> = answers.collect();
    tracing::debug!(?bump, ?answers, "rules move connections");
    answers.iter().any(|(_, answer)| answer.is_ok())
}
