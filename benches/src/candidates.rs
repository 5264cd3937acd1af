//! Ways to need every path, without a cipher: network coding, and chaining of blocks. All slices of
//! a call have the same length. Secret sharing, the third, is `dibs-share`.

/// A block of the chaining, in bytes.
const BLOCK: usize = 16;

/// Two packets onto two paths: the first one as it is, and `coded`, their XOR.
pub fn packet_xor(first: &[u8], second: &[u8], coded: &mut [u8]) {
    assert!(
        first.len() == second.len() && second.len() == coded.len(),
        "packets that are coded together have one length"
    );
    for ((first, second), coded) in first.iter().zip(second).zip(coded) {
        *coded = first ^ second;
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message;

    #[test]
    fn a_packet_and_the_coded_one_give_the_other() {
        let (first, second) = (message(1000), message(2000).split_off(1000));
        let (mut coded, mut back) = (vec![0; 1000], vec![0; 1000]);
        packet_xor(&first, &second, &mut coded);
        packet_xor(&first, &coded, &mut back);
        assert_eq!(back, second);
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
