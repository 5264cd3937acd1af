//! 32 bytes at a time, in lanes of 16.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::pass::{Block, Pass, descramble_rest, scramble_rest};
use crate::window::Window;

#[target_feature(enable = "avx2")]
pub(super) fn scramble(window: &mut Window, mut pass: impl Pass) {
    scramble_blocks(window, &mut pass);
    scramble_rest(window, &mut pass, |window, mut block| {
        scramble_blocks(window, &mut block)
    });
}

#[target_feature(enable = "avx2")]
pub(super) fn descramble(window: &mut Window, mut pass: impl Pass) {
    descramble_blocks(window, &mut pass);
    descramble_rest(window, &mut pass, |window, mut block| {
        descramble_blocks(window, &mut block)
    });
}

#[inline]
#[target_feature(enable = "avx2")]
fn scramble_blocks(window: &mut Window, pass: &mut impl Pass) {
    let mut before = load(&window.bytes);
    let mut xor = _mm256_set1_epi8(window.xor.cast_signed());
    for block in 0..pass.blocks() {
        let plain = load(pass.src(block));
        let low = scrambled(plain[0], before[0], &mut xor);
        let high = scrambled(plain[1], before[1], &mut xor);
        store([low, high], pass.dst(block));
        before = plain;
    }
    store(before, &mut window.bytes);
    window.xor = _mm256_extract_epi8::<0>(xor) as u8;
}

#[inline]
#[target_feature(enable = "avx2")]
fn descramble_blocks(window: &mut Window, pass: &mut impl Pass) {
    let mut plain = load(&window.bytes);
    let mut y = _mm256_set1_epi8(window.xor.cast_signed());
    for block in 0..pass.blocks() {
        let sent = load(pass.src(block));
        plain = [
            descrambled(sent[0], plain[0], &mut y),
            descrambled(sent[1], plain[1], &mut y),
        ];
        store(plain, pass.dst(block));
    }
    store(plain, &mut window.bytes);
    window.xor = _mm256_extract_epi8::<31>(y) as u8;
}

/// Scrambles half a block, `before` being that half of the block before. `xor` is the running XOR,
/// in every byte; from one half to the next it takes only XORs with what is known without it.
#[inline]
#[target_feature(enable = "avx2")]
fn scrambled(plain: __m256i, before: __m256i, xor: &mut __m256i) -> __m256i {
    // The XOR from a byte of the lane before to its end is that of the whole lane, which is in
    // `xor`, and of its bytes before this one.
    let mut prefix = _mm256_xor_si256(plain, _mm256_bslli_epi128::<1>(before));
    prefix = _mm256_xor_si256(prefix, _mm256_bslli_epi128::<1>(prefix));
    prefix = _mm256_xor_si256(prefix, _mm256_bslli_epi128::<2>(prefix));
    prefix = _mm256_xor_si256(prefix, _mm256_bslli_epi128::<4>(prefix));
    prefix = _mm256_xor_si256(prefix, _mm256_bslli_epi128::<8>(prefix));
    // By how much each lane changes the running XOR.
    let change = _mm256_shuffle_epi8(_mm256_xor_si256(prefix, before), _mm256_set1_epi8(15));
    let other = _mm256_permute2x128_si256::<0x01>(change, change);
    let first = _mm256_blend_epi32::<0xf0>(_mm256_setzero_si256(), other);
    let sent = _mm256_xor_si256(_mm256_xor_si256(prefix, first), *xor);
    *xor = _mm256_xor_si256(_mm256_xor_si256(change, other), *xor);
    sent
}

/// Descrambles half a block, `before` being that half of the block before and the last byte of `y`
/// the running XOR.
#[inline]
#[target_feature(enable = "avx2")]
fn descrambled(sent: __m256i, before: __m256i, y: &mut __m256i) -> __m256i {
    let next = _mm256_xor_si256(sent, before);
    let lanes_before = _mm256_permute2x128_si256::<0x21>(*y, next);
    *y = next;
    _mm256_xor_si256(sent, _mm256_alignr_epi8::<15>(next, lanes_before))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(block: &Block) -> [__m256i; 2] {
    let at: *const __m256i = block.as_ptr().cast();
    // SAFETY: a block has two times 32 bytes, and the loads need no alignment.
    unsafe { [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))] }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(halves: [__m256i; 2], block: &mut Block) {
    let at: *mut __m256i = block.as_mut_ptr().cast();
    // SAFETY: a block has two times 32 bytes, and the stores need no alignment.
    unsafe {
        _mm256_storeu_si256(at, halves[0]);
        _mm256_storeu_si256(at.add(1), halves[1]);
    }
}
