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
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("sse4.2")
}

/// Returns the CRC-32C of the plaintext if `CRC`, otherwise 0.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni,vpclmulqdq,sse4.2")]
pub(super) fn scramble<const CRC: bool>(window: &mut Window, mut pass: impl Pass) -> u32 {
    let mut crc = Crc::new();
    let mut before = Sums::of(load(&window.bytes));
    let whole = pass.blocks() / LANES * LANES;
    for group in (0..whole).step_by(LANES) {
        for lane in 0..LANES {
            fetch_ahead(pass.src(group + lane));
            fetch_to_write_ahead(pass.dst(group + lane));
            let plain = Sums::of(load(pass.src(group + lane)));
            store(plain.scrambled_after(&before), pass.dst(group + lane));
            before = plain;
            if CRC {
                crc.add_to_lane(lane, plain.bytes);
            }
        }
    }
    crc.join::<CRC>();
    for block in whole..pass.blocks() {
        let plain = Sums::of(load(pass.src(block)));
        store(plain.scrambled_after(&before), pass.dst(block));
        before = plain;
        if CRC {
            crc.add(plain.bytes);
        }
    }
    let mut last = _mm512_setzero_si512();
    let n = pass.src_rest().len();
    if n > 0 {
        let plain = Sums::of(load_rest(pass.src_rest()));
        store_rest(plain.scrambled_after(&before), pass.dst_rest());
        last = plain.bytes;
        before = Sums::of(shift_in(before.bytes, plain.bytes, n));
    }
    store(before.bytes, &mut window.bytes);
    window.xor = first_byte(xor_of(before.totals, _mm512_set1_epi8(-1)));
    crc.finish::<CRC>(pass.blocks(), last, n)
}

/// Returns the CRC-32C of the plaintext if `CRC`, otherwise 0.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni,vpclmulqdq,sse4.2")]
pub(super) fn descramble<const CRC: bool>(window: &mut Window, mut pass: impl Pass) -> u32 {
    let mut crc = Crc::new();
    let mut plain = load(&window.bytes);
    let mut xor = _mm512_set1_epi8(window.xor.cast_signed());
    let whole = pass.blocks() / LANES * LANES;
    for group in (0..whole).step_by(LANES) {
        for lane in 0..LANES {
            fetch_ahead(pass.src(group + lane));
            fetch_to_write_ahead(pass.dst(group + lane));
            (plain, xor) = descrambled(load(pass.src(group + lane)), plain, xor);
            store(plain, pass.dst(group + lane));
            if CRC {
                crc.add_to_lane(lane, plain);
            }
        }
    }
    crc.join::<CRC>();
    for block in whole..pass.blocks() {
        (plain, xor) = descrambled(load(pass.src(block)), plain, xor);
        store(plain, pass.dst(block));
        if CRC {
            crc.add(plain);
        }
    }
    let mut rest = _mm512_setzero_si512();
    let n = pass.src_rest().len();
    if n > 0 {
        let sent = load_rest(pass.src_rest());
        let before = plain;
        (rest, _) = descrambled(sent, before, xor);
        store_rest(rest, pass.dst_rest());
        plain = shift_in(before, rest, n);
        let last = _mm512_set1_epi8(n as i8 - 1);
        xor = _mm512_permutexvar_epi8(last, _mm512_xor_si512(sent, before));
    }
    store(plain, &mut window.bytes);
    window.xor = first_byte(xor);
    crc.finish::<CRC>(pass.blocks(), rest, n)
}

/// Blocks in turn have CRCs of their own, as each step of one takes long.
const LANES: usize = 4;

/// All three of a ternary operation.
const XOR3: i32 = 0b1001_0110;

/// A CRC-32C under way, by folding (Gopal et al., "Fast CRC computation for generic polynomials using
/// PCLMULQDQ"): a block as a polynomial, congruent to all of its lane so far.
struct Crc {
    lanes: [__m512i; LANES],
    /// The initial value, until the first block has taken it.
    initial: __m512i,
}

impl Crc {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Self {
            lanes: [_mm512_setzero_si512(); LANES],
            initial: _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1)),
        }
    }

    /// Adds a block; they come to the lanes in turn.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add_to_lane(&mut self, lane: usize, mut block: __m512i) {
        if lane == 0 {
            block = _mm512_xor_si512(block, self.initial);
            self.initial = _mm512_setzero_si512();
        }
        self.lanes[lane] = folded(self.lanes[lane], BY_256, block);
    }

    /// Joins the lanes, after as many blocks for each, in the last one.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn join<const CRC: bool>(&mut self) {
        if CRC {
            let [a, b, c, d] = self.lanes;
            self.lanes[3] = folded(a, BY_192, folded(b, BY_128, folded(c, BY_64, d)));
        }
    }

    /// Adds a block to the lanes' sum.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add(&mut self, block: __m512i) {
        let block = _mm512_xor_si512(block, self.initial);
        self.initial = _mm512_setzero_si512();
        self.lanes[3] = folded(self.lanes[3], BY_64, block);
    }

    /// The CRC after so many blocks and the first `n` bytes of `rest`, which has zeros after them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,vpclmulqdq,sse4.2")]
    fn finish<const CRC: bool>(&self, blocks: usize, rest: __m512i, n: usize) -> u32 {
        if !CRC {
            return 0;
        }
        let value = if blocks == 0 {
            let (value, bytes) = words_crc(u32::MAX, rest, n / 8);
            let last = &bytes[n / 8 * 8..n];
            last.iter().fold(value, |value, &b| _mm_crc32_u8(value, b))
        } else {
            // Cut anew, so that whole blocks end where the rest does.
            let all = self.lanes[3];
            let first = shift_in(_mm512_setzero_si512(), all, n);
            let last = folded(first, BY_64, shift_in(all, rest, n));
            words_crc(0, last, BUFFER_LEN / 8).0
        };
        !value
    }
}

/// `x` moved on by a distance, and what stands there.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn folded(x: __m512i, distance: [u32; 2], next: __m512i) -> __m512i {
    let [low, high] = distance.map(i64::from);
    let by = _mm512_set_epi64(high, low, high, low, high, low, high, low);
    _mm512_ternarylogic_epi64::<XOR3>(
        _mm512_clmulepi64_epi128::<0x00>(x, by),
        _mm512_clmulepi64_epi128::<0x11>(x, by),
        next,
    )
}

/// Goes on with the first words of a block, and gives the block's bytes.
#[inline]
#[target_feature(enable = "avx512f,sse4.2")]
fn words_crc(value: u32, block: __m512i, words: usize) -> (u32, Block) {
    let mut bytes = [0; BUFFER_LEN];
    store(block, &mut bytes);
    let (all, _) = bytes.as_chunks();
    let value = all[..words].iter().fold(u64::from(value), |value, word| {
        _mm_crc32_u64(value, u64::from_le_bytes(*word))
    });
    (value as u32, bytes)
}

/// x^(8d + 31) and x^(8d - 33) modulo the polynomial, reflected: they move a block on by d bytes.
const BY_64: [u32; 2] = moved_by(64);
const BY_128: [u32; 2] = moved_by(128);
const BY_192: [u32; 2] = moved_by(192);
const BY_256: [u32; 2] = moved_by(256);

const fn moved_by(distance: usize) -> [u32; 2] {
    [power(8 * distance + 31), power(8 * distance - 33)]
}

const fn power(mut n: usize) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut x = 1 << 31;
    while n > 0 {
        x = x >> 1 ^ if x & 1 == 1 { POLYNOMIAL } else { 0 };
        n -= 1;
    }
    x
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

/// How far ahead memory is fetched into the cache, into the next datagram, too: what the processor does
/// on its own account ends with the page.
const AHEAD: usize = 1024;

#[inline(always)]
fn fetch_ahead(block: &Block) {
    // SAFETY: a prefetch reads nothing, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().wrapping_add(AHEAD).cast()) }
}

#[inline(always)]
fn fetch_to_write_ahead(block: &Block) {
    // SAFETY: as above.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(block.as_ptr().wrapping_add(AHEAD).cast()) }
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
