//! Every input of the corpora, and mutations of them from a seed, with an ordinary compiler.
//!
//! An input that fails is written to the directory for temporary files of the test.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use dibs_fuzz::{TARGETS, Target};
use dibs_switch::messages::{Body, Message};

/// Mutated inputs of each target: a few seconds in a debug build.
const MUTATIONS: [(&str, usize); 6] = [
    ("config", 3000),
    ("control", 3000),
    ("datagrams", 400),
    ("handshake", 300),
    ("messages", 6000),
    ("packets", 100),
];
/// Change it to see others.
const SEED: u64 = 1;

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let entries =
        fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", directory.display());
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// One of the corpus, with some bytes changed, left out, or put in from another.
fn mutated(corpus: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = corpus[rng.below(corpus.len())].clone();
    for _ in 0..=rng.below(4) {
        let at = rng.below(bytes.len() + 1);
        let end = at + rng.below(16).min(bytes.len() - at);
        match rng.below(4) {
            0 => bytes[at..end]
                .iter_mut()
                .for_each(|b| *b = rng.below(256) as u8),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let other = &corpus[rng.below(corpus.len())];
                let from = rng.below(other.len() + 1);
                let to = from + rng.below(64).min(other.len() - from);
                bytes.splice(at..end, other[from..to].iter().copied());
            }
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << rng.below(8);
                }
            }
        }
    }
    bytes
}

fn run(name: &str, target: Target, input: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| target(input))).is_err() {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("failed-{name}"));
        fs::write(&path, input).unwrap();
        panic!("{name} fails on the input in {}", path.display());
    }
}

fn replay(name: &str) {
    let (_, target) = TARGETS.iter().find(|(n, _)| *n == name).expect(name);
    let (_, mutations) = MUTATIONS.iter().find(|(n, _)| *n == name).expect(name);
    let corpus = corpus(name);
    for input in &corpus {
        run(name, *target, input);
    }
    let mut rng = Rng(SEED);
    for _ in 0..*mutations {
        run(name, *target, &mutated(&corpus, &mut rng));
    }
}

macro_rules! replays {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            replay(stringify!($name));
        })*

        #[test]
        fn every_target_is_replayed() {
            assert_eq!(TARGETS.map(|(name, _)| name), [$(stringify!($name)),*]);
        }
    };
}

replays! { config control datagrams handshake messages packets }

/// A corpus of another format than the code's would only show that it is refused.
#[test]
fn the_corpus_has_each_kind_of_message_as_it_is_now() {
    let mut kinds = [0; 10];
    for input in corpus("messages") {
        // The first byte says what follows.
        let message = input.split_first().filter(|(first, _)| **first % 5 == 2);
        let message = message.and_then(|(_, message)| Message::decode(message).ok());
        if let Some(message) = message {
            kinds[match message.body {
                Body::Want { .. } => 0,
                Body::Switch { .. } => 1,
                Body::Answer(_) => 2,
                Body::Confirm { .. } => 3,
                Body::Silent { .. } => 4,
                Body::Knock(_) => 5,
                Body::Match(_) => 6,
                Body::Seek(_) => 8,
                Body::Measure { .. } => 7,
                Body::Hide(_) => 9,
            }] += 1;
        }
    }
    assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
}
