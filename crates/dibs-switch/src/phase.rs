//! Phase of a connection: what is under way with it.

use dibs_settings::BumpId;

use crate::conns::{Choice, Version};

/// Phase of a connection. What is under way with it comes from different hands, so each may be beside the others. A choice
/// stands above all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phase {
    /// The peer is asked for its part in this choice. Unless another one has taken its place meanwhile, it is not in force,
    /// and the kernel has not been told.
    asked: Option<Asked>,
    /// Choice that an earlier run did not bring to an end.
    cut_short: Option<CutShort>,
    /// The peer moves it by a choice that is not carried out: it is not saved, and the kernel does not know.
    arriving: bool,
    /// The peer moves it, and this host has not done its part.
    follows: bool,
    /// Move by no choice: the mark is ahead of our record, or behind it.
    moving: Option<Moving>,
    /// Move by no choice that a rule of the peer ended, or stands against: what the peer answers about it is from before.
    overruled: Option<Moving>,
    /// Move by no choice that the next one ended, before the peer had answered: what it answers may be from before, or after.
    overtaken: Option<Moving>,
    /// Another program chose this bump, which is in use, and we have not taken it up yet.
    awaited: Option<BumpId>,
}

/// Question about a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    version: Version,
    /// Choice that stood before.
    stood: Option<Choice>,
}

/// Choice that an earlier run of the daemon did not bring to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CutShort {
    choice: Choice,
    /// Version of the choice that stood before, if so: another one is later than this.
    stood: Option<Version>,
}

/// Move by no choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moving {
    /// The bump; none: to plain.
    pub bump: Option<BumpId>,
    /// A rule here has it go there. Otherwise the peer's word ends the move.
    pub ruled: bool,
}

impl Phase {
    /// Choice of which the peer is asked for its part.
    pub fn asked(&self) -> Option<Version> {
        self.asked.map(|asked| asked.version)
    }

    /// Choice that stood before the one of which the peer is asked for its part.
    pub fn stood(&self) -> Option<Choice> {
        self.asked.and_then(|asked| asked.stood)
    }

    /// The peer is asked for its part in a choice, before which that one `stood`.
    pub(crate) fn move_to_asked(&mut self, version: Version, stood: Option<Choice>) {
        self.asked = Some(Asked { version, stood });
    }

    /// An earlier run did not bring this choice to an end, before which that one `stood`.
    pub(crate) fn move_to_cut_short(&mut self, choice: Choice, stood: Option<Choice>) {
        let stood = stood.map(|stood| stood.version);
        self.cut_short = Some(CutShort { choice, stood });
    }

    /// True if an earlier run did not bring a choice to an end.
    pub(crate) fn is_cut_short(&self) -> bool {
        self.cut_short.is_some()
    }

    /// Generation of the choice that an earlier run did not bring to an end; 0 without one.
    pub(crate) fn cut_short_at(&self) -> u64 {
        self.cut_short
            .map_or(0, |cut| cut.choice.version.generation)
    }

    /// Gives up what an earlier run did not bring to an end.
    pub(crate) fn end_cut_short(&mut self) {
        self.cut_short = None;
    }

    /// Choice that an earlier run did not bring to an end, unless another one has been made since; what is known now: `known`.
    pub(crate) fn cut_short(&self, known: Option<Choice>) -> Option<Choice> {
        let known = known.map(|known| known.version);
        let cut = self.cut_short.filter(|cut| cut.stood == known);
        cut.map(|cut| cut.choice)
    }

    /// Takes [it](Self::cut_short).
    pub(crate) fn take_cut_short(&mut self, known: Option<Choice>) -> Option<Choice> {
        let choice = self.cut_short(known);
        self.end_cut_short();
        choice
    }

    /// The peer has answered, or told the choice back: then true.
    pub(crate) fn end_asked(&mut self, version: Version) -> bool {
        let asked = self.asked.take_if(|asked| asked.version == version);
        asked.is_some()
    }

    /// True if the peer moves it by a choice that is not carried out.
    pub(crate) fn is_arriving(&self) -> bool {
        self.arriving
    }

    /// The peer moves it, or the kernel knows.
    pub(crate) fn move_to_arriving(&mut self, arriving: bool) {
        self.arriving = arriving;
    }

    /// True if the peer moves it, and this host has not done its part.
    pub(crate) fn follows(&self) -> bool {
        self.follows
    }

    /// The peer moves it, or this host has done its part.
    pub(crate) fn move_to_following(&mut self, follows: bool) {
        self.follows = follows;
    }

    /// Move by no choice that is under way.
    pub fn moving(&self) -> Option<Moving> {
        self.moving
    }

    /// A move by no choice begins.
    pub(crate) fn move_to_moving(&mut self, moving: Moving) {
        self.overtaken = self.moving.filter(|it| *it != moving);
        self.moving = Some(moving);
        self.overruled = None;
    }

    /// A rule of the peer ends this move.
    pub(crate) fn overrule(&mut self, moving: Moving) {
        self.end_moving(moving);
        self.overruled = Some(moving);
    }

    /// A rule of the peer stands against the move that is under way, which goes on by one of this host.
    pub(crate) fn contradict(&mut self) {
        self.overruled = self.moving.or(self.overruled);
    }

    /// True if a rule of the peer ended this move, or stands against it.
    pub(crate) fn is_overruled(&self, moving: Moving) -> bool {
        self.overruled == Some(moving)
    }

    /// True if the next move ended this one.
    pub(crate) fn is_overtaken(&self, moving: Moving) -> bool {
        self.overtaken == Some(moving) && self.moving != Some(moving)
    }

    /// This move is over, if no other one has begun.
    pub(crate) fn end_moving(&mut self, moving: Moving) {
        self.moving = self.moving.filter(|it| *it != moving);
    }

    /// Bump that another program chose, and that we have not taken up.
    pub(crate) fn awaited(&self) -> Option<BumpId> {
        self.awaited
    }

    /// Another program chose this bump.
    pub(crate) fn move_to_awaited(&mut self, bump: Option<BumpId>) {
        self.awaited = bump;
    }

    /// Ends the wait for a choice of another program, which was taken up or was not; what it chose since still waits.
    pub(crate) fn end_awaited(&mut self, bump: Option<BumpId>) {
        self.awaited = self.awaited.filter(|awaited| Some(*awaited) != bump);
    }
}
