//! The kernel against the library's AES-256-GCM.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use dibs_gcm::Key;
use proptest::prelude::*;

/// The same key on both sides.
struct Both {
    ours: Key,
    theirs: LessSafeKey,
}

impl Both {
    fn new(key: &[u8; 32]) -> Option<Self> {
        let theirs = UnboundKey::new(&AES_256_GCM, key).expect("32 bytes");
        let Some(ours) = Key::new(key) else {
            eprintln!("NOT TESTED: this CPU has no vectors for AES-GCM");
            return None;
        };
        Some(Self {
            ours,
            theirs: LessSafeKey::new(theirs),
        })
    }

    /// Both seal to the same bytes, and ours opens them.
    fn agree(&self, nonce: &[u8; 12], aad: &[u8], plain: &[u8]) {
        let lengths = (aad.len(), plain.len());
        let mut expected = plain.to_vec();
        let their_nonce = Nonce::assume_unique_for_key(*nonce);
        let expected_tag = self
            .theirs
            .seal_in_place_separate_tag(their_nonce, Aad::from(aad), &mut expected)
            .expect("lengths that GCM allows");
        let mut text = plain.to_vec();
        let tag = self.ours.seal(nonce, aad, &mut text);
        assert_eq!(text, expected, "text, for lengths {lengths:?}");
        assert_eq!(tag, expected_tag.as_ref(), "tag, for lengths {lengths:?}");
        assert!(
            self.ours.open(nonce, aad, &mut text, &tag),
            "opens, for lengths {lengths:?}"
        );
        assert_eq!(text, plain, "plain text, for lengths {lengths:?}");
    }
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = len as u64 + 1;
    let byte = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..len).map(byte).collect()
}

#[test]
fn every_length_of_associated_data() {
    let Some(both) = Both::new(&[0x5c; 32]) else {
        return;
    };
    let bytes = noise(4096 + 256);
    for aad in 0..=4096 {
        // A step that is no factor of the lengths meets every length of text many times.
        let text = aad * 37 % 257;
        both.agree(&[aad as u8; 12], &bytes[..aad], &bytes[aad..][..text]);
    }
}

#[test]
fn every_length_of_text() {
    let Some(both) = Both::new(&[0xa9; 32]) else {
        return;
    };
    let bytes = noise(4096);
    for text in 0..=2048 {
        for aad in [0, 16, 1424, 1500] {
            both.agree(&[text as u8; 12], &bytes[..aad], &bytes[aad..][..text]);
        }
    }
}

/// Around the number of blocks that are one sum.
#[test]
fn where_one_sum_becomes_two() {
    let Some(both) = Both::new(&[0x3d; 32]) else {
        return;
    };
    let bytes = noise(4096);
    for aad in (0..=1600).step_by(13) {
        let rest = 1536_usize.saturating_sub(aad);
        for text in rest.saturating_sub(40)..rest + 40 {
            both.agree(&[aad as u8; 12], &bytes[..aad], &bytes[aad..][..text]);
        }
    }
}

#[test]
fn long_ones() {
    let Some(both) = Both::new(&[0xe2; 32]) else {
        return;
    };
    let bytes = noise(1 << 18);
    let lengths = [0, 1, 65_535, 65_536, 65_537, 1 << 17];
    for aad in lengths {
        for text in lengths {
            both.agree(&[7; 12], &bytes[..aad], &bytes[aad..][..text]);
        }
    }
}

proptest! {
    #[test]
    fn random_keys_nonces_and_lengths(
        key: [u8; 32],
        nonce: [u8; 12],
        aad in prop::collection::vec(any::<u8>(), 0..=4096),
        text in prop::collection::vec(any::<u8>(), 0..=256),
    ) {
        if let Some(both) = Both::new(&key) {
            both.agree(&nonce, &aad, &text);
        }
    }

    #[test]
    fn a_changed_bit_is_refused(
        key: [u8; 32],
        nonce: [u8; 12],
        aad in prop::collection::vec(any::<u8>(), 1..=1700),
        plain in prop::collection::vec(any::<u8>(), 1..=600),
        at: prop::sample::Index,
        bit in 0..8,
    ) {
        let Some(ours) = Key::new(&key) else { return Ok(()) };
        let mut sealed = plain.clone();
        let tag = ours.seal(&nonce, &aad, &mut sealed);
        let flip = |bytes: &mut [u8]| bytes[at.index(bytes.len())] ^= 1_u8 << bit;
        let refused = |nonce: &[u8; 12], aad: &[u8], text: &[u8], tag: &[u8; 16]| {
            let mut opened = text.to_vec();
            !ours.open(nonce, aad, &mut opened, tag) && opened == text
        };

        let mut other = nonce;
        flip(&mut other);
        prop_assert!(refused(&other, &aad, &sealed, &tag), "nonce");
        let mut other = aad.clone();
        flip(&mut other);
        prop_assert!(refused(&nonce, &other, &sealed, &tag), "associated data");
        let mut other = sealed.clone();
        flip(&mut other);
        prop_assert!(refused(&nonce, &aad, &other, &tag), "text");
        let mut other = tag;
        flip(&mut other);
        prop_assert!(refused(&nonce, &aad, &sealed, &other), "tag");
        prop_assert!(refused(&nonce, &aad[1..], &sealed, &tag), "shorter associated data");
        prop_assert!(refused(&nonce, &aad, &sealed[1..], &tag), "shorter text");
        let mut other = key;
        flip(&mut other);
        let mut opened = sealed.clone();
        let other = Key::new(&other).expect("this CPU has the vectors");
        prop_assert!(!other.open(&nonce, &aad, &mut opened, &tag), "key");
        prop_assert!(ours.open(&nonce, &aad, &mut opened, &tag), "unchanged");
        prop_assert_eq!(opened, plain);
    }
}
