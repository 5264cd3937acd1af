//! The bumps that rules need at peers.

use dibs_policy::Prefix;
use dibs_switch::rules;

use crate::daemon::Daemon;
use crate::rules::Rule;
use crate::terms::policy_prefix;

/// Bumps that rules in force put connections of a peer into; bit n for number n.
pub(crate) fn of_rules(daemon: &Daemon, peer: usize) -> u16 {
    let concerns = |rule: &&Rule| {
        let mut to = rule.classes.iter().map(|class| class.destination);
        to.any(|to| to.is_none_or(|to| leads_to(daemon, peer, to)))
    };
    let state = daemon.state.borrow();
    rules::wanted(state.rules.in_force().filter(concerns))
}

/// True if some of these addresses are behind a peer.
pub(crate) fn leads_to(daemon: &Daemon, peer: usize, to: Prefix) -> bool {
    let mut behind = daemon.config.peers[peer]
        .addresses
        .iter()
        .map(policy_prefix);
    behind.any(|net| net.contains(to) || to.contains(net))
}
