//! The field in fwmark and ctmark that dibs uses, and nothing beside it.
//!
//! From its lowest bit: the bump id (4 bits), OVERRIDE, LOCKED (docs/steering.md). With the default mask
//! `0x3f000000` the bump id is `0x0f000000`, OVERRIDE `0x10000000`, LOCKED `0x20000000`.

use dibs_settings::BumpId;
use serde::{Deserialize, Serialize};

/// Layout of the six bits of dibs in fwmark and ctmark. Every shift comes from the mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct MarkLayout {
    mask: u32,
}

/// The mask is not six adjacent bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("mark mask {0:#x} is not six adjacent bits, such as 0x3f000000")]
pub struct BadMask(pub u32);

impl TryFrom<u32> for MarkLayout {
    type Error = BadMask;

    fn try_from(mask: u32) -> Result<Self, BadMask> {
        Self::new(mask)
    }
}

impl From<MarkLayout> for u32 {
    fn from(marks: MarkLayout) -> Self {
        marks.mask
    }
}

impl MarkLayout {
    /// A layout in `mask`, which must be six adjacent bits.
    pub fn new(mask: u32) -> Result<Self, BadMask> {
        if mask != 0 && mask >> mask.trailing_zeros() == 0x3f {
            Ok(Self { mask })
        } else {
            Err(BadMask(mask))
        }
    }

    /// All six bits.
    pub fn mask(self) -> u32 {
        self.mask
    }

    /// The four bits of the bump id.
    pub fn bump_mask(self) -> u32 {
        0xf << self.shift()
    }

    /// Set in a ctmark by an explicit choice (`enable`, `disable`): class rules and following leave it alone.
    pub fn override_bit(self) -> u32 {
        0x10 << self.shift()
    }

    /// Set in a ctmark once the peer has confirmed a switch: plain packets of it are no longer accepted.
    pub fn locked_bit(self) -> u32 {
        0x20 << self.shift()
    }

    /// The mark of packets that take `bump`.
    pub fn bump(self, bump: BumpId) -> u32 {
        u32::from(bump.get()) << self.shift()
    }

    /// The mark of the daemon's own sockets (bump id 15), which are never steered.
    pub fn own(self) -> u32 {
        self.bump_mask()
    }

    /// Value that `enable` (a bump) and `disable` (none) write into a ctmark, and the bits that it replaces. LOCKED is
    /// not among them.
    pub fn choice(self, bump: Option<BumpId>) -> (u32, u32) {
        let value = self.override_bit() | bump.map_or(0, |bump| self.bump(bump));
        (value, self.override_bit() | self.bump_mask())
    }

    /// Value and mask that put a connection on `bump`. LOCKED is always among them: where it stayed from
    /// another bump, the connection would take nothing but by one that the far end may not be on.
    pub fn whole(self, bump: Option<BumpId>, chosen: bool, locked: bool) -> (u32, u32) {
        let bit = |set, bit| if set { bit } else { 0 };
        let value = bump.map_or(0, |bump| self.bump(bump))
            | bit(chosen, self.override_bit())
            | bit(locked && bump.is_some(), self.locked_bit());
        (value, self.mask)
    }

    /// The bump that `mark` names, if any.
    pub fn bump_of(self, mark: u32) -> Option<BumpId> {
        BumpId::new(((mark & self.bump_mask()) >> self.shift()) as u8)
    }

    fn shift(self) -> u32 {
        self.mask.trailing_zeros()
    }
}

impl Default for MarkLayout {
    fn default() -> Self {
        Self { mask: 0x3f00_0000 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_field_is_the_documented_one() {
        let marks = MarkLayout::default();
        assert_eq!(MarkLayout::new(0x3f00_0000), Ok(marks));
        assert_eq!(marks.bump_mask(), 0x0f00_0000);
        assert_eq!(marks.override_bit(), 0x1000_0000);
        assert_eq!(marks.locked_bit(), 0x2000_0000);
        assert_eq!(marks.own(), 0x0f00_0000);
        assert_eq!(marks.choice(None), (0x1000_0000, 0x1f00_0000));
        assert_eq!(marks.choice(BumpId::new(2)), (0x1200_0000, 0x1f00_0000));
    }

    /// A daemon that was killed between writing a choice down and unlocking the connection left LOCKED of
    /// the bump before in the mark of the new one.
    #[test]
    fn locked_does_not_outlive_a_change_of_bump() {
        let marks = MarkLayout::default();
        let set = |mark: u32, (value, mask): (u32, u32)| mark & !mask | value;
        let on_two = set(0x40, marks.whole(BumpId::new(2), false, true));
        assert_eq!(on_two, 0x2200_0040);
        let on_three = set(on_two, marks.whole(BumpId::new(3), true, false));
        assert_eq!(on_three, 0x1300_0040);
        assert_eq!(set(on_two, marks.whole(None, true, true)), 0x1000_0040);
    }

    #[test]
    fn shifts_follow_the_mask() {
        let marks = MarkLayout::new(0x3f).unwrap();
        let three = BumpId::new(3).unwrap();
        assert_eq!(marks.bump(three), 3);
        assert_eq!(marks.bump_of(0xffff_ff43), Some(three));
        assert_eq!(marks.bump_of(marks.own()), None);
        assert_eq!(
            MarkLayout::new(0xfc00_0000).unwrap().locked_bit(),
            0x8000_0000
        );
    }

    #[test]
    fn other_masks_are_refused() {
        for mask in [0, 0x1f, 0x7f, 0x3e00_0001, u32::MAX, 0xf800_0000] {
            assert_eq!(MarkLayout::new(mask), Err(BadMask(mask)));
        }
    }
}
