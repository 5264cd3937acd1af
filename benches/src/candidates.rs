//! Ways to need every path, without a cipher: secret sharing, network coding, and chaining of
//! blocks. All slices of a call have the same length.

/// A block of the chaining, in bytes.
const BLOCK: usize = 16;

/// One message onto two paths, either of which alone is random: `mask`, which must be random and
/// used once, and `message ^ mask`.
pub fn share(message: &[u8], mask: &[u8], other: &mut [u8]) {
    xor(message, mask, other);
}

/// Two packets onto two paths: the first one as it is, and `coded`, their XOR.
pub fn packet_xor(first: &[u8], second: &[u8], coded: &mut [u8]) {
    xor(first, second, coded);
}

/// Cipher block chaining with the identity for a cipher: each block is the XOR of all plaintext
/// blocks up to it.
pub fn chain(message: &[u8], chained: &mut [u8]) {
    let mut last = [0; BLOCK];
    for (plain, out) in message.chunks(BLOCK).zip(chained.chunks_mut(BLOCK)) {
        for ((last, plain), out) in last.iter_mut().zip(plain).zip(out) {
            *last ^= plain;
            *out = *last;
        }
    }
}

fn xor(a: &[u8], b: &[u8], out: &mut [u8]) {
    assert!(
        a.len() == b.len() && b.len() == out.len(),
        "the shares of a message have its length"
    );
    for ((a, b), out) in a.iter().zip(b).zip(out) {
        *out = a ^ b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message;

    #[test]
    fn a_share_and_its_mask_give_the_message() {
        let (text, mask) = (message(1000), message(2000).split_off(1000));
        let (mut other, mut back) = (vec![0; 1000], vec![0; 1000]);
        share(&text, &mask, &mut other);
        assert_ne!(other, text);
        share(&other, &mask, &mut back);
        assert_eq!(back, text);
    }

    #[test]
    fn chained_blocks_give_the_message_block_by_block() {
        let text = message(100);
        let mut chained = vec![0; 100];
        chain(&text, &mut chained);
        assert_eq!(chained[..BLOCK], text[..BLOCK]);
        for i in BLOCK..100 {
            assert_eq!(chained[i] ^ chained[i - BLOCK], text[i], "byte {i}");
        }
    }
}
