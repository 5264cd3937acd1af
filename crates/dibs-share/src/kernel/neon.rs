//! Vectors of aarch64.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use super::{portable, rows::Register};
use crate::field::NIBBLES;

#[target_feature(enable = "neon")]
pub(super) fn sum(out: &mut [u8], factors: &[u8], rows: &[&[u8]]) {
    if out.len() < size_of::<uint8x16_t>() {
        return portable::sum(out, factors, rows);
    }
    Register {
        zero: || vdupq_n_u8(0),
        plus: |sum, bytes: &_| veorq_u8(sum, load(bytes)),
        plus_times: |sum, by, bytes: &_| veorq_u8(sum, times(by, load(bytes))),
        store: |sum, place: &mut _| store(sum, place),
    }
    .sum(out, factors, rows);
}

/// The table looked up is that of the public factor, and the bytes look up within a register: no
/// address depends on them.
#[inline]
#[target_feature(enable = "neon")]
fn times(by: u8, bytes: uint8x16_t) -> uint8x16_t {
    let [low, high] = &NIBBLES[usize::from(by)];
    let lower = vandq_u8(bytes, vdupq_n_u8(0x0f));
    let upper = vshrq_n_u8::<4>(bytes);
    veorq_u8(vqtbl1q_u8(load(low), lower), vqtbl1q_u8(load(high), upper))
}

#[inline]
#[target_feature(enable = "neon")]
fn load(bytes: &[u8; 16]) -> uint8x16_t {
    // SAFETY: there are 16 bytes.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(register: uint8x16_t, place: &mut [u8; 16]) {
    // SAFETY: there are 16 bytes.
    unsafe { vst1q_u8(place.as_mut_ptr(), register) }
}
