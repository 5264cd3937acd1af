//! Which connections are marked, passed and dropped: the one list, for iptables and for nftables.
//!
//! A packet on its way out (OUTPUT, then STEER): own datagrams and everything not meant for a peer pass
//! untouched; then the rules that require a bump, the connection's OVERRIDE, the other class rules in
//! order, the followed ctmark of a TCP connection. In iptables each of the four leaves the bump id in the packet's
//! mark, and only there; nftables asks the same behind it, and drops what is still unmarked. The guard
//! (POSTROUTING) drops what carries a bump's id and does not leave by its device; what is required and does not
//! iptables drops there, too.
//!
//! On its way in (PREROUTING): what belongs to a LOCKED connection, or is required, and did not
//! come by its bump's device is dropped; then (INPUT) what came by such a device makes a TCP
//! connection without a bump follow it.
//!
//! On its way through a gateway: what the networks behind it send the peers' is marked as on its way out
//! (PASS), but before it is routed, and makes its connection follow in FORWARD.
//!
//! Packets of peers that reach others in this host's name are masqueraded (SOURCE). The answers come for this host, and only
//! their connection's mark says, before that is undone, that they leave by a bump.
//!
//! UDP to port 443 is answered with an ICMP error if the user wants that (`quic.rs`), so that browsers take TCP.
//!
//! Connections that peers open here and this host's nat table leads elsewhere pass likewise: the answers are judged by
//! the names that the peer has for them (ANSWER).
//!
//! What only nftables can say is in `nftables_only.rs`: connections by their ends. What stands in for it where there is no
//! nftables, or no mark to go by, is a rule of a connection's own ([`Binding::Pinned`]), for some of them.

use std::net::IpAddr;

use dibs_settings::{Term, left_out};

use crate::address::common;
use crate::backstop::ruleset::{self, Ruleset};
use crate::desired::{Binding, BumpRoute, ClassRule, DeviceOwner, Fail, widest};
use crate::iptables::Chain;
use crate::rule::nftables::Printed;
use crate::rule::{Bits, Match, Rule, Set, Verdict};
use crate::table::Table;
use crate::{Desired, DeviceName, Family};
use ipnet::IpNet;

mod nftables_only;
mod quic;

/// What `desired` says to one family.
struct List<'a> {
    desired: &'a Desired,
    family: Family,
    /// Where anything steered goes.
    peers: Vec<IpNet>,
}

type Rules<'a> = fn(&List<'a>) -> Vec<Rule>;

/// The chains of iptables.
pub(crate) fn iptables(desired: &Desired, family: Family) -> Vec<Chain> {
    let list = List::new(desired, family);
    if list.peers.is_empty() {
        return Vec::new();
    }
    let closed = desired.fail == Fail::Closed;
    let ours = list.ours().next().is_some();
    let required = closed && list.requires();
    let gateway = !list.passages().is_empty();
    let exit = !desired.exit.is_empty();
    let translates = desired.translates;
    let quic = ours && list.refuses_quic();
    let all: [(&'static str, bool, Rules<'_>); 19] = [
        ("LOCKED", closed, List::locked),
        ("PLAIN", closed, List::plain),
        ("REQUIRED-IN", required, List::required_in),
        ("REQUIRED-OUT", required, List::required_out),
        ("PREROUTING", closed || ours, List::entering),
        ("QUIC-OUT", quic, |list| list.quic(false)),
        ("QUIC-PASS", quic && gateway, |list| list.quic(true)),
        ("REFUSE", ours, List::refused),
        ("FORWARD", ours, List::forwarded),
        ("POSTROUTING", closed, List::guard),
        ("FOLLOW", true, List::restored),
        ("STEER", true, |list| list.steer(false)),
        ("PASS", gateway, |list| list.steer(true)),
        ("OUTPUT", true, List::leaving),
        ("INPUT", true, List::follow),
        ("ANSWER", translates, List::answer),
        ("GATEWAY", gateway || translates, List::entering_gateway),
        ("PASSING", gateway || translates, List::follow_passing),
        ("SOURCE", exit, List::translated),
    ];
    let mut chains = list.of_bumps();
    for (name, _, rules) in all.into_iter().filter(|(_, wanted, _)| *wanted) {
        let (table, hook) = match name {
            "QUIC-OUT" | "QUIC-PASS" => (Table::Filter, None),
            "REFUSE" => (Table::Filter, Some("OUTPUT")),
            "FORWARD" => (Table::Filter, Some("FORWARD")),
            "GATEWAY" => (Table::Mangle, Some("PREROUTING")),
            "PASSING" => (Table::Mangle, Some("FORWARD")),
            "SOURCE" => (Table::Nat, Some("POSTROUTING")),
            "PREROUTING" | "INPUT" | "OUTPUT" | "POSTROUTING" => (Table::Mangle, Some(name)),
            _ => (Table::Mangle, None),
        };
        chains.push(Chain {
            hook,
            ..chain(table, name, &rules(&list))
        });
    }
    chains
}

/// The table of nftables; empty where nothing is wanted. Not every kernel can do source NAT.
pub(crate) fn nftables<'a>(desired: &'a Desired, nat: bool) -> Ruleset {
    let gateway = desired.forwards();
    let bumped = !desired.bumps.is_empty();
    let steered = desired.fail == Fail::Closed && bumped;
    let lists = Family::BOTH.map(|family| List::new(desired, family));
    let (passing, input): (Rules<'a>, Rules<'a>) = match steered {
        true => (List::passing_unmarked, List::follow_untracked),
        false => (List::tracked, List::unmasked),
    };
    let near = !desired.gateway.is_empty();
    let translates = steered && desired.translates;
    let all: [(&str, bool, Rules<'a>); 10] = [
        ("answer", translates, List::answer),
        ("follow", steered, List::restored),
        ("forward", gateway || translates, passing),
        ("input", steered || near, input),
        ("output", steered, List::unmarked),
        ("pass", steered && gateway, |list| list.steer(true)),
        ("postrouting", steered, List::guard),
        ("prerouting", steered && gateway || translates, List::forged),
        ("source", nat && bumped, List::keep_source),
        ("steer", steered, |list| list.steer(false)),
    ];
    let wanted = all.into_iter().filter(|(_, wanted, _)| *wanted);
    let told = |(name, _, rules): (&str, _, Rules<'a>)| ruleset::Chain {
        name: name.to_owned(),
        rules: both(&lists.each_ref().map(rules)),
    };
    let chains = wanted.map(told).collect();
    Ruleset { chains }
}

/// The rules of both families in one chain: those at its ends that are the same stand there once.
fn both([v4, v6]: &[Vec<Rule>; 2]) -> Vec<Printed> {
    let same = |(one, other): &(&Rule, &Rule)| one == other && !one.is_of_a_family();
    let head = v4.iter().zip(v6).take_while(same).count();
    let (first, v4) = v4.split_at(head);
    let v6 = &v6[head..];
    let tail = v4.iter().rev().zip(v6.iter().rev());
    let tail = tail.take_while(same).count();
    let (v4, last) = v4.split_at(v4.len() - tail);
    let parts = [
        (first, None),
        (v4, Some(Family::V4)),
        (&v6[..v6.len() - tail], Some(Family::V6)),
        (last, None),
    ];
    let told = |(rules, family): (&[Rule], _)| -> Vec<Printed> {
        { rules.iter() }
            .filter_map(|rule| rule.nftables(family))
            .collect()
    };
    parts.map(told).concat()
}

fn chain(table: Table, name: &str, rules: &[Rule]) -> Chain {
    Chain {
        table,
        name: format!("DIBS-{name}"),
        hook: None,
        rules: rules.iter().filter_map(Rule::iptables).collect(),
    }
}

/// What fits goes back to what else looks at it.
fn pass(matches: impl Into<Vec<Match>>) -> Rule {
    Rule::new(matches, Verdict::Return)
}

fn stop(matches: impl Into<Vec<Match>>) -> Rule {
    Rule::new(matches, Verdict::Drop)
}

fn goto(chain: impl Into<String>) -> Verdict {
    Verdict::Goto(chain.into())
}

/// It came by a bump's device.
fn came(bump: &BumpRoute) -> Match {
    Match::In(bump.device.clone(), true)
}

/// It leaves by it.
fn leaves(bump: &BumpRoute) -> Match {
    Match::Out(bump.device.clone(), true)
}

fn tcp() -> Match {
    Match::Tcp {
        sport: None,
        dport: None,
    }
}

/// Sent by one network to another, and what else is asked.
fn between(from: IpNet, to: IpNet, more: impl Into<Vec<Match>>) -> Vec<Match> {
    [vec![Match::From(from), Match::To(to)], more.into()].concat()
}

/// A peer's prefix may hold addresses of this very host.
fn to_itself() -> Rule {
    pass([Match::Out(DeviceName::loopback(), true)])
}

fn only_iptables(words: impl Into<String>) -> Match {
    Match::Iptables(words.into())
}

/// Packets of a class; `way` is what else is asked of the devices.
fn of_class(
    rule: &ClassRule,
    from: Option<IpNet>,
    to: Option<IpNet>,
    way: Option<Match>,
    verdict: Verdict,
) -> Rule {
    let by = { rule.interface.clone() }.map(|interface| Match::Out(interface, true));
    let ends = from.map(Match::From).into_iter().chain(to.map(Match::To));
    let matches = ends.chain(by.or(way)).chain(further(rule));
    Rule::new(matches.collect::<Vec<_>>(), verdict)
}

impl<'a> List<'a> {
    fn new(desired: &'a Desired, family: Family) -> Self {
        let peers = desired.peers(family);
        Self {
            desired,
            family,
            peers,
        }
    }

    fn bumps(&self) -> impl Iterator<Item = &'a BumpRoute> {
        self.desired.bumps.iter()
    }

    /// Those by a TUN of ours.
    fn ours(&self) -> impl Iterator<Item = &'a BumpRoute> {
        self.bumps().filter(|bump| bump.owner == DeviceOwner::Ours)
    }

    /// Where forwarded packets that are steered come from and go to.
    fn passages(&self) -> Vec<(IpNet, IpNet)> {
        self.desired.passages(&self.peers, self.family)
    }

    fn passages_of(&self, bump: &BumpRoute) -> Vec<(IpNet, IpNet)> {
        self.desired.passages(&bump.peers, self.family)
    }

    /// Rules for what is sent by, or to, networks in a peer's prefix that are not the peer's.
    fn left_out(&self, end: fn(IpNet) -> Match, verdict: &Verdict) -> Vec<Rule> {
        let prefixes: Vec<IpNet> = { self.bumps().flat_map(|bump| &bump.peers) }
            .copied()
            .collect();
        let left = left_out(&prefixes);
        let left = widest(&left, self.family).into_iter();
        left.map(|net| Rule::new([end(net)], verdict.clone()))
            .collect()
    }

    /// Answers to what peers sent in this host's name.
    fn answers() -> Match {
        only_iptables("-m conntrack --ctstate SNAT --ctdir REPLY")
    }

    /// A rule for what is sent by, or to, each peer.
    fn each_peer(&self, end: fn(IpNet) -> Match, verdict: &Verdict) -> Vec<Rule> {
        let rule = |peer: &IpNet| Rule::new([end(*peer)], verdict.clone());
        self.peers.iter().map(rule).collect()
    }

    /// Rules for what is sent to each peer. A connection to anywhere takes a bump when it begins, or never: in plain it has
    /// another address there, or it is answered by this host where it was called.
    fn called(&self, from: &[Match], verdict: &Verdict) -> Vec<Rule> {
        let to = |net: IpNet| [from, &[Match::To(net)]].concat();
        let rule = |net: &IpNet| Rule::new(to(*net), verdict.clone());
        let mut rules: Vec<Rule> = self.narrow().iter().map(rule).collect();
        for net in self.peers.iter().filter(|net| net.prefix_len() == 0) {
            let in_plain = [
                Match::Begins(false),
                Match::CtMark(Bits::are(self.mask(), 0)),
            ];
            rules.push(pass([&to(*net)[..], &in_plain].concat()));
            rules.push(rule(net));
        }
        rules
    }

    /// Networks of peers that are not everything.
    fn narrow(&self) -> Vec<IpNet> {
        let peers = { self.bumps().flat_map(|bump| &bump.peers) };
        widest(peers.filter(|net| net.prefix_len() > 0), self.family)
    }

    fn mask(&self) -> u32 {
        self.desired.marks.bump_mask()
    }

    fn bits(&self, bump: &BumpRoute) -> Bits {
        Bits::are(self.mask(), self.desired.marks.bump(bump.id))
    }

    fn marked(&self, value: u32) -> Match {
        Match::Mark(Bits::are(self.mask(), value))
    }

    fn chosen(&self) -> Match {
        let chosen = self.desired.marks.override_bit();
        Match::CtMark(Bits::are(chosen, chosen))
    }

    /// The chains of each bump: what may come out of its TUN, what puts connections on it.
    fn of_bumps(&self) -> Vec<Chain> {
        let inbound = |bump: &BumpRoute| {
            let (name, rules) = (format!("IN-{}", bump.id), self.out_of_tun(bump));
            chain(Table::Mangle, &name, &rules)
        };
        let mut chains: Vec<Chain> = self.ours().map(inbound).collect();
        for bump in self.bumps() {
            for (how, lock) in [("SET", false), ("LOCK", true)] {
                let mut used = self.bound(|binding| {
                    (binding == Binding::Required) == lock && binding != Binding::Direct
                });
                let concerns = |(rule, of): (&ClassRule, &BumpRoute)| {
                    of.id == bump.id && !self.destinations(rule, bump).is_empty()
                };
                if used.any(concerns) {
                    let Bits { mask, value, .. } = self.bits(bump);
                    let bit = if lock {
                        self.desired.marks.locked_bit()
                    } else {
                        0
                    };
                    let rules = [
                        Verdict::SetCtMark(Bits::are(mask | bit, value | bit)),
                        Verdict::SetMark(self.bits(bump)),
                    ];
                    let rules = rules.map(|verdict| Rule::new([], verdict));
                    let name = format!("{how}-{}", bump.id);
                    chains.push(chain(Table::Mangle, &name, &rules));
                }
            }
        }
        chains
    }

    // What marks.

    /// What this host sends.
    fn leaving(&self) -> Vec<Rule> {
        let mut rules = vec![pass([self.marked(self.desired.marks.own())])];
        rules.extend(self.called(&[], &goto("STEER")));
        rules
    }

    /// Rules for what the networks behind this host send, and for answers to peers.
    fn entering_gateway(&self) -> Vec<Rule> {
        // A connection with another source has it for the way by which it began: only the daemon can move it.
        let in_plain = Match::CtMark(Bits::are(self.mask(), 0));
        let near = widest(&self.desired.gateway, self.family).into_iter();
        let given = near.map(|near| {
            let given = Match::SourceChanged(true);
            pass([Match::From(near), given, in_plain.clone()])
        });
        let behind = self.desired.behind(self.family).into_iter();
        let entered = behind.flat_map(|near| self.called(&[Match::From(near)], &goto("PASS")));
        let on_a_bump = Match::CtMark(Bits::are_not(self.mask(), 0));
        let answers = Rule::new([Self::answers(), on_a_bump], goto("FOLLOW"));
        let answers = (!self.desired.exit.is_empty()).then_some(answers);
        let called = self.called(&[], &goto("ANSWER")).into_iter();
        let translated = called.map(|rule| {
            let mut rule = as_called(rule);
            rule.matches.insert(0, Match::Translated { answers: true });
            rule
        });
        let translated = translated.filter(|_| self.desired.translates);
        let ours = translated.chain(given).chain(entered);
        ours.chain(answers).collect()
    }

    /// The rules in the order in which they decide, of answers to what the nat table gave another destination.
    fn answer(&self) -> Vec<Rule> {
        self.decide(true).into_iter().map(as_called).collect()
    }

    /// The connection's mark is the packet's, of TCP.
    fn restored(&self) -> Vec<Rule> {
        vec![Rule::new([Match::OfTcp], Verdict::Restore(self.mask()))]
    }

    /// The rules in the order in which they decide, of what this host sends, or of what passes it.
    fn steer(&self, passing: bool) -> Vec<Rule> {
        let mut rules = vec![match passing {
            true => pass([only_iptables("-m addrtype --dst-type LOCAL")]),
            false => to_itself(),
        }];
        rules.extend(self.decide(passing));
        rules
    }

    fn decide(&self, passing: bool) -> Vec<Rule> {
        let on_a_bump = Match::CtMark(Bits::are_not(self.mask(), 0));
        let mut rules = self.left_out(Match::To, &Verdict::Return);
        rules.extend(self.classes(passing, true));
        rules.push(pass([Match::Among(Set::Plain)]));
        rules.push(Rule::new([self.chosen()], goto("FOLLOW")));
        rules.extend(self.classes(passing, false));
        rules.push(Rule::new([on_a_bump], goto("FOLLOW")));
        // Answers to what came by a bump and has no mark to follow by.
        rules.push(stop([Match::Among(Set::Untracked)]));
        rules
    }

    /// The class rules, those that require their bump or the others.
    fn classes(&self, passing: bool, lock: bool) -> Vec<Rule> {
        let mut rules = Vec::new();
        let meant = self.bound(|binding| (binding == Binding::Required) == lock);
        for (rule, bump) in meant.filter(|(rule, _)| !(passing && rule.is_of_sockets())) {
            let take = Verdict::Take {
                bump: bump.id,
                lock,
            };
            for (to, on_a_bump) in self.destinations(rule, bump) {
                if rule.binding != Binding::Preferred {
                    let take = match rule.binding {
                        Binding::Direct => goto("FOLLOW"),
                        _ => take.clone(),
                    };
                    let taken = of_class(rule, rule.source, Some(to), None, take);
                    rules.push(taken.and(on_a_bump));
                    continue;
                }
                // What is on a bump without a session stays there.
                for (prefix, up) in self.desired.sessions_of(bump, self.family) {
                    let verdict = if up { take.clone() } else { goto("FOLLOW") };
                    let to = common(to, prefix);
                    rules.extend(to.map(|to| of_class(rule, rule.source, Some(to), None, verdict)));
                }
            }
        }
        rules
    }

    /// What came in by a bump's device pulls its TCP connection there, unless it has a bump already or its
    /// user chose plain (docs/switching.md). Of a foreign device only what peers send counts, for it may carry
    /// things of others; by our own TUN nothing else gets this far. A reset ends its connection, or is of an earlier one
    /// of the same ends.
    fn follow(&self) -> Vec<Rule> {
        let by = |bump| self.followed(bump, self.senders(bump));
        self.bumps().flat_map(by).collect()
    }

    /// The same of what is forwarded.
    fn follow_passing(&self) -> Vec<Rule> {
        let by = |bump| {
            let translated = self.translated_ends(bump);
            let ends = self.passed(bump).into_iter().chain(translated);
            self.followed(bump, ends.collect())
        };
        self.bumps().flat_map(by).collect()
    }

    /// Who sends what comes by a bump and is for this host.
    fn senders(&self, bump: &BumpRoute) -> Vec<Vec<Match>> {
        if bump.owner == DeviceOwner::Ours {
            return vec![Vec::new()];
        }
        let peers = widest(&bump.peers, self.family).into_iter();
        peers.map(|peer| vec![Match::From(peer)]).collect()
    }

    /// Between whom goes what comes by a bump and passes.
    fn passed(&self, bump: &BumpRoute) -> Vec<Vec<Match>> {
        let passages = self.passages_of(bump).into_iter();
        let ends = passages.map(|(near, far)| between(far, near, []));
        ends.collect()
    }

    /// Packets of peers that came by a bump to this host itself, and that its nat table gave another destination.
    fn translated_ends(&self, bump: &BumpRoute) -> Vec<Vec<Match>> {
        if !self.desired.translates {
            return Vec::new();
        }
        let translated = Match::Translated { answers: false };
        let senders = self.senders(bump).into_iter();
        senders
            .map(|ends| [ends, vec![translated.clone()]].concat())
            .collect()
    }

    fn followed(&self, bump: &BumpRoute, ends: Vec<Vec<Match>>) -> Vec<Rule> {
        let free = Bits::are(self.mask() | self.desired.marks.override_bit(), 0);
        let came = [came(bump), Match::Resets(false), Match::CtMark(free)];
        let on = Verdict::SetCtMark(self.bits(bump));
        let rule = |ends: Vec<Match>| Rule::new([&ends[..], &came].concat(), on.clone());
        ends.into_iter().map(rule).collect()
    }

    // What class rules match.

    /// The rules of some binding, with their bumps.
    fn bound(
        &self,
        meant: impl Fn(Binding) -> bool,
    ) -> impl Iterator<Item = (&'a ClassRule, &'a BumpRoute)> {
        let rules = self.desired.rules.iter();
        let rules = rules.filter(move |rule| meant(rule.binding));
        rules.filter_map(|rule| {
            let is_direct = rule.binding == Binding::Direct;
            let mut bumps = self.bumps();
            Some((rule, bumps.find(|bump| is_direct || bump.id == rule.bump)?))
        })
    }

    /// The rules that require a bump.
    fn required(&self) -> impl Iterator<Item = (&'a ClassRule, &'a BumpRoute)> {
        self.bound(|binding| binding == Binding::Required)
    }

    /// Whether there are such for this family.
    fn requires(&self) -> bool {
        self.required()
            .any(|(rule, bump)| !self.destinations(rule, bump).is_empty())
    }

    /// The destinations that both a rule and its bump mean; of one that others have as well, what tells the peer's packets from
    /// theirs.
    fn destinations(&self, rule: &ClassRule, bump: &BumpRoute) -> Vec<(IpNet, Option<Match>)> {
        if !rule.concerns(self.family) {
            return Vec::new();
        }
        let wanted = rule.destination.unwrap_or(self.family.any());
        let reached = widest(&bump.peers, self.family);
        let is_shared = |peer: &IpNet| self.desired.shared.contains(peer);
        if reached == self.peers && !reached.is_empty() && !reached.iter().any(is_shared) {
            // The chains are entered for these only, so the rule need not say it again.
            return vec![(wanted, None)];
        }
        let both = reached.into_iter().filter_map(|peer| {
            // A rule of one connection names the peer's.
            let is_mixed = is_shared(&peer) && rule.binding != Binding::Pinned;
            let on_a_bump = Match::CtMark(Bits::are_not(self.mask(), 0));
            Some((common(peer, wanted)?, is_mixed.then_some(on_a_bump)))
        });
        both.collect()
    }

    /// What the far end sends of a class is dropped, unless it comes `way`. Whose socket a packet is for is not known
    /// that early, and what shows only in what this host sends not at all, so a rule that names such has none.
    fn kept_out(&self, rule: &ClassRule, bump: &BumpRoute, way: Option<Match>) -> Vec<Rule> {
        if rule.uid.is_some() || rule.shows_only_sending() {
            return Vec::new();
        }
        let far = ClassRule {
            dport: rule.sport,
            sport: rule.dport,
            ..rule.clone()
        };
        let from = self.destinations(rule, bump).into_iter();
        let stop = |(from, on_a_bump)| {
            let stopped = of_class(&far, Some(from), rule.source, way.clone(), Verdict::Drop);
            stopped.and(on_a_bump)
        };
        from.map(stop).collect()
    }

    // What drops.

    /// Where packets that come in are sorted. Nothing of it is kept out where steering fails open: then plain packets must
    /// be taken as they are sent.
    fn entering(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        let closed = self.desired.fail == Fail::Closed;
        if closed {
            let locked = self.desired.marks.locked_bit();
            let locked = Match::CtMark(Bits::are(locked, locked));
            rules.push(Rule::new([locked], Verdict::Jump("LOCKED")));
            if self.requires() {
                rules.extend(self.each_peer(Match::From, &Verdict::Jump("REQUIRED-IN")));
            }
        }
        let sorted = |bump: &BumpRoute| Rule::new([came(bump)], goto(format!("IN-{}", bump.id)));
        rules.extend(self.ours().map(sorted));
        if closed {
            rules.extend(self.each_peer(Match::From, &goto("PLAIN")));
        }
        rules
    }

    /// Packets of LOCKED connections.
    fn locked(&self) -> Vec<Rule> {
        let mut rules = vec![
            // Without a bump LOCKED means nothing: somebody else may have taken the bump away.
            pass([Match::CtMark(Bits::are(self.mask(), 0))]),
            // This host itself says so where a segment is too long for a device: TCP has to hear of it.
            pass([Match::In(DeviceName::loopback(), true)]),
        ];
        // What the networks behind this host send, unless it comes from elsewhere in their name.
        let filter = || only_iptables("-m rpfilter");
        let passages = self.passages().into_iter();
        rules.extend(passages.map(|(near, far)| pass(between(near, far, [filter()]))));
        if !self.desired.exit.is_empty() {
            rules.push(pass([Self::answers()]));
        }
        if self.desired.translates {
            rules.push(pass([Match::Translated { answers: true }, filter()]));
        }
        let by_it = |bump| pass([came(bump), Match::CtMark(self.bits(bump))]);
        rules.extend(self.bumps().map(by_it));
        rules.push(stop([]));
        rules
    }

    /// Packets of peers that came by none of our TUNs.
    fn plain(&self) -> Vec<Rule> {
        // No TCP sends these, but Linux takes the RST in them, and conntrack knows them for no connection's.
        let odd = |flags| only_iptables(format!("-p tcp -m tcp --tcp-flags {flags} {flags}"));
        let odd = ["SYN,RST", "FIN,RST", "RST,URG"].map(|flags| stop([odd(flags)]));
        let mut rules = self.left_out(Match::From, &Verdict::Return);
        rules.extend(odd);
        let pinned = self.bound(|binding| binding == Binding::Pinned);
        let pinned: Vec<Rule> = pinned
            .flat_map(|(rule, bump)| {
                let foreign = bump.owner == DeviceOwner::Foreign;
                let way = foreign.then(|| Match::In(bump.device.clone(), false));
                self.kept_out(rule, bump, way)
            })
            .collect();
        if !pinned.is_empty() {
            rules.push(pass([self.chosen()]));
            rules.extend(pinned);
        }
        rules
    }

    /// Packets of peers, as far as rules require a bump.
    fn required_in(&self) -> Vec<Rule> {
        let required = self.required().flat_map(|(rule, bump)| {
            let elsewhere = Match::In(bump.device.clone(), false);
            self.kept_out(rule, bump, Some(elsewhere))
        });
        let left = self.left_out(Match::From, &Verdict::Return);
        left.into_iter().chain(required).collect()
    }

    /// Packets to peers, likewise.
    fn required_out(&self) -> Vec<Rule> {
        let mut rules = vec![to_itself()];
        rules.extend(self.left_out(Match::To, &Verdict::Return));
        for (rule, bump) in self.required() {
            for (to, on_a_bump) in self.destinations(rule, bump) {
                let elsewhere = Some(Match::Out(bump.device.clone(), false));
                let dropped = of_class(rule, rule.source, Some(to), elsewhere, Verdict::Drop);
                let dropped = dropped.and(on_a_bump);
                if self.desired.translates && !rule.is_of_sockets() {
                    let mut answer = as_called(dropped.clone());
                    answer.matches.push(Match::Translated { answers: true });
                    rules.push(answer);
                }
                rules.push(dropped);
            }
        }
        rules
    }

    /// What may come out of a TUN of ours (docs/threat-model.md, "The peer").
    fn out_of_tun(&self, bump: &BumpRoute) -> Vec<Rule> {
        let (loopback, redirect) = match self.family {
            Family::V4 => ("127.0.0.0/8", "-p icmp -m icmp --icmp-type 5"),
            Family::V6 => ("::1/128", "-p ipv6-icmp -m icmp6 --icmpv6-type 137"),
        };
        let mut rules = vec![
            stop([Match::To(loopback.parse().expect("a prefix"))]),
            stop([only_iptables(redirect)]),
        ];
        rules.extend(self.left_out(Match::From, &Verdict::Drop));
        // Not to all hosts of a network at once.
        let unicast = || only_iptables("-m addrtype --dst-type UNICAST");
        rules.extend(self.closed([unicast()]));
        let passages = self.passages_of(bump).into_iter();
        rules.extend(passages.map(|(near, far)| pass(between(far, near, [unicast()]))));
        rules.push(stop([only_iptables("-m addrtype ! --dst-type LOCAL")]));
        let peers = widest(&bump.peers, self.family).into_iter();
        rules.extend(peers.map(|peer| pass([Match::From(peer)])));
        rules.push(stop([]));
        rules
    }

    /// What came out of a TUN of ours was for this host, until some rule of DNAT gave it another destination;
    /// what others send has no business in one (docs/threat-model.md, "The peer"), but for the networks that this host
    /// forwards for, to those behind the peers and back.
    fn forwarded(&self) -> Vec<Rule> {
        let near = widest(&self.desired.gateway, self.family).into_iter();
        let near = near.filter(|_| self.refuses_quic());
        let quic = |near| {
            Rule::new(
                [Match::From(near), quic::to_443()],
                Verdict::Jump("QUIC-PASS"),
            )
        };
        let mut rules: Vec<Rule> = near.map(quic).collect();
        for bump in self.ours() {
            rules.extend(self.translated_here(bump));
            rules.extend(self.closed([came(bump)]));
            if !self.desired.exit.is_empty() {
                // Nothing would translate its source.
                let unknown = only_iptables("-m conntrack --ctstate INVALID");
                rules.push(stop([came(bump), unknown]));
            }
            for (near, far) in self.passages_of(bump) {
                rules.push(pass(between(far, near, [came(bump)])));
                let goes = [leaves(bump), Match::Mark(self.bits(bump))];
                rules.push(pass(between(near, far, goes)));
            }
            rules.extend([stop([came(bump)]), stop([leaves(bump)])]);
        }
        rules
    }

    /// Passes of what peers send to this host itself, and its nat table gives another destination, and of the answers.
    fn translated_here(&self, bump: &BumpRoute) -> Vec<Rule> {
        if !self.desired.translates {
            return Vec::new();
        }
        let own = { bump.addresses.iter() }.filter(|own| Family::of(**own) == self.family);
        let called = |own: &IpAddr| {
            let own = Match::AsCalled(Box::new(Match::From(IpNet::from(*own))));
            pass([came(bump), Match::Translated { answers: false }, own])
        };
        let mark = Match::Mark(self.bits(bump));
        let answer = pass([leaves(bump), Match::Translated { answers: true }, mark]);
        own.map(called).chain([answer]).collect()
    }

    /// Drops of packets to networks that peers do not reach in this host's name.
    fn closed(&self, how: impl Into<Vec<Match>>) -> Vec<Rule> {
        let how = how.into();
        let closed = self.desired.closed(self.family).into_iter();
        let stopped = closed.map(|net| stop([&[Match::To(net)], &how[..]].concat()));
        stopped.collect()
    }

    /// Source NAT of packets that peers send in this host's name.
    fn translated(&self) -> Vec<Rule> {
        if self.desired.exit.is_empty() {
            return Vec::new();
        }
        let near = widest(&self.desired.gateway, self.family).into_iter();
        let mut rules: Vec<Rule> = near.map(|near| pass([Match::To(near)])).collect();
        for bump in self.ours() {
            let mark = Match::CtMark(self.bits(bump));
            for far in widest(&bump.peers, self.family) {
                for near in widest(&self.desired.exit, self.family) {
                    let sent = between(far, near, [mark.clone()]);
                    rules.push(Rule::new(sent, Verdict::Masquerade));
                }
            }
        }
        rules
    }

    /// Plain packets that fall into a TUN of ours get an ICMP error, as from a host that is not reachable.
    fn refused(&self) -> Vec<Rule> {
        let answer = Verdict::Reject(match self.family {
            Family::V4 => "icmp-host-unreachable",
            Family::V6 => "icmp6-addr-unreachable",
        });
        let refused = |bump| Rule::new([leaves(bump), self.marked(0)], answer.clone());
        let quic =
            { self.refuses_quic() }.then(|| Rule::new([quic::to_443()], Verdict::Jump("QUIC-OUT")));
        quic.into_iter().chain(self.ours().map(refused)).collect()
    }

    /// The guard: plain and own packets pass, marked ones by their bump's device only. Each bump has a drop
    /// rule of its own so that its counter tells; the last one is for ids that no bump has.
    fn guard(&self) -> Vec<Rule> {
        let plain = pass([self.marked(0)]);
        let own = pass([self.marked(self.desired.marks.own())]);
        let mut rules = Vec::new();
        if self.requires() {
            rules.push(own);
            rules.extend(self.each_peer(Match::To, &Verdict::Jump("REQUIRED-OUT")));
            rules.push(plain);
        } else {
            rules.extend([plain, own]);
        }
        for bump in self.bumps() {
            let marked = Match::Mark(self.bits(bump));
            rules.extend([pass([leaves(bump), marked.clone()]), stop([marked])]);
        }
        rules.push(stop([]));
        rules
    }
}

/// The rule, of answers to what the nat table gave another destination.
fn as_called(rule: Rule) -> Rule {
    let named = |part| match part {
        Match::From(_) | Match::To(_) | Match::Tcp { .. } | Match::Among(_) => {
            Match::AsCalled(Box::new(part))
        }
        other => other,
    };
    let matches: Vec<Match> = rule.matches.into_iter().map(named).collect();
    Rule { matches, ..rule }
}

/// All that a rule names but addresses and devices.
pub(crate) fn further(rule: &ClassRule) -> Vec<Match> {
    let &ClassRule {
        sport, dport, uid, ..
    } = rule;
    let mut matches = vec![Match::Tcp { sport, dport }];
    // One match asks for both owners.
    let gid = rule.terms.iter().find_map(|term| match term {
        Term::Gid(gid) => Some(*gid),
        _ => None,
    });
    if uid.is_some() || gid.is_some() {
        matches.push(Match::Owner { uid, gid });
    }
    let others = rule
        .terms
        .iter()
        .filter(|term| !matches!(term, Term::Gid(_)));
    matches.extend(others.cloned().map(Match::Term));
    matches.extend(rule.hours.map(Match::Hours));
    matches.push(Match::Class(rule.id));
    matches
}

#[cfg(test)]
mod tests;
