//! How two hosts make sure that they speak of one connection: each names the other's socket of it.
//!
//! A message may be on its way for long, and a connection end meanwhile and another one take its ends. Who has
//! another socket than the one named answers with its own, and does nothing.

use std::collections::BTreeMap;

use crate::asking::Answer;
use crate::conns::{Pair, Socket};
use crate::messages::{Named, Outcome};

/// A connection that something is to be done with: this one, and no later one of the same ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meant {
    /// Its ends.
    pub pair: Pair,
    /// Its socket here.
    pub socket: Socket,
}

/// How the other ends name their sockets of our connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names(BTreeMap<Pair, (Socket, Socket)>);

impl Names {
    /// The other end's socket of the connection that has the socket `own` here, or
    /// [`UNKNOWN`](Socket::UNKNOWN).
    pub fn get(&self, pair: &Pair, own: Socket) -> Socket {
        let known = self.0.get(pair).filter(|(of, _)| *of == own);
        known.map_or(Socket::UNKNOWN, |(_, theirs)| *theirs)
    }

    /// How a question names a connection.
    pub fn name(&self, conn: &Meant) -> Named {
        Named {
            pair: conn.pair,
            socket: self.get(&conn.pair, conn.socket),
        }
    }

    /// The other end named its socket `theirs` while this connection had the socket `own` here.
    pub fn learn(&mut self, pair: Pair, own: Socket, theirs: Socket) {
        self.0.insert(pair, (own, theirs));
    }

    /// Whether no name is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets the connections that are gone.
    pub fn sweep(&mut self, lives: impl Fn(&Pair, Socket) -> bool) {
        self.0.retain(|pair, (own, _)| lives(pair, *own));
    }
}

/// One question about a connection, whatever is asked. It is asked [by name](Names::name); once more where the
/// peer has another one, if the connection here is still the one that is meant: both sockets were there when
/// the answer was made, so they are the two ends of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    conn: Meant,
    phase: Phase,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Asked,
    /// The peer has this socket, and not the one named.
    Renamed(Socket),
    AskedAgain,
    Answered(Answer),
}

/// What is to be done for a [`Query`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The peer is to be asked.
    Ask,
    /// It is to be found out whether the connection is still there.
    Look,
    /// Nothing: it has its [answer](Query::answer).
    Answered,
}

impl Query {
    /// About this connection.
    pub fn new(conn: Meant) -> Self {
        let phase = Phase::Asked;
        Self { conn, phase }
    }

    /// What it is about.
    pub fn conn(&self) -> Meant {
        self.conn
    }

    /// What is to be done next.
    pub fn next(&self) -> Next {
        match self.phase {
            Phase::Asked | Phase::AskedAgain => Next::Ask,
            Phase::Renamed(_) => Next::Look,
            Phase::Answered(_) => Next::Answered,
        }
    }

    /// What came of it.
    pub fn answer(&self) -> Option<Answer> {
        match self.phase {
            Phase::Answered(answer) => Some(answer),
            _ => None,
        }
    }

    /// The peer has answered, or not.
    pub fn handle_answer(&mut self, answer: Answer) {
        let renamed = match answer {
            Ok((Outcome::OtherSocket, name)) => u32::try_from(name).ok().map(Socket),
            _ => None,
        };
        self.phase = match (self.phase, renamed) {
            (Phase::Asked, Some(theirs)) => Phase::Renamed(theirs),
            _ => Phase::Answered(answer),
        };
    }

    /// Whether the connection is still there; then the name that the peer gave its socket is its name.
    pub fn handle_look(&mut self, names: &mut Names, is_there: bool) {
        if let Phase::Renamed(theirs) = self.phase {
            self.phase = match is_there {
                true => Phase::AskedAgain,
                false => Phase::Answered(Ok((Outcome::NoConnection, 0))),
            };
            if is_there {
                names.learn(self.conn.pair, self.conn.socket, theirs);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::tests::pair;

    const SOCKET: Socket = Socket(77);

    #[test]
    fn a_name_holds_for_one_socket() {
        let mut names = Names::default();
        assert_eq!(names.get(&pair(), SOCKET), Socket::UNKNOWN);
        names.learn(pair(), SOCKET, Socket(5));
        assert_eq!(names.get(&pair(), SOCKET), Socket(5));
        assert_eq!(names.get(&pair(), Socket(78)), Socket::UNKNOWN);
        names.sweep(|_, socket| socket != SOCKET);
        assert_eq!(names, Names::default());
    }

    #[test]
    fn a_question_is_asked_once_more_by_the_right_name() {
        let conn = Meant {
            pair: pair(),
            socket: SOCKET,
        };
        let other = |name| Ok((Outcome::OtherSocket, name));
        let mut names = Names::default();
        let mut query = Query::new(conn);
        assert_eq!(query.next(), Next::Ask);
        query.handle_answer(other(5));
        assert_eq!(query.next(), Next::Look);
        let mut gone = query;
        gone.handle_look(&mut names, false);
        assert_eq!(gone.answer(), Some(Ok((Outcome::NoConnection, 0))));
        assert!(names.is_empty());
        query.handle_look(&mut names, true);
        assert_eq!(
            (query.next(), names.name(&conn).socket),
            (Next::Ask, Socket(5))
        );
        query.handle_answer(other(6));
        assert_eq!(query.answer(), Some(other(6)), "not for ever");

        let mut query = Query::new(conn);
        query.handle_answer(other(u64::MAX));
        assert_eq!(query.answer(), Some(other(u64::MAX)), "that is no name");
    }
}
