//! What happens to a superpacket of 64 KiB on its way, stage by stage: docs/performance.md has the sum.

use std::hint::black_box;
use std::net::IpAddr;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dibs_benches::{PAYLOAD, bench, headers};
use dibs_io::{Family, PathSocket, RecvBatch};
use dibs_scramble::{BUFFER_LEN, Descrambler, Scrambler};
use dibs_wire::checksum::crc32c;
use dibs_wire::emit::MAX_HEADERS;
use dibs_wire::packet;
use dibs_wire::virtio;

/// What a datagram of 1500 bytes has of it, about, and beside it.
const CHUNK: usize = 1400;
const BESIDE: usize = 72;
/// Of what is beside it, this is encrypted.
const TEXT: usize = 40;

fn payload() -> Vec<u8> {
    (0..PAYLOAD).map(|at| ((at * 31) >> 3) as u8).collect()
}

fn stages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("stages");
    group.throughput(Throughput::Bytes(PAYLOAD as u64));
    let plain = payload();
    let mut out = vec![0; PAYLOAD];

    bench(&mut group, "memcpy", || {
        out.copy_from_slice(black_box(&plain))
    });

    let headers = headers([[10, 0, 1, 1], [10, 0, 1, 2]].map(IpAddr::from));
    let mut frame = vec![0; MAX_HEADERS];
    bench(&mut group, "headers", || {
        headers.write(black_box(&mut frame), PAYLOAD, 1448);
    });
    frame.truncate(headers.encoded_len());
    frame.extend_from_slice(&plain);
    bench(&mut group, "parse", || {
        packet::parse(black_box(&frame[virtio::LEN..])).is_ok()
    });

    bench(&mut group, "crc32c", || {
        plain
            .chunks(CHUNK)
            .map(|chunk| crc32c(black_box(chunk)))
            .fold(0, |all, crc| all ^ crc)
    });
    let mut scrambler = Scrambler::new(&[7; BUFFER_LEN]);
    bench(&mut group, "scramble", || {
        for (from, to) in plain.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
            scrambler.scramble(black_box(from), to);
        }
    });
    bench(&mut group, "scramble-crc", || {
        let pairs = plain.chunks(CHUNK).zip(out.chunks_mut(CHUNK));
        pairs.fold(0, |all, (from, to)| {
            all ^ scrambler.scramble_summed(black_box(from), to)
        })
    });
    let mut descrambler = Descrambler::new(&[7; BUFFER_LEN]);
    bench(&mut group, "descramble", || {
        for (from, to) in plain.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
            descrambler.descramble(black_box(from), to);
        }
    });
    bench(&mut group, "descramble-crc", || {
        let pairs = plain.chunks(CHUNK).zip(out.chunks_mut(CHUNK));
        pairs.fold(0, |all, (from, to)| {
            all ^ descrambler.descramble_summed(black_box(from), to)
        })
    });

    // Elsewhere the library's; `codec` has both.
    if let Some(key) = dibs_gcm::Key::new(&[0x5a; dibs_gcm::KEY_LEN]) {
        let datagrams = PAYLOAD.div_ceil(CHUNK);
        let aad = vec![1; CHUNK + BESIDE - TEXT];
        let mut text = [2; TEXT];
        let nonce = [3; dibs_gcm::NONCE_LEN];
        bench(&mut group, "seal", || {
            (0..datagrams).fold(0, |all, _| {
                all ^ key.seal(&nonce, black_box(&aad), black_box(&mut text))[0]
            })
        });
        let tag = [4; dibs_gcm::TAG_LEN];
        bench(&mut group, "open", || {
            (0..datagrams)
                .filter(|_| key.open(&nonce, black_box(&aad), black_box(&mut text), &tag))
                .count()
        });
    }
    group.finish();
}

/// One run of datagrams by a socket of the loopback interface, there and back out: both system calls
/// with the kernel's copies.
fn udp(criterion: &mut Criterion) {
    let local = IpAddr::from([127, 0, 0, 1]);
    let open = || PathSocket::open(None, Some(local), 0, 0).expect("a socket on loopback");
    let (mut from, mut to) = (open(), open());
    let remote = to.local_addr(Family::V4).expect("it is bound");
    let datagram = CHUNK + BESIDE;
    let run = vec![5; 44 * datagram];
    let mut batch = RecvBatch::new();
    let mut group = criterion.benchmark_group("stages");
    group.throughput(Throughput::Bytes(run.len() as u64));
    bench(&mut group, "udp", || {
        let sent = from.send(remote, &run, datagram);
        assert_eq!(sent.sent, run.len(), "loopback takes all");
        let mut received = 0;
        while received < run.len() {
            // What was sent by loopback waits in the socket when the call returns.
            to.recv(Family::V4, &mut batch).expect("it has arrived");
            received += batch.iter_mut().map(|run| run.bytes.len()).sum::<usize>();
        }
    });
    group.finish();
}

criterion_group!(benches, stages, udp);
criterion_main!(benches);
