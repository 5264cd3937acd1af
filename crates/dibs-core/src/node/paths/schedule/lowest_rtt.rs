//! The lowest smoothed round trip that has room.

use super::Candidate;
use crate::node::paths::Link;

pub(super) fn choose<'a>(links: &[Link], candidates: &'a [Candidate]) -> Option<&'a Candidate> {
    let ready = candidates.iter().filter(|one| one.budget > 0);
    ready.min_by_key(|one| (one.avoided, one.secondary, links[one.link].path.srtt()))
}
