//! What was chosen for single connections, by their users here or at the other end.
//!
//! Each choice has a version, (generation, host); the higher wins wherever two meet, so that both ends
//! come to the same one however their messages cross (docs/switching.md).

use dibs_settings::BumpId;
use dibs_wire::FlowKey;
use serde::{Deserialize, Serialize};

/// A socket of one host, by a number that no other of its sockets has: connections that have the same
/// ends one after the other have different sockets. To the other host it is only a name.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Socket(pub u32);

impl Socket {
    /// The other host has not named it yet.
    pub const UNKNOWN: Self = Self(0);
}

/// Which of two choices is the later one: ordered by generation, then by host.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Version {
    /// Grows with each choice for the connection.
    pub generation: u64,
    /// Host that chose: the first bytes of its public key.
    pub host: u64,
}

/// Number of a host in versions, the first bytes of its public key: another one than any other host's, but for one
/// chance in 2^64.
pub fn host_id(key: &[u8; 32]) -> u64 {
    let (first, _) = key.split_first_chunk().expect("32 bytes");
    u64::from_be_bytes(*first)
}

/// Choice for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// The bump; none: plain.
    #[serde(with = "number")]
    pub bump: Option<BumpId>,
    /// The connection's socket here: it does not stand for another one of the same ends.
    pub socket: Socket,
    /// Against other choices.
    pub version: Version,
}

/// A connection that something is to be done with: this one, and no later one of the same ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Meant {
    /// Its ends.
    pub pair: FlowKey,
    /// Its socket here.
    pub socket: Socket,
}

/// Choice for a connection, if there is one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    known: Option<Choice>,
    /// What is to stand by what came of a question about a choice in whose place another one had come: for the
    /// case that nothing comes of that one.
    overtaken: Option<Box<(Version, Option<Choice>)>>,
}

impl Chosen {
    /// The choice.
    pub fn get(&self) -> Option<Choice> {
        self.known
    }

    /// The choice, if it is for this socket here.
    pub fn of(&self, socket: Socket) -> Option<Choice> {
        self.known.filter(|choice| choice.socket == socket)
    }

    fn put(&mut self, choice: Option<Choice>) {
        self.known = choice;
        self.overtaken = self.overtaken.take().filter(|_| choice.is_some());
    }

    /// Makes a choice of `host` that is later than what is known here, and later than generation
    /// `above`. Returns it.
    pub fn propose(
        &mut self,
        socket: Socket,
        bump: Option<BumpId>,
        host: u64,
        above: u64,
    ) -> Choice {
        let known = self.known.map_or(0, |choice| choice.version.generation);
        let generation = known.max(above).saturating_add(1);
        let choice = Choice {
            bump,
            socket,
            version: Version { generation, host },
        };
        self.put(Some(choice));
        choice
    }

    /// Takes the choice `version` back in favour of the one before, unless a later one has come: then false. If the question
    /// about the one before has ended meanwhile, what came of that stands.
    pub fn take_back(&mut self, version: Version, before: Option<Choice>) -> bool {
        let stands = self.known.is_some_and(|choice| choice.version == version);
        if stands {
            let over = self.overtaken.as_deref();
            let over = over.filter(|(of, _)| before.is_some_and(|before| before.version == *of));
            self.put(over.map_or(before, |(_, instead)| *instead));
        }
        stands
    }

    /// Takes a choice of the other end, if it is later; otherwise gives the one that stays.
    pub fn accept(
        &mut self,
        socket: Socket,
        bump: Option<BumpId>,
        version: Version,
    ) -> Result<(), Choice> {
        match self.of(socket) {
            Some(known) if known.version > version => Err(known),
            // Said again.
            Some(known) if known.version == version && known.bump != bump => Err(known),
            _ => {
                self.put(Some(Choice {
                    bump,
                    socket,
                    version,
                }));
                Ok(())
            }
        }
    }

    /// The question about the choice `version` is over, and another one has taken its place; `instead` would
    /// stand otherwise.
    pub(crate) fn overtake(&mut self, version: Version, instead: Option<Choice>) {
        if self.known.is_some() {
            self.overtaken = Some(Box::new((version, instead)));
        }
    }

    /// The connection has another name now, and is the same.
    pub fn rename(&mut self, socket: Socket) {
        if let Some(choice) = &mut self.known {
            choice.socket = socket;
        }
    }

    /// Puts back what was saved.
    pub fn restore(&mut self, choice: Choice) {
        self.put(Some(choice));
    }
}

/// A bump as a number, 0 for none.
mod number {
    use dibs_settings::BumpId;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        bump: &Option<BumpId>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        bump.map_or(0, BumpId::get).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<BumpId>, D::Error> {
        match u8::deserialize(deserializer)? {
            0 => Ok(None),
            number => match BumpId::new(number) {
                Some(bump) => Ok(Some(bump)),
                None => Err(serde::de::Error::custom(format!("no bump is {number}"))),
            },
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    const SOCKET: Socket = Socket(77);

    /// A bump.
    pub(crate) fn bump(number: u8) -> BumpId {
        BumpId::new(number).expect("a number of a bump")
    }

    pub(crate) fn pair() -> FlowKey {
        FlowKey::tcp(([10, 0, 1, 1], 40000), ([10, 0, 1, 2], 80))
    }

    #[test]
    fn only_the_choice_that_was_refused_is_given_up() {
        let mut chosen = Chosen::default();
        let first = chosen.propose(SOCKET, None, 7, 0);
        let later = chosen.propose(SOCKET, BumpId::new(1), 7, 0);
        assert!(!chosen.take_back(first.version, None));
        assert_eq!(chosen.get(), Some(later));
        assert!(chosen.take_back(later.version, None) && chosen.get().is_none());
    }

    /// Another connection has taken the ports before the choice was forgotten.
    #[test]
    fn a_choice_does_not_stand_for_the_next_connection_of_the_same_ends() {
        let mut chosen = Chosen::default();
        let (next, version) = (Socket(78), Version::default());
        let first = chosen.propose(SOCKET, None, 7, 0);
        assert_eq!(chosen.of(SOCKET), Some(first));
        assert_eq!(chosen.of(next), None);
        assert_eq!(chosen.accept(SOCKET, BumpId::new(1), version), Err(first));
        assert_eq!(chosen.accept(next, BumpId::new(1), version), Ok(()));
        assert_eq!(chosen.of(next).and_then(|c| c.bump), BumpId::new(1));
    }

    #[test]
    fn a_refused_choice_leaves_what_was_before() {
        let mut chosen = Chosen::default();
        let first = chosen.propose(SOCKET, BumpId::new(1), 7, 0);
        chosen.take_back(first.version, None);
        assert!(chosen.get().is_none());

        chosen.propose(SOCKET, BumpId::new(1), 7, 0);
        let settled = chosen.get();
        let second = chosen.propose(SOCKET, None, 7, 0);
        assert_eq!(second.version.generation, 2);
        chosen.take_back(second.version, settled);
        assert_eq!(chosen.get(), settled);
    }

    /// Both ends chose at once; the later one came here, the question about ours ended, and then that one could
    /// not be carried out.
    #[test]
    fn a_choice_that_was_overtaken_does_not_wait_for_ever() {
        for earlier in [false, true] {
            let mut chosen = Chosen::default();
            if earlier {
                chosen.propose(SOCKET, BumpId::new(1), 7, 0);
            }
            let before = chosen.get();
            let ours = chosen.propose(SOCKET, BumpId::new(2), 7, 0);
            let generation = ours.version.generation;
            let theirs = |host| Version { generation, host };
            chosen.accept(SOCKET, None, theirs(8)).expect("it is later");
            // The question about ours goes on: whoever asks deals with it.
            let mut going = chosen.clone();
            assert!(going.take_back(theirs(8), Some(ours)));
            assert_eq!(going.get(), Some(ours));

            chosen.overtake(ours.version, before);
            let mut later = chosen.clone();
            later
                .accept(SOCKET, BumpId::new(3), theirs(9))
                .expect("later");
            assert!(!later.take_back(theirs(8), Some(ours)));
            assert_eq!(later.get().and_then(|c| c.bump), BumpId::new(3));

            assert!(chosen.take_back(theirs(8), Some(ours)));
            assert_eq!(chosen.get(), before, "{earlier}");
        }
    }

    #[test]
    fn a_later_choice_is_not_taken_back() {
        let mut chosen = Chosen::default();
        let ours = chosen.propose(SOCKET, BumpId::new(1), 7, 0);
        let theirs = Version {
            generation: 1,
            host: 8,
        };
        assert_eq!(chosen.accept(SOCKET, None, theirs), Ok(()));
        assert!(!chosen.take_back(ours.version, None));
        assert_eq!(chosen.get().map(|c| c.version), Some(theirs));
    }

    proptest! {
        /// Two ends choose at any time; each choice arrives once, whenever. Both end up the same.
        #[test]
        fn ends_converge(steps in proptest::collection::vec((any::<bool>(), 0u8..3, any::<usize>()), 1..24)) {
            let mut ends = [Chosen::default(), Chosen::default()];
            let mut wire: Vec<(usize, u8, Version)> = Vec::new();
            for (second, bump, deliver) in steps {
                let from = usize::from(second);
                let choice = ends[from].propose(SOCKET, BumpId::new(bump), from as u64, 0);
                wire.push((1 - from, bump, choice.version));
                if deliver % 2 == 0 {
                    let (to, bump, version) = wire.swap_remove(deliver / 2 % wire.len());
                    let _ = ends[to].accept(SOCKET, BumpId::new(bump), version);
                }
            }
            for (to, bump, version) in wire.into_iter().rev() {
                let _ = ends[to].accept(SOCKET, BumpId::new(bump), version);
            }
            prop_assert_eq!(ends[0].get(), ends[1].get());
        }
    }
}
