//! Published vectors.

use dibs_gcm::Key;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| c.to_digit(16).expect("a hexadecimal digit") as u8)
        .collect();
    digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect()
}

fn check(key: &str, nonce: &str, aad: &str, plain: &str, cipher: &str, tag: &str) {
    let Some(key) = Key::new(&hex(key).try_into().unwrap()) else {
        eprintln!("NOT TESTED: this CPU has no vectors for AES-GCM");
        return;
    };
    let (nonce, tag) = (hex(nonce).try_into().unwrap(), hex(tag).try_into().unwrap());
    let mut text = hex(plain);
    assert_eq!(key.seal(&nonce, &hex(aad), &mut text), tag);
    assert_eq!(text, hex(cipher));
    assert!(key.open(&nonce, &hex(aad), &mut text, &tag));
    assert_eq!(text, hex(plain));
}

const ZEROS: &str = "0000000000000000000000000000000000000000000000000000000000000000";
const KEY: &str = "feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308";
const NONCE: &str = "cafebabefacedbaddecaf888";
const PLAIN: &str = "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72
                     1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255";
const CIPHER: &str = "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa
                      8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad";

/// McGrew and Viega, "The Galois/Counter Mode of Operation", test cases 13 to 16.
#[test]
fn test_case_13() {
    let tag = "530f8afbc74536b9a963b4f1c4cb738b";
    check(ZEROS, &ZEROS[..24], "", "", "", tag);
}

#[test]
fn test_case_14() {
    let cipher = "cea7403d4d606b6e074ec5d3baf39d18";
    let tag = "d0d1c8a799996bf0265b98b5d48ab919";
    check(ZEROS, &ZEROS[..24], "", &ZEROS[..32], cipher, tag);
}

#[test]
fn test_case_15() {
    let tag = "b094dac5d93471bdec1a502270e3cc6c";
    check(KEY, NONCE, "", PLAIN, CIPHER, tag);
}

#[test]
fn test_case_16() {
    let aad = "feedfacedeadbeeffeedfacedeadbeefabaddad2";
    let (plain, cipher) = (hex_prefix(PLAIN, 60), hex_prefix(CIPHER, 60));
    let tag = "76fc6ece0f4e1768cddf8853bb2d551b";
    check(KEY, NONCE, aad, &plain, &cipher, tag);
}

fn hex_prefix(text: &str, bytes: usize) -> String {
    let digits = text.chars().filter(|c| !c.is_whitespace());
    digits.take(2 * bytes).collect()
}
