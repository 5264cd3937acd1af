//! What stands beside single choices: what rules want, and what other programs did to marks.

use std::collections::BTreeMap;

use dibs_settings::BumpId;
use dibs_switch::asking::Negotiation;
use dibs_switch::conns::Pair;
use dibs_switch::marks::Hand;
use dibs_switch::messages::{Answer, Unanswered};
use dibs_switch::rules::Fit;
use dibs_switch::table::Conn;

use crate::clock::now;
use crate::daemon::Daemon;
use crate::live::Live;
use crate::marking::warn_of;
use crate::rule_book::Rules;
use crate::rules::Rule;
use crate::switching::Progress;
use crate::switching::asking::{self, Move, ROUND};
use crate::wakers::Task;
use crate::{connections, marking, reconcile, switching, wants};

/// Has these rules take the place of all there are. Connections follow them; those
/// of rules that are `gone` and that nothing else keeps go back to plain.
///
/// # Errors
/// The kernel does not take them, or they cannot be saved: what was there before stands again.
pub(crate) async fn replace_rules(
    daemon: &Daemon,
    rules: Rules,
    gone: &[Rule],
    lives: &[Live],
) -> anyhow::Result<()> {
    let before = daemon.state.borrow_mut().rules.replace(rules);
    // Peers first: what comes to them by a bump finds it there.
    wants::send_all(daemon).await;
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
    follow_changed_rules(daemon, gone, lives).await;
    daemon.wakers.wake(Task::Hours);
    daemon.wakers.wake(Task::Sessions);
    daemon.wakers.wake(Task::Users);
    Ok(())
}

/// Has connections follow the rules as they are by now; of those that held and are `gone`, back to plain.
pub(crate) async fn follow_changed_rules(daemon: &Daemon, gone: &[Rule], lives: &[Live]) {
    enforce(daemon, lives).await;
    for rule in gone {
        let_go(daemon, rule, lives).await;
    }
    for (bump, lives) in ruled(daemon, lives) {
        follow_rules(daemon, &lives, Some(bump)).await;
    }
}

/// Where a choice stands against what a rule requires, chooses that: the peer would not follow the
/// rule against the choice.
pub(crate) async fn enforce(daemon: &Daemon, lives: &[Live]) {
    let required = by_bump(lives, |live| {
        daemon.state.borrow().ruling(live).overruled_by()
    });
    for (bump, lives) in required {
        match switching::choose(daemon, &lives, Some(bump), &Progress::default()).await {
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
/// or, if nothing keeps them, back to plain. How many do that.
pub(crate) async fn let_go(daemon: &Daemon, rule: &Rule, lives: &[Live]) -> usize {
    let chosen: Vec<Pair> = {
        let state = daemon.state.borrow();
        let is_left = |live: &&Live| !live.over && state.ruling(live).is_left_to_choice(rule);
        lives.iter().filter(is_left).map(|live| live.pair).collect()
    };
    warn_of(&marking::mark_choices(daemon, &chosen).await);
    let freed = freed(daemon, rule, lives);
    follow_rules(daemon, &freed, None).await;
    freed.len()
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
    moved: Vec<(Pair, Option<BumpId>)>,
) -> anyhow::Result<()> {
    // Nobody changes rules meanwhile.
    let _turn = daemon.users.own_turn().await;
    let moved: BTreeMap<Pair, Option<BumpId>> = moved.into_iter().collect();
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
        follow_rules(daemon, &lives, bump).await;
    }
    Ok(())
}

/// Moves connections here and at their peers because rules changed, not by choice.
pub(crate) async fn follow_rules(daemon: &Daemon, lives: &[Live], bump: Option<BumpId>) {
    let mut by_peer: BTreeMap<usize, Vec<Live>> = BTreeMap::new();
    for live in lives.iter().filter(|live| !live.bound) {
        by_peer.entry(live.peer).or_default().push(*live);
    }
    let moving: Vec<Pair> = by_peer.values().flatten().map(|live| live.pair).collect();
    daemon.update_each(&moving, |conn| conn.moving = true);
    for (peer, lives) in by_peer {
        let mut answers = true;
        for lives in lives.chunks(ROUND) {
            answers = follow_some(daemon, peer, lives, bump, answers).await;
        }
    }
    daemon.update_each(&moving, |conn| conn.moving = false);
    daemon.wakers.wake(Task::Confirm);
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
    let answers: Vec<(Pair, Answer)> = answers.collect();
    tracing::debug!(?bump, ?answers, "rules move connections");
    answers.iter().any(|(_, answer)| answer.is_ok())
}
