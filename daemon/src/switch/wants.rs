//! The bumps that rules need at peers.

use dibs_switch::rules;
use ipnet::IpNet;

use crate::rulebook::rules::Rule;
use crate::switch::Daemon;

/// Bumps that these rules put connections of a peer into; bit n for number n.
pub(crate) fn of_rules<'a>(
    daemon: &Daemon,
    in_force: impl Iterator<Item = &'a Rule>,
    peer: usize,
) -> u16 {
    let concerns = |rule: &&Rule| {
        let mut to = rule.classes.iter().map(|class| class.destination);
        to.any(|to| to.is_none_or(|to| leads_to(daemon, peer, to)))
    };
    rules::wanted(in_force.filter(concerns))
}

/// True if some of these addresses are behind a peer.
pub(crate) fn leads_to(daemon: &Daemon, peer: usize, to: IpNet) -> bool {
    let mut behind = daemon.config.peers[peer].addresses.iter();
    behind.any(|net| net.contains(&to) || to.contains(net))
}
