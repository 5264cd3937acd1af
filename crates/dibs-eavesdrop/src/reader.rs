//! Reads the datagrams of one way one after the other.

use std::collections::VecDeque;
use std::ops::Range;

use crate::attack::{Attacker, How, Kind, Reading, doubts};
use crate::chains::{BEFORE, CHAINS};
use crate::datagram::body;
use crate::known::place;
use crate::view::readable;

/// The header block of a chunk of a flow that is known, with timestamps; the least that one has.
const HEADER: usize = 40;
const LEAST_HEADER: usize = 32;
/// How much longer than the usual one a header block may be: what opens a flow, and acknowledgements.
const LONGER: usize = 160;
/// How far what text looks like may be wrong about where it ends.
const BLUR: usize = 4;
/// Datagrams that are looked at in vain, one after the other, until no more are.
const TRIES: u64 = 40;
/// Datagrams that are looked at by themselves at all: some tenths of a second each.
const MOST: u64 = 200;
/// Runs that may go on in a later datagram: as many flows are told apart where they take turns.
const RUNS: usize = 64;
/// Datagrams after which a run goes on no more: it has a gap, and would be compared with each one to come.
const STALE: u64 = 1024;
/// Bytes that a payload has at least to be looked at.
const SHORTEST: usize = 32;

/// Text of datagrams one behind the other.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Piece {
    /// The sequence number of the first one.
    pub first: u64,
    /// How many there are.
    pub datagrams: u64,
    /// How the first one was read; the others follow from it.
    pub how: How,
    /// Kind that it looks like.
    pub kind: Kind,
    /// Bits that a byte of the first one takes to write down.
    pub bits: f64,
    /// The text, with a point for what cannot be printed.
    pub text: String,
    /// Ranges where the text may be another one than is said.
    pub uncertain: Vec<Range<usize>>,
    /// The same bytes as they are.
    #[serde(skip)]
    pub bytes: Vec<u8>,
}

/// Reads datagrams in the order of their numbers.
pub(crate) struct Reader<'a> {
    attacker: &'a Attacker,
    known: &'a [u8],
    pieces: Vec<(Piece, [bool; CHAINS])>,
    /// The last datagrams of runs, the latest one in front.
    runs: VecDeque<Last>,
    read: u64,
    looked_at: u64,
    failed: u64,
    untried: u64,
    /// Datagrams so far.
    seen: u64,
}

/// The datagram of a run that was read last.
struct Last {
    /// Which piece it is of.
    piece: usize,
    /// What stands behind its clear header.
    body: Vec<u8>,
    /// Plaintext, had the body no header block at its end.
    plaintext: Vec<u8>,
    /// Bytes of it in front of the body.
    before: usize,
    /// Where in the body the payload may end.
    ends: Vec<usize>,
    /// Where its text begins in that of its piece.
    at: usize,
    /// How many datagrams there had been.
    seen: u64,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(attacker: &'a Attacker, known: &'a [u8]) -> Self {
        Self {
            attacker,
            known,
            pieces: Vec::new(),
            runs: VecDeque::new(),
            read: 0,
            looked_at: 0,
            failed: 0,
            untried: 0,
            seen: 0,
        }
    }

    /// Datagrams that were read.
    pub(crate) fn read(&self) -> u64 {
        self.read
    }

    /// Datagrams that were not looked at.
    pub(crate) fn untried(&self) -> u64 {
        self.untried
    }

    /// What was read.
    pub(crate) fn pieces(self) -> Vec<Piece> {
        let all = self.pieces.into_iter();
        all.map(|(mut piece, doubted)| {
            piece.text = readable(&piece.bytes);
            piece.uncertain = doubts(&doubted, piece.bytes.len());
            piece
        })
        .collect()
    }

    /// Looks at one more.
    pub(crate) fn datagram(&mut self, number: u64, datagram: &[u8]) {
        self.seen += 1;
        let oldest = self.seen.saturating_sub(STALE);
        self.runs.retain(|last| last.seen >= oldest);
        let bare = datagram[0] == 6;
        let body = body(datagram);
        let shape = u16::from_be_bytes([datagram[2], datagram[3]]);
        let likely = match bare {
            true => body.len().saturating_sub(usize::from(shape & 0x7fff)),
            false => body.len().saturating_sub(HEADER),
        };
        if likely < SHORTEST {
            return;
        }
        let body = if bare { &body[..likely] } else { body };
        if self.follow(body, likely) {
            self.read += 1;
        } else if let Some(reading) = self.fresh(&body[..likely]) {
            self.read += 1;
            self.begin(number, reading, body, likely);
        }
    }

    /// Whether it goes on where another one ended.
    fn follow(&mut self, body: &[u8], likely: usize) -> bool {
        let goes_on = |last: &Last| {
            last.ends.iter().find_map(|&end| {
                let until = last.before + end;
                let latest = last.plaintext.get(until.checked_sub(CHAINS)?..until)?;
                let latest = latest.try_into().expect("it has this length");
                let scrambled = last.body[end - 1];
                let is_so = self.attacker.goes_on(latest, scrambled, &body[..likely]);
                is_so.then_some((end, *latest, scrambled))
            })
        };
        let mut runs = self.runs.iter().enumerate();
        let found = runs.find_map(|(at, last)| Some((at, goes_on(last)?)));
        let Some((at, (end, latest, scrambled))) = found else {
            return false;
        };
        let last = self.runs.remove(at).expect("it was just found");
        let mut plaintext = latest.to_vec();
        let known = std::iter::once(scrambled).chain(body.iter().copied());
        for (at, (before, byte)) in known.zip(body).enumerate() {
            plaintext.push(byte ^ before ^ plaintext[at]);
        }
        let (piece, _) = &mut self.pieces[last.piece];
        piece.bytes.truncate(last.at);
        let text = &last.plaintext[last.before..last.before + end];
        piece.bytes.extend_from_slice(text);
        piece.datagrams += 1;
        self.append(last.piece, body, plaintext, CHAINS, likely);
        true
    }

    /// What can be read of it by itself.
    fn fresh(&mut self, payload: &[u8]) -> Option<Reading> {
        if let Some(at) = place(payload, self.known) {
            let enough = payload.len().min(self.known.len() - at);
            let plaintext = self.known[at - BEFORE..at + enough].to_vec();
            return Some(Reading {
                how: How::Known,
                bits: 0.0,
                kind: self.attacker.kind(&plaintext),
                doubted: [false; CHAINS],
                plaintext,
            });
        }
        if self.failed == TRIES || self.looked_at == MOST {
            self.untried += 1;
            return None;
        }
        self.looked_at += 1;
        let reading = self.attacker.read(payload);
        match reading {
            Some(_) => self.failed = 0,
            None => self.failed += 1,
        }
        reading
    }

    /// Begins a piece with what was read of a datagram.
    fn begin(&mut self, number: u64, reading: Reading, body: &[u8], likely: usize) {
        let before = match reading.how {
            How::Start => 0,
            How::Within | How::Known => BEFORE,
        };
        let mut plaintext = reading.plaintext;
        for at in plaintext.len() - before..body.len() {
            let Some(earlier) = (before + at).checked_sub(CHAINS) else {
                break;
            };
            plaintext.push(body[at] ^ body[at - 1] ^ plaintext[earlier]);
        }
        let piece = Piece {
            first: number,
            datagrams: 1,
            how: reading.how,
            kind: reading.kind,
            bits: reading.bits,
            text: String::new(),
            uncertain: Vec::new(),
            bytes: plaintext[..before].to_vec(),
        };
        self.pieces.push((piece, reading.doubted));
        self.append(self.pieces.len() - 1, body, plaintext, before, likely);
    }

    /// Adds the text of a datagram to a piece, as far as it seems to go.
    fn append(
        &mut self,
        piece: usize,
        body: &[u8],
        plaintext: Vec<u8>,
        before: usize,
        likely: usize,
    ) {
        let from = likely.saturating_sub(LONGER).max(SHORTEST);
        let to = match body.len() == likely {
            true => likely,
            false => body.len() - LEAST_HEADER,
        };
        let end = self.attacker.end(&plaintext, before + from..before + to);
        let end = match end.map(|end| end - before) {
            Some(end) if end.abs_diff(likely) > BLUR => end,
            _ => likely,
        };
        let longest = plaintext.len() - before;
        let near = (0..=BLUR).flat_map(|off| [end + off, end.saturating_sub(off)]);
        let ends = near.filter(|end| (1..=longest.min(body.len())).contains(end));
        let bytes = &mut self.pieces[piece].0.bytes;
        let at = bytes.len();
        bytes.extend_from_slice(&plaintext[before..before + end.min(longest)]);
        self.runs.truncate(RUNS - 1);
        self.runs.push_front(Last {
            piece,
            ends: ends.collect(),
            body: body.to_vec(),
            plaintext,
            before,
            at,
            seen: self.seen,
        });
    }
}
