//! Which rule decides over a connection, and where that has it go; which bumps rules need at the other end.

use dibs_settings::{BumpId, Level};
use dibs_wire::FlowKey;

use crate::answering::Here;
use crate::conns::{Choice, Socket};
use crate::marks::Hand;
use crate::messages::Outcome;
use crate::table::{Conn, ConnTable};

/// Fit of a rule and a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// It does.
    Means,
    /// It may: only the kernel can tell, by what the connection sends.
    May,
    /// It does not.
    Not,
}

/// A rule for connections that are known as `C`.
pub trait Rule<C> {
    /// The bump that it puts them on; none: they leave directly.
    fn bump(&self) -> Option<BumpId>;
    /// How firmly.
    fn level(&self) -> Level;
    /// Which.
    fn fit(&self, live: &C) -> Fit;
}

/// The bumps that rules need at a peer, bit n for bump n: what a WANT says.
pub fn wanted<'a, C, R: Rule<C> + 'a>(rules: impl Iterator<Item = &'a R>) -> u16 {
    let bumps = rules.filter_map(Rule::bump);
    bumps.fold(0, |bumps, bump| bumps | 1 << bump.get())
}

/// A connection, beside the rules that hold.
#[derive(Clone, Copy, Debug)]
pub struct Ruling<'a, I, C> {
    /// In the order in which they are tried.
    pub rules: I,
    /// The connection.
    pub live: &'a C,
    /// Its socket here.
    pub socket: Socket,
    /// Record of it.
    pub known: &'a Conn,
    /// Bumps that its peer's rules need here.
    pub wants: Wants,
    /// Its peer has a session, and answers.
    pub answers: bool,
}

impl<'a, R, I, C> Ruling<'a, I, C>
where
    R: Rule<C> + 'a,
    I: Iterator<Item = &'a R> + Clone,
{
    fn find(&self, is_meant: impl Fn(&R, Fit) -> bool) -> Option<&'a R> {
        let mut rules = self.rules.clone();
        rules.find(|rule| is_meant(rule, rule.fit(self.live)))
    }

    fn choice(&self) -> Option<Choice> {
        self.known.choice.of(self.socket)
    }

    /// The rule that requires its bump, if one does.
    pub fn requirement(&self) -> Option<&'a R> {
        self.find(|rule, fit| fit == Fit::Means && rule.level() == Level::Require)
    }

    /// The rule that decides where nothing is chosen, if one does.
    pub fn deciding(&self) -> Option<&'a R> {
        // The bump that a rule that only the kernel can follow has it on.
        let by_kernel = self.known.place.handed_by(Hand::Rule);
        let decides = |rule: &R, fit| match fit {
            Fit::Means => true,
            Fit::May => by_kernel.is_some() && by_kernel == rule.bump(),
            Fit::Not => false,
        };
        self.requirement().or_else(|| self.find(decides))
    }

    /// The bump that it is to be on by rules now; none where the rule waits for a session.
    pub fn bump(&self) -> Option<BumpId> {
        let rule = self.deciding()?;
        let waits = rule.level() == Level::Prefer && !self.answers;
        rule.bump().filter(|_| !waits)
    }

    /// The bump that rules move it to: nothing is chosen for it.
    pub fn moves_to(&self) -> Option<BumpId> {
        self.bump().filter(|_| self.choice().is_none())
    }

    /// Bump, or plain, to which the peer is asked again to move, because it could not follow to `went`; none: nowhere.
    pub fn goes_again(&self, went: Option<BumpId>) -> Option<Option<BumpId>> {
        // What plain did not carry is to go there still.
        let handed = || {
            let handed = self.known.place.handed().filter(|to| to.by != Hand::Kept);
            handed.map(|handed| handed.bump)
        };
        // What the peer could not do may stand in the record still, but this host has gone there.
        let is_there = || handed() == went || self.known.place.marked() == went;
        let stays = || self.deciding().is_none() && is_there();
        match (self.choice(), self.bump()) {
            (Some(_), _) => None,
            (None, Some(bump)) => Some(Some(bump)),
            (None, None) => stays().then_some(went),
        }
    }

    /// The bump that is to be chosen for it: the choice for it stands against what a rule requires, and the peer would
    /// not follow the rule against the choice.
    pub fn overruled_by(&self) -> Option<BumpId> {
        let (bump, choice) = (self.requirement()?.bump()?, self.choice()?);
        (choice.bump != Some(bump)).then_some(bump)
    }

    /// True if it waits for a session that it is not to wait for, before it has begun.
    pub fn may_begin_plain(&self) -> bool {
        let prefers = |rule: &R| rule.level() == Level::Prefer;
        self.deciding().is_some_and(prefers) && self.choice().is_none()
    }

    /// Fit of a rule that is `gone`, if nothing else keeps the connection on its bump.
    pub fn freed_of(&self, gone: &R) -> Option<Fit> {
        let ruled = || self.find(|_, fit| fit == Fit::Means).is_some();
        let bump = gone.bump()?;
        let fit = gone.fit(self.live);
        let had_it = match fit {
            Fit::Means => true,
            Fit::May => self.known.place.handed_by(Hand::Rule) == Some(bump),
            Fit::Not => false,
        };
        (had_it && self.choice().is_none() && !ruled()).then_some(fit)
    }

    /// True if its choice counts again because a rule that stood against it is `gone`: the kernel has it where that
    /// rule wanted it.
    pub fn is_left_to_choice(&self, gone: &R) -> bool {
        let stood = gone.level() == Level::Require && gone.fit(self.live) == Fit::Means;
        let stands = |choice: Choice| {
            let required = self.requirement();
            required.is_none_or(|rule| rule.bump() == choice.bump)
        };
        stood && self.choice().is_some_and(stands)
    }

    /// Hand that put it on a bump where nothing is chosen; none: a rule that holds now, which needs no note.
    pub fn hand_of(&self, bump: BumpId) -> Option<Hand> {
        let has = |how| {
            self.find(|rule, fit| fit == how && rule.bump() == Some(bump))
                .is_some()
        };
        if has(Fit::Means) {
            None
        } else if has(Fit::May) {
            Some(Hand::Rule)
        } else if self.wants.needs(bump) {
            Some(Hand::Peer)
        } else {
            Some(Hand::Other)
        }
    }

    /// The bump that it is on while its mark says `marked`, if it is on one.
    pub fn is_on(&self, marked: Option<BumpId>) -> Option<BumpId> {
        let settled = || self.choice().filter(|_| !self.known.is_asked());
        if let Some(rule) = self.requirement() {
            rule.bump()
        } else if let Some(choice) = settled() {
            choice.bump
        } else {
            // The kernel applies a rule with the next packet.
            marked.or_else(|| self.bump())
        }
    }

    /// The same, by whatever reason.
    pub fn stands_on(&self, marked: Option<BumpId>) -> Option<BumpId> {
        let handed = || self.known.place.handed().map(|handed| handed.bump);
        self.is_on(marked).or_else(handed)
    }

    /// The bump that it stays on whose mark has it `on` one: none if it is about to leave it, or not there yet, by its
    /// choice; or by a rule, which takes it elsewhere with the next packet; or if it moves otherwise; or if the peer has it
    /// elsewhere by a rule, and none here requires a bump.
    pub fn stays_on(&self, on: Option<BumpId>) -> Option<BumpId> {
        if self.known.phase.moving().is_some() {
            return None;
        }
        let by_peer = self.known.place.handed_by(Hand::Peer);
        let meant = match (self.requirement(), self.choice()) {
            (Some(rule), _) => rule.bump(),
            (None, Some(choice)) => choice.bump.filter(|_| !self.known.is_asked()),
            (None, None) if by_peer.is_some() && by_peer != on => None,
            (None, None) => self.bump().or(on),
        };
        on.filter(|on| meant == Some(*on))
    }

    /// Knowledge by which a peer's SWITCH for it is judged.
    pub fn here(&self, bound: bool) -> Here {
        Here {
            socket: self.socket,
            bound,
            on: None,
            required: self.requirement().and_then(R::bump),
            ruled: self.deciding().and_then(R::bump),
        }
    }
}

/// The bumps that a peer's rules need here, by its latest WANT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    bumps: u16,
    sequence: u64,
}

impl Wants {
    /// Wants that an earlier run knew.
    pub fn restored(bumps: u16) -> Self {
        let sequence = 0;
        Self { bumps, sequence }
    }

    /// Bit n for bump n.
    pub fn bumps(&self) -> u16 {
        self.bumps
    }

    /// True if they need this one.
    pub fn needs(&self, bump: BumpId) -> bool {
        self.bumps & 1 << bump.get() != 0
    }

    /// The peer's daemon is another one, and numbers its WANTs from the start.
    pub fn handle_restart(&mut self) {
        self.sequence = 0;
    }

    /// Nothing is done for them any more, until the next WANT that says otherwise.
    pub fn clear(&mut self) {
        self.bumps = 0;
    }

    /// A WANT says that they need these, of those that this host carries. What it is answered if nothing is to be done
    /// for it; otherwise these are to be made ready. What the peer's rules had put on others has nothing left that
    /// keeps it there.
    pub fn handle_want(
        &mut self,
        conns: &mut ConnTable,
        sequence: u64,
        bumps: u16,
        is_of_peer: impl Fn(&FlowKey) -> bool,
    ) -> Option<Outcome> {
        if sequence <= self.sequence {
            return Some(Outcome::Older);
        }
        self.sequence = sequence;
        if self.bumps == bumps {
            return Some(Outcome::Done);
        }
        self.bumps = bumps;
        conns.update_all(|pair, conn| {
            let by_peer = conn.place.handed_by(Hand::Peer);
            if by_peer.is_some_and(|bump| !self.needs(bump)) && is_of_peer(pair) {
                conn.place.hand_over(None);
            }
        });
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::tests::{bump, pair};

    const SOCKET: Socket = Socket(77);

    /// Connections are known by a number here: rules mean those of the same parity as their own, or may.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Parity(u8, Level, u8, Fit);

    impl Rule<u8> for Parity {
        fn bump(&self) -> Option<BumpId> {
            (self.0 > 0).then(|| bump(self.0))
        }

        fn level(&self) -> Level {
            self.1
        }

        fn fit(&self, live: &u8) -> Fit {
            match live % 2 == self.2 {
                true => self.3,
                false => Fit::Not,
            }
        }
    }

    const USUAL: Parity = Parity(1, Level::Usual, 0, Fit::Means);
    const REQUIRED: Parity = Parity(2, Level::Require, 0, Fit::Means);
    const PREFERRED: Parity = Parity(3, Level::Prefer, 0, Fit::Means);
    const KERNELS: Parity = Parity(4, Level::Usual, 0, Fit::May);
    const OF_OTHERS: Parity = Parity(5, Level::Require, 1, Fit::Means);

    fn beside<'a>(
        rules: &'a [Parity],
        known: &'a Conn,
    ) -> Ruling<'a, std::slice::Iter<'a, Parity>, u8> {
        Ruling {
            rules: rules.iter(),
            live: &0,
            socket: SOCKET,
            known,
            wants: Wants::restored(1 << 6),
            answers: true,
        }
    }

    fn chosen(number: u8) -> Conn {
        let mut known = Conn::default();
        known.choice.propose(SOCKET, BumpId::new(number), 7, 0);
        known
    }

    fn handed(number: u8, by: Hand) -> Conn {
        let (bump, mut known) = (bump(number), Conn::default());
        known.place.hand_over(by.on(bump));
        known
    }

    #[test]
    fn a_direct_rule_keeps_others_from_deciding_and_moves_nothing() {
        const DIRECT: Parity = Parity(0, Level::Usual, 0, Fit::Means);
        let none = Conn::default();
        let ruling = beside(&[DIRECT, USUAL], &none);
        assert_eq!((ruling.bump(), ruling.moves_to()), (None, None));
        // What began before on a bump stays there.
        assert_eq!(ruling.is_on(BumpId::new(1)), BumpId::new(1));
        assert_eq!(ruling.freed_of(&USUAL), None);
        assert_eq!(beside(&[], &none).freed_of(&DIRECT), None);
        assert_eq!(beside(&[DIRECT, REQUIRED], &none).bump(), BumpId::new(2));
        assert_eq!(wanted::<u8, _>([DIRECT, USUAL].iter()), 1 << 1);
    }

    #[test]
    fn what_is_required_stands_above_the_first_rule_and_above_choices() {
        let none = Conn::default();
        let ruling = beside(&[OF_OTHERS, USUAL, REQUIRED], &none);
        assert_eq!(ruling.requirement(), Some(&REQUIRED));
        assert_eq!(
            (ruling.moves_to(), ruling.overruled_by()),
            (BumpId::new(2), None)
        );
        assert_eq!(
            beside(&[OF_OTHERS, USUAL], &none).moves_to(),
            BumpId::new(1)
        );
        for (number, overruled) in [(0, BumpId::new(2)), (1, BumpId::new(2)), (2, None)] {
            let known = chosen(number);
            let ruling = beside(&[USUAL, REQUIRED], &known);
            assert_eq!(
                (ruling.moves_to(), ruling.overruled_by()),
                (None, overruled)
            );
            assert_eq!(ruling.is_on(BumpId::new(number)), BumpId::new(2));
            let ruling = beside(&[USUAL], &known);
            assert_eq!((ruling.moves_to(), ruling.overruled_by()), (None, None));
            assert_eq!(ruling.is_on(None), BumpId::new(number));
        }
    }

    #[test]
    fn what_is_preferred_waits_for_a_session_and_nothing_else_does() {
        let none = Conn::default();
        for (rules, with, without) in [
            (&[PREFERRED, USUAL], BumpId::new(3), None),
            (&[USUAL, PREFERRED], BumpId::new(1), BumpId::new(1)),
            (&[PREFERRED, REQUIRED], BumpId::new(2), BumpId::new(2)),
        ] {
            let mut ruling = beside(rules, &none);
            assert_eq!(ruling.moves_to(), with);
            ruling.answers = false;
            assert_eq!(ruling.moves_to(), without);
            assert_eq!(ruling.may_begin_plain(), without.is_none());
            // What is there stays, and is not let go by the peer.
            let stays = without.filter(|_| without == BumpId::new(2));
            let there = BumpId::new(3);
            assert_eq!(ruling.is_on(there), stays.or(there));
            assert_eq!(ruling.here(false).ruled, with);
        }
    }

    #[test]
    fn what_is_about_to_leave_or_not_there_yet_does_not_stay() {
        let none = Conn::default();
        let mut asked = Conn::default();
        let choice = asked.choice.propose(SOCKET, BumpId::new(1), 7, 0);
        asked.phase.move_to_asked(choice.version, None);
        for (rules, known, on, stays) in [
            (&[][..], &none, None, None),
            (&[][..], &none, BumpId::new(1), BumpId::new(1)),
            (&[][..], &asked, BumpId::new(1), None),
            (&[][..], &chosen(1), BumpId::new(1), BumpId::new(1)),
            (&[][..], &chosen(1), BumpId::new(2), None),
            // The peer's rule has it there, and ours will not leave it.
            (&[USUAL][..], &none, BumpId::new(2), None),
            (&[USUAL][..], &chosen(3), BumpId::new(3), BumpId::new(3)),
            (&[REQUIRED][..], &asked, BumpId::new(2), BumpId::new(2)),
            (&[REQUIRED][..], &chosen(1), BumpId::new(1), None),
        ] {
            let ruling = beside(rules, known);
            assert_eq!(ruling.stays_on(on), stays, "{ruling:?} {on:?}");
        }
    }

    #[test]
    fn what_only_the_kernel_can_tell_decides_where_it_did() {
        let (none, there) = (Conn::default(), handed(4, Hand::Rule));
        assert_eq!(beside(&[KERNELS], &none).moves_to(), None);
        assert_eq!(beside(&[KERNELS, USUAL], &there).moves_to(), BumpId::new(4));
        for elsewhere in [handed(4, Hand::Other), handed(1, Hand::Rule)] {
            assert_eq!(
                beside(&[KERNELS, USUAL], &elsewhere).moves_to(),
                BumpId::new(1)
            );
        }
    }

    #[test]
    fn a_connection_is_freed_by_what_alone_kept_it() {
        let (none, there) = (Conn::default(), handed(4, Hand::Rule));
        let elsewhere = handed(1, Hand::Rule);
        for (rules, known, gone, freed) in [
            (&[][..], &none, USUAL, Some(Fit::Means)),
            (&[][..], &none, OF_OTHERS, None),
            (&[PREFERRED][..], &none, USUAL, None),
            (&[KERNELS][..], &none, USUAL, Some(Fit::Means)),
            (&[][..], &chosen(1), USUAL, None),
            (&[][..], &none, KERNELS, None),
            (&[][..], &there, KERNELS, Some(Fit::May)),
            (&[][..], &elsewhere, KERNELS, None),
        ] {
            let ruling = beside(rules, known);
            assert_eq!(ruling.freed_of(&gone), freed, "{ruling:?} {gone:?}");
        }
    }

    #[test]
    fn the_peer_is_asked_again_for_what_rules_want_by_now() {
        let (none, there) = (Conn::default(), handed(3, Hand::Other));
        for (rules, known, went, goes) in [
            (&[USUAL][..], &none, Some(1), Some(Some(1))),
            (&[REQUIRED], &none, Some(1), Some(Some(2))),
            (&[USUAL], &none, None, Some(Some(1))),
            (&[USUAL], &chosen(3), Some(1), None),
            // It was freed, and is.
            (&[], &none, None, Some(None)),
            // The rule is gone by now.
            (&[], &none, Some(1), None),
            // Another program moved it.
            (&[], &there, Some(3), Some(Some(3))),
            (&[], &there, None, None),
        ] {
            let goes = goes.map(|bump: Option<u8>| bump.and_then(BumpId::new));
            let ruling = beside(rules, known);
            assert_eq!(
                ruling.goes_again(went.and_then(BumpId::new)),
                goes,
                "{ruling:?}"
            );
        }
        let mut waits = beside(&[PREFERRED], &none);
        waits.answers = false;
        assert_eq!(waits.goes_again(None), None);
    }

    #[test]
    fn a_choice_counts_again_once_no_rule_stands_against_it() {
        for (rules, known, gone, counts) in [
            (&[USUAL][..], chosen(1), REQUIRED, true),
            (&[REQUIRED][..], chosen(1), REQUIRED, false),
            (&[REQUIRED][..], chosen(2), REQUIRED, true),
            (&[][..], chosen(1), USUAL, false),
            (&[][..], chosen(1), OF_OTHERS, false),
            (&[][..], Conn::default(), REQUIRED, false),
        ] {
            let ruling = beside(rules, &known);
            assert_eq!(
                ruling.is_left_to_choice(&gone),
                counts,
                "{ruling:?} {gone:?}"
            );
        }
    }

    #[test]
    fn who_put_a_connection_on_a_bump_is_told_by_rules_here_and_at_the_peer() {
        let none = Conn::default();
        let ruling = beside(&[USUAL, KERNELS, OF_OTHERS], &none);
        for (number, by) in [
            (1, None),
            (4, Some(Hand::Rule)),
            (6, Some(Hand::Peer)),
            (5, Some(Hand::Other)),
        ] {
            assert_eq!(ruling.hand_of(bump(number)), by, "{number}");
        }
    }

    #[test]
    fn the_latest_want_counts_and_releases_what_it_does_not_name() {
        let (mut wants, mut conns) = (Wants::default(), ConnTable::default());
        let want = |wants: &mut Wants, conns: &mut ConnTable, sequence, bumps| {
            wants.handle_want(conns, sequence, bumps, |_| true)
        };
        assert_eq!(want(&mut wants, &mut conns, 2, 1 << 1), None);
        assert_eq!(
            want(&mut wants, &mut conns, 2, 0),
            Some(Outcome::Older),
            "said again"
        );
        assert_eq!(
            want(&mut wants, &mut conns, 3, 1 << 1),
            Some(Outcome::Done),
            "nothing is new"
        );
        for (by, stays) in [(Hand::Peer, false), (Hand::Other, true)] {
            let mut conns = ConnTable::default();
            let handed = by.on(bump(1));
            conns.update(&pair(), |conn| conn.place.hand_over(handed));
            let mut wants = wants;
            assert_eq!(want(&mut wants, &mut conns, 4, 1 << 2), None);
            assert!(wants.needs(bump(2)) && !wants.needs(bump(1)));
            assert_eq!(conns.get(&pair()).place.handed().is_some(), stays);
        }
        wants.handle_restart();
        assert_eq!(want(&mut wants, &mut conns, 1, 0), None);
        let rules = [USUAL, KERNELS];
        assert_eq!(wanted::<u8, _>(rules.iter()), 1 << 1 | 1 << 4);
    }
}
