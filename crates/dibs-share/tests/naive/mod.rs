//! The definitions, byte by byte, and what the tests share.

use dibs_share::Scheme;

/// The product in GF(2^8): the carry-less product, and its remainder by 0x11b.
pub(crate) fn product(a: u8, b: u8) -> u8 {
    let carryless = (0..8)
        .filter(|bit| b >> bit & 1 == 1)
        .fold(0, |sum, bit| sum ^ u16::from(a) << bit);
    let remainder = (8..16).rev().fold(carryless, |rest, bit| {
        let quotient = rest >> bit & 1;
        rest ^ (quotient * 0x11b) << (bit - 8)
    });
    remainder.try_into().expect("less than the modulus")
}

/// The shares of `secret`, computed by the definition of [`Scheme`].
pub(crate) fn shares(scheme: Scheme, secret: &[u8], random: &[u8]) -> Vec<Vec<u8>> {
    let len = secret.len();
    let row = |j: u8| &random[usize::from(j) * len..][..len];
    let rows = || (0..scheme.needed() - 1).map(row);
    if scheme.needed() == scheme.shares() {
        let xor = |i: usize| rows().fold(secret[i], |sum, row| sum ^ row[i]);
        let last = (0..len).map(xor).collect();
        return rows().map(<[u8]>::to_vec).chain([last]).collect();
    }
    let value = |x: u8, i: usize| {
        // Horner's rule, from the highest coefficient down to the secret.
        let higher = rows().rev().fold(0, |sum, row| product(sum, x) ^ row[i]);
        product(higher, x) ^ secret[i]
    };
    (1..=scheme.shares())
        .map(|x| (0..len).map(|i| value(x, i)).collect())
        .collect()
}

/// Bytes without a pattern, by seed (splitmix64).
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ word >> 31) as u8
    };
    (0..len).map(|_| next()).collect()
}
