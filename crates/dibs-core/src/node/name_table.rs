//! Names of connections that the peer calls otherwise ([`names`](super::names)): its name by ours, and ours by its.
//!
//! Names end with what is known of their connections, but for two kinds. Those that were matched last until the owner says that
//! they are over. And those with another port than at the peer last: which of two connections has the port that both have there
//! is known nowhere else.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;

use dibs_wire::FlowKey;

/// Connections of a peer that may have another port than there, at most; of more, the earliest end with what is known of them.
pub const MAX_MOVED: usize = 256;

/// A connection that has another port here than at the peer, because two of the peer's addresses use that one. Both names are as the
/// local host sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovedPort {
    /// Name here.
    pub ours: FlowKey,
    /// Name at the peer.
    pub theirs: FlowKey,
}

/// Name of a connection at the peer.
#[derive(Clone, Copy)]
struct Name {
    theirs: FlowKey,
    kind: Kind,
}

/// Kinds of names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Another address stands for the peer's.
    Translated,
    /// The port is another one, too.
    Moved,
    /// The connection began in plain: it has this name whether it is on a bump or not.
    Matched,
}

/// See the module.
pub(super) struct Names<S> {
    theirs: HashMap<FlowKey, Name, S>,
    ours: HashMap<FlowKey, FlowKey, S>,
    /// Number of those that were matched.
    matched: usize,
    /// Connections with another port, the earliest first.
    moved: VecDeque<FlowKey>,
    /// These are others than the owner was told.
    is_news: bool,
}

impl<S: BuildHasher + Clone> Names<S> {
    pub(super) fn new(hashing: S) -> Self {
        Self {
            theirs: HashMap::with_hasher(hashing.clone()),
            ours: HashMap::with_hasher(hashing),
            matched: 0,
            moved: VecDeque::new(),
            is_news: false,
        }
    }

    /// Name here of the connection that the peer calls `theirs`, if that is another one.
    pub(super) fn ours_of(&self, theirs: &FlowKey) -> Option<FlowKey> {
        self.ours.get(theirs).copied()
    }

    /// Name at the peer of the connection `ours`, if that is another one.
    pub(super) fn theirs_of(&self, ours: &FlowKey) -> Option<FlowKey> {
        if self.theirs.is_empty() {
            return None;
        }
        self.theirs.get(ours).map(|name| name.theirs)
    }

    /// True if the connection `ours` was matched to one of the peer.
    pub(super) fn is_matched(&self, ours: &FlowKey) -> bool {
        self.matched != 0
            && self
                .theirs
                .get(ours)
                .is_some_and(|name| name.kind == Kind::Matched)
    }

    /// Notes that the peer calls the connection `ours` otherwise. Returns one whose name ends with it from now on, if there are too many
    /// with other ports.
    pub(super) fn note_seen(&mut self, ours: FlowKey, theirs: FlowKey) -> Option<FlowKey> {
        let known = self.theirs.get(&ours);
        if known.is_some_and(|name| name.theirs == theirs || name.kind == Kind::Matched) {
            return None;
        }
        if ours.dport == theirs.dport {
            self.note(ours, theirs, Kind::Translated);
            return None;
        }
        self.note(ours, theirs, Kind::Moved);
        self.moved.push_back(ours);
        self.is_news = true;
        if self.moved.len() <= MAX_MOVED {
            return None;
        }
        let earliest = self.moved.pop_front()?;
        self.theirs.get_mut(&earliest)?.kind = Kind::Translated;
        Some(earliest)
    }

    /// Notes that the connection `ours` is the one that the peer calls `theirs`.
    pub(super) fn note_matched(&mut self, ours: FlowKey, theirs: FlowKey) {
        self.note(ours, theirs, Kind::Matched);
        self.matched += 1;
    }

    fn note(&mut self, ours: FlowKey, theirs: FlowKey, kind: Kind) {
        self.forget(&ours);
        if let Some(other) = self.ours.get(&theirs).copied() {
            self.forget(&other);
        }
        self.theirs.insert(ours, Name { theirs, kind });
        self.ours.insert(theirs, ours);
    }

    /// Notes that no more is known of a connection than its name, which ends with it unless it is of a kind that lasts.
    pub(super) fn note_end(&mut self, ours: &FlowKey) {
        let known = self.theirs.get(ours);
        if known.is_some_and(|name| name.kind == Kind::Translated) {
            self.forget(ours);
        }
    }

    pub(super) fn forget(&mut self, ours: &FlowKey) {
        let Some(name) = self.theirs.remove(ours) else {
            return;
        };
        self.ours.remove(&name.theirs);
        match name.kind {
            Kind::Translated => {}
            Kind::Moved => {
                self.moved.retain(|moved| moved != ours);
                self.is_news = true;
            }
            Kind::Matched => self.matched -= 1,
        }
    }

    /// All connections with other ports, if they are others than before.
    pub(super) fn poll_moved(&mut self) -> Option<Vec<MovedPort>> {
        if !std::mem::take(&mut self.is_news) {
            return None;
        }
        let named = self.moved.iter().map(|ours| MovedPort {
            ours: *ours,
            theirs: self.theirs[ours].theirs,
        });
        Some(named.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::hash_map::RandomState;

    use super::*;

    /// Connection number `number`, as it is called here and there.
    fn conn(number: u16) -> [FlowKey; 2] {
        let ours = FlowKey::tcp(([192, 0, 2, 80], 443), ([10, 77, 0, 2], 1024 + number));
        let device = [192, 168, (number >> 8) as u8, number as u8];
        [ours, FlowKey::tcp(([192, 0, 2, 80], 443), (device, 40_000))]
    }

    #[test]
    fn another_port_outlives_what_is_known_of_its_connection_and_is_told_once() {
        let mut names = Names::new(RandomState::new());
        let [ours, theirs] = conn(0);
        assert_eq!(names.note_seen(ours, theirs), None);
        let told = MovedPort { ours, theirs };
        assert_eq!(names.poll_moved(), Some(vec![told]));
        names.note_end(&ours);
        assert_eq!(names.note_seen(ours, theirs), None);
        assert_eq!(names.poll_moved(), None);
        assert_eq!(names.ours_of(&theirs), Some(ours));
        // The port is another connection's from now on.
        names.note_matched(ours, conn(1)[1]);
        assert_eq!(names.poll_moved(), Some(Vec::new()));
        assert_eq!(names.ours_of(&theirs), None);
    }

    #[test]
    fn a_name_with_the_same_port_ends_with_its_connection() {
        let mut names = Names::new(RandomState::new());
        let [ours, mut theirs] = conn(0);
        theirs.dport = ours.dport;
        names.note_seen(ours, theirs);
        names.note_end(&ours);
        assert_eq!(names.ours_of(&theirs), None);
        assert_eq!(names.poll_moved(), None);
    }

    #[test]
    fn of_too_many_other_ports_the_earliest_end_with_their_connections() {
        let mut names = Names::new(RandomState::new());
        let last = MAX_MOVED as u16;
        for number in 0..last {
            let [ours, theirs] = conn(number);
            assert_eq!(names.note_seen(ours, theirs), None);
        }
        let [ours, theirs] = conn(last);
        let [earliest, called] = conn(0);
        assert_eq!(names.note_seen(ours, theirs), Some(earliest));
        assert_eq!(names.ours_of(&called), Some(earliest));
        names.note_end(&earliest);
        assert_eq!(names.ours_of(&called), None);
        assert_eq!(names.poll_moved().map(|all| all.len()), Some(MAX_MOVED));
    }
}
