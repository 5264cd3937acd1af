//! What is said of a capture.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;

use crate::attack::Attacker;
use crate::datagram::{Datagram, Key, body};
use crate::reader::{Piece, Reader};
use crate::statistics::Statistics;

/// Bytes of a packet that are shown.
const SHOWN: usize = 96;
/// Lengths that are listed.
const LENGTHS: usize = 5;

/// Times at which packets passed, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Times {
    /// From the first to the last one.
    pub span: f64,
    /// The longest time without any.
    pub longest_silence: f64,
}

/// What was heard besides.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) packets: u64,
    pub(crate) others: u64,
    pub(crate) handshakes: u64,
    pub(crate) beyond: u64,
    pub(crate) further: u64,
}

/// Report of what someone sees on a path, and recovers.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    /// Frames that were heard.
    pub packets: u64,
    /// Packets that carry neither TCP nor datagrams of dibs.
    pub others: u64,
    /// Handshakes of dibs. They go by paths that are called trusted: if this one is not safe, its label is false.
    pub handshakes: u64,
    /// Datagrams that there was no room for.
    pub beyond: u64,
    /// Datagrams of directions beyond those that are told apart.
    pub further: u64,
    /// TCP that passed without a bump.
    pub plain: Plain,
    /// Directions of what passed by dibs.
    pub directions: Vec<Direction>,
}

/// TCP that can be read as it is.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Plain {
    /// Bytes of payload.
    pub bytes: u64,
    /// Statistics of the bytes that were kept: the first 4 MiB.
    pub statistics: Statistics,
    /// How the first of them begin.
    #[serde(skip)]
    pub first: Vec<u8>,
}

/// The datagrams of one session by one path, one way.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Direction {
    /// Sender.
    pub from: SocketAddr,
    /// To whom.
    pub to: SocketAddr,
    /// The path's id in the clear header.
    pub path: u8,
    /// The receiver index there.
    pub index: u32,
    /// How many there are.
    pub datagrams: u64,
    /// UDP payload of all.
    pub bytes: u64,
    /// Sequence numbers in between that did not pass here.
    pub missing: u64,
    /// When they passed.
    pub times: Times,
    /// The most frequent lengths of UDP payload, and how many datagrams have them.
    pub lengths: Vec<(usize, u64)>,
    /// Statistics of what stands behind the clear headers, without the tags.
    pub statistics: Statistics,
    /// How the first long one of them begins.
    #[serde(skip)]
    pub first: Vec<u8>,
    /// Datagrams that were read.
    pub read: u64,
    /// Datagrams long enough to be read that were not looked at, after too many that could not be.
    pub untried: u64,
    /// Bytes of text that were recovered.
    pub recovered: u64,
    /// Number of those that are certain.
    pub certain: u64,
    /// The text, piece by piece.
    pub pieces: Vec<Piece>,
}

impl Report {
    pub(crate) fn of(counts: Counts, bytes: u64, plain: &[Vec<u8>], ways: Vec<Direction>) -> Self {
        let first = plain.first().map(|first| shown(first).to_vec());
        Self {
            packets: counts.packets,
            others: counts.others,
            handshakes: counts.handshakes,
            beyond: counts.beyond,
            further: counts.further,
            plain: Plain {
                bytes,
                statistics: Statistics::of(plain.iter().map(Vec::as_slice)),
                first: first.unwrap_or_default(),
            },
            directions: ways,
        }
    }
}

impl Direction {
    pub(crate) fn of(
        attacker: &Attacker,
        known: &[u8],
        key: Key,
        way: &BTreeMap<u64, Datagram>,
    ) -> Self {
        let mut reader = Reader::new(attacker, known);
        for (number, datagram) in way {
            reader.datagram(*number, &datagram.bytes);
        }
        let read = reader.read();
        let untried = reader.untried();
        let pieces = reader.pieces();
        let numbers = way.keys().next().zip(way.keys().next_back());
        let expected = numbers.map_or(0, |(first, last)| last - first + 1);
        let doubts = pieces.iter().flat_map(|piece| &piece.uncertain);
        let doubtful: usize = doubts.map(Range::len).sum();
        let recovered = pieces.iter().map(|piece| piece.bytes.len() as u64).sum();
        let bodies = || way.values().map(|datagram| body(&datagram.bytes));
        let long = bodies().max_by_key(|body| body.len().min(SHOWN));
        Self {
            from: key.from,
            to: key.to,
            path: key.path,
            index: key.index,
            datagrams: way.len() as u64,
            bytes: way
                .values()
                .map(|datagram| datagram.bytes.len() as u64)
                .sum(),
            missing: expected - way.len() as u64,
            times: times(way),
            lengths: lengths(way),
            statistics: Statistics::of(bodies()),
            first: long.map(|body| shown(body).to_vec()).unwrap_or_default(),
            read,
            untried,
            recovered,
            certain: recovered - doubtful as u64,
            pieces,
        }
    }
}

fn shown(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len().min(SHOWN)]
}

fn times(way: &BTreeMap<u64, Datagram>) -> Times {
    let mut all: Vec<_> = way.values().map(|datagram| datagram.at).collect();
    all.sort_unstable();
    let span = all
        .last()
        .zip(all.first())
        .map(|(last, first)| *last - *first);
    let silences = all.windows(2).map(|two| two[1] - two[0]);
    Times {
        span: span.unwrap_or_default().as_secs_f64(),
        longest_silence: silences.max().unwrap_or_default().as_secs_f64(),
    }
}

fn lengths(way: &BTreeMap<u64, Datagram>) -> Vec<(usize, u64)> {
    let mut counts: BTreeMap<usize, u64> = BTreeMap::new();
    for datagram in way.values() {
        *counts.entry(datagram.bytes.len()).or_default() += 1;
    }
    let mut all: Vec<_> = counts.into_iter().collect();
    all.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    all.truncate(LENGTHS);
    all
}
