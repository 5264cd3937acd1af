//! Eight bytes at a time in integer registers, for every CPU.

use super::pass::{Block, Pass, descramble_rest, scramble_rest};
use crate::{BUFFER_LEN, window::Window};

const LANE: usize = size_of::<u64>();
/// Times a byte, this is the byte in every place.
const EVERYWHERE: u64 = 0x0101_0101_0101_0101;

pub(super) fn scramble(window: &mut Window, mut pass: impl Pass) {
    scramble_blocks(window, &mut pass);
    scramble_rest(window, &mut pass, |window, mut block| {
        scramble_blocks(window, &mut block)
    });
}

pub(super) fn descramble(window: &mut Window, mut pass: impl Pass) {
    descramble_blocks(window, &mut pass);
    descramble_rest(window, &mut pass, |window, mut block| {
        descramble_blocks(window, &mut block)
    });
}

#[inline(always)]
fn scramble_blocks(window: &mut Window, pass: &mut impl Pass) {
    let mut before = load(&window.bytes);
    let mut xor = u64::from(window.xor);
    for block in 0..pass.blocks() {
        let plain = load(pass.src(block));
        let sent = std::array::from_fn(|lane| {
            // The XOR from this byte of the lane before to its end is that of the whole lane, which
            // is in `xor`, and of its bytes before this one.
            let mut prefix = plain[lane] ^ (before[lane] << 8);
            prefix ^= prefix << 8;
            prefix ^= prefix << 16;
            prefix ^= prefix << 32;
            let sent = prefix ^ (xor * EVERYWHERE);
            xor ^= (prefix ^ before[lane]) >> 56;
            sent
        });
        store(&sent, pass.dst(block));
        before = plain;
    }
    store(&before, &mut window.bytes);
    window.xor = xor as u8;
}

#[inline(always)]
fn descramble_blocks(window: &mut Window, pass: &mut impl Pass) {
    let mut plain = load(&window.bytes);
    let mut xor = u64::from(window.xor);
    for block in 0..pass.blocks() {
        let sent = load(pass.src(block));
        for (plain, sent) in plain.iter_mut().zip(sent) {
            let y = sent ^ *plain;
            *plain = sent ^ (y << 8 | xor);
            xor = y >> 56;
        }
        store(&plain, pass.dst(block));
    }
    store(&plain, &mut window.bytes);
    window.xor = xor as u8;
}

#[inline(always)]
fn load(block: &Block) -> [u64; BUFFER_LEN / LANE] {
    let (lanes, _) = block.as_chunks();
    std::array::from_fn(|lane| u64::from_le_bytes(lanes[lane]))
}

#[inline(always)]
fn store(values: &[u64; BUFFER_LEN / LANE], block: &mut Block) {
    let (lanes, _) = block.as_chunks_mut();
    for (lane, value) in lanes.iter_mut().zip(values) {
        *lane = value.to_le_bytes();
    }
}
