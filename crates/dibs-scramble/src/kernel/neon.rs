//! 16 bytes at a time.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use super::pass::{Block, Pass, descramble_rest, scramble_rest};
use crate::window::Window;

#[target_feature(enable = "neon")]
pub(super) fn scramble(window: &mut Window, mut pass: impl Pass) {
    scramble_blocks(window, &mut pass);
    scramble_rest(window, &mut pass, |window, mut block| {
        scramble_blocks(window, &mut block)
    });
}

#[target_feature(enable = "neon")]
pub(super) fn descramble(window: &mut Window, mut pass: impl Pass) {
    descramble_blocks(window, &mut pass);
    descramble_rest(window, &mut pass, |window, mut block| {
        descramble_blocks(window, &mut block)
    });
}

#[inline]
#[target_feature(enable = "neon")]
fn scramble_blocks(window: &mut Window, pass: &mut impl Pass) {
    let mut before = load(&window.bytes);
    let mut xor = vdupq_n_u8(window.xor);
    for block in 0..pass.blocks() {
        let plain = load(pass.src(block));
        let mut sent = plain;
        for lane in 0..4 {
            sent[lane] = scrambled(plain[lane], before[lane], &mut xor);
        }
        store(sent, pass.dst(block));
        before = plain;
    }
    store(before, &mut window.bytes);
    window.xor = vgetq_lane_u8::<0>(xor);
}

#[inline]
#[target_feature(enable = "neon")]
fn descramble_blocks(window: &mut Window, pass: &mut impl Pass) {
    let mut plain = load(&window.bytes);
    let mut y = vdupq_n_u8(window.xor);
    for block in 0..pass.blocks() {
        let sent = load(pass.src(block));
        for lane in 0..4 {
            let next = veorq_u8(sent[lane], plain[lane]);
            plain[lane] = veorq_u8(sent[lane], vextq_u8::<15>(y, next));
            y = next;
        }
        store(plain, pass.dst(block));
    }
    store(plain, &mut window.bytes);
    window.xor = vgetq_lane_u8::<15>(y);
}

/// Scrambles a lane, `before` being that lane of the block before. `xor` is the running XOR, in
/// every byte; from one lane to the next it takes only an XOR with what is known without it.
#[inline]
#[target_feature(enable = "neon")]
fn scrambled(plain: uint8x16_t, before: uint8x16_t, xor: &mut uint8x16_t) -> uint8x16_t {
    let zero = vdupq_n_u8(0);
    // The XOR from a byte of the lane before to its end is that of the whole lane, which is in
    // `xor`, and of its bytes before this one.
    let mut prefix = veorq_u8(plain, vextq_u8::<15>(zero, before));
    prefix = veorq_u8(prefix, vextq_u8::<15>(zero, prefix));
    prefix = veorq_u8(prefix, vextq_u8::<14>(zero, prefix));
    prefix = veorq_u8(prefix, vextq_u8::<12>(zero, prefix));
    prefix = veorq_u8(prefix, vextq_u8::<8>(zero, prefix));
    let sent = veorq_u8(prefix, *xor);
    *xor = veorq_u8(*xor, vdupq_laneq_u8::<15>(veorq_u8(prefix, before)));
    sent
}

#[inline]
#[target_feature(enable = "neon")]
fn load(block: &Block) -> [uint8x16_t; 4] {
    let at = block.as_ptr();
    // SAFETY: a block has four times 16 bytes.
    unsafe {
        [
            vld1q_u8(at),
            vld1q_u8(at.add(16)),
            vld1q_u8(at.add(32)),
            vld1q_u8(at.add(48)),
        ]
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(lanes: [uint8x16_t; 4], block: &mut Block) {
    let at = block.as_mut_ptr();
    // SAFETY: a block has four times 16 bytes.
    unsafe {
        vst1q_u8(at, lanes[0]);
        vst1q_u8(at.add(16), lanes[1]);
        vst1q_u8(at.add(32), lanes[2]);
        vst1q_u8(at.add(48), lanes[3]);
    }
}
