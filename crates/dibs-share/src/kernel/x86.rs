//! Vectors of x86-64. `gf2p8mulb` multiplies in just this field.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{portable, rows::Register};
use crate::field::NIBBLES;

pub(super) fn gfni_512_detected() -> bool {
    gfni_256_detected()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
}

pub(super) fn gfni_256_detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("gfni")
}

#[target_feature(enable = "avx2,avx512f,avx512bw,gfni")]
pub(super) fn sum_gfni_512(out: &mut [u8], factors: &[u8], rows: &[&[u8]]) {
    if out.len() < size_of::<__m512i>() {
        return sum_gfni_256(out, factors, rows);
    }
    Register {
        zero: || _mm512_setzero_si512(),
        plus: |sum, bytes: &_| _mm512_xor_si512(sum, load_512(bytes)),
        plus_times: |sum, by: u8, bytes: &_| {
            let by = _mm512_set1_epi8(by.cast_signed());
            _mm512_xor_si512(sum, _mm512_gf2p8mul_epi8(load_512(bytes), by))
        },
        store: |sum, place: &mut _| store_512(sum, place),
    }
    .sum(out, factors, rows);
}

#[target_feature(enable = "avx2,gfni")]
pub(super) fn sum_gfni_256(out: &mut [u8], factors: &[u8], rows: &[&[u8]]) {
    if out.len() < size_of::<__m256i>() {
        return portable::sum(out, factors, rows);
    }
    Register {
        zero: || _mm256_setzero_si256(),
        plus: |sum, bytes: &_| _mm256_xor_si256(sum, load(bytes)),
        plus_times: |sum, by: u8, bytes: &_| {
            let by = _mm256_set1_epi8(by.cast_signed());
            _mm256_xor_si256(sum, _mm256_gf2p8mul_epi8(load(bytes), by))
        },
        store: |sum, place: &mut _| store(sum, place),
    }
    .sum(out, factors, rows);
}

#[target_feature(enable = "avx2")]
pub(super) fn sum_avx2(out: &mut [u8], factors: &[u8], rows: &[&[u8]]) {
    if out.len() < size_of::<__m256i>() {
        return portable::sum(out, factors, rows);
    }
    Register {
        zero: || _mm256_setzero_si256(),
        plus: |sum, bytes: &_| _mm256_xor_si256(sum, load(bytes)),
        plus_times: |sum, by, bytes: &_| _mm256_xor_si256(sum, times(by, load(bytes))),
        store: |sum, place: &mut _| store(sum, place),
    }
    .sum(out, factors, rows);
}

/// The table looked up is that of the public factor, and the bytes look up within a register: no
/// address depends on them.
#[inline]
#[target_feature(enable = "avx2")]
fn times(by: u8, bytes: __m256i) -> __m256i {
    let [low, high] = &NIBBLES[usize::from(by)];
    let nibble = _mm256_set1_epi8(0x0f);
    let lower = _mm256_and_si256(bytes, nibble);
    let upper = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble);
    _mm256_xor_si256(
        _mm256_shuffle_epi8(table(low), lower),
        _mm256_shuffle_epi8(table(high), upper),
    )
}

#[inline]
#[target_feature(enable = "avx2")]
fn table(table: &[u8; 16]) -> __m256i {
    // SAFETY: the table has 16 bytes, and the load needs no alignment.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: there are 32 bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(register: __m256i, place: &mut [u8; 32]) {
    // SAFETY: there are 32 bytes, and the store needs no alignment.
    unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), register) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_512(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: there are 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_512(register: __m512i, place: &mut [u8; 64]) {
    // SAFETY: there are 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), register) }
}
