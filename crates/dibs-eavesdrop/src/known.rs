//! What known plaintext gives away of a run: every chain that it touches, for certain.

use crate::chains::{BEFORE, CHAINS, Chains, Keys};

/// Known bytes beyond the 65 that fix all chains: as many as must agree for a place to be the right one.
const AGREEING: usize = 8;

/// The plaintext of a run, and of the 64 bytes before it, of which `known` stands at `at`, counted from the first of
/// these 64. A byte whose chain `known` does not touch is none.
///
/// # Panics
/// If the run has no byte, or `known` does not lie within what it tells of.
pub fn unroll(run: &[u8], known: &[u8], at: usize) -> Vec<Option<u8>> {
    let chains = Chains::of(run);
    assert!(at + known.len() <= chains.bytes(), "known beyond the run");
    let mut keys = [None; CHAINS];
    for (at, byte) in (at..).zip(known) {
        keys[at % CHAINS] = Some(byte ^ chains.relative(at));
    }
    (0..chains.bytes())
        .map(|at| keys[at % CHAINS].map(|key| key ^ chains.relative(at)))
        .collect()
}

/// Place in `known` of the plaintext of a run that he knows to have passed, a file perhaps: of the run's
/// first byte, if 73 bytes or more of it, the 64 before included, are the known ones. No statistics are involved.
pub fn place(run: &[u8], known: &[u8]) -> Option<usize> {
    let chains = Chains::of(run.get(..CHAINS + AGREEING)?);
    let enough = chains.bytes();
    let fits = |start: usize| {
        let known = &known[start..start + enough];
        let keys: Keys = std::array::from_fn(|column| known[column]);
        (CHAINS..enough).all(|at| known[at] ^ keys[at % CHAINS] == chains.relative(at))
            && chains.misfit(&keys) == 0
    };
    let last = known.len().checked_sub(enough)?;
    (0..=last)
        .find(|&start| fits(start))
        .map(|start| start + BEFORE)
}
