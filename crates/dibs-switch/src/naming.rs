//! How two hosts make sure that they speak of one connection: each names the other's socket of it.
//!
//! A message may be on its way for long, and a connection end meanwhile and another one take its ends. Who has
//! another socket than the one named answers with its own, and does nothing.

use crate::conns::{Meant, Socket};
use crate::messages::{Answer, Outcome};
use crate::table::ConnTable;

/// One question about a connection, whatever is asked. It is asked [by name](ConnTable::named); once more where the
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

/// Step that is to be done for a [`Query`].
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

    /// Connection that it is about.
    pub fn conn(&self) -> Meant {
        self.conn
    }

    /// Step that is to be done next.
    pub fn next(&self) -> Next {
        match self.phase {
            Phase::Asked | Phase::AskedAgain => Next::Ask,
            Phase::Renamed(_) => Next::Look,
            Phase::Answered(_) => Next::Answered,
        }
    }

    /// Answer that came of it.
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

    /// Takes what a look at the kernel showed: if the connection is still there, the name that the peer gave its socket
    /// is its name.
    pub fn handle_look(&mut self, conns: &mut ConnTable, is_there: bool) {
        if let Phase::Renamed(theirs) = self.phase {
            self.phase = match is_there {
                true => Phase::AskedAgain,
                false => Phase::Answered(Ok((Outcome::NoConnection, 0))),
            };
            if is_there {
                let Meant { pair, socket } = self.conn;
                conns.update(&pair, |conn| conn.learn_name(socket, theirs));
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
    fn a_question_is_asked_once_more_by_the_right_name() {
        let conn = Meant {
            pair: pair(),
            socket: SOCKET,
        };
        let other = |name| Ok((Outcome::OtherSocket, name));
        let mut conns = ConnTable::default();
        let mut query = Query::new(conn);
        assert_eq!(query.next(), Next::Ask);
        query.handle_answer(other(5));
        assert_eq!(query.next(), Next::Look);
        let mut gone = query;
        gone.handle_look(&mut conns, false);
        assert_eq!(gone.answer(), Some(Ok((Outcome::NoConnection, 0))));
        assert_eq!(conns, ConnTable::default());
        query.handle_look(&mut conns, true);
        assert_eq!(
            (query.next(), conns.named(&conn).socket),
            (Next::Ask, Socket(5))
        );
        query.handle_answer(other(6));
        assert_eq!(query.answer(), Some(other(6)), "not for ever");

        let mut query = Query::new(conn);
        query.handle_answer(other(u64::MAX));
        assert_eq!(query.answer(), Some(other(u64::MAX)), "that is no name");
    }
}
