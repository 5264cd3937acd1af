//! In turn, those that have room.

use super::{Offer, Pick, Wanted, first};

pub(super) fn choose(offers: &[Offer], _: &Wanted) -> Pick {
    first(offers, |one| one.turn).map_or(Pick::Wait, Pick::Take)
}
