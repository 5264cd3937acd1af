//! Which versions the other end of a connection, or a file, may name. Whoever names a version stands until somebody
//! names a later one; so nobody may name one above which there is no room.

use crate::conns::{Chosen, Socket, Version};

/// How far the generation of a choice may lie above what is known of its connection, at most: it grows by one
/// with each choice, and an end that has lost its state knows of none. A peer that goes up by as much
/// forty thousand times a second, which no daemon takes, needs thirteen years to the end of all generations.
pub const MAX_AHEAD: u64 = 1 << 20;

/// The highest generation that a file may hold: no run of choices got there.
const HIGHEST_SAVED: u64 = 1 << 63;

/// The two hosts that choose for a connection.
#[derive(Clone, Copy, Debug)]
pub struct Hosts {
    /// This one.
    pub own: u64,
    /// The one at the other end.
    pub peer: u64,
}

/// Why nobody can have made a choice of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Implausible {
    /// Its generation is too high.
    #[error("an impossible version number")]
    Generation,
    /// It names a host that has nothing to choose.
    #[error("a host that may not choose")]
    Host,
}

impl Chosen {
    /// Gives a choice out of a file, of the host `own`, that nobody can have made a version of that host, which can be
    /// overruled: to forget it would let its connection out of its bump. Returns why. `peers` are all that may have
    /// chosen beside it.
    pub fn make_plausible(&mut self, own: u64, peers: &[u64]) -> Option<Implausible> {
        let mut choice = self.get()?;
        let Version { generation, host } = choice.version;
        let (why, generation) = if generation > HIGHEST_SAVED {
            (Implausible::Generation, 1)
        } else if host != own && !peers.contains(&host) {
            (Implausible::Host, generation + 1)
        } else {
            return None;
        };
        let host = own;
        choice.version = Version { generation, host };
        self.restore(choice);
        Some(why)
    }

    /// True if the other end may name this generation for the connection that has this socket here.
    pub fn may_be(&self, socket: Socket, generation: u64) -> bool {
        let known = self.of(socket);
        let known = known.map_or(0, |choice| choice.version.generation);
        generation <= known.saturating_add(MAX_AHEAD)
    }

    /// Checks a version that the other end names for the connection that has this socket here.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, socket: Socket, version: Version, hosts: Hosts) -> Result<(), Implausible> {
        if ![hosts.own, hosts.peer].contains(&version.host) {
            return Err(Implausible::Host);
        }
        match self.may_be(socket, version.generation) {
            true => Ok(()),
            false => Err(Implausible::Generation),
        }
    }
}

#[cfg(test)]
mod tests {
    use dibs_settings::BumpId;

    use super::*;
    use crate::conns::Choice;

    const SOCKET: Socket = Socket(77);
    const HOSTS: Hosts = Hosts { own: 7, peer: 8 };

    fn version(generation: u64, host: u64) -> Version {
        Version { generation, host }
    }

    /// Takes a choice of the other end as a daemon does.
    fn take(chosen: &mut Chosen, number: u8, version: Version) -> Result<(), Implausible> {
        chosen.check(SOCKET, version, HOSTS)?;
        let taken = chosen.accept(SOCKET, BumpId::new(number), version);
        assert!(taken.is_ok(), "{version:?} is the latest");
        Ok(())
    }

    /// A peer that names the last of all generations is not heard; whatever it gets through with, this host's
    /// next choice is later, for both ends.
    #[test]
    fn every_choice_of_a_peer_can_be_overruled() {
        let mut chosen = Chosen::default();
        let refused = take(&mut chosen, 0, version(u64::MAX, HOSTS.peer));
        assert_eq!(refused, Err(Implausible::Generation));
        assert!(chosen.get().is_none());

        let mut highest = MAX_AHEAD;
        for _ in 0..1000 {
            let above = version(highest + 1, HOSTS.peer);
            assert_eq!(take(&mut chosen, 0, above), Err(Implausible::Generation));
            assert_eq!(take(&mut chosen, 0, version(highest, HOSTS.peer)), Ok(()));
            let ours = chosen.propose(SOCKET, BumpId::new(3), HOSTS.own, 0);
            assert!(ours.version > version(highest, HOSTS.peer));
            // And the peer's own daemon takes it, which knows no more than what it said.
            assert_eq!(ours.version.generation, highest + 1);
            highest = ours.version.generation + MAX_AHEAD;
        }
        assert!(highest < u64::MAX / 1_000_000);
    }

    #[test]
    fn only_the_two_ends_choose() {
        let mut chosen = Chosen::default();
        for (host, taken) in [(7, true), (8, true), (9, false), (u64::MAX, false)] {
            let next = chosen.get().map_or(0, |c| c.version.generation) + 1;
            let was = take(&mut chosen, 1, version(next, host));
            assert_eq!(was.is_ok(), taken, "host {host}: {was:?}");
        }
    }

    /// The first choice for the connection that has the same ends is near nothing again.
    #[test]
    fn what_is_known_of_one_connection_says_nothing_of_the_next() {
        let mut chosen = Chosen::default();
        take(&mut chosen, 1, version(MAX_AHEAD, 8)).expect("just near enough");
        assert!(chosen.may_be(SOCKET, MAX_AHEAD + 1));
        assert!(!chosen.may_be(Socket(78), MAX_AHEAD + 1));
    }

    #[test]
    fn a_saved_choice_keeps_its_bump_and_can_be_overruled() {
        let saved = |generation, host| {
            let mut chosen = Chosen::default();
            let choice = Choice {
                bump: BumpId::new(3),
                socket: SOCKET,
                version: version(generation, host),
            };
            chosen.restore(choice);
            let found = chosen.make_plausible(7, &[8, 9]);
            let stands = chosen.get().expect("it is not forgotten");
            assert_eq!((stands.bump, stands.socket), (BumpId::new(3), SOCKET));
            let later = chosen.propose(SOCKET, None, 7, 0).version;
            assert!(later > stands.version && later.generation < u64::MAX);
            (stands.version, found)
        };
        assert_eq!(saved(1 << 40, 7), (version(1 << 40, 7), None));
        assert_eq!(saved(3, 9), (version(3, 9), None));
        let generation = Some(Implausible::Generation);
        assert_eq!(saved(u64::MAX, 8), (version(1, 7), generation));
        assert_eq!(saved(u64::MAX, 5), (version(1, 7), generation));
        assert_eq!(saved(3, 5), (version(4, 7), Some(Implausible::Host)));
    }
}
