//! QUIC in place of TCP to what a peer carries of the Internet: refused, if the user wants that.

use super::{List, only_iptables, pass, to_itself};
use crate::Family;
use crate::rule::{Match, Rule, Verdict};

impl List<'_> {
    pub(super) fn refuses_quic(&self) -> bool {
        self.desired.refuse_quic && self.peers.iter().any(|net| net.prefix_len() == 0)
    }

    /// Answers to UDP, by the rules that decide about TCP to the same port: what these have go by a peer that has
    /// everything is refused, and QUIC gives up at once. Where TCP leaves directly, so does UDP.
    pub(super) fn quic(&self, passing: bool) -> Vec<Rule> {
        let answer = Verdict::Reject(match self.family {
            Family::V4 => "icmp-port-unreachable",
            Family::V6 => "icmp6-port-unreachable",
        });
        // The port of the paths may be this one.
        let own = pass([self.marked(self.desired.marks.own())]);
        let mut rules = match passing {
            true => Vec::new(),
            false => vec![own, to_itself()],
        };
        rules.extend(self.left_out(Match::To, &Verdict::Return));
        rules.extend(self.narrow().into_iter().map(|net| pass([Match::To(net)])));
        let classes = [true, false].map(|lock| self.classes(passing, lock));
        let classes = classes.into_iter().flatten();
        rules.extend(classes.filter_map(|rule| as_quic(rule, &answer)));
        rules
    }
}

pub(super) fn to_443() -> Match {
    only_iptables("-p udp -m udp --dport 443")
}

/// The class rule, of UDP to port 443 in place of TCP, with this answer in place of a bump; none if it means other ports.
fn as_quic(mut rule: Rule, answer: &Verdict) -> Option<Rule> {
    for asked in &mut rule.matches {
        if let Match::Tcp { sport, dport } = asked {
            if sport.is_some() || dport.is_some_and(|ports| !ports.contains(443)) {
                return None;
            }
            *asked = only_iptables("-p udp");
        }
    }
    rule.verdict = match rule.verdict {
        Verdict::Take { .. } => answer.clone(),
        _ => Verdict::Return,
    };
    Some(rule)
}
