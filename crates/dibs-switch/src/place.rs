//! Place of a connection: what its mark says, as far as this host knows, and why.

use std::time::Duration;

use dibs_core::Time;
use dibs_settings::BumpId;

use crate::marks::{Foreign, Hand, Handed, Mark, STRAGGLERS};
use crate::phase::Moving;

/// Time for which a peer is believed that a connection is to go to plain after plain was seen to carry it: with many
/// connections the first ones wait until all are looked at.
const PROVED: Duration = Duration::from_secs(120);

/// Place of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Bump that it is on neither by choice nor by a rule of ours.
    handed: Option<Handed>,
    written: Option<Written>,
    /// The kernel has it on this bump without a choice: by rules, here or at the peer.
    followed: Option<BumpId>,
    /// Time at which plain carried it, as far as that is known.
    plain: Option<Time>,
    /// Bump to which what comes by it may bring it from plain at any time, as the data path was told.
    expected: Option<BumpId>,
}

/// Mark that we gave a connection last, or took up from another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Written {
    /// Its bump, if it has one.
    bump: Option<BumpId>,
    /// OVERRIDE is set.
    chosen: bool,
    /// Time at which it left a bump for plain.
    left: Option<Time>,
    /// Time since which OVERRIDE says, by no choice, that what still comes by a bump does not pull it back.
    held: Option<Time>,
}

impl Place {
    /// Place where neither a choice nor a rule of ours put it.
    pub fn handed(&self) -> Option<Handed> {
        self.handed
    }

    /// The bump on which this hand put it.
    pub fn handed_by(&self, hand: Hand) -> Option<BumpId> {
        self.handed.filter(|to| to.by == hand).map(|to| to.bump)
    }

    /// Notes where neither a choice nor a rule of ours puts it from now on; none: it is there no more.
    pub fn hand_over(&mut self, to: Option<Handed>) {
        self.handed = to;
    }

    /// Forgets where the peer had it: the peer has given that up for this move.
    pub fn take_from_peer(&mut self, Moving { bump, ruled }: Moving) {
        if { self.handed_by(Hand::Peer) }.is_some_and(|had| Some(had) != bump) {
            self.handed = Hand::Other.on(bump.filter(|_| !ruled));
        }
    }

    /// Notes that plain carries it now.
    pub fn note_plain(&mut self, now: Time) {
        self.plain = Some(now);
    }

    /// True if plain was seen to carry it a short time ago.
    pub fn has_proof(&self, now: Time) -> bool {
        self.plain.is_some_and(|at| now.since(at) < PROVED)
    }

    /// Forgets that plain carried it.
    pub(crate) fn forget_plain(&mut self) {
        self.plain = None;
    }

    /// Bump that this host wrote into its mark last, if it did.
    pub fn written(&self) -> Option<Option<BumpId>> {
        self.written.map(|mark| mark.bump)
    }

    /// True if its mark has this bump by a choice that we know.
    pub(crate) fn is_chosen(&self, bump: Option<BumpId>) -> bool {
        { self.written }.is_some_and(|mark| mark.chosen && mark.bump == bump)
    }

    /// The bump that its mark says, as far as is known.
    pub fn marked(&self) -> Option<BumpId> {
        let handed = self.handed.map(|handed| handed.bump);
        { self.written }.map_or(self.followed.or(handed), |mark| mark.bump)
    }

    /// The same without a place that it is handed over to: a rule of the peer says so before the mark does.
    pub(crate) fn was(&self) -> Option<BumpId> {
        self.written.map_or(self.followed, |mark| mark.bump)
    }

    /// Notes that the data path was told that it may come to this bump from plain.
    pub(crate) fn expect(&mut self, bump: BumpId) {
        self.expected = Some(bump);
    }

    /// The bump that its mark said until now. One that it was expected on: it may be there.
    pub(crate) fn was_before(&self, bump: Option<BumpId>) -> Option<BumpId> {
        { self.expected }
            .filter(|expected| bump == Some(*expected))
            .or(self.was())
    }

    /// Moves it to this mark. True if the mark has OVERRIDE.
    pub(crate) fn move_to_mark(&mut self, mark: &Mark, now: Time) -> bool {
        let bump = mark.bump;
        let left = match (self.marked(), bump) {
            (Some(_), None) => Some(now),
            (None, None) => self.written.and_then(|mark| mark.left),
            (_, Some(_)) => None,
        };
        let stays = { self.held() }.filter(|_| !self.may_follow(now));
        let held = if mark.leaves { Some(now) } else { stays };
        let held = held.filter(|_| bump.is_none() && !mark.explicit);
        let chosen = mark.explicit || held.is_some();
        self.write(bump, chosen, left, held);
        if bump.is_none() {
            self.followed = None;
        }
        if { self.handed_by(Hand::Kept) }.is_some_and(|kept| Some(kept) != bump) {
            self.handed = None;
        }
        chosen
    }

    /// Moves it to the mark that another program, or an earlier run, chose.
    pub fn move_to_chosen(&mut self, bump: Option<BumpId>) {
        self.write(bump, true, None, None);
    }

    /// Moves it to plain by no choice: its mark says so for a moment.
    pub(crate) fn move_to_left(&mut self, now: Time) {
        self.write(None, true, None, Some(now));
    }

    fn write(
        &mut self,
        bump: Option<BumpId>,
        chosen: bool,
        left: Option<Time>,
        held: Option<Time>,
    ) {
        self.expected = None;
        self.written = Some(Written {
            bump,
            chosen,
            left,
            held,
        });
    }

    /// Has it follow at once what comes by a bump, with the next mark that says plain by no choice.
    pub(crate) fn end_hold(&mut self) {
        if let Some(written) = &mut self.written {
            (written.left, written.held) = (None, None);
        }
    }

    /// Time at which it left a bump for plain.
    pub(crate) fn left(&self) -> Option<Time> {
        self.written.and_then(|mark| mark.left)
    }

    /// True if its mark says that it left a bump by no choice.
    pub fn has_left(&self) -> bool {
        self.held().is_some()
    }

    /// True if it left long enough ago to follow again.
    pub(crate) fn may_follow(&self, now: Time) -> bool {
        { self.held() }.is_some_and(|held| now.since(held) >= STRAGGLERS)
    }

    fn held(&self) -> Option<Time> {
        self.written.and_then(|mark| mark.held)
    }

    /// Takes a mark that our record does not know, and that nobody chose. `by`: who puts connections on its bump, if no
    /// rule of ours does.
    pub fn handle_mark(&mut self, bump: Option<BumpId>, by: Option<Hand>, now: Time) -> Foreign {
        let handed = self.handed.map(|handed| handed.bump);
        let had = self.written().unwrap_or(handed.or(self.followed));
        let Some(bump) = bump else {
            self.handed = None;
            return Foreign::News;
        };
        let is_elsewhere = had.is_some_and(|had| had != bump);
        // The kernel follows what comes by a bump from plain alone.
        let by = by.map(|by| match by {
            Hand::Peer if is_elsewhere => Hand::Other,
            by => by,
        });
        let straggles = self.left().is_some_and(|left| now.since(left) < STRAGGLERS);
        if straggles && !matches!(by, None | Some(Hand::Rule)) {
            return Foreign::Straggler;
        }
        self.handed = by.and_then(|by| by.on(bump)).or(self.handed);
        match by {
            None if is_elsewhere => Foreign::News,
            None | Some(Hand::Peer) => Foreign::Known,
            Some(Hand::Rule | Hand::Other | Hand::Kept) => Foreign::News,
        }
    }

    /// Bump on which the kernel has it without a choice.
    pub fn followed(&self) -> Option<BumpId> {
        self.followed
    }

    /// The kernel has it there. Where it had it before.
    pub fn handle_followed(&mut self, bump: Option<BumpId>) -> Option<BumpId> {
        std::mem::replace(&mut self.followed, bump)
    }

    /// Forgets which bump its mark said: nothing but a SYN went by it, so it leaves nothing behind there.
    pub(crate) fn forget_mark(&mut self) {
        (self.written, self.followed) = (None, None);
    }

    /// Bump that its entry had, if it was on one, and whether that was a choice. `asked`: a choice is not there yet, because
    /// the peer is still asked for its part.
    pub(crate) fn had(&self, asked: bool) -> Option<(Option<BumpId>, bool)> {
        let chosen = self.written.filter(|written| asked && written.chosen);
        let chosen = chosen.map(|written| (written.bump, true));
        // A mark of another program may stand above ours, and not be followed yet.
        let written = self.written.and_then(|written| written.bump);
        chosen.or_else(|| self.followed.or(written).map(|bump| (Some(bump), false)))
    }

    /// True if anything is known of it that stands in its mark.
    pub(crate) fn is_marked(&self) -> bool {
        self.handed.is_some() || self.written.is_some()
    }

    /// True if anything is known of it that does not outlive it.
    pub(crate) fn is_swept(&self) -> bool {
        self.is_marked() || self.plain.is_some()
    }

    /// Forgets that, but not what the kernel says.
    pub(crate) fn forget(&mut self) {
        (self.handed, self.written, self.plain) = (None, None, None);
        self.expected = None;
    }
}
