//! What the daemon begins with: the rules of the file, and what the last run left.

use dibs_config::Config;
use dibs_io::LocalTime;
use dibs_switch::conns;
use dibs_switch::rules::Wants;

use crate::data::bumps;
use crate::data::bumps::Carried;
use crate::rulebook::rules;
use crate::rulebook::rules::Rule;
use crate::rulebook::state_file::{Saved, SavedRule};
use crate::rulebook::unresolved;
use crate::rulebook::{RuleBook, Rules};
use crate::switch::{PeerState, Refused, State};

/// What the last run left, and the rules of the file.
pub(crate) fn initial_state(config: &Config, saved: &Saved) -> anyhow::Result<State> {
    let carried = bumps::carried(config);
    let now = dibs_io::local_time();
    let mut rules = of_file(config, &carried, now)?;
    let user_rules = add_saved(config, &carried, &saved.rules, &mut rules);
    let all = Rules {
        rules,
        saved: user_rules,
        suspended: false,
    };
    let mut conns = dibs_switch::table::ConnTable::default();
    // The file may have had them in another order.
    let devices = saved.devices(&carried);
    for saved in &saved.choices {
        let bump = { saved.choice.bump }.map(|bump| bumps::translated(&devices, bump));
        if bump.is_none_or(|bump| carried.iter().any(|carried| carried.id == bump)) {
            let choice = conns::Choice {
                bump,
                ..saved.choice
            };
            conns.update(&saved.conn, |conn| conn.choice.restore(choice));
        }
    }
    let peer_state = |peer: &dibs_config::PeerConfig| {
        let engaged = saved.engaged.get(&peer.public_key.to_string());
        let engaged = engaged.copied().unwrap_or(0);
        let engaged = bumps::translated_mask(&devices, engaged) & !(1 << bumps::NOBODYS.get());
        PeerState {
            wants: Wants::restored(engaged),
            ..PeerState::default()
        }
    };
    Ok(State {
        rules: RuleBook::new(all, saved.next_rule, now.utc_offset),
        conns,
        refused: Refused::default(),
        peers: config.peers.iter().map(peer_state).collect(),
        installed: Default::default(),
        pinned: Default::default(),
    })
}

/// The rules of a file, in its order. One whose user is not known is [`unresolved`].
pub(crate) fn of_file(
    config: &Config,
    carried: &[Carried],
    now: LocalTime,
) -> Result<Vec<Rule>, dibs_config::Error> {
    let made = |(index, rule): (usize, &dibs_config::RuleConfig)| {
        let refuse = |key: &str, message, hint: Option<&str>| {
            config.refuse(
                &format!("rule.{index}.{key}"),
                message,
                hint.map(str::to_owned),
            )
        };
        let Some(bump) = carried.iter().find(|bump| bump.name == rule.bump) else {
            let message = format!("this daemon does not know the bump \"{}\"", rule.bump);
            return Err(refuse("bump", message, Some("restart it")));
        };
        let id = index as u64 + 1;
        let made = match rules::of_file(id, rule, bump.id, now) {
            Err(why) if rule.selection.user().is_some() => {
                unresolved::of_file(id, rule, bump.id, now, why)
            }
            made => made,
        };
        made.map_err(|message| refuse("bump", message, None))
    };
    config.rules.iter().enumerate().map(made).collect()
}

/// Adds the rules that were made with `dibsctl` to those of the file, and returns those that still can be. The
/// file displaces all of them, root's those of members of the group: nothing saved keeps the daemon from
/// starting.
pub(crate) fn add_saved(
    config: &Config,
    carried: &[Carried],
    saved: &[SavedRule],
    rules: &mut Vec<Rule>,
) -> Vec<SavedRule> {
    let bump_id = |name: &str| carried.iter().find(|bump| bump.name == name).map(|b| b.id);
    let now = dibs_io::local_time();
    let behind = |name: &str| {
        let peer = config.peers.iter().find(|peer| peer.name == name);
        peer.map(|peer| peer.addresses.clone())
    };
    let mut sorted: Vec<&SavedRule> = saved.iter().collect();
    sorted.sort_by_key(|saved| (saved.maker() != rules::ROOT, saved.id));
    let mut kept = Vec::new();
    for saved in sorted {
        let SavedRule { id, rule, .. } = saved;
        let by = saved.maker();
        let made = match config.excludes_require().filter(|_| rule.require) {
            Some((message, hint)) => Err(format!("{message}: {hint} to make it again")),
            None => bump_id(&rule.bump)
                .ok_or_else(|| format!("this version does not carry the bump \"{}\"", rule.bump))
                .and_then(|bump| rules::of_user(*id, rule, by, bump, now, behind))
                .and_then(|made| match rules::contradicted(&made, rules) {
                    Some(why) => Err(why),
                    None => Ok(made),
                }),
        };
        match made {
            Ok(made) => {
                rules.push(made);
                kept.push(saved.clone());
            }
            Err(reason) => tracing::warn!(
                "rule {id} of uid {by}, which puts connections on \"{}\", is dropped: {reason}",
                rule.bump
            ),
        }
    }
    kept.sort_by_key(|saved| saved.id);
    kept
}
