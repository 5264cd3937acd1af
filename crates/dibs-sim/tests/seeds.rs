//! Random histories, and the promise that a seed repeats.

use std::sync::Mutex;

use dibs_sim::coverage::Histogram;
use dibs_sim::history::{BETWEEN, STRICT};

/// Seeds of the normal test run; `cargo xtask sim --seeds N` runs any number.
const SEEDS: u64 = 2000;
/// Seeds of histories with devices on the ordinary route.
const SEEDS_BETWEEN: u64 = 300;
/// Seeds of those in which devices follow TCP's numbers, or change them.
const SEEDS_STRICT: u64 = 200;

#[test]
fn random_histories_keep_all_promises() {
    let between = BETWEEN..BETWEEN + SEEDS_BETWEEN;
    let strict = STRICT..STRICT + SEEDS_STRICT;
    let seeds = Mutex::new((0..SEEDS).chain(between).chain(strict));
    let failures = Mutex::new(Vec::new());
    let seen = Mutex::new(Histogram::default());
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let Some(seed) = seeds.lock().unwrap().next() else {
                        return;
                    };
                    match dibs_sim::run(seed) {
                        Ok(report) => seen.lock().unwrap().add(&report.coverage),
                        Err(text) => failures.lock().unwrap().push((seed, text)),
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    if let Some((_, first)) = failures.first() {
        panic!("{} of {SEEDS} seeds fail\n{first}", failures.len());
    }
    // All that a user can want of the paths had an effect.
    let mut missing = seen.into_inner().unwrap().missing();
    missing.retain(|name| name.starts_with("paths: "));
    assert_eq!(missing, [""; 0], "in none of {SEEDS} seeds");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let mut digests: Vec<u64> = (0..50)
        .map(|seed| {
            let first = dibs_sim::run(seed).unwrap();
            assert_eq!(first, dibs_sim::run(seed).unwrap(), "seed {seed}");
            first.digest
        })
        .collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 50, "other seeds give other runs");
}
