//! Kato et al. 2017 and 2018, Table II: the time that ciphers and the two scramblers take for a message.

use std::hint::black_box;
use std::time::{Duration, Instant};

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, Key, KeyInit};
use aes::{Aes128, Aes256};
use anyhow::Result;
use des::{Des, TdesEde3};
use dibs_scramble::reference::{Revised, Straightforward};
use dibs_scramble::{BUFFER_LEN, Descrambler, Scrambler};
use libaes::Cipher;
use serde_json::json;

use super::Stage;
use crate::finding::{Finding, Verdict};

const MESSAGE: usize = 1280;
const INITIAL: [u8; BUFFER_LEN] = [0x5a; BUFFER_LEN];
/// Means are taken of so many messages, and the median of so many means: what else the machine does shows in one of
/// them, not in all.
const BATCH: u32 = 1000;
const BATCHES: usize = 10;

/// A way to process a message, and the paper's milliseconds.
struct Row {
    name: &'static str,
    paper: Option<f64>,
    took: Duration,
}

pub(super) fn run(_: &Stage) -> Result<Finding> {
    let rows = rows();
    let took = |name: &str| {
        let row = rows.iter().find(|row| row.name == name);
        row.map_or(f64::NAN, |row| row.took.as_secs_f64() * 1e3)
    };
    let revised = took(REVISED);
    let cells = rows.iter().map(|row| {
        let ms = row.took.as_secs_f64() * 1e3;
        let paper = |value: Option<String>| value.unwrap_or_default();
        vec![
            row.name.to_owned(),
            paper(row.paper.map(|ms| format!("{ms}"))),
            format!("{ms:.5}"),
            paper(row.paper.map(|ms| format!("{:.1}", ms / 0.0352))),
            format!("{:.1}", ms / revised),
        ]
    });
    let mut finding = Finding {
        setup: format!(
            "One thread, {BATCHES} times {BATCH} messages: the median of the means. DES and triple DES block by block, AES in \
             CBC, in portable code; \"by the processor\" is AES with its own instructions, block by block."
        ),
        data: json!(
            rows.iter()
                .map(|row| json!({"name": row.name, "paper_ms": row.paper, "ms": row.took.as_secs_f64() * 1e3}))
                .collect::<Vec<_>>()
        ),
        ..Finding::default()
    };
    finding.table(
        "Processing a message of 1280 bytes, both ways",
        &[
            "",
            "paper, ms",
            "here, ms",
            "paper, of the revised scrambler",
            "here, of the revised scrambler",
        ],
        cells.collect(),
    );
    let times = |of: f64| match of < 1.0 {
        true => format!("{of:.3} times the revised one"),
        false => format!("{of:.1} times the revised one"),
    };
    let (straightforward, software) = (took(STRAIGHTFORWARD) / revised, took(AES_128) / revised);
    finding.compare(
        "Table II, the straightforward scrambler",
        [&times(0.950 / 0.0352), &times(straightforward)],
        Verdict::agrees_if(
            (10.0..60.0).contains(&straightforward),
            "another ratio on this processor",
        ),
    );
    finding.compare(
        "Table II, AES-128 in software",
        [&times(2.29 / 0.0352), &times(software)],
        Verdict::agrees_if(
            software > 30.0,
            "today's portable AES is far faster than the one that was measured, about 1 MB/s",
        ),
    );
    finding.compare(
        "The scrambler as it is shipped",
        ["not measured", &times(took(SHIPPED) / revised)],
        Verdict::New,
    );
    if aes::hardware_accelerated() {
        let by_processor = took(AES_128_PROCESSOR) / revised;
        let ours = times(by_processor);
        finding.compare(
            "AES-128 by the processor",
            ["not measured", &ours],
            Verdict::New,
        );
        if by_processor < 1.0 {
            finding.say(
                "With AES in the processor the argument of cost is gone: encryption takes less time than the published \
                 scrambler.",
            );
        }
    }
    Ok(finding)
}

const REVISED: &str = "scrambler, revised";
const STRAIGHTFORWARD: &str = "scrambler, straightforward";
const SHIPPED: &str = "scrambler, with vectors, as dibs has it";
const AES_128: &str = "AES-128";
const AES_128_PROCESSOR: &str = "AES-128, by the processor";

fn rows() -> Vec<Row> {
    let row = |name, paper, took| Row { name, paper, took };
    let mut rows = vec![
        row("DES", Some(2.24), by_blocks::<Des>()),
        row("triple DES", Some(6.69), by_blocks::<TdesEde3>()),
        row(AES_128, Some(2.29), chained(Cipher::new_128(&key()))),
        row("AES-192", Some(2.80), chained(Cipher::new_192(&key()))),
        row("AES-256", Some(3.40), chained(Cipher::new_256(&key()))),
    ];
    if aes::hardware_accelerated() {
        rows.push(row(AES_128_PROCESSOR, None, by_blocks::<Aes128>()));
        let aes_256 = by_blocks::<Aes256>();
        rows.push(row("AES-256, by the processor", None, aes_256));
    }
    let mut message = message();
    let (mut near, mut far) = (
        Straightforward::new(&INITIAL),
        Straightforward::new(&INITIAL),
    );
    let took = mean(|| {
        near.scramble(black_box(&mut message));
        far.descramble(black_box(&mut message));
    });
    rows.push(row(STRAIGHTFORWARD, Some(0.950), took));
    let (mut near, mut far) = (Revised::new(&INITIAL), Revised::new(&INITIAL));
    let took = mean(|| {
        near.scramble(black_box(&mut message));
        far.descramble(black_box(&mut message));
    });
    rows.push(row(REVISED, Some(0.0352), took));
    let (mut near, mut far) = (Scrambler::new(&INITIAL), Descrambler::new(&INITIAL));
    let took = mean(|| {
        near.scramble_in_place(black_box(&mut message));
        far.descramble_in_place(black_box(&mut message));
    });
    rows.push(row(SHIPPED, None, took));
    rows
}

fn by_blocks<C: KeyInit + BlockCipherEncrypt + BlockCipherDecrypt>() -> Duration {
    let key: Key<C> = Array::from_fn(|at| at as u8 * 37 + 1);
    let cipher = C::new(&key);
    let mut message = message();
    mean(|| {
        let blocks = Array::slice_as_chunks_mut(black_box(&mut message)).0;
        cipher.encrypt_blocks(blocks);
        cipher.decrypt_blocks(black_box(blocks));
    })
}

fn chained(mut cipher: Cipher) -> Duration {
    cipher.set_auto_padding(false);
    let (message, iv) = (message(), [7; 16]);
    mean(|| {
        let encrypted = cipher.cbc_encrypt(&iv, black_box(&message));
        black_box(cipher.cbc_decrypt(&iv, &encrypted));
    })
}

fn mean(mut message: impl FnMut()) -> Duration {
    let batch = || {
        let start = Instant::now();
        (0..BATCH).for_each(|_| message());
        start.elapsed() / BATCH
    };
    let mut means: Vec<Duration> = std::iter::repeat_with(batch).take(BATCHES).collect();
    means.sort_unstable();
    means[BATCHES / 2]
}

fn message() -> Vec<u8> {
    (0..MESSAGE)
        .map(|at| (at * 167 + (at >> 8)) as u8)
        .collect()
}

fn key<const N: usize>() -> [u8; N] {
    std::array::from_fn(|at| at as u8 * 37 + 1)
}
