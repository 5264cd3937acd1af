//! Every kernel against the straightforward version, and that one against the papers (Kato et al. 2019,
//! "Known-answer tests").

use dibs_scramble::{
    BUFFER_LEN, Descrambler, Kernel, Scrambler, initial_buffer,
    reference::{Revised, Straightforward},
};
use proptest::{collection::vec, prelude::*, sample::Index};

const MAX: usize = 4096;

fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

fn scrambled(initial: &[u8; BUFFER_LEN], plain: &[u8]) -> Vec<u8> {
    let mut sent = plain.to_vec();
    Straightforward::new(initial).scramble(&mut sent);
    sent
}

/// The pieces of `data` between the cuts.
fn split<'a>(data: &'a [u8], cuts: &[Index]) -> Vec<&'a [u8]> {
    let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(data.len() + 1)).collect();
    cuts.extend([0, data.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|cut| &data[cut[0]..cut[1]]).collect()
}

#[test]
fn digits_repeat_as_published() {
    let plain: Vec<u8> = b"0123456789".iter().copied().cycle().take(1024).collect();
    let sent = scrambled(&[0; BUFFER_LEN], &plain);
    for (i, byte) in sent[BUFFER_LEN..].iter().enumerate() {
        assert_eq!(
            *byte,
            b"4163850729"[i % 10],
            "byte {i} after the first {BUFFER_LEN}"
        );
    }
    assert!(sent.windows(10).any(|bytes| bytes == b"7294163850"));
}

#[test]
fn the_first_bytes_by_hand() {
    let mut mac = [0; 20];
    mac[0] = 0x01;
    mac[19] = 0x80;
    // Zeros and 0x01, 0x80: the running XOR is 0x81 until, after 44 bytes, the 0x01 leaves, and
    // after 63 the 0x80.
    let sent = scrambled(&initial_buffer(&mac), &[0; 65]);
    assert_eq!(sent[..45], [0x81; 45]);
    assert_eq!(sent[45..64], [0x80; 19]);
    assert_eq!(sent[64], 0);
    let sent = scrambled(&initial_buffer(&mac), &[0x10, 0x20, 0x40]);
    assert_eq!(sent, [0x91, 0x20 ^ 0x91, 0x40 ^ 0x91 ^ 0x20]);
}

#[test]
fn every_length() {
    let initial: [u8; BUFFER_LEN] = noise(BUFFER_LEN).try_into().expect("of that length");
    let plain = noise(MAX);
    let sent = scrambled(&initial, &plain);
    let after = scrambled(&initial, &[&plain[..], &plain[..]].concat());
    for kernel in Kernel::available() {
        for len in 0..=MAX {
            let context = || format!("{} at {len}", kernel.name());
            let mut scrambler = Scrambler::with_kernel(&initial, kernel);
            let mut output = vec![0; len];
            scrambler.scramble(&plain[..len], &mut output);
            assert!(output == sent[..len], "scramble, {}", context());

            let mut descrambler = Descrambler::with_kernel(&initial, kernel);
            descrambler.descramble(&sent[..len], &mut output);
            assert!(output == plain[..len], "descramble, {}", context());

            // And the state that is left continues the stream.
            let mut next = [&plain[len..], &plain[..64]].concat();
            scrambler.scramble_in_place(&mut next);
            assert!(
                next == after[len..][..next.len()],
                "scramble in place, {}",
                context()
            );
            descrambler.descramble_in_place(&mut next);
            assert!(
                next == [&plain[len..], &plain[..64]].concat(),
                "descramble in place, {}",
                context()
            );
        }
    }
}

#[test]
fn every_length_with_its_crc() {
    let initial: [u8; BUFFER_LEN] = noise(BUFFER_LEN).try_into().expect("of that length");
    let plain = noise(2 * MAX);
    let sent = scrambled(&initial, &plain);
    for kernel in Kernel::available() {
        let mut register = !0;
        for len in 0..=MAX {
            let context = || format!("{} at {len}", kernel.name());
            let mut scrambler = Scrambler::with_kernel(&initial, kernel);
            let mut output = vec![0; len];
            let crc = scrambler.scramble_summed(&plain[..len], &mut output);
            assert_eq!(crc, !register, "{}", context());
            assert!(output == sent[..len], "scramble, {}", context());

            let mut descrambler = Descrambler::with_kernel(&initial, kernel);
            let crc = descrambler.descramble_summed(&sent[..len], &mut output);
            assert_eq!(crc, !register, "{}", context());
            assert!(output == plain[..len], "descramble, {}", context());

            // And the state that is left continues the stream.
            let mut next = plain[len..][..100].to_vec();
            scrambler.scramble_in_place(&mut next);
            assert!(next == sent[len..][..100], "scramble on, {}", context());
            descrambler.descramble_in_place(&mut next);
            assert!(next == plain[len..][..100], "descramble on, {}", context());
            register = crc32c_of_one_more(register, plain[len]);
        }
    }
}

/// The register of a CRC-32C, bit by bit.
fn crc32c_of_one_more(register: u32, byte: u8) -> u32 {
    (0..8).fold(register ^ u32::from(byte), |x, _| {
        x >> 1 ^ if x & 1 == 1 { 0x82f6_3b78 } else { 0 }
    })
}

#[test]
fn a_clone_continues_on_its_own() {
    let plain = noise(1000);
    let mut first = Scrambler::new(&[7; BUFFER_LEN]);
    first.scramble_in_place(&mut plain[..333].to_vec());
    let mut second = first.clone();
    for scrambler in [&mut first, &mut second] {
        let mut rest = plain[333..].to_vec();
        scrambler.scramble_in_place(&mut rest);
        assert_eq!(rest, scrambled(&[7; BUFFER_LEN], &plain)[333..]);
    }
}

#[test]
#[should_panic(expected = "same length")]
fn lengths_must_agree() {
    Scrambler::new(&[0; BUFFER_LEN]).scramble(&[0; 10], &mut [0; 9]);
}

#[test]
fn the_best_kernel_is_the_first() {
    assert_eq!(Kernel::available().next(), Some(Kernel::best()));
    assert_eq!(
        Kernel::available().last().map(Kernel::name),
        Some("portable")
    );
}

proptest! {
    #[test]
    fn every_split(
        initial in any::<[u8; BUFFER_LEN]>(),
        plain in vec(any::<u8>(), 0..=MAX),
        cuts in vec(any::<Index>(), 0..40),
        in_place in any::<bool>(),
    ) {
        let sent = scrambled(&initial, &plain);
        for kernel in Kernel::available() {
            let mut scrambler = Scrambler::with_kernel(&initial, kernel);
            let mut output = Vec::new();
            for piece in split(&plain, &cuts) {
                let mut dst = piece.to_vec();
                if in_place {
                    scrambler.scramble_in_place(&mut dst);
                } else {
                    scrambler.scramble(piece, &mut dst);
                }
                output.extend(dst);
            }
            prop_assert_eq!(&output, &sent, "scramble, {}", kernel.name());

            let mut descrambler = Descrambler::with_kernel(&initial, kernel);
            output.clear();
            for piece in split(&sent, &cuts) {
                let mut dst = piece.to_vec();
                if in_place {
                    descrambler.descramble_in_place(&mut dst);
                } else {
                    descrambler.descramble(piece, &mut dst);
                }
                output.extend(dst);
            }
            prop_assert_eq!(&output, &plain, "descramble, {}", kernel.name());
        }
    }

    #[test]
    fn the_published_versions_agree(
        initial in any::<[u8; BUFFER_LEN]>(),
        plain in vec(any::<u8>(), 0..=MAX),
        cuts in vec(any::<Index>(), 0..40),
    ) {
        let sent = scrambled(&initial, &plain);
        let mut whole = sent.clone();
        Straightforward::new(&initial).descramble(&mut whole);
        prop_assert_eq!(&whole, &plain);

        let (mut sender, mut receiver) = (Revised::new(&initial), Revised::new(&initial));
        let (mut output, mut received) = (Vec::new(), Vec::new());
        for piece in split(&plain, &cuts) {
            let mut piece = piece.to_vec();
            sender.scramble(&mut piece);
            output.extend_from_slice(&piece);
            receiver.descramble(&mut piece);
            received.extend(piece);
        }
        prop_assert_eq!(&output, &sent);
        prop_assert_eq!(&received, &plain);
    }
}
