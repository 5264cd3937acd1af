//! Four blocks at a time with VAES, VPCLMULQDQ, GFNI and AVX-512.
//!
//! GCM writes polynomials with the coefficient of x^0 in the most significant bit of the first byte.
//! With the bits of every byte reversed, a block is a little-endian number whose bit i is the
//! coefficient of x^i, which carry-less products take as it is. That is one bit matrix per vector
//! (GFNI), on another port than the products; reversing the bytes instead would compete with them.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use zeroize::{Zeroize, ZeroizeOnDrop};

use crate::{KEY_LEN, NONCE_LEN, TAG_LEN};

const BLOCK: usize = 16;
/// Blocks in a vector.
const LANES: usize = 4;
const VECTOR: usize = LANES * BLOCK;
/// Blocks in one sum: a datagram of an Ethernet frame, its padding and the block of lengths.
const POWERS: usize = 96;
const ROUNDS: usize = 14;
/// Bytes of text that the vector of the first counter block has room for.
const FIRST: usize = VECTOR - BLOCK;
/// Vectors of counter blocks encrypted together, as many as hide the latency of a round.
const TOGETHER: usize = 4;

type Block = [u8; BLOCK];

/// What is derived from a key.
#[repr(C, align(64))]
#[derive(Zeroize, ZeroizeOnDrop)]
pub(crate) struct Schedule {
    /// H^96 to H, with the bits of each byte reversed; behind them zeros, so that a vector of
    /// powers can be loaded from each.
    powers: [Block; POWERS + LANES - 1],
    round_keys: [Block; ROUNDS + 1],
}

fn detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("vaes")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("gfni")
}

impl Schedule {
    pub(crate) fn new(key: &[u8; KEY_LEN]) -> Option<Box<Self>> {
        detected().then(|| {
            let mut schedule = Box::new(Self {
                powers: [[0; BLOCK]; POWERS + LANES - 1],
                round_keys: [[0; BLOCK]; ROUNDS + 1],
            });
            // SAFETY: the CPU features have just been found.
            unsafe { schedule.derive(key) };
            schedule
        })
    }

    pub(crate) fn seal(
        &self,
        nonce: &[u8; NONCE_LEN],
        aad: &[u8],
        text: &mut [u8],
    ) -> [u8; TAG_LEN] {
        // SAFETY: a schedule exists only where `new` found the CPU features.
        unsafe { self.seal_vectors(nonce, aad, text) }
    }

    pub(crate) fn open(
        &self,
        nonce: &[u8; NONCE_LEN],
        aad: &[u8],
        text: &mut [u8],
        tag: &[u8; TAG_LEN],
    ) -> bool {
        // SAFETY: a schedule exists only where `new` found the CPU features.
        unsafe { self.open_vectors(nonce, aad, text, tag) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn derive(&mut self, key: &[u8; KEY_LEN]) {
        expand(key, &mut self.round_keys);
        let [h] = self.encrypt([_mm512_setzero_si512()]);
        let h = _mm512_zextsi128_si512(_mm512_castsi512_si128(reverse_bits(h)));
        let mut power = h;
        for place in self.powers[..POWERS].iter_mut().rev() {
            store_block(_mm512_castsi512_si128(power), place);
            let mut product = Sum::zero();
            product.add(power, h);
            power = _mm512_zextsi128_si512(product.reduced());
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn seal_vectors(&self, nonce: &[u8; NONCE_LEN], aad: &[u8], text: &mut [u8]) -> [u8; TAG_LEN] {
        let counters = Counters::new(nonce);
        let (mask, pad) = self.first_pads(&counters);
        let mut ghash = Ghash::new(self, aad.len(), text.len());
        ghash.absorb(aad);
        let (first, rest) = text.split_at_mut(text.len().min(FIRST));
        if !first.is_empty() {
            ghash.prepare(first.len());
            ghash.absorb_part(xor_with(first, pad), first.len());
        }
        for (i, group) in rest.chunks_mut(TOGETHER * VECTOR).enumerate() {
            ghash.prepare(group.len());
            self.crypt(&counters, i * TOGETHER, group, Some(&mut ghash));
        }
        let mut tag = [0; TAG_LEN];
        store_block(
            _mm_xor_si128(ghash.finish(aad.len(), first.len() + rest.len()), mask),
            &mut tag,
        );
        tag
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn open_vectors(
        &self,
        nonce: &[u8; NONCE_LEN],
        aad: &[u8],
        text: &mut [u8],
        tag: &[u8; TAG_LEN],
    ) -> bool {
        let counters = Counters::new(nonce);
        let (mask, pad) = self.first_pads(&counters);
        let mut ghash = Ghash::new(self, aad.len(), text.len());
        ghash.absorb(aad);
        ghash.absorb(text);
        let expected = _mm_xor_si128(ghash.finish(aad.len(), text.len()), mask);
        let difference = _mm_xor_si128(expected, load_block(tag));
        if _mm_testz_si128(difference, difference) == 0 {
            return false;
        }
        let (first, rest) = text.split_at_mut(text.len().min(FIRST));
        xor_with(first, pad);
        for (i, group) in rest.chunks_mut(TOGETHER * VECTOR).enumerate() {
            self.crypt(&counters, i * TOGETHER, group, None);
        }
        true
    }

    /// The encrypted first counter block, which masks the tag, and the pads of the text's first
    /// `FIRST` bytes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn first_pads(&self, counters: &Counters) -> (__m128i, __m512i) {
        const LANES_FROM_1: i32 = 0b00_11_10_01;
        let [pads] = self.encrypt([counters.from(1)]);
        (
            _mm512_castsi512_si128(pads),
            _mm512_shuffle_i64x2::<LANES_FROM_1>(pads, pads),
        )
    }

    /// XORs the text with its pads, beginning at vector `at` behind the text's first bytes, and lets
    /// `ghash` absorb the result.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn crypt(
        &self,
        counters: &Counters,
        at: usize,
        text: &mut [u8],
        mut ghash: Option<&mut Ghash<'_>>,
    ) {
        // The vector of the mask came first. A text that GCM allows does not exceed the counter.
        let counter = |vector: usize| counters.from(((1 + at + vector) * LANES + 1) as u32);
        let mut apply = |part: &mut [u8], pad| {
            let text = xor_with(part, pad);
            if let Some(ghash) = &mut ghash {
                ghash.absorb_part(text, part.len());
            }
        };
        if text.len() == TOGETHER * VECTOR {
            let pads = self.encrypt([counter(0), counter(1), counter(2), counter(3)]);
            for (part, pad) in text.chunks_mut(VECTOR).zip(pads) {
                apply(part, pad);
            }
        } else {
            for (i, part) in text.chunks_mut(VECTOR).enumerate() {
                let [pad] = self.encrypt([counter(i)]);
                apply(part, pad);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn encrypt<const N: usize>(&self, mut blocks: [__m512i; N]) -> [__m512i; N] {
        let [first, middle @ .., last] = &self.round_keys;
        let in_all_lanes = |key: &Block| _mm512_broadcast_i32x4(load_block(key));
        for block in &mut blocks {
            *block = _mm512_xor_si512(*block, in_all_lanes(first));
        }
        for key in middle {
            for block in &mut blocks {
                *block = _mm512_aesenc_epi128(*block, in_all_lanes(key));
            }
        }
        for block in &mut blocks {
            *block = _mm512_aesenclast_epi128(*block, in_all_lanes(last));
        }
        blocks
    }
}

/// The counter blocks of a nonce.
struct Counters(__m512i);

impl Counters {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn new(nonce: &[u8; NONCE_LEN]) -> Self {
        // In the two words that callers make nonces of, so that these come straight from their
        // stores.
        let [a, b, c, d, tail @ ..] = *nonce;
        let (head, tail) = (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(tail));
        let low = u64::from(head) | tail << 32;
        let block = _mm_set_epi64x((tail >> 32).cast_signed(), low.cast_signed());
        Self(_mm512_broadcast_i32x4(block))
    }

    /// Four of them, the first with the counter `first`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn from(&self, first: u32) -> __m512i {
        const LAST_WORDS: __mmask16 = 0x8888;
        let lanes = _mm512_set_epi32(3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0);
        let first = _mm512_maskz_set1_epi32(LAST_WORDS, first.cast_signed());
        let big_endian = _mm512_set4_epi32(0x0c0d_0e0f, 0x0809_0a0b, 0x0405_0607, 0x0001_0203);
        let words = _mm512_shuffle_epi8(_mm512_add_epi32(lanes, first), big_endian);
        _mm512_or_si512(self.0, words)
    }
}

/// GHASH under way.
struct Ghash<'a> {
    schedule: &'a Schedule,
    sum: Sum,
    /// The power of H for the next block, or 0 at the end of a sum.
    power: usize,
    /// Whether the whole input is one sum.
    one_sum: bool,
}

impl<'a> Ghash<'a> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn new(schedule: &'a Schedule, aad: usize, text: usize) -> Self {
        let blocks = aad.div_ceil(BLOCK) + text.div_ceil(BLOCK) + 1;
        let one_sum = blocks <= POWERS;
        Self {
            schedule,
            sum: Sum::zero(),
            power: if one_sum { blocks } else { 0 },
            one_sum,
        }
    }

    /// Takes `bytes` in, padded with zeros to whole blocks.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn absorb(&mut self, bytes: &[u8]) {
        for run in bytes.chunks(POWERS * BLOCK) {
            self.prepare(run.len());
            let powers = self.powers_of(run.len());
            let (vectors, rest) = run.as_chunks::<VECTOR>();
            let (pairs, odd) = vectors.as_chunks::<2>();
            for ([a, b], [p, q]) in pairs.iter().zip(powers.as_chunks::<2>().0) {
                let (a, b) = (reverse_bits(load(a)), reverse_bits(load(b)));
                self.sum.add_two(a, load_powers(p), b, load_powers(q));
            }
            if let [vector] = odd {
                let powers = load_powers(&powers[vectors.len() - 1]);
                self.sum.add(reverse_bits(load(vector)), powers);
            }
            if !rest.is_empty() {
                let powers = load_powers(&powers[vectors.len()]);
                self.sum.add(reverse_bits(load_part(rest)), powers);
            }
        }
    }

    /// Takes in the `len` bytes, at most a vector, that `bytes` has before zeros, once prepared for.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn absorb_part(&mut self, bytes: __m512i, len: usize) {
        let powers = self.powers_of(len);
        self.sum.add(reverse_bits(bytes), load_powers(&powers[0]));
    }

    /// The powers for the next `len` bytes, in vectors.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn powers_of(&mut self, len: usize) -> &'a [[Block; LANES]] {
        let blocks = len.div_ceil(BLOCK);
        let powers = &self.schedule.powers[POWERS - self.power..];
        self.power -= blocks;
        powers.as_chunks().0
    }

    /// To be called before bytes are absorbed: where the input is several sums, ends one and begins
    /// the next, of `len` bytes. What was before counts as if added to its first block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn prepare(&mut self, len: usize) {
        if self.one_sum {
            return;
        }
        self.power = len.div_ceil(BLOCK);
        let before = _mm512_zextsi128_si512(self.sum.reduced());
        let power = load_block(&self.schedule.powers[POWERS - self.power]);
        self.sum = Sum::zero();
        self.sum.add(before, _mm512_zextsi128_si512(power));
    }

    /// The hash, after the block of lengths.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn finish(mut self, aad: usize, text: usize) -> __m128i {
        let bits = |len: usize| (len as u64 * 8).swap_bytes().cast_signed();
        let lengths = _mm512_zextsi128_si512(_mm_set_epi64x(bits(text), bits(aad)));
        self.prepare(BLOCK);
        self.absorb_part(lengths, BLOCK);
        _mm_gf2p8affine_epi64_epi8::<0>(self.sum.reduced(), _mm_set1_epi64x(REVERSAL))
    }
}

/// A sum of products, not reduced, of four lanes that are to be added.
struct Sum {
    /// At x^0, x^64 and x^128.
    low: __m512i,
    middle: __m512i,
    high: __m512i,
}

const XOR3: i32 = 0b1001_0110;

impl Sum {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn zero() -> Self {
        let zero = _mm512_setzero_si512();
        Self {
            low: zero,
            middle: zero,
            high: zero,
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn add(&mut self, a: __m512i, p: __m512i) {
        self.low = _mm512_xor_si512(self.low, _mm512_clmulepi64_epi128::<0x00>(a, p));
        self.high = _mm512_xor_si512(self.high, _mm512_clmulepi64_epi128::<0x11>(a, p));
        self.middle = middle(self.middle, a, p);
    }

    /// Adds `a p + b q`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn add_two(&mut self, a: __m512i, p: __m512i, b: __m512i, q: __m512i) {
        self.low = _mm512_ternarylogic_epi64::<XOR3>(
            self.low,
            _mm512_clmulepi64_epi128::<0x00>(a, p),
            _mm512_clmulepi64_epi128::<0x00>(b, q),
        );
        self.high = _mm512_ternarylogic_epi64::<XOR3>(
            self.high,
            _mm512_clmulepi64_epi128::<0x11>(a, p),
            _mm512_clmulepi64_epi128::<0x11>(b, q),
        );
        self.middle = middle(middle(self.middle, a, p), b, q);
    }

    /// The lanes added, modulo x^128 + x^7 + x^2 + x + 1.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
    fn reduced(&self) -> __m128i {
        let low = lanes_added(_mm512_xor_si512(
            self.low,
            _mm512_bslli_epi128::<8>(self.middle),
        ));
        let high = lanes_added(_mm512_xor_si512(
            self.high,
            _mm512_bsrli_epi128::<8>(self.middle),
        ));
        // x^128 = x^7 + x^2 + x + 1: first for what stands at x^192 and above, then for the 64 bits
        // at x^128, to which the first has added.
        let modulus = _mm_set_epi64x(0, 0x87);
        let fold = _mm_clmulepi64_si128::<0x01>(high, modulus);
        let low = _mm_xor_si128(low, _mm_bslli_si128::<8>(fold));
        let high = _mm_xor_si128(high, _mm_bsrli_si128::<8>(fold));
        _mm_xor_si128(low, _mm_clmulepi64_si128::<0x00>(high, modulus))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn middle(sum: __m512i, a: __m512i, p: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<XOR3>(
        sum,
        _mm512_clmulepi64_epi128::<0x01>(a, p),
        _mm512_clmulepi64_epi128::<0x10>(a, p),
    )
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn lanes_added(lanes: __m512i) -> __m128i {
    let two = _mm256_xor_si256(
        _mm512_castsi512_si256(lanes),
        _mm512_extracti64x4_epi64::<1>(lanes),
    );
    _mm_xor_si128(
        _mm256_castsi256_si128(two),
        _mm256_extracti128_si256::<1>(two),
    )
}

/// The bit matrix that reverses the bits of a byte.
const REVERSAL: i64 = 0x8040_2010_0804_0201_u64.cast_signed();

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn reverse_bits(bytes: __m512i) -> __m512i {
    _mm512_gf2p8affine_epi64_epi8::<0>(bytes, _mm512_set1_epi64(REVERSAL))
}

/// The round keys (FIPS 197, 5.2), by the CPU's own S-box: a table would tell the key by its timing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn expand(key: &[u8; KEY_LEN], round_keys: &mut [Block; ROUNDS + 1]) {
    let (halves, _) = key.as_chunks::<BLOCK>();
    let (mut even, mut odd) = (load_block(&halves[0]), load_block(&halves[1]));
    store_block(even, &mut round_keys[0]);
    store_block(odd, &mut round_keys[1]);
    for (i, round_key) in round_keys[2..].iter_mut().enumerate() {
        if i % 2 == 0 {
            let word = _mm_shuffle_epi32::<0xff>(_mm_aeskeygenassist_si128::<0>(odd));
            let constant = _mm_set1_epi32(1 << (i / 2));
            even = _mm_xor_si128(words_summed(even), _mm_xor_si128(word, constant));
            store_block(even, round_key);
        } else {
            let word = _mm_shuffle_epi32::<0xaa>(_mm_aeskeygenassist_si128::<0>(even));
            odd = _mm_xor_si128(words_summed(odd), word);
            store_block(odd, round_key);
        }
    }
}

/// Each word XORed with those before it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn words_summed(words: __m128i) -> __m128i {
    let words = _mm_xor_si128(words, _mm_bslli_si128::<4>(words));
    _mm_xor_si128(words, _mm_bslli_si128::<8>(words))
}

/// XORs `bytes`, at most a vector, with the pad, and returns the result with zeros after it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn xor_with(bytes: &mut [u8], pad: __m512i) -> __m512i {
    let mask = first(bytes.len());
    let xored = _mm512_maskz_mov_epi8(mask, _mm512_xor_si512(load_part(bytes), pad));
    // SAFETY: the mask keeps the store within the slice.
    unsafe { _mm512_mask_storeu_epi8(bytes.as_mut_ptr().cast(), mask, xored) };
    xored
}

/// At most a vector, and zeros after it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn load_part(bytes: &[u8]) -> __m512i {
    // SAFETY: the mask keeps the load within the slice.
    unsafe { _mm512_maskz_loadu_epi8(first(bytes.len()), bytes.as_ptr().cast()) }
}

/// A mask of the first `n` bytes, at most all of a vector.
#[inline(always)]
fn first(n: usize) -> __mmask64 {
    assert!(n <= VECTOR, "a part of a vector is no longer than it");
    u64::MAX.checked_shr((VECTOR - n) as u32).unwrap_or(0)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn load(vector: &[u8; VECTOR]) -> __m512i {
    // SAFETY: a vector has 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn load_powers(powers: &[Block; LANES]) -> __m512i {
    // SAFETY: four blocks have 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(powers.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn load_block(block: &Block) -> __m128i {
    // SAFETY: a block has 16 bytes, and the load needs no alignment.
    unsafe { _mm_loadu_si128(block.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vaes,vpclmulqdq,gfni")]
fn store_block(value: __m128i, block: &mut Block) {
    // SAFETY: a block has 16 bytes, and the store needs no alignment.
    unsafe { _mm_storeu_si128(block.as_mut_ptr().cast(), value) }
}
