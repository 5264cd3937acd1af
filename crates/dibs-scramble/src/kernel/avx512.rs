//! 64 bytes at a time, with byte permutations (VBMI) and 8x8 bit matrices (GFNI).
//!
//! A prefix XOR over bytes is a product of bit matrices. `gf2p8affineqb(x, a)` multiplies, in each
//! group of eight bytes, the matrix `a` with the vectors `x`; with the data as the matrix and unit
//! vectors it transposes, and with the transposed data as the matrix and masks as the vectors it
//! gives any XORs over the eight bytes, transposed back.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::pass::{Block, Pass};
use crate::{BUFFER_LEN, window::Window};

pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("gfni")
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(super) fn scramble(window: &mut Window, mut pass: impl Pass) {
    let mut before = Sums::of(load(&window.bytes));
    for block in 0..pass.blocks() {
        let plain = Sums::of(load(pass.src(block)));
        store(plain.scrambled_after(&before), pass.dst(block));
        before = plain;
    }
    let n = pass.src_rest().len();
    if n > 0 {
        let plain = Sums::of(load_rest(pass.src_rest()));
        store_rest(plain.scrambled_after(&before), pass.dst_rest());
        before = Sums::of(shift_in(before.bytes, plain.bytes, n));
    }
    store(before.bytes, &mut window.bytes);
    window.xor = first_byte(xor_of(before.totals, _mm512_set1_epi8(-1)));
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(super) fn descramble(window: &mut Window, mut pass: impl Pass) {
    let mut plain = load(&window.bytes);
    let mut xor = _mm512_set1_epi8(window.xor.cast_signed());
    for block in 0..pass.blocks() {
        (plain, xor) = descrambled(load(pass.src(block)), plain, xor);
        store(plain, pass.dst(block));
    }
    let n = pass.src_rest().len();
    if n > 0 {
        let sent = load_rest(pass.src_rest());
        let before = plain;
        let (rest, _) = descrambled(sent, before, xor);
        store_rest(rest, pass.dst_rest());
        plain = shift_in(before, rest, n);
        let last = _mm512_set1_epi8(n as i8 - 1);
        xor = _mm512_permutexvar_epi8(last, _mm512_xor_si512(sent, before));
    }
    store(plain, &mut window.bytes);
    window.xor = first_byte(xor);
}

/// A block of plaintext and what its neighbours' outputs are made of. Groups are of eight bytes.
#[derive(Clone, Copy)]
struct Sums {
    bytes: __m512i,
    /// XOR of each byte and those before it in its group.
    prefix: __m512i,
    /// XOR of each byte and those after it in its group.
    suffix: __m512i,
    /// In every group: the XORs of the eight groups.
    totals: __m512i,
}

impl Sums {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
    fn of(bytes: __m512i) -> Self {
        // In the transposed group, bit 7 - r belongs to byte r.
        let transposed = transpose(bytes);
        let up_to = _mm512_set1_epi64(u64::from_le_bytes(UP_TO).cast_signed());
        let from = _mm512_set1_epi64(u64::from_le_bytes(FROM).cast_signed());
        let prefix = _mm512_gf2p8affine_epi64_epi8::<0>(up_to, transposed);
        let suffix = _mm512_gf2p8affine_epi64_epi8::<0>(from, transposed);
        let totals = _mm512_permutexvar_epi8(load(&LAST_OF_GROUPS), prefix);
        Self {
            bytes,
            prefix,
            suffix,
            totals,
        }
    }

    /// This block scrambled, `before` being the one before it. In a byte's own group: from its place
    /// on in the block before, and up to its place in this one. And whole groups: the later ones of
    /// the block before, the earlier ones of this.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
    fn scrambled_after(&self, before: &Self) -> __m512i {
        let groups = _mm512_mask_blend_epi8(EARLIER_GROUPS, before.totals, self.totals);
        let between = xor_of(groups, load(&OTHER_GROUPS));
        const XOR3: i32 = 0b1001_0110;
        _mm512_ternarylogic_epi64::<XOR3>(self.prefix, before.suffix, between)
    }
}

/// The plaintext of `sent` after the block `before`, and the running XOR after it, in the first byte
/// as in `xor`.
///
/// From `before` to the result there is one permutation and one operation, as it is the critical
/// path. A masked permutation would not do: compilers make two instructions of it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn descrambled(sent: __m512i, before: __m512i, xor: __m512i) -> (__m512i, __m512i) {
    const ALL_BUT_FIRST: __mmask64 = !1;
    const A_XOR_B_AND_C: i32 = 0b0111_1000;
    let up_one = load(&UP_ONE);
    let moved = _mm512_permutexvar_epi8(up_one, sent);
    let ahead = _mm512_xor_si512(sent, _mm512_mask_blend_epi8(ALL_BUT_FIRST, xor, moved));
    let behind = _mm512_permutexvar_epi8(up_one, before);
    let plain =
        _mm512_ternarylogic_epi64::<A_XOR_B_AND_C>(ahead, behind, _mm512_movm_epi8(ALL_BUT_FIRST));
    let xor = _mm512_permutexvar_epi8(up_one, _mm512_xor_si512(sent, before));
    (plain, xor)
}

/// XOR, in each group, of the bytes that `mask` names: bit 7 - r for byte r.
#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn xor_of(bytes: __m512i, mask: __m512i) -> __m512i {
    _mm512_gf2p8affine_epi64_epi8::<0>(mask, transpose(bytes))
}

#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn transpose(bytes: __m512i) -> __m512i {
    let units = _mm512_set1_epi64(0x0102_0408_1020_4080);
    _mm512_gf2p8affine_epi64_epi8::<0>(units, bytes)
}

/// The last 64 bytes after `n` of `next` have followed `bytes`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn shift_in(bytes: __m512i, next: __m512i, n: usize) -> __m512i {
    let from = _mm512_add_epi8(load(&PLACES), _mm512_set1_epi8(n as i8));
    _mm512_permutex2var_epi8(bytes, from, next)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn first_byte(bytes: __m512i) -> u8 {
    _mm_cvtsi128_si32(_mm512_castsi512_si128(bytes)) as u8
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(block: &Block) -> __m512i {
    // SAFETY: a block has 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(block.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(bytes: __m512i, block: &mut Block) {
    // SAFETY: a block has 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(block.as_mut_ptr().cast(), bytes) }
}

/// Fewer bytes than a block, and zeros after them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_rest(rest: &[u8]) -> __m512i {
    // SAFETY: the mask keeps the load within the slice.
    unsafe { _mm512_maskz_loadu_epi8(first(rest.len()), rest.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn store_rest(bytes: __m512i, rest: &mut [u8]) {
    // SAFETY: the mask keeps the store within the slice.
    unsafe { _mm512_mask_storeu_epi8(rest.as_mut_ptr().cast(), first(rest.len()), bytes) }
}

/// A mask of the first `n` bytes, fewer than a block.
#[inline(always)]
fn first(n: usize) -> __mmask64 {
    (1 << n) - 1
}

/// The bytes of a group up to each place, and from each place on, as masks for `xor_of`.
const UP_TO: [u8; 8] = [0x80, 0xc0, 0xe0, 0xf0, 0xf8, 0xfc, 0xfe, 0xff];
const FROM: [u8; 8] = [0xff, 0x7f, 0x3f, 0x1f, 0x0f, 0x07, 0x03, 0x01];

static PLACES: Block = tables().0;
static UP_ONE: Block = tables().1;
static LAST_OF_GROUPS: Block = tables().2;
static OTHER_GROUPS: Block = tables().3;

const fn tables() -> (Block, Block, Block, Block) {
    let mut tables = (
        [0; BUFFER_LEN],
        [0; BUFFER_LEN],
        [0; BUFFER_LEN],
        [0; BUFFER_LEN],
    );
    let mut place = 0;
    while place < BUFFER_LEN {
        tables.0[place] = place as u8;
        tables.1[place] = (place as u8).wrapping_sub(1) % 64;
        tables.2[place] = place as u8 % 8 * 8 + 7;
        tables.3[place] = !(0x80 >> (place / 8));
        place += 1;
    }
    tables
}

/// Group q takes from this block the totals of the groups before q.
const EARLIER_GROUPS: __mmask64 = 0x7f3f_1f0f_0703_0100;
