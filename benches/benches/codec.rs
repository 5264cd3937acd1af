//! The bumps' codecs against the papers' ciphers, against what libraries offer today, and against
//! memcpy: `cargo bench --bench codec`.
//!
//! Software AES needs a build of its own, as the switch of the `aes` crate is global; this
//! benchmark builds it and runs it at the end, into the same groups.

use std::{env, hint::black_box, path::Path, process::Command};

use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use criterion::Criterion;
use des::{Des, TdesEde3};
use dibs_benches::{BOTH_WAYS, Group, MESSAGE, SIZES, block_cipher, group, message};
use dibs_scramble::{
    BUFFER_LEN, Descrambler, Kernel, Scrambler,
    reference::{Revised, Straightforward},
};
use dibs_share::{Pads, SEED_LEN, Scheme};

const INITIAL: [u8; BUFFER_LEN] = [0x5a; BUFFER_LEN];

fn main() {
    let mut criterion = dibs_benches::criterion();
    for (name, len) in SIZES {
        let mut group = group(&mut criterion, name, len);
        scrambler(&mut group, len);
        published(&mut group, len);
        block_cipher::one_way::<Des>(&mut group, "des", len);
        block_cipher::one_way::<TdesEde3>(&mut group, "tdea", len);
        aead(&mut group, "aes-128-gcm", &AES_128_GCM, len);
        aead(&mut group, "aes-256-gcm", &AES_256_GCM, len);
        aead(&mut group, "chacha20-poly1305", &CHACHA20_POLY1305, len);
        xor_sharing(&mut group, len);
        group.finish();
    }
    both_ways(&mut criterion);
    datagram(&mut criterion);
    sharing(&mut criterion);
    kernels(&mut criterion);
    criterion.final_summary();
    // Without it, `cargo test` tries each benchmark once.
    if env::args().any(|arg| arg == "--bench") {
        software_aes();
    }
}

fn scrambler(group: &mut Group<'_>, len: usize) {
    let (src, mut dst) = (message(len), vec![0; len]);
    let mut scrambler = Scrambler::new(&INITIAL);
    group.bench_function("scramble", |b| {
        b.iter(|| scrambler.scramble(black_box(&src), black_box(&mut dst)));
    });
    let mut descrambler = Descrambler::new(&INITIAL);
    group.bench_function("descramble", |b| {
        b.iter(|| descrambler.descramble(black_box(&src), black_box(&mut dst)));
    });
    group.bench_function("memcpy", |b| {
        b.iter(|| black_box(&mut dst).copy_from_slice(black_box(&src)));
    });
}

fn published(group: &mut Group<'_>, len: usize) {
    let mut buf = message(len);
    let mut revised = Revised::new(&INITIAL);
    group.bench_function("revised", |b| {
        b.iter(|| revised.scramble(black_box(&mut buf)))
    });
    let mut straightforward = Straightforward::new(&INITIAL);
    group.bench_function("straightforward", |b| {
        b.iter(|| straightforward.scramble(black_box(&mut buf)));
    });
}

fn aead(group: &mut Group<'_>, id: &str, algorithm: &'static Algorithm, len: usize) {
    let key = message(algorithm.key_len());
    let key = LessSafeKey::new(UnboundKey::new(algorithm, &key).expect("a key of its length"));
    let mut buf = message(len);
    let mut counter = 0_u64;
    group.bench_function(id, |b| {
        b.iter(|| {
            counter += 1;
            let mut nonce = [0; 12];
            nonce[4..].copy_from_slice(&counter.to_be_bytes());
            let nonce = Nonce::assume_unique_for_key(nonce);
            key.seal_in_place_separate_tag(nonce, Aad::empty(), black_box(&mut buf))
                .expect("a message far below the limit of the cipher")
        });
    });
}

/// What seals and opens a datagram of scrambled payload: much associated data, little text.
fn datagram(criterion: &mut Criterion) {
    const AAD: usize = 1424;
    const TEXT: usize = 40;
    let mut group = group(criterion, "datagram", AAD + TEXT);
    let nonce_of = |counter: u64| {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&counter.to_be_bytes());
        nonce
    };
    let key = [0x5a; dibs_gcm::KEY_LEN];
    let (aad, mut text) = (message(AAD), message(TEXT));
    let mut counter = 0;

    let library = UnboundKey::new(&AES_256_GCM, &key).expect("a key of its length");
    let library = LessSafeKey::new(library);
    group.bench_function("aes-256-gcm-aad", |b| {
        b.iter(|| {
            counter += 1;
            let nonce = Nonce::assume_unique_for_key(nonce_of(counter));
            let (aad, text) = (Aad::from(black_box(&aad)), black_box(&mut text));
            library
                .seal_in_place_separate_tag(nonce, aad, text)
                .expect("a message far below the limit of the cipher")
        });
    });
    let nonce = || Nonce::assume_unique_for_key(nonce_of(0));
    let mut sealed = message(TEXT);
    library
        .seal_in_place_append_tag(nonce(), Aad::from(&aad), &mut sealed)
        .expect("a message far below the limit of the cipher");
    let mut opened = sealed.clone();
    group.bench_function("aes-256-gcm-aad-open", |b| {
        b.iter(|| {
            opened.copy_from_slice(black_box(&sealed));
            let opened = library.open_in_place(nonce(), Aad::from(black_box(&aad)), &mut opened);
            black_box(opened).expect("what was sealed").len()
        });
    });

    let Some(ours) = dibs_gcm::Key::new(&key) else {
        return;
    };
    group.bench_function("dibs-gcm-aad", |b| {
        b.iter(|| {
            counter += 1;
            ours.seal(&nonce_of(counter), black_box(&aad), black_box(&mut text))
        });
    });
    group.bench_function("dibs-gcm-aad-open", |b| {
        b.iter(|| {
            opened.copy_from_slice(black_box(&sealed));
            let (text, tag) = opened.split_last_chunk_mut().expect("it ends in a tag");
            let authentic = ours.open(&nonce_of(0), black_box(&aad), text, tag);
            assert!(authentic, "what was sealed");
        });
    });
    group.finish();
}

/// Splitting and joining what a datagram carries, without the random bytes, and these alone.
fn sharing(criterion: &mut Criterion) {
    const LEN: usize = 1400;
    let mut group = group(criterion, "1400B-sharing", LEN);
    let secret = message(LEN);
    let mut pads = Pads::new(&[0x5a; SEED_LEN]);
    let mut random = vec![0; LEN];
    group.bench_function("pads", |b| b.iter(|| pads.fill(black_box(&mut random))));
    for (needed, shares) in [(2, 2), (3, 3), (2, 3), (3, 5)] {
        let scheme = Scheme::new(needed, shares).expect("a scheme that exists");
        let mut random = vec![0; scheme.randomness(LEN)];
        pads.fill(&mut random);
        let mut split = vec![vec![0; LEN]; shares.into()];
        let mut joined = vec![0; LEN];
        for kernel in dibs_share::Kernel::available() {
            let id = |what| format!("{what}-{needed}-of-{shares}-{}", kernel.name());
            let mut places: Vec<_> = split.iter_mut().map(Vec::as_mut_slice).collect();
            group.bench_function(id("split"), |b| {
                b.iter(|| {
                    scheme.split_on(kernel, black_box(&secret), &random, black_box(&mut places));
                });
            });
            // The last ones: with Shamir's sharing no factor of theirs is 1.
            let last: Vec<_> = (0..shares)
                .zip(&split)
                .skip((shares - needed).into())
                .map(|(index, share)| (index, &share[..]))
                .collect();
            group.bench_function(id("join"), |b| {
                b.iter(|| scheme.join_on(kernel, black_box(&last), black_box(&mut joined)));
            });
        }
    }
    group.finish();
}

fn xor_sharing(group: &mut Group<'_>, len: usize) {
    let src = message(len);
    let (mut first, mut second) = (vec![0; len], vec![0; len]);
    let (mut pads, mut pad) = (Pads::new(&[0x5a; SEED_LEN]), vec![0; len]);
    let both = Scheme::new(2, 2).expect("a scheme that exists");
    group.bench_function("xor-share", |b| {
        b.iter(|| {
            pads.fill(&mut pad);
            both.split(black_box(&src), &pad, &mut [&mut first, &mut second]);
            black_box((&mut first, &mut second));
        });
    });
}

/// The papers' Table II: one message there and back.
fn both_ways(criterion: &mut Criterion) {
    let mut group = group(criterion, BOTH_WAYS, MESSAGE);
    let mut buf = message(MESSAGE);
    let (mut sender, mut receiver) = (Scrambler::new(&INITIAL), Descrambler::new(&INITIAL));
    group.bench_function("scramble", |b| {
        b.iter(|| {
            sender.scramble_in_place(black_box(&mut buf));
            receiver.descramble_in_place(black_box(&mut buf));
        });
    });
    let (mut sender, mut receiver) = (Revised::new(&INITIAL), Revised::new(&INITIAL));
    group.bench_function("revised", |b| {
        b.iter(|| {
            sender.scramble(black_box(&mut buf));
            receiver.descramble(black_box(&mut buf));
        });
    });
    let (mut sender, mut receiver) = (
        Straightforward::new(&INITIAL),
        Straightforward::new(&INITIAL),
    );
    group.bench_function("straightforward", |b| {
        b.iter(|| {
            sender.scramble(black_box(&mut buf));
            receiver.descramble(black_box(&mut buf));
        });
    });
    block_cipher::both_ways::<Des>(&mut group, "des");
    block_cipher::both_ways::<TdesEde3>(&mut group, "tdea");
    group.finish();
}

/// What CPUs without the widest vectors get.
fn kernels(criterion: &mut Criterion) {
    let mut group = group(criterion, "1280B-kernels", MESSAGE);
    let (src, mut dst) = (message(MESSAGE), vec![0; MESSAGE]);
    for kernel in Kernel::available() {
        let mut scrambler = Scrambler::with_kernel(&INITIAL, kernel);
        group.bench_function(format!("scramble-{}", kernel.name()), |b| {
            b.iter(|| scrambler.scramble(black_box(&src), black_box(&mut dst)));
        });
        let mut descrambler = Descrambler::with_kernel(&INITIAL, kernel);
        group.bench_function(format!("descramble-{}", kernel.name()), |b| {
            b.iter(|| descrambler.descramble(black_box(&src), black_box(&mut dst)));
        });
    }
    group.finish();
}

/// Builds and runs `codec-soft-aes` with the arguments of this process.
fn software_aes() {
    let flags = env::var("RUSTFLAGS").unwrap_or_default() + r#" --cfg aes_backend="soft""#;
    let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "bench",
            "--quiet",
            "--bench",
            "codec-soft-aes",
            "--manifest-path",
        ])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .arg("--target-dir")
        .arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("soft-aes"))
        .arg("--")
        .args(env::args_os().skip(1).filter(|arg| arg != "--bench"))
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("RUSTFLAGS", flags)
        .status()
        .expect("cargo starts, as it started this benchmark");
    assert!(
        status.success(),
        "cargo bench --bench codec-soft-aes: {status}"
    );
}
