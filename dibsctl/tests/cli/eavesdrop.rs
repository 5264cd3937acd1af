//! `eavesdrop`: captures made for the purpose.

use std::path::{Path, PathBuf};

use dibs_scramble::{Scrambler, initial_buffer};
use serde_json::Value;
use tempfile::TempDir;

use crate::run;

const ENGLISH: &[u8] = include_bytes!("../../../crates/dibs-eavesdrop/tests/texts/english.txt");
const CHUNK: usize = 1300;

/// A pcap file of bare IP with two chunks of a text, as on an untrusted path.
fn capture(directory: &TempDir) -> PathBuf {
    let mut sent = vec![0; ENGLISH.len()];
    Scrambler::new(&initial_buffer(&[0x5c; 20])).scramble(ENGLISH, &mut sent);
    let words = |words: &[u32]| {
        words
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let mut file = words(&[0xa1b2_c3d4, 0x0004_0002, 0, 0, 1 << 18, 101]);
    let mut state = 1u64;
    let mut noise = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    for number in 0..2u8 {
        let chunk = &sent[65 + usize::from(number) * CHUNK..][..CHUNK];
        let length = (28 + 16 + CHUNK + 56) as u16;
        let [high, low] = length.to_be_bytes();
        let mut packet = vec![0x45, 0, high, low, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend([10, 0, 2, 1, 10, 0, 2, 2, 0x14, 0xb4, 0x14, 0xb4, 0, 0, 0, 0]);
        packet.extend([4, 1, 9, 9, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, number]);
        packet.extend(chunk);
        packet.extend(std::iter::repeat_with(&mut noise).take(56));
        let length = packet.len() as u32;
        file.extend(words(&[7, u32::from(number) * 1000, length, length]));
        file.extend(packet);
    }
    let path = directory.path().join("wlan0.pcap");
    std::fs::write(&path, file).unwrap();
    path
}

fn words<'a>(path: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let path = path.to_str().unwrap();
    [&["eavesdrop", "--pcap", path], more].concat()
}

#[test]
fn text_is_printed_as_it_was_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = capture(&directory);
    let out = run(&words(&path, &[])).good();
    for line in [
        "2 packets, 0 of them neither TCP nor dibs",
        "10.0.2.1:5300 to 10.0.2.2:5300, path 1, session 01020304: 2 datagrams",
        "in clear: lengths 1372 (2); longest silence 0.001 s; 0 of the path's sequence numbers",
        "from 2 of 2 datagrams, 100 % of it certain",
        "2 datagrams from number 0 on, English, by statistics",
        "  stones. Nobody on the jetty was surprised to see her, for she had been\n",
    ] {
        assert!(out.contains(line), "{line}: {out}");
    }
    let out = run(&words(&path, &["--json"])).good();
    let report: Value = serde_json::from_str(&out).unwrap();
    let way = &report["directions"][0];
    assert_eq!(way["recovered"], 64 + 2 * CHUNK, "{out}");
    let text = way["pieces"][0]["text"].as_str().unwrap();
    assert!(text.contains("He never learned to hurry"), "{text}");
    let other = run(&words(&path, &["--port", "5301"])).good();
    assert!(other.contains("no datagrams of dibs"), "{other}");
}

#[test]
fn what_cannot_be_read_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none.pcap");
    let said = run(&words(&path, &[])).failed();
    assert!(
        said.contains("cannot open") && said.contains("none.pcap"),
        "{said}"
    );
    std::fs::write(&path, "no capture at all").unwrap();
    let said = run(&words(&path, &[])).failed();
    assert!(said.contains("is no capture"), "{said}");
    assert_eq!(run(&["eavesdrop"]).code, 2);
}
