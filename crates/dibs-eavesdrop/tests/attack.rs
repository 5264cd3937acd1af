//! What is recovered of single runs of the scrambler, of texts that the statistics were not made from.

use std::ops::Range;

use dibs_eavesdrop::{Attacker, BEFORE, How, Kind, place, unroll};
use dibs_scramble::{Scrambler, initial_buffer};

/// The length of a run in a datagram of full size, as in the papers' figures.
const RUN: usize = 1380;

const ENGLISH: &[u8] = include_bytes!("texts/english.txt");
const SPEECH: &[u8] = include_bytes!("texts/gettysburg.txt");
const HTTP: &[u8] = include_bytes!("texts/http.txt");
const JSON: &[u8] = include_bytes!("texts/json.txt");
const SOURCE: &[u8] = include_bytes!("texts/source.txt");
const DATABASE: &[u8] = include_bytes!("texts/postgres.bin");

/// The text as it is sent.
fn scrambled(text: &[u8]) -> Vec<u8> {
    let mut sent = vec![0; text.len()];
    Scrambler::new(&initial_buffer(&[0x5c; 20])).scramble(text, &mut sent);
    sent
}

/// Bytes without any pattern.
fn random(seed: u64) -> impl Iterator<Item = u8> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    })
}

/// Where single runs of a text are taken from, behind its first 65 bytes.
fn runs(text: &[u8], length: usize, most: usize) -> Vec<Range<usize>> {
    let last = text.len() - length;
    let apart = ((last - 65) / most).max(400);
    let starts = (65..=last).step_by(apart).take(most);
    starts.map(|start| start..start + length).collect()
}

/// Bytes of these runs, and of the 64 before each, that were read as they are, those that are called certain, and those
/// of the latter that are wrong.
fn recovered(attacker: &Attacker, text: &[u8], runs: &[Range<usize>], kind: Kind) -> [usize; 4] {
    let sent = scrambled(text);
    let mut sums = [0; 4];
    for run in runs {
        let truth = &text[run.start - BEFORE..run.end];
        sums[0] += truth.len();
        let Some(reading) = attacker.read(&sent[run.clone()]) else {
            continue;
        };
        assert_eq!(reading.how, How::Within);
        assert_eq!(reading.kind, kind, "bytes {run:?}");
        let uncertain = reading.uncertain();
        let pairs = reading.plaintext.iter().zip(truth).enumerate();
        for (at, (read, is)) in pairs {
            let certain = !uncertain.iter().any(|range| range.contains(&at));
            sums[1] += usize::from(read == is);
            sums[2] += usize::from(certain);
            sums[3] += usize::from(certain && read != is);
        }
    }
    println!(
        "{kind:?}: of {} bytes {} right, {} certain, {} of them wrong",
        sums[0], sums[1], sums[2], sums[3]
    );
    sums
}

#[test]
fn english_is_read_from_single_runs() {
    let attacker = Attacker::new();
    for text in [ENGLISH, SPEECH] {
        let runs = runs(text, RUN.min(text.len() - 65), 3);
        let [all, right, certain, wrong] = recovered(&attacker, text, &runs, Kind::English);
        assert!(right * 100 >= all * 99, "{right} of {all}");
        assert!(
            certain * 100 >= all * 90 && wrong * 100 <= all,
            "{wrong} of {certain}"
        );
    }
}

#[test]
fn other_kinds_are_read_from_single_runs() {
    let attacker = Attacker::new();
    for (text, kind) in [
        (HTTP, Kind::Http),
        (JSON, Kind::Json),
        (SOURCE, Kind::Source),
        (DATABASE, Kind::Database),
    ] {
        let runs = runs(text, RUN, 3);
        let [all, right, certain, wrong] = recovered(&attacker, text, &runs, kind);
        assert!(right * 100 >= all * 95, "{kind:?}: {right} of {all}");
        assert!(wrong * 100 <= certain, "{kind:?}: {wrong} of {certain}");
    }
}

#[test]
fn short_runs_of_english_are_read() {
    let attacker = Attacker::new();
    let runs = runs(ENGLISH, 350, 4);
    let [all, right, ..] = recovered(&attacker, ENGLISH, &runs, Kind::English);
    assert!(right * 100 >= all * 90, "{right} of {all}");
}

/// What seal and share put on a path is random to who does not have the key, or the other shares.
#[test]
fn nothing_is_read_of_random_bytes_and_guesses_are_chance() {
    let attacker = Attacker::new();
    let mut noise = random(1);
    let (mut here, mut elsewhere) = (0, 0);
    for length in [40, 200, 600, RUN] {
        for run in runs(ENGLISH, length, 2) {
            let shared: Vec<u8> = ENGLISH[run.clone()]
                .iter()
                .zip(&mut noise)
                .map(|(a, b)| a ^ b)
                .collect();
            assert!(
                attacker.read(&shared).is_none(),
                "made up of {length} bytes"
            );
            let Some(guess) = attacker.guess(&shared) else {
                continue;
            };
            let agree = |start: usize| {
                let text = &ENGLISH[start..start + length];
                guess[BEFORE..]
                    .iter()
                    .zip(text)
                    .filter(|(a, b)| a == b)
                    .count()
            };
            here += agree(run.start);
            elsewhere += agree(run.start - 65);
        }
    }
    // As often as anywhere else, give or take five standard deviations.
    let spread = 5.0 * ((here + elsewhere).max(1) as f64).sqrt();
    let difference = here as f64 - elsewhere as f64;
    assert!(
        difference.abs() <= spread,
        "{here} here, {elsewhere} elsewhere"
    );
}

#[test]
fn the_start_of_an_epoch_is_read_by_its_zeros() {
    let attacker = Attacker::new();
    for length in [120, RUN] {
        let sent = scrambled(&ENGLISH[..length]);
        let reading = attacker.read(&sent).expect("it is read");
        assert_eq!(reading.how, How::Start);
        assert_eq!(&reading.plaintext[1..45], &ENGLISH[1..45]);
        let right = reading
            .plaintext
            .iter()
            .zip(ENGLISH)
            .filter(|(a, b)| a == b);
        let right = right.count();
        assert!(right * 100 >= length * 66, "{right} of {length}");
    }
}

#[test]
fn a_reading_goes_on_in_the_run_that_follows_and_in_no_other() {
    let attacker = Attacker::new();
    let sent = scrambled(ENGLISH);
    let latest = ENGLISH[1000 - 65..1000].try_into().expect("65 bytes");
    assert!(attacker.goes_on(latest, sent[999], &sent[1000..2000]));
    assert!(!attacker.goes_on(latest, sent[999], &sent[1001..2000]));
    assert!(!attacker.goes_on(latest, sent[999], &[]));
}

#[test]
fn known_plaintext_unrolls_a_run_for_certain() {
    let text: Vec<u8> = random(2).take(3000).collect();
    let sent = scrambled(&text);
    let run = 1000..2000;
    // 65 bytes tell all; ten tell their chains.
    let known = &text[1200..1265];
    let at = 1200 - (run.start - BEFORE);
    let all = unroll(&sent[run.clone()], known, at);
    let truth = &text[run.start - BEFORE..run.end];
    assert!(all.iter().zip(truth).all(|(read, is)| *read == Some(*is)));
    let some = unroll(&sent[run.clone()], &known[..10], at);
    let read = some.iter().zip(truth).filter(|(read, _)| read.is_some());
    assert!(read.clone().all(|(read, is)| *read == Some(*is)));
    assert_eq!(read.count(), 170);
    // A file that he knows is found, and nothing else is.
    assert_eq!(place(&sent[run.clone()], &text), Some(run.start));
    assert_eq!(place(&sent[run], ENGLISH), None);
    assert_eq!(place(&sent[..10], &text), None);
}

#[test]
fn nothing_is_too_short_to_be_looked_at() {
    let attacker = Attacker::new();
    for length in 0..40 {
        assert!(attacker.read(&vec![7; length]).is_none() || length >= 32);
        assert_eq!(attacker.guess(&vec![7; length]).is_none(), length == 0);
    }
}
