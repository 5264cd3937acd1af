//! What can be read of a run without knowing any of it.

use std::ops::Range;

use crate::chains::{BEFORE, CHAINS, Chains, Keys};
use crate::model::{Context, Model, ORDER};
use crate::search::Search;

/// Bits that a run must save to count as read.
pub const CLAIM: f32 = 64.0;
/// Bytes of a run that the search looks at; the rest follows from them.
const LOOK: usize = 40 * CHAINS;
/// The shortest run that is looked at.
const SHORTEST: usize = 32;
/// How many ways are followed side by side: fewer where chains are long, as they tell more.
const WAYS: usize = 400;
const WIDTHS: Range<usize> = 16..160;
/// A chain is certain if the likeliest other first byte of it costs so many bits more.
const CERTAIN: f32 = 12.0;
/// Zeros at the beginning of the initial buffer; what follows them there is random.
const ZEROS: usize = 44;
/// Bits of what is random in the initial buffer.
const RANDOM: f32 = 8.0 * (BEFORE - ZEROS) as f32;
/// Whether a run begins an epoch is judged by what the zeros show of it: it takes fewer bits a byte than this.
const PLAUSIBLE: f32 = 6.0;
/// Bits that text saves at least in front of what is random.
const TEXT: f32 = 32.0;
/// Bytes by which it is judged whether a run goes on in another one.
const GOING_ON: usize = 256;
/// Bytes of context by which kinds are told apart.
const SHORT: usize = 2;

/// Kind of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// English prose.
    English,
    /// HTTP, and HTML.
    Http,
    /// JSON.
    Json,
    /// Source code.
    Source,
    /// PostgreSQL's protocol.
    Database,
}

/// How a run was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum How {
    /// By statistics; 64 bytes before the run are read, too.
    Within,
    /// The same, and by the zeros in front of an epoch or a solo chunk.
    Start,
    /// By plaintext that he knew.
    Known,
}

/// Text that was read of a run.
#[derive(Clone, Debug)]
pub struct Reading {
    /// How.
    pub how: How,
    /// The plaintext: of [`How::Start`] from the run's first byte on, else from 64 bytes before it.
    pub plaintext: Vec<u8>,
    /// Bits that a byte of it takes to write down.
    pub bits: f64,
    /// Kind that it looks like.
    pub kind: Kind,
    /// Which bytes may be others: of each 65, counted from the first one on.
    pub(crate) doubted: [bool; CHAINS],
}

/// Reads runs by the frequencies of `texts/`.
pub struct Attacker {
    all: Model,
    kinds: Vec<(Kind, Model)>,
}

impl Default for Attacker {
    fn default() -> Self {
        Self::new()
    }
}

impl Attacker {
    /// Takes the frequencies.
    pub fn new() -> Self {
        let texts: [(Kind, &[u8]); 5] = [
            (Kind::English, include_bytes!("../texts/english.txt")),
            (Kind::Http, include_bytes!("../texts/http.txt")),
            (Kind::Json, include_bytes!("../texts/json.txt")),
            (Kind::Source, include_bytes!("../texts/source.txt")),
            (Kind::Database, include_bytes!("../texts/postgres.bin")),
        ];
        let of = |(kind, text)| (kind, Model::of(&[text], SHORT));
        Self {
            all: Model::of(&texts.map(|(_, text)| text), ORDER),
            kinds: texts.into_iter().map(of).collect(),
        }
    }

    /// Reads a run, unless what it would be is not much likelier than chance.
    pub fn read(&self, run: &[u8]) -> Option<Reading> {
        self.read_start(run).or_else(|| self.read_within(run))
    }

    /// The likeliest plaintext of a run and of the 64 bytes before it, be it likely or not; none where the search gives
    /// up.
    pub fn guess(&self, run: &[u8]) -> Option<Vec<u8>> {
        let chains = Chains::of(run.get(..1).map(|_| run)?);
        let search = self.within(&chains);
        Some(chains.plaintext(&search.best(width(&search.text))?))
    }

    /// True if `run` goes on where another one ended: with these 65 bytes of plaintext, and this scrambled one.
    pub fn goes_on(&self, latest: &[u8; CHAINS], scrambled: u8, run: &[u8]) -> bool {
        let judged = &run[..run.len().min(GOING_ON)];
        let mut plaintext = latest.to_vec();
        let mut before = scrambled;
        for (at, byte) in judged.iter().enumerate() {
            plaintext.push(byte ^ before ^ plaintext[at]);
            before = *byte;
        }
        let (front, rest) = plaintext[CHAINS - ORDER..].split_at(ORDER);
        let context = front
            .iter()
            .copied()
            .fold(Context::default(), Context::then);
        let enough = 8.0 * judged.len() as f32 - CLAIM;
        let mut bits = 0.0;
        // Most do not, and that shows before the end.
        let mut costs = self.costs(context, rest);
        let lost = costs.any(|cost| {
            bits += cost;
            bits >= enough
        });
        !lost && bits < enough
    }

    /// Where in these places text ends, and what is random begins; none if there is no text.
    pub(crate) fn end(&self, plaintext: &[u8], places: Range<usize>) -> Option<usize> {
        let places = places.start.min(plaintext.len())..places.end.min(plaintext.len());
        let (mut saved, mut best) = (0.0, (TEXT, None));
        let front = &plaintext[places.start.saturating_sub(ORDER)..places.start];
        let context = front
            .iter()
            .copied()
            .fold(Context::default(), Context::then);
        let costs = self.costs(context, &plaintext[places.clone()]);
        for (at, cost) in (places.start + 1..).zip(costs) {
            saved += 8.0 - cost;
            if saved > best.0 {
                best = (saved, Some(at));
            }
        }
        best.1
    }

    /// What a text looks like most.
    pub(crate) fn kind(&self, text: &[u8]) -> Kind {
        let cost = |model: &Model| -> f32 {
            let mut context = Context::default();
            text.iter()
                .map(|byte| {
                    let cost = model.cost(context, *byte);
                    context = context.then(*byte);
                    cost
                })
                .sum()
        };
        let kinds = self.kinds.iter().map(|(kind, model)| (cost(model), *kind));
        let least = kinds.min_by(|a, b| a.0.total_cmp(&b.0));
        least.expect("there are kinds").1
    }

    fn costs(&self, mut context: Context, bytes: &[u8]) -> impl Iterator<Item = f32> {
        bytes.iter().map(move |byte| {
            let cost = self.all.cost(context, *byte);
            context = context.then(*byte);
            cost
        })
    }

    fn within<'a>(&'a self, chains: &'a Chains) -> Search<'a> {
        Search {
            model: &self.all,
            chains,
            text: 0..chains.bytes().min(LOOK),
            fixed: [None; CHAINS],
        }
    }

    fn read_within(&self, run: &[u8]) -> Option<Reading> {
        if run.len() < SHORTEST {
            return None;
        }
        let chains = Chains::of(run);
        let search = self.within(&chains);
        let seen = search.text.len() - BEFORE;
        let keys = search.best(width(&search.text))?;
        let bits = search.cost(&keys);
        (bits + CLAIM < 8.0 * seen as f32).then(|| self.reading(How::Within, &search, &keys))
    }

    /// Reads a run in front of which stands an initial buffer.
    fn read_start(&self, run: &[u8]) -> Option<Reading> {
        if run.len() < SHORTEST {
            return None;
        }
        let shown: Vec<u8> = run
            .windows(2)
            .take(ZEROS)
            .map(|two| two[0] ^ two[1])
            .collect();
        let bits: f32 = self.costs(Context::default(), &shown).sum();
        if bits > PLAUSIBLE * shown.len() as f32 {
            return None;
        }
        let chains = Chains::of(run);
        let text = BEFORE..chains.bytes().min(LOOK);
        let search = Search {
            model: &self.all,
            chains: &chains,
            text: text.clone(),
            fixed: std::array::from_fn(|column| (column < ZEROS).then_some(0)),
        };
        let keys = search.best(width(&text))?;
        let bits = search.cost(&keys) + RANDOM;
        (bits + CLAIM < 8.0 * text.len() as f32).then(|| self.reading(How::Start, &search, &keys))
    }

    fn reading(&self, how: How, search: &Search<'_>, keys: &Keys) -> Reading {
        let first = search.text.start;
        let doubted = |at: usize| search.margin(keys, (first + at) % CHAINS) < CERTAIN;
        let plaintext = search.chains.plaintext(keys).split_off(first);
        Reading {
            how,
            bits: f64::from(search.cost(keys)) / search.text.len() as f64,
            kind: self.kind(&plaintext[..search.text.len()]),
            doubted: std::array::from_fn(doubted),
            plaintext,
        }
    }
}

impl Reading {
    /// The places in the plaintext that are uncertain.
    pub fn uncertain(&self) -> Vec<Range<usize>> {
        doubts(&self.doubted, self.plaintext.len())
    }
}

/// The places in a text of this length that are uncertain, one behind the other.
pub(crate) fn doubts(doubted: &[bool; CHAINS], length: usize) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for at in (0..length).filter(|at| doubted[at % CHAINS]) {
        match ranges.last_mut() {
            Some(last) if last.end == at => last.end += 1,
            _ => ranges.push(at..at + 1),
        }
    }
    ranges
}

fn width(text: &Range<usize>) -> usize {
    let rows = text.len().div_ceil(CHAINS).max(1);
    (WAYS / rows).clamp(WIDTHS.start, WIDTHS.end)
}
