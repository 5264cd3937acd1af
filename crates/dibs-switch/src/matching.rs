//! Proof that a connection here is the one that a peer calls by other addresses, because a router between the two hosts
//! translates them (docs/nat.md).
//!
//! The connection is in plain. The host that asks has its kernel send an acknowledgement, which says where the connection
//! [stands](Stand), tells the peer those numbers by a MATCH, and repeats the acknowledgement in plain. The peer listens for these
//! numbers, from whatever address they come ([`Search`]). Then it has its own kernel say where the connection of these addresses stands.
//! If that [fits], the two are one. Nobody else can choose the numbers that the peer's kernel sends, so whoever copies the
//! acknowledgement under another source gets no match with a connection of theirs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dibs_wire::SeqNumber;
use dibs_wire::packet::{self, FlowKey, Packet, flags};

use crate::conns::Socket;
use crate::knock;
use crate::messages::Outcome;

/// Time for an acknowledgement to arrive.
pub const WITHIN: Duration = Duration::from_secs(2);
/// Time after the first arrival in which another address may show the same numbers.
pub const GRACE: Duration = Duration::from_millis(150);
/// Addresses that are looked at for one connection, at most.
const MOST_HEARD: usize = 4;
/// Bytes that may be sent and not acknowledged yet.
const WINDOW: i32 = 64 << 20;
/// Bytes that a kernel may have gone on by between the two acknowledgements.
const PROGRESS: i32 = 1 << 30;
/// The same, of a connection without time stamps.
const PROGRESS_UNSTAMPED: i32 = 1 << 20;
/// Time between the time stamp that the asking kernel has last seen and the one that the peer's kernel sends, of a connection whose
/// peer sends, in milliseconds as Linux counts them.
const FRESH: i32 = 20_000;

/// Name over the wire of a live connection that the two hosts call by different addresses; it was matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matched {
    /// The peer's index.
    pub peer: usize,
    /// Name there, as this host sends.
    pub theirs: FlowKey,
    /// The socket here.
    pub socket: Socket,
}

/// Socket here, and the bytes that its connection has carried each way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carrying {
    /// The socket.
    pub socket: Socket,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
}

/// State of a connection by the words of the kernel that has it: an acknowledgement without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stand {
    /// Number of the next byte that the kernel sends.
    pub seq: u32,
    /// Number of the next byte that it expects.
    pub ack: u32,
    /// TSval and TSecr, if the connection has time stamps.
    pub timestamps: Option<(u32, u32)>,
}

impl Stand {
    /// Connection, as its sender sends, and the stand, of an acknowledgement without data.
    pub fn read(bytes: &[u8]) -> Option<(FlowKey, Self)> {
        let Ok(Packet::Tcp(segment)) = packet::parse(bytes) else {
            return None;
        };
        let stand = Self {
            seq: segment.seq.raw(),
            ack: segment.ack.raw(),
            timestamps: segment.timestamps,
        };
        let is_empty = segment.flags == flags::ACK && segment.payload.is_empty();
        is_empty.then_some((segment.tuple, stand))
    }

    /// The acknowledgement that shows it to the peer: one byte behind, so that no kernel counts it as a repetition.
    pub fn shown(self) -> Self {
        let ack = self.ack.wrapping_sub(1);
        Self { ack, ..self }
    }

    /// The acknowledgement as a packet of the connection.
    pub fn packet(self, pair: &FlowKey) -> Vec<u8> {
        let numbers = (SeqNumber::new(self.seq), SeqNumber::new(self.ack));
        knock::acknowledgement(pair, numbers, self.timestamps)
    }
}

/// Packets that a kernel answers with where the connection `pair` stands, as its far end would send them. At least one of
/// them is outside the kernel's window, as no window is as long as the half of all numbers (RFC 9293, 3.10.7.4).
pub fn probes(pair: &FlowKey) -> [Vec<u8>; 2] {
    let none = SeqNumber::new(0);
    [0, 1 << 31]
        .map(|seq| knock::acknowledgement(&pair.reversed(), (SeqNumber::new(seq), none), None))
}

/// True if a connection that stands so at the asking end, and a moment later so here, is one.
///
/// The asking end's numbers are its word. What it cannot have from anybody but the kernel here is what that sends. A connection has
/// gone on since by no more than it ever carried: a copy of the acknowledgement under the name of another connection would
/// otherwise fit one time in fifteen.
pub fn fits(asking: &Stand, here: &Stand, carrying: &Carrying) -> bool {
    let ahead = |of: u32, than: u32| of.wrapping_sub(than) as i32;
    let (sent_there, sent_here) = (ahead(here.ack, asking.seq), ahead(here.seq, asking.ack));
    let stamps = here.timestamps.zip(asking.timestamps);
    if here.timestamps.is_some() != asking.timestamps.is_some() {
        return false;
    }
    let is_fresh = |((here, _), (_, echoed)): ((u32, u32), (u32, u32))| {
        (0..=FRESH).contains(&ahead(here, echoed))
    };
    let most = match stamps {
        // Nothing was sent since: to guess this number is to guess one of all.
        _ if sent_here == 0 => 0,
        Some(stamps) if is_fresh(stamps) => PROGRESS,
        Some(_) => return false,
        None => PROGRESS_UNSTAMPED,
    };
    // The ends of a stream have numbers, too.
    let at_most = |most: i32, carried: u64| {
        let carried = i64::try_from(carried.saturating_add(2));
        i64::from(most).min(carried.unwrap_or(i64::MAX))
    };
    (0..=at_most(most, carrying.sent)).contains(&i64::from(sent_here))
        && (-i64::from(WINDOW)..=at_most(PROGRESS, carrying.received))
            .contains(&i64::from(sent_there))
}

/// Search for the names here of connections that a peer shows.
#[derive(Debug)]
pub struct Search {
    /// The shown acknowledgements.
    shown: Vec<Stand>,
    /// Ends that showed the same, as this host sends, by index.
    heard: BTreeMap<usize, BTreeSet<FlowKey>>,
    /// Acknowledgements whose addresses found no room.
    left_out: u64,
    /// Connections of which something arrived with other numbers.
    renumbered: BTreeSet<usize>,
}

impl Search {
    /// Search for these acknowledgements.
    pub fn new(shown: Vec<Stand>) -> Self {
        Self {
            shown,
            heard: BTreeMap::new(),
            left_out: 0,
            renumbered: BTreeSet::new(),
        }
    }

    /// Takes an acknowledgement that came in, in plain, of the connection `pair` as its sender sends.
    pub fn handle_heard(&mut self, pair: FlowKey, stand: &Stand) {
        for (index, shown) in self.shown.iter().enumerate() {
            let same = [stand.seq == shown.seq, stand.ack == shown.ack];
            let tsval = |stand: &Stand| stand.timestamps.map(|(tsval, _)| tsval);
            if same == [true; 2] {
                let heard = self.heard.entry(index).or_default();
                if heard.len() < MOST_HEARD {
                    heard.insert(pair.reversed());
                } else if !heard.contains(&pair.reversed()) {
                    self.left_out += 1;
                }
            } else if same.contains(&true) || tsval(shown).is_some() && tsval(stand) == tsval(shown)
            {
                self.renumbered.insert(index);
            }
        }
    }

    /// True if each has shown itself.
    pub fn is_complete(&self) -> bool {
        self.heard.len() == self.shown.len()
    }

    /// All ends that showed one of the numbers, as this host sends.
    pub fn candidates(&self) -> BTreeSet<FlowKey> {
        self.heard.values().flatten().copied().collect()
    }

    /// Numbers of copies under other addresses that matched nothing: those without room, and addresses of others.
    pub fn copies(&self, names: &BTreeSet<FlowKey>) -> [u64; 2] {
        let others = self.candidates().difference(names).count();
        [self.left_out, others as u64]
    }

    /// The name here of the connection `index`, of those candidates that stand so by the words of the kernel here.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn name(
        &self,
        index: usize,
        asking: &Stand,
        here: &BTreeMap<FlowKey, (Stand, Carrying)>,
    ) -> Result<FlowKey, Outcome> {
        let Some(heard) = self.heard.get(&index) else {
            return Err(match self.renumbered.contains(&index) {
                true => Outcome::Renumbered,
                false => Outcome::NotHeard,
            });
        };
        let is_one = |pair: &&FlowKey| {
            let here = here.get(pair);
            here.is_some_and(|(stand, carrying)| fits(asking, stand, carrying))
        };
        let fitting: Vec<&FlowKey> = heard.iter().filter(is_one).collect();
        match fitting[..] {
            [pair] => Ok(*pair),
            [] if heard.iter().any(|pair| here.contains_key(pair)) => Err(Outcome::Renumbered),
            [] => Err(Outcome::NoConnection),
            _ => Err(Outcome::Ambiguous),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::tests::pair;

    const ASKING: Stand = Stand {
        seq: 1000,
        ack: 77_000,
        timestamps: Some((500, 90_000)),
    };
    const HERE: Stand = Stand {
        seq: 77_000,
        ack: 1000,
        timestamps: Some((95_000, 480)),
    };

    const LARGE: Carrying = Carrying {
        socket: Socket(7),
        sent: 1 << 32,
        received: 1 << 32,
    };

    fn fits(asking: &Stand, here: &Stand) -> bool {
        super::fits(asking, here, &LARGE)
    }

    /// A small one, and the shown acknowledgement under its name.
    #[test]
    fn a_connection_has_not_gone_on_by_more_than_it_carried() {
        let small = Carrying {
            sent: 5000,
            received: 300,
            ..LARGE
        };
        let fits = |seq, ack| super::fits(&ASKING, &Stand { seq, ack, ..HERE }, &small);
        assert!(fits(82_000, 1300) && fits(77_000, 900));
        assert!(!fits(83_000, 1300) && !fits(82_000, 1400));
        let unknown = Carrying {
            sent: u64::MAX,
            received: u64::MAX,
            ..LARGE
        };
        assert!(super::fits(&ASKING, &HERE, &unknown));
    }

    #[test]
    fn two_ends_fit_that_have_what_the_other_sent() {
        assert!(fits(&ASKING, &HERE));
        let further = |seq, ack| Stand { seq, ack, ..HERE };
        for (here, fit) in [
            (further(77_000, 900), true),
            (further(900_000, 5000), true),
            (further(76_999, 1000), false),
            (further(77_000 + (1 << 31), 1000), false),
            (further(77_000, 1000 + (1 << 31)), false),
        ] {
            assert_eq!(fits(&ASKING, &here), fit, "{here:?}");
        }
        // What sends has sent lately; what does not may have been silent for days.
        let late = Stand {
            timestamps: Some((9_000_000, 480)),
            ..HERE
        };
        assert!(fits(&ASKING, &late));
        assert!(!fits(
            &ASKING,
            &Stand {
                seq: 77_001,
                ..late
            }
        ));
    }

    #[test]
    fn without_time_stamps_less_progress_is_believed() {
        let bare = |stand| Stand {
            timestamps: None,
            ..stand
        };
        let (asking, here) = (bare(ASKING), bare(HERE));
        assert!(fits(&asking, &here));
        assert!(!fits(&asking, &HERE) && !fits(&ASKING, &here));
        let seq = here.seq + (1 << 20) + 1;
        assert!(!fits(&asking, &Stand { seq, ..here }));
    }

    /// Somebody copies the acknowledgement under their own source, and has a connection of their own there.
    #[test]
    fn a_copy_under_another_source_matches_nothing() {
        let other = FlowKey {
            sport: 9,
            ..pair().reversed()
        };
        let mut search = Search::new(vec![ASKING.shown()]);
        search.handle_heard(other, &ASKING.shown());
        let (own, others) = (pair(), other.reversed());
        let strange = Stand {
            seq: 4_000_000_000,
            ..HERE
        };
        let name = |search: &Search, here: &[(FlowKey, Stand)]| {
            let here = here.iter().map(|(pair, stand)| (*pair, (*stand, LARGE)));
            search.name(0, &ASKING, &here.collect())
        };
        assert_eq!(
            name(&search, &[(others, strange)]),
            Err(Outcome::Renumbered)
        );
        assert_eq!(name(&search, &[]), Err(Outcome::NoConnection));
        search.handle_heard(own.reversed(), &ASKING.shown());
        assert_eq!(search.candidates(), [own, others].into());
        assert_eq!(name(&search, &[(others, strange), (own, HERE)]), Ok(own));
        assert_eq!(
            name(&search, &[(others, HERE), (own, HERE)]),
            Err(Outcome::Ambiguous)
        );
    }

    #[test]
    fn thousands_of_copies_cost_a_few_looks() {
        let mut search = Search::new(vec![ASKING.shown()]);
        for sport in 1..5000 {
            let copy = FlowKey {
                sport,
                ..pair().reversed()
            };
            search.handle_heard(copy, &ASKING.shown());
        }
        assert_eq!(search.candidates().len(), MOST_HEARD);
        let copies = [4999 - MOST_HEARD as u64, MOST_HEARD as u64];
        assert_eq!(search.copies(&BTreeSet::new()), copies);
    }

    #[test]
    fn a_network_that_renumbers_is_known_by_what_it_leaves() {
        let shown = ASKING.shown();
        for (seen, expected) in [
            (Stand { seq: 5, ..shown }, Outcome::Renumbered),
            (Stand { ack: 5, ..shown }, Outcome::Renumbered),
            (
                Stand {
                    seq: 5,
                    ack: 9,
                    ..shown
                },
                Outcome::Renumbered,
            ),
            (
                Stand {
                    seq: 5,
                    ack: 9,
                    timestamps: None,
                },
                Outcome::NotHeard,
            ),
        ] {
            let mut search = Search::new(vec![shown]);
            search.handle_heard(pair(), &seen);
            assert!(!search.is_complete());
            assert_eq!(search.name(0, &ASKING, &BTreeMap::new()), Err(expected));
        }
    }

    #[test]
    fn an_acknowledgement_comes_back_as_it_was_shown() {
        let bytes = ASKING.packet(&pair());
        assert_eq!(Stand::read(&bytes), Some((pair(), ASKING)));
        let bare = Stand {
            timestamps: None,
            ..ASKING
        };
        assert_eq!(Stand::read(&bare.packet(&pair())), Some((pair(), bare)));
        for probe in probes(&pair()) {
            let (ends, _) = Stand::read(&probe).expect("an acknowledgement");
            assert_eq!(ends, pair().reversed());
        }
    }
}
