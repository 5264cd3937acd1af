//! What only nftables can say: it stands when all of iptables was flushed, and knows connections by their ends
//! when all of conntrack was.

use super::{List, between, came, leaves, pass, stop, tcp, to_itself};
use crate::desired::{BumpRoute, DeviceOwner, widest};
use crate::rule::{Bits, Match, Rule, Set, Verdict};

impl List<'_> {
    /// What this host sends, and no chain of ours has marked although it should be.
    pub(super) fn unmarked(&self) -> Vec<Rule> {
        let mut rules = vec![self.is_marked(), to_itself()];
        rules.push(stop([Match::Among(Set::Bumped)]));
        rules.extend(self.called(&[], &super::goto("STEER")));
        rules
    }

    /// What passes a gateway: it follows and is kept in as what is this host's own.
    pub(super) fn passing_unmarked(&self) -> Vec<Rule> {
        let remembered = |bump| self.remembered(bump, self.passed(bump));
        let mut rules = self.ungiven();
        rules.extend(self.desired.bumps.iter().flat_map(remembered));
        rules.extend(self.follow_passing());
        for bump in &self.desired.bumps {
            let came = { self.translated_ends(bump).into_iter() }
                .map(|ends| [ends, vec![came(bump)]].concat());
            rules.extend(came.map(|came| Rule::new(came, Verdict::Remember(Set::Translated))));
        }
        rules.push(self.is_marked());
        rules.push(stop([Match::Among(Set::Bumped)]));
        if self.desired.translates {
            let bumped = Match::AsCalled(Box::new(Match::Among(Set::Bumped)));
            rules.push(stop([Match::Translated { answers: true }, bumped]));
        }
        rules.extend(self.entering_gateway());
        if self.desired.translates {
            // Its entry is lost, and nothing else translates its source back.
            rules.push(stop([Match::Among(Set::Translated)]));
        }
        rules
    }

    fn is_marked(&self) -> Rule {
        pass([Match::Mark(Bits::are_not(self.mask(), 0))])
    }

    /// Connections that pass have no socket to be found by: so they are tracked, bump or no bump.
    pub(super) fn tracked(&self) -> Vec<Rule> {
        let mut rules = self.ungiven();
        rules.push(pass([Match::CtMark(Bits::are(self.mask(), 0))]));
        rules
    }

    /// Packets that would leave with another source than their connection has on a bump, because its entry is lost.
    fn ungiven(&self) -> Vec<Rule> {
        let masqueraded = Match::Among(Set::Masqueraded);
        let near = widest(&self.desired.gateway, self.family).into_iter();
        let given = Match::SourceChanged(false);
        near.map(|near| stop([Match::From(near), given.clone(), masqueraded.clone()]))
            .collect()
    }

    /// Packets that nobody translates back, for the same reason: this host would end a connection that it has no socket of.
    pub(super) fn unmasked(&self) -> Vec<Rule> {
        let near = widest(&self.desired.gateway, self.family);
        let masqueraded = { near.first() }.map(|_| stop([Match::AmongBack(Set::Masqueraded)]));
        masqueraded.into_iter().collect()
    }

    /// What comes in by a bump's device makes its connection follow, or is remembered.
    pub(super) fn follow_untracked(&self) -> Vec<Rule> {
        let remembered = |bump| self.remembered(bump, self.senders(bump));
        let mut rules = self.unmasked();
        rules.extend(self.desired.bumps.iter().flat_map(remembered));
        rules.extend(self.follow());
        rules
    }

    /// What is exempt from tracking has no mark to follow by; what there is no room for is dropped.
    fn remembered(&self, bump: &BumpRoute, ends: Vec<Vec<Match>>) -> Vec<Rule> {
        let came = [Match::Untracked, came(bump), tcp()];
        let remembered = Verdict::Remember(Set::Untracked);
        let rules = |ends: Vec<Match>| {
            let came = [&ends[..], &came].concat();
            [Rule::new(came.clone(), remembered.clone()), stop(came)]
        };
        ends.into_iter().flat_map(rules).collect()
    }

    /// What comes in plain of LOCKED connections that pass here, or from elsewhere in the name of who
    /// is behind this host. conntrack would believe it, and nobody could say better, for their sockets
    /// are not here.
    pub(super) fn forged(&self) -> Vec<Rule> {
        // What comes by a bump may.
        let bumps = self.desired.bumps.iter();
        let mut rules: Vec<Rule> = bumps.map(|bump| pass([came(bump)])).collect();
        for (near, far) in self.passages() {
            rules.push(stop(between(far, near, [Match::AmongBack(Set::Locked)])));
            let from_elsewhere = [Match::Among(Set::Locked), Match::NoWayBack];
            rules.push(stop(between(near, far, from_elsewhere)));
        }
        if self.desired.translates {
            rules.push(stop([Match::AmongBack(Set::Locked)]));
        }
        rules
    }

    /// The far end knows a steered connection by its own address: source NAT that the user has for others
    /// finds it done. This accepts nothing: other hooks and tables see the packet all the same.
    pub(super) fn keep_source(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for bump in &self.desired.bumps {
            let mut leaves = vec![leaves(bump)];
            if bump.owner == DeviceOwner::Foreign {
                // What else goes by it is not ours.
                leaves.push(Match::Mark(self.bits(bump)));
            }
            rules.push(Rule::new(leaves, Verdict::KeepSource));
            // What the hosts behind this one answered to another address would not be known for theirs.
            let near = widest(&self.desired.gateway, self.family);
            for far in widest(&bump.peers, self.family) {
                let on_it = || [Match::CtMark(self.bits(bump))];
                let came = near.iter().map(|near| between(far, *near, on_it()));
                rules.extend(came.map(|came| Rule::new(came, Verdict::KeepSource)));
            }
        }
        rules.extend(self.translated());
        rules
    }
}
