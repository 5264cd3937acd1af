//! The lowest smoothed round trip that has room.

use super::{Offer, Pick, Wanted, first};

pub(super) fn choose(offers: &[Offer], _: &Wanted) -> Pick {
    first(offers, |one| one.srtt).map_or(Pick::Wait, Pick::Take)
}
