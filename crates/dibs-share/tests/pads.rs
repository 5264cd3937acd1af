//! The generator of pads against published values and against a library's AES-256-CTR.

use aws_lc_rs::{
    cipher::{AES_256, DecryptionContext, EncryptingKey, EncryptionContext, UnboundCipherKey},
    iv::FixedLength,
};
use dibs_share::{Pads, SEED_LEN};
use proptest::{collection::vec, prelude::*};

/// The generator by its definition, of `pools` keys.
fn expected(seed: &[u8; SEED_LEN], pools: usize) -> Vec<u8> {
    let (mut key, mut stream) = (seed.to_vec(), Vec::new());
    for _ in 0..pools {
        let cipher = UnboundCipherKey::new(&AES_256, &key).expect("a key of its length");
        let cipher = EncryptingKey::ctr(cipher).expect("a mode of the library");
        let mut pool = vec![0; 4096];
        let from_zero = EncryptionContext::Iv128(FixedLength::from([0; 16]));
        let _: DecryptionContext = cipher
            .less_safe_encrypt(&mut pool, from_zero)
            .expect("a counter that starts at 0");
        stream.extend(pool.split_off(SEED_LEN));
        key = pool;
    }
    stream
}

#[test]
fn blocks_as_published() {
    // AES-256 with a key of zeros, of 2: the ciphertext of test case 14 of GCM (McGrew and Viega).
    // Of 0 and 1, its H and its E(K, Y0), make the next key.
    let mut block = [0; 16];
    Pads::new(&[0; SEED_LEN]).fill(&mut block);
    assert_eq!(
        block,
        0xcea7_403d_4d60_6b6e_074e_c5d3_baf3_9d18_u128.to_be_bytes()
    );
    let key = expected(&[0; SEED_LEN], 1);
    assert_eq!(key[..16], block, "the oracle agrees");
}

#[test]
fn a_seed_gives_one_stream() {
    let stream = |seed: u8| {
        let mut stream = vec![0; 10_000];
        Pads::new(&[seed; SEED_LEN]).fill(&mut stream);
        stream
    };
    assert_eq!(stream(1), stream(1));
    assert_ne!(stream(1)[..32], stream(2)[..32]);
}

#[test]
fn no_block_comes_twice() {
    let mut stream = vec![0; 1 << 20];
    Pads::new(&[5; SEED_LEN]).fill(&mut stream);
    let mut blocks: Vec<_> = stream.chunks(16).collect();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!(blocks.len(), stream.len() / 16);
}

proptest! {
    #[test]
    fn the_sizes_asked_for_do_not_matter(
        seed in any::<[u8; SEED_LEN]>(),
        sizes in vec(0..6000_usize, 0..20),
    ) {
        let mut pads = Pads::new(&seed);
        let mut stream = Vec::new();
        for size in sizes {
            let start = stream.len();
            stream.resize(start + size, 0);
            pads.fill(&mut stream[start..]);
        }
        let pools = stream.len().div_ceil(4096 - SEED_LEN);
        prop_assert_eq!(&stream[..], &expected(&seed, pools)[..stream.len()]);
    }
}
