//! What was chosen for single connections, by their users here or at the other end.
//!
//! Each choice has a version, (generation, host); the higher wins wherever two meet, so that both ends
//! come to the same one however their messages cross (docs/switching.md).

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

/// An end of a TCP connection. Tables have thousands of them, and those of a [`SocketAddr`] would be half empty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "SocketAddr", into = "SocketAddr")]
pub struct End {
    ip: IpAddr,
    port: u16,
}

impl End {
    /// Its address.
    pub const fn ip(&self) -> IpAddr {
        self.ip
    }

    /// Its port.
    pub const fn port(&self) -> u16 {
        self.port
    }
}

impl From<SocketAddr> for End {
    fn from(end: SocketAddr) -> Self {
        (end.ip(), end.port()).into()
    }
}

impl From<(IpAddr, u16)> for End {
    fn from((ip, port): (IpAddr, u16)) -> Self {
        Self { ip, port }
    }
}

impl From<End> for (IpAddr, u16) {
    fn from(end: End) -> Self {
        (end.ip, end.port)
    }
}

impl From<End> for SocketAddr {
    fn from(end: End) -> Self {
        Self::new(end.ip, end.port)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::from(*self).fmt(f)
    }
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A TCP connection of this host, as it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Pair {
    /// This host's end.
    pub local: End,
    /// The far end.
    pub remote: End,
}

impl Pair {
    /// The same connection, as the other end sends.
    pub fn reversed(self) -> Self {
        Self {
            local: self.remote,
            remote: self.local,
        }
    }
}

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
    /// Who chose: the first bytes of the public key.
    pub host: u64,
}

/// What was chosen for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// The bump's number; 0 is plain.
    pub bump: u8,
    /// The connection's socket here: it does not stand for another one of the same ends.
    pub socket: Socket,
    /// Against other choices.
    pub version: Version,
    /// The peer has not answered yet, and the kernel has not been told.
    #[serde(skip)]
    pub pending: bool,
}

/// All choices that are in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choices {
    known: BTreeMap<Pair, Choice>,
    /// What is to stand by what came of a question about a choice in whose place another one had come: for the
    /// case that nothing comes of that one.
    overtaken: BTreeMap<Pair, (Version, Option<Choice>)>,
}

impl Choices {
    /// The choice for a connection.
    pub fn get(&self, pair: &Pair) -> Option<Choice> {
        self.known.get(pair).copied()
    }

    /// The choice for the connection that has this socket here.
    pub fn of(&self, pair: &Pair, socket: Socket) -> Option<Choice> {
        self.get(pair).filter(|choice| choice.socket == socket)
    }

    /// All of them, ordered.
    pub fn iter(&self) -> impl Iterator<Item = (Pair, Choice)> {
        self.known.iter().map(|(pair, choice)| (*pair, *choice))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether nothing was chosen.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Makes a choice of `host` that is later than what is known here, and later than generation
    /// `above`. It is pending. Returns it.
    pub fn propose(
        &mut self,
        pair: Pair,
        socket: Socket,
        bump: u8,
        host: u64,
        above: u64,
    ) -> Choice {
        let known = self.known.get(&pair).map_or(0, |c| c.version.generation);
        let choice = Choice {
            bump,
            socket,
            version: Version {
                generation: known.max(above).saturating_add(1),
                host,
            },
            pending: true,
        };
        self.known.insert(pair, choice);
        choice
    }

    /// Ends the wait for the peer, unless a later choice has come meanwhile: then false.
    pub fn settle(&mut self, pair: &Pair, version: Version) -> bool {
        match self.known.get_mut(pair) {
            Some(choice) if choice.version == version => {
                choice.pending = false;
                true
            }
            _ => false,
        }
    }

    /// Whether the choice `version` stands and waits for nobody: the peer agreed, or told it back, as a
    /// daemon does that restarted before its answer got here.
    pub fn is_settled(&self, pair: &Pair, version: Version) -> bool {
        let choice = self.known.get(pair);
        choice.is_some_and(|choice| choice.version == version && !choice.pending)
    }

    /// Takes the choice `version` back in favour of the one before, unless a later one has come or it
    /// is in force meanwhile.
    pub fn take_back(&mut self, pair: &Pair, version: Version, before: Option<Choice>) {
        if self
            .known
            .get(pair)
            .is_some_and(|choice| choice.version == version && choice.pending)
        {
            match before {
                Some(before) => self.known.insert(*pair, before),
                None => self.known.remove(pair),
            };
        }
    }

    /// Forgets the choice `version` that was in force, unless a later one has come: then false.
    pub fn give_up(&mut self, pair: &Pair, version: Version) -> bool {
        let stands = self.known.get(pair).is_some_and(|c| c.version == version);
        stands && self.known.remove(pair).is_some()
    }

    /// Takes a choice of the other end, if it is later; otherwise gives the one that stays.
    pub fn accept(
        &mut self,
        pair: Pair,
        socket: Socket,
        bump: u8,
        version: Version,
    ) -> Result<(), Choice> {
        match self.of(&pair, socket) {
            Some(known) if known.version > version => Err(known),
            // Said again.
            Some(known) if known.version == version && known.bump != bump => Err(known),
            _ => {
                let pending = false;
                self.known.insert(
                    pair,
                    Choice {
                        bump,
                        socket,
                        version,
                        pending,
                    },
                );
                Ok(())
            }
        }
    }

    /// Takes the other end's choice `version`, which could not be carried out, back in favour of the one before:
    /// the other end takes it back, too. False if another one stands by now.
    pub fn refuse(&mut self, pair: &Pair, version: Version, before: Option<Choice>) -> bool {
        let stands = self.get(pair).is_some_and(|c| c.version == version);
        if stands {
            let overtaken = self.overtaken.get(pair).copied();
            let is_over = |before: &Choice| {
                before.pending && overtaken.is_some_and(|(version, _)| version == before.version)
            };
            let before = match before {
                Some(before) if is_over(&before) => overtaken.and_then(|(_, instead)| instead),
                before => before,
            };
            match before {
                Some(before) => self.known.insert(*pair, before),
                None => self.known.remove(pair),
            };
        }
        stands
    }

    /// The question about the choice `version` is over, and another one has taken its place; `instead` would
    /// stand otherwise.
    pub(crate) fn overtake(&mut self, pair: Pair, version: Version, instead: Option<Choice>) {
        if self.known.contains_key(&pair) {
            self.overtaken.insert(pair, (version, instead));
        }
    }

    /// The connection of these ends has another name now, and is the same.
    pub fn rename(&mut self, pair: &Pair, socket: Socket) {
        if let Some(choice) = self.known.get_mut(pair) {
            choice.socket = socket;
        }
    }

    /// Puts back what was saved.
    pub fn restore(&mut self, pair: Pair, choice: Choice) {
        self.known.insert(pair, choice);
    }

    /// Forgets the choices for connections that are gone; returns them.
    pub fn sweep(&mut self, lives: impl Fn(&Pair, Socket) -> bool) -> Vec<Pair> {
        let gone = self.iter().filter(|(pair, c)| !lives(pair, c.socket));
        let gone: Vec<Pair> = gone.map(|(pair, _)| pair).collect();
        for pair in &gone {
            self.known.remove(pair);
        }
        let known = &self.known;
        self.overtaken.retain(|pair, _| known.contains_key(pair));
        gone
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    const SOCKET: Socket = Socket(77);

    pub(crate) fn pair() -> Pair {
        Pair {
            local: (IpAddr::from([10, 0, 1, 1]), 40000).into(),
            remote: (IpAddr::from([10, 0, 1, 2]), 80).into(),
        }
    }

    #[test]
    fn only_the_choice_that_was_refused_is_given_up() {
        let mut choices = Choices::default();
        let first = choices.propose(pair(), SOCKET, 0, 7, 0);
        assert!(choices.settle(&pair(), first.version));
        let later = choices.propose(pair(), SOCKET, 1, 7, 0);
        assert!(!choices.give_up(&pair(), first.version));
        assert_eq!(choices.get(&pair()), Some(later));
        assert!(choices.give_up(&pair(), later.version) && choices.is_empty());
    }

    /// Another connection has taken the ports before the choice was forgotten.
    #[test]
    fn a_choice_does_not_stand_for_the_next_connection_of_the_same_ends() {
        let mut choices = Choices::default();
        let (next, version) = (Socket(78), Version::default());
        let first = choices.propose(pair(), SOCKET, 0, 7, 0);
        assert_eq!(choices.of(&pair(), SOCKET), Some(first));
        assert_eq!(choices.of(&pair(), next), None);
        assert_eq!(choices.accept(pair(), SOCKET, 1, version), Err(first));
        assert_eq!(choices.accept(pair(), next, 1, version), Ok(()));
        assert_eq!(choices.of(&pair(), next).map(|c| c.bump), Some(1));
        assert_eq!(choices.sweep(|_, socket| socket == SOCKET), [pair()]);
    }

    #[test]
    fn a_refused_choice_leaves_what_was_before() {
        let mut choices = Choices::default();
        let first = choices.propose(pair(), SOCKET, 1, 7, 0);
        choices.take_back(&pair(), first.version, None);
        assert!(choices.is_empty());

        let first = choices.propose(pair(), SOCKET, 1, 7, 0);
        assert!(choices.settle(&pair(), first.version));
        let settled = choices.get(&pair());
        let second = choices.propose(pair(), SOCKET, 0, 7, 0);
        assert_eq!(second.version.generation, 2);
        choices.take_back(&pair(), second.version, settled);
        assert_eq!(choices.get(&pair()), settled);
    }

    /// Both ends chose at once; the later one came here, the question about ours ended, and then that one could
    /// not be carried out.
    #[test]
    fn a_choice_that_was_overtaken_does_not_wait_for_ever() {
        for earlier in [false, true] {
            let mut choices = Choices::default();
            if earlier {
                let first = choices.propose(pair(), SOCKET, 1, 7, 0);
                choices.settle(&pair(), first.version);
            }
            let before = choices.get(&pair());
            let ours = choices.propose(pair(), SOCKET, 2, 7, 0);
            let generation = ours.version.generation;
            let theirs = |host| Version { generation, host };
            choices
                .accept(pair(), SOCKET, 0, theirs(8))
                .expect("it is later");
            // The question about ours goes on: whoever asks deals with it.
            let mut going = choices.clone();
            assert!(going.refuse(&pair(), theirs(8), Some(ours)));
            assert_eq!(going.get(&pair()), Some(ours));

            choices.overtake(pair(), ours.version, before);
            let mut later = choices.clone();
            later.accept(pair(), SOCKET, 3, theirs(9)).expect("later");
            assert!(!later.refuse(&pair(), theirs(8), Some(ours)));
            assert_eq!(later.get(&pair()).map(|c| c.bump), Some(3));

            assert!(choices.refuse(&pair(), theirs(8), Some(ours)));
            assert_eq!(choices.get(&pair()), before, "{earlier}");
        }
    }

    #[test]
    fn a_later_choice_is_not_taken_back() {
        let mut choices = Choices::default();
        let ours = choices.propose(pair(), SOCKET, 1, 7, 0);
        let theirs = Version {
            generation: 1,
            host: 8,
        };
        assert_eq!(choices.accept(pair(), SOCKET, 0, theirs), Ok(()));
        choices.take_back(&pair(), ours.version, None);
        assert!(!choices.settle(&pair(), ours.version));
        assert_eq!(choices.get(&pair()).map(|c| c.version), Some(theirs));
    }

    /// The peer accepted, restarted, and told it back; then the question came again, and found the
    /// connection gone.
    #[test]
    fn a_choice_that_was_told_back_is_not_taken_back() {
        let mut choices = Choices::default();
        let first = choices.propose(pair(), SOCKET, 1, 7, 0);
        assert!(choices.settle(&pair(), first.version));
        let before = choices.get(&pair());
        let ours = choices.propose(pair(), SOCKET, 0, 7, 0);
        assert!(!choices.is_settled(&pair(), ours.version));
        assert_eq!(choices.accept(pair(), SOCKET, 0, ours.version), Ok(()));
        assert!(choices.is_settled(&pair(), ours.version));
        choices.take_back(&pair(), ours.version, before);
        assert_eq!(choices.get(&pair()).map(|c| c.version), Some(ours.version));
    }

    proptest! {
        /// Two ends choose at any time; each choice arrives once, whenever. Both end up the same.
        #[test]
        fn ends_converge(steps in proptest::collection::vec((any::<bool>(), 0u8..3, any::<usize>()), 1..24)) {
            let mut ends = [Choices::default(), Choices::default()];
            let mut wire: Vec<(usize, u8, Version)> = Vec::new();
            for (second, bump, deliver) in steps {
                let from = usize::from(second);
                let choice = ends[from].propose(pair(), SOCKET, bump, from as u64, 0);
                ends[from].settle(&pair(), choice.version);
                wire.push((1 - from, bump, choice.version));
                if deliver % 2 == 0 {
                    let (to, bump, version) = wire.swap_remove(deliver / 2 % wire.len());
                    let _ = ends[to].accept(pair(), SOCKET, bump, version);
                }
            }
            for (to, bump, version) in wire.into_iter().rev() {
                let _ = ends[to].accept(pair(), SOCKET, bump, version);
            }
            prop_assert_eq!(ends[0].get(&pair()), ends[1].get(&pair()));
        }
    }
}
